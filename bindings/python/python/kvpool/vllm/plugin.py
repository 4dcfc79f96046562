"""Puts kvpool's classes in the places where vLLM builds its own."""

from __future__ import annotations

import os
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.v1.core import block_pool, kv_cache_coordinator, kv_cache_utils
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheConfig

from .._drift import check_methods
from ..errors import InvalidArgument
from .pool import BlockPool
from .queue import FreeQueue

__all__ = ["check", "install", "register"]

logger = init_logger("vllm.kvpool")

_STOCK_POOL = block_pool.BlockPool
_STOCK_QUEUE = block_pool.FreeKVCacheBlockQueue
_COORDINATOR = kv_cache_coordinator.KVCacheCoordinator
_STOCK_START = _COORDINATOR.__init__

# What the classes use without overriding it.
_POOL_USES = (
    "_maybe_evict_cached_block",
    "_notify_reuse",
    "_remove_cached_block_hashes",
    "cache_full_blocks",
    "free_blocks",
    "get_new_blocks",
    "get_num_free_blocks",
    "move_block_hashes",
    "reset_prefix_cache",
    "touch",
    "unpin_blocks",
)
_QUEUE_OWN = ("clear", "discard", "keep", "remove_n", "use_groups")
_BLOCK_USES = ("_block_hash", "_block_hash_num_tokens", "block_id", "is_null", "pool", "ref_cnt")


def _make_block_hash_with_group_id(block_hash, group_id): ...


def _resolve_block_hashes(
    block_hashes, hash_block_size, block_size, *, supports_fine_grained_hash_lookup=False, alignment_tokens=None
): ...


def check() -> None:
    """Compares the installed vLLM with the one that these classes were written for.

    Raises :class:`EngineChanged`, which names each method that differs.
    """
    engine = f"vLLM {vllm.__version__}"
    functions = (
        (kv_cache_utils.make_block_hash_with_group_id, _make_block_hash_with_group_id),
        (kv_cache_utils.resolve_block_hashes, _resolve_block_hashes),
    )
    check_methods(engine, _STOCK_POOL, BlockPool, _POOL_USES, functions, own=("_refuse_free", "audit", "held"))
    check_methods(engine, _STOCK_QUEUE, FreeQueue, own=_QUEUE_OWN)
    check_methods(engine, KVCacheBlock, object, _BLOCK_USES)
    # Their own methods: one that kvpool lacks would be called on its queue.
    names = {name for name in vars(_STOCK_QUEUE) if not name.startswith("_")}
    check_methods(engine, FreeQueue, object, sorted(names))
    check_methods(engine, kv_cache_coordinator, object, ["BlockPool"])  # type: ignore[arg-type]
    check_methods(engine, KVCacheConfig, object, ["kv_cache_groups"])


def _start(self: Any, *args: Any, **kwargs: Any) -> None:
    """The constructor of vLLM's coordinator, which builds the pool without telling it the groups."""
    _STOCK_START(self, *args, **kwargs)
    queue = self.block_pool.free_block_queue
    if isinstance(queue, FreeQueue):
        queue.use_groups(self.kv_cache_config.kv_cache_groups)
        logger.info("kvpool: ahead %d%s", queue.ahead, f": {queue.unproven}" if queue.unproven else "")


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


def register() -> None:
    """The entry point of the group ``vllm.general_plugins``.

    vLLM loads all installed plugins if ``VLLM_PLUGINS`` is not set; kvpool's changes nothing unless it
    is named there, or ``KVPOOL_VLLM`` is set.
    """
    is_named = "kvpool" in os.environ.get("VLLM_PLUGINS", "").split(",")
    part = os.environ.get("KVPOOL_VLLM", "pool" if is_named else "off")
    install(part)
    logger.info("kvpool: %s", "not in use" if part == "off" else f"vLLM's block {part} is kvpool's")
