"""Cases of kvpool under LMCache, run in its environment by `test_lmcache.py`."""

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
    manager.free(address, 4 * PAGE)
    with pytest.raises(FrameRefused, match=f"frame {address // PAGE} is free"):
        manager.free(address, size)
    assert manager.total_allocated_size == 6 * PAGE
    manager.free(address + 4 * PAGE, 6 * PAGE)
    for region in ((1, PAGE), (0, PAGE - 1), (0, 0)):
        with pytest.raises(InvalidArgument):
            manager.free(*region)
    with pytest.raises(FrameRefused):
        manager.free(99 * PAGE, 2 * PAGE)
    assert manager.check_consistency()
    assert manager.get_free_size() == 100 * PAGE


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
    assert manager.get_heap_size() == 10 * PAGE
