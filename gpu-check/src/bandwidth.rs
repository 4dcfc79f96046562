//! Measures the throughput of the pool's kernels that move bytes, relative to the best linear copy
//! on this device.

use std::sync::Arc;

use cudarc::driver::{CudaStream, result};
use half::bf16;
use kvpool::storage::{DeviceStream, Dtype, Elements, ElementsMut, HostStorage, KvLayout, Scales, Storage};
use kvpool::{FrameId, Run};
use kvpool_cuda::launch::{MOVING_CTAS, Params, Work};
use kvpool_cuda::params::{CopyParams, Move, PackParams, Piece, Way, ZeroParams};
use kvpool_cuda::{CudaStorage, DeviceRows};
use kvpool_testkit::rng::Rng;

use crate::Options;
use crate::gpu::{Buffer, Gpu, Outcome, ProbeParams, launch, layer_first, rate};
use crate::report::Section;
use crate::sample;

/// Baseline: the best linear copy of the device, bytes read and written, in GB/s.
const LINEAR: &str = "best linear copy";
/// Baseline: the driver's linear write.
const MEMSET: &str = "driver's memset";

/// Baseline: the same kernel, compiled for this pair of types. Shows what types as parameters cost.
const FIXED: &str = "the kernel for these types alone";

/// How moves are launched: alone, and beside batches.
const MOVES: [Work; 2] = [Work::Wave, Work::WaveBeside { ctas: MOVING_CTAS }];

/// What this section launches.
pub const WORKS: &[Work] =
    &[MOVES[0], MOVES[1], Work::Pack, Work::Unpack, Work::Zero, Work::Rows, Work::Quantise, Work::Dequantise];

/// Number of frames, or tokens, of an operation whose bytes are verified.
const SAMPLES: usize = 8;

/// Planes, tiles and frames of the measurement: Qwen2.5-7B in bf16 with 16 tokens per block, unless
/// the run is quick.
struct Shape {
    planes: usize,
    tile_bytes: u32,
    frames: usize,
    moved: usize,
    tokens: usize,
    times: usize,
}

impl Shape {
    fn new(options: &Options) -> Self {
        if options.quick {
            Self { planes: 4, tile_bytes: 16 << 10, frames: 16, moved: 8, tokens: 64, times: 3 }
        } else {
            Self { planes: 56, tile_bytes: 16 << 10, frames: 3000, moved: 1000, tokens: 32_768, times: 11 }
        }
    }

    fn block_bytes(&self) -> usize {
        self.planes * self.tile_bytes as usize
    }

    fn payload(&self) -> usize {
        self.moved * self.block_bytes()
    }
}

/// Returns bf16 numbers that differ between elements and seeds, of many magnitudes and both signs.
fn numbers(count: usize, seed: u64) -> Vec<bf16> {
    let mut rng = Rng(seed);
    let number = |bits: u64| {
        let magnitude = f32::from((bits % 251) as u8 + 1) * 0.01 * f32::from(1u8 << (bits >> 20 & 3));
        bf16::from_f32(if bits >> 30 & 1 == 0 { magnitude } else { -magnitude })
    };
    (0..count).map(|_| number(rng.bits())).collect()
}

fn bytes_of(numbers: &[bf16]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

struct Bench<'a> {
    gpu: &'a Gpu,
    shape: Shape,
    stream: Arc<CudaStream>,
    /// The same one.
    shared: DeviceStream,
    arena: Buffer,
    /// The best linear copy in GB/s, read and written.
    linear: f64,
}

/// Measures all kernels that move bytes on the device.
///
/// # Errors
/// An error of the device.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    let shape = Shape::new(options);
    let (stream, shared) = gpu.stream()?;
    let arena = gpu.buffer(shape.frames * shape.block_bytes())?;
    arena.fill(&stream, 0x3C)?;
    let mut bench = Bench { gpu, shape, stream, shared, arena, linear: 0.0 };
    bench.linear_copies(section)?;
    bench.copies(section)?;
    bench.packs(section)?;
    bench.zeroes(section)?;
    bench.stores(section)
}

impl Bench<'_> {
    fn linear_copies(&mut self, section: &mut Section) -> Outcome<()> {
        let Self { gpu, shape, stream, arena, .. } = self;
        let half = shape.frames * shape.block_bytes() / 2;
        let bytes = shape.payload().min(half);
        let (from, to) = (arena.address(), arena.address() + half as u64);
        // SAFETY: the two halves of the arena.
        let driver = || unsafe { result::memcpy_dtod_async(to, from, bytes, stream.cu_stream()) };
        self.linear = rate(2 * bytes, gpu.time(stream, shape.times, driver)?);
        section.figure("driver's copy, linear", self.linear, "GB/s");
        let params = ProbeParams::copy(from, to, bytes);
        for share in [2, 4, 8, 16] {
            // SAFETY: the two halves of the arena.
            let time = unsafe { gpu.time_copy(stream, shape.times, share, &params)? };
            let what = format!("a linear kernel, {} CTAs", share * gpu.multiprocessors);
            section.figure(what, rate(2 * bytes, time), "GB/s");
            self.linear = self.linear.max(rate(2 * bytes, time));
        }
        section.figure(LINEAR, self.linear, "GB/s");
        // The baselines, too, must have copied.
        let tile = shape.tile_bytes as usize;
        let places = || (0..SAMPLES).map(|at| (bytes / tile * at / SAMPLES * tile) as u64);
        let plant = || sample::plant(gpu, tile, places().map(|at| (from + at, to + at)));
        stream.synchronize()?;
        let samples = plant()?;
        driver()?;
        sample::check(gpu, stream, section, "bytes of the driver's linear copy", &samples)?;
        let samples = plant()?;
        // SAFETY: as above.
        unsafe { gpu.time_copy(stream, 1, 8, &params)? };
        sample::check(gpu, stream, section, "bytes of the linear kernel", &samples)
    }

    /// Returns the time of a launch as pools make it.
    ///
    /// # Safety
    /// As for [`Kernels::launch`](kvpool_cuda::Kernels::launch).
    unsafe fn time(&self, work: Work, params: &impl Params) -> Outcome<f64> {
        let Self { gpu, stream, .. } = self;
        // SAFETY: the caller's promise.
        let launch = || unsafe { gpu.device.kernels().launch(stream.cu_stream(), work, params) };
        gpu.time(stream, self.shape.times, launch)
    }

    /// Returns the pieces of layer-first planes in the arena.
    fn pieces(&self) -> Vec<Piece> {
        let Shape { planes, frames, tile_bytes, .. } = self.shape;
        layer_first(self.arena.address(), planes, frames, tile_bytes)
    }

    /// Returns moves whose sources and destinations are scattered over the arena, and distinct.
    fn moves(&self) -> Vec<Move> {
        let mut frames: Vec<u32> = (0..self.shape.frames as u32).collect();
        let mut rng = Rng(77);
        (1..frames.len()).rev().for_each(|at| frames.swap(at, rng.below(at + 1)));
        let (from, to) = frames.split_at(self.shape.moved);
        from.iter().zip(to).map(|(&src, &dst)| Move { src, dst }).collect()
    }

    fn copies(&self, section: &mut Section) -> Outcome<()> {
        let Self { gpu, shape, stream, arena, .. } = self;
        let moves = gpu.upload(&self.moves())?;
        let layers = self.pieces();
        let blocks: Vec<Piece> = (0..shape.planes as u64)
            .map(|plane| Piece {
                base: arena.address() + plane * u64::from(shape.tile_bytes),
                frame_stride: shape.block_bytes() as u64,
                bytes: shape.tile_bytes,
                packed_at: plane as u32 * shape.tile_bytes,
            })
            .collect();
        for (name, list) in [("layer-first", &layers), ("block-first", &blocks)] {
            let pieces = gpu.upload(list)?;
            let (pieces, moves) = ((pieces.address(), list.len()), (moves.address(), shape.moved));
            let params = CopyParams::new(pieces, moves, 16);
            // Some moves, in all planes.
            let piece_at = |piece: &Piece, frame: u32| piece.base + u64::from(frame) * piece.frame_stride;
            let (mut best, sampled) = (f64::INFINITY, self.moves());
            let step = sampled.len().div_ceil(SAMPLES);
            let tiles = sampled.iter().step_by(step).flat_map(|moved| {
                list.iter().map(move |piece| (piece_at(piece, moved.src), piece_at(piece, moved.dst)))
            });
            let samples = sample::plant(gpu, shape.tile_bytes as usize, tiles)?;
            for work in MOVES {
                // SAFETY: pieces, moves and arena are kept until the stream has been waited for.
                let time = unsafe { self.time(work, &params)? };
                best = best.min(time);
                let (rule, got) = (gpu.device.kernels().rule(work), rate(2 * shape.payload(), time));
                let ctas = rule.shape(params.jobs(), gpu.multiprocessors).ctas;
                let what = format!("moves, {name}, {} on {ctas} CTAs", rule.kernel);
                section.ratio(what, got, "GB/s", got / self.linear, LINEAR);
            }
            sample::check(gpu, stream, section, format!("bytes moved, {name}"), &samples)?;
            let kib = shape.block_bytes() / 1024;
            section.figure(format!("{} blocks of {kib} KiB moved, {name}", shape.moved), best, "ms");
        }
        Ok(())
    }

    fn packs(&self, section: &mut Section) -> Outcome<()> {
        let Self { gpu, shape, stream, .. } = self;
        let count = shape.moved / 2;
        let sources: Vec<u32> = self.moves().iter().take(count).map(|step| step.src).collect();
        let (list, block) = (self.pieces(), shape.block_bytes());
        let (n_pieces, pieces, frames) = (list.len() as u32, gpu.upload(&list)?, gpu.upload(&sources)?);
        let packed = gpu.buffer(count * block)?;
        let packed_at = packed.address();
        let params = |way| PackParams {
            pieces: pieces.address(),
            frames: frames.address(),
            packed: packed.address(),
            packed_stride: block as u64,
            n_pieces,
            n_frames: count as u32,
            unit: 16,
            way,
        };
        for (way, what) in [(Way::Out, "pack"), (Way::In, "unpack")] {
            let step = count.div_ceil(SAMPLES);
            let tiles = sources.iter().enumerate().step_by(step).flat_map(|(at, &frame)| {
                list.iter().map(move |piece| {
                    let inside = piece.base + u64::from(frame) * piece.frame_stride;
                    let outside = packed_at + (at * block) as u64 + u64::from(piece.packed_at);
                    if way == Way::Out { (inside, outside) } else { (outside, inside) }
                })
            });
            let samples = sample::plant(gpu, shape.tile_bytes as usize, tiles)?;
            // SAFETY: all buffers are kept until the stream has been waited for.
            let time = unsafe { self.time(way.work(), &params(way))? };
            let got = rate(2 * count * block, time);
            section.ratio(what, got, "GB/s", got / self.linear, LINEAR);
            sample::check(gpu, stream, section, format!("bytes of {what}"), &samples)?;
        }
        Ok(())
    }

    fn zeroes(&self, section: &mut Section) -> Outcome<()> {
        let Self { gpu, shape, stream, arena, .. } = self;
        let targets: Vec<u32> = self.moves().iter().map(|step| step.dst).collect();
        let list = self.pieces();
        // Poison first: the frames may be zero already.
        arena.fill(stream, 0xA5)?;
        let (n_pieces, pieces, frames) = (list.len() as u32, gpu.upload(&list)?, gpu.upload(&targets)?);
        let bytes = shape.payload();
        // SAFETY: inside the arena.
        let driver = || unsafe { result::memset_d8_async(arena.address(), 0, bytes, stream.cu_stream()) };
        let driver = gpu.time(stream, shape.times, driver)?;
        let params = ZeroParams {
            pieces: pieces.address(),
            frames: frames.address(),
            n_pieces,
            n_frames: shape.moved as u32,
            unit: 16,
            reserved: 0,
        };
        // SAFETY: all buffers are kept until the stream has been waited for.
        let time = unsafe { self.time(Work::Zero, &params)? };
        section.ratio("zero", rate(bytes, time), "GB/s written", driver / time, MEMSET);
        stream.synchronize()?;
        let step = targets.len().div_ceil(SAMPLES);
        let mut nonzero = 0;
        for &frame in targets.iter().step_by(step) {
            for piece in &list {
                let at = piece.base + u64::from(frame) * piece.frame_stride;
                nonzero += usize::from(gpu.read(at, piece.bytes as usize)?.iter().any(|&byte| byte != 0));
            }
        }
        section.none("bytes of zero", nonzero, "tiles are not zero");
        Ok(())
    }

    /// Measures stores and loads of rows of one layer in scattered slots, unconverted and as codes,
    /// and compares frames and rows with the host's, bit by bit.
    fn stores(&self, section: &mut Section) -> Outcome<()> {
        const HEADS: usize = 4;
        const ROW: usize = HEADS * 128;
        const BLOCK_TOKENS: usize = 16;
        let (gpu, frames) = (self.gpu, self.shape.frames);
        let mut list: Vec<i64> = (0..(frames * BLOCK_TOKENS) as i64).collect();
        let mut rng = Rng(78);
        (1..list.len()).rev().for_each(|at| list.swap(at, rng.below(at + 1)));
        list.truncate(self.shape.tokens);
        let tokens = list.len();
        let (slots, buffer) = (gpu.upload(&list)?, || gpu.buffer(tokens * ROW * 2));
        let (k, v) = (buffer()?, buffer()?);
        let stride = ROW * 2;
        let (k_at, v_at) = (k.address(), v.address());
        let rows = DeviceRows { dtype: Dtype::Bf16, k: k_at, v: v_at, k_stride: stride, v_stride: stride };
        let rows = Rows { rows, slots: slots.address(), tokens };
        let ordinary = [1, 2].map(|seed| numbers(tokens * ROW, seed));
        let mut kinds = vec![(Dtype::Bf16, Scales::Unit, "bf16".to_owned())];
        for (dtype, code) in [(Dtype::Fp8E4M3, "e4m3"), (Dtype::Fp8E5M2, "e5m2"), (Dtype::Int8, "int8")] {
            let per_head = || vec![0.01f32; HEADS].into();
            let fixed = Scales::PerHead { k: per_head(), v: per_head() };
            kinds.push((dtype, fixed, format!("bf16 as {code}, static scales")));
            kinds.push((dtype, Scales::PerTokenHead, format!("bf16 as {code}, dynamic scales")));
        }
        for (dtype, scales, what) in kinds {
            let layout = KvLayout::builder().layers(1).kv_heads(HEADS).head_dim(ROW / HEADS);
            let layout = layout.block_tokens(BLOCK_TOKENS).dtype(dtype).scales(scales).build()?;
            let storage = CudaStorage::new(&gpu.device, layout.clone(), frames, frames)?;
            let host = HostStorage::new(layout.clone(), frames, frames)?;
            for (buffer, numbers) in [&k, &v].into_iter().zip(&ordinary) {
                gpu.write(buffer.address(), &bytes_of(numbers))?;
            }
            self.move_rows(section, &storage, Way::In, &rows, &what)?;
            self.stream.synchronize()?;
            // SAFETY: no one else uses the storage.
            unsafe { host.store(0, Elements::from(&ordinary[0]), Elements::from(&ordinary[1]), &list)? };
            let all = [Run { start: FrameId(0), len: frames as u32 }];
            let mut packed = [(); 2].map(|()| vec![0; frames * layout.packed_bytes()]);
            // SAFETY: as above.
            unsafe { (storage.pack(&all, &mut packed[0])?, host.pack(&all, &mut packed[1])?) };
            let [got, want] = packed.each_ref().map(|packed| packed.chunks(layout.packed_bytes()));
            let wrong = got.zip(want).filter(|(got, want)| got != want).count();
            section.none(format!("frames of {what}"), wrong, "frames differ from the host's");

            // Not what was stored: the load must write it.
            k.fill(&self.stream, 0)?;
            v.fill(&self.stream, 0)?;
            self.move_rows(section, &storage, Way::Out, &rows, &what)?;
            let mut loaded = [(); 2].map(|()| vec![bf16::ZERO; tokens * ROW]);
            let [k_host, v_host] = &mut loaded;
            // SAFETY: as above.
            unsafe { host.load(0, &list, ElementsMut::from(k_host), ElementsMut::from(v_host))? };
            let mut wrong = 0;
            for (buffer, loaded) in [&k, &v].into_iter().zip(&loaded) {
                let (got, want) = (buffer.download(&self.stream)?, bytes_of(loaded));
                wrong += got.chunks(2).zip(want.chunks(2)).filter(|(got, want)| got != want).count();
            }
            section.none(format!("values of {what}"), wrong, "values differ from the host's");
            storage.close()?;
        }
        Ok(())
    }

    /// Measures the pool's kernel and, for one pair of types, others in the same shape.
    fn move_rows(
        &self,
        section: &mut Section,
        storage: &CudaStorage,
        way: Way,
        rows: &Rows,
        what: &str,
    ) -> Outcome<()> {
        let Self { gpu, shape, stream, shared, .. } = self;
        let Rows { rows, slots, tokens } = *rows;
        let (verb, work, kernel) = match way {
            Way::In => ("store", Work::Quantise, "kvp_probe_quantise"),
            Way::Out => ("load", Work::Dequantise, "kvp_probe_dequantise"),
        };
        let (what, layout) = (format!("{verb}, {what}"), storage.layout());
        // Bytes read and written.
        let bytes = 2 * tokens * layout.row_elements() * (rows.dtype.bytes() + layout.dtype().bytes());
        let mut fixed = None;
        if layout.dtype() == Dtype::Int8 {
            let params = storage.row_params(0, way, rows, slots, tokens)?;
            let ctas = gpu.device.kernels().rule(work).shape(params.jobs(), gpu.multiprocessors).ctas;
            let measure = |name: &str| {
                let kernel = gpu.probe(name)?;
                // SAFETY: rows, slots and frames are kept until the stream has been waited for.
                let launched = || unsafe { launch(stream, &kernel, ctas, &params) };
                Outcome::Ok(rate(bytes, gpu.time(stream, shape.times, launched)?))
            };
            let alone = measure(kernel)?;
            fixed = Some(alone);
            if way == Way::In {
                let (got, what) =
                    (measure("kvp_probe_quantise_row_first")?, format!("{what}, each row first"));
                section.ratio(what, got, "GB/s", got / alone, FIXED);
            }
        }
        // The checked bytes are those of the pool's own kernel, which is launched last.
        let time = gpu.time(stream, shape.times, || {
            // SAFETY: as above; slots are unique, and no one else uses the storage.
            unsafe {
                match way {
                    Way::In => storage.store_on(shared, 0, rows, slots, tokens),
                    Way::Out => storage.load_on(shared, 0, rows, slots, tokens),
                }
            }
        })?;
        let got = rate(bytes, time);
        if let Some(fixed) = fixed {
            section.ratio(format!("{what}, over {FIXED}"), got, "GB/s", got / fixed, FIXED);
        }
        section.ratio(what, got, "GB/s", got / self.linear, LINEAR);
        Ok(())
    }
}

/// Rows on the device, and their slots.
struct Rows {
    rows: DeviceRows,
    slots: u64,
    tokens: usize,
}
