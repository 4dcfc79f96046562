use serde::{Deserialize, Serialize};

/// Counters since a store in this process was opened, and how full it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StoreCounters {
    /// Slots for values; 0 until the first value tells their size.
    pub slots: u64,
    /// Slots that hold a value.
    pub used_slots: u64,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// Values that were written.
    pub writes: u64,
    /// Bytes of the slots that were written.
    pub written_bytes: u64,
    /// Values that made room for others.
    pub evictions: u64,
    /// Values that a full store declined because it had not seen their keys before.
    pub declined_first: u64,
    /// Values that were declined because the write rate was used up.
    pub declined_by_rate: u64,
    /// Slots whose record or value was damaged; they are free.
    pub damaged_slots: u64,
    /// Whether the disk was full within the last minute.
    pub is_disk_full: bool,
}
