"""Cases of kvpool under nano-vllm, run in its environment by `test_nanovllm.py`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from nanovllm.engine.block_manager import BlockManager as Stock
from nanovllm.engine.sequence import Sequence
from nanovllm_schedule import BLOCK, compare

import kvpool.nanovllm
from kvpool.errors import FrameRefused


def test_schedules_are_identical_over_thousands_of_requests() -> None:
    sides, steps = compare(2000, seed=3)
    assert steps > 5000
    stock, ours = sides
    assert (stock.hits, stock.prompt) == (ours.hits, ours.prompt)
    assert stock.hits > 0
    assert stock.blocks == ours.blocks
    assert 3 * sum(ours.runs) < sum(stock.runs)
    counts = ours.scheduler.block_manager.frames.audit()
    assert (counts["owned"], counts["evictable"]) == (0, 0)


def test_tables_name_frames_with_references() -> None:
    manager = kvpool.nanovllm.BlockManager(100, BLOCK)
    shared = [7] * (3 * BLOCK)
    a, b = Sequence(shared + [1]), Sequence(shared + [2])
    assert manager.can_allocate(a)
    manager.allocate(a)
    manager.allocate(b)
    assert a.block_table[:3] == b.block_table[:3]
    assert {frame for frame, _, _ in manager.frames.owners()} == {*a.block_table, *b.block_table}
    assert len(manager.free_block_ids) == 95
    table = list(b.block_table)
    manager.deallocate(b)
    b.block_table = table[3:]
    with pytest.raises(FrameRefused, match=f"block {table[3]} is freed twice"):
        manager.deallocate(b)
    manager.deallocate(a)
    assert manager.frames.available == len(manager.free_block_ids) == 100
    manager.frames.audit()


def test_full_pool_is_refused_as_by_stock() -> None:
    for kind in (Stock, kvpool.nanovllm.BlockManager):
        manager = kind(4, BLOCK)
        first, second = Sequence([1] * (3 * BLOCK)), Sequence([2] * (2 * BLOCK))
        manager.allocate(first)
        assert not manager.can_allocate(second)
        manager.deallocate(first)
        assert manager.can_allocate(second)


def test_changed_engine_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def deallocate(self, seq, keep): ...

    kvpool.nanovllm.install()
    from nanovllm.engine import scheduler

    assert scheduler.BlockManager is kvpool.nanovllm.BlockManager
    monkeypatch.setattr(kvpool.nanovllm._Stock, "deallocate", deallocate)
    with pytest.raises(kvpool.nanovllm.EngineChanged, match=r"deallocate\(self, seq, keep\)"):
        kvpool.nanovllm.install()
