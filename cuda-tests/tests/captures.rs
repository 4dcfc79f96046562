//! Captures of graphs: concurrent work of the pool neither invalidates a capture nor fails because
//! of it, and replays read the right data.

use std::sync::mpsc;
use std::time::Duration;

use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, result};
use kvpool::storage::{DeviceStream, Dtype, FrameMove, HostStorage, KvLayout, Storage};
use kvpool::{DeviceId, FrameId, Run, StorageError};
use kvpool_cuda::{CudaStorage, Device, DeviceRows, DeviceTable};
use kvpool_cuda_tests::mock::{for_each_seed, session};

const FRAMES: usize = 4;

fn layout() -> KvLayout {
    let builder = KvLayout::builder().layers(1).kv_heads(2).head_dim(8).block_tokens(4);
    builder.dtype(Dtype::F32).build().expect("a small layout")
}

fn all() -> [Run; 1] {
    [Run { start: FrameId(0), len: FRAMES as u32 }]
}

fn packed(storage: &dyn Storage) -> Vec<u8> {
    let mut out = vec![0; FRAMES * storage.layout().packed_bytes()];
    // SAFETY: no other thread uses the frames.
    unsafe { storage.pack(&all(), &mut out) }.expect("existing frames");
    out
}

/// Begins a capture in global mode, which forbids all threads to make calls that may wait for the
/// device.
fn begin(stream: &DeviceStream) {
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: the stream is alive.
    let begun = unsafe { sys::cuStreamBeginCapture_v2(stream.as_raw().cast(), mode) };
    assert_eq!(begun, CUresult::CUDA_SUCCESS);
}

fn end(stream: &DeviceStream) -> sys::CUgraphExec {
    let mut graph = std::ptr::null_mut();
    // SAFETY: the stream is alive; the graph is instantiated and destroyed once.
    unsafe {
        let ended = sys::cuStreamEndCapture(stream.as_raw().cast(), &mut graph);
        assert_eq!(ended, CUresult::CUDA_SUCCESS, "the capture was invalidated");
        let mut exec = std::ptr::null_mut();
        assert_eq!(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0), CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuGraphDestroy(graph), CUresult::CUDA_SUCCESS);
        exec
    }
}

#[test]
fn everything_goes_on_beside_a_capture() {
    let session = session();
    let device = Device::open(0).expect("a device");
    let engine = CudaContext::new(0).expect("a device");
    for_each_seed(&session, 20, |_| {
        engine.bind_to_thread().expect("the context");
        let storage = CudaStorage::new(&device, layout(), 2, FRAMES).expect("frames");
        let (captured, other) = (device.stream().expect("a stream"), device.stream().expect("a stream"));
        begin(&captured);
        let (tell, told) = mpsc::channel();
        let later = tell.clone();
        storage.after(&captured, Box::new(move |outcome| later.send(("captured", outcome)).expect("waits")));
        let now = tell.clone();
        storage.after(&other, Box::new(move |outcome| now.send(("other", outcome)).expect("waits")));
        // Calls of other threads count against the capture too.
        kvpool_testkit::threads::scope(|scope| {
            scope.spawn(|| {
                storage.grow(FRAMES).expect("memory");
                assert_eq!(packed(&storage).len(), FRAMES * layout().packed_bytes());
                let moves = [FrameMove::new(FrameId(0), FrameId(1))];
                // SAFETY: no other thread uses the frames.
                unsafe {
                    storage.zero(&all()).expect("frames");
                    storage.copy(&moves).expect("frames");
                    storage.copy_on(&other, &moves).expect("a stream outside the capture");
                    storage.shrink(2);
                }
                storage.settle(&other).expect("a healthy device");
            });
        });
        let refused = |doing, outcome: Result<(), StorageError>| {
            assert_eq!(outcome, Err(StorageError::Capturing { device: DeviceId::Cuda(0), doing }));
        };
        refused("enqueueing", storage.check_stream(&captured));
        refused("waiting for the stream", storage.settle(&captured));
        // SAFETY: the call is refused.
        refused("copying frames", unsafe { storage.copy_on(&captured, &[]) });
        let (first, outcome) = told.recv_timeout(Duration::from_secs(10)).expect("the callback is called");
        assert_eq!((first, outcome), ("other", Ok(())));
        assert!(told.recv_timeout(Duration::from_millis(10)).is_err(), "the stream is still capturing");
        let exec = end(&captured);
        let (second, outcome) = told.recv_timeout(Duration::from_secs(10)).expect("the callback is called");
        assert_eq!((second, outcome), ("captured", Ok(())));
        // SAFETY: instantiated once.
        assert_eq!(unsafe { sys::cuGraphExecDestroy(exec) }, CUresult::CUDA_SUCCESS);
    });
}

#[test]
fn a_captured_store_reads_what_is_in_the_table_when_it_is_replayed() {
    let session = session();
    let device = Device::open(0).expect("a device");
    let engine = CudaContext::new(0).expect("a device");
    let host = HostStorage::new(layout(), FRAMES, FRAMES).expect("frames");
    for_each_seed(&session, 20, |_| {
        engine.bind_to_thread().expect("the context");
        let storage = CudaStorage::new(&device, layout(), FRAMES, FRAMES).expect("frames");
        let mut table = DeviceTable::new(&device, 1, 1, 2).expect("a small table");
        let stream = device.stream().expect("a stream");
        let values: Vec<f32> = (0..2 * layout().row_elements()).map(|at| at as f32 + 0.5).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        // SAFETY: allocated, written, and then only read.
        let rows = unsafe {
            let rows = result::malloc_sync(bytes.len()).expect("memory");
            result::memcpy_htod_sync(rows, &bytes).expect("the bytes");
            result::ctx::synchronize().expect("a healthy device");
            rows
        };
        let row_bytes = layout().row_elements() * 4;
        let both =
            DeviceRows { dtype: Dtype::F32, k: rows, v: rows, k_stride: row_bytes, v_stride: row_bytes };
        begin(&stream);
        // SAFETY: no other thread uses the frames; rows and table live until the last replay is
        // over.
        unsafe { storage.store_on(&stream, 0, both, table.slots(), 2) }.expect("the call can be captured");
        let exec = end(&stream);
        // SAFETY: no other thread uses the frames.
        unsafe {
            storage.zero(&all()).expect("frames");
            host.zero(&all()).expect("frames");
        }
        for slots in [[1i64, 9], [14, -1], [3, 8]] {
            table.fill_slots(&stream, &slots).expect("slots");
            // SAFETY: instantiated, and the stream is alive; only this thread uses the host
            // storage.
            unsafe {
                assert_eq!(sys::cuGraphLaunch(exec, stream.as_raw().cast()), CUresult::CUDA_SUCCESS);
                host.store(0, (&values).into(), (&values).into(), &slots).expect("rows");
            }
        }
        storage.settle(&stream).expect("a healthy device");
        assert!(packed(&storage) == packed(&host));
        // SAFETY: instantiated and allocated once.
        unsafe {
            assert_eq!(sys::cuGraphExecDestroy(exec), CUresult::CUDA_SUCCESS);
            result::free_sync(rows).expect("allocated memory");
        }
    });
}

/// While a blocking stream is capturing, the state of the default stream cannot be queried, and an
/// event recorded in it invalidates that capture.
#[test]
fn the_default_stream_is_waited_for_beside_a_capture_and_leaves_it_alone() {
    let session = session();
    let device = Device::open(0).expect("a device");
    let engine = CudaContext::new(0).expect("a device");
    engine.bind_to_thread().expect("the context");
    let storage = CudaStorage::new(&device, layout(), FRAMES, FRAMES).expect("frames");
    // SAFETY: the default stream lives as long as the context.
    let default = unsafe { DeviceStream::from_raw(DeviceId::Cuda(0), std::ptr::null_mut(), ()) };
    let mut raw = std::ptr::null_mut();
    // SAFETY: the pointer is valid and the context is current; the stream is destroyed at the end.
    let blocking = unsafe {
        assert_eq!(sys::cuStreamCreate(&mut raw, 0), CUresult::CUDA_SUCCESS);
        DeviceStream::from_raw(DeviceId::Cuda(0), raw.cast(), ())
    };
    session.pause();
    // SAFETY: no other thread uses the frames.
    unsafe { storage.copy_on(&default, &[FrameMove::new(FrameId(0), FrameId(1))]) }.expect("enqueued");
    begin(&blocking);
    let (tell, told) = mpsc::channel();
    storage.after(&default, Box::new(move |outcome| tell.send(outcome).expect("waits")));
    let early = told.recv_timeout(Duration::from_millis(20));
    assert!(early.is_err(), "{early:?} was reported for work that has not run");
    let exec = end(&blocking);
    let early = told.recv_timeout(Duration::from_millis(20));
    assert!(early.is_err(), "{early:?} was reported for work that has not run");
    session.resume();
    assert_eq!(told.recv_timeout(Duration::from_secs(5)), Ok(Ok(())));
    // SAFETY: each was created once.
    unsafe {
        assert_eq!(sys::cuGraphExecDestroy(exec), CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuStreamDestroy_v2(raw), CUresult::CUDA_SUCCESS);
    }
}
