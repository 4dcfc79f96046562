//! Model of the scheduler. Theorem: two workers with requests of two blocks and of one, over two
//! blocks, serve both, and all blocks are free at the end. Run with loom:
//!
//! ```text
//! RUSTFLAGS="--cfg kvpool_loom --cfg crossbeam_loom" cargo test --release
//! ```

use kvpool::Pool;
use kvpool::storage::KvLayout;
use kvpool::testing::{self, sync::Arc, thread};
use scheduler_model::Scheduler;

#[test]
// The planted bug is a lost wake-up, which loom reports as a deadlock.
#[cfg_attr(feature = "lost-wake-up", should_panic(expected = "deadlock"))]
fn both_requests_are_served() {
    testing::check("both requests are served", || {
        let pool = Pool::builder(KvLayout::named("tiny").unwrap())
            .blocks(2)
            .segment_blocks(testing::SEGMENT_BLOCKS)
            .without_null_block()
            .without_storage()
            .magazine_blocks(0)
            .build()
            .unwrap();
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
