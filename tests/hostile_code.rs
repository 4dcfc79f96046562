//! Code of a user's that runs inside of the pool, and panics there.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Wake, Waker};

use kvpool::pool::{AllocRequest, Lease, Pool};
use kvpool::storage::KvLayout;

fn pool(blocks: usize) -> Pool {
    Pool::builder(KvLayout::named("tiny").unwrap()).blocks(blocks).without_storage().build().unwrap()
}

/// A waker that panics, once it is armed.
#[derive(Default)]
struct Bomb(AtomicBool);

impl Wake for Bomb {
    fn wake(self: Arc<Self>) {
        assert!(!self.0.swap(false, Relaxed), "on purpose");
    }
}

/// What is given back by a call that panics on its way out is given back once, also if the lease lives on.
#[test]
fn a_release_that_panics_releases_nothing_twice() {
    type Way = fn(&Pool, &mut Lease<'static>);
    let ways: [(&str, Way); 4] = [
        ("truncate", |_, lease| lease.truncate(3)),
        ("free_first", |_, lease| lease.free_first(17)),
        ("split_off", |_, lease| drop(lease.split_off(3))),
        ("release", |pool, lease| pool.handle().release(lease.split_off(3))),
    ];
    for (way, give_back) in ways {
        let pool = pool(32);
        let mut lease = pool.allocate_owned(AllocRequest::new(20)).unwrap();
        let bomb = Arc::new(Bomb::default());
        {
            let waker = Waker::from(bomb.clone());
            let mut waiting = pin!(pool.allocate_async(AllocRequest::new(32)));
            // Until it has looked everywhere, and sleeps.
            for _ in 0..4 {
                assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            }
            bomb.0.store(true, Relaxed);
            let outcome = catch_unwind(AssertUnwindSafe(|| give_back(&pool, &mut lease)));
            assert!(outcome.is_err(), "{way}: the waiter was not woken");
        }
        assert_eq!(lease.blocks().len(), 3, "{way}");
        let others = pool.allocate_owned(AllocRequest::new(pool.free_blocks())).unwrap();
        assert_eq!(others.blocks().len(), 29, "{way}");
        let mut seen = HashSet::new();
        assert!(lease.blocks().iter().chain(others.blocks()).all(|id| seen.insert(*id)), "{way}");
        drop((lease, others));
        assert_eq!(pool.audit().unwrap().owned, 0, "{way}");
    }
}
