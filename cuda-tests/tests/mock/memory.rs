//! Capacity, virtual memory, pointers.

use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, result};

use super::gpu::{code, fill, gpu, unpin};

const GRANULE: usize = 2 << 20;

fn location(device: i32) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

fn create(device: i32, bytes: usize) -> Result<u64, CUresult> {
    // SAFETY: plain integers and enums that allow zero, and a nullable pointer.
    let mut prop: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    prop.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location = location(device);
    let mut handle = 0;
    // SAFETY: both pointers are to local variables.
    unsafe { sys::cuMemCreate(&mut handle, bytes, &prop, 0) }
        .result()
        .map(|()| handle)
        .map_err(|error| error.0)
}

fn reserve(bytes: usize) -> u64 {
    let mut at = 0;
    // SAFETY: the pointer is to a local variable.
    unsafe { sys::cuMemAddressReserve(&mut at, bytes, 0, 0, 0) }.result().unwrap();
    at
}

fn map(at: u64, bytes: usize, handle: u64) -> CUresult {
    // SAFETY: the mock checks addresses; only tests access them.
    unsafe { sys::cuMemMap(at, bytes, 0, handle, 0) }
}

fn open(at: u64, bytes: usize, device: i32, flags: sys::CUmemAccess_flags) -> CUresult {
    let access = sys::CUmemAccessDesc { location: location(device), flags };
    // SAFETY: as in `map`.
    unsafe { sys::cuMemSetAccess(at, bytes, &access, 1) }
}

fn unmap(at: u64, bytes: usize) -> CUresult {
    // SAFETY: as in `map`.
    unsafe { sys::cuMemUnmap(at, bytes) }
}

fn release(handle: u64) {
    // SAFETY: a handle of `create`, released once.
    unsafe { sys::cuMemRelease(handle) }.result().unwrap();
}

fn unreserve(at: u64, bytes: usize) -> CUresult {
    // SAFETY: as in `map`.
    unsafe { sys::cuMemAddressFree(at, bytes) }
}

const READ_WRITE: sys::CUmemAccess_flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
const READ: sys::CUmemAccess_flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ;
const OK: CUresult = CUresult::CUDA_SUCCESS;
const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

#[test]
fn memory_is_counted() {
    let gpu = gpu();
    let before = (gpu.mock.used(0), gpu.mock.live());
    // Small allocations share a slab; a larger one takes whole slabs.
    const SLAB: usize = 2 << 20;
    gpu.mock.set_capacity(0, before.0 + 3 * SLAB);
    let [small, shared] = [0; 2].map(|_| gpu.memory(6000));
    let taken = gpu.mock.used(0) - before.0;
    assert!(taken <= SLAB, "{taken}");
    let large = gpu.memory(SLAB + 1);
    assert_eq!(gpu.context.mem_get_info().unwrap(), (SLAB - taken, before.0 + 3 * SLAB));
    // SAFETY: a context is current.
    let refused = unsafe { result::malloc_sync(2 * SLAB) };
    assert_eq!(refused.unwrap_err().0, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    [small, shared, large].into_iter().for_each(|at| gpu.free(at));
    let again = gpu.memory(SLAB);
    gpu.free(again);
    assert_eq!(gpu.mock.used(0), before.0);
    gpu.mock.assert_no_leaks(&before.1);
}

#[test]
fn fresh_memory_is_not_zero() {
    let gpu = gpu();
    let stream = gpu.stream();
    // SAFETY: only read below, as bytes.
    let fresh = unsafe { stream.alloc::<u8>(100) }.unwrap();
    assert!(stream.clone_dtoh(&fresh).unwrap().iter().all(|&byte| byte != 0));
}

#[test]
fn a_segment_is_mapped_opened_and_given_back() {
    let gpu = gpu();
    gpu.context.bind_to_thread().unwrap();
    let before = (gpu.mock.used(0), gpu.mock.live());
    let stream = gpu.stream();
    let base = reserve(4 * GRANULE);
    assert_eq!(gpu.mock.used(0), before.0, "addresses use no memory");
    let handle = create(0, 2 * GRANULE).unwrap();
    assert_eq!(gpu.mock.used(0), before.0 + 2 * GRANULE);
    assert_eq!(map(base + GRANULE as u64, 2 * GRANULE, handle), OK);
    assert_eq!(open(base + GRANULE as u64, 2 * GRANULE, 0, READ_WRITE), OK);
    fill(&stream, base + GRANULE as u64, 3, 2 * GRANULE).unwrap();
    stream.synchronize().unwrap();

    // The bytes belong to the handle, not to the address.
    assert_eq!(unmap(base + GRANULE as u64, 2 * GRANULE), OK);
    assert_eq!(map(base, 2 * GRANULE, handle), OK);
    assert_eq!(open(base, 2 * GRANULE, 0, READ), OK);
    assert_eq!(gpu.read(&stream, base, 2 * GRANULE), vec![3; 2 * GRANULE]);

    release(handle);
    assert_eq!(gpu.mock.used(0), before.0 + 2 * GRANULE, "mapped memory outlives its handle");
    assert_eq!(unreserve(base, 4 * GRANULE), INVALID, "the range has a mapping");
    assert_eq!(unmap(base, 2 * GRANULE), OK);
    assert_eq!(gpu.mock.used(0), before.0);
    assert_eq!(unreserve(base, 4 * GRANULE), OK);
    drop(stream);
    gpu.mock.assert_no_leaks(&before.1);
}

#[test]
fn ranges_that_do_not_fit_are_refused() {
    let gpu = gpu();
    gpu.context.bind_to_thread().unwrap();
    let base = reserve(4 * GRANULE);
    let handle = create(0, 2 * GRANULE).unwrap();
    assert_eq!(create(0, GRANULE + 1), Err(INVALID), "not a multiple of the granule");
    assert_eq!(create(5, GRANULE), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
    assert_eq!(
        map(base + 3 * GRANULE as u64, 2 * GRANULE, handle),
        INVALID,
        "past the end of the reservation"
    );
    assert_eq!(map(base, 3 * GRANULE, handle), INVALID, "longer than the physical memory");
    assert_eq!(map(base + 512, GRANULE, handle), INVALID, "in the middle of a granule");
    assert_eq!(open(base, GRANULE, 0, READ_WRITE), INVALID, "nothing is mapped");
    assert_eq!(map(base, 2 * GRANULE, handle), OK);
    assert_eq!(map(base + GRANULE as u64, GRANULE, handle), INVALID, "the range has a mapping");
    assert_eq!(unmap(base, GRANULE), INVALID, "part of a mapping");
    assert_eq!(open(base, 3 * GRANULE, 0, READ_WRITE), INVALID, "not fully mapped");
    assert_eq!(unmap(base, 2 * GRANULE), OK);
    release(handle);
    assert_eq!(unreserve(base, GRANULE), INVALID, "part of a reservation");
    assert_eq!(unreserve(base, 4 * GRANULE), OK);
    gpu.mock.set_virtual_memory(0, 0);
    assert_eq!(create(0, GRANULE), Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
}

/// Returns the results of a fill and of a kernel on the second of two granules.
fn touch(prepare: impl Fn(u64, u64)) -> [CUresult; 2] {
    [true, false].map(|by_copy| {
        let gpu = gpu();
        gpu.context.bind_to_thread().unwrap();
        let kernel = gpu.probe("kvp_probe_copy");
        let source = gpu.memory(256);
        let base = reserve(2 * GRANULE);
        let handle = create(0, GRANULE).unwrap();
        let second = base + GRANULE as u64;
        prepare(second, handle);
        let stream = gpu.stream();
        if by_copy {
            fill(&stream, second + 100, 1, 10).unwrap();
        } else {
            let probe = super::gpu::Probe { from: source, to: second, vectors: 16, rounds: 1, reserved: 0 };
            super::gpu::launch(&stream, &kernel, 1, probe).unwrap();
        }
        code(stream.synchronize())
    })
}

#[test]
fn what_is_not_mapped_and_open_cannot_be_touched() {
    const ILLEGAL: [CUresult; 2] = [CUresult::CUDA_ERROR_ILLEGAL_ADDRESS; 2];
    assert_eq!(touch(|_, _| ()), ILLEGAL, "nothing is mapped");
    assert_eq!(
        touch(|at, handle| assert_eq!(map(at, GRANULE, handle), OK)),
        ILLEGAL,
        "mapped, without access"
    );
    let read_only = touch(|at, handle| {
        assert_eq!(map(at, GRANULE, handle), OK);
        assert_eq!(open(at, GRANULE, 0, READ), OK);
    });
    assert_eq!(read_only, ILLEGAL, "read-only");
    let unmapped = touch(|at, handle| {
        assert_eq!(map(at, GRANULE, handle), OK);
        assert_eq!(open(at, GRANULE, 0, READ_WRITE), OK);
        assert_eq!(unmap(at, GRANULE), OK);
    });
    assert_eq!(unmapped, ILLEGAL, "unmapped again");
    let open = touch(|at, handle| {
        assert_eq!(map(at, GRANULE, handle), OK);
        assert_eq!(open(at, GRANULE, 0, READ_WRITE), OK);
    });
    assert_eq!(open, [OK; 2]);
}

#[test]
fn pointers_are_known() {
    let gpu = gpu();
    let other = CudaContext::new(1).unwrap();
    other.bind_to_thread().unwrap();
    // SAFETY: a context is current.
    let there = unsafe { result::malloc_sync(100) }.unwrap();
    let here = gpu.memory(200);
    let pinned = gpu.pinned(300);
    let shared_limbo = [0_u8; 16];
    let ask = |at: u64| {
        let (mut kind, mut device, mut start, mut size) = (9_u32, 9_i32, 9_u64, 9_usize);
        let mut attributes = [
            sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        ];
        let mut data = [
            (&raw mut kind).cast(),
            (&raw mut device).cast(),
            (&raw mut start).cast(),
            (&raw mut size).cast(),
        ];
        // SAFETY: one output pointer per attribute, each of its attribute's type.
        unsafe { sys::cuPointerGetAttributes(4, attributes.as_mut_ptr(), data.as_mut_ptr(), at) }
            .result()
            .unwrap();
        (kind, device, start, size)
    };
    assert_eq!(ask(here + 50), (2, 0, here, 200));
    assert_eq!(ask(there + 99), (2, 1, there, 100));
    assert_eq!(ask(pinned.as_ptr() as u64), (1, 0, pinned.as_ptr() as u64, 300));
    assert_eq!(ask(shared_limbo.as_ptr() as u64), (0, -2, 0, 0), "a stranger's");
    let mut kind = 0_u32;
    let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    // SAFETY: the pointer is to a local variable.
    let stranger = unsafe {
        sys::cuPointerGetAttribute((&raw mut kind).cast(), attribute, shared_limbo.as_ptr() as u64)
    };
    assert_eq!(stranger, INVALID);
    unpin(pinned);
    gpu.free(here);
    gpu.free(there);
}
