//! Random operations on three pools with clears in between, against a model of where each sequence
//! is and of its tokens: every sequence is in the model's pool, with its bytes and its ids; reports
//! say what happened; and after each step all pools pass an audit. A pool finds no token that was
//! computed in it before its last clear, nor one that was computed from such a token, in any pool.
//!
//! Each row has, beside its token and place, its *lineage*: the eras of the pools in which it and
//! the tokens before it were computed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use kvpool::prefix::PrefixKeys;
use kvpool::storage::{Arrangement, Dtype, Elements, ElementsMut, KvPlanes};
use kvpool::{Pool, Preempt, Sequence, SequenceError, SequenceId, TransferError};
use proptest::prelude::*;

use super::kv::{is_idle, pool, prompt, sized};

const POOLS: usize = 3;
/// Families of prompts, which share nothing.
const FAMILIES: u32 = 3;
/// Tokens of the longest prompt.
const LONGEST: usize = 40;
const ROW: usize = 16;

/// By pool: its era when a token was computed there, plus one; 0: none was.
type Lineage = [u16; POOLS];

#[derive(Clone, Debug)]
enum Step {
    Admit(usize, u32, usize),
    Append(u8, usize),
    Truncate(u8, usize),
    Fork(u8),
    Close(u8),
    Migrate(u8, usize),
    Swap(u8, usize),
    Replicate(u8, usize),
    Offload(usize, usize, usize),
    BringBack(usize, usize, u32, usize),
    Clear(usize),
    /// A look-up of the longest prompt of a family finds this many tokens. Not drawn at random.
    Finds(usize, u32, usize),
}

fn step() -> impl Strategy<Value = Step> {
    let side = 0..POOLS;
    let pair = (0..POOLS, 1..POOLS).prop_map(|(from, further)| (from, (from + further) % POOLS));
    prop_oneof![
        5 => (side.clone(), 0..FAMILIES, 1..=LONGEST).prop_map(|(side, family, tokens)| Step::Admit(side, family, tokens)),
        2 => (any::<u8>(), 1..9usize).prop_map(|(which, tokens)| Step::Append(which, tokens)),
        1 => (any::<u8>(), 0..40usize).prop_map(|(which, length)| Step::Truncate(which, length)),
        1 => any::<u8>().prop_map(Step::Fork),
        4 => any::<u8>().prop_map(Step::Close),
        4 => (any::<u8>(), 1..POOLS).prop_map(|(which, to)| Step::Migrate(which, to)),
        3 => (any::<u8>(), 1..POOLS).prop_map(|(which, to)| Step::Swap(which, to)),
        1 => (any::<u8>(), 1..POOLS).prop_map(|(which, to)| Step::Replicate(which, to)),
        4 => (pair.clone(), 1..40usize).prop_map(|((from, to), blocks)| Step::Offload(from, to, blocks)),
        4 => (pair, 0..FAMILIES, 1..=LONGEST).prop_map(|((to, from), family, tokens)| Step::BringBack(to, from, family, tokens)),
        2 => side.prop_map(Step::Clear),
    ]
}

struct Open {
    side: usize,
    sequence: Sequence,
    tokens: Vec<u32>,
}

struct World {
    pools: [Pool; POOLS],
    eras: [u16; POOLS],
    open: BTreeMap<u64, Open>,
    next: u64,
}

fn is_full(error: &TransferError) -> bool {
    matches!(error, TransferError::Alloc(_))
}

fn join(lineage: Lineage, more: Lineage) -> Lineage {
    std::array::from_fn(|pool| match (lineage[pool], more[pool]) {
        (0, era) | (era, 0) => era,
        // Of two eras the earlier one is that which must not be found.
        (one, other) => one.min(other),
    })
}

/// Returns the lineage of all tokens of a sequence, which must be these.
fn lineage_of(pool: &Pool, sequence: &Sequence, tokens: &[u32]) -> Lineage {
    let (length, mut joined) = (sequence.len(), Lineage::default());
    let mut batch = pool.begin_batch();
    for layer in 0..pool.layout().layers() {
        let (mut k, mut v) = (vec![0; length * ROW], vec![0; length * ROW]);
        let [to_k, to_v] = [&mut k, &mut v].map(|rows| ElementsMut::new(Dtype::Bf16, rows).unwrap());
        batch.load(sequence, layer, 0..length, to_k, to_v).unwrap();
        assert_eq!(k, v);
        for (place, row) in (0u32..).zip(k.chunks_exact(ROW)) {
            assert_eq!(row[..4], tokens[place as usize].to_le_bytes(), "{sequence:?}");
            assert_eq!(row[4..8], place.to_le_bytes(), "{sequence:?}");
            let eras = std::array::from_fn(|pool| u16::from_le_bytes([row[8 + 2 * pool], row[9 + 2 * pool]]));
            joined = join(joined, eras);
        }
    }
    joined
}

impl World {
    fn new(block_tokens: usize) -> Self {
        // Room for about the same number of tokens, which the sequences exceed.
        let blocks = 24 * if block_tokens < 4 { 4 / block_tokens } else { 1 };
        let forms = [
            (Arrangement::LayerFirst, KvPlanes::Separate),
            (Arrangement::BlockFirst, KvPlanes::Joined),
            (Arrangement::BlockFirst, KvPlanes::Separate),
        ];
        let pools = forms.map(|(of, parts)| pool(sized(block_tokens, of, parts), blocks));
        Self { pools, eras: [0; POOLS], open: BTreeMap::new(), next: 0 }
    }

    fn pick(&mut self, which: u8) -> Option<Open> {
        let id = *self.open.keys().nth(usize::from(which) % self.open.len().max(1))?;
        self.open.remove(&id)
    }

    fn put(&mut self, open: Open) {
        self.open.insert(open.sequence.id().0, open);
    }

    /// Appends tokens and stores their rows, with the lineage that they get here.
    fn compute(&self, side: usize, sequence: &mut Sequence, all: &[u32]) -> Result<(), SequenceError> {
        let (pool, first) = (&self.pools[side], sequence.len());
        let mut lineage = lineage_of(pool, sequence, all);
        lineage = join(lineage, std::array::from_fn(|of| if of == side { self.eras[side] + 1 } else { 0 }));
        let mut rows = Vec::new();
        for (place, token) in (first as u32..).zip(&all[first..]) {
            rows.extend([token.to_le_bytes(), place.to_le_bytes()].concat());
            lineage.iter().for_each(|era| rows.extend(era.to_le_bytes()));
            rows.extend([0; 2]);
        }
        let mut batch = pool.begin_batch();
        if sequence.announced() > first {
            batch.append(sequence, all.len() - first)?;
        } else {
            // All its tokens are known, wherever it was truncated and whichever pools it was in.
            batch.append(sequence, &all[first..])?;
        }
        for layer in 0..pool.layout().layers() {
            let [k, v] = [&rows, &rows].map(|rows| Elements::new(Dtype::Bf16, rows).unwrap());
            batch.store(sequence, layer, first..all.len(), k, v).unwrap();
        }
        batch.finish();
        Ok(())
    }

    /// Opens a prompt, also with a part of a cached block, and checks when its tokens were computed.
    fn look_up(&self, side: usize, id: u64, tokens: &[u32]) -> Sequence {
        let sequence = self.pools[side].sequence(SequenceId(id)).reuse_tail().tokens(tokens).unwrap();
        let era = lineage_of(&self.pools[side], &sequence, tokens)[side];
        assert!([0, self.eras[side] + 1].contains(&era), "era {era} of {:?}: {sequence:?}", self.eras);
        sequence
    }

    /// Returns the number of tokens in cached full blocks.
    fn cached(&self, side: usize, tokens: &[u32]) -> usize {
        let found = self.look_up(side, u64::MAX, tokens).len();
        let block_tokens = self.pools[side].layout().block_tokens();
        found / block_tokens * block_tokens
    }

    fn all_cached(&self, side: usize) -> Vec<usize> {
        (0..FAMILIES).map(|family| self.cached(side, &prompt(family, LONGEST + 1))).collect()
    }

    async fn apply(&mut self, step: Step) {
        match step {
            Step::Admit(side, family, tokens) => {
                let tokens = prompt(family, tokens);
                self.next += 1;
                let mut sequence = self.look_up(side, self.next, &tokens);
                match self.compute(side, &mut sequence, &tokens) {
                    Ok(()) => self.put(Open { side, sequence, tokens }),
                    Err(error) => assert!(matches!(error, SequenceError::Alloc(_)), "{error}"),
                }
            }
            Step::Append(which, count) => {
                let Some(mut open) = self.pick(which) else { return };
                let id = open.sequence.id().0 as u32;
                let before = open.tokens.len();
                open.tokens.extend((0..count as u32).map(|token| 1 << 30 | id << 12 | token));
                if let Err(error) = self.compute(open.side, &mut open.sequence, &open.tokens) {
                    assert!(matches!(error, SequenceError::Alloc(_)), "{error}");
                    open.tokens.truncate(before);
                }
                self.put(open);
            }
            Step::Truncate(which, length) => {
                let Some(mut open) = self.pick(which) else { return };
                let length = length.min(open.tokens.len());
                open.sequence.truncate(length).unwrap();
                open.tokens.truncate(length);
                self.put(open);
            }
            Step::Fork(which) => {
                let Some(open) = self.pick(which) else { return };
                self.next += 1;
                let sequence = open.sequence.fork(SequenceId(self.next)).unwrap();
                self.put(Open { sequence, side: open.side, tokens: open.tokens.clone() });
                self.put(open);
            }
            Step::Close(which) => drop(self.pick(which)),
            Step::Migrate(which, further) => {
                let Some(Open { side, sequence, tokens }) = self.pick(which) else { return };
                let to = (side + further) % POOLS;
                let state = |of: &Sequence| (of.id(), of.len(), of.committed(), of.announced());
                let before = state(&sequence);
                // Without a wait for room.
                let moved = self.pools[side].migrate(sequence, &self.pools[to]).until(Instant::now()).await;
                let (side, sequence) = match moved {
                    Ok((sequence, report)) => {
                        assert_eq!(report.shared_blocks + report.carried.blocks, sequence.block_count());
                        (to, sequence)
                    }
                    Err(failed) => {
                        assert!(is_full(&failed.error), "{failed}");
                        (side, *failed.sequence)
                    }
                };
                assert_eq!(state(&sequence), before);
                self.put(Open { side, sequence, tokens });
            }
            Step::Swap(which, further) => {
                let Some(Open { side, sequence, tokens }) = self.pick(which) else { return };
                let to = (side + further) % POOLS;
                let announced = sequence.announced();
                match self.pools[side].preempt(sequence, Preempt::Swap(&self.pools[to])).await {
                    Ok(preempted) => {
                        let sequence = preempted.swapped.unwrap().sequence;
                        assert_eq!(sequence.announced(), announced, "ids survive");
                        self.put(Open { side: to, sequence, tokens });
                    }
                    Err(error) => self.put(Open { side, sequence: *error.sequence, tokens }),
                }
            }
            Step::Replicate(which, further) => {
                let Some(open) = self.pick(which) else { return };
                let there = &self.pools[(open.side + further) % POOLS];
                // The id is open there from then on, and closed at once.
                match self.pools[open.side].replicate(&open.sequence, there).await {
                    Ok((replica, _)) => {
                        assert_eq!(replica.len(), open.tokens.len());
                        lineage_of(there, &replica, &open.tokens);
                    }
                    Err(error) => assert!(is_full(&error), "{error}"),
                }
                self.put(open);
            }
            Step::Offload(from, to, blocks) => {
                let before = self.all_cached(from);
                match self.pools[from].offload(&self.pools[to], blocks).await {
                    Ok(report) => {
                        let gone = report.evicted_blocks + report.leaving_blocks + report.warm_blocks;
                        assert_eq!(report.carried.blocks + report.present_blocks, gone, "{report:?}");
                        // No look-up happens, and no batch is in flight.
                        assert_eq!((report.warm_blocks, report.leaving_blocks), (0, 0), "{report:?}");
                        assert!(gone <= blocks, "{report:?}");
                    }
                    Err(error) => {
                        assert!(is_full(&error), "{error}");
                        assert_eq!(self.all_cached(from), before);
                    }
                }
            }
            Step::BringBack(to, from, family, tokens) => {
                let tokens = prompt(family, tokens);
                let before = self.cached(to, &tokens);
                match self.pools[to].bring_back(&self.pools[from], &PrefixKeys::new(), &tokens).await {
                    Ok(report) => {
                        // The last block is not looked up if the prompt ends with it.
                        let block_tokens = self.pools[to].layout().block_tokens();
                        let blocks = report.cached_blocks.min((tokens.len() - 1) / block_tokens);
                        let found = self.cached(to, &tokens);
                        assert!(found == blocks * block_tokens && found >= before, "{report:?}");
                    }
                    Err(error) => assert!(is_full(&error), "{error}"),
                }
            }
            Step::Finds(side, family, tokens) => {
                assert_eq!(self.cached(side, &prompt(family, LONGEST + 1)), tokens);
            }
            Step::Clear(side) => {
                self.pools[side].clear_prefix_cache();
                self.eras[side] += 1;
            }
        }
    }

    fn check(&self) {
        for (side, pool) in self.pools.iter().enumerate() {
            self.all_cached(side);
            let here = || self.open.values().filter(|open| open.side == side);
            let owned: BTreeSet<_> = here().flat_map(|open| open.sequence.blocks()).collect();
            let report = pool.audit().unwrap();
            assert_eq!((report.owned, report.held), (owned.len(), 0), "{report:?}");
            assert_eq!(pool.sequence_count(), here().count());
        }
        for open in self.open.values() {
            assert_eq!(open.sequence.len(), open.tokens.len());
            lineage_of(&self.pools[open.side], &open.sequence, &open.tokens);
        }
    }
}

fn run(block_tokens: usize, steps: Vec<Step>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let mut world = World::new(block_tokens);
    for step in steps {
        runtime.block_on(world.apply(step));
        world.check();
    }
    world.open.clear();
    world.pools.iter().for_each(is_idle);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 400 }, ..ProptestConfig::default() })]

    #[test]
    fn sequences_and_cached_blocks_are_where_they_should_be(
        block_tokens in prop::sample::select(vec![1usize, 2, 3, 4, 16]),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        run(block_tokens, steps);
    }
}

/// The ways by which tokens from before a clear could come back, in a fixed order: they do not, and
/// all others are found.
#[test]
fn only_what_was_cleared_is_not_found() {
    use Step::*;
    let (a, b, c) = (0, 1, 2);
    // The only open sequence goes to the next pool, or to the one before.
    let (next, back) = (Migrate(0, 1), Migrate(0, 2));
    for block_tokens in [1, 2, 3, 16] {
        let (all, half) = (LONGEST / block_tokens * block_tokens, 20 / block_tokens * block_tokens);
        let cached_in_a = [Admit(a, 0, LONGEST), Close(0)];
        let offloaded = [&cached_in_a[..], &[Offload(a, b, 200)]].concat();
        let again = [&offloaded[..], &[BringBack(a, b, 0, LONGEST), Finds(a, 0, all), Clear(a)]].concat();
        for (way, steps) in [
            ("one token, and one more", vec![Admit(a, 0, 1), Append(0, 1)]),
            (
                "a clear of a pool in between",
                [
                    &offloaded[..],
                    &[
                        Offload(b, c, 200),
                        Clear(b),
                        BringBack(a, c, 0, LONGEST),
                        Finds(a, 0, all),
                        Finds(c, 0, all),
                    ],
                ]
                .concat(),
            ),
            (
                "swapped out, and in after the clear",
                vec![
                    Admit(a, 0, LONGEST),
                    Swap(0, 1),
                    Clear(a),
                    back.clone(),
                    Append(0, 5),
                    Close(0),
                    Finds(a, 0, 0),
                    Finds(b, 0, all),
                ],
            ),
            (
                "swapped out and in after the clear",
                vec![
                    Admit(a, 0, LONGEST),
                    Clear(a),
                    Swap(0, 1),
                    back.clone(),
                    Append(0, 5),
                    Close(0),
                    Finds(a, 0, 0),
                    Finds(b, 0, 0),
                ],
            ),
            (
                "over two other pools, in one of which it goes on",
                vec![
                    Admit(a, 0, LONGEST),
                    next.clone(),
                    Append(0, 5),
                    next.clone(),
                    Clear(a),
                    next.clone(),
                    Close(0),
                    Finds(a, 0, 0),
                    Finds(b, 0, all),
                    Finds(c, 0, all),
                    BringBack(a, b, 0, LONGEST),
                    BringBack(a, c, 0, LONGEST),
                    Finds(a, 0, 0),
                ],
            ),
            (
                "offloaded before the clear, over two pools",
                [
                    &offloaded[..],
                    &[
                        Offload(b, c, 200),
                        BringBack(a, c, 0, LONGEST),
                        Finds(a, 0, all),
                        Clear(a),
                        BringBack(a, c, 0, LONGEST),
                        Finds(a, 0, 0),
                        Finds(c, 0, all),
                    ],
                ]
                .concat(),
            ),
            (
                "computed elsewhere, behind blocks from before the clear",
                vec![
                    Admit(a, 0, 20),
                    Close(0),
                    Offload(a, b, 200),
                    Admit(b, 0, LONGEST),
                    Close(0),
                    Clear(a),
                    // The first ones are computed anew, so that what is behind them would be found.
                    Admit(a, 0, 20),
                    Close(0),
                    BringBack(a, b, 0, LONGEST),
                    Finds(a, 0, half),
                ],
            ),
            (
                "new blocks take the place of old ones in the second pool",
                [&again[..], &again, &again].concat(),
            ),
            (
                "a sequence from after the clear shares no old blocks",
                vec![
                    Admit(a, 0, LONGEST),
                    next.clone(),
                    Close(0),
                    Finds(b, 0, all),
                    Clear(a),
                    Admit(a, 0, LONGEST),
                    next.clone(),
                    back.clone(),
                    Close(0),
                    Finds(a, 0, all),
                ],
            ),
            (
                "a clear of a pool in which nothing was computed",
                vec![
                    Admit(a, 0, LONGEST),
                    next.clone(),
                    Clear(b),
                    Finds(b, 0, 0),
                    back.clone(),
                    next.clone(),
                    back.clone(),
                    Close(0),
                    Finds(a, 0, all),
                    Finds(b, 0, all),
                ],
            ),
        ] {
            println!("{way}, blocks of {block_tokens}");
            run(block_tokens, steps);
        }
    }
}
