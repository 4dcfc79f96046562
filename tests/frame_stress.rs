//! Real threads, every operation mixed, and an oracle of ownership: a byte per frame that is
//! swapped to "owned" when a frame is taken and to "free" before it is put back. The swap detects
//! double ownership. Each owner also writes plain memory that belongs to the frame: an order that
//! the bitmaps lack is a data race there, which ThreadSanitizer reports.
#![cfg(not(kvpool_loom))]

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};

use kvpool::frame::{FrameConfig, Frames};
use kvpool::{FrameId, Order, Run};

const FREE: u8 = 0;
const OWNED: u8 = 1;

/// A linear congruential generator: the high bits are good enough to choose operations with.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// Plain memory of a frame, accessed by its owner alone.
#[derive(Default)]
struct Bytes(UnsafeCell<u64>);

// SAFETY: a frame has one owner at a time, which is what this test checks.
unsafe impl Sync for Bytes {}

struct Oracle {
    frames: Frames,
    owners: Vec<AtomicU8>,
    bytes: Vec<Bytes>,
}

impl Oracle {
    fn take(&self, run: Run) {
        for frame in run.frames() {
            // Relaxed: the oracle must not add an order that the bitmap lacks.
            assert_eq!(
                self.owners[frame.index()].swap(OWNED, Ordering::Relaxed),
                FREE,
                "{frame} has two owners"
            );
            // SAFETY: the frame is ours until `leave`.
            unsafe { *self.bytes[frame.index()].0.get() += u64::from(frame.0) + 1 };
        }
    }

    fn leave(&self, run: Run) {
        for frame in run.frames() {
            // SAFETY: the frame is ours since `take`.
            let written = unsafe { *self.bytes[frame.index()].0.get() };
            assert_eq!(written % (u64::from(frame.0) + 1), 0, "{frame} was written by another owner");
            assert_eq!(
                self.owners[frame.index()].swap(FREE, Ordering::Relaxed),
                OWNED,
                "{frame} had no owner"
            );
        }
    }

    fn put(&self, run: Run) {
        self.leave(run);
        self.frames.free_run(run);
    }
}

/// Runs random operations until told to stop; everything is put back at the end.
fn churn(oracle: &Oracle, mut dice: Dice, held_max: usize, stop: &AtomicBool) -> u64 {
    let mut held: Vec<Run> = Vec::new();
    let mut held_frames = 0;
    let mut operations = 0;
    while !stop.load(Ordering::Relaxed) {
        operations += 1;
        let near = FrameId(dice.roll(oracle.frames.total() as u64) as u32);
        let before = held.len();
        // Above its share a thread only puts frames back.
        match dice.roll(if held_frames > held_max { 5 } else { 12 }) {
            0 if !held.is_empty() => {
                // Frees a part of a run, from its end.
                let pick = dice.roll(held.len() as u64) as usize;
                let cut = 1 + dice.roll(u64::from(held[pick].len)) as u32;
                let run = held[pick];
                oracle.put(Run { start: FrameId(run.end() - cut), len: cut });
                held_frames -= cut as usize;
                held[pick].len -= cut;
                if held[pick].len == 0 {
                    held.swap_remove(pick);
                }
                continue;
            }
            1..=4 if !held.is_empty() => {
                let run = held.swap_remove(dice.roll(held.len() as u64) as usize);
                held_frames -= run.len as usize;
                oracle.put(run);
                continue;
            }
            5 => held.extend(oracle.frames.allocate_aligned(Order(dice.roll(9) as u8), near)),
            6 => held.extend(oracle.frames.allocate_run(1 + dice.roll(600) as u32, near)),
            7 => held.extend(oracle.frames.allocate_run(1 + dice.roll(70) as u32, near)),
            8 => {
                let count = 1 + dice.roll(300) as u32;
                oracle.frames.allocate_many(count, near, &mut |run| held.push(run));
            }
            9 => {
                // A run by name; short ones succeed more often.
                let run = Run { start: near, len: 1 + dice.roll(200) as u32 };
                if oracle.frames.claim(run) {
                    held.push(run);
                }
            }
            _ => {
                if let Some(mask) = oracle.frames.refill(1 + dice.roll(64) as u32, near) {
                    held.extend(mask.frames().map(|frame| Run { start: frame, len: 1 }));
                }
            }
        }
        for run in &held[before..] {
            oracle.take(*run);
            held_frames += run.len as usize;
        }
    }
    held.into_iter().for_each(|run| oracle.put(run));
    operations
}

/// Takes some frames away at the end, if a few attempts suffice.
fn shrink(oracle: &Oracle, dice: &mut Dice) -> bool {
    let most = 1 << dice.roll(9);
    let by = 1 + dice.roll(most) as usize;
    let to = oracle.frames.total().saturating_sub(by);
    let Ok(mut shrink) = oracle.frames.begin_shrink(to) else { return false };
    let mut looks = 0;
    while oracle.frames.collect(&mut shrink, |run| oracle.take(run)) > 0 && looks < 20 {
        std::thread::yield_now();
        looks += 1;
    }
    let all = shrink.missing() == 0;
    shrink.for_each_collected(|run| oracle.leave(run));
    if all {
        oracle.frames.commit_shrink(&shrink)
    } else {
        oracle.frames.abandon_shrink(&shrink)
    }
    oracle.frames.end_shrink(shrink);
    all
}

struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn stress(config: FrameConfig, threads: usize, seconds: f32) {
    let seed = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    println!("seed {seed}, {config:?}");
    let owners = (0..config.frames_max).map(|_| AtomicU8::new(FREE)).collect();
    let bytes = (0..config.frames_max).map(|_| Bytes::default()).collect();
    let oracle = Oracle { frames: Frames::new(config), owners, bytes };
    let stop = AtomicBool::new(false);
    kvpool_testkit::threads::scope(|scope| {
        for thread in 0..threads as u64 {
            let (oracle, stop) = (&oracle, &stop);
            let dice = Dice(seed.wrapping_add(thread.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
            scope.spawn(move || {
                let operations = churn(oracle, dice, config.frames / threads, stop);
                println!("thread {thread}: {operations} operations");
            });
        }
        let end = Instant::now() + Duration::from_secs_f32(seconds);
        // Also if this thread fails: the scope waits for the others.
        let _stop = Stop(&stop);
        let (mut dice, mut shrunk) = (Dice(seed), 0);
        while Instant::now() < end {
            std::thread::sleep(Duration::from_millis(2));
            // Spares some units concurrently, and sometimes grows and shrinks the pool.
            let unit = FrameId(dice.roll(oracle.frames.total() as u64) as u32);
            let is_reserved_for_growth = oracle.frames.begin_growth_unit(unit);
            let room = config.frames_max - oracle.frames.total();
            if room > 0 {
                oracle.frames.grow(room.min(1 + dice.roll(100) as usize), &mut |_| Ok(())).unwrap();
            }
            if is_reserved_for_growth {
                oracle.frames.end_growth_unit(unit);
            }
            shrunk += shrink(&oracle, &mut dice) as u64;
        }
        println!("{shrunk} shrinks");
    });
    oracle.frames.audit().unwrap();
    let total = oracle.frames.total();
    let census = oracle.frames.census(Order(6));
    assert_eq!((census.free, census.runs, census.longest_run), (total, 1, total), "seed {seed}");
    assert!(oracle.owners.iter().all(|owner| owner.load(Ordering::Relaxed) == FREE));
}

#[test]
fn a_small_pool_that_is_always_short() {
    stress(FrameConfig { frames: 200, frames_max: 200, segment_frames: 64 }, 3, 1.0);
}

#[test]
fn many_segments() {
    stress(FrameConfig { frames: 5000, frames_max: 5000, segment_frames: 256 }, 2, 1.0);
}

#[test]
fn a_growing_pool() {
    stress(FrameConfig { frames: 1000, frames_max: 40_000, segment_frames: 4096 }, 2, 1.5);
}

/// Single frames of a unit that other threads split and merge all the time: no request is refused,
/// although every frame is hidden behind a split or a merge half of the time.
///
/// A thread that the system stops in mid split hides the frames for as long as it is stopped, and a
/// search waits for no thread. Such requests succeed when they are repeated, and are few.
#[test]
fn no_request_is_refused_while_enough_is_free() {
    const ROUNDS: u32 = 100_000;
    let frames = Frames::new(FrameConfig { frames: 64, frames_max: 64, segment_frames: 64 });
    let refused = AtomicUsize::new(0);
    let one = |round: u32| {
        for _ in 0..1000 {
            if let Some(mask) = frames.refill(1, FrameId(0)) {
                return Run { start: mask.frames().next().unwrap(), len: 1 };
            }
            refused.fetch_add(1, Relaxed);
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("one frame of 64 must be free in round {round}")
    };
    kvpool_testkit::threads::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for round in 0..ROUNDS {
                    let got = match round % 2 {
                        0 => frames.allocate_run(1 + round % 20, FrameId(0)),
                        _ => Some(one(round)),
                    };
                    got.into_iter().for_each(|run| frames.free_run(run));
                }
            });
        }
    });
    frames.audit().unwrap();
    let refused = refused.into_inner();
    assert!(refused < ROUNDS as usize / 1000, "{refused} refusals: more than stopped threads explain");
}
