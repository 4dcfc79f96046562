"""kvpool under LMCache: the address space of its memory allocators is a pool of frames.

    import kvpool.lmcache

    kvpool.lmcache.install()  # before LMCache builds its allocators

LMCache's ``AddressManager`` searches a sorted list of free regions under one lock. This one takes
exact runs of frames of ``align_bytes`` from a :class:`kvpool.FramePool`, from several threads at
once; ``sbrk`` grows the pool. A region that is freed twice, or was never allocated, is refused by
name.

It can be imported only where LMCache is installed, and refuses an LMCache whose address manager has
changed.
"""

from __future__ import annotations

import sys
import threading

from lmcache.v1 import memory_management
from lmcache.v1.memory_management import AddressManager as _Stock

from ._drift import EngineChanged, check_methods
from ._kvpool import FramePool
from .errors import AuditError, InvalidArgument, OutOfBlocks

__all__ = ["AddressManager", "EngineChanged", "check", "install"]

FRAMES_MAX = 1 << 26
"""Frames up to which ``sbrk`` can grow an address space: 256 GiB of 4 KiB frames."""


class AddressManager:
    """An address space from 0, in runs of frames. The methods are those of LMCache's class.

    ``frames_max`` bounds :meth:`sbrk`; by default it is 16 times the first size.
    """

    ALIGN_BYTES = _Stock.ALIGN_BYTES

    def __init__(self, size: int, align_bytes: int = ALIGN_BYTES):
        self._align = align_bytes
        self._size = size
        self._pool: FramePool | None = None
        # For `sbrk` only.
        self._growing = threading.Lock()
        self._grow_to(size)

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
        try:
            frame = self._frames(aligned).allocate_run(aligned // self._align)
        except OutOfBlocks as error:
            message = f"Failed to allocate memory block of size {size} because no memory is available: {error}"
            raise RuntimeError(message) from error
        return frame * self._align, aligned

    def batched_allocate(self, size: int, batch_size: int) -> list[tuple[int, int]]:
        aligned = self._check_size(size)
        if batch_size < 0:
            raise RuntimeError("batch_size must be non-negative")
        if batch_size == 0:
            return []
        try:
            firsts = self._frames(aligned).allocate_equal_runs(aligned // self._align, batch_size)
        except OutOfBlocks as error:
            message = f"Failed to batched allocate {batch_size} memory blocks of size {size}"
            raise RuntimeError(f"{message} because no enough memory is available: {error}") from error
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

    def free(self, address: int, size: int):
        frame, offset = divmod(address, self._align)
        frames, rest = divmod(size, self._align)
        if offset or rest or frames <= 0 or self._pool is None:
            message = f"the region of {size} bytes at {address} is not one of this address space: it would begin and"
            raise InvalidArgument(f"{message} end at multiples of {self._align}")
        self._pool.free_run(frame, frames)

    def sbrk(self, size: int):
        with self._growing:
            grown = self._size + self.compute_aligned_size(size)
            self._grow_to(grown)
            self._size = grown

    def get_heap_size(self) -> int:
        return self._size

    def get_free_size(self) -> int:
        return self._size - self.total_allocated_size

    def check_consistency(self) -> bool:
        if self._pool is None:
            return True
        try:
            return self._pool.audit()["owned"] * self._align == self.total_allocated_size
        except AuditError:
            return False


def check() -> None:
    """Compares the installed LMCache with the one that this class was written for.

    Raises :class:`EngineChanged`, which names each method that differs.
    """
    from lmcache import __version__

    engine = f"LMCache {__version__}"
    check_methods(engine, _Stock, AddressManager, own=("_check_size", "_frames", "_grow_to"))
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
