//! The store over a library with Mooncake's interface.
//!
//! The library is `mooncake_store.c`, compiled here: Mooncake's own cannot be had as a package. What is
//! tested is the table of functions, the memory that goes through it, and how its answers are read, not
//! Mooncake.

use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpool_node::tier::mooncake::{Mooncake, MooncakeSettings};
use kvpool_node::tier::{
    Outcome, SharedTier, StoreError, TierError, TierFailure, TierPolicy, TierSettings, ValueError,
};
use libloading::Library;
use tempfile::TempDir;

use super::kv;
use super::support::{
    SLACK, WAIT, all, bring_back, get, hasty, idle, keys, patient, put, reads, soon, tier, tiered, until,
};

/// Faults of the library, as its source numbers them.
#[derive(Clone, Copy, Debug)]
enum Fault {
    None,
    StoresNothing,
    Transfer,
    Rpc,
    Foreign,
    Hang,
    PutsRpc,
    Short,
    LateWrite,
    Setup,
    Corrupt,
    TooLong,
}

/// A copy of the library, with a table of its own.
struct Fake {
    folder: TempDir,
    library: Library,
}

fn compile(folder: &Path, source: &Path) -> PathBuf {
    let library = folder.join("libmooncake_store.so");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let mut command = Command::new(compiler);
    command.args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread", "-o"]).arg(&library).arg(source);
    let output = command.output().expect("a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    library
}

impl Fake {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tier/mooncake_store.c");
        let path = compile(folder.path(), &source);
        // SAFETY: it has no initialisers.
        let library = unsafe { Library::new(path) }.unwrap();
        Self { folder, library }
    }

    fn settings(&self) -> MooncakeSettings {
        let mut settings = MooncakeSettings::default();
        settings.library = Some(self.folder.path().join("libmooncake_store.so"));
        settings.limit = WAIT;
        settings
    }

    fn tier(&self, settings: TierSettings) -> Arc<SharedTier> {
        tier(Mooncake::connect(self.settings()).unwrap(), settings)
    }

    fn set(&self, fault: Fault) {
        // SAFETY: the type is that of the source.
        unsafe { self.library.get::<unsafe extern "C" fn(c_int)>("fake_set_fault").unwrap()(fault as c_int) };
    }

    fn count(&self) -> usize {
        // SAFETY: the type is that of the source.
        unsafe { self.library.get::<unsafe extern "C" fn() -> usize>("fake_count").unwrap()() }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance() {
    let fake = Fake::new();
    super::conformance::suite(&fake.tier(patient())).await;
}

/// The probe tells what the store does wrong, and leaves nothing behind.
#[test]
fn the_probe() {
    let fake = Fake::new();
    drop(Mooncake::connect(fake.settings()).unwrap());
    assert_eq!(fake.count(), 0);
    for (fault, says) in [
        (Fault::PutsRpc, "of different versions"),
        (Fault::Rpc, "a put answered -900"),
        (Fault::StoresNothing, "does not exist"),
        (Fault::Transfer, "a put answered -800"),
        (Fault::Short, "a get answered 4095 of 4096 bytes"),
        (Fault::Corrupt, "other bytes"),
        (Fault::Setup, "setup answered"),
    ] {
        fake.set(fault);
        let error = Mooncake::connect(fake.settings()).err().expect("a refusal");
        assert!(matches!(error, TierError::Probe { .. }), "{fault:?}: {error:?}");
        assert!(error.to_string().contains(says), "{fault:?}: {error}");
    }
    fake.set(Fault::Hang);
    let mut hasty = fake.settings();
    hasty.limit = Duration::from_millis(50);
    let error = Mooncake::connect(hasty).err().unwrap();
    assert!(error.to_string().contains("within 50 ms"), "{error}");
    fake.set(Fault::None);
}

/// Libraries that are not there, or not the library.
#[test]
fn other_libraries() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = MooncakeSettings::default();
    settings.library = Some(folder.path().join("nothing.so"));
    let error = Mooncake::connect(settings.clone()).err().unwrap();
    assert!(
        matches!(error, TierError::Library { .. }) && error.to_string().contains("nothing.so"),
        "{error}"
    );
    // 18 of the functions.
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tier/mooncake_store.c");
    let text = std::fs::read_to_string(source).unwrap().replace("mooncake_store_get_hostname", "other");
    let without = folder.path().join("without.c");
    std::fs::write(&without, text).unwrap();
    settings.library = Some(compile(folder.path(), &without));
    let error = Mooncake::connect(settings.clone()).err().unwrap();
    assert!(error.to_string().contains("mooncake_store_get_hostname"), "{error}");
    let mut no_replica = settings;
    no_replica.replicas = 0;
    assert!(matches!(Mooncake::connect(no_replica).err(), Some(TierError::OutOfRange { .. })));
}

/// Each fault has its outcome, none is a hit, and the store is of use again afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults() {
    let fake = Fake::new();
    let shared = fake.tier(hasty());
    let (some, others) = (keys(0..10), keys(20..30));
    assert_eq!(put(&shared, &some).await, all(Outcome::Stored, &some));
    for fault in [
        Fault::StoresNothing,
        Fault::Transfer,
        Fault::Rpc,
        Fault::Foreign,
        Fault::PutsRpc,
        Fault::Short,
        Fault::Corrupt,
        Fault::TooLong,
    ] {
        fake.set(fault);
        let stored = put(&shared, &others).await;
        let got = get(&shared, &some).await;
        let is_failed = |outcome: &Outcome| matches!(outcome, Outcome::Failed(_));
        match fault {
            Fault::StoresNothing => {
                assert!(stored.iter().all(is_failed), "a confirmed put that is not there: {stored:?}");
                assert_eq!(got, all(Outcome::Hit, &some));
            }
            Fault::PutsRpc => assert!(stored.iter().all(is_failed) && !got.iter().any(is_failed)),
            Fault::Foreign => {
                let other = |outcome: &Outcome| {
                    let wrong =
                        matches!(outcome, Outcome::Failed(TierFailure::Value(ValueError::OtherBlock { .. })));
                    wrong || *outcome == Outcome::Failed(TierFailure::Remembered)
                };
                assert!(got.iter().all(other), "{got:?}");
            }
            _ => assert!(got.iter().all(is_failed), "{fault:?}: {got:?}"),
        }
        fake.set(Fault::None);
        let began = Instant::now();
        while get(&shared, &some).await != all(Outcome::Hit, &some) {
            assert!(began.elapsed() < WAIT, "{fault:?}: {:?}", shared.counters());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// A transfer that failed writes its memory later: no later get sees that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_write_reaches_no_other_get() {
    let fake = Fake::new();
    let mut settings = hasty();
    settings.failures = u32::MAX;
    settings.failed_keys = 0;
    let shared = fake.tier(settings);
    let some = keys(0..8);
    put(&shared, &some).await;
    for _ in 0..3 {
        fake.set(Fault::LateWrite);
        let failed = get(&shared, &some).await;
        assert!(!failed.contains(&Outcome::Hit));
        fake.set(Fault::None);
        // While the late writes come.
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(60) {
            assert_eq!(get(&shared, &some).await, all(Outcome::Hit, &some));
        }
    }
    assert_eq!(shared.counters().bad_values, 0, "{:?}", shared.counters());
    // Memory that may still be written is bounded.
    fake.set(Fault::LateWrite);
    for _ in 0..40 {
        get(&shared, &some).await;
    }
    let refused = get(&shared, &some).await;
    let is_refused = |outcome: &Outcome| {
        matches!(outcome, Outcome::Failed(TierFailure::Store(StoreError::Refused { .. })))
    };
    assert!(refused.iter().all(is_refused), "{refused:?}");
    // The library writes for 30 ms.
    tokio::time::sleep(Duration::from_millis(100)).await;
}

/// Calls that hang for longer than any deadline.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hang() {
    let fake = Fake::new();
    let shared = fake.tier(hasty());
    let (a, b) = kv::pools(50);
    let tokens = kv::prompt(1, 41);
    drop(kv::admit(&a, 7, &tokens).unwrap());
    tiered(&a, &shared, TierPolicy::Manual).offload(100, soon()).await.unwrap();
    assert_eq!(fake.count(), 10);
    fake.set(Fault::Hang);
    let of_b = tiered(&b, &shared, TierPolicy::Manual);
    let report = bring_back(&of_b, &tokens, Duration::from_millis(100)).await;
    assert_eq!(report.cached_blocks, 0);
    let (reads, memory) = reads(&keys(0..4));
    let deadline = Instant::now() + Duration::from_millis(100);
    shared.get(reads, deadline).await;
    assert!(Instant::now() < deadline + SLACK);
    fake.set(Fault::None);
    until("memory is given back", || memory.iter().all(|own| Arc::strong_count(own) == 1)).await;
    let began = Instant::now();
    while bring_back(&of_b, &tokens, WAIT).await.cached_blocks < 10 {
        assert!(began.elapsed() < WAIT);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(kv::cached(&b, &tokens), 10);
    for pool in [&a, &b] {
        idle(pool).await;
    }
}
