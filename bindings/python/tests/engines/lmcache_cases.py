"""Cases of kvpool under LMCache, run in its environment by `test_lmcache.py`."""

import threading

import pytest

import kvpool.lmcache
from kvpool.errors import FrameRefused, InvalidArgument, ResizeError

PAGE = 4096


def test_install_reaches_modules_that_imported_the_class() -> None:
    from lmcache.v1.memory_allocators import tensor_memory_allocator

    kvpool.lmcache.install()
    assert tensor_memory_allocator.AddressManager is kvpool.lmcache.AddressManager


def test_changed_engine_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(self, address): ...

    monkeypatch.setattr(kvpool.lmcache._Stock, "free", free)
    with pytest.raises(kvpool.lmcache.EngineChanged, match=r"AddressManager\.free\(self, address\)"):
        kvpool.lmcache.install()
    monkeypatch.undo()
    monkeypatch.setattr(kvpool.lmcache._Stock, "shrink", free, raising=False)
    with pytest.raises(kvpool.lmcache.EngineChanged, match="shrink is missing"):
        kvpool.lmcache.install()


def test_double_frees_and_strange_regions_are_refused() -> None:
    manager = kvpool.lmcache.AddressManager(100 * PAGE)
    address, size = manager.allocate(10 * PAGE)
    behind, _ = manager.allocate(10 * PAGE)
    assert behind == address + size
    for region in ((1, PAGE), (address, PAGE - 1), (address, 0), (address, -PAGE)):
        with pytest.raises(InvalidArgument, match="multiples of 4096"):
            manager.free(*region)
    for region, why in (
        ((address, size + PAGE), f"it ends inside the region of {size} bytes at {behind}"),
        ((address, size - PAGE), f"it ends inside the region of {size} bytes at {address}"),
        ((address + PAGE, size - PAGE), f"no region begins at {address + PAGE}"),
        ((address, 2 * size + PAGE), f"no region begins at {behind + size}"),
        ((1 << 40, PAGE), "no region begins at"),
    ):
        with pytest.raises(FrameRefused, match=why):
            manager.free(*region)
    assert manager.total_allocated_size == 2 * size
    manager.free(address, size)
    with pytest.raises(FrameRefused, match=f"no region begins at {address}") as refused:
        manager.free(address, size)
    assert refused.value.frame == address // PAGE
    with pytest.raises(FrameRefused, match="Nothing was freed"):
        manager.free(address, 2 * size)
    manager.free(behind, size)
    assert manager.check_consistency()
    assert manager.get_free_size() == 100 * PAGE


def test_neighbours_are_freed_in_one_call() -> None:
    """LMCache joins regions that it frees together."""
    manager = kvpool.lmcache.AddressManager(100 * PAGE)
    regions = sorted(manager.batched_allocate(3 * PAGE, 10))
    begin = regions[0][0]
    assert [address - begin for address, _ in regions] == [3 * PAGE * at for at in range(10)]
    manager.free(begin + 3 * PAGE, 6 * PAGE)
    assert manager.total_allocated_size == 24 * PAGE
    with pytest.raises(FrameRefused, match=f"no region begins at {begin + 3 * PAGE}. Nothing was freed"):
        manager.free(begin, 9 * PAGE)
    manager.free(begin, 3 * PAGE)
    manager.free(begin + 9 * PAGE, 21 * PAGE)
    assert manager.get_free_size() == 100 * PAGE and manager.check_consistency()


def test_racing_frees_of_one_region_free_it_once() -> None:
    manager = kvpool.lmcache.AddressManager(100 * PAGE)
    outcomes: list[str] = []

    def free(barrier: threading.Barrier, region: tuple[int, int]) -> None:
        barrier.wait()
        try:
            manager.free(*region)
            outcomes.append("freed")
        except FrameRefused:
            outcomes.append("refused")

    for _ in range(50):
        barrier = threading.Barrier(3)
        region = manager.allocate(7 * PAGE)
        threads = [threading.Thread(target=free, args=(barrier, region)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert outcomes.count("freed") == 50 and outcomes.count("refused") == 100
    assert manager.total_allocated_size == 0 and manager.check_consistency()


def test_checks_beside_running_calls_find_nothing() -> None:
    manager = kvpool.lmcache.AddressManager(1 << 28)
    done = threading.Event()
    calls = [0] * 3

    def work(number: int) -> None:
        while not done.is_set():
            regions = [manager.allocate(5 * PAGE) for _ in range(20)]
            for region in regions:
                manager.free(*region)
            calls[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            before = sum(calls)
            assert manager.check_consistency()
            while sum(calls) < before + 3:
                pass
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert manager.total_allocated_size == 0


def test_a_real_inconsistency_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = kvpool.lmcache.AddressManager(100 * PAGE)
    region = manager.allocate(PAGE)
    manager._pool.allocate(3)
    assert not manager.check_consistency()
    # Nobody waits for the check any more.
    manager.free(*region)


def test_refused_batches_change_nothing() -> None:
    manager = kvpool.lmcache.AddressManager(100 * PAGE)
    with pytest.raises(RuntimeError, match="no enough memory"):
        manager.batched_allocate(30 * PAGE, 4)
    assert manager.total_allocated_size == 0
    assert len(manager.batched_allocate(30 * PAGE, 3)) == 3


def test_growth_is_bounded_and_named() -> None:
    manager = kvpool.lmcache.AddressManager(0)
    with pytest.raises(RuntimeError, match="no memory is available"):
        manager.allocate(1)
    manager.sbrk(10 * PAGE)
    assert manager.allocate(10 * PAGE) == (0, 10 * PAGE)
    with pytest.raises(ResizeError):
        manager.sbrk(1 << 50)
    for size in (-1, -PAGE):
        with pytest.raises(InvalidArgument, match=f"cannot grow by {size} bytes"):
            manager.sbrk(size)
    manager.sbrk(0)
    assert manager.get_heap_size() == 10 * PAGE
    assert manager.check_consistency()
