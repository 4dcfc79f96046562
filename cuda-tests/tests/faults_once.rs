//! One call fails, and the device keeps working: the operation fails with an error or takes another
//! path, nothing is left half done, and reads return the stored bytes.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, result};
use kvpool::compact::DefragOptions;
use kvpool::storage::Storage;
use kvpool::{DefragError, FrameId, GrowError, Pool, ResizeError, Run, SequenceId, StorageError};
use kvpool_cuda::{CudaStorage, Device, StreamPriority};
use kvpool_cuda_tests::engine::{Lane, Rig, Shape, Wrong, drained, layout_of};
use kvpool_cuda_tests::mock;

const OUT_OF_MEMORY: i32 = 2;

/// Driver calls made by a step, a copy on write, or a move.
const CALLS: [&str; 10] = [
    "cuEventRecord",
    "cuLaunchKernel",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuLaunchHostFunc",
    "cuStreamWaitEvent",
    "cuStreamGetCtx",
    "cuStreamIsCapturing",
    "cuMemHostAlloc",
    "cuMemAlloc_v2",
];

/// Takes a step; waits first if the lane has its maximum of steps in flight.
fn go_on(rig: &Rig, lane: &mut Lane) -> Result<(), Wrong> {
    lane.go_on(rig)?;
    while !lane.check()? && lane.is_full() {
        std::thread::yield_now();
    }
    Ok(())
}

#[test]
fn a_call_that_fails_once_is_an_error_and_no_more() {
    let session = mock::session();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let _entered = runtime.enter();
    drop(Device::open(0).expect("the mock has a device"));
    assert!(drained(|| session.live()[mock::Kind::Context as usize] == 0));
    let before = session.live();
    let (mut refused, mut compared) = (0, 0);
    for (seed, call) in (0..).zip(CALLS) {
        let device = Device::open(0).expect("the mock has a device");
        let rig = Rig::new(&device, &Shape { layout: layout_of(seed), blocks: (20, 20), caches: true });
        let mut lane = Lane::new(&rig, rig.stream(StreamPriority::Usual), seed);
        for skip in [0, 1, 2, 3, 5, 8, 13] {
            session.fail_call(call, skip, OUT_OF_MEMORY);
            for round in 0..24 {
                match go_on(&rig, &mut lane) {
                    Ok(()) => {}
                    Err(Wrong::Row(row)) => panic!("{call}, {skip}, round {round}: {row}"),
                    Err(_) => refused += 1,
                }
                match runtime
                    .block_on(rig.pool.defragment_with(DefragOptions::new().fragmentation_penalty(0)))
                {
                    Ok(_) => {}
                    Err(DefragError::Copy { error: StorageError::Device { .. }, .. }) => refused += 1,
                    Err(error) => panic!("{call}, {skip}, round {round}: {error}"),
                }
            }
            session.forget_injected();
            assert!(!rig.pool.is_lost(), "{call}, {skip}: the pool was lost although the device works");
        }
        for _ in 0..30 {
            lane.go_on(&rig)
                .and_then(|()| lane.check().map(drop))
                .unwrap_or_else(|wrong| panic!("{call}: {wrong}"));
        }
        lane.clear();
        assert!(drained(|| lane.check().is_ok() && lane.is_idle() && lane.finishes.is_empty()), "{call}");
        let is_sound = drained(|| rig.pool.stats().retired == 0 && rig.pool.audit().is_ok());
        assert!(is_sound, "{call}: {:?}, {:?}", rig.pool.audit(), rig.pool.stats());
        compared += lane.compared;
        drop((lane, rig, device));
        let leaks = |live: mock::Live| live.iter().zip(&before).any(|(now, before)| now > before);
        assert!(drained(|| !leaks(session.live())), "{call}: {:?} of {before:?}", session.live());
    }
    assert!(refused >= 5 && compared > 10_000, "{refused} refused, {compared} compared");
}

/// A failed growth leaves the pool unchanged; a failed construction leaves nothing behind.
#[test]
fn memory_that_is_refused_changes_nothing() {
    let session = mock::session();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let device = Device::open(0).expect("the mock has a device");
    // The frames are so long that adding a few maps more memory.
    let layout = kvpool::storage::KvLayout::builder().layers(2).kv_heads(8).head_dim(256).block_tokens(64);
    let layout = layout.build().expect("a layout");
    let rig = Rig::new(&device, &Shape { layout, blocks: (8, 128), caches: false });
    let (total, frames, before) = (rig.pool.total_blocks(), rig.storage().frames(), session.live());
    let mapped = rig.storage().mapped_bytes();
    for call in ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async"] {
        for skip in 0..3 {
            session.fail_call(call, skip, OUT_OF_MEMORY);
            let grown = runtime.block_on(rig.pool.resize(128));
            session.forget_injected();
            assert!(
                matches!(grown, Err(ResizeError::Grow(GrowError::Memory { .. }))),
                "{call}, {skip}: {grown:?}"
            );
            assert_eq!((rig.pool.total_blocks(), rig.storage().frames()), (total, frames), "{call}");
            assert_eq!(rig.storage().mapped_bytes(), mapped, "{call}");
            session.assert_no_leaks(&before);
        }
    }
    runtime.block_on(rig.pool.resize(128)).expect("enough memory");
    assert!(rig.storage().mapped_bytes() > mapped);
    runtime.block_on(rig.pool.resize(8)).expect("nothing is in use");
    assert!(drained(|| rig.storage().mapped_bytes() == mapped), "unused memory is released");
    std::thread::sleep(Duration::from_millis(5));
    session.assert_no_leaks(&before);
    rig.pool.audit().expect("a consistent pool");
}

/// A release cannot fail: the blocks are scrubbed all the same, before they get new owners.
#[test]
fn what_is_given_up_is_scrubbed_though_a_call_fails() {
    let session = mock::session();
    let engine = CudaContext::new(0).expect("the mock has a device");
    let layout = kvpool::storage::KvLayout::named("tiny").expect("a preset");
    let calls = ["cuMemcpyHtoDAsync_v2", "cuLaunchKernel", "cuEventRecord"];
    for call in calls {
        let device = Device::open(0).expect("the mock has a device");
        let storage = CudaStorage::new(&device, layout.clone(), 9, 9).expect("frames");
        let planes = storage.planes().expect("a device's memory has addresses");
        let pool = Pool::builder(layout.clone()).blocks(8).zero_on_free().storage(Arc::new(storage));
        let pool = pool.build().expect("a pool");
        let mut sequence = pool.sequence(SequenceId(1)).open().expect("a sequence");
        let mut batch = pool.begin_batch();
        batch.append(&mut sequence, 3).expect("blocks");
        batch.finish();
        for plane in planes.tensors() {
            // Does not use the storage, which has no buffers yet.
            let (address, bytes) = (plane.data.addr() as u64, 9 * plane.frame_stride());
            // SAFETY: the plane's tiles; no other thread accesses them now.
            unsafe { result::memset_d8_sync(address, 0xA5, bytes) }.expect("mapped");
        }
        engine.synchronize().expect("a healthy device");
        let before = [session.calls("cuMemsetD8Async"), session.calls(call)];
        session.fail_call(call, 0, OUT_OF_MEMORY);
        drop(sequence);
        session.forget_injected();
        assert!(!pool.is_lost(), "{call}");
        assert!(session.calls(call) > before[1], "{call} was not called");
        // Without an event, the wipe that was enqueued is waited for.
        let fills = session.calls("cuMemsetD8Async") > before[0];
        assert_eq!(fills, call != "cuEventRecord", "{call}");
        let mut read = vec![0; 9 * layout.packed_bytes()];
        let storage = pool.storage().expect("its own");
        // SAFETY: as above.
        unsafe { storage.pack(&[Run { start: FrameId(0), len: 9 }], &mut read) }.expect("frames");
        let clean =
            read.chunks(layout.packed_bytes()).filter(|frame| frame.iter().all(|&byte| byte == 0)).count();
        assert_eq!(clean, 1, "{call}");
        pool.audit().expect("a consistent pool");
    }
}
