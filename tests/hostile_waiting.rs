//! Safe user code that disturbs waiting requests: wakers that panic, runs and requests that are
//! kept and not polled.

use std::future::Future;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use kvpool::compact::{DefragConfig, DefragOptions, FrameCopier, ResizeError, ResizeOptions};
use kvpool::prefix::PrefixConfig;
use kvpool::storage::{CopyDone, FrameMove, KvLayout};
use kvpool::{AllocError, AllocRequest, BlockPin, Lease, Pool, Priority, SequenceId, TurnTask};
use kvpool_testkit::leases::{block, checkerboard, handle};
use tokio::time::timeout;

/// Longer than any wait in this file, on any machine.
const LIMIT: Duration = Duration::from_secs(60);

type Asked = Arc<Mutex<Vec<CopyDone>>>;
fn never(asked: &Asked) -> FrameCopier {
    let asked = asked.clone();
    Arc::new(move |_: &[FrameMove], done: CopyDone| asked.lock().unwrap().push(done))
}
fn stuck(asked: &Asked) -> Pool {
    Pool::builder(KvLayout::named("tiny").unwrap()).blocks(128).engine_copies(never(asked)).build().unwrap()
}
fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn a_range_that_wraps_seals_nothing() {
    use std::ops::Bound;
    let pool = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(10).build().unwrap();
    let mut lease = pool.allocate(AllocRequest::new(3)).unwrap();
    let r = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        lease.seal((Bound::Excluded(usize::MAX), Bound::Unbounded))
    }));
    assert!(
        r.is_err(),
        "no panic, but sealed: {:?}",
        lease.handles().map(|h| pool.info(h).unwrap().sealed).collect::<Vec<_>>()
    );
}

async fn head_in_the_making(takes_signal: bool) {
    let asked = Asked::default();
    let pool = stuck(&asked);
    let kept = checkerboard(&pool);
    let mut run = Box::pin(pool.defragment_with(DefragOptions::new().copy_deadline(Duration::MAX)));
    assert!(poll(run.as_mut()).is_pending());
    let free = pool.free_blocks();
    let mut a = Box::pin(pool.allocate_async(AllocRequest::new(free).contiguous()).into_future());
    assert!(timeout(Duration::from_millis(300), a.as_mut()).await.is_err());
    assert_eq!(pool.stats().waiting, 1);
    // The last block is not moving, or its move is cancelled: one more is free afterwards.
    let still = pool.free_blocks();
    for lease in kept {
        drop(lease);
        if pool.free_blocks() > still {
            break;
        }
    }
    if takes_signal {
        assert!(poll(a.as_mut()).is_pending());
    }
    // From here on `a` is kept and not polled.
    let want = pool.free_blocks();
    let b = pool.allocate_async(AllocRequest::new(want)).until(Instant::now() + LIMIT).await;
    assert!(b.is_ok(), "{want} asked: {b:?}");
}
#[tokio::test]
async fn a_head_that_is_woken_and_not_polled() {
    head_in_the_making(false).await
}
#[tokio::test]
async fn head_that_took_the_signal_and_is_not_polled() {
    head_in_the_making(true).await
}

fn caching() -> Pool {
    Pool::builder(KvLayout::named("tiny").unwrap())
        .blocks(20)
        .prefix_cache(PrefixConfig::new())
        .build()
        .unwrap()
}

struct Bomb;
impl std::task::Wake for Bomb {
    fn wake(self: Arc<Self>) {
        panic!("a panic in a user's waker")
    }
}
fn bomb() -> Waker {
    Waker::from(Arc::new(Bomb))
}
fn caught<R>(f: impl FnOnce() -> R) -> bool {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err()
}
fn plain(n: usize) -> Pool {
    Pool::builder(KvLayout::named("tiny").unwrap())
        .blocks(n)
        .magazine_blocks(0)
        .without_storage()
        .build()
        .unwrap()
}

#[test]
fn a_waker_panics_in_an_allocation() {
    let pool = plain(100);
    let held = pool.allocate_owned(AllocRequest::new(30)).unwrap();
    let mut w = Box::pin(pool.allocate_async(AllocRequest::new(100)).into_future());
    assert!(w.as_mut().poll(&mut Context::from_waker(&bomb())).is_pending());
    let _ = caught(|| drop(pool.allocate(AllocRequest::new(40))));
    drop(w);
    drop(held);
    pool.audit().unwrap();
    assert_eq!(pool.free_blocks(), 100);
}

#[test]
fn a_waker_panics_in_begin_batch() {
    let pool = plain(100);
    let held = pool.allocate_owned(AllocRequest::new(30)).unwrap();
    let mut w = Box::pin(pool.allocate_async(AllocRequest::new(100)).into_future());
    assert!(w.as_mut().poll(&mut Context::from_waker(&bomb())).is_pending());
    let _ = caught(|| pool.begin_batch().finish());
    drop(w);
    drop(held);
    assert_eq!(pool.batches_in_flight(), 0);
    pool.audit().unwrap();
}

#[test]
fn a_waker_of_events_panics_in_finish() {
    let pool = caching();
    let mut events = pool.prefix_cache().unwrap().events().subscribe().unwrap();
    assert!(events.poll_recv(&mut Context::from_waker(&bomb())).is_pending());
    let tokens: Vec<u32> = (0..9).collect();
    let mut sequence = pool.sequence(SequenceId(1)).tokens(&tokens).unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, tokens.len()).unwrap();
    let _ = caught(|| batch.finish());
    drop(events);
    drop(sequence);
    assert_eq!(pool.batches_in_flight(), 0);
    pool.audit().unwrap();
}

/// A pool of 200 blocks, every second of which is owned and sealed; moves are copied at once.
fn holes(patience: Duration) -> (Pool, Vec<Lease<'static>>) {
    let pool = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(200).turn_patience(patience);
    let pool = pool.build().unwrap();
    let kept = checkerboard(&pool);
    (pool, kept)
}

/// A contiguous request whose copy is over, and that is not polled again, holds up nobody beyond
/// the patience.
#[test]
fn a_contiguous_request_that_is_kept_after_its_copy() {
    let (pool, mut kept) = holes(Duration::from_millis(50));
    drop(kept.remove(0));
    let request = AllocRequest::new(30).contiguous().priority(Priority::High);
    let mut first = Box::pin(pool.allocate_async(request).into_future());
    assert!(poll(first.as_mut()).is_pending());
    let began = Instant::now();
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    while let Err(error) = pool.begin_batch().append(&mut sequence, 1) {
        assert!(began.elapsed() < LIMIT, "after {:?}: {error}", began.elapsed());
        std::thread::sleep(Duration::from_millis(5));
    }
    let late = Instant::now() + LIMIT;
    let plain = pollster::block_on(pool.allocate_async(AllocRequest::new(1)).until(late));
    assert!(plain.is_ok(), "after {:?}: {plain:?}", began.elapsed());
    drop((sequence, plain));
    // Polled again, it has its place and its run.
    let lease = pollster::block_on(first).unwrap();
    assert_eq!(lease.blocks().len(), 30);
    drop(lease);
    pool.audit().unwrap();
}

/// While blocks are copied for it, a contiguous request has no reason to run; from the end of the
/// copy on the patience counts.
#[tokio::test]
async fn a_contiguous_request_during_its_copy() {
    const PATIENCE: Duration = Duration::from_millis(100);
    let asked = Asked::default();
    let pool = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(128).engine_copies(never(&asked));
    let pool = pool.turn_patience(PATIENCE).build().unwrap();
    let _kept = checkerboard(&pool);
    let request = AllocRequest::new(8).contiguous().priority(Priority::High);
    let mut first = Box::pin(pool.allocate_async(request).into_future());
    assert!(poll(first.as_mut()).is_pending());
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    let mut append = || pool.begin_batch().append(&mut sequence, 1).is_ok();
    for _ in 0..8 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!append(), "it sleeps");
    }
    let copies = std::mem::take(&mut *asked.lock().unwrap());
    assert!(!copies.is_empty());
    let began = Instant::now();
    copies.into_iter().for_each(|done| done(Ok(())));
    // A busy machine may stop this thread for that long.
    assert!(!append() || began.elapsed() >= PATIENCE, "it was just woken");
    while !append() {
        assert!(began.elapsed() < LIMIT);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(sequence);
    assert_eq!(timeout(LIMIT, first).await.unwrap().unwrap().blocks().len(), 8);
}

/// A pool with a resize to 120 of 200 blocks that was polled once: it holds free frames beyond the
/// new end, and waits for a pinned block.
fn pinned(patience: Duration) -> (Pool, Vec<Lease<'static>>, BlockPin) {
    let (pool, kept) = holes(patience);
    let last = kept.iter().max_by_key(|lease| block(lease)).unwrap();
    let pinned = pool.pin_scoped(handle(last)).unwrap();
    (pool, kept, pinned)
}

/// Its own patience is no reason to end within the limit.
fn patient() -> ResizeOptions {
    ResizeOptions::new().patience(2 * LIMIT)
}

/// The loop of a server: the branch that is taken waits for blocks that the other one holds.
#[tokio::test]
async fn a_resize_in_a_select_beside_a_request() {
    let (pool, _kept, _pinned) = pinned(Duration::from_millis(50));
    let mut resize = Box::pin(pool.resize_with(120, ResizeOptions::new()));
    let mut tick = tokio::time::interval(Duration::from_millis(20));
    tick.tick().await;
    let outcome = timeout(LIMIT, async {
        let mut served = 0;
        loop {
            tokio::select! {
                outcome = &mut resize => return (served, outcome),
                _ = tick.tick() => {
                    let lease = pool.allocate_async(AllocRequest::new(95)).await.unwrap();
                    served += 1;
                    drop(lease);
                }
            }
        }
    });
    let outcome = outcome.await;
    let Ok((served, outcome)) = outcome else { panic!("no progress: {:?}", pool.stats()) };
    assert!(served > 0);
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("pinned"), "{error}");
    assert_eq!((pool.total_blocks(), pool.stats().held), (200, 0));
    pool.audit().unwrap();
}

/// Other runs and resizes have their turn, or learn whose turn it is.
#[tokio::test]
async fn a_resize_that_is_kept_passes_its_turn_on() {
    let (pool, _kept, pinned) = pinned(Duration::from_millis(50));
    let mut resize = Box::pin(pool.resize_with(120, patient()));
    assert!(poll(resize.as_mut()).is_pending());
    assert!(timeout(LIMIT, pool.defragment()).await.is_ok(), "no turn: {:?}", pool.stats());
    let outcome = timeout(LIMIT, pool.resize_with(199, patient().patience(Duration::from_millis(100)))).await;
    assert!(outcome.is_ok(), "no turn: {:?}", pool.stats());
    pool.audit().unwrap();
    drop(pinned);
    let report = timeout(LIMIT, resize).await.unwrap().unwrap();
    assert_eq!((report.to, pool.total_blocks(), pool.stats().held), (120, 120, 0));
    pool.audit().unwrap();
}

/// A runtime that nobody drives keeps its background task from being polled.
#[test]
fn a_background_task_whose_runtime_rests() {
    let (pool, mut kept) = holes(Duration::from_millis(50));
    kept.truncate(50);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _task = runtime.block_on(async {
        let config = DefragConfig::new().interval(Duration::from_micros(100));
        let config = config.moves(DefragOptions::new().wave_bytes(1));
        pool.start_defragmenter(config).unwrap()
    });
    for round in 0..10 {
        let blocks = 199 - round;
        let pass = Duration::from_micros(137 * (1 + round as u64));
        runtime.block_on(async { tokio::time::sleep(pass).await });
        let (say, said) = std::sync::mpsc::channel();
        let other = pool.clone();
        std::thread::spawn(move || {
            let _ = say.send(pollster::block_on(other.resize_with(blocks, patient())));
        });
        let outcome = said.recv_timeout(LIMIT);
        assert!(outcome.is_ok_and(|outcome| outcome.is_ok()), "round {round}: {:?}", pool.stats());
        let mut more = checkerboard(&pool);
        kept.extend(more.split_off(more.len() / 4));
    }
}

#[tokio::test]
async fn options_of_a_resize_are_checked() {
    let (pool, _kept) = holes(Duration::from_millis(50));
    for blocks in [150, 200, 210] {
        for (options, name) in [
            (DefragOptions::new().wave_bytes(0), "wave_bytes"),
            (DefragOptions::new().copy_deadline(Duration::ZERO), "copy_deadline"),
        ] {
            let options = ResizeOptions::new().moves(options);
            let error = pool.resize_with(blocks, options).await.unwrap_err().to_string();
            assert_eq!(error, format!("{name}: must not be zero"));
        }
    }
}

/// A refused request names the blocks that a shrink holds, and statistics whose turn it is.
#[tokio::test]
async fn held_blocks_and_the_turn_are_named() {
    let (pool, _kept, pinned) = pinned(Duration::from_secs(60));
    assert_eq!(pool.stats().turn, None);
    let mut resize = Box::pin(pool.resize_with(120, patient()));
    assert!(poll(resize.as_mut()).is_pending());
    let held = pool.stats().held;
    assert!(held > 0);
    let refused = pool.allocate(AllocRequest::new(95)).unwrap_err();
    assert!(matches!(refused, AllocError::Exhausted { held: named, .. } if named == held), "{refused:?}");
    assert!(refused.to_string().contains(&format!(", {held} held, ")), "{refused}");
    tokio::time::sleep(Duration::from_millis(5)).await;
    let turn = pool.stats().turn.unwrap();
    assert_eq!(turn.task, TurnTask::Resize);
    let unpolled = turn.unpolled().unwrap();
    assert!(unpolled >= Duration::from_millis(5) && turn.age() >= unpolled, "{turn:?}");
    let late =
        pool.allocate_async(AllocRequest::new(95)).until(Instant::now() + Duration::from_millis(10)).await;
    let Err(late @ AllocError::Deadline { turn: Some(named), .. }) = late else { panic!("{late:?}") };
    assert_eq!(named.task, TurnTask::Resize);
    assert!(late.to_string().contains("; a resize has had the turn to move blocks for "), "{late}");
    let other = pool.resize_with(150, patient().patience(Duration::from_millis(1))).await.unwrap_err();
    assert!(matches!(&other, ResizeError::NoTurn { asked: 150, holder: Some(_) }), "{other:?}");
    assert!(other.to_string().contains("150 blocks: a resize has had the turn"), "{other}");
    drop(pinned);
    drop(resize);
    assert_eq!((pool.stats().turn, pool.stats().held), (None, 0));
    pool.audit().unwrap();
}

/// A resize that is polled too rarely is passed over again and again, and gives up; one that is
/// dropped or runs into its end at any of these moments leaves nothing held.
#[tokio::test]
async fn a_resize_that_is_rarely_polled_ends() {
    for polls in 0..4 {
        let (pool, _kept, _pinned) = pinned(Duration::from_millis(5));
        let mut resize =
            Box::pin(pool.resize_with(120, ResizeOptions::new().patience(Duration::from_millis(15))));
        for _ in 0..polls {
            if let Poll::Ready(outcome) = poll(resize.as_mut()) {
                assert!(matches!(outcome, Err(ResizeError::Blocked { .. })), "{outcome:?}");
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
            drop(pool.allocate_async(AllocRequest::new(95)).await.unwrap());
            assert_eq!((pool.stats().held, pool.stats().turn), (0, None), "the shrink was undone");
        }
        drop(resize);
        assert_eq!((pool.stats().held, pool.stats().turn, pool.total_blocks()), (0, None, 200));
        pool.audit().unwrap();
    }
    let (pool, _kept, _pinned) = pinned(Duration::from_millis(5));
    let mut resize =
        Box::pin(pool.resize_with(120, ResizeOptions::new().patience(Duration::from_millis(15))));
    let began = Instant::now();
    loop {
        if let Poll::Ready(outcome) = poll(resize.as_mut()) {
            assert!(matches!(outcome, Err(ResizeError::Blocked { .. })), "{outcome:?}");
            break;
        }
        drop(pool.allocate_async(AllocRequest::new(95)).await.unwrap());
        assert!(began.elapsed() < LIMIT);
    }
}

/// The copy of a run goes on without the run: its turn is not passed over before the copy ends.
#[tokio::test]
async fn a_turn_lasts_as_long_as_its_copies() {
    let asked = Asked::default();
    let pool = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(128).engine_copies(never(&asked));
    let pool = pool.turn_patience(Duration::from_millis(5)).build().unwrap();
    let _kept = checkerboard(&pool);
    let mut run = Box::pin(pool.defragment());
    assert!(poll(run.as_mut()).is_pending());
    let other = pool.resize_with(100, ResizeOptions::new().patience(Duration::from_millis(50))).await;
    let Err(ResizeError::NoTurn { holder: Some(holder), .. }) = other else { panic!("{other:?}") };
    assert_eq!((holder.task, holder.unpolled()), (TurnTask::Defragment, None));
    let serve = |asked: &Asked| {
        let copies = std::mem::take(&mut *asked.lock().unwrap());
        let served = copies.len();
        copies.into_iter().for_each(|done| done(Ok(())));
        served
    };
    assert!(serve(&asked) > 0);
    // The run is not polled: the next has its turn.
    let mut resize = Box::pin(pool.resize_with(100, patient()));
    let moved = timeout(LIMIT, async {
        loop {
            tokio::select! {
                outcome = &mut resize => return outcome,
                _ = tokio::time::sleep(Duration::from_millis(1)) => { serve(&asked); }
            }
        }
    });
    assert_eq!(moved.await.unwrap().unwrap().to, 100);
    // It continues, with its report.
    let report = timeout(LIMIT, async {
        loop {
            tokio::select! {
                outcome = &mut run => return outcome,
                _ = tokio::time::sleep(Duration::from_millis(1)) => { serve(&asked); }
            }
        }
    });
    let report = report.await.unwrap().unwrap();
    assert!(report.moved_blocks > 0 && report.waves > 0, "{report:?}");
    pool.audit().unwrap();
}

/// A resize that is dropped while its blocks are copied holds no longer what it collected.
#[tokio::test]
async fn a_resize_that_is_dropped_during_its_copy() {
    let asked = Asked::default();
    let pool = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(128).blocks_max(200);
    let pool = pool.engine_copies(never(&asked)).build().unwrap();
    let _kept = checkerboard(&pool);
    let mut resize = Box::pin(pool.resize_with(100, patient()));
    assert!(poll(resize.as_mut()).is_pending());
    let moving = asked.lock().unwrap().len();
    let held = pool.stats().held;
    assert!(moving > 0 && held > 14, "{held} held");
    drop(resize);
    assert_eq!(pool.stats().held, held - 14, "the copies hold their destinations");
    pool.resize(130).await.unwrap();
    drop(std::mem::take(&mut *asked.lock().unwrap()));
    assert_eq!((pool.stats().held, pool.stats().turn), (0, None));
    pool.audit().unwrap();
}

/// A running sequence is behind a request for more than can become free without it: the error says
/// that waiting does not help, and closing the sequence serves the request.
#[tokio::test]
async fn a_request_that_lacks_what_its_waiter_owns() {
    let pool = plain(100);
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    let full = 60 * pool.layout().block_tokens();
    pool.begin_batch().append(&mut sequence, full).unwrap();
    let mut first =
        Box::pin(pool.allocate_async(AllocRequest::new(70).priority(Priority::High)).into_future());
    assert!(poll(first.as_mut()).is_pending());
    let refused = pool.begin_batch().append(&mut sequence, full + 1).unwrap_err();
    let behind =
        AllocError::Behind { asked: 1, priority: Priority::Normal, waiting: Priority::High, lacking: 30 };
    assert_eq!(refused, behind.into());
    assert!(refused.to_string().contains("waits ahead, and lacks 30 blocks"), "{refused}");
    drop(sequence);
    assert_eq!(pollster::block_on(first).unwrap().blocks().len(), 70);
}
