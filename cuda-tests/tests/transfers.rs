//! Transfers: between devices and the host, from an engine's memory on its stream, ordered after
//! events, into tables that stay on the device; and refused ranges of an engine's memory.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, result};
use kvpool::storage::{
    AdoptedPlane, AdoptedTensors, Arrangement, DeviceStream, Dtype, FrameMove, HostStorage, KvLayout,
    KvPlanes, Scales, Storage,
};
use kvpool::{FrameId, MovedEntry, Run, StorageError};
use kvpool_cuda::{CudaConfig, CudaStorage, Device, DeviceRows, DeviceTable, TableError};
use kvpool_cuda_tests::mock::{Rules, Style, for_each_seed, session};
use kvpool_testkit::rng::Rng;

const FRAMES: usize = 6;

fn run(start: u32, len: u32) -> Run {
    Run { start: FrameId(start), len }
}

fn bytes(count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..count).map(|_| next()).collect()
}

fn packed(storage: &dyn Storage, runs: &[Run]) -> Vec<u8> {
    let frames: u32 = runs.iter().map(|run| run.len).sum();
    let mut out = vec![0; frames as usize * storage.layout().packed_bytes()];
    // SAFETY: no other thread uses the frames.
    unsafe { storage.pack(runs, &mut out) }.expect("existing frames");
    out
}

fn unpack(storage: &dyn Storage, runs: &[Run], packed: &[u8]) {
    // SAFETY: no other thread uses the frames.
    unsafe { storage.unpack(runs, packed) }.expect("existing frames");
}

fn layout(arrangement: Arrangement, parts: KvPlanes) -> KvLayout {
    let builder = KvLayout::builder().layers(2).kv_heads(2).head_dim(8).block_tokens(4);
    let builder = builder.dtype(Dtype::Fp8E4M3).scales(Scales::PerTokenHead);
    builder.arrangement(arrangement).parts(parts).build().expect("a small layout")
}

/// Returns a layout with frames of 10 MiB, longer than a buffer: 40 tokens of two layers.
fn long(parts: KvPlanes) -> KvLayout {
    let builder = KvLayout::builder().layers(2).kv_heads(8).head_dim(4096).block_tokens(40);
    builder.dtype(Dtype::Bf16).parts(parts).build().expect("a layout")
}

#[test]
fn frames_go_between_devices_and_the_host() {
    let session = session();
    let [first, second] = [0, 1].map(|ordinal| Device::open(ordinal).expect("two devices"));
    let here = layout(Arrangement::LayerFirst, KvPlanes::Separate);
    let there = layout(Arrangement::BlockFirst, KvPlanes::Joined);
    let made = |device, layout: &KvLayout| {
        Box::new(CudaStorage::new(device, layout.clone(), FRAMES, FRAMES).expect("frames"))
    };
    let host = HostStorage::new(there.clone(), FRAMES, FRAMES).expect("frames");
    for_each_seed(&session, 12, |seed| {
        let source = made(&first, &here);
        let content = bytes(FRAMES * here.packed_bytes(), seed);
        unpack(&*source, &[run(0, 6)], &content);
        let targets: [Box<dyn Storage>; 3] = [
            made(&second, &there),
            made(&first, &there),
            Box::new(HostStorage::new(there.clone(), FRAMES, FRAMES).expect("frames")),
        ];
        for target in targets {
            let (from, to) = ([run(4, 2), run(0, 1)], [run(1, 1), run(3, 2)]);
            // SAFETY: no other thread uses the frames.
            unsafe { target.receive(&*source, &from, &to) }.expect("the same packed form");
            assert_eq!(packed(&*target, &to), packed(&*source, &from), "{target:?}");
        }
        // Copies back from the host.
        unpack(&host, &[run(0, 6)], &content);
        // SAFETY: no other thread uses the frames.
        unsafe { source.receive(&host, &[run(0, 6)], &[run(0, 6)]) }.expect("the same packed form");
        assert!(packed(&*source, &[run(0, 6)]) == content);
    });
    let other = made(&second, &long(KvPlanes::Separate));
    let source = made(&first, &here);
    // SAFETY: the call is refused.
    let refused = unsafe { other.receive(&*source, &[run(0, 1)], &[run(0, 1)]) };
    assert!(matches!(refused, Err(StorageError::OtherForm { .. })));
    let target = made(&second, &here);
    // SAFETY: the call is refused.
    let refused = unsafe { target.receive(&*source, &[run(0, 2)], &[run(0, 1)]) };
    assert_eq!(refused.unwrap_err().to_string(), "frames to copy: got 2, expected 1");
}

/// One of the two devices fails while lots are on their way, and what waits for it hangs: the call
/// returns an error within seconds. A source that fails does not affect the other device.
#[test]
fn a_device_that_fails_during_a_copy_between_devices_leaves_nobody_waiting() {
    let session = session();
    let layout = layout(Arrangement::LayerFirst, KvPlanes::Separate);
    for seed in 0..48u64 {
        let mut rng = Rng(seed);
        let (failed, steps) = (rng.below(2) as i32, [0, 1, 3, 9, 30][rng.below(5)]);
        let [first, second] = [0, 1].map(|ordinal| Device::open(ordinal).expect("two devices"));
        let source = CudaStorage::new(&first, layout.clone(), FRAMES, FRAMES).expect("frames");
        let target = CudaStorage::new(&second, layout.clone(), FRAMES, FRAMES).expect("frames");
        unpack(&source, &[run(0, 6)], &bytes(FRAMES * layout.packed_bytes(), 7));
        session.seed(seed);
        session.style([Style::Random, Style::Lazy, Style::Lowest, Style::Ranks][rng.below(4)]);
        // Two of three times it hangs.
        session.rules(&Rules { hang: seed % 3 > 0, ..Rules::of(seed) });
        session.pause();
        kvpool_testkit::threads::scope(|scope| {
            // SAFETY: no other thread uses the frames.
            let copy = || unsafe { target.receive(&source, &[run(0, 6)], &[run(0, 6)]) };
            let copying = scope.spawn(copy);
            while session.pending() == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            session.step(steps);
            session.fail(failed, 719);
            session.resume();
            let start = Instant::now();
            let outcome = copying.join().expect("no panic");
            assert!(start.elapsed() < Duration::from_secs(20), "{seed}: {:?}", start.elapsed());
            match outcome {
                // The copy may have been complete before.
                Ok(()) => assert!(steps > 9, "{seed}: one of the devices is lost"),
                Err(error) => assert!(error.is_lost(), "{seed}: {error}"),
            }
        });
        session.rules(&Rules::default());
        if failed == 0 {
            second.good().expect("it has not waited for the other device");
            let content = bytes(FRAMES * layout.packed_bytes(), 8);
            unpack(&target, &[run(0, 6)], &content);
            assert!(packed(&target, &[run(0, 6)]) == content);
        }
        drop((source, target, first, second));
        // Also discards what waits on the other device.
        for device in [0, 1] {
            session.fail(device, 719);
            session.fail(device, 0);
        }
    }
}

/// The target fails, and the copy to it waits for ever: other threads pack and zero frames of the
/// source meanwhile, and drop another storage of its device.
#[test]
fn a_source_serves_others_while_a_copy_to_a_failed_device_hangs() {
    let session = session();
    let layout = layout(Arrangement::LayerFirst, KvPlanes::Separate);
    let [first, second] = [0, 1].map(|ordinal| Device::open(ordinal).expect("two devices"));
    let source = CudaStorage::new(&first, layout.clone(), 2 * FRAMES, 2 * FRAMES).expect("frames");
    let target = CudaStorage::new(&second, layout.clone(), FRAMES, FRAMES).expect("frames");
    let other = CudaStorage::new(&first, layout.clone(), FRAMES, FRAMES).expect("frames");
    let content = bytes(FRAMES * layout.packed_bytes(), 7);
    unpack(&source, &[run(6, 6)], &content);
    session.hang(1);
    session.pause();
    let (tell, told) = mpsc::channel();
    kvpool_testkit::threads::scope(|scope| {
        let (source, target) = (&source, &target);
        // SAFETY: no other thread uses these frames.
        let copying = scope.spawn(|| unsafe { target.receive(source, &[run(0, 6)], &[run(0, 6)]) });
        // The list of frames, the kernel that packs them, the copy, and its event.
        while session.pending() < 4 {
            std::thread::sleep(Duration::from_millis(1));
        }
        session.fail(1, 719);
        let mut beside = vec![0; content.len()];
        let others = scope.spawn(move || {
            // SAFETY: no other thread uses these frames.
            let outcome =
                unsafe { source.pack(&[run(6, 6)], &mut beside).and_then(|()| source.zero(&[run(6, 1)])) };
            // Gives memory back, which waits for the device.
            drop(other);
            let outcome = outcome.map(|()| beside);
            tell.send(outcome).expect("the test receives");
        });
        session.resume();
        let outcome = told.recv_timeout(Duration::from_secs(20));
        if outcome.is_err() {
            // The threads of the scope wait for it.
            session.fail(0, 719);
        }
        match outcome.expect("it does not wait for the copy") {
            Ok(beside) => assert!(beside == content),
            // On a slow machine: the copy has been given up, and the source with it.
            Err(error) => assert!(error.is_lost(), "{error}"),
        }
        others.join().expect("no panic");
        let error = copying.join().expect("no panic").expect_err("the target is lost");
        assert!(error.is_lost(), "{error}");
    });
    drop((source, target, first, second));
    for device in [0, 1] {
        session.fail(device, 719);
        session.fail(device, 0);
    }
}

/// The driver refuses to tell whether the other device works: the copy that waits beside it ends
/// with an error.
#[test]
fn a_copy_beside_a_device_that_cannot_be_asked_ends() {
    let session = session();
    let layout = layout(Arrangement::LayerFirst, KvPlanes::Separate);
    let [first, second] = [0, 1].map(|ordinal| Device::open(ordinal).expect("two devices"));
    let source = CudaStorage::new(&first, layout.clone(), FRAMES, FRAMES).expect("frames");
    let target = CudaStorage::new(&second, layout, FRAMES, FRAMES).expect("frames");
    session.pause();
    session.fail_calls("cuStreamQuery", 400);
    let (tell, told) = mpsc::channel();
    kvpool_testkit::threads::scope(|scope| {
        let (source, target) = (&source, &target);
        scope.spawn(move || {
            // SAFETY: no other thread uses the frames.
            let outcome = unsafe { target.receive(source, &[run(0, 6)], &[run(0, 6)]) };
            tell.send(outcome).expect("the test receives");
        });
        let outcome = told.recv_timeout(Duration::from_secs(60));
        session.forget_injected();
        session.resume();
        let error = outcome.expect("it does not wait for ever").expect_err("the copy has not run");
        assert!(error.is_lost(), "{error}");
    });
    second.good().expect("it has refused a query, and works");
}

#[test]
fn frames_longer_than_a_buffer_go_in_parts() {
    let session = session();
    session.style(Style::Random);
    let [first, second] = [0, 1].map(|ordinal| Device::open(ordinal).expect("two devices"));
    let [separate, joined] = [KvPlanes::Separate, KvPlanes::Joined].map(long);
    assert!(separate.packed_bytes() > 8 << 20);
    // Several lots.
    let frames = (80usize << 20).div_ceil(separate.packed_bytes());
    let source = CudaStorage::new(&first, separate.clone(), frames, frames).expect("frames");
    let content = bytes(frames * separate.packed_bytes(), 7);
    let all = run(0, frames as u32);
    unpack(&source, &[all], &content);
    assert!(packed(&source, &[all]) == content);
    let reversed: Vec<Run> = (0..frames as u32).rev().map(|frame| run(frame, 1)).collect();
    // One of the two devices runs far ahead of the other now and then.
    session.style(Style::Ranks);
    for (seed, layout) in (0..4).flat_map(|seed| [(2 * seed, &separate), (2 * seed + 1, &joined)]) {
        let target = CudaStorage::new(&second, layout.clone(), frames, frames).expect("frames");
        session.seed(seed);
        // SAFETY: no other thread uses the frames.
        unsafe { target.receive(&source, &[all], &reversed) }.expect("one form");
        assert!(packed(&target, &reversed) == content);
    }
}

/// Device memory allocated by an engine.
struct Engine {
    context: Arc<CudaContext>,
    address: u64,
}

impl Engine {
    fn new(ordinal: usize, content: &[u8]) -> Self {
        let context = CudaContext::new(ordinal).expect("a device");
        context.bind_to_thread().expect("its context");
        // SAFETY: that many bytes are allocated, and written at once.
        let address = unsafe {
            let address = result::malloc_sync(content.len()).expect("memory");
            result::memcpy_htod_sync(address, content).expect("the bytes");
            // From pageable memory the call may return before the bytes have arrived, and other
            // streams do not wait for them.
            result::ctx::synchronize().expect("a healthy device");
            address
        };
        Self { context, address }
    }

    fn read(&self, at: usize, count: usize) -> Vec<u8> {
        read(&self.context, self.address + at as u64, count)
    }
}

fn read(context: &CudaContext, address: u64, count: usize) -> Vec<u8> {
    context.bind_to_thread().expect("the context");
    let mut bytes = vec![0u8; count];
    // SAFETY: the tests read memory that they allocated.
    unsafe { result::memcpy_dtoh_sync(&mut bytes, address) }.expect("the bytes");
    bytes
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.context.bind_to_thread().expect("the context");
        // SAFETY: allocated in `new`.
        unsafe { result::free_sync(self.address) }.expect("allocated memory");
    }
}

#[test]
fn rows_of_an_engine_are_stored_and_loaded_on_its_stream() {
    let session = session();
    let device = Device::open(0).expect("a device");
    let layout = layout(Arrangement::LayerFirst, KvPlanes::Joined);
    let host = HostStorage::new(layout.clone(), FRAMES, FRAMES).expect("frames");
    let stream = device.stream().expect("a stream");
    let slots: [i64; 4] = [5, -1, 22, 9];
    // K and V of a token are adjacent, as a fused projection writes them.
    let (elements, tokens) = (layout.row_elements(), slots.len());
    let values: Vec<f32> = (0..2 * tokens * elements).map(|at| (at as f32 - 60.0) * 0.37).collect();
    let raw: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    let slot_bytes: Vec<u8> = slots.iter().flat_map(|slot| slot.to_ne_bytes()).collect();
    let rows = |half: usize| -> Vec<f32> {
        let row = |token: usize| values[(2 * token + half) * elements..][..elements].to_vec();
        (0..tokens).flat_map(row).collect()
    };
    for_each_seed(&session, 20, |_| {
        let storage = CudaStorage::new(&device, layout.clone(), FRAMES, FRAMES).expect("frames");
        let (qkv, at) = (Engine::new(0, &raw), Engine::new(0, &slot_bytes));
        let loaded = Engine::new(0, &vec![0xEE; raw.len()]);
        let of = |engine: &Engine| DeviceRows {
            dtype: Dtype::F32,
            k: engine.address,
            v: engine.address + 4 * elements as u64,
            k_stride: 8 * elements,
            v_stride: 8 * elements,
        };
        // SAFETY: no other thread uses the frames or the rows, which live until the stream has
        // settled.
        unsafe {
            storage.store_on(&stream, 1, of(&qkv), at.address, tokens).expect("rows");
            storage.load_on(&stream, 1, of(&loaded), at.address, tokens).expect("rows");
        }
        storage.settle(&stream).expect("a healthy device");
        let (mut k, mut v) = (vec![0f32; tokens * elements], vec![0f32; tokens * elements]);
        // SAFETY: only this thread uses the storage.
        unsafe {
            host.store(1, (&rows(0)).into(), (&rows(1)).into(), &slots).expect("rows");
            host.load(1, &slots, (&mut k).into(), (&mut v).into()).expect("rows");
        }
        assert!(
            packed(&storage, &[run(0, 6)]) == packed(&host, &[run(0, 6)]),
            "codes and scales must equal those of the host"
        );
        let got = loaded.read(0, raw.len());
        for token in 0..tokens {
            for (half, want) in [&k, &v].into_iter().enumerate() {
                let got = &got[(2 * token + half) * 4 * elements..][..4 * elements];
                let want: Vec<u8> = if slots[token] < 0 {
                    vec![0xEE; 4 * elements]
                } else {
                    want[token * elements..][..elements]
                        .iter()
                        .flat_map(|value| value.to_ne_bytes())
                        .collect()
                };
                assert!(got == want, "token {token}, half {half}");
            }
        }
    });
    let storage = CudaStorage::new(&device, layout.clone(), FRAMES, FRAMES).expect("frames");
    let good = DeviceRows { dtype: Dtype::F32, k: 4096, v: 8192, k_stride: 64, v_stride: 64 };
    let refused = |layer, rows, slots| {
        // SAFETY: refused before anything is enqueued.
        unsafe { storage.store_on(&stream, layer, rows, slots, 1) }.expect_err("bad rows").to_string()
    };
    assert_eq!(refused(2, good, 4096), "layer: got 2, expected less than 2");
    let bare = DeviceRows { dtype: Dtype::Fp8E4M3, ..good };
    let bare = refused(0, bare, 4096);
    assert!(bare.starts_with("k: got fp8_e4m3 codes without scales"), "{bare}");
    for (rows, slots, message) in [
        (
            DeviceRows { v: 8193, ..good },
            4096,
            "v: got 0x2001 with a stride of 64 bytes, expected multiples of 4 bytes",
        ),
        (
            DeviceRows { k_stride: 60, ..good },
            4096,
            "k: got a stride of 60 bytes, expected at least a row's 64",
        ),
        (good, 4, "slots: got 0x4 with a stride of 8 bytes, expected multiples of 8 bytes"),
    ] {
        assert_eq!(refused(0, rows, slots), message);
    }
}

#[test]
fn a_copy_behind_an_event_is_whole_when_it_is_said_to_be() {
    let session = session();
    let device = Device::open(0).expect("a device");
    let layout = layout(Arrangement::LayerFirst, KvPlanes::Separate);
    for_each_seed(&session, 60, |seed| {
        let storage = CudaStorage::new(&device, layout.clone(), FRAMES, FRAMES).expect("frames");
        let content = bytes(FRAMES * layout.packed_bytes(), seed);
        unpack(&storage, &[run(0, 6)], &content);
        let (tell, told) = mpsc::channel();
        // Two copies at a time: each has buffers of its own.
        for step in [FrameMove::new(FrameId(0), FrameId(3)), FrameMove::new(FrameId(1), FrameId(4))] {
            let tell = tell.clone();
            let done = Box::new(move |outcome| tell.send(outcome).expect("the test receives"));
            // SAFETY: no other thread uses the frames.
            unsafe { storage.copy_then(&[step], done) };
        }
        for _ in 0..2 {
            told.recv_timeout(Duration::from_secs(10))
                .expect("the callback is called")
                .expect("a healthy device");
        }
        assert!(packed(&storage, &[run(3, 2)]) == packed(&storage, &[run(0, 2)]));
        // On an engine's stream: ordered with the work enqueued there.
        let stream = device.stream().expect("a stream");
        // SAFETY: no other thread uses the frames.
        unsafe {
            storage.copy_on(&stream, &[FrameMove::new(FrameId(2), FrameId(5))]).expect("a stream");
            storage.copy_on(&stream, &[FrameMove::new(FrameId(5), FrameId(0))]).expect("a stream");
        }
        let (tell, told) = mpsc::channel();
        storage.after(&stream, Box::new(move |outcome| tell.send(outcome).expect("the test receives")));
        told.recv_timeout(Duration::from_secs(10))
            .expect("the callback is called")
            .expect("a healthy device");
        let all = packed(&storage, &[run(0, 1), run(5, 1), run(2, 1)]);
        let (first, rest) = all.split_at(layout.packed_bytes());
        assert!(first == &rest[..first.len()] && first == &rest[first.len()..]);
    });
}

#[test]
fn tables_are_filled_from_buffers_of_their_own_and_patched_in_place() {
    let session = session();
    let device = Device::open(0).expect("a device");
    let engine = CudaContext::new(0).expect("a device");
    let pool = kvpool::Pool::builder(KvLayout::named("tiny").expect("a preset"))
        .blocks(64)
        .build()
        .expect("a host pool for its tables");
    let mut sequences: Vec<_> =
        (0..3).map(|id| pool.sequence(kvpool::SequenceId(id)).open().expect("a sequence")).collect();
    let block_tokens = pool.layout().block_tokens();
    for_each_seed(&session, 40, |seed| {
        let stream = device.stream().expect("a stream");
        let mut table = DeviceTable::new(&device, 3, 8, 64).expect("a small table");
        let mut batch = pool.begin_batch();
        let mut want = Vec::new();
        // Successive fills, all enqueued before the first has run: the last one remains.
        for round in 0..3 {
            for (at, sequence) in sequences.iter_mut().enumerate() {
                sequence.truncate(0).expect("a sequence");
                batch
                    .append(sequence, 1 + (at * 7 + round * 5 + seed as usize) % (8 * block_tokens))
                    .expect("blocks");
            }
            table.fill(&stream, &batch, &sequences).expect("a table");
            table.fill_slots(&stream, &[round as i64, -1]).expect("slots");
            let mut built = kvpool::BlockTable::with_width(8);
            batch.block_table(&sequences, &mut built).expect("a table");
            want = [built.entries(), built.lengths()].concat();
        }
        let entries =
            [MovedEntry { row: 2, column: 7, frame: 41 }, MovedEntry { row: 0, column: 0, frame: 40 }];
        table.patch(&stream, &entries).expect("entries");
        (want[23], want[0]) = (41, 40);
        settle(&device, &stream);
        let got = [read(&engine, table.entries(), 96), read(&engine, table.lengths(), 12)].concat();
        let got: Vec<i32> =
            got.chunks_exact(4).map(|chunk| i32::from_ne_bytes(chunk.try_into().expect("four"))).collect();
        assert_eq!(got, want);
        assert_eq!(read(&engine, table.slots(), 16), [2i64.to_ne_bytes(), (-1i64).to_ne_bytes()].concat());
        let beyond = MovedEntry { row: 3, column: 0, frame: 0 };
        assert_eq!(
            table.patch(&stream, &[entries[0], beyond]),
            Err(TableError::NoEntry { index: 1, row: 3, column: 0, rows: 3, columns: 8 })
        );
        let many = vec![0; 65];
        let refused = table.fill_slots(&stream, &many);
        assert_eq!(refused, Err(TableError::TooLarge { what: "slots", asked: 65, max: 64 }));
        let mut narrow = DeviceTable::new(&device, 3, 1, 1).expect("a small table");
        let mut low = DeviceTable::new(&device, 2, 8, 1).expect("a small table");
        batch.append(&mut sequences[0], 2 * block_tokens).expect("blocks");
        let refused = narrow.fill(&stream, &batch, &sequences).expect_err("too narrow");
        assert!(matches!(refused, TableError::TooLarge { what: "columns", max: 1, .. }));
        let refused = low.fill(&stream, &batch, &sequences).expect_err("too low");
        assert_eq!(refused, TableError::TooLarge { what: "rows", asked: 3, max: 2 });
        for sequence in &mut sequences {
            sequence.truncate(0).expect("a sequence");
        }
    });
}

fn settle(device: &Device, stream: &DeviceStream) {
    let storage =
        CudaStorage::new(device, KvLayout::named("tiny").expect("a preset"), 1, 1).expect("a frame");
    storage.settle(stream).expect("a healthy device");
}

#[test]
fn tensors_that_are_not_what_they_are_said_to_be_are_refused() {
    let session = session();
    session.style(Style::Fifo);
    let device = Device::open(0).expect("a device");
    // Two planes of tiles of 64 bytes, four frames.
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(4).block_tokens(4).dtype(Dtype::F32);
    let layout = layout.build().expect("a small layout");
    let engine = Engine::new(0, &[0; 1024]);
    let elsewhere = Engine::new(1, &[0; 1024]);
    let host = vec![0u8; 1024];
    let adopt = |k: u64, v: u64| {
        let planes = [k, v].map(|base| AdoptedPlane {
            base: std::ptr::without_provenance_mut(base as usize),
            frame_stride: 64,
        });
        let (tensors, config) = (AdoptedTensors::Planes(&planes), CudaConfig::default());
        // SAFETY: the planes are the engine's memory, which outlives the storage.
        unsafe { CudaStorage::adopt_tensors(&device, layout.clone(), tensors, 4, (), config) }
    };
    let good = adopt(engine.address, engine.address + 256).expect("good planes");
    let planes = good.planes().expect("a device's memory has addresses");
    assert_eq!((good.mapped_bytes(), planes.device(), planes.frames()), (0, device.id(), 4));
    let bases: Vec<_> = planes.tensors().map(|tensor| tensor.data.addr() as u64).collect();
    assert_eq!(bases, [engine.address, engine.address + 256]);
    let on = |k, v| adopt(k, v).expect_err("invalid planes").to_string();
    let host_at = (host.as_ptr() as u64).next_multiple_of(16);
    let (k, got) = (engine.address, |base| format!("got base {base:#x} with a stride of 64 bytes, expected"));
    for (k, v, message) in [
        (k, host_at, format!("plane at index 1: got base {host_at:#x} (")),
        (elsewhere.address, k, "plane at index 0: got memory of cuda:1, expected memory of cuda:0".into()),
        (
            k,
            k + 832,
            "plane at index 1: got 192 bytes from its base to the end of its allocation, expected at least 256"
                .into(),
        ),
        (k, k + 64, "plane at index 1: got memory of the plane at index 0".into()),
        (k + 2, k + 512, format!("plane at index 0: {} multiples of 4 bytes", got(k + 2))),
        (0, k, format!("plane at index 0: {} a base that is not null", got(0))),
    ] {
        let refused = on(k, v);
        assert!(refused.starts_with(&message), "{refused}");
    }
}
