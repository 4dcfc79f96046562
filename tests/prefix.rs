//! Prefix reuse through the pool: hits, misses, evictions, and the limits of a refusal.

use kvpool::prefix::policy::Millis;
use kvpool::prefix::{PrefixConfig, PrefixKeys};
use kvpool::storage::KvLayout;
use kvpool::{AllocError, AllocRequest, Pool, PrefixError, Priority, SequenceError, SequenceId, Tokens};
use kvpool_testkit::leases::singles;
use kvpool_testkit::prompts::{BLOCK_TOKENS, admit, pool, prompt};
use kvpool_testkit::steps::append;

fn serve(pool: &Pool, prompt: &[u32]) -> usize {
    admit(pool, 0, prompt).1
}

#[test]
fn a_prompt_is_found_again_but_for_its_last_token() {
    let pool = pool(100);
    let long = prompt(1, 42);
    assert_eq!([serve(&pool, &long), serve(&pool, &long)], [0, 40]);
    assert_eq!(serve(&pool, &long[..40]), 36, "the last token must be computed");
    assert_eq!(serve(&pool, &long[..3]), 0);
    let mut other = long.clone();
    other[21] = 7;
    assert_eq!(serve(&pool, &other), 20);
    let stats = pool.prefix_cache().unwrap().stats();
    assert_eq!((stats.lookups, stats.lookup_blocks, stats.hit_blocks), (5, 10 + 10 + 10 + 10, 10 + 9 + 5));
    assert_eq!(pool.audit().unwrap().owned, 0);
}

#[test]
fn salts_and_adapters_separate_prefixes() {
    let pool = pool(100);
    let prompt = prompt(1, 33);
    let cached = |keys: PrefixKeys<'_>| {
        let mut sequence = pool.sequence(SequenceId(1)).keys(keys).tokens(&prompt).unwrap();
        let cached = sequence.len();
        append(&pool, &mut sequence, prompt.len() - cached);
        cached
    };
    let kinds = [
        PrefixKeys::new(),
        PrefixKeys::new().salt(b"a"),
        PrefixKeys::new().salt(b"b"),
        PrefixKeys::new().adapter(b"a"),
        PrefixKeys::new().salt(b"a").adapter(b"a"),
    ];
    assert_eq!(kinds.map(cached), [0; 5]);
    assert_eq!(kinds.map(cached), [32; 5]);
}

/// Drafts that an append makes final fill blocks of their own.
#[test]
fn drafts_that_an_append_makes_final_are_reused() {
    let pool = pool(100);
    let tokens = prompt(1, 5 * BLOCK_TOKENS);
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    let mut batch = pool.begin_batch();
    let drafted = 2 * BLOCK_TOKENS;
    batch.append(&mut sequence, Tokens::Draft(drafted)).unwrap();
    sequence.announce(&tokens[..drafted]).unwrap();
    batch.append(&mut sequence, &tokens[drafted..=drafted]).unwrap();
    batch.finish();
    drop(sequence);
    assert_eq!(serve(&pool, &tokens), drafted);
    assert_eq!(pool.audit().unwrap().owned, 0);
}

#[test]
fn unknown_tokens_end_what_can_be_reused() {
    let pool = pool(100);
    let prompt = prompt(1, 9);
    let (mut sequence, _) = admit(&pool, 1, &prompt);
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 3).unwrap();
    let error = batch.append(&mut sequence, &[5]).unwrap_err();
    assert_eq!(error, SequenceError::TokensUnknown { id: SequenceId(1), known: 9 });
    assert_eq!(sequence.len(), 12);
    // Tokens that were truncated can be appended again.
    sequence.truncate(9).unwrap();
    batch.append(&mut sequence, &[5, 6, 7]).unwrap();
    batch.finish();
    drop(sequence);
    let mut again = prompt.clone();
    again.extend([5, 6, 7, 8]);
    assert_eq!(serve(&pool, &again), 12);
    again[10] = 0;
    assert_eq!(serve(&pool, &again), 8);
}

#[test]
fn duplicates_of_a_prefix_coexist() {
    let pool = pool(100);
    let prompt = prompt(1, 41);
    let mut pair = [1, 2].map(|id| pool.sequence(SequenceId(id)).tokens(&prompt).unwrap());
    let mut batch = pool.begin_batch();
    for sequence in &mut pair {
        assert!(sequence.is_empty());
        batch.append(sequence, 41).unwrap();
    }
    batch.finish();
    let (third, cached) = admit(&pool, 3, &prompt);
    assert_eq!(cached, 40);
    drop((pair, third));
    // The duplicates are evicted first.
    assert_eq!(pool.stats().evictable, 20);
    drop(pool.allocate(AllocRequest::new(90)).unwrap());
    assert_eq!(serve(&pool, &prompt), 40);
    pool.audit().unwrap();
}

#[test]
fn a_tail_is_reused_by_a_copy() {
    let pool = pool(100);
    let serve = |prompt: &[u32]| {
        let mut sequence = pool.sequence(SequenceId(1)).reuse_tail().tokens(prompt).unwrap();
        let cached = sequence.len();
        let mut batch = pool.begin_batch();
        let appended = batch.append(&mut sequence, prompt.len() - cached).unwrap();
        assert_eq!(appended.copied.is_some(), !cached.is_multiple_of(BLOCK_TOKENS));
        batch.finish();
        cached
    };
    // The batch must end before the sequence is closed, or its last block is not reused.
    let first = prompt(1, 10);
    let mut sequence = pool.sequence(SequenceId(9)).reuse_tail().tokens(&first).unwrap();
    append(&pool, &mut sequence, 10);
    drop(sequence);
    let mut longer = first.clone();
    longer.extend([5, 6, 7]);
    assert_eq!(serve(&longer), 10, "two full blocks and half of the third");
    assert_eq!(serve(&first[..8]), 7, "cached as a whole: all but the last token");
    assert_eq!(serve(&first[..7]), 4);
    pool.audit().unwrap();
}

#[test]
fn clearing_forgets_everything_and_disturbs_no_owner() {
    let pool = pool(100);
    serve(&pool, &prompt(1, 41));
    let (held, _) = admit(&pool, 1, &prompt(2, 41));
    pool.clear_prefix_cache();
    assert_eq!((pool.stats().evictable, pool.cached_blocks()), (10, vec![]), "unfindable, and not evicted");
    assert_eq!(serve(&pool, &prompt(1, 41)), 0);
    assert_eq!(serve(&pool, &prompt(2, 41)), 0, "owned, but not found");
    drop(held);
    assert_eq!(serve(&pool, &prompt(2, 41)), 40, "computed since the clear");
    pool.audit().unwrap();
}

#[test]
fn bad_input_is_refused_and_changes_nothing() {
    let pool = pool(10);
    let open = |keys| pool.sequence(SequenceId(1)).keys(keys).tokens(&[1, 2, 3]);
    let what = |refused| match refused {
        Err(SequenceError::Prefix(PrefixError::Invalid(error)) | SequenceError::Invalid { error, .. }) => {
            error.what
        }
        other => panic!("{:?}", other.err()),
    };
    assert_eq!(what(open(PrefixKeys::new().salt(b""))), "salt");
    let past = pool.sequence(SequenceId(1)).keep_until(Millis(0)).tokens(&[1]);
    assert_eq!(what(past), "end of the retention");
    let long = pool.sequence(SequenceId(1)).tokens(&[0; 41]);
    assert!(matches!(long, Err(SequenceError::Alloc(AllocError::TooLarge { asked: 11, total: 10 }))));
    let none = pool.sequence(SequenceId(1)).tokens(&[]);
    assert_eq!(what(none), "tokens");
    assert_eq!((pool.sequence_count(), pool.available_blocks()), (0, 10));
    pool.audit().unwrap();
}

#[test]
fn a_block_that_a_batch_may_see_is_not_evicted_before_it_ends() {
    let pool = pool(10);
    let (sequence, _) = admit(&pool, 1, &prompt(1, 40));
    let batch = pool.begin_batch();
    drop(sequence);
    let refused = pool.allocate(AllocRequest::new(1)).unwrap_err();
    assert_eq!(
        refused,
        AllocError::Exhausted {
            asked: 1,
            free: 0,
            retired: 0,
            evictable: 10,
            held: 0,
            in_transfer: 0,
            oldest_batch: Some(batch.ticket())
        }
    );
    assert_eq!(pool.stats().evictable, 10);
    batch.finish();
    drop(pool.allocate(AllocRequest::new(3)).unwrap());
    assert_eq!(serve(&pool, &prompt(1, 29)), 28);
    pool.audit().unwrap();
}

#[test]
fn a_run_is_made_by_the_fewest_evictions() {
    let pool = pool(64);
    serve(&pool, &prompt(1, 256));
    drop(pool.allocate(AllocRequest::new(10)).unwrap());
    let evicted = || pool.prefix_cache().unwrap().stats().evicted_blocks;
    assert_eq!(evicted(), 10);
    let run = pool.allocate(AllocRequest::new(16).contiguous()).unwrap();
    assert!(evicted() <= 10 + 16);
    drop(run);
    pool.audit().unwrap();
}

#[test]
fn evicted_blocks_fill_the_reserve_first() {
    let layout = KvLayout::named("tiny").unwrap();
    let builder = Pool::builder(layout).blocks(20).reserve(4).prefix_cache(PrefixConfig::new());
    let pool = builder.build().unwrap();
    let lease = pool.allocate(AllocRequest::new(16)).unwrap();
    let urgent = pool.allocate(AllocRequest::new(4).priority(Priority::Urgent)).unwrap();
    drop(lease);
    serve(&pool, &prompt(1, 48));
    assert_eq!(pool.stats().reserved, 4);
    drop(urgent);
    let all = pool.allocate(AllocRequest::new(16)).unwrap();
    assert_eq!(pool.stats().reserved, 4);
    drop(all);
    pool.audit().unwrap();
}

/// Every place for the run contains a frame of the reserve, and an evictable block.
#[test]
fn a_run_is_made_through_the_reserve_and_evictable_blocks() {
    let layout = KvLayout::named("tiny").unwrap();
    let builder = Pool::builder(layout).blocks(40).reserve(4).prefix_cache(PrefixConfig::new());
    let pool = builder.without_null_block().magazine_blocks(0).build().unwrap();
    // While it is short, the reserve takes freed frames: here, from the middle.
    let mut urgent = singles(&pool, AllocRequest::new(40).priority(Priority::Urgent));
    urgent.sort_by_key(|lease| lease.frames().next());
    urgent.drain(18..22);
    assert_eq!(pool.stats().reserved, 4);
    drop(urgent);
    serve(&pool, &prompt(1, 17));
    assert_eq!((pool.stats().reserved, pool.stats().evictable), (4, 4));
    drop(pool.allocate(AllocRequest::new(36).contiguous()).unwrap());
    assert_eq!(pool.stats().reserved, 4);
    pool.audit().unwrap();
}

#[test]
fn a_request_that_is_refused_costs_the_cache_nothing() {
    let pool = pool(64);
    let (held, _) = admit(&pool, 1, &prompt(1, 40));
    serve(&pool, &prompt(2, 161));
    for asked in [55, 60, 64] {
        let refused = pool.allocate(AllocRequest::new(asked)).unwrap_err();
        assert_eq!(
            refused,
            AllocError::Exhausted {
                asked,
                free: 14,
                retired: 0,
                evictable: 40,
                held: 0,
                in_transfer: 0,
                oldest_batch: None
            }
        );
    }
    let mut batch = pool.begin_batch();
    let mut other = pool.sequence(SequenceId(3)).open().unwrap();
    assert!(batch.append(&mut other, 55 * BLOCK_TOKENS).is_err());
    batch.finish();
    assert_eq!(pool.prefix_cache().unwrap().stats().evicted_blocks, 0);
    assert_eq!(serve(&pool, &prompt(2, 161)), 160);
    drop(pool.allocate(AllocRequest::new(54)).unwrap());
    drop(held);
    pool.audit().unwrap();
}
