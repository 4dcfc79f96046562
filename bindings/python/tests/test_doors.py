"""The integrations that replace a whole class of an engine, over stand-ins for the engines: no download.

The classes below have the signatures of the engines' and nothing else. Integrations that extend an engine's
class need its code: `.ci/full` runs them all, with the engines.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType

import numpy as np
import pytest
from kvpool._drift import EngineChanged
from kvpool._versions import check_version
from kvpool.errors import FrameRefused, InvalidArgument
from kvpool_plugin.sglang import register


class AddressManager:
    """LMCache's."""

    ALIGN_BYTES = 4096

    def __init__(self, size: int, align_bytes: int = ALIGN_BYTES): ...
    def compute_aligned_size(self, raw_size): ...
    def allocate(self, size): ...
    def batched_allocate(self, size, batch_size): ...
    def free(self, address, size): ...
    def sbrk(self, size): ...
    def get_heap_size(self): ...
    def get_free_size(self): ...
    def check_consistency(self): ...
    @property
    def total_allocated_size(self): ...


class Tensor(np.ndarray):
    """As much of torch as host pools use."""

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> np.ndarray:
        return np.asarray(self)


TORCH = {
    "Tensor": Tensor,
    "uint8": np.uint8,
    "int64": np.int64,
    "zeros": lambda size, dtype, device: np.zeros(size, dtype).view(Tensor),
    "empty": lambda size, dtype: np.empty(size, dtype).view(Tensor),
    "from_numpy": lambda array: array.view(Tensor),
}


class HostKVCache:
    """SGLang's."""

    dcp_size, logical_size, _merge_release_slots = 1, 0, None

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_num, self.page_size, self.size = pages, page_size, pages * page_size
        self.logical_size, self.device, self.lock = self.size, "cpu", nullcontext()
        self.clear()

    def clear(self):
        self.is_stock = True

    def available_size(self): ...
    def alloc(self, need_size): ...
    def free(self, indices): ...


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Imports a door of kvpool over modules with these contents."""

    def load(name: str, modules: dict[str, dict]) -> ModuleType:
        for full, contents in modules.items():
            module = ModuleType(full)
            vars(module).update(contents)
            monkeypatch.setitem(sys.modules, full, module)
            parent, _, child = full.rpartition(".")
            if parent:
                monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
        for full in [full for full in sys.modules if full == name or full.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, full)
        return importlib.import_module(name)

    return load


@pytest.fixture
def lmcache(door: Callable) -> ModuleType:
    logging_of = {"init_logger": logging.getLogger}
    memory = {"AddressManager": type("AddressManager", (), dict(vars(AddressManager)))}
    modules = {"lmcache": {"__version__": "0.5.6"}, "lmcache.logging": logging_of, "lmcache.v1": {}}
    return door("kvpool.lmcache", modules | {"lmcache.v1.memory_management": memory})


@pytest.fixture
def host(door: Callable) -> ModuleType:
    base = {"HostKVCache": type("HostKVCache", (), dict(vars(HostKVCache)))}
    names = ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.pool_host")
    modules = {name: {} for name in names} | {"torch": TORCH, "sglang.version": {"__version__": "0.5.23"}}
    return door("kvpool.sglang.host", modules | {"sglang.srt.mem_cache.pool_host.base": base})


def test_addresses_of_lmcache_are_frames(lmcache: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    from lmcache.v1 import memory_management

    lmcache.install()
    with caplog.at_level(logging.INFO):
        space = memory_management.AddressManager(1 << 20)
    assert "kvpool active: an address space of 1048576 bytes in frames of 4096" in caplog.text
    first, size = space.allocate(10_000)
    others = space.batched_allocate(4096, 3)
    assert (size, space.total_allocated_size) == (12_288, 24_576)
    assert len({first, *(address for address, _ in others)}) == 4 and space.check_consistency()
    space.free(first, size)
    with pytest.raises(FrameRefused, match=f"12288 bytes at {first} is not allocated"):
        space.free(first, size)
    with pytest.raises(RuntimeError, match="no memory is available"):
        space.allocate(1 << 20)
    space.sbrk(1 << 20)
    assert space.allocate(1 << 20)[1] == 1 << 20


def test_a_changed_lmcache_is_refused_by_name(lmcache: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache._Stock, "free", lambda self, address: None)
    with pytest.raises(EngineChanged, match=r"AddressManager\.free\(self, address\)"):
        lmcache.install()
    monkeypatch.undo()
    monkeypatch.setattr(lmcache, "__version__", "0.5.7")
    with pytest.raises(EngineChanged, match=r"LMCache 0\.5\.7 is not one of the versions .* \(0\.5\.6\)"):
        lmcache.install()


def test_pages_of_sglang_are_frames(host: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    stock = host._StockHost(8, 4)
    assert stock.is_stock and not hasattr(stock, "frames")
    host.install()
    with caplog.at_level(logging.INFO):
        pool = host._StockHost(8, 4)
    assert "kvpool active: 8 pages of 4 slots" in caplog.text
    slots = pool.alloc(12)
    assert slots.tolist() == list(range(slots[0], slots[0] + 12)) and pool.available_size() == 20
    with pytest.raises(InvalidArgument, match="of 4 slots would be freed in part"):
        pool.free(slots[:6])
    assert pool.free(slots[::-1]) == 12
    with pytest.raises(AssertionError, match="Double-free"):
        pool.free(slots)
    assert pool.alloc(36) is None and pool.available_size() == 32
    pool.frames.audit()
    host.install("off")
    assert host._StockHost(8, 4).frames is None


def test_a_changed_sglang_ends_a_process_that_asks_for_kvpool(host: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "__version__", "0.5.24")
    register()  # It was not asked for.
    monkeypatch.setenv("SGLANG_PLUGINS", "other, kvpool")
    with pytest.raises(SystemExit, match=r"kvpool cannot be used: SGLang 0\.5\.24 is not one of the versions"):
        register()


def test_versions_are_refused_by_name_unless_permitted(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    check_version("Engine", "1.2+cpu", "1.1", "1.2")
    message = "Engine 1.3 is not one of the versions that kvpool was tested with (1.1, 1.2)"
    with pytest.raises(EngineChanged) as refused:
        check_version("Engine", "1.3", "1.1", "1.2")
    assert str(refused.value) == f"{message}; KVPOOL_ENGINE_UNTESTED=1 tries it" and refused.value.engine == "Engine 1.3"
    monkeypatch.setenv("KVPOOL_ENGINE_UNTESTED", "1")
    check_version("Engine", "1.3", "1.1", "1.2")
    assert message in caplog.text
