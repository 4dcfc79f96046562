//! Waiting requests while the compactor's background task reclaims what moves retired: none sleeps
//! beside free blocks.
//!
//! Freed blocks are wiped, so that the task has frames in hand for long.
//!
//! `KVPOOL_STRESS_SECONDS=<seconds>` makes the test longer.
#![cfg(not(any(kvpool_loom, miri)))]

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use kvpool::compact::DefragConfig;
use kvpool::storage::{Dtype, KvLayout};
use kvpool::{AllocRequest, Lease, Pool};
use kvpool_testkit::storages::{Call, Hooked};
use tokio::time::{sleep, timeout};

const BLOCKS: usize = 32;

/// A wait of this duration is lost.
const LIMIT: Duration = Duration::from_secs(60);

fn pool() -> Pool {
    let layout = KvLayout::builder().layers(32).kv_heads(1).head_dim(16).block_tokens(4).dtype(Dtype::F16);
    let layout = layout.build().unwrap();
    // A thread is sometimes stopped while it wipes, as by a busy scheduler.
    let storage = Hooked::new(layout.clone(), BLOCKS, BLOCKS, |call| {
        if call == Call::Zero && fastrand::u8(..8) == 0 {
            std::thread::sleep(Duration::from_micros(fastrand::u64(..500)));
        }
        Ok(())
    });
    Pool::builder(layout)
        .storage(Arc::new(storage))
        .blocks(BLOCKS)
        .without_null_block()
        .magazine_blocks(4)
        .zero_on_free()
        .build()
        .unwrap()
}

thread_local! {
    static HELD: RefCell<Option<Lease<'static>>> = const { RefCell::new(None) };
}

/// Frees from a thread whose cache is gone, so that the retired runs are in the shared retire list.
fn last_act(pool: Pool, lease: Lease<'static>) {
    let thread = std::thread::spawn(move || {
        HELD.set(None);
        // Initialized after this value, so that the thread's cache is dropped first.
        drop(pool.allocate(AllocRequest::new(1)));
        HELD.set(Some(lease));
    });
    thread.join().unwrap();
}

/// Waits for half of the pool, and frees it under a batch: all frames are retired until it ends.
async fn serve(pool: Pool, stop: Arc<AtomicBool>, rounds: Arc<AtomicUsize>) {
    while !stop.load(Relaxed) {
        let request = AllocRequest::new(BLOCKS / 2);
        let Ok(lease) = timeout(LIMIT, pool.allocate_async(request)).await else {
            let (stats, other) = (pool.stats(), pool.allocate(request).map(drop));
            panic!("asleep for {LIMIT:?}; a request that does not wait: {other:?}; {stats:#?}");
        };
        let lease = lease.unwrap();
        rounds.fetch_add(1, Relaxed);
        // Not the engine's batch, whose end would sift the shared retire list itself.
        let batch = pool.blocks().begin_batch();
        tokio::task::spawn_blocking({
            let pool = pool.clone();
            move || last_act(pool, lease)
        })
        .await
        .unwrap();
        pool.blocks().end_batch(batch);
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_request_sleeps_beside_blocks_that_the_background_task_reclaims() {
    let seconds = std::env::var("KVPOOL_STRESS_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2);
    let (pool, stop, rounds) = (pool(), Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
    let config = DefragConfig::new().interval(Duration::from_millis(1)).threshold(0.5);
    // Several, so that one is often in the middle of it.
    let tasks: Vec<_> = (0..4).map(|_| pool.start_defragmenter(config).unwrap()).collect();
    let servers: Vec<_> =
        (0..4).map(|_| tokio::spawn(serve(pool.clone(), stop.clone(), rounds.clone()))).collect();
    sleep(Duration::from_secs(seconds)).await;
    stop.store(true, Relaxed);
    for server in servers {
        server.await.unwrap();
    }
    for task in tasks {
        task.stop().await;
    }
    println!("{} rounds", rounds.load(Relaxed));
    assert!(rounds.load(Relaxed) > 10);
    let audit = pool.audit().unwrap();
    assert_eq!((audit.owned, audit.held), (0, 0), "{audit:?}");
    assert_eq!(pool.free_blocks(), BLOCKS);
}
