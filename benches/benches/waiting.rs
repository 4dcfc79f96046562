//! What it costs to wait for a block: from a free to the task that has waited for it, beside a semaphore that counts
//! permits (tokio's). On one thread, polled by hand: the way through the line and back, without the system's scheduler;
//! and between two threads, one of which sleeps.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use kvpool::pool::{AllocRequest, Lease, Pool};
use kvpool::storage::KvLayout;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Something of which there is one, and for which others wait.
trait Scarce: Clone + Send + 'static {
    type Held: Send + 'static;

    fn new() -> Self;
    fn wait(&self) -> impl Future<Output = Self::Held>;
}

#[derive(Clone)]
struct Blocks(Pool);

impl Scarce for Blocks {
    type Held = Lease<'static>;

    fn new() -> Self {
        let layout = KvLayout::named("tiny").expect("a layout of the library");
        Self(Pool::builder(layout).blocks(1).without_storage().build().expect("a pool of one block"))
    }

    async fn wait(&self) -> Self::Held {
        let lease = self.0.allocate_async(AllocRequest::new(1)).await.expect("one block");
        assert_eq!(lease.blocks().len(), 1);
        lease
    }
}

#[derive(Clone)]
struct Permits(Arc<Semaphore>);

impl Scarce for Permits {
    type Held = OwnedSemaphorePermit;

    fn new() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }

    async fn wait(&self) -> Self::Held {
        self.0.clone().acquire_owned().await.expect("never closed")
    }
}

/// Asks, sleeps, is woken by the free, and takes: all on one thread.
fn one_thread<S: Scarce>(subject: &S) {
    let mut context = Context::from_waker(Waker::noop());
    let mut first = pin!(subject.wait());
    let Poll::Ready(held) = first.as_mut().poll(&mut context) else { panic!("it is free") };
    let mut second = pin!(subject.wait());
    assert!(second.as_mut().poll(&mut context).is_pending());
    drop(held);
    assert!(second.as_mut().poll(&mut context).is_ready(), "it was handed over");
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(result) => return result,
            Poll::Pending => thread::park(),
        }
    }
}

/// The time from a free on this thread to another thread, which sleeps, having what was freed; `rounds` of them.
fn two_threads<S: Scarce>(rounds: u64) -> Duration {
    let subject = S::new();
    let (waits, is_waiting) = mpsc::channel();
    let (got, has_got) = mpsc::channel();
    let (go, gone) = mpsc::channel::<()>();
    let other = subject.clone();
    let thread = thread::spawn(move || {
        while gone.recv().is_ok() {
            waits.send(()).expect("the measuring thread waits for this");
            drop(block_on(other.wait()));
            got.send(Instant::now()).expect("the measuring thread waits for this");
        }
    });
    let mut sum = Duration::ZERO;
    for _ in 0..rounds {
        let held = block_on(subject.wait());
        go.send(()).expect("the thread waits for this");
        is_waiting.recv().expect("the thread says so");
        // Long enough for it to stand in line, and its thread to sleep.
        thread::sleep(Duration::from_micros(100));
        let begin = Instant::now();
        drop(held);
        sum += has_got.recv().expect("it gets what was freed").duration_since(begin);
    }
    drop(go);
    thread.join().expect("the thread ends when it has nothing to do");
    sum
}

fn hand_over(c: &mut Criterion) {
    let mut group = c.benchmark_group("wait, free, wake, take: one thread");
    let (blocks, permits) = (Blocks::new(), Permits::new());
    group.bench_function("kvpool", |b| b.iter(|| one_thread(&blocks)));
    group.bench_function("tokio semaphore", |b| b.iter(|| one_thread(&permits)));
    group.finish();
    let mut group = c.benchmark_group("from a free to a thread that sleeps");
    group.sample_size(10);
    group.bench_function("kvpool", |b| b.iter_custom(two_threads::<Blocks>));
    group.bench_function("tokio semaphore", |b| b.iter_custom(two_threads::<Permits>));
    group.finish();
}

criterion_group! {
    name = benches;
    config = kvpool_benches::settings();
    targets = hand_over
}
criterion_main!(benches);
