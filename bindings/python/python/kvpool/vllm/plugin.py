"""Puts kvpool's classes in the places where vLLM builds its own."""

from __future__ import annotations

import re
import sys
from multiprocessing import current_process
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core import block_pool, kv_cache_coordinator, kv_cache_manager, kv_cache_utils
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheConfig

from .._drift import check_methods
from .._serve import serve
from ..errors import InvalidArgument
from . import _tested
from .pool import BlockPool
from .queue import FreeQueue

__all__ = ["check", "install"]

logger = init_logger("vllm.kvpool")

_STOCK_POOL = block_pool.BlockPool
_STOCK_QUEUE = block_pool.FreeKVCacheBlockQueue
_COORDINATOR = kv_cache_coordinator.KVCacheCoordinator
_STOCK_START = _COORDINATOR.__init__
_MANAGER = kv_cache_manager.KVCacheManager
_STOCK_MANAGER = _MANAGER.__init__

# What the classes use without overriding it.
_POOL_USES = (
    "_maybe_evict_cached_block",
    "_notify_reuse",
    "_remove_cached_block_hashes",
    "get_num_free_blocks",
    "move_block_hashes",
    "unpin_blocks",
)
_QUEUE_OWN = ("clear", "discard", "keep", "remove_n", "use_groups")
_BLOCK_USES = ("_block_hash", "_block_hash_num_tokens", "block_id", "is_null", "pool", "ref_cnt", "reset_hash")
_MAP_USES = ("contain", "get_one_block", "insert", "pop")


def _make_block_hash_with_group_id(block_hash, group_id): ...


def _resolve_block_hashes(
    block_hashes, hash_block_size, block_size, *, supports_fine_grained_hash_lookup=False, alignment_tokens=None
): ...


def check() -> None:
    """Compares the installed vLLM with the one that these classes were written for.

    Raises :class:`EngineChanged`, which names each method that differs.
    """
    functions = (
        (kv_cache_utils.make_block_hash_with_group_id, _make_block_hash_with_group_id),
        (kv_cache_utils.resolve_block_hashes, _resolve_block_hashes),
    )
    _tested.check(_STOCK_POOL, BlockPool, _POOL_USES, functions, own=("_refuse_free", "audit", "compare", "held"))
    _tested.check(_STOCK_QUEUE, FreeQueue, own=_QUEUE_OWN)
    _tested.check(KVCacheBlock, object, _BLOCK_USES)
    _tested.check(block_pool.BlockHashToBlockMap, object, _MAP_USES)
    # Their own methods: one that kvpool lacks would be called on its queue.
    names = {name for name in vars(_STOCK_QUEUE) if not name.startswith("_")}
    check_methods(_tested.ENGINE, FreeQueue, object, sorted(names))
    _tested.check(kv_cache_coordinator, object, ["BlockPool"])  # type: ignore[arg-type]
    _tested.check(type(_COORDINATOR.__name__, (), {"__init__": _STOCK_START}), object, ["__init__"])
    _tested.check(KVCacheConfig, object, ["kv_cache_groups"])


def _start(self: Any, *args: Any, **kwargs: Any) -> None:
    """The constructor of vLLM's coordinator, which builds the pool without telling it the groups."""
    _STOCK_START(self, *args, **kwargs)
    queue = self.block_pool.free_block_queue
    if isinstance(queue, FreeQueue):
        queue.use_groups(self.kv_cache_config.kv_cache_groups)
        why = f" ({queue.unproven})" if queue.unproven else ""
        frames = queue.num_free_blocks
        logger.info("kvpool active in %s: %d frames, ahead %d%s", _tested.ENGINE, frames, queue.ahead, why)


def _start_manager(self: Any, *args: Any, **kwargs: Any) -> None:
    """The constructor of the scheduler's manager. An offloader has a coordinator too, whose pool is not served."""
    _STOCK_MANAGER(self, *args, **kwargs)
    queue = self.block_pool.free_block_queue
    if isinstance(queue, FreeQueue) and queue.pool is not None:
        queue.admin = serve("KVPOOL_VLLM_SERVE", queue.pool, _rank())
        if queue.admin is not None:
            logger.info("kvpool serves %s at %s", queue.admin.name, queue.admin.address)


def _rank() -> int:
    """The rank of this process: by its name, or where each rank has a scheduler, as under torchrun, by torch."""
    if named := re.fullmatch(r"EngineCore_DP(\d+)", current_process().name):
        return int(named[1])
    group = getattr(sys.modules.get("torch"), "distributed", None)
    return group.get_rank() if group and group.is_available() and group.is_initialized() else 0


def install(part: str = "pool") -> None:
    """Makes vLLM build kvpool's classes from now on: ``"pool"``, ``"queue"``, or ``"off"``.

    May be called again. Raises :class:`EngineChanged` if the installed vLLM differs.
    """
    parts = {
        "pool": (BlockPool, _STOCK_QUEUE),
        "queue": (_STOCK_POOL, FreeQueue),
        "off": (_STOCK_POOL, _STOCK_QUEUE),
    }
    if part not in parts:
        raise InvalidArgument(f"KVPOOL_VLLM is {part!r}, expected one of {', '.join(parts)}")
    if part != "off":
        check()
    kv_cache_coordinator.BlockPool, block_pool.FreeKVCacheBlockQueue = parts[part]
    _COORDINATOR.__init__ = _STOCK_START if part == "off" else _start
    _MANAGER.__init__ = _STOCK_MANAGER if part == "off" else _start_manager
