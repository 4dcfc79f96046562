//! Sequences, and the tables under which their tokens are read.

use kvpool::block::{Moved, Since};
use kvpool::prefix::ExtraKey;
use kvpool::{
    AllocError, BlockHandle, BlockTable, CsrTable, Priority, Sequence, SequenceError, SequenceId, Ticket,
    Tokens,
};

use super::device::Token;
use super::world::World;

/// A sequence, and its tokens.
pub struct Written {
    pub real: Sequence,
    /// Stored values of its tokens: equal for equal ids after equal prefixes under one salt and
    /// equal extra keys.
    pub tokens: Vec<u64>,
    /// Ids of its tokens, and of the announced tokens that are still to come.
    pub ids: Vec<u32>,
    pub salt: u64,
    pub keys: Vec<ExtraKey>,
    /// Number of a batch in flight, and the first position that it wrote.
    pub writes: Vec<(u64, usize)>,
}

impl Written {
    pub fn new(real: Sequence, ids: Vec<u32>, salt: u64, keys: Vec<ExtraKey>) -> Self {
        Self { real, tokens: Vec::new(), ids, salt, keys, writes: Vec::new() }
    }

    /// Returns the stored value of the next token.
    pub fn next_value(&self) -> u64 {
        let mut before = self.tokens.last().copied().unwrap_or(self.salt);
        let begins = |key: &&ExtraKey| key.tokens.start == self.tokens.len();
        // In any order.
        before ^= self.keys.iter().filter(begins).map(|key| 1 << (20 + key.key[0])).fold(0, |a, b| a | b);
        let value = (before ^ u64::from(self.ids[self.tokens.len()])).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        value.rotate_left(29) + 1
    }

    /// Adds the stored values of tokens up to `length`; does nothing if they were added before.
    pub fn came_to(&mut self, length: usize) {
        while self.tokens.len() < length {
            self.tokens.push(self.next_value());
        }
    }
}

/// A table that lives across batches.
pub struct Remembered {
    of: SequenceId,
    since: Ticket,
    blocks: Vec<BlockHandle>,
    frames: Vec<usize>,
}

pub fn some_priority(rng: &mut fastrand::Rng) -> Priority {
    [Priority::Normal, Priority::High, Priority::Urgent][rng.usize(..3)]
}

impl World {
    pub fn open(&mut self) {
        if self.sequences.len() < 12 {
            let id = SequenceId(self.number());
            let priority = some_priority(&mut self.rng);
            let real = self.pool.sequence(id).priority(priority).open().unwrap();
            self.note(format_args!("sequence {id}"));
            self.sequences.push(Written::new(real, Vec::new(), 0, Vec::new()));
        }
    }

    pub fn append(&mut self) {
        let batch = self.some_batch();
        let Some(index) = self.pick(self.sequences.len()) else { return };
        let (kind, count) = (self.rng.u8(..8), self.rng.usize(1..14) * self.scale);
        self.append_so(batch, index, kind, count);
    }

    /// Appends tokens. A `kind` below 2 means drafts, below 5 with ids, below 7 not beyond the
    /// prompt.
    pub fn append_so(&mut self, batch: usize, index: usize, kind: u8, mut count: usize) {
        let block_tokens = self.block_tokens;
        let in_flight = &mut self.batches[batch];
        let written = &mut self.sequences[index];
        let id = written.real.id();
        let before = written.tokens.len();
        if self.rng.u8(..8) == 0 {
            // Of the next tokens that have no id yet.
            let (start, key) = (written.ids.len(), self.rng.u8(..2));
            let key = ExtraKey::new(start..start + self.rng.usize(1..12), &[key]);
            written.real.extra_key(key.tokens.clone(), &key.key).unwrap();
            written.keys.push(key);
        }
        if kind < 7 && written.ids.len() > before {
            // The rest of a prompt, or a part of it.
            count = count.min(written.ids.len() - before);
        }
        let ids: Vec<u32> = (written.ids.len()..before + count).map(|_| self.rng.u32(..2)).collect();
        let is_ahead = written.real.announced() > before;
        written.ids.extend(&ids);
        let outcome = match kind {
            0..2 => in_flight.batch.append(&mut written.real, Tokens::Draft(count)),
            2..5 if !is_ahead => {
                in_flight.batch.append(&mut written.real, &written.ids[before..before + count])
            }
            _ => in_flight.batch.append(&mut written.real, count),
        };
        if outcome.is_err() {
            written.ids.truncate(written.ids.len() - ids.len());
        }
        let appended = match outcome {
            Ok(appended) => appended,
            Err(SequenceError::Alloc(error)) => {
                assert_eq!(written.real.len(), before);
                // An unfinished block may have to be copied.
                let copied = usize::from(!before.is_multiple_of(block_tokens));
                let lacking =
                    (before + count).div_ceil(block_tokens) - before.div_ceil(block_tokens) + copied;
                assert!(lacking > written.real.reserved_blocks(), "within its reservation: {error}");
                self.note(format_args!("{id}: {error}"));
                return self.is_refused_rightly(&error, false);
            }
            // The drafts before these were not announced, or are final tokens.
            Err(SequenceError::TokensUnknown { known, .. }) => {
                assert_eq!((written.real.len(), written.real.announced()), (before, known));
                assert!(known < before, "all {before} tokens are known");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        assert_eq!(appended.tokens, before..before + count);
        let number = in_flight.number;
        if let Some(copied) = appended.copied {
            in_flight.copied.push(copied.from);
            self.device.copy(number, copied.frames, self.pool.blocks().handle(copied.to));
        }
        // What the engine copied for a batch that is abandoned may be missing too.
        let from = if appended.copied.is_some() { before / block_tokens * block_tokens } else { before };
        written.writes.push((number, from));
        let mut slots = Vec::new();
        in_flight.batch.slot_mapping(&written.real, appended.tokens.clone(), &mut slots).unwrap();
        let blocks: Vec<_> = written.real.blocks().collect();
        for (place, slot) in appended.tokens.clone().zip(slots) {
            let value = written.next_value();
            written.tokens.push(value);
            let block = self.pool.blocks().handle(blocks[place / block_tokens]);
            self.device.write(number, Token { slot: slot as usize, block, value });
        }
        self.note(format_args!("{id} in {number}: {appended:?}"));
    }

    /// Returns the number of evictable blocks that a request gets for certain: unseen by batches,
    /// not moving, and without those that the reserve takes.
    pub fn evictable_now(&self) -> usize {
        let counts = self.pool.blocks().counts();
        let is_quiet = self.batches.is_empty() && self.device.copies() == 0;
        let short = self.pool.blocks().reserve() - counts.reserved;
        if is_quiet { counts.evictable.saturating_sub(short) } else { 0 }
    }

    /// Checks that a refusal is true: with one thread, no block is out of reach for a moment.
    pub fn is_refused_rightly(&self, error: &AllocError, is_run: bool) {
        let counts = self.pool.blocks().counts();
        let free = counts.free() + self.evictable_now();
        match *error {
            // For a run, evictable blocks may be scattered.
            AllocError::Exhausted { asked, .. } if is_run => {
                assert!(asked > counts.free() || self.is_resizing(), "{error}: {counts:?}");
            }
            AllocError::Exhausted { asked, .. } => {
                assert!(asked > free || self.is_resizing(), "{error}: {counts:?}");
            }
            // The reserve may have been topped up since.
            AllocError::NoRun { asked, free, evictable, .. } => {
                assert!(asked <= free + evictable, "{error}: {counts:?}");
                assert!(free <= counts.free() + counts.reserved, "{error}: {counts:?}");
            }
            AllocError::Behind { priority, waiting, .. } => {
                assert!(waiting > priority && self.is_in_line(waiting), "{error}");
            }
            AllocError::TooLarge { asked, total } => assert!(asked > total),
            AllocError::Reserved { asked, total, reserve } => {
                assert!(asked <= total && asked > total - reserve)
            }
            _ => panic!("{error}"),
        }
    }

    pub fn commit(&mut self) {
        let Some(index) = self.pick(self.sequences.len()) else { return };
        let length = self.rng.usize(..=self.sequences[index].tokens.len());
        let Written { real, ids, .. } = &mut self.sequences[index];
        if real.announced() < length && self.rng.u8(..4) > 0 {
            // Refused if final ones are unknown.
            let _ = real.announce(&ids[real.announced()..length]);
        }
        real.commit(length).unwrap();
    }

    /// Reserves blocks, or releases those that are reserved.
    pub fn reserve(&mut self) {
        let Some(index) = self.pick(self.sequences.len()) else { return };
        let tokens = self.rng.usize(..12 * self.scale);
        let real = &mut self.sequences[index].real;
        let before = real.reserved_blocks();
        if self.rng.u8(..3) == 0 {
            assert_eq!(real.release_reservation(), before);
            return;
        }
        match real.reserve(tokens) {
            Ok(()) => assert!(real.reserved_blocks() >= before),
            Err(SequenceError::Alloc(error)) => {
                assert_eq!(real.reserved_blocks(), before);
                self.is_refused_rightly(&error, false);
            }
            Err(error) => panic!("{error}"),
        }
    }

    pub fn truncate(&mut self) {
        let Some(index) = self.pick(self.sequences.len()) else { return };
        let length = self.rng.usize(..=self.sequences[index].tokens.len());
        let written = &mut self.sequences[index];
        written.real.truncate(length).unwrap();
        if length < written.tokens.len() {
            written.tokens.truncate(length);
            written.ids.truncate(length);
            written.keys.retain(|key| key.tokens.start < length);
            written.writes.retain(|&(_, from)| from < length);
        }
        let id = written.real.id();
        self.note(format_args!("{id} has {length} tokens"));
    }

    /// Checks that each sequence is cut to where a batch that was dropped began to write.
    pub fn withdraw(&mut self, number: u64) {
        for written in &mut self.sequences {
            let of_batch = written.writes.iter().filter(|write| write.0 == number);
            let length = of_batch.map(|&(_, from)| from).min().unwrap_or(written.tokens.len());
            written.tokens.truncate(length);
            written.writes.retain(|&(_, from)| from < length);
            assert_eq!(written.real.len(), length, "{:?}", written.real);
            // Its blocks go to the reservation.
            written.real.commit(0).unwrap();
            assert_eq!(written.real.len(), length);
        }
    }

    pub fn fork(&mut self) {
        if self.sequences.len() < 12
            && let Some(index) = self.pick(self.sequences.len())
        {
            let id = SequenceId(self.number());
            let written = &self.sequences[index];
            let fork = Written {
                real: written.real.fork(id).unwrap(),
                tokens: written.tokens.clone(),
                ids: written.ids.clone(),
                salt: written.salt,
                keys: written.keys.clone(),
                writes: written.writes.clone(),
            };
            let of = written.real.id();
            self.note(format_args!("{id} is a fork of {of}"));
            self.sequences.push(fork);
        }
    }

    pub fn close(&mut self) {
        if let Some(index) = self.pick(self.sequences.len()) {
            let closed = self.sequences.swap_remove(index);
            let id = closed.real.id();
            self.counting_slices(|_| drop(closed));
            self.note(format_args!("{id} is closed"));
        }
    }

    /// Reads some tokens of some sequences, by one kind of table or another.
    pub fn read(&mut self) {
        let batch = self.some_batch();
        let chosen: Vec<usize> = (0..self.sequences.len()).filter(|_| self.rng.bool()).collect();
        let kind = self.rng.u8(..4);
        let padding = self.pool.blocks().null_block().map_or(-1, |id| self.pool.blocks().frame(id).0 as i32);
        let is_padded = |table: &BlockTable, row: usize, blocks: usize| {
            table.row(row)[blocks..].iter().all(|&frame| frame == padding)
        };
        let frames: Vec<Vec<usize>> = {
            let batch = &self.batches[batch].batch;
            let sequences = chosen.iter().map(|&index| &self.sequences[index].real);
            let frames = |row: &[i32]| row.iter().map(|&frame| frame as usize).collect::<Vec<_>>();
            match kind {
                0 => {
                    let mut table = BlockTable::with_width(3);
                    batch.block_table(sequences, &mut table).unwrap();
                    for (row, &index) in chosen.iter().enumerate() {
                        assert!(
                            is_padded(&table, row, self.sequences[index].real.block_count()),
                            "{table:?}"
                        );
                    }
                    (0..chosen.len()).map(|row| frames(table.row(row))).collect()
                }
                1 => {
                    let mut table = CsrTable::new();
                    batch.csr_table(sequences, &mut table).unwrap();
                    table
                        .indptr
                        .windows(2)
                        .map(|at| frames(&table.indices[at[0] as usize..at[1] as usize]))
                        .collect()
                }
                2 => {
                    let views: Vec<_> =
                        sequences.map(|sequence| self.pool.view(sequence.id()).unwrap()).collect();
                    let mut table = BlockTable::new();
                    batch.block_table(&views, &mut table).unwrap();
                    (0..chosen.len()).map(|row| frames(table.row(row))).collect()
                }
                _ => sequences
                    .map(|sequence| {
                        let mut slots = Vec::new();
                        batch.slot_mapping(sequence, 0..sequence.len(), &mut slots).unwrap();
                        let of_blocks = slots.iter().step_by(self.block_tokens);
                        of_blocks.map(|&slot| slot as usize / self.block_tokens).collect()
                    })
                    .collect(),
            }
        };
        for (&index, frames) in chosen.iter().zip(&frames) {
            self.read_through(batch, index, frames);
        }
        self.note(format_args!("reads {chosen:?} by {kind}: {frames:?}"));
    }

    /// Reads a sequence's tokens through these frames of its blocks.
    pub fn read_through(&mut self, batch: usize, sequence: usize, frames: &[usize]) {
        let (written, block_tokens) = (&self.sequences[sequence], self.block_tokens);
        for (place, block) in written.real.blocks().enumerate() {
            let block = self.pool.blocks().handle(block);
            for (offset, &value) in
                written.tokens[place * block_tokens..].iter().take(block_tokens).enumerate()
            {
                let slot = frames[place] * block_tokens + offset;
                self.device.read(self.batches[batch].number, Token { slot, block, value });
                self.tally.tokens_read += 1;
            }
        }
    }

    /// Reads everything, in a batch of its own.
    pub fn read_all(&mut self) {
        assert!(self.batches.is_empty());
        let batch = self.some_batch();
        for index in 0..self.sequences.len() {
            let real = &self.sequences[index].real;
            assert_eq!(real.len(), self.sequences[index].tokens.len());
            let frames: Vec<usize> =
                real.blocks().map(|block| self.pool.blocks().frame(block).index()).collect();
            self.read_through(batch, index, &frames);
        }
        for index in 0..self.all_leased.len() {
            self.read_leased_in(batch, index);
        }
    }

    pub fn remember(&mut self) {
        let batch = self.some_batch();
        let Some(index) = self.pick(self.sequences.len()) else { return };
        if self.remembered.len() < 6 {
            let real = &self.sequences[index].real;
            let (of, since) = (real.id(), self.batches[batch].batch.ticket());
            self.remembered.push(Remembered { of, since, blocks: Vec::new(), frames: Vec::new() });
            let last = self.remembered.len() - 1;
            self.bring_up_to_date(last, index);
        }
    }

    /// Looks up blocks that the table lacks, or that have been replaced.
    fn bring_up_to_date(&mut self, table: usize, sequence: usize) {
        let blocks = self.pool.blocks();
        let Remembered { blocks: known, frames, .. } = &mut self.remembered[table];
        let now: Vec<_> = self.sequences[sequence].real.blocks().map(|block| blocks.handle(block)).collect();
        let same = known.iter().zip(&now).take_while(|(known, now)| known == now).count();
        known.truncate(same);
        frames.truncate(same);
        frames.extend(now[same..].iter().map(|handle| blocks.frame(handle.id).index()));
        known.extend(&now[same..]);
    }

    /// Checks that a table built under an earlier batch, patched under this one, is as good as a
    /// new one.
    pub fn patch(&mut self) {
        let batch = self.some_batch();
        let Some(table) = self.pick(self.remembered.len()) else { return };
        let of = self.remembered[table].of;
        let Some(sequence) = self.sequences.iter().position(|written| written.real.id() == of) else {
            self.remembered.swap_remove(table);
            return;
        };
        let mut moved = Vec::new();
        let remembered = &mut self.remembered[table];
        match self.batches[batch].batch.moved_since(remembered.since, &mut moved) {
            Since::Listed => {
                for Moved { block, to } in &moved {
                    let places = remembered.blocks.iter().zip(&mut remembered.frames);
                    for (_, frame) in places.filter(|(known, _)| known.id == *block) {
                        *frame = to.index();
                        self.tally.patched += 1;
                    }
                }
            }
            Since::TooLong => remembered.blocks.clear(),
        }
        remembered.since = self.batches[batch].batch.ticket();
        let since = remembered.since;
        self.bring_up_to_date(table, sequence);
        let remembered = &self.remembered[table];
        for (handle, &frame) in remembered.blocks.iter().zip(&remembered.frames) {
            let is = self.pool.blocks().frame(handle.id).index();
            assert_eq!(frame, is, "{handle} of {of}, patched since {since:?}: {moved:?}");
        }
        let frames = remembered.frames.clone();
        self.read_through(batch, sequence, &frames);
        self.note(format_args!("{of} is patched by {moved:?}"));
    }
}
