"""The loop of an engine for a model whose layers differ: windows, states, and layers that keep all tokens.

    python hybrid_engine.py [config.json]

Needs nothing besides kvpool. The engine holds the bytes: here a number for each entry and state, which stands for
what a kernel computes from all tokens so far. It reads back what each next token sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from array import array
from collections import defaultdict

import kvpool

CHUNK = 128  # tokens of a step
SYSTEM_PROMPT = list(range(1_000, 1_400))  # shared by all requests

MODEL = [
    *[kvpool.LayerCache(bytes=256 << 10, state=True)] * 2,
    kvpool.LayerCache(kv_heads=2, head_dim=128, window=64),
    kvpool.LayerCache(kv_heads=2, head_dim=128),
] * 6


class Engine:
    def __init__(self, groups: kvpool.LayerGroups) -> None:
        self.groups = groups
        # Room for eight sequences of 700 tokens, with the states and blocks that stay cached.
        blocks = 8 * groups.frames_held(700)
        self.pool = kvpool.Pool.layered(groups, blocks=blocks, prefix_cache=True, copier=self.move)
        self.memory: dict[int, dict[tuple[int, int], int]] = defaultdict(dict)  # by frame; group, and entry or 0
        self.compared = self.restored = self.hit = self.preempted = self.moved = 0

    def copy(self, copies: list[tuple[int, int, int]]) -> None:
        for _, source, target in copies:
            self.memory[target] = dict(self.memory[source])

    def move(self, pairs: list[tuple[int, int]]) -> None:
        """Copies frames when the pool moves blocks, for a run of frames. Called on another thread."""
        self.copy([(0, *pair) for pair in pairs])
        self.moved += len(pairs)

    def places(
        self, batch: kvpool.Batch, sequence: kvpool.GroupedSequence, group: kvpool.LayerGroup, start: int, stop: int
    ) -> list[tuple[int, int, int]]:
        """Positions of the last tokens of entries, and their frames and offsets, in all lists of a group."""
        found: list[tuple[int, int, int]] = []
        per = (group.block_tokens or 1) // group.ratio
        for list_ in group.lists:
            slots = array("q", bytes(8 * (stop - start)))
            count = batch.entry_mapping([sequence], [start], [stop], list_, group.ratio, slots)
            ends = range(start // group.ratio * group.ratio + group.ratio - 1, stop, group.ratio)
            found += [(end, *divmod(slot, per)) for end, slot in zip(ends, slots[:count], strict=True)]
        return found

    def step(self, batch: kvpool.Batch, sequence: kvpool.GroupedSequence, tokens: list[int], new: int | list[int]) -> None:
        """Appends to a sequence, and writes what its layers compute."""
        (appended,) = batch.append_grouped([sequence], [new])
        self.copy(appended.copies)
        self.restored += bool(appended.copies)
        for number, group in enumerate(self.groups.groups):
            if group.state is not None:
                before, after = hash(tuple(tokens[: appended.start])), hash(tuple(tokens[: appended.stop]))
                for frame in sequence.states[group.state]:
                    # A kernel goes on from the state behind the tokens before; at position 0 it initializes it.
                    assert appended.start == 0 or self.memory[frame][number, 0] == before, "a state is of other tokens"
                    self.memory[frame][number, 0] = after
            for end, frame, at in self.places(batch, sequence, group, appended.start, appended.stop):
                self.memory[frame][number, at] = hash(tuple(tokens[: end + 1]))

    def check(self, batch: kvpool.Batch, sequence: kvpool.GroupedSequence, tokens: list[int]) -> None:
        """Reads what the next token sees."""
        for number, group in enumerate(self.groups.groups):
            first = max(0, len(sequence) + 1 - group.tokens) if group.kind == "window" and group.tokens else 0
            if group.kind == "chunk" and group.tokens:
                first = len(sequence) // group.tokens * group.tokens
            for end, frame, at in self.places(batch, sequence, group, first, len(sequence)):
                assert self.memory[frame][number, at] == hash(tuple(tokens[: end + 1])), f"token {end} is lost"
                self.compared += 1

    async def serve(self, id: int, tokens: list[int], answer: int) -> list[int]:
        """Computes a prompt and its answer, and returns all tokens."""
        chunk: int | None = CHUNK
        while True:
            # Waits for its blocks: of a window, those of one chunk. Without `chunk` no append can be refused.
            admission = self.pool.admit_grouped(id, tokens, headroom=answer, chunk=chunk, session=id % 100, timeout=30)
            with await admission as sequence:  # closed at the end: its blocks stay cached until they are needed
                self.hit += len(sequence)
                try:
                    return await self.run(sequence, tokens, answer)
                except kvpool.OutOfBlocks:
                    self.preempted += 1
                    chunk = None

    async def run(self, sequence: kvpool.GroupedSequence, tokens: list[int], answer: int) -> list[int]:
        prompt = len(tokens)
        while len(sequence) < prompt:
            with self.pool.begin_batch() as batch:
                cut = sequence.next_cut or prompt  # where states are kept for later prompts
                self.step(batch, sequence, tokens, min(cut - len(sequence), CHUNK))
                if len(sequence) == cut < prompt:
                    with contextlib.suppress(kvpool.OutOfBlocks):
                        self.copy(batch.checkpoint(sequence))
            await asyncio.sleep(0)  # other requests go on
        for _ in range(answer):
            tokens = [*tokens, random.randrange(1_000)]
            with self.pool.begin_batch() as batch:
                self.step(batch, sequence, tokens, tokens[-1:])
            await asyncio.sleep(0)
        with self.pool.begin_batch() as batch:
            self.check(batch, sequence, tokens)
        return tokens


def show(groups: kvpool.LayerGroups) -> None:
    print(f"{groups.layers} layers in frames of {groups.frame_bytes:,} bytes; hits every {groups.hit_tokens} tokens")
    print(f"{'group':>5}  {'keeps':<22} {'layers':>6} {'block':>12} {'frames':>6}  lists")
    for number, group in enumerate(groups.groups):
        keeps = {"window": f"window {group.tokens}", "chunk": f"chunk {group.tokens}", "compressed": f"1 in {group.ratio}"}
        shares = "" if group.shares_blocks_of is None else f", as {group.shares_blocks_of}"
        block = "state" if group.block_tokens is None else f"{group.block_tokens} tokens"
        lists = f"{group.lists[0]} to {group.lists[-1]}" if group.lists else "none: a run"
        words = keeps.get(group.kind, group.kind) + shares
        print(f"{number:>5}  {words:<22} {len(group.layers):>6} {block:>12} {group.block_frames:>6}  {lists}")


async def main() -> None:
    random.seed(7)
    if sys.argv[1:]:
        groups = kvpool.LayerGroups.from_config(sys.argv[1], step_tokens=CHUNK)
    else:
        groups = kvpool.LayerGroups(MODEL, step_tokens=CHUNK)
    show(groups)
    engine = Engine(groups)
    prompts = {id: SYSTEM_PROMPT + [random.randrange(1_000) for _ in range(random.randrange(20, 200))] for id in range(6)}
    asked = 0
    for turn in range(2):  # each conversation goes on with what was said
        asked += sum(map(len, prompts.values()))
        served = await asyncio.gather(*(engine.serve(turn * 100 + id, prompt, 12) for id, prompt in prompts.items()))
        prompts = {id: [*tokens, *range(30)] for id, tokens in enumerate(served)}
    report, cache = engine.pool.audit(), engine.pool.prefix_cache
    assert cache is not None and report.owned == 0 and engine.compared > 0
    print(f"{asked:,} tokens of prompts, {engine.hit:,} of them hit; states restored {engine.restored} times")
    print(f"{engine.pool.total_blocks:,} blocks, {cache.stats().evicted_blocks:,} evicted, {engine.moved} moved; {engine.preempted} requests preempted")
    print(f"{engine.compared:,} entries read back: nothing lost, nothing corrupt")


if __name__ == "__main__":
    asyncio.run(main())
