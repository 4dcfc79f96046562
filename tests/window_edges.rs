//! Pools with an attention window: bad input, small pools, and writes that are given back.
#![cfg(not(any(kvpool_loom, miri)))]

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use kvpool::prefix::PrefixConfig;
use kvpool::storage::groups::{GroupOptions, LayerCache, LayerGroups, Reach, Row};
use kvpool::{
    AdmitRequest, Batch, BlockId, BlockTable, Dtype, KvLayout, LowestPriorityFirst, Pool, Preempt, Sequence,
    SequenceId, TOKENS_MAX, Tokens, Window,
};
use pollster::block_on;

const ID: SequenceId = SequenceId(1);

fn layout(block_tokens: usize) -> KvLayout {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).dtype(Dtype::F32);
    layout.block_tokens(block_tokens).build().unwrap()
}

fn window(tokens: usize) -> Window {
    Window::new(tokens).unwrap()
}

fn pool(blocks: usize, block_tokens: usize, window: Window) -> Pool {
    let builder = Pool::builder(layout(block_tokens)).blocks(blocks).threads(1).window(window);
    builder.prefix_cache(PrefixConfig::new()).build().unwrap()
}

/// Without a cache and storage: the engine copies on write.
fn bare(blocks: usize, block_tokens: usize, window: Window) -> Pool {
    let builder = Pool::builder(layout(block_tokens)).blocks(blocks).threads(1).window(window);
    builder.without_storage().build().unwrap()
}

fn append(pool: &Pool, sequence: &mut Sequence, tokens: Tokens<'_>) {
    let mut batch = pool.begin_batch();
    batch.append(sequence, tokens).unwrap();
    batch.finish();
}

/// Checks that every token that the next one sees is in a block.
fn check_continues(pool: &Pool, sequence: &Sequence, window: Window) {
    let (block_tokens, length) = (pool.layout().block_tokens(), sequence.len());
    let blocks: Vec<BlockId> = sequence.blocks().collect();
    for position in 0..length {
        if position < window.sink_tokens() || position + window.tokens() > length {
            assert_ne!(blocks[position / block_tokens], BlockId(0), "token {position} of {length}");
        }
    }
}

/// The batch of the copy is abandoned: the sequence continues at the first token of that block.
#[test]
fn a_copy_by_the_engine_that_is_given_back_leaves_the_window() {
    for block_tokens in [1, 2, 4, 16] {
        for (tokens, more) in (1..40).flat_map(|tokens| [(tokens, 1), (tokens, 40)]) {
            for window in [1, 2, 3, 5, 17].map(window) {
                let pool = bare(200, block_tokens, window);
                let mut sequence = pool.sequence(ID).open().unwrap();
                append(&pool, &mut sequence, Tokens::Final(tokens));
                let fork = sequence.fork(SequenceId(2)).unwrap();
                let mut batch = pool.begin_batch();
                batch.append(&mut sequence, more).unwrap();
                drop(batch);
                check_continues(&pool, &sequence, window);
                append(&pool, &mut sequence, Tokens::Final(1));
                check_continues(&pool, &sequence, window);
                check_continues(&pool, &fork, window);
                drop((sequence, fork));
                assert_eq!(pool.audit().unwrap().owned, 0);
            }
        }
    }
}

/// The draft before it gave up blocks of its own window.
#[test]
fn a_copy_after_a_rejected_draft_leaves_the_window() {
    let (pool, window) = (bare(200, 4, window(3)), window(3));
    let mut sequence = pool.sequence(ID).open().unwrap();
    append(&pool, &mut sequence, Tokens::Final(7));
    append(&pool, &mut sequence, Tokens::Draft(4));
    sequence.truncate(7).unwrap();
    let _fork = sequence.fork(SequenceId(2)).unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 1).unwrap();
    drop(batch);
    assert_eq!(sequence.len(), 4);
    check_continues(&pool, &sequence, window);
}

/// A batch stores tokens of an open block again, and is abandoned.
#[test]
fn a_store_that_is_given_back_leaves_the_window() {
    let (pool, window) = (pool(200, 4, window(3)), window(3));
    let mut sequence = pool.sequence(ID).open().unwrap();
    append(&pool, &mut sequence, Tokens::Final(7));
    append(&pool, &mut sequence, Tokens::Draft(4));
    sequence.truncate(7).unwrap();
    let mut batch = pool.begin_batch();
    let (k, v) = ([1.0; 3], [1.0; 3]);
    batch.store(&mut sequence, 0, 4..7, (&k[..]).into(), (&v[..]).into()).unwrap();
    drop(batch);
    assert_eq!(sequence.len(), 4);
    check_continues(&pool, &sequence, window);
}

/// Its blocks stay open while the batch after them is in flight, and an older one of others.
#[test]
fn open_blocks_keep_their_windows() {
    let (pool, window) = (pool(200, 4, window(3)), window(3));
    let (mut sequence, older) = (pool.sequence(ID).open().unwrap(), pool.begin_batch());
    let (mut first, mut second, mut third) = (pool.begin_batch(), pool.begin_batch(), pool.begin_batch());
    first.append(&mut sequence, 10).unwrap();
    second.append(&mut sequence, 10).unwrap();
    third.append(&mut sequence, 4).unwrap();
    first.finish();
    second.finish();
    let mut last = pool.begin_batch();
    last.append(&mut sequence, 4).unwrap();
    assert_eq!(sequence.settled_blocks(), 2);
    let (k, v) = ([1.0; 1], [1.0; 1]);
    last.store(&mut sequence, 0, 8..9, (&k[..]).into(), (&v[..]).into()).unwrap();
    third.finish();
    drop(last);
    assert_eq!(sequence.len(), 8);
    check_continues(&pool, &sequence, window);
    older.finish();
}

/// The largest windows, sinks and chunks that the types allow.
#[test]
fn extreme_windows_and_chunks() {
    let prompt: Vec<u32> = (0..40).collect();
    for window in [window(TOKENS_MAX).sinks(u32::MAX), window(TOKENS_MAX), window(1).sinks(u32::MAX)] {
        for block_tokens in [1, 4] {
            let pool = pool(100, block_tokens, window);
            for cached in [0, 39 / block_tokens * block_tokens] {
                for chunk in [0, 1, usize::MAX] {
                    let admitted = pool.admit(&AdmitRequest::new(ID, &prompt).chunk(chunk)).unwrap();
                    assert_eq!(admitted.len(), cached);
                    let all = prompt.len().div_ceil(block_tokens) - cached / block_tokens;
                    assert_eq!(admitted.reserved_blocks(), all, "chunks of {chunk}");
                }
                let mut sequence = pool.sequence(ID).tokens(&prompt).unwrap();
                append(&pool, &mut sequence, Tokens::Announced(usize::MAX));
                append(&pool, &mut sequence, Tokens::Ids(&[1]));
                assert_eq!(sequence.blocks_given_up(), 0);
            }
        }
    }
}

/// What it hits is a part of what it needs at once, not an addition.
#[test]
fn a_hit_fits_where_the_prompt_fits() {
    let prompt: Vec<u32> = (0..2_000).collect();
    // 16 blocks of the window, 8 of a chunk, one for the edges; and the null block.
    let pool = pool(26, 16, window(256));
    let request = AdmitRequest::new(ID, &prompt).chunk(128);
    assert_eq!(pool.blocks_needed(&request).unwrap(), 25);
    // Chunks of 64 tokens: the blocks given up become free when the batch has ended.
    let mut sequence = pool.admit(&request).unwrap();
    assert_eq!((sequence.len(), sequence.reserved_blocks()), (0, 25));
    while sequence.len() < prompt.len() {
        append(&pool, &mut sequence, Tokens::Announced(64));
    }
    drop(sequence);
    assert_eq!(pool.blocks_needed(&request).unwrap(), 17, "16 of them are evictable");
    let again = pool.admit(&request).unwrap();
    assert_eq!((again.len(), again.reserved_blocks()), (1_984, 1), "one block is missing");
    drop(again);
    let longer: Vec<u32> = (0..1_984).chain([7; 500]).collect();
    let request = AdmitRequest::new(ID, &longer).chunk(128);
    let mut again =
        block_on(pool.admit_async(&request).until(Instant::now() + Duration::from_secs(5))).unwrap();
    assert_eq!((again.len(), again.reserved_blocks()), (1_984, 9));
    while again.len() < longer.len() {
        append(&pool, &mut again, Tokens::Announced(64));
        check_continues(&pool, &again, window(256));
    }
    drop(again);
    pool.audit().unwrap();
}

/// As an append, it gives up blocks behind the window first.
#[test]
fn a_reservation_takes_the_place_of_blocks_behind_the_window() {
    let pool = pool(11, 4, window(4));
    let mut sequence = pool.sequence(ID).open().unwrap();
    append(&pool, &mut sequence, Tokens::Final(32));
    sequence.reserve(24).unwrap();
    assert_eq!((sequence.blocks_given_up(), sequence.reserved_blocks()), (7, 6));
    check_continues(&pool, &sequence, window(4));
}

/// A preempted sequence finds its last window again.
#[test]
fn a_preempted_sequence_keeps_what_its_window_hits() {
    let (pool, all) = (pool(200, 4, window(8).sinks(4)), (0..101).collect::<Vec<u32>>());
    let mut sequence = pool.sequence(ID).open().unwrap();
    for chunk in all.chunks(10) {
        append(&pool, &mut sequence, Tokens::Ids(chunk));
    }
    assert_eq!(sequence.blocks_given_up(), 22);
    let victim = pool.victim(ID).unwrap();
    assert_eq!((victim.blocks, victim.available_blocks()), (4, 4));
    let preempted = block_on(pool.preempt(sequence, Preempt::Recompute)).unwrap();
    assert_eq!((preempted.tokens_kept, preempted.tokens_lost), (100, 1));
    assert_eq!(pool.sequence(ID).tokens(&all).unwrap().len(), 100);
    // Without a window before the last boundary, nothing is found.
    let cut: Vec<u32> = all[..81].to_vec();
    let mut sequence = pool.sequence(ID).tokens(&cut).unwrap();
    let hit = sequence.len();
    append(&pool, &mut sequence, Tokens::Announced(usize::MAX));
    assert_eq!(hit, 80, "what was given up is cached");
    pool.clear_prefix_cache();
    let preempted = block_on(pool.preempt(sequence, Preempt::Recompute)).unwrap();
    assert_eq!((preempted.tokens_kept, preempted.tokens_lost), (0, 81));
    assert_eq!(pool.sequence(ID).tokens(&cut).unwrap().len(), 0);
}

/// What is left of it goes to another pool, and gives up blocks there.
#[test]
fn a_sequence_without_its_first_blocks_goes() {
    let (pool, target) = (pool(200, 4, window(8)), pool(200, 4, window(8)));
    let mut sequence = pool.sequence(ID).open().unwrap();
    for _ in 0..10 {
        append(&pool, &mut sequence, Tokens::Final(4));
    }
    let (given_up, held) = (sequence.blocks_given_up(), pool.stats().used);
    assert!(given_up > 0);
    let gone = block_on(pool.preempt(sequence, Preempt::Swap(&target))).unwrap();
    let mut sequence = gone.swapped.unwrap().sequence;
    assert_eq!((sequence.len(), sequence.blocks_given_up()), (40, given_up));
    assert_eq!((pool.stats().used, target.stats().used), (0, held));
    append(&target, &mut sequence, Tokens::Final(4));
    append(&target, &mut sequence, Tokens::Final(1));
    assert_eq!(sequence.blocks_given_up(), given_up + 2);
    drop(sequence);
    assert_eq!((pool.audit().unwrap().owned, target.audit().unwrap().owned), (0, 0));
}

/// The last block of known tokens was given up: nothing is to be registered, so nothing waits.
#[test]
fn a_close_awaits_no_batch_for_blocks_that_were_given_up() {
    let pool = pool(200, 4, window(8));
    let mut sequence = pool.sequence(ID).open().unwrap();
    append(&pool, &mut sequence, Tokens::Ids(&[7; 8]));
    append(&pool, &mut sequence, Tokens::Final(40));
    append(&pool, &mut sequence, Tokens::Final(4));
    assert!(sequence.blocks_given_up() > 2);
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 1).unwrap();
    drop(sequence);
    assert!(pool.owners().closing.is_empty());
    batch.finish();
    pool.audit().unwrap();
}

/// Appends tokens of a kind, and stores the number of each.
fn append_numbered(batch: &mut Batch, sequence: &mut Sequence, tokens: Tokens<'_>, kind: u32) -> bool {
    let Ok(appended) = batch.append(sequence, tokens) else { return false };
    let numbers: Vec<f32> = appended.tokens.clone().map(|at| (kind * 1_000 + at as u32) as f32).collect();
    batch.store(sequence, 0, appended.tokens, (&numbers[..]).into(), (&numbers[..]).into()).unwrap();
    true
}

/// Checks the numbers that the next token sees.
fn check_numbers(pool: &Pool, sequence: &Sequence, kind: u32, window: Window) {
    let (mut batch, length) = (pool.begin_batch(), sequence.len());
    let behind = (length + 1).saturating_sub(window.tokens());
    for position in (0..length).filter(|&at| at < window.sink_tokens() || at >= behind) {
        let (mut k, mut v) = ([0.0], [0.0]);
        let token = position..position + 1;
        batch.load(sequence, 0, token, (&mut k[..]).into(), (&mut v[..]).into()).unwrap();
        assert_eq!(k[0], (kind * 1_000 + position as u32) as f32, "token {position} of {length}");
    }
}

/// Counts a thread less, also if it panics.
struct Ended<'a>(&'a AtomicUsize);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// Sequences slide, fork, draft and are abandoned while others compact, resize, clear and read.
#[test]
fn sequences_slide_while_the_pool_changes() {
    const ROUNDS: u64 = if cfg!(debug_assertions) { 60 } else { 600 };
    let window = window(11).sinks(2);
    let builder = Pool::builder(layout(4)).blocks(600).blocks_max(900).segment_blocks(64).threads(6);
    let pool = builder.prefix_cache(PrefixConfig::new()).window(window).build().unwrap();
    let (pool, running) = (&pool, &AtomicUsize::new(3));
    thread::scope(|scope| {
        for worker in 0..3 {
            scope.spawn(move || {
                let (mut random, _ended) = (fastrand::Rng::with_seed(worker), Ended(running));
                let done = (0..ROUNDS)
                    .filter(|round| slide_once(pool, &mut random, (worker << 32 | round) * 2, window));
                assert!(done.count() > 0, "every round was refused");
            });
        }
        scope.spawn(move || {
            let mut random = fastrand::Rng::with_seed(7);
            while running.load(Relaxed) > 0 {
                match random.usize(0..4) {
                    0 => drop(block_on(pool.defragment()).unwrap()),
                    1 => drop(block_on(pool.resize(random.usize(500..900)))),
                    2 => pool.clear_prefix_cache(),
                    _ => drop(pool.victims(&LowestPriorityFirst)),
                }
            }
        });
        scope.spawn(move || {
            let mut table = BlockTable::new();
            while running.load(Relaxed) > 0 {
                let open = pool.victims(&LowestPriorityFirst).into_iter();
                for view in open.filter_map(|victim| pool.view(victim.id)) {
                    let batch = pool.begin_batch();
                    batch.block_table([&view], &mut table).unwrap();
                    assert!(!view.blocks().contains(&BlockId(0)));
                    batch.finish();
                }
            }
        });
    });
    assert_eq!((pool.audit().unwrap().owned, pool.stats().used), (0, 0));
}

/// Returns whether no append was refused.
fn slide_once(pool: &Pool, random: &mut fastrand::Rng, id: u64, window: Window) -> bool {
    let (kind, length) = (random.u32(0..3), random.u32(1..90));
    let all: Vec<u32> = (0..length).map(|at| (kind << 16) + at).collect();
    let request = AdmitRequest::new(SequenceId(id), &all).chunk(8).leave(2);
    let Ok(mut sequence) = pool.admit(&request) else {
        // A batch of another thread may be in the way.
        thread::sleep(Duration::from_millis(1));
        return false;
    };
    check_numbers(pool, &sequence, kind, window);
    while sequence.len() < all.len() {
        let mut batch = pool.begin_batch();
        if !append_numbered(&mut batch, &mut sequence, Tokens::Announced(8), kind) {
            return false;
        }
        // Abandoned now and then: its tokens are appended again.
        if random.u8(..) > 30 {
            batch.finish();
        }
    }
    check_numbers(pool, &sequence, kind, window);
    let mut fork = sequence.fork(SequenceId(id + 1)).unwrap();
    for _ in 0..10 {
        let mut batch = pool.begin_batch();
        let drafted = append_numbered(&mut batch, &mut fork, Tokens::Draft(5), kind);
        let next = (kind << 16) + sequence.len() as u32;
        let is_appended = append_numbered(&mut batch, &mut sequence, Tokens::Ids(&[next]), kind);
        batch.finish();
        let accepted: Vec<u32> =
            (0..random.u32(0..6)).map(|at| (kind << 16) + fork.committed() as u32 + at).collect();
        if !drafted || !is_appended {
            return false;
        }
        fork.accept(&accepted).unwrap();
        check_numbers(pool, &fork, kind, window);
        check_numbers(pool, &sequence, kind, window);
    }
    true
}

/// The error of a model with a window that no pool has names the group.
#[test]
fn a_refused_window_names_its_group() {
    let row = Row::Heads { kv_heads: 1, k_dim: 8, v_dim: 8 };
    let tokens = TOKENS_MAX as u64 + 1;
    for reach in [Reach::Window { tokens, sinks: 0 }, Reach::Chunk { tokens }] {
        let layers = [vec![LayerCache::all(row)], vec![LayerCache { row, reach }]];
        let model = LayerGroups::of_layers(&layers, GroupOptions::new()).unwrap();
        let place = model.groups().iter().position(|group| group.reach() == reach).unwrap();
        let error = Pool::layered(&model).map(drop).unwrap_err();
        assert_eq!((error.what, error.index), ("window", Some(place)), "{error}");
    }
}
