//! The device fails at a random moment, or at a call of any kind, under full load: waiting threads
//! get an error within seconds, nothing panics, owned blocks can be released, and nothing leaks.

use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Once, mpsc};
use std::time::{Duration, Instant};

use kvpool::compact::DefragOptions;
use kvpool::prefix::{PrefixConfig, PrefixKeys};
use kvpool::{AllocError, AllocRequest, DefragConfig, DefragError, Pool, ResizeOptions};
use kvpool_cuda::{Device, StreamPriority};
use kvpool_cuda_tests::engine::{Lane, Rig, Shape, Wrong, drained, layout_of};
use kvpool_cuda_tests::mock::{self, Kind, Live, Session, Style};
use kvpool_testkit::rng::Rng;
use tokio::runtime::Runtime;

/// Longest wait that a test accepts.
const BOUND: Duration = Duration::from_secs(10);
/// Errors that end a context: an address, a launch, a timeout, memory that cannot be corrected, an
/// error contained to this process, a leak of tensor memory.
const STICKY: [i32; 6] = [700, 719, 702, 214, 226, 721];

/// Number of unplanned panics, in any thread: a panic in a callback ends no test, and would go
/// unnoticed.
static PANICS: AtomicUsize = AtomicUsize::new(0);

/// Starts a session with the machine; panics are counted from here on.
fn session() -> Session {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let is_planted =
                info.payload().downcast_ref::<&str>().is_some_and(|text| text.starts_with("planted"));
            if !is_planted {
                PANICS.fetch_add(1, Ordering::SeqCst);
                before(info);
            }
        }));
    });
    mock::session()
}

fn assert_no_panic() {
    assert_eq!(PANICS.load(Ordering::SeqCst), 0, "a thread panicked, perhaps in the background");
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("threads")
}

/// Asserts that all objects of the engine are gone after a while: the watcher may hold the last
/// references.
fn assert_gone(session: &Session, before: &Live) {
    let left = |live: &Live| live.iter().zip(before).any(|(now, before)| now > before);
    assert!(drained(|| !left(&session.live())), "left: {:?}, before: {before:?}", session.live());
}

/// Asserts the same after a device has failed, which forgets no registration: the pages are kept.
fn assert_gone_but_registrations(session: &Session, before: &Live) {
    let mut before = *before;
    before[Kind::Registered as usize] = session.live()[Kind::Registered as usize];
    assert_gone(session, &before);
}

/// Asserts that the pool is consistent once the watcher has made its last callback: an audit
/// concurrent with releases is meaningless.
fn assert_sound(pool: &Pool, seed: u64) {
    let is_sound = drained(|| pool.stats().retired == 0 && pool.audit().is_ok());
    assert!(is_sound, "seed {seed}: {:?}, {:?}", pool.audit(), pool.stats());
}

/// Returns the live objects when no device is open: those that the driver keeps.
fn baseline(session: &Session) -> Live {
    drop(Device::open(0).expect("the mock has a device"));
    let contexts = Kind::Context as usize;
    assert!(drained(|| session.live()[contexts] == 0), "the watcher releases the device");
    session.live()
}

/// Runs steps until the device is lost, then waits until the ends of all finished batches are
/// reported.
fn work_until_lost(rig: &Rig, lane: &mut Lane) -> Wrong {
    let start = Instant::now();
    let wrong = loop {
        assert!(start.elapsed() < BOUND, "the lane has not seen the failure");
        if let Err(wrong) = lane.go_on(rig).and_then(|()| lane.check().map(drop))
            && (rig.device.good().is_err() || matches!(wrong, Wrong::Row(_)))
        {
            break wrong;
        }
        std::thread::yield_now();
    };
    for finish in lane.finishes.drain(..) {
        let told = tokio::runtime::Handle::current().block_on(tokio::time::timeout(BOUND, finish));
        // Steps that the device completed are correct.
        match told.expect("every finish resolves") {
            Ok(()) => {}
            Err(error) => assert!(error.is_lost(), "{error}"),
        }
    }
    wrong
}

/// Keeps requesting more blocks than are free, so that a request is always waiting; ends when the
/// pool is lost.
async fn wait_for_blocks(pool: Pool) -> AllocError {
    let mut held = Vec::new();
    loop {
        match pool.allocate_async(AllocRequest::new(3)).await {
            Ok(lease) => held.push(lease),
            Err(error @ AllocError::DeviceLost { .. }) => return error,
            Err(error) => panic!("{error}"),
        }
        if held.len() > 2 {
            held.clear();
            tokio::task::yield_now().await;
        }
    }
}

async fn defragment(pool: Pool) -> DefragError {
    loop {
        if let Err(error) = pool.defragment_with(DefragOptions::new().fragmentation_penalty(0)).await {
            return error;
        }
        if pool.is_lost() {
            // The compaction moved nothing, and so did not use the device.
            return DefragError::NoBytes;
        }
        tokio::time::sleep(Duration::from_micros(100)).await;
    }
}

/// Keeps sending cached blocks to the host and fetching some back, until the pool is lost.
async fn offload(pool: Pool) {
    let builder = Pool::builder(pool.layout().clone()).blocks(16);
    let elsewhere = builder.prefix_cache(PrefixConfig::new().key(Rig::key())).build().expect("a host pool");
    while !pool.is_lost() {
        let _ = pool.offload(&elsewhere, 4).await;
        let _ = pool.bring_back(&elsewhere, &PrefixKeys::new(), &Lane::prompt(1, 12)).await;
        tokio::time::sleep(Duration::from_micros(300)).await;
    }
    let refused = pool.bring_back(&elsewhere, &PrefixKeys::new(), &Lane::prompt(2, 12)).await;
    assert!(refused.as_ref().map_or(true, |report| report.carried.blocks == 0), "{refused:?}");
    elsewhere.audit().expect("a consistent pool");
}

/// Runs everything under load until `fail` has been called and all users have seen the failure.
fn lose(session: &Session, seed: u64, fail: impl FnOnce(&mut Rng)) {
    let device = Device::open(0).expect("the mock has a device");
    let shape = Shape { layout: layout_of(seed), blocks: (24, 48), caches: true };
    let rig = Rig::new(&device, &shape);
    session.seed(seed);
    session.style([Style::Random, Style::Lazy, Style::Lowest, Style::Ranks][seed as usize % 4]);
    let runtime = runtime();
    let _entered = runtime.enter();
    let defragmenter = rig
        .pool
        .start_defragmenter(
            DefragConfig::new()
                .threshold(0.0)
                .interval(Duration::from_micros(300))
                .moves(DefragOptions::new().wave_bytes(1)),
        )
        .expect("a storage and a runtime");
    let waiting = runtime.spawn(wait_for_blocks(rig.pool.clone()));
    let dropped = runtime.spawn(wait_for_blocks(rig.pool.clone()));
    let compaction = runtime.spawn(defragment(rig.pool.clone()));
    let leaving = runtime.spawn(offload(rig.pool.clone()));
    let mut rng = Rng(seed);
    let lanes = [0, 1].map(|lane| Lane::new(&rig, rig.stream(StreamPriority::Usual), seed * 2 + lane));
    kvpool_testkit::threads::scope(|scope| {
        let lanes: Vec<_> = lanes
            .into_iter()
            .map(|mut lane| {
                let (rig, handle) = (&rig, runtime.handle().clone());
                scope.spawn(move || {
                    let _entered = handle.enter();
                    rig.context.bind_to_thread().expect("a valid context");
                    work_until_lost(rig, &mut lane)
                })
            })
            .collect();
        std::thread::sleep(Duration::from_micros(rng.below(20_000) as u64));
        // A user that gives up halfway affects no other.
        dropped.abort();
        fail(&mut rng);
        for lane in lanes {
            let wrong = lane.join().expect("lanes do not panic");
            assert!(!matches!(wrong, Wrong::Row(_)), "seed {seed}: {wrong}");
        }
    });
    let bounded = |what: &str, ended: bool| assert!(ended, "seed {seed}: {what} still waits");
    bounded("an allocation", runtime.block_on(tokio::time::timeout(BOUND, waiting)).is_ok());
    bounded("a task that was dropped", runtime.block_on(tokio::time::timeout(BOUND, dropped)).is_ok());
    bounded(
        "an offload",
        runtime.block_on(tokio::time::timeout(BOUND, leaving)).is_ok_and(|end| end.is_ok()),
    );
    bounded("a compaction", runtime.block_on(tokio::time::timeout(BOUND, compaction)).is_ok());
    bounded("the defragmenter", runtime.block_on(tokio::time::timeout(BOUND, defragmenter.stop())).is_ok());
    assert!(rig.pool.is_lost(), "seed {seed}");
    assert!(rig.pool.allocate(AllocRequest::new(1)).is_err(), "seed {seed}");
    assert_sound(&rig.pool, seed);
    // The resize may succeed or fail; it must not hang.
    let options = ResizeOptions::new().patience(Duration::from_millis(5));
    let resized = runtime.block_on(tokio::time::timeout(BOUND, rig.pool.resize_with(20, options)));
    bounded("a resize", resized.is_ok());
}

#[test]
fn a_device_that_fails_under_load_leaves_nobody_waiting() {
    let session = session();
    let before = baseline(&session);
    for seed in 0..24 {
        lose(&session, seed, |rng| session.fail(0, STICKY[rng.below(STICKY.len())]));
        session.fail(0, 0);
        assert_gone_but_registrations(&session, &before);
        assert_no_panic();
    }
}

#[test]
fn a_device_that_fails_in_a_call_leaves_nobody_waiting() {
    let session = session();
    let before = baseline(&session);
    let calls = [
        "cuEventRecord",
        "cuEventQuery",
        "cuLaunchKernel",
        "cuMemcpyHtoDAsync_v2",
        "cuLaunchHostFunc",
        "cuStreamWaitEvent",
        "cuStreamGetCtx",
        "cuStreamIsCapturing",
    ];
    for (seed, call) in (0..).zip(calls) {
        lose(&session, seed, |rng| {
            session.fail_call(call, rng.below(4) as u32, STICKY[seed as usize % STICKY.len()])
        });
        session.fail(0, 0);
        session.forget_injected();
        assert_gone_but_registrations(&session, &before);
        assert_no_panic();
    }
}

/// A future that is dropped halfway leaves nothing behind: the copy ends on its own, and its frames
/// become free again.
#[test]
fn futures_that_are_dropped_leave_nothing_half_done() {
    let session = session();
    let before = baseline(&session);
    let runtime = runtime();
    let _entered = runtime.enter();
    for seed in 0..12 {
        let device = Device::open(0).expect("the mock has a device");
        let shape = Shape { layout: layout_of(seed), blocks: (24, 48), caches: true };
        let rig = Rig::new(&device, &shape);
        session.seed(seed);
        let mut rng = Rng(seed);
        let mut lane = Lane::new(&rig, rig.stream(StreamPriority::Highest), seed);
        for _ in 0..40 {
            lane.go_on(&rig).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
            let pool = rig.pool.clone();
            let blocks = 20 + rng.below(28);
            let options = ResizeOptions::new().patience(Duration::from_millis(2));
            let mut futures: Vec<Pin<Box<dyn Future<Output = ()>>>> = vec![
                Box::pin(async {
                    drop(pool.defragment_with(DefragOptions::new().fragmentation_penalty(0)).await)
                }),
                Box::pin(async { drop(pool.resize_with(blocks, options).await) }),
                Box::pin(async { drop(pool.allocate_async(AllocRequest::new(8)).await) }),
            ];
            for future in &mut futures {
                let patience = Duration::from_micros(rng.below(500) as u64);
                let _ = runtime.block_on(async { tokio::time::timeout(patience, future).await });
            }
            // Finishes that the engine does not await end as well.
            lane.finishes.truncate(rng.below(2));
            drop(futures);
            lane.check().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
        }
        lane.clear();
        assert!(
            drained(|| lane.check().is_ok() && lane.is_idle() && lane.finishes.is_empty()),
            "seed {seed}"
        );
        assert_sound(&rig.pool, seed);
        assert!(!rig.pool.is_lost());
        drop((lane, rig, device));
        assert_gone(&session, &before);
        assert_no_panic();
    }
}

/// Threads of the engine panic in the middle of a step: their batches end with their streams, and
/// blocks that they may not have computed are not found.
#[test]
fn threads_that_panic_leave_a_pool_that_works() {
    let session = session();
    let before = baseline(&session);
    let device = Device::open(0).expect("the mock has a device");
    let rig = Rig::new(&device, &Shape { layout: layout_of(0), blocks: (24, 24), caches: true });
    let (tell, told) = mpsc::channel();
    for seed in 0..8 {
        let died = kvpool_testkit::threads::scope(|scope| {
            let thread = scope.spawn(|| {
                rig.context.bind_to_thread().expect("a valid context");
                let mut lane = Lane::new(&rig, rig.stream(StreamPriority::Usual), 100 + seed);
                (0..6).for_each(|_| lane.go_on(&rig).expect("a healthy device"));
                let mut batch = rig.pool.begin_batch_on(&lane.stream).expect("a healthy device");
                let id = kvpool::SequenceId(1000 + seed);
                let prompt: Vec<u32> = (0..12).map(|at| 0x7700_0000 | at).collect();
                let mut sequence = rig.pool.sequence(id).tokens(&prompt).expect("enough blocks");
                tell.send(sequence.len()).expect("the test receives");
                let _ = batch.append(&mut sequence, 12);
                panic!("planted: before anything was stored");
            });
            thread.join().is_err()
        });
        assert!(died);
        assert_eq!(told.recv().expect("sent"), 0, "a block was found that was never computed");
    }
    assert_sound(&rig.pool, 0);
    let mut lane = Lane::new(&rig, rig.stream(StreamPriority::Usual), 7);
    for _ in 0..60 {
        lane.go_on(&rig).and_then(|()| lane.check().map(drop)).unwrap_or_else(|wrong| panic!("{wrong}"));
    }
    drop((lane, rig, device));
    assert_gone(&session, &before);
    assert_no_panic();
}
