//! The runs of adjacent frames in which open sequences lie.

use kvpool::storage::KvLayout;
use kvpool::{AllocRequest, BlockTable, Pool, SequenceId, SequenceRuns};
use kvpool_testkit::prompts::BLOCK_TOKENS;

fn pool(blocks: usize) -> Pool {
    Pool::builder(KvLayout::named("tiny").unwrap()).blocks(blocks).build().unwrap()
}

#[test]
fn runs_are_counted_by_table_and_a_shared_block_in_each() {
    let pool = pool(12);
    assert_eq!(pool.sequence_runs(), SequenceRuns::default());
    // Frames 1 to 12, of which every second one is freed, and the last four.
    let mut leases: Vec<_> = (0..12).map(|_| pool.allocate(AllocRequest::new(1)).unwrap()).collect();
    leases.sort_by_key(|lease| lease.frames().next());
    let mut place = 0;
    leases.retain(|_| {
        place += 1;
        place <= 8 && place % 2 == 0
    });
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    let _without_blocks = pool.sequence(SequenceId(2)).open().unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 8 * BLOCK_TOKENS).unwrap();
    let mut table = BlockTable::new();
    batch.block_table([&sequence], &mut table).unwrap();
    batch.finish();
    // All free frames: 1, 3, 5, 7 and 9 to 12, of which the run 9 to 12 is one.
    let mut frames = table.row(0).to_vec();
    frames.sort_unstable();
    assert_eq!(frames, [1, 3, 5, 7, 9, 10, 11, 12], "{:?}", table.row(0));
    let runs = pool.sequence_runs();
    assert_eq!((runs.sequences, runs.mean, runs.p50, runs.p99, runs.mean_run), (1, 5.0, 5, 5, 1.6));
    let fork = sequence.fork(SequenceId(3)).unwrap();
    let both = pool.sequence_runs();
    assert_eq!((both.sequences, both.mean, both.mean_run), (2, 5.0, 1.6));
    assert_eq!(pool.fragmentation().mean_run, 0.0, "no frame is free");
    drop((sequence, fork));
    assert_eq!(pool.sequence_runs().sequences, 0);
}
