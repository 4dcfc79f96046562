//! One thread of the traffic: continuous batching in real time.
//!
//! A step begins a batch, appends a piece of a prompt or of an answer to each running sequence, and
//! writes the new tokens through their slots. Complete sequences are read back through their slots,
//! and closed. The thread then rests for as long as the step took, so that the traffic uses at most
//! half of a core per thread. Meanwhile its sequences may leave (see
//! [`Exchange`](super::exchange::Exchange)), and the tier's prefixes of the next requests are
//! fetched (see [`Coming`]). A sequence that arrives is read back before it continues.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use kvpool::storage::DeviceStream;
use kvpool::{Batch, Pool};
use kvpool_node::settings::{LoadKind, LoadSettings};

use super::coming::{Coming, Fetching};
use super::running::Running;
use super::shared::Shared;
use crate::{Access, Rows, Shape, Transfer, full, slots};

const RUNNING_MAX: usize = 64;

const STEP_TOKENS: usize = 2048;

const DECODE_TOKENS: usize = 8;

const REST_MIN: Duration = Duration::from_micros(500);
const REST_MAX: Duration = Duration::from_millis(100);

/// One in this many blocks of the pool is left to running sequences when a request is admitted.
const MARGIN: usize = 16;

/// Requests per thread whose prefixes are fetched from the tier at a time.
const AHEAD: usize = 4;

/// A thread of the traffic. See the [module](self).
pub(super) struct Conversing<'a> {
    pool: &'a Pool,
    shared: &'a Shared,
    fetching: Option<Fetching>,
    thread: usize,
    settings: LoadSettings,
    shape: Shape,
    stream: Option<DeviceStream>,
    running: Vec<Running>,
    /// The next requests: they wait for room or for their prefixes.
    coming: VecDeque<Coming>,
    transfer: Transfer<'a>,
}

impl<'a> Conversing<'a> {
    pub fn new(
        pool: &'a Pool,
        rows: &'a Rows,
        shared: &'a Shared,
        (thread, settings): (usize, LoadSettings),
        stream: Option<DeviceStream>,
        fetching: Option<Fetching>,
    ) -> Self {
        Self {
            pool,
            shared,
            fetching,
            thread,
            settings,
            shape: rows.shape(),
            stream,
            running: Vec::new(),
            coming: VecDeque::new(),
            transfer: Transfer::new(rows, &shared.counters.transfers),
        }
    }

    /// Runs until the traffic ends. An error ends this thread and becomes a finding.
    pub fn run(mut self) {
        while let Some(_inside) = self.shared.enter() {
            if let Err(finding) = self.serve() {
                self.shared.find(finding);
                break;
            }
            self.pool.trim();
        }
        if let Err(finding) = self.end() {
            self.shared.find(finding);
        }
        self.shared.counters.open.fetch_sub(self.running.len() as u64, Relaxed);
        self.running.clear();
        self.pool.trim();
    }

    fn end(&mut self) -> Result<(), String> {
        if let Some(fetching) = &self.fetching {
            self.coming.drain(..).for_each(|coming| coming.give_up(fetching));
        }
        self.running = self.shared.exchange.pick_up(self.thread);
        let batch = self.begin();
        self.adopt(&batch)?;
        while let Some(last) = self.running.pop() {
            self.close(&batch, last)?;
        }
        Ok(())
    }

    /// Serves until the traffic is halted or ends.
    fn serve(&mut self) -> Result<(), String> {
        while !self.shared.is_ended() && !self.shared.is_halted() {
            let start = Instant::now();
            self.running = self.shared.exchange.pick_up(self.thread);
            let stepped = self.step();
            self.shared.exchange.lay_down(self.thread, std::mem::take(&mut self.running));
            stepped?;
            thread::sleep(start.elapsed().clamp(REST_MIN, REST_MAX).max(self.settings.rest));
        }
        Ok(())
    }

    fn step(&mut self) -> Result<(), String> {
        if self.settings.kind == LoadKind::Conversations {
            self.admit()?;
        }
        let mut batch = self.begin();
        self.adopt(&batch)?;
        let (mut place, mut budget) = (0, STEP_TOKENS);
        while place < self.running.len() {
            if !self.advance(&mut batch, place, &mut budget)? {
                // The pool is full: the sequence that began last is closed, for the next step,
                // since this batch has seen its blocks.
                self.transfer.flush(Access::Write)?;
                self.close_last(&batch)?;
                break;
            }
            place += 1;
        }
        self.transfer.flush(Access::Write)?;
        batch.finish();
        self.retire()
    }

    fn begin(&self) -> Batch {
        let on = self.stream.as_ref().and_then(|stream| self.pool.begin_batch_on(stream).ok());
        on.unwrap_or_else(|| self.pool.begin_batch())
    }

    /// Takes over sequences that arrived, and reads them back.
    fn adopt(&mut self, batch: &Batch) -> Result<(), String> {
        let counters = &self.shared.counters;
        while let Some(sequence) = self.shared.exchange.arrived() {
            let running = match Running::of(sequence, self.shared.seed) {
                Ok(running) => running,
                Err(stranger) => {
                    self.shared.exchange.keep(*stranger);
                    continue;
                }
            };
            let counter = if running.is_arrived { &counters.arrived } else { &counters.returned };
            counter.fetch_add(1, Relaxed);
            counters.open.fetch_add(1, Relaxed);
            self.check(batch, &running)?;
            let blocks = self.shape.blocks(running.sequence.len() as u64);
            counters.arrived_blocks_verified.fetch_add(blocks as u64, Relaxed);
            self.running.push(running);
        }
        Ok(())
    }

    /// Opens sequences while there is room for them, beside what those of this thread will need.
    fn admit(&mut self) -> Result<(), String> {
        while self.running.len() < RUNNING_MAX {
            self.look_ahead();
            let Some(next) = self.coming.front() else { return Ok(()) };
            let total = self.pool.total_blocks();
            let blocks = next.blocks(self.shape);
            if blocks + total / MARGIN > total {
                self.coming.pop_front();
                self.shared.counters.rejected.fetch_add(1, Relaxed);
                // One per step, so that a pool that is too small for all does not keep a core busy.
                return Ok(());
            }
            let is_ready = self.fetching.is_none() || next.has_come();
            if !is_ready || self.pool.available_blocks() < blocks + self.needed() || !self.open()? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Returns the number of blocks reserved for running sequences.
    fn needed(&self) -> usize {
        let pending: usize = self.running.iter().map(|running| running.pending(self.shape)).sum();
        pending + self.pool.total_blocks() / MARGIN
    }

    /// Takes the next requests, and begins to fetch the prefixes of those that have room.
    fn look_ahead(&mut self) {
        let ahead = if self.fetching.is_some() { AHEAD } else { 1 };
        while self.coming.len() < ahead {
            self.coming.push_back(Coming::new(self.shared.turn()));
        }
        let (mut needed, available) = (self.needed(), self.pool.available_blocks());
        let Some(fetching) = &self.fetching else { return };
        for coming in &mut self.coming {
            needed += coming.blocks(self.shape);
            if needed > available {
                return;
            }
            coming.fetch(fetching);
        }
    }

    /// Opens the sequence of the next request, with the cached part of its prompt; false if the
    /// pool has no room for it.
    fn open(&mut self) -> Result<bool, String> {
        let Some(next) = self.coming.front() else { return Ok(false) };
        let (turn, prompt) = (next.turn, next.prompt());
        let opened = self.pool.sequence(turn.id()).tokens(&prompt);
        let sequence = match opened.map_err(full) {
            Ok(sequence) => sequence,
            Err(Ok(_)) => return Ok(false),
            Err(Err(reason)) => return Err(format!("sequence {}: opening it: {reason}", turn.id().0)),
        };
        self.shared.counters.cached_tokens.fetch_add(sequence.len() as u64, Relaxed);
        self.shared.counters.open.fetch_add(1, Relaxed);
        let Some(Coming { request, text, .. }) = self.coming.pop_front() else { return Ok(false) };
        let (prompt, total) = (request.input_tokens as usize, request.tokens() as usize);
        self.running.push(Running { turn, sequence, text, prompt, total, is_arrived: false });
        Ok(true)
    }

    /// Appends the next tokens of a sequence and gathers them for writing; false if the pool is
    /// full.
    fn advance(&mut self, batch: &mut Batch, place: usize, budget: &mut usize) -> Result<bool, String> {
        let Running { turn, sequence, text, prompt, total, .. } = &mut self.running[place];
        let held = sequence.len();
        let appended = if held < *prompt {
            let tokens = (*prompt - held).min(*budget);
            if tokens == 0 {
                return Ok(true);
            }
            *budget -= tokens;
            batch.append(sequence, tokens)
        } else if held < *total {
            let tokens = (*total - held).min(DECODE_TOKENS);
            let ids: [u32; DECODE_TOKENS] = std::array::from_fn(|at| text.id(held + at));
            batch.append(sequence, &ids[..tokens])
        } else {
            return Ok(true);
        };
        if let Err(error) = appended {
            return full(error)
                .map(|_| false)
                .map_err(|reason| format!("sequence {}: appending: {reason}", turn.id().0));
        }
        let new = held..sequence.len();
        self.shared.counters.tokens.fetch_add(new.len() as u64, Relaxed);
        let slots = slots(batch, sequence, self.shape);
        self.transfer.add(Access::Write, (turn.number, turn.seed, 0), text, new, slots)?;
        Ok(true)
    }

    fn retire(&mut self) -> Result<(), String> {
        if self.running.iter().all(|running| running.sequence.len() < running.total) {
            return Ok(());
        }
        let batch = self.begin();
        let mut place = 0;
        while place < self.running.len() {
            if self.running[place].sequence.len() < self.running[place].total {
                place += 1;
                continue;
            }
            let done = self.running.remove(place);
            let is_arrived = done.is_arrived;
            self.close(&batch, done)?;
            self.shared.counters.completed.fetch_add(1, Relaxed);
            self.shared.counters.arrived_completed.fetch_add(is_arrived.into(), Relaxed);
        }
        Ok(())
    }

    fn close_last(&mut self, batch: &Batch) -> Result<(), String> {
        let Some(last) = self.running.pop() else { return Ok(()) };
        self.shared.counters.preempted.fetch_add(1, Relaxed);
        self.close(batch, last)
    }

    fn close(&mut self, batch: &Batch, gone: Running) -> Result<(), String> {
        self.shared.counters.open.fetch_sub(1, Relaxed);
        self.check(batch, &gone)
    }

    fn check(&mut self, batch: &Batch, running: &Running) -> Result<(), String> {
        let Running { turn, sequence, text, .. } = running;
        let all = 0..sequence.len();
        self.transfer.add(
            Access::Check,
            (turn.number, turn.seed, 0),
            text,
            all,
            slots(batch, sequence, self.shape),
        )?;
        self.transfer.flush(Access::Check)?;
        let counters = &self.shared.counters;
        counters.tokens_verified.fetch_add(std::mem::take(&mut self.transfer.tokens_verified), Relaxed);
        let corrupt = std::mem::take(&mut self.transfer.corrupt);
        if !corrupt.is_empty() {
            counters.blocks_corrupt.fetch_add(corrupt.len() as u64, Relaxed);
            let blocks = corrupt.len();
            let id = turn.id().0;
            self.shared.find(format!("sequence {id}: {blocks} blocks are not as they were written"));
        }
        Ok(())
    }
}
