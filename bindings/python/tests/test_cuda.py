"""Pools of a CUDA device, on the mock driver of `cuda-tests`; needs a build with the feature `cuda`.

`.ci/full python` builds both, and names the driver in `KVPOOL_MOCK_CUDA`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Iterator

import kvpool
import pytest
from conftest import TOKENS, layout

DRIVER = os.environ.get("KVPOOL_MOCK_CUDA")
pytestmark = pytest.mark.skipif(DRIVER is None, reason="KVPOOL_MOCK_CUDA names no driver")


@pytest.fixture(scope="module")
def driver() -> ctypes.CDLL:
    # Loaded first: its name is what the search for libcuda finds.
    driver = ctypes.CDLL(DRIVER, mode=ctypes.RTLD_GLOBAL)
    context = ctypes.c_void_p()
    assert driver.cuInit(0) == 0
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxSetCurrent(context) == 0
    return driver


@pytest.fixture
def stream(driver: ctypes.CDLL) -> Iterator[ctypes.c_void_p]:
    stream = ctypes.c_void_p()
    assert driver.cuStreamCreate(ctypes.byref(stream), 1) == 0
    yield stream
    driver.kvp_mock_resume()
    assert driver.cuStreamDestroy_v2(stream) == 0


@pytest.fixture
def pool(driver: ctypes.CDLL) -> Iterator[kvpool.Pool]:
    pool = kvpool.Pool(layout(), 20, prefix_cache=True, device="cuda:0")
    yield pool
    pool.audit()


def end_of_batches(driver: ctypes.CDLL, pool: kvpool.Pool, stream: ctypes.c_void_p) -> None:
    driver.kvp_mock_resume()
    assert driver.cuStreamSynchronize(stream) == 0
    # The pool hears of it on a thread of the driver.
    deadline = time.monotonic() + 30
    while pool.stats().batches_in_flight > 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert pool.stats().batches_in_flight == 0


def test_a_batch_ends_with_its_stream(driver: ctypes.CDLL, pool: kvpool.Pool, stream: ctypes.c_void_p) -> None:
    prompt = range(9)
    sequence, batch = pool.sequence(1, prompt), pool.begin_batch(stream=stream.value)
    batch.append(sequence, 9)
    view = pool.view(sequence, 0, 0)
    assert not view.readonly and view.__dlpack_device__() == (2, 0) and view.device == "cuda:0"
    assert view.__cuda_array_interface__["data"] == (view.address, False)
    with pytest.raises(kvpool.Busy, match=f"block {sequence.blocks[0]} would become final"):
        batch.finish()
    assert not batch.finished
    del view
    gc.collect()
    driver.kvp_mock_pause()
    batch.finish()
    assert batch.finished and pool.stats().batches_in_flight == 1
    # It becomes final when the stream gets there: a view that began now could write it later.
    assert not pool.info(sequence.handles[0]).sealed
    view = pool.view(sequence, 0, 0)
    assert view.readonly and view.__cuda_array_interface__["data"][1]
    del view
    assert len(pool.sequence(2, prompt)) == 0
    end_of_batches(driver, pool, stream)
    assert pool.info(sequence.handles[0]).sealed and len(pool.sequence(3, prompt)) == 2 * TOKENS
    # An open block can be written, also by the next batch.
    with pool.begin_batch(stream=stream.value) as batch:
        batch.append(sequence, 1)
        assert not pool.view(sequence, 2, 0).readonly
    end_of_batches(driver, pool, stream)
    sequence.close()


def test_an_exception_ends_a_batch_on_a_stream(driver: ctypes.CDLL, pool: kvpool.Pool, stream: ctypes.c_void_p) -> None:
    prompt = range(9)
    with pytest.raises(ZeroDivisionError), pool.sequence(1, prompt) as sequence:
        with pool.begin_batch(stream=stream.value) as batch:
            batch.append(sequence, 9)
            1 / 0  # noqa: B018
    end_of_batches(driver, pool, stream)
    assert batch.finished and len(pool.sequence(2, prompt)) == 0


def test_device_memory_is_no_buffer(pool: kvpool.Pool) -> None:
    plane = pool.plane(0)
    with pytest.raises(BufferError, match="the memory is on a device; use DLPack"):
        memoryview(plane)
    with pytest.raises(BufferError, match="exported there only"):
        plane.__dlpack__(dl_device=(1, 0))
    assert "dltensor_versioned" in repr(plane.__dlpack__(max_version=(1, 0), stream=1))


def test_devices_that_are_not_there(driver: ctypes.CDLL) -> None:
    with pytest.raises(kvpool.StorageError):
        kvpool.Pool(layout(), 4, device="cuda:99")
    for name in ("cuda:", "cuda:x", "cuda:-1", "rocm:0"):
        with pytest.raises(kvpool.BuildError, match="it is host or cuda:N"):
            kvpool.Pool(layout(), 4, device=name)
