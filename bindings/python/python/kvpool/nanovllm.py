"""kvpool under nano-vllm: the blocks of its block manager are frames of a pool of kvpool.

    import kvpool.nanovllm

    kvpool.nanovllm.install()  # before the engine is made
    from nanovllm import LLM

The class is nano-vllm's, with its hashes and counts, over another list of free blocks: a sequence
gets a run of blocks where there is one, and grows behind its last block. Schedules stay the same.

It can be imported only where nano-vllm is installed, and refuses one whose manager has changed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from nanovllm.engine import scheduler
from nanovllm.engine.block_manager import BlockManager as _Stock

from ._drift import EngineChanged, check_methods
from ._kvpool import FramePool
from .errors import FrameRefused

__all__ = ["BlockManager", "EngineChanged", "check", "install"]

logger = logging.getLogger("nanovllm.kvpool")


class _FreeBlocks:
    """nano-vllm's list of free block ids: it is asked for its length and its first entry, loses
    entries by name, and gets them at its end."""

    def __init__(self, blocks: int, is_cached: Callable[[int], bool]) -> None:
        self.pool = FramePool(blocks, null_block=False, magazine_frames=0, threads=1)
        self._free = blocks
        self._is_cached = is_cached
        # Allocated in kvpool, and not yet taken by the manager.
        self._ready: deque[int] = deque()
        # Freed by the manager, and not yet in kvpool.
        self._freed: list[int] = []

    def __len__(self) -> int:
        return self._free

    def __getitem__(self, index: int) -> int:
        if index != 0:
            raise NotImplementedError("kvpool chooses the next block only")
        if not self._ready:
            self.settle()
            self._ready.extend(self.pool.allocate(1))
        return self._ready[0]

    def remove(self, block_id: int) -> None:
        if self._ready and self._ready[0] == block_id:
            self._ready.popleft()
        elif block_id in self._ready:
            self._ready.remove(block_id)
        else:
            # Cached, and hit.
            self.pool.take([block_id])
        self._free -= 1

    def append(self, block_id: int) -> None:
        self._freed.append(block_id)
        self._free += 1

    def reserve(self, blocks: int) -> None:
        """Chooses the next blocks together: in few runs."""
        self.settle()
        blocks = min(blocks, self._free)
        if blocks > 0:
            self._ready.extend(self.pool.allocate(blocks, runs=True))

    def follow(self, block_id: int) -> None:
        """Chooses the block after ``block_id``, if it is free and not cached."""
        self.settle()
        following = block_id + 1
        if following < self.pool.frames and not self._is_cached(following):
            try:
                self.pool.claim([following])
            except FrameRefused:
                return
            self._ready.append(following)

    def settle(self) -> None:
        """Gives freed blocks, and chosen ones that were not taken, to kvpool: one list each."""
        if self._ready:
            self._freed.extend(self._ready)
            self._ready.clear()
        if self._freed:
            cached = [block_id for block_id in self._freed if self._is_cached(block_id)]
            if len(cached) < len(self._freed):
                self.pool.discard([block_id for block_id in self._freed if not self._is_cached(block_id)])
            if cached:
                self.pool.keep(cached)
            self._freed.clear()


class BlockManager(_Stock):
    """A ``BlockManager`` whose blocks are frames of a pool of kvpool."""

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(num_blocks, block_size)
        self.free_block_ids = _FreeBlocks(num_blocks, self._is_cached)
        logger.info("kvpool active: %d blocks", num_blocks)

    @property
    def frames(self) -> FramePool:
        """The pool: its statistics, audit and owners."""
        self.free_block_ids.settle()
        return self.free_block_ids.pool

    def _is_cached(self, block_id: int) -> bool:
        block = self.blocks[block_id]
        return block.hash != -1 and self.hash_to_block_id.get(block.hash) == block_id

    def allocate(self, seq: Any, *more: Any):
        self.free_block_ids.reserve(seq.num_blocks)
        try:
            return super().allocate(seq, *more)
        finally:
            self.free_block_ids.settle()

    def deallocate(self, seq: Any):
        if any(self.blocks[block_id].ref_count < 1 for block_id in seq.block_table):
            self._refuse_free(seq)
        super().deallocate(seq)
        self.free_block_ids.settle()

    def _refuse_free(self, seq: Any) -> None:
        for index, block_id in enumerate(seq.block_table):
            if self.blocks[block_id].ref_count < 1:
                message = f"entry {index}: block {block_id} is freed twice: it has no references. Nothing was freed"
                raise FrameRefused(message, kind="Unreferenced", index=index, frame=block_id)

    def can_append(self, seq: Any) -> bool:
        return len(seq) % self.block_size != 1 or len(self.free_block_ids) > 0

    def may_append(self, seq: Any):
        rest = len(seq) % self.block_size
        if rest == 1:
            self.free_block_ids.follow(seq.block_table[-1])
            super().may_append(seq)
            self.free_block_ids.settle()
        elif rest == 0:
            super().may_append(seq)
        else:
            # Most calls: nothing to do.
            assert self.blocks[seq.block_table[-1]].hash == -1


def check() -> None:
    """Compares the installed nano-vllm with the one that this class was written for.

    Raises :class:`EngineChanged`, which names each method that differs.
    """

    class Expected:
        """The signatures on which the class relies; ``allocate`` passes further ones on."""

        def __init__(self, num_blocks, block_size): ...
        def deallocate(self, seq): ...
        def may_append(self, seq): ...
        def can_append(self, seq): ...
        def can_allocate(self, seq): ...

    check_methods("nano-vllm", _Stock, Expected, ["allocate", "_allocate_block", "_deallocate_block"])
    check_methods("nano-vllm", scheduler, object, ["BlockManager"])  # type: ignore[arg-type]


def install() -> None:
    """Makes nano-vllm's scheduler build kvpool's block manager from now on. May be called again.

    Raises :class:`EngineChanged` if the installed nano-vllm differs.
    """
    check()
    scheduler.BlockManager = BlockManager
