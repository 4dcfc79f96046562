"""LMCache's own address manager against kvpool's: the same requests in one run.

    python bindings/python/bench/lmcache_addresses.py [--rounds 20000] [--align 4096]

A heap of 8 GiB holds regions of the given sizes, in random order, up to a share of the heap. Each
round frees random regions and allocates others: with both managers, the same ones in turn, except
those that a manager refused.

| column | meaning |
|---|---|
| allocate, free | CPU time of a call, on the calling thread |
| batch | CPU time of a call for 16 regions |
| refused | share of allocations refused, for lack of a region that is long enough |
| longest | longest free region at the end, as a share of the free bytes |
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEAP = 8 << 30
BATCH = 16


class Side:
    """One manager, and what is measured of it."""

    def __init__(self, name: str, manager) -> None:
        self.name, self.manager = name, manager
        self.live: dict[int, tuple[int, int]] = {}
        self.cpu: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def call(self, part: str, function, *arguments):
        begin = time.thread_time()
        try:
            return function(*arguments)
        except RuntimeError:
            self.calls["refused"] += 1
            return None
        finally:
            self.cpu[part] += time.thread_time() - begin
            self.calls[part] += 1

    def allocate(self, number: int, size: int) -> None:
        region = self.call("allocate", self.manager.allocate, size)
        if region is not None:
            self.live[number] = region

    def batch(self, number: int, size: int) -> None:
        regions = self.call("batch", self.manager.batched_allocate, size, BATCH)
        for offset, region in enumerate(regions or ()):
            self.live[number + offset] = region

    def free(self, number: int) -> None:
        region = self.live.pop(number, None)
        if region is not None:
            self.call("free", self.manager.free, *region)

    def longest(self) -> float:
        """The longest free region, found by trying, as a share of the free bytes."""
        low, high = 0, self.manager.get_free_size()
        while high - low > 1 << 16:
            middle = (low + high) // 2
            try:
                self.manager.free(*self.manager.allocate(middle))
                low = middle
            except RuntimeError:
                high = middle
        return low / self.manager.get_free_size()


def drive(sides: list[Side], sizes: list[int], fill: float, rounds: int) -> None:
    dice = random.Random(5)
    numbers: list[int] = []
    held = 0
    sized: dict[int, int] = {}
    for number in range(0, rounds * BATCH, BATCH):
        while numbers and held > fill * HEAP:
            index = dice.randrange(len(numbers))
            numbers[index], numbers[-1] = numbers[-1], numbers[index]
            old = numbers.pop()
            held -= sized.pop(old)
            for side in sides:
                side.free(old)
        size = dice.choice(sizes)
        count = BATCH if dice.random() < 0.05 else 1
        for side in sides:
            side.batch(number, size) if count > 1 else side.allocate(number, size)
        for offset in range(count):
            numbers.append(number + offset)
            sized[number + offset] = size
            held += size


def run(rounds: int, align: int) -> None:
    import logging

    from lmcache.v1.memory_management import AddressManager as Stock

    from kvpool import lmcache

    logging.disable(logging.WARNING)
    print("| sizes | heap | manager | allocate, us | batch, us | free, us | refused | longest |")
    print("|---|---|---|---|---|---|---|---|")
    for name, sizes in (("2 MiB", [2 << 20]), ("64 KiB to 4 MiB", [(1 << 16) * n for n in range(1, 65)])):
        for fill in (0.7, 0.95):
            sides = [Side("LMCache", Stock(HEAP, align)), Side("kvpool", lmcache.AddressManager(HEAP, align))]
            drive(sides, sizes, fill, rounds)
            for side in sides:
                micros = [side.cpu[part] / side.calls[part] * 1e6 for part in ("allocate", "batch", "free")]
                tried = side.calls["allocate"] + side.calls["batch"]
                assert side.manager.check_consistency()
                print(
                    f"| {name} | {fill:.0%} | {side.name} | {' | '.join(f'{value:.1f}' for value in micros)} |"
                    f" {side.calls['refused'] / tried:.2%} | {side.longest():.0%} |"
                )


def main() -> int:
    parser = argparse.ArgumentParser(description="LMCache's address manager against kvpool's")
    parser.add_argument("--rounds", type=int, default=20000)
    parser.add_argument("--align", type=int, default=4096, help="bytes to which addresses and sizes are aligned")
    arguments = parser.parse_args()
    if "KVPOOL_ENGINE_READY" in os.environ:
        run(arguments.rounds, arguments.align)
        return 0
    sys.path.insert(0, str(HERE.parent / "tests"))
    from engines.fetch import Unavailable, environment_of, fetch, python_of

    try:
        engine = fetch("lmcache")
    except Unavailable as error:
        print(f"SKIPPED: LMCache cannot be fetched: {error}", file=sys.stderr)
        return 0
    environment = {**environment_of(engine), "KVPOOL_ENGINE_READY": "1"}
    return subprocess.run([python_of(engine), __file__, *sys.argv[1:]], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
