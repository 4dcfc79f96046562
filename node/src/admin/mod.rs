//! The admin interface: a small HTTP API over a pool of either kind, and its client.
//!
//! | route | answer |
//! |---|---|
//! | `GET /` | the live page, which follows the events; needs no token |
//! | `GET /healthz` | [`Health`]; 503 unless the node serves; needs no token |
//! | `GET /readyz` | [`Readiness`]; 503 unless the node should get requests; needs no token |
//! | `GET /stats` | [`StatsReport`] |
//! | `GET /metrics` | the [metrics](crate::metrics) |
//! | `GET /map.svg` | a picture of the pool |
//! | `GET /owners` | [`OwnersReport`]; `?limit=N` for at most N owners, by default 1,000 |
//! | `GET /migrations` | [`MigrationList`] |
//! | `GET /topology` | [`TopologyReport`](crate::topology::TopologyReport) |
//! | `GET /events` | server-sent [events](Notice) |
//! | `GET /openapi.json` | the description of all routes |
//! | `POST /defrag` | [`DefragOutcome`] |
//! | `POST /resize` | [`ResizeOrder`] to [`ResizeOutcome`] |
//! | `POST /migrate` | [`MigrateOrder`] to [`MigrationRecord`] |
//! | `POST /declare-ended` | [`EndedOrder`] to [`EndedOutcome`] |
//! | `POST /trim` | [`TrimOrder`] to [`TrimOutcome`] |
//! | `POST /hints` | [`HintsEnvelope`](crate::hints::HintsEnvelope) to [`HintsAnswer`](crate::hints::HintsAnswer) |
//! | `POST /audit` | [`AuditOutcome`] |
//!
//! Every error is a [`Problem`], as `application/problem+json` (RFC 9457).
//!
//! A [pool of frames](ServedPool::Frames) has neither bytes nor sequences: figures about them are
//! absent, and `/sequences`, `/migrations`, `/defrag`, `/resize`, `/migrate`, `/declare-ended`, and
//! evictions by `/trim`, which are its engine's, are refused with 501.
//!
//! # Authorization
//!
//! Outside of the loopback, [`AdminServer::bind`] requires a bearer token; a Unix socket needs
//! none, because only the process's user can open it. An `https` address presents the certificate
//! of [`AdminCredentials`]. A token is compared in constant time, before a body is read. Without a
//! token, only requests whose `Host` is an IP address or `localhost` are answered, which prevents
//! DNS rebinding. A request that changes anything must have the content type `application/json`,
//! which a web page cannot send to another origin without a CORS preflight.
//!
//! # Limits
//!
//! [`Limits`] bounds the connections, the size and time of header and body, and the time to make
//! and read an answer. A connection takes one request. While all places are taken, a new connection
//! displaces the oldest without a request, so that silent callers lock no other out; if all are
//! being answered, the new caller gets 503 with `Retry-After`, except for `/healthz` and `/readyz`.
//! Disconnecting a caller leaves nothing half done: compactions and resizes are cancel safe.

mod access;
mod apart;
mod api;
mod client;
mod connections;
#[cfg(test)]
mod description_tests;
mod events;
mod failures;
mod guard;
mod interface;
mod limits;
mod page;
mod pool;
mod problem;
mod reporter;
mod routes;
mod served_pool;
mod server;
mod serving;
#[cfg(test)]
mod tests;
mod views;

pub use access::{AccessError, AdminAccess, AdminCredentials};
pub use api::{
    AllocationTimes, AuditOutcome, DefragOutcome, EndedOrder, EndedOutcome, Health, HealthState,
    MigrateOrder, MigrationKind, MigrationList, MigrationRecord, MigrationSide, MigrationState,
    MigrationTransport, ResizeOrder, ResizeOutcome, SequenceStats, StatsReport,
};
pub use client::{Client, ClientError};
pub use events::{Follower, Notice, SequenceSummary, StatsSummary};
pub use failures::Failures;
pub use interface::{Admin, Answer};
pub use kvpool_map::{CellChanges, Cells};
pub use limits::Limits;
pub use pool::{PoolAdmin, Quiet};
pub use problem::{AdminError, Problem};
pub use reporter::{Fetching, Reporter, Reporters};
pub use served_pool::ServedPool;
pub use server::{AdminServer, BindError};
pub(crate) use serving::Serving;
pub use views::{NotReady, OwnerKind, OwnerRecord, OwnersReport, Readiness, TrimOrder, TrimOutcome};
