//! Whatever happens to sequences, a state is what was computed from the tokens before it.

use std::collections::BTreeMap;

use kvpool::{GroupedSequence, SequenceError, Tokens};
use pollster::block_on;
use proptest::prelude::*;

use super::Engine;

#[derive(Clone, Copy, Debug)]
enum Step {
    Admit(usize, usize),
    Prefill(usize),
    Append(usize, usize),
    Abandon(usize, usize),
    Truncate(usize),
    Close(usize),
    Evict(usize),
    Clear,
    Compact,
}

fn step() -> impl Strategy<Value = Step> {
    let (slot, tokens) = (0..3_usize, 1..40_usize);
    prop_oneof![
        4 => (slot.clone(), 2..90_usize).prop_map(|(slot, tokens)| Step::Admit(slot, tokens)),
        5 => slot.clone().prop_map(Step::Prefill),
        3 => (slot.clone(), tokens.clone()).prop_map(|(slot, tokens)| Step::Append(slot, tokens)),
        1 => (slot.clone(), tokens).prop_map(|(slot, tokens)| Step::Abandon(slot, tokens)),
        1 => slot.clone().prop_map(Step::Truncate),
        3 => slot.prop_map(Step::Close),
        1 => (0..90_usize).prop_map(Step::Evict),
        1 => Just(Step::Clear),
        1 => Just(Step::Compact),
    ]
}

struct Run {
    engine: Engine,
    open: BTreeMap<usize, (GroupedSequence, Vec<u32>)>,
    next: u64,
}

impl Run {
    fn step(&mut self, step: Step) {
        self.next += 1;
        match step {
            Step::Admit(slot, tokens) => {
                self.open.remove(&slot);
                let all: Vec<u32> = (0..tokens as u32).chain([self.next as u32 % 3]).collect();
                let session = (self.next % 4).checked_sub(1);
                if let Ok(sequence) = self.engine.admit_in(self.next, session, &all) {
                    self.open.insert(slot, (sequence, all));
                }
            }
            Step::Prefill(slot) => {
                let Some((sequence, all)) = self.open.get_mut(&slot) else { return };
                if let Err(error) = self.engine.prefill(sequence, all) {
                    assert!(matches!(error, SequenceError::Alloc(_)), "{error}");
                }
            }
            Step::Append(slot, tokens) | Step::Abandon(slot, tokens) => {
                let Some((sequence, all)) = self.open.get_mut(&slot) else { return };
                let mut batch = self.engine.pool.begin_batch();
                let known = all.len();
                if sequence.len() < known {
                    let _ = self.engine.step(&mut batch, sequence, all, Tokens::Announced(tokens));
                } else {
                    all.extend((0..tokens).map(|at| ((known + at) % 7) as u32));
                    let new = all[known..].to_vec();
                    if self.engine.step(&mut batch, sequence, all, Tokens::Ids(&new)).is_err() {
                        all.truncate(known);
                    }
                }
                if matches!(step, Step::Append(..)) { batch.finish() } else { drop(batch) }
            }
            Step::Truncate(slot) => {
                let Some((sequence, all)) = self.open.get_mut(&slot) else { return };
                sequence.truncate(0).unwrap();
                all.truncate(sequence.group(0).announced());
            }
            Step::Close(slot) => drop(self.open.remove(&slot)),
            Step::Evict(keep) => drop(self.engine.pool.evict_cached(keep)),
            Step::Clear => self.engine.pool.clear_prefix_cache(),
            Step::Compact => drop(block_on(self.engine.pool.defragment()).unwrap()),
        }
        for (sequence, all) in self.open.values_mut() {
            // Withdraws what was abandoned.
            let known = sequence.len();
            sequence.truncate(usize::MAX).unwrap_err();
            assert_eq!(sequence.len(), known);
            all.truncate(sequence.group(0).announced());
            self.engine.check(sequence, all);
        }
        self.engine.pool.audit().unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 40 } else { 250 }))]
    /// Whatever happens, a state is what was computed from the tokens before it.
    #[test]
    fn every_state_is_of_its_tokens(
        block_tokens in prop_oneof![Just(1_usize), Just(2), Just(3), Just(16)],
        blocks in prop_oneof![Just(60_usize), 200..900_usize],
        steps in prop::collection::vec(step(), 1..50),
    ) {
        let mut run = Run { engine: Engine::new(blocks, block_tokens), open: BTreeMap::new(), next: 0 };
        steps.into_iter().for_each(|step| run.step(step));
        run.open.clear();
        run.engine.close();
    }
}
