//! Devices that are opened: those that cannot be used are refused with a reason, images of kernels are
//! chosen, and what is refused on the way leaves nothing.

use std::time::Duration;

use kvpool::storage::DeviceStream;
use kvpool_cuda::{CudaError, Device, KernelImage, StreamPriority, Version, devices};
use kvpool_cuda_tests::engine::drained;
use kvpool_cuda_tests::mock::session;

const OUT_OF_MEMORY: i32 = 2;
const INVALID_VALUE: i32 = 1;

#[test]
fn devices_are_listed_with_what_is_wrong_with_them() {
    let session = session();
    session.set_capability(1, 7, 5);
    let listed = devices().expect("a driver");
    assert_eq!(listed.len(), 2);
    assert_eq!(listed[0].unusable, None);
    assert!(listed[0].multiprocessors > 0 && listed[0].memory_bytes > 0 && !listed[0].name.is_empty());
    let too_old = CudaError::DeviceTooOld {
        capability: Version { major: 7, minor: 5 },
        needed: Version { major: 8, minor: 0 },
    };
    assert_eq!(listed[1].unusable, Some(too_old.clone()));
    assert_eq!(Device::open(1).unwrap_err(), too_old);
    assert_eq!(Device::open(7).unwrap_err(), CudaError::NoDevice { ordinal: 7, count: 2 });
    session.set_virtual_memory(0, 0);
    assert_eq!(Device::open(0).unwrap_err(), CudaError::NoVirtualMemory);
    session.set_version(11080);
    let refused = Device::open(0).unwrap_err();
    assert_eq!(refused.to_string(), "the CUDA driver has version 11.8; at least 12.0 is needed");
}

#[test]
fn what_is_refused_while_a_device_is_opened_leaves_nothing() {
    let session = session();
    // The first device may create driver objects that are never freed.
    drop(Device::open(0).expect("a device"));
    std::thread::sleep(Duration::from_millis(50));
    let before = session.live();
    for function in [
        "cuDevicePrimaryCtxRetain",
        "cuModuleLoadDataEx",
        "cuModuleGetFunction",
        "cuStreamCreateWithPriority",
    ] {
        session.fail_call(function, 0, INVALID_VALUE);
        let refused = Device::open(0).expect_err(function);
        assert!(matches!(refused, CudaError::Driver { .. }), "{function}: {refused}");
        session.assert_no_leaks(&before);
    }
}

/// The driver refuses some of the buffers that are allocated in advance: the device opens without
/// them, and gives back all others.
#[test]
fn buffers_that_are_refused_while_a_device_is_opened_leave_no_other() {
    let session = session();
    let gone = |before| drained(|| session.live() == before);
    let _other = Device::open(0).expect("a device");
    let before = session.live();
    for function in ["cuMemHostAlloc", "cuMemAlloc_v2"] {
        session.fail_call(function, 3, OUT_OF_MEMORY);
        drop(Device::open(0).expect(function));
        session.forget_injected();
        assert!(gone(before), "{function}: {:?}, before: {before:?}", session.live());
    }
}

/// Kernels that the driver does not compile: the error has the compiler's messages.
#[test]
fn a_compilation_that_fails_says_why() {
    const INVALID_PTX: i32 = 218;
    const COMPILER_NOT_FOUND: i32 = 221;
    let session = session();
    // A device for which no program has machine code.
    session.set_capability(0, 12, 0);
    let before = session.live();
    for code in [INVALID_PTX, COMPILER_NOT_FOUND, OUT_OF_MEMORY] {
        session.fail_compilation(code);
        let refused = Device::open(0).expect_err("no kernels");
        let text = refused.to_string();
        assert!(text.contains("loading the kernels") && text.contains("ptxas fatal"), "{text}");
        session.assert_no_leaks(&before);
    }
    session.fail_compilation(0);
    Device::open(0).expect("the compiler works again");
}

/// An image that the driver refuses is replaced by the next one: machine code, if the program has it, by
/// PTX, behind which there is none.
#[test]
fn refused_machine_code_is_replaced_by_ptx() {
    let session = session();
    let before = session.live();
    for (major, minor, sometimes) in [(8, 0, true), (8, 6, true), (9, 0, true), (12, 0, false)] {
        session.set_capability(0, major, minor);
        let image = Device::open(0).expect("a device").kernels().image;
        assert!(sometimes || image == KernelImage::Ptx, "{major}.{minor}");
        // Invalid, for another architecture, of a newer toolchain.
        for code in [200, 209, 222] {
            session.fail_call("cuModuleLoadDataEx", 0, code);
            match Device::open(0) {
                Ok(device) => {
                    assert_eq!((image, device.kernels().image), (KernelImage::Cubin, KernelImage::Ptx));
                }
                Err(error) => {
                    assert!(image == KernelImage::Ptx && error.to_string().contains("loading the kernels"));
                }
            }
        }
        // An error of the device is none of the image.
        session.fail_call("cuModuleLoadDataEx", 0, OUT_OF_MEMORY);
        Device::open(0).expect_err("no memory");
    }
    // The threads that watch dropped devices end by themselves.
    let is_over = || session.live().iter().zip(&before).all(|(now, before)| now <= before);
    assert!(drained(is_over), "{:?}, {before:?}", session.live());
}

#[test]
fn streams_have_the_priority_that_was_asked_for() {
    let session = session();
    let device = Device::open(0).expect("a device");
    let made = |priority| device.stream_with_priority(priority).expect("a stream");
    let [usual, high, low] =
        [StreamPriority::Usual, StreamPriority::Highest, StreamPriority::Lowest].map(made);
    let of = |stream: &DeviceStream| session.priority(stream.as_raw() as usize);
    assert!(of(&high) < of(&low) && of(&high) <= of(&usual) && of(&usual) <= of(&low));
}
