//! Checks every kernel: device storage against the scalar reference, in every layout, in its own
//! memory and in an engine's tensors surrounded by poison; and tables that are patched in place.

use std::panic::{AssertUnwindSafe, catch_unwind};

use kvpool::storage::{
    AdoptedPlane, AdoptedTensors, Arrangement, Dtype, Elements, ElementsMut, FrameMove, KvLayout, KvPlanes,
    Storage,
};
use kvpool::{FrameId, MovedEntry, Run};
use kvpool_cuda::launch::Work;
use kvpool_cuda::params::PatchParams;
use kvpool_cuda::{CudaConfig, CudaStorage, DeviceRows};
use kvpool_testkit::conformance::{self, FRAMES};
use kvpool_testkit::rng::Rng;

use crate::Options;
use crate::gpu::{Buffer, Gpu, Outcome};
use crate::report::Section;

/// Fill pattern around an engine's tensors.
const POISON: u8 = 0xA5;

/// What this section launches, by storages and itself.
pub const WORKS: &[Work] = &[
    Work::Copy,
    Work::Wave,
    Work::Zero,
    Work::Pack,
    Work::Unpack,
    Work::Rows,
    Work::Quantise,
    Work::Dequantise,
    Work::Patch,
];

/// Runs the conformance suite twice, and patches tables.
///
/// # Errors
/// An error of the device.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    let layouts = conformance::layouts();
    let step = if options.quick { 7 } else { 1 };
    let mut chosen: Vec<(usize, KvLayout)> = layouts.into_iter().enumerate().step_by(step).collect();
    chosen.extend((1000..).zip(conformance::wide_layouts().into_iter().step_by(step)));
    conform(section, "its own memory", &chosen, |layout, frames, frames_max| {
        CudaStorage::new(&gpu.device, layout.clone(), frames, frames_max).expect("memory for a few frames")
    });
    conform(section, "an engine's tensors", &chosen, |layout, frames, _| {
        let (tensors, planes) = Tensors::new(gpu, layout, frames).expect("memory for a few frames");
        let config = CudaConfig::default();
        let planes = AdoptedTensors::Planes(&planes);
        // SAFETY: the storage owns the tensors; no one else accesses them meanwhile.
        unsafe { CudaStorage::adopt_tensors(&gpu.device, layout.clone(), planes, frames, tensors, config) }
            .expect("valid planes")
    });
    pointers(gpu, section)?;
    patches(gpu, section)?;
    far(gpu, options, section)
}

/// Moves, stores and loads in frames beyond 4 GiB of one plane.
fn far(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    // K and V of one layer are one plane.
    let builder = KvLayout::builder().layers(1).kv_heads(8).head_dim(1024).parts(KvPlanes::Joined);
    let layout = builder.block_tokens(64).dtype(Dtype::Bf16).build()?;
    let frame_bytes = layout.packed_bytes();
    let frames = if options.quick { 40 } else { (5usize << 30) / frame_bytes };
    let storage = CudaStorage::new(&gpu.device, layout.clone(), frames, frames)?;
    let places = [0, frames / 3, frames / 2 + 1, frames - 2].map(|frame| frame as u32);
    let run = |frame: u32| Run { start: FrameId(frame), len: 1 };
    let mut rng = Rng(91);
    let content = places.map(|_| rng.bytes(frame_bytes));
    let mut wrong: Vec<String> = Vec::new();
    let compare = |wrong: &mut Vec<String>, what: &str, frame: u32, want: &[u8]| -> Outcome<()> {
        let mut got = vec![0; frame_bytes];
        // SAFETY: no one else uses the storage.
        unsafe { storage.pack(&[run(frame)], &mut got)? };
        if got != want {
            wrong.push(format!("{what}: frame {frame}"));
        }
        Ok(())
    };
    for (&place, content) in places.iter().zip(&content) {
        // SAFETY: as above.
        unsafe { storage.unpack(&[run(place)], content)? };
    }
    for (&place, content) in places.iter().zip(&content) {
        compare(&mut wrong, "unpacked and packed", place, content)?;
        // SAFETY: as above.
        unsafe { storage.copy(&[FrameMove::new(FrameId(place), FrameId(place + 1))])? };
        compare(&mut wrong, "moved", place + 1, content)?;
    }
    // A token in the last frame, and the same rows loaded.
    let slots = [(frames * layout.block_tokens()) as i64 - 1, 0];
    let elements = conformance::elements(Dtype::Bf16, 2 * layout.row_elements(), &mut rng);
    let rows = Elements::new(Dtype::Bf16, &elements.bytes)?;
    let mut got = [vec![0; elements.bytes.len()], vec![0; elements.bytes.len()]];
    let [k, v] = &mut got;
    // SAFETY: as above.
    unsafe {
        storage.store(0, rows, rows, &slots)?;
        storage.load(0, &slots, ElementsMut::new(Dtype::Bf16, k)?, ElementsMut::new(Dtype::Bf16, v)?)?;
    }
    if got.iter().any(|got| *got != elements.bytes) {
        wrong.push("stored and loaded".into());
    }
    // SAFETY: as above.
    unsafe { storage.zero(&[run(frames as u32 - 1)])? };
    compare(&mut wrong, "zeroed", frames as u32 - 1, &vec![0; frame_bytes])?;
    let gib = (frames * frame_bytes) as f64 / f64::from(1 << 30);
    section.check(format!("one plane of {gib:.1} GiB"), wrong.is_empty(), wrong.join("; "));
    storage.close()?;
    Ok(())
}

fn conform(
    section: &mut Section,
    name: &str,
    layouts: &[(usize, KvLayout)],
    make: impl Fn(&KvLayout, usize, usize) -> CudaStorage,
) {
    let mut wrong = Vec::new();
    for (seed, layout) in layouts {
        let make = |layout: &KvLayout, frames, frames_max| {
            Box::new(make(layout, frames, frames_max)) as Box<dyn Storage>
        };
        let ran = catch_unwind(AssertUnwindSafe(|| conformance::run_layout(layout, make, *seed as u64)));
        if let Err(panic) = ran {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            // The beginning of a failed comparison is sufficient.
            let text: String = text.unwrap_or_default().chars().take(200).collect();
            wrong.push(format!("{layout}: {text}"));
        }
    }
    let what = format!("store, load, copy, pack, quantise, zero: {name}");
    check_layouts(section, &what, layouts.len(), &wrong);
}

/// Checks that no layout was wrong; the first that was is said.
fn check_layouts(section: &mut Section, what: &str, count: usize, wrong: &[String]) {
    let detail = match wrong.first() {
        None => format!("{count} layouts"),
        Some(first) => format!("{} of {count} layouts are wrong; {first}", wrong.len()),
    };
    section.check(what, wrong.is_empty(), detail);
}

/// An engine's tensors: planes with gaps between them and, if layer-first, between their tiles.
struct Tensors {
    memory: Buffer,
    /// Offset, stride and size of each plane's tiles.
    tiles: Vec<(usize, usize, usize)>,
    frames: usize,
}

impl Tensors {
    fn new(gpu: &Gpu, layout: &KvLayout, frames: usize) -> Outcome<(Self, Vec<AdoptedPlane>)> {
        let table = layout.planes(frames)?;
        let mut end = 64;
        let mut tiles = Vec::new();
        for plane in &table.planes {
            let stride = plane.frame_stride + 16;
            if layout.arrangement() == Arrangement::BlockFirst {
                tiles.push((64 + plane.base, stride, plane.tile_bytes));
                end = end.max(64 + plane.base + frames * stride);
            } else {
                tiles.push((end, stride, plane.tile_bytes));
                end += frames * stride + 48;
            }
        }
        let memory = gpu.upload(&vec![POISON; end + 64])?;
        let base = memory.address() as usize;
        let planes = tiles
            .iter()
            .map(|&(offset, frame_stride, _)| AdoptedPlane {
                base: std::ptr::without_provenance_mut(base + offset),
                frame_stride,
            })
            .collect();
        Ok((Self { memory, tiles, frames }, planes))
    }
}

impl Drop for Tensors {
    /// Checks that no byte outside of the tiles has changed. A panic here belongs to the check that
    /// created the tensors.
    fn drop(&mut self) {
        let Ok(bytes) = self.memory.read() else { return };
        let mut inside = vec![false; bytes.len()];
        for &(offset, stride, tile) in &self.tiles {
            (0..self.frames).for_each(|frame| inside[offset + frame * stride..][..tile].fill(true));
        }
        let stray = (0..bytes.len()).find(|&at| !inside[at] && bytes[at] != POISON);
        if !std::thread::panicking() {
            assert_eq!(stray, None, "a byte outside all tiles was written");
        }
    }
}

/// Stores and loads rows in the device's memory on an engine's stream.
///
/// Compares the result with the same rows stored from the host.
fn pointers(gpu: &Gpu, section: &mut Section) -> Outcome<()> {
    let mut wrong = Vec::new();
    let layouts = conformance::layouts();
    let (stream, shared) = gpu.stream()?;
    for (seed, layout) in layouts.iter().enumerate() {
        let tokens = FRAMES * layout.block_tokens();
        let mut rng = Rng(seed as u64);
        let dtype = if layout.dtype().is_quantised() { Dtype::Bf16 } else { layout.dtype() };
        let count = tokens * layout.row_elements();
        let [k, v] = [(); 2].map(|()| conformance::elements(dtype, count, &mut rng));
        // Every third slot is padding.
        let slots: Vec<i64> =
            (0..tokens as i64).rev().map(|slot| if slot % 3 == 1 { -1 } else { slot }).collect();
        let make = || CudaStorage::new(&gpu.device, layout.clone(), FRAMES, FRAMES);
        let (engine, host) = (make()?, make()?);
        let is_latent = layout.parts() == KvPlanes::Latent;
        let rows = [Elements::new(dtype, &k.bytes)?, Elements::new(dtype, &v.bytes)?];
        let poison = vec![POISON; k.bytes.len()];
        let on_device = [gpu.upload(&k.bytes)?, gpu.upload(&v.bytes)?];
        let back = [gpu.upload(&poison)?, gpu.upload(&poison)?];
        let slots_there = gpu.upload(&slots)?;
        let stride = layout.row_elements() * dtype.bytes();
        let named = |at: &[Buffer; 2]| DeviceRows {
            dtype,
            k: at[0].address(),
            v: at[1].address(),
            k_stride: stride,
            v_stride: stride,
        };
        let layer = layout.layers() - 1;
        // SAFETY: no one else uses these storages and rows, and the stream is waited for before
        // they are dropped.
        unsafe {
            engine.store_on(&shared, layer, named(&on_device), slots_there.address(), tokens)?;
            engine.load_on(&shared, layer, named(&back), slots_there.address(), tokens)?;
        }
        stream.synchronize()?;
        let v_rows = if is_latent { Elements::none() } else { rows[1] };
        // SAFETY: as above.
        unsafe { host.store(layer, rows[0], v_rows, &slots)? };
        let mut want = [poison.clone(), poison];
        let [k_back, v_back] = &mut want;
        let v_back = if is_latent { ElementsMut::none() } else { ElementsMut::new(dtype, v_back)? };
        // SAFETY: as above.
        unsafe { host.load(layer, &slots, ElementsMut::new(dtype, k_back)?, v_back)? };
        let halves = if is_latent { 1 } else { 2 };
        let loaded = (0..halves).all(|half| back[half].read().is_ok_and(|got| got == want[half]));
        let kept = packed(&engine)? == packed(&host)?;
        if !loaded || !kept {
            wrong.push(format!("{layout} (stored correctly: {kept}, loaded correctly: {loaded})"));
        }
    }
    check_layouts(section, "an engine's own pointers and stream", layouts.len(), &wrong);
    Ok(())
}

/// Returns the packed contents of a storage.
fn packed(storage: &CudaStorage) -> Outcome<Vec<u8>> {
    let mut bytes = vec![0; storage.frames() * storage.layout().packed_bytes()];
    let all = [Run { start: FrameId(0), len: storage.frames() as u32 }];
    // SAFETY: no one else uses it.
    unsafe { storage.pack(&all, &mut bytes)? };
    Ok(bytes)
}

/// Patches entries of a table in the device's memory, in place.
fn patches(gpu: &Gpu, section: &mut Section) -> Outcome<()> {
    const ROWS: u32 = 300;
    const COLUMNS: u32 = 517;
    let mut rng = Rng(5);
    let mut want: Vec<i32> = (0..ROWS * COLUMNS).map(|_| rng.bits() as i32).collect();
    let table = gpu.upload(&want)?;
    let mut places: Vec<u32> = (0..ROWS * COLUMNS).collect();
    (1..places.len()).rev().for_each(|at| places.swap(at, rng.below(at + 1)));
    let entries: Vec<MovedEntry> = places[..4000]
        .iter()
        .map(|&place| MovedEntry { row: place / COLUMNS, column: place % COLUMNS, frame: rng.bits() as i32 })
        .collect();
    for entry in &entries {
        want[(entry.row * COLUMNS + entry.column) as usize] = entry.frame;
    }
    let list = gpu.upload(&entries)?;
    let (stream, _) = gpu.stream()?;
    let params = PatchParams {
        table: table.address(),
        entries: list.address(),
        row_stride: COLUMNS,
        n: entries.len() as u32,
    };
    // SAFETY: the table and the list are kept until the stream has been waited for.
    unsafe { gpu.device.kernels().launch(stream.cu_stream(), Work::Patch, &params)? };
    let got = table.download(&stream)?;
    let want: Vec<u8> = want.into_iter().flat_map(i32::to_ne_bytes).collect();
    section.check("a table patched in place", got == want, format!("{} entries", entries.len()));
    Ok(())
}
