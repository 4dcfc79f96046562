//! The files of a store: open, format, and the state that all calls share. Blocks on the drive.

use std::fs::DirBuilder;
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::super::file_error::FileError;
use super::super::key::TierKey;
use super::super::store_counters::StoreCounters;
use super::super::store_error::StoreError;
use super::admission::{SeenKeys, WriteRate};
use super::buffers::{ALIGN, Buffers};
use super::record::{NoSuperblock, RECORD_BYTES, RECORDS, Record, Superblock, VERSION};
use super::settings::FileSettings;
use super::table::SlotTable;
use super::volume::{self, Volume};

/// Name of the store in reports.
pub(super) const NAME: &str = "file";

/// The record of a free slot.
pub(super) const FREE: [u8; RECORD_BYTES] = [0; RECORD_BYTES];

/// Bytes of the index that are read at a time.
const CHUNK: usize = 1 << 20;

pub(super) struct SlotFile {
    pub(super) settings: FileSettings,
    pub(super) index: Box<dyn Volume>,
    pub(super) values: Box<dyn Volume>,
    pub(super) buffers: Arc<Buffers>,
    /// Never locked during an operation on a file: look-ups and counters lock it on a thread of the
    /// runtime.
    pub(super) state: Mutex<State>,
    /// Held by the put that formats the store; others wait for it.
    pub(super) formatting: Mutex<()>,
    /// Of the directory.
    _lock: Option<volume::Lock>,
}

pub(super) struct State {
    /// `None` until the first put tells the size of values. Does not change while a slot is in use.
    pub(super) opened: Option<Opened>,
    /// Whether a value larger than the slots was declined.
    pub(super) has_misfit: bool,
    pub(super) rate: Option<WriteRate>,
    /// Until when the disk counts as full.
    pub(super) full_until: Option<Instant>,
    /// Until when it has no space even for what replaces a value.
    pub(super) declines_until: Option<Instant>,
    pub(super) counters: StoreCounters,
}

pub(super) struct Opened {
    pub(super) of: Superblock,
    pub(super) table: SlotTable,
    pub(super) seen: SeenKeys,
}

impl Opened {
    fn new(of: Superblock, slots: u32, records: Vec<(u32, Record)>, stale: &mut Vec<u32>) -> Self {
        let table = SlotTable::new(slots, records, stale);
        Self { of, table, seen: SeenKeys::new(slots as usize) }
    }
}

/// Returns the bytes of a slot for values of `length` bytes.
pub(super) fn slot_bytes(length: usize) -> usize {
    (RECORD_BYTES + length).next_multiple_of(ALIGN)
}

impl SlotFile {
    /// Creates the directory if it is missing, locks it, and reads the index.
    pub(super) fn open(settings: FileSettings) -> Result<Self, FileError> {
        settings.check()?;
        let directory = settings.directory.clone();
        // Not its parents: one that is missing may be a drive that is not mounted.
        match DirBuilder::new().mode(0o700).create(&directory) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(system("create", directory, &error));
            }
            _ => {}
        }
        let path = directory.join("lock");
        let lock = volume::lock(&path).map_err(|error| system("lock", path, &error))?;
        let lock = lock.ok_or_else(|| FileError::InUse { path: directory.clone() })?;
        let path = directory.join("index");
        let index = volume::open(&path).map_err(|error| system("open", path, &error))?;
        let path = directory.join("values");
        let values = volume::open_direct(&path).map_err(|error| system("open", path, &error))?;
        Ok(Self { _lock: Some(lock), ..Self::over(settings, Box::new(index), Box::new(values))? })
    }

    /// Reads the index of a store over other volumes.
    pub(super) fn over(
        settings: FileSettings,
        index: Box<dyn Volume>,
        values: Box<dyn Volume>,
    ) -> Result<Self, FileError> {
        let state = State {
            opened: None,
            has_misfit: false,
            rate: settings.write_rate.map(|rate| WriteRate::new(rate, Instant::now())),
            full_until: None,
            declines_until: None,
            counters: StoreCounters::default(),
        };
        // While a value is read, the former one lands.
        let buffers = Buffers::new(2 * settings.depth);
        let (state, formatting) = (Mutex::new(state), Mutex::default());
        let mut file = Self { settings, index, values, buffers, state, formatting, _lock: None };
        match file.superblock()? {
            Some(of) => {
                let loaded = file.load(of);
                let (opened, damaged) = loaded.map_err(|error| system("read", file.path("index"), &error))?;
                let state = file.state.get_mut();
                (state.opened, state.counters.damaged_slots) = (Some(opened), damaged);
            }
            // A format writes the values only once the superblock is on the medium.
            None if file.state.get_mut().counters.damaged_slots == 0 => {
                let size = file.values.size().map_err(|error| system("read", file.path("values"), &error))?;
                if size > 0 {
                    return Err(FileError::Foreign { path: file.settings.directory });
                }
            }
            None => {}
        }
        Ok(file)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.settings.directory.join(name)
    }

    /// Returns the superblock; `None` if there is none yet, or it was damaged.
    fn superblock(&self) -> Result<Option<Superblock>, FileError> {
        let path = || self.settings.directory.clone();
        let mut bytes = [0; RECORD_BYTES];
        match self.index.read_at(&mut bytes, 0) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                let size = self.index.size().map_err(|error| system("read", self.path("index"), &error))?;
                return if size == 0 { Ok(None) } else { Err(FileError::Foreign { path: path() }) };
            }
            read => read.map_err(|error| system("read", self.path("index"), &error))?,
        }
        match Superblock::decode(&bytes) {
            Ok(of) if of.slot_bytes % ALIGN as u64 == 0 => Ok(Some(of)),
            Err(NoSuperblock::Foreign) => Err(FileError::Foreign { path: path() }),
            Err(NoSuperblock::Version(got)) => Err(FileError::Format { path: path(), got, want: VERSION }),
            Err(NoSuperblock::Blank) => Ok(None),
            _ => {
                tracing::warn!(path = %path().display(), "the tier begins empty: its index was damaged");
                self.state.lock().counters.damaged_slots += 1;
                Ok(None)
            }
        }
    }

    /// Returns the number of slots of this size that the settings allow.
    pub(super) fn slots(&self, slot_bytes: u64) -> u32 {
        let bytes = self.settings.size.saturating_sub(RECORDS);
        u32::try_from(bytes / (slot_bytes + RECORD_BYTES as u64)).unwrap_or(u32::MAX)
    }

    /// Reads all records, and gives the files the size of the settings, or that of the values that
    /// they have. Also returns the number of records that are damaged.
    fn load(&self, of: Superblock) -> io::Result<(Opened, u64)> {
        let (mut records, mut invalid) = (Vec::new(), Vec::new());
        let mut chunk = vec![0; CHUNK];
        let bytes = self.index.size()?.saturating_sub(RECORDS);
        let in_file = u32::try_from(bytes / RECORD_BYTES as u64).unwrap_or(u32::MAX);
        let mut slot = 0;
        while slot < in_file {
            let wanted = (in_file - slot).min((CHUNK / RECORD_BYTES) as u32);
            let chunk = &mut chunk[..wanted as usize * RECORD_BYTES];
            self.index.read_at(chunk, Superblock::record(slot))?;
            for bytes in chunk.as_chunks::<RECORD_BYTES>().0 {
                match Record::decode(bytes, of, slot) {
                    Some(record) if slot_bytes(record.length as usize) as u64 <= of.slot_bytes => {
                        records.push((slot, record));
                    }
                    _ if *bytes != [0; RECORD_BYTES] => invalid.push(slot),
                    _ => {}
                }
                slot += 1;
            }
        }
        let (damaged, wanted) = (invalid.len() as u64, self.slots(of.slot_bytes));
        let used = records.last().map_or(0, |(slot, _)| slot + 1);
        if wanted < used {
            let path = self.settings.directory.display();
            tracing::warn!(%path, "a tier has values beyond its size, and keeps them: for less space, remove the directory");
        }
        let slots = wanted.max(used);
        self.index.set_size(Superblock::record(slots))?;
        self.values.set_size(of.slot(slots))?;
        let opened = Opened::new(of, slots, records, &mut invalid);
        for slot in invalid.into_iter().filter(|slot| *slot < slots) {
            self.write_free(slot);
        }
        Ok((opened, damaged))
    }

    /// Writes zeros over the record of a slot. If it fails, the record stays: its value is valid,
    /// loses to a greater generation, or is found to be damaged.
    pub(super) fn write_free(&self, slot: u32) {
        if let Err(error) = self.index.write_at(&FREE, Superblock::record(slot)) {
            tracing::debug!(slot, %error, "the record of a free slot stays");
        }
    }

    /// Makes an empty store of slots for values of `length` bytes. The superblock is on the medium
    /// before the values take space: without it, the directory is new.
    pub(super) fn format(&self, length: usize) -> Result<Opened, StoreError> {
        let slot_bytes = slot_bytes(length) as u64;
        let store = getrandom::u64().map_err(|error| StoreError::Refused {
            store: NAME,
            reason: format!("no random number for a format: {error}"),
        })?;
        let of = Superblock { store, slot_bytes };
        let files = || {
            self.values.set_size(0)?;
            self.values.sync()?;
            let slots = self.slots(slot_bytes);
            self.index.set_size(0)?;
            self.index.set_size(Superblock::record(slots))?;
            self.index.write_at(&of.encode(), 0)?;
            self.index.sync()?;
            self.values.set_size(of.slot(slots))?;
            Ok(Opened::new(of, slots, Vec::new(), &mut Vec::new()))
        };
        files().map_err(|error| self.failed("format", "index", &error))
    }

    /// Returns for each key whether it has a value.
    pub(super) fn exists(&self, keys: &[TierKey]) -> Vec<bool> {
        let state = self.state.lock();
        let has = |key| state.opened.as_ref().is_some_and(|opened| opened.table.find(key).is_some());
        keys.iter().map(has).collect()
    }

    /// Returns counters since the store was opened, and how full it is.
    pub(super) fn counters(&self) -> StoreCounters {
        let state = self.state.lock();
        let mut counters = state.counters;
        if let Some(opened) = &state.opened {
            counters.slots = opened.table.slots() as u64;
            counters.used_slots = opened.table.held() as u64;
            counters.slot_bytes = opened.of.slot_bytes;
        }
        counters.is_disk_full = state.is_disk_full(Instant::now());
        counters
    }

    /// Returns the error of an operation on a file.
    pub(super) fn failed(&self, operation: &'static str, name: &str, error: &io::Error) -> StoreError {
        let path = self.path(name);
        match error.kind() {
            // The last is what a limit of a file's size causes.
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                StoreError::NoSpace { store: NAME, path }
            }
            ErrorKind::ReadOnlyFilesystem => StoreError::ReadOnly { store: NAME, path },
            _ => StoreError::Drive { store: NAME, operation, path, reason: error.to_string() },
        }
    }
}

impl State {
    pub(super) fn is_disk_full(&self, now: Instant) -> bool {
        self.full_until.is_some_and(|until| now < until)
    }

    pub(super) fn declines(&self, now: Instant) -> bool {
        self.declines_until.is_some_and(|until| now < until)
    }
}

/// Returns the error of the system when a directory is opened.
pub(super) fn system(operation: &'static str, path: PathBuf, error: &io::Error) -> FileError {
    FileError::System { operation, path, reason: error.to_string() }
}
