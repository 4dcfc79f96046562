//! Bad input through the public API: the error says what and where, and the pool is unchanged.
//!
//! Bad handles are in the model (`properties.rs`), bytes and slots in the storage conformance
//! suite.

use std::sync::Arc;

use kvpool::storage::{HostStorage, KvLayout, Sizing, Storage};
use kvpool::{
    AllocError, AllocRequest, BlockHandle, BlockTable, CsrTable, DeviceId, FRAMES_MAX, GrowError,
    HandleError, Invalid, Lease, Order, Pool, PoolBuilder, SequenceError, SequenceId, TOKENS_MAX, Tokens,
};
use kvpool_testkit::leases::{block, handle, singles};
use kvpool_testkit::steps::{append, exhausted};

fn layout() -> KvLayout {
    KvLayout::named("tiny").unwrap()
}

fn builder() -> PoolBuilder {
    Pool::builder(layout()).without_storage()
}

fn refused(builder: PoolBuilder) -> String {
    builder.build().map(drop).expect_err("the builder accepted bad input").to_string()
}

fn invalid(
    id: SequenceId,
    what: &'static str,
    got: impl std::fmt::Display,
    limit: impl std::fmt::Display,
) -> SequenceError {
    SequenceError::Invalid { id, error: Invalid::new(what, got, limit) }
}

/// A pool with some allocated blocks, which must be unchanged when this is dropped.
struct Unchanged {
    pool: Pool,
    held: Vec<Lease<'static>>,
}

impl Unchanged {
    fn new() -> Self {
        let pool = Pool::builder(layout()).blocks(100).blocks_max(150).build().unwrap();
        let held = singles(&pool, AllocRequest::new(10));
        Self { pool, held }
    }
}

impl Drop for Unchanged {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        assert_eq!((self.pool.free_blocks(), self.pool.total_blocks()), (90, 100));
        self.pool.audit().unwrap();
        for handle in self.held.iter().map(handle) {
            let info = self.pool.info(handle).unwrap();
            assert_eq!((info.refs, info.pins), (1, 0), "{handle}");
        }
        self.held.clear();
        drop(self.pool.allocate(AllocRequest::new(100)).unwrap());
        self.pool.audit().unwrap();
    }
}

#[test]
fn builders_of_no_pool() {
    for builder in [builder(), builder().blocks(0), builder().blocks_max(10)] {
        let want = "blocks: got 0, or nothing, expected at least 1, by `blocks` or `sizing`";
        assert_eq!(refused(builder), want);
    }
    let max = FRAMES_MAX - 1;
    for blocks in [FRAMES_MAX, usize::MAX] {
        for (builder, what) in
            [(builder().blocks(blocks), "blocks"), (builder().blocks(1).blocks_max(blocks), "blocks_max")]
        {
            assert_eq!(refused(builder), format!("{what}: got {blocks}, expected at most {max}"));
        }
    }
    let error = refused(builder().blocks(FRAMES_MAX + 1).without_null_block());
    assert!(error.ends_with(&format!("expected at most {FRAMES_MAX}")), "{error}");
    let want = "zero_on_free: got a pool without storage, expected a pool with storage";
    assert_eq!(refused(builder().blocks(8).zero_on_free()), want);
    let error = refused(builder().blocks(10).blocks_max(9));
    assert_eq!(error, "blocks: got 10, expected at most 9");
    for frames in [0, 1, 32, 63, 65, 4097, 2 * FRAMES_MAX, usize::MAX] {
        let error = refused(builder().blocks(10).segment_blocks(frames));
        let limit = format!("a power of two from 64 to {FRAMES_MAX}");
        assert_eq!(error, format!("segment_blocks: got {frames}, expected {limit}"));
    }
    for blocks in [65, usize::MAX] {
        let error = refused(builder().blocks(10).magazine_blocks(blocks));
        assert_eq!(error, format!("magazine_blocks: got {blocks}, expected at most 64"));
    }
    // More than a machine runs.
    for threads in [1 << 17, usize::MAX / 2 + 1, usize::MAX] {
        for builder in [builder().blocks(10), builder().blocks(10).magazine_blocks(1)] {
            let error = refused(builder.threads(threads));
            assert_eq!(error, format!("threads: got {threads}, expected at most 65536"));
        }
    }
    let error = refused(builder().blocks(10).fragmentation_order(Order(28)));
    assert_eq!(error, "fragmentation_order: got 28, expected at most 27");
}

#[test]
fn extreme_options_that_are_accepted() {
    builder().blocks(10).magazine_blocks(1).threads(1 << 16).build().unwrap();
    builder().blocks(10).threads(0).build().unwrap();
    builder().blocks(10).fragmentation_order(Order(27)).build().unwrap().stats();
    for every in [1, (1 << 31) + 1, u32::MAX] {
        let pool = builder().blocks(10).latency_sample(every).build().unwrap();
        drop(pool.allocate(AllocRequest::new(1)).unwrap());
    }
}

/// A layout may have such blocks; a sequence, whose tokens kernels count in 32 bits, may not.
#[test]
fn blocks_of_more_tokens_than_a_sequence_has() {
    let layout =
        |tokens| KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(tokens).build().unwrap();
    for tokens in [TOKENS_MAX + 1, 1 << 40] {
        let error = refused(Pool::builder(layout(tokens)).without_storage().blocks(1));
        assert_eq!(error, format!("block_tokens: got {tokens}, expected at most {TOKENS_MAX}"));
    }
    let pool = Pool::builder(layout(TOKENS_MAX)).without_storage().blocks(1).build().unwrap();
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    append(&pool, &mut sequence, TOKENS_MAX);
    assert_eq!(sequence.block_count(), 1);
}

#[test]
fn layouts_of_more_bytes_than_there_are_addresses() {
    let large = KvLayout::builder().layers(1).kv_heads(1).head_dim(1 << 40).build().unwrap();
    for builder in [
        Pool::builder(large.clone()).blocks(FRAMES_MAX - 1),
        Pool::builder(large).blocks(1).blocks_max(FRAMES_MAX - 1),
    ] {
        let error = refused(builder);
        assert!(
            error.starts_with("reservation: got ") && error.ends_with("within the address space"),
            "{error}"
        );
    }
}

#[test]
fn impossible_sizings() {
    for ratio in [f64::NAN, f64::NEG_INFINITY, -0.5, 0.0, 1.5] {
        let sizing = Sizing::Memory { ratio, free_before: 1 << 30, model_bytes: 0 };
        let error = format!("memory ratio: got {ratio}, expected above 0 and at most 1");
        assert_eq!(refused(builder().sizing(sizing)), error);
    }
    // Room for the null block only.
    for sizing in [
        Sizing::Frames(1),
        Sizing::Memory { ratio: 1.0, free_before: layout().bytes_per_block() as u64, model_bytes: 0 },
        Sizing::Memory { ratio: 1.0, free_before: 1, model_bytes: u64::MAX },
    ] {
        let error = refused(builder().sizing(sizing));
        assert!(error.starts_with("frames: got ") && error.ends_with("expected at least 2"), "{error}");
    }
    let error = refused(builder().sizing(Sizing::Frames(usize::MAX)));
    assert_eq!(error, format!("frames: got {}, expected at most {FRAMES_MAX}", usize::MAX));
}

#[test]
fn storage_of_another_layout() {
    let other = KvLayout::named_builder("tiny").unwrap().block_tokens(8).build().unwrap();
    let storage: Arc<dyn Storage> = Arc::new(HostStorage::new(other.clone(), 11, 11).unwrap());
    let error = refused(Pool::builder(layout()).blocks(10).storage(storage));
    let want = format!("layout of the storage: got {other}, expected that of the pool, {}", layout());
    assert_eq!(error, want);
}

#[test]
fn storage_that_is_too_small() {
    let storage = || -> Arc<dyn Storage> { Arc::new(HostStorage::new(layout(), 10, 20).unwrap()) };
    let error = refused(Pool::builder(layout()).blocks(10).storage(storage()));
    assert_eq!(error, "frames of the storage: got 10, expected at least 11", "the null block");
    let error = refused(Pool::builder(layout()).blocks(9).blocks_max(20).storage(storage()));
    assert_eq!(error, "frames of the storage: got 20, expected at least 21");
    Pool::builder(layout()).blocks(9).blocks_max(19).storage(storage()).build().unwrap();
}

#[test]
fn requests_that_no_pool_can_meet() {
    let test = Unchanged::new();
    let pool = &test.pool;
    let device = DeviceId::Cuda(3);
    for (request, refusal) in [
        (AllocRequest::new(0), AllocError::Zero),
        (AllocRequest::new(0).contiguous(), AllocError::Zero),
        (AllocRequest::new(101), AllocError::TooLarge { asked: 101, total: 100 }),
        (AllocRequest::new(usize::MAX), AllocError::TooLarge { asked: usize::MAX, total: 100 }),
        (AllocRequest::new(usize::MAX).contiguous(), AllocError::TooLarge { asked: usize::MAX, total: 100 }),
        (AllocRequest::new(1 << 32), AllocError::TooLarge { asked: 1 << 32, total: 100 }),
        (AllocRequest::new((1 << 32) + 1), AllocError::TooLarge { asked: (1 << 32) + 1, total: 100 }),
        (AllocRequest::new(91), exhausted(91, 90)),
        (AllocRequest::new(91).contiguous(), exhausted(91, 90)),
        (
            AllocRequest::new(1).device(device),
            AllocError::WrongDevice { asked: device, device: DeviceId::Host },
        ),
    ] {
        assert_eq!(pool.allocate(request).map(drop), Err(refusal), "{request:?}");
        assert_eq!(pool.allocate_owned(request).map(drop), Err(refusal));
    }
}

#[test]
fn runs_that_do_not_exist() {
    let pool = builder().blocks(64).magazine_blocks(0).build().unwrap();
    let mut odd = singles(&pool, AllocRequest::new(64));
    odd.retain(|lease| block(lease).0 % 2 == 1);
    let refusal = AllocError::NoRun { asked: 2, longest_run: 1, free: 32, evictable: 0 };
    assert_eq!(pool.allocate(AllocRequest::new(2).contiguous()).map(drop), Err(refusal));
    assert_eq!(pool.free_blocks(), 32);
    pool.audit().unwrap();
    drop(odd);
}

/// Arbitrary numbers: none is a good handle, and none causes a panic.
#[test]
fn forged_handles() {
    let test = Unchanged::new();
    let pool = &test.pool;
    let mut rng = fastrand::Rng::with_seed(7);
    for round in 0..20_000 {
        let mut bits = rng.u128(..);
        if round % 2 == 0 {
            // The right pool, and an id within its range.
            bits = bits & !((1 << 64) - 1) | u128::from(pool.tag().0) << 32 | u128::from(rng.u32(..200));
        }
        let forged = BlockHandle::from_bits(bits);
        assert_eq!(forged.to_bits(), bits);
        let refusal = pool.info(forged).unwrap_err();
        let is_there = forged.pool == pool.tag() && (1..=100).contains(&forged.id.0);
        match refusal {
            HandleError::Foreign { handle, pool: of } => {
                assert!((handle, of) == (forged, pool.tag()) && !is_there)
            }
            HandleError::OutOfRange { handle, total: 100 } => assert!(handle == forged && !is_there),
            HandleError::Stale { handle, .. } => assert!(handle == forged && is_there),
            other => panic!("{forged}: {other}"),
        }
        assert_eq!(pool.pin_scoped(forged).map(drop), Err(refusal));
    }
}

#[test]
fn more_references_than_a_word_counts() {
    let test = Unchanged::new();
    let lease = test.pool.allocate(AllocRequest::new(2)).unwrap();
    let mut shares: Vec<_> = std::iter::from_fn(|| lease.share().ok()).collect();
    let max = shares.len() as u32 + 1;
    // One more of the first block fits, and none of the second.
    let mut last = shares.pop().unwrap();
    let tail = last.split_off(1);
    drop(last);
    let id = lease.blocks()[1];
    assert_eq!(lease.share().map(drop), Err(HandleError::TooManyReferences { id, max }));
    let refs: Vec<_> = lease.handles().map(|handle| test.pool.info(handle).unwrap().refs).collect();
    assert_eq!(refs, [max - 1, max], "the block before it in the lease is unchanged");
    drop((lease, shares, tail));
}

#[test]
fn more_pins_than_a_word_counts() {
    let test = Unchanged::new();
    let handle = handle(&test.held[0]);
    let pins: Vec<_> = std::iter::from_fn(|| test.pool.pin_scoped(handle).ok()).collect();
    let max = pins.len() as u32;
    assert_eq!(test.pool.info(handle).unwrap().pins, max);
    assert_eq!(test.pool.pin_scoped(handle).map(drop), Err(HandleError::TooManyPins { id: handle.id, max }));
}

#[test]
fn growth_past_the_maximum_or_by_zero() {
    let test = Unchanged::new();
    assert_eq!(test.pool.grow(0), Err(GrowError::Zero));
    for asked in [51, FRAMES_MAX, usize::MAX] {
        assert_eq!(test.pool.grow(asked), Err(GrowError::TooLarge { asked, total: 100, max: 150 }));
    }
    let fixed = builder().blocks(10).build().unwrap();
    assert_eq!(fixed.grow(1), Err(GrowError::TooLarge { asked: 1, total: 10, max: 10 }));
}

#[test]
fn sequences_that_are_open_already() {
    let test = Unchanged::new();
    let (one, two) = (SequenceId(1), SequenceId(u64::MAX - 1));
    let mut sequence = test.pool.sequence(one).open().unwrap();
    let mut batch = test.pool.begin_batch();
    batch.append(&mut sequence, 5).unwrap();
    let other = test.pool.sequence(two).open().unwrap();
    let free = test.pool.free_blocks();
    assert_eq!(test.pool.sequence(one).open().map(drop), Err(SequenceError::AlreadyOpen { id: one }));
    assert_eq!(sequence.fork(two).map(drop), Err(SequenceError::AlreadyOpen { id: two }));
    assert_eq!(sequence.fork(one).map(drop), Err(SequenceError::AlreadyOpen { id: one }));
    assert_eq!((test.pool.free_blocks(), test.pool.sequence_count()), (free, 2));
    drop((batch, sequence, other));
    assert_eq!(test.pool.sequence_count(), 0);
}

/// Also where the list of that many blocks would not fit into memory: nothing is reserved for it.
#[test]
fn more_tokens_than_a_pool_or_a_sequence_holds() {
    let test = Unchanged::new();
    let id = SequenceId(3);
    for length in [0, 5] {
        let mut sequence = test.pool.sequence(id).open().unwrap();
        let mut batch = test.pool.begin_batch();
        if length > 0 {
            batch.append(&mut sequence, length).unwrap();
        }
        let free = test.pool.free_blocks();
        for asked in [usize::MAX, (usize::MAX - length).saturating_add(1), 1 << 32, TOKENS_MAX + 1 - length] {
            let got = format!("{asked} after {length}");
            let refusal = invalid(id, "tokens", got, format!("at most {TOKENS_MAX} in all"));
            assert_eq!(batch.append(&mut sequence, asked), Err(refusal.clone()));
            assert_eq!(batch.append(&mut sequence, Tokens::Draft(asked)), Err(refusal));
        }
        for asked in [1000, TOKENS_MAX - length] {
            let refusal = batch.append(&mut sequence, asked).unwrap_err();
            assert!(
                matches!(refusal, SequenceError::Alloc(AllocError::TooLarge { total: 100, .. })),
                "{refusal}"
            );
            assert_eq!(batch.append(&mut sequence, Tokens::Draft(asked)), Err(refusal));
        }
        assert_eq!((sequence.len(), sequence.committed(), test.pool.free_blocks()), (length, length, free));
        if length > 0 {
            batch.append(&mut sequence, 1).unwrap();
        }
        batch.finish();
    }
    let layout = KvLayout::named_builder("tiny").unwrap().block_tokens(1).build().unwrap();
    let pool = Pool::builder(layout).without_storage().blocks(4).build().unwrap();
    let mut sequence = pool.sequence(id).open().unwrap();
    let refusal = pool.begin_batch().append(&mut sequence, TOKENS_MAX).unwrap_err();
    assert_eq!(refusal, SequenceError::Alloc(AllocError::TooLarge { asked: TOKENS_MAX, total: 4 }));
}

#[test]
fn lengths_beyond_the_end() {
    let test = Unchanged::new();
    let id = SequenceId(9);
    let mut sequence = test.pool.sequence(id).open().unwrap();
    let mut batch = test.pool.begin_batch();
    batch.append(&mut sequence, Tokens::Draft(6)).unwrap();
    for asked in [7, 1 << 32, (1 << 32) + 3, usize::MAX] {
        let refusal = |what| Err(invalid(id, what, asked, "at most its 6 tokens"));
        assert_eq!(sequence.commit(asked), refusal("tokens to commit"));
        assert_eq!(sequence.truncate(asked), refusal("tokens to keep"));
    }
    for (start, end) in [(0, 7), (6, 5), (usize::MAX, usize::MAX), (1 << 32, (1 << 32) + 1), (usize::MAX, 0)]
    {
        let mut slots = vec![-1];
        let refusal =
            invalid(id, "range of tokens", format!("{start}..{end}"), "a range within its 6 tokens");
        assert_eq!(batch.slot_mapping(&sequence, start..end, &mut slots), Err(refusal.clone()));
        assert_eq!(slots, [-1]);
        let stored =
            batch.store(&mut sequence, 0, start..end, (&[0.0_f32; 0][..]).into(), (&[0.0_f32; 0][..]).into());
        assert_eq!(stored, Err(refusal));
    }
    assert_eq!((sequence.len(), sequence.committed()), (6, 0));
    batch.finish();

    let bare = builder().blocks(4).build().unwrap();
    let mut sequence = bare.sequence(id).open().unwrap();
    let mut batch = bare.begin_batch();
    batch.append(&mut sequence, 1).unwrap();
    let none = || (&[0.0_f32; 0][..]).into();
    assert_eq!(batch.store(&mut sequence, 0, 0..1, none(), none()), Err(SequenceError::NoStorage));
    assert_eq!(batch.append(&mut sequence, 0), Err(invalid(id, "tokens", 0, "at least 1")));
}

/// Its last block takes the token, but this pool has no block of that number.
#[test]
fn a_sequence_of_a_larger_pool() {
    let [small, large] = [4, 400].map(|blocks| builder().blocks(blocks).build().unwrap());
    let mut theirs = large.sequence(SequenceId(2)).open().unwrap();
    let mut step = large.begin_batch();
    let tokens = 300 * theirs.block_tokens() + 1;
    step.append(&mut theirs, tokens).unwrap();
    let mut batch = small.begin_batch();
    let refusal = Err(SequenceError::ForeignSequence { id: SequenceId(2) });
    assert_eq!(batch.append(&mut theirs, 1).map(drop), refusal);
    batch.finish();
    step.finish();
}

/// Also in the middle of a list of good ones: the output built for those before it is discarded.
#[test]
fn sequences_of_another_pool() {
    let (test, other) = (Unchanged::new(), Unchanged::new());
    let mut ours = test.pool.sequence(SequenceId(1)).open().unwrap();
    let mut theirs = other.pool.sequence(SequenceId(2)).open().unwrap();
    let mut batch = test.pool.begin_batch();
    batch.append(&mut ours, 9).unwrap();
    append(&other.pool, &mut theirs, 9);
    let refusal = Err(SequenceError::ForeignSequence { id: SequenceId(2) });
    let free = (test.pool.free_blocks(), other.pool.free_blocks());
    assert_eq!(batch.append(&mut theirs, 1).map(drop), refusal);
    assert_eq!(batch.append(&mut theirs, usize::MAX).map(drop), refusal);
    assert_eq!(batch.append(&mut theirs, Tokens::Draft(1)).map(drop), refusal);

    let (mut table, mut csr, mut lengths) = (BlockTable::new(), CsrTable::new(), vec![1]);
    batch.block_table([&ours], &mut table).unwrap();
    assert_eq!(batch.block_table([&ours, &theirs], &mut table), refusal);
    assert_eq!(batch.csr_table([&ours, &theirs], &mut csr), refusal);
    assert_eq!(batch.lengths([&ours, &theirs], &mut lengths), refusal);
    assert_eq!((table.rows(), table.entries(), table.lengths()), (0, &[][..], &[][..]));
    assert_eq!((csr.indptr, csr.indices, csr.last_page_len, lengths), (vec![0], vec![], vec![], vec![]));
    let view = other.pool.view(SequenceId(2)).unwrap();
    assert_eq!(batch.block_table([&view], &mut table), refusal);
    assert_eq!((test.pool.free_blocks(), other.pool.free_blocks()), free);
    assert_eq!(theirs.len(), 9);
    batch.finish();
}
