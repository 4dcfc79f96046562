//! The prefix cache under misuse, and under unlucky timing.

use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::Duration;

use kvpool::prefix::policy::{CachePriority, Head, Millis, Place, Policy, PolicyKind, Released};
use kvpool::prefix::{PrefixConfig, PrefixKeys};
use kvpool::{AllocError, AllocRequest, Pool, Sequence, SequenceId};
use kvpool_testkit::prompts::{BLOCK_TOKENS, pool_of};

/// Returns a prompt of this many full blocks, and one token.
fn prompt(first: u32, blocks: usize) -> Vec<u32> {
    (0..(blocks * BLOCK_TOKENS) as u32 + 1).map(|token| first * 100_000 + token).collect()
}

/// Appends the uncached tokens of a prompt, and ends the batch.
fn fill(pool: &Pool, mut sequence: Sequence, prompt: &[u32]) -> Sequence {
    let mut batch = pool.begin_batch();
    let missing = prompt.len() - sequence.len();
    batch.append(&mut sequence, missing).unwrap();
    batch.finish();
    sequence
}

fn open(pool: &Pool, id: u64, prompt: &[u32]) -> Sequence {
    fill(pool, pool.sequence(SequenceId(id)).tokens(prompt).unwrap(), prompt)
}

/// Runs a function that may never return.
fn in_time(f: impl FnOnce() + Send + 'static) {
    let (done, wait) = mpsc::channel();
    std::thread::spawn(move || {
        f();
        done.send(()).unwrap();
    });
    wait.recv_timeout(Duration::from_secs(20)).expect("the function returns");
}

/// Between the release of a block and its recording, another sequence reuses and releases it.
#[test]
fn a_late_release_does_not_hide_a_batch() {
    type Hook = Box<dyn FnOnce() + Send>;
    let hook: Arc<Mutex<Option<Hook>>> = Arc::default();
    let called = hook.clone();
    // The clock is read between the two, for the retention.
    let config = PrefixConfig::new().policy(PolicyKind::Priority).clock(move || {
        let hook = called.lock().unwrap().take();
        hook.into_iter().for_each(|hook| hook());
        Millis(1)
    });
    let pool = pool_of(10, config);
    let tokens = prompt(1, 10);
    let retained = pool.sequence(SequenceId(1)).keep_until(Millis(2)).tokens(&tokens[..40]).unwrap();
    let sequence = fill(&pool, retained, &tokens[..40]);
    let batch = Arc::new(OnceLock::new());
    let (other, under) = (pool.clone(), batch.clone());
    *hook.lock().unwrap() = Some(Box::new(move || {
        let again = other.sequence(SequenceId(2)).tokens(&prompt(1, 10)[..37]).unwrap();
        assert_eq!(again.len(), 36);
        assert!(under.set(Mutex::new(Some(other.begin_batch()))).is_ok());
        drop(again);
    }));
    drop(sequence);
    let batch = batch.get().expect("the hook was called").lock().unwrap().take().unwrap();
    let refused = pool.allocate(AllocRequest::new(2));
    assert!(
        matches!(refused, Err(AllocError::Exhausted { .. })),
        "a batch in flight reads all but one: {refused:?}"
    );
    batch.finish();
    drop(pool.allocate(AllocRequest::new(10)).unwrap());
    pool.audit().unwrap();
}

/// Two blocks of one queue, far ahead of its cursor: the queue's head is a bound, not a rank of
/// either.
#[test]
fn the_front_of_a_queue_is_found_among_ranks_that_lie_far_ahead() {
    in_time(|| {
        let pool = pool_of(40, PrefixConfig::new().policy_of(Arc::new(HighRanks)));
        let keep = |first: u32| {
            let tokens = prompt(first, 1);
            let sequence = pool.sequence(SequenceId(1)).keep(CachePriority::High).tokens(&tokens).unwrap();
            drop(fill(&pool, sequence, &tokens));
        };
        let evict = |first: u32| {
            drop(open(&pool, 2, &prompt(first, 30)));
            drop(pool.allocate(AllocRequest::new(20)).unwrap());
        };
        keep(1);
        evict(2);
        keep(3);
        evict(4);
        for first in [1, 3] {
            assert_eq!(pool.sequence(SequenceId(1)).tokens(&prompt(first, 1)).unwrap().len(), 4, "kept");
        }
        drop(pool.allocate(AllocRequest::new(40)).unwrap());
        pool.audit().unwrap();
    });
}

/// Places blocks of high priority in a queue of its own, far ahead.
#[derive(Debug)]
struct HighRanks;

impl Policy for HighRanks {
    fn name(&self) -> &'static str {
        "high ranks"
    }

    fn queues(&self) -> usize {
        2
    }

    fn victim(&self, heads: &[Option<Head>], _: Millis) -> Option<usize> {
        heads.iter().position(Option::is_some)
    }

    fn place(&self, released: &Released, _: Millis) -> Place {
        let queue = u8::from(released.priority == CachePriority::High);
        Place { queue, rank: u64::from(queue) << 54 | released.order, state: 0 }
    }
}

/// Values at their limits.
#[test]
fn extreme_values_break_nothing() {
    let config = PrefixConfig::new().policy(PolicyKind::Priority).clock(|| Millis(u64::MAX - 1));
    let pool = pool_of(20, config);
    let tokens = [u32::MAX; 33];
    for keep in CachePriority::ALL {
        let keys = PrefixKeys::new().salt(&[255; 1000]);
        let builder = pool.sequence(SequenceId(u64::MAX)).keys(keys).keep(keep).keep_until(Millis(u64::MAX));
        let sequence = builder.tokens(&tokens).unwrap();
        drop(fill(&pool, sequence, &tokens));
        drop(pool.allocate(AllocRequest::new(15)).unwrap());
    }
    drop(pool.allocate(AllocRequest::new(20)).unwrap());
    pool.audit().unwrap();
}
