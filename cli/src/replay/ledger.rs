//! A memory for tests: the simplest that is right, behind one lock, and with faults to order.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use std::sync::{Arc, Mutex};

use super::content::Shape;
use super::memory::{FreeSpace, Memory, Refusal};

/// What goes wrong, once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    None,
    /// A stored byte has a bit flipped.
    FlippedBit,
    /// A block is handed out although somebody has it.
    DoubleOwner,
    /// A freed block is lost.
    Leak,
    /// A store does not reach memory.
    LostStore,
    /// A block table names another frame.
    WrongFrame,
    /// A broken invariant.
    Panic,
}

struct State {
    free: VecDeque<u32>,
    taken: BTreeSet<u32>,
    bytes: Vec<u8>,
}

pub struct Ledger {
    shape: Shape,
    blocks: usize,
    fault: Fault,
    /// Events to go until the fault, which happens once.
    countdown: AtomicUsize,
    done: AtomicBool,
    state: Arc<Mutex<State>>,
}

pub struct Held {
    blocks: Vec<u32>,
    tokens: usize,
    lose: bool,
    state: Arc<Mutex<State>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut state = self.state.lock().unwrap();
        let kept = self.blocks.len() - usize::from(self.lose && !self.blocks.is_empty());
        for block in self.blocks.drain(..kept) {
            state.taken.remove(&block);
            state.free.push_back(block);
        }
    }
}

impl Ledger {
    pub fn new(shape: Shape, blocks: usize, fault: Fault) -> Self {
        let bytes = vec![0; blocks * shape.block_tokens * shape.layers * (shape.k_bytes + shape.v_bytes)];
        let state = State { free: (0..blocks as u32).collect(), taken: BTreeSet::new(), bytes };
        let countdown = AtomicUsize::new(40);
        Self {
            shape,
            blocks,
            fault,
            countdown,
            done: AtomicBool::new(false),
            state: Arc::new(Mutex::new(state)),
        }
    }

    /// Whether the fault happens now.
    fn strikes(&self, fault: Fault) -> bool {
        self.fault == fault
            && self.countdown.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_err()
            && !self.done.swap(true, Relaxed)
    }

    /// Where one token's row of a layer lies: K, then V.
    fn place(&self, layer: usize, slot: i64) -> Range<usize> {
        let row = self.shape.k_bytes + self.shape.v_bytes;
        let start = (layer * self.blocks * self.shape.block_tokens + slot as usize) * row;
        start..start + row
    }
}

impl Memory for Ledger {
    type Sequence = Held;
    type Batch = ();
    type Table = Vec<i32>;

    fn blocks(&self) -> usize {
        self.blocks
    }

    fn free_blocks(&self) -> usize {
        self.state.lock().unwrap().free.len()
    }

    fn free_space(&self) -> FreeSpace {
        FreeSpace { blocks: self.free_blocks(), fragmentation: 0.0 }
    }

    fn open(&self, _id: u64) -> Result<Held, String> {
        Ok(Held {
            blocks: Vec::new(),
            tokens: 0,
            lose: self.strikes(Fault::Leak),
            state: Arc::clone(&self.state),
        })
    }

    fn begin(&self) {
        assert!(!self.strikes(Fault::Panic), "ordered");
    }

    fn append(&self, (): &mut (), sequence: &mut Held, tokens: usize) -> Result<(), Refusal> {
        let wanted = self.shape.blocks((sequence.tokens + tokens) as u64) - sequence.blocks.len();
        let mut state = self.state.lock().unwrap();
        if wanted > state.free.len() {
            return Err(Refusal::Full { free: state.free.len(), retired: 0 });
        }
        for _ in 0..wanted {
            let twice = state.taken.first().copied().filter(|_| self.strikes(Fault::DoubleOwner));
            let block = twice.or_else(|| state.free.pop_front()).unwrap();
            state.taken.insert(block);
            sequence.blocks.push(block);
        }
        sequence.tokens += tokens;
        Ok(())
    }

    fn slots(
        &self,
        (): &(),
        sequence: &Held,
        tokens: Range<usize>,
        out: &mut Vec<i64>,
    ) -> Result<(), String> {
        let size = self.shape.block_tokens;
        out.extend(tokens.map(|token| (sequence.blocks[token / size] as usize * size + token % size) as i64));
        Ok(())
    }

    fn block_table<'t>(
        &self,
        (): &(),
        sequence: &Held,
        table: &'t mut Vec<i32>,
    ) -> Result<&'t [i32], String> {
        table.clear();
        table.extend(sequence.blocks.iter().map(|&block| block as i32));
        if self.strikes(Fault::WrongFrame) {
            table[0] = (table[0] + 1) % self.blocks as i32;
        }
        Ok(table)
    }

    fn store(&self, layer: usize, k: &[u8], v: &[u8], slots: &[i64]) -> Result<(), String> {
        if self.strikes(Fault::LostStore) {
            return Ok(());
        }
        let (k_bytes, v_bytes) = (self.shape.k_bytes, self.shape.v_bytes);
        let mut state = self.state.lock().unwrap();
        for (index, &slot) in slots.iter().enumerate() {
            let row = &mut state.bytes[self.place(layer, slot)];
            row[..k_bytes].copy_from_slice(&k[index * k_bytes..][..k_bytes]);
            row[k_bytes..].copy_from_slice(&v[index * v_bytes..][..v_bytes]);
        }
        if self.strikes(Fault::FlippedBit) {
            state.bytes[self.place(layer, slots[0])][3] ^= 4;
        }
        Ok(())
    }

    fn load(&self, layer: usize, slots: &[i64], k: &mut [u8], v: &mut [u8]) -> Result<(), String> {
        let (k_bytes, v_bytes) = (self.shape.k_bytes, self.shape.v_bytes);
        let state = self.state.lock().unwrap();
        for (index, &slot) in slots.iter().enumerate() {
            let row = &state.bytes[self.place(layer, slot)];
            k[index * k_bytes..][..k_bytes].copy_from_slice(&row[..k_bytes]);
            v[index * v_bytes..][..v_bytes].copy_from_slice(&row[k_bytes..]);
        }
        Ok(())
    }

    fn leave(&self) {}

    fn take_all(&self) -> Result<(), String> {
        self.audit()
    }

    fn audit(&self) -> Result<(), String> {
        let free = self.free_blocks();
        if free == self.blocks { Ok(()) } else { Err(format!("{free} of {} blocks are free", self.blocks)) }
    }
}
