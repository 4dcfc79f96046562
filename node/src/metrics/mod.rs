//! Metrics for Prometheus, and their text.
//!
//! ```text
//! Pool::metrics, counters of a node -- at a scrape --> Scrape -- encode --> OpenMetrics text
//! ```
//!
//! There is no registry: a scrape reads the counters that a pool and a node keep anyway.
//!
//! # Invariants
//!
//! - [`FAMILIES`] lists every metric with its labels. A [`Scrape`] accepts no other, so that
//!   `docs/operate.md` and `docs/grafana.json` can be checked against it.
//! - A family without known values, such as that of peers for a pool without a node, is omitted.
//! - A bound of a histogram ends an interval of the pool, so no time is counted on its wrong side.

mod families;
mod family;
mod histogram;
mod pool;
mod scrape;
#[cfg(test)]
mod tests;

pub use families::*;
pub use family::{Family, FamilyKind};
pub use pool::{frames, pool};
pub use scrape::{CONTENT_TYPE, Scrape};
