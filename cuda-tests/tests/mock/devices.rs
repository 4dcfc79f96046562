//! Devices, contexts, modules, peers.

use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, DevicePtr, result};

use super::gpu::{PROBES, Probe, code, copy, gpu, launch};

#[test]
fn devices_are_what_a_test_says() {
    let gpu = gpu();
    gpu.mock.set_devices(3);
    gpu.mock.set_capability(2, 8, 6);
    gpu.mock.set_capacity(2, 1 << 20);
    gpu.mock.set_virtual_memory(2, 0);
    gpu.mock.set_version(12040);
    assert_eq!(CudaContext::device_count().unwrap(), 3);
    let third = CudaContext::new(2).unwrap();
    assert_eq!(third.compute_capability().unwrap(), (8, 6));
    assert_eq!(third.mem_get_info().unwrap(), (1 << 20, 1 << 20));
    assert!(third.name().unwrap().ends_with('2'));
    let supported =
        third.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED);
    assert_eq!(supported.unwrap(), 0);
    let mut version = 0;
    // SAFETY: the pointer is to a local variable.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().unwrap();
    assert_eq!(version, 12040);
    gpu.mock.set_devices(2);
    assert_eq!(CudaContext::new(2).unwrap_err().0, CUresult::CUDA_ERROR_INVALID_DEVICE);
    assert_eq!(gpu.context.mem_get_info().unwrap().1, 4 << 30, "each device has its own memory");
}

#[test]
fn errors_have_their_names() {
    let gpu = gpu();
    assert_eq!(gpu.mock.live().len(), 12);
    let error = CudaContext::new(7).unwrap_err();
    assert_eq!(error.error_name().unwrap().to_str().unwrap(), "CUDA_ERROR_INVALID_DEVICE");
    assert_eq!(error.error_string().unwrap().to_str().unwrap(), "invalid device ordinal");
}

#[test]
fn ptx_is_refused_where_the_device_or_the_driver_is_older() {
    let gpu = gpu();
    let load = |text: &str| {
        let ptx = cudarc::nvrtc::Ptx::from_src(text);
        gpu.context.load_module(ptx).map(drop).map_err(|error| error.0)
    };
    assert_eq!(load(PROBES), Ok(()));
    gpu.mock.set_capability(0, 7, 5);
    assert_eq!(load(PROBES), Err(CUresult::CUDA_ERROR_INVALID_PTX));
    gpu.mock.set_capability(0, 9, 0);
    gpu.mock.set_version(11080);
    assert_eq!(load(PROBES), Err(CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION));
    assert_eq!(load("int main() {}"), Err(CUresult::CUDA_ERROR_INVALID_IMAGE));
}

#[test]
fn a_function_is_found_where_ptx_and_host_have_it() {
    let gpu = gpu();
    let module = gpu.context.load_module(cudarc::nvrtc::Ptx::from_src(PROBES)).unwrap();
    assert!(module.load_function("kvp_probe_read").is_ok());
    // The host has kvp_copy; this PTX does not.
    assert_eq!(module.load_function("kvp_copy").unwrap_err().0, CUresult::CUDA_ERROR_NOT_FOUND);
    assert_eq!(module.load_function("kvp_probe").unwrap_err().0, CUresult::CUDA_ERROR_NOT_FOUND);
}

#[test]
fn a_launch_that_cannot_be_is_refused() {
    let gpu = gpu();
    let at = gpu.memory(64);
    let kernel = gpu.probe("kvp_probe_copy");
    let probe = Probe { from: at, to: at + 32, vectors: 1, rounds: 1, reserved: 0 };
    assert_eq!(code(launch(&gpu.stream(), &kernel, 0, probe)), CUresult::CUDA_ERROR_INVALID_VALUE, "no CTA");
    let other = CudaContext::new(1).unwrap().new_stream().unwrap();
    assert_eq!(
        code(launch(&other, &kernel, 1, probe)),
        CUresult::CUDA_ERROR_INVALID_HANDLE,
        "another device's stream"
    );
    let event = gpu.context.new_event(None).unwrap();
    // SAFETY: both handles are alive.
    let recorded = unsafe { result::event::record(event.cu_event(), other.cu_stream()) };
    assert_eq!(code(recorded), CUresult::CUDA_ERROR_INVALID_HANDLE, "an event of another device");
}

#[test]
fn an_event_orders_streams_of_two_devices() {
    let gpu = gpu();
    let other = CudaContext::new(1).unwrap();
    let (here, there) = (gpu.stream(), other.new_stream().unwrap());
    gpu.mock.pause();
    let from = here.clone_htod(&[1_u8; 64]).unwrap();
    here.record_event(None).and_then(|event| there.wait(&event)).unwrap();
    let mark = there.record_event(None).unwrap();
    assert!(!mark.try_is_complete().unwrap());
    gpu.mock.step(u64::MAX);
    assert!(mark.try_is_complete().unwrap());
    drop(from);
}

#[test]
fn peers_copy_by_their_contexts_or_after_access_was_given() {
    let gpu = gpu();
    let other = CudaContext::new(1).unwrap();
    let (here, there) = (gpu.stream(), other.new_stream().unwrap());
    let from = here.clone_htod(&[7_u8; 100]).unwrap();
    let to = there.alloc_zeros::<u8>(100).unwrap();
    here.synchronize().unwrap();
    there.synchronize().unwrap();
    let (source, _read) = from.device_ptr(&here);
    let (target, _write) = to.device_ptr(&there);
    here.context().bind_to_thread().unwrap();
    // SAFETY: both allocations and contexts live until the copy is done.
    let copied = unsafe {
        result::memcpy_peer_async(other.cu_ctx(), target, gpu.context.cu_ctx(), source, 100, here.cu_stream())
    };
    copied.unwrap();
    here.synchronize().unwrap();
    assert_eq!(there.clone_dtoh(&to).unwrap(), [7; 100]);

    let mut can = 0;
    // SAFETY: the pointer is to a local variable.
    unsafe { sys::cuDeviceCanAccessPeer(&mut can, 0, 1) }.result().unwrap();
    assert_eq!(can, 1);
    here.context().bind_to_thread().unwrap();
    // SAFETY: the other context is alive.
    unsafe { sys::cuCtxEnablePeerAccess(other.cu_ctx(), 0) }.result().unwrap();
    copy(&here, target, source, 50).unwrap();
    here.synchronize().unwrap();
    // SAFETY: as above.
    unsafe { sys::cuCtxDisablePeerAccess(other.cu_ctx()) }.result().unwrap();
    copy(&here, target, source, 50).unwrap();
    assert_eq!(here.synchronize().unwrap_err().0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, "without access");
}
