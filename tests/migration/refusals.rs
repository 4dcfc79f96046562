//! Refused migrations: the error says what and where, and nothing has changed.

use kvpool_testkit::steps::exhausted;
use std::time::Instant;

use kvpool::prefix::{PrefixConfig, PrefixKeys};
use kvpool::storage::KvLayout;
use kvpool::{
    AllocError, AllocRequest, Invalid, Pool, Sequence, SequenceError, SequenceId, StorageError, TransferError,
};

use super::kv::{admit, builder, check, config, extend, is_idle, plain, pool, pools, prompt};

/// Checks that a sequence is refused, and unchanged.
async fn refused(from: &Pool, sequence: Sequence, to: &Pool, tokens: &[u32]) -> (TransferError, Sequence) {
    let before = [from, to].map(|pool| (pool.available_blocks(), pool.sequence_count()));
    let error = from.migrate(sequence, to).until(Instant::now()).await.unwrap_err();
    assert_eq!(before, [from, to].map(|pool| (pool.available_blocks(), pool.sequence_count())), "{error}");
    assert!(error.to_string().contains(&error.sequence.id().to_string()), "{error}");
    let sequence = *error.sequence;
    check(from, &sequence, tokens);
    for pool in [from, to] {
        pool.audit().unwrap();
    }
    (error.error, sequence)
}

fn same_pool(pool: &Pool) -> TransferError {
    Invalid::new("target", format_args!("{}, the source", pool.tag()), "another pool").into()
}

#[tokio::test]
async fn the_same_pool() {
    let here = pool(plain(), 20);
    let tokens = prompt(1, 21);
    let sequence = admit(&here, 7, &tokens).unwrap();
    let (error, sequence) = refused(&here, sequence, &here.clone(), &tokens).await;
    assert_eq!(error, same_pool(&here));
    drop(sequence);
    let error = here.offload(&here, 1).await.unwrap_err();
    assert_eq!(error, same_pool(&here));
    let error = here.bring_back(&here, &PrefixKeys::new(), &tokens).await.unwrap_err();
    assert_eq!(error, same_pool(&here));
    is_idle(&here);
}

#[tokio::test]
async fn a_foreign_sequence() {
    let (from, to) = pools(20);
    let owner = pool(plain(), 20);
    let tokens = prompt(1, 21);
    let sequence = admit(&owner, 7, &tokens).unwrap();
    let error = from.migrate(sequence, &to).await.unwrap_err();
    assert_eq!(error.error, TransferError::ForeignSequence { id: SequenceId(7), pool: from.tag() });
    check(&owner, &error.sequence, &tokens);
    drop(error);
    [from, to, owner].iter().for_each(is_idle);
}

#[tokio::test]
async fn an_id_that_is_open_there() {
    let (from, to) = pools(20);
    let tokens = prompt(1, 21);
    let open = to.sequence(SequenceId(7)).open().unwrap();
    let sequence = admit(&from, 7, &tokens).unwrap();
    let (error, sequence) = refused(&from, sequence, &to, &tokens).await;
    assert_eq!(error, TransferError::Sequence(SequenceError::AlreadyOpen { id: SequenceId(7) }));
    drop(open);
    drop(from.migrate(sequence, &to).await.unwrap());
    [from, to].iter().for_each(is_idle);
}

/// Refused while the batch that wrote to it is in flight; no other batch is an obstacle.
#[tokio::test]
async fn a_sequence_that_is_being_written() {
    let (from, to) = pools(20);
    let tokens = prompt(1, 21);
    let mut sequence = from.sequence(SequenceId(7)).tokens(&tokens).unwrap();
    let older = from.begin_batch();
    let mut batch = from.begin_batch();
    let ticket = batch.ticket();
    extend(&mut batch, &mut sequence, &tokens).unwrap();
    let (error, sequence) = refused(&from, sequence, &to, &tokens).await;
    assert_eq!(error, TransferError::BeingWritten { id: SequenceId(7), batch: ticket });
    batch.finish();
    let later = from.begin_batch();
    drop(from.migrate(sequence, &to).await.unwrap());
    drop((older, later));
    [from, to].iter().for_each(is_idle);
}

/// A batch that wrote is known, also if an older one wrote after it and has ended.
#[tokio::test]
async fn a_sequence_that_two_batches_wrote_in_turn() {
    let (from, to) = pools(20);
    let tokens = prompt(1, 8);
    let mut sequence = from.sequence(SequenceId(7)).tokens(&tokens).unwrap();
    let (mut older, mut newer) = (from.begin_batch(), from.begin_batch());
    let ticket = newer.ticket();
    extend(&mut newer, &mut sequence, &tokens[..4]).unwrap();
    extend(&mut older, &mut sequence, &tokens[4..]).unwrap();
    older.finish();
    let (error, sequence) = refused(&from, sequence, &to, &tokens).await;
    assert_eq!(error, TransferError::BeingWritten { id: SequenceId(7), batch: ticket });
    newer.finish();
    drop(from.migrate(sequence, &to).await.unwrap());
    [from, to].iter().for_each(is_idle);
}

#[tokio::test]
async fn another_form() {
    let from = pool(plain(), 20);
    let tokens = prompt(1, 21);
    let sequence = admit(&from, 7, &tokens).unwrap();
    let to =
        Pool::builder(KvLayout::named("tiny").unwrap()).blocks(20).prefix_cache(config()).build().unwrap();
    let error = from.migrate(sequence, &to).await.unwrap_err();
    let TransferError::Storage(StorageError::OtherForm { from: ours, to: theirs }) = &error.error else {
        panic!("{error}")
    };
    assert_ne!(ours, theirs);
    check(&from, &error.sequence, &tokens);
    drop(error);
    let error = from.offload(&to, 5).await.unwrap_err();
    assert!(matches!(error, TransferError::Storage(StorageError::OtherForm { .. })), "{error}");
    [from, to].iter().for_each(is_idle);
}

#[tokio::test]
async fn no_bytes_on_either_side() {
    let bytes = pool(plain(), 20);
    let none = builder(plain(), 20).prefix_cache(config()).without_storage().build().unwrap();
    for (from, to) in [(&bytes, &none), (&none, &bytes)] {
        let sequence = from.sequence(SequenceId(7)).open().unwrap();
        let error = from.migrate(sequence, to).await.unwrap_err();
        assert_eq!(error.error, TransferError::NoStorage { pool: none.tag() });
        assert_eq!(from.offload(to, 3).await.unwrap_err(), TransferError::NoStorage { pool: none.tag() });
    }
}

#[tokio::test]
async fn no_room_in_the_target() {
    let (from, to) = pools(20);
    let tokens = prompt(1, 21);
    let sequence = admit(&from, 7, &tokens).unwrap();
    let held = to.allocate(AllocRequest::new(15)).unwrap();
    let (error, sequence) = refused(&from, sequence, &to, &tokens).await;
    let want =
        AllocError::Deadline { asked: 6, free: 5, retired: 0, oldest_batch: None, head: None, turn: None };
    assert_eq!(error, TransferError::Alloc(want));
    let error = from.replicate(&sequence, &to).await.unwrap_err();
    let want = exhausted(6, 5);
    assert_eq!(error, TransferError::Alloc(want), "a copy never waits");
    let rest = to.allocate(AllocRequest::new(5)).unwrap();
    drop(sequence);
    let error = from.offload(&to, 5).await.unwrap_err();
    assert!(matches!(error, TransferError::Alloc(AllocError::Exhausted { .. })), "{error}");
    assert_eq!(super::kv::cached(&from, &tokens), 5, "the blocks are still cached here");
    drop((held, rest));
    [from, to].iter().for_each(is_idle);
}

#[tokio::test]
async fn caches_that_never_find_each_others_blocks() {
    let here = pool(plain(), 20);
    let random = builder(plain(), 20).prefix_cache(PrefixConfig::new()).build().unwrap();
    let none = builder(plain(), 20).build().unwrap();
    let keys = PrefixKeys::new();
    for error in [
        here.offload(&random, 1).await.unwrap_err(),
        random.bring_back(&here, &keys, &[1; 9]).await.unwrap_err(),
    ] {
        assert!(matches!(&error, TransferError::Invalid(invalid) if invalid.what == "hashing"), "{error}");
    }
    let no_cache = TransferError::NoCache { pool: none.tag() };
    assert_eq!(here.offload(&none, 1).await.unwrap_err(), no_cache);
    assert_eq!(none.offload(&here, 1).await.unwrap_err(), no_cache);
    assert_eq!(none.bring_back(&here, &keys, &[1; 9]).await.unwrap_err(), no_cache);
}

#[tokio::test]
async fn empty_and_invalid_requests() {
    let (here, there) = pools(20);
    assert_eq!(here.offload(&there, 0).await.unwrap_err(), TransferError::Alloc(AllocError::Zero));
    assert_eq!(here.offload(&there, usize::MAX).await.unwrap().carried.blocks, 0, "no block is cached");
    let keys = PrefixKeys::new().salt(b"");
    let error = here.bring_back(&there, &keys, &[1; 9]).await.unwrap_err();
    assert!(matches!(&error, TransferError::Invalid(invalid) if invalid.what == "salt"), "{error}");
    let back = here.bring_back(&there, &PrefixKeys::new(), &[]).await.unwrap();
    assert_eq!((back.cached_blocks, back.carried.blocks), (0, 0));
}
