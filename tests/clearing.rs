//! What a clear of the prefix cache forgets, for ever, and what those who listen are told of it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::*};

use kvpool::prefix::{BlockHash, KvEvent, KvEvents, PrefixConfig};
use kvpool::{AllocRequest, BlockId, Pool, SequenceId};
use kvpool_testkit::prompts::{BLOCK_TOKENS, admit, pool, pool_of, prompt};

/// Each row notes the era of its block in few bits. What a sequence holds must not come back when
/// they go round.
#[test]
fn no_number_of_clears_brings_a_held_block_back() {
    let pool = pool(20);
    let (held, _) = admit(&pool, 1, &prompt(1, 9));
    // Noted under a batch that is in flight all the while, and registered after.
    let mut late = pool.sequence(SequenceId(2)).tokens(&prompt(2, 9)).unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut late, 9).unwrap();
    let found = |number| pool.sequence(SequenceId(9)).tokens(&prompt(number, 9)).unwrap().len();
    assert_eq!([found(1), found(2)], [8, 0]);
    for clear in 1..(1 << 16) + 2 {
        assert_eq!(pool.clear_prefix_cache(), 0, "all of it is held");
        // Before, at, and after the one at which 16 bits go round.
        if !(2..(1 << 16) - 1).contains(&clear) {
            assert_eq!([found(1), found(2)], [0, 0], "after {clear} clears");
        }
    }
    batch.finish();
    // A chain that began before all clears goes on, and registers what it fills.
    let mut batch = pool.begin_batch();
    batch.append_tokens(&mut late, &prompt(2, 16)[9..]).unwrap();
    batch.finish();
    assert_eq!([found(1), found(2)], [0, 0]);
    drop((held, late));
    assert_eq!([found(1), found(2)], [0, 0]);
    // What begins now is of the new era.
    drop(admit(&pool, 3, &prompt(1, 9)));
    assert_eq!(found(1), 8);
    pool.audit().unwrap();
}

/// What a router knows.
#[derive(Default)]
struct Router {
    stored: BTreeSet<(BlockId, BlockHash)>,
    cleared: usize,
    removed: usize,
    next: u64,
}

impl Router {
    /// Takes in what is there. Nothing is removed that was not stored since the last clear.
    fn follow(&mut self, events: &mut KvEvents) {
        while let Some(told) = events.try_recv() {
            assert_eq!(told.number, self.next, "a gap: {:?}", told.event);
            self.next += 1;
            match told.event {
                KvEvent::Stored { block, hash, .. } => drop(self.stored.insert((block, hash))),
                KvEvent::Removed { block, hash } => {
                    self.removed += 1;
                    assert!(self.stored.remove(&(block, hash)), "{block} was removed by a clear before");
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
fn what_a_clear_covers_is_not_removed_again() {
    let pool = pool(20);
    let mut events = pool.prefix_cache().unwrap().events().subscribe().unwrap();
    let mut router = Router::default();
    // Three blocks evictable, two owned, and a chain of the old era that goes on.
    drop(admit(&pool, 1, &prompt(1, 13)));
    let (held, _) = admit(&pool, 2, &prompt(2, 9));
    let (mut long, _) = admit(&pool, 3, &prompt(3, 9));
    router.follow(&mut events);
    assert_eq!(router.stored.len(), 7);
    assert_eq!(pool.clear_prefix_cache(), 3);
    router.follow(&mut events);
    assert_eq!((router.cleared, router.removed, router.stored.len()), (1, 0, 0));
    let mut batch = pool.begin_batch();
    batch.append_tokens(&mut long, &prompt(3, 16)[9..]).unwrap();
    batch.finish();
    drop((held, long));
    drop(pool.allocate(AllocRequest::new(20)).unwrap());
    router.follow(&mut events);
    assert_eq!((router.removed, router.stored.len()), (0, 0), "of the old era nothing is told");
    // Of the new one everything is.
    drop(admit(&pool, 4, &prompt(1, 13)));
    router.follow(&mut events);
    assert_eq!(router.stored, pool.cached_blocks().into_iter().collect());
    drop(pool.allocate(AllocRequest::new(20)).unwrap());
    router.follow(&mut events);
    assert_eq!((router.removed, router.stored.len()), (3, 0));
}

/// Ends the other threads' work, also if this one panics.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Threads register, release and evict while another clears: whoever follows is never told of the
/// end of what a clear covered, and knows in the end what is cached.
#[test]
fn a_router_that_follows_clears_beside_registrations_is_right() {
    const CLEARS: usize = 300;
    let pool = pool_of(64, PrefixConfig::new().events(1 << 20));
    let mut events = pool.prefix_cache().unwrap().events().subscribe().unwrap();
    let (mut router, is_over) = (Router::default(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let over = Over(&is_over);
        let work = |thread| {
            let (pool, is_over): (&Pool, _) = (&pool, &is_over);
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(thread);
                while !is_over.load(Relaxed) {
                    let prompt = prompt(rng.u32(0..12), rng.usize(1..5) * BLOCK_TOKENS + 1);
                    let mut sequence = pool.sequence(SequenceId(thread)).tokens(&prompt).unwrap();
                    let cached = sequence.len();
                    // Refused where a thread that is stopped has a batch in flight: then all that
                    // is freed waits.
                    let _ = pool.begin_batch().append(&mut sequence, prompt.len() - cached);
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
        // Joined: a scope does not wait for the threads' destructors, which give back what they
        // kept.
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    router.follow(&mut events);
    assert_eq!(router.cleared, CLEARS);
    assert_eq!(router.stored, pool.cached_blocks().into_iter().collect());
    pool.audit().unwrap();
}
