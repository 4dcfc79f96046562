//! The frame floor: the magazine alone compared with the compare-exchange that it saves, and the
//! bitmap alone.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

use criterion::{Criterion, criterion_group, criterion_main};
use kvpool::frame::{Depot, FrameConfig, Frames, MagazinePair, OwnerCell};
use kvpool::{FrameId, Order, Run};

const FRAMES: usize = 65_536;

fn frames() -> Frames {
    Frames::new(FrameConfig { frames: FRAMES, frames_max: FRAMES, segment_frames: 4096 })
}

/// One frame through a thread's cache, bare and in its owner cell, compared with an uncontended
/// compare-exchange.
fn magazine(c: &mut Criterion) {
    let (frames, depot) = (frames(), Depot::new(64));
    let mut group = c.benchmark_group("magazine");

    let word = AtomicU64::new(0);
    group.bench_function("an uncontended compare-exchange", |bencher| {
        let mut expected = word.load(Ordering::Relaxed);
        bencher.iter(|| {
            let next = black_box(expected + 1);
            word.compare_exchange(expected, next, Ordering::AcqRel, Ordering::Relaxed)
                .expect("no contention");
            expected = next;
        });
    });

    let mut cache = MagazinePair::new(64, FrameId(0));
    group.bench_function("allocate + free", |bencher| {
        bencher.iter(|| {
            let frame = cache.allocate(&frames, &depot).expect("nearly all are free");
            cache.free(black_box(frame), &frames, &depot);
        });
    });

    let cell = OwnerCell::new(cache);
    group.bench_function("allocate + free, in its cell", |bencher| {
        bencher.iter(|| {
            // SAFETY: this thread created the cell and is the only one that enters it.
            let frame = unsafe { cell.enter(|cache| cache.allocate(&frames, &depot)) };
            let frame = black_box(frame.flatten().expect("nearly all are free"));
            // SAFETY: as above.
            unsafe { cell.enter(|cache| cache.free(frame, &frames, &depot)) }.expect("no thread visits");
        });
    });
    cell.visit(|cache| cache.flush(&frames)).expect("no thread is inside");
    assert_eq!(frames.free_frames(), FRAMES, "lost frames");
}

/// The bitmap at half fill: aligned runs of several orders, and a refill of a whole magazine.
fn bitmap(c: &mut Criterion) {
    let mut group = c.benchmark_group("bitmap, half full");
    for order in [0, 3, 6, 9, 11].map(Order) {
        let frames = frames();
        let mut held = half_of(&frames, order);
        let mut random = fastrand::Rng::with_seed(7);
        group.bench_function(format!("order {}", order.0), |bencher| {
            bencher.iter(|| {
                let index = random.usize(..held.len());
                frames.free_run(held[index]);
                held[index] = frames.allocate_aligned(order, held[index].start).expect("half is free");
            });
        });
        held.into_iter().for_each(|run| frames.free_run(run));
        assert_eq!(frames.free_frames(), FRAMES, "lost frames");
    }
    let frames = frames();
    group.bench_function("refill of 64", |bencher| {
        bencher.iter(|| {
            let mask = frames.refill(64, FrameId(0)).expect("all are free");
            frames.free_mask(black_box(mask));
        });
    });
    assert_eq!(frames.free_frames(), FRAMES, "lost frames");
}

/// Runs of one order that take half of the frames, spread at random.
fn half_of(frames: &Frames, order: Order) -> Vec<Run> {
    let mut all: Vec<Run> = std::iter::from_fn(|| frames.allocate_aligned(order, FrameId(0))).collect();
    assert_eq!(all.len(), FRAMES >> order.0, "aligned runs are missing");
    fastrand::Rng::with_seed(1).shuffle(&mut all);
    all.split_off(all.len() / 2).into_iter().for_each(|run| frames.free_run(run));
    all
}

criterion_group! {
    name = benches;
    config = kvpool_benches::settings();
    targets = magazine, bitmap
}
criterion_main!(benches);
