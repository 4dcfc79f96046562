//! Evicts the block that was released longest ago.

use super::{Head, Millis, Place, Policy, Released};

pub(super) const NAME: &str = "lru";

/// Least recently used: evicts blocks in the order of their release, so the end of a request's
/// prefix before its beginning. Learns nothing and keeps no state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Lru;

impl Policy for Lru {
    fn learns(&self) -> bool {
        false
    }

    fn places_by_order(&self) -> bool {
        true
    }

    fn name(&self) -> &'static str {
        NAME
    }

    fn queues(&self) -> usize {
        1
    }

    fn place(&self, released: &Released, _now: Millis) -> Place {
        Place { queue: 0, rank: released.order, state: 0 }
    }

    fn victim(&self, heads: &[Option<Head>], _now: Millis) -> Option<usize> {
        heads.iter().position(Option::is_some)
    }
}
