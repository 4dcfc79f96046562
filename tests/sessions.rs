//! What requests of one session keep in the cache: its last two checkpoints before others, and the
//! place in the eviction order of what it computes again.
#![cfg(not(any(kvpool_loom, miri)))]

use kvpool::prefix::{HashKey, PrefixConfig};
use kvpool::{AdmitRequest, AllocRequest, KvLayout, Pool, Sequence, SequenceId, SessionId, Tokens};

/// Frames of the state.
const STATE: usize = 10;

fn pool(blocks: usize, states: Option<usize>) -> Pool {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(4).build().unwrap();
    Pool::builder(layout)
        .blocks(blocks)
        .without_storage()
        .threads(1)
        .states(states)
        .prefix_cache(PrefixConfig::new().tolerance(0.0).key(HashKey::from_bytes([7; 32])))
        .build()
        .unwrap()
}

/// Serves a request, with checkpoints; returns the length of its hit.
fn serve(pool: &Pool, id: u64, session: Option<u64>, prompt: &[u32]) -> usize {
    let request = AdmitRequest::new(SequenceId(id), prompt);
    let request = session.map_or(request.clone(), |session| request.session(SessionId(session)));
    let mut sequence = pool.admit_grouped(&request).unwrap();
    let hit = sequence.len();
    while sequence.len() < prompt.len() {
        let mut batch = pool.begin_batch();
        let cut = sequence.next_cut();
        let new = cut.unwrap_or(prompt.len()) - sequence.len();
        batch.append_grouped(&mut sequence, Tokens::Announced(new)).unwrap();
        if cut.is_some() {
            batch.checkpoint(&mut sequence).unwrap();
        }
        batch.finish();
    }
    hit
}

/// Returns the length of a hit, without keeping anything.
fn hit(pool: &Pool, prompt: &[u32]) -> usize {
    pool.admit_grouped(&AdmitRequest::new(SequenceId(1_000), prompt)).unwrap().len()
}

/// Tokens of a text, of which others do not begin alike.
fn text(number: u32, tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|at| number * 1_000 + at).collect()
}

fn audit(pool: &Pool) {
    pool.audit().unwrap();
    assert_eq!(pool.stats().available, pool.total_blocks());
}

/// Evicts blocks until at least this many are free.
fn make_room(pool: &Pool, free: usize) {
    let before = pool.metrics().evictions;
    pool.evict_cached(pool.total_blocks() - free);
    assert!(pool.metrics().evictions.total() > before.total());
}

#[test]
fn a_dominated_checkpoint_goes_before_older_blocks() {
    let pool = pool(400, Some(STATE));
    let (other, all) = (text(9, 41), text(1, 161));
    serve(&pool, 0, Some(9), &other);
    // The prompt grows: each is hit where the last one ended.
    let hits: Vec<_> =
        (1..=3).map(|turn| serve(&pool, turn, Some(1), &all[..40 * turn as usize + 1])).collect();
    assert_eq!(hits, [0, 40, 80]);
    let free = pool.stats().free;
    make_room(&pool, free + STATE);
    assert_eq!(pool.metrics().evictions.evict_first, STATE as u64);
    assert_eq!((hit(&pool, &all[..60]), hit(&pool, &all[..100])), (0, 80), "the first one is gone");
    assert_eq!((hit(&pool, &all), hit(&pool, &other)), (120, 40), "nothing else is");
    audit(&pool);
}

/// A conversation that leaves its path: the checkpoint at the end of the former prompt is dead.
#[test]
fn a_checkpoint_off_the_path_goes_first() {
    let pool = pool(400, Some(STATE));
    let all = text(1, 161);
    serve(&pool, 0, Some(9), &text(9, 41));
    serve(&pool, 1, Some(1), &all[..41]);
    serve(&pool, 2, Some(1), &[&all[..61], &text(2, 20)].concat());
    // Two new ones: where it leaves the cached path, and at its end.
    assert_eq!(serve(&pool, 3, Some(1), &[&all[..61], &text(3, 60)].concat()), 40);
    let free = pool.stats().free;
    // Five blocks of tokens were computed again.
    make_room(&pool, free + 2 * STATE + 5);
    let evictions = pool.metrics().evictions;
    assert_eq!((evictions.useless, evictions.evict_first), (5, 2 * STATE as u64));
    assert_eq!(hit(&pool, &[&all[..61], &text(2, 20)].concat()), 60, "but not 80");
    assert_eq!(hit(&pool, &[&all[..61], &text(3, 60)].concat()), 120);
    assert_eq!(hit(&pool, &text(9, 41)), 40);
    audit(&pool);
}

/// A checkpoint behind a common prompt is not one session's to give up.
#[test]
fn a_checkpoint_that_others_hit_stays() {
    let pool = pool(400, Some(STATE));
    let all = text(1, 161);
    assert_eq!(serve(&pool, 0, Some(1), &all[..41]), 0);
    assert_eq!(serve(&pool, 1, Some(2), &[&all[..40], &text(2, 21)].concat()), 40);
    for turn in 2..=4 {
        serve(&pool, turn, Some(1), &all[..40 * turn as usize + 1]);
    }
    let free = pool.stats().free;
    make_room(&pool, free + STATE);
    assert_eq!(hit(&pool, &[&all[..40], &text(3, 21)].concat()), 40);
    assert_eq!(hit(&pool, &all[..100]), 40, "the next one of its session is gone");
    audit(&pool);
}

/// A hit ends what a demotion began.
#[test]
fn a_demoted_checkpoint_that_is_hit_is_as_good_as_new() {
    let pool = pool(400, Some(STATE));
    let all = text(1, 161);
    for turn in 1..=3 {
        serve(&pool, turn, Some(1), &all[..40 * turn as usize + 1]);
    }
    let branch = [&all[..40], &text(2, 21)].concat();
    assert_eq!(serve(&pool, 4, Some(2), &branch), 40, "demoted, not gone");
    let evicted = pool.metrics().evictions.evict_first;
    let free = pool.stats().free;
    make_room(&pool, free + 1);
    assert_eq!(pool.metrics().evictions.evict_first, evicted);
    assert_eq!(hit(&pool, &[&all[..40], &text(3, 21)].concat()), 40);
    audit(&pool);
}

/// In a full pool, the dominated checkpoint makes room for the one that dominates it, also while a
/// batch is in flight.
#[test]
fn a_new_checkpoint_evicts_the_one_that_it_dominates() {
    for session in [Some(1), None] {
        for blocks in 61..75 {
            let (pool, all) = (pool(blocks, Some(STATE)), text(1, 161));
            for turn in 1..=3 {
                let end = 40 * turn as usize;
                assert_eq!(serve(&pool, turn, session, &all[..end + 1]), end - 40, "{blocks} blocks");
            }
            assert_eq!((hit(&pool, &all), hit(&pool, &all[..60])), (120, 0), "{blocks} blocks");
            audit(&pool);
        }
    }
}

/// A refused admission hits nothing: the checkpoint is its session's alone.
#[test]
fn a_refused_admission_is_no_hit() {
    let (pool, all) = (pool(400, Some(STATE)), text(1, 161));
    serve(&pool, 1, Some(1), &all[..41]);
    let lease = pool.allocate(AllocRequest::new(pool.stats().free - 5)).unwrap();
    let request = AdmitRequest::new(SequenceId(50), &all[..81]).session(SessionId(1));
    assert!(pool.admit_grouped(&request).is_err());
    drop(lease);
    for turn in 2..=3 {
        serve(&pool, turn, Some(1), &all[..40 * turn as usize + 1]);
    }
    let free = pool.stats().free;
    make_room(&pool, free + STATE);
    assert_eq!(pool.metrics().evictions.evict_first, STATE as u64);
    audit(&pool);
}

/// Of several copies, the one that stays has the place of the last release, in whatever order they
/// were registered and released.
#[test]
fn the_last_release_of_a_copy_counts() {
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    for (registered, released) in orders.iter().flat_map(|one| orders.iter().map(move |two| (one, two))) {
        let pool = pool(300, None);
        let (shared, other) = (text(1, 41), text(2, 41));
        let open = |id: u64, prompt: &[u32]| pool.sequence(SequenceId(id)).tokens(prompt).unwrap();
        let append = |sequence: &mut Sequence| {
            let mut batch = pool.begin_batch();
            batch.append(sequence, 41).unwrap();
            batch
        };
        let mut copies = [1, 2, 3].map(|id| Some(open(id, &shared)));
        let mut batches = copies.each_mut().map(|copy| Some(append(copy.as_mut().unwrap())));
        registered.iter().for_each(|&copy| batches[copy].take().unwrap().finish());
        released[..2].iter().for_each(|&copy| drop(copies[copy].take()));
        let mut last = open(30, &other);
        append(&mut last).finish();
        drop(last);
        drop(copies);
        pool.evict_cached(15);
        let hits = (open(40, &shared).len(), open(50, &other).len());
        assert_eq!(hits, (40, 20), "registered {registered:?}, released {released:?}");
        audit(&pool);
    }
}

/// Requests that compute the same tokens at the same time, the first in a hurry: the release of the
/// second says that they were just used.
#[test]
fn a_released_duplicate_renews_the_original() {
    let pool = pool(60, None);
    let (shared, other) = (text(1, 41), text(2, 41));
    let open = |id: u64, prompt: &[u32]| pool.sequence(SequenceId(id)).tokens(prompt).unwrap();
    let append = |sequence: &mut Sequence, tokens: usize| {
        let mut batch = pool.begin_batch();
        batch.append(sequence, tokens).unwrap();
        batch.finish();
    };
    let (mut first, mut second) = (open(1, &shared), open(2, &shared));
    append(&mut first, 41);
    append(&mut second, 41);
    drop(first);
    let mut third = open(3, &other);
    append(&mut third, 41);
    drop(third);
    drop(second);
    let evicted = pool.metrics().evictions;
    assert_eq!(evicted.total(), 0);
    // The duplicates, and half of what was used least recently.
    pool.evict_cached(15);
    let evicted = pool.metrics().evictions;
    assert_eq!((evicted.useless, evicted.by_queue[0]), (10, 5));
    assert_eq!((open(4, &shared).len(), open(5, &other).len()), (40, 20));
    audit(&pool);
}
