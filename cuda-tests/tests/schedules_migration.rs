//! Blocks leave the device and come back while an engine runs: cached ones to a pool on the host or
//! on another device, and whole sequences. Lookups return what was stored, even if a request was
//! cancelled halfway.

use std::time::{Duration, Instant};

use kvpool::prefix::{HashKey, PrefixConfig, PrefixKeys};
use kvpool::storage::{Elements, ElementsMut, HostStorage, KvLayout, Storage};
use kvpool::{MigrateError, MigrationReport, Pool, Sequence, SequenceError, SequenceId, TransferError};
use kvpool_cuda::{CudaStorage, Device, StreamPriority};
use kvpool_cuda_tests::engine::{Lane, Rig, Rows, Shape, Wrong, drained, layout_of};
use kvpool_cuda_tests::mock::{self, Style};
use kvpool_testkit::rng::Rng;

const ROUNDS: usize = 80;

/// Returns a second pool with the same hashes, as a target.
fn other(device: Option<&Device>, layout: &KvLayout, key: HashKey) -> Pool {
    let builder = Pool::builder(layout.clone()).blocks(24).threads(1);
    let builder = builder.prefix_cache(PrefixConfig::new().key(key));
    let storage: std::sync::Arc<dyn Storage> = match device {
        Some(device) => {
            std::sync::Arc::new(CudaStorage::new(device, layout.clone(), 25, 25).expect("frames"))
        }
        None => std::sync::Arc::new(HostStorage::new(layout.clone(), 25, 25).expect("frames")),
    };
    builder.storage(storage).build().expect("a pool")
}

/// Takes a step; waits first if the lane has its maximum of steps in flight.
fn go_on(rig: &Rig, lane: &mut Lane) -> Result<(), Wrong> {
    lane.go_on(rig)?;
    let start = Instant::now();
    while !lane.check()? && lane.is_full() {
        assert!(start.elapsed() < Duration::from_secs(20), "a step does not end");
        std::thread::yield_now();
    }
    Ok(())
}

#[test]
fn cached_blocks_that_left_are_what_they_were_when_they_are_back() {
    let session = mock::session();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("threads");
    let [device, second] = [0, 1].map(|ordinal| Device::open(ordinal).expect("two devices"));
    let (mut left, mut back, mut compared) = (0, 0, 0);
    for seed in 0..12 {
        let layout = layout_of(seed * 13);
        let rig = Rig::new(&device, &Shape { layout: layout.clone(), blocks: (20, 20), caches: true });
        let elsewhere = other((seed % 2 == 0).then_some(&second), &layout, Rig::key());
        let mut lane = Lane::new(&rig, rig.stream(StreamPriority::Usual), seed);
        session.seed(seed);
        session.style([Style::Random, Style::Lazy, Style::Lowest, Style::Ranks][seed as usize % 4]);
        let mut rng = Rng(seed);
        for round in 0..ROUNDS {
            go_on(&rig, &mut lane).unwrap_or_else(|wrong| panic!("seed {seed}, round {round}: {wrong}"));
            // Half of them are cancelled halfway.
            let patience =
                Duration::from_micros(if rng.below(2) == 0 { 2_000_000 } else { rng.below(600) as u64 });
            let prompt = Lane::prompt(rng.below(5) as u32, 12);
            runtime.block_on(async {
                let offload =
                    tokio::time::timeout(patience, rig.pool.offload(&elsewhere, 1 + rng.below(6))).await;
                if let Ok(Ok(report)) = offload {
                    left += report.carried.blocks;
                }
                let keys = PrefixKeys::new();
                let came =
                    tokio::time::timeout(patience, rig.pool.bring_back(&elsewhere, &keys, &prompt)).await;
                if let Ok(Ok(report)) = came {
                    back += report.carried.blocks;
                }
            });
        }
        lane.clear();
        assert!(
            drained(|| lane.check().is_ok() && lane.is_idle() && lane.finishes.is_empty()),
            "seed {seed}"
        );
        for pool in [&rig.pool, &elsewhere] {
            let is_sound = drained(|| pool.stats().retired == 0 && pool.audit().is_ok());
            assert!(is_sound, "seed {seed}: {:?}, {:?}", pool.audit(), pool.stats());
        }
        compared += lane.compared;
    }
    assert!(left > 20 && back > 5 && compared > 1000, "{left} left, {back} came back, {compared} compared");
}

/// Migrates a sequence, and retries while a cancelled copy still holds the sequence's id in the
/// target.
async fn migrate(from: &Pool, sequence: Sequence, to: &Pool) -> (Sequence, MigrationReport) {
    let (mut sequence, start) = (sequence, Instant::now());
    loop {
        match from.migrate(sequence, to).await {
            Ok(moved) => return moved,
            Err(MigrateError {
                error: TransferError::Sequence(SequenceError::AlreadyOpen { .. }),
                sequence: back,
            }) if start.elapsed() < Duration::from_secs(10) => sequence = *back,
            Err(error) => panic!("{error}"),
        }
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
}

#[test]
fn sequences_go_from_device_to_device_and_to_the_host() {
    let session = mock::session();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("threads");
    let [device, second] = [0, 1].map(|ordinal| Device::open(ordinal).expect("two devices"));
    for seed in 0..8 {
        let layout = layout_of(seed * 17 + 1);
        let rig = Rig::new(&device, &Shape { layout: layout.clone(), blocks: (40, 40), caches: false });
        let pools =
            [other(Some(&second), &layout, Rig::key()), other(None, &layout, Rig::key()), rig.pool.clone()];
        let mut rows = Rows::new(&layout);
        session.seed(seed);
        session.style([Style::Random, Style::Lazy, Style::Ranks][seed as usize % 3]);
        let (mut rng, dtype, bytes) = (Rng(seed), rows.dtype(), rows.bytes());
        let tokens: Vec<u32> = (0..20).map(|_| rng.bits() as u32).collect();
        let stream = rig.stream(StreamPriority::Usual);
        let mut sequence = rig.pool.sequence(SequenceId(9)).open().expect("a new id");
        let mut batch = rig.pool.begin_batch_on(&stream).expect("a valid stream");
        batch.append(&mut sequence, tokens.len()).expect("blocks");
        for layer in 0..layout.layers() {
            let [k, v] = [0, 1].map(|half| {
                tokens.iter().flat_map(|&token| rows.stored(token, layer)[half].clone()).collect::<Vec<u8>>()
            });
            let v = if rows.halves() == 2 { Elements::new(dtype, &v) } else { Ok(Elements::none()) };
            let k = Elements::new(dtype, &k).expect("whole elements");
            batch.store(&mut sequence, layer, 0..tokens.len(), k, v.expect("whole elements")).expect("rows");
        }
        let ended = batch.finish_on(&stream).expect("a valid stream");
        runtime.block_on(ended).expect("a healthy device");
        let mut here = rig.pool.clone();
        for to in pools {
            // A cancelled attempt has no effect.
            let patience = Duration::from_micros(rng.below(400) as u64);
            let tried = runtime
                .block_on(async { tokio::time::timeout(patience, here.replicate(&sequence, &to)).await });
            drop(tried);
            let (there, report) = runtime.block_on(migrate(&here, sequence, &to));
            assert_eq!((there.len(), report.carried.blocks), (tokens.len(), there.block_count()));
            let mut batch = to.begin_batch();
            for layer in 0..layout.layers() {
                let mut found = [vec![0; tokens.len() * bytes], vec![0; tokens.len() * bytes]];
                let [k, v] = &mut found;
                let k = ElementsMut::new(dtype, k).expect("whole elements");
                let v = if rows.halves() == 2 { ElementsMut::new(dtype, v) } else { Ok(ElementsMut::none()) };
                batch.load(&there, layer, 0..tokens.len(), k, v.expect("whole elements")).expect("rows");
                for (at, &token) in tokens.iter().enumerate() {
                    for (half, found) in found.iter().enumerate().take(rows.halves()) {
                        let expected = &rows.loaded(token, layer)[half];
                        assert_eq!(&found[at * bytes..][..bytes], expected, "seed {seed}, token {at}");
                    }
                }
            }
            batch.finish();
            assert!(
                drained(|| here.stats().used == 0 && here.audit().is_ok()),
                "seed {seed}: {:?}",
                here.stats()
            );
            (sequence, here) = (there, to);
        }
        drop(sequence);
        assert!(drained(|| here.stats().used == 0 && here.audit().is_ok()));
    }
}
