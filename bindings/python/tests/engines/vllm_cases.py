"""Cases of kvpool under vLLM, run in vLLM's environment by `test_vllm.py`."""

import itertools
import linecache
import logging
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import vllm
from vllm.utils.hashing import sha256
from vllm.v1.core import block_pool, kv_cache_coordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

import kvpool.vllm
import kvpool_plugin
from kvpool.errors import FrameRefused, InvalidArgument

BLOCK = 16
PART = os.environ["KVPOOL_VLLM"]
init_none_hash(sha256)


def manager_of(part: str, blocks: int) -> KVCacheManager:
    kvpool.vllm.install(part)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return KVCacheManager(config, max_model_len=8192, scheduler_block_size=BLOCK, hash_block_size=BLOCK)


def request_of(name: str, tokens: list[int]) -> Request:
    params = SamplingParams(max_tokens=17)
    return Request(name, tokens, params, None, block_hasher=get_request_block_hasher(BLOCK, sha256))


def start(manager: KVCacheManager, request: Request) -> bool:
    blocks, hit, _ = manager.get_computed_blocks(request)
    new = request.num_tokens - hit
    if manager.allocate_slots(request, new, hit, blocks) is None:
        return False
    request.num_computed_tokens = request.num_tokens
    return True


def test_entry_point_installs_by_name() -> None:
    kvpool_plugin.register_vllm()
    ours = kvpool.vllm.BlockPool if PART == "pool" else kvpool.vllm.FreeQueue
    assert ours in (kv_cache_coordinator.BlockPool, block_pool.FreeKVCacheBlockQueue)
    with pytest.raises(InvalidArgument, match="KVPOOL_VLLM is 'both'"):
        kvpool.vllm.install("both")


def test_an_entry_point_that_is_not_named_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM loads all installed plugins if none is named."""
    from kvpool.vllm import plugin

    kvpool.vllm.install("off")
    monkeypatch.delenv("KVPOOL_VLLM")
    for named, ours in ((None, False), ("other,another", False), ("other,kvpool", True)):
        if named is None:
            monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        else:
            monkeypatch.setenv("VLLM_PLUGINS", named)
        kvpool_plugin.register_vllm()
        assert (kv_cache_coordinator.BlockPool is not plugin._STOCK_POOL) == ours
    kvpool.vllm.install("off")


def test_settings_are_checked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("many", "-1", "1.5"):
        monkeypatch.setenv("KVPOOL_VLLM_AHEAD", text)
        with pytest.raises(InvalidArgument, match=f"KVPOOL_VLLM_AHEAD is '{text}'"):
            manager_of(PART, 100)


def test_changed_engine_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(self, blocks, now): ...

    from kvpool.vllm import plugin

    monkeypatch.setattr(plugin._STOCK_POOL, "touch", touch)
    with pytest.raises(kvpool.vllm.EngineChanged, match=r"BlockPool\.touch\(self, blocks, now\)") as refused:
        kvpool.vllm.install(PART)
    assert len(refused.value.differences) == 1
    monkeypatch.undo()
    monkeypatch.delattr(plugin._STOCK_QUEUE, "append_n")
    with pytest.raises(kvpool.vllm.EngineChanged):
        monkeypatch.setattr(KVCacheBlock, "ref_cnt", None)
        monkeypatch.delattr(KVCacheBlock, "ref_cnt")
        kvpool.vllm.install(PART)


def test_a_changed_body_is_refused_by_name_unless_allowed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvpool.vllm import plugin

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        return [self.popleft() for _ in range(n)]

    # As a patch of vLLM's own source has it: the same name in the same module.
    popleft_n.__module__ = plugin._STOCK_QUEUE.__module__
    popleft_n.__qualname__ = plugin._STOCK_QUEUE.popleft_n.__qualname__
    monkeypatch.setattr(plugin._STOCK_QUEUE, "popleft_n", popleft_n)
    with pytest.raises(kvpool.vllm.EngineChanged, match="the body of FreeKVCacheBlockQueue.popleft_n is another one"):
        kvpool.vllm.install(PART)
    monkeypatch.setenv("KVPOOL_VLLM_UNTESTED", "1")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    kvpool.vllm.install(PART)
    assert "the body of FreeKVCacheBlockQueue.popleft_n is another one" in caplog.text
    monkeypatch.setattr(plugin._STOCK_QUEUE, "popleft_n", lambda self: None)
    with pytest.raises(kvpool.vllm.EngineChanged, match=r"popleft_n\(self\), expected"):
        kvpool.vllm.install(PART)


def test_the_log_says_that_kvpool_is_active(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm.kvpool")
    frames = len(manager_of(PART, 1281).block_pool.free_block_queue.get_all_free_blocks())
    assert f"kvpool active in vLLM {vllm.__version__}: {frames} frames, ahead " in caplog.text
    caplog.clear()
    manager_of("off", 1281)
    assert "kvpool" not in caplog.text


def test_comments_and_docstrings_are_no_change() -> None:
    from kvpool._drift import body_of

    def scope(text: str) -> object:
        name = f"<{text}>"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        exec(compile(text, name, "exec"), space := {})
        return space["f"]

    plain = body_of(scope("def f(a):\n    return a + 1\n"))
    assert plain == body_of(scope('def f(a):\n    """Adds."""\n    # One.\n    return (a\n            + 1)\n'))
    assert plain != body_of(scope("def f(a):\n    return a + 2\n"))


@pytest.mark.skipif(PART == "queue", reason="vLLM's pool has no metrics of kvpool")
def test_values_of_an_engine_are_in_the_front_ends_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPOOL_VLLM_METRICS", raising=False)
    front = """
import os, subprocess, sys
from prometheus_client import generate_latest
from kvpool.vllm import metrics
metrics.share()
folder = os.environ["KVPOOL_VLLM_METRICS"]
subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
print(generate_latest().decode(), "FOLDER", folder)
"""
    engine = """
import os
from kvpool.vllm import BlockPool, metrics
inherited = os.environ["KVPOOL_VLLM_METRICS"]
metrics.share()
assert os.environ["KVPOOL_VLLM_METRICS"] == inherited
pool = BlockPool(101, True, 16)
for _ in range(34):
    pool.free_blocks(reversed(pool.get_new_blocks(10)))
pool.free_blocks(pool.get_new_blocks(1))
held = pool.get_new_blocks(30)
pool.get_usage()
"""
    ran = subprocess.run([sys.executable, "-c", front, engine], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    for line in (
        "kvpool:tables_total 2.0", "kvpool:table_blocks_total 20.0", "kvpool:table_runs_total 2.0",
        "kvpool:audited_blocks_total 100.0", "kvpool:audit_failures_total 0.0", "kvpool:moved_blocks_total 0.0",
    ):
        assert line in ran.stdout.splitlines(), ran.stdout
    assert [line for line in ran.stdout.splitlines() if line.startswith("kvpool:used_blocks{pid=") and line.endswith(" 30.0")]
    assert not os.path.exists(ran.stdout.split("FOLDER ")[1].strip()), "removed at the front end's end"


@pytest.mark.skipif(PART == "queue", reason="vLLM's pool has no metrics of kvpool")
def test_metrics_of_several_front_ends_are_in_vllms_folder(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    from prometheus_client.multiprocess import MultiProcessCollector

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(kvpool.vllm.metrics, "SECONDS", 0.0)
    pool = kvpool.vllm.BlockPool(101, True, BLOCK)
    pool.get_usage()
    found = {metric.name: metric.samples[0].value for metric in MultiProcessCollector(None, str(tmp_path)).collect()}
    assert found["kvpool:audited_blocks"] == 100 and found["kvpool:free_blocks"] == 100
    second = kvpool.vllm.BlockPool(51, True, BLOCK)
    second.get_usage()
    found = {metric.name: [sample.value for sample in metric.samples] for metric in MultiProcessCollector(None, str(tmp_path)).collect()}
    assert found["kvpool:audited_blocks"] == [150], "of both pools"
    assert sorted(found["kvpool:free_blocks"]) == [50, 100], "of each"
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "removed"))
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    for _ in range(2):
        pool.get_usage()
    assert caplog.text.count("kvpool: no metrics: ") == 1, "said once, and the engine goes on"


@pytest.mark.skipif(PART == "queue", reason="vLLM's pool has no metrics of kvpool")
def test_audits_are_bounded_and_counted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    pool = kvpool.vllm.BlockPool(5001, True, BLOCK)
    audited = []
    for _ in range(4):
        pool.meter._due = 0.0
        pool.get_usage()
        audited.append(pool.meter.counts["audited_blocks"])
        pool.get_usage()
    assert audited == [2048, 4096, 5000, 7048], "at most AUDITED for each interval, from the first again"
    pool.blocks[2100].ref_cnt = 1
    pool.meter._due = 0.0
    pool.get_usage()
    assert pool.meter.counts["audit_failures"] == 1
    assert "block 2100 has 1 references in vLLM and 0 in kvpool" in caplog.text
    pool.blocks[2100].ref_cnt = 0
    assert pool.reset_prefix_cache()
    assert pool.meter.counts["audited_blocks"] == 9096 + 5000 and pool.meter.counts["audit_failures"] == 1


@pytest.mark.skipif(PART == "queue", reason="vLLM's pool makes its own attributes")
def test_changed_attributes_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpool.vllm import plugin

    stock = plugin._STOCK_POOL.__init__

    def changed(self, *args, **kwargs):
        stock(self, *args, **kwargs)
        self.free_queue = self.__dict__.pop("free_block_queue")

    monkeypatch.setattr(plugin._STOCK_POOL, "__init__", changed)
    with pytest.raises(kvpool.vllm.EngineChanged, match="free_block_queue is missing"):
        kvpool.vllm.BlockPool(10, True, BLOCK)


def test_nothing_is_evicted_ahead_if_vllms_configuration_has_other_states(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind

    from kvpool.vllm import groups

    kvpool.vllm.install(PART)
    full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)

    def manager(kind: Kind) -> KVCacheManager:
        shape = {"block_size": BLOCK, "shapes": ((2, 8),), "dtypes": (torch.float32,)}
        states = MambaSpec(**shape, mamba_type=kind, mamba_cache_mode="align")
        layers = [KVCacheGroupSpec(["full"], full), KVCacheGroupSpec(["states"], states)]
        config = KVCacheConfig(num_blocks=1025, kv_cache_tensors=[], kv_cache_groups=layers)
        return KVCacheManager(config, max_model_len=8192, scheduler_block_size=BLOCK, hash_block_size=BLOCK)

    for kind in Kind:
        monkeypatch.setattr(groups, "PROVEN", set())
        queue = manager(kind).block_pool.free_block_queue
        assert queue.ahead == 0
        assert queue.unproven == f"group 1 holds states (MambaSpec, {kind.name})"
        monkeypatch.setattr(groups, "PROVEN", {kind.name})
        queue = manager(kind).block_pool.free_block_queue
        assert queue.ahead == 8 and queue.states
    assert manager_of(PART, 1025).block_pool.free_block_queue.ahead == 8
    monkeypatch.undo()
    assert groups.PROVEN <= {kind.name for kind in Kind}, "as vLLM names them"


@pytest.mark.skipif(PART == "queue", reason="compaction is of the pool")
def test_compaction_is_refused_for_states() -> None:
    from kvpool.vllm.compaction import Compactor

    pool = manager_of("pool", 100).block_pool
    pool.free_block_queue.states = "group 1 holds states (MambaSpec, SHORT_CONV)"
    with pytest.raises(InvalidArgument, match="moves blocks of keys and values only: group 1 holds states"):
        Compactor(pool)


def test_same_hits_as_stock_over_many_requests() -> None:
    """A pool that never evicts finds the same prefixes; a full one stays consistent."""
    stock, ours = manager_of("off", 4001), manager_of(PART, 4001)
    small = manager_of(PART, 301)
    dice = random.Random(7)
    running: list[tuple[Request, Request, Request | None]] = []
    for step in range(400):
        prefix = [dice.randrange(8)] * BLOCK * dice.randrange(1, 6)
        tokens = prefix + [step] * dice.randrange(1, 40)
        pair = tuple(request_of(f"{step}", tokens) for _ in range(3))
        hits = [manager.get_computed_blocks(request)[1] for manager, request in zip((stock, ours), pair)]
        assert hits[0] == hits[1]
        assert start(stock, pair[0]) and start(ours, pair[1])
        assert len(ours.get_block_ids(f"{step}")[0]) == len(stock.get_block_ids(f"{step}")[0])
        running.append((pair[0], pair[1], pair[2] if start(small, pair[2]) else None))
        if len(running) > 20:
            done = running.pop(dice.randrange(len(running)))
            stock.free(done[0])
            ours.free(done[1])
            if done[2] is not None:
                small.free(done[2])
    for manager in (ours, small):
        assert manager.block_pool.null_block.block_id == 0
        held = {id for group in manager.coordinator.single_type_managers for table in group.req_to_blocks.values()
                for id in (block.block_id for block in table)}
        pool = manager.block_pool.free_block_queue.pool
        null = {0} if PART == "queue" else set()
        assert held | null == {frame for frame, _, _ in pool.owners()}
        assert pool.audit()["owned"] == len(held | null)
    assert not kvpool.vllm.owners(ours).unaccounted
    assert set(kvpool.vllm.owners(ours).requests) == {pair[1].request_id for pair in running}
    for pair in running:
        ours.free(pair[1])
    assert ours.block_pool.get_usage() == 0
    assert ours.reset_prefix_cache()
    assert ours.block_pool.free_block_queue.num_free_blocks == 4000


def test_owners_name_leaks() -> None:
    manager = manager_of(PART, 101)
    request = request_of("a", [1] * 50)
    assert start(manager, request)
    (ids,) = manager.get_block_ids("a")
    manager.coordinator.single_type_managers[0].req_to_blocks["a"].pop()
    found = kvpool.vllm.owners(manager)
    assert found.requests == {"a": ids[:-1]}
    assert found.unaccounted == {ids[-1]: 1}


@pytest.mark.skipif(PART == "queue", reason="vLLM's pool counts references, and does not check them")
def test_double_free_is_refused_and_changes_nothing() -> None:
    manager = manager_of(PART, 101)
    pool = manager.block_pool
    blocks = pool.get_new_blocks(4)
    free = pool.get_num_free_blocks()
    with pytest.raises(FrameRefused, match=f"block {blocks[1].block_id} is freed twice") as refused:
        pool.free_blocks([blocks[0], blocks[1], blocks[2], blocks[1]])
    assert (refused.value.index, refused.value.frame) == (3, blocks[1].block_id)
    assert [block.ref_cnt for block in blocks] == [1] * 4
    assert pool.get_num_free_blocks() == free
    pool.free_blocks(blocks)
    with pytest.raises(FrameRefused):
        pool.free_blocks(blocks[:1])
    pool.audit()


def test_queue_takes_named_blocks_and_orders_evictions() -> None:
    queue = kvpool.vllm.FreeQueue([KVCacheBlock(i) for i in range(1, 65)])
    blocks = queue.popleft_n(64)
    assert queue.num_free_blocks == 0
    assert sorted(block.block_id for block in blocks) == list(range(1, 65))
    queue.append_n(blocks[:40])
    queue.prepend_n(blocks[40:])
    assert [block.block_id for block in queue.get_all_free_blocks()] == [
        block.block_id for block in blocks[40:] + blocks[:40]
    ]
    after = list(queue.iter_blocks_after(blocks[30]))
    assert after == blocks[31:40]
    # Contents are given up only when the others are in use.
    taken = queue.popleft_n(24)
    assert {block.block_id for block in taken} == {block.block_id for block in blocks[40:]}
    queue.remove(blocks[39])
    assert blocks[39] not in queue.get_all_free_blocks()
    with pytest.raises(FrameRefused):
        queue.remove(KVCacheBlock(1000))
    assert queue.num_free_blocks == 39
    with pytest.raises(ValueError, match="not consecutive"):
        kvpool.vllm.FreeQueue([KVCacheBlock(3), KVCacheBlock(5)])


def test_order_of_eviction_is_that_of_frees_and_is_read_in_pages() -> None:
    """As vLLM's lazy offloader reads it: some blocks in each step, from a cursor on."""
    queue = kvpool.vllm.FreeQueue([KVCacheBlock(i) for i in range(1, 5001)])
    blocks = queue.popleft_n(5000)
    dice = random.Random(1)
    dice.shuffle(blocks)
    queue.append_n(blocks)
    for _ in range(50):
        # Hits, and their ends: the queue keeps the order of the others.
        hits = dice.sample(blocks, 100)
        for block in hits:
            queue.remove(block)
        moved = {block.block_id for block in hits}
        rest = [block for block in blocks if block.block_id not in moved]
        assert queue.get_all_free_blocks() == rest
        assert list(queue.iter_blocks_after(hits[0])) == []
        queue.append_n(hits)
        blocks = rest + hits
        assert queue.get_all_free_blocks() == blocks
        at = dice.randrange(5000)
        assert list(queue.iter_blocks_after(blocks[at])) == blocks[at + 1 :]

    read: list[int] = []

    class Counting:
        def available_after(self, frames: int, cursor: int | None) -> list[int]:
            read.append(frames)
            return pool.available_after(frames, cursor)

    pool, queue.pool = queue.pool, Counting()
    for start in (None, blocks[4000]):
        read.clear()
        assert len(list(itertools.islice(queue.iter_blocks_after(start), 200))) == 200
        assert sum(read) <= 2 * 200 + 64


@pytest.mark.skipif(PART == "queue", reason="compaction is of the pool")
def test_compaction_keeps_every_cached_byte() -> None:
    """Copies between steps, with hits in between: what a hash finds is what was written under it."""
    from kvpool.vllm.compaction import Compactor

    manager = manager_of("pool", 1025)
    pool = manager.block_pool
    compactor = Compactor(pool, moves_max=64, fragmentation=0.1)
    memory: dict[int, bytes] = {}
    dice = random.Random(3)
    running: list[Request] = []
    gained = 0
    for step in range(600):
        request = request_of(f"{step}", [dice.randrange(40)] * BLOCK * dice.randrange(1, 6) + [1000 + step] * 30)
        _, hit, _ = manager.get_computed_blocks(request)
        if start(manager, request):
            (ids,) = manager.get_block_ids(request.request_id)
            for index, block_id in enumerate(ids):
                wanted = request.block_hashes[index] if index < len(request.block_hashes) else b"tail"
                if index * BLOCK < hit:
                    assert memory[block_id] == wanted, "a hit finds what was written under its hash"
                memory[block_id] = wanted
            running.append(request)
        while len(running) > 12 or (running and dice.random() < 0.3):
            manager.free(running.pop(dice.randrange(len(running))))
        # What the workers do with the step's pairs; hits of the next step come before the commit.
        if step % 2 == 0:
            before = pool.frames.fragmentation()
            copies = compactor.propose()
            for source, target in copies:
                memory[target] = memory[source]
            assert not set(id for _, id in copies) & {frame for frame, _, _ in pool.frames.owners()}
        else:
            gained += compactor.commit()
            if gained and before > 0.5:
                assert pool.frames.fragmentation() <= before + 0.2
        if step % 50 == 49:
            compactor.commit()
            pool.audit()
            for block in pool.blocks[1:]:
                if block.block_hash is not None:
                    assert memory[block.block_id] == block.block_hash[:-4]
    assert compactor.moved > 100
    compactor.propose()
    compactor.cancel()
    for request in running:
        manager.free(request)
    assert pool.reset_prefix_cache()
    pool.audit()


@pytest.mark.skipif(PART == "queue", reason="compaction is of the pool")
def test_compaction_tells_readers_of_destinations() -> None:
    """A block that is read without a reference until it is reused may become a destination."""
    from kvpool.vllm.compaction import Compactor

    pool = manager_of("pool", 129).block_pool
    blocks = pool.get_new_blocks(128)
    pool.free_block_queue.pool.register([block.block_id for block in blocks[::4]], [bytes([n]) for n in range(32)])
    told: list[int] = []
    pool.unpin_blocks(blocks, lambda block: told.append(block.block_id))
    pool.frames.uncache([block.block_id for n, block in enumerate(blocks) if n % 4])
    copies = Compactor(pool, fragmentation=0.1).propose()
    assert copies
    assert sorted(told) == sorted(target for _, target in copies)


@pytest.mark.skipif(PART == "queue", reason="compaction is of the pool")
def test_blocks_of_moves_in_flight_are_dealt_out_when_they_are_needed() -> None:
    from kvpool.vllm.compaction import Compactor

    pool = manager_of("pool", 129).block_pool
    blocks = pool.get_new_blocks(128)
    pool.free_block_queue.pool.register([block.block_id for block in blocks[::4]], [bytes([n]) for n in range(32)])
    pool.unpin_blocks(blocks, lambda block: None)
    pool.frames.uncache([block.block_id for n, block in enumerate(blocks) if n % 4])
    compactor = Compactor(pool, fragmentation=0.1)
    assert compactor.propose()
    assert len(pool.get_new_blocks(pool.get_num_free_blocks())) == 128
    assert compactor.commit() == 0
    pool.audit()


@pytest.mark.skipif(PART == "queue", reason="compaction is of the pool")
def test_compaction_makes_room_where_the_cache_fills_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine at work has no blocks without contents: what is evicted next has to make room."""
    from kvpool.vllm.compaction import Compactor

    monkeypatch.setenv("KVPOOL_VLLM_AHEAD", "0")
    manager = manager_of("pool", 1025)
    pool = manager.block_pool
    requests = [request_of(f"{number}", [number] * BLOCK) for number in range(800)]
    for request in requests:
        assert start(manager, request)
    # Evicted first: one request in four.
    for request in sorted(requests, key=lambda request: int(request.request_id) % 4):
        manager.free(request)
    assert start(manager, filler := request_of("filler", [1000] * (pool.frames.stats()["free"] * BLOCK)))
    assert pool.frames.stats()["free"] == 0
    monkeypatch.setenv("KVPOOL_VLLM_ROOM", "0")
    assert Compactor(pool, fragmentation=0.1).propose() == []
    monkeypatch.setenv("KVPOOL_VLLM_ROOM", "many")
    with pytest.raises(InvalidArgument, match="KVPOOL_VLLM_ROOM is 'many'"):
        Compactor(pool)
    monkeypatch.setenv("KVPOOL_VLLM_ROOM", "64")
    compactor = Compactor(pool, fragmentation=0.1)
    before = {block.block_hash for block in pool.blocks if block.block_hash}
    assert len(before) == 1024
    copies = compactor.propose()
    assert copies
    assert compactor.commit() == len(copies)
    assert pool.frames.fragmentation() < 0.5, "it was 1"
    # All contents but those of the evicted blocks are found, where they are now.
    after = {block.block_hash for block in pool.blocks if block.block_hash}
    assert after < before
    assert len(before - after) <= 64
    found = {pool.cached_block_hash_to_block.get_one_block(key).block_hash for key in after}
    assert found == after
    manager.free(filler)
    pool.audit()


@pytest.mark.skipif(PART == "queue", reason="compaction is of the pool")
def test_compaction_refuses_vllms_own_pool() -> None:
    from kvpool.vllm.compaction import Compactor

    with pytest.raises(InvalidArgument, match="VLLM_PLUGINS"):
        Compactor(manager_of("off", 10).block_pool)


def test_offloading_spec_builds_kvpools_manager_and_places_stay_apart() -> None:
    from types import SimpleNamespace

    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu import manager as stock

    from kvpool.vllm.offload import KvpoolOffloadingManager, KvpoolOffloadingSpec

    spec = KvpoolOffloadingSpec.__new__(KvpoolOffloadingSpec)
    spec._manager, spec.num_chunks, spec.extra_config = None, 256, {}
    spec.eviction_policy, spec.cache_policy_module_path, spec.cpu_info = "lru", None, None
    spec.kv_events_config = SimpleNamespace(enable_kv_cache_events=False)
    manager = spec.get_manager()
    assert type(manager) is KvpoolOffloadingManager
    assert stock.CPUOffloadingManager is not KvpoolOffloadingManager
    dice = random.Random(9)
    for number in range(400):
        keys = [make_offload_key(bytes([dice.randrange(40), index]) * 16, 0) for index in range(dice.randrange(1, 60))]
        context = ReqContext(req_id=f"{number}")
        manager.on_new_request(context)
        stored = manager.prepare_store(keys, context)
        assert stored is not None
        manager.complete_store(stored.keys_to_store, context, success=dice.random() < 0.9)
        found = [key for key in keys if manager.lookup(key, context) is LookupResult.HIT]
        ids = manager.prepare_load(found, context).chunk_ids.tolist()
        assert len(set(ids)) == len(found) and all(0 <= chunk < 256 for chunk in ids)
        manager.complete_load(found, context)
        assert manager.frames.used == manager._num_allocated_chunks
    manager.frames.audit()
    manager.reset_cache()
    assert manager.frames.available == 256 == manager._get_num_free_chunks()
