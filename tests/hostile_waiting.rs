//! Safe user code that disturbs waiting requests: wakers that panic, runs and requests that are
//! kept and not polled.

use std::future::Future;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use kvpool::compact::{DefragOptions, FrameCopier};
use kvpool::prefix::PrefixConfig;
use kvpool::storage::{CopyDone, FrameMove, KvLayout};
use kvpool::{AllocRequest, BlockHandle, Pool, SequenceId};
use tokio::time::timeout;

type Asked = Arc<Mutex<Vec<CopyDone>>>;
fn never(asked: &Asked) -> FrameCopier {
    let asked = asked.clone();
    Arc::new(move |_: &[FrameMove], done: CopyDone| asked.lock().unwrap().push(done))
}
fn stuck(asked: &Asked) -> Pool {
    Pool::builder(KvLayout::named("tiny").unwrap()).blocks(128).engine_copies(never(asked)).build().unwrap()
}
fn checkerboard(pool: &Pool) -> Vec<BlockHandle> {
    let mut handles = Vec::new();
    pool.allocate_raw(AllocRequest::new(pool.free_blocks()), &mut handles).unwrap();
    let (kept, gone): (Vec<_>, Vec<_>) = handles.into_iter().partition(|handle| handle.id.0 % 2 == 0);
    pool.free(&gone).unwrap();
    kept.iter().for_each(|&handle| pool.seal(handle).unwrap());
    kept
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
    let mut a = Box::pin(pool.allocate_async(AllocRequest::new(free).contiguous()));
    assert!(timeout(Duration::from_millis(300), a.as_mut()).await.is_err());
    assert_eq!(pool.stats().waiting, 1);
    // The last block is not moving, or its move is cancelled: one more is free afterwards.
    let still = pool.free_blocks();
    for handle in kept {
        pool.free(&[handle]).unwrap();
        if pool.free_blocks() > still {
            break;
        }
    }
    if takes_signal {
        assert!(poll(a.as_mut()).is_pending());
    }
    // From here on `a` is kept and not polled.
    let want = pool.free_blocks();
    let b = pool.allocate_until(AllocRequest::new(want), Instant::now() + Duration::from_secs(3)).await;
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
    let mut w = Box::pin(pool.allocate_async(AllocRequest::new(100)));
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
    let mut w = Box::pin(pool.allocate_async(AllocRequest::new(100)));
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
