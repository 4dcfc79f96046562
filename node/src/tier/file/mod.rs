//! A directory on a local drive as the store of a tier: a cache that survives a restart.
//!
//! Values have the same size, so each has a slot of a file. The index, another file, has a record
//! of 64 bytes for each slot, and is read as a whole at the start; the slots are not.
//!
//! # Layout of the directory
//!
//! | file | offset | contents |
//! |---|---|---|
//! | `lock` | | empty; the process that uses the directory has its lock (`flock`) |
//! | `index` | 0 | superblock, 64 bytes: `kvslots` and the version, a random number of the store, bytes of a slot, zeros, checksum |
//! | | 4096 + 64 n | record of slot n, or zeros if it is free |
//! | `values` | n × bytes of a slot | slot n: its record again as a header, the [value](super::TierValue), zeros up to a multiple of 4,096 |
//!
//! | bytes of a record | |
//! |---|---|
//! | 0-15 | fingerprint of the key |
//! | 16-39 | hash of the key, and its check |
//! | 40-47 | generation: the number of the put |
//! | 48-51 | bytes of the value |
//! | 52-55 | zeros |
//! | 56-63 | XXH3-64 of bytes 0 to 55, seeded with the number of the store and the slot |
//!
//! Numbers are little-endian. The value has a header and a checksum of its own.
//!
//! # One put
//!
//! ```text
//! 1  a slot is taken; the key that is evicted for it is not found any more      memory
//! 2  zeros over the record of that key                                          index
//! 3  header and value                                                           values, one write
//! 4  the record                                                                 index
//! 5  the key is found; the record of its former value, if any, gets zeros       memory, index
//! ```
//!
//! The states of a slot are in `table`.
//!
//! # Invariants
//!
//! ```text
//! a value is served only if record == header, and both hashes, length and checksum are right
//! of two records of a key, that of the greater generation is valid
//! a slot is written only while its record is zeros, or was, and it has no reader
//! no file is read or written under the lock of the state
//! no format begins while a slot is in use
//! ```
//!
//! # Crashes
//!
//! | interrupted | after the restart |
//! |---|---|
//! | between 2 and 4, by the end of the process | the slot is free: only the value in flight is lost, and the evicted one |
//! | between 4 and 5 | both values of the key are there, and the new one is valid |
//! | in a format, before the superblock | the directory is new. The superblock is flushed before the file of values grows: so values without one are not of a tier |
//! | by a power failure | nothing else was flushed by force, so each of the last writes may be missing or torn, in any order. A record without its value is found when it is read: a miss, and the slot is free. A torn record is not valid: it gets zeros at the start, and its slot is free |
//!
//! The checksum of a value has 64 bits, and is for faults, not against an attacker who can write
//! to the directory.
//!
//! # Input and output
//!
//! Slots are read and written with `O_DIRECT`, until the file system refuses it: the page cache
//! would be a second copy of what the pool keeps anyway. A read goes into an aligned buffer, from
//! which the value lands in its frame; a put is copied into one. Calls are `pread` and `pwrite` on
//! threads for blocking calls, at most as many as the depth of the queue. `io_uring` would save
//! system calls, of which there is one for each value of some hundred KiB, at the price of unsafe
//! code, and many containers forbid it.

mod admission;
mod buffers;
mod record;
mod settings;
mod slot_file;
mod store;
mod table;
#[cfg(test)]
mod tests;
mod transfer;
mod volume;

pub use super::file_error::FileError;
pub use settings::{Admission, FileSettings};
pub use store::FileStore;
