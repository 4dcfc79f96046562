//! What a refused request costs, by the size of the pool: nothing that serves walks the pool.

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
    println!("median of {ROUNDS} refusals, in us; in brackets the longest\n");
    println!("{:>9}  {:>18}  {:>18}  {:>18}", "blocks", "all owned", "all seen", "no run of 16");
    for blocks in SIZES {
        let row = [all_owned(blocks), all_seen(blocks), no_run(blocks)];
        let text = row.map(|(median, longest)| format!("{median:.2} ({longest:.1})"));
        println!("{blocks:>9}  {:>18}  {:>18}  {:>18}", text[0], text[1], text[2]);
    }
}

/// Returns the median and the longest time.
fn times(refused: impl Fn() -> AllocError) -> (f64, f64) {
    let once = || {
        let began = Instant::now();
        black_box(refused());
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
    let layout = KvLayout::named("tiny").expect("the layout is known");
    let len = 64 * layout.block_tokens();
    let pool = Pool::builder(layout).blocks(blocks).prefix_cache(PrefixConfig::new());
    let pool = pool.build().expect("the memory suffices");
    let batch = pool.begin_batch();
    for number in 0..blocks / 64 {
        let prompt: Vec<u32> = (0..len).map(|token| (number * len + token) as u32).collect();
        let mut sequence = pool.sequence(SequenceId(number as u64)).tokens(&prompt).expect("room");
        let mut writer = pool.begin_batch();
        writer.append(&mut sequence, len).expect("room");
        writer.finish();
    }
    let result = times(|| pool.allocate(AllocRequest::new(1)).expect_err("all are seen"));
    batch.finish();
    result
}
