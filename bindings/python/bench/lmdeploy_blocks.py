"""LMDeploy's own allocator against kvpool's, without and with compaction: the same requests in one run.

    python bindings/python/bench/lmdeploy_blocks.py [--steps 20000]

Sequences of up to 12,000 tokens come, grow by a token a step, and end, through LMDeploy's
`DefaultBlockManager`, at 90 % of the pool. All managers get the same calls.

| column | meaning |
|---|---|
| runs | maximal runs of consecutive physical blocks of a sequence when it ends, mean |
| CPU | time of a step in the block manager, on the calling thread |
| compaction | the same for proposing and committing moves, without the copies |
| moved | blocks copied per step |
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
BLOCK = 64
BLOCKS = 16384
EVERY = 8
"""Steps between two compactions."""
MOVES_MAX = 256


class Side:
    """One block manager, and what is measured of it."""

    def __init__(self, name: str, kind: type, compacts: bool = False) -> None:
        from lmdeploy.pytorch.paging.block_manager import DefaultBlockManager, base_block_manager

        stock, base_block_manager.LogicalAllocator = base_block_manager.LogicalAllocator, kind
        self.manager = DefaultBlockManager(BLOCKS, 0)
        base_block_manager.LogicalAllocator = stock
        self.name, self.compacts = name, compacts
        self.running: dict[int, SimpleNamespace] = {}
        self.cpu = self.compaction = 0.0
        self.moved = 0
        self.runs: list[int] = []
        self.blocks: list[int] = []

    def begin(self, number: int, tokens: int) -> None:
        from lmdeploy.pytorch.block import LogicalTokenBlocks

        self.running[number] = SimpleNamespace(
            logical_blocks=LogicalTokenBlocks(), num_all_ids=tokens, block_size=BLOCK, kv_token_limit=None
        )

    def step(self) -> None:
        begin = time.thread_time()
        for sequence in self.running.values():
            sequence.num_all_ids += 1
            self.manager.allocate(sequence)
        self.cpu += time.thread_time() - begin

    def compact(self) -> None:
        if self.compacts:
            begin = time.thread_time()
            tables = [sequence.logical_blocks.get_real_blocks() for sequence in self.running.values()]
            self.moved += self.manager.allocator.defragment(tables, lambda pairs: None, MOVES_MAX)
            self.compaction += time.thread_time() - begin

    def end(self, number: int) -> None:
        from kvpool import lmdeploy

        sequence = self.running.pop(number)
        table = self.manager.get_block_table(sequence)
        self.runs.append(lmdeploy.runs(table))
        self.blocks.append(len(table))
        begin = time.thread_time()
        self.manager.free(sequence)
        self.cpu += time.thread_time() - begin


def run(steps: int) -> None:
    from kvpool import lmdeploy

    sides = [
        Side("LMDeploy", lmdeploy._StockLogical),
        Side("kvpool", lmdeploy.LogicalAllocator),
        Side("kvpool, with compaction", lmdeploy.LogicalAllocator, compacts=True),
    ]
    dice = random.Random(2)
    ends: dict[int, int] = {}
    number = 0
    for step in range(steps):
        for done in [name for name, end in ends.items() if end <= step]:
            del ends[done]
            for side in sides:
                side.end(done)
        # The rest is room for the growth of all.
        free = sides[0].manager.get_num_free_gpu_blocks() - BLOCKS // 10
        while (tokens := dice.randrange(100, 12000)) // BLOCK < free:
            free -= tokens // BLOCK + 1
            number += 1
            ends[number] = step + dice.randrange(20, 600)
            for side in sides:
                side.begin(number, tokens)
        for side in sides:
            side.step()
            if step % EVERY == 0:
                side.compact()
    print(f"{number} sequences, {steps} steps, {BLOCKS} blocks of {BLOCK} tokens")
    print("| allocator | runs | of blocks | CPU, us | compaction, us | moved |")
    print("|---|---|---|---|---|---|")
    for side in sides:
        skip = len(side.runs) // 5
        runs = sum(side.runs[skip:]) / len(side.runs[skip:])
        blocks = sum(side.blocks[skip:]) / len(side.blocks[skip:])
        print(
            f"| {side.name} | {runs:.2f} | {blocks:.1f} | {side.cpu / steps * 1e6:.0f} |"
            f" {side.compaction / steps * 1e6:.0f} | {side.moved / steps:.1f} |"
        )
    for side in sides[1:]:
        held = sum(len(sequence.logical_blocks) for sequence in side.running.values())
        assert side.manager.allocator.get_phy_allocator("gpu").frames.audit()["owned"] == held


def main() -> int:
    parser = argparse.ArgumentParser(description="LMDeploy's allocator against kvpool's")
    parser.add_argument("--steps", type=int, default=20000)
    arguments = parser.parse_args()
    if "KVPOOL_ENGINE_READY" in os.environ:
        run(arguments.steps)
        return 0
    sys.path.insert(0, str(HERE.parent / "tests"))
    from engines.fetch import Unavailable, environment_of, fetch, python_of

    try:
        engine = fetch("lmdeploy")
    except Unavailable as error:
        print(f"SKIPPED: LMDeploy cannot be fetched: {error}", file=sys.stderr)
        return 0
    environment = {**environment_of(engine), "KVPOOL_ENGINE_READY": "1"}
    return subprocess.run([python_of(engine), __file__, *sys.argv[1:]], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
