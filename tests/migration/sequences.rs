//! A sequence goes to another pool, and continues there.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use kvpool::prefix::PrefixConfig;
use kvpool::prefix::policy::{CachePriority, Head, Millis, Place, Policy, Released};
use kvpool::storage::{Arrangement, KvPlanes};
use kvpool::{AllocRequest, Pool, Priority, SequenceId, Tokens};
use kvpool_testkit::steps::append;

use super::kv::{
    BLOCK_TOKENS, admit, builder, cached, check, config, extend, is_idle, layout, plain, pool, pools, prompt,
    store,
};

#[tokio::test]
async fn bytes_arrive_in_every_arrangement() {
    let tokens = prompt(1, 42);
    let arrangements = [Arrangement::LayerFirst, Arrangement::BlockFirst];
    let all = || {
        arrangements.into_iter().flat_map(|a| [KvPlanes::Separate, KvPlanes::Joined].map(|p| layout(a, p)))
    };
    for from in all() {
        for to in all() {
            let (from, to) = (pool(from.clone(), 100), pool(to, 100));
            let sequence = admit(&from, 7, &tokens).unwrap();
            let (sequence, report) = from.migrate(sequence, &to).await.unwrap();
            assert_eq!((sequence.id(), sequence.len(), sequence.committed()), (SequenceId(7), 42, 42));
            assert_eq!((report.tokens, report.shared_blocks, report.carried.blocks), (42, 0, 11));
            assert_eq!(report.carried.bytes, 11 * from.layout().packed_bytes() as u64);
            check(&to, &sequence, &tokens);
            drop(sequence);
            assert_eq!([cached(&from, &tokens), cached(&to, &tokens)], [10, 10], "found on both sides");
            [from, to].iter().for_each(is_idle);
        }
    }
}

/// Blocks in consecutive frames go in one run.
#[tokio::test]
async fn consecutive_frames_go_in_one_run() {
    let (from, to) = pools(100);
    let sequence = admit(&from, 7, &prompt(1, 80)).unwrap();
    let (_, report) = from.migrate(sequence, &to).await.unwrap();
    assert!(report.carried.runs <= 3, "{report:?}");
}

/// A batch that panicked may not have stored its appended tokens: they must not be found in any
/// pool.
#[tokio::test]
async fn blocks_of_a_panicked_batch_are_found_nowhere() {
    let (from, to) = pools(50);
    let tokens = prompt(1, 42);
    let mut sequence = admit(&from, 7, &tokens[..17]).unwrap();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let mut batch = from.begin_batch();
        batch.append(&mut sequence, &tokens[17..]).unwrap();
        panic!("before anything is stored");
    }));
    assert!(panicked.is_err());
    assert_eq!(cached(&from, &tokens), 4);
    let (replica, _) = from.replicate(&sequence, &to).await.unwrap();
    assert_eq!((replica.len(), replica.announced(), cached(&to, &tokens)), (17, 17, 4));
    check(&to, &replica, &tokens);
    assert_eq!(sequence.len(), 17, "what the batch appended was withdrawn");
    let (moved, _) = {
        drop(replica);
        from.migrate(sequence, &to).await.unwrap()
    };
    assert_eq!(cached(&to, &tokens), 4);
    drop(moved);
    [from, to].iter().for_each(is_idle);
}

/// Drafts stay drafts, and can be truncated; announced tokens are appended later.
#[tokio::test]
async fn drafts_and_announced_tokens_go_too() {
    let (from, to) = pools(100);
    let tokens = prompt(1, 64);
    let mut sequence = from.sequence(SequenceId(7)).priority(Priority::High).tokens(&tokens[..40]).unwrap();
    let mut batch = from.begin_batch();
    extend(&mut batch, &mut sequence, &tokens[..30]).unwrap();
    batch.finish();
    let mut batch = from.begin_batch();
    let drafted = batch.append(&mut sequence, Tokens::Draft(7)).unwrap().tokens;
    store(&mut batch, &mut sequence, drafted.start, &tokens[drafted]);
    batch.finish();
    let (mut sequence, _) = from.migrate(sequence, &to).await.unwrap();
    assert_eq!((sequence.len(), sequence.committed(), sequence.announced()), (37, 30, 40));
    assert_eq!(sequence.priority(), Priority::High);
    check(&to, &sequence, &tokens);
    assert_eq!(cached(&to, &tokens), 30 / BLOCK_TOKENS, "final tokens only");
    sequence.commit(33).unwrap();
    sequence.truncate(36).unwrap();
    let mut batch = to.begin_batch();
    batch.append(&mut sequence, &tokens[36..64]).unwrap();
    store(&mut batch, &mut sequence, 36, &tokens[36..64]);
    batch.finish();
    check(&to, &sequence, &tokens);
    drop(sequence);
    assert_eq!(cached(&to, &tokens), 15);
    [from, to].iter().for_each(is_idle);
}

#[tokio::test]
async fn blocks_cached_in_the_target_are_shared() {
    let (from, to) = pools(100);
    let tokens = prompt(1, 42);
    drop(admit(&to, 1, &tokens[..22]).unwrap());
    let used = to.stats().evictable;
    let sequence = admit(&from, 7, &tokens).unwrap();
    let (sequence, report) = from.migrate(sequence, &to).await.unwrap();
    assert_eq!((used, report.shared_blocks, report.carried.blocks), (5, 5, 6));
    check(&to, &sequence, &tokens);
    assert_eq!(to.audit().unwrap().owned, 11);
    drop(sequence);
    [from, to].iter().for_each(is_idle);
}

/// Without caches, with one on either side, with caches that hash differently, and after a clear:
/// the bytes arrive, and no false hit occurs.
#[tokio::test]
async fn caches_that_do_not_agree() {
    let tokens = prompt(1, 42);
    let with = |config| builder(plain(), 100).prefix_cache(config).build().unwrap();
    let without = || builder(plain(), 100).build().unwrap();
    let random = || with(PrefixConfig::new());
    let cases: [(Pool, Pool, bool); 5] = [
        (without(), without(), false),
        (without(), with(config()), false),
        (with(config()), without(), false),
        (with(config()), random(), false),
        (with(config()), with(config()), true),
    ];
    for (from, to, clears) in cases {
        let sequence = admit(&from, 7, &tokens).unwrap();
        if clears {
            from.clear_prefix_cache();
        }
        let (mut sequence, _) = from.migrate(sequence, &to).await.unwrap();
        check(&to, &sequence, &tokens);
        append(&to, &mut sequence, &tokens[..10]);
        drop(sequence);
        assert_eq!(cached(&to, &tokens), 0);
        [from, to].iter().for_each(is_idle);
    }
}

/// What is left of a retention at the source lasts at the target, by its clock; then its policy
/// places the blocks by the priority asked for at the source.
#[tokio::test]
async fn retention_uses_the_targets_clock() {
    for (now, placed, broken) in [(349, 0, 2), (350, 2, 0)] {
        retained_until_350(now, placed, broken).await;
    }
}

async fn retained_until_350(now: u64, placed: usize, broken: u64) {
    let (seen, time) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicU64::new(50)));
    let from = builder(plain(), 100).prefix_cache(config().clock(|| Millis(1_000))).build().unwrap();
    let (watcher, clock) = (Arc::new(Watcher(seen.clone())), time.clone());
    let config = config().clock(move || Millis(clock.load(Relaxed))).policy_of(watcher);
    let to = builder(plain(), 100).prefix_cache(config).build().unwrap();
    let tokens = prompt(1, 9);
    let opened = from.sequence(SequenceId(7)).keep(CachePriority::High).keep_until(Millis(1_300));
    let mut sequence = opened.tokens(&tokens).unwrap();
    let mut batch = from.begin_batch();
    extend(&mut batch, &mut sequence, &tokens).unwrap();
    batch.finish();
    drop(from.migrate(sequence, &to).await.unwrap());
    time.store(now, Relaxed);
    drop(to.allocate(AllocRequest::new(100)).unwrap());
    assert_eq!(*seen.lock().unwrap(), vec![CachePriority::High; placed], "at {now}");
    assert_eq!(to.metrics().evictions.retained, broken, "at {now}");
}

/// The priority of each block that is placed.
type Told = Vec<CachePriority>;

#[derive(Debug)]
struct Watcher(Arc<Mutex<Told>>);

impl Policy for Watcher {
    fn name(&self) -> &'static str {
        "watcher"
    }

    fn queues(&self) -> usize {
        1
    }

    fn victim(&self, heads: &[Option<Head>], _: Millis) -> Option<usize> {
        heads[0].map(|_| 0)
    }

    fn place(&self, released: &Released, _: Millis) -> Place {
        self.0.lock().unwrap().push(released.priority);
        Place { queue: 0, rank: released.order, state: 0 }
    }
}

/// Outside of any runtime, the polling thread copies.
#[test]
fn without_a_runtime() {
    let (from, to) = pools(100);
    let tokens = prompt(1, 42);
    let sequence = admit(&from, 7, &tokens).unwrap();
    let mut migration = std::pin::pin!(from.migrate(sequence, &to).into_future());
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let std::task::Poll::Ready(outcome) = migration.as_mut().poll(&mut context) else {
        panic!("there is nothing to wait for");
    };
    check(&to, &outcome.unwrap().0, &tokens);
}
