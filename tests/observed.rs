//! What a pool reports: statistics, and the end of its events.

use std::sync::Arc;
use std::time::Duration;

use kvpool::compact::{DefragConfig, FRAGMENTATION_PENALTY, Goal, plan};
use kvpool::storage::KvLayout;
use kvpool::{AllocRequest, BlockHandle, Order, Pool, SequenceId, Ticket, Tokens};
use kvpool_testkit::leases::{block, handle, singles};
use kvpool_testkit::prompts::{admit, pool as caching_pool, prompt};
use kvpool_testkit::steps::append;

fn layout() -> KvLayout {
    KvLayout::named("tiny").unwrap()
}

fn pool(blocks: usize) -> Pool {
    Pool::builder(layout()).blocks(blocks).build().unwrap()
}

async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future)
        .await
        .unwrap_or_else(|_| panic!("{what}: still waiting"))
}

/// This thread has used the pool and lives on: its thread-local cache must not keep the events
/// open.
#[tokio::test]
async fn the_events_end_with_the_pool() {
    let pool = caching_pool(20);
    let mut events = pool.prefix_cache().unwrap().events().subscribe().unwrap();
    drop(admit(&pool, 1, &prompt(1, 9)));
    let (clone, lease) = (pool.clone(), pool.allocate_owned(AllocRequest::new(1)).unwrap());
    assert!(soon("stored", events.recv()).await.is_some());
    assert!(soon("stored", events.recv()).await.is_some());
    let waiting = tokio::spawn(async move { events.recv().await.is_none() });
    drop(pool);
    tokio::task::yield_now().await;
    assert!(!waiting.is_finished(), "a clone keeps the pool alive");
    drop(clone);
    assert!(soon("the end", waiting).await.unwrap());
    drop(lease);
}

/// A sequence outlives the pool, and its events are still sent.
#[tokio::test]
async fn the_events_end_with_the_last_sequence() {
    let pool = caching_pool(20);
    let mut events = pool.prefix_cache().unwrap().events().subscribe().unwrap();
    let mut sequence = pool.sequence(SequenceId(1)).tokens(&prompt(1, 9)).unwrap();
    let mut batch = pool.begin_batch();
    drop(pool);
    batch.append(&mut sequence, 9).unwrap();
    batch.finish();
    assert!(events.try_recv().is_some() && events.try_recv().is_some());
    drop(sequence);
    assert!(soon("the end", events.recv()).await.is_none());
}

/// A background task keeps nothing alive.
#[tokio::test(start_paused = true)]
async fn the_background_task_ends_with_the_pool() {
    let pool = caching_pool(20);
    let mut events = pool.prefix_cache().unwrap().events().subscribe().unwrap();
    let storage = Arc::downgrade(pool.storage().unwrap());
    let task = pool.start_defragmenter(DefragConfig::new()).unwrap();
    drop(admit(&pool, 1, &prompt(1, 9)));
    tokio::time::sleep(Duration::from_secs(10)).await;
    drop(pool);
    for _ in 0..2 {
        assert!(soon("stored", events.recv()).await.is_some());
    }
    assert!(soon("the end", events.recv()).await.is_none());
    assert!(storage.upgrade().is_none(), "the memory is released");
    assert_eq!(soon("the task", task.stop()).await.failed, 0);
}

fn access(pool: &Pool, handle: BlockHandle) -> Ticket {
    pool.info(handle).unwrap().last_access
}

#[test]
fn a_share_and_a_fork_are_accesses() {
    let pool = pool(20);
    let leases = singles(&pool, AllocRequest::new(2));
    let handles: Vec<_> = leases.iter().map(handle).collect();
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    append(&pool, &mut sequence, 6);
    let block = pool.blocks().handle(sequence.blocks().next().unwrap());
    let before = access(&pool, block);
    for _ in 0..3 {
        pool.begin_batch().finish();
    }
    assert_eq!((access(&pool, handles[0]), access(&pool, block)), (Ticket(0), before));
    let now = pool.blocks().clock().newest();
    let shared = leases[0].share().unwrap();
    assert_eq!((access(&pool, handles[0]), access(&pool, handles[1])), (now, Ticket(0)));
    let fork = sequence.fork(SequenceId(2)).unwrap();
    assert!(before < now);
    assert_eq!(access(&pool, block), now);
    assert_eq!(pool.info(block).unwrap().sequence, Some(SequenceId(1)), "the rest is as it was");
    drop((fork, shared));
}

/// One allocation in so many is timed, of every kind; appends that need no block do not count.
#[test]
fn appends_are_timed_as_allocations_are() {
    let pool = Pool::builder(layout()).blocks(200).latency_sample(1).build().unwrap();
    let samples = || pool.stats().latency.samples;
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 4).unwrap();
    assert_eq!(samples(), 1);
    batch.append(&mut sequence, 2).unwrap();
    assert_eq!(samples(), 2);
    batch.append(&mut sequence, 1).unwrap();
    batch.append(&mut sequence, Tokens::Draft(1)).unwrap();
    assert_eq!(samples(), 2, "the last block had room");
    let mut fork = sequence.fork(SequenceId(2)).unwrap();
    batch.append(&mut fork, Tokens::Draft(1)).unwrap();
    batch.finish();
    assert_eq!(samples(), 3);
    drop(pool.allocate_owned(AllocRequest::new(1)).unwrap());
    drop(pool.allocate(AllocRequest::new(3)).unwrap());
    assert_eq!(samples(), 5);
}

/// A thread that allocates in one way only is sampled as often as any other.
#[test]
fn one_in_so_many_is_timed_on_every_path() {
    const EVERY: usize = 8;
    let ways: [fn(&Pool); 3] = [
        |pool| drop(pool.allocate_owned(AllocRequest::new(1)).unwrap()),
        |pool| drop(pool.allocate(AllocRequest::new(3)).unwrap()),
        |pool| {
            let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
            append(pool, &mut sequence, 3);
        },
    ];
    for (number, way) in ways.into_iter().enumerate() {
        let pool = Pool::builder(layout()).blocks(100).latency_sample(EVERY as u32).build().unwrap();
        kvpool_testkit::threads::scope(|scope| {
            drop(scope.spawn(|| (0..10 * EVERY).for_each(|_| way(&pool))))
        });
        assert_eq!(pool.stats().latency.samples, 10, "way {number}");
    }
}

/// An idle background task checks less and less often; changes are detected in time nevertheless.
#[tokio::test(start_paused = true)]
async fn an_idle_task_checks_rarely_and_wakes_up() {
    let pool = pool(1_023);
    let task = pool.start_defragmenter(DefragConfig::new()).unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let idle = task.totals();
    assert!((100..=700).contains(&idle.looks), "{idle:?}");
    // A fragmented pool whose blocks are all open: also idle.
    let mut kept = singles(&pool, AllocRequest::new(1_023));
    kept.retain(|lease| block(lease).0.is_multiple_of(2));
    tokio::time::sleep(Duration::from_secs(60)).await;
    let vain = task.totals();
    assert!((100..=700).contains(&(vain.looks - idle.looks)), "{idle:?} {vain:?}");
    // Seals by hand, which free nothing: detected within two seconds.
    kept.iter_mut().for_each(|lease| lease.seal(..));
    tokio::time::sleep(Duration::from_secs(2)).await;
    let sealed = task.totals();
    assert!(sealed.moved_blocks > 200, "{sealed:?}");
    // Frees are detected within a fifth of a second.
    tokio::time::sleep(Duration::from_secs(60)).await;
    let before = task.totals();
    kept.retain(|lease| block(lease).0.is_multiple_of(4));
    tokio::time::sleep(Duration::from_millis(200)).await;
    let after = task.totals();
    assert!(after.moved_blocks > before.moved_blocks, "{before:?} {after:?}");
    assert_eq!(task.stop().await.failed, 0);
    drop(kept);
    pool.audit().unwrap();
}

/// Frames that can be in no run, the null block and the reserve do not count as fragmentation.
#[test]
fn an_empty_pool_is_not_fragmented() {
    for blocks in (1..130).chain([255, 256, 257, 1_000, 1_023, 4_095, 4_096, 4_097, 10_000]) {
        for (order, reserve) in [(0, 0), (1, 0), (4, 0), (4, blocks / 3), (6, blocks / 2), (9, 0)] {
            for has_null in [true, false] {
                let mut builder =
                    Pool::builder(layout()).blocks(blocks).reserve(reserve).fragmentation_order(Order(order));
                if !has_null {
                    builder = builder.without_null_block();
                }
                let pool = builder.without_storage().build().unwrap();
                let what = format!(
                    "{blocks} blocks, {reserve} of them reserved, order {order}, null block: {has_null}"
                );
                assert_eq!(pool.fragmentation().rate, 0.0, "{what}");
                assert_eq!(pool.blocks().fragmentation(Order(order)), 0.0, "{what}");
                assert_eq!(pool.snapshot().fragmentation(Order(order)), 0.0, "{what}");
            }
        }
    }
}

/// The rate is 0 exactly where no move could gain a run, and every function that reports it agrees.
#[test]
fn a_pool_is_fragmented_where_a_move_would_help() {
    let mut random = fastrand::Rng::with_seed(5);
    let mut seen = [0; 2];
    for round in 0..400 {
        let (blocks, order) = (random.usize(1..300), Order(random.u8(..6)));
        let mut builder =
            Pool::builder(layout()).blocks(blocks).magazine_blocks(0).fragmentation_order(order);
        if random.bool() {
            builder = builder.without_null_block();
        }
        let pool = builder.build().unwrap();
        let mut kept = singles(&pool, AllocRequest::new(blocks));
        let density = random.f64();
        kept.retain_mut(|lease| {
            lease.seal(..);
            random.f64() < density
        });
        let snapshot = pool.snapshot();
        let rate = pool.fragmentation().rate;
        assert_eq!(
            [pool.blocks().fragmentation(order), snapshot.fragmentation(order)],
            [rate; 2],
            "round {round}"
        );
        let gained =
            plan(&snapshot, Goal::Fragmentation { order }, usize::MAX, FRAGMENTATION_PENALTY).runs_gained;
        assert_eq!(rate > 0.0, gained > 0, "round {round}: {rate}, {gained} runs to gain of {snapshot:?}");
        seen[usize::from(gained > 0)] += 1;
    }
    assert!(seen.iter().all(|&rounds| rounds > 50), "{seen:?}");
}
