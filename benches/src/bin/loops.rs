//! Runs one path of allocate and free `n` times and nothing else, for `instructions.sh` to count.

use std::hint::black_box;

use kvpool::prefix::PrefixConfig;
use kvpool::{Pool, SequenceId};
use kvpool_benches::subject::{Handles, Leases, Listed, Parking, Queued, RawHandles, Standard, layout};
use kvpool_benches::{Subject, Worker};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().unwrap_or_default();
    let count = arguments.next().and_then(|count| count.parse().ok());
    let Some(count) = count else { usage() };
    match path.as_str() {
        "lease" => one::<Leases>(count),
        "raw" => one::<RawHandles>(count),
        "handle" => one::<Handles>(count),
        "ten" => ten::<RawHandles>(count),
        "ten-lease" => ten::<Leases>(count),
        "sequence" => sequence(count, false, 0),
        "sequence-ten" => sequence(count, false, 10),
        "cached-sequence" => sequence(count, true, 0),
        "cached-sequence-ten" => sequence(count, true, 10),
        "cached-request" => cached_request(count),
        "batch" => batch(count),
        "decode" => decode(count),
        "std-mutex" => one::<Listed<Standard>>(count),
        "parking-lot" => one::<Listed<Parking>>(count),
        "array-queue" => one::<Listed<Queued>>(count),
        _ => usage(),
    }
}

fn usage() -> ! {
    eprintln!(
        "usage: loops <lease | raw | handle | ten | ten-lease | sequence | sequence-ten | \
         cached-sequence | cached-sequence-ten | cached-request | batch | decode | std-mutex | parking-lot | array-queue> <count>"
    );
    std::process::exit(2)
}

fn one<S: Subject>(count: u64) {
    let subject = S::new(4096);
    let mut worker = subject.worker();
    for _ in 0..count {
        let block = black_box(worker.allocate());
        worker.free(block);
    }
}

fn ten<S: Subject>(count: u64) {
    let subject = S::new(4096);
    let mut worker = subject.worker();
    for owner in 0..count {
        let blocks = black_box(worker.allocate_many(10, owner));
        worker.free_many(blocks);
    }
}

fn pool(is_cached: bool) -> Pool {
    let builder = Pool::builder(layout()).blocks(65_536).without_storage();
    let builder = if is_cached { builder.prefix_cache(PrefixConfig::new()) } else { builder };
    builder.build().expect("a valid pool")
}

/// Opens a sequence, appends that many blocks in a batch, and closes it.
fn sequence(count: u64, is_cached: bool, blocks: usize) {
    let pool = pool(is_cached);
    for id in 0..count {
        let mut sequence = pool.sequence(SequenceId(id)).open().expect("a new id");
        if blocks > 0 {
            let mut batch = pool.begin_batch();
            batch.append(&mut sequence, 16 * blocks).expect("there is room");
            batch.finish();
        }
        black_box(&sequence);
    }
}

/// A prompt of 1,000 tokens, of which 62 blocks are cached; its last tokens, and its end.
fn cached_request(count: u64) {
    let pool = pool(true);
    let prompt: Vec<u32> = (0..1_000).collect();
    for id in 0..=count {
        let mut sequence = pool.sequence(SequenceId(id)).tokens(&prompt).expect("a new id");
        let rest = prompt.len() - sequence.len();
        let mut batch = pool.begin_batch();
        batch.append(&mut sequence, rest).expect("there is room");
        batch.finish();
    }
}

/// An empty batch.
fn batch(count: u64) {
    let pool = pool(true);
    (0..count).for_each(|_| pool.begin_batch().finish());
}

/// One more token for a sequence; each sixteenth takes a block.
fn decode(count: u64) {
    let pool = pool(true);
    let mut sequence = pool.sequence(SequenceId(1)).open().expect("a new id");
    let mut batch = pool.begin_batch();
    for token in 0..count {
        if token % 256 == 0 {
            batch.finish();
            batch = pool.begin_batch();
        }
        batch.append_tokens(&mut sequence, &[token as u32]).expect("there is room");
    }
}
