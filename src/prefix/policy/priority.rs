//! What requests asked to be kept goes last.
//!
//! Two queues a [`CachePriority`]: blocks in the order of their release, and blocks that are to be kept for a time, in the
//! order in which their time ends. A block whose time has ended is one of its priority like any other, and its state, the
//! order of its release, says which of the two heads was released first.
//!
//! | queue | rank | state |
//! |---|---|---|
//! | `2 * priority` | order of release | order of release |
//! | `2 * priority + 1` | when its time ends, in ms, 40 bits · low 24 bits of the order of release | order of release |
//!
//! The low bits of a rank let the end of a prefix go before its beginning also among blocks that are kept until the same
//! moment. They wrap once in 16 million releases; a prefix that lies across goes beginning first, once, which costs hits
//! and nothing else.

use super::{CachePriority, Head, Millis, Place, Policy, Released};

pub(super) const NAME: &str = "priority";

const ORDER_BITS: u32 = 24;

/// Lower [priorities](CachePriority) go first, least recently used first among equals. What is to be kept until some
/// moment goes before that only if nothing else is left: rather than refuse an allocation, a promise is broken, of the
/// lowest priority first, and then the one that would have ended first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PriorityLru;

/// When the time of a block in a queue of kept ones ends.
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
