//! Transfer buffers: how many are kept, and when they are used again.

use std::time::Duration;

use kvpool::storage::{KvLayout, Storage};
use kvpool::{FrameId, Run};
use kvpool_cuda::{CudaStorage, Device, DeviceTable};
use kvpool_cuda_tests::engine::drained;
use kvpool_cuda_tests::mock::{Kind, session};

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`: says nothing about the device.
const REFUSED: i32 = 900;

/// A stream that makes no progress has taken many buffers: when it has given them back, most of them are
/// freed.
#[test]
fn buffers_that_are_not_used_any_more_are_freed() {
    /// Slots of one buffer of 8 MiB.
    const SLOTS: usize = (8 << 20) / size_of::<i64>();
    let session = session();
    let device = Device::open(0).expect("a device");
    let stream = device.stream().expect("a stream");
    let mut table = DeviceTable::new(&device, 1, 1, SLOTS).expect("a table");
    let slots = vec![0; SLOTS];
    let pinned = || session.live()[Kind::HostMemory as usize];
    let before = pinned();
    session.pause();
    for _ in 0..48 {
        table.fill_slots(&stream, &slots).expect("slots");
    }
    assert_eq!(pinned() - before, 44, "four are prepared");
    session.resume();
    // 256 MiB, of which the small buffers that are prepared take less than one.
    assert!(drained(|| pinned() - before == 31 - 4), "{}", pinned() - before);
    // Which serve the next ones.
    for _ in 0..31 {
        table.fill_slots(&stream, &slots).expect("slots");
    }
    assert!(drained(|| session.pending() == 0));
    assert_eq!(pinned() - before, 31 - 4);
}

/// The driver does not tell when the copy to a pinned buffer ends: no other transfer gets the buffer, to
/// which the device may still write.
#[test]
fn a_buffer_that_the_device_may_still_write_is_not_used_again() {
    let session = session();
    let device = Device::open(0).expect("a device");
    let layout = KvLayout::named("tiny").expect("a preset");
    let storage = CudaStorage::new(&device, layout.clone(), 2, 2).expect("frames");
    let frame = |at| [Run { start: FrameId(at), len: 1 }];
    let [old, new] = [1u8, 2].map(|byte| vec![byte; layout.packed_bytes()]);
    // SAFETY: no other thread uses the frames.
    unsafe { storage.unpack(&frame(0), &old) }.expect("a frame");
    let mut read = vec![0; layout.packed_bytes()];
    session.pause();
    for call in ["cuEventSynchronize", "cuStreamSynchronize"] {
        session.fail_calls(call, REFUSED);
    }
    // SAFETY: as above.
    let refused = unsafe { storage.pack(&frame(0), &mut read) }.expect_err("its end is not known");
    assert!(!refused.is_lost() && session.pending() > 0, "{refused}");
    session.forget_injected();
    std::thread::scope(|scope| {
        let pending = session.pending();
        // SAFETY: as above.
        let writing = scope.spawn(|| unsafe { storage.unpack(&frame(1), &new) });
        while session.pending() == pending {
            std::thread::sleep(Duration::from_millis(1));
        }
        session.resume();
        writing.join().expect("no panic").expect("a frame");
    });
    // SAFETY: as above.
    unsafe { storage.pack(&frame(1), &mut read) }.expect("a frame");
    assert!(read == new, "the late copy has changed the buffer of another transfer");
}
