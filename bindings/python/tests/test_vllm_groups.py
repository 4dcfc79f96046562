"""What kvpool evicts ahead under vLLM, by the groups of its layers. vLLM is a stand-in of a few classes."""

from __future__ import annotations

import importlib
import random
import re
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvpool.errors import InvalidArgument

BLOCKS = 1025


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt = block_id, 0


class AttentionSpec: ...


class SlidingWindowSpec(AttentionSpec): ...


class MambaSpec:
    def __init__(self, kind: str) -> None:
        self.mamba_type = SimpleNamespace(name=kind)


class OtherSpec: ...


class Layers:
    def __init__(self, *specs: Any) -> None:
        self.kv_cache_specs = {f"layer {number}": spec for number, spec in enumerate(specs)}


class Coordinator:
    def __init__(self, kv_cache_config: Any) -> None:
        self.kv_cache_config = kv_cache_config
        self.block_pool = sys.modules["vllm.v1.core.kv_cache_coordinator"].BlockPool()


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, text: str, *values: Any) -> None:
        self.lines.append(text % values)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """kvpool's plugin, imported with a stand-in for vLLM."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.33.0"},
        "vllm.logger": {"init_logger": lambda name: Log()},
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.block_pool": {"BlockPool": type("BlockPool", (), {}), "FreeKVCacheBlockQueue": object},
        "vllm.v1.core.kv_cache_coordinator": {"KVCacheCoordinator": Coordinator, "BlockPool": None},
        "vllm.v1.core.kv_cache_utils": {
            "KVCacheBlock": Block,
            "make_block_hash_with_group_id": None,
            "resolve_block_hashes": None,
        },
        "vllm.v1.core.kv_cache_manager": {"KVCacheManager": object},
        "vllm.v1.kv_cache_interface": {"KVCacheConfig": object},
        "vllm.v1.request": {"Request": object},
    }
    for name, entries in contents.items():
        module = ModuleType(name)
        vars(module).update(entries)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    try:
        yield importlib.import_module("kvpool.vllm.plugin")
    finally:
        for name in [name for name in sys.modules if name.startswith("kvpool.vllm")]:
            del sys.modules[name]


def start(plugin: Any, *specs: Any) -> Any:
    """Builds a coordinator as vLLM does, and returns its queue."""
    pool = SimpleNamespace(free_block_queue=plugin.FreeQueue([Block(number + 1) for number in range(BLOCKS)]))
    sys.modules["vllm.v1.core.kv_cache_coordinator"].BlockPool = lambda: pool  # type: ignore[attr-defined]
    coordinator = Coordinator.__new__(Coordinator)
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    plugin._start(coordinator, SimpleNamespace(kv_cache_groups=groups))
    return pool.free_block_queue


def dealt(queue: Any) -> tuple[list[int], list[int]]:
    """Fills the pool with contents, and returns the blocks freed first and those that a request gets."""
    ids = [block.block_id for block in queue.popleft_n(BLOCKS)]
    random.Random(1).shuffle(ids)
    queue.keep(ids)
    return sorted(ids[:64]), sorted(block.block_id for block in queue.popleft_n(64))


def test_blocks_are_evicted_ahead_for_attention_and_compared_states(plugin: Any) -> None:
    full, window, convolution = AttentionSpec(), SlidingWindowSpec(), MambaSpec("SHORT_CONV")
    for specs in ([full], [full, window], [convolution, full], [Layers(full, window)]):
        queue = start(plugin, *specs)
        assert queue.unproven is None
        assert (queue.states is not None) == (convolution in specs), "its blocks are not moved"
        assert queue.ahead == BLOCKS // 128
        first, got = dealt(queue)
        assert first != got, "the request gets a longer run than the oldest blocks form"
    assert plugin.logger.lines == [f"kvpool active in vLLM 0.33.0: {BLOCKS} frames, ahead 8"] * 4


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ([AttentionSpec(), MambaSpec("MAMBA7")], "group 1 holds states (MambaSpec, MAMBA7)"),
        ([Layers(AttentionSpec(), MambaSpec("MAMBA7"))], "group 0 holds states (MambaSpec, MAMBA7)"),
        ([OtherSpec()], "group 0 holds states (OtherSpec, unknown)"),
    ],
)
def test_nothing_is_evicted_ahead_in_a_group_of_other_states(
    plugin: Any, specs: list[Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = start(plugin, *specs)
    assert queue.ahead == 0
    assert plugin.logger.lines == [f"kvpool active in vLLM 0.33.0: {BLOCKS} frames, ahead 0 ({reason})"]
    first, got = dealt(queue)
    assert first == got, "the blocks that were freed first, and no others"
    monkeypatch.setenv("KVPOOL_VLLM_AHEAD", "0")
    start(plugin, *specs)
    monkeypatch.setenv("KVPOOL_VLLM_AHEAD", "4")
    with pytest.raises(InvalidArgument, match=re.escape(f"KVPOOL_VLLM_AHEAD is 4, expected 0: {reason}")):
        start(plugin, *specs)
