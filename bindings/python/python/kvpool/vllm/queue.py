"""vLLM's queue of free blocks, over a :class:`kvpool.FramePool`.

A block is in the queue if it has no references. In kvpool its frame is then free, or cached without
references if vLLM found its contents worth keeping. vLLM keeps its hashes, events and reference
counts; kvpool decides which frames are dealt out:

* frames without contents first, then those that were freed first;
* in few runs, chosen among more frames than the request needs, which are evicted ahead. Their
  contents are found until they are dealt out: vLLM's hashes stay until then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from .._kvpool import Admin, FramePool
from ..errors import FrameRefused, InvalidArgument, OutOfBlocks
from ._settings import number
from . import groups as kinds

__all__ = ["FreeQueue"]

# Blocks that one call reads, from the first to the last one of an iteration.
_PAGE_MIN, _PAGE_MAX = 64, 4096


class FreeQueue:
    """Free blocks. The order of ``popleft_n`` is kvpool's; all names are those of vLLM's queue.

    The ids of ``blocks`` are consecutive, from 0, or from 1 if block 0 is the null block.
    """

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        first = blocks[0].block_id if blocks else 1
        ids = range(first, first + len(blocks))
        if first > 1 or any(block.block_id != block_id for block, block_id in zip(blocks, ids)):
            raise ValueError("the ids of the blocks are not consecutive from 0 or 1")
        self.num_free_blocks = len(blocks)
        self.pool = FramePool(len(blocks), null_block=first == 1, threads=1, magazine_frames=0) if blocks else None
        """The pool, for its statistics, audit and owners."""
        self.admin: Admin | None = None
        """Its admin interface, if ``KVPOOL_VLLM_SERVE`` asks for one."""
        self._blocks: list[KVCacheBlock | None] = [None] * first + list(blocks)
        # More frames ahead make longer runs, and evict less in the order of use.
        self.ahead = min(number("KVPOOL_VLLM_AHEAD", int, len(blocks) // 128), len(blocks) // 8)
        self.on_short: Callable[[], None] | None = None
        """Called when blocks are missing, before a request is refused: moves in flight hold some."""
        self.unproven: str | None = None
        """The group for which nothing is evicted ahead, and why."""
        self.states: str | None = None
        """A group of states of any kind: its blocks are not moved."""

    def use_groups(self, groups: list[Any]) -> None:
        """Takes the groups that the blocks are dealt out to. Called before the first request.

        Nothing is evicted ahead if a group holds states of a kind that has not been compared.
        """
        self.states = kinds.unproven(groups, ())
        self.unproven = kinds.unproven(groups, kinds.PROVEN)
        if self.unproven is None:
            return
        if os.environ.get("KVPOOL_VLLM_AHEAD") is not None and self.ahead:
            raise InvalidArgument(f"KVPOOL_VLLM_AHEAD is {self.ahead}, expected 0: {self.unproven}")
        self.ahead = 0

    def popleft(self) -> KVCacheBlock:
        """Takes one block. The first of a new queue is block 0: vLLM makes it the null block."""
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        if self.num_free_blocks == len(self._blocks):
            self.remove(self._blocks[0])
            return self._blocks[0]
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Takes ``n`` blocks, in few runs of ids, in ascending order."""
        if n == 0:
            return []
        assert self.num_free_blocks >= n
        try:
            frames = self.pool.allocate(n, runs=True, ahead=self.ahead)
        except OutOfBlocks:
            if self.on_short is None:
                raise
            self.on_short()
            frames = self.pool.allocate(n, runs=True)
        self.num_free_blocks -= n
        blocks = self._blocks
        return [blocks[frame] for frame in frames]

    def remove(self, block: KVCacheBlock) -> None:
        """Takes a block with its contents."""
        self.remove_n([block.block_id])

    def remove_n(self, ids: list[int]) -> None:
        """Takes blocks with their contents, by id."""
        self.pool.take(ids)
        self.num_free_blocks -= len(ids)

    def append(self, block: KVCacheBlock) -> None:
        """Puts a block back, to be evicted last."""
        self.keep([block.block_id])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Puts blocks back, to be evicted after all others, in this order."""
        if blocks:
            self.keep([block.block_id for block in blocks])

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Puts blocks back whose contents are not needed again."""
        if blocks:
            self.discard([block.block_id for block in blocks])

    def keep(self, ids: list[int]) -> None:
        """Puts blocks back by id, with contents worth keeping."""
        self.pool.keep(ids)
        self.num_free_blocks += len(ids)

    def discard(self, ids: list[int]) -> None:
        """Puts blocks back by id, without contents."""
        self.pool.discard(ids)
        self.num_free_blocks += len(ids)

    def clear(self) -> None:
        """Forgets all contents. All blocks are in the queue."""
        if self.pool is not None:
            self.pool.clear()

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All free blocks, those to be evicted first before the others. O(blocks)."""
        if self.pool is None:
            return []
        blocks = self._blocks
        return [blocks[frame] for frame in self.pool.available_after(len(blocks))]

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Free blocks after ``cursor``, in the order of eviction: none after a block in use.

        Blocks are read in pages. The first call reads the whole pool.
        """
        after, page, blocks = None if cursor is None else cursor.block_id, _PAGE_MIN, self._blocks
        while self.pool is not None:
            try:
                frames = self.pool.available_after(page, after)
            except FrameRefused:
                return
            for frame in frames:
                if not blocks[frame].ref_cnt:  # not taken since the page was read
                    yield blocks[frame]
            if len(frames) < page:
                return
            after, page = frames[-1], min(2 * page, _PAGE_MAX)
