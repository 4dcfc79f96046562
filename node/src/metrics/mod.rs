//! Metrics for Prometheus: which there are, and their text.
//!
//! ```text
//! Pool::metrics, counters of a node -- at a scrape --> Scrape -- encode --> OpenMetrics text
//! ```
//!
//! Nothing is registered and nothing is counted for a scrape: it reads the counters that a pool and
//! a node keep anyway.
//!
//! # Invariants
//!
//! - [`FAMILIES`] lists every metric, with its labels. A [`Scrape`] accepts no other, so that the
//!   table of `docs/operate.md` and the queries of `docs/grafana.json` can be compared with it.
//! - A family whose values are not known, such as those of peers for a pool without a node, is left
//!   out.
//! - A bound of a histogram is the end of an interval that the pool counts by itself, so that no
//!   time is counted on the wrong side of it.
//!
//! | file | content |
//! |---|---|
//! | `family` | a metric: its name, kind and labels |
//! | `families` | all metrics |
//! | `scrape` | their values at one moment, and the text |
//! | `histogram` | histograms of a pool as those of Prometheus |
//! | `pool` | the values of a pool |

mod families;
mod family;
mod histogram;
mod pool;
mod scrape;
#[cfg(test)]
mod tests;

pub use families::*;
pub use family::{Family, FamilyKind};
pub use pool::pool;
pub use scrape::{CONTENT_TYPE, Scrape};
