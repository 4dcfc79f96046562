//! Devices that fail, and calls that are made to fail.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::CUresult;
use kvpool_cuda_tests::mock::Style;

use super::gpu::{Probe, code, copy, fill, gpu, host_call, launch};

const FAILED: CUresult = CUresult::CUDA_ERROR_LAUNCH_FAILED;

#[test]
fn a_failure_is_for_good_and_its_host_functions_are_never_called() {
    let gpu = gpu();
    let at = gpu.memory(16);
    let stream = gpu.stream();
    let called = Arc::new(AtomicBool::new(false));
    gpu.mock.pause();
    fill(&stream, at, 1, 16).unwrap();
    let event = stream.record_event(None).unwrap();
    host_call(&stream, {
        let called = called.clone();
        move || called.store(true, Ordering::Release)
    })
    .unwrap();
    gpu.mock.fail(0, FAILED as i32);
    gpu.mock.resume();
    for _ in 0..2 {
        assert_eq!(event.try_is_complete().unwrap_err().0, FAILED);
        assert_eq!(event.synchronize().unwrap_err().0, FAILED);
        assert_eq!(stream.synchronize().unwrap_err().0, FAILED);
        assert_eq!(code(fill(&stream, at, 1, 16)), FAILED);
        assert_eq!(code(stream.wait(&event)), FAILED);
        assert_eq!(gpu.context.new_stream().unwrap_err().0, FAILED);
        assert_eq!(gpu.context.mem_get_info().unwrap_err().0, FAILED);
    }
    std::thread::sleep(Duration::from_millis(40));
    assert!(!called.load(Ordering::Acquire), "a failed device called a host function");
    assert_eq!(gpu.mock.step(1), 0, "a failed device runs no step");

    // The other device still works.
    let other = CudaContext::new(1).unwrap();
    let stream = other.new_stream().unwrap();
    let there = stream.clone_htod(&[1_u8; 16]).unwrap();
    assert_eq!(stream.clone_dtoh(&there).unwrap(), [1; 16]);
}

#[test]
fn a_host_function_that_waits_for_its_turn_when_the_device_fails_is_not_called() {
    let gpu = gpu();
    let (first, second) = (gpu.stream(), gpu.stream());
    let (go, wait) = mpsc::channel::<()>();
    let called = Arc::new(AtomicBool::new(false));
    host_call(&first, move || wait.recv().unwrap()).unwrap();
    std::thread::sleep(Duration::from_millis(30));
    host_call(&second, {
        let called = called.clone();
        move || called.store(true, Ordering::Release)
    })
    .unwrap();
    std::thread::sleep(Duration::from_millis(30));
    gpu.mock.fail(0, FAILED as i32);
    go.send(()).unwrap();
    std::thread::sleep(Duration::from_millis(30));
    assert!(!called.load(Ordering::Acquire), "a failed device called a host function");
}

#[test]
fn who_waits_while_the_device_fails_gets_the_failure() {
    let gpu = gpu();
    let at = gpu.memory(16);
    let stream = gpu.stream();
    gpu.mock.pause();
    fill(&stream, at, 1, 16).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| stream.synchronize());
        std::thread::sleep(Duration::from_millis(20));
        assert!(!waiter.is_finished(), "the device was paused");
        gpu.mock.fail(0, FAILED as i32);
        assert_eq!(waiter.join().unwrap().unwrap_err().0, FAILED);
    });
}

#[test]
fn a_call_fails_once_where_it_is_told_to() {
    let gpu = gpu();
    let before = (gpu.mock.live(), gpu.mock.calls("cuEventCreate"));
    gpu.mock.fail_call("cuEventCreate", 1, CUresult::CUDA_ERROR_OUT_OF_MEMORY as i32);
    let first = gpu.context.new_event(None).unwrap();
    assert_eq!(gpu.context.new_event(None).unwrap_err().0, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    let third = gpu.context.new_event(None).unwrap();
    assert_eq!(gpu.mock.calls("cuEventCreate"), before.1 + 3);
    drop((first, third));
    gpu.mock.assert_no_leaks(&before.0);
}

#[test]
fn a_copy_past_its_memory_fails_the_device() {
    let gpu = gpu();
    let (at, to) = (gpu.memory(4096), gpu.memory(8192));
    let stream = gpu.stream();
    copy(&stream, to, at, 4096).unwrap();
    stream.synchronize().unwrap();
    copy(&stream, to, at, 4097).unwrap();
    assert_eq!(stream.synchronize().unwrap_err().0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_eq!(code(fill(&stream, at, 0, 1)), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
}

#[test]
fn a_kernel_past_its_memory_fails_the_device() {
    let gpu = gpu();
    let (from, to) = (gpu.memory(4096), gpu.memory(4096));
    let kernel = gpu.probe("kvp_probe_copy");
    let stream = gpu.stream();
    launch(&stream, &kernel, 2, Probe { from, to, vectors: 256, rounds: 1, reserved: 0 }).unwrap();
    stream.synchronize().unwrap();
    launch(&stream, &kernel, 2, Probe { from, to, vectors: 257, rounds: 1, reserved: 0 }).unwrap();
    assert_eq!(stream.synchronize().unwrap_err().0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
}

#[test]
fn memory_that_was_freed_is_touched_by_nobody() {
    let gpu = gpu();
    let (from, to) = (gpu.memory(4096), gpu.memory(4096));
    let kernel = gpu.probe("kvp_probe_copy");
    let stream = gpu.stream();
    gpu.free(from);
    launch(&stream, &kernel, 1, Probe { from, to, vectors: 256, rounds: 1, reserved: 0 }).unwrap();
    assert_eq!(stream.synchronize().unwrap_err().0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
}

#[test]
fn memory_allocated_in_a_stream_is_there_when_the_stream_is() {
    let gpu = gpu();
    let (a, b) = (gpu.stream(), gpu.stream());
    for (waits, style) in
        [(true, Style::Starve(a.cu_stream() as usize)), (false, Style::Starve(a.cu_stream() as usize))]
    {
        gpu.mock.style(style);
        gpu.mock.pause();
        gpu.context.bind_to_thread().unwrap();
        // SAFETY: the stream is alive.
        let at = unsafe { cudarc::driver::result::malloc_async(a.cu_stream(), 64) }.unwrap();
        if waits {
            b.join(&a).unwrap();
        }
        fill(&b, at, 1, 64).unwrap();
        gpu.mock.resume();
        let expected = if waits { CUresult::CUDA_SUCCESS } else { CUresult::CUDA_ERROR_ILLEGAL_ADDRESS };
        assert_eq!(code(b.synchronize()), expected, "waits: {waits}");
    }
}
