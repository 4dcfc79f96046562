//! Steps that fail on a device: what was appended for them is withdrawn, whether the launch was
//! refused, the batch was dropped while its stream was busy, or the device failed.

use std::sync::Arc;
use std::time::Duration;

use kvpool::prefix::PrefixConfig;
use kvpool::storage::{DeviceStream, KvLayout};
use kvpool::{Pool, Sequence, SequenceId, Tokens};
use kvpool_cuda::{CudaStorage, Device};
use kvpool_cuda_tests::engine::drained;
use kvpool_cuda_tests::mock::session;

const ILLEGAL_ADDRESS: i32 = 700;

const BLOCK: usize = 4;

fn layout() -> KvLayout {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(4).block_tokens(BLOCK);
    layout.build().expect("a small layout")
}

fn pool(device: &Device) -> Pool {
    let storage = CudaStorage::new(device, layout(), 33, 33).expect("memory for a few frames");
    let pool = Pool::builder(layout()).blocks(32).prefix_cache(PrefixConfig::new());
    pool.storage(Arc::new(storage)).build().expect("a small pool")
}

fn prompt() -> Vec<u32> {
    (0..5 * BLOCK as u32).collect()
}

fn open(pool: &Pool, id: u64) -> Sequence {
    pool.sequence(SequenceId(id)).tokens(&prompt()).expect("a new id")
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime")
}

/// One step of an engine: appends the prompt's first `total` tokens, launches, and ends on the
/// stream. An error of the launch drops the batch.
fn step(
    pool: &Pool,
    stream: &DeviceStream,
    sequence: &mut Sequence,
    total: usize,
    launch: impl FnOnce() -> Result<(), &'static str>,
) -> Result<kvpool::Finish, &'static str> {
    let mut batch = pool.begin_batch_on(stream).expect("a valid stream");
    let rest = Tokens::Announced(total.saturating_sub(sequence.len()));
    batch.append(sequence, rest).expect("blocks");
    launch()?;
    Ok(batch.finish_on(stream).expect("a valid stream"))
}

/// Returns the number of tokens that a new request with the prompt is given.
fn found(pool: &Pool) -> usize {
    let mut longer = prompt();
    longer.push(7);
    pool.sequence(SequenceId(99)).tokens(&longer).expect("a new id").len()
}

fn finished(finish: kvpool::Finish) {
    let limited = async { tokio::time::timeout(Duration::from_secs(5), finish).await };
    runtime().block_on(limited).expect("the stream completes").expect("a healthy device");
}

#[test]
fn a_launch_that_fails_takes_its_tokens_back() {
    let _session = session();
    let device = Device::open(0).expect("the mock has a device");
    let (pool, stream) = (pool(&device), device.stream().expect("a stream"));
    let mut sequence = open(&pool, 1);
    finished(step(&pool, &stream, &mut sequence, 2 * BLOCK, || Ok(())).expect("a launch"));
    let refused = step(&pool, &stream, &mut sequence, 5 * BLOCK, || Err("no resources"));
    assert_eq!(refused.err(), Some("no resources"));
    assert_eq!((sequence.len(), found(&pool)), (2 * BLOCK, 2 * BLOCK));
    assert!(drained(|| pool.stats().batches_in_flight == 0));
    // The same step again, with the same blocks.
    let used = pool.stats().used;
    finished(step(&pool, &stream, &mut sequence, 5 * BLOCK, || Ok(())).expect("a launch"));
    assert_eq!((sequence.len(), pool.stats().used), (5 * BLOCK, used));
    assert_eq!((found(&pool), pool.stats().batches_abandoned), (5 * BLOCK, 1));
    drop(sequence);
    assert!(drained(|| pool.stats().retired == 0 && pool.audit().is_ok()));
}

/// The step is tried again at once, while the stream has not got to the end of the dropped batch,
/// which may still write to its blocks: the second try has others.
#[test]
fn a_batch_that_is_dropped_on_a_busy_stream_is_withdrawn_at_once() {
    let session = session();
    let device = Device::open(0).expect("the mock has a device");
    let (pool, stream) = (pool(&device), device.stream().expect("a stream"));
    let mut sequence = open(&pool, 1);
    finished(step(&pool, &stream, &mut sequence, BLOCK + 1, || Ok(())).expect("a launch"));
    let mut fork = sequence.fork(SequenceId(2)).expect("a new id");
    session.pause();
    let mut batch = pool.begin_batch_on(&stream).expect("a valid stream");
    let appended = batch.append(&mut fork, 3 * BLOCK - 1).expect("blocks");
    assert!(appended.copied.is_some(), "the tail is shared");
    let copied: Vec<_> = fork.blocks().skip(1).collect();
    drop(batch);
    assert_eq!((fork.len(), sequence.len(), found(&pool)), (BLOCK + 1, BLOCK + 1, BLOCK));
    let finish = step(&pool, &stream, &mut fork, 4 * BLOCK, || Ok(())).expect("a launch");
    assert_eq!((fork.len(), found(&pool)), (4 * BLOCK, BLOCK));
    assert!(fork.blocks().skip(2).all(|id| !copied.contains(&id)), "blocks of the dropped batch");
    session.resume();
    finished(finish);
    assert!(drained(|| pool.stats().batches_in_flight == 0));
    // Two batches wrote to the tail: the sequence finds its block written at its next operation.
    drop((sequence, fork));
    assert_eq!((found(&pool), pool.stats().batches_abandoned), (4 * BLOCK, 1));
    assert!(drained(|| pool.stats().retired == 0 && pool.audit().is_ok()));
}

#[test]
fn a_device_that_fails_takes_the_tokens_of_its_steps_back() {
    let session = session();
    let device = Device::open(0).expect("the mock has a device");
    let (pool, stream) = (pool(&device), device.stream().expect("a stream"));
    let mut sequence = open(&pool, 1);
    finished(step(&pool, &stream, &mut sequence, 2 * BLOCK, || Ok(())).expect("a launch"));
    session.pause();
    let first = step(&pool, &stream, &mut sequence, 3 * BLOCK, || Ok(())).expect("a launch");
    let second = step(&pool, &stream, &mut sequence, 5 * BLOCK, || Ok(())).expect("a launch");
    session.fail(0, ILLEGAL_ADDRESS);
    session.resume();
    for finish in [first, second] {
        let limited = async { tokio::time::timeout(Duration::from_secs(10), finish).await };
        runtime().block_on(limited).expect("the finish resolves").expect_err("the device has failed");
    }
    assert!(pool.is_lost());
    assert_eq!(sequence.len(), 2 * BLOCK, "what was computed before");
    assert_eq!(pool.stats().batches_abandoned, 2);
    drop(sequence);
    assert!(drained(|| pool.audit().is_ok()));
}

/// The stream cannot be told to report its end: the batch is handed back, and is abandoned if the
/// caller drops it.
#[test]
fn a_finish_that_is_refused_and_dropped_is_abandoned() {
    let _session = session();
    let [device, other] = [0, 1].map(|ordinal| Device::open(ordinal).expect("two devices"));
    let (pool, stream) = (pool(&device), device.stream().expect("a stream"));
    let foreign = other.stream().expect("a stream");
    let mut sequence = open(&pool, 1);
    let mut batch = pool.begin_batch_on(&stream).expect("a valid stream");
    batch.append(&mut sequence, Tokens::Announced(5 * BLOCK)).expect("blocks");
    let back = batch.finish_on(&foreign).expect_err("a stream of another device");
    assert_eq!(sequence.len(), 5 * BLOCK, "the batch continues");
    drop(back);
    assert_eq!((sequence.len(), found(&pool)), (0, 0));
    finished(step(&pool, &stream, &mut sequence, 5 * BLOCK, || Ok(())).expect("a launch"));
    // The dropped batch may have been in flight at the append: the sequence seals its blocks itself.
    drop(sequence);
    assert_eq!(found(&pool), 5 * BLOCK);
}
