"""kvpool under LMCache: the address space of its memory allocators is a pool of frames.

    import kvpool.lmcache

    kvpool.lmcache.install()  # before LMCache builds its allocators

LMCache's ``AddressManager`` searches a sorted list of free regions under one lock. This one takes
exact runs of frames of ``align_bytes`` from a :class:`kvpool.FramePool`, from several threads at
once; ``sbrk`` grows the pool. Whole regions are freed, one or several neighbours in a call, as
LMCache does; what is not allocated, or would end inside another region, is refused by name.

It can be imported only where LMCache is installed, and refuses an LMCache whose address manager has
changed.
"""

from __future__ import annotations

import sys
import threading
import time

from lmcache import __version__
from lmcache.logging import init_logger
from lmcache.v1 import memory_management
from lmcache.v1.memory_management import AddressManager as _Stock

from ._drift import EngineChanged, check_methods
from ._kvpool import FramePool
from ._versions import check_version
from .errors import AuditError, FrameRefused, InvalidArgument, OutOfBlocks

__all__ = ["AddressManager", "EngineChanged", "check", "install"]

logger = init_logger("lmcache.kvpool")

CHECKS = 8
"""Tries of a check of consistency beside running calls."""

FRAMES_MAX = 1 << 26
"""Frames up to which ``sbrk`` can grow an address space: 256 GiB of 4 KiB frames."""


class AddressManager:
    """An address space from 0, in runs of frames. The methods are those of LMCache's class.

    ``sbrk`` grows it up to 16 times its first size, or to 65,536 frames if that is more.
    """

    ALIGN_BYTES = _Stock.ALIGN_BYTES

    def __init__(self, size: int, align_bytes: int = ALIGN_BYTES):
        self._align = align_bytes
        self._size = size
        self._pool: FramePool | None = None
        # The frames of each allocated region, by its first one. Whoever removes an entry frees the region.
        self._regions: dict[int, int] = {}
        # Calls begin only while it is None: it is set while a check waits for those that run.
        self._pause: threading.Event | None = None
        # For `sbrk` and checks only.
        self._growing = threading.Lock()
        self._grow_to(size)
        logger.info("kvpool active: an address space of %d bytes in frames of %d", size, align_bytes)

    def _grow_to(self, size: int) -> None:
        frames = size // self._align
        if self._pool is not None:
            missing = frames - self._pool.frames
            if missing > 0:
                self._pool.grow(missing)
        elif frames > 0:
            frames_max = max(frames, min(max(16 * frames, 1 << 16), FRAMES_MAX))
            self._pool = FramePool(frames, frames_max=frames_max, null_block=False, magazine_frames=0)

    @property
    def total_allocated_size(self) -> int:
        return self._pool.used * self._align if self._pool is not None else 0

    def compute_aligned_size(self, raw_size: int) -> int:
        return (raw_size + self._align - 1) & ~(self._align - 1)

    def allocate(self, size: int) -> tuple[int, int]:
        aligned = self._check_size(size)
        frames = aligned // self._align
        if self._pause is not None:
            self._wait()
        try:
            first = self._frames(aligned).allocate_run(frames)
        except OutOfBlocks as error:
            message = f"Failed to allocate memory block of size {size} because no memory is available: {error}"
            raise RuntimeError(message) from error
        self._regions[first] = frames
        return first * self._align, aligned

    def batched_allocate(self, size: int, batch_size: int) -> list[tuple[int, int]]:
        aligned = self._check_size(size)
        if batch_size < 0:
            raise RuntimeError("batch_size must be non-negative")
        if batch_size == 0:
            return []
        frames = aligned // self._align
        if self._pause is not None:
            self._wait()
        try:
            firsts = self._frames(aligned).allocate_equal_runs(frames, batch_size)
        except OutOfBlocks as error:
            message = f"Failed to batched allocate {batch_size} memory blocks of size {size}"
            raise RuntimeError(f"{message} because no enough memory is available: {error}") from error
        self._regions.update(dict.fromkeys(firsts, frames))
        return [(first * self._align, aligned) for first in firsts]

    def _frames(self, asked: int) -> FramePool:
        if self._pool is None:
            raise OutOfBlocks("the address space is empty", asked=asked)
        return self._pool

    def _check_size(self, size: int) -> int:
        # As in LMCache: a defect of the caller, and no lack of memory.
        if size <= 0:
            raise ValueError("size must be greater than 0")
        return self.compute_aligned_size(size)

    def _wait(self) -> None:
        pause = self._pause
        if pause is not None:
            pause.wait()

    def free(self, address: int, size: int):
        align = self._align
        if address % align or size % align or size <= 0 or self._pool is None:
            message = f"the region of {size} bytes at {address} is not one of this address space: it would begin and"
            raise InvalidArgument(f"{message} end at multiples of {align}")
        first, frames = address // align, size // align
        if self._pause is not None:
            self._wait()
        if (found := self._regions.pop(first, None)) != frames:
            self._take_neighbours(first, first + frames, found)
        self._pool.free_run(first, frames)

    def _take_neighbours(self, first: int, end: int, found: int | None) -> None:
        """Removes the regions from `first` to `end`, of which the first was removed and has `found`
        frames. Refuses a part of a region, and removes none."""
        regions, at, frames = self._regions, first, found
        spanned: list[tuple[int, int]] = []
        while frames is not None:
            spanned.append((at, frames))
            if at + frames >= end:
                break
            at += frames
            frames = regions.get(at)
        taken = {} if found is None else {first: found}
        if frames is not None and at + frames == end:
            # Looked at before they are removed: a refused call must not disturb frees of its neighbours.
            for at, frames in spanned[1:]:
                if regions.pop(at, None) != frames:
                    break
                taken[at] = frames
            else:
                return
            frames = None
        regions.update(taken)
        if frames is None:
            why = f"no region begins at {at * self._align}"
        else:
            why = f"it ends inside the region of {frames * self._align} bytes at {at * self._align}"
        region = f"the region of {(end - first) * self._align} bytes at {first * self._align} is not allocated"
        raise FrameRefused(f"{region}: {why}. Nothing was freed", kind="Unreferenced", index=at - first, frame=at)

    def sbrk(self, size: int):
        if size < 0:
            raise InvalidArgument(f"an address space cannot grow by {size} bytes")
        with self._growing:
            grown = self._size + self.compute_aligned_size(size)
            self._grow_to(grown)
            self._size = grown

    def get_heap_size(self) -> int:
        return self._size

    def get_free_size(self) -> int:
        return self._size - self.total_allocated_size

    def check_consistency(self) -> bool:
        # Calls that run meanwhile look like contradictions: others are held up until they have ended.
        with self._growing:
            if self._pool is None or self._is_consistent():
                return True
            pause = self._pause = threading.Event()
            try:
                for attempt in range(CHECKS):
                    time.sleep(0.001 * 2**attempt)
                    if self._is_consistent():
                        return True
                return False
            finally:
                self._pause = None
                pause.set()

    def _is_consistent(self) -> bool:
        assert self._pool is not None
        try:
            owned = self._pool.audit()["owned"]
        except AuditError:
            return False
        return owned == self._pool.used == sum(list(self._regions.values()))


def check() -> None:
    """Compares the installed LMCache with the one that this class was written for.

    Raises :class:`EngineChanged`, which names each method that differs.
    """
    engine = f"LMCache {__version__}"
    check_version("LMCache", __version__, "0.5.6")
    own = ("_check_size", "_frames", "_grow_to", "_is_consistent", "_take_neighbours", "_wait")
    check_methods(engine, _Stock, AddressManager, own=own)
    # Their public methods: one that kvpool lacks would be called on its class.
    names = [name for name in vars(_Stock) if not name.startswith("_")]
    check_methods(engine, AddressManager, object, names)


def install() -> None:
    """Makes LMCache build kvpool's address managers from now on. May be called again.

    Raises :class:`EngineChanged` if the installed LMCache differs.
    """
    check()
    memory_management.AddressManager = AddressManager
    for name, module in list(sys.modules.items()):
        if name.startswith("lmcache.") and getattr(module, "AddressManager", None) is _Stock:
            module.AddressManager = AddressManager
