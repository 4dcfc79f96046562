//! Internal work of the pool in one batch and another user's work in the next: run in the order of
//! the calls.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use cudarc::driver::{CudaContext, sys};
use half::bf16;
use kvpool::cuda::{CudaStorage, Device};
use kvpool::storage::{DeviceStream, Dtype, Elements, ElementsMut, FrameMove, KvLayout, Storage};
use kvpool::{FrameId, Pool, Run, SequenceId};
use kvpool_cuda_tests::mock::{Style, session};

/// Keeps a stream busy, by a host function that waits, until the sender is used or dropped. A context
/// must be current.
fn hold(stream: &DeviceStream) -> Sender<()> {
    unsafe extern "C" fn wait(data: *mut c_void) {
        // SAFETY: the box of `hold`, passed once.
        let gone = unsafe { Box::from_raw(data.cast::<Receiver<()>>()) };
        let _ = gone.recv();
    }
    let (go, gone) = channel::<()>();
    let data = Box::into_raw(Box::new(gone)).cast();
    // SAFETY: the stream lives, and the function calls no function of the driver.
    let held = unsafe { sys::cuLaunchHostFunc(stream.as_raw().cast(), Some(wait), data) };
    held.result().expect("a healthy device");
    go
}

/// A copy on write is still pending on one stream when another batch stores to the copy from the
/// host: the stored rows remain.
#[test]
fn a_store_comes_behind_a_copy_on_write_of_another_batch() {
    let session = session();
    let device = Device::open(0).expect("the mock has a device");
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(4).block_tokens(4).dtype(Dtype::F32);
    let layout = layout.build().expect("a small layout");
    let storage = CudaStorage::new(&device, layout.clone(), 9, 9).expect("memory for a few frames");
    let pool = Pool::builder(layout).blocks(8).storage(Arc::new(storage)).build().expect("a small pool");
    let rows: Vec<f32> = (0..16).map(|value| value as f32).collect();

    let mut first = pool.sequence(SequenceId(1)).open().expect("a new id");
    let mut batch = pool.begin_batch();
    batch.append(&mut first, 2).expect("enough blocks");
    batch
        .store(&mut first, 0, 0..2, Elements::from(&rows[..8]), Elements::from(&rows[..8]))
        .expect("good rows");
    batch.finish();

    let stream = device.stream().expect("a stream");
    // Nothing runs until both are enqueued; then every stream runs before the one with the copy, as
    // long as possible.
    session.style(Style::Starve(stream.as_raw() as usize));
    session.pause();
    let mut fork = first.fork(SequenceId(2)).expect("a new id");
    let mut batch = pool.begin_batch_on(&stream).expect("a stream of the device");
    let appended = batch.append(&mut fork, 1).expect("enough blocks");
    assert!(appended.copied.is_some(), "the tail is shared");
    let ended = batch.finish_on(&stream).expect("a stream of the device");

    kvpool_testkit::threads::scope(|scope| {
        let (pool, fork, rows) = (&pool, &mut fork, &rows);
        let storing = scope.spawn(move || {
            let mut batch = pool.begin_batch();
            batch.append(fork, 1).expect("enough blocks");
            let (k, v) = (Elements::from(&rows[8..]), Elements::from(&rows[8..]));
            batch.store(fork, 0, 2..4, k, v).expect("good rows");
        });
        thread::sleep(Duration::from_millis(300));
        assert!(!storing.is_finished(), "the device is paused");
        session.resume();
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(ended).expect("a healthy device");

    let (mut k, mut v) = (vec![0f32; 16], vec![0f32; 16]);
    let mut batch = pool.begin_batch();
    batch.load(&fork, 0, 0..4, ElementsMut::from(&mut k), ElementsMut::from(&mut v)).expect("good rows");
    batch.finish();
    assert_eq!((k, v), (rows.clone(), rows));
    drop((first, fork));
    pool.audit().expect("a consistent pool");
}

/// While a copy on write is pending on a stream that makes no progress, the host stores to other
/// blocks, and the pool grows: only operations on the copy wait for it.
#[test]
fn a_copy_on_write_holds_back_nothing_else() {
    let session = session();
    let device = Device::open(0).expect("the mock has a device");
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(4).block_tokens(4).dtype(Dtype::F32);
    let layout = layout.build().expect("a small layout");
    let storage = CudaStorage::new(&device, layout.clone(), 9, 17).expect("memory for a few frames");
    let pool = Pool::builder(layout).blocks(8).blocks_max(16).storage(Arc::new(storage));
    let pool = pool.build().expect("a small pool");
    let rows: Vec<f32> = (0..8).map(|value| value as f32).collect();
    let mut first = pool.sequence(SequenceId(1)).open().expect("a new id");
    let mut batch = pool.begin_batch();
    batch.append(&mut first, 2).expect("enough blocks");
    batch.finish();
    let stream = device.stream().expect("a stream");
    let _context = CudaContext::new(0).expect("the mock has a device");
    let go = hold(&stream);
    let mut fork = first.fork(SequenceId(2)).expect("a new id");
    let mut batch = pool.begin_batch_on(&stream).expect("a stream of the device");
    assert!(batch.append(&mut fork, 1).expect("enough blocks").copied.is_some());
    let ended = batch.finish_on(&stream).expect("a stream of the device");

    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let mut other = pool.sequence(SequenceId(3)).open().expect("a new id");
    let mut batch = pool.begin_batch();
    batch.append(&mut other, 2).expect("enough blocks");
    let (k, v) = (Elements::from(&rows), Elements::from(&rows));
    batch.store(&mut other, 0, 0..2, k, v).expect("good rows");
    batch.finish();
    runtime.block_on(pool.resize(16)).expect("enough memory");
    assert!(session.pending() > 0, "the stream is still held");
    go.send(()).expect("the stream waits");
    runtime.block_on(ended).expect("a healthy device");
    drop((first, fork, other));
    pool.audit().expect("a consistent pool");
}

/// Blocks that a batch frees when it ends are wiped behind the reports of other events, not before
/// them; until then they have no new owner.
#[test]
fn wipes_at_the_end_of_a_batch_delay_no_report() {
    let session = session();
    let device = Device::open(0).expect("the mock has a device");
    let layout = KvLayout::named("tiny").expect("a preset");
    let storage = CudaStorage::new(&device, layout.clone(), 9, 9).expect("memory for a few frames");
    let pool = Pool::builder(layout.clone()).blocks(8).zero_on_free().storage(Arc::new(storage));
    let pool = pool.build().expect("a small pool");
    let elements = 3 * layout.row_elements();
    let rows = vec![bf16::ONE; elements];
    let mut sequence = pool.sequence(SequenceId(1)).open().expect("a new id");
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 3).expect("enough blocks");
    batch.store(&mut sequence, 0, 0..3, Elements::from(&rows), Elements::from(&rows)).expect("good rows");
    batch.finish();
    let [engine, other] = [0; 2].map(|_| device.stream().expect("a stream"));
    // The batch holds the last reference on the copied block until it ends.
    let mut fork = sequence.fork(SequenceId(2)).expect("a new id");
    let mut batch = pool.begin_batch_on(&engine).expect("a stream of the device");
    session.pause();
    assert!(batch.append(&mut fork, 1).expect("enough blocks").copied.is_some());
    drop(sequence);
    let ended = batch.finish_on(&engine).expect("a stream of the device");
    // Only these two streams make progress: the wipe does not.
    let step = |stream: &DeviceStream| session.step_stream(stream.as_raw() as usize, 100);
    step(&engine);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(ended).expect("a healthy device");
    let (tell, told) = channel();
    let storage = pool.storage().expect("its own").clone();
    storage.after(&other, Box::new(move |outcome| tell.send(outcome).expect("the test receives")));
    step(&other);
    assert_eq!(told.recv_timeout(Duration::from_secs(5)), Ok(Ok(())), "the watcher waits for the wipe");
    assert_eq!(pool.free_blocks(), 6, "the block is not free before it is wiped");
    session.resume();
    let wiped = kvpool_cuda_tests::engine::drained(|| pool.free_blocks() == 7);
    assert!(wiped, "{:?}", pool.stats());
    let mut read = vec![0; 9 * layout.packed_bytes()];
    // SAFETY: no other thread uses the frames.
    unsafe { storage.pack(&[Run { start: FrameId(0), len: 9 }], &mut read) }.expect("frames");
    let used = read.chunks(layout.packed_bytes()).filter(|frame| frame.iter().any(|&byte| byte != 0));
    assert_eq!(used.count(), 1, "that of the fork");
    pool.audit().expect("a consistent pool");
}

/// The nudge of a wave does not wait for a batch that is still running: the nudges of different
/// streams are on different streams.
#[test]
fn a_wave_is_told_though_a_batch_runs_longer() {
    let session = session();
    let device = Device::open(0).expect("the mock has a device");
    let layout = KvLayout::named("tiny").expect("a preset");
    let storage = CudaStorage::new(&device, layout, 4, 4).expect("frames");
    let stream = device.stream().expect("a stream");
    session.pause();
    session.style(Style::Starve(stream.as_raw() as usize));
    let (batch, batch_ended) = channel();
    // SAFETY: no other thread uses these frames.
    unsafe { storage.copy_on(&stream, &[FrameMove::new(FrameId(3), FrameId(0))]) }.expect("a valid stream");
    storage.after(&stream, Box::new(move |outcome| batch.send(outcome).expect("the test receives")));
    // The batch, its event, and its nudge.
    let of_batch = session.pending();
    let (wave, wave_ended) = channel();
    let done = Box::new(move |outcome| wave.send(outcome).expect("the test receives"));
    // SAFETY: as above.
    unsafe { storage.copy_then(&[FrameMove::new(FrameId(1), FrameId(2))], done) };
    while session.pending() > of_batch {
        assert!(session.step(1) > 0, "the machine makes no progress");
    }
    // The batch's kernel and both events: nothing of it has run.
    let left = session.step_stream(stream.as_raw() as usize, u64::MAX);
    assert!(left >= 3, "the wave's nudge was called only after the batch: {left} steps are left");
    assert_eq!(wave_ended.recv_timeout(Duration::from_secs(5)), Ok(Ok(())));
    session.resume();
    assert_eq!(batch_ended.recv_timeout(Duration::from_secs(5)), Ok(Ok(())));
}
