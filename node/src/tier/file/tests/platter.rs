//! Volumes in memory. They know which bytes are safe from a power failure, and count writes.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::super::volume::Volume;

/// Unit that a drive writes as a whole.
const SECTOR: usize = 512;

/// Unit in which a file takes space.
const PAGE: u64 = 4096;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    None,
    /// After this many writes, the next one is torn, and the process has ended.
    EndsAfter(u64),
    /// The process has ended.
    Ended,
    /// The disk has space for this many pages.
    Full(usize),
    /// The values have no space, nor has a copy of what they have.
    FullCopies,
    ReadOnly,
    /// Reads fail.
    Unreadable,
}

enum Change {
    Write(u64, Vec<u8>),
    Size(u64),
}

#[derive(Default)]
struct Platter {
    bytes: Vec<u8>,
    /// What a power failure leaves in any case.
    durable: Vec<u8>,
    /// Later changes, in order.
    changes: Vec<Change>,
}

struct State {
    index: Platter,
    values: Platter,
    fault: Fault,
    writes: u64,
    pages: HashSet<(bool, u64)>,
    random: fastrand::Rng,
}

/// The two volumes of a store.
#[derive(Clone)]
pub struct Disk(Arc<Mutex<State>>);

struct File {
    disk: Disk,
    is_index: bool,
}

impl Platter {
    fn set_size(bytes: &mut Vec<u8>, size: u64) {
        bytes.resize(size as usize, 0);
    }

    fn write(bytes: &mut Vec<u8>, from: &[u8], at: u64) {
        let end = at as usize + from.len();
        bytes.resize(bytes.len().max(end), 0);
        bytes[at as usize..end].copy_from_slice(from);
    }

    /// Keeps some of the sectors of what was not durable.
    fn lose_power(&mut self, random: &mut fastrand::Rng) {
        let kept = random.f64();
        for change in std::mem::take(&mut self.changes) {
            match change {
                Change::Size(size) if random.f64() < 0.9 => Self::set_size(&mut self.durable, size),
                Change::Size(_) => {}
                Change::Write(at, bytes) => {
                    // Sectors begin at multiples of their size in the file.
                    let mut from = 0;
                    while from < bytes.len() {
                        let end = (SECTOR - (at as usize + from) % SECTOR + from).min(bytes.len());
                        if random.f64() < kept {
                            Self::write(&mut self.durable, &bytes[from..end], at + from as u64);
                        }
                        from = end;
                    }
                }
            }
        }
        self.bytes = self.durable.clone();
    }
}

impl Disk {
    pub fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(State {
            index: Platter::default(),
            values: Platter::default(),
            fault: Fault::None,
            writes: 0,
            pages: HashSet::new(),
            random: fastrand::Rng::with_seed(seed),
        })))
    }

    pub fn index(&self) -> impl Volume + use<> {
        File { disk: self.clone(), is_index: true }
    }

    pub fn values(&self) -> impl Volume + use<> {
        File { disk: self.clone(), is_index: false }
    }

    pub fn set_fault(&self, fault: Fault) {
        self.0.lock().fault = fault;
    }

    pub fn has_ended(&self) -> bool {
        self.0.lock().fault == Fault::Ended
    }

    pub fn pages(&self) -> usize {
        self.0.lock().pages.len()
    }

    /// Flushes everything to the medium.
    pub fn sync(&self) {
        let state = &mut *self.0.lock();
        for platter in [&mut state.index, &mut state.values] {
            platter.durable = platter.bytes.clone();
            platter.changes.clear();
        }
    }

    pub fn lose_power(&self) {
        let state = &mut *self.0.lock();
        state.index.lose_power(&mut state.random);
        state.values.lose_power(&mut state.random);
    }

    /// Changes the bytes of a file.
    pub fn change(&self, is_index: bool, change: impl FnOnce(&mut Vec<u8>)) {
        let state = &mut *self.0.lock();
        change(&mut state.of(is_index).bytes);
    }
}

impl State {
    fn of(&mut self, is_index: bool) -> &mut Platter {
        if is_index { &mut self.index } else { &mut self.values }
    }
}

fn error(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

impl File {
    /// Begins a write. Returns how many of its bytes are written, and the result.
    fn begin(&self, at: u64, length: usize) -> (MutexGuard<'_, State>, usize, io::Result<()>) {
        let mut guard = self.disk.0.lock();
        let state = &mut *guard;
        let (written, result) = match state.fault {
            Fault::Ended => (0, Err(error(libc::EIO))),
            Fault::ReadOnly => (0, Err(error(libc::EROFS))),
            Fault::FullCopies if !self.is_index => (0, Err(error(libc::ENOSPC))),
            Fault::EndsAfter(writes) if state.writes >= writes => {
                state.fault = Fault::Ended;
                (state.random.usize(..=length), Err(error(libc::EIO)))
            }
            Fault::Full(pages_max) => {
                let pages = at / PAGE..(at + length as u64).div_ceil(PAGE);
                let new = pages.filter(|page| !state.pages.contains(&(self.is_index, *page))).count();
                if state.pages.len() + new > pages_max {
                    (0, Err(error(libc::ENOSPC)))
                } else {
                    (length, Ok(()))
                }
            }
            _ => (length, Ok(())),
        };
        state.writes += 1;
        (guard, written, result)
    }
}

impl Volume for File {
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        let mut state = self.disk.0.lock();
        if state.fault == Fault::Unreadable {
            return Err(error(libc::EIO));
        }
        let bytes = &state.of(self.is_index).bytes;
        let from = bytes.get(at as usize..at as usize + into.len());
        into.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let (mut state, written, result) = self.begin(at, bytes.len());
        let written = &bytes[..written];
        if !written.is_empty() {
            let pages = at / PAGE..(at + written.len() as u64).div_ceil(PAGE);
            state.pages.extend(pages.map(|page| (self.is_index, page)));
        }
        let platter = state.of(self.is_index);
        Platter::write(&mut platter.bytes, written, at);
        platter.changes.push(Change::Write(at, written.to_vec()));
        result
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.disk.0.lock().of(self.is_index).bytes.len() as u64)
    }

    fn set_size(&self, bytes: u64) -> io::Result<()> {
        let (mut state, written, result) = self.begin(0, 0);
        if result.is_ok() {
            let platter = state.of(self.is_index);
            Platter::set_size(&mut platter.bytes, bytes);
            platter.changes.push(Change::Size(bytes));
        }
        debug_assert_eq!(written, 0);
        result
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.disk.0.lock();
        if state.fault == Fault::Ended {
            return Err(error(libc::EIO));
        }
        let platter = state.of(self.is_index);
        platter.durable = platter.bytes.clone();
        platter.changes.clear();
        Ok(())
    }
}
