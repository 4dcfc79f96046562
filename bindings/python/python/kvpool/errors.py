"""Errors of kvpool. Every error that the package raises is a `KvPoolError`.

The message is that of the Rust error: it says what was refused, and where. The fields of the Rust
error are attributes of the exception, and ``kind`` is the name of its variant, for example
``"Exhausted"``.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AuditError",
    "BatchEnded",
    "BufferRefused",
    "BuildError",
    "Busy",
    "CacheError",
    "Closed",
    "DefragmentError",
    "ForeignHandle",
    "Forked",
    "FrameRefused",
    "HandleError",
    "InvalidArgument",
    "InvalidCacheArgument",
    "InvalidMigrateArgument",
    "InvalidSequenceArgument",
    "InvalidStorageArgument",
    "KvPoolError",
    "MigrateError",
    "NoRun",
    "NodeError",
    "OutOfBlocks",
    "OverQuota",
    "PoolLost",
    "ResizeError",
    "SequenceError",
    "StaleHandle",
    "StorageError",
    "Timeout",
]


class KvPoolError(Exception):
    """Base class of all errors of kvpool."""

    kind: str
    """Name of the error's variant in Rust, or of the refused step. For ``Invalid``: ``what`` was refused, its ``index``
    in a list or ``None``, what was ``got``, and the ``limit``."""

    def __init__(self, message: str = "", /, **fields: Any) -> None:
        super().__init__(message)
        self.kind = type(self).__name__
        for name, value in fields.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        # Reached for missing fields only. It also tells type checkers that errors have fields.
        raise AttributeError(f"{type(self).__name__} ({self.__dict__.get('kind')}) has no field {name!r}")


class InvalidArgument(KvPoolError, ValueError):
    """An argument is outside the range that the call accepts: zero, negative, or too large."""


class BufferRefused(InvalidArgument):
    """A buffer has the wrong element type or size, is not contiguous, or is read-only."""


class BuildError(InvalidArgument):
    """A pool or layout cannot be built from these settings."""


class OutOfBlocks(KvPoolError, MemoryError):
    """Too few blocks are available. Nothing was allocated.

    Fields by ``kind``: ``asked`` always; ``free``, ``retired``, ``evictable``, ``held``,
    ``in_transfer`` and ``oldest_batch`` for ``Exhausted``; ``total`` for ``TooLarge``; ``total`` and ``reserve`` for
    ``Reserved``; ``priority``, ``waiting`` and ``lacking`` for ``Behind``; ``most`` for ``Floors``.
    """

    asked: int
    """Number of blocks requested."""


class NoRun(OutOfBlocks):
    """Enough blocks are free or evictable, but no run is long enough. Fields: ``longest_run``, ``free``
    and ``evictable``."""


class OverQuota(OutOfBlocks):
    """The request would take its ``tenant`` beyond its ``quota`` of blocks, of which it holds ``held``, and has too
    few cached blocks of its own to evict. Others may still get blocks."""


class Timeout(KvPoolError, TimeoutError):
    """A deadline passed. For an allocation: ``asked``, ``free``, ``retired``, the oldest batch, the head
    of the line, and in ``turn`` the task that moves blocks."""


class HandleError(KvPoolError):
    """A handle was refused. ``block`` is its block id. The pool is unchanged."""


class StaleHandle(HandleError):
    """The block was freed after the handle was made: a use after a free."""


class ForeignHandle(HandleError):
    """A handle, sequence or key of another pool."""


class FrameRefused(KvPoolError):
    """A list of frames was refused, as a whole. ``index`` is the entry, ``frame`` its number."""


class SequenceError(KvPoolError):
    """A call on a sequence was refused. ``sequence`` is its id, where the error names one."""


class InvalidSequenceArgument(SequenceError, InvalidArgument):
    """A number of tokens, a range or an index is invalid for the sequence."""


class CacheError(KvPoolError):
    """A call on the prefix cache was refused."""


class InvalidCacheArgument(CacheError, InvalidArgument):
    """A key, a hash, a salt or a retention time is invalid."""


class StorageError(KvPoolError):
    """An operation on the bytes of blocks was refused, or failed."""


class InvalidStorageArgument(StorageError, InvalidArgument):
    """A layer, a place or a size is invalid for the storage."""


class PoolLost(StorageError):
    """The pool's device failed. Its bytes are lost, and the pool allocates no more blocks."""


class DefragmentError(KvPoolError):
    """A compaction did not begin, or a copy failed; its wave of moves was undone."""


class ResizeError(KvPoolError):
    """A pool was not resized.

    For ``Blocked``: ``blocks``, pairs of id and reason, and ``retired``. For ``NoTurn``: ``holder``, the task that
    had the turn to move blocks, or ``None``.
    """


class MigrateError(KvPoolError):
    """A transfer to another pool or node failed. The sequence stays where it was."""


class InvalidMigrateArgument(MigrateError, InvalidArgument):
    """The pools, or the contents of a manifest, do not fit together."""


class NodeError(KvPoolError):
    """A node did not start, or refused a request."""


class AuditError(KvPoolError):
    """An audit found a block that is counted wrongly, or a reference without an owner: a defect of kvpool."""


class Closed(KvPoolError):
    """The object was closed, or given away, by an earlier call."""


class BatchEnded(Closed):
    """The batch has ended."""


class Busy(KvPoolError):
    """Another call is using the object, or views of its blocks exist.

    For ``Viewed``: ``views``, their number, and ``block``, if they would be written after it is final.
    """


class Forked(KvPoolError):
    """The object was made by the parent of this process: it has no threads and no memory here.

    Fields: ``made_in`` and ``used_in``, process ids. Build the pool after the fork, or start
    processes by ``spawn``.
    """
