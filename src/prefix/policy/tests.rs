//! Drives policies by hand, with sorted maps as queues.

use std::collections::BTreeMap;

use super::*;

struct Bench {
    policy: Arc<dyn Policy>,
    queues: Vec<BTreeMap<(u64, u32), u64>>,
    order: u64,
}

impl Bench {
    fn new(kind: PolicyKind) -> Self {
        let policy = kind.build();
        let queues = vec![BTreeMap::new(); policy.queues()];
        Self { policy, queues, order: 0 }
    }

    fn release(&mut self, blocks: &[u32], now: u64, priority: CachePriority) {
        for (depth, &block) in blocks.iter().enumerate().rev() {
            self.order += 1;
            let released = Released {
                order: self.order,
                hash: u64::from(block),
                depth: depth as u32,
                chain: blocks.len() as u32,
                hits: 0,
                context: 0,
                state: 0,
                priority,
                session: None,
                returns_at: None,
            };
            let place = self.policy.place(&released, Millis(now));
            self.queues[place.queue as usize].insert((place.rank, block), place.state);
        }
    }

    fn evict(&mut self, now: u64) -> Option<u32> {
        let heads: Vec<_> = (self.queues.iter())
            .map(|queue| queue.first_key_value().map(|(&(rank, _), &state)| Head { rank, state }))
            .collect();
        let queue = self.policy.victim(&heads, Millis(now))?;
        Some(self.queues[queue].pop_first().expect("the named queue has a head").0.1)
    }

    fn evict_all(&mut self, now: u64) -> Vec<u32> {
        std::iter::from_fn(|| self.evict(now)).collect()
    }
}

use CachePriority::{High, Low, Normal};

#[test]
fn every_policy_is_found_by_its_name_and_no_other_is() {
    for kind in PolicyKind::ALL {
        assert_eq!(kind.name().parse(), Ok(kind));
        assert_eq!(kind.build().name(), kind.name());
        assert!((1..=QUEUES_MAX).contains(&kind.build().queues()), "{kind}");
    }
    let error = "mru".parse::<PolicyKind>().unwrap_err().to_string();
    assert_eq!(error, "no eviction policy is called \"mru\"; there are lru, priority, sessions");
}

#[test]
fn without_heads_there_is_no_victim_and_with_one_it_is_that() {
    for kind in PolicyKind::ALL {
        let policy = kind.build();
        let mut heads = vec![None; policy.queues()];
        assert_eq!(policy.victim(&heads, Millis(7)), None, "{kind}");
        for queue in 0..heads.len() {
            for (rank, state) in [(0, 0), (u64::MAX, u64::MAX), (0, u64::MAX), (u64::MAX, 0)] {
                heads[queue] = Some(Head { rank, state });
                assert_eq!(policy.victim(&heads, Millis(7)), Some(queue), "{kind}");
            }
            heads[queue] = None;
        }
    }
}

#[test]
fn lru_takes_the_end_of_the_oldest_prefix_first() {
    let mut bench = Bench::new(PolicyKind::Lru);
    bench.release(&[1, 2, 3], 5, High);
    bench.release(&[4, 5], 4, Low);
    assert_eq!(bench.evict_all(6), [3, 2, 1, 5, 4]);
    assert_eq!(bench.evict(6), None);
}

#[test]
fn lower_priorities_go_first() {
    let mut bench = Bench::new(PolicyKind::Priority);
    for (first, priority) in [(1, High), (3, Low), (5, Normal), (7, Low)] {
        bench.release(&[first, first + 1], 0, priority);
    }
    assert_eq!(bench.evict_all(0), [4, 3, 8, 7, 6, 5, 2, 1]);
}
