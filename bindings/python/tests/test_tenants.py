"""Tenants: quotas and floors, by the numbers that the pool counts."""

from __future__ import annotations

import kvpool
import pytest

from conftest import layout


def test_a_tenant_keeps_to_its_quota_and_its_floor() -> None:
    block = layout().bytes_per_block
    pool = kvpool.Pool(layout(), 20, prefix_cache=True, tenants={7: {"quota": 8 * block, "floor": 4 * block}, 8: {}})
    tokens = layout().block_tokens
    first = pool.sequence(1, range(6 * tokens), tenant=7)
    with pool.begin_batch() as batch:
        batch.append(first, 6 * tokens)
    with pytest.raises(kvpool.OverQuota):
        first.reserve(3 * tokens)
    first.close()
    (seven, eight) = pool.tenants()
    assert (seven.id, seven.held_bytes, seven.cached_bytes, seven.refused_requests) == (7, 6 * block, 6 * block, 1)
    assert (eight.id, eight.held_bytes, eight.quota_bytes) == (8, 0, None)
    # Others get what is beyond its floor.
    second = pool.sequence(2, tenant=8)
    with pytest.raises(kvpool.OutOfBlocks):
        second.reserve(17 * tokens)
    second.reserve(16 * tokens)
    assert pool.tenants()[0].held_bytes == 4 * block
    second.close()
    pool.set_tenant(7, quota=2 * block)
    with pytest.raises(kvpool.InvalidArgument):
        pool.set_tenant(7, quota=block, floor=2 * block)
    pool.audit()


def test_a_grouped_sequence_counts_for_its_tenant() -> None:
    heads = {"kv_heads": 1, "head_dim": 4}
    groups = kvpool.LayerGroups([kvpool.LayerCache(**heads, window=20), kvpool.LayerCache(**heads)] * 2)
    tenants = {7: {"quota": 30 * groups.frame_bytes}, 8: {}}
    pool = kvpool.Pool.layered(groups, blocks=100, prefix_cache=True, tenants=tenants)
    first = pool.try_admit_grouped(1, range(100), tenant=7)
    (seven, eight) = pool.tenants()
    held = 100 - pool.stats().free
    assert held > 1 and (seven.held_bytes, eight.held_bytes) == (held * groups.frame_bytes, 0)
    with pytest.raises(kvpool.OverQuota):
        pool.try_admit_grouped(2, range(1_000, 1_400), tenant=7)
    with pytest.raises(kvpool.OverQuota):
        pool.admit_grouped(2, range(1_000, 1_400), tenant=7).wait()
    second = pool.admit_grouped(2, range(1_000, 1_200), tenant=8).wait()
    assert pool.tenants()[1].held_bytes > 0
    with pytest.raises(kvpool.InvalidArgument):
        pool.try_admit_grouped(3, range(9), tenant=9)
    first.close()
    second.close()
