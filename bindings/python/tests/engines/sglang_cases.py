"""Cases of kvpool under SGLang, run in its environment by `test_sglang.py`."""

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import kvpool.sglang.host
import numpy as np
import pytest
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

from kvpool.errors import InvalidArgument
from kvpool_plugin.sglang import register

sys.path.append(str(Path(__file__).resolve().parents[1]))
from cache_node import CacheNode

PAGE = 4
PAGES = 101


@pytest.fixture(autouse=True)
def stock_again() -> Iterator[None]:
    yield
    kvpool.sglang.install("off")


def host_pool(part: str = "host", layout: str = "page_first", pages: int = PAGES) -> MHATokenToKVPoolHost:
    """A host pool of SGLang's, over a device pool in the memory of this process."""
    kvpool.sglang.install(part)
    device = MHATokenToKVPool(
        size=PAGE,
        page_size=PAGE,
        dtype=torch.float16,
        head_num=2,
        head_dim=4,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    return MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        host_to_device_ratio=pages - 1,
        host_size=0,
        page_size=PAGE,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=PAGE,
        start_layer=0,
        end_layer=3,
    )


def pages_of(slots: torch.Tensor) -> list[int]:
    """The pages of whole pages of slots, in order."""
    rows = slots.numpy().reshape(-1, PAGE)
    assert (rows == rows[:, :1] + np.arange(PAGE)).all() and (rows[:, 0] % PAGE == 0).all()
    return (rows[:, 0] // PAGE).tolist()


def test_same_requests_are_served_by_whole_pages_in_fewer_runs() -> None:
    pools = {part: host_pool(part) for part in ("off", "host")}
    dice = random.Random(3)
    live: list[dict[str, torch.Tensor]] = []
    runs = {"off": 0, "host": 0}
    for _ in range(2000):
        size = dice.randrange(1, 12) * PAGE
        got = {part: pool.alloc(size) for part, pool in pools.items()}
        assert (got["off"] is None) == (got["host"] is None)
        if got["host"] is not None:
            live.append(got)
            for part, slots in got.items():
                places = pages_of(slots)
                runs[part] += 1 + sum(b != a + 1 for a, b in zip(places, places[1:]))
        while live and (got["host"] is None or dice.random() < 0.45):
            gone = live.pop(dice.randrange(len(live)))
            for part, pool in pools.items():
                # As it is drained: pages in another order, in one call.
                pieces = list(gone[part].split(PAGE))
                dice.shuffle(pieces)
                assert pool.free(torch.cat(pieces)) == len(gone[part])
            got = gone
        assert pools["off"].available_size() == pools["host"].available_size()
        held = [page for entry in live for page in pages_of(entry["host"])]
        assert len(set(held)) == len(held) == pools["host"].frames.used
    assert runs["host"] < 0.3 * runs["off"]
    pools["host"].frames.audit()


def test_frees_are_refused_by_name_and_change_nothing() -> None:
    pool = host_pool()
    slots = pool.alloc(4 * PAGE)
    pool.free(slots[:PAGE])
    for wrong, named in (
        (slots, slots[:PAGE].tolist()),
        (torch.cat([slots[PAGE:], slots[PAGE : 2 * PAGE]]), slots[PAGE : 2 * PAGE].tolist()),
        (torch.tensor([PAGES * PAGE]), [PAGES * PAGE]),
        (torch.tensor([-1]), [-1]),
    ):
        with pytest.raises(AssertionError, match=re.escape(f"slots not currently allocated: {named}")):
            pool.free(wrong)
    part = int(slots[2 * PAGE]) // PAGE
    with pytest.raises(InvalidArgument, match=f"page {part} of 4 slots would be freed in part. Nothing was freed"):
        pool.free(slots[PAGE : 2 * PAGE + 1])
    assert pool.available_size() == (PAGES - 3) * PAGE
    backwards = torch.from_numpy(slots[PAGE:].numpy()[::-1].copy())
    assert pool.free(backwards) == 3 * PAGE
    assert pool.free(slots[:0]) == 0
    assert pool.alloc((PAGES + 1) * PAGE) is None
    with pytest.raises(AssertionError, match="multiple of the page size"):
        pool.alloc(PAGE + 1)
    assert len(pool.alloc(PAGES * PAGE)) == PAGES * PAGE
    pool.clear()
    assert pool.available_size() == PAGES * PAGE
    with pytest.raises(AssertionError, match="Double-free"):
        pool.free(slots)


def test_pools_with_free_lists_of_their_own_keep_them() -> None:
    kvpool.sglang.install()
    assert MHATokenToKVPoolHost.alloc is HostKVCache.alloc
    assert MambaPoolHost.alloc is not HostKVCache.alloc
    before = host_pool("off")
    pool = host_pool("host")
    assert before.frames is None and len(before.alloc(PAGE)) == PAGE
    pool.dcp_size = 2
    pool.clear()
    assert len(pool.free_slots) == 2 * PAGES * PAGE == pool.available_size()
    pool.free(pool.alloc(2 * PAGE)[:PAGE])


def test_plugin_changes_nothing_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting, wanted in ({}, False), ({"SGLANG_PLUGINS": "other, kvpool"}, True), ({"KVPOOL_SGLANG": "host"}, True):
        for name in ("SGLANG_PLUGINS", "KVPOOL_SGLANG"):
            monkeypatch.delenv(name, raising=False)
        for name, value in setting.items():
            monkeypatch.setenv(name, value)
        register()
        assert kvpool.sglang.host._is_on is wanted
        kvpool.sglang.install("off")


FAILURES = {
    "a setting": ({"KVPOOL_SGLANG": "device"}, "", "KVPOOL_SGLANG is 'device'"),
    "an import": ({"SGLANG_PLUGINS": "kvpool"}, "raise ImportError('no extension')", "no extension"),
    "another version": ({"SGLANG_PLUGINS": "kvpool"}, "", "SGLang 0.5.99 is not one of the versions"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_plugin_that_was_asked_for_and_fails_ends_the_process(what: str, tmp_path: Path) -> None:
    """Through SGLang's own loader, which logs what plugins raise and continues."""
    setting, module, reason = FAILURES[what]
    project = tomllib.loads((Path(kvpool.__file__).parents[2] / "pyproject.toml").read_text())["project"]
    place = project["entry-points"]["sglang.srt.plugins"]["kvpool"]
    metadata = tmp_path / "kvpool-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpool\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nkvpool = {place}\n")
    if module:
        (tmp_path / "kvpool.py").write_text(module)
    version = "import sglang.version; sglang.version.__version__ = '0.5.99'; " if "version" in what else ""
    load = f"{version}from sglang.srt.plugins import load_plugins; load_plugins(); print('SGLang runs')"

    def ran(setting: dict[str, str]) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}", **setting}
        return subprocess.run([sys.executable, "-c", load], env=environment, capture_output=True, text=True)

    failed, off = ran(setting), ran({"KVPOOL_SGLANG": "off"})
    assert (failed.returncode, failed.stdout) == (1, "") and f"kvpool cannot be used: {reason}" in failed.stderr
    assert (off.returncode, off.stdout) == (0, "SGLang runs\n"), off.stderr


def test_changed_engine_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def alloc(self, need_size, owner): ...

    monkeypatch.setitem(kvpool.sglang.host._stock, "alloc", alloc)
    with pytest.raises(kvpool.sglang.EngineChanged, match=r"HostKVCache\.alloc\(self, need_size, owner\)"):
        kvpool.sglang.install()


# ---- Storage

PAGE_BYTES = 2 * 3 * PAGE * 2 * 4 * 2  # K and V of 3 layers, 2 heads of 4 values of 2 bytes
WAIT = 60.0  # The longest time of any step: the machine may be busy.


def latent_pool(layout: str = "page_first") -> MLATokenToKVPoolHost:
    """A host pool of latent pages, each of which is one piece in memory."""
    device = MLATokenToKVPool(PAGE, PAGE, torch.float16, 12, 4, 3, "cpu", False)
    return MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        PAGES - 1,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=PAGE,
        start_layer=0,
        end_layer=3,
        target_layer_num=3,
    )


def config(settings: dict | None = None, is_mla_model: bool = False, **more: object) -> HiCacheStorageConfig:
    settings = {"in_process_bytes": 1 << 20} if settings is None else settings
    extra = {
        "backend_name": "kvpool",
        "module_path": "kvpool.sglang",
        "class_name": "KvpoolStorage",
        "kvpool": settings,
    }
    values = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    values |= {"enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "org/model"}
    return HiCacheStorageConfig(**{**values, **more}, is_mla_model=is_mla_model, extra_config=extra)


def backend(pool: HostKVCache, settings: dict | None = None, **more: object) -> HiCacheStorage:
    """The storage backend, as SGLang's controller makes it."""
    storage = StorageBackendFactory.create_backend("dynamic", config(settings, **more), pool)
    assert type(storage) is kvpool.sglang.KvpoolStorage
    storage.register_mem_pool_host(pool)
    storage.on_host_pools_registered()
    return storage


def fill(pool: HostKVCache, slots: torch.Tensor, seed: int) -> list[bytes]:
    """Writes random bytes to pages, and returns them."""
    dice = random.Random(seed)
    pages = [dice.randbytes(PAGE_BYTES) for _ in range(len(slots) // PAGE)]
    for slot, page in zip(slots[::PAGE].tolist(), pages):
        pool.set_from_flat_data_page(slot, torch.from_numpy(np.frombuffer(bytearray(page), np.uint8)).view(pool.dtype))
    assert bytes_of(pool, slots) == pages
    return pages


def bytes_of(pool: HostKVCache, slots: torch.Tensor) -> list[bytes]:
    return [pool.get_data_page(slot).view(torch.uint8).numpy().tobytes() for slot in slots[::PAGE].tolist()]


def names(*numbers: int) -> list[str]:
    return [f"{number:064x}" for number in numbers]


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def at(node: CacheNode, **more: object) -> dict:
    """Settings of a backend that sees failures soon, and forgets them soon."""
    return {"peer": "cache", "address": node.address, "patience": WAIT, "timeout": WAIT, "rest": 0.05} | more


@pytest.fixture(scope="module")
def node() -> Iterator[CacheNode]:
    with CacheNode(PAGE_BYTES, values=2000) as node:
        yield node


@pytest.mark.parametrize("make", [host_pool, latent_pool])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("interface", ["v1", "generic"])
def test_pages_come_back_through_a_node(node: CacheNode, make: Callable, layout: str, interface: str) -> None:
    """Two engines with the node between them, through the functions of SGLang's controller."""
    make_pool = (lambda: make(layout=layout)) if make is latent_pool else lambda: make("host", layout=layout)
    place = {"namespace": f"{make.__name__} {layout} {interface}"}
    one, other = make_pool(), make_pool()
    stores = [backend(pool, at(node, **place), is_mla_model=make is latent_pool) for pool in (one, other)]
    assert stores[0]._pages["kv"].is_view == (make is latent_pool and layout != "layer_first")
    write, read = (
        SimpleNamespace(storage_backend=store, storage_host_pool=pool, page_size=PAGE)
        for store, pool in zip(stores, (one, other))
    )
    kind = "_page_{}_zero_copy" if interface == "v1" else "_generic_page_{}"
    page_set, page_get = getattr(HiCacheController, kind.format("set")), getattr(HiCacheController, kind.format("get"))
    keys = names(*range(40))
    sources = one.alloc(40 * PAGE)
    pages = fill(one, sources, seed=len(layout))
    until(lambda: page_set(write, keys[:30], sources[: 30 * PAGE]))
    until(lambda: stores[1].batch_exists(keys) == 30)
    assert stores[1].exists(keys[29]) and not stores[1].exists(keys[30])
    targets = other.alloc(40 * PAGE)
    before = fill(other, targets, seed=99)
    operation = SimpleNamespace(request_id="r", is_terminated=lambda: False)
    assert page_get(read, operation, keys, targets) == 30
    assert bytes_of(other, targets) == pages[:30] + before[30:]
    got = stores[1].get(keys[3])
    assert got is not None and got.view(torch.uint8).numpy().tobytes() == pages[3]
    assert stores[1].get(keys[33]) is None
    for store in stores:
        store.close()
    assert page_get(read, operation, keys, targets) == 0 and not page_set(write, keys, sources)


def test_pages_of_others_are_misses(node: CacheNode, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, latent = host_pool(), latent_pool()
    slots = pool.alloc(PAGE)
    fill(pool, slots, 1)
    base = backend(pool, at(node, namespace="others"))
    until(lambda: base.batch_set_v1(names(1), slots) == [True])
    same = backend(host_pool(), at(node, namespace="others"))
    until(lambda: same.exists(*names(1)))

    def misses(pool: HostKVCache, namespace: str = "others", **more: object) -> bool:
        storage = backend(pool, at(node, namespace=namespace), **more)
        # It reaches the node.
        until(lambda: storage.batch_set_v1(names(2), slots) == [True] and storage.exists(*names(2)))
        return not storage.exists(*names(1))

    assert misses(pool, tp_rank=1, tp_size=2)
    assert misses(pool, tp_size=2)
    assert misses(pool, pp_rank=1, pp_size=2)
    assert misses(pool, attn_cp_rank=1, attn_cp_size=2)
    assert misses(pool, model_name="org/model2")
    assert misses(pool, namespace="others 2")
    assert misses(host_pool(layout="layer_first"))
    with monkeypatch.context() as patch:
        # Bytes of another format, which has the same dtype in memory.
        arguments = SimpleNamespace(kv_cache_dtype="fp8_e5m2")
        patch.setattr("kvpool.sglang.storage.get_server_args", lambda: arguments)
        assert misses(pool)
    # Latent pages are the same on all tensor-parallel ranks.
    slots = latent.alloc(PAGE)
    fill(latent, slots, 2)
    writer = backend(latent, at(node, namespace="others"), is_mla_model=True, tp_size=2)
    until(lambda: writer.batch_set_v1(names(7), slots) == [True])
    other = backend(latent, at(node, namespace="others"), is_mla_model=True, tp_size=2, tp_rank=1)
    until(lambda: other.exists(*names(7)))


def test_what_a_node_damages_or_loses_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    pool = host_pool()
    slots = pool.alloc(10 * PAGE)
    pages = fill(pool, slots, 5)
    keys = names(*range(10))
    # A call that the node's end has lost is tried again soon.
    soon = {"patience": 2.0}
    with CacheNode(PAGE_BYTES, values=64) as node:
        storage = backend(pool, at(node, **soon))
        until(lambda: all(storage.batch_set_v1(keys, slots)))
        other = backend(host_pool(), at(node, **soon))
        until(lambda: other.exists(keys[0]))
        node.ask("damage")
        reader = backend(host_pool(), at(node, **soon))
        targets = reader.mem_pool_host.alloc(10 * PAGE)
        before = fill(reader.mem_pool_host, targets, 6)
        hits: list[bool] = []

        def read_bad() -> bool:
            hits[:] = reader.batch_get_v1(keys, targets)
            return reader._pages["kv"].tier.stats().bad_values > 0

        until(read_bad)
        assert hits == [False] * 10
        assert reader._pages["kv"].tier.stats().bad_values == node.ask("damaged") == 10
        assert "peer found a value damaged, and dropped it; 10 pages were bad so far" in caplog.text
        assert bytes_of(reader.mem_pool_host, targets) == [
            page if is_hit else old for is_hit, page, old in zip(hits, pages, before)
        ]
        node.kill()
        assert storage.batch_set_v1(names(50), slots[:PAGE]) == [False]
        before = fill(reader.mem_pool_host, targets, 7)
        # What is on its way here may still be found.
        hits = reader.batch_get_v1(keys, targets)
        assert not all(hits)
        assert bytes_of(reader.mem_pool_host, targets) == [
            page if is_hit else old for is_hit, page, old in zip(hits, pages, before)
        ]
        node.start()
        until(lambda: storage.batch_set_v1(keys, slots) == [True] * 10)
        until(lambda: other.batch_get_v1(keys, targets) == [True] * 10)
        assert bytes_of(other.mem_pool_host, targets) == pages


def test_same_answers_as_the_file_backend(tmp_path: Path) -> None:
    """SGLang's own backend beside kvpool's: the same calls, with extra pools and both policies."""
    pools = {name: host_pool() for name in ("kv", "indexer", "swa", "mamba")}
    settings = {"in_process_bytes": 1 << 24}
    settings["pools"] = {name: {"in_process_bytes": 1 << 24} for name in ("indexer", "swa", "mamba")}
    ours, stock = backend(pools["kv"], settings), HiCacheFile(config(), str(tmp_path))
    stock.register_mem_pool_host(pools["kv"])
    for storage in (ours, stock):
        for name, pool in pools.items():
            storage.register_mem_host_pool_v2(pool, PoolName(name))
    slots = {name: pool.alloc(60 * PAGE) for name, pool in pools.items()}
    dice = random.Random(8)
    for name, pool in pools.items():
        fill(pool, slots[name], len(name))

    def transfer(name: str, numbers: list[int], **more: object) -> PoolTransfer:
        places = [slots[name][number * PAGE : (number + 1) * PAGE] for number in numbers]
        return PoolTransfer(PoolName(name), host_indices=torch.cat(places), keys=names(*numbers), **more)

    found = several = 0
    for _ in range(300):
        numbers = sorted(dice.sample(range(60), dice.randrange(1, 12)))
        if dice.random() < 0.5:
            transfers = [transfer(name, numbers) for name in pools if dice.random() < 0.5]
            assert ours.batch_set_v2(transfers) == stock.batch_set_v2(transfers)
            continue
        keys = names(*range(dice.randrange(40), 60))
        assert ours.batch_exists(keys) == stock.batch_exists(keys)
        trailing = {"hit_policy": PoolHitPolicy.TRAILING_PAGES}
        wanted = [
            PoolTransfer(PoolName.INDEXER),
            PoolTransfer(PoolName.SWA, keys=keys[:3], **trailing),
            PoolTransfer(PoolName.MAMBA, keys=keys[:1], **trailing),
        ]
        wanted = [transfer for transfer in wanted if dice.random() < 0.6]
        one, other = ours.batch_exists_v2(keys, wanted), stock.batch_exists_v2(keys, wanted)
        assert one == other
        found += one.kv_hit_pages > 0
        several += len(one.restorable_prefix_pages) > 1 and any(t.hit_policy != PoolHitPolicy.ALL_PAGES for t in wanted)
        reads = [transfer(name, numbers) for name in pools]
        before = {name: bytes_of(pool, slots[name]) for name, pool in pools.items()}
        assert ours.batch_get_v2(reads) == stock.batch_get_v2(reads)
        assert before == {name: bytes_of(pool, slots[name]) for name, pool in pools.items()}
    assert found > 10 and several > 10
    short = PoolTransfer(PoolName.KV, host_indices=slots["kv"][:PAGE], keys=names(1, 2))
    assert ours.batch_get_v2([short]) == stock.batch_get_v2([short]) == {PoolName.KV: [False, False]}
    with pytest.raises(ValueError, match="Unsupported pool hit policy"):
        ours.batch_exists_v2(names(0), [PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.BLOCK_GROUPS)])


def test_batches_beyond_the_memory_on_the_way_go_in_parts(node: CacheNode) -> None:
    pool = host_pool()
    storage = backend(pool, at(node, puts=7, window=8, namespace="parts"))
    slots = pool.alloc(100 * PAGE)
    pages = fill(pool, slots, 12)
    keys = names(*range(100))
    until(lambda: storage.batch_set_v1(keys, slots) == [True] * 100)
    fill(pool, slots, 13)
    assert storage.batch_get_v1(keys, slots) == [True] * 100
    assert bytes_of(pool, slots) == pages
    assert storage.batch_exists(keys) == 100


def test_threads_that_prefetch_and_back_up_see_whole_pages(node: CacheNode) -> None:
    pool = host_pool(pages=401)
    storage = backend(pool, at(node, namespace="threads"))
    wrong: list[bytes] = []
    ended: list[int] = []

    def work(number: int) -> None:
        slots = pool.alloc(40 * PAGE)
        for turn in range(8):
            keys = names(*(10_000 * number + 100 * turn + at for at in range(20)))
            pages = fill(pool, slots[: 20 * PAGE], 1000 * number + turn)
            until(lambda: all(storage.batch_set_v1(keys, slots[: 20 * PAGE])))
            hits: list[bool] = []

            def read() -> bool:
                hits[:] = storage.batch_get_v1(keys, slots[20 * PAGE :])
                return any(hits)

            until(read)
            pages_read = bytes_of(pool, slots[20 * PAGE :])
            wrong.extend(page for is_hit, page, good in zip(hits, pages_read, pages) if is_hit and page != good)
        ended.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(ended) == 4


def test_clear_and_statistics() -> None:
    pool = host_pool()
    storage = backend(pool, enable_storage_metrics=True)
    slots = pool.alloc(5 * PAGE)
    fill(pool, slots, 3)
    keys = names(*range(5))
    assert storage.batch_set_v1(keys, slots) == [True] * 5
    assert storage.batch_get_v1(keys, slots) == [True] * 5
    stats = storage.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([5], [5])
    assert stats.prefetch_bandwidth[0] > 0
    assert storage.get_stats().prefetch_pgs == []
    assert storage.clear()
    assert storage.batch_exists(keys) == 0 and storage.batch_get_v1(keys, slots) == [False] * 5
    assert storage.batch_set_v1(keys, slots) == [True] * 5 and storage.batch_exists(keys) == 5
    assert backend(pool).get_stats() is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "name a node by 'peer' and 'address'"),
        ({"peer": "cache", "adress": "x"}, "there is no setting 'adress'"),
        ({"in_process_bytes": "1 GB"}, "kvpool.in_process_bytes is '1 GB', expected int"),
        ({"in_process_bytes": True}, "expected int"),
        ({"settings": "/nowhere/kvpool.toml"}, "cannot read the settings file /nowhere/kvpool.toml"),
        ({"settings": "x", "token_file": "y"}, "or set 'settings' or 'in_process_bytes' alone"),
        ({"settings": "x", "peer": "cache"}, "or set 'settings' or 'in_process_bytes' alone"),
        ({"in_process_bytes": 1, "peer": "cache", "address": "h:1"}, "or set 'settings' or 'in_process_bytes' alone"),
        ([], "expected an object"),
    ],
)
def test_settings_are_refused_by_name(settings: object, why: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(why)):
        backend(host_pool(), settings)


def test_pools_without_a_node_or_pages_are_refused_by_name() -> None:
    storage = backend(host_pool())
    with pytest.raises(InvalidArgument, match="the host pool 'mamba' has pages of another size"):
        storage.register_mem_host_pool_v2(host_pool(), PoolName.MAMBA)
    with pytest.raises(InvalidArgument, match="the host pool 'kv' has no pages of one piece"):
        backend(host_pool(layout="page_unified"))


def test_changed_storage_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def batch_exists(self, keys): ...

    monkeypatch.setattr(HiCacheStorage, "batch_exists", batch_exists)
    with pytest.raises(kvpool.sglang.EngineChanged, match=r"HiCacheStorage\.batch_exists\(self, keys\)"):
        backend(host_pool())
    monkeypatch.undo()
    monkeypatch.setattr(HiCacheStorage, "batch_delete", batch_exists, raising=False)
    with pytest.raises(kvpool.sglang.EngineChanged, match="KvpoolStorage.batch_delete is missing"):
        backend(host_pool())


def page_of(address: str, path: str) -> str:
    with urllib.request.urlopen(f"{address}{path}", timeout=30) as answer:
        return answer.read().decode()


def test_the_pool_is_served_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_pool().admin is None
    monkeypatch.setenv("KVPOOL_SGLANG_SERVE", "127.0.0.1:0")
    first, second = host_pool(), host_pool()
    assert first.admin.address != second.admin.address
    first.alloc(3 * PAGE)
    assert json.loads(page_of(first.admin.address, "/stats"))["used"] == 3
    address = first.admin.address
    first.clear()
    assert first.admin.address == address
    assert json.loads(page_of(address, "/stats"))["used"] == 0
    first.alloc(2 * PAGE)
    assert f'kvpool_blocks{{pool="{first.admin.name}",state="used"}} 2' in page_of(address, "/metrics")
    assert "<html" in page_of(address, "/")
    monkeypatch.setenv("KVPOOL_SGLANG_SERVE", "nowhere.toml")
    with pytest.raises(InvalidArgument, match="^KVPOOL_SGLANG_SERVE is 'nowhere.toml': cannot read"):
        host_pool()
