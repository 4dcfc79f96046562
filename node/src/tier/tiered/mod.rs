//! A pool with a tier.

mod fetch;
mod follow;
mod link;
mod offload;
mod settings;
#[expect(clippy::module_inception, reason = "the room is named after its main type")]
mod tiered;

pub(super) use link::Link as TieredLink;
pub use link::{TierReport, TieredCounters};
pub use settings::{TierPolicy, TieredSettings};
pub use tiered::Tiered;
