"""`FramePool`: frames and foreign hashes, by lists and buffers."""

from __future__ import annotations

import array
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from kvpool import FramePool
from kvpool.errors import (
    BufferRefused,
    Closed,
    ForeignHandle,
    FrameRefused,
    InvalidArgument,
    NoRun,
    OutOfBlocks,
    ResizeError,
)

FRAMES = 256


@pytest.fixture
def pool() -> Iterator[FramePool]:
    """A pool of frames 1 to 256, which is audited at the end."""
    pool = FramePool(FRAMES, magazine_frames=0)
    yield pool
    pool.audit()


def runs(frames: list[int]) -> int:
    return sum(after != before + 1 for before, after in zip(frames, frames[1:])) + 1


def test_lists_and_buffers_mean_the_same(pool: FramePool) -> None:
    listed = pool.allocate(10)
    buffer = array.array("I", [0] * 6)
    pool.allocate_into(buffer)
    assert not set(listed) & set(buffer)
    assert pool.references(buffer) == [1] * 6
    pool.share(buffer)
    assert pool.references(tuple(buffer)) == [2] * 6
    pool.free(array.array("I", buffer.tolist() * 2))
    pool.free(listed)
    assert pool.available == FRAMES
    numpy = pytest.importorskip("numpy")
    table = numpy.zeros(4, dtype=numpy.uint32)
    pool.allocate_into(table)
    pool.free(table)


def test_refused_buffers_allocate_nothing(pool: FramePool) -> None:
    for buffer in (array.array("i", [0] * 4), bytes(16), memoryview(array.array("I", range(8)))[::2], [0] * 4):
        with pytest.raises(BufferRefused):
            pool.allocate_into(buffer)
    with pytest.raises(InvalidArgument, match="entry 1: -1 is no frame number"):
        pool.free([1, -1])
    with pytest.raises(InvalidArgument, match="entry 0: 'x'"):
        pool.free(["x"])
    with pytest.raises(InvalidArgument):
        pool.allocate(0)
    with pytest.raises(OutOfBlocks) as refused:
        pool.allocate(FRAMES + 1)
    assert (refused.value.asked, refused.value.total) == (FRAMES + 1, FRAMES)
    assert pool.stats()["used"] == 0


def test_double_frees_are_named_and_change_nothing(pool: FramePool) -> None:
    a, b, c = pool.allocate(3)
    pool.free([b])
    with pytest.raises(FrameRefused) as refused:
        pool.free([a, c, b])
    assert (refused.value.kind, refused.value.index, refused.value.frame) == ("Free", 2, b)
    with pytest.raises(FrameRefused, match="listed 2 times and has 1 references") as refused:
        pool.free([a, a])
    assert (refused.value.kind, refused.value.listed) == ("Repeated", 2)
    with pytest.raises(FrameRefused, match="null block"):
        pool.discard([0])
    with pytest.raises(FrameRefused, match=f"frame {FRAMES + 1} of a pool"):
        pool.share([a, FRAMES + 1])
    assert pool.references([a, b, c]) == [1, 0, 1]
    pool.free([a, c])


def test_hashes_are_found_by_group_and_evicted_in_order(pool: FramePool) -> None:
    frames = pool.allocate(4)
    hashes = [bytes([number]) * 32 for number in range(4)]
    pool.register(frames, hashes)
    assert pool.lookup(hashes) == frames
    assert pool.lookup(hashes, group=1) == []
    assert pool.lookup([hashes[0], b"other", hashes[1]]) == frames[:1]
    keys = pool.keys(hashes)
    pool.free(frames)
    assert pool.hit(keys) == frames
    pool.free_evict_first(frames[3:])
    pool.free(frames[:3])
    assert pool.evict(1) == 1
    assert pool.lookup(hashes) == frames[:3]
    assert pool.unregister(hashes[2]) == 1
    assert pool.uncache(frames) == 2
    assert pool.stats()["evictable"] == 0
    with pytest.raises(InvalidArgument, match="entry 1: a hash is an object of type bytes"):
        pool.keys([b"a", "b"])
    with pytest.raises(FrameRefused, match="entry 1: the hash is empty"):
        pool.keys([b"a", b""])
    with pytest.raises(InvalidArgument, match="1 frames and 4 hashes"):
        pool.register(frames[:1], keys)
    with pytest.raises(ForeignHandle):
        FramePool(8).lookup(keys)


def test_groups_of_layers_are_hit_at_one_boundary(pool: FramePool) -> None:
    hashes = [bytes([block]) for block in range(1, 9)]
    full, window = pool.allocate(8), pool.allocate(2)
    pool.register(full[:6], hashes[:6])
    pool.register(window, hashes[3:5], group=1)
    pool.register(full[6:], hashes[:2], group=2)
    pool.free(full + window)
    asked: list[tuple[list[bytes], int, int | None]] = [(hashes, 0, None), (hashes, 1, 2)]
    boundary, frames = pool.hit_groups(asked)
    assert (boundary, frames) == (5, [full[:5], window])
    assert pool.references(full) == [1] * 5 + [0] * 3
    pool.free(frames[0] + frames[1])
    # A block of the third group has two units; a state needs its last block.
    units = [1, 1, 2]
    assert pool.hit_groups([*asked, (hashes[:4], 2, 1)], units) == (0, [[], [], []])
    boundary, frames = pool.hit_groups([asked[0], (hashes[:4], 2, 1), (hashes, 3, 0)], [1, 2, 1])
    assert (boundary, frames) == (4, [full[:4], [full[7]], []])
    pool.free(frames[0] + frames[1])
    for wrong in [[1], [1, 0]]:
        with pytest.raises(ValueError):
            pool.hit_groups(asked, wrong)
    with pytest.raises(FrameRefused, match="entry 2: the hash is empty"):
        pool.hit_groups([asked[0], (hashes[:2] + [b""], 1, 1)])
    assert pool.references(full + window) == [0] * 10


def test_frames_keep_contents_until_they_are_allocated(pool: FramePool) -> None:
    frames = pool.allocate(8)
    pool.keep(frames)
    assert pool.stats()["evictable"] == 8
    pool.evict(3)
    # Evicted, and not allocated since: the contents are still there.
    pool.take(frames)
    assert pool.references(frames) == [1] * 8
    with pytest.raises(FrameRefused) as refused:
        pool.take([*frames, FRAMES + 7])
    assert refused.value.index == 8
    assert pool.references(frames) == [1] * 8
    pool.keep(frames[:4])
    pool.discard(frames[4:])
    assert pool.stats()["evictable"] == 4
    with pytest.raises(FrameRefused):
        pool.keep(frames[:1])
    assert pool.reset()
    assert pool.stats()["evictable"] == 0


def test_reset_waits_for_owners(pool: FramePool) -> None:
    frames = pool.allocate(2, sequence=7)
    assert pool.owners() == [(frames[0], 1, 7), (frames[1], 1, 7)]
    pool.keep(frames[:1])
    assert not pool.reset()
    with pytest.raises(FrameRefused, match="1 frames are in use"):
        pool.clear()
    pool.free(frames[1:])
    assert pool.reset()
    assert pool.owners() == []


def test_evicting_ahead_makes_longer_runs() -> None:
    """Frames are kept in a random order: what is evicted for one request alone is scattered."""
    found = {}
    for ahead in (0, 1024):
        pool = FramePool(4096, magazine_frames=0)
        frames = pool.allocate(4096)
        random.Random(1).shuffle(frames)
        pool.keep(frames)
        found[ahead] = sum(runs(pool.allocate(64, runs=True, ahead=ahead)) for _ in range(8))
        pool.audit()
    assert found[1024] * 3 < found[0] * 2


def test_runs_and_claims(pool: FramePool) -> None:
    first = pool.allocate_run(100)
    assert pool.references(range(first, first + 100)) == [1] * 100
    ((start, length),) = pool.allocate_runs(30)
    pool.free(range(start, start + length))
    pool.claim([start, start + 2])
    with pytest.raises(FrameRefused, match="is in use"):
        pool.claim([start + 1, start + 2])
    assert pool.references([start + 1]) == [0]
    with pytest.raises(NoRun):
        pool.allocate_run(154)
    used = pool.used
    firsts = pool.allocate_equal_runs(10, 5)
    assert pool.used == used + 50
    pool.free_run(firsts[0], 10)
    with pytest.raises(FrameRefused, match=f"frame {firsts[0]} is free"):
        pool.free_run(firsts[0], 10)
    with pytest.raises(FrameRefused, match="of a pool of"):
        pool.free_run(FRAMES, 10)
    with pytest.raises(OutOfBlocks):
        pool.allocate_equal_runs(20, 10)
    assert pool.used == used + 40
    assert pool.is_writable(start)


def test_moves_are_proposed_copied_and_committed(pool: FramePool) -> None:
    frames = pool.allocate(FRAMES)
    hashes = {frame: frame.to_bytes(8, "big") for frame in frames if frame % 4 == 0}
    pool.register(list(hashes), list(hashes.values()))
    pool.free(frames)
    assert pool.fragmentation() > 0.9
    moves = pool.propose_moves(1000)
    pairs = moves.pairs()
    assert len(moves) == len(pairs) > 0
    hit = pool.hit([hashes[pairs[0][0]]])
    moved, stayed = moves.commit()
    assert [frame for frame, _ in stayed] == [pairs[0][0]] == hit
    assert all(pool.lookup([hashes[source]]) == [target] for source, target in moved)
    assert pool.fragmentation() < 0.2
    with pytest.raises(Closed):
        moves.commit()
    moves.cancel()
    pool.propose_moves(10).cancel()


def test_a_price_of_breaks_decides_which_moves_are_proposed() -> None:
    # 64 free frames in runs of 4 between stretches of cached ones, none of them at a multiple of 16.
    pool = FramePool(1088)
    frames = pool.allocate(1088)
    cached = [frame for frame in frames if frame % 68 >= 4]
    pool.register(cached, [frame.to_bytes(8, "big") for frame in cached])
    pool.free(frames)
    assert len(pool.propose_moves(1000, fragmentation_penalty=0)) > 0
    dear = [len(pool.propose_moves(1000, fragmentation_penalty=price)) for price in (1 << 20, 1 << 40)]
    assert dear == [0, 0]
    with pytest.raises(InvalidArgument):
        pool.propose_moves(1, fragmentation_penalty=-1)


def test_batches_hold_freed_frames_back(pool: FramePool) -> None:
    frames = pool.allocate(FRAMES)
    with pool.begin_batch():
        pool.free(frames)
        with pytest.raises(OutOfBlocks) as refused:
            pool.allocate(1)
        assert refused.value.retired == FRAMES
    pool.free(pool.allocate(FRAMES))


def test_resize(pool: FramePool) -> None:
    grown = FramePool(64, frames_max=256, segment_frames=64)
    grown.grow(64)
    frames = grown.allocate(128)
    grown.keep(frames)
    grown.take(frames)
    with pytest.raises(ResizeError):
        grown.shrink(64)
    grown.discard(frames)
    grown.shrink(64)
    assert grown.frames == 65
    with pytest.raises(ResizeError):
        pool.grow(1 << 20)


def test_threads_share_a_pool(pool: FramePool) -> None:
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        try:
            for _ in range(500):
                frames = pool.allocate(dice.randrange(1, 20))
                assert pool.references(frames) == [1] * len(frames)
                (pool.keep if dice.random() < 0.5 else pool.discard)(frames)
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert pool.available == FRAMES


def test_fork_is_refused(pool: FramePool, run_python) -> None:
    script = """
import os, kvpool
pool = kvpool.FramePool(8)
child = os.fork()
if child == 0:
    try:
        pool.allocate(1)
    except kvpool.errors.Forked as error:
        os._exit(0 if error.made_in == os.getppid() else 2)
    os._exit(1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    ran = run_python(script)
    assert ran.returncode == 0, ran.stderr


def test_repr_and_audit(pool: FramePool) -> None:
    pool.free(pool.allocate(3))
    assert repr(pool) == f"FramePool(frames={FRAMES}, free={FRAMES}, evictable=0, used=0)"
    assert pool.audit()["total"] == FRAMES + 1


def test_order_is_read_in_pages_from_a_cursor(pool: FramePool) -> None:
    frames = pool.allocate(FRAMES)
    order: list[int] = []
    dice = random.Random(5)
    for _ in range(60):
        kept = dice.sample([frame for frame in frames if frame not in order], dice.randrange(1, 30))
        pool.keep(kept)
        order += kept
        again = dice.sample(order, dice.randrange(0, len(order)))
        pool.take(again)
        pool.keep(again)
        order = [frame for frame in order if frame not in again] + again
        assert pool.available_after(FRAMES) == order
        at = dice.randrange(len(order))
        assert pool.available_after(9, order[at]) == order[at + 1 : at + 10]
        if len(order) > FRAMES - 30:
            gone = order[::3]
            pool.take(gone)
            order = [frame for frame in order if frame not in gone]
    pool.evict(20)
    assert pool.available_after(FRAMES) == sorted(order[:20]) + order[20:]
    assert pool.available_after(3, sorted(order[:20])[-1]) == order[20:23]
    used = next(frame for frame in frames if frame not in order)
    with pytest.raises(FrameRefused, match=f"frame {used}"):
        pool.available_after(1, used)
    pool.take(order)
    assert pool.available_after(FRAMES) == []


def test_another_thread_runs_during_calls_of_many_frames() -> None:
    count = 262_144
    pool = FramePool(count, magazine_frames=0)
    turns, is_done = [0], threading.Event()

    def spin() -> None:
        while not is_done.is_set():
            turns[0] += 1
            time.sleep(0)  # gives the GIL to the calling thread

    def has_progress(call: Callable[[], object]) -> bool:
        before = turns[0]
        call()
        return turns[0] > before

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=spin)
    thread.start()
    try:
        # The interpreter takes the GIL from no thread: the other one runs only if a call gives it away.
        sys.setswitchinterval(1000)
        frames = array.array("I", [0]) * count
        calls = {
            "allocate_into": lambda: pool.allocate_into(frames),
            "references": lambda: pool.references(frames),
            "keep": lambda: pool.keep(frames),
            "available_after": lambda: pool.available_after(count),
            "take": lambda: pool.take(frames),
            "discard": lambda: pool.discard(frames),
        }
        missing = set(calls)
        for _ in range(20):
            missing -= {name for name, call in calls.items() if has_progress(call)}
        assert not missing
    finally:
        is_done.set()
        sys.setswitchinterval(interval)
        thread.join()
    pool.audit()
