//! The host's side: pinned and pageable memory, host functions, parameters of launches.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use kvpool_cuda_tests::mock::for_each_seed;

use super::gpu::{Probe, download, fill, gpu, host_call, launch, unpin, upload};

#[test]
fn a_pinned_buffer_is_read_when_the_stream_gets_there() {
    let gpu = gpu();
    let at = gpu.memory(100);
    let stream = gpu.stream();
    let pinned = gpu.pinned(100);
    pinned.fill(1);
    gpu.mock.pause();
    upload(&stream, at, pinned).unwrap();
    pinned.fill(2);
    assert_eq!(gpu.read(&stream, at, 100), [2; 100], "the copy must see the change made before it ran");
    unpin(pinned);
}

#[test]
fn a_pinned_copy_can_see_half_of_a_change() {
    let gpu = gpu();
    const BYTES: usize = 64 << 10;
    let at = gpu.memory(BYTES);
    let stream = gpu.stream();
    let pinned = gpu.pinned(BYTES);
    let mut torn = 0;
    for_each_seed(&gpu.mock, 20, |_| {
        pinned.fill(1);
        gpu.mock.pause();
        upload(&stream, at, pinned).unwrap();
        gpu.mock.step(1);
        pinned.fill(2);
        let read = gpu.read(&stream, at, BYTES);
        torn += usize::from(read.contains(&1) && read.contains(&2));
    });
    assert!(torn > 0, "no schedule split a copy");
    unpin(pinned);
}

#[test]
fn a_pageable_buffer_is_read_at_the_call() {
    let gpu = gpu();
    let at = gpu.memory(100);
    let stream = gpu.stream();
    let mut pageable = vec![1; 100];
    gpu.mock.pause();
    upload(&stream, at, &pageable).unwrap();
    pageable.fill(2);
    assert_eq!(gpu.read(&stream, at, 100), [1; 100]);
}

#[test]
fn a_copy_to_pinned_memory_comes_later() {
    let gpu = gpu();
    let at = gpu.memory(100);
    let stream = gpu.stream();
    let pinned = gpu.pinned(100);
    gpu.mock.pause();
    fill(&stream, at, 7, 100).unwrap();
    download(&stream, pinned, at).unwrap();
    assert_eq!(pinned, [0; 100]);
    gpu.mock.step(u64::MAX);
    assert_eq!(pinned, [7; 100]);
    unpin(pinned);
}

#[test]
fn registered_memory_is_pinned() {
    let gpu = gpu();
    let at = gpu.memory(4096);
    let stream = gpu.stream();
    let mut memory = vec![1_u8; 4096];
    // SAFETY: the memory lives until it is unregistered below.
    unsafe { cudarc::driver::sys::cuMemHostRegister_v2(memory.as_mut_ptr().cast(), 4096, 1) }
        .result()
        .unwrap();
    // SAFETY: as above; the call is refused.
    let again = unsafe { cudarc::driver::sys::cuMemHostRegister_v2(memory.as_mut_ptr().cast(), 10, 1) };
    assert_eq!(again, cudarc::driver::sys::CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    gpu.mock.pause();
    upload(&stream, at, &memory).unwrap();
    memory.fill(2);
    assert_eq!(gpu.read(&stream, at, 4096), [2; 4096]);
    // SAFETY: registered above, and no longer in use.
    unsafe { cudarc::driver::sys::cuMemHostUnregister(memory.as_mut_ptr().cast()) }.result().unwrap();
}

#[test]
fn a_launch_has_its_parameters_from_the_call() {
    let gpu = gpu();
    let (from, to) = (gpu.memory(256), gpu.memory(256));
    let kernel = gpu.probe("kvp_probe_copy");
    let stream = gpu.stream();
    gpu.mock.pause();
    fill(&stream, from, 5, 256).unwrap();
    launch(&stream, &kernel, 1, Probe { from, to, vectors: 16, rounds: 1, reserved: 0 }).unwrap();
    assert_eq!(gpu.read(&stream, to, 256), [5; 256]);
}

#[test]
fn a_host_function_is_called_in_order_and_holds_up_its_stream_alone() {
    let gpu = gpu();
    let at = gpu.memory(32);
    let (stream, other) = (gpu.stream(), gpu.stream());
    let (go, wait) = mpsc::channel::<()>();
    let (tell, called) = mpsc::channel();
    fill(&stream, at, 1, 16).unwrap();
    let before = stream.record_event(None).unwrap();
    host_call(&stream, move || {
        tell.send(()).unwrap();
        wait.recv().unwrap();
    })
    .unwrap();
    fill(&stream, at, 2, 16).unwrap();
    let after = stream.record_event(None).unwrap();
    called.recv().unwrap();
    assert!(before.try_is_complete().unwrap());
    fill(&other, at + 16, 3, 16).unwrap();
    other.synchronize().unwrap();
    assert_eq!(gpu.read(&other, at, 32), [[1; 16], [3; 16]].concat());
    assert!(!after.try_is_complete().unwrap());
    go.send(()).unwrap();
    assert_eq!(gpu.read(&stream, at, 16), [2; 16]);
}

#[test]
fn a_host_function_has_returned_when_its_step_is_done() {
    let gpu = gpu();
    let stream = gpu.stream();
    let called = Arc::new(AtomicBool::new(false));
    gpu.mock.pause();
    host_call(&stream, {
        let called = called.clone();
        move || called.store(true, Ordering::Release)
    })
    .unwrap();
    assert!(!called.load(Ordering::Acquire));
    gpu.mock.step(1);
    assert!(called.load(Ordering::Acquire));
}
