//! Counters, gauges and histograms agree with what was done; owners and audits name who holds
//! blocks.

use std::task::{Context, Waker};
use std::time::Duration;

use kvpool::storage::KvLayout;
use kvpool::{AllocRequest, Lease, Metrics, PinOwner, Pool, Priority, SequenceId, SourcePlace};
use kvpool_testkit::leases::checkerboard;
use kvpool_testkit::prompts::{BLOCK_TOKENS, admit, pool as caching_pool, prompt};
use kvpool_testkit::steps::append;

fn pool(blocks: usize) -> Pool {
    Pool::builder(KvLayout::named("tiny").unwrap()).blocks(blocks).build().unwrap()
}

/// Checks the equation between counters and gauges, and returns the metrics.
fn balanced(pool: &Pool) -> Metrics {
    let metrics = pool.metrics();
    assert_eq!(
        metrics.allocations.blocks,
        metrics.allocations.freed_blocks
            + metrics.evictions.total()
            + (metrics.stats.used + metrics.stats.evictable) as u64,
        "{metrics:?}"
    );
    metrics
}

/// Returns requests, blocks and freed blocks since `before`.
fn since(pool: &Pool, before: &Metrics) -> (u64, u64, u64) {
    let (now, before) = (balanced(pool).allocations, before.allocations);
    (now.requests - before.requests, now.blocks - before.blocks, now.freed_blocks - before.freed_blocks)
}

#[test]
fn each_kind_of_allocation_counts_once() {
    let pool = pool(2_000);
    let mut counted = balanced(&pool);
    assert_eq!(counted.allocations.requests, 0);
    let mut expect = |what: &str, counts| {
        assert_eq!(since(&pool, &counted), counts, "{what}");
        counted = pool.metrics();
    };
    for blocks in [1, 3, 16, 17, 300] {
        let count = blocks as u64;
        let lease = pool.allocate(AllocRequest::new(blocks)).unwrap();
        expect("a lease", (1, count, 0));
        drop(lease);
        expect("its end", (0, 0, count));
        drop(pool.allocate_owned(AllocRequest::new(blocks)).unwrap());
        expect("an owned lease", (1, count, count));
        drop(pool.allocate(AllocRequest::new(blocks).contiguous()).unwrap());
        expect("a run", (1, count, count));
        let lease = pool.allocate(AllocRequest::new(blocks)).unwrap();
        expect("a lease to share", (1, count, 0));
        drop(lease.share().unwrap());
        expect("a reference that is not the last", (0, 0, 0));
        drop(lease);
        expect("the last references", (0, 0, count));
        let mut lease = pool.allocate(AllocRequest::new(blocks)).unwrap();
        lease.truncate(blocks / 2);
        expect("a shortened lease", (1, count, count - count / 2));
        drop(lease.split_off(0));
        expect("a part", (0, 0, count / 2));
    }
    // While a batch is in flight, freed blocks are retired: free for this count.
    let batch = pool.begin_batch();
    drop(pool.allocate(AllocRequest::new(5)).unwrap());
    expect("a retired lease", (1, 5, 5));
    batch.finish();
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 3 * BLOCK_TOKENS).unwrap();
    expect("an append", (1, 3, 0));
    batch.append(&mut sequence, 1).unwrap();
    batch.append(&mut sequence, 1).unwrap();
    expect("two appends, one of which needs a block", (1, 1, 0));
    batch.finish();
    drop(sequence);
    expect("the end of a sequence", (0, 0, 4));
    pool.audit().unwrap();
}

#[test]
fn threads_count_without_loss() {
    const ROUNDS: u64 = 2_000;
    let pool = pool(4_000);
    let threads: Vec<_> = (0..4)
        .map(|thread| {
            let pool = pool.clone();
            std::thread::spawn(move || {
                let mut kept = Vec::new();
                for round in 0..ROUNDS {
                    let lease = pool.allocate_owned(AllocRequest::new(1 + (round % 5) as usize)).unwrap();
                    kept.push(lease);
                    if kept.len() > 8 + thread {
                        drop(kept.remove(0));
                    }
                }
                kept
            })
        })
        .collect();
    // Leases of joined threads are dropped here, by another thread than the one that made them.
    let kept: Vec<_> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
    let metrics = balanced(&pool);
    assert_eq!((metrics.allocations.requests, metrics.allocations.blocks), (4 * ROUNDS, 4 * ROUNDS * 3));
    assert_eq!(kept.iter().map(|lease| lease.blocks().len()).sum::<usize>(), metrics.stats.used);
    drop(kept);
    assert_eq!(balanced(&pool).allocations.freed_blocks, 4 * ROUNDS * 3);
}

#[test]
fn refusals_count_by_reason() {
    let layout = KvLayout::named("tiny").unwrap();
    let pool = Pool::builder(layout).blocks(10).reserve(2).build().unwrap();
    let _kept = pool.allocate(AllocRequest::new(8)).unwrap();
    let device = pool.storage().unwrap().device();
    assert!(pool.allocate(AllocRequest::new(0)).is_err());
    assert!(pool.allocate(AllocRequest::new(11)).is_err());
    assert!(pool.allocate(AllocRequest::new(9)).is_err());
    for _ in 0..3 {
        assert!(pool.allocate(AllocRequest::new(1)).is_err());
    }
    drop(pool.allocate(AllocRequest::new(1).priority(Priority::Urgent).device(device)).unwrap());
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    assert!(pool.begin_batch().append(&mut sequence, 1).is_err());
    let refusals = balanced(&pool).refusals;
    assert_eq!((refusals.invalid, refusals.too_large, refusals.reserved), (1, 1, 1), "{refusals:?}");
    assert_eq!((refusals.exhausted, refusals.total()), (4, 7), "{refusals:?}");
}

#[tokio::test]
async fn waits_count_and_are_timed() {
    let pool = pool(4);
    let all = pool.allocate_owned(AllocRequest::new(4)).unwrap();
    let soon = std::time::Instant::now() + Duration::from_millis(5);
    assert!(pool.allocate_async(AllocRequest::new(1)).until(soon).await.is_err());
    let (lease, ()) = tokio::join!(pool.allocate_async(AllocRequest::new(2)), async {
        tokio::time::sleep(Duration::from_millis(5)).await;
        drop(all);
    });
    drop(lease.unwrap());
    drop(pool.allocate_async(AllocRequest::new(2)).await.unwrap());
    let metrics = balanced(&pool);
    let waits = metrics.waits;
    assert_eq!((waits.waits, waits.granted, waits.missed_deadlines), (2, 1, 1));
    let wait = &metrics.latencies.wait;
    assert_eq!(wait.count(), 1);
    assert!(wait.sum_ns >= 4_000_000 && wait.quantiles().max_ns >= 4_000_000, "{wait:?}");
}

#[tokio::test]
async fn waiting_requests_are_counted_by_priority() {
    let pool = pool(4);
    let all = pool.allocate_owned(AllocRequest::new(4)).unwrap();
    let of = |priority| Box::pin(pool.allocate_async(AllocRequest::new(1).priority(priority)).into_future());
    let mut waiting =
        [Priority::Urgent, Priority::Normal, Priority::Normal].map(of).into_iter().collect::<Vec<_>>();
    for request in &mut waiting {
        let mut context = Context::from_waker(Waker::noop());
        assert!(request.as_mut().poll(&mut context).is_pending());
    }
    assert_eq!(pool.stats().waiting_by_priority, [2, 0, 1]);
    drop(waiting.pop());
    assert_eq!(pool.stats().waiting_by_priority, [1, 0, 1], "a dropped future leaves the line");
    drop(all);
    for request in waiting {
        drop(request.await.unwrap());
    }
    assert_eq!(pool.stats().waiting_by_priority, [0; 3]);
}

#[tokio::test]
async fn resizes_are_timed_with_refused_ones() {
    let pool = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(64).blocks_max(256).segment_blocks(64);
    let pool = pool.build().unwrap();
    assert_eq!(pool.metrics().latencies.resize.count(), 0);
    pool.resize(128).await.unwrap();
    pool.resize(1 << 20).await.unwrap_err();
    let resize = pool.metrics().latencies.resize;
    assert_eq!(resize.count(), 2);
    // The sum is exact; the maximum is the upper end of its bucket, which is at most 1/16 too high.
    let most = resize.sum_ns + resize.sum_ns / 16 + 1;
    assert!(resize.sum_ns > 0 && (1..=most).contains(&resize.quantiles().max_ns), "{resize:?}");
}

#[test]
fn histograms_count_every_operation() {
    let layout = KvLayout::named("tiny").unwrap();
    let pool = Pool::builder(layout)
        .blocks(100)
        .latency_sample(1)
        .prefix_cache(kvpool::PrefixConfig::new())
        .build()
        .unwrap();
    for blocks in [1, 1, 4] {
        drop(pool.allocate(AllocRequest::new(blocks)).unwrap());
        drop(pool.allocate_owned(AllocRequest::new(blocks)).unwrap());
    }
    drop(admit(&pool, 1, &prompt(1, 9)));
    let latencies = pool.metrics().latencies;
    assert_eq!(latencies.sampled_every, 1);
    let counts = [&latencies.allocate, &latencies.append, &latencies.admit, &latencies.free];
    assert_eq!(counts.map(|histogram| histogram.count()), [6, 1, 1, 7]);
    for histogram in counts {
        assert!(histogram.buckets.is_sorted_by_key(|bucket| bucket.up_to_ns));
        let quantiles = histogram.quantiles();
        assert!(quantiles.p50_ns <= quantiles.max_ns && histogram.sum_ns > 0);
    }
    assert_eq!(pool.stats().latency.samples, 7, "allocations and appends together");
}

#[test]
fn hits_and_evictions_count() {
    let pool = caching_pool(12);
    drop(admit(&pool, 1, &prompt(1, 17)));
    drop(admit(&pool, 2, &prompt(1, 17)));
    let metrics = balanced(&pool);
    assert_eq!((metrics.query_tokens, metrics.hit_tokens), (32, 16));
    assert_eq!((metrics.prefix.lookups, metrics.evictions.total()), (2, 0));
    assert_eq!(metrics.stats.evictable, 4);
    drop(pool.allocate(AllocRequest::new(10)).unwrap());
    let metrics = balanced(&pool);
    let evicted = &metrics.evictions;
    assert!(evicted.total() >= 2 && evicted.by_queue == [evicted.total()], "{evicted:?}");
    drop(admit(&pool, 3, &prompt(3, 17)));
    let before = balanced(&pool).evictions;
    pool.clear_prefix_cache();
    assert_eq!(balanced(&pool).evictions, before);
    let stale = pool.evict_cached(0) as u64;
    let after = balanced(&pool).evictions;
    assert!(stale > 0);
    assert_eq!((after.by_queue[0], after.total()), (before.by_queue[0] + stale, before.total() + stale));
    let events = pool.prefix_cache().unwrap().events().subscribe().unwrap();
    assert_eq!(pool.metrics().event_subscribers, 1);
    drop(events);
    assert_eq!((pool.metrics().event_subscribers, pool.metrics().lost_events), (0, 0));
}

#[tokio::test]
async fn moves_and_migrations_count() {
    let (here, there) = (pool(1_000), pool(1_000));
    let kept = checkerboard(&here);
    let report = here.defragment().await.unwrap();
    assert!(report.moved_blocks > 0);
    let moves = here.metrics().moves;
    assert_eq!((moves.moved_blocks, moves.moved_bytes), (report.moved_blocks as u64, report.moved_bytes));
    assert_eq!((moves.waves, moves.given_up), (report.waves as u64, report.given_up));
    assert_eq!(moves.runs, 1);
    here.resize(600).await.unwrap();
    assert_eq!(here.metrics().moves.runs, 2);
    drop(kept);
    let mut sequence = here.sequence(SequenceId(1)).open().unwrap();
    append(&here, &mut sequence, 9);
    let (sequence, report) = here.migrate(sequence, &there).await.unwrap();
    let error = here.migrate(sequence, &there).await.unwrap_err();
    drop(error);
    let migrations = here.metrics().migrations.unwrap();
    assert_eq!((migrations.migrated, migrations.refused, migrations.replicated), (1, 1, 0));
    assert_eq!((migrations.failed, migrations.swapped_out, migrations.swapped_in), (0, 0, 0));
    assert_eq!((migrations.blocks, migrations.bytes), (3, report.carried.bytes));
    balanced(&here);
    balanced(&there);
}

#[test]
fn owners_are_listed_with_their_blocks() {
    let pool = pool(200);
    let lease = pool.allocate(AllocRequest::new(3).sequence(SequenceId(9)).priority(Priority::High)).unwrap();
    let lease_line = line!() - 1;
    let fixed = pool.allocate(AllocRequest::new(2).pinned()).unwrap();
    let mut sequence = pool.sequence(SequenceId(1)).priority(Priority::Urgent).open().unwrap();
    append(&pool, &mut sequence, 9);
    let fork = sequence.fork(SequenceId(2)).unwrap();
    let block = sequence.blocks().next().unwrap();
    let pin = pool.pin_scoped(pool.blocks().handle(block)).unwrap();
    let pin_line = line!() - 1;
    let batch = pool.begin_batch();

    let owners = pool.owners();
    assert_eq!(owners.blocks(), pool.stats().used);
    assert_eq!(owners.batches_in_flight, 1);
    let [first, second] = &owners.sequences[..] else { panic!("{owners:?}") };
    assert_eq!((first.id, first.tokens, first.shared_blocks), (SequenceId(1), 9, 3));
    assert_eq!((second.id, second.tokens, second.shared_blocks), (SequenceId(2), 9, 3));
    assert_eq!(first.blocks, sequence.blocks().collect::<Vec<_>>());
    assert_eq!(first.blocks, second.blocks);
    assert_eq!(first.priority, Some(Priority::Urgent));
    assert!(first.held_for >= second.held_for);
    assert_eq!(owners.leases.len(), 2);
    let owner = |of: &Lease<'_>| owners.leases.iter().find(|owner| owner.blocks == of.blocks()).unwrap();
    let (other, owner) = (owner(&fixed), owner(&lease));
    assert_eq!((owner.sequence, owner.priority), (Some(SequenceId(9)), Priority::High));
    assert_eq!((other.sequence, other.priority), (None, Priority::Normal));
    let mut pinned: Vec<_> = fixed.blocks().iter().map(|&block| (block, 1, PinOwner::Lease)).collect();
    pinned.push((block, 1, PinOwner::Sequence(SequenceId(1))));
    pinned.sort_unstable_by_key(|&(block, ..)| block);
    let listed: Vec<_> =
        owners.pinned.iter().map(|pinned| (pinned.block, pinned.pins, pinned.owner)).collect();
    assert_eq!(listed, pinned);
    let pinned_at = owners.pinned.iter().find(|pinned| pinned.block == block).unwrap().pinned_at.as_ref();
    if cfg!(debug_assertions) {
        assert!(is_line(owner.allocated_at.as_ref().unwrap(), lease_line));
        assert!(is_line(pinned_at.unwrap(), pin_line));
        assert!(owner.held_for.unwrap() < Duration::from_secs(60));
    } else {
        assert_eq!((&owner.allocated_at, pinned_at), (&None, None));
    }

    drop((lease, fork, pin, batch, sequence));
    let owners = pool.owners();
    assert_eq!((owners.sequences.len(), owners.leases.len()), (0, 1));
    assert_eq!((owners.blocks(), owners.pinned.len()), (2, 2));
}

fn is_line(place: &SourcePlace, line: u32) -> bool {
    place.file == file!() && place.line == line
}

/// Every way to make a lease names the line that called it.
#[cfg(debug_assertions)]
#[tokio::test]
async fn an_audit_names_the_line_that_leaked() {
    let pool = pool(100);
    let mut lines = Vec::new();
    let leak = |lease| std::mem::forget(lease);
    leak(pool.allocate_owned(AllocRequest::new(1)).unwrap());
    lines.push((line!() - 1, 1));
    leak(pool.allocate(AllocRequest::new(20)).unwrap().into_owned());
    lines.push((line!() - 1, 20));
    leak(pool.allocate_async(AllocRequest::new(3)).await.unwrap());
    lines.push((line!() - 1, 3));
    let soon = std::time::Instant::now() + Duration::from_secs(5);
    leak(pool.allocate_async(AllocRequest::new(4)).until(soon).await.unwrap());
    lines.push((line!() - 1, 4));
    let lease = pool.allocate(AllocRequest::new(5)).unwrap();
    lines.push((line!() - 1, 5));
    drop(pool.allocate(AllocRequest::new(6)).unwrap());
    let named = pool.audit().unwrap().allocated_at;
    assert!(named.iter().all(|(place, _)| place.file == file!()), "{named:?}");
    let named: Vec<_> = named.into_iter().map(|(place, blocks)| (place.line, blocks)).collect();
    assert_eq!(named, lines);
    drop(lease);
    // The same blocks, owned by a sequence now, have no line.
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    append(&pool, &mut sequence, 5 * BLOCK_TOKENS);
    assert_eq!(pool.audit().unwrap().allocated_at.len(), lines.len() - 1);
}
