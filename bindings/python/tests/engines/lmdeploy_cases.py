"""Cases of kvpool under LMDeploy, run in its environment by `test_lmdeploy.py`."""

import random
from types import SimpleNamespace

import kvpool.lmdeploy
import numpy as np
import pytest
from lmdeploy.pytorch.block import LogicalTokenBlocks
from lmdeploy.pytorch.paging.block_manager import DefaultBlockManager, base_block_manager

from kvpool.errors import Closed, FrameRefused

BLOCK = 64


def manager_of(kind: type, gpu: int, cpu: int = 0, reserved: int = 0) -> DefaultBlockManager:
    stock = base_block_manager.LogicalAllocator
    base_block_manager.LogicalAllocator = kind
    try:
        return DefaultBlockManager(gpu, cpu, reserved)
    finally:
        base_block_manager.LogicalAllocator = stock


def sequence_of(tokens: int) -> SimpleNamespace:
    return SimpleNamespace(
        logical_blocks=LogicalTokenBlocks(), num_all_ids=tokens, block_size=BLOCK, kv_token_limit=None
    )


def table_of(sequence: SimpleNamespace) -> np.ndarray:
    return np.array(sequence.logical_blocks.get_real_blocks())


def test_logical_blocks_are_those_of_stock_and_bytes_move_along() -> None:
    """Both managers over the same requests: equal logical tables. Compaction loses no byte."""
    stock, ours = manager_of(kvpool.lmdeploy._StockLogical, 400, 100, 3), manager_of(
        kvpool.lmdeploy.LogicalAllocator, 400, 100, 3
    )
    dice = random.Random(11)
    memory: dict[int, int] = {}
    running: list[tuple[SimpleNamespace, SimpleNamespace]] = []
    moved = 0

    def copy(pairs: list[tuple[int, int]]) -> None:
        assert not {target for _, target in pairs} & set(memory)
        for source, target in pairs:
            memory[target] = memory.pop(source)

    for _ in range(3000):
        if dice.random() < 0.3:
            tokens = dice.randrange(1, 30 * BLOCK)
            pair = (sequence_of(tokens), sequence_of(tokens))
            assert stock.can_allocate(pair[0]) == ours.can_allocate(pair[1])
            if stock.can_allocate(pair[0]):
                running.append(pair)
        for pair in running:
            for sequence, manager in zip(pair, (stock, ours)):
                sequence.num_all_ids += dice.randrange(1, 2)
            if stock.can_allocate(pair[0]):
                for sequence, manager in zip(pair, (stock, ours)):
                    manager.allocate(sequence)
            assert (table_of(pair[0]) == table_of(pair[1])).all()
            for logical, place in zip(table_of(pair[1]), ours.get_block_table(pair[1])):
                assert 3 <= place < 400
                assert memory.setdefault(int(place), int(logical)) == logical
        if running and (dice.random() < 0.3 or len(running) > 25):
            pair = running.pop(dice.randrange(len(running)))
            for place in ours.get_block_table(pair[1]):
                del memory[int(place)]
            stock.free(pair[0])
            ours.free(pair[1])
        if dice.random() < 0.1:
            moved += ours.allocator.defragment([table_of(pair[1]) for pair in running], copy, moves_max=64)
        assert stock.get_num_free_gpu_blocks() == ours.get_num_free_gpu_blocks()
    assert moved > 200
    counts = ours.allocator.get_phy_allocator("gpu").frames.audit()
    assert counts["owned"] == sum(len(table_of(pair[1])) for pair in running) == len(memory)


def test_swaps_keep_their_places_apart() -> None:
    manager = manager_of(kvpool.lmdeploy.LogicalAllocator, 20, 10)
    sequence = sequence_of(8 * BLOCK)
    manager.allocate(sequence)
    sequence.logical_blocks = SwapTable(sequence.logical_blocks)
    done, pairs = manager.try_swap_out(sequence)
    assert done and len(pairs) == 8
    assert manager.on_device(sequence, "cpu")
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (20, 2)
    done, _ = manager.try_swap_in(sequence)
    assert done and manager.on_device(sequence, "gpu")
    with pytest.raises(MemoryError):
        manager.allocator.allocate(13, "gpu")
    assert manager.get_num_free_gpu_blocks() == 12


class SwapTable:
    """Swapping indexes arrays by the table itself."""

    def __init__(self, table: LogicalTokenBlocks) -> None:
        self.table = table

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.array(self.table.get_real_blocks(), dtype=dtype)

    def __len__(self) -> int:
        return len(self.table)

    def __getattr__(self, name: str):
        return getattr(self.table, name)


def test_double_frees_are_named_and_change_nothing() -> None:
    allocator = kvpool.lmdeploy.LogicalAllocator(0, 50)
    blocks = allocator.allocate(10)
    shared = blocks[:3]
    allocator.add_ref_count(shared, 1)
    allocator.free(np.concatenate([shared, shared]))
    assert allocator.get_phy_allocator("gpu").get_num_free_blocks() == allocator.get_num_free_blocks() == 43
    with pytest.raises(FrameRefused, match=f"entry 1: logical block {blocks[0]} is freed more often") as refused:
        allocator.free(np.array([blocks[5], blocks[0]]))
    assert (refused.value.index, refused.value.frame) == (1, blocks[0])
    assert allocator.get_ref_count(blocks).tolist() == [0] * 3 + [1] * 7
    allocator.free(blocks[3:])
    assert allocator.get_phy_allocator("gpu").frames.audit()["owned"] == 0


def test_moves_leave_shared_blocks_and_give_way() -> None:
    allocator = kvpool.lmdeploy.LogicalAllocator(0, 64)
    singles = [allocator.allocate(1) for _ in range(32)]
    a, b = np.concatenate(singles[::2]), np.concatenate(singles[1::2])
    allocator.add_ref_count(a[:4], 1)
    places = allocator.get_physical_blocks(a).copy()
    moves = allocator.propose_moves([a, b], 28)
    assert len(moves.pairs) == 28
    allocator.free(b[:2])
    allocator.add_ref_count(a[10:11], 1)
    assert moves.commit() == 25
    now = allocator.get_physical_blocks(a)
    assert (now[:4] == places[:4]).all() and now[10] == places[10]
    assert kvpool.lmdeploy.runs(allocator.get_physical_blocks(b[2:])) == 1
    with pytest.raises(Closed):
        moves.commit()

    def fail(pairs: list[tuple[int, int]]) -> None:
        raise OSError("a worker is gone")

    pieces = np.concatenate([allocator.allocate(1) for _ in range(6)])
    allocator.free(pieces[1::2])
    before = allocator.get_physical_blocks(pieces).copy()
    with pytest.raises(OSError, match="a worker is gone"):
        allocator.defragment([pieces[::2]], fail)
    assert (allocator.get_physical_blocks(pieces) == before).all()
    frames = allocator.get_phy_allocator("gpu").frames
    assert frames.audit()["owned"] == 64 - allocator.get_num_free_blocks()


@pytest.mark.parametrize("change", ["freed and allocated", "swapped out and in"])
def test_moves_of_blocks_that_came_back_to_their_places_give_way(change: str) -> None:
    """A block of another owner at the same place, by the same number, is not the one that was copied."""
    allocator = kvpool.lmdeploy.LogicalAllocator(32, 64)
    singles = [allocator.allocate(1) for _ in range(32)]
    blocks = np.concatenate(singles[::2])
    sources = allocator.get_physical_blocks(blocks).copy()
    moves = allocator.propose_moves([blocks], 16)
    assert [source for source, _ in moves.pairs] == sources.tolist()
    if change == "freed and allocated":
        # Nothing else is free, so that the new owner gets the same ones.
        allocator.allocate(allocator.get_phy_allocator("gpu").get_num_free_blocks())
        allocator.free(blocks[2:])
        assert (np.sort(allocator.allocate(14)) == np.sort(blocks[2:])).all()
    else:
        allocator.update_phy_map(blocks[2:], allocator.get_phy_allocator("cpu").allocate(14))
        allocator.update_phy_map(blocks[2:], sources[2:])
    assert (allocator.get_physical_blocks(blocks) == sources).all()
    assert moves.commit() == 2
    assert (allocator.get_physical_blocks(blocks[2:]) == sources[2:]).all()


def test_changed_engine_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(self, blocks, now): ...

    stock = base_block_manager.LogicalAllocator
    kvpool.lmdeploy.install()
    assert base_block_manager.LogicalAllocator is kvpool.lmdeploy.LogicalAllocator
    base_block_manager.LogicalAllocator = stock
    base_block_manager.PhysicalAllocator = kvpool.lmdeploy._StockPhysical
    monkeypatch.setattr(kvpool.lmdeploy._StockLogical, "free", free)
    with pytest.raises(kvpool.lmdeploy.EngineChanged, match=r"LogicalAllocator\.free\(self, blocks, now\)"):
        kvpool.lmdeploy.install()
