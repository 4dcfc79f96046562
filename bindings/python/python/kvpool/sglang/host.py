"""Pages of SGLang's host pools as frames of a pool of kvpool."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import torch
from sglang.srt.mem_cache.pool_host.base import HostKVCache as _StockHost
from sglang.version import __version__

from .._drift import check_methods
from .._kvpool import Admin, FramePool
from .._serve import serve
from .._versions import check_version
from ..errors import FrameRefused, InvalidArgument, OutOfBlocks

__all__ = ["HostPages", "check", "check_tested", "install"]

logger = logging.getLogger("sglang.kvpool")


class HostPages:
    """The methods of ``HostKVCache`` that deal slots: pages of a pool of frames.

    :func:`install` puts them into ``HostKVCache`` itself, for all of its subclasses that do not have
    free lists of their own. ``frames`` is the pool, with its statistics, audit and runs; frame 0 holds
    the slots from 0. It is None where stock's free lists stay: in pools that were made before, and
    with decode context parallelism, where pages are freed in parts.
    """

    frames: FramePool | None = None
    admin: Admin | None = None
    """The admin interface of ``frames``, if ``KVPOOL_SGLANG_SERVE`` asks for one."""

    def clear(self):
        if not _is_on or self.dcp_size != 1:
            self.frames = self.admin = None
            return _stock["clear"](self)
        with self.lock:
            # Slots of allocations before are refused from now on.
            self.frames = FramePool(self.page_num, null_block=False, magazine_frames=0)
            if self.admin is None:
                self.admin = serve("KVPOOL_SGLANG_SERVE", self.frames, _number_of_pool())
            else:
                self.admin.set_pool(self.frames)
            self._offsets = np.arange(self.page_size, dtype=np.int64)
            self.mem_state = torch.zeros((self.logical_size,), dtype=torch.uint8, device=self.device)
            # Always empty here: what is freed can be allocated at once.
            self.release_slots, self.num_release_slots = [], 0
        logger.info("kvpool active: %d pages of %d slots of a host pool", self.page_num, self.page_size)
        if self.admin is not None:
            logger.info("kvpool serves %s at %s", self.admin.name, self.admin.address)

    def available_size(self):
        if self.frames is None:
            return _stock["available_size"](self)
        return self.frames.available * self.page_size

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if self.frames is None:
            return _stock["alloc"](self, need_size)
        pages, rest = divmod(need_size, self.page_size)
        assert rest == 0, "The requested size should be a multiple of the page size."
        if pages == 0:
            return torch.empty((0,), dtype=torch.int64)
        found = np.empty(pages, dtype=np.uint32)
        try:
            self.frames.allocate_into(found, runs=True)
        except OutOfBlocks:
            return None
        slots = found.astype(np.int64)[:, None] * self.page_size + self._offsets
        return torch.from_numpy(slots.reshape(-1))

    def free(self, indices: torch.Tensor) -> int:
        if self.frames is None:
            return _stock["free"](self, indices)
        slots = indices.cpu().numpy()
        if len(slots) == 0:
            return 0
        if len(slots) % self.page_size == 0:
            rows = slots.reshape(-1, self.page_size)
            pages = rows[:, 0] // self.page_size
            if (rows == pages[:, None] * self.page_size + self._offsets).all():
                try:
                    self.frames.free(pages.astype(np.uint32))
                    return len(slots)
                except FrameRefused:
                    pass
        return self._free_in_any_order(slots)

    def _free_in_any_order(self, slots: np.ndarray) -> int:
        """Frees pages whose slots are not in order; refuses others by name, and frees nothing."""
        known = (slots >= 0) & (slots < self.size)
        used = np.zeros(len(slots), dtype=bool)
        used[known] = np.array(self.frames.references(slots[known] // self.page_size)) > 0
        counted, counts = np.unique(slots, return_counts=True)
        refused = sorted({*slots[~used].tolist(), *counted[counts > 1].tolist()})
        assert not refused, f"Double-free detected: slots not currently allocated: {refused}."
        pages, counts = np.unique(slots // self.page_size, return_counts=True)
        part = pages[counts != self.page_size]
        if len(part):
            message = f"page {part[0]} of {self.page_size} slots would be freed in part. Nothing was freed"
            raise InvalidArgument(message)
        self.frames.free(pages.astype(np.uint32))
        return len(slots)


_DEALT = ("clear", "available_size", "alloc", "free")
_stock = {name: getattr(_StockHost, name) for name in _DEALT}
_is_on = False


_pools = itertools.count()


def _number_of_pool() -> int:
    """Returns a number that no other pool of these ranks has. Replicas have ranks of their own, which are equal."""
    group = getattr(torch, "distributed", None)
    if group is None or not group.is_available() or not group.is_initialized():
        return next(_pools)
    return group.get_rank() + next(_pools) * group.get_world_size()


def check_tested() -> str:
    """Refuses a version of SGLang that was not tested; returns its name."""
    check_version("SGLang", __version__, "0.5.23")
    return f"SGLang {__version__}"


def check() -> None:
    """Compares the installed SGLang with the one that the host pool was written for.

    Raises :class:`EngineChanged`, which names each method that differs.
    """
    engine = check_tested()
    stock = type("HostKVCache", (), _stock)
    check_methods(engine, stock, HostPages, _DEALT, own=("_free_in_any_order",))
    check_methods(engine, _StockHost, object, ["dcp_size", "logical_size", "_merge_release_slots"])


def install(part: str = "host") -> None:
    """Makes host pools that SGLang builds from now on deal pages of kvpool (``"host"``), or stock's slots
    again (``"off"``). Those that exist stay as they are.

    May be called again. Raises :class:`EngineChanged` if the installed SGLang differs.
    """
    global _is_on
    if part not in ("host", "off"):
        raise InvalidArgument(f"KVPOOL_SGLANG is {part!r}, expected one of host, off")
    if part == "host":
        check()
        for name in ("frames", "admin", "_free_in_any_order", *_DEALT):
            setattr(_StockHost, name, vars(HostPages)[name])
    _is_on = part == "host"
