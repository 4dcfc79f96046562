//! Batches on a device's stream that the test advances by hand: a batch releases nothing before the
//! stream gets there, copies-on-write are ordered by the stream, and no request waits for a lost
//! device.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use kvpool::prefix::PrefixConfig;
use kvpool::storage::{
    CopyDone, DeviceStream, Elements, ElementsMut, FrameMove, HostStorage, KvLayout, Storage,
};
use kvpool::{
    AllocError, AllocRequest, BlockTable, DeviceId, Pool, Sequence, SequenceError, SequenceId, StorageError,
};

const DEVICE: DeviceId = DeviceId::Cuda(3);
/// In the layout "tiny".
const BLOCK_TOKENS: usize = 4;

/// A command in the stream.
enum Work {
    Copy(Vec<FrameMove>),
    Tell(CopyDone),
}

/// One stream, which advances when it is told to.
#[derive(Default)]
struct Stream {
    work: Mutex<VecDeque<Work>>,
    is_lost: Mutex<bool>,
}

/// Host memory that poses as a device's.
struct Queued {
    host: HostStorage,
    stream: Arc<Stream>,
}

impl std::fmt::Debug for Queued {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Queued")
    }
}

fn lost() -> StorageError {
    StorageError::DeviceLost { device: DEVICE, reason: "the test says so".into() }
}

impl Queued {
    fn go_on(&self, items: usize) {
        for _ in 0..items {
            let Some(work) = self.stream.work.lock().unwrap().pop_front() else { return };
            match work {
                // SAFETY: the batch guarantees the frame rule until the stream has done it.
                Work::Copy(moves) => unsafe { self.host.copy(&moves) }.expect("checked when it was enqueued"),
                Work::Tell(done) => done(Ok(())),
            }
        }
    }

    fn waits(&self) -> usize {
        self.stream.work.lock().unwrap().len()
    }

    fn fail(&self) {
        *self.stream.is_lost.lock().unwrap() = true;
        let work = std::mem::take(&mut *self.stream.work.lock().unwrap());
        for work in work {
            if let Work::Tell(done) = work {
                done(Err(lost()));
            }
        }
    }
}

// All but stream operations is forwarded to host memory. The frame rule is the caller's.
impl Storage for Queued {
    kvpool_testkit::as_on_the_host!(host);

    fn device(&self) -> DeviceId {
        DEVICE
    }

    fn check_stream(&self, stream: &DeviceStream) -> Result<(), StorageError> {
        if stream.device() != DEVICE {
            return Err(StorageError::ForeignStream { stream: stream.device(), storage: DEVICE });
        }
        if *self.stream.is_lost.lock().unwrap() { Err(lost()) } else { Ok(()) }
    }

    unsafe fn copy_on(&self, stream: &DeviceStream, moves: &[FrameMove]) -> Result<(), StorageError> {
        self.check_stream(stream)?;
        self.stream.work.lock().unwrap().push_back(Work::Copy(moves.to_vec()));
        Ok(())
    }

    fn after(&self, stream: &DeviceStream, done: CopyDone) {
        match self.check_stream(stream) {
            Ok(()) => self.stream.work.lock().unwrap().push_back(Work::Tell(done)),
            error => done(error),
        }
    }

    fn settle(&self, stream: &DeviceStream) -> Result<(), StorageError> {
        self.check_stream(stream)?;
        self.go_on(usize::MAX);
        Ok(())
    }
}

struct World {
    device: Arc<dyn Storage>,
    pool: Pool,
    stream: DeviceStream,
}

impl World {
    fn new(blocks: usize) -> Self {
        let layout = KvLayout::named("tiny").unwrap();
        let host = HostStorage::new(layout.clone(), blocks + 1, blocks + 1).unwrap();
        let builder = Pool::builder(layout).blocks(blocks).threads(1).magazine_blocks(0);
        let builder = builder.prefix_cache(PrefixConfig::new());
        let pool = builder.storage(Arc::new(Queued { host, stream: Arc::default() })).build().unwrap();
        let device = pool.storage().unwrap().clone();
        Self { device, pool, stream: stream_of(DEVICE) }
    }

    fn device(&self) -> &Queued {
        self.device.as_any().downcast_ref().unwrap()
    }

    fn open(&self, id: u64) -> Sequence {
        self.pool.sequence(SequenceId(id)).open().unwrap()
    }

    fn free(&self) -> usize {
        self.pool.free_blocks()
    }
}

fn stream_of(device: DeviceId) -> DeviceStream {
    // SAFETY: only `Queued` gets it, which does not use the handle.
    unsafe { DeviceStream::from_raw(device, std::ptr::null_mut(), ()) }
}

fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    pin!(future).poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn nothing_is_released_before_the_stream_gets_there() {
    let world = World::new(8);
    let mut reader = world.open(1);
    let mut first = world.pool.begin_batch_on(&world.stream).unwrap();
    first.append(&mut reader, 2 * BLOCK_TOKENS).unwrap();
    let mut end = first.finish_on(&world.stream).unwrap();
    // Its blocks are released while the device may still write them.
    drop(reader);
    assert_eq!(world.pool.stats().retired, 2);
    let took = world.pool.allocate(AllocRequest::new(8));
    assert!(matches!(took, Err(AllocError::Exhausted { retired: 2, .. })), "{took:?}");
    assert!(poll(&mut end).is_pending());

    world.device().go_on(1);
    assert_eq!(poll(&mut end), Poll::Ready(Ok(())));
    assert_eq!(world.pool.allocate(AllocRequest::new(8)).unwrap().blocks().len(), 8);
    world.pool.audit().unwrap();
}

#[test]
fn blocks_are_cached_once_they_are_written() {
    let world = World::new(16);
    let prompt: Vec<u32> = (0..20).collect();
    let mut sequence = world.pool.sequence(SequenceId(1)).tokens(&prompt).unwrap();
    let mut batch = world.pool.begin_batch_on(&world.stream).unwrap();
    batch.append(&mut sequence, prompt.len()).unwrap();
    batch.finish();
    let cached = |id| world.pool.sequence(SequenceId(id)).tokens(&prompt).unwrap().len();
    assert_eq!((cached(2), world.device().waits()), (0, 1), "the device has not written it yet");
    world.device().go_on(1);
    assert_eq!(cached(3), 16);
    drop(sequence);
    world.pool.audit().unwrap();
}

#[test]
fn a_copy_on_write_is_ordered_by_the_stream() {
    let world = World::new(8);
    let mut first = world.open(1);
    let rows: Vec<f32> = (0..3 * 16).map(|value| value as f32).collect();
    let layout = world.device.layout().clone();
    let bytes = |rows: &[f32]| -> Vec<u8> {
        rows.iter().flat_map(|&row| half::bf16::from_f32(row).to_ne_bytes()).collect()
    };
    let stored = bytes(&rows[..3 * layout.row_elements()]);
    let elements = || Elements::new(layout.dtype(), &stored).unwrap();
    let mut batch = world.pool.begin_batch_on(&world.stream).unwrap();
    batch.append(&mut first, 3).unwrap();
    for layer in 0..layout.layers() {
        batch.store(&mut first, layer, 0..3, elements(), elements()).unwrap();
    }
    batch.finish();
    world.device().go_on(1);

    let mut fork = first.fork(SequenceId(2)).unwrap();
    let mut batch = world.pool.begin_batch_on(&world.stream).unwrap();
    let appended = batch.append(&mut fork, 1).unwrap();
    let copied = appended.copied.expect("the tail is shared");
    assert_eq!(world.device().waits(), 1, "enqueued, but not done");
    // The source must not get another owner before the copy is done.
    drop(first);
    let mut table = BlockTable::new();
    batch.block_table([&fork], &mut table).unwrap();
    assert_eq!(table.row(0), [copied.frames.dst.0 as i32]);
    let free = world.free();
    assert_eq!(free, 6, "all blocks but the copy and its source");

    // A load is ordered after earlier commands of the stream.
    let mut got = (vec![0u8; stored.len()], vec![0u8; stored.len()]);
    let into = |bytes| ElementsMut::new(layout.dtype(), bytes).unwrap();
    batch.load(&fork, 1, 0..3, into(&mut got.0), into(&mut got.1)).unwrap();
    assert_eq!((&got.0, &got.1), (&stored, &stored));
    batch.finish();
    assert_eq!(world.free(), 6);
    world.device().go_on(1);
    assert_eq!(world.free(), 7);
    drop(fork);
    world.pool.audit().unwrap();
}

#[test]
fn a_foreign_stream_is_refused_and_the_batch_goes_on() {
    let world = World::new(8);
    let foreign = stream_of(DeviceId::Cuda(0));
    let refused = StorageError::ForeignStream { stream: DeviceId::Cuda(0), storage: DEVICE };
    assert_eq!(world.pool.begin_batch_on(&foreign).unwrap_err(), refused);
    let mut sequence = world.open(1);
    let mut batch = world.pool.begin_batch();
    batch.append(&mut sequence, 1).unwrap();
    let mut back = batch.finish_on(&foreign).unwrap_err();
    assert_eq!(back.error, refused);
    back.batch.append(&mut sequence, 1).unwrap();
    back.batch.finish();
    assert_eq!((sequence.len(), world.device().waits()), (2, 0));

    let host = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(4).build().unwrap();
    assert!(matches!(host.begin_batch_on(&world.stream), Err(StorageError::ForeignStream { .. })));
    assert_eq!(host.stats().retired, 0);
}

#[test]
fn a_batch_that_is_dropped_ends_with_its_stream() {
    let world = World::new(8);
    let mut sequence = world.open(1);
    let mut batch = world.pool.begin_batch_on(&world.stream).unwrap();
    batch.append(&mut sequence, 4).unwrap();
    drop(batch);
    drop(sequence);
    assert_eq!(world.pool.stats().retired, 1);
    world.device().go_on(1);
    assert_eq!(world.pool.stats().retired, 0);
    assert_eq!(world.free(), 8);
}

/// Also when the stream gets there on another thread, which does not panic.
#[test]
fn blocks_of_a_panicked_batch_are_not_found() {
    let world = World::new(8);
    let prompt: Vec<u32> = (0..8).collect();
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut sequence = world.pool.sequence(SequenceId(1)).tokens(&prompt).unwrap();
        let mut batch = world.pool.begin_batch_on(&world.stream).unwrap();
        batch.append(&mut sequence, prompt.len()).unwrap();
        panic!("before the kernels were launched");
    }));
    assert!(outcome.is_err());
    kvpool_testkit::threads::scope(|scope| scope.spawn(|| world.device().go_on(1)).join().unwrap());
    assert_eq!(world.pool.sequence(SequenceId(2)).tokens(&prompt).unwrap().len(), 0);
    assert_eq!(world.free(), 8);
    world.pool.audit().unwrap();
}

#[test]
fn a_lost_device_leaves_no_request_waiting() {
    let world = World::new(4);
    let prompt: Vec<u32> = (0..8).collect();
    let mut sequence = world.pool.sequence(SequenceId(1)).tokens(&prompt).unwrap();
    let mut batch = world.pool.begin_batch_on(&world.stream).unwrap();
    batch.append(&mut sequence, 8).unwrap();
    let mut end = batch.finish_on(&world.stream).unwrap();
    let mut waiting = Box::pin(world.pool.allocate_async(AllocRequest::new(4)).into_future());
    let mut behind = Box::pin(world.pool.allocate_async(AllocRequest::new(1)).into_future());
    assert!(poll(&mut waiting).is_pending() && poll(&mut behind).is_pending());

    world.device().fail();
    assert_eq!(poll(&mut end), Poll::Ready(Err(lost())));
    for waiting in [&mut waiting, &mut behind] {
        let refused = poll(waiting);
        assert!(
            matches!(refused, Poll::Ready(Err(AllocError::DeviceLost { device: DEVICE }))),
            "{refused:?}"
        );
    }
    assert!(world.pool.is_lost());
    let refused = AllocError::DeviceLost { device: DEVICE };
    assert_eq!(world.pool.allocate(AllocRequest::new(1)).unwrap_err(), refused);
    assert_eq!(world.pool.begin_batch_on(&world.stream).unwrap_err(), lost());
    let mut batch = world.pool.begin_batch();
    // The blocks of the withdrawn tokens.
    assert_eq!((sequence.len(), sequence.release_reservation() > 0), (0, true));
    assert_eq!(batch.append(&mut sequence, 8).unwrap_err(), SequenceError::Alloc(refused));
    batch.finish();
    // Blocks that were never computed are not found, and owned ones can still be released.
    assert!(world.pool.cached_blocks().is_empty());
    drop((sequence, waiting, behind));
    assert_eq!(world.pool.stats().used, 0);
    world.pool.audit().unwrap();
}

/// Frames cached by threads are not handed out either.
#[test]
fn magazines_hand_out_nothing_of_a_lost_device() {
    let layout = KvLayout::named("tiny").unwrap();
    let host = HostStorage::new(layout.clone(), 257, 257).unwrap();
    let device = Arc::new(Queued { host, stream: Arc::default() });
    let stream = device.stream.clone();
    let pool = Pool::builder(layout).blocks(256).magazine_blocks(16).storage(device).build().unwrap();
    for _ in 0..3 {
        drop((pool.allocate(AllocRequest::new(1)).unwrap(), pool.allocate(AllocRequest::new(5)).unwrap()));
    }
    let batch = pool.begin_batch_on(&stream_of(DEVICE)).unwrap();
    batch.finish();
    let Some(Work::Tell(done)) = stream.work.lock().unwrap().pop_front() else { panic!("the batch's end") };
    done(Err(lost()));
    let refused = AllocError::DeviceLost { device: DEVICE };
    for blocks in [1, 5, 40] {
        assert_eq!(pool.allocate(AllocRequest::new(blocks)).unwrap_err(), refused);
    }
    assert_eq!(pool.free_blocks(), 256);
    pool.audit().unwrap();
}

/// A stream that is no longer watched is not a stream that got there.
#[test]
fn an_unwatched_end_is_an_error() {
    let world = World::new(4);
    let batch = world.pool.begin_batch_on(&world.stream).unwrap();
    let mut end = batch.finish_on(&world.stream).unwrap();
    drop(world.device().stream.work.lock().unwrap().pop_front());
    assert!(matches!(poll(&mut end), Poll::Ready(Err(StorageError::Device { device: DEVICE, .. }))));
    assert_eq!(world.free(), 4);
}
