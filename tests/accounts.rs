//! Each reference has an owner: an audit accounts for those of every kind of owner, and finds those
//! that no owner will release.
#![cfg(not(kvpool_loom))]

use std::future::Future;
use std::mem::forget;
use std::pin::pin;
use std::sync::Mutex;
use std::task::{Context, Poll, Waker};
use std::thread;

use kvpool::block::Blocks;
use kvpool::prefix::{HashKey, PrefixConfig, PrefixKeys};
use kvpool::storage::KvLayout;
use kvpool::{
    AdmitRequest, AllocRequest, AuditError, BlockId, FrameGroup, FramePool, Lease, Pool, Priority, Sequence,
    SequenceId, Unaccounted,
};
use kvpool_testkit::prompts::{admit, pool_of, prompt};

/// Pools that agree on hashes.
fn pool(blocks: usize) -> Pool {
    pool_of(blocks, PrefixConfig::new().key(HashKey::from_bytes([7; 32])))
}

/// What a sequence does with blocks, without a sequence.
fn allocate_listed(blocks: &Blocks, request: &AllocRequest) -> Option<BlockId> {
    let mut taken = None;
    blocks.allocate_listed(request, None, &mut |id| taken = Some(id)).ok().and(taken)
}

fn share_listed(blocks: &Blocks, ids: &[BlockId]) {
    blocks.share_listed(ids).unwrap();
}

fn release_listed(blocks: &Blocks, ids: &[BlockId]) {
    blocks.release_listed(ids);
}

/// A pool that copies nothing: the engine does, until the batch ends.
fn unstored(blocks: usize) -> Pool {
    let builder = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(blocks).without_storage();
    builder.prefix_cache(PrefixConfig::new()).build().unwrap()
}

fn append(pool: &Pool, sequence: &mut Sequence, tokens: usize) {
    let mut batch = pool.begin_batch();
    batch.append(sequence, tokens).unwrap();
    batch.finish();
}

fn sound(pool: &Pool) {
    pool.audit().unwrap();
    assert_eq!(pool.owners().unaccounted, None);
}

/// Returns what an audit finds, which the report of the owners repeats.
fn found(pool: &Pool) -> Unaccounted {
    let Err(AuditError::Unaccounted(found)) = pool.audit() else { panic!("{:?}", pool.audit()) };
    assert_eq!(pool.owners().unaccounted.as_ref(), Some(&found));
    found
}

/// Checks that an audit finds one more reference on a block, and only while it is there.
fn is_found(pool: &Pool, block: BlockId) {
    sound(pool);
    share_listed(pool.blocks(), &[block]);
    let lost = found(pool);
    assert_eq!((lost.references, &lost.blocks[..]), (1, &[block][..]), "{lost}");
    let owners = pool.owners();
    assert!(owners.leases.iter().all(|owner| !owner.blocks.contains(&block)));
    release_listed(pool.blocks(), &[block]);
    sound(pool);
}

/// The reference of a lookup that no sequence adopted: the blocks are cached, and never evicted.
#[test]
fn a_cached_block_without_an_owner() {
    let pool = pool(20);
    drop(admit(&pool, 1, &prompt(1, 9)));
    let (sequence, cached) = admit(&pool, 2, &prompt(1, 9));
    assert_eq!(cached, 8);
    let blocks: Vec<_> = sequence.blocks().take(2).collect();
    share_listed(pool.blocks(), &blocks);
    drop(sequence);
    let lost = found(&pool);
    assert_eq!((lost.references, lost.blocks), (2, blocks));
    let owners = pool.owners();
    assert!(owners.leases.is_empty() && owners.blocks() == 0, "{owners:?}");
    let message = pool.audit().unwrap_err().to_string();
    assert!(message.starts_with("owners account for all but 2 references; wrong blocks: 2, ["), "{message}");
}

/// Extra references on the blocks of owners that list them.
#[test]
fn more_references_than_owners_that_list_their_blocks() {
    let here = pool(60);
    let (sequence, _) = admit(&here, 1, &prompt(1, 18));
    let first = sequence.blocks().next().unwrap();
    is_found(&here, first);
    let fork = sequence.fork(SequenceId(2)).unwrap();
    is_found(&here, first);
    let pinned = here.pin_prefix(&PrefixKeys::new(), &prompt(1, 18)).unwrap();
    is_found(&here, first);
    drop((sequence, fork));
    is_found(&here, first);
    // Whoever forgets it has it for good, and is an owner.
    forget(pinned);
    is_found(&here, first);

    let there = pool(60);
    let (sequence, _) = admit(&here, 3, &prompt(3, 18));
    let moved = sequence.blocks().nth(1).unwrap();
    let copy = here.export_copy(&sequence).unwrap();
    is_found(&here, moved);
    drop(copy);
    let export = here.export(sequence).unwrap();
    is_found(&here, moved);
    let manifest = export.manifest().unwrap();
    let mut import = there.import(&manifest).unwrap();
    is_found(&there, import.blocks()[2]);
    let (read, written) = (export.piece(&[0, 1]).unwrap(), import.piece(&[2]).unwrap());
    let block = import.blocks()[2];
    drop((export, import));
    // Only the transport holds them.
    is_found(&here, moved);
    is_found(&there, block);
    drop((read, written));
    sound(&here);
    sound(&there);

    // Evictable blocks on their way.
    drop(admit(&here, 4, &prompt(4, 18)));
    let cold = here.export_cached(3).unwrap();
    is_found(&here, cold.blocks()[0]);
    let import = there.import(&cold.manifest().unwrap()).unwrap();
    sound(&there);
    forget((cold, import));
    sound(&here);
    sound(&there);
}

/// Blocks of lists that no list has.
#[test]
fn blocks_that_no_owner_lists() {
    let pool = unstored(40);
    let request = AllocRequest::new(1).sequence(SequenceId(9));
    let lost = allocate_listed(pool.blocks(), &request).unwrap();
    let alone = found(&pool);
    assert_eq!((alone.references, &alone.candidates[..]), (1, &[lost][..]));

    // Beside owners of blocks that look alike.
    let lease = pool.allocate(AllocRequest::new(3)).unwrap();
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    sequence.reserve(9).unwrap();
    let shared = pool.allocate(AllocRequest::new(2)).unwrap();
    let more = shared.share().unwrap();
    let among = found(&pool);
    assert_eq!((among.references, among.blocks.len(), among.candidates.len()), (1, 0, 9), "{among}");
    assert!(
        among.candidates.contains(&lost) && lease.blocks().iter().all(|id| among.candidates.contains(id))
    );
    release_listed(pool.blocks(), &[lost]);
    sound(&pool);
    drop((shared, more));
    sound(&pool);
    // A lease's block may have any number of references: the number is wrong, and it is a
    // candidate.
    share_listed(pool.blocks(), &lease.blocks()[..1]);
    let lost = found(&pool);
    assert_eq!((lost.references, lost.blocks.len()), (1, 0), "{lost}");
    assert!(lost.candidates.contains(&lease.blocks()[0]));
    release_listed(pool.blocks(), &lease.blocks()[..1]);
    sound(&pool);
}

/// A user who forgets a lease owns its blocks: that is no fault of the pool, and is reported as
/// what it is.
#[test]
fn forgotten_leases_are_leases() {
    let pool = pool(60);
    forget(pool.allocate(AllocRequest::new(3)).unwrap());
    let mut lease = pool.allocate_owned(AllocRequest::new(9)).unwrap();
    forget(lease.split_off(5));
    forget(lease.share().unwrap());
    drop(lease);
    sound(&pool);
    assert_eq!(pool.owners().leases.iter().map(|owner| owner.blocks.len()).sum::<usize>(), 3 + 9);
}

/// Copies on write that the batch keeps, reservations, and requests in line.
#[test]
fn owners_that_do_not_say_which() {
    let pool = unstored(8);
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    append(&pool, &mut sequence, 6);
    let mut fork = sequence.fork(SequenceId(2)).unwrap();
    let mut batch = pool.begin_batch();
    let copied = batch.append(&mut fork, 1).unwrap().copied.unwrap();
    sound(&pool);
    drop(sequence);
    sound(&pool);
    share_listed(pool.blocks(), &[copied.from]);
    let lost = found(&pool);
    assert_eq!((lost.references, lost.blocks.len()), (1, 0), "a source of a copy is a candidate");
    assert!(lost.candidates.contains(&copied.from));
    batch.finish();
    assert_eq!(found(&pool).references, 1);
    release_listed(pool.blocks(), &[copied.from]);
    fork.reserve(8).unwrap();
    sound(&pool);

    // Requests of each kind wait for blocks, with and without a prefix to keep.
    let rest = pool.allocate(AllocRequest::new(pool.counts().free())).unwrap();
    let long = prompt(1, 12);
    let request = AdmitRequest::new(SequenceId(3), &long);
    let mut lease =
        Box::pin(pool.allocate_async(AllocRequest::new(2).priority(Priority::High)).into_future());
    let mut admitted = Box::pin(pool.admit_async(&request).into_future());
    let mut more = Box::pin(pool.reserve_async(&mut fork, 20).into_future());
    let mut context = Context::from_waker(Waker::noop());
    assert!(lease.as_mut().poll(&mut context).is_pending());
    assert!(admitted.as_mut().poll(&mut context).is_pending());
    assert!(more.as_mut().poll(&mut context).is_pending());
    sound(&pool);
    drop(rest);
    let Poll::Ready(Ok(lease)) = lease.as_mut().poll(&mut context) else { panic!("blocks are free") };
    sound(&pool);
    drop((admitted, more));
    sound(&pool);
    forget(lease);
    sound(&pool);
}

/// The reverse: an owner whose reference was released by another.
#[test]
fn references_that_do_not_exist() {
    let here = pool(40);
    let (sequence, _) = admit(&here, 1, &prompt(1, 9));
    let last = sequence.blocks().last().unwrap();
    release_listed(here.blocks(), &[last]);
    let missing = found(&here);
    assert_eq!((missing.references, &missing.blocks[..]), (-1, &[last][..]));
    forget(sequence);

    let other = pool(40);
    let lease = other.allocate(AllocRequest::new(2)).unwrap();
    release_listed(other.blocks(), &lease.blocks()[..1]);
    assert_eq!((found(&other).references, found(&other).blocks.len()), (-1, 0));
    forget(lease);
}

/// Each step by which references change hands keeps the counts, whoever takes it.
#[test]
fn every_step_is_counted() {
    for is_cached in [true, false] {
        let layout = KvLayout::named("tiny").unwrap();
        let builder = Pool::builder(layout).blocks(300).magazine_blocks(4);
        let here =
            if is_cached { builder.prefix_cache(PrefixConfig::new()) } else { builder }.build().unwrap();
        for blocks in [1, 3, 16, 17, 90] {
            drop(here.allocate(AllocRequest::new(blocks)).unwrap());
            sound(&here);
            let lease = here.allocate(AllocRequest::new(blocks)).unwrap();
            let mut shared = lease.share().unwrap();
            sound(&here);
            drop(shared.split_off(blocks / 2));
            sound(&here);
            drop(lease);
            sound(&here);
            drop(shared);
            sound(&here);
            let mut lease = here.allocate(AllocRequest::new(blocks)).unwrap();
            let elsewhere = lease.split_off(blocks / 2).into_owned();
            thread::scope(|scope| scope.spawn(move || drop(elsewhere)).join().unwrap());
            lease.seal(..);
            let shared = lease.share().unwrap().into_owned();
            drop(lease);
            thread::scope(|scope| scope.spawn(move || drop(shared)).join().unwrap());
            sound(&here);
            let mut sequence = here.sequence(SequenceId(1)).open().unwrap();
            sequence.reserve(blocks).unwrap();
            append(&here, &mut sequence, 4 * blocks - 2);
            let mut fork = sequence.fork(SequenceId(2)).unwrap();
            append(&here, &mut fork, 3);
            sound(&here);
            sequence.truncate(blocks).unwrap();
            sequence.reserve(40).unwrap();
            sequence.release_reservation();
            sound(&here);
            drop(sequence);
            thread::scope(|scope| scope.spawn(move || drop(fork)).join().unwrap());
            sound(&here);
        }
    }
}

/// References up to the maximum, and the way back from a refusal.
#[test]
fn refusals_count_nothing() {
    let pool = pool(20);
    let lease = pool.allocate(AllocRequest::new(3)).unwrap();
    let mut shares: Vec<_> = std::iter::from_fn(|| lease.share().ok()).collect();
    assert_eq!(shares.len(), 8_190);
    // The first block has room for one more, the others do not.
    let rest = shares[0].split_off(1);
    drop(shares.swap_remove(0));
    assert!(lease.share().is_err());
    sound(&pool);
    drop((lease, shares, rest));
    let (sequence, _) = admit(&pool, 1, &prompt(1, 9));
    let last = sequence.blocks().last().unwrap();
    (0..8_190).for_each(|_| share_listed(pool.blocks(), &[last]));
    assert!(sequence.fork(SequenceId(2)).is_err());
    (0..8_190).for_each(|_| release_listed(pool.blocks(), &[last]));
    sound(&pool);
}

/// The engine of a frame pool is the owner of its references.
#[test]
fn frames_are_counted() {
    let pool = FramePool::builder(200).build().unwrap();
    let mut random = fastrand::Rng::with_seed(7);
    let mut owned: Vec<u32> = Vec::new();
    let keys: Vec<_> = (0..40_u32).map(|key| pool.key(FrameGroup(0), &key.to_le_bytes()).unwrap()).collect();
    for _ in 0..3_000 {
        match random.u32(..8) {
            0 | 1 => {
                let _ = pool.allocate(AllocRequest::new(random.usize(1..40)), &mut owned);
            }
            2 if !owned.is_empty() => {
                let shared = owned[random.usize(..owned.len())];
                pool.share(&[shared]).unwrap();
                owned.push(shared);
            }
            3 if !owned.is_empty() => {
                let named = owned[random.usize(..owned.len())];
                pool.register(&[(named, keys[random.usize(..keys.len())])]).unwrap();
            }
            4 => {
                let from = random.usize(..keys.len());
                pool.hit(&keys[from..keys.len().min(from + 3)], &mut owned).unwrap();
            }
            5 if !owned.is_empty() => {
                pool.uncache(&[owned[random.usize(..owned.len())]]).unwrap();
            }
            6 => {
                pool.unregister(keys[random.usize(..keys.len())]).unwrap();
            }
            _ => {
                random.shuffle(&mut owned);
                let freed = owned.split_off(owned.len() - random.usize(..=owned.len().min(30)));
                pool.free(&freed).unwrap();
            }
        }
        pool.audit().unwrap();
    }
}

/// Threads that allocate, share, free each other's blocks, grow sequences, drop futures, move
/// blocks and end: afterwards, every reference has an owner, and one that has none is found.
#[test]
fn threads_leave_every_reference_with_an_owner() {
    let rounds = if cfg!(debug_assertions) { 12 } else { 60 };
    let here = Pool::builder(KvLayout::named("tiny").unwrap())
        .blocks(600)
        .magazine_blocks(8)
        .threads(4)
        .prefix_cache(PrefixConfig::new())
        .build()
        .unwrap();
    let there = pool(600);
    let leases = Mutex::new(Vec::new());
    for round in 0..rounds {
        thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|number| {
                    let (here, there, leases) = (&here, &there, &leases);
                    scope.spawn(move || work(round * 4 + number, here, there, leases))
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        sound(&here);
        sound(&there);
        let lost = allocate_listed(here.blocks(), &AllocRequest::new(1)).unwrap();
        assert_eq!(found(&here).references, 1);
        release_listed(here.blocks(), &[lost]);
    }
}

fn work(number: u64, here: &Pool, there: &Pool, leases: &Mutex<Vec<Lease<'static>>>) {
    let mut random = fastrand::Rng::with_seed(number);
    let mut sequences = Vec::new();
    for step in 0..300 {
        match random.u32(..12) {
            0 | 1 => {
                if let Ok(lease) = here.allocate_owned(AllocRequest::new(random.usize(1..20))) {
                    leases.lock().unwrap().push(lease);
                }
            }
            2 | 3 => {
                let dropped = leases.lock().unwrap().pop();
                drop(dropped);
            }
            4 => {
                let mut leases = leases.lock().unwrap();
                if let Some(lease) = leases.last() {
                    let shared = lease.share().unwrap();
                    leases.push(shared);
                }
            }
            5 => {
                let freed: Vec<_> = {
                    let mut all = leases.lock().unwrap();
                    let keep = all.len() - random.usize(..=all.len().min(4));
                    all.drain(keep..).collect()
                };
                drop(freed);
            }
            6 | 7 => {
                let prompt = prompt(random.u32(..4), random.usize(1..60));
                let request = AdmitRequest::new(SequenceId(1_000 * number + step), &prompt);
                if let Ok(mut sequence) = here.admit(&request) {
                    let rest = prompt.len() - sequence.len();
                    append(here, &mut sequence, rest);
                    sequences.push(sequence);
                }
            }
            8 => {
                if let Some(sequence) = sequences.pop() {
                    drop(sequence);
                }
            }
            9 => {
                let Some(sequence) = sequences.last() else { continue };
                if let Ok(mut fork) = sequence.fork(SequenceId(1_000 * number + step)) {
                    let mut step = here.begin_batch();
                    let _ = step.append(&mut fork, random.usize(1..9));
                    step.finish();
                    sequences.push(fork);
                }
            }
            10 => {
                let mut waits = pin!(here.allocate_async(AllocRequest::new(500)).into_future());
                let _ = waits.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            }
            _ if random.bool() => {
                let _ = pollster::block_on(here.defragment());
            }
            _ => {
                let Some(sequence) = sequences.pop() else { continue };
                match pollster::block_on(here.migrate(sequence, there).until(std::time::Instant::now())) {
                    Ok(_) => {}
                    Err(error) => drop(error.sequence),
                }
            }
        }
    }
}
