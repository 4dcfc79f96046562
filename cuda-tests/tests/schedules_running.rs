//! The same engine while the machine runs freely: lanes on threads of their own, a background
//! defragmenter, and a pool that is resized all the time. The operating system affects these
//! schedules; a seed makes one only likely.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvpool::{DefragConfig, DefragOptions, ResizeError, ResizeOptions, SequenceId};
use kvpool_cuda::{Device, StreamPriority};
use kvpool_cuda_tests::engine::{Lane, Rig, Shape, Wrong, drained, layout_of};
use kvpool_cuda_tests::mock::{self, Rules, Session, Style};
use kvpool_testkit::rng::Rng;

const ROUNDS: usize = 150;
const LANES: u64 = 2;

/// Waits for the lane's oldest step if the lane has its maximum of steps in flight.
fn go_on(rig: &Rig, lane: &mut Lane) -> Result<(), Wrong> {
    lane.go_on(rig)?;
    let start = Instant::now();
    while !lane.check()? && lane.is_full() {
        assert!(start.elapsed() < Duration::from_secs(20), "a step does not end");
        std::thread::yield_now();
    }
    Ok(())
}

fn run(session: &Session, device: &Device, seed: u64) -> Result<(u64, u64, u64), Wrong> {
    let shape = Shape { layout: layout_of(seed * 7 + 3), blocks: (24, 64), caches: seed.is_multiple_of(2) };
    let rig = Rig::new(device, &shape);
    let streams: Vec<_> = (0..LANES).map(|_| rig.stream(StreamPriority::Highest)).collect();
    session.seed(seed);
    session.rules(&Rules::of(seed));
    session.style(match seed % 5 {
        0 => Style::Random,
        1 => Style::Lazy,
        2 => Style::Starve(streams[0].as_raw() as usize),
        3 => Style::Lowest,
        _ => Style::Ranks,
    });
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("threads");
    let _entered = runtime.enter();
    let config = DefragConfig::new().threshold(0.0).interval(Duration::from_micros(300));
    let moves = DefragOptions::new().wave_bytes(2 * rig.pool.layout().bytes_per_block());
    let config = config.moves(moves);
    let defragmenter = rig.pool.start_defragmenter(config).expect("a storage and a runtime");
    let (rig, at_work) = (&rig, AtomicUsize::new(streams.len()));
    let (mut compared, mut resized, mut wrong) = (0, 0, None);
    kvpool_testkit::threads::scope(|scope| {
        let at_work = &at_work;
        let lanes: Vec<_> = (seed * LANES..)
            .zip(streams)
            .map(|(number, stream)| {
                scope.spawn(move || {
                    rig.context.bind_to_thread().expect("a valid context");
                    let mut lane = Lane::new(rig, stream, number);
                    let outcome = (0..ROUNDS).try_for_each(|_| go_on(rig, &mut lane));
                    at_work.fetch_sub(1, Ordering::SeqCst);
                    outcome?;
                    lane.clear();
                    assert!(
                        drained(|| lane.check().is_err() || (lane.is_idle() && lane.finishes.is_empty()))
                    );
                    lane.check()?;
                    Ok::<u64, Wrong>(lane.compared)
                })
            })
            .collect();
        let mut rng = Rng(seed);
        while at_work.load(Ordering::SeqCst) > 0 {
            let blocks = 16 + rng.below(48);
            let options = ResizeOptions::new().patience(Duration::from_millis(3));
            match runtime.block_on(rig.pool.resize_with(blocks, options)) {
                Ok(_) => resized += 1,
                Err(
                    ResizeError::NoRoom { .. }
                    | ResizeError::NoTurn { .. }
                    | ResizeError::Blocked { .. }
                    | ResizeError::Shrink(_),
                ) => {}
                Err(error) => panic!("{error}"),
            }
        }
        for lane in lanes {
            match lane.join().expect("lanes do not panic") {
                Ok(rows) => compared += rows,
                Err(error) => wrong = Some(error),
            }
        }
    });
    let totals = runtime.block_on(defragmenter.stop());
    session.style(Style::Fifo);
    session.rules(&Rules::default());
    if let Some(wrong) = wrong {
        return Err(wrong);
    }
    assert!(totals.failed == 0, "{totals:?}");
    assert!(
        drained(|| rig.pool.stats().retired == 0 && rig.pool.audit().is_ok()),
        "{:?}: {:?}",
        rig.pool.stats(),
        rig.pool.audit()
    );
    assert!(rig.pool.sequence(SequenceId(u64::MAX)).open().is_ok());
    Ok((compared, totals.moved_blocks as u64, resized))
}

#[test]
fn what_is_read_is_what_was_stored_while_all_run() {
    let session = mock::session();
    let device = Device::open(0).expect("the mock has a device");
    let number = |name: &str| std::env::var(name).ok().map(|value| value.parse().expect("a number"));
    let count: u64 = number("KVPOOL_SCHEDULES").unwrap_or(300) / 10;
    let seeds = number("KVPOOL_SCHEDULE_SEED").map_or(0..count.max(5), |seed| seed..seed + 1);
    let mut sum = (0, 0, 0);
    for seed in seeds.clone() {
        let (compared, moved, resized) =
            run(&session, &device, seed).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
        sum = (sum.0 + compared, sum.1 + moved, sum.2 + resized);
    }
    println!("{seeds:?}: {} rows compared, {} blocks moved, {} changes of size", sum.0, sum.1, sum.2);
    assert!(
        seeds.end - seeds.start < 5 || (sum.0 > 10_000 && sum.1 > 10 && sum.2 > 10),
        "{sum:?}: the runs do too little"
    );
}
