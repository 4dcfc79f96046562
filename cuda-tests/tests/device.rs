//! A device in use: its memory, its streams, its failure, which is reported to all users, and no thread
//! that waits forever.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, result};
use kvpool::storage::{AdoptedPlane, AdoptedTensors, DeviceStream, FrameMove, KvLayout, Storage};
use kvpool::{DeviceId, FrameId, Pool, Run, SequenceId, StorageError};
use kvpool_cuda::{CudaConfig, CudaStorage, Device};
use kvpool_cuda_tests::engine::drained;
use kvpool_cuda_tests::mock::{Kind, Style, forgotten, session};

const ILLEGAL_ADDRESS: i32 = 700;
const OUT_OF_MEMORY: i32 = 2;

fn tiny() -> KvLayout {
    KvLayout::named("tiny").expect("a preset")
}

fn all(frames: usize) -> Run {
    Run { start: FrameId(0), len: frames as u32 }
}

/// The end of work cannot be detected any more: memory that an engine has lent is not given back,
/// because the device may still use it.
#[test]
fn adopted_memory_that_may_be_in_use_is_not_given_back() {
    /// The engine's memory, and whether it was given back.
    struct Lent(Arc<CudaContext>, u64, Arc<AtomicBool>);
    impl Drop for Lent {
        fn drop(&mut self) {
            self.2.store(true, Ordering::SeqCst);
            self.0.bind_to_thread().expect("its context");
            // SAFETY: allocated below.
            unsafe { result::free_sync(self.1) }.expect("allocated memory");
        }
    }
    let session = session();
    for is_stuck in [false, true] {
        let device = Device::open(0).expect("a device");
        let context = CudaContext::new(0).expect("a device");
        // SAFETY: the allocation is freed by its owner.
        let address = unsafe { result::malloc_sync(4 * tiny().packed_bytes()) }.expect("memory");
        let planes: Vec<AdoptedPlane> = tiny()
            .planes(4)
            .expect("planes")
            .planes
            .iter()
            .map(|plane| {
                let base = std::ptr::without_provenance_mut(address as usize + plane.base);
                AdoptedPlane { base, frame_stride: plane.frame_stride }
            })
            .collect();
        let given_back = Arc::new(AtomicBool::new(false));
        let owner = Lent(context, address, given_back.clone());
        let (tensors, config) = (AdoptedTensors::Planes(&planes), CudaConfig::default());
        // SAFETY: the memory lives until its owner is dropped.
        let storage = unsafe { CudaStorage::adopt_tensors(&device, tiny(), tensors, 4, owner, config) };
        let storage = storage.expect("memory of this device");
        let (tell, told) = mpsc::channel();
        session.pause();
        let moves = [FrameMove::new(FrameId(0), FrameId(1))];
        // SAFETY: no other thread uses the frames.
        unsafe { storage.copy_then(&moves, Box::new(move |end| tell.send(end).expect("the test receives"))) };
        if is_stuck {
            session.fail_calls("cuEventQuery", 400);
            let outcome = told.recv_timeout(Duration::from_secs(20)).expect("the callback is called");
            assert!(matches!(&outcome, Err(error) if error.is_lost()), "{outcome:?}");
            drop((storage, device));
            assert!(session.pending() > 0, "the copy has not run");
            std::thread::sleep(Duration::from_millis(20));
            assert!(!given_back.load(Ordering::SeqCst), "the copy would access freed memory");
            session.forget_injected();
            session.resume();
        } else {
            drop((storage, device));
            assert!(!given_back.load(Ordering::SeqCst), "the copy is in flight");
            session.resume();
            assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok(Ok(())));
            assert!(drained(|| given_back.load(Ordering::SeqCst)));
        }
    }
}

/// The same for memory that was mapped here: it stays mapped.
#[test]
fn mapped_memory_that_may_be_in_use_stays_mapped() {
    let session = session();
    let device = Device::open(0).expect("a device");
    let config = CudaConfig::default().segment_frames(1);
    let layout = KvLayout::builder().layers(1).kv_heads(8).head_dim(256).block_tokens(512).build().unwrap();
    let storage = CudaStorage::with_config(&device, layout, 8, 8, config).expect("frames");
    let mapped = storage.mapped_bytes();
    let (tell, told) = mpsc::channel();
    session.pause();
    let moves = [FrameMove::new(FrameId(0), FrameId(7))];
    // SAFETY: no other thread uses the frames.
    unsafe { storage.copy_then(&moves, Box::new(move |end| tell.send(end).expect("the test receives"))) };
    session.fail_calls("cuEventQuery", 400);
    let outcome = told.recv_timeout(Duration::from_secs(20)).expect("the callback is called");
    assert!(matches!(&outcome, Err(error) if error.is_lost()), "{outcome:?}");
    // SAFETY: the frame rule is broken by the device, which may still copy.
    unsafe { storage.shrink(1) };
    assert_eq!((storage.frames(), storage.mapped_bytes()), (1, mapped), "the copy would fault");
    let before = session.live();
    drop(storage);
    let now = session.live();
    for kind in [Kind::Mapping, Kind::Reservation] {
        assert_eq!(now[kind as usize], before[kind as usize], "{kind:?}");
    }
    session.forget_injected();
    session.resume();
    assert!(drained(|| session.pending() == 0), "the copy has not faulted");
}

#[test]
fn too_little_memory_is_said_in_bytes_and_undone() {
    let session = session();
    let device = Device::open(0).expect("a device");
    session.set_capacity(0, 1 << 20);
    let layout = KvLayout::named("llama-3.1-8b").expect("a preset");
    let before = session.live();
    match CudaStorage::new(&device, layout, 64, 64) {
        Err(StorageError::DeviceMemory { device, bytes, free, total }) => {
            assert_eq!((device, total), (DeviceId::Cuda(0), 1 << 20));
            assert!(bytes >= 64 * (2 << 20) && free <= total);
        }
        other => panic!("{other:?}"),
    }
    session.assert_no_leaks(&before);
}

/// The device supports memory that others can access, and the driver refuses to create it: the frames
/// get memory without, and the storage says so.
#[test]
fn memory_that_others_cannot_access_is_taken_if_the_driver_refuses_more() {
    let session = session();
    let device = Device::open(0).expect("a device");
    for (refused, exportable, rdma) in
        [(0, true, true), (2, true, false), (1, false, false), (3, false, false)]
    {
        session.refuse(refused);
        let storage = CudaStorage::new(&device, tiny(), 4, 8).expect("frames");
        let sharing = storage.memory_sharing().expect("mapped memory");
        assert_eq!((sharing.exportable, sharing.rdma), (exportable, rdma), "{refused}");
        storage.grow(8).expect("the same kind of memory");
        // SAFETY: only this thread uses the storage.
        unsafe { storage.zero(&[all(8)]) }.expect("frames");
        storage.close().expect("a healthy device");
    }
}

#[test]
fn a_growth_that_fails_in_the_middle_changes_nothing() {
    let session = session();
    let device = Device::open(0).expect("a device");
    let config = kvpool_cuda::CudaConfig::default().segment_frames(1);
    // Layer-first, with several regions; added frames take chunks of their own.
    let layout = KvLayout::builder().layers(2).kv_heads(8).head_dim(256).block_tokens(64).build().unwrap();
    let storage = CudaStorage::with_config(&device, layout.clone(), 1, 64, config).expect("one frame");
    let pattern: Vec<u8> = (0..layout.packed_bytes()).map(|at| at as u8).collect();
    // SAFETY: only this thread uses the storage.
    unsafe { storage.unpack(&[all(1)], &pattern) }.expect("a frame");
    let (before, mapped) = (session.live(), storage.mapped_bytes());
    for function in ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async"] {
        for skip in [0, 1, 5] {
            session.fail_call(function, skip, OUT_OF_MEMORY);
            storage.grow(64).expect_err(function);
            session.forget_injected();
            assert_eq!((storage.frames(), storage.mapped_bytes()), (1, mapped), "{function} {skip}");
            session.assert_no_leaks(&before);
        }
    }
    storage.grow(64).expect("enough memory");
    assert!(storage.mapped_bytes() > mapped);
    let mut read = vec![0; 64 * pattern.len()];
    // SAFETY: only this thread uses the storage.
    unsafe { storage.pack(&[all(64)], &mut read) }.expect("all frames");
    assert!(read[..pattern.len()] == pattern && read[pattern.len()..].iter().all(|&byte| byte == 0));
    // SAFETY: only this thread uses the storage.
    unsafe { storage.shrink(1) };
    assert_eq!(storage.mapped_bytes(), mapped);
    let now = session.live();
    for kind in [Kind::Mapping, Kind::Physical, Kind::Reservation] {
        assert_eq!(now[kind as usize], before[kind as usize], "{kind:?}");
    }
    storage.close().expect("a healthy device");
}

#[test]
fn a_lost_device_tells_all_waiting_and_later_requests() {
    let session = session();
    let device = Device::open(0).expect("a device");
    let storage = CudaStorage::new(&device, tiny(), 8, 8).expect("frames");
    let stream = device.stream().expect("a stream");
    session.pause();
    let (tell, told) = mpsc::channel();
    for _ in 0..3 {
        let tell = tell.clone();
        storage.after(&stream, Box::new(move |outcome| tell.send(outcome).expect("the test receives")));
    }
    let moved = tell.clone();
    let moves = [FrameMove::new(FrameId(0), FrameId(1))];
    // SAFETY: no other thread uses the frames.
    unsafe {
        storage.copy_then(&moves, Box::new(move |outcome| moved.send(outcome).expect("the test receives")))
    };
    assert!(told.recv_timeout(Duration::from_millis(20)).is_err(), "nothing has run yet");
    session.fail(0, ILLEGAL_ADDRESS);
    for _ in 0..4 {
        let outcome = told.recv_timeout(Duration::from_secs(5)).expect("every callback is called");
        assert!(matches!(&outcome, Err(error) if error.is_lost()), "{outcome:?}");
    }
    session.resume();
    let lost = |outcome: Result<(), StorageError>| {
        assert!(matches!(&outcome, Err(error) if error.is_lost()), "{outcome:?}");
    };
    let mut packed = vec![0; tiny().packed_bytes()];
    // SAFETY: only this thread uses the storage.
    unsafe {
        lost(storage.copy(&moves));
        lost(storage.zero(&[all(1)]));
        lost(storage.pack(&[all(1)], &mut packed));
        lost(storage.unpack(&[all(1)], &packed));
        lost(storage.copy_on(&stream, &moves));
    }
    lost(storage.check_stream(&stream));
    lost(storage.settle(&stream));
    lost(device.good());
    let late = tell.clone();
    storage.after(&stream, Box::new(move |outcome| late.send(outcome).expect("the test receives")));
    lost(told.recv_timeout(Duration::from_secs(5)).expect("the callback is called"));
    lost(storage.close());
}

#[test]
fn a_callback_may_drop_the_last_of_everything() {
    let session = session();
    let before = session.live();
    let device = Device::open(0).expect("a device");
    let storage = CudaStorage::new(&device, tiny(), 4, 4).expect("frames");
    let stream = device.stream().expect("a stream");
    let (tell, told) = mpsc::channel();
    let watching = CudaStorage::new(&device, tiny(), 1, 1).expect("a frame");
    session.pause();
    let on = stream.clone();
    let owned = (storage, stream, device.clone());
    watching.after(
        &on,
        Box::new(move |outcome| {
            drop(owned);
            tell.send(outcome).expect("the test receives");
        }),
    );
    session.resume();
    drop((watching, device, on));
    told.recv_timeout(Duration::from_secs(5)).expect("called").expect("a healthy device");
    std::thread::sleep(Duration::from_millis(100));
    session.assert_no_leaks(&before);
}

#[test]
fn a_callback_that_panics_harms_nobody_else() {
    let session = session();
    let device = Device::open(0).expect("a device");
    let storage = CudaStorage::new(&device, tiny(), 1, 1).expect("a frame");
    let stream = device.stream().expect("a stream");
    let (tell, told) = mpsc::channel();
    session.pause();
    storage.after(&stream, Box::new(|_| panic!("planted: a callback panics")));
    storage.after(&stream, Box::new(move |outcome| tell.send(outcome).expect("the test receives")));
    session.resume();
    told.recv_timeout(Duration::from_secs(5))
        .expect("the second callback is called")
        .expect("a healthy device");
}

#[test]
fn streams_of_others_are_refused() {
    let session = session();
    session.style(Style::Random);
    let [first, second] = [0, 1].map(|ordinal| Device::open(ordinal).expect("two devices"));
    let storage = CudaStorage::new(&first, tiny(), 2, 2).expect("frames");
    let foreign = second.stream().expect("a stream");
    let refused = StorageError::ForeignStream { stream: DeviceId::Cuda(1), storage: DeviceId::Cuda(0) };
    assert_eq!(storage.check_stream(&foreign), Err(refused.clone()));
    assert_eq!(storage.settle(&foreign), Err(refused.clone()));
    // SAFETY: the handle is a stream's, although of another device than declared.
    let lying = unsafe { DeviceStream::from_raw(DeviceId::Cuda(0), foreign.as_raw(), foreign.clone()) };
    assert!(matches!(storage.check_stream(&lying), Err(StorageError::Device { .. })));
    let (tell, told) = mpsc::channel();
    storage.after(&foreign, Box::new(move |outcome| tell.send(outcome).expect("the test receives")));
    assert_eq!(told.recv().expect("called immediately"), Err(refused));
    assert!(session.live()[Kind::Stream as usize] > 0);
}

#[test]
fn a_pool_that_scrubs_gives_up_a_lost_device_without_a_panic() {
    let session = session();
    let device = Device::open(0).expect("a device");
    let storage = CudaStorage::new(&device, tiny(), 9, 9).expect("frames");
    let pool =
        Pool::builder(tiny()).blocks(8).zero_on_free().storage(Arc::new(storage)).build().expect("a pool");
    let mut sequence = pool.sequence(SequenceId(1)).open().expect("a sequence");
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 3).expect("blocks");
    batch.finish();
    session.fail(0, ILLEGAL_ADDRESS);
    drop(sequence);
    pool.audit().expect("a consistent pool");
    drop(pool);
}

#[test]
fn an_owner_of_a_stream_that_panics_ends_no_batch_early() {
    struct Grim;
    impl Drop for Grim {
        fn drop(&mut self) {
            panic!("planted: the owner of a stream panics");
        }
    }
    let session = session();
    let device = Device::open(0).expect("a device");
    let storage = CudaStorage::new(&device, tiny(), 1, 1).expect("a frame");
    let stream = device.stream().expect("a stream");
    // SAFETY: the stream lives until the end of the test.
    let grim = unsafe { DeviceStream::from_raw(DeviceId::Cuda(0), stream.as_raw(), Grim) };
    let (tell, told) = mpsc::channel();
    let told_of = |stream: &DeviceStream| {
        let tell = tell.clone();
        storage.after(stream, Box::new(move |outcome| tell.send(outcome).expect("the test receives")));
    };
    session.pause();
    told_of(&grim);
    // The watcher now holds the last reference.
    drop(grim);
    session.resume();
    assert_eq!(told.recv_timeout(Duration::from_secs(5)), Ok(Ok(())));
    session.pause();
    told_of(&stream);
    assert!(told.recv_timeout(Duration::from_millis(20)).is_err(), "nothing has run yet");
    session.resume();
    assert_eq!(told.recv_timeout(Duration::from_secs(5)), Ok(Ok(())));
}

#[test]
fn the_stream_of_whichever_thread_is_none_to_end_a_batch_on() {
    let _session = session();
    let device = Device::open(0).expect("a device");
    let storage = CudaStorage::new(&device, tiny(), 2, 2).expect("frames");
    // SAFETY: CU_STREAM_PER_THREAD, which always exists.
    let own = unsafe { DeviceStream::from_raw(DeviceId::Cuda(0), std::ptr::without_provenance_mut(2), ()) };
    let refused = storage.check_stream(&own).expect_err("a different stream on every thread");
    assert!(refused.to_string().contains("per-thread"), "{refused}");
    let moves = [FrameMove::new(FrameId(0), FrameId(1))];
    // SAFETY: the call is refused.
    assert_eq!(unsafe { storage.copy_on(&own, &moves) }, Err(refused.clone()));
    assert_eq!(storage.settle(&own), Err(refused));
}

#[test]
fn a_copy_on_write_is_waited_for_though_the_batch_is_finished_on_another_stream() {
    let session = session();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let device = Device::open(0).expect("a device");
    let storage = CudaStorage::new(&device, tiny(), 9, 9).expect("frames");
    let pool = Pool::builder(tiny()).blocks(8).storage(Arc::new(storage)).build().expect("a pool");
    let (begun, other) = (device.stream().expect("a stream"), device.stream().expect("a stream"));
    let mut sequence = pool.sequence(SequenceId(1)).open().expect("a sequence");
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 3).expect("blocks");
    batch.finish();
    let mut fork = sequence.fork(SequenceId(2)).expect("a fork");
    session.pause();
    let mut batch = pool.begin_batch_on(&begun).expect("a valid stream");
    assert!(batch.append(&mut fork, 1).expect("blocks").copied.is_some());
    let mut finish = batch.finish_on(&other).expect("a valid stream");
    // The other stream has no work and completes.
    session.step_stream(other.as_raw() as usize, 100);
    runtime.block_on(async {
        let early = tokio::time::timeout(Duration::from_millis(20), &mut finish).await;
        assert!(early.is_err(), "{early:?}: the copy is not done");
        session.resume();
        tokio::time::timeout(Duration::from_secs(5), finish)
            .await
            .expect("the finish resolves")
            .expect("a healthy device");
    });
    drop((sequence, fork));
    pool.audit().expect("a consistent pool");
}

/// The driver refuses every event: the stream itself tells that its work is complete.
#[test]
fn a_stream_without_events_is_asked_itself() {
    let session = session();
    let device = Device::open(0).expect("a device");
    let storage = CudaStorage::new(&device, tiny(), 2, 2).expect("frames");
    let stream = device.stream().expect("a stream");
    let (tell, told) = mpsc::channel();
    let moves = [FrameMove::new(FrameId(0), FrameId(1))];
    session.pause();
    // SAFETY: no other thread uses the frames.
    unsafe { storage.copy_on(&stream, &moves) }.expect("a valid stream");
    session.fail_calls("cuEventRecord", OUT_OF_MEMORY);
    storage.after(&stream, Box::new(move |outcome| tell.send(outcome).expect("the test receives")));
    let early = told.recv_timeout(Duration::from_millis(500));
    assert!(early.is_err(), "{early:?}: the copy has not run");
    session.resume();
    assert_eq!(told.recv_timeout(Duration::from_secs(4)), Ok(Ok(())));
    session.forget_injected();
    device.good().expect("a healthy device");
}

/// The driver refuses events for good, and the stream does not say that it is idle: the waiter gets
/// an error, and does not wait forever.
#[test]
fn a_stream_that_cannot_be_asked_loses_the_device() {
    let session = session();
    for (query, least, most) in [(Some(400), 4, 12), (None, 4, 12)] {
        let device = Device::open(0).expect("a device");
        let storage = CudaStorage::new(&device, tiny(), 2, 2).expect("frames");
        let stream = device.stream().expect("a stream");
        let (tell, told) = mpsc::channel();
        let moves = [FrameMove::new(FrameId(0), FrameId(1))];
        session.pause();
        // SAFETY: no other thread uses the frames.
        unsafe { storage.copy_on(&stream, &moves) }.expect("a valid stream");
        session.fail_calls("cuEventRecord", 400);
        if let Some(code) = query {
            session.fail_calls("cuStreamQuery", code);
        }
        let start = Instant::now();
        storage.after(&stream, Box::new(move |outcome| tell.send(outcome).expect("the test receives")));
        let outcome = told.recv_timeout(Duration::from_secs(most)).expect("the callback is called");
        assert!(matches!(&outcome, Err(error) if error.is_lost()), "{outcome:?}");
        assert!(start.elapsed() >= Duration::from_secs(least), "{:?}", start.elapsed());
        assert!(device.good().is_err());
        session.forget_injected();
        session.resume();
        drop((storage, stream, device));
        forgotten();
    }
}

/// A launch makes few driver calls: one context guard around all of them, and no allocation.
#[test]
fn a_launch_takes_few_calls() {
    let session = session();
    let device = Device::open(0).expect("a device");
    let storage = CudaStorage::new(&device, tiny(), 600, 600).expect("frames");
    let stream = device.stream().expect("a stream");
    session.pause();
    let moves: Vec<FrameMove> = (0..256).map(|at| FrameMove::new(FrameId(at), FrameId(300 + at))).collect();
    let calls = |work: &dyn Fn()| {
        let before = session.calls_here();
        work();
        session.calls_here() - before
    };
    // SAFETY: nothing runs, and no other thread uses the frames.
    let wave = calls(&|| unsafe { storage.copy_then(&moves, Box::new(|_| ())) });
    // SAFETY: as above.
    let ordered = calls(&|| unsafe { storage.copy_on(&stream, &moves[..1]) }.expect("a valid stream"));
    assert!(wave <= 8, "{wave} calls for a wave of 256 moves");
    assert!(ordered <= 8, "{ordered} calls for a copy on a stream");
    session.resume();
}

/// Copies by both kernels and in both shapes: on devices with and without bulk copies, alone and
/// beside a batch; and with more moves than a launch takes as parameters.
#[test]
fn frames_are_copied_by_either_kernel() {
    let session = session();
    for (major, minor) in [(8, 0), (9, 0)] {
        session.set_capability(0, major, minor);
        let device = Device::open(0).expect("a device");
        let storage = CudaStorage::new(&device, tiny(), 601, 601).expect("frames");
        let frame = tiny().packed_bytes();
        let content: Vec<u8> = (0..300 * frame).map(|at| (at * 7 + at / 251) as u8).collect();
        // SAFETY: only this thread uses the storage.
        unsafe { storage.unpack(&[all(300)], &content) }.expect("frames");
        let moves: Vec<FrameMove> =
            (0..300).map(|at| FrameMove::new(FrameId(at), FrameId(600 - at))).collect();
        let stream = device.stream().expect("a stream");
        let (first, rest) = moves.split_at(10);
        // SAFETY: as above.
        unsafe { storage.copy(rest) }.expect("frames");
        session.pause();
        storage.after(&stream, Box::new(|_| ()));
        let (tell, told) = mpsc::channel();
        // SAFETY: as above, until the callback.
        unsafe { storage.copy_then(first, Box::new(move |end| tell.send(end).expect("the test receives"))) };
        session.resume();
        assert_eq!(told.recv_timeout(Duration::from_secs(5)), Ok(Ok(())));
        let mut read = vec![0; 300 * frame];
        let copies = Run { start: FrameId(301), len: 300 };
        // SAFETY: as above.
        unsafe { storage.pack(&[copies], &mut read) }.expect("frames");
        let same = read.chunks(frame).rev().eq(content.chunks(frame));
        assert!(same, "compute capability {major}.{minor}");
        storage.close().expect("a healthy device");
    }
}
