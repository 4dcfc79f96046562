//! The pool, the engine's state, and the schedule.

use std::collections::BTreeSet;
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use kvpool::compact::{Defragmenter, FrameKind};
use kvpool::storage::{CopyDone, Dtype, FrameMove, KvLayout};
use kvpool::{AllocRequest, Batch, BlockId, BlockPin, FrameId, Order, Pool, StorageError};
use tokio::runtime::Runtime;

use super::device::Device;
use super::leased::Leased;
use super::sequences::{Remembered, Written};
use super::tasks::Task;
use super::{hinted, prefix};

/// Number of steps of a schedule.
const STEPS: std::ops::Range<usize> = 100..1500;

/// One seed in so many has a large pool.
pub const LARGE_EVERY: u64 = 32;

/// Copies that the pool asked for, until the device is told.
type Desk = Arc<Mutex<Vec<(Vec<FrameMove>, CopyDone)>>>;

/// A batch in flight.
pub struct InFlight {
    pub number: u64,
    pub batch: Batch,
    /// Blocks that it keeps because they are being copied.
    pub copied: Vec<BlockId>,
}

/// Counts of events.
#[derive(Clone, Copy, Default, Debug)]
pub struct Tally {
    pub steps: u64,
    pub tokens_read: u64,
    pub moved: u64,
    pub cancelled_moves: u64,
    pub copies_failed: u64,
    pub patched: u64,
    pub allocated: u64,
    pub deadlines: u64,
    pub cancelled: u64,
    pub runs: u64,
    pub shrinks: u64,
    pub shrinks_given_up: u64,
    pub background_runs: u64,
    pub hits: u64,
    pub half_hits: u64,
    pub evicted: u64,
    pub cleared: u64,
    pub hinted: u64,
    /// Blocks evicted ahead of need, by the ends of batches and of sequences.
    pub reclaimed: u64,
    /// Frames that audits found reserved for growth.
    pub reserved_for_growth: u64,
    /// Hash of all steps and their results.
    pub trace: u64,
}

impl Tally {
    fn counts(&mut self) -> [(&'static str, &mut u64); 20] {
        [
            ("steps", &mut self.steps),
            ("tokens_read", &mut self.tokens_read),
            ("moved", &mut self.moved),
            ("cancelled_moves", &mut self.cancelled_moves),
            ("copies_failed", &mut self.copies_failed),
            ("patched", &mut self.patched),
            ("allocated", &mut self.allocated),
            ("deadlines", &mut self.deadlines),
            ("cancelled", &mut self.cancelled),
            ("runs", &mut self.runs),
            ("shrinks", &mut self.shrinks),
            ("shrinks_given_up", &mut self.shrinks_given_up),
            ("background_runs", &mut self.background_runs),
            ("hits", &mut self.hits),
            ("half_hits", &mut self.half_hits),
            ("evicted", &mut self.evicted),
            ("cleared", &mut self.cleared),
            ("hinted", &mut self.hinted),
            ("reclaimed", &mut self.reclaimed),
            ("reserved_for_growth", &mut self.reserved_for_growth),
        ]
    }

    pub fn add(&mut self, other: &Self) {
        let mut other = *other;
        self.trace ^= other.trace;
        for ((_, sum), (_, count)) in self.counts().into_iter().zip(other.counts()) {
            *sum += *count;
        }
    }

    /// Fails if some event never happened: the simulation would check less than it claims.
    pub fn is_complete(mut self) {
        self.counts().into_iter().for_each(|(what, count)| assert_ne!(*count, 0, "no {what}"));
    }
}

pub struct World {
    pub rng: Rng,
    pub pool: Pool,
    pub device: Device,
    pub batches: Vec<InFlight>,
    pub sequences: Vec<Written>,
    /// Beginnings of prompts.
    pub prompts: Vec<Vec<u32>>,
    pub remembered: Vec<Remembered>,
    pub all_leased: Vec<Leased>,
    /// Pins on blocks of sequences, and the frames in which they were pinned.
    pub forged: Vec<(BlockPin, FrameId)>,
    pub tasks: Vec<Task>,
    pub defragmenter: Option<Defragmenter>,
    pub runtime: Rc<Runtime>,
    pub tally: Tally,
    /// Numbers for tokens, sequences, batches and tasks.
    pub last: u64,
    /// Factor of the lengths of sequences and of the steps of the device: 1 but in large pools.
    pub scale: usize,
    /// Of the cache.
    pub clock: Arc<AtomicU64>,
    /// The most blocks that hints pin; `None` in a pool that takes none.
    pub pinned_max: Option<usize>,
    /// Tokens per block, by the seed.
    pub block_tokens: usize,
    /// Probability that a copy fails, in percent.
    failing: u8,
    /// Approximate maximum share of the pool in use, in percent.
    ceiling: usize,
    desk: Desk,
    is_told: bool,
}

/// Returns whether a seed's pool is large enough to evict ahead of need and to spare units for the
/// growth of sequences. Those schedules take longer.
pub fn is_large(seed: u64) -> bool {
    seed.is_multiple_of(LARGE_EVERY)
}

/// A possible step; each schedule takes some often, and others not at all.
type Step = fn(&mut World);

const STEP_KINDS: &[(u32, &str, Step)] = &[
    (6, "begin a batch", World::begin_batch),
    (9, "end a batch", World::end_some_batch),
    (12, "let the stream run", World::work),
    (4, "open a sequence", World::open),
    (3, "open a prompt", World::open_prompt),
    (12, "serve a prompt", World::serve_prompt),
    (1, "clear the cache", World::clear_cache),
    (4, "hint", World::hint),
    (1, "let the cache's time pass", World::pass_cache_time),
    (20, "append", World::append),
    (3, "commit", World::commit),
    (5, "truncate", World::truncate),
    (3, "reserve", World::reserve),
    (4, "fork", World::fork),
    (3, "close", World::close),
    (8, "read", World::read),
    (3, "remember a table", World::remember),
    (5, "patch a table", World::patch),
    (10, "allocate leased", World::allocate_leased),
    (2, "scatter leased", World::scatter_leased),
    (6, "write leased", World::write_leased),
    (16, "seal leased", World::seal_leased),
    (2, "reopen leased", World::reopen_leased),
    (3, "share leased", World::share_leased),
    (3, "pin leased", World::pin_leased),
    (3, "unpin leased", World::unpin_leased),
    (2, "pin by a forged handle", World::pin_forged),
    (1, "unpin by a forged handle", World::unpin_forged),
    (6, "free leased", World::free_leased),
    (4, "read leased", World::read_leased),
    (6, "allocate and wait", World::allocate_and_wait),
    (5, "defragment", World::defragment),
    (2, "resize", World::resize),
    (3, "cancel", World::cancel),
    (40, "poll", World::poll_woken),
    (1, "poll for nothing", World::poll_any),
    (30, "copy", World::copy_some),
    (4, "let time pass", World::pass_time),
    (1, "trim", World::trim),
    (4, "audit", World::audit),
    (1, "a background task", World::background),
    (3, "a wave by hand", World::wave),
];

impl World {
    pub fn new(seed: u64, runtime: Rc<Runtime>, is_told: bool) -> Self {
        let mut rng = Rng::with_seed(seed);
        let block_tokens = [4, 1, 2, 3, 16][seed as usize % 5];
        let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(block_tokens);
        let is_large = is_large(seed);
        let blocks = match rng.u8(..4) {
            _ if is_large => rng.usize(1_024..3_000),
            0 => rng.usize(3..20),
            _ => rng.usize(20..200),
        };
        let scale = if is_large { blocks / 40 } else { 1 };
        let blocks_max = blocks + rng.usize(0..100);
        let desk = Desk::default();
        let asked = desk.clone();
        let copier = Arc::new(move |moves: &[FrameMove], done: CopyDone| {
            asked.lock().unwrap().push((moves.to_vec(), done));
        });
        let layout = layout.dtype(Dtype::F32).build().unwrap();
        let mut builder = Pool::builder(layout.clone())
            .blocks(blocks)
            .blocks_max(blocks_max)
            .segment_blocks(if is_large { 64 << rng.u8(..5) } else { 64 })
            .threads(rng.usize(1..4))
            .latency_sample(0)
            .fragmentation_order(Order(rng.u8(..5)))
            .engine_copies(copier)
            // By the order of the queue: the schedule must not depend on the clock.
            .turn_patience(Duration::MAX);
        if rng.bool() {
            builder = builder.magazine_blocks(rng.usize(..10));
        }
        if rng.bool() {
            builder = builder.reserve(rng.usize(..(blocks / 3).min(8)));
        }
        if rng.u8(..4) == 0 {
            builder = builder.without_null_block();
        }
        let caches = rng.u8(..4);
        let (clock, mut pinned_max) = (Arc::new(AtomicU64::new(1_000)), None);
        if is_large || caches > 0 {
            builder = builder.prefix_cache(prefix::some_config(&mut rng, clock.clone()));
            if rng.u8(..4) > 0 {
                let block_bytes = layout.bytes_per_block() as u64;
                let (limits, most) = hinted::some_limits(&mut rng, blocks, block_bytes);
                (builder, pinned_max) = (builder.hints(limits), Some(most));
            }
        }
        let pool = builder.build().unwrap();
        let device = Device::new(pool.blocks().total_frames(), blocks_max + 1, block_tokens);
        let mut world = Self {
            failing: if rng.bool() { 0 } else { rng.u8(..100) },
            ceiling: [50, 65, 80, 100][rng.usize(..4)],
            rng,
            device,
            pool,
            batches: Vec::new(),
            sequences: Vec::new(),
            prompts: prefix::some_prompts(&mut Rng::with_seed(!seed), scale),
            remembered: Vec::new(),
            all_leased: Vec::new(),
            forged: Vec::new(),
            tasks: Vec::new(),
            defragmenter: None,
            runtime,
            tally: Tally { trace: 0xcbf2_9ce4_8422_2325, ..Tally::default() },
            last: 0,
            scale,
            clock,
            pinned_max,
            block_tokens,
            desk,
            is_told,
        };
        world.note(format_args!("seed {seed}: {blocks} of {blocks_max} blocks of {block_tokens}"));
        world
    }

    pub fn run(&mut self) {
        // Some kinds of steps often, some not at all: faults that a mixture hides appear without
        // it.
        let weights: Vec<u32> =
            STEP_KINDS.iter().map(|(weight, ..)| weight * [0, 1, 2, 2, 6][self.rng.usize(..5)]).collect();
        let all = weights.iter().sum::<u32>().max(1);
        for _ in 0..self.rng.usize(STEPS) {
            let (name, step) = self.choose(&weights, all);
            self.tally.steps += 1;
            self.note(format_args!("-- {name}"));
            step(self);
            self.settle();
        }
    }

    fn choose(&mut self, weights: &[u32], all: u32) -> (&'static str, Step) {
        let used = self.pool.blocks().counts().used();
        if used * 100 > self.ceiling * self.pool.total_blocks() && self.rng.bool() {
            return if self.rng.bool() {
                ("make room", World::free_leased)
            } else {
                ("make room", World::close)
            };
        }
        let mut at = self.rng.u32(..all);
        let chosen = weights.iter().position(|&weight| {
            let is_here = at < weight;
            at = at.saturating_sub(weight);
            is_here
        });
        let (_, name, step) = STEP_KINDS[chosen.unwrap_or(0)];
        (name, step)
    }

    /// Records a step: prints it, or adds it to a hash that differs if any step differs.
    pub fn note(&mut self, what: fmt::Arguments<'_>) {
        struct Trace<'a>(&'a mut u64);
        impl fmt::Write for Trace<'_> {
            fn write_str(&mut self, text: &str) -> fmt::Result {
                for byte in text.bytes() {
                    *self.0 = (*self.0 ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
                }
                Ok(())
            }
        }
        let _ = fmt::Write::write_fmt(&mut Trace(&mut self.tally.trace), what);
        if self.is_told {
            eprintln!("{what}");
        }
    }

    /// Returns a number that was not returned before.
    pub fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Returns a random index below `len`; `None` if `len` is 0.
    pub fn pick(&mut self, len: usize) -> Option<usize> {
        (len > 0).then(|| self.rng.usize(..len))
    }

    /// After every step: tells the device the pool's copies and size.
    pub fn settle(&mut self) {
        self.device.resize(self.pool.blocks().total_frames());
        let asked = std::mem::take(&mut *self.desk.lock().unwrap());
        for (moves, done) in asked {
            self.note(format_args!("copies {} frames, {:?} first", moves.len(), moves[0]));
            self.device.ask(moves, done);
        }
    }

    pub fn begin_batch(&mut self) {
        if self.batches.len() < 5 {
            let number = self.number();
            let batch = self.pool.begin_batch();
            self.note(format_args!("batch {number}, {:?}", batch.ticket()));
            self.batches.push(InFlight { number, batch, copied: Vec::new() });
        }
    }

    /// Returns one of the batches in flight, beginning one if there is none.
    pub fn some_batch(&mut self) -> usize {
        if self.batches.is_empty() {
            self.begin_batch();
        }
        self.rng.usize(..self.batches.len())
    }

    fn end_some_batch(&mut self) {
        if let Some(batch) = self.pick(self.batches.len()) {
            self.end_batch(batch);
        }
    }

    pub fn end_batch(&mut self, batch: usize) {
        let InFlight { number, batch, .. } = self.batches.swap_remove(batch);
        self.note(format_args!("batch {number} ends"));
        self.device.end_batch(number);
        let fails = self.rng.u8(..16) == 0;
        self.counting_slices(|_| if fails { drop(batch) } else { batch.finish() });
        if fails {
            self.note(format_args!("batch {number} was abandoned"));
            self.withdraw(number);
        }
        self.sequences.iter_mut().for_each(|written| written.writes.retain(|write| write.0 != number));
    }

    /// Returns the number of blocks evicted so far.
    fn evicted(&self) -> u64 {
        self.pool.prefix_cache().map_or(0, |cache| cache.stats().evicted_blocks)
    }

    /// Ends a batch or a sequence, which evicts nothing but ahead of need.
    pub fn counting_slices(&mut self, end: impl FnOnce(&mut Self)) {
        let before = self.evicted();
        end(self);
        self.tally.reclaimed += self.evicted() - before;
    }

    fn work(&mut self) {
        let count = self.rng.usize(1..60) * self.scale;
        self.device.work(count);
        if let Some(batch) = self.pick(self.batches.len()) {
            self.device.check_reads(self.batches[batch].number);
        }
    }

    fn copy_some(&mut self) {
        let Some(copy) = self.pick(self.device.copies()) else { return };
        if self.rng.u16(..1000) < u16::from(self.failing) {
            let done = self.device.break_off(copy);
            self.tally.copies_failed += 1;
            if self.rng.bool() {
                self.note(format_args!("a copy fails"));
                done(Err(StorageError::Memory { bytes: 1, reason: std::io::ErrorKind::Other }));
            } else {
                self.note(format_args!("a copy is dropped"));
                drop(done);
            }
            return;
        }
        let tokens = self.rng.usize(1..40) * self.scale;
        let Some((moves, done)) = self.device.copy_some(copy, tokens) else { return };
        let blocks = self.pool.blocks().clone();
        let sources: Vec<_> = moves.iter().map(|moved| blocks.block_at(moved.src)).collect();
        done(Ok(()));
        let arrived = sources.iter().zip(&moves).filter(|(block, moved)| blocks.frame(**block) == moved.dst);
        let arrived = arrived.count() as u64;
        self.note(format_args!("a copy ends, {arrived} blocks moved"));
        self.tally.moved += arrived;
        self.tally.cancelled_moves += moves.len() as u64 - arrived;
    }

    fn pass_time(&mut self) {
        let time = Duration::from_micros(self.rng.u64(..30_000));
        self.note(format_args!("{time:?} pass"));
        self.advance(time);
    }

    /// Advances tokio's clock, fires its timers, and runs spawned tasks.
    pub fn advance(&mut self, time: Duration) {
        self.runtime.block_on(tokio::time::advance(time));
        self.settle();
    }

    fn trim(&mut self) {
        self.pool.trim();
    }

    /// Begins a wave by hand, of random frames.
    fn wave(&mut self) {
        let snapshot = self.pool.snapshot();
        let of_kind = |kind| -> Vec<FrameId> {
            let frames = (0..).map(FrameId).zip(snapshot.frames());
            frames.filter(|(_, state)| state.kind() == kind).map(|(frame, _)| frame).collect()
        };
        let (mut from, mut to) = (of_kind(FrameKind::Movable), of_kind(FrameKind::Free));
        self.rng.shuffle(&mut from);
        self.rng.shuffle(&mut to);
        // And a move that is impossible.
        let frames = self.pool.blocks().total_frames() as u32;
        let any = (FrameId(self.rng.u32(..frames)), FrameId(self.rng.u32(..frames)));
        let count = self.rng.usize(1..20);
        let pairs: Vec<_> = from.into_iter().zip(to).take(count).chain([any]).collect();
        let mut cancelled_moves = 0;
        let wave = self.pool.blocks().begin_wave(pairs, &mut |_, _| cancelled_moves += 1);
        self.note(format_args!("{} of {} to be moved", wave.len(), wave.len() as u64 + cancelled_moves));
        if wave.is_empty() {
            return;
        }
        let moves = wave.moves().map(|(from, to)| FrameMove::new(from, to)).collect();
        self.device.ask(
            moves,
            Box::new(move |outcome| {
                if outcome.is_ok() {
                    // SAFETY: the device has copied the bytes.
                    unsafe { wave.publish(&mut |_, _| {}) };
                }
            }),
        );
    }

    /// Returns whether a resize is in progress, so that free blocks may be out of reach.
    pub fn is_resizing(&self) -> bool {
        self.tasks.iter().any(Task::is_resize)
    }

    /// Checks that `audit` agrees with the engine's owned blocks and references.
    fn audit(&mut self) {
        let report = self.pool.audit().unwrap_or_else(|finding| panic!("{finding}"));
        let mut owned = BTreeSet::new();
        let mut references = 0;
        let listed = self.sequences.iter().flat_map(|written| written.real.blocks());
        let kept = self.batches.iter().flat_map(|batch| batch.copied.iter().copied());
        let closing = if self.pool.stats().closing > 0 { self.pool.owners().closing } else { Vec::new() };
        for block in listed.chain(kept).chain(closing) {
            owned.insert(block);
            references += 1;
        }
        for leased in &self.all_leased {
            owned.insert(leased.handle.id);
            references += leased.leases.len() as u64;
        }
        let reserved: usize = self.sequences.iter().map(|written| written.real.reserved_blocks()).sum();
        let expected = (owned.len() + reserved, references + reserved as u64);
        assert_eq!((report.owned, report.references), expected, "{report:?}");
        let is_quiet = self.device.copies() == 0 && !self.is_resizing();
        assert!(report.held == 0 || !is_quiet, "held without a reason: {report:?}");
        self.note(format_args!("{report:?}"));
        self.tally.reserved_for_growth += report.reserved_for_growth as u64;
        self.check_pins();
        self.check_queue();
    }

    /// Ends everything.
    pub fn end(mut self) -> Tally {
        self.note(format_args!("== the end"));
        self.audit();
        self.end_batches();
        if let Some(defragmenter) = self.defragmenter.take() {
            self.stop(defragmenter);
        }
        self.failing = 0;
        self.defragment();
        self.finish_tasks(false);
        self.read_all();
        self.end_batches();
        self.finish_tasks(false);
        self.audit();
        self.sequences.clear();
        self.forged.clear();
        self.free_all();
        self.finish_tasks(true);
        let counts = self.pool.blocks().counts();
        assert!(self.tasks.is_empty(), "tasks never end: {:?}, {counts:?}", self.tasks);
        assert!(self.device.is_idle());
        self.audit();
        let counts = self.pool.blocks().counts();
        let free = counts.free() + counts.evictable;
        assert_eq!(free + counts.reserved, self.pool.total_blocks(), "{counts:?}");
        self.tally.evicted = self.evicted();
        // A short reserve takes evicted blocks before any request gets them.
        let all = free.min(self.pool.total_blocks() - self.pool.blocks().reserve());
        drop(self.pool.allocate(AllocRequest::new(all)).expect("all evictable blocks"));
        assert_eq!((self.pool.stats().waiting, self.pool.sequence_count()), (0, 0));
        self.note(format_args!("{counts:?}"));
        self.tally
    }

    fn end_batches(&mut self) {
        while let Some(batch) = self.pick(self.batches.len()) {
            self.end_batch(batch);
            self.settle();
        }
    }

    /// Runs until no task makes progress; blocks allocated meanwhile are kept or freed.
    fn finish_tasks(&mut self, frees: bool) {
        let mut idle = 0;
        while idle < 30 && !(self.tasks.is_empty() && self.device.copies() == 0) {
            let before = (self.tasks.len(), self.tally.moved);
            let mut polls = 0;
            while self.device.copies() > 0 || self.tasks.iter().any(Task::is_woken) {
                polls += 1;
                assert!(polls < 100_000, "tasks wake each other forever: {:?}", self.tasks);
                self.copy_some();
                self.settle();
                self.poll_woken();
                self.settle();
                if frees {
                    self.free_all();
                }
            }
            self.check_queue();
            self.advance(Duration::from_millis(5));
            idle = if before == (self.tasks.len(), self.tally.moved) { idle + 1 } else { 0 };
        }
    }
}
