//! Blocks that go to another pool and come back: their bytes, who finds them, and that none is lost whatever goes wrong.
//!
//! | file | what |
//! |---|---|
//! | `kv` | bytes that say what they are |
//! | `sequences` | a sequence goes to another pool, and goes on |
//! | `cached` | evictable blocks go, and come back |
//! | `refusals` | what is refused, and that nothing has happened then |
//! | `faults` | storages that fail or panic, futures that are dropped |
//! | `property` | any list of operations, against a model of which sequences are where |
//! | `stress` | threads on both pools meanwhile |
#![cfg(not(kvpool_loom))]

mod cached;
mod faults;
mod kv;
mod property;
mod refusals;
mod sequences;
#[cfg(not(miri))]
mod stress;
