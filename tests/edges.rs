//! What happens at the edges of a pool's life: threads on their way out, storage that outlives or is handed on, growth
//! seen half-way.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use kvpool::error::HandleError;
use kvpool::ids::SequenceId;
use kvpool::pool::{AllocRequest, BuildError, Lease, Pool};
use kvpool::storage::{HostStorage, KvLayout, Storage};
use kvpool_testkit::threads;

fn layout() -> KvLayout {
    KvLayout::named("tiny").unwrap()
}

thread_local! {
    /// Leases that go when the thread's destructors run.
    static LAST: RefCell<Vec<Lease<'static>>> = const { RefCell::new(Vec::new()) };
}

/// A thread whose cache is gone by the time that it frees puts runs aside elsewhere: they are counted in blocks, and
/// as free once no batch sees them.
#[test]
fn what_a_dying_thread_retires_is_counted() {
    let pool = Pool::builder(layout()).blocks(100).without_storage().build().unwrap();
    let batch = pool.begin_batch();
    std::thread::scope(|scope| {
        let dying = scope.spawn(|| {
            // First in, last out: its destructor runs after that of the thread's cache.
            LAST.with_borrow_mut(|last| last.push(pool.allocate_owned(AllocRequest::new(20)).unwrap()));
        });
        dying.join().unwrap();
    });
    assert_eq!(pool.audit().unwrap().retired, 20);
    assert_eq!((pool.stats().retired, pool.free_blocks(), pool.stats().used), (20, 80, 0));
    batch.finish();
    assert_eq!((pool.stats().retired, pool.free_blocks()), (0, 100));
    pool.audit().unwrap();
    assert_eq!(pool.allocate(AllocRequest::new(100)).unwrap().blocks().len(), 100);
    pool.audit().unwrap();
}

/// Two pools over the same bytes would let two sequences write one place, each in good faith.
#[test]
fn storage_belongs_to_one_pool() {
    let storage: Arc<dyn Storage> = Arc::new(HostStorage::new(layout(), 11, 11).unwrap());
    let build = |storage| Pool::builder(layout()).blocks(10).storage(storage).build();
    assert!(matches!(build(storage.clone()), Err(BuildError::StorageShared)));
    let pool = build(storage).unwrap();
    let again = Arc::clone(pool.storage().unwrap());
    assert!(matches!(build(again), Err(BuildError::StorageShared)));
}

/// Threads remember the pool that they used; that must not keep gigabytes.
#[test]
fn the_bytes_go_with_the_pool() {
    let pool = Pool::builder(layout()).blocks(10).zero_on_free().build().unwrap();
    let lease = pool.allocate_owned(AllocRequest::new(3)).unwrap();
    let storage: Weak<dyn Storage> = Arc::downgrade(pool.storage().unwrap());
    let sequence = pool.sequence(SequenceId(1)).open().unwrap();
    drop(pool);
    assert!(storage.upgrade().is_some(), "an open sequence keeps its bytes");
    drop(sequence);
    assert!(storage.upgrade().is_none(), "nobody can read these bytes any more");
    // There is nothing to wipe.
    drop(lease);
}

/// A block of the new part can be freed by handle as soon as it can be had, also before `grow` has returned.
#[test]
fn new_blocks_can_be_freed_at_once() {
    const ROUNDS: usize = if cfg!(miri) { 20 } else { 300 };
    for _ in 0..ROUNDS {
        let pool = Pool::builder(layout()).blocks(1).blocks_max(400).magazine_blocks(0).without_storage();
        let pool = pool.build().unwrap();
        let stop = AtomicBool::new(false);
        threads::scope(|scope| {
            scope.spawn(|| {
                let mut handles = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let count = pool.total_blocks();
                    let _ = pool.allocate_raw(AllocRequest::new(count), &mut handles);
                    pool.free(&handles).unwrap();
                    handles.clear();
                }
            });
            for _ in 0..399 {
                pool.grow(1).unwrap();
            }
            stop.store(true, Ordering::Relaxed);
        });
        pool.audit().unwrap();
    }
}

/// A handle can be made up, or be of a block that is somebody else's by now. Whose blocks a sequence stores to, without
/// `unsafe`, does not hang on that.
#[test]
fn no_handle_frees_a_sequences_block() {
    let pool = Pool::builder(layout()).blocks(8).build().unwrap();
    let lease = pool.allocate(AllocRequest::new(8)).unwrap();
    let handles: Vec<_> = lease.handles().collect();
    // Freed by handle although the lease has them, and taken by a sequence.
    pool.free(&handles).unwrap();
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    pool.begin_batch().append(&mut sequence, 8 * pool.layout().block_tokens()).unwrap();
    for id in sequence.blocks() {
        let made_up = pool.blocks().handle(id);
        assert!(matches!(pool.free(&[made_up]), Err(HandleError::Listed { .. })));
        assert!(matches!(pool.free(&[made_up, made_up]), Err(HandleError::Listed { .. })));
        assert!(matches!(pool.share(&[made_up]), Err(HandleError::Listed { .. })));
        assert_eq!(pool.info(made_up).unwrap().refs, 1);
    }
    let dropped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(lease)));
    assert!(dropped.is_err(), "the lease's blocks are not its own any more");
    let fork = sequence.fork(SequenceId(2)).unwrap();
    drop(sequence);
    drop(fork);
    assert_eq!(pool.audit().unwrap().references, 0);
}

#[test]
fn metadata_is_under_40_bytes_a_block() {
    for blocks in [1_000, 65_536, 100_000] {
        let pool = Pool::builder(layout()).blocks(blocks).without_storage().build().unwrap();
        let bytes = pool.blocks().metadata_bytes() as f64 / blocks as f64;
        assert!(bytes < 40.0, "{bytes} bytes a block in a pool of {blocks}");
    }
}
