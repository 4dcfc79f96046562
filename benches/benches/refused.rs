//! What a refused request costs, by the size of the pool, and a run that evicts: nothing that
//! serves walks the pool.

use std::hint::black_box;
use std::time::Instant;

use kvpool::block::{Blocks, BlocksConfig};
use kvpool::prefix::PrefixConfig;
use kvpool::storage::KvLayout;
use kvpool::{AllocError, AllocRequest, BlockId, DeviceId, Pool, SequenceId};
use kvpool_benches::report::median;

const SIZES: [usize; 3] = [1 << 16, 1 << 20, 1 << 23];
const ROUNDS: usize = 101;

fn main() {
    println!("median of {ROUNDS} requests, in us; in brackets the longest");
    println!("refused: all owned, all seen, no run of 16 without and with a cache");
    println!("granted: a run of 64 out of a full cache\n");
    println!(
        "{:>9}  {:>16}  {:>16}  {:>16}  {:>16}  {:>16}",
        "blocks", "all owned", "all seen", "no run of 16", "no window", "run of 64"
    );
    for blocks in SIZES {
        let row =
            [all_owned(blocks), all_seen(blocks), no_run(blocks), no_window(blocks), evicted_run(blocks)];
        let text = row.map(|(median, longest)| format!("{median:.2} ({longest:.1})"));
        print!("{blocks:>9}");
        text.iter().for_each(|text| print!("  {text:>16}"));
        println!();
    }
}

/// Returns the median and the longest time.
fn times<T>(mut request: impl FnMut() -> T) -> (f64, f64) {
    let mut once = || {
        let began = Instant::now();
        black_box(request());
        began.elapsed().as_secs_f64() * 1e6
    };
    once();
    let times: Vec<f64> = (0..ROUNDS).map(|_| once()).collect();
    (median(times.iter().copied()), times.into_iter().fold(0.0, f64::max))
}

/// Returns a pool of which every block is owned.
fn owned(frames: usize) -> (Blocks, Vec<BlockId>) {
    let config = BlocksConfig {
        frames,
        frames_max: frames,
        segment_frames: 1 << 16,
        magazine_blocks: 64,
        threads: 2,
        has_null_block: false,
        reserve: 0,
        run_frames: 0,
        device: DeviceId::Host,
    };
    let (blocks, mut ids) = (Blocks::new(config, None), Vec::with_capacity(frames));
    blocks.allocate(&AllocRequest::new(frames), &mut |id| ids.push(id)).expect("all are free");
    (blocks, ids)
}

fn refusal(blocks: &Blocks, request: AllocRequest) -> AllocError {
    blocks.allocate(&request, &mut |_| {}).expect_err("too few are free")
}

fn all_owned(frames: usize) -> (f64, f64) {
    let (blocks, _) = owned(frames);
    times(|| refusal(&blocks, AllocRequest::new(1)))
}

/// Every second block is free.
fn no_run(frames: usize) -> (f64, f64) {
    let (blocks, ids) = owned(frames);
    let half: Vec<BlockId> = ids.into_iter().filter(|id| id.index() % 2 == 0).collect();
    blocks.release(&half);
    blocks.trim();
    times(|| refusal(&blocks, AllocRequest::new(16).contiguous()))
}

/// All blocks are cached and evictable, and one batch in flight may see them.
fn all_seen(blocks: usize) -> (f64, f64) {
    let pool = cache(blocks);
    let batch = pool.begin_batch();
    fill(&pool);
    let result = times(|| pool.allocate(AllocRequest::new(1)).expect_err("all are seen"));
    batch.finish();
    result
}

/// Sequences have all cached blocks but the last one of each prompt, and leases all runs of 16.
fn no_window(blocks: usize) -> (f64, f64) {
    let pool = cache(blocks);
    fill(&pool);
    let open =
        |number| pool.sequence(SequenceId(number as u64)).tokens(&prompt(&pool, number)).expect("room");
    let _held: Vec<_> = (0..blocks / 64).map(open).collect();
    let request = || pool.allocate(AllocRequest::new(16).contiguous());
    let _runs: Vec<_> = std::iter::from_fn(|| request().ok()).collect();
    assert!(pool.stats().evictable >= 16);
    times(|| request().expect_err("no window"))
}

/// All blocks are cached and evictable; the runs are kept.
fn evicted_run(blocks: usize) -> (f64, f64) {
    let pool = cache(blocks);
    fill(&pool);
    let mut runs = Vec::with_capacity(ROUNDS + 1);
    times(|| runs.push(pool.allocate(AllocRequest::new(64).contiguous()).expect("evictable blocks")))
}

fn cache(blocks: usize) -> Pool {
    let layout = KvLayout::named("tiny").expect("the layout is known");
    let pool = Pool::builder(layout).blocks(blocks).prefix_cache(PrefixConfig::new());
    pool.build().expect("the memory suffices")
}

/// Returns a prompt of 64 blocks.
fn prompt(pool: &Pool, number: usize) -> Vec<u32> {
    let len = 64 * pool.layout().block_tokens();
    (0..len).map(|token| (number * len + token) as u32).collect()
}

fn fill(pool: &Pool) {
    for number in 0..pool.total_blocks() / 64 {
        let prompt = prompt(pool, number);
        let mut sequence = pool.sequence(SequenceId(number as u64)).tokens(&prompt).expect("room");
        let mut writer = pool.begin_batch();
        writer.append(&mut sequence, prompt.len()).expect("room");
        writer.finish();
    }
}
