"""Several Python threads on one pool, against a list of free ids behind a lock, in one run.

    pip install ./bindings/python && python bindings/python/bench/threads.py [--calls 100000]

Each thread allocates blocks, holds them for some calls, and frees them. The figures are nanoseconds of
the process's CPU time to allocate blocks and free them again, the median of rounds that take turns:
with four threads, what is more than with one is the price of locks and of handing the GIL on. The last
column is the wall time of as many calls with four threads as with one: with the GIL, threads take
turns; without it (`python3.14t`) they run at once. The pools are audited at the end.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
import threading
import time
from collections.abc import Callable

import kvpool

BLOCKS = 100_000
HELD = 16  # allocations that a thread holds
ROUNDS = 5


class LockedList:
    """A stack of free ids behind a lock, without owners or checks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = list(range(BLOCKS))

    def allocate(self, count: int) -> list[int]:
        with self._lock:
            if len(self._free) < count:
                raise MemoryError
            ids = self._free[-count:]
            del self._free[-count:]
            return ids

    def free(self, ids: list[int]) -> None:
        with self._lock:
            self._free.extend(ids)


def measure(allocate: Callable[[int], object], free: Callable[..., object], threads: int, count: int, calls: int) -> tuple[float, float]:
    """Returns the seconds of CPU time and of wall time for `calls` calls, shared among the threads."""
    start = threading.Barrier(threads + 1)

    def work() -> None:
        held: collections.deque[object] = collections.deque()
        start.wait()
        for _ in range(calls // threads):
            held.append(allocate(count))
            if len(held) > HELD:
                free(held.popleft())
        while held:
            free(held.popleft())

    running = [threading.Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    cpu, wall = time.process_time(), time.perf_counter()
    start.wait()
    for thread in running:
        thread.join()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000, help="calls of a round")
    calls = parser.parse_args().calls
    layout = kvpool.Layout.named("qwen2.5-0.5b")
    pool = kvpool.Pool(layout, BLOCKS, storage=False)
    frames = kvpool.FramePool(BLOCKS)
    locked = LockedList()
    rows: dict[str, tuple[Callable[[int], object], Callable[..., object]]] = {
        "list behind a lock": (locked.allocate, locked.free),
        "FramePool, lists": (frames.allocate, frames.free),
        "leases": (pool.try_allocate, kvpool.Lease.close),
    }
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(f"Python {sys.version.split()[0]}, {'with' if gil else 'without'} the GIL")
    print("| pool | blocks of a call | one thread, ns | four threads, ns | wall, four / one |")
    print("|---|---|---|---|---|")
    for count in (1, 10, 64):
        found: dict[tuple[str, int], list[tuple[float, float]]] = collections.defaultdict(list)
        for _ in range(ROUNDS):
            for name, (allocate, free) in rows.items():
                for threads in (1, 4):
                    found[name, threads].append(measure(allocate, free, threads, count, calls))
        for name in rows:
            (cpu_one, one), (cpu_four, four) = (
                [statistics.median(column) for column in zip(*found[name, threads])] for threads in (1, 4)
            )
            print(f"| {name} | {count} | {cpu_one / calls * 1e9:.0f} | {cpu_four / calls * 1e9:.0f} | {four / one:.2f} |", flush=True)
    assert len(set(locked._free)) == BLOCKS
    assert pool.audit().owned == 0 and frames.audit()["owned"] == 0
    assert pool.available_blocks == frames.available == BLOCKS


if __name__ == "__main__":
    main()
