//! Threads admit, extend and drop prompts on two pools, compact them, and request most of the free
//! blocks, while sequences migrate, and cached blocks go and come back; some transfers are dropped
//! midway. A read returns what was stored for the token.
//!
//! `KVPOOL_SEED=<seed>` repeats the threads' random choices (the schedule is up to the machine);
//! `KVPOOL_STRESS_SECONDS=<seconds>` makes the test longer.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use kvpool::compact::DefragOptions;
use kvpool::prefix::PrefixKeys;
use kvpool::{AllocRequest, Pool, Sequence, SequenceError, TransferError};
use kvpool_testkit::threads;

use super::kv::{admit, check, is_idle, other, plain, pool, prompt, store};

const BLOCKS: usize = 200;
const ENGINES: usize = 3;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

struct Shared {
    pools: [Pool; 2],
    stop: AtomicBool,
    next: AtomicU64,
    migrated: AtomicUsize,
    offloaded: AtomicUsize,
    came_back: AtomicUsize,
    given_up: AtomicUsize,
}

fn count(what: &AtomicUsize, more: usize) {
    what.fetch_add(more, Relaxed);
}

fn full(error: &SequenceError) {
    assert!(matches!(error, SequenceError::Alloc(_)), "{error}");
}

/// Returns a prompt of one of eight families, of any length; those of one family begin alike.
fn some_prompt(rng: &mut Rng) -> Vec<u32> {
    prompt(rng.u32(..8), rng.usize(1..120))
}

impl Shared {
    fn goes_on(&self) -> bool {
        !self.stop.load(Relaxed)
    }

    /// Sequences of its own on both pools, which it extends, migrates and closes.
    fn engine(&self, runtime: &tokio::runtime::Handle, rng: &mut Rng) {
        let mut open: Vec<(usize, Sequence, Vec<u32>)> = Vec::new();
        while self.goes_on() {
            match rng.u8(..10) {
                0..3 => {
                    let (side, tokens) = (rng.usize(..2), some_prompt(rng));
                    match admit(&self.pools[side], self.next.fetch_add(1, Relaxed), &tokens) {
                        Ok(sequence) => open.push((side, sequence, tokens)),
                        Err(error) => {
                            full(&error);
                            open.clear();
                        }
                    }
                }
                3..5 if !open.is_empty() => {
                    let (side, sequence, tokens) = &mut open[0];
                    let more: Vec<u32> = (0..rng.usize(1..9)).map(|_| rng.u32(1 << 30..)).collect();
                    let mut batch = self.pools[*side].begin_batch();
                    match batch.append(sequence, &more) {
                        Ok(_) => {
                            store(&mut batch, sequence, tokens.len(), &more);
                            tokens.extend(more);
                        }
                        Err(error) => full(&error),
                    }
                    batch.finish();
                }
                5..8 if !open.is_empty() => {
                    let at = rng.usize(..open.len());
                    let (side, sequence, tokens) = open.swap_remove(at);
                    open.extend(
                        self.migrate(runtime, side, sequence, rng.u8(..8) == 0)
                            .map(|(side, sequence)| (side, sequence, tokens)),
                    );
                }
                _ if !open.is_empty() => {
                    let (side, sequence, tokens) = open.swap_remove(rng.usize(..open.len()));
                    check(&self.pools[side], &sequence, &tokens);
                }
                _ => {}
            }
            if open.len() > 6 {
                open.remove(0);
            }
            if let Some((side, sequence, tokens)) = open.last() {
                check(&self.pools[*side], sequence, tokens);
            }
        }
    }

    fn migrate(
        &self,
        runtime: &tokio::runtime::Handle,
        side: usize,
        sequence: Sequence,
        gives_up: bool,
    ) -> Option<(usize, Sequence)> {
        // With a deadline: engines that wait for each other's blocks would wait for ever.
        let until = Instant::now() + Duration::from_millis(5);
        let to = &self.pools[1 - side];
        let migration = self.pools[side].migrate(sequence, to).until(until);
        let outcome = if gives_up {
            let timeout = async { tokio::time::timeout(Duration::ZERO, migration).await };
            runtime.block_on(timeout).ok()
        } else {
            Some(runtime.block_on(migration))
        };
        match outcome {
            None => {
                self.given_up.fetch_add(1, Relaxed);
                None
            }
            Some(Ok((sequence, _))) => {
                self.migrated.fetch_add(1, Relaxed);
                Some((1 - side, sequence))
            }
            Some(Err(failed)) => {
                // Other threads' batches may have begun before ours ended.
                let is_meant =
                    matches!(failed.error, TransferError::Alloc(_) | TransferError::BeingWritten { .. });
                assert!(is_meant, "{failed}");
                Some((side, *failed.sequence))
            }
        }
    }

    /// Offloads cached blocks, and brings them back.
    fn tiers(&self, runtime: &tokio::runtime::Handle, rng: &mut Rng) {
        let keys = PrefixKeys::new();
        while self.goes_on() {
            let side = rng.usize(..2);
            let (here, there) = (&self.pools[side], &self.pools[1 - side]);
            let timeout = Duration::from_micros(if rng.u8(..4) == 0 { rng.u64(..200) } else { 10_000_000 });
            let done = if rng.bool() {
                let offload = here.offload(there, rng.usize(1..60));
                let done = runtime.block_on(async { tokio::time::timeout(timeout, offload).await });
                done.map(|done| done.map(|report| count(&self.offloaded, report.carried.blocks)))
            } else {
                let tokens = some_prompt(rng);
                let back = here.bring_back(there, &keys, &tokens);
                let done = runtime.block_on(async { tokio::time::timeout(timeout, back).await });
                done.map(|done| done.map(|report| count(&self.came_back, report.carried.blocks)))
            };
            match done {
                Ok(Ok(())) => {}
                Ok(Err(error)) => assert!(matches!(error, TransferError::Alloc(_)), "{error}"),
                Err(_) => count(&self.given_up, 1),
            }
        }
    }

    /// Sometimes allocates most free blocks, so that cached blocks are evicted; and compacts.
    fn others(&self, runtime: &tokio::runtime::Handle, rng: &mut Rng) {
        while self.goes_on() {
            let pool = &self.pools[rng.usize(..2)];
            if rng.bool() {
                let wanted = pool.free_blocks() * rng.usize(1..9) / 10;
                drop(pool.allocate(AllocRequest::new(wanted.max(1))));
            } else {
                runtime
                    .block_on(pool.defragment_with(DefragOptions::new().fragmentation_penalty(0)))
                    .unwrap();
            }
            thread::yield_now();
        }
    }
}

#[test]
fn threads_on_both_pools() {
    let seed = number("KVPOOL_SEED").unwrap_or_else(|| fastrand::u64(..));
    println!("KVPOOL_SEED={seed}");
    let seconds = number("KVPOOL_STRESS_SECONDS").unwrap_or(2);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap();
    let shared = Shared {
        pools: [pool(plain(), BLOCKS), pool(other(), BLOCKS)],
        stop: AtomicBool::new(false),
        next: AtomicU64::new(1),
        migrated: AtomicUsize::new(0),
        offloaded: AtomicUsize::new(0),
        came_back: AtomicUsize::new(0),
        given_up: AtomicUsize::new(0),
    };
    let handle = runtime.handle();
    let until = Instant::now() + Duration::from_secs(seconds);
    threads::scope(|scope| {
        let mut started = Vec::new();
        for engine in 0..ENGINES as u64 {
            let shared = &shared;
            started.push(scope.spawn(move || shared.engine(handle, &mut Rng::with_seed(seed ^ engine))));
        }
        started.push(scope.spawn(|| shared.tiers(handle, &mut Rng::with_seed(seed ^ 100))));
        started.push(scope.spawn(|| shared.others(handle, &mut Rng::with_seed(seed ^ 200))));
        // A thread that ends early has failed, and reports it when it is joined.
        while Instant::now() < until && !started.iter().any(|thread| thread.is_finished()) {
            thread::sleep(Duration::from_millis(5));
        }
        shared.stop.store(true, Relaxed);
    });
    // The runtime's drop ends jobs that no future waits for.
    drop(runtime);
    let Shared { migrated, offloaded, came_back, given_up, .. } = &shared;
    let counts = [migrated, offloaded, came_back, given_up].map(|count| count.load(Relaxed));
    println!("{counts:?} migrated, offloaded, brought back, dropped");
    assert!(counts.iter().all(|&count| count > 0), "{counts:?}");
    shared.pools.iter().for_each(is_idle);
}
