//! The conformance suite over device memory, mapped and adopted: every schedule gives the same
//! bytes as on the host.

use cudarc::driver::{CudaContext, result};
use kvpool::storage::{
    AdoptedPlane, AdoptedTensors, Arrangement, Dtype, Elements, FrameMove, HostStorage, KvLayout, Plane,
    Scales, Storage,
};
use kvpool::{FrameId, Run};
use kvpool_cuda::{CudaConfig, CudaStorage, Device};
use kvpool_cuda_tests::mock::{Rules, Style, session};
use kvpool_testkit::conformance::{self, FRAMES};

/// An engine's tensors: planes in reverse order with gaps between them and, if layer-first, between
/// their frames. Bytes outside all tiles are checked for changes.
struct Engine {
    context: std::sync::Arc<CudaContext>,
    memory: u64,
    bytes: usize,
    planes: Vec<(usize, usize, usize)>,
}

const UNTOUCHED: u8 = 0xA5;

impl Engine {
    fn new(layout: &KvLayout, frames: usize) -> Self {
        let table = layout.planes(frames).expect("a small table").planes;
        let mut end = 32;
        let planes: Vec<_> = if layout.arrangement() == Arrangement::BlockFirst {
            let place = |plane: &Plane| (48 + plane.base, plane.frame_stride + 16, plane.tile_bytes);
            table.iter().map(place).collect()
        } else {
            let place = |plane: &Plane| {
                let (base, stride) = (end, plane.frame_stride + 16);
                end += frames * stride + 8;
                (base, stride, plane.tile_bytes)
            };
            let mut planes: Vec<_> = table.iter().rev().map(place).collect();
            planes.reverse();
            planes
        };
        let bytes = planes.iter().map(|(base, stride, _)| base + frames * stride).max().unwrap_or(0) + 64;
        let context = CudaContext::new(0).expect("a device");
        context.bind_to_thread().expect("its context");
        // SAFETY: that many bytes are allocated, and then written.
        let memory = unsafe {
            let memory = result::malloc_sync(bytes).expect("memory for a few frames");
            result::memset_d8_sync(memory, UNTOUCHED, bytes).expect("a pattern");
            // The call may return before the bytes have arrived, and other streams do not wait for
            // them.
            result::ctx::synchronize().expect("a healthy device");
            memory
        };
        Self { context, memory, bytes, planes }
    }

    fn adopted(&self) -> Vec<AdoptedPlane> {
        let plane = |&(base, frame_stride, _)| AdoptedPlane {
            base: std::ptr::without_provenance_mut(self.memory as usize + base),
            frame_stride,
        };
        self.planes.iter().map(plane).collect()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.context.bind_to_thread().expect("the context");
        let mut bytes = vec![0u8; self.bytes];
        // SAFETY: allocated in `new`, and the storage was dropped.
        unsafe {
            result::memcpy_dtoh_sync(&mut bytes, self.memory).expect("the bytes");
            result::free_sync(self.memory).expect("allocated memory");
        }
        let mut inside = vec![false; bytes.len()];
        for &(base, stride, tile) in &self.planes {
            (0..FRAMES).for_each(|frame| inside[base + frame * stride..][..tile].fill(true));
        }
        let shared_limbo = (0..bytes.len()).find(|&at| !inside[at] && bytes[at] != UNTOUCHED);
        if !std::thread::panicking() {
            assert_eq!(shared_limbo, None, "a byte outside all tiles was written");
        }
    }
}

#[test]
fn mapped_memory_conforms() {
    let session = session();
    // Devices have granules of 2 MiB; thousands of storages with these would take minutes.
    session.rules(&Rules { granularity: 64 << 10, ..Rules::default() });
    for (style, seed) in [(Style::Random, 1), (Style::Lazy, 2)] {
        session.style(style);
        session.seed(seed);
        let before = session.live();
        {
            let device = Device::open(0).expect("the mock has a device");
            conformance::run(|layout, frames, frames_max| -> Box<dyn Storage> {
                let config = CudaConfig::default().segment_frames(2);
                let storage = CudaStorage::with_config(&device, layout.clone(), frames, frames_max, config);
                Box::new(storage.expect("memory for a few frames"))
            });
        }
        // The watcher ends on its own, shortly after the device was dropped.
        std::thread::sleep(std::time::Duration::from_millis(100));
        session.assert_no_leaks(&before);
    }
}

#[test]
fn adopted_memory_conforms() {
    let session = session();
    session.style(Style::Random);
    session.seed(3);
    let device = Device::open(0).expect("the mock has a device");
    conformance::run(|layout, frames, _| -> Box<dyn Storage> {
        let engine = Engine::new(layout, frames);
        let planes = engine.adopted();
        let config = CudaConfig::default();
        let tensors = AdoptedTensors::Planes(&planes);
        // SAFETY: the engine's memory lives as long as the storage, and is not accessed elsewhere.
        let storage =
            unsafe { CudaStorage::adopt_tensors(&device, layout.clone(), tensors, frames, engine, config) };
        Box::new(storage.expect("good planes"))
    });
}

/// Frames more than 4 GiB apart: offsets in a plane need more than 32 bits. The memory between the
/// tiles is never touched, so that the machine does not have to hold it.
#[test]
fn frames_beyond_four_gibibytes_conform() {
    const STRIDE: usize = 3 << 30;
    let session = session();
    session.set_capacity(0, 64 << 30);
    let device = Device::open(0).expect("the mock has a device");
    let layout = KvLayout::builder().layers(1).kv_heads(2).head_dim(128).block_tokens(80);
    let layout = layout.dtype(Dtype::Fp8E4M3).scales(Scales::PerTokenHead).build().expect("a layout");
    let planes = layout.planes(1).expect("a small table").planes;
    let context = CudaContext::new(0).expect("a device");
    context.bind_to_thread().expect("its context");
    let bases: Vec<usize> = planes
        .iter()
        .scan(0, |end, plane| {
            let base = *end;
            *end = base + plane.tile_bytes.next_multiple_of(256);
            Some(base)
        })
        .collect();
    let bytes = 2 * STRIDE + (1 << 20);
    // SAFETY: freed below.
    let memory = unsafe { result::malloc_sync(bytes) }.expect("memory that is not touched");
    let adopted: Vec<AdoptedPlane> = bases
        .iter()
        .map(|base| AdoptedPlane {
            base: std::ptr::without_provenance_mut(memory as usize + base),
            frame_stride: STRIDE,
        })
        .collect();
    {
        let (tensors, config) = (AdoptedTensors::Planes(&adopted), CudaConfig::default());
        // SAFETY: the memory outlives the storage, and is not accessed elsewhere.
        let far = unsafe { CudaStorage::adopt_tensors(&device, layout.clone(), tensors, 3, (), config) };
        let (far, near) =
            (far.expect("good planes"), HostStorage::new(layout.clone(), 3, 3).expect("frames"));
        let tokens = layout.block_tokens();
        let slots: Vec<i64> =
            [2, 0].iter().flat_map(|at| (0..tokens).map(move |token| (at * tokens + token) as i64)).collect();
        let rows: Vec<f32> =
            (0..slots.len() * layout.row_elements()).map(|at| (at % 509) as f32 * 0.37 - 90.0).collect();
        let all = |frames: &[u32]| -> Vec<Run> {
            frames.iter().map(|&frame| Run { start: FrameId(frame), len: 1 }).collect()
        };
        let packed = |storage: &dyn Storage| {
            let mut out = vec![0; 3 * layout.packed_bytes()];
            // SAFETY: no other thread uses the frames.
            unsafe { storage.pack(&all(&[0, 1, 2]), &mut out) }.expect("frames");
            out
        };
        for storage in [&far as &dyn Storage, &near] {
            // SAFETY: no other thread uses the frames.
            unsafe {
                storage.zero(&all(&[0, 1, 2])).expect("frames");
                storage.store(0, Elements::from(&rows), Elements::from(&rows), &slots).expect("good rows");
                storage.copy(&[FrameMove::new(FrameId(2), FrameId(1))]).expect("frames");
            }
        }
        assert!(packed(&far) == packed(&near), "the bytes differ from those of the host");
        let bytes = packed(&near);
        // SAFETY: as above.
        unsafe { far.unpack(&all(&[2, 1, 0]), &bytes) }.expect("frames");
        let frame = layout.packed_bytes();
        let turned = packed(&far);
        assert!(turned[..frame] == bytes[2 * frame..] && turned[2 * frame..] == bytes[..frame]);
        far.close().expect("a healthy device");
    }
    // SAFETY: allocated above, and no longer used.
    unsafe { result::free_sync(memory) }.expect("allocated");
}
