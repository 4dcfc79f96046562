//! Clears of the prefix cache: what they forget for good, and the events that they send.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::*};

use kvpool::prefix::policy::{CachePriority, PolicyKind};
use kvpool::prefix::{BlockHash, KvEvent, KvEvents, PrefixConfig};
use kvpool::{AllocRequest, BlockId, Pool, SequenceId};
use kvpool_testkit::prompts::{BLOCK_TOKENS, admit, pool, pool_of, prompt};
use kvpool_testkit::steps::append;

/// Each row stores the era of its block in few bits. A block that a sequence holds must not be
/// found again when they wrap around.
#[test]
fn no_number_of_clears_brings_a_held_block_back() {
    let pool = pool(20);
    let (held, _) = admit(&pool, 1, &prompt(1, 9));
    // Recorded under a batch that stays in flight, and registered afterwards.
    let mut late = pool.sequence(SequenceId(2)).tokens(&prompt(2, 9)).unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut late, 9).unwrap();
    let found = |number| pool.sequence(SequenceId(9)).tokens(&prompt(number, 9)).unwrap().len();
    assert_eq!([found(1), found(2)], [8, 0]);
    for clear in 1..(1 << 16) + 2 {
        pool.clear_prefix_cache();
        // Before, at, and after the clear at which 16 bits wrap around.
        if !(2..(1 << 16) - 1).contains(&clear) {
            assert_eq!([found(1), found(2)], [0, 0], "after {clear} clears");
        }
    }
    batch.finish();
    // A chain that began before all clears continues, and registers the blocks that it fills.
    append(&pool, &mut late, &prompt(2, 16)[9..]);
    assert_eq!([found(1), found(2)], [0, 0]);
    drop((held, late));
    assert_eq!([found(1), found(2)], [0, 0]);
    // New chains belong to the new era.
    drop(admit(&pool, 3, &prompt(1, 9)));
    assert_eq!(found(1), 8);
    pool.audit().unwrap();
}

/// Blocks of earlier eras, which a pool with room does not evict, take no place in the index from
/// those of the same hash that are cached later.
#[test]
fn no_number_of_clears_keeps_a_prompt_from_being_found() {
    let pool = pool(2_000);
    for clears in 0..60 {
        drop(admit(&pool, 1, &prompt(1, 41)));
        assert_eq!(admit(&pool, 2, &prompt(1, 41)).1, 40, "after {clears} clears");
        pool.clear_prefix_cache();
    }
    assert_eq!((pool.prefix_cache().unwrap().stats().forgotten_blocks, pool.stats().evictable), (0, 600));
    pool.audit().unwrap();
}

/// A clear leaves blocks of the old era evictable. They are evicted before all that are cached
/// later, whatever the policy, and an offload does not take them.
#[test]
fn blocks_of_an_earlier_era_are_evicted_first() {
    for kind in PolicyKind::ALL {
        let pool = pool_of(60, PrefixConfig::new().policy(kind));
        let keep = |number, priority| {
            let tokens = prompt(number, 4 * BLOCK_TOKENS);
            let mut sequence = pool.sequence(SequenceId(1)).keep(priority).tokens(&tokens).unwrap();
            append(&pool, &mut sequence, tokens.len());
        };
        (0..5).for_each(|number| keep(number, CachePriority::High));
        pool.clear_prefix_cache();
        (5..10).for_each(|number| keep(number, CachePriority::Low));
        assert_eq!(pool.stats().evictable, 40);
        let fresh: BTreeSet<_> = pool.cached_blocks().into_iter().collect();
        assert_eq!(fresh.len(), 20);
        assert_eq!(pool.evict_cached(20), 20);
        assert_eq!(pool.cached_blocks().into_iter().collect::<BTreeSet<_>>(), fresh, "{kind:?}");
        pool.clear_prefix_cache();
        assert!(pool.export_cached(3).unwrap().is_empty());
        assert_eq!((pool.stats().evictable, pool.free_blocks()), (0, 60), "dropped on the way");
        pool.audit().unwrap();
    }
}

/// A trim evicts in the policy's order, down to a number of blocks, over several slices of its own,
/// and leaves blocks with owners, and those that a batch may see.
#[test]
fn a_trim_keeps_the_blocks_that_would_be_evicted_last() {
    let pool = pool(2_000);
    // One after another: 0 is evicted first.
    for number in 0..400 {
        drop(admit(&pool, number.into(), &prompt(number, 4 * BLOCK_TOKENS)));
    }
    let (held, _) = admit(&pool, 1_000, &prompt(1_000, 9));
    let found = |number| pool.sequence(SequenceId(2_000)).tokens(&prompt(number, 16)).unwrap().len();
    assert_eq!(pool.stats().evictable, 1_600);
    assert_eq!(pool.evict_cached(1_600), 0);
    assert_eq!(pool.evict_cached(usize::MAX), 0);
    let freed = pool.free_blocks();
    assert_eq!(pool.evict_cached(40), 1_560);
    assert_eq!((pool.stats().evictable, pool.free_blocks()), (40, freed + 1_560));
    assert_eq!((found(0), found(389)), (0, 0));
    // A prompt's last token is always computed.
    assert_eq!([found(390), found(399)], [3 * BLOCK_TOKENS; 2]);
    let batch = pool.begin_batch();
    drop(admit(&pool, 3_000, &prompt(3_000, 4 * BLOCK_TOKENS)));
    // These were released while the batch was in flight: it may see them.
    let left = pool.stats().evictable - pool.evict_cached(0);
    assert!(left >= 4, "{left} are left");
    batch.finish();
    assert_eq!(pool.evict_cached(0), left);
    assert_eq!(pool.stats().evictable, 0);
    assert_eq!(pool.sequence(SequenceId(4_000)).tokens(&prompt(1_000, 9)).unwrap().len(), 8);
    drop(held);
    pool.audit().unwrap();
}

/// A router's view of the cache.
#[derive(Default)]
struct Router {
    stored: BTreeSet<(BlockId, BlockHash)>,
    cleared: usize,
    removed: usize,
    next: u64,
}

impl Router {
    /// Applies pending events. A block may only be removed if it was stored since the last clear.
    fn follow(&mut self, events: &mut KvEvents) {
        while let Some(told) = events.try_recv() {
            assert_eq!(told.number, self.next, "a gap: {:?}", told.event);
            self.next += 1;
            match told.event {
                KvEvent::Stored { block, hash, .. } => drop(self.stored.insert((block, hash))),
                KvEvent::Removed { block, hash, .. } => {
                    self.removed += 1;
                    assert!(self.stored.remove(&(block, hash)), "{block} was already removed by a clear");
                }
                KvEvent::Cleared => {
                    self.cleared += 1;
                    self.stored.clear();
                }
                other => panic!("nothing was lost: {other:?}"),
            }
        }
    }
}

#[test]
fn a_block_covered_by_a_clear_is_not_removed_again() {
    let pool = pool(20);
    let mut events = pool.prefix_cache().unwrap().events().subscribe().unwrap();
    let mut router = Router::default();
    // Three blocks are evictable, two owned, and a chain of the old era continues.
    drop(admit(&pool, 1, &prompt(1, 13)));
    let (held, _) = admit(&pool, 2, &prompt(2, 9));
    let (mut long, _) = admit(&pool, 3, &prompt(3, 9));
    router.follow(&mut events);
    assert_eq!(router.stored.len(), 7);
    pool.clear_prefix_cache();
    assert_eq!(pool.stats().evictable, 3, "unfindable, and not evicted yet");
    router.follow(&mut events);
    assert_eq!((router.cleared, router.removed, router.stored.len()), (1, 0, 0));
    append(&pool, &mut long, &prompt(3, 16)[9..]);
    drop((held, long));
    drop(pool.allocate(AllocRequest::new(20)).unwrap());
    router.follow(&mut events);
    assert_eq!((router.removed, router.stored.len()), (0, 0), "no events for the old era");
    // The new era has events for every block.
    drop(admit(&pool, 4, &prompt(1, 13)));
    router.follow(&mut events);
    assert_eq!(router.stored, pool.cached_blocks().into_iter().collect());
    drop(pool.allocate(AllocRequest::new(20)).unwrap());
    router.follow(&mut events);
    assert_eq!((router.removed, router.stored.len()), (3, 0));
}

/// Stops the other threads when dropped, also by a panic.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Threads register, release and evict while another clears: a follower of the events never sees a
/// removal that a clear covered, and finally knows what is cached.
#[test]
fn a_router_is_right_beside_concurrent_clears() {
    const CLEARS: usize = 300;
    let pool = pool_of(64, PrefixConfig::new().events(1 << 20));
    let mut events = pool.prefix_cache().unwrap().events().subscribe().unwrap();
    let (mut router, is_over) = (Router::default(), AtomicBool::new(false));
    kvpool_testkit::threads::scope(|scope| {
        let over = Over(&is_over);
        let work = |thread| {
            let (pool, is_over): (&Pool, _) = (&pool, &is_over);
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(thread);
                while !is_over.load(Relaxed) {
                    let prompt = prompt(rng.u32(0..12), rng.usize(1..5) * BLOCK_TOKENS + 1);
                    let mut sequence = pool.sequence(SequenceId(thread)).tokens(&prompt).unwrap();
                    let cached = sequence.len();
                    // Refused if a stopped thread has a batch in flight: it holds back all freed
                    // frames.
                    let mut step = pool.begin_batch();
                    let _ = step.append(&mut sequence, prompt.len() - cached);
                    step.finish();
                }
            })
        };
        let threads = [0, 1, 2].map(work);
        for _ in 0..CLEARS {
            pool.clear_prefix_cache();
            router.follow(&mut events);
            std::thread::yield_now();
        }
        drop(over);
        // Joined: a scope does not wait for the threads' destructors, which flush their caches.
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    router.follow(&mut events);
    assert_eq!(router.cleared, CLEARS);
    assert_eq!(router.stored, pool.cached_blocks().into_iter().collect());
    pool.audit().unwrap();
}
