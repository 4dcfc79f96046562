//! Model of the scheduler. Theorem: two workers with requests of two blocks and of one, over two
//! blocks, serve both, and all blocks are free at the end. Run with loom, with each call of the
//! pool as one step, or with all steps of the pool:
//!
//! ```text
//! RUSTFLAGS="--cfg kvpool_loom_coarse" cargo test --release
//! RUSTFLAGS="--cfg kvpool_loom --cfg crossbeam_loom" cargo test --release
//! ```

#[cfg(any(kvpool_loom, kvpool_loom_coarse))]
use kvpool::AllocRequest;
use kvpool::{AdmitRequest, Pool, SequenceId};
use kvpool::storage::KvLayout;
use kvpool::testing::{self, sync::Arc, thread};
use scheduler_model::Scheduler;

fn pool(blocks: usize) -> Pool {
    Pool::builder(KvLayout::named("tiny").unwrap())
        .blocks(blocks)
        .segment_blocks(testing::SEGMENT_BLOCKS)
        .without_null_block()
        .without_storage()
        .magazine_blocks(0)
        .build()
        .unwrap()
}

#[test]
// The planted bug is a lost wake-up, which loom reports as a deadlock.
#[cfg_attr(feature = "lost-wake-up", should_panic(expected = "deadlock"))]
fn both_requests_are_served() {
    testing::check("both requests are served", || {
        let pool = pool(2);
        let scheduler = Arc::new(Scheduler::new(pool.clone(), [2, 1]));
        let worker = {
            let scheduler = scheduler.clone();
            thread::spawn(move || scheduler.work())
        };
        scheduler.work();
        worker.join().unwrap();
        assert_eq!(scheduler.finished(), 2);
        // The worker's cache is returned when the thread's destructors have run.
        testing::end_exploring();
        testing::wait_for_threads(&pool, 0);
        pool.audit().unwrap();
        assert_eq!(pool.free_blocks(), 2);
    });
}

/// Of an append and an admission of two blocks each, over three blocks, one gets its blocks.
#[test]
fn an_append_beside_an_admission() {
    testing::Check::new("an append beside an admission").preemptions(1).run(|| {
        let pool = pool(3);
        let mut running = pool.sequence(SequenceId(1)).open().unwrap();
        let admission = {
            let pool = pool.clone();
            thread::spawn(move || pool.admit(&AdmitRequest::new(SequenceId(2), &[1; 8])))
        };
        let mut batch = pool.begin_batch();
        let appended = batch.append(&mut running, 8).is_ok();
        batch.finish();
        let admitted = admission.join().unwrap().is_ok();
        assert!(appended || admitted, "both were refused");
        assert!(!(appended && admitted), "both got two of three blocks");
    });
}

/// Between a count and an allocation another thread can take the block: a model finds this, also
/// where each call is one step.
#[test]
#[cfg(any(kvpool_loom, kvpool_loom_coarse))]
#[should_panic(expected = "it was free")]
fn a_count_is_out_of_date() {
    testing::check("a count is out of date", || {
        let pool = pool(1);
        let other = pool.clone();
        let worker = thread::spawn(move || drop(other.allocate(AllocRequest::new(1))));
        if pool.free_blocks() == 1 {
            drop(pool.allocate(AllocRequest::new(1)).expect("it was free"));
        }
        worker.join().unwrap();
    });
}
