//! Evicts by requested priority and retention time.
//!
//! Each [`CachePriority`] has two queues: blocks in the order of their release, and blocks under
//! retention, in the order of its expiry. A block whose retention has expired ranks like any other
//! of its priority: the states tell which of the two heads was released first.
//!
//! | queue | rank | state |
//! |---|---|---|
//! | `2 * priority` | order of release | order of release |
//! | `2 * priority + 1` | end of retention in ms, 40 bits · low 24 bits of the order of release | order of release |
//!
//! By the low bits of a rank, the end of a prefix precedes its beginning among blocks retained
//! until the same moment. They wrap every 16 million releases; a prefix released across the wrap is
//! evicted beginning first, which only costs hits.

use super::{CachePriority, Head, Millis, Place, Policy, Released};

pub(super) const NAME: &str = "priority";

const ORDER_BITS: u32 = 24;

/// Evicts lower [priorities](CachePriority) first, then the least recently used. Blocks under
/// retention come last: lower priorities first, then earlier expiry.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PriorityLru;

/// Returns when the retention of a block in a queue of retained blocks expires.
const fn ends(rank: u64) -> Millis {
    Millis(rank >> ORDER_BITS)
}

impl Policy for PriorityLru {
    fn name(&self) -> &'static str {
        NAME
    }

    fn queues(&self) -> usize {
        2 * CachePriority::ALL.len()
    }

    fn place(&self, released: &Released, now: Millis) -> Place {
        let (queue, order) = (2 * released.priority as u8, released.order);
        match released.keep_until {
            Some(until) if until > now => {
                let until = until.0.min(u64::MAX >> ORDER_BITS);
                let rank = until << ORDER_BITS | order & ((1 << ORDER_BITS) - 1);
                Place { queue: queue + 1, rank, state: order }
            }
            _ => Place { queue, rank: order, state: order },
        }
    }

    fn victim(&self, heads: &[Option<Head>], now: Millis) -> Option<usize> {
        let head = |queue: usize| heads.get(queue).copied().flatten();
        for plain in CachePriority::ALL.map(|priority| 2 * priority as usize) {
            let kept = plain + 1;
            match (head(plain), head(kept).filter(|kept| ends(kept.rank) <= now)) {
                (Some(p), Some(k)) => return Some(if k.state < p.state { kept } else { plain }),
                (Some(_), None) => return Some(plain),
                (None, Some(_)) => return Some(kept),
                (None, None) => {}
            }
        }
        heads.iter().position(Option::is_some)
    }
}
