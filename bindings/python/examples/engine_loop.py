"""The loop of a small engine: requests wait for memory, and steps read block tables.

Needs nothing besides kvpool. Prints what a reader can check, and ends with an audit.
"""

from __future__ import annotations

import asyncio
import random

import kvpool

LAYOUT = kvpool.Layout(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bf16")
SYSTEM_PROMPT = list(range(1_000, 1_096))  # shared by all requests: six blocks


async def admit(pool: kvpool.Pool, running: list[kvpool.Sequence], id: int, prompt: list[int], answer: int) -> None:
    """Waits for the blocks of the prompt and of the answer, and joins the running sequences."""
    sequence = await pool.admit(id, prompt, headroom=answer, timeout=30)
    with pool.begin_batch() as batch:
        cached = len(sequence)
        batch.advance(sequence)  # cannot fail: the blocks are reserved
    print(f"request {id}: {cached} of {len(prompt)} tokens were cached")
    running.append(sequence)


def step(pool: kvpool.Pool, running: list[kvpool.Sequence], table: memoryview, slots: memoryview) -> None:
    """Appends one token to each sequence, and fills the buffers that a kernel would read."""
    with pool.begin_batch() as batch:
        batch.decode(running)
        batch.block_table(running, table)
        for place, sequence in enumerate(running):
            batch.slot_mapping(sequence, len(sequence) - 1, len(sequence), slots, place)
        # ... kernels write K and V at the slots, and read what the table lists ...


async def main() -> None:
    rng = random.Random(7)
    pool = kvpool.Pool(LAYOUT, 100, prefix_cache=True)
    table = memoryview(bytearray(4 * 16 * 100)).cast("B").cast("i", [16, 100])
    slots = memoryview(bytearray(8 * 16)).cast("q")
    running: list[kvpool.Sequence] = []
    requests = []
    for id in range(12):
        prompt = SYSTEM_PROMPT + [rng.randrange(1_000) for _ in range(rng.randrange(50, 300))]
        requests.append(asyncio.create_task(admit(pool, running, id, prompt, 64)))
    ends: dict[int, int] = {}
    steps = 0
    while not all(request.done() for request in requests) or running:
        await asyncio.sleep(0)  # admissions go on
        if not running:
            continue
        step(pool, running, table, slots)
        steps += 1
        for sequence in list(running):
            if len(sequence) >= ends.setdefault(sequence.id, len(sequence) + 60):
                running.remove(sequence)
                sequence.close()  # its blocks stay cached until they are needed
    await asyncio.gather(*requests)
    cache = pool.prefix_cache
    assert cache is not None
    print(f"{steps} steps, {cache.stats().hit_rate:.0%} of the full blocks of the prompts were cached")
    pool.map().save("kvpool-map.svg")
    print("a picture of the pool is in kvpool-map.svg")
    print(pool.audit())


if __name__ == "__main__":
    asyncio.run(main())
