//! Cost of waiting: the hand-over from a free to the task that waits for the block, and the
//! overhead when no task waits.
//!
//! The baseline is the alternative: a tokio semaphore with a permit for each block, acquired before
//! the allocation and released after the free. Hand-overs are timed from before the free until the
//! waiting task has its block: within one thread, and to a sleeping thread.

use std::future::poll_fn;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc;
use std::task::Poll;
use std::time::{Duration, Instant};

use kvpool::{AllocRequest, Lease, Pool};
use kvpool_benches::report::{Times, median};
use kvpool_benches::subject::pool;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

const BLOCKS: usize = 1024;
const HAND_OVERS: usize = 4_000;
const ROUNDS: usize = 9;

/// A block, and the permit with which it was allocated.
type Held = (Lease<'static>, Option<OwnedSemaphorePermit>);

/// A method of waiting for a block.
#[derive(Clone)]
enum Way {
    Pool(Pool),
    Permits(Pool, Arc<Semaphore>),
}

impl Way {
    fn both() -> [(&'static str, Self); 2] {
        let permits = Arc::new(Semaphore::new(BLOCKS));
        [("allocate_async", Self::Pool(pool(BLOCKS))), ("semaphore", Self::Permits(pool(BLOCKS), permits))]
    }

    fn pool(&self) -> &Pool {
        match self {
            Self::Pool(pool) | Self::Permits(pool, _) => pool,
        }
    }

    #[inline]
    async fn allocate(&self) -> Held {
        match self {
            Self::Pool(pool) => {
                (pool.allocate_async(AllocRequest::new(1)).await.expect("blocks come free"), None)
            }
            Self::Permits(pool, permits) => {
                let permit = permits.clone().acquire_owned().await.expect("never closed");
                (pool.allocate_owned(AllocRequest::new(1)).expect("one permit per block"), Some(permit))
            }
        }
    }

    /// Allocates all blocks, one by one.
    fn take_all(&self, runtime: &Runtime) -> Vec<Held> {
        runtime.block_on(async {
            let mut held = Vec::new();
            for _ in 0..BLOCKS {
                held.push(self.allocate().await);
            }
            held
        })
    }
}

fn main() {
    let one = Builder::new_current_thread().enable_all().build().expect("a runtime");
    no_task_waits(&one);
    println!("\nfrom a free to the waiting task, {HAND_OVERS} times, in ns");
    println!("{:<40} {:>8} {:>8} {:>8} {:>9}", "", "median", "p99", "p99.9", "max");
    for (name, way) in Way::both() {
        print(&format!("{name}, within one thread"), within_one_thread(&one, &way));
    }
    for (name, way) in Way::both() {
        print(&format!("{name}, to a sleeping thread"), to_a_sleeping_thread(&way));
    }
}

fn print(name: &str, times: Vec<Duration>) {
    let Times { median, p99, p999, max } = Times::of(times);
    let [median, p99, p999, max] = [median, p99, p999, max].map(|time| time.as_nanos());
    println!("{name:<40} {median:>8} {p99:>8} {p999:>8} {max:>9}");
}

/// Allocates and frees one block after another.
fn no_task_waits(runtime: &Runtime) {
    println!("one block allocated and freed, no task waiting, medians of {ROUNDS} rounds");
    println!("{:<40} {:>8} {:>8}", "", "ns", "ratio");
    let [(_, own), (_, permits)] = Way::both();
    let mut times: [Vec<f64>; 3] = Default::default();
    for _ in 0..ROUNDS {
        let time = |f: &mut dyn FnMut()| {
            let start = Instant::now();
            (0..100).for_each(|_| f());
            start.elapsed().as_nanos() as f64 / 100_000.0
        };
        let pool = own.pool();
        times[0].push(time(&mut || {
            for _ in 0..1000 {
                drop(black_box(pool.allocate_owned(AllocRequest::new(1))));
            }
        }));
        for (times, way) in times[1..].iter_mut().zip([&own, &permits]) {
            times.push(time(&mut || {
                runtime.block_on(async {
                    for _ in 0..1000 {
                        drop(black_box(way.allocate().await));
                    }
                });
            }));
        }
    }
    for (name, ns) in ["allocate_owned", "allocate_async", "semaphore + allocate_owned"].iter().zip(&times) {
        let ratio = ns.iter().zip(&times[0]).map(|(ns, base)| ns / base);
        println!("{name:<40} {:>8.1} {:>8.2}", median(ns.iter().copied()), median(ratio));
    }
}

fn within_one_thread(runtime: &Runtime, way: &Way) -> Vec<Duration> {
    let mut held = way.take_all(runtime);
    let times = runtime.block_on(async {
        let mut times = Vec::with_capacity(HAND_OVERS);
        for _ in 0..HAND_OVERS {
            let mut waiting = std::pin::pin!(way.allocate());
            poll_fn(|context| {
                assert!(waiting.as_mut().poll(context).is_pending(), "nothing is free");
                Poll::Ready(())
            })
            .await;
            let start = Instant::now();
            drop(held.pop());
            let block = waiting.await;
            times.push(start.elapsed());
            held.push(block);
        }
        times
    });
    end(way, held);
    times
}

fn to_a_sleeping_thread(way: &Way) -> Vec<Duration> {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut held = way.take_all(&runtime);
    let waits = &AtomicBool::new(false);
    let (send, receive) = mpsc::channel();
    let times = std::thread::scope(|scope| {
        scope.spawn(move || {
            for _ in 0..HAND_OVERS {
                let got = runtime.block_on(async {
                    let mut waiting = std::pin::pin!(way.allocate());
                    poll_fn(|context| {
                        let polled = waiting.as_mut().poll(context).map(|block| (block, Instant::now()));
                        if polled.is_pending() {
                            waits.store(true, SeqCst);
                        }
                        polled
                    })
                    .await
                });
                send.send(got).expect("the other thread listens");
            }
        });
        let mut times = Vec::with_capacity(HAND_OVERS);
        for _ in 0..HAND_OVERS {
            while !waits.load(SeqCst) {
                std::thread::yield_now();
            }
            // Long enough for the other thread to fall asleep.
            std::thread::sleep(Duration::from_micros(50));
            waits.store(false, SeqCst);
            let freed = held.pop();
            let start = Instant::now();
            drop(freed);
            let (block, end) = receive.recv().expect("the other thread sends");
            times.push(end - start);
            held.push(block);
        }
        times
    });
    end(way, held);
    times
}

fn end(way: &Way, held: Vec<Held>) {
    drop(held);
    assert_eq!(way.pool().free_blocks(), BLOCKS, "lost blocks");
}
