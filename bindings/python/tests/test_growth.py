"""Growth in line, and preemption, of sequences with several lists."""

from __future__ import annotations

import asyncio

import kvpool
import pytest

HEADS = {"kv_heads": 1, "head_dim": 4}
ALL = kvpool.LayerCache(**HEADS)
WINDOW = kvpool.LayerCache(**HEADS, window=20)


def test_growth_waits_for_all_lists() -> None:
    pool = kvpool.Pool.layered(kvpool.LayerGroups([WINDOW, ALL] * 2), blocks=40, prefix_cache=True)
    events = pool.prefix_cache.events()

    async def main() -> None:
        first, second = [await pool.admit_grouped(id, [id] * 80) for id in (1, 2)]
        with pool.begin_batch() as batch:
            batch.append_grouped([first, second], [80, 80])
        with pytest.raises(kvpool.OutOfBlocks):
            second.reserve(200)
        with pytest.raises(kvpool.Timeout):
            await pool.reserve_grouped(second, 200, timeout=0.02)
        growing = asyncio.create_task(pool.reserve_grouped(second, 200))
        await asyncio.sleep(0.01)
        with pytest.raises(kvpool.Busy):
            second.reserve(1)
        held = first.held_blocks
        report = first.preempt()
        assert (report.id, report.freed_blocks + report.cached_blocks, first.closed) == (1, held, True)
        assert report.tokens_kept + report.tokens_lost == 80
        await growing
        assert second.reserved_blocks > 0
        with pytest.raises(kvpool.Closed):
            first.preempt()

    asyncio.run(main())
    groups = {event.group for event in events.drain() if event.kind == "stored"}
    assert groups == {0, 1}
    pool.audit()
