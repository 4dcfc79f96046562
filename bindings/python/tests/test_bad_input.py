"""Bad input is refused by an exception of ours, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

import kvpool
import numpy as np
import pytest
from conftest import layout, singles


@pytest.fixture
def step(pool: kvpool.Pool) -> tuple[kvpool.Batch, kvpool.Sequence]:
    sequence, batch = pool.sequence(1), pool.begin_batch()
    batch.append(sequence, 10)
    return batch, sequence


def test_outputs_of_the_wrong_form(step: tuple[kvpool.Batch, kvpool.Sequence]) -> None:
    batch, sequence = step
    refusals = [
        (np.zeros((2, 4), np.float32), "out is float32; it must be int32 or int64"),
        (np.zeros((2, 4), np.int16), "out is int16"),
        (np.zeros((2, 4), np.uint32), "out is uint32"),
        (np.zeros((2, 4), ">i4"), "out is int32|out is format"),
        (np.zeros(8, np.int32), r"out has shape \[8\]; it must have 2 dimensions"),
        (np.zeros((2, 8), np.int32)[:, ::2], "out is not C-contiguous"),
        (np.zeros((4, 2), np.int32).T, "out is not C-contiguous"),
        (np.zeros((0, 4), np.int32), r"dimension 0 must be at least 1"),
        (np.zeros((2, 2), np.int32), r"out has shape \[2, 2\]; dimension 1 must be at least 3"),
    ]
    read_only = np.zeros((2, 4), np.int32)
    read_only.flags.writeable = False
    refusals.append((read_only, "out is read-only"))
    for out, message in refusals:
        before = out.copy()
        with pytest.raises(kvpool.BufferRefused, match=message) as refused:
            batch.block_table([sequence], out)
        assert refused.value.argument == "out"
        assert (out == before).all()
    with pytest.raises(TypeError):
        batch.block_table([sequence], [[0] * 4])
    out = np.zeros(9, np.int64)
    with pytest.raises(kvpool.BufferRefused, match="must be at least 10"):
        batch.slot_mapping(sequence, 0, 10, out)
    with pytest.raises(kvpool.BufferRefused, match="must be at least 18446744073709551615"):
        batch.slot_mapping(sequence, 0, 1, out, 2**64 - 1)
    with pytest.raises(kvpool.BufferRefused, match="indices"):
        batch.csr_table([sequence], np.zeros(2, np.int32), np.zeros(2, np.int32), np.zeros(1, np.int32))
    misaligned = np.frombuffer(bytearray(4 * 10 + 1), np.uint8)[1:].view(np.int32)
    with pytest.raises(kvpool.BufferRefused, match="not aligned"):
        batch.slot_mapping(sequence, 0, 10, misaligned)
    assert out.tolist() == [0] * 9


def test_tokens_of_the_wrong_form(pool: kvpool.Pool) -> None:
    refusals = [
        (np.zeros(4, np.float32), "float32"),
        (np.zeros((2, 2), np.int32), "not contiguous in one dimension"),
        (np.zeros(8, np.int32)[::2], "not contiguous in one dimension"),
        (np.zeros(4, ">i8"), "int32, uint32, int64 or uint64"),
    ]
    for tokens, message in refusals:
        with pytest.raises(kvpool.BufferRefused, match=message):
            pool.sequence(1, tokens)
    for tokens in ([1, 2, -3], np.array([1, 2, -3]), np.array([1, 2, 2**40]), [1, 2, 2**80], (1, 2, 2**40)):
        with pytest.raises(kvpool.InvalidArgument, match="entry 2 is .*; it must be from 0 to 4294967295") as refused:
            pool.sequence(1, tokens)
        assert refused.value.index == 2
    for tokens in (7, [1, "two"], [1.5]):
        with pytest.raises(TypeError):
            pool.sequence(1, tokens)
    assert pool.sequence_count == 0
    for tokens in (np.arange(9, dtype=dtype) for dtype in (np.int32, np.uint32, np.int64, np.uint64)):
        assert len(pool.sequence(1, tokens)) == 0


def test_numbers_out_of_range(pool: kvpool.Pool, step: tuple[kvpool.Batch, kvpool.Sequence]) -> None:
    batch, sequence = step
    lease = pool.try_allocate(2)
    calls = [
        (lambda: pool.try_allocate(-1), "a number of blocks cannot be -1; it is from 0 to 18446744073709551615"),
        (lambda: pool.try_allocate(2**70), "a number of blocks cannot be 1180591620717411303424"),
        (lambda: pool.try_allocate(0), "zero blocks requested"),
        (lambda: pool.sequence(-1), "a sequence id cannot be -1"),
        (lambda: pool.try_admit(2, []), "sequence 2: tokens: got 0, expected at least 1"),
        (lambda: batch.append(sequence, -1), "a number of tokens cannot be -1"),
        (lambda: batch.append(sequence, 0), "sequence 1: tokens: got 0, expected at least 1"),
        (lambda: lease.truncate(-1), "an index cannot be -1"),
        (lambda: lease.split_off(3), "3..2 is outside of 2 blocks"),
        (lambda: lease.seal(0, 3), "0..3 is outside of 2 blocks"),
        (lambda: lease.reopen(2), "2..3 is outside of 2 blocks"),
        (lambda: pool.view(lease, 2, 0), "2..3 is outside of 2 blocks"),
        (lambda: pool.view(lease, 0, 2), "layer 2 is outside 2 layers"),
        (lambda: pool.view(lease, 0, 0, "x"), "no part \"x\""),
        (lambda: pool.plane(0, "k_scales"), "no part \"k_scales\""),
        (lambda: pool.try_allocate(1, priority="low"), "unknown priority \"low\""),
        (lambda: pool.allocate(1, timeout=-1).wait(), "a time cannot be -1 seconds"),
        (lambda: pool.allocate(1, timeout=float("nan")).wait(), "a time cannot be NaN seconds"),
        (lambda: pool.start_defragmenter(interval=float("inf")), "a time cannot be inf seconds"),
        (lambda: batch.decode([sequence, sequence]), "the sequences at indices 0 and 1 are the same"),
        (lambda: batch.decode([sequence], [1, 2]), "2 tokens for 1 sequences"),
    ]
    before = pool.stats().as_dict()
    for call, message in calls:
        with pytest.raises(kvpool.InvalidArgument, match=message):
            call()
    after = pool.stats().as_dict()
    assert (before["used"], before["free"]) == (after["used"], after["free"])
    with pytest.raises(kvpool.SequenceError, match=r"range of tokens: got 5\.\.20, expected") as refused:
        batch.slots(sequence, 5, 20)
    value = refused.value
    assert (value.kind, value.sequence, value.what, value.index, value.got) == ("Invalid", 1, "range of tokens", None, "5..20")
    assert value.limit == "a range within its 10 tokens"
    assert isinstance(value, kvpool.InvalidArgument)
    with pytest.raises(kvpool.InvalidCacheArgument, match="hash") as refused:
        pool.prefix_cache.uncache(["no hash"])
    assert isinstance(refused.value, kvpool.CacheError)
    with pytest.raises(kvpool.SequenceError, match="sequence 1: tokens to keep: got 11, expected at most its 10"):
        sequence.truncate(11)


def test_a_step_says_which_argument_it_refuses() -> None:
    shape = kvpool.Layout(layers=1, kv_heads=1, head_dim=8, block_tokens=2**27)
    pool = kvpool.Pool(shape, 20, storage=False)
    with pool.sequence(3) as sequence, pool.begin_batch() as batch:
        batch.append(sequence, 2**31 - 1)
        with pytest.raises(kvpool.InvalidSequenceArgument, match="at most 2147483647 in all") as refused:
            batch.decode([sequence])
        assert isinstance(refused.value, kvpool.InvalidArgument)
        assert (refused.value.sequence, refused.value.kind, refused.value.what) == (3, "Invalid", "tokens")


def test_refusals_say_what_was_free(pool: kvpool.Pool) -> None:
    with pytest.raises(kvpool.OutOfBlocks, match="requested 101 blocks from a pool of 100") as refused:
        pool.try_allocate(101)
    assert (refused.value.kind, refused.value.asked, refused.value.total) == ("TooLarge", 101, 100)
    lease = pool.try_allocate(90)
    with pytest.raises(MemoryError, match="requested 20 blocks; 10 free") as refused:
        pool.try_allocate(20)
    assert (refused.value.asked, refused.value.free, refused.value.evictable) == (20, 10, 0)
    lease.close()
    leases = singles(pool, 100)
    for lease in leases[::2]:
        lease.close()
    with pytest.raises(kvpool.NoRun, match="the longest free run has") as refused:
        pool.try_allocate(8, contiguous=True)
    assert (refused.value.asked, refused.value.free) == (8, 50)
    with pool.sequence(1) as first, pool.sequence(2) as second, pool.begin_batch() as batch:
        batch.append(first, 4)
        batch.append(second, 4)
        rest = pool.try_allocate(48)
        with pytest.raises(kvpool.OutOfBlocks, match="2 of the step's sequences lack blocks") as refused:
            batch.decode([first, second])
        assert refused.value.sequences == [1, 2] and len(first) == 4
        rest.close()
    for lease in leases[1::2]:
        lease.close()


def test_handles_that_are_not_valid(pool: kvpool.Pool) -> None:
    with pool.try_allocate(2) as lease:
        handles = lease.handles
    with pytest.raises(kvpool.StaleHandle, match="is stale") as refused:
        pool.info(handles[0])
    assert refused.value.block == handles[0].block
    other = kvpool.Pool(layout(), 10)
    with pytest.raises(kvpool.ForeignHandle, match="was passed to pool"):
        other.info(handles[0])
    with pool.sequence(1) as sequence, other.begin_batch() as batch:
        with pytest.raises(kvpool.ForeignHandle, match="different pools"):
            batch.append(sequence, 1)


def test_use_after_close(pool: kvpool.Pool) -> None:
    sequence, lease, batch = pool.sequence(1), pool.try_allocate(1), pool.begin_batch()
    table = kvpool.BlockTable()
    batch.append(sequence, 1)
    call = pool.allocate(1)
    batch.finish()
    with pytest.raises(kvpool.BatchEnded):
        batch.finish()
    sequence.close()
    lease.close()
    for use in (lambda: len(sequence), lambda: sequence.fork(2), lambda: sequence.blocks):
        with pytest.raises(kvpool.Closed, match="this sequence is closed"):
            use()
    with pytest.raises(kvpool.Closed, match="this lease is closed"):
        _ = lease.blocks
    cache = pool.prefix_cache
    pool.close()
    pool.close()
    for use in (pool.stats, pool.begin_batch, lambda: pool.try_allocate(1), lambda: pool.allocate(1), cache.stats, pool.audit):
        with pytest.raises(kvpool.Closed, match="this pool is closed"):
            use()
    assert repr(pool) == "<kvpool.Pool, closed>" and repr(sequence).endswith("closed>") and table.rows == 0
    call.close()


def test_the_memory_of_a_closed_pool_lasts_as_long_as_its_blocks() -> None:
    pool = kvpool.Pool(layout(), 10)
    lease = pool.try_allocate(1)
    view = np.asarray(pool.view(lease, 0, 0))
    pool.close()
    view[:] = 1.5
    assert view.sum() == 1.5 * view.size
    del view
    lease.close()


def test_tables_of_absurd_widths_are_refused(pool: kvpool.Pool) -> None:
    for width in (2**62 + 5, 2**40, 2**24 + 1):
        with pytest.raises(kvpool.InvalidArgument, match="at most 16777216"):
            kvpool.BlockTable(width)


def test_tables_without_memory_are_refused(run_python: Callable[[str], CompletedProcess[str]]) -> None:
    script = """
import resource
import kvpool
pool = kvpool.Pool(kvpool.Layout(layers=1, kv_heads=1, head_dim=8, block_tokens=4, dtype="f32"), 100)
sequences = [pool.sequence(id) for id in range(64)]
table = kvpool.BlockTable(2**24)
resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
with pool.begin_batch() as batch:
    try:
        batch.block_table(sequences, table)
    except kvpool.InvalidArgument as error:
        print(error)
"""
    result = run_python(script)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip() == "there is no memory for a block table of 64 rows and 16777216 columns"


def test_more_batches_than_a_pool_can_have_are_refused(run_python: Callable[[str], CompletedProcess[str]]) -> None:
    script = """
import os
import kvpool
layout = kvpool.Layout(layers=1, kv_heads=1, head_dim=8, block_tokens=4, dtype="f32")
for pool in (kvpool.Pool(layout, 10), kvpool.FramePool(10)):
    batches = []
    try:
        while len(batches) < 8_000:
            batches.append(pool.begin_batch())
    except kvpool.KvPoolError as error:
        print(error.kind, len(batches), flush=True)
    batches.pop()
    batches.append(pool.begin_batch())
os._exit(0)  # the ends of so many batches take long in a debug build
"""
    result = run_python(script)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == ["TooManyBatches 4096"] * 2


def test_queues_of_events_have_a_largest_capacity() -> None:
    with pytest.raises(kvpool.KvPoolError, match="at most 16777216"):
        kvpool.Pool(layout(), 10, prefix_cache=True, events=2**40)


def test_settings_that_have_no_effect_are_refused() -> None:
    for cache in (None, False):
        for setting in ({"events": 10}, {"hashing": "keyed"}, {"hashing": "fast"}, {"hash_key": bytes(32)}):
            (name,) = setting
            with pytest.raises(kvpool.BuildError, match=f"`{name}` needs a prefix cache") as refused:
                kvpool.Pool(layout(), 10, prefix_cache=cache, **setting)
            assert (refused.value.kind, refused.value.argument) == ("NoCache", name)
    kvpool.Pool(layout(), 10, prefix_cache=True, events=10, hashing="keyed", hash_key=bytes(32))
    for device in ("host", "cuda:0"):
        with pytest.raises(kvpool.BuildError, match="a pool without storage is on no device"):
            kvpool.Pool(layout(), 10, storage=False, device=device)
    with pytest.raises(kvpool.BuildError, match="zero_on_free: got a pool without storage"):
        kvpool.Pool(layout(), 10, storage=False, zero_on_free=True)
    with pytest.raises(kvpool.InvalidArgument, match="kv_heads: got 2, expected 1, as the layout is latent"):
        kvpool.Layout(layers=1, head_dim=8, latent=True, kv_heads=2)
    with pytest.raises(kvpool.InvalidArgument, match="pass `order` or `run`, not both"):
        kvpool.FramePool(8).propose_moves(1, order=2, run=4)


def test_frames_named_more_often_than_referenced_keep_what_they_had() -> None:
    frames = kvpool.FramePool(8)
    a, b = frames.allocate(2)
    for give in (frames.keep, frames.discard):
        with pytest.raises(kvpool.KvPoolError):
            give([a, b, a])
        assert frames.references([a, b]) == [1, 1]
    assert frames.is_writable(a) and frames.is_writable(b)
    frames.keep([a, b])
    frames.take([b, a])
    with pytest.raises(kvpool.KvPoolError):
        frames.discard([b, a, b])
    assert not frames.is_writable(b), "it is cached as before"


def test_a_request_that_is_refused_evicts_nothing() -> None:
    frames = kvpool.FramePool(8)
    frames.keep(frames.allocate(8))
    for blocks in (9, 2**40):
        with pytest.raises(kvpool.OutOfBlocks):
            frames.allocate(blocks, ahead=1)
    assert frames.stats()["evictable"] == 8


def test_a_batch_that_is_dropped_caches_nothing() -> None:
    pool = kvpool.Pool(layout(), 10, prefix_cache=True)
    tokens = list(range(8))
    sequence = pool.sequence(1, tokens)
    batch = pool.begin_batch()
    batch.append(sequence, 8)
    del batch
    sequence.close()
    assert pool.stats().evictable == 0
    pool.audit()
