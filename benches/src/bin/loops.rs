//! Runs one path of allocate and free `n` times and nothing else, for `instructions.sh` to count.

use std::hint::black_box;
use std::sync::Mutex;

use kvpool::prefix::PrefixConfig;
use kvpool::{AdmitRequest, AllocRequest, Append, FramePool, Pool, Sequence, SequenceError, SequenceId};
use kvpool_benches::subject::{Leases, Listed, Parking, Queued, Standard, layout};
use kvpool_benches::{Subject, Worker};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().unwrap_or_default();
    let count = arguments.next().and_then(|count| count.parse().ok());
    let Some(count) = count else { usage() };
    match path.as_str() {
        "lease" => one::<Leases>(count),
        "ten-lease" => ten::<Leases>(count),
        "sequence" => sequence(count, false, 0),
        "sequence-ten" => sequence(count, false, 10),
        "cached-sequence" => sequence(count, true, 0),
        "cached-sequence-ten" => sequence(count, true, 10),
        "cached-request" => cached_request(count),
        "evicting-request" => evicting_request(count),
        "open" => prompts(count, |pool, id, prompt| pool.sequence(id).tokens(prompt)),
        "admit" => prompts(count, |pool, id, prompt| pool.admit(&AdmitRequest::new(id, prompt))),
        "batch" => batch(count),
        "decode" => decode(count),
        "appends" => steps(count, false),
        "decode-step" => steps(count, true),
        "std-mutex" => one::<Listed<Standard>>(count),
        "parking-lot" => one::<Listed<Parking>>(count),
        "array-queue" => one::<Listed<Queued>>(count),
        _ => match lists_of(&path) {
            Some((true, blocks)) => frames(count, blocks),
            Some((false, blocks)) => free_list(count, blocks),
            None => usage(),
        },
    }
}

fn usage() -> ! {
    eprintln!(
        "usage: loops <lease | ten-lease | sequence | sequence-ten | \
         cached-sequence | cached-sequence-ten | cached-request | evicting-request | open | admit | batch | \
         decode | appends | decode-step | std-mutex | parking-lot | array-queue | \
         frames-<blocks> | free-list-<blocks>> <count>"
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

/// Reads `frames-<blocks>` or `free-list-<blocks>`; the first is true for a frame pool.
fn lists_of(path: &str) -> Option<(bool, usize)> {
    let (kind, blocks) = path.rsplit_once('-')?;
    let is_frame_pool = match kind {
        "frames" => true,
        "free-list" => false,
        _ => return None,
    };
    Some((is_frame_pool, blocks.parse().ok().filter(|&blocks| blocks > 0)?))
}

/// Lists that a loop holds: it frees the oldest and allocates another.
const LISTS_HELD: usize = 16;

/// A list of a frame pool.
fn frames(count: u64, blocks: usize) {
    let pool = FramePool::builder(65_536).build().expect("a valid pool");
    let mut held = vec![Vec::new(); LISTS_HELD];
    for turn in 0..count as usize {
        let list = &mut held[turn % LISTS_HELD];
        pool.free(list).expect("allocated before");
        list.clear();
        pool.allocate(AllocRequest::new(blocks), black_box(list)).expect("there is room");
    }
}

/// A list of a `Mutex<Vec>` of numbers, without owners or checks.
fn free_list(count: u64, blocks: usize) {
    let free = Mutex::new((0..65_536_u32).collect::<Vec<_>>());
    let mut held = vec![Vec::new(); LISTS_HELD];
    for turn in 0..count as usize {
        let list = &mut held[turn % LISTS_HELD];
        free.lock().unwrap().extend_from_slice(list);
        list.clear();
        let mut free = free.lock().unwrap();
        let rest = free.len() - blocks;
        black_box(&mut *list).extend(free.drain(rest..));
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

/// A prompt of 1,000 tokens of its own in a pool full of cached blocks, which it evicts, and its
/// end.
fn evicting_request(count: u64) {
    let pool = pool(true);
    let mut prompt: Vec<u32> = (0..1_000).collect();
    for id in 0..=count {
        prompt[0] = id as u32;
        let mut sequence = pool.sequence(SequenceId(id)).tokens(&prompt).expect("a new id");
        let mut batch = pool.begin_batch();
        batch.append(&mut sequence, prompt.len()).expect("there is room");
        batch.finish();
    }
}

/// The opening, or the admission, of a prompt of 1,000 tokens, of which 62 blocks are cached and one
/// is not, and the end of the sequence.
fn prompts(count: u64, open: impl Fn(&Pool, SequenceId, &[u32]) -> Result<Sequence, SequenceError>) {
    let pool = pool(true);
    let prompt: Vec<u32> = (0..1_000).collect();
    let mut first = pool.sequence(SequenceId(count)).tokens(&prompt).expect("a new id");
    let mut step = pool.begin_batch();
    step.append(&mut first, prompt.len()).expect("there is room");
    step.finish();
    drop(first);
    for id in 0..count {
        let mut sequence = open(&pool, SequenceId(id), &prompt).expect("there is room");
        if black_box(&sequence).is_empty() {
            // Blocks are not kept when their generation wraps around.
            let mut step = pool.begin_batch();
            step.append(&mut sequence, prompt.len()).expect("there is room");
            step.finish();
        }
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
        batch.append(&mut sequence, &[token as u32]).expect("there is room");
    }
}

/// A token for each of 256 sequences, appended one by one, or in one call. Counts tokens.
fn steps(count: u64, is_at_once: bool) {
    const SEQUENCES: u64 = 256;
    let pool = pool(true);
    let mut sequences: Vec<Sequence> =
        (0..SEQUENCES).map(|id| pool.sequence(SequenceId(id)).open().expect("a new id")).collect();
    // So that the same number of them needs a block in each step.
    let begin = |sequences: &mut [Sequence]| {
        let mut batch = pool.begin_batch();
        for (place, sequence) in sequences.iter_mut().enumerate() {
            sequence.truncate(0).expect("it is not shorter");
            batch.append(sequence, &vec![place as u32; 1 + place % 16]).expect("there is room");
        }
        batch.finish();
    };
    begin(&mut sequences);
    let tokens = [0; SEQUENCES as usize];
    for step in 0..count / SEQUENCES {
        let mut batch = pool.begin_batch();
        if is_at_once {
            let sequences = sequences.iter_mut().zip(&tokens);
            let mut all: Vec<Append> = sequences
                .map(|(sequence, token)| Append::new(sequence, std::slice::from_ref(token)))
                .collect();
            batch.step(&mut all).expect("there is room");
        } else {
            for (sequence, token) in sequences.iter_mut().zip(&tokens) {
                batch.append(sequence, &[*token]).expect("there is room");
            }
        }
        batch.finish();
        if step % 2_048 == 2_047 {
            begin(&mut sequences);
        }
    }
}
