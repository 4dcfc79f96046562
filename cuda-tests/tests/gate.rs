//! Calls that wait in the driver for all work of a device, and copies to another device that hangs:
//! neither is there beside the other, through whichever handle of the device.

use std::ffi::c_void;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use cudarc::driver::{CudaContext, sys};
use kvpool::storage::{DeviceStream, Dtype, HostStorage, KvLayout, Storage};
use kvpool::{FrameId, Run, StorageError};
use kvpool_cuda::{CudaConfig, CudaStorage, Device, DeviceTable};
use kvpool_cuda_tests::mock::{Rules, Session, session};

const FRAMES: usize = 4;
/// Growth by which memory is mapped.
const MORE: usize = 64;

fn run(start: u32, len: u32) -> Run {
    Run { start: FrameId(start), len }
}

/// Returns a layout with frames of 256 KiB, or of 10 MiB.
fn layout(is_long: bool) -> KvLayout {
    let (head_dim, block_tokens) = if is_long { (4096, 40) } else { (256, 16) };
    let builder = KvLayout::builder().layers(2).kv_heads(8).head_dim(head_dim).block_tokens(block_tokens);
    builder.dtype(Dtype::Bf16).build().expect("a layout")
}

fn new(device: &Device, frames: usize, is_long: bool) -> CudaStorage {
    let config = CudaConfig::default().segment_frames(1);
    CudaStorage::with_config(device, layout(is_long), frames, MORE * frames, config).expect("frames")
}

fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let mut left = 60_000;
    while !is_so() {
        left -= 1;
        assert!(left > 0, "timed out: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the number of copies between devices that were enqueued.
fn sent(session: &Session) -> u64 {
    session.calls("cuMemcpyPeerAsync")
}

/// Keeps a stream busy, by a host function that waits, until the sender is used or dropped. A context
/// must be current.
fn hold(stream: &DeviceStream) -> Sender<()> {
    unsafe extern "C" fn wait(data: *mut c_void) {
        // SAFETY: the box of `hold`, passed once.
        let gone = unsafe { Box::from_raw(data.cast::<Receiver<()>>()) };
        let _ = gone.recv();
    }
    let (go, gone) = mpsc::channel::<()>();
    let data = Box::into_raw(Box::new(gone)).cast();
    // SAFETY: the stream lives, and the function calls no function of the driver.
    let held = unsafe { sys::cuLaunchHostFunc(stream.as_raw().cast(), Some(wait), data) };
    held.result().expect("a healthy device");
    go
}

/// The target fails, and the copy to it waits for ever. Meanwhile other threads allocate, register, map,
/// unmap and free through another handle of the source's device, each of which may wait in the driver
/// for all of its work: they return, and the device is lost to all of its handles.
#[test]
fn calls_beside_a_copy_to_a_hanging_device_return() {
    let session = session();
    for round in 0..7 {
        let [first, again, second] = [0, 0, 1].map(|ordinal| Device::open(ordinal).expect("two devices"));
        let (source, target) = (new(&first, FRAMES, false), new(&second, FRAMES, false));
        let (other, closed) = (new(&again, FRAMES, false), new(&again, FRAMES, false));
        let table = DeviceTable::new(&again, 2, 2, 2).expect("a table");
        let host = HostStorage::new(layout(false), FRAMES, FRAMES).expect("frames");
        if round == 2 {
            other.grow(MORE * FRAMES).expect("enough memory");
        }
        session.rules(&Rules { stalls: true, hang: true, ..Rules::default() });
        session.pause();
        let before = sent(&session);
        let all = [run(0, FRAMES as u32)];
        std::thread::scope(|scope| {
            let (source, target) = (&source, &target);
            // SAFETY: no other thread uses these frames.
            let copying = scope.spawn(move || unsafe { target.receive(source, &all, &all) });
            wait("the copy is enqueued", || sent(&session) > before);
            session.fail(1, 719);
            let (tell, told) = mpsc::channel::<Result<(), String>>();
            let (again, other, host) = (&again, &other, &host);
            scope.spawn(move || {
                let outcome = match round {
                    0 => CudaStorage::new(again, layout(false), 1, 1)
                        .map(drop)
                        .map_err(|error| error.to_string()),
                    1 => other.grow(MORE * FRAMES).map_err(|error| error.to_string()),
                    2 => {
                        // SAFETY: no other thread uses the frames.
                        unsafe { other.shrink(1) };
                        Ok(())
                    }
                    3 => {
                        drop((closed, table));
                        Ok(())
                    }
                    // SAFETY: no other thread uses the frames.
                    4 => unsafe { host.receive(other, &all, &all) }.map_err(|error| error.to_string()),
                    5 => DeviceTable::new(again, 2, 2, 2).map(drop).map_err(|error| error.to_string()),
                    _ => Device::open(0).map(drop).map_err(|error| error.to_string()),
                };
                tell.send(outcome).expect("the test receives");
            });
            session.resume();
            let outcome = told.recv_timeout(Duration::from_secs(60)).expect("it does not wait for ever");
            assert!(matches!(round, 2..=4) || outcome.is_err(), "{round}: the device is stuck");
            let error = copying.join().expect("no panic").expect_err("the target is lost");
            assert!(error.is_lost(), "{error}");
        });
        let lost = again.good().expect_err("the primary context is the same");
        assert!(lost.to_string().contains("waits for another device"), "{lost}");
        session.rules(&Rules::default());
        drop((source, target, other, host, first, again, second));
        for device in [0, 1] {
            session.fail(device, 719);
            session.fail(device, 0);
        }
    }
}

/// A call waits in the driver for all work of the device: no copy to another device begins, which might
/// never end, until it has returned.
#[test]
fn no_copy_begins_while_a_call_waits_in_the_driver() {
    let session = session();
    let [first, again, second] = [0, 0, 1].map(|ordinal| Device::open(ordinal).expect("two devices"));
    let (source, target) = (new(&first, FRAMES, false), new(&second, FRAMES, false));
    let all = [run(0, FRAMES as u32)];
    // SAFETY: no other thread uses the frames.
    let copy = || unsafe { target.receive(&source, &all, &all) };
    copy().expect("healthy devices");
    let stream = first.stream().expect("a stream");
    let context = CudaContext::new(0).expect("a device");
    context.bind_to_thread().expect("its context");
    session.rules(&Rules { stalls: true, ..Rules::default() });
    let (before, calls) = (sent(&session), session.calls("cuMemAlloc_v2"));
    std::thread::scope(|scope| {
        // In the scope, whose threads go on if the test fails.
        let go = hold(&stream);
        let calling = scope.spawn(|| DeviceTable::new(&again, 2, 2, 2).map(drop));
        wait("the call is in the driver", || session.calls("cuMemAlloc_v2") > calls);
        let copying = scope.spawn(copy);
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(sent(&session), before, "a copy has begun beside the call");
        assert!(!calling.is_finished() && !copying.is_finished(), "the device is busy");
        go.send(()).expect("the stream waits");
        calling.join().expect("no panic").expect("enough memory");
        copying.join().expect("no panic").expect("healthy devices");
    });
    assert!(sent(&session) > before);
}

/// While lots are on their way to another device, no memory is allocated for later ones: that might
/// wait for those, for ever.
#[test]
fn a_copy_takes_all_its_buffers_before_it_begins() {
    const MANY: usize = 24;
    let session = session();
    let [first, second] = [0, 1].map(|ordinal| Device::open(ordinal).expect("two devices"));
    let (source, target) = (new(&first, MANY, true), new(&second, MANY, true));
    let all = [run(0, MANY as u32)];
    let allocations = || session.calls("cuMemAlloc_v2") + session.calls("cuMemHostAlloc");
    let (before, none) = (sent(&session), allocations());
    session.pause();
    std::thread::scope(|scope| {
        // SAFETY: no other thread uses the frames.
        let copying = scope.spawn(|| unsafe { target.receive(&source, &all, &all) });
        wait("lots are on their way", || sent(&session) > before);
        let taken = allocations();
        assert!(taken > none, "the longest buffers are not prepared");
        session.resume();
        copying.join().expect("no panic").expect("healthy devices");
        assert_eq!(allocations(), taken, "allocated in flight");
    });
    assert_eq!(sent(&session) - before, MANY.div_ceil(3) as u64, "three frames a lot");
}

/// A device that its pools fill has room for few lots, which follow one another in the same buffers: none
/// arrives in a buffer that another one is being unpacked from.
#[test]
fn a_copy_goes_on_with_few_buffers() {
    const MANY: usize = 9;
    let session = session();
    for skip in 1..6 {
        let [first, second] = [0, 1].map(|ordinal| Device::open(ordinal).expect("two devices"));
        let (source, target) = (new(&first, MANY, true), new(&second, MANY, true));
        let content: Vec<u8> =
            (0..MANY * layout(true).packed_bytes()).map(|at| (at / 7 + at / 977) as u8).collect();
        let all = [run(0, MANY as u32)];
        // SAFETY: no other thread uses the frames.
        unsafe { source.unpack(&all, &content) }.expect("frames");
        // Unpacks nothing before someone waits for it, and others arrive meanwhile.
        session.stop(1, 1);
        session.fail_call("cuMemAlloc_v2", skip, 2);
        // SAFETY: as above.
        let copied: Result<(), StorageError> = unsafe { target.receive(&source, &all, &all) };
        copied.expect("fewer buffers");
        session.stop(1, 0);
        session.forget_injected();
        let mut read = vec![0; content.len()];
        // SAFETY: as above.
        unsafe { target.pack(&all, &mut read) }.expect("frames");
        assert!(read == content, "{skip}");
    }
}
