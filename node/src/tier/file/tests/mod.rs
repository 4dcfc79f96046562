//! A store over volumes in memory, which can be interrupted, torn, cut, filled and damaged.
//!
//! | file | contents |
//! |---|---|
//! | `support` | values, stores, and what a get comes to |
//! | `platter` | the volumes, and their faults |
//! | `crashes` | the end of the process at every write; power failures |
//! | `damage` | bit flips, cut files, other formats, full and read-only disks |
//! | `model` | random operations against a naive model |
//! | `policy` | eviction, admission, the write rate, sizes of values |

mod crashes;
mod damage;
mod model;
mod platter;
mod policy;
mod support;
