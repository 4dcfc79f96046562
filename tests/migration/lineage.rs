//! Random operations on three pools with clears in between: a pool finds no token that was computed
//! in it before its last clear, nor one that was computed from such a token, in any pool.
//!
//! Each row has, beside its token and place, its *lineage*: the eras of the pools in which it and
//! the tokens before it were computed.

use std::collections::BTreeMap;
use std::time::Instant;

use kvpool::prefix::PrefixKeys;
use kvpool::storage::{Arrangement, Dtype, Elements, ElementsMut, KvPlanes};
use kvpool::{Pool, Preempt, Sequence, SequenceError, SequenceId};
use proptest::prelude::*;

use super::kv::{is_idle, pool, prompt, sized};

const POOLS: usize = 3;
const BLOCKS: usize = 60;
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
}

fn step() -> impl Strategy<Value = Step> {
    let side = 0..POOLS;
    let pair = (0..POOLS, 1..POOLS).prop_map(|(from, further)| (from, (from + further) % POOLS));
    prop_oneof![
        5 => (side.clone(), 0..2u32, 1..40usize).prop_map(|(side, family, tokens)| Step::Admit(side, family, tokens)),
        2 => (any::<u8>(), 1..9usize).prop_map(|(which, tokens)| Step::Append(which, tokens)),
        1 => (any::<u8>(), 0..40usize).prop_map(|(which, length)| Step::Truncate(which, length)),
        1 => any::<u8>().prop_map(Step::Fork),
        4 => any::<u8>().prop_map(Step::Close),
        4 => (any::<u8>(), 1..POOLS).prop_map(|(which, to)| Step::Migrate(which, to)),
        3 => (any::<u8>(), 1..POOLS).prop_map(|(which, to)| Step::Swap(which, to)),
        1 => (any::<u8>(), 1..POOLS).prop_map(|(which, to)| Step::Replicate(which, to)),
        4 => (pair.clone(), 1..40usize).prop_map(|((from, to), blocks)| Step::Offload(from, to, blocks)),
        4 => (pair, 0..2u32, 1..40usize).prop_map(|((to, from), family, tokens)| Step::BringBack(to, from, family, tokens)),
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
    /// Tokens that look-ups found.
    found: usize,
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
        let arrangements = [Arrangement::LayerFirst, Arrangement::BlockFirst, Arrangement::LayerFirst];
        let pools = arrangements.map(|of| pool(sized(block_tokens, of, KvPlanes::Separate), BLOCKS));
        Self { pools, eras: [0; POOLS], open: BTreeMap::new(), next: 0, found: 0 }
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
            match batch.append(sequence, &all[first..]) {
                Err(SequenceError::TokensUnknown { .. }) => batch.append(sequence, all.len() - first),
                appended => appended,
            }?;
        }
        for layer in 0..pool.layout().layers() {
            let [k, v] = [&rows, &rows].map(|rows| Elements::new(Dtype::Bf16, rows).unwrap());
            batch.store(sequence, layer, first..all.len(), k, v).unwrap();
        }
        batch.finish();
        Ok(())
    }

    async fn apply(&mut self, step: Step) {
        match step {
            Step::Admit(side, family, tokens) => {
                let tokens = prompt(family, tokens);
                self.next += 1;
                let opened = self.pools[side].sequence(SequenceId(self.next)).tokens(&tokens);
                let mut sequence = opened.unwrap();
                if self.compute(side, &mut sequence, &tokens).is_ok() {
                    self.put(Open { side, sequence, tokens });
                }
            }
            Step::Append(which, count) => {
                let Some(mut open) = self.pick(which) else { return };
                let id = open.sequence.id().0 as u32;
                let before = open.tokens.len();
                open.tokens.extend((0..count as u32).map(|token| 1 << 30 | id << 12 | token));
                if self.compute(open.side, &mut open.sequence, &open.tokens).is_err() {
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
                let there = &self.pools[to];
                let moved = self.pools[side].migrate(sequence, there).until(Instant::now()).await;
                let (side, sequence) =
                    moved.map_or_else(|error| (side, *error.sequence), |(sequence, _)| (to, sequence));
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
                drop(self.pools[open.side].replicate(&open.sequence, there).await);
                self.put(open);
            }
            Step::Offload(from, to, blocks) => {
                drop(self.pools[from].offload(&self.pools[to], blocks).await);
            }
            Step::BringBack(to, from, family, tokens) => {
                let keys = PrefixKeys::new();
                drop(self.pools[to].bring_back(&self.pools[from], &keys, &prompt(family, tokens)).await);
            }
            Step::Clear(side) => {
                self.pools[side].clear_prefix_cache();
                self.eras[side] += 1;
            }
        }
    }

    fn check(&mut self) {
        for (side, pool) in self.pools.iter().enumerate() {
            for family in 0..2 {
                let tokens = prompt(family, 41);
                let sequence = pool.sequence(SequenceId(u64::MAX)).tokens(&tokens).unwrap();
                let era = lineage_of(pool, &sequence, &tokens)[side];
                assert!(
                    [0, self.eras[side] + 1].contains(&era),
                    "era {era} of {:?}: {sequence:?}",
                    self.eras
                );
                self.found += sequence.len();
            }
            pool.audit().unwrap();
        }
        for open in self.open.values() {
            assert_eq!(open.sequence.len(), open.tokens.len());
            lineage_of(&self.pools[open.side], &open.sequence, &open.tokens);
        }
    }
}

fn run(block_tokens: usize, steps: Vec<Step>) -> usize {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let mut world = World::new(block_tokens);
    for step in steps {
        runtime.block_on(world.apply(step));
        world.check();
    }
    world.open.clear();
    world.pools.iter().for_each(is_idle);
    world.found
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 400 }, ..ProptestConfig::default() })]

    #[test]
    fn nothing_from_before_a_clear_is_found(
        block_tokens in prop::sample::select(vec![1usize, 2, 3, 4, 16]),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        run(block_tokens, steps);
    }
}

/// The same steps in a fixed order: most of what may be found is found.
#[test]
fn what_was_not_cleared_is_found() {
    for block_tokens in [1, 2, 3, 16] {
        let steps = vec![
            Step::Admit(0, 0, 40),
            Step::Close(0),
            Step::Offload(0, 1, 40),
            Step::Offload(1, 2, 40),
            Step::Clear(1),
            Step::BringBack(0, 2, 0, 40),
        ];
        let found = run(block_tokens, steps);
        let whole = 40 / block_tokens * block_tokens;
        assert_eq!(found, 7 * whole, "blocks of {block_tokens}");
    }
}
