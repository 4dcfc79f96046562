//! Edges of a pool's life: threads that end, storage that outlives the pool or is handed on, growth
//! seen half-way.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use kvpool::storage::{HostStorage, KvLayout, Storage};
use kvpool::{AllocRequest, AuditError, BuildError, Lease, Pool, SequenceId};
use kvpool_testkit::threads;

fn layout() -> KvLayout {
    KvLayout::named("tiny").unwrap()
}

thread_local! {
    /// Leases that are dropped when the thread's destructors run.
    static LAST: RefCell<Vec<Lease<'static>>> = const { RefCell::new(Vec::new()) };
}

/// A thread empties its cache after the end of its scope: an audit at that time misses no frame.
#[test]
fn an_audit_beside_a_thread_that_ends_finds_no_fault() {
    let pool = Pool::builder(layout()).blocks(4_096).without_storage().build().unwrap();
    for round in 0..2_000 {
        std::thread::scope(|scope| {
            scope.spawn(|| drop(pool.allocate(AllocRequest::new(1)).unwrap()));
        });
        let audit = pool.audit();
        assert!(matches!(audit, Ok(_) | Err(AuditError::Busy)), "round {round}: {audit:?}");
    }
}

/// A thread whose cache is gone when it frees retires runs in the shared retire list: they are
/// counted in blocks, and as free once no batch sees them.
#[test]
fn blocks_that_a_dying_thread_retires_are_counted() {
    let pool = Pool::builder(layout()).blocks(100).without_storage().build().unwrap();
    let batch = pool.begin_batch();
    threads::scope(|scope| {
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

/// Two pools over the same bytes would let two sequences write to one place.
#[test]
fn storage_belongs_to_one_pool() {
    let storage: Arc<dyn Storage> = Arc::new(HostStorage::new(layout(), 11, 11).unwrap());
    let build = |storage| Pool::builder(layout()).blocks(10).storage(storage).build();
    assert!(matches!(build(storage.clone()), Err(BuildError::StorageShared)));
    let pool = build(storage).unwrap();
    let again = Arc::clone(pool.storage().unwrap());
    assert!(matches!(build(again), Err(BuildError::StorageShared)));
}

/// Threads remember the pool that they used; this must not keep its storage.
#[test]
fn the_bytes_go_with_the_pool() {
    let pool = Pool::builder(layout()).blocks(10).zero_on_free().build().unwrap();
    let lease = pool.allocate_owned(AllocRequest::new(3)).unwrap();
    let storage: Weak<dyn Storage> = Arc::downgrade(pool.storage().unwrap());
    let sequence = pool.sequence(SequenceId(1)).open().unwrap();
    drop(pool);
    assert!(storage.upgrade().is_some(), "an open sequence keeps its bytes");
    drop(sequence);
    assert!(storage.upgrade().is_none(), "the bytes are unreachable");
    // There are no bytes to wipe.
    drop(lease);
}

/// A new block can be freed as soon as it is allocated, also before `grow` has returned.
#[test]
fn new_blocks_can_be_freed_at_once() {
    const ROUNDS: usize = if cfg!(miri) { 20 } else { 300 };
    for _ in 0..ROUNDS {
        let pool = Pool::builder(layout()).blocks(1).blocks_max(400).magazine_blocks(0).without_storage();
        let pool = pool.build().unwrap();
        let stop = AtomicBool::new(false);
        threads::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    drop(pool.allocate(AllocRequest::new(pool.total_blocks())));
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

#[test]
fn metadata_is_under_40_bytes_a_block() {
    for blocks in [1_000, 65_536, 100_000] {
        let pool = Pool::builder(layout()).blocks(blocks).without_storage().build().unwrap();
        let bytes = pool.blocks().metadata_bytes() as f64 / blocks as f64;
        assert!(bytes < 40.0, "{bytes} bytes per block in a pool of {blocks}");
    }
}
