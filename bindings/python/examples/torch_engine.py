"""An engine on PyTorch whose kernels read and write the pool's memory, on the host or on a CUDA device.

    python torch_engine.py [DEVICE] [STEPS]

Needs torch, and for a device (`cuda:0`) a build with the feature `cuda`. Every step writes K and V of
its tokens at the slots of the pool, then reads all tokens of all sequences through the block table,
on the stream of its batch, and counts elements that are wrong. Meanwhile sequences fork, end, are
swapped out and return, and a defragmenter moves blocks. Prints what was done, and ends with an audit.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from typing import Any, Literal

import kvpool
import torch  # type: ignore[import-not-found,unused-ignore]

TOKENS = 16
LAYOUT = kvpool.Layout(layers=2, kv_heads=4, head_dim=64, block_tokens=TOKENS, dtype="f32")
FRAMES, RUNNING = 600, 16
SIDES: tuple[Literal["k"], Literal["v"]] = ("k", "v")
PARTS = [(layer, part) for layer in range(2) for part in SIDES]


class Engine:
    """Sequences with their tokens, which determine what must be in the memory of each."""

    def __init__(self, device: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.device = torch.device("cpu" if device == "host" else device)
        self.pool = kvpool.Pool(LAYOUT, FRAMES, prefix_cache=True, device=device)
        self.swap = kvpool.Pool(LAYOUT, FRAMES)
        self.planes = [torch.from_dlpack(self.pool.plane(layer, part)) for layer, part in PARTS]
        self.streams: list[Any] = [torch.cuda.Stream(self.device) for _ in range(2)] if device != "host" else [None]
        self.wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        self.synchronize()
        self.running: list[tuple[kvpool.Sequence, list[int]]] = []
        self.swapped: list[tuple[kvpool.Sequence, list[int]]] = []
        self.next_id = 1
        self.done = dict.fromkeys(("steps", "tokens read", "cached tokens", "forks", "swaps"), 0)

    def synchronize(self) -> None:
        """Waits for all streams: those of the batches do not wait for the default stream, nor it for them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def begin(self) -> tuple[kvpool.Batch, Any]:
        """Begins a batch on one of the streams, by turns."""
        stream = self.streams[self.done["steps"] % len(self.streams)]
        # Tokens of the step before are read in this one, on the other stream.
        for other in self.streams if stream else []:
            stream.wait_stream(other)
        return (self.pool.begin_batch(stream=stream.cuda_stream) if stream else self.pool.begin_batch()), stream

    def admit(self) -> None:
        """Opens a sequence: one of a few prompts, in part cached, with tokens of its own behind it."""
        base = self.random.randrange(4)
        prompt = [base * 1_000 + at for at in range(160)] + [self.random.randrange(9_999) for _ in range(40)]
        sequence = self.pool.sequence(self.next_id, prompt)
        self.next_id += 1
        self.done["cached tokens"] += len(sequence)
        self.running.append((sequence, prompt))

    def fork(self) -> None:
        """Forks a sequence: both share its blocks until one of them writes."""
        sequence, tokens = self.random.choice(self.running)
        self.running.append((sequence.fork(self.next_id), list(tokens)))
        self.next_id += 1
        self.done["forks"] += 1

    async def exchange(self) -> None:
        """Swaps a sequence out, or one in."""
        if self.swapped and self.random.random() < 0.5:
            sequence, tokens = self.swapped.pop()
            sequence, _ = await self.pool.resume(sequence, timeout=10)
            self.running.append((sequence, tokens))
        else:
            sequence, tokens = self.running.pop(self.random.randrange(len(self.running)))
            _, there = await self.pool.preempt(sequence, swap=self.swap, timeout=10)
            assert there is not None
            self.swapped.append((there, tokens))
        self.done["swaps"] += 1

    def step(self) -> None:
        """Appends to every sequence, writes the new tokens, and reads all of them."""
        batch, stream = self.begin()
        with batch, torch.cuda.stream(stream) if stream else torch.inference_mode():
            new_slots: list[int] = []
            new_values: list[int] = []
            for sequence, tokens in self.running:
                begin = len(sequence)
                if begin == len(tokens):
                    tokens.append(self.random.randrange(9_999))
                    batch.append_tokens(sequence, tokens[begin:])
                else:
                    batch.advance(sequence)  # the prompt, announced when the sequence was opened
                new_slots += batch.slots(sequence, begin, len(tokens))
                new_values += tokens[begin:]
            width = max(len(sequence.blocks) for sequence, _ in self.running)
            table = torch.zeros((len(self.running), width), dtype=torch.int32)
            batch.block_table([sequence for sequence, _ in self.running], table.numpy())
            expected = torch.full((len(self.running), width * TOKENS), -1)
            for row, (_, tokens) in enumerate(self.running):
                expected[row, : len(tokens)] = torch.tensor(tokens)
            slots, values = torch.tensor(new_slots).to(self.device), torch.tensor(new_values).to(self.device)
            table, expected = table.long().to(self.device), expected.to(self.device)
            for place, plane in enumerate(self.planes):
                added = place / 4
                plane[slots // TOKENS, slots % TOKENS] = (values + added)[:, None, None].expand(-1, 4, 64)
                there = plane[table].flatten(1, 2)
                right = there == (expected + added)[:, :, None, None]
                self.wrong += (~right & (expected >= 0)[:, :, None, None]).sum()
        self.done["steps"] += 1
        self.done["tokens read"] += sum(len(tokens) for _, tokens in self.running)

    def close_some(self) -> None:
        """Closes the sequences that are long enough; some of their blocks stay cached."""
        for entry in [entry for entry in self.running if len(entry[1]) > 210 + entry[0].id % 32]:
            self.running.remove(entry)
            entry[0].close()


async def main(device: str, steps: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    engine = Engine(device, seed)
    begun = time.monotonic()
    with engine.pool.start_defragmenter(threshold=0.0, interval=0.001, share=1.0) as defragmenter:
        for step in range(steps):
            while len(engine.running) < RUNNING:
                engine.admit()
            engine.step()
            if step % 7 == 3:
                engine.fork()
            if step % 5 == 4:
                await engine.exchange()
            engine.close_some()
        moved = (await defragmenter.stop()).as_dict()
    engine.synchronize()
    wrong = int(engine.wrong)
    for sequence, _ in [*engine.running, *engine.swapped]:
        await engine.pool.settled(engine.pool.stats().oldest_batch or 0, timeout=10)
        sequence.close()
    print(f"{device}: {engine.done}, {time.monotonic() - begun:.1f} s, {wrong} wrong elements")
    print(f"defragmenter: {moved}")
    assert wrong == 0, f"seed {seed}"
    while engine.pool.stats().batches_in_flight:
        await asyncio.sleep(0.001)
    print(engine.pool.audit())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "host", int(sys.argv[2]) if len(sys.argv) > 2 else 300))
