//! Waiting allocations: order, deadlines, dropped futures, every event that wakes, and the reserve.
//! Every wait has a time limit, so that no test hangs.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::*};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use kvpool::storage::KvLayout;
use kvpool::{
    AllocError, AllocRequest, BuildError, Lease, Pool, PoolBuilder, Priority, SequenceError, SequenceId,
};
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

async fn soon<T>(future: impl Future<Output = T>) -> T {
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

/// Waits until this number of requests is in line.
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
async fn free_blocks_are_allocated_at_once() {
    let pool = pool(100);
    let mut future = pin!(pool.allocate_async(AllocRequest::new(100)));
    let Poll::Ready(lease) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
        panic!("all are free")
    };
    assert_eq!(lease.unwrap().blocks().len(), 100);
    quiet(&pool, 100);
}

#[tokio::test]
async fn urgent_before_high_before_normal_and_each_in_order() {
    let pool = pool(8);
    let held = all(&pool);
    let (say, mut said) = mpsc::unbounded_channel();
    let line = [
        (Priority::Normal, 4),
        (Priority::Normal, 5),
        (Priority::High, 2),
        (Priority::Urgent, 0),
        (Priority::High, 3),
        (Priority::Urgent, 1),
    ];
    for (come, (priority, name)) in line.into_iter().enumerate() {
        named(&pool, AllocRequest::new(8).priority(priority), name, &say);
        in_line(&pool, come + 1).await;
    }
    drop(held);
    for expected in 0..line.len() {
        assert_eq!(soon(said.recv()).await, Some(expected));
    }
    soon(async {
        while pool.free_blocks() < 8 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    quiet(&pool, 8);
}

#[tokio::test]
async fn a_small_request_does_not_overtake_a_large_one() {
    let pool = pool(8);
    let mut held = all(&pool);
    let (say, mut said) = mpsc::unbounded_channel();
    named(&pool, AllocRequest::new(6), 0, &say);
    in_line(&pool, 1).await;
    named(&pool, AllocRequest::new(1), 1, &say);
    in_line(&pool, 2).await;
    held.truncate(4);
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(said.try_recv().is_err(), "four are free: enough for the second request only");
    // An allocation that does not wait takes free blocks.
    drop(pool.allocate(AllocRequest::new(1)).unwrap());
    held.truncate(2);
    assert_eq!((soon(said.recv()).await, soon(said.recv()).await), (Some(0), Some(1)));
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
    let outcome = pool.allocate_until(AllocRequest::new(4), late).await;
    assert_eq!(
        outcome.unwrap_err(),
        AllocError::Deadline { asked: 4, free: 0, retired: 0, oldest_batch: None, head: None }
    );
    assert_eq!(begin.elapsed(), Duration::from_secs(5));
    quiet_but(&pool, 10);
    // Tried once, although the deadline has passed.
    held.truncate(9);
    assert_eq!(pool.allocate_until(AllocRequest::new(1), begin).await.unwrap().blocks().len(), 1);
    // And before a deadline.
    let other = pool.clone();
    let late = Instant::now() + Duration::from_secs(5);
    let waiting = tokio::spawn(async move { other.allocate_until(AllocRequest::new(10), late).await });
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
        let mut futures = [(); 2].map(|()| Some(Box::pin(pool.allocate_async(AllocRequest::new(4)))));
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

/// A request that is polled by hand, once: it is woken later, and not polled again.
fn stalled<'a>(
    pool: &'a Pool,
    request: AllocRequest,
    bell: &Arc<Bell>,
) -> std::pin::Pin<Box<impl Future<Output = Result<Lease<'static>, AllocError>> + 'a>> {
    let mut future = Box::pin(pool.allocate_async(request));
    assert!(future.as_mut().poll(&mut Context::from_waker(&Waker::from(bell.clone()))).is_pending());
    future
}

/// Everything is free, and no further frees come: requests with deadlines look after the line, and
/// so does the background task.
#[tokio::test]
async fn a_head_that_is_not_polled_is_passed_over() {
    for by_deadline in [true, false] {
        let storage = builder(8).turn_patience(Duration::from_millis(20));
        let pool = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(8);
        let pool = if by_deadline { storage } else { pool.turn_patience(Duration::from_millis(20)) };
        let pool = pool.build().unwrap();
        let held = all(&pool);
        let bell = Arc::new(Bell::default());
        let mut first = stalled(&pool, AllocRequest::new(8).priority(Priority::High), &bell);
        let (say, mut said) = mpsc::unbounded_channel();
        let _task = (!by_deadline).then(|| pool.start_defragmenter(Default::default()).unwrap());
        if by_deadline {
            let (other, say) = (pool.clone(), say.clone());
            tokio::spawn(async move {
                let late = Instant::now() + LIMIT;
                let lease = other.allocate_until(AllocRequest::new(8), late).await.unwrap();
                say.send(1).unwrap();
                drop(lease);
            });
        } else {
            named(&pool, AllocRequest::new(8), 1, &say);
        }
        in_line(&pool, 2).await;
        named(&pool, AllocRequest::new(8), 2, &say);
        in_line(&pool, 3).await;
        drop(held);
        assert!(bell.0.load(Relaxed) > 0);
        let begun = Instant::now();
        assert_eq!((soon(said.recv()).await, soon(said.recv()).await), (Some(1), Some(2)));
        assert!(begun.elapsed() >= Duration::from_millis(20), "not before the patience has passed");
        in_line(&pool, 1).await;
        let stats = pool.stats();
        assert_eq!(stats.passed_over, 1);
        let head = stats.head_of_line.unwrap();
        assert_eq!((head.priority, head.asked), (Priority::High, 8));
        assert!(
            head.unpolled().unwrap() >= Duration::from_millis(20)
                && head.waited() >= head.unpolled().unwrap()
        );
        // It has kept its place: ahead of a later request, though that one is awake.
        let held = all(&pool);
        named(&pool, AllocRequest::new(8), 3, &say);
        in_line(&pool, 2).await;
        let waker = Waker::from(bell.clone());
        assert!(first.as_mut().poll(&mut Context::from_waker(&waker)).is_pending(), "nothing is free");
        assert_eq!(pool.stats().passed_over, 0);
        drop(held);
        let Poll::Ready(lease) = first.as_mut().poll(&mut Context::from_waker(&waker)) else {
            panic!("it is the head, and all blocks are free")
        };
        assert!(said.try_recv().is_err());
        drop(lease);
        drop(first);
        assert_eq!(soon(said.recv()).await, Some(3));
        in_line(&pool, 0).await;
    }
}

/// A request that is polled when it is woken is not overtaken, however long it waited.
#[tokio::test]
async fn a_head_that_sleeps_is_not_passed_over() {
    let pool = builder(8).turn_patience(Duration::from_millis(1)).build().unwrap();
    let mut held = all(&pool);
    let (say, mut said) = mpsc::unbounded_channel();
    named(&pool, AllocRequest::new(8), 1, &say);
    in_line(&pool, 1).await;
    named(&pool, AllocRequest::new(1), 2, &say);
    in_line(&pool, 2).await;
    while held.blocks().len() > 1 {
        held.truncate(held.blocks().len() - 1);
        sleep(Duration::from_millis(5)).await;
    }
    assert!(said.try_recv().is_err(), "the free blocks are for the head");
    drop(held);
    assert_eq!((soon(said.recv()).await, soon(said.recv()).await), (Some(1), Some(2)));
}

/// In a pool with unlimited patience, a request that times out learns what held it up.
#[tokio::test]
async fn a_deadline_names_the_first_in_line() {
    let pool = builder(8).turn_patience(Duration::MAX).build().unwrap();
    let held = all(&pool);
    let bell = Arc::new(Bell::default());
    let first = stalled(&pool, AllocRequest::new(5).priority(Priority::High), &bell);
    drop(held);
    let refused = pool.allocate_until(AllocRequest::new(1), Instant::now() + Duration::from_millis(60)).await;
    let Err(error @ AllocError::Deadline { asked: 1, free: 8, head: Some(head), .. }) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!((head.priority, head.asked), (Priority::High, 5));
    assert!(head.unpolled().unwrap() >= Duration::from_millis(50), "{head:?}");
    let text = error.to_string();
    assert!(text.contains("5 blocks at high priority") && text.contains("not polled since"), "{text}");
    drop(first);
    quiet(&pool, 8);
}

/// A batch that is never ended is distinguished from short ones, and errors name it.
#[tokio::test]
async fn a_batch_that_is_not_ended_is_named() {
    let pool = pool(8);
    assert_eq!((pool.stats().batches_in_flight, pool.stats().oldest_batch), (0, None));
    drop(pool.begin_batch());
    let (forgotten, other) = (pool.begin_batch(), pool.begin_batch());
    drop(all(&pool));
    let refused = pool.allocate(AllocRequest::new(1)).unwrap_err();
    assert!(matches!(
        refused,
        AllocError::Exhausted { retired: 8, oldest_batch: Some(kvpool::Ticket(2)), .. }
    ));
    assert!(refused.to_string().contains("the oldest is batch 2"), "{refused}");
    let short = Duration::from_millis(30);
    let late = pool.allocate_until(AllocRequest::new(1), Instant::now() + short).await.unwrap_err();
    let AllocError::Deadline { retired: 8, oldest_batch: Some(oldest), head: None, .. } = late else {
        panic!("{late:?}")
    };
    assert!(oldest.ticket.0 == 2 && oldest.age() >= short, "{oldest:?}");
    assert!(late.to_string().contains("batch 2, in flight for at least"), "{late}");
    let stats = pool.stats();
    assert_eq!(stats.batches_in_flight, 2);
    assert!(stats.oldest_batch.unwrap().age() >= oldest.age());
    drop(forgotten);
    let stats = pool.stats();
    assert_eq!((stats.batches_in_flight, stats.oldest_batch.unwrap().ticket.0), (1, 3));
    assert!(stats.oldest_batch.unwrap().age() < short, "it is another batch");
    drop(other);
    assert_eq!(pool.stats().oldest_batch, None);
    quiet(&pool, 8);
}

#[tokio::test]
async fn growth_wakes() {
    let pool = builder(8).blocks_max(100).build().unwrap();
    let held = all(&pool);
    let other = pool.clone();
    let waiting = tokio::spawn(async move { other.allocate_async(AllocRequest::new(8)).await });
    in_line(&pool, 1).await;
    pool.grow(8).unwrap();
    let lease = soon(waiting).await.unwrap().unwrap();
    drop((held, lease));
    quiet(&pool, 16);
}

#[tokio::test]
async fn the_end_of_a_batch_wakes() {
    for dropped in [false, true] {
        let pool = pool(8);
        let held = all(&pool);
        let (first, second) = (pool.begin_batch(), pool.begin_batch());
        drop(held);
        assert_eq!(pool.stats().retired, 8);
        let other = pool.clone();
        let waiting = tokio::spawn(async move { other.allocate_async(AllocRequest::new(8)).await });
        in_line(&pool, 1).await;
        second.finish();
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert!(!waiting.is_finished());
        if dropped {
            drop(first)
        } else {
            first.finish()
        }
        drop(soon(waiting).await.unwrap().unwrap());
        quiet(&pool, 8);
    }
}

/// Allocates all free blocks, and frees them when called.
type Way = fn(Pool) -> Box<dyn FnOnce()>;

const WAYS: [(&str, Way); 7] = [
    ("drop of a lease", |pool| {
        let lease = all(&pool);
        Box::new(move || drop(lease))
    }),
    ("drop of a lease's tail", |pool| {
        let mut lease = all(&pool);
        Box::new(move || lease.truncate(1))
    }),
    ("a list of handles", |pool| {
        let handles = all(&pool).into_raw();
        Box::new(move || pool.free(&handles).unwrap())
    }),
    ("handle by handle", |pool| {
        let handles = all(&pool).into_raw();
        Box::new(move || handles.iter().for_each(|&handle| pool.free(&[handle]).unwrap()))
    }),
    ("into an explicit cache that is dropped", |pool| {
        let lease = all(&pool);
        Box::new(move || pool.handle().release(lease))
    }),
    ("close of a sequence", |pool| {
        let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
        let tokens = pool.free_blocks() * pool.layout().block_tokens();
        pool.begin_batch().append(&mut sequence, tokens).unwrap();
        Box::new(move || drop(sequence))
    }),
    ("the last reference of several", |pool| {
        let shared = all(&pool).into_raw();
        pool.share(&shared).unwrap();
        pool.free(&shared).unwrap();
        Box::new(move || pool.free(&shared).unwrap())
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
            let mut future = pin!(pool.allocate_async(AllocRequest::new(blocks - 1)));
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

#[test]
fn a_reserve_must_leave_something() {
    for reserve in [10, 11, usize::MAX] {
        let refused = builder(10).reserve(reserve).build();
        assert!(matches!(refused, Err(BuildError::Reserve { reserve: told, blocks: 10 }) if told == reserve));
    }
}

#[tokio::test]
async fn the_reserve_is_for_urgent_requests() {
    let pool = builder(100).reserve(10).build().unwrap();
    assert_eq!((pool.total_blocks(), pool.free_blocks(), pool.stats().reserved), (100, 90, 10));
    assert!(!pool.blocks().is_awaited(), "a full reserve costs nothing");
    assert_eq!(pool.audit().unwrap().reserved, 10);
    let held = all(&pool);
    for priority in [Priority::Normal, Priority::High] {
        let refused = pool.allocate(AllocRequest::new(1).priority(priority)).unwrap_err();
        assert_eq!(
            refused,
            AllocError::Exhausted { asked: 1, free: 0, retired: 0, evictable: 0, oldest_batch: None }
        );
    }
    let urgent = |blocks| AllocRequest::new(blocks).priority(Priority::Urgent);
    assert!(pool.allocate(urgent(11)).is_err());
    assert_eq!(pool.stats().reserved, 10, "a refusal takes nothing");
    let mut one = pool.allocate_owned(urgent(4)).unwrap();
    let mut sequence = pool.sequence(SequenceId(1)).priority(Priority::Urgent).open().unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 3 * pool.layout().block_tokens()).unwrap();
    drop(batch);
    let three = soon(pool.allocate_async(urgent(3))).await.unwrap();
    assert_eq!((pool.stats().reserved, pool.audit().unwrap().owned), (0, 100));
    let mut poor = pool.sequence(SequenceId(2)).open().unwrap();
    let outcome = pool.begin_batch().append(&mut poor, 1);
    assert!(matches!(outcome, Err(SequenceError::Alloc(AllocError::Exhausted { .. }))));

    // Freed blocks fill the reserve before other requests get any.
    one.truncate(1);
    assert_eq!((pool.stats().reserved, pool.free_blocks()), (3, 0));
    assert!(pool.allocate(AllocRequest::new(1)).is_err());
    assert!(pool.blocks().is_awaited());
    drop((one, three, sequence));
    assert_eq!((pool.stats().reserved, pool.free_blocks()), (10, 0));
    drop(held);
    assert_eq!((pool.stats().reserved, pool.free_blocks()), (10, 90));
    drop(poor);
    let report = pool.audit().unwrap();
    assert_eq!((report.owned, report.reserved), (0, 10));
    assert!(!pool.blocks().is_awaited());
}

/// When a batch ends, its retired blocks fill the reserve before a waiting request gets any.
#[tokio::test]
async fn the_reserve_is_filled_when_a_batch_ends() {
    let pool = builder(10).reserve(4).build().unwrap();
    let held = all(&pool);
    let urgent = pool.allocate_owned(AllocRequest::new(4).priority(Priority::Urgent)).unwrap();
    let batch = pool.begin_batch();
    drop(held);
    let other = pool.clone();
    let waiting = tokio::spawn(async move { other.allocate_async(AllocRequest::new(3)).await });
    in_line(&pool, 1).await;
    drop(batch);
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(!waiting.is_finished(), "the reserve got four of six freed blocks");
    assert_eq!((pool.stats().reserved, pool.free_blocks()), (4, 2));
    drop(urgent);
    drop(soon(waiting).await.unwrap().unwrap());
    assert_eq!(pool.stats().reserved, 4);
    quiet(&pool, 6);
}

/// The reserve is at the end of the pool, which is removed; and a request waits for more than
/// remains.
#[tokio::test]
async fn a_pool_shrinks_below_its_reserve_and_waiting_requests() {
    let pool =
        builder(256).without_null_block().magazine_blocks(0).reserve(8).segment_blocks(64).build().unwrap();
    let mut first: Vec<_> = (0..248).map(|_| pool.allocate_owned(AllocRequest::new(1)).unwrap()).collect();
    first.sort_by_key(|lease| lease.frames().next());
    let urgent = pool.allocate_owned(AllocRequest::new(8).priority(Priority::Urgent)).unwrap();
    // The last eight fill the reserve again.
    first.truncate(240);
    assert_eq!((pool.stats().reserved, pool.free_blocks()), (8, 0));
    let held = first.swap_remove(0);
    drop((first, urgent));
    let other = pool.clone();
    let waiting = tokio::spawn(async move { other.allocate_async(AllocRequest::new(248)).await });
    in_line(&pool, 1).await;
    let min = pool.resize(8).await.unwrap_err();
    assert!(min.to_string().contains("at least 9"), "{min}");
    soon(pool.resize(64)).await.unwrap();
    let refused = soon(waiting).await.unwrap().unwrap_err();
    assert_eq!(refused, AllocError::TooLarge { asked: 248, total: 64 });
    assert_eq!((pool.stats().reserved, pool.free_blocks()), (8, 55));
    let all = pool.allocate_owned(AllocRequest::new(63).priority(Priority::Urgent)).unwrap();
    assert!(all.frames().all(|frame| frame.0 < 64));
    drop((all, held));
    assert_eq!(pool.stats().reserved, 8);
    quiet(&pool, 56);
}

/// The reserve was filled one by one, and interrupts the free frames: it moves, and keeps its size.
#[tokio::test]
async fn the_reserve_makes_way_for_a_run() {
    let pool = builder(12).without_null_block().reserve(3).magazine_blocks(0).build().unwrap();
    let urgent = AllocRequest::new(12).priority(Priority::Urgent);
    let mut all = Vec::new();
    pool.allocate_raw(urgent, &mut all).unwrap();
    // The first freed frames, in the middle of the pool, are set aside.
    let (first, rest): (Vec<_>, Vec<_>) = all.iter().partition(|handle| [2, 5, 8].contains(&handle.id.get()));
    pool.free(&first).unwrap();
    pool.free(&rest).unwrap();
    assert_eq!((pool.stats().reserved, pool.free_blocks()), (3, 9));
    for _ in 0..2 {
        let run = soon(pool.allocate_async(AllocRequest::new(9).contiguous())).await.unwrap();
        assert_eq!((run.runs().count(), pool.stats().reserved, pool.free_blocks()), (1, 3, 0));
        drop(run);
        quiet(&pool, 9);
    }
}

/// Threads that allocate and free, tasks that wait for large requests with deadlines, and tasks
/// that drop their futures.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_waiters_frees_and_drops_ends_in_order() {
    const BLOCKS: usize = 48;
    for (reserve, magazine_blocks) in [(0, 0), (0, 8), (6, 4)] {
        let pool =
            builder(BLOCKS + reserve).reserve(reserve).magazine_blocks(magazine_blocks).build().unwrap();
        let stop = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..2)
            .map(|seed| {
                let (pool, stop) = (pool.clone(), stop.clone());
                std::thread::spawn(move || churn(&pool, &stop, seed))
            })
            .collect();
        let tasks: Vec<_> = (0..24)
            .map(|task| {
                let pool = pool.clone();
                tokio::spawn(async move { wait_and_give_up(&pool, task).await })
            })
            .collect();
        let mut served = 0;
        for task in tasks {
            served += soon(task).await.unwrap();
        }
        assert!(served > 0);
        stop.store(1, Relaxed);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(pool.stats().reserved, reserve);
        quiet(&pool, BLOCKS);
    }
}

fn churn(pool: &Pool, stop: &AtomicUsize, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut held = Vec::new();
    while stop.load(Relaxed) == 0 {
        match rng.u32(..10) {
            0..4 => held.extend(pool.allocate_owned(AllocRequest::new(rng.usize(1..8)))),
            4..8 if !held.is_empty() => drop(held.swap_remove(rng.usize(..held.len()))),
            8 => {
                let batch = pool.begin_batch();
                held.pop();
                batch.finish();
            }
            _ => held.extend(pool.allocate_owned(AllocRequest::new(1).priority(Priority::Urgent))),
        }
        // Blocks held forever would make the others wait forever.
        if rng.u32(..50) == 0 {
            held.clear();
            std::thread::yield_now();
        }
    }
}

/// Number of requests served.
async fn wait_and_give_up(pool: &Pool, task: u64) -> usize {
    let mut rng = fastrand::Rng::with_seed(100 + task);
    let mut served = 0;
    for _ in 0..60 {
        let priority = [Priority::Normal, Priority::High, Priority::Urgent][rng.usize(..3)];
        let request = AllocRequest::new(rng.usize(1..40)).priority(priority);
        match rng.u32(..4) {
            // Dropped at a random moment.
            0 => {
                tokio::select! {
                    lease = pool.allocate_async(request) => drop(lease.unwrap()),
                    () = spin(rng.u32(..20)) => {}
                }
            }
            1 => {
                let late = Instant::now() + Duration::from_micros(rng.u64(..500));
                match pool.allocate_until(request, late).await {
                    Ok(_) | Err(AllocError::Deadline { .. }) => {}
                    Err(other) => panic!("{other}"),
                }
            }
            _ => {
                let lease = soon(pool.allocate_async(request)).await.unwrap();
                assert_eq!(lease.blocks().len(), request.blocks);
                if rng.bool() {
                    tokio::task::yield_now().await;
                }
                served += 1;
            }
        }
    }
    served
}

async fn spin(turns: u32) {
    for _ in 0..turns {
        tokio::task::yield_now().await;
    }
}
