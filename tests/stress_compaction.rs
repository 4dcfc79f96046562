//! Real threads on a pool whose blocks move concurrently: a background task, runs by hand, runs for
//! waiting requests, and resizes. Every token and every raw block is read back, in copies and in tiles
//! that blocks move away from. Also on a device whose copies end later, or fail, and with freed blocks
//! that are wiped.
//!
//! `KVPOOL_SEED=<seed>` repeats the threads' random choices (the schedule is up to the machine);
//! `KVPOOL_STRESS_SECONDS=<seconds>` makes the test longer.
#![cfg(not(any(kvpool_loom, miri)))]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use fastrand::Rng;
use kvpool::block::{Moved, Since};
use kvpool::compact::{DefragConfig, DefragError, DefragOptions, ResizeError, ResizeOptions};
use kvpool::storage::{CopyDone, Dtype, FrameMove, HostStorage, KvLayout, Storage};
use kvpool::{
    AllocError, AllocRequest, BlockHandle, BlockPin, BlockTable, DeviceId, FrameId, Lease, Order, Pool,
    Priority, Run, Sequence, SequenceError, SequenceId, StorageError, Ticket, Tokens,
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

/// Memory of a device that copies a wave of moves at some later time, or fails, possibly without
/// reporting it.
#[derive(Debug)]
struct Late {
    host: Arc<HostStorage>,
    copies: Mutex<mpsc::Sender<(Vec<FrameMove>, CopyDone)>>,
}

impl Late {
    fn new(layout: KvLayout, frames: usize, seed: u64) -> Self {
        let host = Arc::new(HostStorage::new(layout, frames, frames).unwrap());
        let (copies, copied) = mpsc::channel::<(Vec<FrameMove>, CopyDone)>();
        let (storage, mut rng) = (host.clone(), Rng::with_seed(seed));
        std::thread::spawn(move || {
            for (moves, done) in copied {
                std::thread::sleep(Duration::from_micros(rng.u64(..600)));
                match rng.u8(..32) {
                    0 => done(Err(StorageError::Unsupported { device: DeviceId::Host, what: "nothing" })),
                    1 => drop(done),
                    // SAFETY: the frame rule holds until `done` is called.
                    _ => done(unsafe { storage.copy(&moves) }),
                }
            }
        });
        Self { host, copies: Mutex::new(copies) }
    }
}

// All but a wave's copy is forwarded to host memory. The frame rule is the caller's.
impl Storage for Late {
    kvpool_testkit::as_on_the_host!(host);

    fn device(&self) -> DeviceId {
        DeviceId::Cuda(0)
    }

    unsafe fn copy_then(&self, moves: &[FrameMove], done: CopyDone) {
        let _ = self.copies.lock().unwrap().send((moves.to_vec(), done));
    }
}

/// Copies that a [`Late`] device failed.
fn has_failed(error: &DefragError) -> bool {
    matches!(error, DefragError::Copy { .. } | DefragError::CopyDropped { .. })
}

fn pool(reserve: usize, late: Option<u64>) -> Pool {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(HEAD_DIM).block_tokens(BLOCK_TOKENS);
    let layout = layout.dtype(Dtype::F32).build().unwrap();
    let builder =
        Pool::builder(layout.clone()).blocks(BLOCKS).segment_blocks(256).threads(4).reserve(reserve);
    match late {
        None => builder,
        Some(seed) => builder.storage(Arc::new(Late::new(layout, BLOCKS + 1, seed))).zero_on_free(),
    }
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
        if is_on_host(pool) && rng.bool() {
            for index in appended.start / BLOCK_TOKENS..appended.end.div_ceil(BLOCK_TOKENS) {
                let (k, v) = batch.tile_mut::<f32>(&mut self.real, 0, index).unwrap();
                let tokens = &self.tokens[index * BLOCK_TOKENS..];
                for ((k, v), token) in k.chunks_mut(HEAD_DIM).zip(v.chunks_mut(HEAD_DIM)).zip(tokens) {
                    k.fill(*token);
                    v.fill(-*token);
                }
            }
        } else {
            let k: Vec<f32> =
                self.tokens[appended.clone()].iter().flat_map(|&token| [token; HEAD_DIM]).collect();
            let v: Vec<f32> = k.iter().map(|k| -k).collect();
            batch.store(&mut self.real, 0, appended, (&k).into(), (&v).into()).unwrap();
        }
        batch.finish();
    }

    /// Takes all tiles, and reads them again and again while blocks move away from under them, and a
    /// fork comes and goes. Returns the number of blocks that moved.
    fn check_tiles(&self, pool: &Pool, fork: SequenceId, rng: &mut Rng) -> usize {
        let batch = pool.begin_batch();
        let frames = || self.real.blocks().map(|block| pool.blocks().frame(block));
        let (before, mut tiles): (Vec<_>, _) = (frames().collect(), Vec::new());
        for index in 0..self.real.block_count() {
            match batch.tile::<f32>(&self.real, 0, index) {
                Ok(tile) => tiles.push((index, tile)),
                // Shared, and not sealed.
                Err(SequenceError::NotReadable { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        let fork = (rng.u8(..4) == 0).then(|| self.real.fork(fork));
        for turn in 0..rng.usize(1..6) {
            for &(index, (k, v)) in &tiles {
                let tokens = &self.tokens[index * BLOCK_TOKENS..];
                assert_eq!(k.len(), tokens.len().min(BLOCK_TOKENS) * HEAD_DIM);
                for ((k, v), &token) in k.chunks(HEAD_DIM).zip(v.chunks(HEAD_DIM)).zip(tokens) {
                    let is_kept = k.iter().all(|&k| k == token) && v.iter().all(|&v| v == -token);
                    assert!(is_kept, "block {index} of {}, turn {turn}", self.real.id());
                }
            }
            std::thread::sleep(Duration::from_micros(rng.u64(..400)));
        }
        drop(fork);
        frames().zip(&before).filter(|(now, before)| now != *before).count()
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

fn is_on_host(pool: &Pool) -> bool {
    pool.storage().unwrap().device() == DeviceId::Host
}

/// Sequences open, grow, fork and close; each is checked when it closes. Counts the blocks that left
/// a frame under a tile.
fn serve(pool: &Pool, stop: &AtomicBool, ids: &AtomicUsize, left: &AtomicUsize, mut rng: Rng) {
    let new_id = || SequenceId(ids.fetch_add(1, Relaxed) as u64);
    let mut sequences: Vec<Written> = Vec::new();
    let mut table = (Ticket(0), SequenceId(0), Vec::new(), Vec::new());
    while !stop.load(Relaxed) {
        let many = sequences.len();
        match rng.u8(..21) {
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
            18 if many > 0 && is_on_host(pool) => {
                let moved = sequences[rng.usize(..many)].check_tiles(pool, new_id(), &mut rng);
                left.fetch_add(moved, Relaxed);
            }
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
async fn resize(pool: Pool, stop: &AtomicBool, shrinks: &AtomicUsize, is_late: bool, mut rng: Rng) {
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
            Err(ResizeError::Defrag(error)) if is_late && has_failed(&error) => {}
            Err(error) => panic!("{error}"),
        }
        if rng.u8(..4) == 0 {
            // Dropped in the middle.
            let _ = tokio::time::timeout(Duration::from_micros(300), pool.resize(BLOCKS / 3)).await;
        }
        let options = DefragOptions::new().order(Order(rng.u8(..8))).wave_bytes(rng.usize(1..40_000));
        let run =
            tokio::time::timeout(Duration::from_micros(rng.u64(..3_000)), pool.defragment_with(options));
        if let Ok(Err(error)) = run.await {
            assert!(is_late && has_failed(&error), "{error}");
        }
        tokio::time::sleep(Duration::from_micros(rng.u64(..2_000))).await;
    }
}

fn everything_at_once(reserve: usize, is_late: bool, seed: u64) {
    let pool = pool(reserve, is_late.then_some(seed));
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
    let left = AtomicUsize::new(if is_late { usize::MAX / 2 } else { 0 });
    // Until every event has occurred, also on a busy machine.
    let is_enough = |of: Duration| {
        let counts = [&served, &shrinks, &left].map(|count| count.load(Relaxed));
        let counts = [&counts[..], &[task.totals().moved_blocks]].concat();
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
        let (pool, stop, ids, left) = (&pool, &stop, &ids, &left);
        let threads: Vec<_> = (0..2)
            .map(|thread| scope.spawn(move || serve(pool, stop, ids, left, rng(thread))))
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
            tokio::join!(waits, resize(pool.clone(), stop, &shrinks, is_late, rng(4)), stopwatch)
        });
        drop(raise);
    });
    let totals = runtime.block_on(task.stop());
    println!("{served:?} served, {shrinks:?} shrinks, {left:?} left a frame under a tile, {totals:?}");
    assert!(
        [served, shrinks, left].into_iter().all(|count| count.into_inner() > 0) && totals.moved_blocks > 0
    );
    assert!(is_late || totals.failed == 0, "{totals:?}");
    // The last copy may be on a thread of the runtime, and ends with it, or on the device.
    drop(runtime);
    let begun = Instant::now();
    while pool.audit().map_or(true, |report| report.held > 0) && begun.elapsed() < LIMIT {
        std::thread::sleep(Duration::from_millis(1));
    }
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
    everything_at_once(0, false, seed);
    everything_at_once(40, false, seed);
}

#[test]
fn on_a_device_that_copies_late_and_fails() {
    let seed = number("KVPOOL_SEED").unwrap_or_else(|| fastrand::u64(..));
    eprintln!("KVPOOL_SEED={seed}");
    everything_at_once(16, true, seed);
}
