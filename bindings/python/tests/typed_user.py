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


def values(tier: kvpool.Tier, memory: npt.NDArray[np.uint8]) -> list[str]:
    stored = tier.put([b"key"], [memory]).wait()
    return [*stored, *tier.get([b"key"], [bytearray(10)]).wait()]


def frames(pool: kvpool.FramePool, into: npt.NDArray[np.uint32]) -> kvpool.Layout:
    pool.allocate_into(into, runs=True)
    pool.free(into)
    return copy.copy(kvpool.Layout(layers=1, head_dim=8))


def mistakes(pool: kvpool.FramePool, tier: kvpool.Tier) -> None:
    pool.allocate_into(7)  # type: ignore[arg-type]
    tier.put([b"key"], ["text"])  # type: ignore[list-item]
