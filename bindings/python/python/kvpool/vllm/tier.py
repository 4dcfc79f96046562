"""A kvpool node as a secondary tier of vLLM's offloading.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 8589934592, "spec_name": "TieringOffloadingSpec",
        "secondary_tiers": [{"type": "KvpoolTier", "module_path": "kvpool.vllm.tier", "peer": "cache",
        "address": "10.0.0.9:7411", "namespace": "revision 3", "token_file": "/etc/kvpool/token"}]}}'

Chunks that vLLM stores in CPU memory go to the node, and all engines with the same model, layout and
namespace find them there. The node's pool is that of :meth:`kvpool.Tier.pool`; its values have the
size of vLLM's chunks, which the log states at the start.

A node that is gone, hangs or restarts costs hits and nothing else: lookups are misses, and loads fail for
the chunks that did not arrive by their deadline, which vLLM then computes. What arrives is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobId, JobResult, SecondaryTierManager, TransferJob

from .._kvpool import Call, Tier
from ..errors import InvalidArgument
from ._tested import check

__all__ = ["KvpoolTier"]

logger = init_logger("vllm.kvpool")


class _Lookups(AsyncLookupManager):
    """Asks the node for the keys of a step, on a thread of its own."""

    def __init__(self, *args: Any, tier: Tier, timeout: float, **kwargs: Any) -> None:
        self._tier, self._timeout = tier, timeout
        super().__init__(*args, **kwargs)  # starts the thread

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return [word == "hit" for word in self._tier.exists(keys, timeout=self._timeout).wait()]


class KvpoolTier(SecondaryTierManager):
    """A ``SecondaryTierManager`` over a kvpool node.

    ``namespace`` names what vLLM's configuration does not know, as the revision of the weights. ``settings`` is a
    file with the settings of ``kvpool serve``, or a mapping, instead of the arguments of the link: its ``tier`` is the
    store, or else the one node of its ``peers``, and its ``admin`` serves page and metrics of the tier. ``token_file``
    has one line; ``tls_cert``, ``tls_key`` and ``tls_ca`` are PEM files, and ``name`` is the name of this
    end in the certificate. Lookups take at most ``lookup_timeout`` seconds, loads and stores
    ``load_timeout`` and ``store_timeout``. A call of the node that takes longer than ``patience`` seconds
    counts as failed; a node that failed three times is not asked for ``rest`` seconds. Values pass through
    memory for ``window`` chunks: at least as many as a prefix has, or they are transferred twice, for the
    lookup and for the load.
    """

    def __init__(
        self,
        *args: Any,
        namespace: str,
        settings: str | dict[str, Any] | None = None,
        peer: str | None = None,
        address: str | None = None,
        name: str | None = None,
        token_file: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        tls_ca: str | None = None,
        window: int = 64,
        lookup_timeout: float = 1.0,
        load_timeout: float = 5.0,
        store_timeout: float = 10.0,
        patience: float = 2.0,
        rest: float = 5.0,
        locality: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.locality = None if locality is None else Locality(locality)
        self._timeouts = (load_timeout, store_timeout)
        files = (tls_cert, tls_key, tls_ca)
        if any(files) and not all(files):
            raise InvalidArgument(f"tier {self.tier_type}: tls_cert, tls_key and tls_ca belong together")
        link = (peer, address, name, token_file, *files)
        if (settings is None) != (peer is not None and address is not None) or (settings and any(link)):
            raise InvalidArgument(
                f"tier {self.tier_type}: name a node by peer and address, with name, token_file and tls_*, or all by settings"
            )
        limits: dict[str, Any] = {
            "value_bytes": self._block_size_bytes,
            "namespace": f"{namespace} {self._layout()}",
            "window": window,
            "puts": max(window, 1),
            "patience": patience,
            "rest": rest,
        }
        # Values of one call: as many as a thread of the tier has room for in the window.
        self._part = max(window // 4, 1)
        if settings is None:
            token = None if token_file is None else Path(token_file).read_bytes().strip()
            tls = tuple(Path(file).read_bytes() for file in files if file) or None
            self._tier = Tier.peer(peer, address, name=name, token=token, tls=tls, **limits)
        else:
            self._tier = Tier.from_settings(settings, **limits)
        self._memory = self._primary_kv_view.cast("B")
        self._lookups = _Lookups(self.tier_type, tier=self._tier, timeout=lookup_timeout)
        self._loads = ThreadPoolExecutor(2, thread_name_prefix="kvpool-tier-load")
        self._stores = ThreadPoolExecutor(1, thread_name_prefix="kvpool-tier-store")
        self._jobs: dict[JobId, Future[None]] = {}
        self._finished: SimpleQueue[tuple[TransferJob, list[OffloadKey], float]] = SimpleQueue()
        self._failure: str | None = None
        logger.info("kvpool: tier %s is %r, of %s", self.tier_type, self._tier, address or settings)

    def _layout(self) -> str:
        """What engines have in common whose chunks have the same bytes, as vLLM names folders for it."""
        spec = self._offloading_spec
        mapper = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, parallel_agnostic=True)
        return f"{mapper.base_path}_r{mapper.rank}"

    def _views(self, chunk_ids: Iterable[int]) -> list[memoryview]:
        size = self._block_size_bytes
        return [self._memory[int(chunk) * size :][:size] for chunk in chunk_ids]

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        # Values that the node has are not sent again.
        self._submit(self._stores, job_metadata, self._tier.put, "stored", self._timeouts[1])

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._loads, job_metadata, self._tier.get, "hit", self._timeouts[0])

    def _submit(
        self, threads: ThreadPoolExecutor, job: TransferJob, call: Callable[..., Call[list[Any]]], done: str, timeout: float
    ) -> None:
        def work() -> None:
            begin, keys, successful = monotonic(), list(job.keys), []
            try:
                views = self._views(job.chunk_ids)
                for at in range(0, len(keys), self._part):
                    part = keys[at : at + self._part]
                    left = max(begin + timeout - monotonic(), 0.0)
                    words = call(part, views[at : at + self._part], timeout=left).wait()
                    successful += [key for key, word in zip(part, words) if word == done]
            except Exception:
                logger.exception("kvpool: job %s of tier %s failed", job.job_id, self.tier_type)
            finally:
                self._finished.put((job, successful, monotonic() - begin))

        self._jobs[job.job_id] = threads.submit(work)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        while True:
            try:
                job, successful, seconds = self._finished.get_nowait()
            except Empty:
                return results
            self._jobs.pop(job.job_id, None)
            is_success = len(successful) == len(job.keys)
            if not is_success:
                self._note_failure()
                if job.is_promotion:
                    self._lookups.mark_miss(set(job.keys) - set(successful))
            results.append(
                JobResult(
                    job_id=job.job_id,
                    success=is_success,
                    successful_keys=tuple(successful) if job.is_promotion and not is_success and successful else None,
                    transfer_time=seconds,
                    transfer_bytes=len(successful) * self._block_size_bytes,
                )
            )

    def _note_failure(self) -> None:
        failure = self._tier.stats().last_failure
        if failure != self._failure:
            self._failure = failure
            logger.warning("kvpool: tier %s: %s", self.tier_type, failure)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def drain_jobs(self) -> None:
        wait(list(self._jobs.values()))

    def shutdown(self) -> None:
        self._lookups.shutdown()
        for threads in (self._loads, self._stores):
            threads.shutdown(wait=True, cancel_futures=True)
        self._tier.close()
        self._memory.release()


def _from_offloading_spec(root_dir, offloading_spec, blocks_per_file=1, parallel_agnostic=False): ...
def _lookups(self, tier_type): ...
def _job(self, job_id, keys, chunk_ids, is_promotion, req_context, submit_time=...): ...
def _result(self, job_id, success, successful_keys=None, transfer_time=None, transfer_bytes=None): ...


check(
    SecondaryTierManager,
    KvpoolTier,
    functions=[
        (FileMapper.from_offloading_spec, _from_offloading_spec),
        (TransferJob.__init__, _job),
        (JobResult.__init__, _result),
    ],
    own=("_layout", "_note_failure", "_submit", "_views"),
)
_USES = ["cleanup", "flush", "lookup", "mark_miss", "shutdown"]
check(AsyncLookupManager, _Lookups, _USES, [(AsyncLookupManager.__init__, _lookups)])
