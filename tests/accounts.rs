//! Each reference has an owner: an audit accounts for those of every kind of owner, and finds those
//! that no owner will release.
#![cfg(not(kvpool_loom))]

use std::future::Future;
use std::mem::forget;
use std::task::{Context, Poll, Waker};

use kvpool::block::Blocks;
use kvpool::prefix::{HashKey, PrefixConfig, PrefixKeys};
use kvpool::storage::KvLayout;
use kvpool::{AdmitRequest, AllocRequest, AuditError, BlockId, Pool, Priority, SequenceId, Unaccounted};
use kvpool_testkit::prompts::{admit, pool_of, prompt};
use kvpool_testkit::steps::append;

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

/// Copies on write that the batch keeps, reservations, and requests in the queue.
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
    let rest = pool.allocate(AllocRequest::new(pool.free_blocks())).unwrap();
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
