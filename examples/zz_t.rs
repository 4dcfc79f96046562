use kvpool::pool::*;
use kvpool::storage::*;
fn cpu() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
    t.tv_sec as u64 * 1000000000 + t.tv_nsec as u64
}
fn time(name: &str, n: u64, mut f: impl FnMut()) {
    for _ in 0..n / 10 {
        f()
    }
    let mut best = f64::MAX;
    for _ in 0..5 {
        let t = cpu();
        for _ in 0..n {
            f()
        }
        best = best.min((cpu() - t) as f64 / n as f64);
    }
    println!("{name}: {best:.2} ns");
}
fn main() {
    let pool =
        Pool::builder(KvLayout::named("tiny").unwrap()).blocks(65536).without_storage().build().unwrap();
    let w = std::sync::atomic::AtomicU64::new(0);
    time("cas", 20_000_000, || {
        let _ = std::hint::black_box(w.compare_exchange(
            0,
            0,
            std::sync::atomic::Ordering::AcqRel,
            std::sync::atomic::Ordering::Relaxed,
        ));
    });
    time("lease 1", 5_000_000, || {
        drop(std::hint::black_box(pool.allocate(AllocRequest::new(1)).unwrap()));
    });
    time("lease 10", 1_000_000, || {
        drop(std::hint::black_box(
            pool.allocate(
                AllocRequest::new(10).sequence(kvpool::ids::SequenceId(7)).priority(Priority::High),
            )
            .unwrap(),
        ));
    });
    let mut v = Vec::with_capacity(64);
    time("owned 1", 5_000_000, || {
        drop(std::hint::black_box(pool.allocate_owned(AllocRequest::new(1)).unwrap()));
    });
    time("raw 1", 5_000_000, || {
        v.clear();
        pool.allocate_raw(AllocRequest::new(1), &mut v).unwrap();
        pool.free(&v).unwrap();
    });
    time("raw 10", 1_000_000, || {
        v.clear();
        pool.allocate_raw(AllocRequest::new(10), &mut v).unwrap();
        pool.free(&v).unwrap();
    });
    let h = pool.handle();
    time("handle lease 1", 5_000_000, || {
        let l = h.allocate(AllocRequest::new(1)).unwrap();
        h.release(l);
    });
    time("lease 100", 100_000, || {
        drop(std::hint::black_box(pool.allocate(AllocRequest::new(100)).unwrap()));
    });
    let mut ls = Vec::new();
    time("burst 64", 20_000, || {
        for _ in 0..64 {
            ls.push(pool.allocate(AllocRequest::new(1)).unwrap());
        }
        ls.clear();
    });
    let two = |k: usize| {
        let t = std::time::Instant::now();
        std::thread::scope(|s| {
            for _ in 0..k {
                let pool = &pool;
                s.spawn(move || {
                    for _ in 0..5_000_000u64 {
                        std::hint::black_box(pool.allocate(AllocRequest::new(1)).unwrap());
                    }
                });
            }
        });
        5e6 * k as f64 / t.elapsed().as_secs_f64() / 1e6
    };
    let (a, b) = (two(1), two(2));
    println!("x1 {a:.1} M/s x2 {b:.1} M/s ratio {:.2}", b / a);
    drop(ls);
    println!("{:?} {:?}", pool.audit(), pool.stats().latency);
}
