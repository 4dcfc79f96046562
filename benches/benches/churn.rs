//! Fragmentation during a long churn of concurrently growing sequences, with 85 to 95 % of the pool
//! in use: without compaction, with background compaction by several policies, and the result of a
//! perfect compaction at each moment.
//!
//! 65,536 blocks of 16 tokens. A prompt takes 1 to 128 blocks; every open sequence then grows by
//! one token per step, until it has grown by up to 64 blocks, and is closed. Prompts are admitted
//! while less is in use than a bound that wanders between 85 and 95 %. A batch covers each step,
//! and the next begins before it ends, so that some batch is always in flight. First the pool is
//! turned over several times at full speed; then a step takes 5 ms, several times faster than in
//! production, and compaction begins.
//!
//! Fragmentation is the share of the free frames outside free aligned runs of 16, sampled before
//! each step, when the engine would admit. *All* counts the frames in magazines among them,
//! *bitmaps* does not. Moved bytes are reported per run gained, and per byte that the sequences
//! wrote.
//!
//! Frames that sequences reserve for their growth count as fragmentation; compaction leaves them.

use std::time::{Duration, Instant};

use kvpool::compact::{DefragConfig, Defragmenter, FRAGMENTATION_PENALTY, Goal, plan};
use kvpool::storage::{Dtype, KvLayout};
use kvpool::{Batch, Pool, Sequence, SequenceId};
use kvpool_benches::report::median;
use tokio::runtime::Builder;

const BLOCKS: usize = 65_536;
const PROMPT_MAX: usize = 128;
const GROWTH_MAX: usize = 64;
const TOKENS: usize = 16;
const STEP: Duration = Duration::from_millis(5);
/// Steps at full speed, which turn the pool over several times.
const BEFORE: usize = 6_000;
/// Steps in which compaction reaches its steady rate, before the first sample.
const WARM_UP: usize = 400;
const STEPS: usize = 2_000;

fn main() {
    println!("{BLOCKS} blocks, 85 to 95 % in use, {STEPS} steps of {STEP:?}, fragmentation at order 4");
    println!(
        "{:<26} {:>9} {:>6} {:>6} {:>8} {:>6} {:>6} {:>9} {:>9} {:>9} {:>7} {:>8} {:>8}",
        "",
        "all: mean",
        "p50",
        "p99",
        "bitmaps:",
        "p50",
        "p99",
        "sequences",
        "moves a",
        "moved by",
        "time",
        "closed",
        "appends"
    );
    println!(
        "{:<26} {:>9} {:>6} {:>6} {:>8} {:>6} {:>6} {:>9} {:>9} {:>9} {:>7} {:>8} {:>8}",
        "", "", "", "", "mean", "", "", "mean run", "run", "written", "in runs", "", "refused"
    );
    let policy = |threshold: f64, ms: u64| {
        let interval = Duration::from_millis(ms);
        Some(DefragConfig::new().threshold(threshold).interval(interval))
    };
    let off = churn(None);
    off.print("off");
    off.print_ideal();
    churn(Some(DefragConfig::new())).print("default");
    for (threshold, ms) in [(0.1, 5), (0.05, 5), (0.02, 5), (0.02, 1), (0.0, 1)] {
        churn(policy(threshold, ms)).print(&format!("above {:.0} %, every {ms} ms", threshold * 100.0));
    }
}

/// Samples taken before the steps.
#[derive(Default)]
struct Seen {
    all: Vec<f64>,
    bitmaps: Vec<f64>,
    ideal: Vec<f64>,
    runs: Vec<f64>,
    ideal_runs: Vec<f64>,
    moved_blocks: usize,
    runs_gained: isize,
    written_blocks: usize,
    closed: usize,
    refused: usize,
    busy: f64,
}

fn churn(config: Option<DefragConfig>) -> Seen {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let layout =
        KvLayout::builder().layers(1).kv_heads(1).head_dim(8).block_tokens(TOKENS).dtype(Dtype::Bf16);
    let pool = Pool::builder(layout.build().expect("a valid layout")).blocks(BLOCKS);
    let pool = pool.build().expect("memory for the pool");
    let mut engine = Engine::new(&pool);
    (0..BEFORE).for_each(|_| engine.step());
    (engine.written, engine.closed, engine.refused) = (0, 0, 0);
    let mut seen = Seen::default();
    let task: Option<Defragmenter> = config.map(|config| {
        let _inside = runtime.enter();
        pool.start_defragmenter(config).expect("host memory")
    });
    let started = Instant::now();
    for step in 0..WARM_UP + STEPS {
        let end = Instant::now() + STEP;
        if step >= WARM_UP {
            seen.sample(&pool, step % 20 == 0, task.is_none());
        }
        engine.step();
        std::thread::sleep(end.saturating_duration_since(Instant::now()));
    }
    if let Some(task) = task {
        let totals = runtime.block_on(task.stop());
        assert!(totals.failed == 0 && totals.moved_blocks > 0, "{totals:?}");
        (seen.moved_blocks, seen.runs_gained) = (totals.moved_blocks, totals.runs_gained);
        seen.busy = totals.time.as_secs_f64() / started.elapsed().as_secs_f64();
    }
    (seen.written_blocks, seen.closed, seen.refused) = (engine.written, engine.closed, engine.refused);
    drop(engine);
    assert_eq!(pool.audit().expect("a pool without contradictions").owned, 0);
    assert_eq!(pool.free_blocks(), BLOCKS, "lost blocks");
    seen
}

/// Sequences, and the batch in flight.
struct Engine<'a> {
    pool: &'a Pool,
    live: Vec<(Sequence, usize)>,
    batch: Option<Batch>,
    random: fastrand::Rng,
    next: u64,
    bound: f64,
    written: usize,
    closed: usize,
    refused: usize,
}

impl<'a> Engine<'a> {
    fn new(pool: &'a Pool) -> Self {
        let random = fastrand::Rng::with_seed(90);
        Self {
            pool,
            live: Vec::new(),
            batch: None,
            random,
            next: 0,
            bound: 0.9,
            written: 0,
            closed: 0,
            refused: 0,
        }
    }

    fn step(&mut self) {
        let mut batch = self.pool.begin_batch();
        let mut place = 0;
        while let Some((sequence, end)) = self.live.get_mut(place) {
            if sequence.len() < *end {
                match batch.append(sequence, 1) {
                    Ok(appended) => self.written += appended.new_blocks,
                    // The batch continues in the next step.
                    Err(_) => self.refused += 1,
                }
                place += 1;
            } else {
                self.live.swap_remove(place);
                self.closed += 1;
            }
        }
        self.bound = (self.bound + 0.004 * (self.random.f64() - 0.5)).clamp(0.85, 0.95);
        let bound = (BLOCKS as f64 * self.bound) as usize;
        while BLOCKS - self.pool.free_blocks() + PROMPT_MAX < bound {
            let prompt = self.random.usize(1..=PROMPT_MAX * TOKENS);
            let mut sequence = self.pool.sequence(SequenceId(self.next)).open().expect("a new id");
            self.written += batch.append(&mut sequence, prompt).expect("there is room").new_blocks;
            self.live.push((sequence, prompt + self.random.usize(1..=GROWTH_MAX * TOKENS)));
            self.next += 1;
        }
        // The previous batch ends.
        self.batch.replace(batch).into_iter().for_each(Batch::finish);
    }
}

impl Seen {
    fn sample(&mut self, pool: &Pool, looks_closely: bool, is_off: bool) {
        let seen = pool.fragmentation();
        self.all.push(seen.rate);
        self.bitmaps.push(seen.unusable);
        if looks_closely {
            let mut snapshot = pool.snapshot();
            self.runs.push(snapshot.mean_sequence_run());
            if is_off {
                let order = snapshot.order();
                snapshot.apply(&plan(
                    &snapshot,
                    Goal::Fragmentation { order },
                    usize::MAX,
                    FRAGMENTATION_PENALTY,
                ));
                self.ideal.push(snapshot.fragmentation(order));
                self.ideal_runs.push(snapshot.mean_sequence_run());
            }
        }
    }

    fn print(&self, name: &str) {
        let moves = self.moved_blocks as f64 / self.runs_gained.max(1) as f64;
        let share = self.moved_blocks as f64 / self.written_blocks as f64;
        println!(
            "{name:<26} {} {} {:>9.2} {moves:>9.1} {share:>9.3} {:>6.1}% {:>8} {:>8}",
            shares(&self.all),
            shares(&self.bitmaps),
            median(self.runs.iter().copied()),
            self.busy * 100.0,
            self.closed,
            self.refused,
        );
    }

    /// Prints the fragmentation of the bitmaps that remains if everything movable at that moment is
    /// moved.
    fn print_ideal(&self) {
        let runs = median(self.ideal_runs.iter().copied());
        println!(
            "{:<26} {:>9} {:>6} {:>6} {} {runs:>9.2}",
            "ideal, at each moment",
            "",
            "",
            "",
            shares(&self.ideal)
        );
    }
}

/// Formats mean, median and 99th percentile.
fn shares(figures: &[f64]) -> String {
    let mut sorted = figures.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| 100.0 * sorted[((sorted.len() - 1) as f64 * share) as usize];
    let mean = 100.0 * sorted.iter().sum::<f64>() / sorted.len() as f64;
    format!("{mean:>8.1}% {:>5.1}% {:>5.1}%", at(0.5), at(0.99))
}
