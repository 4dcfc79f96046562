//! Pools with an attention window: what a sequence keeps, what it gives up, and what is hit.
#![cfg(not(any(kvpool_loom, miri)))]

use std::collections::BTreeMap;
use std::thread;

use kvpool::prefix::{HashKey, PrefixConfig};
use kvpool::{
    AdmitRequest, Batch, BlockId, BlockTable, Dtype, Invalid, KvLayout, Pool, Sequence, SequenceError,
    SequenceId, Tokens, Window,
};
use pollster::block_on;
use proptest::prelude::*;

fn layout(block_tokens: usize) -> KvLayout {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).dtype(Dtype::F32);
    layout.block_tokens(block_tokens).build().unwrap()
}

fn pool(blocks: usize, block_tokens: usize, window: usize, sinks: u32) -> Pool {
    let cache = PrefixConfig::new().key(HashKey::from_bytes([7; 32]));
    Pool::builder(layout(block_tokens))
        .blocks(blocks)
        .threads(1)
        .prefix_cache(cache)
        .window(Window::new(window).unwrap().sinks(sinks))
        .build()
        .unwrap()
}

/// What is stored for the last of these tokens: it depends on all of them.
fn stamp(tokens: &[u32]) -> f32 {
    let mix = |sum: u32, token: &u32| sum.wrapping_mul(0x01000193) ^ token.wrapping_add(1);
    (tokens.iter().fold(0x811c9dc5, mix) >> 8) as f32
}

/// Appends tokens, and stores a stamp for each.
fn append(
    batch: &mut Batch,
    sequence: &mut Sequence,
    all: &[u32],
    tokens: Tokens<'_>,
) -> Result<(), SequenceError> {
    let new = batch.append(sequence, tokens)?.tokens;
    let stamps: Vec<f32> = new.clone().map(|position| stamp(&all[..=position])).collect();
    batch.store(sequence, 0, new, (&stamps[..]).into(), (&stamps[..]).into())
}

/// Checks that the next token finds each token that it sees, and each table entry its frame.
fn check(pool: &Pool, sequence: &Sequence, all: &[u32], window: usize, sinks: usize) {
    let (block_tokens, length) = (pool.layout().block_tokens(), sequence.len());
    let mut batch = pool.begin_batch();
    for position in (0..length).filter(|&position| position < sinks || position + window > length) {
        let (mut k, mut v) = ([0.0], [0.0]);
        let tokens = position..position + 1;
        batch.load(sequence, 0, tokens, (&mut k[..]).into(), (&mut v[..]).into()).unwrap();
        assert_eq!(
            (k, v),
            ([stamp(&all[..=position])], [stamp(&all[..=position])]),
            "token {position} of {length}"
        );
    }
    let mut table = BlockTable::new();
    batch.block_table([sequence], &mut table).unwrap();
    let (mut given_up, row) = (0, table.row(0));
    for (place, id) in sequence.blocks().enumerate() {
        let is_null = id == BlockId(0);
        given_up += usize::from(is_null);
        let in_frame = |frame: i32| is_null == (frame == 0);
        assert!(in_frame(row[place]), "frame {} at place {place}", row[place]);
        let (begin, mut slots) = (place * block_tokens, Vec::new());
        let slot = batch.slot_mapping(sequence, begin..begin + 1, &mut slots);
        match slot {
            Ok(()) => assert_eq!((is_null, slots[0]), (false, i64::from(row[place]) * block_tokens as i64)),
            Err(SequenceError::BehindWindow { position, kept_from, .. }) => {
                assert_eq!((is_null, position, kept_from % block_tokens), (true, begin, 0));
                assert!(kept_from > begin && kept_from < length);
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(given_up, sequence.blocks_given_up());
    batch.finish();
}

#[test]
fn a_long_sequence_keeps_its_window() {
    for (window, most) in [(128, 10), (16, 3), (1, 2), (17, 3)] {
        let pool = pool(200, 16, window, 0);
        let (mut sequence, mut all) = (pool.sequence(SequenceId(1)).open().unwrap(), Vec::new());
        let mut held = 0;
        for token in 0..1_600 {
            all.push(token);
            let mut batch = pool.begin_batch();
            append(&mut batch, &mut sequence, &all, Tokens::Ids(&[token])).unwrap();
            batch.finish();
            held = held.max(sequence.block_count() - sequence.blocks_given_up());
        }
        check(&pool, &sequence, &all, window, 0);
        assert!(held <= most, "{held} blocks for a window of {window}");
        assert_eq!(pool.stats().used, sequence.block_count() - sequence.blocks_given_up());
        drop(sequence);
        pool.audit().unwrap();
    }
}

/// A prompt ten times the pool, in chunks: it is admitted by what it needs at once.
#[test]
fn a_prompt_larger_than_the_pool() {
    let (pool, prompt) = (pool(100, 16, 256, 4), (0..16_000).collect::<Vec<u32>>());
    let id = SequenceId(1);
    let whole = pool.admit(&AdmitRequest::new(id, &prompt)).unwrap_err();
    assert!(whole.to_string().contains("1000"), "{whole}");
    let mut sequence = pool.admit(&AdmitRequest::new(id, &prompt).chunk(512)).unwrap();
    assert_eq!(sequence.reserved_blocks(), 50, "a sink, 16 of the window, 32 of a chunk, 1 for the edges");
    while sequence.len() < prompt.len() {
        let mut batch = pool.begin_batch();
        append(&mut batch, &mut sequence, &prompt, Tokens::Announced(512)).unwrap();
        batch.finish();
        check(&pool, &sequence, &prompt, 256, 4);
        assert!(sequence.block_count() - sequence.blocks_given_up() <= 50);
    }
    drop(sequence);
    pool.audit().unwrap();
    // The last window is the newest: it is hit.
    let again = pool.sequence(id).tokens(&prompt).unwrap();
    assert_eq!((again.len(), again.blocks_given_up()), (15_984, 999 - 16 - 1));
    check(&pool, &again, &prompt, 256, 4);
}

/// The tables of a batch in flight show the windows of its tokens, whatever is appended since.
#[test]
fn batches_in_flight_keep_their_windows() {
    let (pool, all) = (pool(200, 4, 8, 0), (0..400).collect::<Vec<u32>>());
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    let mut first = pool.begin_batch();
    append(&mut first, &mut sequence, &all, Tokens::Ids(&all[..100])).unwrap();
    let mut second = pool.begin_batch();
    append(&mut second, &mut sequence, &all, Tokens::Ids(&all[100..200])).unwrap();
    assert_eq!(sequence.blocks_given_up(), 0, "the first batch sees all of them");
    first.finish();
    let mut third = pool.begin_batch();
    append(&mut third, &mut sequence, &all, Tokens::Ids(&all[200..300])).unwrap();
    assert_eq!(sequence.blocks_given_up(), (100 - 7) / 4, "the second began at token 100");
    // Abandoned: the sequence goes on after the first batch's tokens, whose window is there.
    drop(second);
    drop(third);
    assert_eq!(sequence.len(), 100);
    check(&pool, &sequence, &all, 8, 0);
    let mut batch = pool.begin_batch();
    append(&mut batch, &mut sequence, &all, Tokens::Ids(&all[100..200])).unwrap();
    batch.finish();
    check(&pool, &sequence, &all, 8, 0);
    drop(sequence);
    pool.audit().unwrap();
}

#[test]
fn tokens_behind_the_window_are_refused_by_name() {
    let (pool, all) = (pool(200, 4, 8, 2), (0..100).collect::<Vec<u32>>());
    let mut sequence = pool.sequence(SequenceId(5)).open().unwrap();
    for chunk in all.chunks(20) {
        let mut batch = pool.begin_batch();
        append(&mut batch, &mut sequence, &all, Tokens::Ids(chunk)).unwrap();
        batch.finish();
    }
    let given_up = sequence.blocks_given_up();
    assert_eq!(given_up, (80 - 7) / 4 - 1, "one block of sinks stays");
    let behind = |error: &SequenceError, at: usize| {
        let SequenceError::BehindWindow { id, position, kept_from } = *error else { panic!("{error}") };
        assert_eq!((id, position, kept_from), (SequenceId(5), at, 72));
        assert!(error.to_string().contains("token"), "{error}");
    };
    let mut batch = pool.begin_batch();
    let mut slots = vec![1];
    behind(&batch.slot_mapping(&sequence, 3..6, &mut slots).unwrap_err(), 4);
    let view = pool.view(SequenceId(5)).unwrap();
    behind(&batch.slot_mapping(&view, 3..6, &mut slots).unwrap_err(), 4);
    assert_eq!(slots, [1]);
    let (mut k, mut v) = ([0.0; 8], [0.0; 8]);
    let load = batch.load(&sequence, 0, 68..76, (&mut k[..]).into(), (&mut v[..]).into());
    behind(&load.unwrap_err(), 68);
    behind(&batch.tile::<f32>(&sequence, 0, 17).unwrap_err(), 68);
    assert!(batch.tile::<f32>(&sequence, 0, 18).is_ok());
    batch.finish();
    behind(&sequence.truncate(78).unwrap_err(), 69);
    assert_eq!(sequence.len(), 100, "unchanged");
    assert_eq!(view.blocks().len(), 25 - given_up, "a view lists the blocks that are held");
    let target = self::pool(200, 4, 8, 2);
    let (sequence, report) = block_on(pool.migrate(sequence, &target)).unwrap();
    assert_eq!((report.carried.blocks, sequence.blocks_given_up()), (25 - given_up, given_up));
    check(&target, &sequence, &all, 8, 2);
    let (mut sequence, _) = block_on(target.migrate(sequence, &pool)).unwrap();
    behind(&sequence.truncate(79).unwrap_err(), 69);
    sequence.truncate(80).unwrap();
    check(&pool, &sequence, &all, 8, 2);
    sequence.truncate(0).unwrap();
    assert_eq!((sequence.len(), sequence.blocks_given_up()), (0, 0));
    let builder = Pool::builder(layout(4)).blocks(9).without_null_block().window(Window::new(3).unwrap());
    assert!(builder.build().unwrap_err().to_string().contains("null block"));
    let _: Invalid = Window::new(0).unwrap_err();
}

/// Threads hit, append and close in a pool that is too small for them: no hit holds other bytes.
#[test]
fn a_window_is_hit_while_its_blocks_are_evicted() {
    const ROUNDS: u64 = if cfg!(debug_assertions) { 300 } else { 3_000 };
    let pool = pool(60, 4, 24, 3);
    let hits: usize = thread::scope(|scope| {
        let run = |thread: u64| {
            let pool = &pool;
            move || {
                let (mut random, mut hits) = (fastrand::Rng::with_seed(thread), 0);
                for round in 0..ROUNDS {
                    let (prompt, tokens) = (random.u32(..4), random.usize(8..90));
                    let all: Vec<u32> = [prompt].into_iter().chain(0..tokens as u32).collect();
                    let id = SequenceId(thread << 32 | round);
                    let mut sequence = pool.sequence(id).tokens(&all).unwrap();
                    hits += sequence.len();
                    check(pool, &sequence, &all, 24, 3);
                    let mut batch = pool.begin_batch();
                    while sequence.len() < all.len()
                        && append(&mut batch, &mut sequence, &all, Tokens::Announced(16)).is_ok()
                    {
                        batch.finish();
                        batch = pool.begin_batch();
                        check(pool, &sequence, &all, 24, 3);
                    }
                    batch.finish();
                }
                hits
            }
        };
        let threads: Vec<_> = (0..4).map(|thread| scope.spawn(run(thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!(hits > 0, "nothing was hit");
    pool.audit().unwrap();
    assert_eq!(pool.stats().used, 0);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Open(usize),
    Append(usize, usize),
    /// Drafts some tokens, accepts some of them.
    Draft(usize, usize, usize),
    Fork(usize, usize),
    Abandon(usize, usize),
    Truncate(usize, usize),
    Close(usize),
    Compact,
}

fn step() -> impl Strategy<Value = Step> {
    let (slot, tokens) = (0..3_usize, 1..40_usize);
    prop_oneof![
        3 => slot.clone().prop_map(Step::Open),
        6 => (slot.clone(), tokens.clone()).prop_map(|(slot, tokens)| Step::Append(slot, tokens)),
        2 => (slot.clone(), 1..9_usize, 0..9_usize).prop_map(|(slot, drafted, accepted)| Step::Draft(slot, drafted, accepted)),
        1 => (slot.clone(), slot.clone()).prop_map(|(from, to)| Step::Fork(from, to)),
        1 => (slot.clone(), tokens.clone()).prop_map(|(slot, tokens)| Step::Abandon(slot, tokens)),
        1 => (slot.clone(), 0..200_usize).prop_map(|(slot, tokens)| Step::Truncate(slot, tokens)),
        2 => slot.prop_map(Step::Close),
        1 => Just(Step::Compact),
    ]
}

/// Open sequences with all their tokens. Tokens are few, so that prompts are hit and then differ.
struct Run {
    pool: Pool,
    open: BTreeMap<usize, (Sequence, Vec<u32>)>,
    window: usize,
    sinks: usize,
    next: u64,
}

impl Run {
    fn id(&mut self) -> SequenceId {
        self.next += 1;
        SequenceId(self.next)
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Open(slot) => {
                self.open.remove(&slot);
                let (id, common) = (self.id(), self.next as usize % 5 * 13 + 2);
                let all: Vec<u32> = (0..common as u32).chain([self.next as u32 % 3]).collect();
                let sequence = self.pool.sequence(id).tokens(&all).unwrap();
                check(&self.pool, &sequence, &all, self.window, self.sinks);
                self.open.insert(slot, (sequence, all));
            }
            Step::Append(slot, tokens) | Step::Abandon(slot, tokens) => {
                let Some((sequence, all)) = self.open.get_mut(&slot) else { return };
                let known = all.len();
                all.extend((0..tokens).map(|at| ((known + at) % 7) as u32));
                let mut batch = self.pool.begin_batch();
                let rest = known - sequence.len();
                if rest > 0 && append(&mut batch, sequence, all, Tokens::Announced(rest)).is_err() {
                    all.truncate(known);
                    return;
                }
                let new = all[known..].to_vec();
                let is_appended = append(&mut batch, sequence, all, Tokens::Ids(&new)).is_ok();
                if !is_appended {
                    all.truncate(known);
                }
                if matches!(step, Step::Append(..)) {
                    batch.finish();
                } else {
                    drop(batch);
                }
            }
            Step::Draft(slot, drafted, accepted) => {
                let Some((sequence, all)) = self.open.get_mut(&slot) else { return };
                if sequence.len() != all.len() {
                    return;
                }
                let mut batch = self.pool.begin_batch();
                let known = all.len();
                all.extend((0..drafted).map(|at| ((known + at) % 5) as u32));
                if append(&mut batch, sequence, all, Tokens::Draft(drafted)).is_err() {
                    return all.truncate(known);
                }
                batch.finish();
                all.truncate(known + accepted.min(drafted));
                sequence.accept(&all[known..]).unwrap();
            }
            Step::Fork(from, to) => {
                let id = self.id();
                let Some((sequence, all)) = self.open.get(&from) else { return };
                let fork = (sequence.fork(id).unwrap(), all.clone());
                self.open.insert(to, fork);
            }
            Step::Truncate(slot, tokens) => {
                let Some((sequence, all)) = self.open.get_mut(&slot) else { return };
                match sequence.truncate(tokens.min(sequence.len())) {
                    Ok(()) => all.truncate(sequence.announced()),
                    Err(SequenceError::BehindWindow { .. }) => assert!(sequence.blocks_given_up() > 0),
                    Err(error) => panic!("{error}"),
                }
            }
            Step::Close(slot) => drop(self.open.remove(&slot)),
            Step::Compact => drop(block_on(self.pool.defragment()).unwrap()),
        }
        for (sequence, all) in self.open.values() {
            check(&self.pool, sequence, all, self.window, self.sinks);
        }
        self.pool.audit().unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 60 } else { 400 }))]
    /// Whatever happens, the next token of each sequence finds exactly what it sees.
    #[test]
    fn the_next_token_finds_what_it_sees(
        (window, sinks) in (1..50_usize, prop_oneof![Just(0), 1..9_u32]),
        block_tokens in prop_oneof![Just(1_usize), Just(2), Just(3), Just(16)],
        blocks in prop_oneof![Just(40_usize), 100..400_usize],
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let pool = pool(blocks, block_tokens, window, sinks);
        let mut run = Run { pool, open: BTreeMap::new(), window, sinks: sinks as usize, next: 0 };
        steps.into_iter().for_each(|step| run.step(step));
        run.open.clear();
        run.pool.audit().unwrap();
        prop_assert_eq!(run.pool.stats().used, 0);
    }
}
