//! Many tasks that wait, give up and free at once.

use super::*;

/// Threads that allocate and free, tasks that wait for large requests with deadlines, and tasks
/// that drop their futures.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_waiters_frees_and_drops_ends_in_order() {
    const BLOCKS: usize = 48;
    for (reserve, magazine_blocks) in [(0, 0), (0, 8), (6, 4)] {
        let pool =
            builder(BLOCKS + reserve).reserve(reserve).magazine_blocks(magazine_blocks).build().unwrap();
        let stop = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..2)
            .map(|seed| {
                let (pool, stop) = (pool.clone(), stop.clone());
                std::thread::spawn(move || churn(&pool, &stop, seed))
            })
            .collect();
        let tasks: Vec<_> = (0..24)
            .map(|task| {
                let pool = pool.clone();
                tokio::spawn(async move { wait_and_give_up(&pool, task).await })
            })
            .collect();
        let mut served = 0;
        for task in tasks {
            served += soon(task).await.unwrap();
        }
        assert!(served > 0);
        stop.store(1, Relaxed);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(pool.stats().reserved, reserve);
        quiet(&pool, BLOCKS);
    }
}

fn churn(pool: &Pool, stop: &AtomicUsize, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut held = Vec::new();
    while stop.load(Relaxed) == 0 {
        match rng.u32(..10) {
            0..4 => held.extend(pool.allocate_owned(AllocRequest::new(rng.usize(1..8)))),
            4..8 if !held.is_empty() => drop(held.swap_remove(rng.usize(..held.len()))),
            8 => {
                let batch = pool.begin_batch();
                held.pop();
                batch.finish();
            }
            _ => held.extend(pool.allocate_owned(AllocRequest::new(1).priority(Priority::Urgent))),
        }
        // Blocks held forever would make the others wait forever.
        if rng.u32(..50) == 0 {
            held.clear();
            std::thread::yield_now();
        }
    }
}

/// Number of requests served.
async fn wait_and_give_up(pool: &Pool, task: u64) -> usize {
    let mut rng = fastrand::Rng::with_seed(100 + task);
    let mut served = 0;
    for _ in 0..60 {
        let priority = [Priority::Normal, Priority::High, Priority::Urgent][rng.usize(..3)];
        let request = AllocRequest::new(rng.usize(1..40)).priority(priority);
        match rng.u32(..4) {
            // Dropped at a random moment.
            0 => {
                tokio::select! {
                    lease = pool.allocate_async(request) => drop(lease.unwrap()),
                    () = spin(rng.u32(..20)) => {}
                }
            }
            1 => {
                let late = std::time::Instant::now() + Duration::from_micros(rng.u64(..500));
                match pool.allocate_async(request).until(late).await {
                    Ok(_) | Err(AllocError::Deadline { .. }) => {}
                    Err(other) => panic!("{other}"),
                }
            }
            _ => {
                let lease = soon(pool.allocate_async(request)).await.unwrap();
                assert_eq!(lease.blocks().len(), request.blocks);
                if rng.bool() {
                    tokio::task::yield_now().await;
                }
                served += 1;
            }
        }
    }
    served
}

async fn spin(turns: u32) {
    for _ in 0..turns {
        tokio::task::yield_now().await;
    }
}
