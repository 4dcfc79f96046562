//! Tenants: quotas, floors, and what counts for whom.

mod hinted;
mod limits;
mod model;
mod moved;
mod order;
mod refusals;
mod threads;
mod time;

use kvpool::prefix::policy::PolicyKind;
use kvpool::prefix::{PrefixConfig, PrefixKeys};
use kvpool::tenants::{TenantInfo, TenantLimits};
use kvpool::{
    AdmitRequest, AllocError, AllocRequest, KvLayout, Lease, Pool, PoolBuilder, Sequence, SequenceError,
    SequenceId, TenantError, TenantId, Tokens,
};
use kvpool_testkit::prompts::{BLOCK_TOKENS, prompt};

const A: TenantId = TenantId(7);
const B: TenantId = TenantId(8);

fn block_bytes() -> u64 {
    KvLayout::named("tiny").unwrap().bytes_per_block() as u64
}

fn limits(quota: impl Into<Option<usize>>, floor: usize) -> TenantLimits {
    let limits = TenantLimits::new().floor(floor as u64 * block_bytes());
    quota.into().map_or(limits, |quota| limits.quota(quota as u64 * block_bytes()))
}

fn builder(blocks: usize, cache: PrefixConfig) -> PoolBuilder {
    let layout = KvLayout::named("tiny").unwrap();
    Pool::builder(layout).blocks(blocks).threads(1).magazine_blocks(4).prefix_cache(cache)
}

/// A pool whose evictions are exactly in order.
fn pool(blocks: usize, tenants: &[(TenantId, TenantLimits)]) -> Pool {
    let cache = PrefixConfig::new().tolerance(0.0);
    builder(blocks, cache).tenants(tenants.iter().copied()).build().unwrap()
}

fn request(id: u64, tokens: &[u32], tenant: Option<TenantId>) -> AdmitRequest<'_> {
    let request = AdmitRequest::new(SequenceId(id), tokens);
    tenant.map_or(request.clone(), |tenant| request.tenant(tenant))
}

/// Computes the prompt of this number, with this many full blocks and one with one token.
fn try_open(
    pool: &Pool,
    number: u32,
    blocks: usize,
    tenant: impl Into<Option<TenantId>>,
) -> Result<Sequence, SequenceError> {
    let tokens = prompt(number, blocks * BLOCK_TOKENS + 1);
    let mut sequence = pool.admit(&request(number.into(), &tokens, tenant.into()))?;
    let mut batch = pool.begin_batch();
    let missing = tokens.len() - sequence.len();
    batch.append(&mut sequence, Tokens::Announced(missing)).expect("the blocks are reserved");
    batch.finish();
    Ok(sequence)
}

fn open(pool: &Pool, number: u32, blocks: usize, tenant: impl Into<Option<TenantId>>) -> Sequence {
    try_open(pool, number, blocks, tenant).unwrap()
}

fn run(pool: &Pool, number: u32, blocks: usize, tenant: impl Into<Option<TenantId>>) {
    drop(open(pool, number, blocks, tenant));
}

/// Takes this many blocks more than are free.
fn evict(pool: &Pool, blocks: usize) -> Result<Lease<'_>, AllocError> {
    pool.allocate(AllocRequest::new(pool.free_blocks() + blocks))
}

fn info(pool: &Pool, id: TenantId) -> TenantInfo {
    pool.tenants().into_iter().find(|info| info.id == id).unwrap()
}

/// Returns the blocks that a tenant holds, and the cached ones of them.
fn holds(pool: &Pool, id: TenantId) -> (u64, u64) {
    let info = info(pool, id);
    assert_eq!(info.held_bytes, info.owned_bytes + info.cached_bytes);
    (info.held_bytes / block_bytes(), info.cached_bytes / block_bytes())
}

/// Returns how many leading blocks of a prompt are cached.
fn cached(pool: &Pool, number: u32) -> usize {
    let request_tokens = prompt(number, 60 * BLOCK_TOKENS + 1);
    let sequence = pool.sequence(SequenceId(u64::MAX)).tokens(&request_tokens).unwrap();
    sequence.len() / BLOCK_TOKENS
}

#[test]
fn a_quota_evicts_its_own_blocks_first_and_then_refuses() {
    let pool = pool(100, &[(A, limits(20, 0)), (B, limits(None, 0))]);
    run(&pool, 1, 10, B);
    run(&pool, 2, 10, A);
    assert_eq!((holds(&pool, A), holds(&pool, B)), ((10, 10), (10, 10)), "the unfinished block is free");
    let running = open(&pool, 3, 14, A);
    assert_eq!(holds(&pool, A), (20, 5), "the 15 new blocks exceeded it by 5");
    assert_eq!((cached(&pool, 1), info(&pool, A).evicted_blocks), (10, 5), "B's are older");
    let error = try_open(&pool, 4, 5, A).unwrap_err();
    let held = AllocError::OverQuota { asked: 6, tenant: A, quota: 20, held: 20 };
    assert_eq!(error, SequenceError::Alloc(held));
    assert_eq!(holds(&pool, A), (20, 5), "an eviction would have been wasted");
    assert_eq!(info(&pool, A).refused_requests, 1);
    assert_eq!(pool.metrics().refusals.over_quota, 1);
    let words = error.to_string();
    assert!(words.contains("tenant 7") && words.contains("20 of its quota of 20"), "{words}");
    drop(running);
    run(&pool, 4, 5, A);
    assert!(matches!(
        try_open(&pool, 5, 20, A).unwrap_err(),
        SequenceError::Alloc(AllocError::OverQuota { asked: 21, .. })
    ));
    run(&pool, 5, 40, B);
    pool.audit().unwrap();
}

#[test]
fn others_evict_down_to_the_floor_and_no_further() {
    let pool = pool(61, &[(A, limits(None, 15)), (B, limits(None, 0))]);
    run(&pool, 1, 30, A);
    run(&pool, 2, 30, B);
    let lease = evict(&pool, 40).unwrap();
    assert_eq!((holds(&pool, A), holds(&pool, B)), ((15, 15), (5, 5)), "A's are older");
    assert_eq!(cached(&pool, 1), 15);
    let error = evict(&pool, 6).unwrap_err();
    assert!(matches!(error, AllocError::Exhausted { evictable: 5, .. }), "{error}");
    assert_eq!((holds(&pool, B), info(&pool, A).protected_evictions > 0), ((5, 5), true));
    let rest = evict(&pool, 5).unwrap();
    assert_eq!((holds(&pool, A), holds(&pool, B)), ((15, 15), (0, 0)));
    assert!(evict(&pool, 1).is_err() && try_open(&pool, 3, 1, B).is_err());
    // The tenant itself may evict its own.
    run(&pool, 3, 7, A);
    assert_eq!(holds(&pool, A), (14, 14), "8 of 15 went for the prompt, whose last block is free");
    drop((lease, rest));
    pool.audit().unwrap();
}

#[test]
fn what_a_tenant_owns_counts_for_its_floor() {
    let pool = pool(60, &[(A, limits(None, 20))]);
    run(&pool, 1, 20, A);
    let running = open(&pool, 2, 19, A);
    assert_eq!(holds(&pool, A), (40, 20));
    let lease = evict(&pool, 20).unwrap();
    assert_eq!(holds(&pool, A), (20, 0), "the owned ones are its floor");
    assert!(evict(&pool, 1).is_err());
    drop(running);
    assert_eq!(holds(&pool, A), (19, 19), "and stay so in the cache");
    assert!(evict(&pool, 2).is_err(), "one is free");
    drop(lease);
    pool.audit().unwrap();
}

#[test]
fn a_shared_block_counts_for_the_tenant_that_computed_it() {
    let pool = pool(100, &[(A, limits(None, 0)), (B, limits(10, 0))]);
    run(&pool, 1, 20, A);
    let of_b = open(&pool, 1, 24, B);
    assert_eq!((holds(&pool, A), holds(&pool, B)), ((20, 0), (5, 0)), "owned by B's sequence");
    assert_eq!((info(&pool, B).hit_blocks, info(&pool, B).hit_tokens), (20, 80));
    let mut fork = of_b.fork(SequenceId(99)).unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut fork, Tokens::Final(1)).unwrap();
    batch.finish();
    assert_eq!((holds(&pool, A), holds(&pool, B)), ((20, 0), (6, 0)), "the copy of the last block");
    drop(of_b);
    drop(fork);
    assert_eq!((holds(&pool, A), holds(&pool, B)), ((20, 20), (4, 4)));
    let none = open(&pool, 1, 30, None);
    assert_eq!((holds(&pool, A), holds(&pool, B)), ((20, 0), (4, 0)));
    drop(none);
    assert_eq!(pool.evict_cached(0), 30);
    assert_eq!((holds(&pool, A), holds(&pool, B)), ((0, 0), (0, 0)));
    pool.audit().unwrap();
}

#[test]
fn the_order_over_all_tenants_is_that_of_releases() {
    let pool = pool(100, &[(A, limits(None, 0)), (B, limits(None, 0))]);
    for number in 0..9 {
        run(&pool, number, 5, [None, Some(A), Some(B)][number as usize % 3]);
    }
    for evicted in 1..=45 {
        drop(evict(&pool, 1).unwrap());
        let (gone, rest) = (evicted / 5, evicted % 5);
        let left: Vec<_> = (0..9).map(|number| 5 - usize::from(number < gone) * 5).collect();
        if rest == 0 {
            assert_eq!((0..9).map(|number| in_cache(&pool, number)).collect::<Vec<_>>(), left, "{evicted}");
        }
    }
    pool.audit().unwrap();
}

/// Like [`cached`], without a use of the blocks.
fn in_cache(pool: &Pool, number: u32) -> usize {
    let all: Vec<_> = pool.cached_blocks().into_iter().map(|(_, hash)| hash).collect();
    let cache = pool.prefix_cache().unwrap();
    let hashes = cache.hashes(&PrefixKeys::new(), &prompt(number, 60 * BLOCK_TOKENS)).unwrap();
    hashes.iter().take_while(|hash| all.contains(hash)).count()
}

#[test]
fn other_policies_take_from_the_tenant_with_most_beyond_its_floor() {
    let cache = PrefixConfig::new().policy(PolicyKind::Sessions);
    let tenants = [(A, limits(None, 5)), (B, limits(None, 0))];
    let pool = builder(100, cache).tenants(tenants).build().unwrap();
    run(&pool, 1, 30, A);
    run(&pool, 2, 20, B);
    let lease = evict(&pool, 5).unwrap();
    assert_eq!((holds(&pool, A), holds(&pool, B)), ((25, 25), (20, 20)));
    let rest = evict(&pool, 40).unwrap();
    assert_eq!((holds(&pool, A), holds(&pool, B)), ((5, 5), (0, 0)));
    drop((lease, rest));
    pool.audit().unwrap();
}

/// A block that was evicted out of order stays in its entry in the queue of its former tenant.
#[test]
fn strays_in_a_queue_that_is_passed_over_are_found() {
    // With ten times as many, they are enqueued anew in several batches.
    for scale in [1, 10] {
        let floor = 30 * scale as u64;
        let pool = pool(64 * scale, &[(A, limits(None, 30 * scale)), (B, limits(None, 0))]);
        run(&pool, 1, 40 * scale, A);
        drop(pool.allocate(AllocRequest::new(30 * scale).contiguous()));
        run(&pool, 2, 20 * scale, B);
        let lease = evict(&pool, 10 * scale).unwrap();
        assert!(holds(&pool, A).0 >= floor);
        pool.audit().unwrap();
        drop(lease);
        drop(evict(&pool, (holds(&pool, B).1 + holds(&pool, A).0 - floor) as usize).unwrap());
        assert_eq!((holds(&pool, A).0, holds(&pool, B).0), (floor, 0));
        // Those that were no strays are where A's own evictions find them.
        let lease = pool.allocate(AllocRequest::new(pool.free_blocks())).unwrap();
        run(&pool, 3, 20 * scale - 1, A);
        assert_eq!(in_cache(&pool, 3), (20 * scale - 1).min(60));
        drop(lease);
        pool.audit().unwrap();
    }
}

/// Frames that no batch sees can be used at once, whatever batch is in flight.
#[test]
fn a_quota_evicts_only_its_own_blocks_while_a_batch_is_in_flight() {
    for floor in [20, 10] {
        let pool = pool(41, &[(A, limits(20, 0)), (B, limits(None, floor))]);
        run(&pool, 1, 20, B);
        run(&pool, 2, 19, A);
        let owned = open(&pool, 6, 0, A);
        let tokens = prompt(3, 1);
        let mut other = pool.admit(&request(3, &tokens, None)).unwrap();
        let mut batch = pool.begin_batch();
        batch.append(&mut other, Tokens::Announced(1)).unwrap();
        assert_eq!(pool.free_blocks(), 0);
        let first = open(&pool, 4, 9, A);
        assert_eq!((holds(&pool, A), holds(&pool, B)), ((20, 9), (20, 20)));
        let second = open(&pool, 5, 8, A);
        assert_eq!((holds(&pool, A), holds(&pool, B)), ((20, 0), (20, 20)));
        assert_eq!(info(&pool, A).evicted_blocks, 19);
        batch.finish();
        drop((owned, first, second, other));
        pool.audit().unwrap();
    }
}

#[test]
fn a_request_that_the_pool_cannot_serve_evicts_nothing_for_its_quota() {
    let pool = pool(40, &[(A, limits(41, 0))]);
    run(&pool, 1, 20, A);
    let too_large = try_open(&pool, 2, 40, A).unwrap_err();
    assert!(matches!(too_large, SequenceError::Alloc(AllocError::TooLarge { .. })), "{too_large}");
    assert_eq!(holds(&pool, A), (20, 20));
    pool.set_tenant(A, limits(25, 0)).unwrap();
    let lease = pool.allocate(AllocRequest::new(20)).unwrap();
    let exhausted = try_open(&pool, 2, 21, A).unwrap_err();
    let expected = matches!(
        exhausted,
        SequenceError::Alloc(AllocError::Exhausted { asked: 22, free: 0, evictable: 20, .. })
    );
    assert!(expected, "{exhausted}");
    assert_eq!((holds(&pool, A), info(&pool, A).evicted_blocks), ((20, 20), 0));
    drop(lease);
    drop(open(&pool, 2, 21, A));
    assert_eq!(info(&pool, A).evicted_blocks, 17);
    pool.audit().unwrap();
}
