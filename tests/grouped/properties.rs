//! Whatever happens to sequences, the next token finds what it sees in every group.

use std::collections::{BTreeMap, BTreeSet};

use kvpool::{AdmitRequest, GroupedSequence, Pool, SequenceError, SequenceId, Tokens};
use pollster::block_on;
use proptest::prelude::*;

use super::{append, check, pool};

#[derive(Clone, Copy, Debug)]
enum Step {
    Admit(usize, usize),
    Append(usize, usize),
    Abandon(usize, usize),
    Draft(usize, usize, usize),
    Fork(usize, usize),
    Truncate(usize, usize),
    Close(usize),
    Compact,
}

fn step() -> impl Strategy<Value = Step> {
    let (slot, tokens) = (0..3_usize, 1..40_usize);
    prop_oneof![
        4 => (slot.clone(), 2..90_usize).prop_map(|(slot, tokens)| Step::Admit(slot, tokens)),
        6 => (slot.clone(), tokens.clone()).prop_map(|(slot, tokens)| Step::Append(slot, tokens)),
        1 => (slot.clone(), tokens).prop_map(|(slot, tokens)| Step::Abandon(slot, tokens)),
        2 => (slot.clone(), 1..9_usize, 0..9_usize).prop_map(|(slot, most, kept)| Step::Draft(slot, most, kept)),
        1 => (slot.clone(), slot.clone()).prop_map(|(from, to)| Step::Fork(from, to)),
        1 => (slot.clone(), 0..200_usize).prop_map(|(slot, tokens)| Step::Truncate(slot, tokens)),
        2 => slot.prop_map(Step::Close),
        1 => Just(Step::Compact),
    ]
}

struct Run {
    pool: Pool,
    open: BTreeMap<usize, (GroupedSequence, Vec<u32>)>,
    /// Those whose reservation has all blocks of the announced tokens: a fork has none, costs its
    /// source the copy of a shared last block, and an abandoned batch leaves it the blocks of that
    /// batch only. A truncation gives blocks back.
    covered: BTreeSet<usize>,
    next: u64,
}

impl Run {
    fn step(&mut self, step: Step) {
        self.next += 1;
        let id = SequenceId(self.next);
        match step {
            Step::Admit(slot, tokens) => {
                self.open.remove(&slot);
                self.covered.insert(slot);
                let all: Vec<u32> = (0..tokens as u32).chain([self.next as u32 % 3]).collect();
                let request = AdmitRequest::new(id, &all);
                if let Ok(sequence) = self.pool.admit_grouped(&request) {
                    self.open.insert(slot, (sequence, all));
                }
            }
            Step::Append(slot, tokens) | Step::Abandon(slot, tokens) => {
                let Some((sequence, all)) = self.open.get_mut(&slot) else { return };
                let mut batch = self.pool.begin_batch();
                let known = all.len();
                if sequence.len() < known {
                    let outcome = append(&mut batch, sequence, all, Tokens::Announced(tokens));
                    assert!(outcome.is_ok() || !self.covered.contains(&slot), "{outcome:?}");
                } else {
                    all.extend((0..tokens).map(|at| ((known + at) % 7) as u32));
                    let new = all[known..].to_vec();
                    if append(&mut batch, sequence, all, Tokens::Ids(&new)).is_err() {
                        all.truncate(known);
                    }
                }
                if matches!(step, Step::Append(..)) { batch.finish() } else { drop(batch) }
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
                let Some((sequence, all)) = self.open.get_mut(&from) else { return };
                let fork = (sequence.fork(id).unwrap(), all.clone());
                self.open.insert(to, fork);
                self.covered.retain(|slot| ![from, to].contains(slot));
            }
            Step::Truncate(slot, tokens) => {
                let Some((sequence, all)) = self.open.get_mut(&slot) else { return };
                self.covered.remove(&slot);
                let (length, held) = (sequence.len(), sequence.held_blocks());
                match sequence.truncate(tokens.min(length)) {
                    Ok(()) => all.truncate(sequence.group(0).announced()),
                    Err(SequenceError::BehindWindow { .. }) => {
                        assert_eq!((sequence.len(), sequence.held_blocks()), (length, held));
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            Step::Close(slot) => drop(self.open.remove(&slot)),
            Step::Compact => drop(block_on(self.pool.defragment()).unwrap()),
        }
        for (sequence, all) in self.open.values() {
            check(&self.pool, sequence, all);
        }
        self.pool.audit().unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 40 } else { 250 }))]
    /// Whatever happens, the next token of each sequence finds what it sees in every group.
    #[test]
    fn every_group_has_what_the_next_token_sees(
        block_tokens in prop_oneof![Just(1_usize), Just(2), Just(3), Just(16)],
        blocks in prop_oneof![Just(60_usize), 200..900_usize],
        steps in prop::collection::vec(step(), 1..50),
    ) {
        let mut run = Run {
            pool: pool(blocks, block_tokens),
            open: BTreeMap::new(),
            covered: BTreeSet::new(),
            next: 0,
        };
        steps.into_iter().for_each(|step| run.step(step));
        run.open.clear();
        run.pool.audit().unwrap();
        prop_assert_eq!(run.pool.stats().used, 0);
    }
}
