"""Offloading to CPU memory with places by runs, through vLLM's offloading connector.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 8589934592,
        "spec_name": "KvpoolOffloadingSpec", "spec_module_path": "kvpool.vllm.offload"}}'

vLLM's manager takes chunks from a stack: after a while, neighbours in a request are strangers in
memory. This one takes them from a :class:`kvpool.FramePool`, in few runs, so that a store or load
is few copies. Lookups, eviction, events and the worker stay vLLM's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.base import OffloadingManager, OffloadKey, PrepareStoreOutput, ReqContext
from vllm.v1.kv_offload.cpu import spec as _spec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from .._drift import check_methods
from .._kvpool import FramePool
from ._tested import ENGINE, check

__all__ = ["KvpoolOffloadingManager", "KvpoolOffloadingSpec"]

AHEAD = 1 / 64
"""Share of the chunks to evict ahead of a store, from which its runs are chosen."""


class KvpoolOffloadingManager(CPUOffloadingManager):
    """A ``CPUOffloadingManager`` whose chunks are frames of a pool of kvpool."""

    def __init__(self, num_chunks: int, *args: Any, **kwargs: Any):
        super().__init__(num_chunks, *args, **kwargs)
        check_methods(ENGINE, self, object, _USES)
        self._frames: FramePool | None = None
        self._freed: list[int] = []
        self._ahead = int(num_chunks * AHEAD)
        # Chunks that the store under way may need; None outside of a store.
        self._offered: int | None = None
        self._reset_frames()

    @property
    def frames(self) -> FramePool | None:
        """The pool: its statistics, audit and owners. Frame 0 is chunk 0."""
        self._settle()
        return self._frames

    def _reset_frames(self) -> None:
        self._freed.clear()
        self._num_allocated_chunks = 0
        chunks = self._num_chunks
        self._frames = FramePool(chunks, null_block=False, magazine_frames=0, threads=1) if chunks else None

    def _settle(self) -> None:
        """Gives freed chunks to kvpool, as one list."""
        if self._freed:
            self._frames.free(self._freed)
            self._freed.clear()

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        self._offered = len(keys)
        try:
            return super().prepare_store(keys, req_context)
        finally:
            self._offered = None

    def _get_num_free_chunks(self) -> int:
        free = self._num_chunks - self._num_allocated_chunks
        if self._offered is None:
            return free
        # Fewer than there are: the store evicts ahead. Not where that could fail a store that fits: it takes
        # at most a chunk for each key, and none of the chunks that these keys have is evicted for it.
        if self._num_evictable_cache_chunks >= 2 * self._offered + self._ahead:
            return max(free - self._ahead, 0)
        return free

    def _allocate_chunks(self, keys: list[Any]) -> list[ChunkStatus]:
        if not keys:
            return []
        self._settle()
        chunks = self._frames.allocate(len(keys), runs=True)
        self._num_allocated_chunks += len(chunks)
        return [ChunkStatus(chunk) for chunk in chunks]

    def _free_chunk(self, chunk: ChunkStatus) -> None:
        self._freed.append(chunk.chunk_id)
        self._num_allocated_chunks -= 1

    def reset_cache(self) -> None:
        super().reset_cache()
        self._reset_frames()


class KvpoolOffloadingSpec(CPUOffloadingSpec):
    """vLLM's CPU offloading, with kvpool's manager. Its settings are those of ``CPUOffloadingSpec``."""

    def get_manager(self) -> OffloadingManager:
        # vLLM builds the manager from its settings; only the class is another one.
        stock, _spec.CPUOffloadingManager = _spec.CPUOffloadingManager, KvpoolOffloadingManager
        try:
            return super().get_manager()
        finally:
            _spec.CPUOffloadingManager = stock


def _chunk(self, chunk_id): ...


# Attributes of a manager that the class reads, or on which it relies to stay as it leaves them.
_USES = ("_free_list", "_num_allocated_chunks", "_num_chunks", "_num_evictable_cache_chunks", "_policy")
check(
    CPUOffloadingManager,
    KvpoolOffloadingManager,
    functions=[(ChunkStatus.__init__, _chunk)],
    own=("_reset_frames", "_settle"),
)
check(ChunkStatus, object, ["chunk_id"])
check(CPUOffloadingSpec, KvpoolOffloadingSpec)
check(_spec, object, ["CPUOffloadingManager"])
