//! Tiers for tests, and what goes through them.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvpool::Pool;
use kvpool::prefix::{BlockHash, PrefixKeys};
use kvpool_node::tier::{
    Fingerprint, Landing, Outcome, SharedTier, Store, TierKey, TierPolicy, TierRead, TierReport,
    TierSettings, TierValue, Tiered, TieredSettings, ValueError, value_bytes, verify,
};

use super::faulty::Faulty;
use super::kv;

/// The longest time of any step. The machine may be busy.
pub const WAIT: Duration = Duration::from_secs(20);

/// What a call may take longer than its deadline on a busy machine.
pub const SLACK: Duration = Duration::from_secs(5);

pub const NAMESPACE: &str = "tests";

/// Settings by which a busy machine is no failure.
pub fn patient() -> TierSettings {
    let mut settings = TierSettings::default();
    settings.patience = WAIT;
    settings
}

/// Settings by which a test sees failures soon.
pub fn hasty() -> TierSettings {
    let mut settings = TierSettings::default();
    settings.patience = Duration::from_millis(200);
    settings.rest = Duration::from_millis(200);
    settings.failed_for = Duration::from_millis(200);
    settings
}

pub fn tier(store: impl Store, settings: TierSettings) -> Arc<SharedTier> {
    Arc::new(SharedTier::new(store, settings).unwrap())
}

pub fn in_process(settings: TierSettings) -> (Faulty, Arc<SharedTier>) {
    let store = Faulty::new(64 << 20);
    (store.clone(), tier(store, settings))
}

pub fn soon() -> Instant {
    Instant::now() + WAIT
}

pub fn packed_bytes() -> usize {
    kv::plain().packed_bytes()
}

/// A hash whose bits are spread, as those of a prefix cache are.
fn hash_of(number: u64) -> BlockHash {
    let mut random = fastrand::Rng::with_seed(number);
    BlockHash::new(random.u128(..), random.u64(..))
}

/// A key of the pools of `kv`.
pub fn key(number: u64) -> TierKey {
    let fingerprint = Fingerprint::of(&kv::pool(kv::plain(), 8), NAMESPACE).unwrap();
    TierKey { fingerprint, hash: hash_of(number) }
}

pub fn keys(numbers: impl IntoIterator<Item = u64>) -> Vec<TierKey> {
    let first = key(0);
    numbers.into_iter().map(|number| TierKey { hash: hash_of(number), ..first }).collect()
}

/// The packed bytes of the block with a key, in a version of them.
pub fn block(key: &TierKey, version: u8) -> Vec<u8> {
    let seed = key.hash.key() as u64;
    (0..packed_bytes() as u64).map(|at| (seed ^ at.wrapping_mul(0x9E37_79B9)) as u8 ^ version).collect()
}

pub fn value(key: &TierKey, version: u8) -> TierValue {
    let fill = |bytes: &mut [u8]| {
        bytes.copy_from_slice(&block(key, version));
        Ok::<_, ()>(())
    };
    TierValue::new(*key, &[], packed_bytes(), fill).unwrap()
}

pub fn values(keys: &[TierKey]) -> Vec<TierValue> {
    keys.iter().map(|key| value(key, 0)).collect()
}

/// Memory of a test for one block. `block` is free for others once the tier has dropped it.
struct TestMemory {
    key: TierKey,
    block: Arc<Mutex<Vec<u8>>>,
}

impl Landing for TestMemory {
    fn land(&mut self, value: &[u8]) -> Result<(), ValueError> {
        *self.block.lock().unwrap() = verify(&self.key, packed_bytes(), value)?.to_vec();
        Ok(())
    }
}

pub type Blocks = Vec<Arc<Mutex<Vec<u8>>>>;

pub fn reads(keys: &[TierKey]) -> (Vec<TierRead>, Blocks) {
    let blocks: Blocks = keys.iter().map(|_| Arc::default()).collect();
    let read = |(key, block): (&TierKey, &Arc<Mutex<Vec<u8>>>)| TierRead {
        key: *key,
        bytes: value_bytes(packed_bytes()),
        memory: Box::new(TestMemory { key: *key, block: block.clone() }),
    };
    (keys.iter().zip(&blocks).map(read).collect(), blocks)
}

/// Reads keys. Checks the bytes of hits, and that their memory was given back.
pub async fn get(tier: &SharedTier, keys: &[TierKey]) -> Vec<Outcome> {
    let (reads, blocks) = reads(keys);
    let outcomes = tier.get(reads, soon()).await;
    assert_eq!(outcomes.len(), keys.len());
    for ((key, outcome), memory) in keys.iter().zip(&outcomes).zip(&blocks) {
        assert_eq!(Arc::strong_count(memory), 1, "{outcome:?}");
        if *outcome == Outcome::Hit {
            assert_eq!(*memory.lock().unwrap(), block(key, 0), "a wrong byte");
        }
    }
    outcomes
}

pub async fn put(tier: &SharedTier, keys: &[TierKey]) -> Vec<Outcome> {
    tier.put(values(keys), soon()).await
}

pub fn all(outcome: Outcome, keys: &[TierKey]) -> Vec<Outcome> {
    vec![outcome; keys.len()]
}

pub fn tiered(pool: &Pool, tier: &Arc<SharedTier>, policy: TierPolicy) -> Tiered {
    Tiered::new(pool.clone(), tier.clone(), TieredSettings::new(NAMESPACE).policy(policy)).unwrap()
}

/// Brings a prompt back, and checks that the call ends in time.
pub async fn bring_back(tiered: &Tiered, tokens: &[u32], limit: Duration) -> TierReport {
    let deadline = Instant::now() + limit;
    let report = tiered.bring_back(&PrefixKeys::new(), tokens, deadline).await.unwrap();
    assert!(Instant::now() < deadline + SLACK, "{report:?}");
    report
}

/// Waits for a condition.
pub async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < WAIT, "{what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Waits until no call of a tier holds a frame of a pool, and checks the pool.
pub async fn idle(pool: &Pool) {
    until("frames are given back", || pool.owners().transfers.is_empty()).await;
    kv::is_idle(pool);
}
