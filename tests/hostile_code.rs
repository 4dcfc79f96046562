//! User code that runs inside of the pool: reentrant calls and panics in it cost no owner a block.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};

use kvpool::prefix::PrefixConfig;
use kvpool::prefix::policy::{Head, Millis, Place, Policy, Released};
use kvpool::storage::KvLayout;
use kvpool::{AllocRequest, Lease, Pool, SequenceId};
use kvpool_testkit::storages::{Call, Hooked};

fn pool(blocks: usize) -> Pool {
    Pool::builder(KvLayout::named("tiny").unwrap()).blocks(blocks).without_storage().build().unwrap()
}

/// A waker that panics once it is armed.
#[derive(Default)]
struct Bomb(AtomicBool);

impl Wake for Bomb {
    fn wake(self: Arc<Self>) {
        assert!(!self.0.swap(false, Relaxed), "on purpose");
    }
}

/// Blocks released by a call that panics on its way out are released once, even if the lease lives
/// on.
#[test]
fn a_release_that_panics_releases_nothing_twice() {
    type Way = fn(&mut Lease<'static>);
    let ways: [(&str, Way); 2] =
        [("truncate", |lease| lease.truncate(3)), ("split_off", |lease| drop(lease.split_off(3)))];
    for (way, give_back) in ways {
        let pool = pool(32);
        let mut lease = pool.allocate_owned(AllocRequest::new(20)).unwrap();
        let bomb = Arc::new(Bomb::default());
        {
            let waker = Waker::from(bomb.clone());
            let mut waiting = pin!(pool.allocate_async(AllocRequest::new(32)).into_future());
            // Until it has searched everywhere, and sleeps.
            for _ in 0..4 {
                assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            }
            bomb.0.store(true, Relaxed);
            let outcome = catch_unwind(AssertUnwindSafe(|| give_back(&mut lease)));
            assert!(outcome.is_ok(), "{way}: a waker's panic must not propagate");
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

/// A policy that, when asked for a victim, drops the last reference to its pool and first uses
/// another.
#[derive(Debug, Default)]
struct Dropping {
    pool: Mutex<Option<Pool>>,
    caches_in_use: AtomicUsize,
}

impl Policy for Dropping {
    fn name(&self) -> &'static str {
        "dropping"
    }

    fn queues(&self) -> usize {
        2
    }

    fn place(&self, released: &Released, _: Millis) -> Place {
        Place { queue: 0, rank: released.order, state: 0 }
    }

    fn victim(&self, heads: &[Option<Head>], _: Millis) -> Option<usize> {
        if let Some(last) = self.pool.lock().unwrap().take() {
            let blocks = last.blocks().clone();
            drop(last);
            drop(pool(8).allocate(AllocRequest::new(1)).unwrap());
            self.caches_in_use.store(blocks.thread_caches_in_use(), Relaxed);
        }
        heads.iter().position(Option::is_some)
    }
}

/// The calling thread is in the middle of an allocation: it keeps its cache until the call returns.
#[test]
fn a_policy_that_drops_its_pool() {
    let policy = Arc::new(Dropping::default());
    let config = PrefixConfig::new().policy_of(policy.clone());
    let builder = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(16).without_storage();
    let pool = builder.prefix_cache(config).build().unwrap();
    let block_tokens = pool.layout().block_tokens();
    let prompt: Vec<u32> = (0..16 * block_tokens as u32).collect();
    let mut first = pool.sequence(SequenceId(1)).tokens(&prompt).unwrap();
    let mut step = pool.begin_batch();
    step.append(&mut first, prompt.len()).unwrap();
    step.finish();
    drop(first);
    assert_eq!(pool.stats().evictable, 16);
    let mut second = pool.sequence(SequenceId(2)).open().unwrap();
    let mut batch = pool.begin_batch();
    *policy.pool.lock().unwrap() = Some(pool);
    batch.append(&mut second, 3 * block_tokens).unwrap();
    assert_eq!(policy.caches_in_use.load(Relaxed), 1);
    drop((batch, second));
}

/// The payload of a panic, whose destructor panics too.
struct Payload;

impl Drop for Payload {
    fn drop(&mut self) {
        panic!("on purpose, in a payload");
    }
}

/// A waker, and a policy, whose panics have such a payload.
#[derive(Debug)]
struct Payloads;

impl Wake for Payloads {
    fn wake(self: Arc<Self>) {
        panic_any(Payload)
    }
}

impl Policy for Payloads {
    fn name(&self) -> &'static str {
        "payloads"
    }

    fn queues(&self) -> usize {
        2
    }

    fn place(&self, _: &Released, _: Millis) -> Place {
        panic_any(Payload)
    }

    fn victim(&self, _: &[Option<Head>], _: Millis) -> Option<usize> {
        panic_any(Payload)
    }
}

/// The pool drops the payloads of panics that it catches: a panic of their destructors goes no
/// further either.
#[test]
fn a_waker_panics_with_a_payload_that_panics() {
    let pool = pool(32);
    let lease = pool.allocate_owned(AllocRequest::new(20)).unwrap();
    let waker = Waker::from(Arc::new(Payloads));
    let mut waiting = pin!(pool.allocate_async(AllocRequest::new(32)).into_future());
    for _ in 0..4 {
        assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    }
    drop(lease);
    assert_eq!((pool.audit().unwrap().owned, pool.stats().free), (0, 32));
}

#[test]
fn a_policy_panics_with_a_payload_that_panics() {
    let config = PrefixConfig::new().policy_of(Arc::new(Payloads));
    let builder = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(16).without_storage();
    let pool = builder.prefix_cache(config).build().unwrap();
    for id in 0..4 {
        let prompt: Vec<u32> =
            (0..10 * pool.layout().block_tokens() as u32).map(|n| n + 1_000 * id).collect();
        let mut sequence = pool.sequence(SequenceId(u64::from(id))).tokens(&prompt).unwrap();
        let mut step = pool.begin_batch();
        step.append(&mut sequence, prompt.len()).unwrap();
        step.finish();
    }
    assert_eq!((pool.audit().unwrap().owned, pool.available_blocks()), (0, 16));
    assert!(pool.prefix_cache().unwrap().stats().evicted_blocks >= 24);
}

#[test]
fn a_wipe_panics_with_a_payload_that_panics() {
    let is_armed = Arc::new(AtomicBool::new(false));
    let armed = is_armed.clone();
    let layout = KvLayout::named("tiny").unwrap();
    let storage = Hooked::new(layout.clone(), 33, 33, move |call| {
        if call == Call::Zero && armed.load(Relaxed) {
            panic_any(Payload)
        }
        Ok(())
    });
    let pool = Pool::builder(layout).blocks(32).storage(Arc::new(storage)).zero_on_free().build().unwrap();
    let lease = pool.allocate_owned(AllocRequest::new(3)).unwrap();
    is_armed.store(true, Relaxed);
    drop(lease);
    is_armed.store(false, Relaxed);
    assert_eq!((pool.stats().unwiped, pool.audit().unwrap().held), (3, 3));
}
