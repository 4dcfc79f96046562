//! Evicts by requested priority: a queue per [`CachePriority`], in the order of release.

use super::{CachePriority, Head, Millis, Place, Policy, Released};

pub(super) const NAME: &str = "priority";

/// Evicts lower [priorities](CachePriority) first, then the least recently used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PriorityLru;

impl Policy for PriorityLru {
    fn name(&self) -> &'static str {
        NAME
    }

    fn learns(&self) -> bool {
        false
    }

    fn queues(&self) -> usize {
        CachePriority::ALL.len()
    }

    fn place(&self, released: &Released, _now: Millis) -> Place {
        Place { queue: released.priority as u8, rank: released.order, state: 0 }
    }

    fn victim(&self, heads: &[Option<Head>], _now: Millis) -> Option<usize> {
        heads.iter().position(Option::is_some)
    }
}
