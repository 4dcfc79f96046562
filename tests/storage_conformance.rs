//! The conformance suite over host memory, reserved and adopted.

use std::alloc::{Layout, alloc, dealloc};

use kvpool::storage::{AdoptedPlane, AdoptedTensors, Arrangement, HostStorage, KvLayout, Storage};
use kvpool_testkit::conformance::{self, FRAMES, FRAMES_MAX, Op, Pair};
use proptest::prelude::*;

fn reserved(layout: &KvLayout, frames: usize, frames_max: usize) -> Box<dyn Storage> {
    Box::new(HostStorage::new(layout.clone(), frames, frames_max).expect("memory for a few frames"))
}

/// An engine's memory: planes in reverse order with gaps between them and, layer-first, between
/// their frames. Every byte outside of all tiles is checked.
struct Engine {
    memory: *mut u8,
    layout: Layout,
    planes: Vec<(usize, usize, usize)>,
}

const UNTOUCHED: u8 = 0xA5;

// SAFETY: the memory is only touched through the storage, and on drop.
unsafe impl Send for Engine {}
// SAFETY: as above.
unsafe impl Sync for Engine {}

impl Engine {
    fn new(layout: &KvLayout, frames: usize) -> Self {
        let table = layout.planes(frames).expect("a small table");
        let mut end = 32;
        let planes: Vec<_> = if layout.arrangement() == Arrangement::BlockFirst {
            table
                .planes
                .iter()
                .map(|plane| (48 + plane.base, plane.frame_stride + 16, plane.tile_bytes))
                .collect()
        } else {
            let place = |plane: &kvpool::storage::Plane| {
                let (base, stride) = (end, plane.frame_stride + 16);
                end += frames * stride + 8;
                (base, stride, plane.tile_bytes)
            };
            let mut planes: Vec<_> = table.planes.iter().rev().map(place).collect();
            planes.reverse();
            planes
        };
        let bytes = planes.iter().map(|(base, stride, _)| base + frames * stride).max().unwrap_or(0) + 64;
        let layout = Layout::from_size_align(bytes, 64).expect("a small allocation");
        // SAFETY: the size is not zero.
        let memory = unsafe { alloc(layout) };
        assert!(!memory.is_null());
        // SAFETY: just allocated.
        unsafe { memory.write_bytes(UNTOUCHED, bytes) };
        Self { memory, layout, planes }
    }

    fn adopted(&self) -> Vec<AdoptedPlane> {
        let plane =
            |&(base, frame_stride, _)| AdoptedPlane { base: self.memory.wrapping_add(base), frame_stride };
        self.planes.iter().map(plane).collect()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, and the storage is dropped.
        let bytes = unsafe { std::slice::from_raw_parts(self.memory, self.layout.size()) };
        let mut inside = vec![false; bytes.len()];
        for &(base, stride, tile) in &self.planes {
            (0..FRAMES).for_each(|frame| inside[base + frame * stride..][..tile].fill(true));
        }
        let stray = (0..bytes.len()).find(|&at| !inside[at] && bytes[at] != UNTOUCHED);
        // SAFETY: as allocated; not used again.
        unsafe { dealloc(self.memory, self.layout) };
        if !std::thread::panicking() {
            assert_eq!(stray, None, "a byte outside all tiles was written");
        }
    }
}

fn adopted(layout: &KvLayout, frames: usize, _frames_max: usize) -> Box<dyn Storage> {
    let engine = Engine::new(layout, frames);
    let planes = engine.adopted();
    let tensors = AdoptedTensors::Planes(&planes);
    // SAFETY: the storage owns the memory's owner; no other access happens meanwhile.
    let storage = unsafe { HostStorage::adopt_tensors(layout.clone(), tensors, frames, engine) };
    Box::new(storage.expect("good planes"))
}

#[test]
fn reserved_memory_conforms() {
    conformance::run(reserved);
}

#[test]
fn adopted_memory_conforms() {
    conformance::run(adopted);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 2 } else { 200 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Random operations in random layouts, on both kinds of memory.
    #[test]
    fn storage_does_what_the_reference_does(
        layout in proptest::sample::select(conformance::layouts()),
        own in any::<bool>(),
        seeds in proptest::collection::vec(any::<u64>(), 1..if cfg!(miri) { 5 } else { 40 }),
    ) {
        let storage = if own { reserved(&layout, FRAMES, FRAMES_MAX) } else { adopted(&layout, FRAMES, FRAMES) };
        let mut pair = Pair::new(&*storage);
        for seed in seeds {
            pair.apply(&Op::random(&layout, FRAMES, &mut kvpool_testkit::rng::Rng(seed)));
        }
    }
}
