"""Memory of the pool in other libraries, without copies."""

from __future__ import annotations

import gc
import hashlib

import kvpool
import numpy as np
import pytest
from conftest import TOKENS, layout


def test_a_view_is_the_blocks_memory(pool: kvpool.Pool) -> None:
    with pool.sequence(1) as sequence, pool.begin_batch() as batch:
        batch.append(sequence, 6)
        view = np.asarray(pool.view(sequence, 1, 0, "k"))
        assert view.shape == (TOKENS, 2, 8) and view.dtype == np.float32
        k, v = np.ones((2, 2, 8), np.float32), np.zeros((2, 2, 8), np.float32)
        batch.store(sequence, 0, 4, 6, k, v)
        assert (view[:2] == 1).all()
        view[0] = 7
        assert (np.frombuffer(batch.load(sequence, 0, 4, 5)[0], np.float32) == 7).all()
        # The same memory in the tensor of all frames.
        frame = batch.slots(sequence, 4, 5)[0] // TOKENS
        whole = np.from_dlpack(pool.plane(0, "k"))
        assert whole.shape == (101, TOKENS, 2, 8)
        assert (whole[frame, 0] == 7).all() and whole[frame].ctypes.data == view.ctypes.data
        memory = memoryview(pool.view(sequence, 1, 0, "v"))
        assert memory.shape == (TOKENS, 2, 8) and memory.c_contiguous and not memory.readonly
        memory.release()
        del view
        gc.collect()


def test_a_view_keeps_its_block(pool: kvpool.Pool) -> None:
    lease = pool.try_allocate(4)
    handle = lease.handles[1]
    tensor = pool.view(lease, 1, 0)
    array = np.from_dlpack(tensor)
    del tensor
    assert pool.info(handle).pins == 1
    for call in (lease.close, lambda: lease.truncate(0), lambda: lease.split_off(1), lease.into_handles):
        with pytest.raises(kvpool.Busy, match="1 views of its blocks exist; delete them first"):
            call()
    with pytest.raises(kvpool.Busy, match="cannot seal blocks: 1 writable views"):
        lease.seal()
    address = array.ctypes.data
    del lease, call  # the view keeps it
    gc.collect()
    array[:] = 3
    assert pool.stats().used == 4 and array.ctypes.data == address
    del array
    gc.collect()
    assert pool.stats().used == 0


def test_views_of_sealed_blocks_are_read_only(pool: kvpool.Pool) -> None:
    with pool.try_allocate(1) as lease:
        lease.seal()
        tensor = pool.view(lease, 0, 0)
        assert tensor.readonly and memoryview(tensor).readonly
        assert not np.asarray(tensor).flags.writeable
        with pytest.raises(BufferError, match="read only by consumers of DLPack 1.0"):
            tensor.__dlpack__()
        assert not np.from_dlpack(tensor).flags.writeable
        del tensor
        gc.collect()
        assert lease.reopen(0)


def test_sequences_with_views_do_not_let_go_of_blocks(pool: kvpool.Pool) -> None:
    other = kvpool.Pool(layout(), 10)
    sequence = pool.sequence(1)
    with pool.begin_batch() as batch:
        batch.append(sequence, 6)
    view = pool.view(sequence, 1, 0)
    for call in (sequence.close, lambda: sequence.truncate(1), lambda: sequence.fork(2), lambda: pool.migrate_blocking(sequence, other)):
        with pytest.raises(kvpool.Busy, match="1 views"):
            call()
    with pool.begin_batch() as batch:
        assert batch.append(sequence, 1).copied is None
    del view
    with sequence.fork(2):
        with pytest.raises(kvpool.SequenceError, match="block 1 of sequence 1 is shared and not full"):
            pool.view(sequence, 1, 0)
        assert pool.view(sequence, 0, 0).readonly


def test_element_types() -> None:
    codes = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "fp8_e4m3": np.uint8, "fp8_e5m2": np.uint8, "int8": np.int8}
    for name, dtype in codes.items():
        plane = kvpool.Pool(layout(name), 4).plane(1, "v")
        array = np.asarray(plane)
        assert (plane.dtype, array.dtype, array.nbytes) == (name, dtype, plane.nbytes)
        assert plane.__dlpack_device__() == (1, 0) and plane.device == "host"
        assert plane.address == array.ctypes.data
        assert not hasattr(plane, "__cuda_array_interface__")
    scales = kvpool.Pool(layout("int8", dynamic_scales=True), 4).plane(0, "k_scales")
    assert scales.shape == (5, TOKENS, 2, 1) and scales.dtype == "f32"


def test_interleaved_planes_have_strides() -> None:
    pool = kvpool.Pool(layout(joined=True), 4)
    k, v = np.asarray(pool.plane(0, "k")), np.asarray(pool.plane(0, "v"))
    assert k.strides[0] == 2 * k[0].nbytes and v.ctypes.data == k.ctypes.data + k[0].nbytes
    assert (np.from_dlpack(pool.plane(0, "v")).strides, k.shape) == (v.strides, (5, TOKENS, 2, 8))
    with pytest.raises(BufferError, match="the consumer must accept strides"):
        hashlib.sha256(pool.plane(0, "k"))


def test_dlpack_refuses_what_it_cannot_do(pool: kvpool.Pool) -> None:
    plane = pool.plane(0)
    for arguments, message in [({"copy": True}, "without copies"), ({"dl_device": (2, 0)}, "exported there only")]:
        with pytest.raises(BufferError, match=message):
            plane.__dlpack__(**arguments)
    for arguments in [{}, {"max_version": (1, 0)}, {"stream": None, "copy": False, "dl_device": (1, 0)}]:
        capsule = plane.__dlpack__(**arguments)  # not consumed
        del capsule
    without = kvpool.Pool(layout(), 4, storage=False)
    with pytest.raises(kvpool.StorageError, match="built without storage"):
        without.plane(0)


def test_a_table_with_views_is_not_filled(pool: kvpool.Pool) -> None:
    table = kvpool.BlockTable()
    with pool.sequence(1) as sequence, pool.begin_batch() as batch:
        batch.append(sequence, 9)
        batch.block_table([sequence], table)
        view = memoryview(table)
        assert view.tolist() == [table.row(0)] and view.readonly
        with pytest.raises(kvpool.Busy, match="1 views of the table exist"):
            batch.block_table([sequence], table)
        view.release()
        batch.block_table([sequence], table)
    without_null = kvpool.Pool(layout(), 4, null_block=False)
    with without_null.sequence(1) as sequence, without_null.begin_batch() as batch:
        batch.append(sequence, 1)
        out = np.zeros((1, 3), np.int64)
        batch.block_table([sequence], out)
        assert out.tolist() == [[batch.slots(sequence, 0, 1)[0] // TOKENS, -1, -1]]
