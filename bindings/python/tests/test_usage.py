"""Allocation, sequences, batches, the prefix cache, and what they report."""

from __future__ import annotations

import asyncio
import gc
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import kvpool
import numpy as np
import pytest
from conftest import TOKENS, layout, singles


def test_a_lease_frees_its_blocks(pool: kvpool.Pool) -> None:
    with pool.try_allocate(10, sequence=7, priority="high") as lease:
        assert len(lease) == len(set(lease.blocks)) == 10
        assert sum(length for _, length in lease.runs) == 10
        assert pool.info(lease.handles[0]).sequence == 7
        rest = lease.split_off(6)
        rest.truncate(1)
        assert (len(lease), len(rest), pool.free_blocks) == (6, 1, 93)
        rest.close()
        rest.close()
        assert rest.closed
    assert pool.free_blocks == 100


def test_lists_and_buffers_agree(pool: kvpool.Pool) -> None:
    with pool.try_allocate(10) as lease:
        for dtype in (np.int32, np.int64):
            out = np.full(12, -7, dtype)
            assert lease.blocks_into(out) == 10
            assert out.tolist() == lease.blocks + [-7, -7]
            assert lease.frames_into(out) == 10
            assert out[:10].tolist() == lease.frames


def test_a_shared_lease_keeps_its_blocks(pool: kvpool.Pool) -> None:
    lease = pool.try_allocate(3)
    shared = lease.share()
    handles = lease.handles
    assert (shared.blocks, pool.info(handles[0]).references) == (lease.blocks, 2)
    lease.seal()
    assert not shared.reopen(0)
    lease.close()
    assert (len({*handles, *shared.handles}), pool.info(handles[0]).references) == (3, 1)
    assert shared.reopen(0)
    shared.close()
    assert pool.free_blocks == 100


def test_a_block_of_two_leases_has_no_writable_view(pool: kvpool.Pool) -> None:
    lease = pool.try_allocate(1)
    part = lease.share().split_off(0)
    view = pool.view(lease, 0, 0)
    assert view.readonly
    part.seal()
    del view
    gc.collect()
    part.close()
    assert lease.reopen(0)
    assert not pool.view(lease, 0, 0).readonly
    gc.collect()
    lease.close()
    assert pool.free_blocks == 100


def test_contiguous_and_pinned(pool: kvpool.Pool) -> None:
    with pool.try_allocate(20, contiguous=True, pinned=True) as lease:
        assert len(lease.runs) == 1
        assert pool.info(lease.handles[0]).pins == 1


def test_appends_tables_and_slots(pool: kvpool.Pool) -> None:
    with pool.sequence(1) as first, pool.sequence(2) as second, pool.begin_batch() as batch:
        new = batch.append(first, 10)
        assert (new.start, new.stop, new.new_blocks, new.copied) == (0, 10, 3, None)
        batch.append(second, 3)
        table = np.full((3, 5), -1, np.int32)
        assert batch.block_table([first, second], table) == (2, 3)
        assert table[0].tolist()[3:] == [0, 0] and table[1].tolist()[1:] == [0] * 4
        assert table[2].tolist() == [-1] * 5, "rows behind the last sequence are left alone"
        slots = batch.slots(first, 0, 10)
        assert slots == [table[0][i // TOKENS] * TOKENS + i % TOKENS for i in range(10)]
        for dtype in (np.int32, np.int64):
            out = np.zeros(12, dtype)
            assert batch.slot_mapping(first, 0, 10, out, 1) == 10
            assert out[1:11].tolist() == slots
        own = kvpool.BlockTable(4)
        assert batch.block_table([first, second], own) == (2, 4)
        assert (own.rows, own.width, own.lengths) == (2, 4, [10, 3])
        assert np.asarray(own).tolist() == [own.row(0), own.row(1)] == table[:2, :4].tolist()
        indptr, indices, last = np.zeros(3, np.int32), np.zeros(8, np.int32), np.zeros(2, np.int32)
        assert batch.csr_table([first, second], indptr, indices, last) == 4
        assert indptr.tolist() == [0, 3, 4] and last.tolist() == [2, 3]
        assert batch.lengths([first, second]) == [10, 3]
        assert batch.decode([first, second]).new_blocks == 0
    assert batch.finished and first.closed


def test_forks_copy_on_write_and_drafts(pool: kvpool.Pool) -> None:
    with pool.sequence(1) as parent:
        with pool.begin_batch() as batch:
            batch.append(parent, 6)
            with parent.fork(2) as child:
                assert child.blocks == parent.blocks
                assert batch.append(child, 1).copied is not None
                assert child.blocks[0] == parent.blocks[0] and child.blocks[1] != parent.blocks[1]
                batch.draft(child, 4)
                child.truncate(9)
                child.commit(9)
                assert (len(child), child.committed) == (9, 9)


def test_bytes_are_stored_and_loaded(pool: kvpool.Pool) -> None:
    k = np.arange(6 * 16, dtype=np.float32).reshape(6, 2, 8)
    v = -k
    with pool.sequence(1) as sequence, pool.begin_batch() as batch:
        batch.append(sequence, 6)
        batch.store(sequence, 1, 0, 6, k, v)
        got = batch.load(sequence, 1, 2, 6)
        assert [np.frombuffer(part, np.float32).reshape(4, 2, 8).tolist() for part in got] == [k[2:].tolist(), v[2:].tolist()]


def test_the_prefix_cache_finds_what_was_computed(pool: kvpool.Pool) -> None:
    prompt = list(range(42))
    for cached in (0, 40):
        with pool.sequence(7, prompt) as sequence, pool.begin_batch() as batch:
            assert len(sequence) == cached
            batch.append(sequence, 42 - cached)
            batch.append_tokens(sequence, np.array([1, 2, 3], np.int64))
    cache = pool.prefix_cache
    assert cache is not None and cache.stats().hit_blocks == 10
    # 12: the last full block was computed twice.
    assert len(cache.blocks()) == pool.stats().evictable == 12
    with pool.sequence(8, prompt, salt=b"another") as other:
        assert len(other) == 0
    with cache.pin(prompt) as pinned:
        assert (pinned.tokens, len(pinned.blocks)) == (40, 10)
        assert cache.evict() == 2
    assert cache.clear() is None
    assert cache.evict(0) == 10
    assert pool.free_blocks == 100


def test_wrong_blocks_are_not_found_any_more(pool: kvpool.Pool) -> None:
    prompt, cache = list(range(42)), pool.prefix_cache
    assert cache is not None
    with pool.sequence(1, prompt) as sequence:
        with pool.begin_batch() as batch:
            batch.append(sequence, 42)
        hashes = sequence.block_hashes
        assert (len(hashes), cache.uncache(hashes[2:])) == (10, (0, 8))
        with pool.sequence(2, prompt) as other:
            assert len(other) == 8
        assert len(sequence) == 42
    assert cache.uncache(hashes) == (2, 0)
    assert (cache.stats().uncached_blocks, pool.free_blocks) == (10, 100)
    with pytest.raises(kvpool.CacheError):
        cache.uncache(["no hash"])


def test_the_needed_blocks_predict_an_admission(pool: kvpool.Pool) -> None:
    prompt = list(range(42))
    with pool.sequence(1, prompt) as sequence, pool.begin_batch() as batch:
        batch.append(sequence, 42)
    # The ten evictable blocks of its prefix are needed too.
    assert pool.blocks_needed(range(80)) == 20
    with pool.try_allocate(81):
        assert (pool.available_blocks, pool.blocks_needed(prompt, headroom=34)) == (19, 19)
        with pool.try_admit(2, prompt, headroom=34):
            assert pool.available_blocks == 0
        with pytest.raises(kvpool.OutOfBlocks):
            pool.try_admit(3, prompt, headroom=38)


def test_a_request_that_comes_back_is_no_hit(pool: kvpool.Pool) -> None:
    prompt, cache = list(range(42)), pool.prefix_cache
    assert cache is not None

    async def serve() -> None:
        for cached in (0, 40):
            sequence = pool.sequence(1, prompt)
            assert len(sequence) == cached
            with pool.begin_batch() as batch:
                batch.append(sequence, 42 - cached)
            await pool.preempt(sequence)

    asyncio.run(serve())
    stats = cache.stats()
    assert (stats.lookups, stats.lookup_blocks, stats.hit_rate) == (1, 10, 0)
    assert (stats.resumed_lookups, stats.resumed_lookup_blocks, stats.resumed_hit_blocks) == (1, 10, 10)


def test_keys_of_ranges_separate_images(pool: kvpool.Pool) -> None:
    cache = pool.prefix_cache
    assert cache is not None
    prompt = [7] * (10 * TOKENS + 1)
    image = (5 * TOKENS, 7 * TOKENS)
    events = cache.events()

    def serve(key: bytes) -> int:
        with pool.try_admit(1, prompt, extra_keys=[(*image, key)]) as sequence, pool.begin_batch() as batch:
            cached = len(sequence)
            batch.append(sequence, len(prompt) - cached)
            return cached

    assert [serve(b"first"), serve(b"second")] == [0, 5 * TOKENS]
    assert [serve(b"first"), serve(b"second")] == [10 * TOKENS] * 2
    stored = [event.extra_keys for event in events.drain() if event.kind == "stored"]
    keys = [[]] * 5 + [[(0, b"first")], [(-TOKENS, b"first")]] + [[]] * 3
    assert stored[:10] == keys
    with pool.sequence(2, [1] * TOKENS) as sequence:
        with pool.begin_batch() as batch:
            batch.append(sequence, TOKENS)
        sequence.extra_key(TOKENS, 3 * TOKENS, b"later")
        with pytest.raises(kvpool.CacheError):
            sequence.extra_key(TOKENS - 1, TOKENS, b"late")
    with pytest.raises(kvpool.CacheError):
        pool.sequence(3, prompt, extra_keys=[(0, len(prompt) + 1, b"beyond")])
    with pytest.raises(kvpool.CacheError):
        cache.pin(prompt, extra_keys=[(*image, b"third"), (0, 1, b"another")])


def test_admission_reserves(pool: kvpool.Pool) -> None:
    with pool.try_admit(7, range(42), headroom=100, priority="high") as sequence:
        assert sequence.reserved_blocks == 36
        with pool.begin_batch() as batch:
            batch.advance(sequence)
        assert sequence.reserved_blocks == 25
        assert pool.victims()[0].id == 7
        assert sequence.release_reservation() == 25
        sequence.reserve(40)
        with pytest.raises(kvpool.SequenceError, match="sequence 7 is already open") as refused:
            pool.try_admit(7, [1])
        assert (refused.value.sequence, refused.value.kind) == (7, "AlreadyOpen")


def test_an_exception_in_a_batch_takes_its_tokens_back(pool: kvpool.Pool) -> None:
    cache = pool.prefix_cache
    assert cache is not None
    with pool.sequence(1, [1, 2, 3, 4, 5]) as sequence:

        def step(launch: Callable[[], object]) -> kvpool.Batch:
            with pool.begin_batch() as batch:
                batch.append(sequence, 5)
                launch()
            return batch

        with pytest.raises(ZeroDivisionError):
            step(lambda: 1 // 0)
        # The ids stay announced.
        assert (len(sequence), len(sequence.block_hashes), cache.blocks()) == (0, 1, [])
        stats = pool.stats()
        assert (stats.batches_in_flight, stats.batches_abandoned) == (0, 1)
        # Its blocks are kept for the same step.
        free = pool.free_blocks
        assert step(lambda: None).finished
        assert (len(sequence), len(cache.blocks()), pool.free_blocks) == (5, 1, free)
        # What was computed before stays.
        with pytest.raises(KeyError), pool.begin_batch() as batch:
            batch.append_tokens(sequence, [6, 7, 8, 9])
            raise KeyError
        assert (len(sequence), len(cache.blocks())) == (5, 1)
        with pytest.raises(kvpool.BatchEnded, match="this batch has ended"):
            batch.append(sequence, 1)
        with pool.begin_batch() as batch:
            batch.append_tokens(sequence, [6, 7, 8, 9])
    with pool.sequence(2, [1, 2, 3, 4, 5, 6, 7, 8, 9]) as sequence:
        assert len(sequence) == 8


def test_a_batch_that_is_dropped_is_abandoned(pool: kvpool.Pool) -> None:
    with pool.sequence(1, [1, 2, 3, 4, 5]) as sequence:
        batch = pool.begin_batch()
        batch.append(sequence, 5)
        del batch
        gc.collect()
        assert len(sequence) == 0
    assert pool.stats().batches_abandoned == 1
    pool.audit()


def test_compaction_and_resizes_block(pool: kvpool.Pool) -> None:
    leases = singles(pool, 100)
    for lease in leases[::2]:
        lease.close()
    for lease in leases[1::2]:
        lease.seal()
    assert pool.fragmentation().rate > 0.5
    report = pool.defragment().wait()
    assert report.moved_blocks > 0 and report.fragmentation_after < 0.1
    resized = pool.resize(60).wait()
    assert (resized.before, resized.after, pool.total_blocks) == (100, 60, 60)
    assert pool.resize(200).wait().after == 200
    for lease in leases[1::2]:
        lease.close()
    assert pool.compaction_state is None
    with pool.start_defragmenter(threshold=0.5, interval=0.01, share=0.1) as task:
        assert task.totals().failed == 0
        until = time.monotonic() + 20
        while pool.compaction_state != "contiguous":
            assert time.monotonic() < until, pool.compaction_state
            time.sleep(0.001)
    assert pool.compaction_state is None
    with pytest.raises(ValueError, match="share"):
        pool.start_defragmenter(share=1.5)
    with pytest.raises(kvpool.Closed, match="this defragmenter is closed"):
        task.totals()


def test_runs_of_sequences_are_counted(pool: kvpool.Pool) -> None:
    assert pool.sequence_runs().sequences == 0
    with pool.sequence(1) as sequence, pool.begin_batch() as batch:
        batch.append(sequence, 42)
        runs = pool.sequence_runs()
        assert (runs.sequences, runs.mean, runs.p50, runs.p99, runs.mean_run) == (1, 1.0, 1, 1, 11.0)


def test_records_and_pictures(pool: kvpool.Pool) -> None:
    stats = pool.stats()
    fields = stats.as_dict()
    assert fields["total"] == stats.total == 100
    assert repr(stats).startswith("Stats(total=100, used=0, free=100")
    assert "oldest_batch=None" in repr(stats)
    ElementTree.fromstring(stats._repr_html_())
    ElementTree.fromstring(pool._repr_html_())
    picture = pool.map(title="a & b")
    ElementTree.fromstring(picture.svg)
    assert picture._repr_svg_() == picture.svg
    assert "100 blocks" in repr(pool)
    repr(pool.try_allocate(1)), repr(pool.sequence(1)), repr(pool.begin_batch()), repr(kvpool.BlockTable())


def test_layouts() -> None:
    assert "qwen2.5-0.5b" in kvpool.Layout.names()
    named = kvpool.Layout.named("qwen2.5-0.5b", block_tokens=32)
    assert named.block_tokens == 32 and named.bytes_per_block == 32 * named.bytes_per_token
    assert layout() == layout() != layout("f16")
    with pytest.raises(kvpool.BuildError, match="head_dim: got 0, or nothing") as refused:
        kvpool.Layout(layers=1, head_dim=0)
    assert (refused.value.kind, refused.value.what) == ("Invalid", "head_dim")
    with pytest.raises(kvpool.BuildError, match='model: got "no", expected one of'):
        kvpool.Layout.named("no")
    with pytest.raises(kvpool.InvalidArgument, match="unknown dtype"):
        layout("f8")


@pytest.mark.parametrize("policy", [True, "lru", "priority"])
def test_policies(policy: bool | str) -> None:
    assert kvpool.Pool(layout(), 10, prefix_cache=policy, hashing="keyed", hash_key=bytes(32)).prefix_cache is not None


def test_pools_that_cannot_be_built() -> None:
    with pytest.raises(kvpool.BuildError, match='no eviction policy is called "mru"; there are lru, priority'):
        kvpool.Pool(layout(), 10, prefix_cache="mru")
    with pytest.raises(kvpool.BuildError, match="blocks: got 0, or nothing, expected at least 1"):
        kvpool.Pool(layout(), 0)
    with pytest.raises(kvpool.BuildError, match="reserve: got 10, expected less than the pool's 10"):
        kvpool.Pool(layout(), 10, reserve=10)
    with pytest.raises(kvpool.StorageError, match="CUDA"):
        kvpool.Pool(layout(), 10, device="cuda:0")
    with pytest.raises(kvpool.BuildError, match="unknown device"):
        kvpool.Pool(layout(), 10, device="tpu")
    with pytest.raises(kvpool.InvalidArgument, match="has 3 bytes"):
        kvpool.Pool(layout(), 10, prefix_cache=True, hash_key=b"abc")
    assert kvpool.Pool(layout(), 10, prefix_cache=False).prefix_cache is None
