//! A directory on a local drive as the store: restarts, kills, one process at a time, policies.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use kvpool_node::admin::Reporter;
use kvpool_node::tier::file::{Admission, FileError, FileSettings, FileStore};
use kvpool_node::tier::{BreakerState, Outcome, SharedTier, TierError, TierPolicy, TierReporter, connect};
use tempfile::{TempDir, tempdir};

use super::kv;
use super::support::{WAIT, all, bring_back, get, idle, keys, patient, put, soon, tier, tiered};

const SIZE: u64 = 64 << 20;

/// The variable that makes the program the child of a test.
const CHILD: &str = "KVPOOL_TEST_FILE_TIER";

fn over(directory: &Path) -> Arc<SharedTier> {
    let mut settings = FileSettings::new(directory, SIZE);
    settings.admission = Admission::Always;
    tier(FileStore::open(settings).unwrap(), patient())
}

fn address(directory: &TempDir, query: &str) -> String {
    format!("file://{}?{query}", directory.path().display())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance() {
    let directory = tempdir().unwrap();
    let tier = connect(&address(&directory, "size=64MiB&depth=4"), patient()).unwrap();
    assert_eq!(tier.name(), "file");
    super::conformance::suite(&tier).await;
}

/// A file system without direct I/O.
#[tokio::test]
async fn conformance_in_shared_memory() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else { return };
    super::conformance::suite(&over(directory.path())).await;
}

/// A pool stores its blocks, and the process restarts: another pool finds the prefix.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefix_survives_a_restart() {
    let (directory, tokens) = (tempdir().unwrap(), kv::prompt(1, 41));
    let (a, b) = kv::pools(50);
    {
        let tier = over(directory.path());
        let of_a = tiered(&a, &tier, TierPolicy::WriteThrough);
        drop(kv::admit(&a, 7, &tokens).unwrap());
        assert!(of_a.flush(soon()).await);
        assert_eq!(tier.store_counters().unwrap().used_slots, 10);
        of_a.close().await;
    }
    let tier = over(directory.path());
    let of_b = tiered(&b, &tier, TierPolicy::Manual);
    let report = bring_back(&of_b, &tokens, WAIT).await;
    assert_eq!((report.cached_blocks, report.moved_blocks), (10, 10));
    assert_eq!(kv::cached(&b, &tokens), 10, "their bytes are compared");
    for pool in [&a, &b] {
        idle(pool).await;
    }
}

#[tokio::test]
async fn one_process_uses_a_directory() {
    let directory = tempdir().unwrap();
    let first = over(directory.path());
    let query = "size=64MiB";
    let refused = connect(&address(&directory, query), patient()).err().unwrap();
    assert!(matches!(&refused, TierError::File(FileError::InUse { path }) if path == directory.path()));
    assert!(refused.to_string().contains("is in use: each directory"), "{refused}");
    put(&first, &keys(0..3)).await;
    drop(first);
    let second = connect(&address(&directory, query), patient()).unwrap();
    assert_eq!(get(&second, &keys(0..3)).await, all(Outcome::Hit, &keys(0..3)));
}

#[test]
fn a_directory_that_cannot_be_used() {
    for (address, wanted) in [
        ("file:///proc/self/kvpool?size=1GiB", "cannot create /proc/self/kvpool"),
        ("file:///dev/null?size=1GiB", "/dev/null"),
        ("file:///dev/shm/no-such-drive/kvpool?size=1GiB", "cannot create /dev/shm/no-such-drive/kvpool"),
        ("file:///var/cache/kvpool", "a size is missing"),
    ] {
        let refused = connect(address, patient()).err().unwrap();
        assert!(matches!(refused, TierError::File(_)), "{refused}");
        assert!(refused.to_string().contains(wanted), "{refused}");
    }
}

/// A value that was changed on the drive is a miss that is counted and said, and can be put again.
#[tokio::test]
async fn a_damaged_value_is_a_miss() {
    use std::os::unix::fs::FileExt;
    let directory = tempdir().unwrap();
    let (tier, some) = (over(directory.path()), keys(0..3));
    put(&tier, &some).await;
    let values = std::fs::OpenOptions::new().write(true).open(directory.path().join("values")).unwrap();
    values.write_all_at(&[0xEE; 64], 512).unwrap();
    // Puts run side by side: any key may have the first slot.
    let got = get(&tier, &some).await;
    assert_eq!(got.iter().filter(|got| **got == Outcome::Miss).count(), 1, "{got:?}");
    assert_eq!(got.iter().filter(|got| **got == Outcome::Hit).count(), 2, "{got:?}");
    assert_eq!((tier.counters().bad_values, tier.store_counters().unwrap().damaged_slots), (1, 1));
    assert!(tier.failures().last_error().unwrap().0.contains("found a value damaged"));
    assert_eq!(put(&tier, &some).await, all(Outcome::Stored, &some));
    assert_eq!(get(&tier, &some).await, all(Outcome::Hit, &some));
}

/// A store that is full declines new keys: that is no failure, and is counted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_that_are_declined() {
    let directory = tempdir().unwrap();
    let tier = connect(&address(&directory, "size=1MiB"), patient()).unwrap();
    let reporter = TierReporter::without_pool("drive", &tier);
    let first = keys(0..1);
    assert_eq!(put(&tier, &first).await, all(Outcome::Stored, &first));
    let slots = tier.store_counters().unwrap().slots;
    let others = keys(1..slots);
    for some in others.chunks(60) {
        assert_eq!(put(&tier, some).await, all(Outcome::Stored, some));
    }
    let more = keys(1000..1020);
    assert_eq!(put(&tier, &more).await, all(Outcome::Declined, &more));
    let stored = put(&tier, &more).await.iter().filter(|outcome| **outcome == Outcome::Stored).count();
    assert!(stored >= 15, "{stored}");
    let counters = tier.counters();
    assert_eq!((counters.failed, counters.breaker), (0, BreakerState::Closed));
    assert!(counters.declined >= 20 && counters.stored >= slots, "{counters:?}");
    let stats = reporter.stats().unwrap();
    assert_eq!(stats["store"]["used_slots"], slots);
    assert_eq!(stats["store"]["evictions"], stored);
    assert_eq!(stats["declined"], counters.declined);
}

/// What an evicted block's tier declines leaves the pool all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn declined_blocks_are_evicted() {
    let directory = tempdir().unwrap();
    let (a, _) = kv::pools(50);
    drop(kv::admit(&a, 7, &kv::prompt(1, 41)).unwrap());
    let tier = connect(&address(&directory, "size=64MiB&write_rate=1B"), patient()).unwrap();
    let report = tiered(&a, &tier, TierPolicy::Manual).offload(100, soon()).await.unwrap();
    assert_eq!((report.moved_blocks, report.cached_blocks, report.failed_blocks), (1, 10, 0));
    assert_eq!(tier.store_counters().unwrap().declined_by_rate, 9);
    idle(&a).await;
}

/// The child of the test below: puts keys, and tells each that is stored.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the child of another test"]
async fn child() {
    let Ok(given) = std::env::var(CHILD) else { return };
    let (directory, first) = given.split_once(' ').unwrap();
    let (tier, first): (_, u64) = (over(Path::new(directory)), first.parse().unwrap());
    for number in first..first + 2000 {
        assert_eq!(put(&tier, &keys([number])).await, [Outcome::Stored]);
        println!("stored {number}");
    }
}

/// A process is killed while it puts, again and again: what it was told to be stored is found.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills() {
    let (directory, mut random) = (tempdir().unwrap(), fastrand::Rng::with_seed(1));
    let mut stored: Vec<u64> = Vec::new();
    for round in 0..8 {
        let first = round * 10_000;
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "file::child", "--ignored", "--nocapture"])
            .env(CHILD, format!("{} {first}", directory.path().display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut left = random.usize(1..40);
        let mut note = |line: String| {
            // The test program's own words may precede it on the line.
            let number = line.rsplit_once("stored ").and_then(|(_, number)| number.parse().ok());
            number.map(|number| stored.push(number)).is_some()
        };
        while left > 0 {
            let line = lines.next().expect("it goes on").unwrap();
            left -= usize::from(note(line));
        }
        std::thread::sleep(Duration::from_micros(random.u64(0..3000)));
        child.kill().unwrap();
        child.wait().unwrap();
        lines.map_while(Result::ok).for_each(|line| _ = note(line));
        let tier = over(directory.path());
        let all_keys = keys(stored.iter().copied());
        assert_eq!(get(&tier, &all_keys).await, all(Outcome::Hit, &all_keys), "round {round}");
        assert_eq!(tier.store_counters().unwrap().damaged_slots, 0);
    }
}
