"""kvpool under LMDeploy's PyTorch engine: physical blocks are frames of a pool of kvpool.

    import kvpool.lmdeploy

    kvpool.lmdeploy.install()  # before the engine is made

Sequences of LMDeploy list *logical* blocks, and a map says where they are. So kvpool chooses places
by runs, and blocks in use can move between two steps: :meth:`LogicalAllocator.defragment` copies
the blocks of sequences in pieces to one run each, and changes the map.

It can be imported only where LMDeploy is installed, and refuses one whose allocator has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import lmdeploy
import numpy as np
from lmdeploy.pytorch.paging.block_manager import base_block_manager as _module
from lmdeploy.utils import get_logger

from ._drift import EngineChanged, check_methods
from ._kvpool import FramePool
from ._versions import check_version
from .errors import Closed, FrameRefused, NoRun, OutOfBlocks

__all__ = ["EngineChanged", "LogicalAllocator", "Moves", "PhysicalAllocator", "check", "install"]

logger = get_logger("lmdeploy")

_StockLogical = _module.LogicalAllocator
_StockPhysical = _module.PhysicalAllocator


def runs(places: np.ndarray) -> int:
    """The number of maximal runs of consecutive places."""
    return int(np.count_nonzero(np.diff(places) != 1)) + 1 if len(places) else 0


class PhysicalAllocator(_StockPhysical):
    """Places of one device, in runs."""

    def __init__(self, num_blocks: int, offset: int = 0):
        self._num_blocks = num_blocks
        self._offset = offset
        self._free_count = num_blocks
        self.frames = FramePool(num_blocks, null_block=False, magazine_frames=0, threads=1) if num_blocks else None
        """The pool: its statistics, audit and owners. Frame 0 is the first place of the device."""

    def allocate(self, num_blocks: int):
        if num_blocks > self._free_count:
            raise MemoryError("No enough free memory blocks.")
        if num_blocks == 0:
            return np.empty((0,), dtype=np.int64)
        places = np.empty((num_blocks,), dtype=np.uint32)
        self.frames.allocate_into(places, runs=True)
        self._free_count -= num_blocks
        return places.astype(np.int64) + self._offset

    def allocate_run(self, num_blocks: int) -> np.ndarray:
        """Takes consecutive places. Raises :class:`kvpool.errors.NoRun` if there are none."""
        first = self.frames.allocate_run(num_blocks)
        self._free_count -= num_blocks
        return np.arange(first, first + num_blocks, dtype=np.int64) + self._offset

    def free(self, blocks: np.ndarray):
        if len(blocks) > 0:
            self.frames.free((np.asarray(blocks) - self._offset).astype(np.uint32))
            self._free_count += len(blocks)
        return blocks


class Moves:
    """Blocks to copy between two steps: ``pairs`` of source and destination, both physical.

    Destinations are taken until :meth:`commit` or :meth:`cancel`.
    """

    def __init__(self, allocator: LogicalAllocator, logical: np.ndarray, sources: np.ndarray, targets: np.ndarray):
        self._allocator: LogicalAllocator | None = allocator
        self._logical, self._sources, self._targets = logical, sources, targets
        # By its number and place alone, a block that was freed and allocated again is the same.
        self._generations = allocator._generations[logical]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self._sources.tolist(), self._targets.tolist()))

    def _end(self) -> LogicalAllocator:
        allocator, self._allocator = self._allocator, None
        if allocator is None:
            raise Closed("these moves were committed or cancelled already")
        return allocator

    def commit(self) -> int:
        """The copies are made: the map changes. Blocks that were freed, swapped or shared meanwhile
        stay. Returns the number of blocks that moved."""
        allocator = self._end()
        stays = allocator._generations[self._logical] != self._generations
        stays |= allocator.get_ref_count(self._logical) != 1
        moves = ~stays
        places = allocator.get_phy_allocator("gpu")
        allocator.update_phy_map(self._logical[moves], self._targets[moves])
        places.free(np.concatenate([self._sources[moves], self._targets[stays]]))
        return int(np.count_nonzero(moves))

    def cancel(self) -> None:
        """Nothing has moved."""
        self._end().get_phy_allocator("gpu").free(self._targets)


class LogicalAllocator(_StockLogical):
    """A ``LogicalAllocator`` whose physical blocks are frames of a pool of kvpool."""

    def __init__(self, num_cpu_blocks: int, num_gpu_blocks: int, num_gpu_reserved: int = 0) -> None:
        super().__init__(num_cpu_blocks, num_gpu_blocks, num_gpu_reserved)
        self._gpu_allocator = PhysicalAllocator(num_gpu_blocks - num_gpu_reserved, num_gpu_reserved)
        self._cpu_allocator = PhysicalAllocator(num_cpu_blocks, self._cpu_mem_offset)
        self._marks = np.zeros(self._num_blocks, dtype=np.int64)
        # How often each logical block was freed, or got another place.
        self._generations = np.zeros(self._num_blocks, dtype=np.int64)
        logger.info("kvpool active: %d blocks on the device, %d on the host", num_gpu_blocks, num_cpu_blocks)

    def free(self, blocks: np.ndarray):
        if len(blocks) == 0:
            return
        self.add_ref_count(blocks, -1)
        counts = self.get_ref_count(blocks)
        if counts.min() < 0:
            self.add_ref_count(blocks, 1)
            self._refuse_free(blocks, counts)
        self.update_access_time(blocks)
        freed = blocks[counts == 0]
        if len(freed) > 1:
            # A block that is listed once for each of its references is free once: at the last one.
            order = np.arange(len(freed))
            self._marks[freed] = order
            is_last = self._marks[freed] == order
            freed = freed if is_last.all() else freed[is_last]
        if len(freed) == 0:
            return
        self._generations[freed] += 1
        used = self._num_blocks - self._free_count
        self._free_blocks[used - len(freed) : used] = freed
        self._free_count += len(freed)
        places = self.get_physical_blocks(freed)
        is_gpu = places < self._cpu_mem_offset
        if is_gpu.all():
            self._gpu_allocator.free(places)
        else:
            self._gpu_allocator.free(places[is_gpu])
            self._cpu_allocator.free(places[~is_gpu])

    def update_phy_map(self, log_blocks: np.ndarray, phy_blocks: np.ndarray):
        super().update_phy_map(log_blocks, phy_blocks)
        self._generations[log_blocks] += 1

    def _refuse_free(self, blocks: np.ndarray, counts: np.ndarray) -> None:
        index = int(np.argmax(counts < 0))
        block = int(blocks[index])
        message = f"entry {index}: logical block {block} is freed more often than it has references. Nothing was freed"
        raise FrameRefused(message, kind="Unreferenced", index=index, frame=block)

    def propose_moves(self, tables: Iterable[np.ndarray], moves_max: int) -> Moves:
        """Proposes to bring each of these sequences into one run, as far as there is room: those
        first whose runs cost the fewest copies. ``tables`` are lists of logical blocks.

        At most ``moves_max`` blocks move, and only those with one reference: others may be read
        asynchronously, by their places.
        """
        offset = self.cpu_mem_offset()
        wanted = []
        for table in tables:
            places = self.get_physical_blocks(table)
            fixed = np.flatnonzero((self.get_ref_count(table) != 1) | (places >= offset))
            first = int(fixed[-1]) + 1 if len(fixed) else 0
            pieces = runs(places[first:])
            if pieces > 1:
                wanted.append(((pieces - 1) / (len(table) - first), table[first:], places[first:]))
        wanted.sort(key=lambda entry: -entry[0])
        chosen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        gpu = self.get_phy_allocator("gpu")
        for _, logical, places in wanted:
            if len(logical) > moves_max:
                continue
            try:
                targets = gpu.allocate_run(len(logical))
            except (NoRun, OutOfBlocks):
                continue
            moves_max -= len(logical)
            chosen.append((logical, places, targets))
        if not chosen:
            chosen = [(np.empty((0,), dtype=np.int64),) * 3]
        return Moves(self, *(np.concatenate(column) for column in zip(*chosen)))

    def defragment(
        self, tables: Iterable[np.ndarray], copy: Callable[[list[tuple[int, int]]], None], moves_max: int = 256
    ) -> int:
        """Moves blocks between two steps, and returns their number.

        ``copy`` copies the pairs of physical blocks on all workers, in every layer. If it raises,
        nothing has moved.
        """
        moves = self.propose_moves(tables, moves_max)
        if not moves.pairs:
            moves.cancel()
            return 0
        try:
            copy(moves.pairs)
        except BaseException:
            moves.cancel()
            raise
        return moves.commit()


def check() -> None:
    """Compares the installed LMDeploy with the one that these classes were written for.

    Raises :class:`EngineChanged`, which names each method that differs.
    """
    engine = f"LMDeploy {lmdeploy.__version__}"
    check_version("LMDeploy", lmdeploy.__version__, "0.18.0")
    uses = ["add_ref_count", "cpu_mem_offset", "get_phy_allocator", "get_physical_blocks", "get_ref_count"]
    own = ("_refuse_free", "defragment", "propose_moves")
    check_methods(engine, _StockLogical, LogicalAllocator, uses, own=own)
    check_methods(engine, _StockPhysical, PhysicalAllocator, ["get_num_free_blocks"], own=("allocate_run",))


def install() -> None:
    """Makes LMDeploy's block managers build kvpool's allocators from now on. May be called again.

    Raises :class:`EngineChanged` if the installed LMDeploy differs.
    """
    check()
    _module.LogicalAllocator = LogicalAllocator
    _module.PhysicalAllocator = PhysicalAllocator
