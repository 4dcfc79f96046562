//! What every tier does, whatever its store is.

use std::time::Instant;

use kvpool::prefix::BlockHash;
use kvpool_node::tier::{BreakerState, Outcome, SharedTier, TierFailure, TierKey, TierSettings};

use super::support::{all, get, in_process, keys, patient, put, soon, value};

/// The suite. The store is empty, and has room for all.
pub async fn suite(tier: &SharedTier) {
    let (some, others) = (keys(0..40), keys(100..110));
    assert_eq!(tier.exists(some.clone(), soon()).await, all(Outcome::Miss, &some));
    assert_eq!(get(tier, &some).await, all(Outcome::Miss, &some));
    // Empty calls.
    assert_eq!(tier.exists(Vec::new(), soon()).await, []);
    assert_eq!(get(tier, &[]).await, []);
    assert_eq!(put(tier, &[]).await, []);
    // What is put is found, and nothing else.
    assert_eq!(put(tier, &some).await, all(Outcome::Stored, &some));
    assert_eq!(tier.exists(some.clone(), soon()).await, all(Outcome::Hit, &some));
    assert_eq!(get(tier, &some).await, all(Outcome::Hit, &some));
    assert_eq!(get(tier, &others).await, all(Outcome::Miss, &others));
    let mixed = [some[3], others[0], some[39], some[3], others[1]];
    let [hit, miss] = [Outcome::Hit, Outcome::Miss];
    assert_eq!(get(tier, &mixed).await, [&hit, &miss, &hit, &hit, &miss].map(Clone::clone));
    // Again, with the same bytes.
    assert_eq!(put(tier, &some[..5]).await, all(Outcome::Stored, &some[..5]));
    assert_eq!(get(tier, &some[..5]).await, all(Outcome::Hit, &some[..5]));
    // The same 128 bits with another check are another block.
    let hash = BlockHash::new(some[7].hash.key(), some[7].hash.check() ^ 1);
    let collision = TierKey { hash, ..some[7] };
    assert_ne!(get(tier, &[collision]).await, [Outcome::Hit]);
    assert_eq!(get(tier, &[some[7]]).await, [Outcome::Hit]);
    // A deadline that has passed: no outcome is wrong, and nothing waits.
    let (began, past) = (Instant::now(), Instant::now());
    let outcomes = tier.put(vec![value(&others[9], 0)], past).await;
    assert!(!matches!(outcomes[..], [Outcome::Hit | Outcome::Miss]), "{outcomes:?}");
    assert!(began.elapsed() < super::support::SLACK);
    let counters = tier.counters();
    assert_eq!(counters.breaker, BreakerState::Closed, "{counters:?}");
    assert!(counters.stored >= 45 && counters.hits >= 48 && counters.misses >= 52, "{counters:?}");
    assert!(counters.read_bytes > 0 && counters.written_bytes > 0, "{counters:?}");
    concurrent(tier).await;
    tier.close();
    let closed = Outcome::Failed(TierFailure::Closed);
    assert_eq!(get(tier, &some[..3]).await, all(closed.clone(), &some[..3]));
    assert_eq!(put(tier, &some[..3]).await, all(closed, &some[..3]));
}

/// Calls that overlap have their own outcomes.
async fn concurrent(tier: &SharedTier) {
    let [a, b, c] = [keys(200..220), keys(300..320), keys(400..420)];
    assert_eq!(put(tier, &a).await, all(Outcome::Stored, &a));
    let (got_a, put_b, got_c) = tokio::join!(get(tier, &a), put(tier, &b), get(tier, &c));
    assert_eq!((got_a, put_b), (all(Outcome::Hit, &a), all(Outcome::Stored, &b)));
    assert_eq!(got_c, all(Outcome::Miss, &c));
    assert_eq!(get(tier, &b).await, all(Outcome::Hit, &b));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_the_process() {
    let (_store, tier) = in_process(patient());
    suite(&tier).await;
}

#[tokio::test]
async fn one_call_at_a_time_on_a_runtime_of_one_thread() {
    let mut settings = TierSettings::default();
    settings.calls = 1;
    let (_store, tier) = in_process(settings);
    suite(&tier).await;
}
