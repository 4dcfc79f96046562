"""Owners of blocks: which request holds what, and which blocks nobody accounts for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_manager import KVCacheManager

__all__ = ["Owners", "owners"]


@dataclass
class Owners:
    """The owners of the blocks of a :class:`KVCacheManager`."""

    requests: dict[str, list[int]] = field(default_factory=dict)
    """Block ids by request, over all groups of layers."""
    unaccounted: dict[int, int] = field(default_factory=dict)
    """Number of references on a block that are in no request's table: held by a connector or a copy
    in flight, or leaked."""

    def __str__(self) -> str:
        lines = [f"{request}: {len(ids)} blocks" for request, ids in self.requests.items()]
        if self.unaccounted:
            lines.append(f"in no table: {self.unaccounted}")
        return "\n".join(lines) or "no blocks in use"


def owners(manager: KVCacheManager) -> Owners:
    """Returns who holds the blocks of ``manager``. Visits all blocks."""
    found = Owners()
    tables: Counter[int] = Counter()
    pool = manager.block_pool
    for group in manager.coordinator.single_type_managers:
        if group.block_pool is not pool:
            continue
        for request, blocks in group.req_to_blocks.items():
            ids = [block.block_id for block in blocks if not block.is_null]
            found.requests.setdefault(request, []).extend(ids)
            tables.update(ids)
    for block in pool.blocks:
        missing = block.ref_cnt - tables[block.block_id]
        if missing and not block.is_null:
            found.unaccounted[block.block_id] = missing
    return found
