"""SGLang's storage of pages in a kvpool node."""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    STORAGE_BATCH_SIZE,
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.runtime_context import get_server_args

from .._drift import check_methods
from .._kvpool import Tier
from ..errors import InvalidArgument, KvPoolError
from .host import check_tested

__all__ = ["KvpoolStorage", "check_storage"]

logger = logging.getLogger("sglang.kvpool")

_PROCESS = secrets.token_hex(8)

WINDOW_BYTES = 256 << 20
"""Memory for pages on their way to and from a node, if ``window`` is not set."""

_SETTINGS = {
    "settings": str,
    "peer": str,
    "address": str,
    "namespace": str,
    "name": str,
    "token_file": str,
    "tls_files": list,
    "in_process_bytes": int,
    "window": int,
    "threads": int,
    "puts": int,
    "patience": float,
    "rest": float,
    "timeout": float,
    "pools": dict,
}


def _settings(text: dict, where: str = "kvpool") -> dict[str, Any]:
    """Checks the settings of a node: their names and types."""
    if not isinstance(text, dict):
        raise InvalidArgument(f"the setting {where!r} is {text!r}, expected an object")
    for name, value in text.items():
        if name not in _SETTINGS:
            raise InvalidArgument(f"{where}: there is no setting {name!r}; the settings are {', '.join(_SETTINGS)}")
        kind = _SETTINGS[name]
        wanted = (int, float) if kind is float else kind
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise InvalidArgument(f"{where}.{name} is {value!r}, expected {kind.__name__}")
    alone = {"settings", "in_process_bytes"} & set(text)
    link = {"peer", "address", "name", "token_file", "tls_files"} & set(text)
    if len(alone) > 1 or bool(alone) == bool(link) or link and not {"peer", "address"} <= link:
        raise InvalidArgument(
            f"{where}: name a node by 'peer' and 'address', with its link, or set 'settings' or 'in_process_bytes' alone"
        )
    return text


def _values() -> str:
    """What the dtype of a page does not tell: floats of 8 bits are stored as integers, whatever their
    format, which differs between makers of devices too."""
    try:
        named = get_server_args().kv_cache_dtype
    except ValueError:
        # Without a server, as in tests.
        named = "auto"
    return f"{named} hip" if torch.version.hip else str(named)


class _Pages:
    """The pages of one host pool, as values of a tier."""

    def __init__(self, host_pool: Any, name: str, settings: dict[str, Any], config: HiCacheStorageConfig):
        self.host_pool, self.name, self.page_size = host_pool, name, host_pool.page_size
        try:
            page = host_pool.get_dummy_flat_data_page()
            one, other = host_pool.get_data_page(0), host_pool.get_data_page(0)
        except (NotImplementedError, ValueError) as error:
            raise InvalidArgument(f"the host pool {name!r} has no pages of one piece: {error}") from error
        if page is None or one is None:
            raise InvalidArgument(f"the host pool {name!r} has no bytes of its own")
        self.dtype, self.page_bytes = page.dtype, page.numel() * page.element_size()
        # Then pages are read into their places. Otherwise, `get_data_page` made two copies.
        self.is_view = one.is_contiguous() and one.data_ptr() == other.data_ptr()
        self._local = threading.local()
        self._failure: str | None = None
        place = settings.get("peer", "memory")
        logger.info("kvpool active: pages of %d bytes of the host pool %s in %s", self.page_bytes, name, place)
        self.timeout = float(settings.get("timeout", 5.0))
        fitting = max(2, WINDOW_BYTES // self.page_bytes)
        self.puts = settings.get("puts", min(STORAGE_BATCH_SIZE, fitting))
        # What must agree for bytes to be interchangeable. Layouts write a page in different orders.
        parts = (
            "sglang",
            settings.get("namespace", ""),
            config.model_name or "",
            name,
            page.dtype,
            _values(),
            host_pool.layout,
            self.page_size,
            config.logical_page_size,
            host_pool.storage_format_tag or "",
        )
        namespace = json.dumps([str(part) for part in parts])
        if "in_process_bytes" in settings:
            self.tier = Tier.in_process(settings["in_process_bytes"], value_bytes=self.page_bytes, namespace=namespace)
            return
        token, tls = settings.get("token_file"), settings.get("tls_files")
        limits = {key: settings[key] for key in ("threads", "patience", "rest") if key in settings}
        limits |= {"value_bytes": self.page_bytes, "namespace": namespace, "puts": self.puts}
        limits["window"] = settings.get("window", min(STORAGE_BATCH_SIZE, fitting))
        if "settings" in settings:
            self.tier = Tier.from_settings(settings["settings"], **limits)
            return
        self.tier = Tier.peer(
            settings["peer"],
            settings["address"],
            name=settings.get("name"),
            token=Path(token).read_bytes().strip() if token else None,
            tls=tuple(Path(file).read_bytes() for file in tls) if tls else None,
            **limits,
        )

    def _are(self, words: list[str], wanted: str) -> list[bool]:
        """Compares the words of a call, and logs why pages are missing or not stored, unless it was logged last."""
        done = [word == wanted for word in words]
        if not all(done) and (stats := self.tier.stats()).last_failure != self._failure:
            self._failure = stats.last_failure
            logger.warning("kvpool: host pool %s: %s; %d pages were bad so far", self.name, self._failure, stats.bad_values)
        return done

    def pieces(self, count: int) -> Sequence[slice]:
        """Batches that are too large for the memory on the way go in several."""
        return [slice(at, min(at + self.puts, count)) for at in range(0, count, self.puts)]

    def exists(self, keys: list[bytes]) -> list[bool]:
        return [word == "hit" for word in self.tier.exists(keys, timeout=self.timeout).wait()]

    def get(self, keys: list[bytes], targets: list[np.ndarray]) -> list[bool]:
        words: list[str] = []
        for part in self.pieces(len(keys)):
            words += self.tier.get(keys[part], targets[part], timeout=self.timeout).wait()
        return self._are(words, "hit")

    def put(self, keys: list[bytes], values: list[np.ndarray]) -> list[bool]:
        words: list[str] = []
        for part in self.pieces(len(keys)):
            words += self.tier.put(keys[part], values[part], timeout=self.timeout).wait()
        return self._are(words, "stored")

    def read(self, keys: list[bytes], slots: list[int]) -> list[bool]:
        """Reads pages into the slots that begin at these."""
        if self.is_view:
            return self.get(keys, [_bytes(self.host_pool.get_data_page(slot)) for slot in slots])
        found: list[bool] = []
        for part in self.pieces(len(keys)):
            read = self._staging()[: len(keys[part])]
            hits = self.get(keys[part], list(read))
            for slot, page, is_hit in zip(slots[part], read, hits):
                if is_hit:
                    self.host_pool.set_from_flat_data_page(slot, torch.from_numpy(page).view(self.dtype))
            found += hits
        return found

    def _staging(self) -> np.ndarray:
        """Memory for the pages of one call of this thread. New memory costs more than the copies."""
        if not hasattr(self._local, "staging"):
            self._local.staging = np.empty((self.puts, self.page_bytes), dtype=np.uint8)
        return self._local.staging

    def write(self, keys: list[bytes], slots: list[int]) -> list[bool]:
        """Stores the pages of the slots that begin at these."""
        stored: list[bool] = []
        for part in self.pieces(len(keys)):
            pages = [_bytes(self.host_pool.get_data_page(slot)) for slot in slots[part]]
            stored += self.put(keys[part], pages)
        return stored


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor in host memory, without a copy."""
    return tensor.view(torch.uint8).numpy()


class KvpoolStorage(HiCacheStorage):
    """SGLang's third level, in a kvpool node.

    A failure of the node is a miss, or a page that is not stored; the node is then left alone for a
    while. What a node returns is verified before it is used. Pages are found by their hash, model,
    shape and rank, so that engines with another parallelism or layout miss.

    The settings are those of :class:`kvpool.Tier`, in the object ``kvpool`` of the extra
    configuration, besides:

    - ``namespace``: what the model's name does not tell, such as the revision of its weights;
    - ``timeout``: seconds after which a call returns, with what it has;
    - ``pools``: settings by the name of a host pool, for models with several (``"mamba"``, ...): each
      has pages of another size, and needs a node of its own;
    - ``in_process_bytes``: no node, but memory of this process.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None):
        check_storage()
        self._config = storage_config
        self._settings = _settings((storage_config.extra_config or {}).get("kvpool", {}))
        self._pages: dict[str, _Pages] = {}
        self._clears = 0
        self._lock = threading.Lock()
        self._moved: dict[str, list[tuple[int, float]]] = {"prefetch": [], "backup": []}

    # ---- Pools

    def register_mem_pool_host(self, mem_pool_host: Any):
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, PoolName.KV.value)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name):
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool, str(host_pool_name))

    def _register(self, host_pool: Any, name: str) -> None:
        known = self._pages.get(name)
        if known is not None and known.host_pool is host_pool:
            return
        settings = self._settings
        if name != PoolName.KV.value:
            settings = settings.get("pools", {}).get(name)
            if settings is None:
                message = f"the host pool {name!r} has pages of another size: name a node for them in kvpool.pools"
                raise InvalidArgument(message)
            settings = _settings(settings, f"kvpool.pools.{name}")
        self._pages[name] = _Pages(host_pool, name, settings, self._config)

    # ---- Keys

    def _keys(self, keys: Sequence[str], pages: _Pages) -> list[bytes]:
        """Keys with what tells one rank's pages from another's."""
        config = self._config
        ranks = [
            config.pp_rank,
            config.pp_size,
            config.attn_cp_rank,
            config.attn_cp_size,
            config.dcp_rank,
            config.dcp_size,
        ]
        # Latent pages are the same on all tensor-parallel ranks; states are not.
        if not config.is_mla_model or pages.name == PoolName.MAMBA.value:
            ranks += [config.tp_rank, config.tp_size]
        suffix = f" {' '.join(map(str, ranks))} {self._clears}"
        if self._clears:
            # Other launches count, too. Ranks of one launch on a host agree by SGLang's variable.
            suffix += f" {os.environ.get('SGLANG_RUN_ID', _PROCESS)}"
        return [f"{key}{suffix}".encode() for key in keys]

    # ---- One pool

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._prefix(keys, PoolName.KV.value)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._move("prefetch", PoolName.KV.value, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._move("backup", PoolName.KV.value, keys, host_indices)

    def batch_get(
        self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None]:
        pages = self._pages[PoolName.KV.value]
        if target_locations is None:
            target_locations = [pages.host_pool.get_dummy_flat_data_page() for _ in keys]
        hits = self._try(len(keys), pages.get, self._keys(keys, pages), [_bytes(target) for target in target_locations])
        return [target if is_hit else None for target, is_hit in zip(target_locations, hits)]

    def get(self, key: str, target_location: Any | None = None, target_sizes: Any | None = None) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        if values is None:
            return False
        pages = self._pages[PoolName.KV.value]
        named = self._keys(keys, pages)
        return all(self._try(len(keys), pages.put, named, [_bytes(value.contiguous()) for value in values]))

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        return self.batch_set([key], None if value is None else [value])

    # ---- Several pools

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        for transfer in pool_transfers or []:
            if transfer.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                raise ValueError(f"Unsupported pool hit policy: {transfer.hit_policy}")
        kv_pages = self._prefix(keys, PoolName.KV.value)
        found: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        # Ranks restore the longest prefix that all of them can, so each reports every length.
        restorable = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            is_all = transfer.hit_policy == PoolHitPolicy.ALL_PAGES
            last = kv_pages if is_all else max(1, len(transfer.keys or []))
            # The lengths of prefixes whose last pages this pool has: all of them, or as many as it needs.
            lengths, in_a_row = set(), 0
            for length, is_hit in enumerate(self._found(keys[:kv_pages], str(transfer.name)), 1):
                in_a_row = in_a_row + 1 if is_hit else 0
                if in_a_row >= min(last, length):
                    lengths.add(length)
            if lengths:
                found[transfer.name] = max(lengths)
            restorable = [length for length in restorable if length in lengths]
        return PoolTransferResult(restorable[-1] if restorable else 0, found, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {t.name: self._move("prefetch", str(t.name), t.keys or [], t.host_indices) for t in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {t.name: self._move("backup", str(t.name), t.keys or [], t.host_indices) for t in transfers}

    # ---- The rest

    def clear(self) -> bool:
        """Forgets all pages: this engine does not find them any more, nor do its other ranks, which
        are told too. The node evicts them in time. From then on, engines find only what was stored by
        their own launch (on several hosts: by their host). An engine that starts afterwards finds the
        first pages again; weights that change need another ``namespace``."""
        self._clears += 1
        return True

    def get_stats(self):
        """Pages and bandwidths of the transfers since the last call, as SGLang's own backends have
        them; None if metrics are off."""
        if not self._config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            moved, self._moved = self._moved, {"prefetch": [], "backup": []}
        metrics = StorageMetrics()
        for kind, entries in moved.items():
            getattr(metrics, f"{kind}_pgs").extend(pages for pages, _ in entries)
            getattr(metrics, f"{kind}_bandwidth").extend(bandwidth for _, bandwidth in entries)
        return metrics

    def close(self) -> None:
        for pages in self._pages.values():
            pages.tier.close()

    # ---- Within

    def _try(self, count: int, call, *arguments) -> list[bool]:
        try:
            return call(*arguments)
        except KvPoolError as error:
            logger.warning("kvpool: %d pages are missing or not stored: %s", count, error)
            return [False] * count

    def _found(self, keys: Sequence[str], name: str) -> list[bool]:
        pages = self._pages[name]
        return self._try(len(keys), pages.exists, self._keys(keys, pages))

    def _prefix(self, keys: Sequence[str], name: str) -> int:
        hits = self._found(keys, name)
        return hits.index(False) if False in hits else len(hits)

    def _move(self, kind: str, name: str, keys: Sequence[str], slots: torch.Tensor | None) -> list[bool]:
        pages = self._pages[name]
        if slots is None or slots.numel() != len(keys) * pages.page_size:
            have = 0 if slots is None else slots.numel()
            logger.error("kvpool: %d slots of %s for %d pages of %d", have, name, len(keys), pages.page_size)
            return [False] * len(keys)
        begin = time.perf_counter()
        firsts = slots[:: pages.page_size].tolist()
        done = self._try(len(keys), pages.read if kind == "prefetch" else pages.write, self._keys(keys, pages), firsts)
        count = sum(done)
        if count and self._config.enable_storage_metrics:
            gigabytes = count * pages.page_bytes / 1e9
            with self._lock:
                self._moved[kind].append((count, gigabytes / max(time.perf_counter() - begin, 1e-9)))
        return done


def _configuration(
    self,
    tp_rank,
    tp_size,
    pp_rank,
    pp_size,
    attn_cp_rank,
    attn_cp_size,
    is_mla_model,
    enable_storage_metrics,
    is_page_first_layout,
    model_name,
    tp_lcm_size=None,
    should_split_heads=False,
    dp_rank=0,
    extra_config=None,
    dcp_size=1,
    dcp_rank=0,
    logical_page_size=None,
): ...


def check_storage() -> None:
    """Compares the installed SGLang with the one that the storage backend was written for.

    Raises :class:`EngineChanged`, which names each method that differs.
    """
    engine = check_tested()
    # SGLang closes a backend that has such a method.
    own = [name for name in vars(KvpoolStorage) if name.startswith("_") or name == "close"]
    functions = [(HiCacheStorageConfig.__init__, _configuration)]
    check_methods(engine, HiCacheStorage, KvpoolStorage, functions=functions, own=own)
    # Their methods: one that kvpool lacks would be inherited as a stub that does nothing.
    names = [name for name in vars(HiCacheStorage) if not name.startswith("_") and name != "on_host_pools_registered"]
    missing = type(
        "KvpoolStorage", (), {name: vars(KvpoolStorage)[name] for name in names if name in vars(KvpoolStorage)}
    )
    check_methods(engine, missing, object, names)
    used = ["get_data_page", "get_dummy_flat_data_page", "set_from_flat_data_page"]
    check_methods(engine, HostKVCache, object, ["storage_format_tag", *used])
