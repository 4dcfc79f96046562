//! Statistics, metrics, owners and events survive a round trip through JSON.

use kvpool::prefix::{BlockHash, KvEvent, Numbered};
use kvpool::{AllocRequest, BlockId, SequenceId};
use kvpool_testkit::prompts::{admit, pool as caching_pool, prompt};
use serde::de::DeserializeOwned;

/// Returns the JSON text of a value that it also restores.
fn round_trip<T: serde::Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(value: &T) -> String {
    let text = serde_json::to_string(value).unwrap();
    assert_eq!(&serde_json::from_str::<T>(&text).unwrap(), value, "{text}");
    text
}

#[tokio::test]
async fn reports_survive_a_round_trip() {
    let layout = kvpool::KvLayout::named("tiny").unwrap();
    let cache = kvpool::PrefixConfig::new();
    let pool =
        kvpool::Pool::builder(layout).blocks(50).prefix_cache(cache).latency_sample(1).build().unwrap();
    let _sequence = admit(&pool, 7, &prompt(1, 30));
    let _lease = pool.allocate(AllocRequest::new(3).sequence(SequenceId(u64::MAX - 1)).pinned()).unwrap();
    let _batch = pool.begin_batch();
    let text = round_trip(&pool.metrics());
    for name in ["freed_blocks", "query_tokens", "given_up", "by_queue", "up_to_ns", "oldest_batch"] {
        assert!(text.contains(&format!("\"{name}\"")), "{name} is missing: {text}");
    }
    round_trip(&pool.stats());
    round_trip(&pool.fragmentation());
    round_trip(&pool.sequence_runs());
    let owners = round_trip(&pool.owners());
    assert!(owners.contains(&(u64::MAX - 1).to_string()), "{owners}");
    round_trip(&pool.blocks().counts());
    round_trip(&pool.defragment().await.unwrap());
}

#[test]
fn times_of_an_older_node_are_read() {
    let older = r#"{"samples": 3, "p50_ns": 120, "p99_ns": 1250, "max_ns": 80000}"#;
    let times: kvpool::Latency = serde_json::from_str(older).unwrap();
    assert_eq!((times.samples, times.p99_ns, times.p999_ns, times.max_ns), (3, 1250, 0, 80_000));
}

#[test]
fn events_survive_a_round_trip() {
    let pool = caching_pool(20);
    let mut events = pool.prefix_cache().unwrap().events().subscribe().unwrap();
    drop(admit(&pool, 1, &prompt(1, 9)));
    pool.clear_prefix_cache();
    let mut kinds = 0;
    while let Some(event) = events.try_recv() {
        let text = round_trip(&event);
        if let KvEvent::Stored { hash, .. } = event.event {
            assert!(text.contains(&hash.to_string()), "a hash is text: {text}");
        }
        kinds += 1;
    }
    assert_eq!(kinds, 3, "two blocks, and the clear");
    let lost = Numbered { number: 5, event: KvEvent::Resync { lost: u64::MAX } };
    round_trip(&lost);
    round_trip(&KvEvent::Removed { block: BlockId(3), hash: BlockHash::new(u128::MAX, 1), group: 7 });
    assert!(serde_json::from_str::<BlockHash>("\"12-zz\"").is_err());
}
