//! A stream of the engine, and the sequences that run on it.
//!
//! ```text
//! a step     pinned ──> rows, slots ── store_on ── load_on, by slots ──> rows ──┐
//!            table, slots filled under the batch ── pack, by the table ──> ──┴──> pinned, mark
//! ```
//!
//! The rows and slots to store are in a buffer that belongs to the step until its mark is reached.
//! The rows to load are listed in a [`DeviceTable`] of the pool, which all steps share.

use std::collections::VecDeque;
use std::ops::Range;
use std::pin::pin;

use cudarc::driver::sys;
use kvpool::storage::{DeviceStream, Storage};
use kvpool::{Batch, Finish, Sequence, SequenceError, SequenceId};
use kvpool_cuda::{DeviceRows, DeviceTable};
use kvpool_testkit::rng::Rng;

use super::buffer::{BYTES, Buffer, Buffers, Mark};
use super::gather::Gather;
use super::rig::Rig;
use super::rows::Rows;
use super::wrong::Wrong;

/// Maximum number of sequences of a lane, and of tokens of each.
const SEQUENCES: usize = 4;
const TOKENS: usize = 28;
/// Maximum number of steps in flight.
const FLIGHTS: usize = 3;

/// A stream of the engine, with its sequences and steps.
pub struct Lane {
    /// The engine's stream.
    pub stream: DeviceStream,
    running: Vec<Running>,
    flights: VecDeque<Flight>,
    /// Futures of finished batches.
    pub finishes: Vec<Finish>,
    rows: Rows,
    buffers: Buffers,
    /// Buffers of steps that failed half-way: the device may still be using them.
    left: Vec<Buffer>,
    table: DeviceTable,
    gather: Gather,
    rng: Rng,
    next_id: u64,
    /// Number of compared rows.
    pub compared: u64,
}

struct Running {
    sequence: Sequence,
    tokens: Vec<u32>,
}

/// A step that has not been seen complete.
struct Flight {
    mark: Mark,
    buffer: Buffer,
    /// Tokens of the sequences that were read.
    tokens: Vec<Vec<u32>>,
    /// Offsets in the buffer for K and V of each layer.
    back: Vec<[usize; 2]>,
    /// Range in the buffer for the packed blocks.
    packed: Range<usize>,
    what: String,
}

/// The end of a step, the offsets of its rows in the buffer by layer and half, and the range of its
/// packed frames.
type Enqueued = (Mark, Vec<[usize; 2]>, Range<usize>);

/// Allocates the parts of a buffer.
struct Place(usize);

impl Place {
    fn of(&mut self, bytes: usize) -> usize {
        let at = self.0.next_multiple_of(16);
        self.0 = at + bytes;
        assert!(self.0 <= BYTES, "a step needs {} bytes", self.0);
        at
    }
}

impl Lane {
    /// Creates a lane on this stream; `seed` determines its choices and sequence ids.
    pub fn new(rig: &Rig, stream: DeviceStream, seed: u64) -> Self {
        let layout = rig.storage().layout().clone();
        let columns = TOKENS.div_ceil(layout.block_tokens());
        let table = DeviceTable::new(&rig.device, SEQUENCES, columns, SEQUENCES * TOKENS);
        Self {
            table: table.expect("memory for a table"),
            gather: Gather::new(&rig.context, rig.storage()).expect("the kernels load"),
            stream,
            running: Vec::new(),
            flights: VecDeque::new(),
            finishes: Vec::new(),
            rows: Rows::new(&layout),
            buffers: Buffers::default(),
            left: Vec::new(),
            rng: Rng(seed),
            next_id: seed << 32,
            compared: 0,
        }
    }

    /// Returns true if the maximum number of steps is in flight.
    pub fn is_full(&self) -> bool {
        self.flights.len() >= FLIGHTS
    }

    /// Returns true if no step is in flight.
    pub fn is_idle(&self) -> bool {
        self.flights.is_empty()
    }

    /// Makes one random action of an engine: opens, forks or drops a sequence, or runs a step.
    pub fn go_on(&mut self, rig: &Rig) -> Result<(), Wrong> {
        match self.rng.below(10) {
            0 | 1 if !self.running.is_empty() => {
                let victim = self.rng.below(self.running.len());
                self.running.swap_remove(victim);
            }
            2 if !self.running.is_empty() && self.running.len() < SEQUENCES => {
                let parent = &self.running[self.rng.below(self.running.len())];
                let sequence = parent.sequence.fork(SequenceId(self.next_id))?;
                self.next_id += 1;
                // Including tokens that are announced and not appended yet.
                let tokens = parent.tokens.clone();
                self.running.push(Running { sequence, tokens });
            }
            3 if !self.is_full() => drop(self.step(rig, true)?),
            _ if !self.is_full() => {
                if self.running.len() < SEQUENCES && self.rng.below(2) == 0 {
                    self.open(rig)?;
                }
                if let Some(finish) = self.step(rig, false)? {
                    self.finishes.push(finish);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Drops all sequences, including those that the device still reads.
    pub fn clear(&mut self) {
        self.running.clear();
    }

    /// Returns the beginning of one of the prompts.
    pub fn prompt(number: u32, length: u32) -> Vec<u32> {
        (0..length).map(|at| number << 16 | at).collect()
    }

    /// Opens a sequence with one of a few prompts, so that it hits blocks of others.
    fn open(&mut self, rig: &Rig) -> Result<(), Wrong> {
        let prompt = self.rng.below(5) as u32;
        let length = 1 + self.rng.below(12) as u32;
        let tokens = Self::prompt(prompt, length);
        let sequence = match rig.pool.sequence(SequenceId(self.next_id)).tokens(&tokens) {
            Err(SequenceError::Alloc(_)) => return Ok(()),
            sequence => sequence?,
        };
        self.next_id += 1;
        self.running.push(Running { sequence, tokens });
        Ok(())
    }

    /// Runs one step. With `is_left`, finishes the batch without naming the stream, which must have
    /// the same result.
    pub fn step(&mut self, rig: &Rig, is_left: bool) -> Result<Option<Finish>, Wrong> {
        let mut batch = rig.pool.begin_batch_on(&self.stream)?;
        let mut appended = Vec::new();
        let enqueued = self.fill_and_enqueue(rig, &mut batch, &mut appended);
        if let Err(wrong) = enqueued {
            // Nothing of what was appended is found afterwards. The requests are dropped.
            drop(batch);
            for (index, _) in appended.into_iter().rev() {
                self.running.remove(index);
            }
            return Err(wrong);
        }
        if is_left {
            batch.finish();
            return Ok(None);
        }
        match batch.finish_on(&self.stream) {
            Ok(finish) => Ok(Some(finish)),
            Err(refused) => Err(refused.error.into()),
        }
    }

    fn fill_and_enqueue(
        &mut self,
        rig: &Rig,
        batch: &mut Batch,
        appended: &mut Vec<(usize, usize)>,
    ) -> Result<(), Wrong> {
        let (mut stored, mut new_slots, mut slots) = (vec![], vec![], vec![]);
        let mut what = format!("batch {}:", batch.ticket());
        let mut read = Vec::new();
        for (index, running) in self.running.iter_mut().enumerate() {
            if self.rng.below(4) == 0 {
                continue;
            }
            let added = running.append(batch, &mut self.rng)?;
            appended.push((index, added.start));
            batch.slot_mapping(&running.sequence, added.clone(), &mut new_slots)?;
            stored.extend_from_slice(&running.tokens[added.clone()]);
            batch.slot_mapping(&running.sequence, 0..running.sequence.len(), &mut slots)?;
            read.push(index);
            what += &format!(" {}+{}", running.sequence.id(), added.len());
        }
        let read: Vec<&Running> = read.into_iter().map(|index| &self.running[index]).collect();
        self.table.fill_slots(&self.stream, &slots)?;
        self.table.fill(&self.stream, batch, read.iter().map(|running| &running.sequence))?;
        let tokens: Vec<Vec<u32>> =
            read.iter().map(|running| running.tokens[..running.sequence.len()].to_vec()).collect();
        let mut buffer = self.buffers.take()?;
        match self.enqueue(rig, &mut buffer, &stored, &new_slots, &tokens) {
            Ok((mark, back, packed)) => {
                self.flights.push_back(Flight { mark, buffer, tokens, back, packed, what });
                Ok(())
            }
            Err(wrong) => {
                // Part of it may be in progress.
                self.left.push(buffer);
                Err(wrong)
            }
        }
    }

    fn enqueue(
        &mut self,
        rig: &Rig,
        buffer: &mut Buffer,
        stored: &[u32],
        new_slots: &[i64],
        tokens: &[Vec<u32>],
    ) -> Result<Enqueued, Wrong> {
        let (storage, stream) = (rig.storage(), &self.stream);
        let layers = storage.layout().layers();
        let (dtype, row, halves) = (self.rows.dtype(), self.rows.bytes(), self.rows.halves());
        let mut place = Place(0);
        let (pieces_at, slots_at) = (place.of(self.gather.pieces().len()), place.of(size_of_val(new_slots)));
        buffer.bytes()[pieces_at..][..self.gather.pieces().len()].copy_from_slice(self.gather.pieces());
        for (to, slot) in buffer.bytes()[slots_at..].chunks_exact_mut(size_of::<i64>()).zip(new_slots) {
            to.copy_from_slice(&slot.to_ne_bytes());
        }
        let mut rows_at = Vec::new();
        for layer in 0..layers {
            let at = [place.of(stored.len() * row), place.of(stored.len() * row)];
            for (half, &at) in at.iter().enumerate().take(halves) {
                for (to, &token) in buffer.bytes()[at..].chunks_exact_mut(row).zip(stored) {
                    to.copy_from_slice(&self.rows.stored(token, layer)[half]);
                }
            }
            rows_at.push(at);
        }
        let loaded = tokens.iter().map(Vec::len).sum::<usize>();
        let (sent, back_at) = (place.0, place.of(0));
        let back: Vec<[usize; 2]> =
            (0..layers).map(|_| [place.of(loaded * row), place.of(loaded * row)]).collect();
        let packed_bytes = self.gather.packed_bytes(tokens.len(), self.table.columns());
        let packed_at = place.of(packed_bytes);
        let device = buffer.device;
        let there = |[k, v]: [usize; 2]| {
            let [k, v] = [k, v].map(|at| device + at as u64);
            DeviceRows { dtype, k, v, k_stride: row, v_stride: row }
        };
        // SAFETY: the buffer belongs to this step until its mark is reached; slots and table were
        // built under the batch, which ends behind this work; no one else writes the new tokens;
        // rows are padded with the null block, which exists.
        unsafe {
            buffer.send(sent, stream)?;
            for (layer, &at) in rows_at.iter().enumerate() {
                storage.store_on(stream, layer, there(at), device + slots_at as u64, stored.len())?;
            }
            for (layer, &at) in back.iter().enumerate() {
                storage.load_on(stream, layer, there(at), self.table.slots(), loaded)?;
            }
            if !tokens.is_empty() {
                let (pieces, packed) = (device + pieces_at as u64, device + packed_at as u64);
                self.gather.enqueue(&self.table, tokens.len(), pieces, packed, stream.as_raw().cast())?;
            }
            buffer.fetch(back_at, place.0 - back_at, stream)?;
        }
        let mark = Mark::behind(stream)?;
        Ok((mark, back, packed_at..packed_at + packed_bytes))
    }

    /// Compares the results of completed steps. Returns true if there were any.
    pub fn check(&mut self) -> Result<bool, Wrong> {
        let mut any = false;
        while self.flights.front().map_or(Ok(false), |flight| flight.mark.is_reached())? {
            let mut flight = self.flights.pop_front().expect("a flight is in front");
            let wrong = self.compare(&mut flight);
            self.buffers.give_back(flight.buffer);
            wrong?;
            any = true;
        }
        let mut failed = None;
        self.finishes.retain_mut(|finish| match super::poll(&mut pin!(finish)) {
            std::task::Poll::Pending => true,
            std::task::Poll::Ready(outcome) => {
                failed = failed.take().or(outcome.err());
                false
            }
        });
        failed.map_or(Ok(any), |error| Err(error.into()))
    }

    fn compare(&mut self, flight: &mut Flight) -> Result<(), Wrong> {
        let (row, halves) = (self.rows.bytes(), self.rows.halves());
        let what = &flight.what;
        for (layer, at) in flight.back.iter().enumerate() {
            for (half, &at) in at.iter().take(halves).enumerate() {
                for (index, &token) in flight.tokens.iter().flatten().enumerate() {
                    let found = &flight.buffer.bytes()[at + index * row..][..row];
                    let expected = &self.rows.loaded(token, layer)[half];
                    if found != expected {
                        return Err(Wrong::Row(format!(
                            "{what}: layer {layer}, half {half}, row {index}, token {token:#x}: {found:x?} in place of {expected:x?}"
                        )));
                    }
                    self.compared += 1;
                }
            }
        }
        let packed = &flight.buffer.bytes()[flight.packed.clone()];
        let compared = self.gather.compare(packed, self.table.columns(), &flight.tokens, &mut self.rows);
        self.compared += compared.map_err(|wrong| Wrong::Row(format!("{what}, {wrong}")))?;
        Ok(())
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Its buffers are freed next. On a failed device no work is in progress. SAFETY: the stream
        // lives.
        let _ = unsafe { sys::cuStreamSynchronize(self.stream.as_raw().cast()) };
    }
}

impl Running {
    /// Appends announced tokens, or new ones, or none if there are no blocks. Returns the range to
    /// store.
    fn append(&mut self, batch: &mut Batch, rng: &mut Rng) -> Result<Range<usize>, Wrong> {
        let (length, known) = (self.sequence.len(), self.tokens.len());
        let count = if known > length { known - length } else { 1 + rng.below(5) };
        if length + count > TOKENS {
            return Ok(length..length);
        }
        let new: Vec<u32> = (0..count).map(|_| 1 << 31 | rng.bits() as u32).collect();
        let appended = if known > length {
            batch.append(&mut self.sequence, count)
        } else {
            batch.append(&mut self.sequence, &new)
        };
        match appended {
            Ok(appended) => {
                if known == length {
                    self.tokens.extend_from_slice(&new);
                }
                Ok(appended.tokens)
            }
            Err(SequenceError::Alloc(_)) => Ok(length..length),
            Err(error) => Err(error.into()),
        }
    }
}
