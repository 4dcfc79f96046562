"""A lock-free concurrent pool for the KV-cache blocks of LLM inference engines.

A **block** holds the K and V of a number of tokens, over all layers; its id never changes while it
lives. A **frame** is the place in memory that holds it. A `Sequence` is a list of blocks with the
tokens of one request, a `Lease` owns blocks without tokens, and a `Batch` is one step of the engine.

    import kvpool

    pool = kvpool.Pool(kvpool.Layout.named("qwen2.5-0.5b"), 10_000)
    with pool.sequence(7) as sequence, pool.begin_batch() as batch:
        new = batch.append(sequence, 100)
        slots = batch.slots(sequence, new.start, new.stop)

Calls that may wait are coroutines (`await pool.allocate(4)`), and have a form that blocks
(`pool.allocate(4).wait()`); those that begin with `try_` never wait. All errors are subclasses of
`KvPoolError`.
"""

from __future__ import annotations

import copyreg
from typing import NoReturn

from . import _kvpool, errors
from ._kvpool import (
    Admin,
    Append,
    Audit,
    Batch,
    BlockState,
    BlockTable,
    CacheStats,
    Call,
    Candidate,
    DecodeStep,
    Defragmenter,
    DefragmenterTotals,
    DefragmentReport,
    Event,
    Events,
    EvictionOrder,
    FragmentationState,
    FrameBatch,
    FrameKeys,
    FrameMoves,
    FramePool,
    GroupedAppend,
    GroupedSequence,
    Handle,
    LayerCache,
    LayerGroup,
    LayerGroups,
    LayerPlace,
    Layout,
    Lease,
    Map,
    Migrated,
    MigrationState,
    Node,
    NodeStats,
    PinnedPrefix,
    Pool,
    PreemptReport,
    PrefixCache,
    Resized,
    RunsPerSequence,
    Sequence,
    SessionInfo,
    Stats,
    TenantInfo,
    Tensor,
    Tier,
    TierStats,
    VersionRange,
    __version__,
)
from .errors import *  # noqa: F403

__all__ = [
    "Admin",
    "Append",
    "Audit",
    "Batch",
    "BlockState",
    "BlockTable",
    "CacheStats",
    "Call",
    "Candidate",
    "DecodeStep",
    "DefragmentReport",
    "Defragmenter",
    "DefragmenterTotals",
    "Event",
    "Events",
    "EvictionOrder",
    "FragmentationState",
    "FrameBatch",
    "FrameKeys",
    "FrameMoves",
    "FramePool",
    "GroupedAppend",
    "GroupedSequence",
    "Handle",
    "LayerCache",
    "LayerGroup",
    "LayerGroups",
    "LayerPlace",
    "Layout",
    "Lease",
    "Map",
    "Migrated",
    "MigrationState",
    "Node",
    "NodeStats",
    "PinnedPrefix",
    "Pool",
    "PreemptReport",
    "PrefixCache",
    "Resized",
    "RunsPerSequence",
    "Sequence",
    "SessionInfo",
    "Stats",
    "TenantInfo",
    "Tensor",
    "Tier",
    "TierStats",
    "VersionRange",
    "__version__",
    "errors",
]
__all__ += errors.__all__


def _refuse_copies(value: object) -> NoReturn:
    raise TypeError(
        f"a kvpool.{type(value).__name__} cannot be pickled or copied: it belongs to memory and threads of this process; "
        "make one in the process that uses it"
    )


for _class in vars(_kvpool).values():
    # Records and layouts are values.
    if isinstance(_class, type) and not {"__reduce__", "__getnewargs_ex__"} & vars(_class).keys():
        copyreg.pickle(_class, _refuse_copies)
