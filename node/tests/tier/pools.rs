//! Pools that share blocks through a tier.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpool::hints::HintLimits;
use kvpool::prefix::{HashKey, PrefixConfig, PrefixKeys};
use kvpool::{AllocRequest, Dtype, KvLayout, Pool, SequenceId, SessionId};
use kvpool_node::admin::Reporters;
use kvpool_node::hints::HintsEnvelope;
use kvpool_node::tier::{SharedTier, TierError, TierPolicy, TierReporter, Tiered, TieredSettings};
use serde_json::{Value, json};

use super::faulty::{Fault, Faulty};
use super::kv;
use super::support::{
    NAMESPACE, SLACK, WAIT, bring_back, hasty, idle, in_process, patient, soon, tiered, until,
};

/// A pool that has computed a prompt of ten full blocks, and stored them; and another pool.
async fn stored() -> (Faulty, Arc<SharedTier>, [Pool; 2], Vec<u32>) {
    let (store, tier) = in_process(hasty());
    let (a, b) = kv::pools(50);
    let tokens = kv::prompt(1, 41);
    drop(kv::admit(&a, 7, &tokens).unwrap());
    let of_a = tiered(&a, &tier, TierPolicy::Manual);
    let report = of_a.offload(100, soon()).await.unwrap();
    assert_eq!((report.moved_blocks, report.cached_blocks, store.len()), (10, 10, 10));
    (store, tier, [a, b], tokens)
}

#[tokio::test]
async fn a_prefix_comes_back_in_another_pool() {
    let (_store, tier, [a, b], tokens) = stored().await;
    assert_eq!(kv::cached(&a, &tokens), 0, "it was evicted");
    let of_b = tiered(&b, &tier, TierPolicy::Manual);
    // A part is here already.
    drop(kv::admit(&b, 1, &tokens[..13]).unwrap());
    let report = bring_back(&of_b, &tokens, WAIT).await;
    assert_eq!((report.cached_blocks, report.moved_blocks), (10, 7));
    assert_eq!(report.bytes, 7 * super::support::packed_bytes() as u64);
    assert_eq!(kv::cached(&b, &tokens), 10);
    // Nothing more to do.
    let report = bring_back(&of_b, &tokens, WAIT).await;
    assert_eq!((report.cached_blocks, report.moved_blocks), (10, 0));
    // Another prompt shares four blocks with it.
    let other = [&tokens[..18], &kv::prompt(9, 20)].concat();
    let of_a = tiered(&a, &tier, TierPolicy::Manual);
    let report = bring_back(&of_a, &other, WAIT).await;
    assert_eq!((report.cached_blocks, report.moved_blocks), (4, 4));
    assert_eq!(kv::cached(&a, &other), 4);
    assert_eq!(of_b.counters().fetched_blocks, 7);
    // Keys are part of the hashes.
    let salted = PrefixKeys::new().salt(b"tenant");
    let report = of_a.bring_back(&salted, &tokens, soon()).await.unwrap();
    assert_eq!((report.cached_blocks, report.moved_blocks), (0, 0));
    for pool in [&a, &b] {
        idle(pool).await;
    }
}

/// Computes a prompt in a pool with hints, and moves its blocks to the tier.
async fn hinted(blocks: usize, tokens: usize) -> (Faulty, Pool, Tiered, Vec<u32>) {
    let (store, tier) = in_process(hasty());
    let builder = kv::builder(kv::plain(), blocks).prefix_cache(kv::config());
    let pool = builder.hints(HintLimits::new()).build().unwrap();
    let tokens = kv::prompt(1, tokens);
    let mut sequence = pool.sequence(SequenceId(7)).session(SessionId(3)).tokens(&tokens).unwrap();
    let mut batch = pool.begin_batch();
    kv::extend(&mut batch, &mut sequence, &tokens).unwrap();
    batch.finish();
    drop(sequence);
    let tiered = tiered(&pool, &tier, TierPolicy::Manual);
    tiered.offload(blocks, soon()).await.unwrap();
    assert_eq!(kv::cached(&pool, &tokens), 0);
    (store, pool, tiered, tokens)
}

fn prefetch(pool: &Pool, reporters: &Reporters, payload: Value) -> Value {
    let action =
        json!({"action_id": "a", "action_type": "kv.prefetch", "action_version": "1", "payload": payload});
    let envelope = json!({"protocol_version": "1", "message_id": "m", "actions": [action]});
    let envelope: HintsEnvelope = serde_json::from_value(envelope).unwrap();
    serde_json::to_value(envelope.carry_out_with(pool, reporters).unwrap()).unwrap()["outcomes"][0].clone()
}

/// Prefetches hold few frames, however many are hinted, and end before requests lack blocks.
#[tokio::test]
async fn prefetches_do_not_hold_the_pool() {
    let (store, pool, tiered, tokens) = hinted(400, 4 * 350 + 1).await;
    let reporters = Reporters::new();
    reporters.add(TierReporter::new("in_process", &tiered));
    store.set_fault(Fault::HangInGets);
    let payload = json!({"session_id": 3, "ttl_seconds": 20});
    for _ in 0..64 {
        assert_eq!(prefetch(&pool, &reporters, payload.clone())["outcome"], json!("deferred"));
    }
    let busy = prefetch(&pool, &reporters, payload.clone());
    assert_eq!((&busy["reason"], &busy["prefetches"]), (&json!("busy"), &json!(64)));
    until("a prefetch holds frames", || !pool.owners().transfers.is_empty()).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(pool.free_blocks(), 400 - 64);
    drop(pool.allocate(AllocRequest::new(336)).unwrap());
    store.set_fault(Fault::None);
    // A quarter of the pool is left.
    until("blocks are here", || {
        prefetch(&pool, &reporters, payload.clone());
        kv::cached(&pool, &tokens) > 0
    })
    .await;
    until("all have ended", || pool.owners().transfers.is_empty()).await;
    assert!(kv::cached(&pool, &tokens) <= 300, "{}", kv::cached(&pool, &tokens));
}

/// A hint brings the blocks of a session back from the tier, through the services of a node.
#[tokio::test]
async fn a_hint_prefetches_what_a_session_had() {
    let (_store, pool, tiered, tokens) = hinted(50, 41).await;
    let reporters = Reporters::new();
    let refused = prefetch(&pool, &reporters, json!({"session_id": 3}));
    assert_eq!((&refused["outcome"], &refused["reason"]), (&json!("rejected"), &json!("no_tier")));
    reporters.add(TierReporter::new("in_process", &tiered));
    let missing = prefetch(&pool, &reporters, json!({"session_id": 4}));
    assert_eq!(missing["outcome"], json!("missing"));
    let deferred = prefetch(&pool, &reporters, json!({"session_id": 3, "ttl_seconds": 20}));
    assert_eq!((&deferred["outcome"], &deferred["blocks"]), (&json!("deferred"), &json!(10)));
    until("the blocks are here", || pool.cached_blocks().len() == 10).await;
    assert_eq!(kv::cached(&pool, &tokens), 10);
    idle(&pool).await;
}

/// The end of a prefix is evicted first, so that what is left can be found.
#[tokio::test]
async fn the_end_of_a_prefix_is_evicted_first() {
    let (_store, tier, [_a, b], tokens) = stored().await;
    let of_b = tiered(&b, &tier, TierPolicy::Manual);
    bring_back(&of_b, &tokens, WAIT).await;
    drop(b.allocate(AllocRequest::new(46)).unwrap());
    assert_eq!(kv::cached(&b, &tokens), 4);
    idle(&b).await;
}

/// As many blocks as there is room for, from the beginning on.
#[tokio::test]
async fn a_pool_that_is_too_small() {
    let (_store, tier, [_a, _b], tokens) = stored().await;
    let small = kv::pool(kv::plain(), 6);
    let of_small = tiered(&small, &tier, TierPolicy::Manual);
    let taken = small.allocate(AllocRequest::new(2)).unwrap();
    let report = bring_back(&of_small, &tokens, WAIT).await;
    assert_eq!((report.cached_blocks, report.moved_blocks), (4, 4));
    drop(taken);
    assert_eq!(kv::cached(&small, &tokens[..17]), 4);
    idle(&small).await;
}

/// Pools with another hash key, layout or namespace find nothing.
#[tokio::test]
async fn only_pools_that_agree_share() {
    let (_store, tier, [_a, _b], tokens) = stored().await;
    let other_key = PrefixConfig::new().key(HashKey::from_bytes([8; 32]));
    let other_key = kv::builder(kv::plain(), 50).prefix_cache(other_key).build().unwrap();
    let of_other = tiered(&other_key, &tier, TierPolicy::Manual);
    assert_eq!(bring_back(&of_other, &tokens, WAIT).await.cached_blocks, 0);
    let wider = KvLayout::builder().layers(2).kv_heads(2).head_dim(8).block_tokens(4);
    let wider = kv::pool(wider.dtype(Dtype::Bf16).build().unwrap(), 50);
    let of_wider = tiered(&wider, &tier, TierPolicy::Manual);
    assert_eq!(bring_back(&of_wider, &tokens, WAIT).await.cached_blocks, 0);
    let same = kv::pool(kv::plain(), 50);
    let settings = TieredSettings::new("another model").policy(TierPolicy::Manual);
    let elsewhere = Tiered::new(same.clone(), tier.clone(), settings).unwrap();
    assert_eq!(bring_back(&elsewhere, &tokens, WAIT).await.cached_blocks, 0);
    let no_name = Tiered::new(same, tier.clone(), TieredSettings::new(""));
    assert_eq!(no_name.err(), Some(TierError::Namespace));
    let bare = kv::builder(kv::plain(), 50).build().unwrap();
    let no_cache = Tiered::new(bare, tier, TieredSettings::new(NAMESPACE));
    assert!(matches!(no_cache.err(), Some(TierError::Pool(_))));
}

/// A tier that lies in every way: never a wrong byte, never a wait beyond the deadline, and nothing is
/// left behind.
#[tokio::test]
async fn a_tier_that_lies() {
    let limit = Duration::from_millis(300);
    for fault in [
        Fault::Refuse,
        Fault::Short,
        Fault::Long,
        Fault::Foreign,
        Fault::Corrupt,
        Fault::ClaimsAll,
        Fault::Miscounts,
        Fault::Panic,
    ] {
        let (store, tier, [_a, b], tokens) = stored().await;
        let of_b = tiered(&b, &tier, TierPolicy::Manual);
        store.set_fault(fault);
        let report = bring_back(&of_b, &tokens, limit).await;
        assert_eq!((report.cached_blocks, report.moved_blocks), (0, 0), "{fault:?}");
        assert_eq!(kv::cached(&b, &tokens), 0, "{fault:?}");
        idle(&b).await;
        // It is of use again when it stops.
        store.set_fault(Fault::None);
        let began = Instant::now();
        while bring_back(&of_b, &tokens, WAIT).await.cached_blocks < 10 {
            assert!(began.elapsed() < WAIT, "{fault:?}: {:?}", tier.counters());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(kv::cached(&b, &tokens), 10);
        idle(&b).await;
    }
}

/// One wrong block: the blocks before it are of use.
#[tokio::test]
async fn a_prefix_ends_at_the_first_wrong_block() {
    let (store, tier, [a, b], tokens) = stored().await;
    // A second prompt, computed where the fault begins after four of its blocks are stored.
    let of_a = tiered(&a, &tier, TierPolicy::Manual);
    let long = kv::prompt(2, 41);
    drop(kv::admit(&a, 8, &long[..17]).unwrap());
    of_a.offload(100, soon()).await.unwrap();
    store.set_fault(Fault::StoresNothing);
    drop(kv::admit(&a, 8, &long).unwrap());
    let report = of_a.offload(100, soon()).await.unwrap();
    assert_eq!(report.moved_blocks, 6, "it says so");
    store.set_fault(Fault::None);
    let of_b = tiered(&b, &tier, TierPolicy::Manual);
    let report = bring_back(&of_b, &long, WAIT).await;
    assert_eq!((report.cached_blocks, report.moved_blocks), (4, 4));
    assert_eq!((kv::cached(&b, &long), bring_back(&of_b, &tokens, WAIT).await.cached_blocks), (4, 10));
    for pool in [&a, &b] {
        idle(pool).await;
    }
}

/// Frames whose get has not returned by the deadline are free at once: its answer finds no memory.
#[tokio::test]
async fn frames_of_a_get_that_hangs() {
    let (store, tier, [_a, b], tokens) = stored().await;
    let of_b = tiered(&b, &tier, TierPolicy::Manual);
    store.set_fault(Fault::HangInGets);
    let report = bring_back(&of_b, &tokens, Duration::from_millis(200)).await;
    assert_eq!((report.cached_blocks, report.overdue_blocks), (0, 10), "{report:?}");
    let counts = b.stats();
    assert_eq!((counts.in_transfer, counts.quarantined), (0, 0));
    // Another prompt gets them all, and keeps its bytes.
    let other = kv::prompt(3, 4 * 49 + 1);
    let sequence = kv::admit(&b, 9, &other).unwrap();
    store.set_fault(Fault::None);
    until("the store has answered", || tier.counters().in_flight == 0).await;
    kv::check(&b, &sequence, &other);
    drop(sequence);
    b.clear_prefix_cache();
    idle(&b).await;
    let began = Instant::now();
    while bring_back(&of_b, &tokens, WAIT).await.cached_blocks < 10 {
        assert!(began.elapsed() < WAIT);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(kv::cached(&b, &tokens), 10);
    idle(&b).await;
}

/// A call of the store is under way when the pool goes.
#[tokio::test]
async fn a_pool_that_is_dropped_meanwhile() {
    let (store, tier, [_a, b], tokens) = stored().await;
    let of_b = Arc::new(tiered(&b, &tier, TierPolicy::Manual));
    store.set_fault(Fault::Slow(Duration::from_millis(100)));
    let bringing = {
        let (of_b, tokens) = (of_b.clone(), tokens.clone());
        tokio::spawn(async move { bring_back(&of_b, &tokens, Duration::from_millis(150)).await })
    };
    let report = bringing.await.unwrap();
    assert!(report.took < Duration::from_millis(150) + super::support::SLACK);
    // The tier may hold frames of a pool whose other owners are gone.
    drop((of_b, b));
    store.set_fault(Fault::None);
    until("the store has answered", || tier.counters().in_flight == 0).await;
}

#[tokio::test]
async fn write_through_stores_what_is_computed() {
    let (store, tier) = in_process(hasty());
    let (a, b) = kv::pools(50);
    // From before, and from now on.
    let [before, after] = [kv::prompt(1, 41), kv::prompt(2, 29)];
    drop(kv::admit(&a, 7, &before).unwrap());
    let of_a = tiered(&a, &tier, TierPolicy::WriteThrough);
    let of_b = tiered(&b, &tier, TierPolicy::WriteThrough);
    let open = kv::admit(&a, 8, &after).unwrap();
    until("all blocks are stored", || store.len() == 17).await;
    for tokens in [&before, &after] {
        let report = bring_back(&of_b, tokens, WAIT).await;
        assert_eq!(report.cached_blocks, tokens.len() / 4);
        assert_eq!(kv::cached(&b, tokens), tokens.len() / 4);
    }
    // What came from the tier is not stored again.
    until("they were looked at", || of_b.counters().present_blocks == 17).await;
    assert_eq!(of_b.counters().stored_blocks, 0);
    until("they were counted", || of_a.counters().stored_blocks == 17).await;
    drop(open);
    drop((of_a, of_b));
    for pool in [&a, &b] {
        idle(pool).await;
    }
}

/// At the end of a node: what the policy says is stored, or the deadline ends it.
#[tokio::test]
async fn a_flush_stores_what_is_cached() {
    let (store, tier) = in_process(patient());
    let (a, _) = kv::pools(50);
    for policy in [TierPolicy::WriteThrough, TierPolicy::OnEviction, TierPolicy::Manual] {
        store.clear();
        store.set_fault(Fault::Slow(Duration::from_millis(20)));
        let of_a = tiered(&a, &tier, policy);
        drop(kv::admit(&a, 7, &kv::prompt(1, 81)).unwrap());
        assert!(of_a.flush(soon()).await, "{policy:?}");
        let (stored, kept) = if policy == TierPolicy::Manual { (0, 20) } else { (20, 0) };
        assert_eq!(store.len(), stored, "{policy:?}");
        if policy == TierPolicy::OnEviction {
            assert_eq!(a.stats().evictable, kept, "they left");
        }
        // A store that hangs.
        store.clear();
        a.clear_prefix_cache();
        store.set_fault(Fault::Hang);
        drop(kv::admit(&a, 8, &kv::prompt(2, 41)).unwrap());
        let began = Instant::now();
        let is_flushed = of_a.flush(began + Duration::from_millis(100)).await;
        assert_eq!(is_flushed, policy == TierPolicy::Manual, "{policy:?}");
        assert!(began.elapsed() < Duration::from_millis(100) + SLACK, "{policy:?}");
        store.set_fault(Fault::None);
        drop(of_a);
        idle(&a).await;
        a.clear_prefix_cache();
    }
}

/// Cleared blocks are not stored, and a store that hangs does not keep the pool.
#[tokio::test]
async fn write_through_under_failures() {
    let (store, tier) = in_process(hasty());
    let (a, _) = kv::pools(50);
    let of_a = {
        let mut settings = TieredSettings::new(NAMESPACE);
        settings.put_limit = Duration::from_millis(50);
        settings.waiting_max = 8;
        Tiered::new(a.clone(), tier.clone(), settings).unwrap()
    };
    store.set_fault(Fault::Hang);
    for first in 1..8 {
        drop(kv::admit(&a, 7, &kv::prompt(first, 21)).unwrap());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    until("some are dropped", || of_a.counters().dropped_blocks > 0).await;
    a.clear_prefix_cache();
    store.set_fault(Fault::None);
    // It goes on behind the breaker's rest.
    let mut first = 100;
    let began = Instant::now();
    while of_a.counters().stored_blocks == 0 {
        assert!(began.elapsed() < WAIT, "{:?}", tier.counters());
        drop(kv::admit(&a, 7, &kv::prompt(first, 9)).unwrap());
        first += 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(of_a);
    idle(&a).await;
}

#[tokio::test]
async fn blocks_leave_before_they_are_evicted() {
    let (store, tier) = in_process(hasty());
    let (a, b) = kv::pools(40);
    let mut settings = TieredSettings::new(NAMESPACE).policy(TierPolicy::OnEviction);
    settings.keep_free = Some(15);
    let of_a = Tiered::new(a.clone(), tier.clone(), settings).unwrap();
    let prompts: Vec<_> = (1..4).map(|first| kv::prompt(first, 41)).collect();
    for tokens in &prompts {
        drop(kv::admit(&a, 7, tokens).unwrap());
    }
    until("room is made", || a.free_blocks() >= 15).await;
    let left = store.len();
    assert!((5..=10).contains(&left), "{left}");
    assert_eq!(of_a.counters().stored_blocks, left as u64);
    // The coldest ones: the ends of the first prompt. With the blocks that are left here, it is whole.
    let here = kv::cached(&a, &prompts[0]);
    let report = bring_back(&of_a, &prompts[0], WAIT).await;
    assert!(report.cached_blocks == 10 && report.moved_blocks == 10 - here, "{report:?}, {here}");
    // What came back took room, which is made again.
    until("room is made", || a.free_blocks() >= 15).await;
    // A store that refuses: everything stays.
    store.set_fault(Fault::Refuse);
    let stored = of_a.counters().stored_blocks;
    for first in 10..14 {
        drop(kv::admit(&a, 7, &kv::prompt(first, 41)).unwrap());
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(of_a.counters().stored_blocks, stored);
    assert_eq!(kv::cached(&a, &kv::prompt(13, 41)), 10);
    drop(of_a);
    for pool in [&a, &b] {
        idle(pool).await;
    }
}

/// Blocks that the tier did not take stay cached, in their places.
#[tokio::test]
async fn an_offload_that_fails() {
    let (store, tier) = in_process(patient());
    let (a, _) = kv::pools(50);
    let tokens = kv::prompt(1, 41);
    drop(kv::admit(&a, 7, &tokens).unwrap());
    let of_a = tiered(&a, &tier, TierPolicy::Manual);
    for fault in [Fault::Refuse, Fault::Panic, Fault::Hang] {
        store.set_fault(fault);
        let report = of_a.offload(100, Instant::now() + Duration::from_millis(50)).await.unwrap();
        assert_eq!((report.cached_blocks, report.moved_blocks), (0, 0), "{fault:?}");
        assert_eq!(kv::cached(&a, &tokens), 10, "{fault:?}");
    }
    store.set_fault(Fault::None);
    idle(&a).await;
}

/// More blocks than may wait to be put: they are stored batch by batch, and none is dropped.
#[tokio::test]
async fn an_offload_of_everything() {
    let (store, tier) = in_process(patient());
    let a = kv::pool(kv::plain(), 400);
    let tokens = kv::prompt(1, 4 * 300 + 1);
    drop(kv::admit(&a, 7, &tokens).unwrap());
    let report = tiered(&a, &tier, TierPolicy::Manual).offload(usize::MAX, soon()).await.unwrap();
    assert_eq!(
        (report.moved_blocks, report.cached_blocks, report.failed_blocks),
        (300, 300, 0),
        "{report:?}"
    );
    assert_eq!((store.len(), tier.counters().dropped_puts), (300, 0));
    idle(&a).await;
}

/// Blocks that are computed while the store is gone are stored when it is back.
#[tokio::test]
async fn write_through_goes_on_behind_an_outage() {
    for fault in [Fault::Refuse, Fault::Hang, Fault::Panic] {
        let (store, tier) = in_process(hasty());
        let (a, _) = kv::pools(50);
        let mut settings = TieredSettings::new(NAMESPACE);
        settings.put_limit = Duration::from_millis(50);
        let of_a = Tiered::new(a.clone(), tier.clone(), settings).unwrap();
        store.set_fault(fault);
        drop(kv::admit(&a, 7, &kv::prompt(1, 41)).unwrap());
        let has_failed = || tier.counters().failed + tier.counters().overdue > 0;
        until("it was tried", has_failed).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(store.len(), 0);
        store.set_fault(Fault::None);
        until("all blocks are stored", || store.len() == 10).await;
        until("they were counted", || of_a.counters().stored_blocks + of_a.counters().present_blocks >= 10)
            .await;
        drop(of_a);
        idle(&a).await;
    }
}

/// A value that is damaged in the store is replaced by the node that found it, once it has the block.
#[tokio::test]
async fn a_damaged_value_is_replaced() {
    let (store, tier, [_a, b], tokens) = stored().await;
    store.set_fault(Fault::Corrupt);
    let of_b = tiered(&b, &tier, TierPolicy::WriteThrough);
    assert_eq!(bring_back(&of_b, &tokens, WAIT).await.cached_blocks, 0);
    store.set_fault(Fault::None);
    let before = tier.counters().stored;
    drop(kv::admit(&b, 7, &tokens).unwrap());
    until("it is stored again", || tier.counters().stored == before + 10).await;
    drop(of_b);
    idle(&b).await;
}

/// A time limit that cannot be added to the present.
#[tokio::test]
async fn write_through_without_a_limit() {
    let (store, tier) = in_process(hasty());
    let (a, _) = kv::pools(50);
    let mut settings = TieredSettings::new(NAMESPACE);
    settings.put_limit = Duration::MAX;
    let of_a = Tiered::new(a.clone(), tier.clone(), settings).unwrap();
    drop(kv::admit(&a, 7, &kv::prompt(1, 41)).unwrap());
    until("all blocks are stored", || store.len() == 10).await;
    drop(of_a);
    idle(&a).await;
}

/// Values of this pool from before a clear are misses, and are replaced; other pools find them.
#[tokio::test]
async fn values_from_before_a_clear() {
    let (store, tier, [a, b], tokens) = stored().await;
    // Two nodes; the one remembers for long what failed.
    let mut settings = hasty();
    settings.failed_for = WAIT;
    let remembering = super::support::tier(store, settings);
    let (of_a, of_b) = (tiered(&a, &remembering, TierPolicy::Manual), tiered(&b, &tier, TierPolicy::Manual));
    a.clear_prefix_cache();
    let report = bring_back(&of_a, &tokens, WAIT).await;
    assert_eq!((report.cached_blocks, report.moved_blocks), (0, 0));
    assert!(report.failed_blocks > 0, "{report:?}");
    assert_eq!(kv::cached(&a, &tokens), 0);
    idle(&a).await;
    // What another pool computes behind them does not come back either.
    assert_eq!(bring_back(&of_b, &tokens, WAIT).await.cached_blocks, 10);
    let longer = [&tokens[..], &kv::prompt(2, 20)].concat();
    drop(kv::admit(&b, 8, &longer).unwrap());
    let report = of_b.offload(100, soon()).await.unwrap();
    assert!(report.moved_blocks >= 5, "{report:?}");
    drop(kv::admit(&a, 9, &longer[..41]).unwrap());
    let here = kv::cached(&a, &longer);
    assert_eq!(bring_back(&of_a, &longer, WAIT).await.cached_blocks, here);
    // The blocks that were computed anew are put again.
    let report = of_a.offload(100, soon()).await.unwrap();
    assert_eq!((report.moved_blocks, report.present_blocks), (10, 0), "{report:?}");
    assert_eq!(kv::cached(&a, &longer), 0);
    let report = bring_back(&of_a, &tokens, WAIT).await;
    assert_eq!((report.cached_blocks, kv::cached(&a, &tokens)), (10, 10));
    for pool in [&a, &b] {
        idle(pool).await;
    }
}
