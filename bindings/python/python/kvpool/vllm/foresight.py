"""kvpool's eviction policy ``foresight`` for vLLM's offloading to CPU memory.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 8589934592,
        "eviction_policy": "ForesightCachePolicy", "cache_policy_module_path": "kvpool.vllm.foresight"}}'

It learns from past requests which chunks are likely to be reused, and is LRU until that has more
hits (``docs/eviction.md``). The policy is that of kvpool's pools, through
:class:`kvpool.EvictionOrder`. It works with vLLM's own manager, with kvpool's, and under tiering.

| vLLM | the policy |
|---|---|
| a chunk is stored or loaded for a request | used by a request that has not ended; evicted last, its end before its beginning |
| the request has finished | its lookup, and the release of its chunks that no other request uses, the last one first |
| a transfer begins, ends | held, evictable again at its place |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import vllm
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

from .._drift import check_methods
from .._kvpool import EvictionOrder

__all__ = ["ForesightCachePolicy"]


@dataclass(slots=True)
class _Number:
    """The number of a request in an order of eviction."""

    order: EvictionOrder
    number: int


class ForesightCachePolicy(CachePolicy):
    """A ``CachePolicy`` by kvpool's ``foresight``."""

    POLICY = "foresight"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.chunks: dict[OffloadKey, ChunkStatus] = {}
        self.order = EvictionOrder(cache_capacity, self.POLICY)

    def _number_of(self, req_context: ReqContext) -> int:
        state = req_context.get_state(_Number)
        if state is None or state.order is not self.order:
            state = _Number(self.order, self.order.begin())
            req_context.set_state(state)
        return state.number

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self.chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext) -> None:
        self.chunks[key] = chunk
        position = req_context.get_offload_key_position(key)
        number = None if position is None else self._number_of(req_context)
        self.order.insert(key, number, position or 0, evictable=chunk.ref_cnt == 0)

    def remove(self, key: OffloadKey) -> None:
        del self.chunks[key]
        self.order.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self.order.touch(list(keys))

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """They are not there: nothing to order. The end of the request shows the policy what it missed."""

    def on_request_access(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        positions = ((key, req_context.get_offload_key_position(key)) for key in keys if key in self.chunks)
        known = [(key, position) for key, position in positions if position is not None]
        if known:
            self.order.use(known, self._number_of(req_context))

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        state = req_context.get_state(_Number)
        number = state.number if state is not None and state.order is self.order else None
        self.order.finish(order_request_keys(key_groups, req_context), reused_keys, number)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        keys = self.order.evict(n, protected)
        return None if keys is None else [(key, self.chunks.pop(key)) for key in keys]

    def clear(self) -> None:
        self.chunks.clear()
        # Another order: requests that have a number of the former one get a new one.
        self.order = EvictionOrder(self.cache_capacity, self.POLICY)

    def mark_evictable(self, key: OffloadKey) -> None:
        self.order.release(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self.order.hold(key)


def _order_request_keys(key_groups, req_context): ...
def _chunk(self, chunk_id): ...


_ENGINE = f"vLLM {vllm.__version__}"
_FUNCTIONS = [(order_request_keys, _order_request_keys), (ChunkStatus.__init__, _chunk)]
check_methods(_ENGINE, CachePolicy, ForesightCachePolicy, functions=_FUNCTIONS, own=("_number_of",))
check_methods(_ENGINE, ReqContext, object, ["get_offload_key_position", "get_state", "set_state"])
check_methods(_ENGINE, ChunkStatus, object, ["chunk_id", "ref_cnt"])
