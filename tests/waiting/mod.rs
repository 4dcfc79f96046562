//! Waiting allocations: order, deadlines, dropped futures, every event that wakes, and the reserve.
//! Every wait has a time limit, so that no test hangs.

mod heads;
mod reserve;
mod storm;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::*};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use kvpool::storage::KvLayout;
use kvpool::{AllocError, AllocRequest, Lease, Pool, PoolBuilder, Priority, SequenceError, SequenceId};
use kvpool_testkit::leases::{block, singles, split};
use kvpool_testkit::steps::append;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

/// Longer than any wait in this file, on any machine.
const LIMIT: Duration = Duration::from_secs(30);

fn builder(blocks: usize) -> PoolBuilder {
    Pool::builder(KvLayout::named("tiny").unwrap()).blocks(blocks).without_storage().threads(2)
}

fn pool(blocks: usize) -> Pool {
    builder(blocks).build().unwrap()
}

fn all(pool: &Pool) -> Lease<'static> {
    pool.allocate_owned(AllocRequest::new(pool.free_blocks())).unwrap()
}

async fn soon<T>(future: impl IntoFuture<Output = T>) -> T {
    timeout(LIMIT, future).await.expect("a request sleeps beside a free block")
}

/// Counts its wakes.
#[derive(Default)]
struct Bell(AtomicUsize);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// Waits until this number of requests is in the queue.
async fn in_line(pool: &Pool, count: usize) {
    soon(async {
        while pool.stats().waiting != count {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// Spawns a task that waits for blocks, reports its name when it has them, and frees them.
fn named(
    pool: &Pool,
    request: AllocRequest,
    name: usize,
    said: &mpsc::UnboundedSender<usize>,
) -> JoinHandle<()> {
    let (pool, said) = (pool.clone(), said.clone());
    tokio::spawn(async move {
        let lease = pool.allocate_async(request).await.unwrap();
        said.send(name).unwrap();
        drop(lease);
    })
}

fn quiet(pool: &Pool, free: usize) {
    let report = pool.audit().unwrap();
    assert_eq!((report.owned, pool.free_blocks(), pool.stats().waiting), (0, free, 0), "{report:?}");
    assert!(!pool.blocks().is_awaited(), "frees take the fast path again");
}

#[tokio::test]
async fn requests_that_waiting_cannot_meet_are_refused_at_once() {
    let pool = builder(10).reserve(4).build().unwrap();
    let _held = all(&pool);
    let urgent = |blocks| AllocRequest::new(blocks).priority(Priority::Urgent);
    for (request, error) in [
        (AllocRequest::new(0), AllocError::Zero),
        (urgent(11), AllocError::TooLarge { asked: 11, total: 10 }),
        (AllocRequest::new(7), AllocError::Reserved { asked: 7, total: 10, reserve: 4 }),
        (urgent(7).contiguous(), AllocError::Reserved { asked: 7, total: 10, reserve: 4 }),
    ] {
        assert_eq!(soon(pool.allocate_async(request)).await.unwrap_err(), error);
        assert_eq!(pool.allocate(request).unwrap_err(), error);
    }
    let elsewhere = AllocRequest::new(1).device(kvpool::DeviceId::Cuda(3));
    assert!(matches!(soon(pool.allocate_async(elsewhere)).await, Err(AllocError::WrongDevice { .. })));
    assert_eq!(pool.stats().waiting, 0);
}

#[tokio::test(start_paused = true)]
async fn a_deadline_ends_the_wait() {
    let pool = pool(10);
    let mut held = all(&pool);
    let begin = Instant::now();
    let late = begin + Duration::from_secs(5);
    let outcome = pool.allocate_async(AllocRequest::new(4)).until(late.into_std()).await;
    assert_eq!(
        outcome.unwrap_err(),
        AllocError::Deadline { asked: 4, free: 0, retired: 0, oldest_batch: None, head: None, turn: None }
    );
    assert_eq!(begin.elapsed(), Duration::from_secs(5));
    quiet_but(&pool, 10);
    // Tried once, although the deadline has passed.
    held.truncate(9);
    assert_eq!(
        pool.allocate_async(AllocRequest::new(1)).until(begin.into_std()).await.unwrap().blocks().len(),
        1
    );
    // And before a deadline.
    let other = pool.clone();
    let late = Instant::now() + Duration::from_secs(5);
    let waiting =
        tokio::spawn(async move { other.allocate_async(AllocRequest::new(10)).until(late.into_std()).await });
    sleep(Duration::from_secs(4)).await;
    drop(held);
    assert_eq!(waiting.await.unwrap().unwrap().blocks().len(), 10);
    quiet(&pool, 10);
}

/// No request waits, and `owned` blocks are owned.
fn quiet_but(pool: &Pool, owned: usize) {
    assert_eq!((pool.audit().unwrap().owned, pool.stats().waiting), (owned, 0));
    assert!(!pool.blocks().is_awaited());
}

/// A future dropped while asleep, and one dropped after it was woken and before it searched.
#[tokio::test]
async fn a_dropped_future_hands_its_turn_on() {
    for woken in [false, true] {
        let pool = pool(4);
        let mut held = Some(all(&pool));
        let bells = [(); 2].map(|()| Arc::new(Bell::default()));
        let wakers = bells.clone().map(Waker::from);
        let mut futures =
            [(); 2].map(|()| Some(Box::pin(pool.allocate_async(AllocRequest::new(4)).into_future())));
        for (future, waker) in futures.iter_mut().zip(&wakers) {
            let future = future.as_mut().unwrap().as_mut();
            assert!(future.poll(&mut Context::from_waker(waker)).is_pending(), "nothing is free");
        }
        if woken {
            held.take();
            assert!(bells[0].0.load(Relaxed) > 0, "the head is woken by the free");
            assert_eq!(bells[1].0.load(Relaxed), 0, "and no other request");
        }
        futures[0].take();
        held.take();
        assert!(bells[1].0.load(Relaxed) > 0, "the turn passes to the second request");
        let second = futures[1].as_mut().unwrap().as_mut();
        let Poll::Ready(lease) = second.poll(&mut Context::from_waker(&wakers[1])) else {
            panic!("all are free")
        };
        drop(lease);
        futures[1].take();
        quiet(&pool, 4);
    }
}

/// Allocates all free blocks, and frees them when called.
type Way = fn(Pool) -> Box<dyn FnOnce()>;

const WAYS: [(&str, Way); 6] = [
    ("drop of a lease", |pool| {
        let lease = all(&pool);
        Box::new(move || drop(lease))
    }),
    ("drop of a lease's tail", |pool| {
        let mut lease = all(&pool);
        Box::new(move || lease.truncate(1))
    }),
    ("block by block", |pool| {
        let singles = split(all(&pool));
        Box::new(move || drop(singles))
    }),
    ("drop on a thread that ends", |pool| {
        let lease = all(&pool);
        Box::new(move || std::thread::spawn(move || drop(lease)).join().unwrap())
    }),
    ("close of a sequence", |pool| {
        let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
        let tokens = pool.free_blocks() * pool.layout().block_tokens();
        append(&pool, &mut sequence, tokens);
        Box::new(move || drop(sequence))
    }),
    ("the last reference of several", |pool| {
        let lease = all(&pool);
        drop(lease.share().unwrap());
        Box::new(move || drop(lease))
    }),
];

#[tokio::test]
async fn every_way_to_free_wakes() {
    for (magazine_blocks, blocks) in [(0, 40), (8, 40), (8, 24), (8, 21)] {
        for (way, take) in WAYS {
            let pool = builder(blocks).magazine_blocks(magazine_blocks).build().unwrap();
            // Most blocks stay owned: the freed ones are not enough for the head, which is woken
            // nevertheless.
            let held = pool.allocate_owned(AllocRequest::new(20)).unwrap();
            let free = take(pool.clone());
            let bell = Arc::new(Bell::default());
            let waker = Waker::from(bell.clone());
            let mut future = pin!(pool.allocate_async(AllocRequest::new(blocks - 1)).into_future());
            assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            assert_eq!(bell.0.load(Relaxed), 0, "it sleeps");
            free();
            let freed = pool.free_blocks();
            assert_eq!(bell.0.load(Relaxed), (freed > 0) as usize, "{way}, {freed} free");
            assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            let before = bell.0.load(Relaxed);
            drop(held);
            assert_eq!(bell.0.load(Relaxed), before + 1, "{way}, then a lease");
            assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready(), "{way}");
        }
    }
}

/// Blocks are in magazines of other threads: one that sleeps, and one that ends during the wait.
#[tokio::test]
async fn magazines_of_other_threads_are_reclaimed() {
    let pool = builder(64).magazine_blocks(8).build().unwrap();
    let (go, gone) = std::sync::mpsc::channel::<()>();
    let (ready, is_ready) = std::sync::mpsc::channel();
    let other = pool.clone();
    let sleeper = std::thread::spawn(move || {
        drop(other.allocate(AllocRequest::new(8)).unwrap());
        ready.send(()).unwrap();
        gone.recv().unwrap();
    });
    is_ready.recv().unwrap();
    drop(soon(pool.allocate_async(AllocRequest::new(64))).await.unwrap());
    go.send(()).unwrap();
    sleeper.join().unwrap();
    let held = all(&pool);
    let other = pool.clone();
    let waiting = tokio::spawn(async move { other.allocate_async(AllocRequest::new(64)).await });
    in_line(&pool, 1).await;
    std::thread::spawn(move || drop(held)).join().unwrap();
    drop(soon(waiting).await.unwrap().unwrap());
    quiet(&pool, 64);
}

#[tokio::test]
async fn a_run_is_waited_for() {
    let pool = builder(64).without_null_block().magazine_blocks(0).build().unwrap();
    let mut leases: Vec<_> =
        (0..64).map(|_| Some(pool.allocate_owned(AllocRequest::new(1)).unwrap())).collect();
    leases.sort_by_key(|lease| lease.as_ref().map(|lease| lease.frames().next()));
    leases.iter_mut().step_by(2).for_each(|lease| drop(lease.take()));
    let request = AllocRequest::new(8).contiguous();
    assert!(matches!(pool.allocate(request), Err(AllocError::NoRun { free: 32, .. })));
    let other = pool.clone();
    let waiting = tokio::spawn(async move { other.allocate_async(request).await });
    in_line(&pool, 1).await;
    leases.iter_mut().take(8).for_each(|lease| drop(lease.take()));
    let run = soon(waiting).await.unwrap().unwrap();
    assert_eq!(run.runs().count(), 1);
    drop((run, leases));
    quiet(&pool, 64);
}
