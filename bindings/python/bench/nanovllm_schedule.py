"""nano-vllm's own block manager against kvpool's: the same requests, two schedulers, in one run.

    python bindings/python/bench/nanovllm_schedule.py [--requests 3000]

nano-vllm's `Scheduler` runs without a device. The schedules have to be identical at each step;
otherwise the script fails. nano-vllm comes from the package index (`nano-vllm-fork`, a copy of its
main branch: upstream has no package).

| column | meaning |
|---|---|
| runs | maximal runs of consecutive ids in the table of a completed sequence, mean |
| hit rate | share of prompt tokens found in blocks of other sequences |
| CPU | time of `schedule` and `postprocess` per step, on the calling thread |
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
BLOCK = 256
SEQUENCES = 40
"""At once. As many as always fit: this version's scheduler fails when it preempts, with either manager."""


class Side:
    """A scheduler with one of the managers, and what is measured of it."""

    def __init__(self, name: str, manager: type, blocks: int) -> None:
        from nanovllm.engine import scheduler

        stock, scheduler.BlockManager = scheduler.BlockManager, manager
        config = SimpleNamespace(
            max_num_seqs=SEQUENCES, max_num_batched_tokens=16384, eos=-1, kvcache_block_size=BLOCK, num_kvcache_blocks=blocks
        )
        self.scheduler = scheduler.Scheduler(config)
        scheduler.BlockManager = stock
        self.name = name
        self.cpu = 0.0
        self.runs: list[int] = []
        self.blocks: list[int] = []
        self.prompt = self.hits = 0

    def step(self, dice: random.Random) -> tuple:
        """One step. Returns what was scheduled: it must not depend on the manager."""
        begin = time.thread_time()
        seqs, is_prefill = self.scheduler.schedule()
        self.cpu += time.thread_time() - begin
        seen = (is_prefill, [(seq.number, len(seq), seq.num_cached_tokens) for seq in seqs])
        if is_prefill:
            self.prompt += sum(len(seq) for seq in seqs)
            self.hits += sum(seq.num_cached_tokens for seq in seqs)
        tokens = [dice.randrange(1000) for _ in seqs]
        for seq in seqs:
            if seq.num_completion_tokens + 1 == seq.max_tokens:
                table = seq.block_table
                self.runs.append(sum(b != a + 1 for a, b in zip(table, table[1:])) + 1)
                self.blocks.append(len(table))
        begin = time.thread_time()
        self.scheduler.postprocess(seqs, tokens)
        self.cpu += time.thread_time() - begin
        return seen


def compare(requests: int, blocks: int = 1200, seed: int = 7) -> tuple[list[Side], int]:
    """Runs both managers over the same requests. Raises AssertionError where their schedules differ."""
    from nanovllm.engine.block_manager import BlockManager as Stock
    from nanovllm.engine.sequence import Sequence
    from nanovllm.sampling_params import SamplingParams

    from kvpool import nanovllm

    sides = [Side("nano-vllm", Stock, blocks), Side("kvpool", nanovllm.BlockManager, blocks)]
    dice = random.Random(seed)
    prefixes = [[dice.randrange(1000) for _ in range(BLOCK * dice.randrange(1, 12))] for _ in range(20)]
    left, steps = requests, 0
    tokens = [random.Random(seed), random.Random(seed)]
    while left or not all(side.scheduler.is_finished() for side in sides):
        live = len(sides[0].scheduler.waiting) + len(sides[0].scheduler.running)
        for _ in range(min(left, dice.randrange(4), SEQUENCES - live)):
            left -= 1
            prompt = dice.choice(prefixes) + [dice.randrange(1000) for _ in range(dice.randrange(1, 3000))]
            params = SamplingParams(max_tokens=dice.randrange(1, 400), ignore_eos=True)
            for side in sides:
                seq = Sequence(prompt, params)
                seq.number = requests - left
                side.scheduler.add(seq)
        if any(side.scheduler.is_finished() for side in sides):
            assert all(side.scheduler.is_finished() for side in sides)
            continue
        seen = [side.step(tokens[index]) for index, side in enumerate(sides)]
        assert seen[0] == seen[1], f"step {steps}: {seen}"
        steps += 1
    return sides, steps


def run(requests: int) -> None:
    sides, steps = compare(requests)
    print(f"{requests} requests, {steps} steps with identical schedules")
    print("| manager | runs | of blocks | hit rate | CPU of a step, us |")
    print("|---|---|---|---|---|")
    for side in sides:
        runs, blocks = sum(side.runs) / len(side.runs), sum(side.blocks) / len(side.blocks)
        rate = side.hits / side.prompt
        print(f"| {side.name} | {runs:.2f} | {blocks:.2f} | {rate:.2%} | {side.cpu / steps * 1e6:.0f} |")
    print(f"audit: {sides[1].scheduler.block_manager.frames.audit()}")


def main() -> int:
    parser = argparse.ArgumentParser(description="nano-vllm's block manager against kvpool's")
    parser.add_argument("--requests", type=int, default=3000)
    arguments = parser.parse_args()
    if "KVPOOL_ENGINE_READY" in os.environ:
        run(arguments.requests)
        return 0
    sys.path.insert(0, str(HERE.parent / "tests"))
    from engines.fetch import Unavailable, environment_of, fetch, python_of

    try:
        engine = fetch("nano-vllm-fork")
    except Unavailable as error:
        print(f"SKIPPED: nano-vllm cannot be fetched: {error}", file=sys.stderr)
        return 0
    environment = {**environment_of(engine), "KVPOOL_ENGINE_READY": "1"}
    return subprocess.run([python_of(engine), __file__, *sys.argv[1:]], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
