"""Memory of the pool in other libraries, without copies."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import threading
import time

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
    for call in (lease.close, lambda: lease.truncate(0), lambda: lease.split_off(1)):
        with pytest.raises(kvpool.Busy, match="1 views of its blocks exist; delete them first"):
            call()
    with pytest.raises(kvpool.Busy, match=f"cannot seal blocks: block {handle.block} would become final"):
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
    for call in (sequence.close, lambda: sequence.truncate(1), lambda: sequence.fork(2), lambda: pool.migrate(sequence, other).wait()):
        with pytest.raises(kvpool.Busy, match="1 views"):
            call()
    with pool.begin_batch() as batch:
        assert batch.append(sequence, 1).copied is None
    del view
    with sequence.fork(2):
        with pytest.raises(kvpool.SequenceError, match="block 1 of sequence 1 is not full, and shared or final"):
            pool.view(sequence, 1, 0)
        assert pool.view(sequence, 0, 0).readonly


def as_views(pool: kvpool.Pool, sequence: kvpool.Sequence, place: int) -> list[object]:
    """A view of each kind."""
    tensor = pool.view(sequence, place, 0)
    return [tensor, memoryview(tensor), np.asarray(tensor), np.from_dlpack(tensor)]


def test_a_batch_does_not_end_under_a_writable_view(pool: kvpool.Pool) -> None:
    prompt = list(range(10))
    for kind in range(4):
        sequence = pool.sequence(kind, prompt)
        batch = pool.begin_batch()
        batch.append(sequence, 10 - len(sequence))
        pool.prefix_cache.clear()  # so that each round fills its blocks itself
        assert len(sequence) == 10
        block = sequence.blocks[1]
        view = as_views(pool, sequence, 1)[kind]
        for end in (batch.finish, lambda: batch.__exit__(None, None, None)):
            with pytest.raises(kvpool.Busy, match=f"cannot end the batch: block {block} would become final") as refused:
                end()
            assert (refused.value.kind, refused.value.block, refused.value.views) == ("Viewed", block, 1)
        # Nothing is lost: the batch is in flight, and the sequence as it was.
        assert not batch.finished and pool.stats().batches_in_flight == 1
        assert (len(sequence), pool.info(sequence.handles[1]).sealed) == (10, False)
        batch.append(sequence, 1)
        del view, refused
        gc.collect()
        batch.finish()
        assert pool.info(sequence.handles[1]).sealed and pool.view(sequence, 1, 0).readonly
        sequence.close()
        pool.prefix_cache.clear()
    assert pool.stats().used == 0


def test_views_of_open_blocks_outlive_batches(pool: kvpool.Pool) -> None:
    with pool.sequence(1) as sequence:
        with pool.begin_batch() as batch:
            batch.append(sequence, 6)
            view = np.asarray(pool.view(sequence, 1, 0))  # half full
        with pool.begin_batch() as batch:
            batch.append(sequence, 1)
            view[:] = 3
        with pytest.raises(kvpool.Busy, match="cannot end the batch"), pool.begin_batch() as batch:
            batch.append(sequence, 1)
        assert not batch.finished and len(sequence) == 8
        del view
        gc.collect()
        batch.finish()


def test_bytes_that_others_share_are_never_writable(pool: kvpool.Pool) -> None:
    """What a view wrote too late would change the hit of another sequence."""
    prompt = list(range(8))
    sequence, batch = pool.sequence(1, prompt), pool.begin_batch()
    batch.append(sequence, 8)
    view = np.asarray(pool.view(sequence, 0, 0))
    view[:] = 1
    with pytest.raises(kvpool.Busy):
        batch.finish()
    assert len(pool.sequence(2, prompt)) == 0
    del view
    gc.collect()
    batch.finish()
    with pool.sequence(3, prompt) as other:
        assert len(other) == 4  # at least one token is computed
        shared = np.asarray(pool.view(other, 0, 0))
        assert (shared == 1).all() and not shared.flags.writeable
        del shared
        gc.collect()
    sequence.close()


def test_blocks_of_drafts_do_not_become_final_under_a_writable_view(pool: kvpool.Pool) -> None:
    with pool.sequence(1) as sequence, pool.begin_batch() as batch:
        batch.draft(sequence, 9)
        view = np.asarray(pool.view(sequence, 1, 0))
        sequence.commit(4)
        block = sequence.blocks[1]
        with pytest.raises(kvpool.Busy, match=f"cannot commit tokens: block {block} would become final"):
            sequence.commit(8)
        assert sequence.committed == 4
        del view
        gc.collect()
        sequence.commit(8)


def test_an_append_makes_no_block_final_under_a_writable_view(pool: kvpool.Pool) -> None:
    sequence, other = pool.sequence(1), pool.sequence(2)
    first, second = pool.begin_batch(), pool.begin_batch()
    first.append(sequence, 3)
    second.append(sequence, 1)  # the other writer is in flight: the sequence itself seals the block, later
    view = np.asarray(pool.view(sequence, 0, 0))
    first.finish()
    second.finish()
    with pool.begin_batch() as batch:
        batch.append(other, 1)
        for append in (
            lambda: batch.append(sequence, 1),
            lambda: batch.append_tokens(sequence, [1]),
            lambda: batch.advance(sequence),
            lambda: batch.draft(sequence, 1),
            lambda: batch.decode([other, sequence]),
        ):
            with pytest.raises(kvpool.Busy, match=f"block {sequence.blocks[0]} would become final"):
                append()
        assert (len(sequence), len(other), pool.info(sequence.handles[0]).sealed) == (4, 1, False)
        del view, append
        gc.collect()
        # What is due is final before it is viewed.
        assert pool.view(sequence, 0, 0).readonly
        batch.append(sequence, 1)
    sequence.close()
    other.close()


def test_views_of_blocks_that_an_append_may_replace_are_refused(pool: kvpool.Pool) -> None:
    with pool.sequence(1) as sequence, pool.begin_batch() as first:
        first.append(sequence, 4)
        sequence.truncate(2)
        with pytest.raises(kvpool.SequenceError, match="the next append may replace it"):
            pool.view(sequence, 0, 0)
        with pool.begin_batch() as second:
            assert second.append(sequence, 1).copied is not None


def test_an_exception_ends_the_batch_under_any_view(pool: kvpool.Pool) -> None:
    prompt = list(range(8))
    escaped: list[np.ndarray] = []
    with pytest.raises(ZeroDivisionError) as raised:
        with pool.sequence(1, prompt) as sequence, pool.begin_batch() as batch:
            batch.append(sequence, 8)
            escaped.append(np.asarray(pool.view(sequence, 0, 0)))
            1 / 0  # noqa: B018
    assert raised.value.__context__ is None, "no exception of ours hides it"
    assert batch.finished and pool.stats().batches_in_flight == 0
    escaped[0][:] = 7
    assert len(pool.sequence(2, prompt)) == 0, "what it may still write is not found"
    with pytest.raises(kvpool.Busy, match="cannot fork the sequence: 1 views"):
        sequence.fork(3)
    # The view keeps the sequence, which is closed when it ends.
    assert not sequence.closed
    escaped.clear()
    gc.collect()
    sequence.close()
    lease = pool.try_allocate(1)
    with pytest.raises(ZeroDivisionError), lease:
        view = pool.view(lease, 0, 0)
        1 / 0  # noqa: B018
    del view, lease
    gc.collect()
    assert pool.stats().used == 0


def test_a_view_that_began_elsewhere_stops_the_end_of_a_batch() -> None:
    """Views begin and batches end in several threads: a writable view never sees its block final."""
    pool = kvpool.Pool(layout(), 64, prefix_cache=True)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(30):
                prompt = [number, step] * 4
                with pool.sequence(number * 1000 + step, prompt) as sequence:
                    batch = pool.begin_batch()
                    batch.append(sequence, 8)
                    start = threading.Barrier(2)

                    def end(batch: kvpool.Batch = batch, start: threading.Barrier = start) -> None:
                        start.wait(30)
                        while not batch.finished:
                            try:
                                batch.finish()
                            except kvpool.Busy:
                                time.sleep(0.001)

                    ending = threading.Thread(target=end)
                    ending.start()
                    start.wait(30)
                    handle = sequence.handles[1]
                    view = memoryview(pool.view(sequence, 1, 0))
                    for _ in range(0 if view.readonly else 20):
                        assert not pool.info(handle).sealed
                        time.sleep(0)
                    view.release()
                    ending.join()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    pool.audit()


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
    for arguments in [{}, {"max_version": (1, 0)}, {"max_version": (1, 3), "stream": 2**64}, {"stream": None, "copy": False, "dl_device": (1, 0)}]:
        capsule = plane.__dlpack__(**arguments)  # not consumed
        del capsule
    without = kvpool.Pool(layout(), 4, storage=False)
    with pytest.raises(kvpool.StorageError, match="built without storage"):
        without.plane(0)


class ManagedTensor(ctypes.Structure):
    """The beginning of DLPack's DLManagedTensorVersioned."""

    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]


def test_dlpack_versions_of_element_types() -> None:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    for dtype, minor in {"f32": 0, "f16": 0, "bf16": 0, "int8": 0, "fp8_e4m3": 1, "fp8_e5m2": 1}.items():
        plane = kvpool.Pool(layout(dtype), 4).plane(0)
        capsule = plane.__dlpack__(max_version=(1, 0))
        tensor = ManagedTensor.from_address(pointer(capsule, b"dltensor_versioned"))
        assert (tensor.major, tensor.minor) == (1, minor)
        if minor == 0:
            assert "dltensor" in repr(plane.__dlpack__(max_version=(0, 8)))
        else:
            with pytest.raises(BufferError, match="has a code since DLPack 1.1"):
                plane.__dlpack__()


# Of Python's object.h.
STRIDES, C_CONTIGUOUS, F_CONTIGUOUS, ANY_CONTIGUOUS = 0x18, 0x38, 0x58, 0x98


def exports(owner: object, flags: int) -> bool:
    """Whether a buffer of these properties can be had."""
    view = (ctypes.c_byte * 256)()
    get = ctypes.pythonapi.PyObject_GetBuffer
    get.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
    try:
        get(owner, ctypes.addressof(view), flags)
    except BufferError:
        return False
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
    return True


def test_orders_of_dimensions(pool: kvpool.Pool) -> None:
    with pool.sequence(1) as first, pool.sequence(2) as second, pool.begin_batch() as batch:
        batch.append(first, 9)
        batch.append(second, 9)
        for sequences, has_fortran_order in [([first, second], False), ([first], True), ([], True)]:
            table = kvpool.BlockTable()
            batch.block_table(sequences, table)
            assert exports(table, STRIDES) and exports(table, C_CONTIGUOUS) and exports(table, ANY_CONTIGUOUS)
            assert exports(table, F_CONTIGUOUS) == has_fortran_order
            batch.block_table(sequences, table)  # no view is left
    plane = pool.plane(0)
    assert exports(plane, C_CONTIGUOUS) and exports(plane, ANY_CONTIGUOUS) and not exports(plane, F_CONTIGUOUS)
    joined = kvpool.Pool(layout(joined=True), 4).plane(0)
    assert exports(joined, STRIDES)
    assert not any(exports(joined, flags) for flags in (C_CONTIGUOUS, F_CONTIGUOUS, ANY_CONTIGUOUS))


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
