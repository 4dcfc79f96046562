//! Gets and puts of a store. They block on the drive.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::super::key::TierKey;
use super::super::store_error::StoreError;
use super::super::value::{TierValue, verify_as_said};
use super::buffers::Buffer;
use super::record::{RECORD_BYTES, Record, Superblock};
use super::settings::Admission;
use super::slot_file::{FREE, NAME, Opened, SlotFile, State, slot_bytes};
use super::table::{SlotTable, Taken, hash_of};

/// Time after a full disk for which puts replace values instead of taking unused slots.
const FULL_FOR: Duration = Duration::from_secs(60);

/// A value in the buffer into which it was read.
pub(super) struct Read {
    slot: Buffer,
    length: usize,
}

impl AsRef<[u8]> for Read {
    fn as_ref(&self) -> &[u8] {
        &self.slot[RECORD_BYTES..][..self.length]
    }
}

/// A slot that is not written while this exists.
struct Pin<'a> {
    file: &'a SlotFile,
    of: Superblock,
    slot: u32,
    record: Record,
}

impl Pin<'_> {
    /// The key is not found any more. The slot is free when the last reader has ended.
    fn condemn(&self, is_damaged: bool) {
        let mut state = self.file.state.lock();
        // Once, although several may read it.
        let was_found = state.table().condemn(self.slot);
        state.counters.damaged_slots += u64::from(is_damaged && was_found);
    }

    fn is_damaged(&self) -> StoreError {
        self.condemn(true);
        tracing::debug!(slot = self.slot, "a slot of a tier's file is damaged");
        StoreError::Damaged { store: NAME }
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        let clears = self.file.state.lock().table().unpin(self.slot);
        if clears {
            self.file.clear(self.slot);
        }
    }
}

impl SlotFile {
    /// Reads and verifies the value of a key.
    ///
    /// # Errors
    /// [`StoreError::Damaged`], after which the key has no value; an error of the drive.
    pub(super) fn get(&self, key: &TierKey) -> Result<Option<Read>, StoreError> {
        let Some(pin) = self.pin(key) else { return Ok(None) };
        let length = pin.record.length as usize;
        let mut slot = self.buffers.take(slot_bytes(length));
        match self.values.read_at(&mut slot, pin.of.slot(pin.slot)) {
            // The file was cut.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Err(pin.is_damaged()),
            read => read.map_err(|error| self.failed("read", "values", &error))?,
        }
        let header: [u8; RECORD_BYTES] = std::array::from_fn(|at| slot[at]);
        if header != pin.record.encode(pin.of, pin.slot) {
            // Another put was interrupted before its record was written, or the record after it.
            if Record::decode(&header, pin.of, pin.slot).is_some() {
                pin.condemn(false);
                return Ok(None);
            }
            return Err(pin.is_damaged());
        }
        let read = Read { slot, length };
        match verify_as_said(key, read.as_ref()) {
            Ok(_) => Ok(Some(read)),
            Err(_) => Err(pin.is_damaged()),
        }
    }

    fn pin(&self, key: &TierKey) -> Option<Pin<'_>> {
        let mut state = self.state.lock();
        let opened = state.opened.as_mut()?;
        let (slot, record) = opened.table.pin(key)?;
        Some(Pin { file: self, of: opened.of, slot, record })
    }

    /// Stores a value.
    ///
    /// # Errors
    /// [`StoreError::Declined`], [`StoreError::Refused`] if no slot fits, an error of the drive.
    pub(super) fn put(&self, value: &TierValue) -> Result<(), StoreError> {
        let (of, taken) = self.admit(value)?;
        let is_fresh = taken.is_fresh;
        let mut written = self.write(of, taken, value);
        if matches!(written, Err(StoreError::NoSpace { .. }))
            && let Some(taken) = self.note_full(is_fresh.then_some(value.key()))
        {
            written = self.write(of, taken, value);
            if matches!(written, Err(StoreError::NoSpace { .. })) {
                self.note_full(None);
            }
        }
        if written.is_err()
            && let Some(rate) = &mut self.state.lock().rate
        {
            rate.refund(slot_bytes(value.bytes().len()));
        }
        written
    }

    /// Notes that the disk is full. Takes the slot of another value for a key whose write needed
    /// more space: it has its space already. If a write failed that needed none, as it can on file
    /// systems that copy on write, further evictions would only lose values.
    fn note_full(&self, key: Option<&TierKey>) -> Option<Taken> {
        let (now, mut state) = (Instant::now(), self.state.lock());
        if !state.is_disk_full(now) {
            tracing::warn!(path = %self.settings.directory.display(), "the disk of a tier is full: values replace others");
        }
        state.full_until = Some(now + FULL_FOR);
        match key {
            Some(_) if state.declines(now) => None,
            Some(key) => state.take(Some(key)),
            None => {
                state.declines_until = state.full_until;
                None
            }
        }
    }

    /// Decides whether a value is stored, and takes a slot for it.
    fn admit(&self, value: &TierValue) -> Result<(Superblock, Taken), StoreError> {
        let length = value.bytes().len();
        let (mut state, now) = (self.fit(length)?, Instant::now());
        if state.declines(now) {
            return Err(StoreError::Declined { store: NAME, reason: "the disk is full" });
        }
        let is_disk_full = state.is_disk_full(now);
        let opened = state.opened.as_mut().expect("a format that fits");
        let (of, was_seen) = (opened.of, opened.seen.note(hash_of(value.key())));
        let table = &opened.table;
        let is_full = !if is_disk_full { table.has_written_free() } else { table.has_free() };
        let is_new = !was_seen && opened.table.find(value.key()).is_none();
        if is_full && is_new && self.settings.admission == Admission::Second {
            state.counters.declined_first += 1;
            return Err(StoreError::Declined {
                store: NAME,
                reason: "it is full, and has not seen the key before",
            });
        }
        if state.rate.as_mut().is_some_and(|rate| !rate.takes(slot_bytes(length), now)) {
            state.counters.declined_by_rate += 1;
            return Err(StoreError::Declined { store: NAME, reason: "its write rate is used up" });
        }
        let taken = if is_disk_full { state.take(Some(value.key())) } else { None };
        // On a full disk without a value: it may have got space.
        if let Some(taken) = taken.or_else(|| state.take(None)) {
            return Ok((of, taken));
        }
        if let Some(rate) = &mut state.rate {
            rate.refund(slot_bytes(length));
        }
        let reason = "every slot is being read or written".to_owned();
        Err(StoreError::Refused { store: NAME, reason })
    }

    /// Returns the state once its slots fit values of this size. Formats a store that has no
    /// format, or no value and too small slots.
    fn fit(&self, length: usize) -> Result<MutexGuard<'_, State>, StoreError> {
        let state = self.state.lock();
        if state.fits(length) {
            return Ok(state);
        }
        drop(state);
        let _formatting = self.formatting.lock();
        let mut state = self.state.lock();
        if state.fits(length) {
            return Ok(state);
        }
        let wanted = slot_bytes(length) as u64;
        if self.slots(wanted) == 0 || u32::try_from(length).is_err() {
            let size = self.settings.size;
            let reason = format!("a size of {size} bytes has no space for a value of {length}");
            return Err(StoreError::Refused { store: NAME, reason });
        }
        if let Some(opened) = state.opened.as_ref().filter(|opened| !opened.table.is_idle()) {
            let slot_bytes = opened.of.slot_bytes;
            if !std::mem::replace(&mut state.has_misfit, true) {
                let path = self.settings.directory.display();
                tracing::warn!(%path, length, slot_bytes, "a tier declines values that are larger than its slots: use another directory, or remove this one");
            }
            let reason = "its slots are for smaller values: use another directory, or remove this one";
            return Err(StoreError::Declined { store: NAME, reason });
        }
        // No slot is taken, and a failure leaves a directory without a format.
        state.opened = None;
        drop(state);
        let opened = self.format(length)?;
        let mut state = self.state.lock();
        state.opened = Some(opened);
        Ok(state)
    }

    fn write(&self, of: Superblock, taken: Taken, value: &TierValue) -> Result<(), StoreError> {
        let Taken { slot, generation, evicted, .. } = taken;
        let length = value.bytes().len();
        let record = Record { key: *value.key(), generation, length: length as u32 };
        let words = record.encode(of, slot);
        let mut is_lost = false;
        let mut write = || {
            if evicted.is_some() {
                self.write_record(&FREE, slot)?;
                is_lost = true;
            }
            let mut bytes = self.buffers.take(slot_bytes(length));
            bytes[..RECORD_BYTES].copy_from_slice(&words);
            bytes[RECORD_BYTES..][..length].copy_from_slice(value.bytes());
            bytes[RECORD_BYTES + length..].fill(0);
            let written = self.values.write_at(&bytes, of.slot(slot));
            written.map_err(|error| self.failed("write", "values", &error))?;
            self.write_record(&words, slot)
        };
        let written = write();
        let mut state = self.state.lock();
        let cleared = match (&written, evicted) {
            (Ok(()), _) => state.table().finish(slot, record),
            (Err(_), Some(evicted)) if !is_lost => state.table().reinstate(slot, evicted).then_some(slot),
            (Err(_), _) => {
                state.table().abandon(slot);
                Some(slot)
            }
        };
        if written.is_ok() {
            state.counters.writes += 1;
            state.counters.written_bytes += slot_bytes(length) as u64;
        }
        let is_other = evicted.is_some_and(|evicted| evicted.key != record.key);
        state.counters.evictions += u64::from(is_lost && is_other);
        drop(state);
        if let Some(slot) = cleared {
            self.clear(slot);
        }
        written
    }

    fn write_record(&self, words: &[u8], slot: u32) -> Result<(), StoreError> {
        let written = self.index.write_at(words, Superblock::record(slot));
        written.map_err(|error| self.failed("write", "index", &error))
    }

    /// Overwrites the record of a leaving slot without readers, and frees it.
    fn clear(&self, slot: u32) {
        self.write_free(slot);
        self.state.lock().table().clear(slot);
    }
}

impl State {
    /// Returns whether there are slots for values of this size.
    fn fits(&self, length: usize) -> bool {
        let fits =
            |opened: &Opened| slot_bytes(length) as u64 <= opened.of.slot_bytes && opened.table.slots() > 0;
        self.opened.as_ref().is_some_and(fits)
    }

    /// Returns the table while a slot is in use.
    fn table(&mut self) -> &mut SlotTable {
        &mut self.opened.as_mut().expect("the format of a slot that is in use").table
    }

    /// Takes a slot; with a key, one whose space is on the disk.
    fn take(&mut self, key: Option<&TierKey>) -> Option<Taken> {
        let opened = self.opened.as_mut()?;
        let taken = match key {
            Some(key) => opened.table.take_written(key)?,
            None => opened.table.take()?,
        };
        if let Some(evicted) = &taken.evicted {
            // If it comes back, it was of use.
            opened.seen.note(hash_of(&evicted.key));
        }
        Some(taken)
    }
}
