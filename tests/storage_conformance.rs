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

/// Blocks packed by one arrangement are unpacked by another: the packed form is independent of
/// layout.
#[test]
fn packed_blocks_travel_between_arrangements() {
    use kvpool::storage::{Dtype, KvPlanes, Scales};
    use kvpool::{FrameId, Run};
    let all = [Run { start: FrameId(0), len: 3 }];
    let make = |arrangement, parts| {
        let layout =
            KvLayout::named_builder("tiny").expect("a known name").arrangement(arrangement).parts(parts);
        let layout =
            layout.dtype(Dtype::Fp8E4M3).scales(Scales::PerTokenHead).build().expect("a good layout");
        HostStorage::new(layout, 3, 3).expect("memory for three frames")
    };
    let from = make(Arrangement::LayerFirst, KvPlanes::Separate);
    let rows: Vec<f32> = (0..12 * 16).map(|value| value as f32 - 90.0).collect();
    let slots: Vec<i64> = (0..12).collect();
    let mut packed = vec![0; 3 * from.layout().packed_bytes()];
    // SAFETY: one thread.
    unsafe {
        from.store(0, (&rows).into(), (&rows).into(), &slots).expect("good rows");
        from.store(1, (&rows).into(), (&rows).into(), &slots).expect("good rows");
        from.pack(&all, &mut packed).expect("all frames");
    }
    for (arrangement, parts) in [
        (Arrangement::LayerFirst, KvPlanes::Joined),
        (Arrangement::BlockFirst, KvPlanes::Separate),
        (Arrangement::BlockFirst, KvPlanes::Joined),
    ] {
        let to = make(arrangement, parts);
        let (mut k, mut v) = (vec![0f32; rows.len()], vec![0f32; rows.len()]);
        // SAFETY: one thread.
        unsafe {
            to.unpack(&all, &packed).expect("all frames");
            to.load(1, &slots, (&mut k).into(), (&mut v).into()).expect("good slots");
        }
        for (got, want) in k.iter().zip(&rows).chain(v.iter().zip(&rows)) {
            assert!((got - want).abs() <= want.abs() / 16.0 + 0.2, "{got} differs from {want}");
        }
    }
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
