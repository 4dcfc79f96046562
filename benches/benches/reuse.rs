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
//! ```
//!
//! An argument selects one of them. Subjects take turns, round by round; each figure is the minimum
//! and the median over the rounds, each of admissions and evictions the mean of its undisturbed
//! calls, and in brackets stands the median of the rounds' ratios to
//! kvpool: above 1, the other takes longer (for a rate: does more). Threads that run at once are
//! pinned to one core each.

use std::time::Instant;

use kvpool::prefix::{KvEvents, PrefixConfig};
use kvpool::storage::{Dtype, KvLayout};
use kvpool::{Pool, SequenceId};
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
        println!("{:>3} subscribers {least:8.1} {:8.1}", subscribers.len(), median(times.into_iter()));
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
    let parts: [(&str, fn()); 5] =
        [("admit", admit), ("look-up", look_up), ("evict", evict), ("single", single), ("events", events)];
    let is_chosen = |name| std::env::args().any(|argument| argument == name);
    let any_is_chosen = parts.iter().any(|(name, _)| is_chosen(*name));
    for (name, part) in parts {
        if is_chosen(name) || !any_is_chosen {
            part();
        }
    }
}
