"""Code of a user, for `mypy --strict`: numpy's arrays are buffers for every Python that the package supports."""

from __future__ import annotations

import array
import copy

import kvpool
import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


def step(pool: kvpool.Pool, running: list[kvpool.Sequence], table: Int32, slots: npt.NDArray[np.int64]) -> tuple[int, int]:
    with pool.begin_batch() as batch:
        batch.append_tokens(running[0], np.arange(4, dtype=np.uint32))
        batch.slot_mapping(running[0], 0, 4, slots, at=0)
        batch.slot_mapping(running[0], 0, 4, array.array("q", [0] * 4))
        batch.csr_table(running, table, table, array.array("i", [0] * 16))
        return batch.block_table(running, table)


def grouped(pool: kvpool.Pool, tables: npt.NDArray[np.int32], slots: npt.NDArray[np.int64]) -> list[int]:
    groups = kvpool.LayerGroups([kvpool.LayerCache(kv_heads=2, head_dim=8, window=64), None, [kvpool.LayerCache(latent=64)]])
    pool = kvpool.Pool.layered(groups, memory=1 << 30, prefix_cache="lru", copier=lambda pairs: print(len(pairs)))
    sequence = pool.admit_grouped(1, np.arange(64), chunk=32, session=7).wait()
    with pool.begin_batch() as batch:
        new = batch.append_grouped([sequence], [32])[0]
        batch.append_grouped([sequence], [np.arange(4, dtype=np.uint32)])
        batch.slot_mappings([sequence], [new.start], np.array([new.stop]), [slots, None])
        return batch.block_tables([sequence], [tables, kvpool.BlockTable()])


def hints(envelope: dict[str, object], packed: bytes) -> list[int | None]:
    layout = kvpool.Layout(layers=1, head_dim=8)
    pool = kvpool.Pool(layout, 100, prefix_cache=True, hints={"pinned_bytes": 1 << 20, "longest": 60.0})
    with pool.admit(1, [1, 2, 3], session=7).wait() as sequence:
        sequence.expect_return(1.5)
    print(pool.hint(envelope)["outcomes"], pool.hint(packed)["message_id"])
    return [session.returns_at_ms for session in pool.sessions()]


def values(tier: kvpool.Tier, memory: npt.NDArray[np.uint8]) -> list[str]:
    stored = tier.put([b"key"], [memory]).wait()
    return [*stored, *tier.get([b"key"], [bytearray(10)]).wait()]


def frames(pool: kvpool.FramePool, into: npt.NDArray[np.uint32]) -> kvpool.Layout:
    pool.allocate_into(into, runs=True)
    pool.free(into)
    return copy.copy(kvpool.Layout(layers=1, head_dim=8))


def mistakes(pool: kvpool.FramePool, tier: kvpool.Tier) -> None:
    kvpool.Pool(kvpool.Layout(layers=1, head_dim=8), 100, hints={"colour": 1})  # type: ignore[arg-type]
    pool.allocate_into(7)  # type: ignore[arg-type]
    tier.put([b"key"], ["text"])  # type: ignore[list-item]
