//! A pool on a device whose streams run in every order that CUDA allows: an engine reads exactly
//! the rows that it stored.
//!
//! Each seed is a schedule: a layout, a style of the mock, and the progress of the device between
//! two calls of the host. The machine is paused, one thread makes all calls, and the machine is
//! stepped once the watcher has made all callbacks that it can: so the same seed gives the same
//! schedule. `KVPOOL_SCHEDULE_SEED` runs one seed alone, `KVPOOL_SCHEDULES` sets the number of
//! schedules.
//!
//! What CUDA leaves open is a choice of the seed, too: [`Rules`], and what happens at one round of some
//! schedules, an [`Event`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::time::Instant;

use kvpool::compact::{DefragError, DefragOptions, DefragReport};
use kvpool::{AllocError, AllocRequest};
use kvpool_cuda::{CudaError, Device, StreamPriority};
use kvpool_cuda_tests::engine::{Lane, Rig, Shape, Wrong, drained, layout_of, poll};
use kvpool_cuda_tests::mock::{self, Rules, Session, Style};
use kvpool_testkit::rng::Rng;

/// Number of rounds of one schedule.
const ROUNDS: usize = 60;
/// Number of streams of an open device: the watcher's.
const STREAMS: i64 = 5;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

/// Resumes the machine when dropped: the destructors of other values wait for it.
struct Resumed<'a>(&'a Session);

impl Drop for Resumed<'_> {
    fn drop(&mut self) {
        self.0.style(Style::Fifo);
        self.0.rules(&Rules::default());
        self.0.resume();
    }
}

/// What happens in the middle of a schedule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Event {
    Nothing,
    /// The device makes no progress for a number of rounds. CUDA bounds the time of no kernel: calls
    /// that do not wait go on, and the host may run as far ahead as its buffers allow.
    Hang(usize),
    /// An error that ends the context: work in flight stops anywhere, and every later call returns the
    /// same error.
    Failure(i32),
    /// The device makes no progress for a number of rounds, and then the driver ends the context
    /// (`CUDA_ERROR_LAUNCH_TIMEOUT`).
    Timeout(usize),
    /// Another part of the process opens the device, and the driver does not compile the kernels: it is
    /// short of memory, has no compiler, or does not know the instructions. Nothing else is affected.
    Compilation(i32),
    /// The same, for loading the code of the kernel of this number: the driver loads code when it is
    /// first asked for, and may be short of memory then. Unloading the others waits for the device.
    Loading(u32),
}

/// Errors that end a context: an address, a launch, memory that cannot be corrected, an error contained
/// to this process.
const STICKY: [i32; 4] = [700, 719, 214, 226];

/// Kernels that a device loads.
const KERNELS: usize = 8;
const LAUNCH_TIMEOUT: i32 = 702;
/// Memory, no code for this device, PTX, the compiler, the version of the PTX.
const COMPILATION: [i32; 5] = [2, 209, 218, 221, 222];

impl Event {
    /// Returns the event of a schedule, and its round. Half of the schedules have none.
    fn of(seed: u64) -> (usize, Self) {
        let mut rng = Rng(seed.wrapping_mul(0xD134_2543_DE82_EF95) ^ 0x5EED);
        let (round, rounds) = (5 + rng.below(ROUNDS - 10), 1 + rng.below(12));
        let event = match rng.below(10) {
            0 => Self::Hang(rounds),
            1 => Self::Failure(STICKY[rng.below(STICKY.len())]),
            2 => Self::Timeout(rounds),
            3 => Self::Compilation(COMPILATION[rng.below(COMPILATION.len())]),
            4 => Self::Loading(rng.below(KERNELS) as u32),
            _ => Self::Nothing,
        };
        (round, event)
    }

    fn begin(self, session: &Session) {
        match self {
            Self::Nothing => {}
            Self::Hang(_) | Self::Timeout(_) => session.stop(0, 1),
            Self::Failure(code) => session.fail(0, code),
            Self::Compilation(code) => {
                session.fail_compilation(code);
                is_refused(session);
            }
            Self::Loading(number) => {
                session.fail_call("cuFuncGetAttribute", number, COMPILATION[0]);
                is_refused(session);
            }
        }
    }

    fn end(self, session: &Session) {
        match self {
            Self::Hang(_) => session.stop(0, 0),
            Self::Timeout(_) => {
                session.fail(0, LAUNCH_TIMEOUT);
                session.stop(0, 0);
            }
            _ => {}
        }
    }

    fn rounds(self) -> usize {
        if let Self::Hang(rounds) | Self::Timeout(rounds) = self { rounds } else { 0 }
    }

    fn is_failure(self) -> bool {
        matches!(self, Self::Failure(_) | Self::Timeout(_))
    }
}

/// Opens the device again, which must fail with an error that says why, and leave nothing.
fn is_refused(session: &Session) {
    let before = session.live();
    let refused = Device::open(0).expect_err("no kernels");
    session.fail_compilation(0);
    session.forget_injected();
    assert!(matches!(&refused, CudaError::Driver { doing, .. } if doing.starts_with("loading")), "{refused}");
    session.assert_no_leaks(&before);
}

/// A compaction under way.
type Running<'a> = Pin<Box<dyn Future<Output = Result<DefragReport, DefragError>> + 'a>>;

/// Results of a schedule.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Outcome {
    compared: u64,
    moved: u64,
    trace: u64,
}

fn schedule(
    session: &Session,
    device: &Device,
    seed: u64,
    rules: &Rules,
    (at, event): (usize, Event),
) -> Result<Outcome, Wrong> {
    // The watcher may still hold streams of the previous schedule.
    let streams = mock::Kind::Stream as usize;
    assert!(
        drained(|| session.live()[streams] <= STREAMS && session.pending() == 0),
        "{} streams are left",
        session.live()[streams]
    );
    let mut rng = Rng(seed);
    let shape = Shape { layout: layout_of(rng.bits() % 1000), blocks: (20, 20), caches: seed % 4 != 3 };
    session.style(Style::Fifo);
    let rig = Rig::new(device, &shape);
    // Compaction's stream is the only starved one if all streams of the engine have higher
    // priorities.
    let is_high = |lane: usize| matches!(seed % 6, 3 | 4) || (seed >> lane) & 1 == 0;
    let priority = |lane: usize| if is_high(lane) { StreamPriority::Highest } else { StreamPriority::Usual };
    let mut lanes: Vec<Lane> = (0..1 + rng.below(2))
        .map(|lane| Lane::new(&rig, rig.stream(priority(lane)), seed * 2 + lane as u64))
        .collect();
    let mut run: Option<Running<'_>> = None;
    let mut moved = 0;
    assert!(drained(|| session.pending() == 0), "the work submitted so far has not ended");
    session.pause();
    session.seed(seed);
    let _resumed = Resumed(session);
    session.rules(rules);
    session.style(match seed % 6 {
        0 => Style::Random,
        1 => Style::Lazy,
        2 => Style::Starve(lanes[0].stream.as_raw() as usize),
        3 | 4 => Style::Lowest,
        _ => Style::Ranks,
    });
    // The watcher has forgotten the events before the pause.
    rig.quiet(session);
    let pace = [4, 20, 60, 150][rng.below(4)];
    let wave_bytes = (1 + seed as usize % 3) * rig.pool.layout().bytes_per_block();
    let mut is_over = event == Event::Nothing;
    for round in 0..ROUNDS {
        if round == at {
            event.begin(session);
        }
        if round >= at + event.rounds() && !is_over {
            event.end(session);
            is_over = true;
            if event.is_failure() {
                return lose(session, &rig, lanes, run).map(|()| Outcome::default());
            }
        }
        let lane = rng.below(lanes.len());
        if lanes[lane].is_full() {
            // The engine waits for its oldest step.
            while !lanes[lane].check()? {
                if session.step(1 + rng.below(40) as u64) == 0 {
                    assert!(round >= at && !is_over, "the machine makes no progress");
                    // A stopped device: the engine has to wait for its end.
                    event.end(session);
                    is_over = true;
                    if event.is_failure() {
                        return lose(session, &rig, lanes, run).map(|()| Outcome::default());
                    }
                }
                rig.quiet(session);
            }
        }
        lanes[lane].go_on(&rig)?;
        let pending = run.get_or_insert_with(|| {
            let pool = rig.pool.clone();
            // Short waves, so that several are in flight.
            let options = DefragOptions::new().fragmentation_penalty(0).wave_bytes(wave_bytes);
            Box::pin(async move { pool.defragment_with(options).await })
        });
        if let std::task::Poll::Ready(report) = poll(pending) {
            moved += report.expect("no failure").moved_blocks as u64;
            run = None;
        }
        session.step(rng.below(pace) as u64);
        rig.quiet(session);
        for lane in &mut lanes {
            lane.check()?;
        }
    }
    if !is_over {
        event.end(session);
        if event.is_failure() {
            return lose(session, &rig, lanes, run).map(|()| Outcome::default());
        }
    }
    // Everything is dropped while the device is still working.
    lanes.iter_mut().for_each(Lane::clear);
    while lanes.iter().any(|lane| !lane.is_idle()) {
        session.step(100);
        for lane in &mut lanes {
            lane.check()?;
        }
    }
    while session.step(1000) > 0 {}
    rig.quiet(session);
    while let Some(pending) = &mut run {
        if let std::task::Poll::Ready(report) = poll(pending) {
            moved += report.expect("no failure").moved_blocks as u64;
            run = None;
        }
        while session.step(1000) > 0 {}
        rig.quiet(session);
    }
    let trace = session.trace();
    assert!(drained(|| lanes.iter_mut().all(|lane| lane.check().is_ok() && lane.finishes.is_empty())));
    rig.pool.audit().expect("a consistent pool without sequences");
    Ok(Outcome { compared: lanes.iter().map(|lane| lane.compared).sum(), moved, trace })
}

/// The device has failed: everybody is told, no wrong row is read, and the pool can be dropped.
fn lose(session: &Session, rig: &Rig, mut lanes: Vec<Lane>, run: Option<Running<'_>>) -> Result<(), Wrong> {
    for lane in &mut lanes {
        let outcome = lane.go_on(rig).and_then(|()| lane.check().map(drop));
        if let Err(wrong @ Wrong::Row(_)) = outcome {
            return Err(wrong);
        }
        let told = drained(|| {
            lane.finishes.retain_mut(|finish| poll(finish).is_pending());
            lane.finishes.is_empty()
        });
        assert!(told, "a batch is not told of the failure");
        lane.clear();
    }
    if let Some(mut run) = run {
        assert!(drained(|| poll(&mut run).is_ready()), "a compaction is not told of the failure");
    }
    let refused = rig.pool.begin_batch_on(&lanes[0].stream).expect_err("the device is lost");
    assert!(refused.is_lost(), "{refused}");
    assert!(rig.pool.is_lost());
    let refused = rig.pool.allocate(AllocRequest::new(1)).expect_err("the device is lost");
    assert!(matches!(refused, AllocError::DeviceLost { .. }), "{refused}");
    let is_sound = drained(|| rig.pool.stats().retired == 0 && rig.pool.audit().is_ok());
    assert!(is_sound, "{:?}, {:?}", rig.pool.audit(), rig.pool.stats());
    session.resume();
    Ok(())
}

/// Reopens the device if a schedule has broken it.
fn opened(session: &Session, device: &mut Option<Device>) -> Device {
    if device.as_ref().is_none_or(|device| device.good().is_err()) {
        session.fail(0, 0);
        *device = Some(Device::open(0).expect("the mock has a device"));
    }
    device.clone().expect("opened")
}

#[test]
fn what_is_read_is_what_was_stored() {
    let session = mock::session();
    let (mut device, start) = (None, Instant::now());
    let count = number("KVPOOL_SCHEDULES").unwrap_or(300);
    let seeds = number("KVPOOL_SCHEDULE_SEED").map_or(0..count, |seed| seed..seed + 1);
    let (mut corrupt, mut first, total) = (0, None, seeds.end - seeds.start);
    let mut sum = Outcome::default();
    for seed in seeds {
        let device = opened(&session, &mut device);
        let event = Event::of(seed);
        let outcome =
            catch_unwind(AssertUnwindSafe(|| schedule(&session, &device, seed, &Rules::of(seed), event)));
        let why = match outcome {
            Ok(Ok(outcome)) => {
                sum = Outcome {
                    compared: sum.compared + outcome.compared,
                    moved: sum.moved + outcome.moved,
                    ..sum
                };
                continue;
            }
            Ok(Err(wrong)) => wrong.to_string(),
            Err(_) => "a panic".into(),
        };
        corrupt += 1;
        first.get_or_insert(format!("seed {seed}: {why}"));
        // One failing schedule is enough to catch a planted bug.
        if std::env::var_os("KVPOOL_MUTANT").is_some() {
            println!("caught in schedule {seed}: {why}");
            break;
        }
    }
    println!(
        "{total} schedules, {} rows compared, {} blocks moved, in {:.1?}",
        sum.compared,
        sum.moved,
        start.elapsed()
    );
    println!("caught in {corrupt} of {total} schedules");
    assert_eq!(
        corrupt,
        0,
        "of {total} schedules; the first, which KVPOOL_SCHEDULE_SEED repeats: {}",
        first.unwrap_or_default()
    );
    assert!(
        total < 100 || (sum.moved > total && sum.compared > 100 * total),
        "{sum:?}: the schedules do too little"
    );
}

#[test]
fn a_seed_is_a_schedule() {
    let session = mock::session();
    let device = Device::open(0).expect("the mock has a device");
    for seed in [0, 1, 2, 3, 5, 17] {
        // A call that blocks lets the device and the watcher run beside it.
        let rules = Rules { queue_limit: 1000, stalls: false, ..Rules::of(seed) };
        let event = (20, if seed % 2 == 0 { Event::Hang(3) } else { Event::Nothing });
        let runs: Vec<Outcome> = (0..3)
            .map(|_| {
                schedule(&session, &device, seed, &rules, event)
                    .unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"))
            })
            .collect();
        assert!(runs.iter().all(|run| *run == runs[0]), "seed {seed}: {runs:?}");
    }
}
