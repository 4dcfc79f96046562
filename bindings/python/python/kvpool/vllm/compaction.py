"""Compaction of cached blocks that no request uses, by copies between two steps of vLLM.

Off unless vLLM is started with a scheduler of this file:

    vllm serve ... --scheduler-cls kvpool.vllm.compaction.CompactingAsyncScheduler

A block that a request uses stays: the workers have its id in their tables. A cached block without
references is in no table. kvpool proposes pairs of blocks, and the pairs go to the workers with
those of vLLM's copies on write, which they execute before the step's forward pass. When the step
has ended, the moves take effect, and the hashes follow.

```text
schedule             propose: sources are not evicted, destinations are not dealt out
  the step           the workers copy
update_from_output   commit: hashes move to the destinations, the sources are free
```

A source that a request hits meanwhile stays where it is.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from ..errors import InvalidArgument
from ._settings import number
from ._tested import check
from .pool import BlockPool

__all__ = ["CompactingAsyncScheduler", "CompactingScheduler", "Compactor"]

MOVES_MAX = number("KVPOOL_VLLM_MOVES", int, 64)
"""Blocks to copy in one step."""
STEPS = number("KVPOOL_VLLM_COMPACTION_STEPS", int, 16)
"""Steps between two proposals."""
FRAGMENTATION = number("KVPOOL_VLLM_FRAGMENTATION", float, 0.3)
"""Share of the possible free runs that is missing, from which on blocks are moved."""


class Compactor:
    """Proposes moves of cached blocks of a :class:`BlockPool`, and commits them."""

    def __init__(self, pool: BlockPool, moves_max: int = MOVES_MAX, fragmentation: float = FRAGMENTATION) -> None:
        if not isinstance(pool, BlockPool):
            raise InvalidArgument("compaction needs kvpool's block pool: VLLM_PLUGINS has to name kvpool")
        if pool.free_block_queue.states:
            raise InvalidArgument(f"compaction moves blocks of keys and values only: {pool.free_block_queue.states}")
        self.pool = pool
        self.moves_max = moves_max
        blocks = pool.num_gpu_blocks
        self.room = min(number("KVPOOL_VLLM_ROOM", int, min(2 * moves_max, blocks // 64)), blocks // 8)
        """Blocks to have without contents before a proposal. The cache fills the pool of an engine at
        work: blocks are evicted ahead, and vLLM finds them until a copy is put there."""
        self.fragmentation = fragmentation
        self.moved = 0
        """Blocks moved so far."""
        self._moves: Any = None
        # Blocks are dealt out for steps behind the copies, which leave the sources as they are.
        pool.free_block_queue.on_short = self.cancel

    def propose(self) -> list[KVCacheBlockCopy]:
        """Returns the copies to make in the next step. None if those of a step are not committed."""
        frames = self.pool.frames
        if self._moves is not None or frames is None:
            return []
        missing = self.room - frames.stats()["free"]
        if missing > 0:
            frames.evict(missing)
        if frames.fragmentation() < self.fragmentation:
            return []
        moves = frames.propose_moves(self.moves_max)
        pairs = moves.pairs()
        if not pairs:
            return []
        self._moves = moves
        pool = self.pool
        targets = [pool.blocks[target] for _, target in pairs]
        try:
            if pool._reuse_watchers:
                # Readers of a block without a reference have to stop: it is written from now on.
                pool._notify_reuse(targets)
            for block in targets:
                # Evicted ahead and not dealt out yet: its contents were still found.
                pool._maybe_evict_cached_block(block)
        except BaseException:
            self.cancel()
            raise
        return [KVCacheBlockCopy(source, target) for source, target in pairs]

    def commit(self) -> int:
        """The copies are made: the moves take effect. Returns their number."""
        if self._moves is None:
            return 0
        moved, _ = self._moves.commit()
        self._moves = None
        pool = self.pool
        for source, target in moved:
            pool.move_block_hashes(pool.blocks[source], pool.blocks[target])
        self.moved += len(moved)
        pool.meter.counts["moved_blocks"] += len(moved)
        pool.meter.counts["compactions"] += 1
        return len(moved)

    def cancel(self) -> None:
        """The copies are not made: nothing has moved."""
        if self._moves is not None:
            self.pool.meter.counts["cancelled_blocks"] += len(self._moves)
            self._moves.cancel()
            self._moves = None


class _Compacting:
    """What both schedulers do around a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.connector is not None:  # type: ignore[attr-defined]
            # It reads a step's copies before these are added, and may still store their destinations.
            raise InvalidArgument("compaction cannot be used with a KV connector")
        self._compactor = Compactor(self.kv_cache_manager.block_pool)  # type: ignore[attr-defined]
        self._steps = 0
        # The output of the step that copies: moves take effect when it has been processed.
        self._copying: Any = None

    def schedule(self, throttle_prefills: bool = False) -> Any:
        output = super().schedule(throttle_prefills)  # type: ignore[misc]
        self._steps += 1
        if self._copying is None and output.total_num_scheduled_tokens > 0 and self._steps >= STEPS:
            self._steps = 0
            copies = self._compactor.propose()
            if copies:
                output.kv_cache_block_copies = [*(output.kv_cache_block_copies or ()), *copies]
                self._copying = output
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if self._copying is scheduler_output:
            self._copying = None
            self._compactor.commit()
        return outputs


class CompactingScheduler(_Compacting, Scheduler):
    """vLLM's scheduler, with compaction."""


class CompactingAsyncScheduler(_Compacting, AsyncScheduler):
    """vLLM's asynchronous scheduler, with compaction."""


def _copy(src_block_id, dst_block_id): ...


for _stock in (Scheduler, AsyncScheduler):
    check(_stock, _Compacting, functions=[(KVCacheBlockCopy, _copy)])
check(SchedulerOutput, object, ["kv_cache_block_copies", "total_num_scheduled_tokens"])
