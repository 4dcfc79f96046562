//! Capacity of pools for published models, whose layers differ in most: the tokens held at the
//! first refusal, as a share of those that an exact pool holds.
//!
//! An exact pool has blocks of 16 tokens in each group of layers, no other padding, one state a
//! sequence, and no place that matters. What a sequence takes in it is counted from the bytes of
//! an entry. Sequences of one length: whole ones, one after the other, in chunks of 256 tokens, and
//! the last 16 tokens one by one. If all layers are alike, the pool has one list of blocks of one
//! frame. Beside the pool, with the same memory, by the same count:
//!
//! - *page, 1* and *page, 2*: one page for all groups, as vLLM has it, with one or two states a
//!   request. A block of tokens grows until its page holds a state, and states are padded to it.
//!   Layers are split into groups of the smallest count of a kind (of the largest, if that is less
//!   than 1.5 times as many), the last one padded with empty layers.
//! - *split*: exact, but one part of the memory is for layers that keep all tokens, and one for the
//!   others, as sequences of 4,096 tokens need them.
//!
//! Drift: lengths are uniform between half and one and a half of a mean, which goes *up* from 600
//! to 4,096 and to 32,768, *down* to 600, and stays there *after* that. It takes four fills of the
//! memory from each to the next. A refusal closes a sequence at random, and the request is made
//! again. What the open sequences take in an exact pool is noted at all refusals, also those
//! within a prompt, as a share of the memory: its means, and the least. An exact pool under the
//! same load refuses with less than all of its memory taken, because a request is whole; the means
//! of others are given as shares of its means. *With moves*: the same with a copier, which copies
//! nothing: an admission that finds enough frames and no run waits while blocks are moved for it,
//! and is then tried again. *No run* counts the refusals for lack of a run, *moved* the blocks.
//!
//! Arguments select models by parts of their names.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

use kvpool::storage::groups::{GroupOptions, LayerGroup, LayerGroups, Reach};
use kvpool::storage::{CopyDone, FrameMove};
use kvpool::{AdmitRequest, AllocError, Dtype, GroupedSequence, Pool, SequenceError, SequenceId};

const LENGTHS: [usize; 3] = [600, 4_096, 32_768];
/// Length for which a split is made.
const SPLIT_FOR: usize = 4_096;
/// Tokens of a block of an exact pool.
const BLOCK: u64 = 16;
/// Tokens of a step.
const CHUNK: usize = 256;
/// Tokens of a sequence that are decoded, one by one: as many as a block, so that one is taken.
const DECODED: usize = 16;
/// How often the memory is filled while the mean length goes from one to the next.
const FILLS: f64 = 4.0;

/// Models, GiB of memory, the multiple of a page's tokens, and whether K and V have 8 bits.
const MODELS: [(&str, u64, u64, bool); 23] = [
    ("llama-3.1-70b", 40, 16, false),
    ("gemma-3-27b", 40, 16, false),
    ("gemma-4-26b-a4b", 16, 16, false),
    ("gemma-4-31b", 40, 16, false),
    ("gpt-oss-120b", 16, 16, false),
    ("llama-4-scout", 40, 16, false),
    ("mimo-v2-flash", 16, 16, false),
    ("inkling", 40, 16, false),
    ("qwen3-next-80b", 16, 16, false),
    ("qwen3.5-27b", 40, 16, false),
    ("qwen3.5-35b-a3b", 16, 16, false),
    ("qwen3.5-397b-a17b", 40, 16, false),
    ("nemotron-3-nano-30b", 8, 16, false),
    ("nemotron-3-super-120b", 40, 16, false),
    ("nemotron-3-ultra-550b", 40, 16, false),
    ("kimi-linear-48b", 8, 128, false),
    ("kimi-k3", 40, 128, false),
    ("glm-5.3-flash", 40, 128, false),
    ("jamba-1.5-mini", 8, 16, false),
    ("deepseek-v3.2", 40, 64, true),
    ("glm-5.2", 40, 64, true),
    ("deepseek-v4-flash", 16, 64, true),
    ("deepseek-v4-pro", 16, 64, true),
];

const LENGTHS_HEAD: [&str; 2] = [
    "                                 kvpool and exact             kvpool         page, 1         page, 2         split",
    "model                  memory        600    4096   32768    600    4k   32k   600   4k  32k   600   4k  32k   600   4k  32k",
];

const DRIFT_HEAD: [&str; 2] = [
    "                         exact pool: means         kvpool: of exact                         with moves: of exact",
    "model                       up  down after least      up  down after least refused no run      up  down after least no run   moved     s",
];

fn main() {
    let wanted: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    println!("sequences at the first refusal and in an exact pool; shares of its tokens\n");
    LENGTHS_HEAD.iter().for_each(|line| println!("{line}"));
    let mut models = Vec::new();
    for (name, gib, multiple, is_fp8) in MODELS {
        if !wanted.is_empty() && !wanted.iter().any(|part| name.contains(part.as_str())) {
            continue;
        }
        let model = Model::new(name, gib, is_fp8);
        lengths_row(&model, multiple);
        models.push(model);
    }
    println!("\ndrift: share of the memory taken at refusals\n");
    DRIFT_HEAD.iter().for_each(|line| println!("{line}"));
    models.iter().for_each(drift_row);
}

/// A model and the memory for it.
struct Model {
    name: &'static str,
    gib: u64,
    groups: LayerGroups,
}

impl Model {
    fn new(name: &'static str, gib: u64, is_fp8: bool) -> Self {
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/configs/{name}.json"));
        let config = std::fs::read_to_string(config).expect("a configuration of the tests");
        let mut options = GroupOptions::new();
        options.dtype = is_fp8.then_some(Dtype::Fp8E4M3);
        Self { name, gib, groups: LayerGroups::from_config(&config, options).expect("a known model") }
    }

    fn memory(&self) -> u64 {
        self.gib << 30
    }

    /// Returns a pool in this memory.
    fn pool(&self, has_copier: bool) -> Pool {
        let builder = Pool::layered(&self.groups).expect("a model that runs");
        let builder = builder.blocks((self.memory() / self.groups.frame_bytes()) as usize).threads(1);
        let copier = Arc::new(|_: &[FrameMove], done: CopyDone| done(Ok(())));
        if has_copier { builder.engine_copies(copier).build() } else { builder.build() }.expect("a pool")
    }

    fn has_states(&self) -> bool {
        self.groups.groups().iter().any(is_state)
    }

    /// Returns the bytes that a sequence takes of an exact pool.
    fn exact_bytes(&self, tokens: usize) -> u64 {
        self.groups.groups().iter().map(|group| group_bytes(group, tokens)).sum()
    }
}

fn is_state(group: &LayerGroup) -> bool {
    matches!(group.reach(), Reach::State)
}

/// Prints what is held of sequences of one length.
fn lengths_row(model: &Model, multiple: u64) {
    let exact = LENGTHS.map(|tokens| model.memory() / model.exact_bytes(tokens));
    let held = LENGTHS.map(|tokens| held_at_refusal(&model.pool(false), tokens));
    let share = |held: [u64; 3]| std::array::from_fn(|at| held[at] as f64 / exact[at] as f64);
    print!("{:<22} {:>2} GiB ", model.name, model.gib);
    held.iter()
        .zip(exact)
        .zip([10, 8, 8])
        .for_each(|((held, exact), width)| print!("{:>width$}", format!("{held}/{exact}")));
    let [short, middle, long]: [f64; 3] = share(held);
    print!("  {short:.3} {middle:.3} {long:.3}");
    // The rules are for a page that all groups of layers have, whatever an entry is.
    let is_compressed = |group: &LayerGroup| matches!(group.reach(), Reach::Compressed { .. });
    let is_paged = !model.groups.groups().iter().any(is_compressed);
    let paged = is_paged.then(|| Paged::new(model, multiple));
    let pages = |states| {
        let sequences = |paged: &Paged| LENGTHS.map(|tokens| paged.sequences(model, states, tokens));
        paged.as_ref().map(|paged| share(sequences(paged)))
    };
    let two = if model.has_states() { pages(2) } else { None };
    let several = model.groups.groups().len() > 1;
    let parts = several.then(|| share(LENGTHS.map(|tokens| split(model, tokens))));
    for shares in [pages(1), two, parts] {
        match shares {
            Some([short, middle, long]) => print!("  {short:.2} {middle:.2} {long:.2}"),
            None => print!("  {:>4} {:>4} {:>4}", "-", "-", "-"),
        }
    }
    println!();
}

/// Prints what is held while lengths drift.
fn drift_row(model: &Model) {
    let began = Instant::now();
    let (exact, (plain, _)) = (drift_exact(model), drift(model, false));
    print!("{:<22}", model.name);
    let shares = |of: &Refusals, is_exact: bool| {
        let of_exact = |phase: usize| if is_exact { 1.0 } else { exact.mean(phase) };
        let [up, down, after] = [0, 1, 2].map(|phase| of.mean(phase) / of_exact(phase));
        print!("   {up:.3} {down:.3} {after:.3} {:.3}", of.least);
    };
    shares(&exact, true);
    shares(&plain, false);
    print!(" {:>7} {:>6}", plain.count(), plain.no_run);
    if model.has_states() {
        let (moves, moved) = drift(model, true);
        shares(&moves, false);
        print!(" {:>6} {moved:>7}", moves.no_run);
    } else {
        print!("   {:>5} {:>5} {:>5} {:>5} {:>6} {:>7}", "-", "-", "-", "-", "-", "-");
    }
    println!("  {:>4.1}", began.elapsed().as_secs_f64());
}

/// Returns the blocks of `block` tokens that a sequence of this length holds between two steps.
fn blocks_at_rest(reach: Reach, tokens: u64, block: u64) -> u64 {
    let all = tokens.div_ceil(block);
    match reach {
        Reach::State => 1,
        // A window that begins at the last token of a block lies in one block more.
        Reach::Window { tokens, sinks } => all.min((tokens - 1).div_ceil(block) + 1 + sinks.div_ceil(block)),
        Reach::Chunk { tokens } => all.min(tokens.div_ceil(block)),
        _ => all,
    }
}

/// Returns the bytes that a group of layers takes of an exact pool for a sequence.
fn group_bytes(group: &LayerGroup, tokens: usize) -> u64 {
    let (block, ratio) = match group.reach() {
        Reach::State => (1, 1),
        // A window of fewer tokens than a block has smaller blocks.
        Reach::Window { tokens, .. } if tokens < BLOCK => (group.block_tokens().unwrap_or(BLOCK), 1),
        Reach::Compressed { ratio } => (BLOCK, ratio),
        _ => (BLOCK, 1),
    };
    blocks_at_rest(group.reach(), tokens as u64, block) * block * group.entry_bytes() / ratio
}

/// Returns how many sequences fit into two parts of the memory, for layers that keep all tokens and
/// for the others.
fn split(model: &Model, tokens: usize) -> u64 {
    let groups = || model.groups.groups().iter();
    let keeps_all = |group: &&LayerGroup| matches!(group.reach(), Reach::All | Reach::Compressed { .. });
    let all = |tokens| -> u64 { groups().filter(keeps_all).map(|group| group_bytes(group, tokens)).sum() };
    let others = |tokens| model.exact_bytes(tokens) - all(tokens);
    let whole = u128::from(model.exact_bytes(SPLIT_FOR));
    let part = |then: u64, now: u64| {
        let memory = u128::from(model.memory()) * u128::from(then) / whole;
        (memory / u128::from(now)) as u64
    };
    part(all(SPLIT_FOR), all(tokens)).min(part(others(SPLIT_FOR), others(tokens)))
}

/// A memory of pages of one size: a block is a page of each layer of a group of layers.
struct Paged {
    /// Layers of a group.
    layers: u64,
    page: u64,
}

impl Paged {
    /// A page has a multiple of so many tokens.
    fn new(model: &Model, multiple: u64) -> Self {
        let groups = model.groups.groups();
        let counts = || groups.iter().map(|group| group.layers().len() as u64);
        let (least, most) = (counts().min().unwrap_or(1), counts().max().unwrap_or(1));
        let layers = if 2 * most < 3 * least { most } else { least };
        let row = groups.iter().filter(|group| !is_state(group)).map(row_bytes).max().unwrap_or(1);
        let state = groups.iter().filter(|group| is_state(group)).map(row_bytes).max().unwrap_or(1);
        Self { layers, page: state.div_ceil(multiple * row) * multiple * row }
    }

    /// Returns how many sequences fit into the memory.
    fn sequences(&self, model: &Model, states: u64, tokens: usize) -> u64 {
        let pages = |group: &LayerGroup| match group.reach() {
            Reach::State => states,
            // Narrow rows: as many more tokens as fit.
            reach => blocks_at_rest(reach, tokens as u64, self.page / row_bytes(group)),
        };
        let groups = model.groups.groups().iter();
        let pages: u64 = groups.map(|of| pages(of) * (of.layers().len() as u64).div_ceil(self.layers)).sum();
        model.memory() / self.page / self.layers / pages
    }
}

/// Returns the bytes of an entry in one layer, on average where layers differ.
fn row_bytes(group: &LayerGroup) -> u64 {
    group.entry_bytes() / group.layers().len() as u64
}

/// Computes the next tokens: of a prompt, or one of the last ones, which are decoded. At the end a
/// window holds no step.
fn step(pool: &Pool, sequence: &mut GroupedSequence, tokens: usize) -> Result<(), SequenceError> {
    let left = tokens - sequence.len();
    let mut batch = pool.begin_batch();
    batch.append_grouped(sequence, if left > DECODED { CHUNK.min(left - DECODED) } else { 1 })?;
    batch.finish();
    Ok(())
}

/// Returns how many sequences of a length a pool holds when it refuses the next one.
fn held_at_refusal(pool: &Pool, tokens: usize) -> u64 {
    let (prompt, mut open) = (vec![0; tokens], Vec::new());
    loop {
        let request = AdmitRequest::new(SequenceId(open.len() as u64), &prompt).chunk(CHUNK);
        let whole = pool.admit_grouped(&request).and_then(|mut sequence| {
            while sequence.len() < tokens {
                step(pool, &mut sequence, tokens)?;
            }
            Ok(sequence)
        });
        match whole {
            Ok(sequence) => open.push(sequence),
            Err(SequenceError::Alloc(_)) => return open.len() as u64,
            Err(error) => panic!("{error}"),
        }
    }
}

/// The lengths of a drifting load.
struct Lengths {
    random: fastrand::Rng,
    /// How often the sequences so far fill the memory, without the first time.
    fills: f64,
}

impl Lengths {
    fn new() -> Self {
        Self { random: fastrand::Rng::with_seed(7), fills: -1.0 }
    }

    /// Returns the length of the next sequence, and the phase: 0 up, 1 down, 2 after. `None` at the
    /// end.
    fn next(&mut self, model: &Model) -> Option<(usize, usize)> {
        let [short, middle, long] = LENGTHS.map(|mean| mean as f64);
        let legs = [(short, middle, 0), (middle, long, 0), (long, short, 1), (short, short, 2)];
        let at = (self.fills / FILLS).max(0.0);
        let &(from, to, phase) = legs.get(at as usize)?;
        let mean = from * (to / from).powf(at.fract());
        let tokens = (mean * (0.5 + self.random.f64())) as usize;
        self.fills += model.exact_bytes(tokens) as f64 / model.memory() as f64;
        Some((tokens, phase))
    }
}

/// Shares of the memory that open sequences take in an exact pool, at refusals.
struct Refusals {
    /// The number and the sum, by phase.
    phases: [(u32, f64); 3],
    least: f64,
    no_run: u32,
}

impl Refusals {
    fn new() -> Self {
        Self { phases: [(0, 0.0); 3], least: 1.0, no_run: 0 }
    }

    fn add(&mut self, phase: usize, share: f64) {
        let (count, sum) = &mut self.phases[phase];
        (*count, *sum, self.least) = (*count + 1, *sum + share, self.least.min(share));
    }

    fn count(&self) -> u32 {
        self.phases.iter().map(|(count, _)| count).sum()
    }

    fn mean(&self, phase: usize) -> f64 {
        let (count, sum) = self.phases[phase];
        sum / f64::from(count)
    }
}

/// Runs a drifting load on an exact pool.
fn drift_exact(model: &Model) -> Refusals {
    let (mut lengths, mut refusals) = (Lengths::new(), Refusals::new());
    let (mut open, mut held, mut closing) = (Vec::new(), 0, fastrand::Rng::with_seed(11));
    while let Some((tokens, phase)) = lengths.next(model) {
        let bytes = model.exact_bytes(tokens);
        while held + bytes > model.memory() {
            refusals.add(phase, held as f64 / model.memory() as f64);
            held -= open.swap_remove(closing.usize(..open.len()));
        }
        held += bytes;
        open.push(bytes);
    }
    refusals
}

/// Runs a drifting load on a pool, and returns the number of blocks moved, too.
fn drift(model: &Model, has_copier: bool) -> (Refusals, u64) {
    let pool = model.pool(has_copier);
    let (mut lengths, mut refusals) = (Lengths::new(), Refusals::new());
    let (mut open, mut id) = (Vec::<GroupedSequence>::new(), 0);
    let mut closing = fastrand::Rng::with_seed(11);
    let mut prompt = Vec::new();
    while let Some((tokens, phase)) = lengths.next(model) {
        id += 1;
        prompt.resize(tokens, 0);
        let request = AdmitRequest::new(SequenceId(id), &prompt).chunk(CHUNK);
        let mut close = |open: &mut Vec<GroupedSequence>, unfinished: usize, error| {
            let SequenceError::Alloc(error) = error else { panic!("{error}") };
            let lengths = open.iter().map(GroupedSequence::len).chain((unfinished > 0).then_some(unfinished));
            let bytes: u64 = lengths.map(|tokens| model.exact_bytes(tokens)).sum();
            refusals.add(phase, bytes as f64 / model.memory() as f64);
            refusals.no_run += u32::from(matches!(error, AllocError::NoRun { .. }));
            drop(open.swap_remove(closing.usize(..open.len())));
        };
        let mut sequence = loop {
            match admit(&pool, &request, has_copier) {
                Ok(sequence) => break sequence,
                Err(error) => close(&mut open, 0, error),
            }
        };
        while sequence.len() < tokens {
            if let Err(error) = step(&pool, &mut sequence, tokens) {
                close(&mut open, sequence.len(), error);
            }
        }
        open.push(sequence);
    }
    open.clear();
    pool.audit().expect("a sound pool");
    (refusals, pool.metrics().moves.moved_blocks)
}

/// Whether a future is to be polled again.
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Relaxed);
    }
}

/// Admits a sequence. With moves, frames are made a run if there are enough and no run.
fn admit(pool: &Pool, request: &AdmitRequest<'_>, moves: bool) -> Result<GroupedSequence, SequenceError> {
    match pool.admit_grouped(request) {
        Err(SequenceError::Alloc(AllocError::NoRun { .. })) if moves => {}
        outcome => return outcome,
    }
    let mut waiting = Box::pin(pool.admit_grouped_async(request).into_future());
    let woken = Arc::new(Woken(AtomicBool::new(true)));
    let waker = Waker::from(woken.clone());
    // While it moves blocks, it is woken at once; behind them, it rests.
    while woken.0.swap(false, Relaxed) {
        if let Poll::Ready(outcome) = waiting.as_mut().poll(&mut Context::from_waker(&waker)) {
            return outcome;
        }
    }
    drop(waiting);
    pool.admit_grouped(request)
}
