//! An engine that holds the bytes of a pool: it checks each state that it reads, and each token that
//! the next one sees.

use std::sync::{Arc, Mutex};

use kvpool::prefix::{HashKey, PrefixConfig};
use kvpool::storage::{CopyDone, FrameMove};
use kvpool::{
    AdmitRequest, Batch, GroupCopy, GroupedSequence, KvLayout, Pool, SequenceError, SequenceId, SessionId,
    Tokens, Window,
};

/// Frames of the states of [`Engine::new`].
pub const STATES: [usize; 2] = [5, 2];

/// A list of blocks: its window, with sinks, and the tokens of a block.
pub type List = (Option<(usize, u32)>, usize);

/// An engine's memory: a cell for each token of a frame.
#[derive(Clone)]
pub struct Engine {
    pub pool: Pool,
    pub cells: Arc<Mutex<Vec<u64>>>,
    pub lists: Vec<List>,
    pub states: Vec<usize>,
    /// The cells of a frame.
    in_frame: usize,
}

/// What is computed from these tokens, by a layer or a frame of a state.
fn stamp(of: usize, tokens: &[u32]) -> u64 {
    let mix = |sum: u64, &token: &u32| (sum ^ (u64::from(token) + 1)).wrapping_mul(0x0000_0100_0000_01b3);
    tokens.iter().fold(0xcbf2_9ce4_8422_2325 ^ of as u64, mix)
}

impl Engine {
    /// A list that keeps all tokens, one with a window, and two states.
    pub fn new(blocks: usize, block_tokens: usize) -> Self {
        Self::with(blocks, &[(None, block_tokens), (Some((9, 0)), block_tokens)], &STATES)
    }

    pub fn with(blocks: usize, lists: &[List], states: &[usize]) -> Self {
        let in_frame = lists.iter().map(|list| list.1).max().unwrap();
        let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(lists[0].1);
        let cells = Arc::new(Mutex::new(vec![0; (blocks + 1) * in_frame]));
        let memory = cells.clone();
        let copier = Arc::new(move |moves: &[FrameMove], done: CopyDone| {
            moves.iter().for_each(|&frames| copy(&mut memory.lock().unwrap(), in_frame, frames));
            done(Ok(()));
        });
        let window = |(tokens, sinks)| Window::new(tokens).unwrap().sinks(sinks);
        let pool = Pool::builder(layout.build().unwrap())
            .blocks(blocks)
            .threads(1)
            .engine_copies(copier)
            .prefix_cache(PrefixConfig::new().key(HashKey::from_bytes([7; 32])))
            .groups(lists.iter().map(|list| list.0.map(window)))
            .list_tokens(lists.iter().map(|list| list.1))
            .states(states.iter().copied())
            .build()
            .unwrap();
        Self { pool, cells, lists: lists.to_vec(), states: states.to_vec(), in_frame }
    }

    pub fn copies(&self, copies: &[GroupCopy]) {
        let mut cells = self.cells.lock().unwrap();
        for of in copies {
            let state = of.group.checked_sub(self.lists.len());
            assert_eq!(of.frames.len(), state.map_or(1, |state| self.states[state]));
            of.frames.iter().for_each(|&frames| copy(&mut cells, self.in_frame, frames));
        }
    }

    /// Returns the place of a slot of a list in the memory.
    pub fn cell(&self, list: usize, slot: i64) -> usize {
        let (slot, tokens) = (slot as usize, self.lists[list].1);
        slot / tokens * self.in_frame + slot % tokens
    }

    /// Appends, and computes: each frame of a state from what it held before.
    pub fn step(
        &self,
        batch: &mut Batch,
        sequence: &mut GroupedSequence,
        all: &[u32],
        tokens: Tokens<'_>,
    ) -> Result<(), SequenceError> {
        let appended = batch.append_grouped(sequence, tokens)?;
        self.copies(&appended.copies);
        let new = appended.tokens;
        for list in 0..self.lists.len() {
            let mut slots = Vec::new();
            batch.slot_mapping(sequence.group(list), new.clone(), &mut slots)?;
            let mut cells = self.cells.lock().unwrap();
            for (position, slot) in new.clone().zip(slots) {
                cells[self.cell(list, slot)] = stamp(list, &all[..=position]);
            }
        }
        let mut cells = self.cells.lock().unwrap();
        for state in 0..self.states.len() {
            for (frame, at) in sequence.state(state).enumerate() {
                let cell = &mut cells[at * self.in_frame..][..self.in_frame];
                let (of, before) = (self.lists.len() + 100 * state + frame, appended.stepped.start);
                // At position 0 the engine initializes it.
                assert!(before == 0 || cell.iter().all(|&cell| cell == stamp(of, &all[..before])));
                cell.fill(stamp(of, &all[..appended.stepped.end]));
            }
        }
        assert_eq!(sequence.state_tokens(), appended.stepped.end);
        Ok(())
    }

    /// Checks that the states hold what they say, if they are in the sequence's own frames.
    pub fn check_states(&self, sequence: &GroupedSequence, all: &[u32]) {
        let (cells, tokens) = (self.cells.lock().unwrap(), sequence.state_tokens());
        for state in (0..self.states.len()).filter(|_| tokens > 0) {
            for (frame, at) in sequence.state(state).enumerate() {
                let expected = stamp(self.lists.len() + 100 * state + frame, &all[..tokens]);
                assert!(cells[at * self.in_frame..][..self.in_frame].iter().all(|&cell| cell == expected));
            }
        }
    }

    /// Checks that the next token finds what it sees in each group of blocks.
    pub fn check(&self, sequence: &GroupedSequence, all: &[u32]) {
        let batch = &mut self.pool.begin_batch();
        let length = sequence.len();
        for (list, &(window, block_tokens)) in self.lists.iter().enumerate() {
            let of_list = sequence.group(list);
            assert_eq!((of_list.len(), of_list.block_tokens()), (length, block_tokens));
            assert_eq!(of_list.block_count(), length.div_ceil(block_tokens));
            let (window, sinks) = window.map_or((usize::MAX, 0), |(window, sinks)| (window, sinks as usize));
            let first = length.saturating_sub(window.saturating_sub(1));
            for tokens in [0..sinks.min(first), first..length] {
                let mut slots = Vec::new();
                batch.slot_mapping(of_list, tokens.clone(), &mut slots).unwrap();
                let cells = self.cells.lock().unwrap();
                for (position, &slot) in tokens.clone().zip(&slots) {
                    let cell = cells[self.cell(list, slot)];
                    assert_eq!(cell, stamp(list, &all[..=position]), "{position} of {length} in list {list}");
                }
                for ratio in (1..=block_tokens).filter(|ratio| block_tokens.is_multiple_of(*ratio)) {
                    let mut entries = Vec::new();
                    batch.entry_mapping(of_list, ratio, tokens.clone(), &mut entries).unwrap();
                    let ends = tokens.clone().zip(&slots).filter(|(at, _)| (at + 1).is_multiple_of(ratio));
                    assert!(ends.map(|(_, slot)| slot / ratio as i64).eq(entries), "1 in {ratio}");
                }
            }
        }
        for (state, &frames) in self.states.iter().enumerate() {
            assert_eq!(sequence.state(state).len(), frames);
        }
    }

    pub fn admit(&self, id: u64, all: &[u32]) -> Result<GroupedSequence, SequenceError> {
        self.admit_in(id, None, all)
    }

    pub fn admit_in(
        &self,
        id: u64,
        session: Option<u64>,
        all: &[u32],
    ) -> Result<GroupedSequence, SequenceError> {
        let request = AdmitRequest::new(SequenceId(id), all).chunk(16);
        let session = session.map(SessionId);
        self.pool.admit_grouped(&session.map_or(request.clone(), |session| request.session(session)))
    }

    /// Computes the rest of a prompt, with a checkpoint at its last boundary.
    pub fn prefill(&self, sequence: &mut GroupedSequence, all: &[u32]) -> Result<(), SequenceError> {
        while sequence.len() < all.len() {
            let mut batch = self.pool.begin_batch();
            let end = sequence.next_cut().unwrap_or(all.len());
            let tokens = (end - sequence.len()).min(16);
            self.step(&mut batch, sequence, all, Tokens::Announced(tokens))?;
            if sequence.len() == end && end < all.len() {
                // Without blocks for it there is none.
                if let Ok(copies) = batch.checkpoint(sequence) {
                    self.copies(&copies);
                }
            }
            batch.finish();
        }
        Ok(())
    }

    pub fn close(&self) {
        self.pool.audit().unwrap();
        assert_eq!((self.pool.stats().used, self.pool.sequence_count()), (0, 0));
    }
}

fn copy(cells: &mut [u64], in_frame: usize, frames: FrameMove) {
    let (from, to) = (frames.src.index() * in_frame, frames.dst.index() * in_frame);
    cells.copy_within(from..from + in_frame, to);
}
