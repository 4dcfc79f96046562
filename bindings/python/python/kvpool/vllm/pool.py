"""vLLM's block pool, over a :class:`kvpool.FramePool`.

The class is vLLM's, with another queue of free blocks, and with loops that pass whole lists to it.
Hashes, events, metrics and reference counts stay vLLM's. What is added: places in few runs, double
frees that are refused by name, an audit, and a list of the blocks in use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core import block_pool as stock
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)
from vllm.v1.request import Request

from .._drift import check_methods
from ..errors import FrameRefused
from ._tested import ENGINE
from .metrics import Meter
from .queue import FreeQueue

__all__ = ["BlockPool"]


# Attributes of a pool that the class reads, or sets for methods that it inherits.
_USES = (
    "_reuse_watchers",
    "blocks",
    "cached_block_hash_to_block",
    "cached_block_hashes_by_block",
    "enable_caching",
    "enable_kv_cache_events",
    "free_block_queue",
    "hash_block_size",
    "metrics_collector",
    "null_block",
    "num_gpu_blocks",
)


class BlockPool(stock.BlockPool):
    """A ``BlockPool`` whose blocks are frames of a pool of kvpool."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        check_methods(ENGINE, self, object, _USES)
        # The null block has left vLLM's own queue, and the others leave it now.
        for block in self.blocks:
            block.prev_free_block = block.next_free_block = None
        self.free_block_queue = FreeQueue(self.blocks[1:])
        self.meter = Meter(self)

    @property
    def frames(self) -> Any:
        """The :class:`kvpool.FramePool`: its statistics, audit and compaction."""
        return self.free_block_queue.pool

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        queue = self.free_block_queue
        if num_blocks > queue.num_free_blocks:
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        blocks = queue.popleft_n(num_blocks)
        if self._reuse_watchers:
            self._notify_reuse(blocks)
        if self.metrics_collector or self.enable_kv_cache_events:
            for block in blocks:
                if self.enable_caching:
                    self._maybe_evict_cached_block(block)
                assert block.ref_cnt == 0
                block.ref_cnt = 1
                if self.metrics_collector:
                    self.metrics_collector.on_block_allocated(block)
            return blocks
        by_hash = self.cached_block_hash_to_block._cache
        further = self.cached_block_hashes_by_block
        for block in blocks:
            assert block.ref_cnt == 0
            block.ref_cnt = 1
            key = block._block_hash
            if key is None:
                continue
            if block.block_id in further:
                self._remove_cached_block_hashes(block)
                continue
            # As `_remove_cached_block_hashes`, for the usual case: one block of this hash.
            known = by_hash.pop(key, None)
            if known is not block:
                if known is not None:
                    by_hash[key] = known
                self._remove_cached_block_hashes(block)
                continue
            block._block_hash = block._block_hash_num_tokens = None
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        # Before anything is counted: an error leaves all as it was.
        unused = {block.block_id: None for block in blocks if block.ref_cnt == 0 and not block.is_null}
        if unused:
            self.free_block_queue.remove_n(list(unused))
        metrics = self.metrics_collector
        for block in blocks:
            if block.is_null:
                continue
            block.ref_cnt += 1
            if metrics:
                metrics.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        discard: list[int] = []
        # Without caching, no contents are worth keeping.
        keep: list[int] = [] if self.enable_caching else discard
        other_pools: dict[stock.BlockPool, list[KVCacheBlock]] = {}
        blocks = list(ordered_blocks)
        self.meter.note_freed(blocks)
        rest = iter(blocks)
        for block in rest:
            # The usual case. The null block has no references.
            if block.ref_cnt == 1 and block.pool is self:
                block.ref_cnt = 0
            else:
                pool = block.pool
                if block.is_null:
                    continue
                if pool is not None and pool is not self:
                    other_pools.setdefault(pool, []).append(block)
                    continue
                block.ref_cnt = count = block.ref_cnt - 1
                if count < 0:
                    self._refuse_free(blocks, len(blocks) - 1 - sum(1 for _ in rest))
                if count:
                    continue
            if block._block_hash is None:
                discard.append(block.block_id)
            else:
                keep.append(block.block_id)
        queue = self.free_block_queue
        if discard:
            queue.discard(discard)
        if keep and keep is not discard:
            queue.keep(keep)
        for pool, others in other_pools.items():
            pool.free_blocks(others)

    def _refuse_free(self, blocks: list[KVCacheBlock], index: int) -> None:
        """Undoes the frees up to ``index``, and names the block there, which had no references."""
        for block in blocks[: index + 1]:
            if not block.is_null and (block.pool is self or block.pool is None):
                block.ref_cnt += 1
        block_id = blocks[index].block_id
        raise FrameRefused(
            f"entry {index}: block {block_id} is freed twice: it has no references. Nothing was freed",
            kind="Unreferenced",
            index=index,
            frame=block_id,
        )

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        if self.enable_kv_cache_events or block_mask is not None:
            super().cache_full_blocks(
                request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask
            )
            return
        if num_cached_blocks >= num_full_blocks:
            return
        hashes = resolve_block_hashes(request.block_hashes, self.hash_block_size, block_size)
        hashes = hashes[num_cached_blocks:num_full_blocks]
        group = make_block_hash_with_group_id(b"", kv_cache_group_id)
        by_hash = self.cached_block_hash_to_block._cache
        num_tokens = num_cached_blocks * block_size
        for block, block_hash in zip(blocks[num_cached_blocks:num_full_blocks], hashes):
            num_tokens += block_size
            if block.is_null:
                continue
            if block._block_hash is not None:
                # Found by a part of its contents so far.
                assert block._block_hash_num_tokens is not None
                assert block._block_hash_num_tokens < num_tokens
                self._remove_cached_block_hashes(block)
            key = block_hash + group
            block._block_hash = key
            block._block_hash_num_tokens = num_tokens
            if by_hash.setdefault(key, block) is not block:
                self.cached_block_hash_to_block.insert(key, block)

    def reset_prefix_cache(self) -> bool:
        if not super().reset_prefix_cache():
            return False
        self.free_block_queue.clear()
        self.meter.audit(self.audit, self.num_gpu_blocks - 1)
        return True

    def get_usage(self) -> float:
        usage = super().get_usage()
        # vLLM asks when it collects statistics, once in a step.
        self.meter.note_step(is_idle=not usage)
        return usage

    def held(self) -> list[tuple[int, int]]:
        """The blocks in use, in ascending order: pairs of block id and number of references."""
        return [(block.block_id, block.ref_cnt) for block in self.blocks if block.ref_cnt and not block.is_null]

    def audit(self) -> dict[str, int]:
        """Recounts every frame, and compares kvpool's state of each block with vLLM's count."""
        counts = self.frames.audit()
        self.compare(1, self.num_gpu_blocks)
        return counts

    def compare(self, first: int, end: int) -> None:
        """Compares kvpool's state of some blocks with vLLM's count."""
        for block, in_use in zip(self.blocks[first:end], self.frames.references(range(first, end))):
            if (block.ref_cnt > 0) != (in_use > 0):
                raise FrameRefused(
                    f"block {block.block_id} has {block.ref_cnt} references in vLLM and {in_use} in kvpool",
                    kind="Audit",
                    frame=block.block_id,
                )
