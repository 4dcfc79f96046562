//! Several batches in flight that write to the same sequences, and end in any order, or not at all.

use std::collections::BTreeMap;

use fastrand::Rng;
use kvpool::{Batch, GroupedSequence, SequenceError, SequenceId, Tokens};
use pollster::block_on;

use super::engine::{Engine, List};

/// A batch, and the cells with their values that its kernels read.
struct Flight {
    batch: Batch,
    reads: Vec<(usize, u64)>,
}

struct Run {
    engine: Engine,
    open: BTreeMap<u64, (GroupedSequence, Vec<u32>)>,
    flights: Vec<Flight>,
    random: Rng,
    next: u64,
}

impl Run {
    fn new(lists: &[List], states: &[usize], blocks: usize, seed: u64) -> Self {
        let engine = Engine::with(blocks, lists, states);
        Self { engine, open: BTreeMap::new(), flights: Vec::new(), random: Rng::with_seed(seed), next: 0 }
    }

    fn pick(&mut self) -> Option<u64> {
        let keys: Vec<u64> = self.open.keys().copied().collect();
        self.random.choice(keys)
    }

    fn pick_flight(&mut self) -> Option<Flight> {
        let at = self.random.choice(0..self.flights.len())?;
        Some(self.flights.swap_remove(at))
    }

    /// What a sequence was cut behind may be written again.
    fn forget_reads(&mut self) {
        self.flights.iter_mut().for_each(|flight| flight.reads.clear());
    }

    /// Returns what the token at this position sees.
    fn reads(&self, sequence: &GroupedSequence, position: usize) -> Vec<(usize, u64)> {
        let batch = self.engine.pool.begin_batch();
        let mut reads = Vec::new();
        for (list, &(window, _)) in self.engine.lists.iter().enumerate() {
            let (window, sinks) = window.map_or((usize::MAX, 0), |(window, sinks)| (window, sinks as usize));
            let first = position.saturating_sub(window.saturating_sub(1));
            let mut slots = Vec::new();
            for tokens in [0..sinks.min(first), first..position] {
                batch.slot_mapping(sequence.group(list), tokens, &mut slots).unwrap();
            }
            let cells = self.engine.cells.lock().unwrap();
            let cells = slots.iter().map(|&slot| self.engine.cell(list, slot)).map(|at| (at, cells[at]));
            reads.extend(cells);
        }
        batch.finish();
        reads
    }

    fn admit(&mut self) {
        let tokens = self.random.u32(2..110);
        let all: Vec<u32> = (0..tokens).chain([self.next as u32 % 3]).collect();
        if self.open.len() < 4
            && let Ok(sequence) = self.engine.admit(self.next, &all)
        {
            self.open.insert(self.next, (sequence, all));
        }
    }

    fn append(&mut self) -> Option<()> {
        let (key, tokens) = (self.pick()?, self.random.usize(1..24));
        let is_new = self.flights.is_empty() || self.flights.len() < 3 && self.random.bool();
        let mut flight = match is_new {
            true => Flight { batch: self.engine.pool.begin_batch(), reads: Vec::new() },
            false => self.pick_flight()?,
        };
        let (mut sequence, mut all) = self.open.remove(&key)?;
        let (known, begin) = (all.len(), sequence.len());
        let outcome = if begin < known {
            self.engine.step(&mut flight.batch, &mut sequence, &all, Tokens::Announced(tokens))
        } else {
            let other = self.random.u32(..3);
            all.extend((0..tokens).map(|at| ((known + at) % 7) as u32 + other));
            let new = all[known..].to_vec();
            self.engine.step(&mut flight.batch, &mut sequence, &all, Tokens::Ids(&new))
        };
        match outcome {
            Ok(()) => flight.reads.extend(self.reads(&sequence, begin)),
            Err(_) => all.truncate(known),
        }
        self.open.insert(key, (sequence, all));
        self.flights.push(flight);
        Some(())
    }

    fn draft(&mut self) -> Option<()> {
        let key = self.pick()?;
        let (sequence, all) = self.open.get_mut(&key)?;
        let (known, drafted) = (all.len(), self.random.usize(1..9));
        if sequence.len() != known || !self.engine.states.is_empty() {
            return None;
        }
        let mut batch = self.engine.pool.begin_batch();
        all.extend((0..drafted).map(|at| ((known + at) % 5) as u32));
        if self.engine.step(&mut batch, sequence, all, Tokens::Draft(drafted)).is_err() {
            all.truncate(known);
            return None;
        }
        batch.finish();
        all.truncate(known + self.random.usize(..=drafted));
        sequence.accept(&all[known..]).unwrap();
        self.forget_reads();
        Some(())
    }

    fn truncate(&mut self) -> Option<()> {
        let (key, tokens) = (self.pick()?, self.random.usize(..30));
        let (sequence, all) = self.open.get_mut(&key)?;
        if sequence.truncate(sequence.len().saturating_sub(tokens)).is_ok() {
            all.truncate(sequence.group(0).announced());
            self.forget_reads();
        }
        Some(())
    }

    fn fork(&mut self) -> Option<()> {
        let key = self.pick()?;
        let (sequence, all) = self.open.get_mut(&key)?;
        let fork = sequence.fork(SequenceId(self.next)).ok()?;
        let all = all.clone();
        self.open.insert(self.next, (fork, all));
        Some(())
    }

    fn uncache(&mut self) -> Option<()> {
        let key = self.pick()?;
        let of_list = self.open[&key].0.group(self.random.usize(..self.engine.lists.len()));
        let hash = self.random.choice(of_list.block_hashes())?;
        self.engine.pool.uncache(&[*hash]);
        Some(())
    }

    fn step(&mut self) {
        self.next += 1;
        match self.random.u32(..23) {
            0..3 => self.admit(),
            3..10 => drop(self.append()),
            10..12 => self.pick_flight().into_iter().for_each(|flight| flight.batch.finish()),
            12..14 => {
                drop(self.pick_flight());
                self.forget_reads();
            }
            14..16 if self.open.len() < 5 => drop(self.fork()),
            16 => drop(self.truncate()),
            17 => drop(self.pick().and_then(|key| self.open.remove(&key))),
            18 => drop(self.draft()),
            19 => drop(self.engine.pool.evict_cached(self.random.usize(..60))),
            20 => self.engine.pool.clear_prefix_cache(),
            21 => drop(block_on(self.engine.pool.defragment()).unwrap()),
            _ => drop(self.uncache()),
        }
    }

    /// Checks each sequence as it is, and then withdraws what was abandoned.
    fn check(&mut self) {
        let cells = self.engine.cells.lock().unwrap();
        for (at, value) in self.flights.iter().flat_map(|flight| &flight.reads) {
            assert_eq!(cells[*at], *value, "a batch in flight reads other bytes");
        }
        drop(cells);
        let mut was_cut = false;
        for (sequence, all) in self.open.values_mut() {
            let (length, lists) = (sequence.len(), 0..sequence.groups());
            let of_list = |sequence: &GroupedSequence, list| {
                let list = sequence.group(list);
                let held = list.block_count().checked_sub(list.blocks_given_up());
                (list.announced(), held.expect("a block is not given up twice"))
            };
            let before: Vec<_> = lists.clone().map(|list| of_list(sequence, list)).collect();
            if self.engine.states.is_empty() {
                assert_eq!(sequence.held_blocks(), before.iter().map(|of| of.1).sum::<usize>());
                assert!(lists.clone().all(|list| sequence.group(list).len() == length));
            }
            assert!(matches!(sequence.truncate(usize::MAX), Err(SequenceError::Invalid { .. })));
            assert_eq!(sequence.len(), length);
            let announced = sequence.group(0).announced();
            assert!(lists.clone().all(|list| of_list(sequence, list).0 == announced));
            was_cut |= all.len() > announced;
            all.truncate(announced);
            self.engine.check(sequence, all);
        }
        if was_cut {
            self.forget_reads();
        }
        self.engine.pool.audit().unwrap();
    }
}

/// The next token of each sequence sees its own tokens in every list, as do batches in flight.
#[test]
fn batches_end_in_any_order() {
    let sets: [&[List]; 9] = [
        &[(None, 4), (Some((9, 0)), 4)],
        &[(None, 16), (Some((9, 0)), 4)],
        &[(Some((1, 0)), 1), (None, 16)],
        &[(Some((9, 0)), 4), (None, 16), (Some((24, 5)), 8)],
        &[(None, 6), (Some((7, 3)), 4), (Some((1, 0)), 3)],
        &[(Some((3, 0)), 5), (None, 7)],
        &[(Some((20, 0)), 16), (Some((20, 0)), 2)],
        &[(None, 4), (Some((2, 1)), 16)],
        &[(Some((33, 2)), 2), (Some((5, 0)), 16), (None, 8)],
    ];
    let seed = std::env::var("KVPOOL_FLIGHTS_SEED").ok().and_then(|seed| seed.parse().ok());
    let seeds = seed.map_or(0..if cfg!(debug_assertions) { 90 } else { 900 }, |seed| seed..seed + 1);
    for seed in seeds {
        println!("KVPOOL_FLIGHTS_SEED={seed}");
        let states: &[usize] = if seed % 5 == 4 { &[3] } else { &[] };
        let blocks = if seed % 7 < 2 { 90 } else { 700 };
        let mut run = Run::new(sets[(seed % 9) as usize], states, blocks, seed);
        for _ in 0..150 {
            run.step();
            run.check();
        }
        run.flights.drain(..).for_each(|flight| flight.batch.finish());
        run.open.clear();
        run.engine.close();
    }
}
