//! Operations that a device cannot do are refused with an error that names the operation and the
//! argument; the pool and the device stay unchanged. Refusals by a single device or storage are
//! tested in `device` and `transfers`; these tests go through pools and batches.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, result};
use kvpool::storage::{
    AdoptedPlane, AdoptedTensors, DeviceStream, Dtype, ElementsMut, FrameMove, KvLayout, Storage,
};
use kvpool::{
    DeviceId, FrameId, GrowError, Invalid, Pool, ResizeError, Run, SequenceError, SequenceId, StorageError,
};
use kvpool_cuda::{CudaConfig, CudaStorage, Device, DeviceRows, DeviceTable, StreamPriority, TableError};
use kvpool_cuda_tests::engine::{Buffers, Rig, Shape, drained};
use kvpool_cuda_tests::mock::{self, Kind, Live, Session};

const ZERO: DeviceId = DeviceId::Cuda(0);

fn layout() -> KvLayout {
    let layout = KvLayout::builder().layers(2).kv_heads(2).head_dim(4).block_tokens(4).dtype(Dtype::F32);
    layout.build().expect("a layout")
}

fn rig(device: &Device) -> Rig {
    Rig::new(device, &Shape { layout: layout(), blocks: (8, 16), caches: false })
}

/// Asserts that no objects were added since `before`, except buffers, which are kept.
fn assert_kept(session: &Session, before: &Live) {
    let kinds = [Kind::Stream, Kind::Reservation, Kind::Physical, Kind::Mapping, Kind::Context, Kind::Event];
    let same = |live: Live| kinds.iter().all(|&kind| live[kind as usize] <= before[kind as usize]);
    assert!(drained(|| same(session.live())), "{:?}, before: {before:?}", session.live());
}

fn begin_capture(stream: &DeviceStream) {
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: the stream is alive.
    let begun = unsafe { sys::cuStreamBeginCapture_v2(stream.as_raw().cast(), mode) };
    assert_eq!(begun, CUresult::CUDA_SUCCESS);
}

fn end_capture(stream: &DeviceStream) {
    let mut graph = std::ptr::null_mut();
    // SAFETY: the stream is alive; the graph is destroyed once.
    unsafe {
        let ended = sys::cuStreamEndCapture(stream.as_raw().cast(), &mut graph);
        assert_eq!(ended, CUresult::CUDA_SUCCESS, "the capture was invalidated");
        assert_eq!(sys::cuGraphDestroy(graph), CUresult::CUDA_SUCCESS);
    }
}

#[test]
fn a_batch_ends_on_no_stream_but_its_devices_own() {
    let session = mock::session();
    let [device, other] = [0, 1].map(|ordinal| Device::open(ordinal).expect("two devices"));
    let rig = rig(&device);
    let foreign = other.stream().expect("a stream");
    let refused = StorageError::ForeignStream { stream: DeviceId::Cuda(1), storage: ZERO };
    assert_eq!(rig.pool.begin_batch_on(&foreign).expect_err("a stream of another device"), refused);
    // SAFETY: the handle is a stream's, although of another device than declared.
    let lying = unsafe { DeviceStream::from_raw(ZERO, foreign.as_raw(), foreign.clone()) };
    let said = rig.pool.begin_batch_on(&lying).expect_err("a stream of another context");
    assert!(matches!(&said, StorageError::Device { device: ZERO, doing: "using a stream", .. }), "{said}");

    let (own, before) = (rig.stream(StreamPriority::Usual), session.live());
    let mut sequence = rig.pool.sequence(SequenceId(1)).open().expect("a new id");
    let mut batch = rig.pool.begin_batch_on(&own).expect("a valid stream");
    batch.append(&mut sequence, 5).expect("blocks");
    for stream in [&foreign, &lying] {
        let back = batch.finish_on(stream).expect_err("a stream of another device");
        assert!(matches!(&back.error, StorageError::ForeignStream { .. } | StorageError::Device { .. }));
        batch = *back.batch;
        // The batch continues as if the call had not been made.
        batch.append(&mut sequence, 1).expect("blocks");
    }
    let mut table = DeviceTable::new(&device, 1, 4, 8).expect("a small table");
    let filled = table.fill(&foreign, &batch, [&sequence]);
    assert_eq!(filled, Err(TableError::Storage(refused)));
    batch.finish_on(&own).map(drop).expect("a valid stream");
    assert_eq!(sequence.len(), 7);
    drop(sequence);
    assert!(drained(|| rig.pool.stats().retired == 0 && rig.pool.audit().is_ok()));
    assert!(!rig.pool.is_lost());
    drop(table);
    assert_kept(&session, &before);

    let host = Pool::builder(layout()).blocks(4).build().expect("a host pool");
    let refused = host.begin_batch_on(&own).expect_err("the host has no streams");
    assert_eq!(refused, StorageError::ForeignStream { stream: ZERO, storage: DeviceId::Host });
}

#[test]
fn a_stream_that_is_captured_is_refused_and_its_capture_is_not_broken() {
    let _session = mock::session();
    let device = Device::open(0).expect("a device");
    let rig = rig(&device);
    let (stream, mut table) =
        (rig.stream(StreamPriority::Usual), DeviceTable::new(&device, 1, 4, 8).expect("a small table"));
    let mut sequence = rig.pool.sequence(SequenceId(1)).open().expect("a new id");
    let mut batch = rig.pool.begin_batch();
    batch.append(&mut sequence, 5).expect("blocks");
    begin_capture(&stream);
    let is_refused = |error: &StorageError| matches!(error, StorageError::Capturing { device: ZERO, .. });
    assert!(is_refused(&rig.pool.begin_batch_on(&stream).expect_err("captured")));
    let filled = table.fill(&stream, &batch, [&sequence]).expect_err("captured");
    assert!(matches!(&filled, TableError::Storage(error) if is_refused(error)), "{filled}");
    let patched = table.patch(&stream, &[]).expect_err("captured");
    assert!(matches!(&patched, TableError::Storage(error) if is_refused(error)), "{patched}");
    let back = batch.finish_on(&stream).expect_err("captured");
    assert!(is_refused(&back.error), "{back}");
    end_capture(&stream);
    table.fill(&stream, &back.batch, [&sequence]).expect("the capture has ended");
    back.batch.finish_on(&stream).map(drop).expect("the capture has ended");
    drop(sequence);
    assert!(drained(|| rig.pool.stats().retired == 0 && rig.pool.audit().is_ok()));
}

/// Frames that do not exist, or that were not yet added or already removed, are refused: unmapped
/// memory is never accessed.
#[test]
fn no_frame_is_reached_that_is_not_there() {
    let session = mock::session();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let device = Device::open(0).expect("a device");
    let rig = rig(&device);
    let storage = rig.storage();
    let (frames, row) = (storage.frames(), storage.layout().row_elements());
    assert_eq!((frames, storage.frames_max()), (9, 17));
    let untouched = |frames: usize| {
        let mut bytes = vec![0; row * 4];
        let mut other = bytes.clone();
        let slot = (frames * 4) as i64;
        let (k, v) = (ElementsMut::new(Dtype::F32, &mut bytes), ElementsMut::new(Dtype::F32, &mut other));
        let (k, v) = (k.expect("whole elements"), v.expect("whole elements"));
        let stream = rig.stream(StreamPriority::Usual);
        let beyond = FrameMove::new(FrameId(0), FrameId(frames as u32));
        let run = Run { start: FrameId(frames as u32 - 1), len: 2 };
        let mut packed = vec![0; 2 * storage.layout().packed_bytes()];
        // SAFETY: every call is refused.
        unsafe {
            let out: StorageError = Invalid::new("slot", slot, format_args!("less than {slot}")).at(0).into();
            assert_eq!(storage.load(0, &[slot], k, v), Err(out));
            let limit = format_args!("less than {frames}");
            let out: StorageError = Invalid::new("frame", beyond.dst, limit).at(0).into();
            assert_eq!(storage.copy(&[beyond]), Err(out.clone()));
            assert_eq!(storage.copy_on(&stream, &[beyond]), Err(out.clone()));
            storage.copy_then(&[beyond], Box::new(move |outcome| assert_eq!(outcome, Err(out))));
            let (got, limit) =
                (format_args!("2 frames from {}", run.start), format_args!("frames below {frames}"));
            let out: StorageError = Invalid::new("run", got, limit).at(0).into();
            assert_eq!(storage.zero(&[run]), Err(out.clone()));
            assert_eq!(storage.pack(&[run], &mut packed), Err(out.clone()));
            assert_eq!(storage.unpack(&[run], &packed), Err(out));
        }
    };
    untouched(9);
    runtime.block_on(rig.pool.resize(16)).expect("memory");
    untouched(17);
    runtime.block_on(rig.pool.resize(4)).expect("nothing is in use");
    assert_eq!(storage.frames(), 5);
    untouched(5);
    let grown = runtime.block_on(rig.pool.resize(17)).expect_err("beyond the reservation");
    assert!(matches!(grown, ResizeError::Grow(GrowError::TooLarge { .. })), "{grown}");
    assert!(drained(|| session.pending() == 0));
    device.good().expect("the device is healthy");
    rig.pool.audit().expect("a consistent pool");
}

#[test]
fn rows_of_an_engine_that_cannot_be_are_refused() {
    let _session = mock::session();
    let device = Device::open(0).expect("a device");
    let rig = rig(&device);
    let stream = rig.stream(StreamPriority::Usual);
    let buffer = Buffers::default().take().expect("memory");
    let at = buffer.device;
    let row = rig.storage().layout().row_elements() * 4;
    let good = DeviceRows { dtype: Dtype::F32, k: at + 1024, v: at + 4096, k_stride: row, v_stride: row };
    let store = |layer, rows, slots| {
        // SAFETY: where the rows are valid, all slots are negative; otherwise the call is refused.
        unsafe { rig.storage().store_on(&stream, layer, rows, slots, 1) }.expect_err("refused").to_string()
    };
    assert_eq!(store(2, good, at), "layer: got 2, expected less than 2");
    assert_eq!(
        store(0, DeviceRows { dtype: Dtype::F16, ..good }, at),
        "k: got f16, expected f32, as in the layout"
    );
    for (k, v, which) in [(0, good.v, "k"), (at + 2, good.v, "k"), (good.k, at + 5, "v")] {
        let refused = store(0, DeviceRows { k, v, ..good }, at);
        let is_named = refused.starts_with(which) && refused.ends_with("expected multiples of 4 bytes");
        assert!(is_named, "{refused}");
    }
    let short = DeviceRows { v_stride: row - 4, ..good };
    let refused = format!("v: got a stride of {} bytes, expected at least a row's {row}", row - 4);
    assert_eq!(store(0, short, at), refused);
    for slots in [0, at + 4] {
        let refused = store(0, good, slots);
        assert!(refused.starts_with("slots: ") && refused.ends_with("multiples of 8 bytes"), "{refused}");
    }
    rig.storage().settle(&stream).expect("a healthy device");
}

#[test]
fn pools_that_no_device_holds_are_refused() {
    let session = mock::session();
    let device = Device::open(0).expect("a device");
    session.set_capacity(0, 8 << 20);
    let before = session.live();
    let large = KvLayout::named("llama-3.1-8b").expect("a preset");
    match CudaStorage::new(&device, large.clone(), 1000, 1000).expect_err("more memory than the device has") {
        StorageError::DeviceMemory { device, bytes, free, total } => {
            assert_eq!((device, total), (ZERO, 8 << 20));
            assert!(free <= total && bytes > total);
        }
        error => panic!("{error}"),
    }
    let most =
        CudaStorage::new(&device, large, 1, usize::MAX / 2).expect_err("too large for the address space");
    assert!(matches!(most, StorageError::Invalid(_)), "{most}");
    for (frames, frames_max) in [(0, 4), (5, 4)] {
        let refused =
            CudaStorage::new(&device, layout(), frames, frames_max).expect_err("an invalid frame count");
        assert!(refused.to_string().starts_with("number of frames: got "), "{refused}");
    }
    session.set_capacity(0, mock::CAPACITY);
    let storage: Arc<dyn Storage> = Arc::new(CudaStorage::new(&device, layout(), 4, 4).expect("four frames"));
    // The null block needs one more frame.
    let refused = Pool::builder(layout()).blocks(4).storage(storage).build().expect_err("one frame too few");
    assert_eq!(refused.to_string(), "frames of the storage: got 4, expected at least 5");
    assert_kept(&session, &before);
}

/// An engine's tensors are kept exactly as long as they are in use; the rest of its memory is not
/// touched.
#[test]
fn adopted_tensors_are_all_that_there_is() {
    let session = mock::session();
    let device = Device::open(0).expect("a device");
    let context = CudaContext::new(0).expect("a device");
    context.bind_to_thread().expect("its context");
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(4).block_tokens(4).dtype(Dtype::F32);
    let layout = layout.build().expect("a layout");
    // SAFETY: that many bytes are allocated; freed below.
    let address = unsafe { result::malloc_sync(2 * 6 * 64) }.expect("memory");
    let plane = |at: u64, frame_stride| AdoptedPlane {
        base: std::ptr::without_provenance_mut((address + at) as usize),
        frame_stride,
    };
    let adopt = |planes: &[AdoptedPlane], frames, owner| {
        let (tensors, config) = (AdoptedTensors::Planes(planes), CudaConfig::default());
        // SAFETY: `owner` declares that the tensors outlive the storage.
        unsafe { CudaStorage::adopt_tensors(&device, layout.clone(), tensors, frames, owner, config) }
    };
    let before = session.live();
    let owner = Arc::new(());
    for (planes, frames, what, index, limit) in [
        (&[plane(0, 64)][..], 6, "number of planes", None, "2"),
        (&[plane(0, 48), plane(384, 64)], 6, "plane", Some(0), "a stride of at least 64"),
        (&[plane(0, 64), plane(384, (usize::MAX / 4) & !63)], 6, "plane", Some(1), ""),
        (&[plane(0, 64), plane(384, 64)], 0, "number of frames", None, "1 up to the maximum"),
        (&[plane(0, 64), plane(384, 64)], 7, "plane", Some(1), "memory of its own"),
    ] {
        let refused = adopt(planes, frames, owner.clone()).expect_err("impossible");
        let StorageError::Invalid(invalid) = refused else { panic!("{refused}") };
        assert_eq!((invalid.what, invalid.index), (what, index), "{invalid}");
        assert!(invalid.limit.starts_with(limit), "{invalid}");
    }
    assert_eq!(Arc::strong_count(&owner), 1, "a refused call keeps no reference");
    assert_kept(&session, &before);

    let storage = adopt(&[plane(0, 64), plane(384, 64)], 6, owner.clone()).expect("good tensors");
    assert_eq!((storage.frames(), storage.frames_max(), Arc::strong_count(&owner)), (6, 6, 2));
    let pool = Pool::builder(layout.clone()).blocks(5).storage(Arc::new(storage)).build().expect("a pool");
    let grown = pool.grow(1).expect_err("adopted storage cannot grow");
    assert!(matches!(grown, GrowError::TooLarge { .. }), "{grown}");
    let mut sequence = pool.sequence(SequenceId(1)).open().expect("a new id");
    let stream = device.stream().expect("a stream");
    let mut batch = pool.begin_batch_on(&stream).expect("a valid stream");
    batch.append(&mut sequence, 20).expect("all blocks");
    let refused = batch.append(&mut sequence, 1).expect_err("no more blocks");
    assert!(matches!(refused, SequenceError::Alloc(_)), "{refused}");
    batch.finish_on(&stream).map(drop).expect("a valid stream");
    drop(sequence);
    drop(pool);
    assert!(drained(|| Arc::strong_count(&owner) == 1), "the tensors are released");
    // SAFETY: allocated above, and released by the pool.
    unsafe { result::free_sync(address) }.expect("memory of the engine");
}
