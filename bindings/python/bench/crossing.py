"""What a call from Python costs: nanoseconds per call, the least of several rounds.

    pip install ./bindings/python numpy && python bindings/python/bench/crossing.py [--seconds 0.1]

Each line is beside the emptiest method of the package in the same run: `Call.close` of a call that has
ended takes a lock and returns. "list" and "buffer" say how numbers cross. Every operation is checked
once before it is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import timeit
from collections.abc import Callable

import kvpool
import numpy as np

SEQUENCES = 64
PROMPT = 241  # tokens of each sequence: 16 blocks, with room for 15 more tokens


def measure(operation: Callable[[], object], seconds: float) -> float:
    """Returns nanoseconds per call: the least of five rounds, without the cost of the loop."""

    def least(timed: Callable[[], object], count: int) -> float:
        return min(timeit.repeat(timed, number=count, repeat=5)) / count

    operation()
    timer = timeit.Timer(operation)
    count, taken = timer.autorange()
    count = max(1, int(count * seconds / taken))
    return (least(operation, count) - least(lambda: None, count)) * 1e9


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seconds", type=float, default=0.1, help="time of a round")
    seconds = arguments.parse_args().seconds

    layout = kvpool.Layout.named("qwen2.5-0.5b")
    pool = kvpool.Pool(layout, 10_000, storage=False)
    # Another pool: what is freed here waits for the batch of the steps below.
    steps = kvpool.Pool(layout, 10_000, storage=False)
    frames = kvpool.FramePool(10_001)
    rows: list[tuple[str, Callable[[], object]]] = []

    ended = pool.allocate(1)
    ended.close()
    rows.append(("an empty method", ended.close))
    rows.append(("read an attribute: pool.total_blocks", lambda: pool.total_blocks))

    for count in (1, 10, 64):
        blocks = "1 block" if count == 1 else f"{count} blocks"
        out = np.zeros(count, np.uint32)
        ids = np.zeros(count, np.int32)

        def lease(count: int = count) -> None:
            pool.try_allocate(count).close()

        def lease_list(count: int = count) -> list[int]:
            lease = pool.try_allocate(count)
            ids = lease.blocks
            lease.close()
            return ids

        def lease_buffer(count: int = count, ids: np.ndarray = ids) -> None:
            lease = pool.try_allocate(count)
            lease.blocks_into(ids)
            lease.close()

        def frames_list(count: int = count) -> None:
            frames.free(frames.allocate(count))

        def frames_buffer(out: np.ndarray = out) -> None:
            frames.allocate_into(out)
            frames.free(out)

        assert len(set(lease_list())) == count
        rows.append((f"lease {blocks} and close it", lease))
        rows.append(("the same with its ids, list", lease_list))
        rows.append(("the same with its ids, buffer", lease_buffer))
        rows.append((f"FramePool: allocate {blocks} and free, list", frames_list))
        rows.append((f"FramePool: allocate {blocks} and free, buffer", frames_buffer))

    sequences = [steps.sequence(id) for id in range(SEQUENCES)]
    with steps.begin_batch() as batch:
        for sequence in sequences:
            batch.append(sequence, PROMPT)
    width = 16
    batch = steps.begin_batch()
    tokens = kvpool.Pool(layout, 10_000, storage=False)
    grows, current = tokens.sequence(1_000), [tokens.begin_batch()]

    def append() -> None:
        if len(grows) >= 20_000:
            current[0].finish()  # it keeps what is truncated
            grows.truncate(0)
            current[0] = tokens.begin_batch()
        current[0].append(grows, 1)

    def decode() -> None:
        batch.decode(sequences)
        if len(sequences[0]) >= 256:  # every 15th call; no block comes or goes
            for sequence in sequences:
                sequence.truncate(PROMPT)

    table, own = np.zeros((SEQUENCES, width), np.int32), kvpool.BlockTable()
    slots = np.zeros(PROMPT, np.int64)
    assert batch.block_table(sequences, table) == (SEQUENCES, width)
    assert batch.slots(sequences[0], 0, 16) == [int(table[0, 0]) * 16 + offset for offset in range(16)]
    rows.append(("begin and finish a batch", lambda: pool.begin_batch().finish()))
    rows.append(("len(sequence)", lambda: len(grows)))
    rows.append(("len and append of one token", append))
    rows.append((f"decode: one token for each of {SEQUENCES} sequences", decode))
    rows.append((f"block table of {SEQUENCES} sequences, 16 blocks each, buffer", lambda: batch.block_table(sequences, table)))
    rows.append(("the same, BlockTable", lambda: batch.block_table(sequences, own)))
    rows.append((f"slots of {PROMPT} tokens, buffer", lambda: batch.slot_mapping(sequences[0], 0, PROMPT, slots)))
    rows.append(("the same, list", lambda: batch.slots(sequences[0], 0, PROMPT)))
    rows.append(("stats", pool.stats))

    print(f"kvpool {kvpool.__version__}, Python {sys.version.split()[0]}\n")
    print(f"{'call':62} {'ns':>9} {'of empty':>9}")
    empty = 0.0
    for name, operation in rows:
        ns = measure(operation, seconds)
        empty = empty or ns
        print(f"{name:62} {ns:9.0f} {ns / empty:8.1f}x")

    async def awaited(rounds: int) -> float:
        loop = asyncio.get_running_loop()
        best = float("inf")
        for _ in range(5):
            begin = loop.time()
            for _ in range(rounds):
                (await pool.allocate(1)).close()
            best = min(best, loop.time() - begin)
        return best / rounds * 1e9

    async def waited(rounds: int) -> float:
        loop = asyncio.get_running_loop()
        rest = pool.available_blocks
        taken = []
        for _ in range(rounds):
            lease = pool.try_allocate(rest)
            waiting = asyncio.ensure_future(pool.allocate(rest))
            await asyncio.sleep(0)
            begin = loop.time()
            lease.close()
            got = await waiting
            taken.append(loop.time() - begin)
            got.close()
        return statistics.median(taken) * 1e9

    ns = asyncio.run(awaited(20_000))
    print(f"{'await allocate(1) that need not wait, and close':62} {ns:9.0f} {ns / empty:8.1f}x")
    ns = asyncio.run(waited(300))
    print(f"{'from a free to the awaiting task, median':62} {ns:9.0f} {ns / empty:8.1f}x")
    batch.finish()
    current[0].finish()
    for sequence in [*sequences, grows]:
        sequence.close()
    pool.audit()
    steps.audit()
    tokens.audit()


if __name__ == "__main__":
    main()
