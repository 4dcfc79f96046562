"""kvpool's values in vLLM's ``/metrics``.

vLLM sends its statistics from the engine's process to the front end in messages without room for others. kvpool's
values take the way of prometheus_client's multiprocess mode: the engine writes them to files, which the front end reads
for each answer of ``/metrics``. Engines on other hosts than the front end's are not seen.

An engine writes them once a second, in a step of which vLLM collects statistics, and when it becomes idle. Before that it
audits ``AUDITED`` blocks, so that no step waits for an audit of the whole pool; all frames are recounted when the prefix
cache is reset.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from ..errors import KvPoolError

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from .pool import BlockPool

__all__ = ["Meter", "share"]

logger = init_logger("vllm.kvpool")

FOLDER = "KVPOOL_VLLM_METRICS"
_shared: str | None = None
"""The folder that ``/metrics`` of this process shows."""
_BYTES = 1 << 20
"""Size of a file, which prometheus_client maps. It is allocated first: a full file system is an error then, not a signal."""
SECONDS = 1.0
"""Time between two writes."""
AUDITED = 2048
"""Blocks to compare with vLLM's counts before a write."""
TABLES = 17
"""One table in this many is counted. A prime: models with groups of layers free several tables for each request."""
COUNTERS = {
    "tables": f"Freed tables of two blocks or more, one in {TABLES}",
    "table_blocks": "Blocks of these tables",
    "table_runs": "Runs of consecutive blocks in these tables: descriptors of a transfer",
    "compactions": "Steps that moved blocks",
    "moved_blocks": "Blocks moved by compaction",
    "cancelled_blocks": "Blocks whose moves were cancelled because a request needed blocks",
    "audited_blocks": "Blocks whose state was compared with vLLM's reference count",
    "audit_failures": "Audits that found a contradiction, which the log names",
}
GAUGES = {
    "used_blocks": "Blocks in use",
    "cached_blocks": "Blocks with contents that no request uses",
    "free_blocks": "Blocks without contents",
    "fragmentation": "Share of the possible free runs that is missing",
}


def share() -> None:
    """Makes ``/metrics`` of this process, a front end, show what the engines write that it starts.

    A process that another front end has started shares the folder of that one.
    """
    global _shared
    from prometheus_client import REGISTRY
    from prometheus_client.multiprocess import MultiProcessCollector

    folder = os.environ.get(FOLDER)
    if folder is None or not os.path.isdir(folder):
        folder = os.environ[FOLDER] = tempfile.mkdtemp(prefix="kvpool-metrics-")
        owner = os.getpid()
        atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    if _shared != folder:
        _shared = folder
        MultiProcessCollector(REGISTRY, path=folder)


class Meter:
    """Counts what happens in an engine's pool, audits it in parts, and writes the values."""

    _numbers = itertools.count()

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.counts: Counter[str] = Counter()
        self._number = next(Meter._numbers)
        self._frees = 0
        self._due = 0.0
        self._compared = 1
        self._files: dict[str, Any] = {}
        self._was_idle = False
        self._cannot_write = False

    def note_freed(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Notes a block table, which vLLM frees from its end. Single blocks are those that left a window."""
        if len(blocks) < 2:
            return
        self._frees += 1
        if self._frees % TABLES == 0:
            ids = [block.block_id for block in blocks if not block.is_null]
            self.counts["tables"] += 1
            self.counts["table_blocks"] += len(ids)
            self.counts["table_runs"] += sum(a - b != 1 for a, b in zip(ids, ids[1:])) + bool(ids)

    def note_step(self, is_idle: bool) -> None:
        """Writes the values if they are due, after an audit of the next blocks."""
        now = time.monotonic()
        becomes_idle, self._was_idle = is_idle and not self._was_idle, is_idle
        if self._pool.frames is None or now < self._due and not becomes_idle:
            return
        if now >= self._due:
            self._due = now + SECONDS
            blocks = self._pool.num_gpu_blocks
            first, end = self._compared, min(self._compared + AUDITED, blocks)
            self._compared = end if end < blocks else 1
            self.audit(lambda: self._pool.compare(first, end), end - first)
        self._write()

    def audit(self, audit: Callable[[], object], blocks: int) -> None:
        """Audits. A contradiction is logged and counted, and requests go on."""
        self.counts["audited_blocks"] += blocks
        try:
            audit()
        except KvPoolError as error:
            self.counts["audit_failures"] += 1
            logger.error("kvpool: audit: %s", error)

    def _values(self) -> dict[str, float]:
        frames = self._pool.frames
        stats = frames.stats()
        states = {"used_blocks": "used", "cached_blocks": "evictable", "free_blocks": "free"}
        return {
            **{name: self.counts[name] for name in COUNTERS},
            **{name: stats[state] for name, state in states.items()},
            "fragmentation": frames.fragmentation(),
        }

    def _write(self) -> None:
        queue = self._pool.free_block_queue
        if queue.admin is not None:
            try:
                queue.admin.report("vllm", {name: self.counts[name] for name in COUNTERS})
            except KvPoolError as error:  # it was closed
                queue.admin = None
                logger.warning("kvpool: the admin interface is told no counts any more: %s", error)
        # vLLM has a folder of its own for several front ends.
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR") or os.environ.get(FOLDER)
        if self._cannot_write or folder is None:
            return
        try:
            self._write_into(folder)
        except Exception as error:  # the files are prometheus_client's: whatever fails there, the engine goes on
            self._cannot_write = True
            logger.warning("kvpool: no metrics: %s", error)

    def _write_into(self, folder: str) -> None:
        from prometheus_client.mmap_dict import mmap_key

        values = self._values()
        process = f"{os.getpid()}-{self._number}" if self._number else str(os.getpid())
        # Collectors read the type, how to join the values of processes, and the label `pid` from the file's name.
        for kind, suffix, texts in (("counter_kvpool", "_total", COUNTERS), ("gauge_liveall", "", GAUGES)):
            file = self._file(os.path.join(folder, f"{kind}_{process}.db"))
            for name, text in texts.items():
                key = mmap_key(f"kvpool:{name}", f"kvpool:{name}{suffix}", [], [], text)
                file.write_value(key, values[name], time.time())

    def _file(self, path: str) -> Any:
        from prometheus_client.mmap_dict import MmapedDict

        if path not in self._files:
            with open(path, "a+b") as file:
                os.posix_fallocate(file.fileno(), 0, _BYTES)
            self._files[path] = MmapedDict(path)
        return self._files[path]
