//! Real threads that admit, decode, fork and drop prompts of one tree, in a pool that holds a third
//! of it. Meanwhile blocks move, the cache is cleared, the pool is resized, other requests want
//! runs, wait and give up, and steps of the engine panic. A read returns what was stored for the
//! token *and all tokens before it*.
//!
//! `KVPOOL_SEED=<seed>` repeats the threads' random choices (the schedule is up to the machine);
//! `KVPOOL_STRESS_SECONDS=<seconds>` makes the test longer.
#![cfg(not(any(kvpool_loom, miri)))]

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use kvpool::compact::{DefragConfig, DefragOptions, ResizeError, ResizeOptions};
use kvpool::prefix::policy::{CachePriority, PolicyKind};
use kvpool::prefix::{Hashing, PrefixConfig, PrefixKeys};
use kvpool::storage::{Dtype, KvLayout};
use kvpool::{
    AllocError, AllocRequest, Batch, Lease, Order, Pool, Priority, Sequence, SequenceError, SequenceId,
    Tokens,
};
use kvpool_testkit::threads;

const BLOCKS: usize = 300;
const BLOCK_TOKENS: usize = 4;
const HEAD_DIM: usize = 4;

/// Longer than any wait in this file.
const LIMIT: Duration = Duration::from_secs(60);

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Message of a step's intended panic.
struct Meant;

/// Returns a part of a prompt of the tree, number `kind` on its level: the same each time.
fn part(level: u32, kind: u32) -> impl Iterator<Item = u32> {
    let mut rng = Rng::with_seed(u64::from(level) << 32 | u64::from(kind));
    let tokens = rng.usize(20..90);
    (0..tokens).map(move |_| rng.u32(..50))
}

/// Returns a path down the tree, possibly extended.
fn some_prompt(rng: &mut Rng) -> Vec<u32> {
    let (root, branch) = (rng.u32(..5), rng.u32(..5));
    let mut prompt: Vec<u32> = part(0, root).collect();
    if rng.u8(..8) > 0 {
        prompt.extend(part(1 + root, branch));
    }
    let rest = rng.usize(..12);
    prompt.extend((0..rest).map(|_| rng.u32(..3)));
    prompt
}

const SALTS: [&[u8]; 3] = [b"", b"red", b"blue"];

/// Returns the value stored for a token: it depends on the salt and all tokens before it.
fn value(state: &mut u64, token: u32) -> f32 {
    *state = (*state ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    (*state >> 41) as f32
}

/// A sequence, and its tokens.
struct Written {
    real: Sequence,
    tokens: Vec<u32>,
    salt: usize,
}

impl Written {
    fn values(&self) -> Vec<f32> {
        let mut state = self.salt as u64 + 1;
        self.tokens.iter().map(|&token| value(&mut state, token)).collect()
    }

    fn store(&mut self, batch: &mut Batch, tokens: Range<usize>) {
        let k: Vec<f32> = self.values()[tokens.clone()].iter().flat_map(|&is| [is; HEAD_DIM]).collect();
        let v: Vec<f32> = k.iter().map(|k| -k).collect();
        batch.store(&mut self.real, 0, tokens, (&k).into(), (&v).into()).unwrap();
    }

    fn check(&self, pool: &Pool) {
        let len = self.real.len();
        let (mut k, mut v) = (vec![0.0_f32; len * HEAD_DIM], vec![0.0_f32; len * HEAD_DIM]);
        let mut batch = pool.begin_batch();
        batch.load(&self.real, 0, 0..len, (&mut k).into(), (&mut v).into()).unwrap();
        let (k, v) = (k.as_chunks::<HEAD_DIM>().0, v.as_chunks::<HEAD_DIM>().0);
        for (token, &is) in self.values()[..len].iter().enumerate() {
            let id = self.real.id();
            assert_eq!(
                (k[token], v[token]),
                ([is; HEAD_DIM], [-is; HEAD_DIM]),
                "token {token} of {len} of {id}"
            );
        }
    }
}

/// State shared by the threads.
struct Stage {
    pool: Pool,
    stop: AtomicBool,
    ids: AtomicUsize,
    served: AtomicUsize,
    runs: AtomicUsize,
    waited: AtomicUsize,
    sizes: AtomicUsize,
}

impl Stage {
    fn new_id(&self) -> SequenceId {
        SequenceId(self.ids.fetch_add(1, Relaxed) as u64)
    }

    fn open(&self, rng: &mut Rng) -> Written {
        let (tokens, salt) = (some_prompt(rng), rng.usize(..SALTS.len()).saturating_sub(rng.usize(..2)));
        let mut builder = self.pool.sequence(self.new_id()).keep(CachePriority::ALL[rng.usize(..3)]);
        if salt > 0 {
            builder = builder.keys(PrefixKeys::new().salt(SALTS[salt]));
        }
        if rng.bool() {
            builder = builder.reuse_tail();
        }
        let real = builder.tokens(&tokens).unwrap();
        assert!(real.len() < tokens.len(), "the last token must be computed");
        let written = Written { real, tokens, salt };
        written.check(&self.pool);
        written
    }

    /// Runs one step: the rest of the prompt in chunks, then single tokens, or drafts of which some
    /// are committed. `None`: there are no blocks.
    fn step(&self, written: &mut Written, late: &mut Vec<Batch>, rng: &mut Rng) -> Option<()> {
        let mut batch = self.pool.begin_batch();
        let (from, prompt) = (written.real.len(), written.tokens.len());
        let appended = if from < prompt {
            let count = rng.usize(1..=prompt - from);
            batch.append(&mut written.real, count)
        } else if rng.u8(..4) > 0 {
            let more: Vec<u32> = (0..rng.usize(1..6)).map(|_| rng.u32(..3)).collect();
            written.tokens.extend(&more);
            batch.append(&mut written.real, &more)
        } else {
            written.tokens.extend((0..5).map(|_| rng.u32(..3)));
            batch.append(&mut written.real, Tokens::Draft(5))
        };
        match appended {
            Ok(appended) => {
                if rng.u8(..100) == 0 {
                    resume_unwind(Box::new(Meant));
                }
                let is_draft = appended.tokens.end > written.real.committed();
                written.store(&mut batch, appended.tokens);
                if is_draft {
                    let kept = from + rng.usize(..=5);
                    if rng.bool() {
                        // The engine knows the accepted drafts when its step has ended.
                        batch.finish();
                        batch = self.pool.begin_batch();
                    }
                    written.real.announce(&written.tokens[from..kept]).unwrap();
                    written.real.commit(kept).unwrap();
                    written.real.truncate(kept).unwrap();
                    written.tokens.truncate(kept);
                }
            }
            Err(SequenceError::Alloc(
                AllocError::Exhausted { .. } | AllocError::Behind { .. } | AllocError::TooLarge { .. },
            )) => {
                written.tokens.truncate(prompt);
                return None;
            }
            Err(error) => panic!("{error}"),
        }
        if rng.u8(..3) == 0 {
            late.push(batch);
        } else {
            batch.finish();
        }
        Some(())
    }

    /// Sequences open, grow, fork, are truncated, and close.
    fn serve(&self, mut rng: Rng) {
        let (mut open, mut late): (Vec<Written>, Vec<Batch>) = (Vec::new(), Vec::new());
        while !self.stop.load(Relaxed) {
            let many = open.len();
            match rng.u8(..20) {
                0..4 if many < 6 => open.push(self.open(&mut rng)),
                0..15 if many > 0 => {
                    let mut written = open.swap_remove(rng.usize(..many));
                    // A panic takes its sequence and its batch along.
                    match catch_unwind(AssertUnwindSafe(|| {
                        let outcome = self.step(&mut written, &mut late, &mut rng);
                        (written, outcome)
                    })) {
                        Ok((written, Some(()))) => open.push(written),
                        Ok((written, None)) => {
                            written.check(&self.pool);
                            late.drain(..).for_each(Batch::finish);
                        }
                        Err(cause) if cause.is::<Meant>() => {}
                        Err(cause) => resume_unwind(cause),
                    }
                    self.served.fetch_add(1, Relaxed);
                }
                15 if many > 0 && many < 8 => {
                    let written = &open[rng.usize(..many)];
                    let real = written.real.fork(self.new_id()).unwrap();
                    open.push(Written { real, tokens: written.tokens.clone(), ..*written });
                }
                16 if many > 0 => {
                    let written = &mut open[rng.usize(..many)];
                    // To a block boundary: the tokens of a partly truncated block are unknown.
                    let length = rng.usize(..=written.real.len()) / BLOCK_TOKENS * BLOCK_TOKENS;
                    if length < written.real.len() {
                        written.real.truncate(length).unwrap();
                        written.tokens.truncate(length);
                    }
                }
                17 if !late.is_empty() => late.swap_remove(rng.usize(..late.len())).finish(),
                18 if many > 0 => open[rng.usize(..many)].check(&self.pool),
                _ if many > 2 => open.swap_remove(rng.usize(..many)).check(&self.pool),
                _ => {}
            }
            if late.len() > 4 {
                late.drain(..).for_each(Batch::finish);
            }
        }
        open.iter().for_each(|written| written.check(&self.pool));
    }

    /// Writes to every frame that it gets.
    fn scribble(&self, lease: &Lease<'_>) {
        let runs: Vec<_> = lease.runs().collect();
        let bytes = vec![0xee; self.pool.layout().packed_bytes() * lease.blocks().len()];
        // SAFETY: the blocks belong to this lease and are open, so that they do not move.
        unsafe { self.pool.storage().unwrap().unpack(&runs, &bytes) }.unwrap();
    }

    /// Compaction runs, and occasional clears of the cache.
    fn want_runs(&self, mut rng: Rng) {
        while !self.stop.load(Relaxed) {
            let mut request = AllocRequest::new(rng.usize(1..30));
            request.contiguous = rng.u8(..4) > 0;
            match self.pool.allocate(request) {
                Ok(lease) => {
                    self.scribble(&lease);
                    self.runs.fetch_add(1, Relaxed);
                }
                Err(
                    AllocError::Exhausted { .. } | AllocError::NoRun { .. } | AllocError::TooLarge { .. },
                ) => {}
                Err(error) => panic!("{error}"),
            }
            if rng.u8(..40) == 0 {
                self.pool.clear_prefix_cache();
            }
            thread::sleep(Duration::from_micros(rng.u64(..1000)));
        }
    }

    /// Waiting requests, with deadlines, and dropped futures.
    async fn wait(&self, mut rng: Rng) {
        while !self.stop.load(Relaxed) {
            let mut request = AllocRequest::new(rng.usize(1..60));
            request.contiguous = rng.bool();
            request.priority = [Priority::Normal, Priority::High, Priority::Urgent][rng.usize(..3)];
            let until = Instant::now() + Duration::from_micros(rng.u64(..20_000));
            match self.pool.allocate_async(request).until(until).await {
                Ok(lease) => {
                    self.scribble(&lease);
                    self.waited.fetch_add(1, Relaxed);
                }
                Err(AllocError::Deadline { .. }) => {}
                Err(error) => panic!("{error}"),
            }
            let soon = Duration::from_micros(rng.u64(..500));
            let _ = tokio::time::timeout(soon, self.pool.allocate_async(request)).await;
        }
    }

    /// Resizes, repeatedly.
    async fn resize(&self, mut rng: Rng) {
        while !self.stop.load(Relaxed) {
            let blocks = rng.usize(BLOCKS * 2 / 3..=BLOCKS);
            let options = ResizeOptions::new().patience(Duration::from_millis(rng.u64(..20)));
            let moves = DefragOptions::new().wave_bytes(rng.usize(1..4_000));
            match self.pool.resize_with(blocks, options.moves(moves)).await {
                Ok(_) => drop(self.sizes.fetch_add(1, Relaxed)),
                Err(
                    ResizeError::NoRoom { .. } | ResizeError::NoTurn { .. } | ResizeError::Blocked { .. },
                ) => {}
                Err(error) => panic!("{error}"),
            }
            tokio::time::sleep(Duration::from_micros(rng.u64(..5_000))).await;
        }
    }
}

fn everything_at_once(what: &str, config: PrefixConfig, hits_min: u64) {
    let seed = number("KVPOOL_SEED").unwrap_or_else(|| fastrand::u64(..));
    eprintln!("{what}: KVPOOL_SEED={seed}");
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(HEAD_DIM).block_tokens(BLOCK_TOKENS);
    let builder = Pool::builder(layout.dtype(Dtype::F32).build().unwrap()).blocks(BLOCKS).segment_blocks(64);
    let pool = builder.threads(4).reserve(8).prefix_cache(config).build().unwrap();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build().unwrap();
    let config = DefragConfig::new().threshold(0.01).interval(Duration::from_millis(1));
    let config = config.moves(DefragOptions::new().order(Order(3)).wave_bytes(3_000));
    let task = runtime.block_on(async { pool.start_defragmenter(config) }).unwrap();
    let count = || AtomicUsize::new(0);
    let stage = Stage {
        pool: pool.clone(),
        stop: AtomicBool::new(false),
        ids: AtomicUsize::new(1),
        served: count(),
        runs: count(),
        waited: count(),
        sizes: count(),
    };
    let seconds = number("KVPOOL_STRESS_SECONDS").unwrap_or(2);
    let stats = || pool.prefix_cache().unwrap().stats();
    let is_enough = |of: Duration| {
        let counts =
            [&stage.served, &stage.runs, &stage.waited, &stage.sizes].map(|count| count.load(Relaxed));
        let is_all = counts.iter().all(|&count| count > 2) && stats().hit_blocks >= hits_min;
        of > LIMIT || of > Duration::from_secs(seconds) && is_all && task.totals().moved_blocks > 0
    };
    threads::scope(|scope| {
        let (stage, rng) = (&stage, |thread: u64| Rng::with_seed(seed ^ thread << 40));
        let threads: Vec<_> = (0..2)
            .map(|thread| scope.spawn(move || stage.serve(rng(thread))))
            .chain([scope.spawn(move || stage.want_runs(rng(2)))])
            .collect();
        let stopwatch = async {
            let begun = Instant::now();
            while !is_enough(begun.elapsed()) && threads.iter().all(|thread| !thread.is_finished()) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            stage.stop.store(true, Relaxed);
        };
        let all = async { tokio::join!(stage.wait(rng(3)), stage.resize(rng(4)), stopwatch) };
        // Stops the others, also by a panic.
        let outcome = catch_unwind(AssertUnwindSafe(|| runtime.block_on(all)));
        stage.stop.store(true, Relaxed);
        outcome.unwrap_or_else(|cause| resume_unwind(cause));
    });
    let totals = runtime.block_on(task.stop());
    let counts = [&stage.served, &stage.runs, &stage.waited, &stage.sizes].map(|count| count.load(Relaxed));
    println!("{what}: {counts:?} served, runs, waited, sizes; {:?}; {totals:?}", stats());
    assert!(counts.iter().all(|&count| count > 2) && totals.moved_blocks > 0 && stats().evicted_blocks > 0);
    assert!(stats().hit_blocks >= hits_min);
    // The last copy may be on a thread of the runtime, and ends with it.
    drop(runtime);
    // A shrink may have taken frames from the reserve after the last free; the next one tops it up.
    drop(pool.allocate(AllocRequest::new(1)).unwrap());
    let report = pool.audit().unwrap();
    assert_eq!((report.owned, report.held, report.reserved), (0, 0, 8), "{report:?}");
    assert_eq!((pool.available_blocks() + 8, pool.stats().waiting), (pool.total_blocks(), 0));
    drop(pool.allocate(AllocRequest::new(pool.available_blocks())).unwrap());
    assert_eq!(pool.audit().unwrap().evictable, 0);
}

#[test]
fn least_recently_used() {
    everything_at_once("lru", PrefixConfig::new(), 100);
}

#[test]
fn by_priority() {
    everything_at_once("priority", PrefixConfig::new().policy(PolicyKind::Priority), 100);
}

/// Every key is equal, so two buckets of the index are all there is: it forgets nearly every block,
/// and the check must tell the rest apart.
#[test]
fn all_keys_alike() {
    everything_at_once("weak", PrefixConfig::new().hashing(Hashing::Weak { mask: 0 }), 1);
}
