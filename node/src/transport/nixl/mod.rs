//! Transfers by NIXL: RDMA, GPU memory, and peers in Python.
//!
//! The library is loaded at run time; this crate builds without it.
//!
//! # One thread
//!
//! All objects of NIXL belong to one thread of the transport. It registers memory, loads peers,
//! posts requests and polls them. Over shared memory, posting a request *is* the copy, so a
//! submission is split into requests of at most 8 MiB, two of which are in flight, to be fair to
//! other transfers. The thread also polls while peers may write here: without hardware support, the
//! receiving end must make progress too.
//!
//! # What NIXL does not do
//!
//! | missing | consequence |
//! |---|---|
//! | deadlines: a stopped peer leaves a request in progress forever | a transfer without progress for [`patience`](NixlSettings::patience) is quarantined |
//! | cancellation: released requests may still write later | a quarantined transfer keeps its hold until its requests end, or the agent is gone |
//! | protection: a peer with the metadata may write all registered memory | peers are authenticated by the link that carries the metadata; a grant is an agreement |
//! | the target's knowledge of writes in flight | a grant is over when the source says so ([`SourceState::Over`]) or the agent is gone |
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
