//! Prefix reuse by whole engines: kvpool compared with an exact LRU and with a radix tree, each
//! behind a mutex.
//!
//! ```text
//! admit     prompts of 1,000 tokens: the admission, and the whole request; one thread, two, and
//!           more where there are cores
//! look-up   a cached prompt of 8,000 tokens
//! evict     a block, one by one and 64 at once, in pools of three sizes, cached for prompts of one
//!           block and of 62; two threads against one
//! single    blocks of one token: long prompts
//! events    a whole request that stores and evicts 62 blocks, with subscribers of the events
//! weights   a change of the version of the weights in a full cache, and a cached prompt of 1,000
//!           tokens at version 0 and at another one
//! hints     hints about a session of 10,000 blocks, and single blocks that another thread
//!           allocates beside them and without
//! tenants   a request of 64 blocks and single blocks, each evicting as many, in a pool full of the
//!           cached blocks of 64 tenants with floors, of one, and without
//! ```
//!
//! An argument selects one of them. Subjects take turns, round by round; each figure is the minimum
//! and the median over the rounds, each of admissions and evictions the mean of its undisturbed
//! calls, and in brackets stands the median of the rounds' ratios to
//! kvpool: above 1, the other takes longer (for a rate: does more). Threads that run at once are
//! pinned to one core each.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use kvpool::hints::{Action, Hint, HintLimits, Outcome, Target};
use kvpool::prefix::policy::CachePriority;
use kvpool::prefix::{HashKey, KvEvents, PrefixConfig};
use kvpool::storage::{Dtype, KvLayout};
use kvpool::tenants::TenantLimits;
use kvpool::{AdmitRequest, AllocRequest, Pool, SequenceId, SessionId, TenantId, Tokens, WeightsVersion};
use kvpool_benches::report::median;
use kvpool_benches::reuse::{
    Case, Engine, Figures, Full, Kvpool, Locked, Prompts, Radix, Requests, Turns, Worker, verify, verify_hits,
};
use kvpool_benches::threads;

const BLOCKS: usize = 65_536;
const ROUNDS: usize = 31;
const TURNS: Turns<3> = Turns::new([Kvpool::NAME, Locked::NAME, Radix::NAME]);

fn admit() {
    for threads in threads::counts(16) {
        TURNS.head(&format!("admit 1000 tokens, {threads} threads"));
        for (name, prompts, is_full) in [
            ("cached", Prompts::Own, false),
            ("cached, the same prompt", Prompts::Same, false),
            ("not cached", Prompts::Fresh, false),
            ("not cached, evicting", Prompts::Fresh, true),
            ("half cached, evicting", Prompts::Half, true),
        ] {
            let case = Case { prompts, threads, tokens: 1_000, blocks: BLOCKS, block_tokens: 16, is_full };
            if threads == 1 && prompts == Prompts::Same {
                continue;
            }
            let (ours, locked) = (Requests::<Kvpool>::new(case), Requests::<Locked>::new(case));
            let tree = Requests::<Radix>::new(case);
            let lines = ["admission, us", "whole request, us", "requests per ms"];
            let lines = lines.map(|line| format!("{name}: {line}"));
            let figures = |Figures { admission, request, rate }| [admission, request, rate];
            TURNS.measure(
                ROUNDS,
                lines.each_ref().map(String::as_str),
                [&mut || figures(ours.round()), &mut || figures(locked.round()), &mut || {
                    figures(tree.round())
                }],
            );
        }
    }
}

fn look_up() {
    TURNS.head("look up a cached prompt, hashing included");
    for tokens in [1_001, 8_001] {
        let case = Case {
            prompts: Prompts::Own,
            threads: 1,
            tokens,
            blocks: BLOCKS,
            block_tokens: 16,
            is_full: false,
        };
        let (ours, locked) = (Requests::<Kvpool>::new(case), Requests::<Locked>::new(case));
        let tree = Requests::<Radix>::new(case);
        let line = format!("{tokens} tokens, us");
        TURNS.measure(
            ROUNDS,
            [&line],
            [&mut || [ours.look_ups()], &mut || [locked.look_ups()], &mut || [tree.look_ups()]],
        );
    }
}

fn evict_by_two(blocks: usize, ours: &mut Full<Kvpool>, locked: &mut Full<Locked>, tree: &mut Full<Radix>) {
    let lines = ["one thread", "two threads, ns/block of each", "two threads: times the throughput"];
    let lines = lines.map(|line| format!("{blocks} blocks, 64 at once, {line}"));
    TURNS.measure(
        15,
        lines.each_ref().map(String::as_str),
        [&mut || ours.evict_by_two(blocks), &mut || locked.evict_by_two(blocks), &mut || {
            tree.evict_by_two(blocks)
        }],
    );
}

fn evict() {
    for prompt in [1, 62] {
        TURNS.head(&format!("evict prompts of {prompt} blocks, ns/block"));
        evict_prompts(prompt);
    }
}

fn evict_prompts(prompt: usize) {
    for blocks in [4_096, 65_536, 1_000_000] {
        let mut ours = Full::<Kvpool>::of_prompts(blocks, prompt);
        let mut locked = Full::<Locked>::of_prompts(blocks, prompt);
        let mut tree = Full::<Radix>::of_prompts(blocks, prompt);
        let lines = ["one by one", "64 at once"].map(|line| format!("{blocks} blocks, {line}"));
        TURNS.measure(
            15,
            lines.each_ref().map(String::as_str),
            [&mut || ours.evict(blocks), &mut || locked.evict(blocks), &mut || tree.evict(blocks)],
        );
        if blocks > 4_096 {
            evict_by_two(blocks, &mut ours, &mut locked, &mut tree);
        }
        let unowned = [ours.engine.unowned(), locked.engine.unowned(), tree.engine.unowned()];
        assert_eq!(unowned, [blocks; 3], "lost blocks");
    }
}

/// Returns ns per token of every step in the life of a prompt in blocks of one token, from its
/// first admission to its eviction.
fn life<E: Engine>(engine: &E, tokens: usize) -> [f64; 6] {
    let prompt: Vec<u32> = (0..tokens as u32).collect();
    let mut slots = Vec::with_capacity(tokens);
    let mut worker = engine.worker(0);
    let mut times = [0.0; 6];
    for (admission, cached) in [(0, 0), (3, tokens - 1)] {
        let time = |begin: Instant| begin.elapsed().as_nanos() as f64 / tokens as f64;
        slots.clear();
        worker.begin();
        worker.prepare(&prompt);
        let begin = Instant::now();
        let mut request = worker.admit(&prompt);
        worker.slots(&request, cached..tokens, &mut slots);
        times[admission] = time(begin);
        assert_eq!(<E::Worker<'_> as Worker>::cached(&request), cached, "{}: cached tokens", E::NAME);
        let begin = Instant::now();
        worker.finish(&mut request);
        times[admission + 1] = time(begin);
        let begin = Instant::now();
        worker.end(request);
        if cached == 0 {
            times[admission + 2] = time(begin);
        } else {
            times[admission + 1] += time(begin);
        }
    }
    let begin = Instant::now();
    let blocks = worker.allocate(tokens);
    times[5] = begin.elapsed().as_nanos() as f64 / tokens as f64;
    worker.free(blocks);
    drop(worker);
    engine.clear();
    times
}

/// Returns ns for one more token, with its slot, of a sequence of `tokens` tokens.
fn one_more(tokens: usize) -> f64 {
    let shape = KvLayout::builder().layers(28).kv_heads(4).head_dim(128).dtype(Dtype::Bf16);
    let layout = shape.block_tokens(1).build().expect("a valid layout");
    let pool = Pool::builder(layout).blocks(tokens + 10_000).without_storage();
    let pool = pool.prefix_cache(PrefixConfig::new()).build().expect("a valid pool");
    let prompt: Vec<u32> = (0..tokens as u32).collect();
    let mut sequence = pool.sequence(SequenceId(1)).tokens(&prompt).expect("room for the prompt");
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, tokens).expect("room for the prompt");
    batch.finish();
    let mut slots = Vec::with_capacity(1);
    let mut one = |token: u32| {
        let begin = Instant::now();
        let mut batch = pool.begin_batch();
        slots.clear();
        batch.append(&mut sequence, &[token]).expect("there is room");
        let last = sequence.len() - 1;
        batch.slot_mapping(&sequence, last..last + 1, &mut slots).expect("its own token");
        batch.finish();
        begin.elapsed().as_nanos() as f64
    };
    median((0..4_096).map(&mut one))
}

fn single() {
    TURNS.head("blocks of one token, ns/token");
    for tokens in [1_000, 10_000, 100_000] {
        // The eviction needs the whole pool, and the last token's block of the second admission is
        // new.
        let blocks = tokens + 1;
        let (ours, locked, tree) = (Kvpool::new(blocks, 1), Locked::new(blocks, 1), Radix::new(blocks, 1));
        let lines = ["admit", "register", "close", "admit, cached", "register and close, cached", "evict"];
        let lines = lines.map(|line| format!("{tokens} tokens: {line}"));
        TURNS.measure(
            ROUNDS,
            lines.each_ref().map(String::as_str),
            [&mut || life(&ours, tokens), &mut || life(&locked, tokens), &mut || life(&tree, tokens)],
        );
    }
    for tokens in [1_000, 10_000, 100_000] {
        println!("one more token after {tokens}: {:.0} ns", one_more(tokens));
    }
}

/// A pool, and subscribers that receive the events of each request after it.
struct Followed {
    pool: Pool,
    subscribers: Vec<KvEvents>,
    next: u64,
}

impl Followed {
    fn new(subscribers: usize) -> Self {
        let shape = KvLayout::builder().layers(28).kv_heads(4).head_dim(128).dtype(Dtype::Bf16);
        let layout = shape.block_tokens(16).build().expect("a valid layout");
        let pool = Pool::builder(layout).blocks(1_024).without_storage();
        let pool = pool.prefix_cache(PrefixConfig::new()).build().expect("a valid pool");
        let events = pool.prefix_cache().expect("it has one").events();
        let subscribers = (0..subscribers).map(|_| events.subscribe().expect("a fence")).collect();
        let mut this = Self { pool, subscribers, next: 0 };
        (0..32).for_each(|_| _ = this.request());
        this
    }

    /// Returns us of a request.
    fn request(&mut self) -> f64 {
        self.next += 1;
        let prompt: Vec<u32> = (0..1_000).map(|token| token << 16 | self.next as u32).collect();
        let begin = Instant::now();
        let mut batch = self.pool.begin_batch();
        let mut sequence = self.pool.sequence(SequenceId(self.next)).tokens(&prompt).expect("room");
        batch.append(&mut sequence, prompt.len()).expect("room");
        batch.finish();
        drop(sequence);
        let time = begin.elapsed().as_nanos() as f64 / 1e3;
        for events in &mut self.subscribers {
            let count = std::iter::from_fn(|| events.try_recv()).count();
            assert!(count >= 62, "{count} events of a request that stores 62 blocks");
        }
        time
    }
}

fn events() {
    println!("a whole request of 62 blocks, evicting, with subscribers of the events, us");
    let mut followed = [0, 1, 8, 64].map(Followed::new);
    let rounds: Vec<[f64; 4]> = (0..1_000).map(|_| followed.each_mut().map(Followed::request)).collect();
    for (of, Followed { subscribers, .. }) in followed.iter().enumerate() {
        let times: Vec<f64> = rounds.iter().map(|round| round[of]).collect();
        let least = times.iter().copied().fold(f64::MAX, f64::min);
        println!("{:>3} subscribers {least:8.1} {:8.1}", subscribers.len(), median(times));
    }
}

/// Returns ns of a change to another version and back, and of opening a cached prompt of 1,000
/// tokens before any change and at version 1, in a cache of this many blocks: minima over the
/// rounds.
fn change(blocks: usize) -> [f64; 3] {
    let shape = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).block_tokens(16);
    let pool = Pool::builder(shape.build().expect("a valid layout")).blocks(blocks).without_storage();
    let pool = pool.prefix_cache(PrefixConfig::new()).build().expect("a valid pool");
    let mut prompt: Vec<u32> = (0..1_000).collect();
    let compute = |prompt: &[u32]| {
        let mut sequence = pool.sequence(SequenceId(1)).tokens(prompt).expect("room");
        let mut batch = pool.begin_batch();
        let rest = prompt.len() - sequence.len();
        batch.append(&mut sequence, rest).expect("room");
        batch.finish();
    };
    for number in 0..blocks.div_ceil(62) as u32 {
        prompt[0] = number;
        compute(&prompt);
    }
    let open = |prompt: &[u32]| {
        let least = |_| {
            let begin = Instant::now();
            let sequence = pool.sequence(SequenceId(1)).tokens(prompt).expect("room");
            let time = begin.elapsed().as_nanos() as f64;
            assert_eq!(sequence.len(), 992, "the prompt is cached");
            time
        };
        (0..20_000).map(least).fold(f64::MAX, f64::min)
    };
    let before = open(&prompt);
    let turn = |_| {
        let begin = Instant::now();
        pool.begin_version(WeightsVersion(1)).expect("a cache");
        pool.begin_version(WeightsVersion(0)).expect("a cache");
        begin.elapsed().as_nanos() as f64 / 2.0
    };
    let turns = (0..10_000).map(turn).fold(f64::MAX, f64::min);
    pool.begin_version(WeightsVersion(1)).expect("a cache");
    compute(&prompt);
    [turns, before, open(&prompt)]
}

fn weights() {
    println!("versions of the weights, ns: a change; a cached prompt before any change, at version 1");
    for blocks in [BLOCKS, 1_000_000] {
        let [turn, before, after] = change(blocks);
        println!(
            "{blocks:>9} cached blocks {turn:8.0} {before:8.0} {after:8.0} ({:.3} times)",
            after / before
        );
    }
}

/// Hints about a session of 10,000 blocks, and what one thread's allocations take meanwhile.
fn hints() {
    const SESSION: usize = 10_000;
    let shape = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).block_tokens(16);
    let builder = Pool::builder(shape.build().expect("a valid layout"))
        .blocks(BLOCKS)
        .without_storage()
        .prefix_cache(PrefixConfig::new());
    let pool = builder.hints(HintLimits::new()).build().expect("a pool");
    let run = |id: u64, first: u32, blocks: usize| {
        let prompt: Vec<u32> = (0..(16 * blocks + 1) as u32).map(|token| first ^ token << 8).collect();
        let request = AdmitRequest::new(SequenceId(id), &prompt).session(SessionId(id));
        let mut sequence = pool.admit(&request).expect("room");
        let mut batch = pool.begin_batch();
        let missing = prompt.len() - sequence.len();
        batch.append(&mut sequence, Tokens::Announced(missing)).expect("room");
        batch.finish();
    };
    (1..=(BLOCKS / SESSION) as u64).for_each(|id| run(id, id as u32, SESSION));
    let now = || pool.prefix_cache().expect("a cache").now();
    let retain = || Action::Retain { priority: CachePriority::High, until: now() + 600_000 };
    let time = |action: &dyn Fn() -> Action| {
        let mut times: Vec<f64> = (0..ROUNDS * 4)
            .map(|_| {
                let hint = Hint::new(Target::Session(SessionId(2)), action());
                let begin = Instant::now();
                let outcome = pool.hint(&hint);
                let took = begin.elapsed().as_nanos() as f64 / 1e3;
                assert_eq!(outcome, Outcome::Accepted { blocks: SESSION });
                took
            })
            .collect();
        times.sort_by(f64::total_cmp);
        (times[0], median(times))
    };
    println!("hints about {SESSION} blocks, us: minimum, median");
    let pin = || Action::Pin { until: now() + 600_000 };
    for (name, action) in
        [("retain", &retain as &dyn Fn() -> Action), ("pin", &pin), ("demote", &|| Action::Demote)]
    {
        let (least, middle) = time(action);
        println!("{name:>9} {least:8.0} {middle:8.0}");
    }
    let stop = AtomicBool::new(false);
    let allocations = |beside: &dyn Fn()| {
        stop.store(false, Relaxed);
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let mut times: Vec<f64> = (0..400_000)
                    .map(|_| {
                        let begin = Instant::now();
                        let lease = pool.allocate(AllocRequest::new(1)).expect("room");
                        let took = begin.elapsed().as_nanos() as f64;
                        drop(lease);
                        took
                    })
                    .collect();
                stop.store(true, Relaxed);
                times.sort_by(f64::total_cmp);
                [0.5, 0.999].map(|share| times[(times.len() as f64 * share) as usize])
            });
            while !stop.load(Relaxed) {
                beside();
            }
            thread.join().expect("allocations")
        })
    };
    // The other thread is as busy without hints.
    let idle = || (0..1_000).for_each(|_| std::hint::spin_loop());
    let hinting = || {
        pool.hint(&Hint::new(Target::Session(SessionId(2)), retain()));
    };
    println!("one block, ns: p50, p99.9; beside a busy thread, beside hints");
    for _ in 0..3 {
        let [without, with] = [allocations(&idle), allocations(&hinting)];
        println!("          {:8.0} {:8.0} {:8.0} {:8.0}", without[0], without[1], with[0], with[1]);
    }
}

fn tenants() {
    const PROMPT: u32 = 64;
    println!("64 blocks and one, each evicting as many, us: minimum, median");
    let request = |pool: &Pool, tenant: Option<TenantId>, number: u32| {
        let prompt: Vec<u32> = (0..16 * PROMPT).map(|token| number ^ token << 16).collect();
        let request = AdmitRequest::new(SequenceId(number.into()), &prompt);
        let request = tenant.map_or(request.clone(), |tenant| request.tenant(tenant));
        let begin = Instant::now();
        let mut sequence = pool.admit(&request).expect("room");
        let mut batch = pool.begin_batch();
        batch.append(&mut sequence, Tokens::Announced(prompt.len())).expect("room");
        batch.finish();
        drop(sequence);
        begin.elapsed().as_nanos() as f64 / 1e3
    };
    let mut rows = [None, Some(1), Some(64)].map(|tenants| {
        let shape = KvLayout::builder().layers(1).kv_heads(1).head_dim(8).block_tokens(16);
        let layout = shape.build().expect("a valid layout");
        // Half of the pool is protected.
        let floor = (BLOCKS * layout.bytes_per_block()) as u64 / 2 / tenants.unwrap_or(1);
        let cache = PrefixConfig::new().key(HashKey::from_bytes([7; 32]));
        let builder = Pool::builder(layout).blocks(BLOCKS).without_storage().prefix_cache(cache);
        let limits = TenantLimits::new().floor(floor);
        let builder = match tenants {
            Some(tenants) => builder.tenants((0..tenants).map(|id| (TenantId(id), limits))),
            None => builder,
        };
        let of = move |number: u32| tenants.map(|tenants| TenantId(u64::from(number) % tenants));
        let pool = builder.build().expect("a pool");
        (0..BLOCKS as u32 / PROMPT).for_each(|number| _ = request(&pool, of(number), number));
        (pool, of, BLOCKS as u32 / PROMPT, Vec::new(), Vec::new())
    });
    for _ in 0..ROUNDS * 4 {
        for (pool, of, next, requests, blocks) in &mut rows {
            requests.push((0..16).map(|at| request(pool, of(*next + at), *next + at)).sum::<f64>() / 16.0);
            *next += 16;
            let free = pool.allocate(AllocRequest::new(pool.free_blocks()));
            let begin = Instant::now();
            let leases: Vec<_> =
                (0..64).map(|_| pool.allocate(AllocRequest::new(1)).expect("room")).collect();
            blocks.push(begin.elapsed().as_nanos() as f64 / 64e3);
            drop((free, leases));
            (0..2).for_each(|at| _ = request(pool, of(*next + at), *next + at));
            *next += 2;
        }
    }
    for (name, (.., requests, blocks)) in ["none", "1", "64"].into_iter().zip(&mut rows) {
        let figures = [requests, blocks].map(|times| {
            times.sort_by(f64::total_cmp);
            (times[0], median(times.iter().copied()))
        });
        let [(request, requests), (block, blocks)] = figures;
        println!("{name:>9} {request:8.1} {requests:8.1} {block:8.3} {blocks:8.3}");
    }
}

fn main() {
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("reuse: to measure, run `cargo bench -p kvpool-benches --bench reuse`");
        return;
    }
    println!("{}", threads::pinning());
    verify::<Kvpool>();
    verify::<Locked>();
    verify::<Radix>();
    verify_hits::<Kvpool, Locked>();
    verify_hits::<Locked, Radix>();
    let parts: [(&str, fn()); 8] = [
        ("admit", admit),
        ("look-up", look_up),
        ("evict", evict),
        ("single", single),
        ("events", events),
        ("weights", weights),
        ("hints", hints),
        ("tenants", tenants),
    ];
    let is_chosen = |name| std::env::args().any(|argument| argument == name);
    let any_is_chosen = parts.iter().any(|(name, _)| is_chosen(*name));
    for (name, part) in parts {
        if is_chosen(name) || !any_is_chosen {
            part();
        }
    }
}
