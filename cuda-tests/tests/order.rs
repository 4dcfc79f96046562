//! Internal work of the pool in one batch and another user's work in the next: run in the order of
//! the calls.

use std::ffi::c_void;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use cudarc::driver::{CudaContext, sys};
use half::bf16;
use kvpool::prefix::policy::{Head, Millis, Place, Policy, Released};
use kvpool::prefix::{HashKey, PrefixConfig};
use kvpool::storage::{DeviceStream, Dtype, Elements, ElementsMut, FrameMove, KvLayout, Storage};
use kvpool::{Batch, FrameId, Pool, Run, Sequence, SequenceId};
use kvpool_cuda::{CudaStorage, Device};
use kvpool_cuda_tests::engine::drained;
use kvpool_cuda_tests::mock::{Session, Style, for_each_seed, session};

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
            batch.finish();
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
    let wiped = drained(|| pool.free_blocks() == 7);
    assert!(wiped, "{:?}", pool.stats());
    let mut read = vec![0; 9 * layout.packed_bytes()];
    // SAFETY: no other thread uses the frames.
    unsafe { storage.pack(&[Run { start: FrameId(0), len: 9 }], &mut read) }.expect("frames");
    let used = read.chunks(layout.packed_bytes()).filter(|frame| frame.iter().any(|&byte| byte != 0));
    assert_eq!(used.count(), 1, "that of the fork");
    pool.audit().expect("a consistent pool");
}

/// Wipes and copies to the device are on different streams: the copy does not wait for a wipe that
/// the device has not begun. A copy to a frame that was wiped remains, whatever the device runs
/// first.
#[test]
fn a_copy_after_a_wipe_is_not_wiped() {
    let session = session();
    let device = Device::open(0).expect("the mock has a device");
    let layout = KvLayout::named("tiny").expect("a preset");
    let storage = CudaStorage::new(&device, layout.clone(), 4, 4).expect("frames");
    let content: Vec<u8> = (0..layout.packed_bytes()).map(|at| (at % 251 + 1) as u8).collect();
    let one = |frame| [Run { start: FrameId(frame), len: 1 }];
    let wipe = |frame| {
        let (tell, told) = channel();
        let done = Box::new(move |outcome| tell.send(outcome).expect("the test receives"));
        // SAFETY: no one uses the frame before this is told.
        unsafe { storage.zero_then(&one(frame), done) };
        told
    };
    // Only what a thread waits for runs.
    session.style(Style::Lazy);
    let told = wipe(1);
    // SAFETY: no other thread uses the frame.
    unsafe { storage.unpack(&one(2), &content) }.expect("a frame");
    assert!(told.try_recv().is_err() && session.pending() > 0, "the copy has waited for the wipe");
    session.style(Style::Random);
    assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok(Ok(())));
    for_each_seed(&session, 60, |seed| {
        session.style([Style::Random, Style::Lowest, Style::Ranks][seed as usize % 3]);
        assert_eq!(wipe(2).recv_timeout(Duration::from_secs(20)), Ok(Ok(())));
        let mut read = vec![0; content.len()];
        // SAFETY: as above.
        unsafe {
            storage.unpack(&one(2), &content).expect("a frame");
            device_is_idle(&session);
            storage.pack(&one(2), &mut read).expect("a frame");
        }
        assert!(read == content, "the frame was wiped after the copy");
    });
}

/// Waits until no operation is pending.
fn device_is_idle(session: &Session) {
    while session.pending() > 0 {
        thread::yield_now();
    }
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

/// CUDA may run the host functions of all streams on one thread. While one of the engine takes long,
/// waves go on: none of them waits for its own nudge.
#[test]
fn waves_go_on_while_a_host_function_of_the_engine_takes_long() {
    let session = session();
    let device = Device::open(0).expect("the mock has a device");
    let layout = KvLayout::named("tiny").expect("a preset");
    let storage = CudaStorage::new(&device, layout, 6, 6).expect("frames");
    let stream = device.stream().expect("a stream");
    let _context = CudaContext::new(0).expect("the mock has a device");
    let go = hold(&stream);
    let (tell, told) = channel();
    for wave in 0..3 {
        let tell = tell.clone();
        let done = Box::new(move |outcome| tell.send(outcome).expect("the test receives"));
        // SAFETY: no other thread uses the frames.
        unsafe { storage.copy_then(&[FrameMove::new(FrameId(wave), FrameId(3 + wave))], done) };
    }
    let told: Vec<_> = (0..3).map(|_| told.recv_timeout(Duration::from_secs(20))).collect();
    go.send(()).expect("the stream waits");
    assert_eq!(told, [Ok(Ok(())), Ok(Ok(())), Ok(Ok(()))]);
    while session.pending() > 0 {
        thread::sleep(Duration::from_millis(1));
    }
}

/// Blocks freed while one wipe is in flight, on the watcher's thread; the device is paused.
struct Freed {
    pool: Pool,
    /// Sequences that hold one block each: those that were not copied, and the copies.
    open: Vec<Sequence>,
    /// Launches and allocations before the first wipe.
    before: (u64, u64),
}

/// Number of sequences with a block, of which every second one is copied and its block freed: the
/// freed ones are no neighbours.
const SEQUENCES: u64 = 24;

/// Returns the numbers of launches and of allocations.
fn launches_and_allocations(session: &Session) -> (u64, u64) {
    let allocations = session.calls("cuMemHostAlloc") + session.calls("cuMemAlloc_v2");
    (session.calls("cuLaunchKernel"), allocations)
}

fn freed_during_a_wipe(session: &Session, device: &Device) -> Freed {
    let layout = KvLayout::named("tiny").expect("a preset");
    let storage = CudaStorage::new(device, layout.clone(), 65, 65).expect("memory for a few frames");
    let pool = Pool::builder(layout).blocks(64).zero_on_free().storage(Arc::new(storage));
    let pool = pool.build().expect("a small pool");
    let mut batch = pool.begin_batch();
    let sequences: Vec<Sequence> = (0..SEQUENCES)
        .map(|id| {
            let mut sequence = pool.sequence(SequenceId(id)).open().expect("a new id");
            batch.append(&mut sequence, 1).expect("enough blocks");
            sequence
        })
        .collect();
    batch.finish();
    // The batch holds the last reference on the copied blocks.
    let engine = device.stream().expect("a stream");
    let mut batch = pool.begin_batch_on(&engine).expect("a stream of the device");
    session.pause();
    let mut open = Vec::new();
    for sequence in sequences {
        if sequence.id().0 % 2 > 0 {
            open.push(sequence);
            continue;
        }
        let mut fork = sequence.fork(SequenceId(SEQUENCES + sequence.id().0)).expect("a fork");
        assert!(batch.append(&mut fork, 1).expect("enough blocks").copied.is_some());
        open.push(fork);
    }
    let before = launches_and_allocations(session);
    let ended = batch.finish_on(&engine).expect("a stream of the device");
    session.step_stream(engine.as_raw() as usize, u64::MAX);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(ended).expect("a healthy device");
    let (launches, allocations) = launches_and_allocations(session);
    let first = (launches - before.0, allocations - before.1);
    if first != (1, 0) {
        // What the failure drops waits for the device.
        session.resume();
    }
    assert_eq!(first, (1, 0), "one wipe is in flight");
    Freed { pool, open, before }
}

/// Blocks that are freed on the watcher's thread are wiped by one launch at a time: those that are
/// freed during a wipe are gathered for the next.
#[test]
fn runs_that_are_freed_during_a_wipe_are_wiped_together() {
    let session = session();
    let device = Device::open(0).expect("the mock has a device");
    let Freed { pool, open, before } = freed_during_a_wipe(&session, &device);
    session.resume();
    let used = SEQUENCES as usize;
    assert!(drained(|| pool.free_blocks() == 64 - used), "{:?}", pool.stats());
    let (launches, allocations) = launches_and_allocations(&session);
    assert_eq!((launches - before.0, allocations - before.1), (2, 0), "the others went together");
    drop(open);
    assert!(drained(|| pool.free_blocks() == 64), "{:?}", pool.stats());
    pool.audit().expect("a consistent pool");
}

/// The driver refuses a wipe of many runs altogether: each is wiped once more, alone, and none is lost.
#[test]
fn a_wipe_that_fails_is_repeated_run_by_run() {
    const OUT_OF_MEMORY: i32 = 2;
    let session = session();
    let device = Device::open(0).expect("the mock has a device");
    let Freed { pool, open, before } = freed_during_a_wipe(&session, &device);
    let fills = session.calls("cuMemsetD8Async");
    // The kernel of the next wipe, of all the others, and what takes its place.
    session.fail_call("cuLaunchKernel", 0, OUT_OF_MEMORY);
    session.fail_call("cuMemsetD8Async", 0, OUT_OF_MEMORY);
    session.resume();
    let used = SEQUENCES as usize;
    // The first wipe, the one that fails, and one for each of the others.
    let launches = 1 + 1 + (SEQUENCES / 2 - 1);
    assert!(
        drained(|| pool.free_blocks() == 64 - used && session.calls("cuLaunchKernel") - before.0 == launches),
        "{} launches, {:?}",
        session.calls("cuLaunchKernel") - before.0,
        pool.stats()
    );
    assert_eq!(session.calls("cuMemsetD8Async") - fills, 1, "only the wipe that failed");
    let report = pool.audit().expect("a consistent pool");
    assert_eq!((report.unwiped, report.held, pool.stats().unwiped), (0, 0, 0));
    drop(open);
}

/// The driver refuses the kernel that wipes: the wipe takes another way, and the caller, which may be
/// the watcher, does not wait for the device.
#[test]
fn a_wipe_without_a_kernel_is_not_waited_for() {
    const OUT_OF_MEMORY: i32 = 2;
    let session = session();
    let device = Device::open(0).expect("the mock has a device");
    let layout = KvLayout::named("tiny").expect("a preset");
    let storage = CudaStorage::new(&device, layout.clone(), 4, 4).expect("frames");
    let frames = Run { start: FrameId(0), len: 4 };
    // SAFETY: no other thread uses the frames.
    unsafe { storage.unpack(&[frames], &vec![7; 4 * layout.packed_bytes()]) }.expect("frames");
    let (tell, told) = channel();
    session.pause();
    session.fail_calls("cuLaunchKernel", OUT_OF_MEMORY);
    kvpool_testkit::threads::scope(|scope| {
        let (ended, has_ended) = channel();
        let storage = &storage;
        scope.spawn(move || {
            let done = Box::new(move |outcome| tell.send(outcome).expect("the test receives"));
            // SAFETY: no other thread uses the frames, until the callback.
            unsafe { storage.zero_then(&[frames], done) };
            ended.send(()).expect("the test receives");
        });
        let returned = has_ended.recv_timeout(Duration::from_secs(20));
        session.resume();
        returned.expect("the call returns while the device is paused");
    });
    assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok(Ok(())));
    session.forget_injected();
    let mut read = vec![1; 4 * layout.packed_bytes()];
    // SAFETY: no other thread uses the frames.
    unsafe { storage.pack(&[frames], &mut read) }.expect("frames");
    assert!(read.iter().all(|&byte| byte == 0));
}

/// Two queues, of which the first is emptied first; notes the threads that evict.
#[derive(Debug, Default)]
struct Noting(Mutex<Vec<Option<String>>>);

impl Policy for Noting {
    fn name(&self) -> &'static str {
        "noting"
    }

    fn queues(&self) -> usize {
        2
    }

    fn place(&self, released: &Released, _: Millis) -> Place {
        Place { queue: (released.order % 2) as u8, rank: released.order, state: 0 }
    }

    fn victim(&self, heads: &[Option<Head>], _: Millis) -> Option<usize> {
        self.0.lock().expect("no panic").push(thread::current().name().map(str::to_owned));
        heads.iter().position(Option::is_some)
    }
}

/// Evictions ahead of need are work of the engine's thread, while the device computes: on the
/// watcher's thread they would delay the reports of other streams.
#[test]
fn the_watcher_evicts_nothing() {
    const BLOCKS: usize = 32_768;
    let _session = session();
    let device = Device::open(0).expect("the mock has a device");
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(4).block_tokens(1).dtype(Dtype::F32);
    let layout = layout.build().expect("a small layout");
    let storage = CudaStorage::new(&device, layout.clone(), BLOCKS + 1, BLOCKS + 1).expect("frames");
    let policy = Arc::new(Noting::default());
    let cache = PrefixConfig::new().key(HashKey::from_bytes([7; 32])).policy_of(policy.clone());
    let pool = Pool::builder(layout).blocks(BLOCKS).prefix_cache(cache).storage(Arc::new(storage));
    let pool = pool.build().expect("a pool");
    let open = |batch: &mut Batch, id: u64, blocks: usize| {
        let tokens: Vec<u32> = (0..blocks as u32).map(|token| token | (id as u32) << 20).collect();
        let mut sequence = pool.sequence(SequenceId(id)).tokens(&tokens).expect("a new id");
        batch.append(&mut sequence, blocks).expect("enough blocks");
        sequence
    };
    let stream = device.stream().expect("a stream");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let step = |id, blocks| {
        let mut batch = pool.begin_batch_on(&stream).expect("a stream of the device");
        let sequence = open(&mut batch, id, blocks);
        let ended = batch.finish_on(&stream).expect("a stream of the device");
        runtime.block_on(ended).expect("a healthy device");
        sequence
    };
    // Half of the pool is evictable, and the other half nearly full.
    drop(step(1, BLOCKS / 2));
    let evicted = || pool.prefix_cache().expect("it has one").stats().evicted_blocks;
    assert_eq!(evicted(), 0);
    let kept = step(2, BLOCKS / 2 - 64);
    assert!(evicted() > 0, "ahead of need: {:?}", pool.stats());
    let threads = policy.0.lock().expect("no panic").clone();
    let own = thread::current().name().map(str::to_owned);
    assert!(!threads.is_empty() && threads.iter().all(|name| *name == own), "{threads:?}");
    drop(kept);
    pool.audit().expect("a consistent pool");
}
