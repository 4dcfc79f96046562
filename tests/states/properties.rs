//! Whatever happens to sequences, a state is what was computed from the tokens before it.

use std::collections::BTreeMap;

use kvpool::{GroupedSequence, SequenceError, SequenceId, Tokens};
use pollster::block_on;
use proptest::prelude::*;

use super::engine::{Engine, List, STATES};

#[derive(Clone, Copy, Debug)]
enum Step {
    Admit(usize, usize),
    Prefill(usize),
    Append(usize, usize),
    Abandon(usize, usize),
    Draft(usize, usize, usize),
    Fork(usize, usize),
    Truncate(usize, usize),
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
        1 => (slot.clone(), 1..9_usize, 0..9_usize).prop_map(|(slot, most, kept)| Step::Draft(slot, most, kept)),
        1 => (slot.clone(), slot.clone()).prop_map(|(from, to)| Step::Fork(from, to)),
        1 => (slot.clone(), prop_oneof![Just(0_usize), 0..200_usize])
            .prop_map(|(slot, tokens)| Step::Truncate(slot, tokens)),
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
            Step::Draft(slot, drafted, accepted) => {
                let Some((sequence, all)) = self.open.get_mut(&slot) else { return };
                let known = all.len();
                if sequence.len() != known || !self.engine.states.is_empty() {
                    return;
                }
                let mut batch = self.engine.pool.begin_batch();
                all.extend((0..drafted).map(|at| ((known + at) % 5) as u32));
                if self.engine.step(&mut batch, sequence, all, Tokens::Draft(drafted)).is_err() {
                    return all.truncate(known);
                }
                batch.finish();
                all.truncate(known + accepted.min(drafted));
                sequence.accept(&all[known..]).unwrap();
            }
            Step::Fork(from, to) => {
                let Some((sequence, all)) = self.open.get_mut(&from) else { return };
                match sequence.fork(SequenceId(self.next)) {
                    Ok(fork) => {
                        let all = all.clone();
                        self.open.insert(to, (fork, all));
                    }
                    Err(_) => assert!(!self.engine.states.is_empty()),
                }
            }
            Step::Truncate(slot, tokens) => {
                let Some((sequence, all)) = self.open.get_mut(&slot) else { return };
                let (length, reserved) = (sequence.len(), sequence.reserved_blocks());
                match sequence.truncate(tokens.min(length)) {
                    Ok(()) => all.truncate(sequence.group(0).announced()),
                    Err(SequenceError::BehindWindow { .. } | SequenceError::StateAhead { .. }) => {
                        assert_eq!((sequence.len(), sequence.reserved_blocks()), (length, reserved));
                    }
                    Err(error) => panic!("{error}"),
                }
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
    /// Whatever happens, a state is what was computed from the tokens before it, and the next token
    /// sees its window in every list, whatever the tokens of the lists' blocks.
    #[test]
    fn every_state_is_of_its_tokens(
        unit in prop_oneof![Just(1_usize), Just(2), Just(3), Just(16)],
        multiples in prop::array::uniform3(1..5_usize),
        has_states in any::<bool>(),
        blocks in prop_oneof![Just(80_usize), 200..900_usize],
        steps in prop::collection::vec(step(), 1..50),
    ) {
        let windows = [None, Some((9, 0)), Some((24, 5))];
        let lists: Vec<List> =
            windows.into_iter().zip(multiples).map(|(window, multiple)| (window, unit * multiple)).collect();
        let states = if has_states { &STATES[..] } else { &[] };
        let engine = Engine::with(blocks, &lists, states);
        let mut run = Run { engine, open: BTreeMap::new(), next: 0 };
        steps.into_iter().for_each(|step| run.step(step));
        run.open.clear();
        run.engine.close();
    }
}
