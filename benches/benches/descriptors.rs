//! Descriptors per sequence of a migration, with and without a compaction before. Counts only.
//!
//! A transfer takes one descriptor for each run of consecutive frames and each tensor of the
//! layout.
//! The runs are those of the transfers' own reports: every sequence is copied to an empty pool
//! before the compaction and after it, and its bytes there are checked. A report counts the runs of
//! the source or of the target, whichever has more; the targets are empty, so that the source's
//! count.
//!
//! *Churn*: prompts of 1 to 128 blocks are admitted while less than 90 % is in use, and every open
//! sequence grows by one token per step, by up to 64 blocks, and ends; after 1,500 steps. *Single
//! holes*: the pool is filled, every other frame is freed, and sequences of 64 blocks are admitted
//! into half of these holes. Then the blocks between them end too.

#[path = "../../tests/migration/kv.rs"]
#[allow(dead_code)]
mod kv;

use kvpool::{Pool, Sequence, SequenceId};
use kvpool_benches::bytes::{place, singles};
use kvpool_benches::report::mean;
use tokio::runtime::{Builder, Runtime};

const BLOCKS: usize = 8_192;
const PROMPT_MAX: usize = 128;
const GROWTH_MAX: usize = 64;
const STEPS: usize = 1_500;
const IN_HOLES: usize = 64;

fn main() {
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("descriptors: to measure, run `cargo bench -p kvpool-benches --bench descriptors`");
        return;
    }
    let runtime = Builder::new_current_thread().enable_time().build().expect("a runtime");
    println!("{BLOCKS} blocks; runs per sequence in the reports of transfers, before and after a compaction");
    println!(
        "{:<34} {:>9} {:>8}   {:>6} {:>5} {:>5}   {:>6} {:>5} {:>5}   {:>7}",
        "", "sequences", "blocks", "mean", "p50", "max", "mean", "p50", "max", "moved"
    );
    churn(&runtime, "churn, cache off", kv::builder(kv::plain(), BLOCKS).build().expect("memory"));
    churn(&runtime, "churn, cache on", kv::pool(kv::plain(), BLOCKS));
    holes(&runtime);
}

/// A sequence with its tokens, and the length at which it ends.
struct Open {
    sequence: Sequence,
    tokens: Vec<u32>,
}

fn open(pool: &Pool, id: u32, prompt: usize, end: usize) -> Open {
    let tokens = kv::prompt(id + 1, end);
    let sequence = kv::admit(pool, u64::from(id), &tokens[..prompt]).expect("there is room");
    Open { sequence, tokens }
}

fn churn(runtime: &Runtime, name: &str, pool: Pool) {
    let mut random = fastrand::Rng::with_seed(90);
    let mut live: Vec<Open> = Vec::new();
    let mut next = 0;
    for _ in 0..STEPS {
        let mut batch = pool.begin_batch();
        live.retain_mut(|Open { sequence, tokens }| {
            let at = sequence.len();
            let Some(token) = tokens.get(at..at + 1) else { return false };
            // Where there is no room it grows later.
            if batch.append(sequence, token).is_ok() {
                kv::store(&mut batch, sequence, at, token);
            }
            true
        });
        batch.finish();
        let in_use = |pool: &Pool| BLOCKS - pool.available_blocks();
        while in_use(&pool) + PROMPT_MAX < BLOCKS * 9 / 10 {
            let prompt = random.usize(1..=PROMPT_MAX * kv::BLOCK_TOKENS);
            let end = prompt + random.usize(1..=GROWTH_MAX * kv::BLOCK_TOKENS);
            live.push(open(&pool, next, prompt, end));
            next += 1;
        }
    }
    compare(runtime, name, &pool, &live);
    drop(live);
    kv::is_idle(&pool);
}

fn holes(runtime: &Runtime) {
    let pool = kv::builder(kv::plain(), BLOCKS).build().expect("memory");
    let mut all = singles(&pool, BLOCKS);
    all.iter_mut().for_each(|lease| lease.seal(..));
    all.sort_unstable_by_key(|lease| place(lease).start);
    let between: Vec<_> = all.into_iter().step_by(2).collect();
    pool.trim();
    let tokens = IN_HOLES * kv::BLOCK_TOKENS;
    let live: Vec<Open> =
        (0..(BLOCKS / 4 / IN_HOLES) as u32).map(|id| open(&pool, id, tokens, tokens)).collect();
    compare(runtime, "single holes, a quarter free", &pool, &live);
    drop(between);
    pool.trim();
    compare(runtime, "the same once their neighbours ended", &pool, &live);
    drop(live);
    kv::is_idle(&pool);
}

fn compare(runtime: &Runtime, name: &str, pool: &Pool, live: &[Open]) {
    let before = runs(runtime, pool, live);
    let moved = runtime.block_on(pool.defragment()).expect("host memory").moved_blocks;
    let after = runs(runtime, pool, live);
    let blocks = mean(live.iter().map(|open| open.sequence.len().div_ceil(kv::BLOCK_TOKENS) as f64));
    println!(
        "{name:<34} {:>9} {blocks:>8.1}   {}   {}   {moved:>7}",
        live.len(),
        summary(before),
        summary(after)
    );
}

/// Copies each sequence to an empty pool, and returns the numbers of runs that the reports state.
fn runs(runtime: &Runtime, pool: &Pool, live: &[Open]) -> Vec<usize> {
    let copy = |Open { sequence, tokens }: &Open| {
        let target = kv::pool(kv::plain(), PROMPT_MAX + GROWTH_MAX + 2);
        let copied = runtime.block_on(pool.replicate(sequence, &target).into_future());
        let (replica, report) = copied.expect("an empty pool has room");
        assert_eq!(report.carried.blocks, sequence.len().div_ceil(kv::BLOCK_TOKENS));
        assert_eq!(replica.id(), SequenceId(sequence.id().0));
        kv::check(&target, &replica, tokens);
        report.carried.runs
    };
    live.iter().map(copy).collect()
}

fn summary(mut runs: Vec<usize>) -> String {
    runs.sort_unstable();
    let mean = mean(runs.iter().map(|&runs| runs as f64));
    format!("{mean:>6.1} {:>5} {:>5}", runs[runs.len() / 2], runs[runs.len() - 1])
}
