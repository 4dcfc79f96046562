"""vLLM's queue of free blocks, over a :class:`kvpool.FramePool`.

A block is in the queue if it has no references. In kvpool its frame is then free, or cached without
references if vLLM found its contents worth keeping. vLLM keeps its hashes, events and reference
counts; kvpool decides which frames are dealt out:

* frames without contents first, then those that were freed first;
* in few runs, chosen among more frames than the request needs, which are evicted ahead. Their
  contents are found until they are dealt out: vLLM's hashes stay until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from .._kvpool import FramePool
from ..errors import OutOfBlocks
from ._settings import number
from ._tested import ENGINE

__all__ = ["FreeQueue"]

logger = init_logger("vllm.kvpool")


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
        self._blocks: list[KVCacheBlock | None] = [None] * first + list(blocks)
        # More frames ahead make longer runs, and evict less in the order of use.
        self._ahead = min(number("KVPOOL_VLLM_AHEAD", int, len(blocks) // 128), len(blocks) // 8)
        # Lists of ids in the order in which they were put back: to be evicted last, or, as tuples,
        # first.
        self._log: list[list[int] | tuple[int, ...]] = []
        self._logged = 0
        self.on_short: Callable[[], None] | None = None
        """Called when blocks are missing, before a request is refused: moves in flight hold some."""
        logger.info("kvpool active in %s: %d frames, ahead %d", ENGINE, len(blocks), self._ahead)

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
            frames = self.pool.allocate(n, runs=True, ahead=self._ahead)
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
        self._note(ids)

    def discard(self, ids: list[int]) -> None:
        """Puts blocks back by id, without contents."""
        self.pool.discard(ids)
        self.num_free_blocks += len(ids)
        self._note(tuple(ids))

    def note_moved(self, moved: list[tuple[int, int]]) -> None:
        """Notes blocks in the queue whose contents are in other blocks now."""
        self._note(tuple(source for source, _ in moved))
        self._note([target for _, target in moved])

    def clear(self) -> None:
        """Forgets all contents. All blocks are in the queue."""
        if self.pool is not None:
            self.pool.clear()
        self._log.clear()
        self._logged = 0

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All free blocks, those to be evicted first before the others. O(blocks)."""
        blocks = self._blocks
        return [blocks[block_id] for block_id in self._order()]

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Free blocks after ``cursor``, in the order of eviction. O(blocks)."""
        order = self._order()
        start = 0
        if cursor is not None:
            start = order.index(cursor.block_id) + 1 if cursor.block_id in order else len(order)
        blocks = self._blocks
        for block_id in order[start:]:
            yield blocks[block_id]

    def _note(self, ids: list[int] | tuple[int, ...]) -> None:
        self._log.append(ids)
        self._logged += len(ids)
        if self._logged > 4 * len(self._blocks):
            kept, first = self._last_places()
            self._log = [tuple(first), kept]
            self._logged = len(kept) + len(first)

    def _last_places(self) -> tuple[list[int], list[int]]:
        """The free blocks to be evicted last and first, in that order each."""
        if self.pool is None:
            return [], []
        first = 1 if self._blocks[0] is None else 0
        references = self.pool.references(range(first, len(self._blocks)))
        is_free = {first + i for i, count in enumerate(references) if not count}
        kept: list[int] = []
        discarded: list[int] = []
        for ids in reversed(self._log):
            place = discarded if isinstance(ids, tuple) else kept
            for block_id in reversed(ids):
                if block_id in is_free:
                    is_free.remove(block_id)
                    place.append(block_id)
        kept.reverse()
        return kept, discarded[::-1] + sorted(is_free)

    def _order(self) -> list[int]:
        kept, discarded = self._last_places()
        return discarded + kept
