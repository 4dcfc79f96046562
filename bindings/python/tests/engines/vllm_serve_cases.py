"""The admin interface of vLLM's block pool, run in vLLM's environment by `test_vllm.py`."""

import json
import multiprocessing
import urllib.request
from pathlib import Path

import pytest
from vllm_cases import BLOCK, PART, manager_of, request_of, start

from kvpool.errors import InvalidArgument, NodeError


def page_of(address: str, path: str) -> str:
    with urllib.request.urlopen(f"{address}{path}", timeout=30) as answer:
        return answer.read().decode()


def test_the_pool_is_served_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert manager_of(PART, 100).block_pool.free_block_queue.admin is None
    monkeypatch.setenv("KVPOOL_VLLM_SERVE", "127.0.0.1:0")
    manager = manager_of(PART, 100)
    queue = manager.block_pool.free_block_queue
    assert start(manager, request_of("a", list(range(5 * BLOCK))))
    stats = json.loads(page_of(queue.admin.address, "/stats"))
    # vLLM's queue has the null block too.
    null = PART == "queue"
    assert (stats["total"], stats["used"], stats["free"]) == (99 + null, 5 + null, 94)
    assert "<html" in page_of(queue.admin.address, "/")
    metrics = page_of(queue.admin.address, "/metrics")
    assert f'kvpool_blocks{{pool="{queue.admin.name}",state="used"}} {5 + null}' in metrics
    if PART == "pool":
        manager.block_pool.get_usage()
        assert 'engine="vllm",counter="audited_blocks"' in page_of(queue.admin.address, "/metrics")
    # A second engine on this port stops, and says why.
    port = int(queue.admin.address.rsplit(":", 1)[1])
    monkeypatch.setenv("KVPOOL_VLLM_SERVE", f"127.0.0.1:{port}")
    with pytest.raises(NodeError, match=f"^KVPOOL_VLLM_SERVE is '127.0.0.1:{port}': admin: .* is in use"):
        manager_of(PART, 100)
    # A settings file, and the process of a data-parallel rank.
    file = tmp_path / "kvpool.toml"
    file.write_text(f'name = "engine"\nadmin = "unix:{tmp_path}/admin"\n')
    monkeypatch.setenv("KVPOOL_VLLM_SERVE", str(file))
    monkeypatch.setattr(multiprocessing.current_process(), "name", "EngineCore_DP3")
    admin = manager_of(PART, 100).block_pool.free_block_queue.admin
    assert (admin.name, admin.address) == ("engine-3", f"unix:{tmp_path}/admin.3")
    file.write_text('tier = "redis://127.0.0.1:1"\n')
    with pytest.raises(InvalidArgument, match="^KVPOOL_VLLM_SERVE is .*: tier needs a pool with sequences"):
        manager_of(PART, 100)
