//! Transfers by NIXL: remote direct memory access, memory of GPUs, and peers in Python.
//!
//! The library is found at run time; this crate needs nothing of it to be built.
//!
//! # One thread
//!
//! All objects of NIXL belong to one thread of the transport. It registers memory, loads peers,
//! posts requests and polls them, because over shared memory posting *is* the copy. A submission
//! is cut into requests of at most 8 MiB, of which two are in flight, so that other transfers get
//! their turn. The thread also polls while peers may write here: without hardware, the receiving
//! end has to take part.
//!
//! # What NIXL does not do
//!
//! | missing | consequence |
//! |---|---|
//! | deadlines: a stopped peer leaves a request in progress for ever | a transfer without progress for [`patience`](NixlSettings::patience) is quarantined |
//! | cancellation: released requests still write later | a quarantined transfer keeps its hold until its requests end, or the agent is gone |
//! | protection: a peer that has the metadata may write to all registered memory | peers are authenticated by the link that carries the metadata; a grant is an agreement |
//! | knowledge at the target of what a source has in flight | a grant is over when the source says so ([`SourceState::Over`]) or the agent is gone |
//!
//! [`SourceState::Over`]: kvpool::transport::SourceState::Over

mod agent;
mod api;
mod metadata;
mod shared;
mod span;
mod transport;
mod work;

pub use api::{LOCATION, check};
pub use transport::{NixlSettings, NixlTransport};
