//! Real threads on a pool whose blocks move concurrently: a background task, runs by hand, runs for
//! waiting requests, and resizes. Every token and every raw block is read back.
//!
//! `KVPOOL_SEED=<seed>` repeats the threads' random choices (the schedule is up to the machine);
//! `KVPOOL_STRESS_SECONDS=<seconds>` makes the test longer.
#![cfg(not(any(kvpool_loom, miri)))]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use fastrand::Rng;
use kvpool::block::{Moved, Since};
use kvpool::compact::{DefragConfig, DefragOptions, ResizeError, ResizeOptions};
use kvpool::storage::{Dtype, KvLayout};
use kvpool::{
    AllocError, AllocRequest, BlockHandle, BlockPin, BlockTable, FrameId, Lease, Order, Pool, Priority, Run,
    Sequence, SequenceError, SequenceId, Ticket, Tokens,
};
use kvpool_testkit::leases::{handle, split};
use kvpool_testkit::threads;

const BLOCKS: usize = 1200;
const BLOCK_TOKENS: usize = 4;
const HEAD_DIM: usize = 32;

/// Longer than any wait in this file.
const LIMIT: Duration = Duration::from_secs(60);

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn pool(reserve: usize) -> Pool {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(HEAD_DIM).block_tokens(BLOCK_TOKENS);
    Pool::builder(layout.dtype(Dtype::F32).build().unwrap())
        .blocks(BLOCKS)
        .segment_blocks(256)
        .threads(4)
        .reserve(reserve)
        .build()
        .unwrap()
}

/// A sequence, and the number stored for each token: all elements of K are that number, of V its
/// negative.
struct Written {
    real: Sequence,
    tokens: Vec<f32>,
}

impl Written {
    /// Does nothing if there are no blocks.
    fn append(&mut self, pool: &Pool, rng: &mut Rng) {
        let count = rng.usize(1..12);
        let mut batch = pool.begin_batch();
        let outcome = if rng.u8(..4) == 0 {
            batch.append(&mut self.real, Tokens::Draft(count))
        } else {
            batch.append(&mut self.real, count)
        };
        let appended = match outcome {
            Ok(appended) => appended.tokens,
            Err(SequenceError::Alloc(
                AllocError::Exhausted { .. } | AllocError::Behind { .. } | AllocError::TooLarge { .. },
            )) => return,
            Err(error) => panic!("{error}"),
        };
        self.tokens.extend((0..count).map(|_| rng.u32(1..1 << 23) as f32));
        let k: Vec<f32> = self.tokens[appended.clone()].iter().flat_map(|&token| [token; HEAD_DIM]).collect();
        let v: Vec<f32> = k.iter().map(|k| -k).collect();
        batch.store(&mut self.real, 0, appended, (&k).into(), (&v).into()).unwrap();
        batch.finish();
    }

    fn check(&self, pool: &Pool) {
        let len = self.tokens.len();
        assert_eq!(len, self.real.len());
        let (mut k, mut v) = (vec![0.0_f32; len * HEAD_DIM], vec![0.0_f32; len * HEAD_DIM]);
        let mut batch = pool.begin_batch();
        batch.load(&self.real, 0, 0..len, (&mut k).into(), (&mut v).into()).unwrap();
        for (token, &is) in self.tokens.iter().enumerate() {
            let of = token * HEAD_DIM..(token + 1) * HEAD_DIM;
            assert!(k[of.clone()].iter().all(|&k| k == is), "K of token {token} of {}", self.real.id());
            assert!(v[of].iter().all(|&v| v == -is), "V of token {token} of {}", self.real.id());
        }
    }
}

/// Sequences open, grow, fork and close; each is checked when it closes.
fn serve(pool: &Pool, stop: &AtomicBool, ids: &AtomicUsize, mut rng: Rng) {
    let new_id = || SequenceId(ids.fetch_add(1, Relaxed) as u64);
    let mut sequences: Vec<Written> = Vec::new();
    let mut table = (Ticket(0), SequenceId(0), Vec::new(), Vec::new());
    while !stop.load(Relaxed) {
        let many = sequences.len();
        match rng.u8(..20) {
            0..3 if many < 24 => {
                let priority = [Priority::Normal, Priority::Urgent][rng.usize(..2)];
                let real = pool.sequence(new_id()).priority(priority).open().unwrap();
                sequences.push(Written { real, tokens: Vec::new() });
            }
            3..13 if many > 0 => sequences[rng.usize(..many)].append(pool, &mut rng),
            13 if many > 0 => {
                let written = &mut sequences[rng.usize(..many)];
                written.real.commit(rng.usize(..=written.tokens.len())).unwrap();
            }
            14 if many > 0 => {
                let written = &mut sequences[rng.usize(..many)];
                let length = rng.usize(..=written.tokens.len());
                written.real.truncate(length).unwrap();
                written.tokens.truncate(length);
            }
            15 if many > 0 && many < 24 => {
                let written = &sequences[rng.usize(..many)];
                let real = written.real.fork(new_id()).unwrap();
                let tokens = written.tokens.clone();
                sequences.push(Written { real, tokens });
            }
            16 if many > 0 => sequences[rng.usize(..many)].check(pool),
            17 if many > 0 => patch(pool, &sequences, &mut table, &mut rng),
            _ if many > 12 => sequences.swap_remove(rng.usize(..many)).check(pool),
            _ => {}
        }
    }
    sequences.iter().for_each(|written| written.check(pool));
}

/// A patched table is as good as a new one. A block that is just moving may be in either frame.
fn patch(
    pool: &Pool,
    sequences: &[Written],
    (since, of, blocks, frames): &mut (Ticket, SequenceId, Vec<BlockHandle>, Vec<i32>),
    rng: &mut Rng,
) {
    let batch = pool.begin_batch();
    let mut moved: Vec<Moved> = Vec::new();
    let is_listed = batch.moved_since(*since, &mut moved) == Since::Listed;
    if let Some(written) = sequences.iter().find(|written| written.real.id() == *of && is_listed) {
        for (block, frame) in blocks.iter().zip(frames.iter_mut()) {
            if let Some(last) = moved.iter().rev().find(|moved| moved.block == block.id) {
                *frame = last.to.0 as i32;
            }
        }
        let mut slots = Vec::new();
        batch.slot_mapping(&written.real, 0..written.tokens.len(), &mut slots).unwrap();
        let mut k = vec![0.0_f32; BLOCK_TOKENS * HEAD_DIM];
        for (place, block) in written.real.blocks().enumerate().take(frames.len()) {
            if pool.blocks().handle(block) != blocks[place] {
                break;
            }
            // Through the patched frame, whole tokens only.
            let tokens = &written.tokens[place * BLOCK_TOKENS..];
            let tokens = &tokens[..tokens.len().min(BLOCK_TOKENS)];
            let first = i64::from(frames[place]) * BLOCK_TOKENS as i64;
            let slots: Vec<i64> = (first..first + tokens.len() as i64).collect();
            let k = &mut k[..tokens.len() * HEAD_DIM];
            let mut v = vec![0.0_f32; k.len()];
            // SAFETY: the sequence is this thread's, and not written here. The batch keeps its
            // blocks' frames, including those that a move has just left.
            unsafe { pool.storage().unwrap().load(0, &slots, (&mut *k).into(), (&mut v).into()) }.unwrap();
            for (token, &is) in tokens.iter().enumerate() {
                assert_eq!(k[token * HEAD_DIM], is, "token {token} of {} in {block}", written.real.id());
            }
        }
    }
    let Some(written) = (!sequences.is_empty()).then(|| &sequences[rng.usize(..sequences.len())]) else {
        return;
    };
    let mut table = BlockTable::new();
    batch.block_table([&written.real], &mut table).unwrap();
    (*since, *of) = (batch.ticket(), written.real.id());
    *blocks = written.real.blocks().map(|block| pool.blocks().handle(block)).collect();
    *frames = table.row(0).to_vec();
}

/// A leased block, and the value of all its bytes.
struct Held {
    lease: Lease<'static>,
    stamp: u8,
    pin: Option<BlockPin>,
}

impl Held {
    fn frame(&self) -> FrameId {
        self.lease.frames().next().unwrap()
    }
}

fn write(pool: &Pool, held: &Held) {
    let bytes = vec![held.stamp; pool.layout().packed_bytes()];
    let batch = pool.begin_batch();
    let run = Run { start: held.frame(), len: 1 };
    // SAFETY: only this thread owns the block, which is open, so that it does not move.
    unsafe { pool.storage().unwrap().unpack(&[run], &bytes) }.unwrap();
    batch.finish();
}

fn check(pool: &Pool, held: &Held) {
    let mut bytes = vec![0; pool.layout().packed_bytes()];
    let batch = pool.begin_batch();
    let run = Run { start: held.frame(), len: 1 };
    // SAFETY: this thread owns the block and does not write it here; the batch keeps the frame.
    unsafe { pool.storage().unwrap().pack(&[run], &mut bytes) }.unwrap();
    batch.finish();
    assert!(bytes.iter().all(|&byte| byte == held.stamp), "{:?} in {run} lost its bytes", held.lease);
}

/// Leased blocks: written, sealed, pinned, reopened and written again, shared, freed.
fn hold(pool: &Pool, stop: &AtomicBool, mut rng: Rng) {
    let mut all: Vec<Held> = Vec::new();
    while !stop.load(Relaxed) {
        let leases = pool.allocate_owned(AllocRequest::new(rng.usize(1..30))).map(split);
        for lease in leases.unwrap_or_default() {
            let mut held = Held { lease, stamp: rng.u8(1..), pin: None };
            write(pool, &held);
            held.lease.seal(..);
            all.push(held);
        }
        rng.shuffle(&mut all);
        for held in all.iter_mut().take(10) {
            match rng.u8(..5) {
                0 if held.lease.reopen(0) => {
                    held.stamp = rng.u8(1..);
                    write(pool, held);
                    held.lease.seal(..);
                }
                1 if held.pin.is_none() => {
                    held.pin = Some(pool.pin_scoped(handle(&held.lease)).unwrap());
                    let before = held.frame();
                    check(pool, held);
                    assert_eq!(held.frame(), before, "pinned blocks stay");
                }
                2 => held.pin = None,
                3 => {
                    let shared = held.lease.share().unwrap();
                    check(pool, held);
                    held.lease = shared;
                }
                _ => check(pool, held),
            }
        }
        while all.len() > rng.usize(50..300) {
            check(pool, &all.swap_remove(rng.usize(..all.len())));
        }
    }
    all.iter().for_each(|held| check(pool, held));
}

/// Waiting requests, also for runs, with deadlines, and dropped futures.
async fn wait(pool: Pool, stop: &AtomicBool, served: &AtomicUsize, mut rng: Rng) {
    while !stop.load(Relaxed) {
        let mut request = AllocRequest::new(rng.usize(1..60));
        request.contiguous = rng.bool();
        request.priority = [Priority::Normal, Priority::High, Priority::Urgent][rng.usize(..3)];
        let until = Instant::now() + Duration::from_micros(rng.u64(..20_000));
        match pool.allocate_async(request).until(until).await {
            Ok(lease) => {
                assert!(!request.contiguous || lease.runs().count() == 1);
                served.fetch_add(1, Relaxed);
            }
            Err(AllocError::Deadline { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Resizes, repeatedly.
async fn resize(pool: Pool, stop: &AtomicBool, shrinks: &AtomicUsize, mut rng: Rng) {
    while !stop.load(Relaxed) {
        // Slightly smaller, with few blocks in the way, or any size.
        let less = pool.total_blocks().saturating_sub(rng.usize(1..60)).max(BLOCKS / 3);
        let blocks = if rng.u8(..3) > 0 { less } else { rng.usize(BLOCKS / 3..=BLOCKS) };
        let is_less = blocks < pool.total_blocks();
        let options = ResizeOptions::new()
            .patience(Duration::from_millis(rng.u64(..20)))
            .moves(DefragOptions::new().wave_bytes(rng.usize(1..40_000)));
        match pool.resize_with(blocks, options).await {
            Ok(report) => {
                assert_eq!((report.to, pool.total_blocks()), (blocks, blocks));
                shrinks.fetch_add(usize::from(is_less), Relaxed);
            }
            Err(ResizeError::NoRoom { .. } | ResizeError::NoTurn { .. } | ResizeError::Blocked { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        if rng.u8(..4) == 0 {
            // Dropped in the middle.
            let _ = tokio::time::timeout(Duration::from_micros(300), pool.resize(BLOCKS / 3)).await;
        }
        let options = DefragOptions::new().order(Order(rng.u8(..8))).wave_bytes(rng.usize(1..40_000));
        let run =
            tokio::time::timeout(Duration::from_micros(rng.u64(..3_000)), pool.defragment_with(options));
        if let Ok(outcome) = run.await {
            outcome.unwrap();
        }
        tokio::time::sleep(Duration::from_micros(rng.u64(..2_000))).await;
    }
}

fn everything_at_once(reserve: usize, seed: u64) {
    let pool = pool(reserve);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build().unwrap();
    let seconds = number("KVPOOL_STRESS_SECONDS").unwrap_or(2);
    let (stop, ids) = (AtomicBool::new(false), AtomicUsize::new(1));
    let config = DefragConfig::new()
        .threshold(0.01)
        .interval(Duration::from_millis(1))
        .moves(DefragOptions::new().wave_bytes(20_000).order(Order(3)));
    let task = runtime.block_on(async { pool.start_defragmenter(config) }).unwrap();
    let rng = |thread: u64| Rng::with_seed(seed ^ thread << 40);
    let (served, shrinks) = (AtomicUsize::new(0), AtomicUsize::new(0));
    // Until every event has occurred, also on a busy machine.
    let is_enough = |of: Duration| {
        let counts = [served.load(Relaxed), shrinks.load(Relaxed), task.totals().moved_blocks];
        of > LIMIT || of > Duration::from_secs(seconds) && counts.iter().all(|&count| count > 2)
    };
    threads::scope(|scope| {
        /// Stops the others, also by a panic.
        struct Raise<'a>(&'a AtomicBool);
        impl Drop for Raise<'_> {
            fn drop(&mut self) {
                self.0.store(true, Relaxed);
            }
        }
        let raise = Raise(&stop);
        let (pool, stop, ids) = (&pool, &stop, &ids);
        let threads: Vec<_> = (0..2)
            .map(|thread| scope.spawn(move || serve(pool, stop, ids, rng(thread))))
            .chain([scope.spawn(move || hold(pool, stop, rng(2)))])
            .collect();
        let stopwatch = async {
            let begun = Instant::now();
            while !is_enough(begun.elapsed()) && threads.iter().all(|thread| !thread.is_finished()) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            stop.store(true, Relaxed);
        };
        runtime.block_on(async {
            let waits = wait(pool.clone(), stop, &served, rng(3));
            tokio::join!(waits, resize(pool.clone(), stop, &shrinks, rng(4)), stopwatch)
        });
        drop(raise);
    });
    let totals = runtime.block_on(task.stop());
    println!("{served:?} served, {shrinks:?} shrinks, {totals:?}");
    assert!(served.into_inner() > 0 && shrinks.into_inner() > 0 && totals.moved_blocks > 0);
    assert_eq!(totals.failed, 0);
    // The last copy may be on a thread of the runtime, and ends with it.
    drop(runtime);
    let report = pool.audit().unwrap();
    assert_eq!((report.owned, report.held), (0, 0), "{report:?}");
    assert_eq!(report.reserved, reserve);
    assert_eq!(pool.free_blocks() + reserve, pool.total_blocks());
    assert_eq!(pool.stats().waiting, 0);
}

#[test]
fn everything_at_once_while_blocks_move() {
    let seed = number("KVPOOL_SEED").unwrap_or_else(|| fastrand::u64(..));
    eprintln!("KVPOOL_SEED={seed}");
    everything_at_once(0, seed);
    everything_at_once(40, seed);
}
