//! A storage that panics or refuses, at each call that a pool makes by itself: the pool does not
//! stay busy, loses no block unaccounted, and serves the next call.
#![cfg(not(kvpool_loom))]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use kvpool::compact::{DefragError, ResizeError};
use kvpool::storage::{CopyDone, Dtype, HostStorage, KvLayout, Storage};
use kvpool::{AllocRequest, DeviceId, FrameId, GrowError, Pool, Run, SequenceId, StorageError};
use kvpool_testkit::leases::checkerboard;
use kvpool_testkit::steps::append;
use kvpool_testkit::storages::{Call, Hooked};

const BLOCKS: usize = 64;
const BLOCKS_MAX: usize = 128;

/// The fault to inject, once, at a call of this kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    Panics,
    Refuses,
}

#[derive(Clone, Default)]
struct Plan(Arc<Mutex<Option<(Call, Fault)>>>);

impl Plan {
    fn next(&self, call: Call, fault: Fault) {
        *self.0.lock().unwrap() = Some((call, fault));
    }

    fn is_over(&self) -> bool {
        self.0.lock().unwrap().is_none()
    }

    fn hook(&self, call: Call) -> Result<(), StorageError> {
        // Not under the lock, which a panic would poison.
        let fault = self.0.lock().unwrap().take_if(|(planned, _)| *planned == call);
        match fault {
            None => Ok(()),
            Some((_, Fault::Refuses)) => {
                Err(StorageError::Memory { bytes: 1, reason: std::io::ErrorKind::Other })
            }
            Some((_, Fault::Panics)) => panic!("on purpose"),
        }
    }
}

/// Creates a pool with blocks of this many bytes: the polling thread copies small ones, another
/// thread of the runtime large ones.
fn pool(head_dim: usize, zeroes: bool) -> (Pool, Plan) {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(head_dim).block_tokens(4);
    let layout = layout.dtype(Dtype::F32).build().unwrap();
    let plan = Plan::default();
    let hooks = plan.clone();
    let storage = Hooked::new(layout.clone(), BLOCKS, BLOCKS_MAX, move |call| hooks.hook(call));
    let builder = Pool::builder(layout).storage(Arc::new(storage)).blocks(BLOCKS).blocks_max(BLOCKS_MAX);
    let builder = builder.without_null_block().magazine_blocks(4).segment_blocks(64);
    let builder = if zeroes { builder.zero_on_free() } else { builder };
    (builder.build().unwrap(), plan)
}

fn panics<T>(f: impl FnOnce() -> T) {
    assert!(catch_unwind(AssertUnwindSafe(f)).is_err(), "the storage's panic was not propagated");
}

/// Checks that every block can be allocated, and every resize works.
fn is_whole(pool: &Pool, plan: &Plan) {
    assert!(plan.is_over(), "the call was never made");
    let total = pool.total_blocks();
    let report = pool.audit().unwrap();
    assert_eq!((report.owned, report.held, pool.free_blocks()), (0, 0, total), "{report:?}");
    drop(pool.allocate(AllocRequest::new(total)).unwrap());
    block_on(pool.resize(BLOCKS_MAX)).unwrap();
    block_on(pool.resize(BLOCKS / 4)).unwrap();
    block_on(pool.resize(BLOCKS)).unwrap();
    drop(pool.allocate(AllocRequest::new(BLOCKS)).unwrap());
    pool.audit().unwrap();
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let bounded = async { tokio::time::timeout(std::time::Duration::from_secs(60), future).await };
    runtime.block_on(bounded).expect("it hangs")
}

/// Whether the frames' memory was released is unknown: the pool removes them, and growth returns
/// them.
#[test]
fn a_shrink_that_panics_is_completed() {
    let (pool, plan) = pool(8, false);
    plan.next(Call::Shrink, Fault::Panics);
    panics(|| block_on(pool.resize(BLOCKS / 2)));
    assert_eq!(pool.total_blocks(), BLOCKS / 2);
    is_whole(&pool, &plan);
}

#[test]
fn a_waiting_request_is_refused_when_a_shrink_panics() {
    let (pool, plan) = pool(8, false);
    plan.next(Call::Shrink, Fault::Panics);
    block_on(async {
        let held = pool.allocate_owned(AllocRequest::new(1)).unwrap();
        let waiting = tokio::spawn({
            let pool = pool.clone();
            async move { pool.allocate_async(AllocRequest::new(BLOCKS)).await.map(drop) }
        });
        while pool.stats().waiting == 0 {
            tokio::task::yield_now().await;
        }
        let shrink = tokio::spawn({
            let pool = pool.clone();
            async move { pool.resize(BLOCKS / 2).await }
        });
        assert!(shrink.await.unwrap_err().is_panic());
        assert!(waiting.await.unwrap().is_err(), "the pool is smaller than the request");
        drop(held);
    });
    is_whole(&pool, &plan);
}

#[test]
fn a_growth_that_fails_changes_nothing() {
    let (pool, plan) = pool(8, false);
    plan.next(Call::Grow, Fault::Refuses);
    assert!(matches!(pool.grow(8), Err(GrowError::Memory { .. })));
    plan.next(Call::Grow, Fault::Refuses);
    let refused = block_on(pool.resize(BLOCKS + 8));
    assert!(matches!(refused, Err(ResizeError::Grow(GrowError::Memory { .. }))), "{refused:?}");
    plan.next(Call::Grow, Fault::Panics);
    panics(|| pool.grow(8));
    assert_eq!(pool.total_blocks(), BLOCKS);
    is_whole(&pool, &plan);
}

#[test]
fn a_copy_that_fails_puts_the_wave_back() {
    // Copied at once, and on another thread.
    for head_dim in [8, 4096] {
        let (pool, plan) = pool(head_dim, false);
        let kept = checkerboard(&pool);
        let is_elsewhere = head_dim > 8;
        plan.next(Call::Copy, Fault::Refuses);
        let refused = block_on(pool.defragment());
        assert!(matches!(refused, Err(DefragError::Copy { .. })), "{refused:?}");
        plan.next(Call::Copy, Fault::Panics);
        if is_elsewhere {
            let dropped = block_on(pool.defragment());
            assert!(matches!(dropped, Err(DefragError::CopyDropped { .. })), "{dropped:?}");
        } else {
            panics(|| block_on(pool.defragment()));
        }
        let report = pool.audit().unwrap();
        assert_eq!((report.held, report.owned), (0, kept.len()), "{report:?}");
        // The same for a shrink, which must move them.
        plan.next(Call::Copy, Fault::Panics);
        if is_elsewhere {
            let dropped = block_on(pool.resize(BLOCKS / 2));
            assert!(
                matches!(dropped, Err(ResizeError::Defrag(DefragError::CopyDropped { .. }))),
                "{dropped:?}"
            );
        } else {
            panics(|| block_on(pool.resize(BLOCKS / 2)));
        }
        assert_eq!(pool.total_blocks(), BLOCKS);
        assert!(block_on(pool.defragment()).unwrap().moved_blocks > 0);
        drop(kept);
        is_whole(&pool, &plan);
    }
}

/// A copy-on-write.
#[test]
fn an_append_whose_copy_panics_loses_nothing() {
    let (pool, plan) = pool(8, false);
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    append(&pool, &mut sequence, 6);
    let mut fork = sequence.fork(SequenceId(2)).unwrap();
    plan.next(Call::Copy, Fault::Panics);
    panics(|| pool.begin_batch().append(&mut fork, 1));
    pool.audit().unwrap();
    drop((fork, sequence));
    is_whole(&pool, &plan);
}

/// Frames that could not be wiped get no other owner; all else continues, and the destructor that
/// freed them does not panic.
#[test]
fn frames_that_are_not_wiped_are_held() {
    for fault in [Fault::Panics, Fault::Refuses] {
        // By a release with and without a batch in flight, of few blocks and of many, and by an
        // allocation that reclaims retired frames.
        for (blocks, has_batch) in [(1, false), (1, true), (3, true), (30, false), (30, true)] {
            let (pool, plan) = pool(8, true);
            let lease = pool.allocate_owned(AllocRequest::new(blocks)).unwrap();
            let other = pool.allocate_owned(AllocRequest::new(2)).unwrap();
            let batch = has_batch.then(|| pool.begin_batch());
            plan.next(Call::Zero, fault);
            drop((lease, other));
            drop(batch);
            let lost = loop {
                match pool.allocate(AllocRequest::new(BLOCKS - pool.stats().unwiped)) {
                    Ok(all) => break BLOCKS - all.blocks().len(),
                    // The failed wipe came with this allocation.
                    Err(_) if plan.is_over() => {}
                    Err(error) => panic!("{error}"),
                }
            };
            assert!(plan.is_over() && lost > 0 && lost <= blocks + 2, "{lost} of {blocks}");
            let (stats, report) = (pool.stats(), pool.audit().unwrap());
            assert_eq!((stats.unwiped, stats.held, report.held), (lost, lost, lost), "{report:?}");
            assert_eq!((report.owned, stats.free), (0, BLOCKS - lost));
        }
    }
}

/// What a [`Reporting`] storage does with a wipe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wipe {
    Ends,
    Waits,
    Refuses,
    /// Refuses more than one run at a time, and a bad frame.
    RefusesMany,
    /// Drops the callback.
    Forgets,
    Panics,
}

/// A storage whose callers are threads that report the ends of device work: wipes are deferred.
#[derive(Clone)]
struct Reporting(Arc<HostStorage>, Arc<Mutex<Wipes>>);

struct Wipes {
    next: Wipe,
    bad: Option<FrameId>,
    /// Callbacks of wipes that wait, each with its number of runs.
    waiting: Vec<(usize, CopyDone)>,
}

impl std::fmt::Debug for Reporting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl Reporting {
    fn next(&self, next: Wipe) {
        self.1.lock().unwrap().next = next;
    }

    fn waiting(&self) -> Vec<usize> {
        self.1.lock().unwrap().waiting.iter().map(|(runs, _)| *runs).collect()
    }

    /// Ends the oldest wipe that waits.
    fn end(&self) {
        let (_, done) = self.1.lock().unwrap().waiting.remove(0);
        done(Ok(()));
    }
}

impl Storage for Reporting {
    kvpool_testkit::as_on_the_host!(0);

    fn device(&self) -> DeviceId {
        self.0.device()
    }

    fn must_not_wait(&self) -> bool {
        true
    }

    unsafe fn zero_then(&self, runs: &[Run], done: CopyDone) {
        let next = self.1.lock().unwrap().next;
        match next {
            // SAFETY: the caller keeps the frame rule.
            Wipe::Ends => done(unsafe { self.zero(runs) }),
            Wipe::Waits => self.1.lock().unwrap().waiting.push((runs.len(), done)),
            Wipe::Refuses => done(Err(StorageError::Memory { bytes: 1, reason: std::io::ErrorKind::Other })),
            Wipe::RefusesMany => {
                let is_bad = runs.len() > 1 || Some(runs[0].start) == self.1.lock().unwrap().bad;
                let refused = Err(StorageError::Memory { bytes: 1, reason: std::io::ErrorKind::Other });
                // SAFETY: as above.
                done(if is_bad { refused } else { unsafe { self.zero(runs) } });
            }
            Wipe::Forgets => drop(done),
            Wipe::Panics => panic!("on purpose"),
        }
    }
}

fn reporting() -> (Pool, Reporting) {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).block_tokens(4).dtype(Dtype::F32);
    let layout = layout.build().unwrap();
    let host = HostStorage::new(layout.clone(), BLOCKS, BLOCKS).unwrap();
    let wipes = Wipes { next: Wipe::Ends, bad: None, waiting: Vec::new() };
    let storage = Reporting(Arc::new(host), Arc::new(Mutex::new(wipes)));
    let builder = Pool::builder(layout).storage(Arc::new(storage.clone())).blocks(BLOCKS).zero_on_free();
    (builder.without_null_block().magazine_blocks(0).build().unwrap(), storage)
}

/// Each block whose deferred wipe fails in any way is counted, once, and the wipes of others go on.
#[test]
fn deferred_wipes_that_fail_are_counted() {
    let (pool, storage) = reporting();
    let mut lost = 0;
    for wipe in [Wipe::Panics, Wipe::Forgets, Wipe::Refuses, Wipe::Panics] {
        storage.next(wipe);
        drop(pool.allocate(AllocRequest::new(1)).unwrap());
        lost += 1;
        let stats = pool.stats();
        assert_eq!((stats.unwiped, stats.held, stats.free), (lost, lost, BLOCKS - lost), "{wipe:?}");
        storage.next(Wipe::Ends);
        drop(pool.allocate(AllocRequest::new(BLOCKS - lost)).unwrap());
        let (stats, report) = (pool.stats(), pool.audit().unwrap());
        assert_eq!((stats.unwiped, stats.free, report.held), (lost, BLOCKS - lost, lost), "{wipe:?}");
        assert_eq!(report.unwiped, lost);
    }
}

/// A wipe of many runs fails because of one of them: the others are wiped, and only that one is held.
#[test]
fn a_wipe_that_fails_loses_only_the_run_that_failed() {
    for (bad, lost) in [(None, 0), (Some(5), 1)] {
        let (pool, storage) = reporting();
        let leases: Vec<_> = (0..12).map(|_| pool.allocate(AllocRequest::new(1)).unwrap()).collect();
        let frames: Vec<FrameId> = leases.iter().map(|lease| lease.runs().next().unwrap().start).collect();
        let bytes = vec![7; frames.len() * pool.layout().packed_bytes()];
        let runs: Vec<Run> = frames.iter().map(|&start| Run { start, len: 1 }).collect();
        // SAFETY: frames of these leases.
        unsafe { storage.0.unpack(&runs, &bytes) }.unwrap();
        storage.next(Wipe::Waits);
        let (first, rest): (Vec<_>, Vec<_>) = leases.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
        drop(first);
        assert_eq!(storage.waiting(), [1]);
        storage.1.lock().unwrap().bad = bad.map(|at: usize| frames[2 * at]);
        storage.next(Wipe::RefusesMany);
        storage.end();
        let (stats, report) = (pool.stats(), pool.audit().unwrap());
        assert_eq!((stats.unwiped, report.unwiped, report.held), (lost, lost, lost), "{report:?}");
        assert_eq!((stats.free, report.owned), (BLOCKS - 6 - lost, 6));
        let mut read = vec![0; bytes.len()];
        // SAFETY: only this thread uses the storage.
        unsafe { storage.0.pack(&runs, &mut read) }.unwrap();
        let frame = pool.layout().packed_bytes();
        for at in (2..12).step_by(2) {
            let is_wiped = read[at * frame..][..frame].iter().all(|&byte| byte == 0);
            assert_eq!(is_wiped, Some(at / 2) != bad, "{at}");
        }
        drop(rest);
    }
}

/// One deferred wipe is in flight; what is freed meanwhile is in the next one, also after a failure.
#[test]
fn deferred_wipes_go_one_at_a_time() {
    let (pool, storage) = reporting();
    let mut leases: Vec<_> = (0..12).map(|_| pool.allocate(AllocRequest::new(1)).unwrap()).collect();
    storage.next(Wipe::Waits);
    // No neighbours.
    let mut kept = Vec::new();
    for (at, lease) in leases.drain(..).enumerate() {
        if at % 2 == 1 {
            kept.push(lease);
        }
    }
    assert_eq!((storage.waiting(), pool.stats().held), (vec![1], 6));
    storage.end();
    assert_eq!((storage.waiting(), pool.stats().held), (vec![5], 5), "the others, together");
    storage.next(Wipe::Panics);
    drop(kept.pop());
    storage.end();
    assert_eq!((storage.waiting(), pool.stats().held, pool.stats().unwiped), (vec![], 1, 1));
    // Wipes that end at once, in a wipe that waited.
    storage.next(Wipe::Waits);
    drop(kept.pop());
    storage.next(Wipe::Ends);
    drop(kept);
    assert_eq!((storage.waiting(), pool.stats().held), (vec![1], 6), "one of them is not wiped");
    storage.end();
    assert_eq!((pool.stats().held, pool.stats().free), (1, BLOCKS - 1));
    pool.audit().unwrap();
}
