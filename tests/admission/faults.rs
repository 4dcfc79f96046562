//! Admissions and decode steps under unlucky timing, and beside a pool that shrinks or fails.

use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use kvpool::prefix::PrefixConfig;
use kvpool::prefix::policy::{Head, Millis, Place, Policy, Released};
use kvpool::storage::KvLayout;
use kvpool::{
    AllocError, AllocRequest, Append, DeviceId, Lease, Pool, Priority, Sequence, SequenceError, SequenceId,
    StepError, StorageError, Tokens,
};
use kvpool_testkit::prompts::{admit as serve, pool as caching, pool_of, prompt};
use kvpool_testkit::steps::append;
use kvpool_testkit::storages::{Call, Hooked};
use tokio::time::sleep;

use super::{plain, poll_once, quiet, request};

/// What the copies after this many others meet; without an error they panic.
type Fault = Mutex<Option<(usize, Option<StorageError>)>>;

/// Creates a pool with a prefix cache on a storage whose copies fail or panic when told to.
fn hooked(blocks: usize) -> (Pool, Arc<Fault>) {
    let layout = KvLayout::named("tiny").unwrap();
    let fault: Arc<Fault> = Arc::default();
    let next = fault.clone();
    let storage = Hooked::new(layout.clone(), blocks + 1, blocks + 1, move |call| {
        let fault = match &mut *next.lock().unwrap() {
            Some((0, fault)) if call == Call::Copy => fault.clone(),
            Some((others, _)) if call == Call::Copy => {
                *others -= 1;
                return Ok(());
            }
            _ => return Ok(()),
        };
        Err(fault.expect("on purpose"))
    });
    let builder = Pool::builder(layout).storage(Arc::new(storage)).blocks(blocks).threads(1);
    (builder.prefix_cache(PrefixConfig::new()).build().unwrap(), fault)
}

/// A copy on write that finds the device lost.
fn lose(pool: &Pool, fault: &Fault, sequence: &Sequence) {
    let mut fork = sequence.fork(SequenceId(1_000)).unwrap();
    let lost = StorageError::DeviceLost { device: DeviceId::Host, reason: "the test says so".into() };
    *fault.lock().unwrap() = Some((0, Some(lost)));
    pool.begin_batch().append(&mut fork, 1).unwrap_err();
}

#[tokio::test]
async fn an_admission_learns_that_the_device_is_lost() {
    let (pool, fault) = hooked(10);
    let (sequence, _) = serve(&pool, 1, &prompt(1, 5));
    let mut reserving = pool.sequence(SequenceId(2)).open().unwrap();
    let rest = pool.allocate(AllocRequest::new(7)).unwrap();
    let tokens = prompt(2, 20);
    let wanted = request(3, &tokens);
    let mut waiting = pin!(pool.admit_async(&wanted).into_future());
    let mut growing = pin!(pool.reserve_async(&mut reserving, 20).into_future());
    for _ in 0..5 {
        assert!(poll_once(waiting.as_mut()).is_pending());
        assert!(poll_once(growing.as_mut()).is_pending());
    }
    lose(&pool, &fault, &sequence);
    let lost = SequenceError::Alloc(AllocError::DeviceLost { device: DeviceId::Host });
    assert_eq!(poll_once(growing.as_mut()), Poll::Ready(Err(lost.clone())));
    let Poll::Ready(outcome) = poll_once(waiting.as_mut()) else { panic!("the admission waits forever") };
    assert_eq!(outcome.unwrap_err(), lost);
    drop(rest);
}

#[tokio::test]
async fn requests_that_a_shrink_made_impossible_are_refused() {
    let pool = caching(100);
    let cached = prompt(1, 17);
    drop(serve(&pool, 0, &cached));
    // Four cached blocks and 60 others.
    let tokens = prompt(1, 64 * 4);
    let wanted = request(3, &tokens);
    let mut reserving = pool.sequence(SequenceId(2)).open().unwrap();
    reserving.reserve(16 * 4).unwrap();
    append(&pool, &mut reserving, 16 * 4);
    let held = pool.allocate(AllocRequest::new(40)).unwrap();
    let mut growing = pin!(pool.reserve_async(&mut reserving, 50 * 4).into_future());
    let mut waiting = pin!(pool.admit_async(&wanted).into_future());
    for _ in 0..5 {
        assert!(poll_once(growing.as_mut()).is_pending());
        assert!(poll_once(waiting.as_mut()).is_pending());
    }
    pool.resize(63).await.unwrap();
    let outcome = poll_once(growing.as_mut());
    let Poll::Ready(Err(error)) = outcome else { panic!("the reservation waits forever") };
    assert_eq!(error, SequenceError::Alloc(AllocError::TooLarge { asked: 66, total: 63 }));
    let Poll::Ready(outcome) = poll_once(waiting.as_mut()) else { panic!("the admission waits forever") };
    assert_eq!(outcome.unwrap_err(), SequenceError::Alloc(AllocError::TooLarge { asked: 64, total: 63 }));
    drop(held);
}

/// The reserve is not for a prompt that is cached in part, either.
#[tokio::test]
async fn requests_that_need_the_reserve_are_refused() {
    let layout = KvLayout::named("tiny").unwrap();
    let builder = Pool::builder(layout).blocks(10).reserve(2).threads(1).prefix_cache(PrefixConfig::new());
    let pool = builder.build().unwrap();
    drop(serve(&pool, 0, &prompt(1, 17)));
    let tokens = prompt(1, 36);
    let reserved = SequenceError::Alloc(AllocError::Reserved { asked: 9, total: 10, reserve: 2 });
    assert_eq!(pool.admit(&request(3, &tokens)).unwrap_err(), reserved);
    let wanted = request(3, &tokens);
    let mut waiting = pin!(pool.admit_async(&wanted).into_future());
    let Poll::Ready(outcome) = poll_once(waiting.as_mut()) else { panic!("the admission waits forever") };
    assert_eq!(outcome.unwrap_err(), reserved);
    let (mut sequence, _) = serve(&pool, 4, &prompt(2, 16));
    assert_eq!(sequence.reserve(20).unwrap_err(), reserved);
    let mut waiting = pin!(pool.reserve_async(&mut sequence, 20).into_future());
    let Poll::Ready(outcome) = poll_once(waiting.as_mut()) else { panic!("the reservation waits forever") };
    assert_eq!(outcome.unwrap_err(), reserved);
}

/// An admission does without a block that it would copy, if it needs that block's memory.
#[tokio::test]
async fn a_partial_hit_does_not_keep_its_own_admission_waiting() {
    let pool = caching(5);
    let tokens = prompt(1, 18);
    let mut sequence = pool.sequence(SequenceId(1)).reuse_tail().tokens(&tokens).unwrap();
    append(&pool, &mut sequence, 18);
    drop(sequence);
    assert_eq!(pool.stats().evictable, 5);
    let longer = prompt(1, 20);
    let wanted = request(2, &longer).reuse_tail();
    assert_eq!(pool.blocks_needed(&wanted).unwrap(), 5, "four of them are cached");
    let sequence = pool.admit(&wanted).unwrap();
    assert_eq!((sequence.len(), sequence.reserved_blocks()), (16, 1));
    drop(sequence);
    quiet(&pool);
}

/// A waiting request that is kept and not polled does not hold up admissions for longer than the
/// patience.
#[tokio::test]
async fn a_request_that_is_not_polled_is_passed_over_by_admissions() {
    let pool = plain(20);
    let held = pool.allocate_owned(AllocRequest::new(20)).unwrap();
    let mut kept = Box::pin(pool.allocate_async(AllocRequest::new(20)).into_future());
    assert!(poll_once(kept.as_mut()).is_pending());
    drop(held);
    let tokens = prompt(1, 8);
    assert!(matches!(pool.admit(&request(1, &tokens)), Err(SequenceError::Alloc(AllocError::Behind { .. }))));
    sleep(Duration::from_millis(150)).await;
    drop(pool.admit(&request(1, &tokens)).unwrap());
    drop(kept);
    quiet(&pool);
}

type Waiting = Pin<Box<dyn Future<Output = Result<Lease<'static>, AllocError>> + Send>>;

/// A request of higher priority, which enters the queue while an admission searches.
struct Other {
    pool: Pool,
    blocks: usize,
    /// What the admission would have got.
    taken: Option<Lease<'static>>,
    waiting: Option<Waiting>,
    lease: Option<Lease<'static>>,
}

#[derive(Default)]
struct Shared {
    other: Mutex<Option<Other>>,
    was_woken: AtomicBool,
}

impl Shared {
    /// Polls the other request, like another thread that does so at once.
    fn poll(self: &Arc<Self>) {
        let Some(mut other) = self.other.lock().unwrap().take() else { return };
        let (pool, blocks) = (other.pool.clone(), other.blocks);
        other.taken.get_or_insert_with(|| pool.allocate_owned(AllocRequest::new(4)).unwrap());
        let waiting = other.waiting.get_or_insert_with(|| {
            Box::pin(
                async move { pool.allocate_async(AllocRequest::new(blocks).priority(Priority::High)).await },
            )
        });
        let waker = Waker::from(self.clone());
        loop {
            self.was_woken.store(false, SeqCst);
            match waiting.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(lease) => {
                    other.lease = Some(lease.unwrap());
                    break;
                }
                Poll::Pending if self.was_woken.load(SeqCst) => {}
                Poll::Pending => break,
            }
        }
        let is_served = other.lease.is_some();
        *self.other.lock().unwrap() = Some(other);
        if is_served {
            self.was_woken.store(false, SeqCst);
        }
    }
}

impl Wake for Shared {
    fn wake(self: Arc<Self>) {
        self.was_woken.store(true, SeqCst);
        self.poll();
    }
}

struct Hook(Arc<Shared>);

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hook").finish_non_exhaustive()
    }
}

impl Policy for Hook {
    fn name(&self) -> &'static str {
        "hook"
    }

    fn queues(&self) -> usize {
        2
    }

    fn place(&self, released: &Released, _: Millis) -> Place {
        Place { queue: 0, rank: released.order, state: 0 }
    }

    fn victim(&self, heads: &[Option<Head>], _: Millis) -> Option<usize> {
        // Called while a search has references on its prefix.
        self.0.poll();
        heads.iter().position(Option::is_some)
    }
}

/// An admission holds its cached prefix while it searches. A request of higher priority that
/// searches meanwhile and finds too little is told when the prefix is evictable again.
#[tokio::test]
async fn a_request_ahead_learns_of_the_prefix_that_an_admission_put_back() {
    let shared = Arc::new(Shared::default());
    let pool = pool_of(20, PrefixConfig::new().policy_of(Arc::new(Hook(shared.clone()))));
    // Four blocks that can be evicted, four that a batch may see.
    drop(serve(&pool, 1, &prompt(1, 16)));
    let (seen, _) = serve(&pool, 2, &prompt(2, 16));
    let batch = pool.begin_batch();
    drop(seen);
    let rest = pool.allocate(AllocRequest::new(12)).unwrap();
    let tokens = prompt(1, 28);
    let wanted = request(3, &tokens);
    let mut waiting = pin!(pool.admit_async(&wanted).into_future());
    assert!(poll_once(waiting.as_mut()).is_pending());
    // The admission is in the queue, and the end of the batch gives it a turn. While it searches,
    // four blocks go to another owner, and the other request comes.
    batch.finish();
    let other = Other { pool: pool.clone(), blocks: 4, taken: None, waiting: None, lease: None };
    *shared.other.lock().unwrap() = Some(other);
    for _ in 0..5 {
        assert!(poll_once(waiting.as_mut()).is_pending());
    }
    let other = shared.other.lock().unwrap().take().unwrap();
    assert!(other.waiting.is_some(), "the hook was called");
    assert!(other.lease.is_some(), "it sleeps beside evictable blocks");
    drop(rest);
}

/// What a decode step must leave as it was.
fn state(sequence: &Sequence) -> (usize, usize, usize, usize, usize) {
    (
        sequence.len(),
        sequence.committed(),
        sequence.announced(),
        sequence.reserved_blocks(),
        sequence.block_count(),
    )
}

#[test]
fn a_step_refused_for_its_tokens_changes_no_sequence() {
    let pool = caching(20);
    let (mut first, _) = serve(&pool, 1, &prompt(1, 8));
    first.reserve(4).unwrap();
    let mut drafting = pool.sequence(SequenceId(3)).open().unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut drafting, &[1, 2]).unwrap();
    drafting.announce(&[3]).unwrap();
    batch.append(&mut drafting, Tokens::Draft(1)).unwrap();
    let (mut last, _) = serve(&pool, 2, &prompt(2, 8));
    last.announce(&[1, 2]).unwrap();
    let before = [state(&first), state(&drafting), state(&last)];
    let free = pool.available_blocks();
    let step = [(&mut first, &[5]), (&mut drafting, &[6]), (&mut last, &[7])];
    let refused = batch.step(&mut step.map(|(sequence, ids)| Append::new(sequence, ids)));
    assert!(matches!(
        refused.unwrap_err(),
        StepError::Sequence { id: SequenceId(2), error: SequenceError::TokensAhead { .. } }
    ));
    assert_eq!([state(&first), state(&drafting), state(&last)], before);
    assert_eq!(pool.available_blocks(), free);
    drop((batch, first, drafting, last));
    quiet(&pool);
}

#[test]
fn a_step_whose_copy_fails_changes_no_sequence() {
    for (others, panics) in [(0, false), (0, true), (1, false), (1, true)] {
        let (pool, fault) = hooked(30);
        let (mut first, _) = serve(&pool, 1, &prompt(1, 8));
        first.announce(&[1, 2]).unwrap();
        first.reserve(4).unwrap();
        let (mut drafting, _) = serve(&pool, 3, &prompt(3, 2));
        let mut batch = pool.begin_batch();
        batch.append(&mut drafting, Tokens::Draft(1)).unwrap();
        let (mut one, _) = serve(&pool, 5, &prompt(5, 6));
        let (mut two, _) = serve(&pool, 2, &prompt(2, 6));
        let forks = [one.fork(SequenceId(10)).unwrap(), two.fork(SequenceId(11)).unwrap()];
        let states = |step: &[Append]| step.iter().map(|append| state(append.sequence)).collect::<Vec<_>>();
        let step = [&mut first, &mut drafting, &mut one, &mut two];
        let mut step = step.map(|sequence| Append::new(sequence, 1));
        let before = states(&step);
        let free = pool.available_blocks();
        *fault.lock().unwrap() = Some((
            others,
            (!panics).then_some(StorageError::Memory { bytes: 1, reason: std::io::ErrorKind::Other }),
        ));
        let outcome = catch_unwind(AssertUnwindSafe(|| batch.step(&mut step)));
        if panics {
            outcome.unwrap_err();
        } else {
            let at = if others == 0 { 5 } else { 2 };
            let refused = outcome.unwrap().unwrap_err();
            let StepError::Sequence { id, error: SequenceError::Storage(_) } = refused else {
                panic!("{refused}")
            };
            assert_eq!(id, SequenceId(at));
        }
        assert_eq!(states(&step), before);
        assert_eq!(pool.available_blocks(), free - others, "the copy that was made stays");
        *fault.lock().unwrap() = None;
        let decoded = batch.step(&mut step).unwrap();
        assert_eq!((decoded.new_blocks, decoded.copied.len()), (3 - others, 2 - others));
        assert_eq!(step.map(|append| append.sequence.reserved_blocks()), [0; 4]);
        drop((batch, first, drafting, one, two, forks));
        quiet(&pool);
    }
}
