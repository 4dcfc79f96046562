//! Candidates for preemption and their order.

use std::cmp::Ordering;

use kvpool::{LowestPriorityFirst, Pool, Priority, Sequence, SequenceError, SequenceId, Victim};
use kvpool_testkit::steps::append;

use super::kv::{admit, is_idle, plain, pool, prompt};

fn ids(victims: &[Victim]) -> Vec<u64> {
    victims.iter().map(|victim| victim.id.0).collect()
}

fn open(pool: &Pool, id: u64, priority: Priority, tokens: usize) -> Sequence {
    let mut sequence = pool.sequence(SequenceId(id)).priority(priority).open().unwrap();
    if tokens > 0 {
        append(pool, &mut sequence, tokens);
    }
    sequence
}

#[test]
fn the_default_order() {
    let pool = pool(plain(), 100);
    let open = |id, priority, tokens| open(&pool, id, priority, tokens);
    let sequences = [
        open(1, Priority::High, 40),
        open(2, Priority::Normal, 40),
        open(3, Priority::Normal, 8),
        open(4, Priority::Urgent, 80),
        open(5, Priority::Normal, 0),
    ];
    // Opened under the same newest batch.
    let (mut few, mut many) = (open(6, Priority::Normal, 0), open(7, Priority::Normal, 0));
    let mut batch = pool.begin_batch();
    batch.append(&mut few, 4).unwrap();
    batch.append(&mut many, 8).unwrap();
    batch.finish();
    assert_eq!(ids(&pool.victims(&LowestPriorityFirst)), [7, 6, 3, 2, 1, 4, 5]);
    let most_blocks = |a: &Victim, b: &Victim| b.blocks.cmp(&a.blocks).then(a.id.cmp(&b.id));
    assert_eq!(ids(&pool.victims(&most_blocks)), [4, 1, 2, 3, 7, 6, 5]);
    let victim = pool.victim(SequenceId(2)).unwrap();
    assert_eq!((victim.priority, victim.tokens, victim.blocks), (Priority::Normal, 40, 10));
    drop((sequences, few, many));
    is_idle(&pool);
}

/// Shared blocks do not count, cached ones count apart, and the close gives back what was listed.
#[tokio::test]
async fn blocks_that_a_close_gives_back() {
    let pool = pool(plain(), 100);
    let tokens = prompt(1, 42);
    let first = admit(&pool, 1, &tokens).unwrap();
    let mut fork = first.fork(SequenceId(2)).unwrap();
    append(&pool, &mut fork, 9);
    let counts = |id| {
        let victim = pool.victim(SequenceId(id)).unwrap();
        (victim.freed_blocks, victim.cached_blocks, victim.shared_blocks)
    };
    assert_eq!(counts(1), (1, 0, 10), "the fork has copied the last block");
    assert_eq!(counts(2), (3, 0, 10));
    let (free, available) = (pool.free_blocks(), pool.available_blocks());
    drop(fork);
    assert_eq!((pool.free_blocks(), pool.available_blocks()), (free + 3, available + 3));
    assert_eq!(counts(1), (1, 10, 0));
    let preempted = pool.preempt(first, kvpool::Preempt::Recompute).await.unwrap();
    assert_eq!((preempted.freed_blocks, preempted.cached_blocks), (1, 10));
    is_idle(&pool);
}

/// A candidate that finished meanwhile is absent, or an error.
#[test]
fn a_victim_that_finished() {
    let pool = pool(plain(), 100);
    let (a, b) = (open(&pool, 1, Priority::Normal, 8), open(&pool, 2, Priority::Normal, 8));
    assert_eq!(ids(&pool.victims(&LowestPriorityFirst)), [2, 1]);
    drop(b);
    assert_eq!(ids(&pool.victims(&LowestPriorityFirst)), [1]);
    let want = SequenceError::NotOpen { id: SequenceId(2) };
    assert_eq!(pool.victim(SequenceId(2)).unwrap_err(), want);
    drop(a);
    let any = |_: &Victim, _: &Victim| Ordering::Equal;
    assert!(pool.victims(&any).is_empty());
    is_idle(&pool);
}
