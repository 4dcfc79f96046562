//! Internal work of the pool in one batch and another user's work in the next: run in the order of
//! the calls.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kvpool::cuda::{CudaStorage, Device};
use kvpool::storage::{Dtype, Elements, ElementsMut, KvLayout};
use kvpool::{Pool, SequenceId};
use kvpool_cuda_tests::mock::{Style, session};

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
