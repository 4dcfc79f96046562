mod sessions;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use kvpool::prefix::policy::PolicyKind;
use kvpool::storage::groups::{GroupOptions, LayerCache, LayerGroups, Reach, Row};
use kvpool::storage::{CopyDone, Dtype, Elements, ElementsMut, FrameMove, HostStorage, KvLayout, Storage};
use kvpool::{AllocRequest, DeviceId, StorageError};

use super::*;
use crate::trace::{Generated, HASH_BLOCK_TOKENS, Request};
use kvpool_load::{Corrupt, Shape};

/// A fault of the storage. All but `DoubleOwner`, `LostCopy` and the last two occur once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    None,
    FlippedBit,
    LostStore,
    /// Rows are also stored in the slots of the first call, as if blocks had two owners.
    DoubleOwner,
    /// Rows are loaded from another frame.
    WrongFrame,
    /// Copies of states are not made.
    LostCopy,
    Panic,
    /// Copies fail. Stores are slow until one has failed.
    Copy,
    Slow,
}

/// Host memory with a fault. Loads and stores are serialized, so that no fault is a data race.
#[derive(Debug)]
struct Faulty {
    host: HostStorage,
    fault: Fault,
    countdown: AtomicUsize,
    is_done: AtomicBool,
    first: Mutex<Vec<i64>>,
}

impl Faulty {
    fn strikes(&self, fault: Fault) -> bool {
        self.fault == fault
            && self.countdown.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_err()
            // Rows of another owner may be given up, or written again, before they are read back.
            && (!self.is_done.swap(true, Relaxed) || matches!(fault, Fault::DoubleOwner | Fault::LostCopy))
    }

    fn is_slow(&self) -> bool {
        matches!(self.fault, Fault::Copy | Fault::Slow) && !self.is_done.load(Relaxed)
    }
}

// The host's memory, except for the fault. The frame rule is the caller's.
impl Storage for Faulty {
    kvpool_testkit::as_on_the_host!(host, but store, load and copy);

    fn device(&self) -> DeviceId {
        self.host.device()
    }

    unsafe fn store(
        &self,
        layer: usize,
        k: Elements<'_>,
        v: Elements<'_>,
        slots: &[i64],
    ) -> Result<(), StorageError> {
        assert!(!self.strikes(Fault::Panic), "on purpose");
        if self.is_slow() {
            thread::sleep(Duration::from_millis(3));
        }
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        if self.strikes(Fault::LostStore) {
            return Ok(());
        }
        let mut bytes = k.as_bytes().to_vec();
        if self.strikes(Fault::FlippedBit) {
            bytes[3] ^= 4;
        }
        // SAFETY: see above; the second store is under the lock of all calls.
        unsafe {
            self.host.store(layer, Elements::new(k.dtype(), &bytes)?, v, slots)?;
            if self.strikes(Fault::DoubleOwner) {
                let others: Vec<i64> = first.iter().copied().filter(|slot| !slots.contains(slot)).collect();
                let rows: Vec<u8> = bytes.iter().copied().cycle().take(8 * others.len()).collect();
                let rows = Elements::new(k.dtype(), &rows)?;
                self.host.store(layer, rows, rows, &others)?;
            }
        }
        if first.is_empty() {
            slots.clone_into(&mut first);
        }
        Ok(())
    }

    unsafe fn load(
        &self,
        layer: usize,
        slots: &[i64],
        k: ElementsMut<'_>,
        v: ElementsMut<'_>,
    ) -> Result<(), StorageError> {
        let _serialized = self.first.lock();
        let mut slots = slots.to_vec();
        if self.strikes(Fault::WrongFrame) {
            let (frame, all) = (SHAPE.block_tokens as i64, (self.frames() * SHAPE.block_tokens) as i64);
            slots.iter_mut().for_each(|slot| *slot = (*slot + frame) % all);
        }
        // SAFETY: see above; other frames are loaded under the lock of all calls.
        unsafe { self.host.load(layer, &slots, k, v) }
    }

    unsafe fn copy(&self, moves: &[FrameMove]) -> Result<(), StorageError> {
        let _serialized = self.first.lock();
        if self.strikes(Fault::LostCopy) {
            return Ok(());
        }
        // SAFETY: see above; other frames are accessed under the lock of all calls.
        unsafe { self.host.copy(moves) }
    }

    unsafe fn copy_then(&self, moves: &[FrameMove], done: CopyDone) {
        if self.fault == Fault::Copy {
            self.is_done.store(true, Relaxed);
            return done(Err(StorageError::Memory { bytes: 1, reason: std::io::ErrorKind::Other }));
        }
        let serialized = self.first.lock();
        // SAFETY: see above.
        let copied = unsafe { self.host.copy(moves) };
        drop(serialized);
        done(copied);
    }
}

const SHAPE: Shape = Shape { layers: 2, k_bytes: 8, v_bytes: 8, block_tokens: 16 };

const LRU: Eviction = Eviction { policy: PolicyKind::Lru, tolerance: None };

/// A pool with a faulty storage; `calls` is the number of calls before the fault.
fn faulty(
    blocks: usize,
    blocks_max: usize,
    eviction: Option<Eviction>,
    fault: Fault,
    calls: usize,
) -> ReplayPool {
    let layout = KvLayout::builder().layers(2).kv_heads(1).head_dim(4).dtype(Dtype::F16);
    let layout = layout.block_tokens(SHAPE.block_tokens).build().unwrap();
    assert_eq!(Shape::of(&layout), SHAPE);
    faulty_in(&Layers::Alike(layout, None), (blocks, blocks_max), eviction, fault, calls)
}

fn faulty_in(
    layers: &Layers,
    (blocks, blocks_max): (usize, usize),
    eviction: Option<Eviction>,
    fault: Fault,
    calls: usize,
) -> ReplayPool {
    let host = HostStorage::new(layers.stored().unwrap(), blocks + 1, blocks_max + 1).unwrap();
    let (countdown, is_done, first) = (AtomicUsize::new(calls), AtomicBool::new(false), Mutex::default());
    let storage = Arc::new(Faulty { host, fault, countdown, is_done, first });
    ReplayPool::on(storage, vec![], layers, blocks, blocks_max, eviction).unwrap()
}

/// A pool of two layers with a window of 40 tokens, and one that keeps all: three lists.
fn grouped(blocks: usize, eviction: Option<Eviction>, fault: Fault) -> ReplayPool {
    let row = Row::Heads { kv_heads: 1, k_dim: 4, v_dim: 4 };
    let window = LayerCache { row, reach: Reach::Window { tokens: 40, sinks: 0 } };
    let layers = [vec![window], vec![window], vec![LayerCache::all(row)]];
    let layers = Layers::Groups(LayerGroups::of_layers(&layers, GroupOptions::new()).unwrap());
    let pool = faulty_in(&layers, (blocks, blocks), eviction, fault, 40);
    assert_eq!((pool.lists().count(), pool.groups().len()), (3, 2));
    pool
}

/// A pool whose fault occurs after some steps.
pub(crate) fn pool(blocks: usize, fault: Fault) -> ReplayPool {
    faulty(blocks, blocks, None, fault, 40)
}

fn caching(blocks: usize, fault: Fault) -> ReplayPool {
    faulty(blocks, blocks, Some(LRU), fault, 40)
}

/// Requests that arrive nearly at once, into a pool that holds a few of them.
fn crowd(requests: u32) -> Trace {
    let request = |index: u32| {
        let arrival = Duration::from_millis(u64::from(index));
        Request::new(arrival, 40 + 7 * (index % 11), 30 + index % 50)
    };
    trace((0..requests).map(request))
}

fn trace(requests: impl IntoIterator<Item = Request>) -> Trace {
    let requests = requests.into_iter().collect();
    Trace { name: "requests".into(), requests, hash_tokens: HASH_BLOCK_TOKENS, out_of_order: 0 }
}

fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn run(pool: &ReplayPool, trace: &Trace, threads: usize) -> Outcome {
    replay(pool, trace, &Options::new(trace, threads), go_on)
}

#[test]
fn every_request_is_completed_and_every_token_verified() {
    let trace = crowd(200);
    let all: u64 = trace.requests.iter().map(Request::tokens).sum();
    for threads in [1, 2, 3] {
        let outcome = run(&pool(3000, Fault::None), &trace, threads);
        assert!(outcome.is_sound(200), "{outcome:?}");
        assert_eq!((outcome.tally.completed, outcome.tally.tokens), (200, all));
        assert!(outcome.tally.tokens_verified > all, "all at the end, and the last of each step");
        assert_eq!(outcome.first_refusal, None);
        // None was preempted, so every table read at an end was of a completed request.
        let sum = 200.0 * outcome.tally.tables.per_sequence.mean();
        assert!(
            (sum - outcome.tally.tables.runs as f64).abs() < 1e-6,
            "{sum} of {}",
            outcome.tally.tables.runs
        );
    }
    // Each of these alone makes a replay unsound.
    type Damage = fn(&mut Outcome);
    let damages: [(Damage, bool); 5] = [
        (|outcome| outcome.audit = Err("a block".into()), false),
        (|outcome| outcome.blocks_leaked = 1, false),
        (|outcome| outcome.tally.blocks_freed += 1, false),
        (|outcome| outcome.tally.find("a fault".into()), false),
        (|outcome| outcome.tally.completed -= 1, true),
    ];
    for (damage, is_intact) in damages {
        let mut outcome = run(&pool(3000, Fault::None), &crowd(3), 1);
        damage(&mut outcome);
        assert_eq!((outcome.is_intact(), outcome.is_sound(3)), (is_intact, false), "{outcome:?}");
    }
}

/// Threads that preempt each other in a pool for one or two requests still terminate.
#[test]
fn a_pool_that_is_far_too_small_completes_every_request() {
    let trace = crowd(120);
    for blocks in [12, 13, 20, 40] {
        for threads in [1, 2, 3] {
            let outcome = run(&pool(blocks, Fault::None), &trace, threads);
            assert!(outcome.is_sound(120), "{blocks} blocks, {threads} threads: {outcome:?}");
            assert_eq!(outcome.tally.completed, 120);
        }
    }
    let outcome = run(&pool(40, Fault::None), &trace, 2);
    assert!(outcome.tally.preempted > 0);
    let refusal = outcome.first_refusal.unwrap();
    assert!(refusal.used > 0.8 && refusal.owned <= refusal.used);
    assert!((1..=outcome.peak_tokens).contains(&refusal.tokens), "{outcome:?}");
}

/// Three requests of 11 blocks at a time fill a third of the pool. Those of the second and third
/// round count: the first fills the pool, and no request waits for the end of the last.
#[test]
fn a_closed_loop_begins_requests_by_use_and_counts_while_it_is_steady() {
    let trace = trace((0..12).map(|hour| Request::new(Duration::from_secs(3600 * hour), 160, 16)));
    let options = Options { fill: Some(33), free_list: true, ..Options::new(&trace, 1) };
    let Outcome { tally, list_added, .. } = replay(&pool(100, Fault::None), &trace, &options, go_on);
    assert_eq!((tally.completed, tally.preempted, tally.refused, list_added), (12, 0, 0, Some(0)));
    assert_eq!((tally.tables.per_sequence.count(), tally.tables.blocks), (6, 66));
    // After the prompts 30 blocks, then 33 in 15 steps, and none after the last.
    let mean = (30.0 + 15.0 * 33.0) / 17.0 / 100.0;
    assert!((tally.utilization.mean() - mean).abs() < 1e-9, "{} {mean}", tally.utilization.mean());
    // The list: ten blocks for each prompt in turn, one more for each, and all back in reverse:
    // blocks 0-9 30, 10-19 31, 20-29 32 are followed by 33-42 63, 43-52 64, 53-62 65, and these by
    // 66-75 96, 76-85 97, 86-95 98.
    assert_eq!((tally.listed.blocks, tally.listed.runs), (66, 12));
    assert_eq!([0.5, 0.99].map(|share| tally.listed.per_sequence.at(share)), [2, 2]);
}

#[test]
fn a_replay_of_nothing_is_not_sound() {
    let outcome = run(&pool(60, Fault::None), &Trace { requests: vec![], ..crowd(1) }, 2);
    assert_eq!(outcome.tally.findings, ["nothing was replayed: no request was completed"]);
    assert!(!outcome.is_sound(0));
}

/// The outcome covers all work done, and the threads read back their open sequences.
#[test]
fn a_replay_is_interrupted() {
    let trace = crowd(20_000);
    for threads in [1, 3] {
        for pool in [pool, caching] {
            let pool = pool(200, Fault::None);
            let mut breaks = 0;
            let outcome = replay(&pool, &trace, &Options::new(&trace, threads), |progress| {
                let is_enough = progress.settled > 0;
                breaks += u32::from(is_enough);
                if is_enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            assert!(breaks > 0 && outcome.interrupted, "{outcome:?}");
            assert!(outcome.is_sound(20_000), "{outcome:?}");
            assert!(outcome.tally.completed > 0 && outcome.tally.completed < 20_000);
            assert_eq!(pool.free_blocks(), 200);
        }
    }
    // An interrupt before the first completion is neither a success nor a fault.
    let options = Options::new(&trace, 1);
    let outcome = replay(&pool(200, Fault::None), &trace, &options, |_| ControlFlow::Break(()));
    assert!(outcome.interrupted && outcome.is_intact(), "{outcome:?}");
    assert_eq!(outcome.is_sound(20_000), outcome.tally.completed > 0);
    // A complete replay is not interrupted.
    let trace = crowd(5);
    let outcome = replay(&pool(200, Fault::None), &trace, &Options::new(&trace, 1), |progress| {
        if progress.settled == 5 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(!outcome.interrupted && outcome.is_sound(5), "{outcome:?}");
}

#[test]
fn without_verification_nothing_is_read() {
    let trace = crowd(50);
    let options = Options { verify: false, ..Options::new(&trace, 2) };
    let outcome = replay(&pool(60, Fault::WrongFrame), &trace, &options, go_on);
    assert!(outcome.is_sound(50));
    assert_eq!(outcome.tally.tokens_verified, 0);
}

#[test]
fn one_fault_anywhere_is_found() {
    let trace = crowd(100);
    for fault in [Fault::FlippedBit, Fault::DoubleOwner, Fault::LostStore, Fault::WrongFrame] {
        for threads in [1, 2] {
            for pool in [pool, caching] {
                let outcome = run(&pool(60, fault), &trace, threads);
                assert!(!outcome.tally.corrupt.is_empty(), "{fault:?} went unnoticed: {outcome:?}");
                assert!(!outcome.is_sound(100));
            }
        }
    }
    let leaking = pool(60, Fault::None);
    let _leaked = leaking.allocate(AllocRequest::new(1)).unwrap();
    let outcome = run(&leaking, &trace, 2);
    assert_eq!((outcome.blocks_leaked, outcome.is_sound(100)), (1, false));
    assert!(outcome.tally.findings[0].starts_with("not every block can be allocated"), "{outcome:?}");
}

/// A pool of groups that holds a few requests serves all of them, and a fault in any list is found.
#[test]
fn groups_are_served_and_verified() {
    let trace = crowd(100);
    for threads in [1, 2, 3] {
        for eviction in [None, Some(LRU)] {
            for blocks in [40, 100] {
                let outcome = run(&grouped(blocks, eviction, Fault::None), &trace, threads);
                assert!(outcome.is_sound(100), "{blocks} blocks, {threads} threads: {outcome:?}");
                assert_eq!(outcome.tally.completed, 100);
                assert!(outcome.tally.refused > 0 && outcome.peak_tokens > 0, "{outcome:?}");
                let [window, all] = &outcome.tally.groups[..] else { panic!("{outcome:?}") };
                assert!(window.given_up > 0 && all.given_up == 0, "{outcome:?}");
            }
            for fault in [Fault::FlippedBit, Fault::DoubleOwner, Fault::LostStore, Fault::WrongFrame] {
                let outcome = run(&grouped(100, eviction, fault), &trace, threads);
                assert!(!outcome.tally.corrupt.is_empty(), "{fault:?} went unnoticed: {outcome:?}");
                assert!(!outcome.is_sound(100));
            }
        }
    }
}

/// A pool of a layer with a state of 17 frames, and one that keeps all tokens.
fn stateful(blocks: usize, eviction: Option<Eviction>, fault: Fault) -> ReplayPool {
    let row = Row::Heads { kv_heads: 1, k_dim: 4, v_dim: 4 };
    let state = LayerCache { row: Row::Bytes { bytes: 17 * 256, side_bytes: 0 }, reach: Reach::State };
    let layers = [vec![state], vec![LayerCache::all(row)]];
    let layers = Layers::Groups(LayerGroups::of_layers(&layers, GroupOptions::new()).unwrap());
    let calls = if fault == Fault::LostCopy { 0 } else { 40 };
    let pool = faulty_in(&layers, (blocks, blocks), eviction, fault, calls);
    assert_eq!((pool.lists().count(), pool.lists().state_frames()), (1, 17));
    pool
}

/// States are kept at the cuts of prompts, and found again only behind the same tokens.
#[test]
fn states_are_served_and_verified() {
    let mut trace = crowd(100);
    for (index, request) in (0..).zip(&mut trace.requests) {
        (request.hash_ids, request.hashed_tokens) = (vec![index % 5], request.input_tokens);
        // A few run at once, so that most find what an earlier one with their tokens has left.
        request.arrival = Duration::from_millis(500 * index);
    }
    for threads in [1, 2, 3] {
        for eviction in [None, Some(LRU)] {
            for blocks in [80, 400] {
                let outcome = run(&stateful(blocks, eviction, Fault::None), &trace, threads);
                assert!(outcome.is_sound(100), "{blocks} blocks, {threads} threads: {outcome:?}");
                let tally = &outcome.tally;
                assert_eq!(tally.completed, 100);
                assert_eq!(tally.checkpoints > 0, eviction.is_some(), "{outcome:?}");
                // The small pool evicts what a request leaves before the next with its tokens.
                assert!(blocks == 80 || (tally.hit_blocks > 0) == eviction.is_some(), "{outcome:?}");
            }
            for fault in [Fault::FlippedBit, Fault::DoubleOwner, Fault::LostStore, Fault::WrongFrame] {
                let outcome = run(&stateful(200, eviction, fault), &trace, threads);
                assert!(!outcome.tally.corrupt.is_empty(), "{fault:?} went unnoticed: {outcome:?}");
            }
        }
        let pool = stateful(1000, Some(LRU), Fault::LostCopy);
        let outcome = run(&pool, &trace, threads);
        let in_states = |corrupt: &Corrupt| corrupt.list >= pool.lists().count();
        assert!(outcome.tally.corrupt.iter().any(in_states), "{outcome:?}");
        assert!(outcome.tally.corrupt.iter().all(in_states), "{outcome:?}");
    }
}

/// Other threads do not wait forever for the blocks of a dead thread.
#[test]
fn a_thread_that_panics_is_a_finding() {
    for threads in [1, 3] {
        let outcome = run(&pool(60, Fault::Panic), &crowd(100), threads);
        assert_eq!(outcome.tally.findings[0], "a scheduler thread panicked: on purpose");
        assert!(!outcome.is_sound(100));
    }
}

#[test]
fn one_thread_is_deterministic() {
    let trace = Generated::Conversations.trace(3, 120);
    let blocks = blocks_for(&trace.requests, |tokens| SHAPE.blocks(tokens)) / 2;
    let counts = || {
        let tally = run(&pool(blocks, Fault::None), &trace, 1).tally;
        (tally.tokens, tally.tokens_verified, tally.preempted, tally.blocks_allocated, tally.tables.runs)
    };
    let first = counts();
    assert!(first.2 > 0, "no preemption at half of the derived size");
    // Tables of preempted requests count as runs, but not per sequence.
    let sum = |tally: &Tally| tally.completed as f64 * tally.tables.per_sequence.mean();
    let tally = run(&pool(blocks, Fault::None), &trace, 1).tally;
    assert!(sum(&tally) < tally.tables.runs as f64 - 0.5, "{} of {}", sum(&tally), tally.tables.runs);
    assert_eq!(first, counts());
}

/// The cached part of a prompt is neither written nor charged, but read back like the rest.
#[test]
fn prefixes_are_found_again_and_verified() {
    let trace = Generated::Conversations.trace(3, 120);
    let blocks = 2 * blocks_for(&trace.requests, |tokens| SHAPE.blocks(tokens));
    let all: u64 = trace.requests.iter().map(Request::tokens).sum();
    for threads in [1, 2, 3] {
        let outcome = run(&caching(blocks, Fault::None), &trace, threads);
        assert!(outcome.is_sound(120), "{outcome:?}");
        let tally = &outcome.tally;
        assert_eq!((tally.completed, tally.preempted), (120, 0));
        let full: u64 = trace.requests.iter().map(|request| u64::from(request.input_tokens / 16)).sum();
        assert_eq!((tally.lookup_blocks, tally.resumed_lookup_blocks), (full, 0));
        assert!(tally.hit_blocks > full / 4, "{} of {full}", tally.hit_blocks);
        assert_eq!(tally.tokens + 16 * tally.hit_blocks, all);
        assert!(tally.tokens_verified > all);
    }
}

/// A preempted request finds its own blocks again, and the blocks of other requests that it finds
/// are right.
#[test]
fn a_preempted_request_finds_its_blocks_again() {
    let strangers = crowd(120);
    let mut friends = crowd(120);
    for (index, request) in (0..).zip(&mut friends.requests) {
        (request.hash_ids, request.hashed_tokens) = (vec![index % 5], request.input_tokens);
    }
    for (trace, is_shared) in [(strangers, false), (friends, true)] {
        for threads in [1, 2, 3] {
            let outcome = run(&caching(40, Fault::None), &trace, threads);
            assert!(outcome.is_sound(120), "{threads} threads: {:?}", outcome.tally.findings);
            let tally = &outcome.tally;
            assert!(tally.preempted > 0 && tally.resumed_lookup_blocks > 0);
            assert!(tally.resumed_hit_blocks <= tally.resumed_lookup_blocks);
            assert_eq!(tally.hit_blocks > 0, is_shared);
            // With one thread it returns before others have taken all of its blocks.
            assert!(threads > 1 || tally.resumed_hit_blocks > 0);
        }
    }
}

/// An overwritten cached block is found by the request that hits it.
#[test]
fn a_wrong_hit_is_found() {
    let request = |second| Request {
        hash_ids: vec![7],
        hashed_tokens: 64,
        ..Request::new(Duration::from_secs(second), 64, 20)
    };
    let trace = trace([request(0), request(1000)]);
    // With two layers, the first request stores its prompt and 20 tokens.
    let outcome = run(&faulty(60, 60, Some(LRU), Fault::DoubleOwner, 42), &trace, 1);
    assert_eq!(outcome.tally.hit_blocks, 3, "{outcome:?}");
    let hits = [0, 1, 2].map(|block| Corrupt { request: 1, attempt: 0, list: 0, block });
    assert_eq!(outcome.tally.corrupt, hits.into());
}

#[test]
fn a_miscount_of_the_cache_is_found() {
    let outcome = run(&caching(60, Fault::None), &crowd(100), 1);
    let mut tally = outcome.tally;
    let mut stats = PrefixStats::default();
    (stats.lookup_blocks, stats.hit_blocks) =
        (tally.lookup_blocks + tally.resumed_lookup_blocks, tally.resumed_hit_blocks + tally.hit_blocks);
    assert_eq!(miscounts(&tally, &stats), None);
    tally.hit_blocks += 1;
    assert!(miscounts(&tally, &stats).unwrap().starts_with("the cache counted "));
}

fn resizing(trace: &Trace, threads: usize, schedule: &str) -> Options {
    Options { schedule: schedule.parse().unwrap(), ..Options::new(trace, threads) }
}

/// A request that no longer fits is rejected, running or waiting.
#[test]
fn a_pool_that_has_become_too_small_rejects() {
    // The second one runs when the third arrives, which does not fit beside it.
    let requests = [(0, 20, 1), (0, 40, 500), (2, 610, 0), (2, 20, 1)];
    let request = |(at, input, output)| Request::new(Duration::from_secs(at), input, output);
    let trace = trace(requests.map(request));
    for threads in [1, 2] {
        let pool = faulty(40, 40, None, Fault::Slow, 0);
        let outcome = replay(&pool, &trace, &resizing(&trace, threads, "1%:20"), go_on);
        assert!(outcome.is_sound(4), "{outcome:?}");
        let ended = (pool.total_blocks(), outcome.tally.completed, outcome.tally.rejected);
        if threads == 1 {
            assert!(ended == (20, 2, 2) && outcome.tally.preempted > 0, "{outcome:?}");
        } else {
            // With two threads on a loaded machine, the third one may be admitted before the
            // second, or the second come back before the pool has shrunk: then one of them ends.
            assert!([(20, 2, 2), (20, 3, 1)].contains(&ended), "{outcome:?}");
        }
    }
}

#[test]
fn a_failure_of_resizing_or_compaction_is_a_finding() {
    let trace = crowd(300);
    let outcome = replay(&pool(60, Fault::None), &trace, &resizing(&trace, 2, "10%:61"), go_on);
    let [finding] = &outcome.tally.findings[..] else { panic!("{outcome:?}") };
    assert!(finding.starts_with("a resize failed: ") && !outcome.is_sound(100), "{finding}");
    let compaction = Some(Compaction { threshold: 0.0, interval: Duration::from_millis(1) });
    let options = Options { compaction, ..Options::new(&trace, 2) };
    let outcome = replay(&pool(400, Fault::Copy), &trace, &options, go_on);
    let [finding] = &outcome.tally.findings[..] else { panic!("{outcome:?}") };
    assert!(finding.ends_with(" runs ended because a copy failed"), "{finding}");
    assert!(finding.starts_with("compaction: ") && !outcome.is_sound(100), "{finding}");
}

/// At a share of the requests all threads halt once and keep their sequences; then the replay ends.
#[test]
fn a_replay_halts_for_inspection() {
    let trace = crowd(300);
    for threads in [1, 2, 3] {
        let options = Options { halt_at: Some("40%".parse().unwrap()), ..Options::new(&trace, threads) };
        let pool = pool(200, Fault::None);
        let mut looks = Vec::new();
        let outcome = replay(&pool, &trace, &options, |progress| {
            if progress.is_halted {
                looks.push((progress.settled, pool.free_blocks()));
                thread::sleep(Duration::from_millis(5));
                assert_eq!(pool.free_blocks(), looks[0].1, "nothing changes meanwhile");
            }
            ControlFlow::Continue(())
        });
        assert!(outcome.is_intact() && !outcome.is_sound(300), "{outcome:?}");
        assert_eq!(looks.len(), 1);
        let (settled, free) = looks[0];
        assert!((120..300).contains(&settled) && free < 200, "{looks:?}");
        assert_eq!(outcome.tally.completed, settled);
    }
}

/// A fault that only the last reading of a halted replay can detect is found.
#[test]
fn the_sequences_of_a_halted_replay_are_read_back() {
    let trace = crowd(300);
    let options = Options { halt_at: Some("40%".parse().unwrap()), ..Options::new(&trace, 2) };
    let pool = pool(200, Fault::None);
    let outcome = replay(&pool, &trace, &options, |progress| {
        if progress.is_halted {
            let slots: Vec<i64> = (0..201 * SHAPE.block_tokens as i64).collect();
            let wrong = vec![0xA5; slots.len() * SHAPE.k_bytes];
            pool.rows().store(1, &wrong, &wrong, &slots).unwrap();
        }
        ControlFlow::Continue(())
    });
    assert!(!outcome.tally.corrupt.is_empty() && !outcome.is_intact());
}
