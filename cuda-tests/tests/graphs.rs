//! Graphs that read block tables: captured once, and replayed while blocks move, with the table
//! patched in place before each launch. Also captures on one thread while other threads use the
//! pool.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUgraphExec, CUresult, CUstreamCaptureMode};
use kvpool::compact::DefragOptions;
use kvpool::storage::{DeviceStream, Elements, KvLayout, Storage};
use kvpool::{DefragConfig, MovedEntry, Sequence, SequenceId, Since, Ticket};
use kvpool_cuda::{Device, DeviceTable, StreamPriority};
use kvpool_cuda_tests::engine::{Buffers, Gather, Lane, Mark, Rig, Rows, Shape, drained, layout_of};
use kvpool_cuda_tests::mock::{self, Style};
use kvpool_testkit::rng::Rng;

/// Number of sequences in the table, and number of tokens of each.
const ROWS: usize = 4;
const TOKENS: usize = 24;

fn ok(answer: CUresult) {
    assert_eq!(answer, CUresult::CUDA_SUCCESS);
}

/// Returns the graph of the work that `enqueue` submits.
fn captured(stream: &DeviceStream, mode: CUstreamCaptureMode, enqueue: impl FnOnce()) -> CUgraphExec {
    let (raw, mut graph, mut exec) = (stream.as_raw().cast(), std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the stream is alive; pointers are valid; the graph is destroyed once.
    unsafe {
        ok(sys::cuStreamBeginCapture_v2(raw, mode));
        enqueue();
        ok(sys::cuStreamEndCapture(raw, &mut graph));
        ok(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        ok(sys::cuGraphDestroy(graph));
    }
    exec
}

/// Opens a sequence of unique tokens and stores their rows from the host.
fn stored(
    rig: &Rig,
    rows: &mut Rows,
    stream: &DeviceStream,
    id: u64,
    count: usize,
) -> Option<(Sequence, Vec<u32>)> {
    let mut sequence = rig.pool.sequence(SequenceId(id)).open().expect("a new id");
    let tokens: Vec<u32> = (0..count as u32).map(|at| (id as u32) << 8 | at).collect();
    let mut batch = rig.pool.begin_batch_on(stream).expect("a healthy device");
    batch.append(&mut sequence, count).ok()?;
    for layer in 0..rig.storage().layout().layers() {
        let [k, v] = [0, 1].map(|half| {
            tokens.iter().flat_map(|&token| rows.stored(token, layer)[half].clone()).collect::<Vec<u8>>()
        });
        let dtype = rows.dtype();
        let k = Elements::new(dtype, &k).expect("whole elements");
        let v = if rows.halves() == 2 {
            Elements::new(dtype, &v).expect("whole elements")
        } else {
            Elements::none()
        };
        batch.store(&mut sequence, layer, 0..count, k, v).expect("slots of this sequence");
    }
    batch.finish();
    Some((sequence, tokens))
}

struct Replay<'a> {
    rig: &'a Rig,
    stream: DeviceStream,
    table: DeviceTable,
    gather: Gather,
    since: Ticket,
    patched: usize,
}

impl Replay<'_> {
    /// Writes the whole table in its current state.
    fn fill(&mut self, sequences: &[(Sequence, Vec<u32>)]) {
        let batch = self.rig.pool.begin_batch_on(&self.stream).expect("a healthy device");
        let rows = sequences.iter().map(|(sequence, _)| sequence);
        self.table.fill(&self.stream, &batch, rows).expect("a table of this size");
        self.since = batch.ticket();
        batch.finish();
    }

    /// Patches the table and launches the graph, in a batch of its own.
    fn launch(&mut self, exec: CUgraphExec, sequences: &[(Sequence, Vec<u32>)], must_patch: bool) {
        let batch = self.rig.pool.begin_batch_on(&self.stream).expect("a healthy device");
        let mut entries: Vec<MovedEntry> = Vec::new();
        let rows = sequences.iter().map(|(sequence, _)| sequence);
        let since =
            batch.moved_entries(rows.clone(), self.since, &mut entries).expect("sequences of this pool");
        if matches!(since, Since::TooLong) {
            self.table.fill(&self.stream, &batch, rows).expect("a table of this size");
        } else if must_patch {
            self.table.patch(&self.stream, &entries).expect("entries of the table");
        }
        self.patched += entries.len();
        self.since = batch.ticket();
        // SAFETY: instantiated, and the stream is alive.
        ok(unsafe { sys::cuGraphLaunch(exec, self.stream.as_raw().cast()) });
        batch.finish_on(&self.stream).map(drop).expect("a healthy device");
    }
}

/// Returns the number of replays that read other bytes than were stored, and the number of patched
/// entries.
fn replays(seed: u64, must_patch: bool) -> (usize, usize) {
    let session = mock::session();
    let device = Device::open(0).expect("the mock has a device");
    let layout = layout_of(seed * 11);
    let columns = TOKENS.div_ceil(layout.block_tokens());
    let blocks = (ROWS + 3) * columns + 8;
    let rig = Rig::new(&device, &Shape { layout, blocks: (blocks, blocks), caches: false });
    let layout: &KvLayout = rig.storage().layout();
    let mut rows = Rows::new(layout);
    let gather = Gather::new(&rig.context, rig.storage()).expect("the kernels load");
    let stream = rig.stream(StreamPriority::Usual);
    let table = DeviceTable::new(&device, ROWS, columns, 1).expect("memory for a table");
    let mut replay = Replay { rig: &rig, stream, table, gather, since: Ticket(0), patched: 0 };
    session.seed(seed);
    session.style([Style::Random, Style::Lowest, Style::Ranks][seed as usize % 3]);

    let (mut sequences, mut fillers, mut id) = (Vec::new(), Vec::new(), 0);
    let mut add = |rows: &mut Rows, stream: &DeviceStream, count| {
        id += 1;
        stored(&rig, rows, stream, id, count)
    };
    for _ in 0..ROWS {
        sequences.push(add(&mut rows, &replay.stream, TOKENS).expect("enough blocks"));
    }
    replay.fill(&sequences);

    let mut buffers = Buffers::default();
    let mut buffer = buffers.take().expect("memory");
    let pieces = replay.gather.pieces().len();
    buffer.bytes()[..pieces].copy_from_slice(replay.gather.pieces());
    let at = pieces.next_multiple_of(16);
    let bytes = replay.gather.packed_bytes(ROWS, columns);
    // SAFETY: the buffer lives to the end.
    unsafe { buffer.send(pieces, &replay.stream) }.expect("a healthy device");
    let exec = captured(&replay.stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL, || {
        let (raw, packed) = (replay.stream.as_raw().cast(), buffer.device + at as u64);
        // SAFETY: the table and the buffer live to the end.
        unsafe {
            replay.gather.enqueue(&replay.table, ROWS, buffer.device, packed, raw).expect("captured");
            buffer.fetch(at, bytes, &replay.stream).expect("captured");
        }
    });

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (mut rng, mut wrong) = (Rng(seed), 0);
    for _ in 0..6 {
        // Creates something to move: replaces one sequence by a new one that is stored between
        // fillers, then frees the fillers.
        fillers.clear();
        assert!(drained(|| rig.pool.stats().retired == 0), "the batches of the last round have not ended");
        sequences.remove(rng.below(ROWS));
        fillers.extend((0..3).filter_map(|_| add(&mut rows, &replay.stream, 1 + rng.below(TOKENS / 2))));
        sequences.push(add(&mut rows, &replay.stream, TOKENS).expect("enough blocks"));
        replay.fill(&sequences);
        fillers.clear();
        // Moves also where they break runs.
        let options = DefragOptions::new().fragmentation_penalty(0);
        runtime.block_on(rig.pool.defragment_with(options)).expect("a healthy device");
        // The vacated frames are overwritten at once.
        while let Some(filler) = add(&mut rows, &replay.stream, 1 + rng.below(2 * layout.block_tokens())) {
            fillers.push(filler);
        }
        replay.launch(exec, &sequences, must_patch);
        let mark = Mark::behind(&replay.stream).expect("a healthy device");
        assert!(drained(|| mark.is_reached().expect("a healthy device")));
        let tokens: Vec<Vec<u32>> = sequences.iter().map(|(_, tokens)| tokens.clone()).collect();
        let packed = &buffer.bytes()[at..][..bytes];
        wrong += usize::from(replay.gather.compare(packed, columns, &tokens, &mut rows).is_err());
    }
    // SAFETY: instantiated once; no launch of it is in flight.
    ok(unsafe { sys::cuGraphExecDestroy(exec) });
    (wrong, replay.patched)
}

#[test]
fn a_graph_reads_the_table_as_it_was_patched_before_its_launch() {
    let (mut patched, mut stale) = (0, 0);
    for seed in 0..8 {
        let (wrong, entries) = replays(seed, true);
        assert_eq!(wrong, 0, "seed {seed}");
        patched += entries;
        // The same without patching: a wrong read shows that the replays can detect stale tables.
        stale += replays(seed, false).0;
    }
    assert!(patched > 10 && stale > 0, "{patched} entries patched, {stale} replays of stale tables seen");
}

#[test]
fn a_capture_is_not_broken_by_a_pool_in_full_use() {
    let session = mock::session();
    let device = Device::open(0).expect("the mock has a device");
    let rig = Rig::new(&device, &Shape { layout: layout_of(5), blocks: (24, 24), caches: true });
    session.seed(5);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("threads");
    let _entered = runtime.enter();
    let config = DefragConfig::new().threshold(0.0).interval(Duration::from_micros(300));
    let defragmenter = rig.pool.start_defragmenter(config).expect("a storage and a runtime");
    let (is_over, compared) = (AtomicBool::new(false), AtomicU64::new(0));
    let lane = Lane::new(&rig, rig.stream(StreamPriority::Usual), 5);
    let (stream, gather) = (rig.stream(StreamPriority::Usual), Gather::new(&rig.context, rig.storage()));
    let gather = gather.expect("the kernels load");
    let columns = TOKENS.div_ceil(rig.storage().layout().block_tokens());
    let table = DeviceTable::new(&device, 1, columns, 1).expect("memory for a table");
    let mut buffers = Buffers::default();
    let buffer = buffers.take().expect("memory");
    let (count, start) = (&compared, Instant::now());
    kvpool_testkit::threads::scope(|scope| {
        let (rig, is_over) = (&rig, &is_over);
        let worker = scope.spawn(move || {
            rig.context.bind_to_thread().expect("a valid context");
            // The engine handles the capture mode of its own calls.
            let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
            // SAFETY: the pointer is valid.
            ok(unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) });
            let mut lane = lane;
            while !is_over.load(Ordering::SeqCst) {
                let outcome = lane.go_on(rig).and_then(|()| lane.check().map(drop));
                outcome.unwrap_or_else(|wrong| panic!("{wrong}"));
                count.store(lane.compared, Ordering::SeqCst);
                std::thread::yield_now();
            }
            lane.clear();
            assert!(drained(|| lane.check().is_ok() && lane.is_idle() && lane.finishes.is_empty()));
        });
        let mut captures = 0;
        while captures < 40
            || (count.load(Ordering::SeqCst) < 1000 && start.elapsed() < Duration::from_secs(20))
        {
            captures += 1;
            let exec = captured(&stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL, || {
                // SAFETY: never replayed.
                unsafe { gather.enqueue(&table, 1, buffer.device, buffer.device, stream.as_raw().cast()) }
                    .expect("captured");
                // Long enough for the watcher to poll in between.
                std::thread::sleep(Duration::from_millis(5));
            });
            // SAFETY: instantiated once.
            ok(unsafe { sys::cuGraphExecDestroy(exec) });
        }
        is_over.store(true, Ordering::SeqCst);
        worker.join().expect("the worker does not panic");
    });
    let totals = runtime.block_on(defragmenter.stop());
    let compared = compared.into_inner();
    assert!(compared >= 1000 && totals.failed == 0, "{compared} rows compared, {totals:?}");
}
