//! Versions of weights: no request finds blocks of others, whatever was in flight at the change.

mod ghost;
mod groups;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};
use std::thread;

use kvpool::prefix::{PrefixHasher, PrefixKeys, Weights};
use kvpool::{
    AdmitRequest, AllocRequest, Invalid, KvLayout, Pool, PrefixError, Sequence, SequenceId, WeightsVersion,
};
use kvpool_testkit::prompts::{BLOCK_TOKENS, admit, pool, prompt};

use crate::migration::kv;

fn versions(sequence: &Sequence) -> Vec<(usize, u64)> {
    sequence.versions().map(|range| (range.from, range.model.0)).collect()
}

fn begin(pool: &Pool, version: u64) {
    pool.begin_version(WeightsVersion(version)).unwrap();
}

#[test]
fn a_version_finds_its_own_blocks_only() {
    let pool = pool(100);
    let tokens = prompt(1, 41);
    for (version, cached) in [(0, 0), (0, 40), (7, 0), (7, 40), (u64::MAX, 0), (0, 40), (7, 40), (8, 0)] {
        begin(&pool, version);
        let (sequence, found) = admit(&pool, 1, &tokens);
        assert_eq!((found, versions(&sequence)), (cached, vec![(0, version)]), "version {version}");
    }
    assert_eq!(pool.begin_version(WeightsVersion(9)).unwrap(), WeightsVersion(8));
    assert_eq!(pool.prefix_cache().unwrap().weights(None).model, WeightsVersion(9));
    pool.audit().unwrap();
}

/// The hashes of a router agree, for each version.
#[test]
fn hashes_from_outside_are_those_of_the_pool() {
    let pool = pool(100);
    let (tokens, cache) = (prompt(1, 41), pool.prefix_cache().unwrap());
    let hasher: &PrefixHasher = cache.hasher();
    let keys = PrefixKeys::new().adapter(b"one");
    let mut seen = std::collections::HashSet::new();
    for version in 0..4 {
        begin(&pool, version);
        pool.begin_adapter_version(b"one", WeightsVersion(version / 2)).unwrap();
        for (keys, adapter) in [(PrefixKeys::new(), None), (keys, Some(&b"one"[..]))] {
            let mut sequence = pool.sequence(SequenceId(1)).keys(keys).open().unwrap();
            sequence.announce(&tokens).unwrap();
            let outside = hasher.hashes(&keys.weights(cache.weights(adapter)), &tokens).unwrap();
            assert_eq!((sequence.block_hashes(), outside.len()), (&outside[..], 10));
            assert_eq!(cache.hashes(&keys, &tokens).unwrap(), outside);
            assert!(outside.into_iter().all(|hash| seen.insert(hash)), "a hash of another version");
        }
    }
    let weights = Weights { model: WeightsVersion(3), adapter: WeightsVersion(1) };
    assert_eq!(cache.weights(Some(b"one")), weights);
}

/// Published fault: after a change, old blocks were hit for up to 17 steps, as batches in flight
/// and running sequences registered them.
#[test]
fn what_runs_at_a_change_brings_no_old_block_back() {
    let pool = pool(400);
    begin(&pool, 1);
    let (tokens, later) = (prompt(1, 21), prompt(1, 200));
    let (mut running, _) = admit(&pool, 1, &tokens);
    let mut late = pool.sequence(SequenceId(2)).tokens(&prompt(2, 21)).unwrap();
    let mut in_flight = pool.begin_batch();
    in_flight.append(&mut late, 21).unwrap();
    in_flight.append(&mut running, &later[21..38]).unwrap();
    begin(&pool, 2);
    let found = |number| pool.sequence(SequenceId(9)).tokens(&prompt(number, 200)).unwrap().len();
    let mut in_flight = Some(in_flight);
    for step in 0..20 {
        assert_eq!([found(1), found(2)], [0, 0], "after {step} steps");
        let mut batch = pool.begin_batch();
        let length = running.len();
        batch.append(&mut running, &later[length..length + 5]).unwrap();
        batch.finish();
        if step == 10 {
            in_flight.take().unwrap().finish();
        }
    }
    assert_eq!(versions(&running), [(0, 1), (38, 2)]);
    drop((running, late));
    assert_eq!([found(1), found(2)], [0, 0], "after they were closed");
    begin(&pool, 1);
    // Of the first version, all that a batch of it had filled before another one wrote.
    assert_eq!([found(1), found(2)], [36, 20]);
    pool.audit().unwrap();
}

/// Published fault: an update that races with admissions in line. The old blocks stay cached
/// meanwhile, and are hit by who is admitted after a return to their version.
#[test]
fn who_waits_in_line_is_looked_up_with_the_version_at_its_admission() {
    for (at_admission, cached) in [(1, 0), (0, 4 * BLOCK_TOKENS)] {
        let pool = pool(14);
        let tokens = prompt(1, 4 * BLOCK_TOKENS + 1);
        drop(admit(&pool, 1, &tokens));
        let hashes = pool.prefix_cache().unwrap().hashes(&PrefixKeys::new(), &tokens).unwrap();
        let held = pool.allocate(AllocRequest::new(8)).unwrap();
        let request = |id| AdmitRequest::new(SequenceId(id), &tokens).headroom(2 * BLOCK_TOKENS);
        let requests = [request(4), request(5), request(6)];
        let admitted = |number: usize| Box::pin(pool.admit_async(&requests[number]).into_future());
        let mut context = Context::from_waker(Waker::noop());
        begin(&pool, 2 * (1 - at_admission));
        // Polled before the change; created before it and not polled; created after it.
        let mut waiting = [admitted(0), admitted(1)];
        assert!(waiting[0].as_mut().poll(&mut context).is_pending());
        begin(&pool, at_admission);
        drop(held);
        for mut waiting in waiting.into_iter().chain([admitted(2)]) {
            assert_eq!(pool.has_cached(&hashes), [true; 4], "they could be found");
            let Poll::Ready(sequence) = waiting.as_mut().poll(&mut context) else { panic!("there is room") };
            let sequence = sequence.unwrap();
            assert_eq!((sequence.len(), sequence.weights().unwrap().model.0), (cached, at_admission));
        }
        pool.audit().unwrap();
    }
}

/// A retention that ends while a request waits: it cannot be hashed again, and must find nothing.
#[test]
fn who_cannot_be_hashed_again_finds_nothing() {
    use kvpool::prefix::{PrefixConfig, policy::Millis};
    use std::sync::Arc;
    let clock = Arc::new(AtomicU64::new(0));
    let now = clock.clone();
    let config = PrefixConfig::new().clock(move || Millis(now.load(Relaxed)));
    let pool = kvpool_testkit::prompts::pool_of(12, config);
    let tokens = prompt(1, 4 * BLOCK_TOKENS + 1);
    drop(admit(&pool, 1, &tokens));
    let held = admit(&pool, 2, &prompt(2, 6 * BLOCK_TOKENS)).0;
    let request = AdmitRequest::new(SequenceId(3), &tokens).headroom(4 * BLOCK_TOKENS);
    let request = request.keep_until(Millis(10));
    let mut waiting = Box::pin(pool.admit_async(&request).into_future());
    let mut context = Context::from_waker(Waker::noop());
    assert!(waiting.as_mut().poll(&mut context).is_pending());
    begin(&pool, 1);
    clock.store(20, Relaxed);
    drop(held);
    let Poll::Ready(sequence) = waiting.as_mut().poll(&mut context) else { panic!("there is room") };
    let mut sequence = sequence.unwrap();
    assert_eq!(sequence.len(), 0);
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, tokens.len()).unwrap();
    batch.finish();
    drop((sequence, waiting));
    assert_eq!(pool.sequence(SequenceId(4)).tokens(&tokens).unwrap().len(), 0);
    pool.audit().unwrap();
}

#[test]
fn an_adapter_has_versions_of_its_own() {
    let pool = pool(200);
    let tokens = prompt(1, 41);
    let compute = |adapter: Option<&[u8]>| {
        let keys = adapter.map_or(PrefixKeys::new(), |adapter| PrefixKeys::new().adapter(adapter));
        let mut sequence = pool.sequence(SequenceId(1)).keys(keys).tokens(&tokens).unwrap();
        let found = sequence.len();
        let mut batch = pool.begin_batch();
        batch.append(&mut sequence, tokens.len() - found).unwrap();
        batch.finish();
        found
    };
    let all = [None, Some(&b"one"[..]), Some(&b"two"[..])];
    assert_eq!(all.map(compute), [0; 3]);
    assert_eq!(pool.begin_adapter_version(b"one", WeightsVersion(5)).unwrap(), WeightsVersion(0));
    assert_eq!(all.map(compute), [40, 0, 40]);
    begin(&pool, 1);
    assert_eq!(all.map(compute), [0; 3]);
    pool.begin_adapter_version(b"two", WeightsVersion(5)).unwrap();
    assert_eq!(all.map(compute), [40, 40, 0]);
    begin(&pool, 0);
    assert_eq!(all.map(compute), [40, 40, 0]);
    assert_eq!(pool.begin_adapter_version(b"one", WeightsVersion(0)).unwrap(), WeightsVersion(5));
    pool.begin_adapter_version(b"two", WeightsVersion(0)).unwrap();
    assert_eq!(all.map(compute), [40; 3]);
    pool.audit().unwrap();
}

/// A batch that is older than the last change of an adapter has an unknown version.
#[test]
fn a_batch_before_a_change_of_an_adapter_registers_nothing() {
    let pool = pool(100);
    let tokens = prompt(1, 41);
    let keys = PrefixKeys::new().adapter(b"one");
    pool.begin_adapter_version(b"one", WeightsVersion(1)).unwrap();
    let mut batch = pool.begin_batch();
    pool.begin_adapter_version(b"one", WeightsVersion(u64::MAX)).unwrap();
    let mut sequence = pool.sequence(SequenceId(1)).keys(keys).tokens(&tokens).unwrap();
    batch.append(&mut sequence, tokens.len()).unwrap();
    batch.finish();
    let adapters: Vec<_> = sequence.versions().map(|range| (range.from, range.adapter)).collect();
    assert_eq!(adapters, [(0, None)]);
    assert_eq!(sequence.weights().unwrap().adapter, WeightsVersion(u64::MAX));
    drop(sequence);
    for version in [u64::MAX, 1, 0] {
        pool.begin_adapter_version(b"one", WeightsVersion(version)).unwrap();
        assert_eq!(pool.sequence(SequenceId(1)).keys(keys).tokens(&tokens).unwrap().len(), 0);
    }
}

#[test]
fn ranges_follow_cuts_and_forks() {
    let pool = pool(100);
    let tokens = prompt(1, 100);
    let mut sequence = pool.sequence(SequenceId(1)).tokens(&tokens).unwrap();
    assert_eq!(versions(&sequence), []);
    let append = |sequence: &mut Sequence, version, count: usize| {
        begin(&pool, version);
        let mut batch = pool.begin_batch();
        batch.append(sequence, kvpool::Tokens::Announced(count)).unwrap();
        batch.finish();
    };
    append(&mut sequence, 0, 10);
    append(&mut sequence, 3, 10);
    append(&mut sequence, 3, 1);
    append(&mut sequence, 0, 5);
    assert_eq!(versions(&sequence), [(0, 0), (10, 3), (21, 0)]);
    let fork = sequence.fork(SequenceId(2)).unwrap();
    sequence.truncate(21).unwrap();
    assert_eq!(versions(&sequence), [(0, 0), (10, 3)]);
    sequence.truncate(7).unwrap();
    assert_eq!(versions(&sequence), [(0, 0)]);
    sequence.announce(&tokens[7..]).unwrap();
    // A batch of the version that was cut off.
    append(&mut sequence, 0, 2);
    append(&mut sequence, 3, 1);
    assert_eq!(versions(&sequence), [(0, 0), (9, 3)]);
    sequence.truncate(0).unwrap();
    sequence.announce(&tokens).unwrap();
    append(&mut sequence, 3, 4);
    assert_eq!((versions(&sequence), versions(&fork)), (vec![(0, 3)], vec![(0, 0), (10, 3), (21, 0)]));
    // It was abandoned: what a later batch computes is of that one.
    begin(&pool, 4);
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, kvpool::Tokens::Announced(3)).unwrap();
    drop(batch);
    assert_eq!(versions(&sequence), [(0, 3)]);
    append(&mut sequence, 3, 3);
    assert_eq!(versions(&sequence), [(0, 3)]);
    append(&mut sequence, 4, 3);
    assert_eq!(versions(&sequence), [(0, 3), (7, 4)]);
}

/// A sequence goes on in a pool of another version, and its blocks stay those of its own.
#[tokio::test]
async fn a_migrated_sequence_keeps_its_versions() {
    let (here, there) = kv::pools(100);
    let tokens = kv::prompt(1, 42);
    begin(&here, 1);
    begin(&there, 2);
    let sequence = kv::admit(&here, 1, &tokens).unwrap();
    let (mut moved, _) = here.migrate(sequence, &there).await.unwrap();
    assert_eq!(versions(&moved), [(0, 1)]);
    let found =
        |pool: &Pool| pool.sequence(SequenceId(9)).tokens(&[&tokens[..], &[1; 9]].concat()).unwrap().len();
    assert_eq!([found(&here), found(&there)], [40, 0]);
    let mut batch = there.begin_batch();
    batch.append(&mut moved, &[1; 9]).unwrap();
    batch.finish();
    assert_eq!(versions(&moved), [(0, 1), (42, 2)]);
    assert_eq!(found(&there), 0);
    begin(&there, 1);
    assert_eq!(found(&there), 40, "what arrived is of the first version");
    // Back, with both versions, to a pool of the second: nothing more is found.
    begin(&here, 2);
    let (mut back, _) = there.migrate(moved, &here).await.unwrap();
    let mut batch = here.begin_batch();
    batch.append(&mut back, &[2; 9]).unwrap();
    batch.finish();
    assert_eq!(versions(&back), [(0, 1), (42, 2)]);
    drop(back);
    assert_eq!(found(&here), 0);
    begin(&here, 1);
    assert_eq!(found(&here), 40);
    // Neither offloads nor copies on demand bring blocks of another version.
    let report = here.offload(&there, 100).await.unwrap();
    assert!(report.evicted_blocks > 0);
    begin(&there, 3);
    begin(&here, 3);
    let back = here.bring_back(&there, &PrefixKeys::new(), &tokens).await.unwrap();
    assert_eq!((back.cached_blocks, found(&here), found(&there)), (0, 0, 0));
    begin(&here, 1);
    let back = here.bring_back(&there, &PrefixKeys::new(), &tokens).await.unwrap();
    assert_eq!((back.cached_blocks, found(&here), found(&there)), (10, 40, 0));
    [here, there].iter().for_each(kv::is_idle);
}

#[test]
fn bad_input_is_refused() {
    let plain = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(10).build().unwrap();
    assert_eq!(plain.begin_version(WeightsVersion(1)), Err(PrefixError::NoCache));
    assert_eq!(plain.begin_adapter_version(b"one", WeightsVersion(1)), Err(PrefixError::NoCache));
    let pool = pool(10);
    let refused = pool.begin_adapter_version(b"", WeightsVersion(1)).unwrap_err();
    assert!(matches!(&refused, PrefixError::Invalid(Invalid { .. })), "{refused}");
    assert!(refused.to_string().contains("adapter"), "{refused}");
}

/// Requests of many threads beside changes. Each block says with which version it was computed.
#[test]
fn threads_beside_changes() {
    let pool = pool(400);
    let blocks: Vec<AtomicU64> = (0..401).map(|_| AtomicU64::new(u64::MAX)).collect();
    let rounds = if cfg!(debug_assertions) { 1_000 } else { 20_000 };
    let (hits, is_done) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let work = |thread: u64| {
            let (pool, blocks, hits) = (&pool, &blocks, &hits);
            move || {
                for round in 0..rounds {
                    let tokens = prompt(round % 5, 41);
                    let Ok(mut sequence) = pool.sequence(SequenceId(thread)).tokens(&tokens) else {
                        continue;
                    };
                    let (cached, own) = (sequence.len(), sequence.weights().unwrap().model.0);
                    for id in sequence.blocks() {
                        assert_eq!(blocks[id.index()].load(Relaxed), own, "in a hit of {cached} tokens");
                    }
                    hits.fetch_add(u64::from(cached > 0), Relaxed);
                    let mut batch = pool.begin_batch();
                    // A thread that is stopped inside its batch may hold back all freed blocks.
                    if batch.append(&mut sequence, tokens.len() - cached).is_err() {
                        continue;
                    }
                    let is_pure = versions(&sequence) == [(0, own)];
                    for id in sequence.blocks().skip(cached / BLOCK_TOKENS) {
                        blocks[id.index()].store(if is_pure { own } else { u64::MAX }, Relaxed);
                    }
                    batch.finish();
                }
            }
        };
        let workers = [0, 1].map(|thread| scope.spawn(work(thread)));
        scope.spawn(|| {
            for change in 0.. {
                if is_done.load(Relaxed) {
                    break;
                }
                begin(&pool, change % 3);
                thread::yield_now();
            }
        });
        let ended = workers.map(|worker| worker.join());
        is_done.store(true, Relaxed);
        ended.into_iter().for_each(|ended| ended.unwrap());
    });
    assert!(hits.into_inner() > 10, "nothing was hit");
    pool.audit().unwrap();
}
