//! The conformance suite over device memory, mapped and adopted: every schedule gives the same
//! bytes as on the host.

use cudarc::driver::{CudaContext, result};
use kvpool::cuda::{CudaConfig, CudaStorage, Device};
use kvpool::storage::{AdoptedPlane, Arrangement, KvLayout, Plane, Storage};
use kvpool_cuda_tests::mock::{Style, session};
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
        // SAFETY: the engine's memory lives as long as the storage, and is not accessed elsewhere.
        let storage = unsafe { CudaStorage::adopt(&device, layout.clone(), &planes, frames, engine, config) };
        Box::new(storage.expect("good planes"))
    });
}
