//! Measures the throughput of the pool's kernels that move bytes, relative to the best linear copy
//! on this device.

use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream, result};
use half::bf16;
use kvpool::storage::{Dtype, Elements, ElementsMut, HostStorage, KvLayout, Scales, Storage};
use kvpool::{FrameId, Run};
use kvpool_cuda::launch::{MOVING_CTAS, Most, Params, Rule, Work};
use kvpool_cuda::params::{
    CopyParams, Lane, Move, PackParams, Piece, QuantParams, RowsParams, SCALES_PER_HEAD,
    SCALES_PER_TOKEN_HEAD, Way, ZeroParams, code_type, row_type,
};
use kvpool_testkit::rng::Rng;

use crate::Options;
use crate::gpu::{Buffer, Gpu, Outcome, ProbeParams, launch, layer_first};
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

/// Numbers of CTAs of a multiprocessor that convert rows, to be compared.
const CONVERTING_CTAS: [u32; 3] = [4, 6, 8];

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

/// Returns places of tiles in a range of this many bytes, other than those at multiples of an eighth.
fn samples_again(bytes: usize, tile: usize) -> impl Iterator<Item = u64> {
    (0..SAMPLES).map(move |at| ((bytes / tile - 1) * at / SAMPLES * tile) as u64)
}

/// Returns a rate in GB/s.
fn rate(bytes: usize, milliseconds: f64) -> f64 {
    bytes as f64 / 1e6 / milliseconds
}

struct Bench<'a> {
    gpu: &'a Gpu,
    shape: Shape,
    stream: Arc<CudaStream>,
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
    let (stream, _) = gpu.stream()?;
    let arena = gpu.buffer(shape.frames * shape.block_bytes())?;
    arena.fill(&stream, 0x3C)?;
    let mut bench = Bench { gpu, shape, stream, arena, linear: 0.0 };
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
        let driver = gpu.time(stream, shape.times, || {
            // SAFETY: the two halves of the arena.
            unsafe { result::memcpy_dtod_async(to, from, bytes, stream.cu_stream())? };
            Ok(())
        })?;
        section.figure("driver's copy, linear", rate(2 * bytes, driver), "GB/s");
        self.linear = rate(2 * bytes, driver);
        let kernel = gpu.probe("kvp_probe_copy")?;
        for share in [2, 4, 8, 16] {
            let grid = share * gpu.multiprocessors;
            let params = ProbeParams { from, to, vectors: bytes as u64 / 16, rounds: 1, reserved: 0 };
            let time = gpu.time(stream, shape.times, || {
                // SAFETY: the two halves of the arena.
                unsafe { launch(stream, &kernel, grid, &params) }
            })?;
            section.figure(format!("a linear kernel, {grid} CTAs"), rate(2 * bytes, time), "GB/s");
            self.linear = self.linear.max(rate(2 * bytes, time));
        }
        section.figure(LINEAR, self.linear, "GB/s");
        // The baseline, too, must have copied.
        stream.synchronize()?;
        let tile = shape.tile_bytes as usize;
        let places = (0..SAMPLES).map(|at| (bytes / tile * at / SAMPLES * tile) as u64);
        let samples = sample::plant(gpu, tile, places.map(|at| (from + at, to + at)))?;
        // SAFETY: the two halves of the arena.
        unsafe { result::memcpy_dtod_async(to, from, bytes, stream.cu_stream())? };
        stream.synchronize()?;
        let mut missing = sample::missing(gpu, &samples)?;
        let samples = sample::plant(gpu, tile, samples_again(bytes, tile).map(|at| (from + at, to + at)))?;
        let params = ProbeParams { from, to, vectors: bytes as u64 / 16, rounds: 1, reserved: 0 };
        // SAFETY: as above.
        unsafe { launch(stream, &kernel, 8 * gpu.multiprocessors, &params)? };
        stream.synchronize()?;
        missing += sample::missing(gpu, &samples)?;
        section.check("bytes of the linear copies", missing == 0, format!("{missing} tiles differ"));
        Ok(())
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
        let layers = layer_first(arena.address(), shape.planes, shape.frames, shape.tile_bytes);
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
                let time = gpu.time(stream, shape.times, || {
                    // SAFETY: pieces, moves and arena are kept until the stream has been waited
                    // for.
                    unsafe { gpu.launch(stream, work, &params) }
                })?;
                best = best.min(time);
                let (rule, got) = (work.rule(gpu.device.has_bulk()), rate(2 * shape.payload(), time));
                let ctas = rule.shape(params.jobs(), gpu.multiprocessors).ctas;
                let what = format!("moves, {name}, {} on {ctas} CTAs", rule.kernel);
                section.ratio(what, got, "GB/s", got / self.linear, LINEAR);
            }
            stream.synchronize()?;
            let missing = sample::missing(gpu, &samples)?;
            section.check(
                format!("bytes moved, {name}"),
                missing == 0,
                format!("{missing} of {} tiles differ", samples.len()),
            );
            let kib = shape.block_bytes() / 1024;
            section.figure(format!("{} blocks of {kib} KiB moved, {name}", shape.moved), best, "ms");
        }
        Ok(())
    }

    fn packs(&self, section: &mut Section) -> Outcome<()> {
        let Self { gpu, shape, stream, arena, .. } = self;
        let count = shape.moved / 2;
        let pieces = layer_first(arena.address(), shape.planes, shape.frames, shape.tile_bytes);
        let sources: Vec<u32> = self.moves().iter().take(count).map(|step| step.src).collect();
        let (list, block) = (pieces, shape.block_bytes());
        let (n_pieces, pieces, frames) = (list.len() as u32, gpu.upload(&list)?, gpu.upload(&sources)?);
        let packed = gpu.buffer(count * block)?;
        let packed_at = packed.address();
        let params = |way| PackParams {
            pieces: pieces.address(),
            frames: frames.address(),
            packed: packed.address(),
            packed_stride: shape.block_bytes() as u64,
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
            let time = gpu.time(stream, shape.times, || {
                // SAFETY: all buffers are kept until the stream has been waited for.
                unsafe { gpu.launch(stream, way.work(), &params(way)) }
            })?;
            let got = rate(2 * count * shape.block_bytes(), time);
            section.ratio(what, got, "GB/s", got / self.linear, LINEAR);
            stream.synchronize()?;
            let missing = sample::missing(gpu, &samples)?;
            let detail = format!("{missing} of {} tiles differ", samples.len());
            section.check(format!("bytes of {what}"), missing == 0, detail);
        }
        Ok(())
    }

    fn zeroes(&self, section: &mut Section) -> Outcome<()> {
        let Self { gpu, shape, stream, arena, .. } = self;
        let pieces = layer_first(arena.address(), shape.planes, shape.frames, shape.tile_bytes);
        let targets: Vec<u32> = self.moves().iter().map(|step| step.dst).collect();
        let list = pieces;
        // Poison first: the frames may be zero already.
        arena.fill(stream, 0xA5)?;
        let (n_pieces, pieces, frames) = (list.len() as u32, gpu.upload(&list)?, gpu.upload(&targets)?);
        let bytes = shape.payload();
        let driver = gpu.time(stream, shape.times, || {
            // SAFETY: inside the arena.
            unsafe { result::memset_d8_async(arena.address(), 0, bytes, stream.cu_stream())? };
            Ok(())
        })?;
        let params = ZeroParams {
            pieces: pieces.address(),
            frames: frames.address(),
            n_pieces,
            n_frames: shape.moved as u32,
            unit: 16,
            reserved: 0,
        };
        let time = gpu.time(stream, shape.times, || {
            // SAFETY: all buffers are kept until the stream has been waited for.
            unsafe { gpu.launch(stream, Work::Zero, &params) }
        })?;
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
        section.check("bytes of zero", nonzero == 0, format!("{nonzero} tiles are not zero"));
        Ok(())
    }

    /// Measures stores and loads of rows of one layer, in scattered slots.
    ///
    /// The rows have 4 heads of 128 elements in bf16, and are stored unconverted or as codes.
    fn stores(&self, section: &mut Section) -> Outcome<()> {
        const HEADS: u32 = 4;
        const HEAD_DIM: u32 = 128;
        const BLOCK_TOKENS: u32 = 16;
        let Self { gpu, shape, stream, arena, .. } = self;
        let tokens = shape.tokens;
        let slots_max = shape.frames * BLOCK_TOKENS as usize;
        let mut slots: Vec<i64> = (0..slots_max as i64).collect();
        let mut rng = Rng(78);
        (1..slots.len()).rev().for_each(|at| slots.swap(at, rng.below(at + 1)));
        slots.truncate(tokens);
        let tokens = slots.len();
        let row_in = HEADS * HEAD_DIM * 2;
        let plane = |index: u64| arena.address() + index * (shape.frames * shape.tile_bytes as usize) as u64;
        let lane = |index| Lane { base: plane(index), frame_stride: u64::from(shape.tile_bytes) };
        let list = slots;
        let slots = gpu.upload(&list)?;
        let (k, v) = (gpu.buffer(tokens * row_in as usize)?, gpu.buffer(tokens * row_in as usize)?);
        // Byte pattern of ordinary numbers.
        k.fill(stream, 0x3E)?;
        v.fill(stream, 0x3E)?;
        let scales = gpu.upload(&vec![0.01f32; HEADS as usize])?;
        let rows = |way, row_bytes| RowsParams {
            k: k.address(),
            v: v.address(),
            k_stride: u64::from(row_in),
            v_stride: u64::from(row_in),
            slots: slots.address(),
            k_lane: lane(0),
            v_lane: lane(1),
            row_bytes,
            block_tokens: BLOCK_TOKENS,
            n_tokens: tokens as u32,
            unit: 16,
            way,
            row_type: row_type(Dtype::Bf16).expect("bf16 can be converted"),
        };
        let inside = |half: u64, slot: i64| {
            let (frame, offset) =
                (slot as u64 / u64::from(BLOCK_TOKENS), slot as u64 % u64::from(BLOCK_TOKENS));
            plane(half) + frame * u64::from(shape.tile_bytes) + offset * u64::from(row_in)
        };
        for (way, what) in [(Way::In, "store, bf16"), (Way::Out, "load, bf16")] {
            let rows_of =
                list.iter().enumerate().step_by(tokens.div_ceil(SAMPLES)).flat_map(|(token, &slot)| {
                    [(0, k.address()), (1, v.address())].map(|(half, base)| {
                        let (outside, inside) = (base + token as u64 * u64::from(row_in), inside(half, slot));
                        if way == Way::In { (outside, inside) } else { (inside, outside) }
                    })
                });
            let samples = sample::plant(gpu, row_in as usize, rows_of)?;
            let time = gpu.time(stream, shape.times, || {
                // SAFETY: all buffers are kept until the stream has been waited for; slots are
                // unique.
                unsafe { gpu.launch(stream, Work::Rows, &rows(way, row_in)) }
            })?;
            let got = rate(4 * tokens * row_in as usize, time);
            section.ratio(what, got, "GB/s", got / self.linear, LINEAR);
            stream.synchronize()?;
            let missing = sample::missing(gpu, &samples)?;
            let detail = format!("{missing} of {} rows differ", samples.len());
            section.check(format!("bytes of {what}"), missing == 0, detail);
        }
        let ordinary = [
            numbers(tokens * (HEADS * HEAD_DIM) as usize, 1),
            numbers(tokens * (HEADS * HEAD_DIM) as usize, 2),
        ];
        for (dtype, code) in [(Dtype::Fp8E4M3, "e4m3"), (Dtype::Fp8E5M2, "e5m2"), (Dtype::Int8, "int8")] {
            for (mode, scaled) in [(SCALES_PER_HEAD, "static"), (SCALES_PER_TOKEN_HEAD, "dynamic")] {
                let params = QuantParams {
                    rows: rows(Way::In, HEADS * HEAD_DIM),
                    k_scales: scales.address(),
                    v_scales: scales.address(),
                    k_scale_lane: lane(2),
                    v_scale_lane: lane(3),
                    heads: HEADS,
                    head_dim: HEAD_DIM,
                    mode,
                    code_type: code_type(dtype).expect("a type of codes"),
                };
                stream.synchronize()?;
                for (buffer, numbers) in [&k, &v].into_iter().zip(&ordinary) {
                    gpu.write(buffer.address(), &bytes_of(numbers))?;
                }
                for (work, verb, what) in
                    [(Work::Quantise, "quantise", "store"), (Work::Dequantise, "dequantise", "load")]
                {
                    if work == Work::Dequantise {
                        // Not what was stored: the load must write it.
                        stream.synchronize()?;
                        k.fill(stream, 0)?;
                        v.fill(stream, 0)?;
                        stream.synchronize()?;
                    }
                    // With the pool's own kernel, or another one in the same shape.
                    let shape_of = work.rule(false).shape(params.jobs(), gpu.multiprocessors);
                    let time = |launch: &dyn Fn() -> Outcome<()>| {
                        let time = gpu.time(stream, shape.times, launch)?;
                        Outcome::Ok(rate(3 * tokens * row_in as usize, time))
                    };
                    let measure = |other: Option<CudaFunction>| {
                        // SAFETY: as above.
                        time(&|| unsafe {
                            match &other {
                                Some(other) => launch(stream, other, shape_of.ctas, &params),
                                None => gpu.launch(stream, work, &params),
                            }
                        })
                    };
                    // By the number of CTAs of a multiprocessor.
                    for ctas in CONVERTING_CTAS {
                        let kernel = work.rule(false).kernel;
                        let most = Most::PerMultiprocessor(ctas);
                        let shape =
                            Rule { most, ..work.rule(false) }.shape(params.jobs(), gpu.multiprocessors);
                        // SAFETY: as above.
                        let got = time(&|| unsafe { gpu.launch_as(stream, kernel, shape, &params) })?;
                        let what =
                            format!("{what}, bf16 as {code}, {scaled} scales, {ctas} CTAs a multiprocessor");
                        section.ratio(what, got, "GB/s", got / self.linear, LINEAR);
                    }
                    let what = format!("{what}, bf16 as {code}, {scaled} scales");
                    let fixed = match dtype {
                        Dtype::Int8 => Some(measure(Some(gpu.probe(&format!("kvp_probe_{verb}"))?))?),
                        _ => None,
                    };
                    // The checked bytes are those of the pool's own kernel, which is launched last.
                    let got = measure(None)?;
                    if let Some(fixed) = fixed {
                        section.ratio(format!("{what}, over {FIXED}"), got, "GB/s", got / fixed, FIXED);
                    }
                    section.ratio(what, got, "GB/s", got / self.linear, LINEAR);
                }
                stream.synchronize()?;
                // The same on the host: codes, scales and values are equal to the bit.
                let per_head = || vec![0.01f32; HEADS as usize].into();
                let kinds = if mode == SCALES_PER_HEAD {
                    Scales::PerHead { k: per_head(), v: per_head() }
                } else {
                    Scales::PerTokenHead
                };
                let layout =
                    KvLayout::builder().layers(1).kv_heads(HEADS as usize).head_dim(HEAD_DIM as usize);
                let layout = layout.block_tokens(BLOCK_TOKENS as usize).dtype(dtype).scales(kinds).build()?;
                let host = HostStorage::new(layout.clone(), shape.frames, shape.frames)?;
                // SAFETY: no one else uses the storage.
                unsafe { host.store(0, Elements::from(&ordinary[0]), Elements::from(&ordinary[1]), &list)? };
                let mut loaded = [(); 2].map(|()| vec![bf16::ZERO; tokens * (HEADS * HEAD_DIM) as usize]);
                let [k_host, v_host] = &mut loaded;
                // SAFETY: as above.
                unsafe { host.load(0, &list, ElementsMut::from(k_host), ElementsMut::from(v_host))? };
                let mut wrong = 0;
                for (buffer, loaded) in [&k, &v].into_iter().zip(&loaded) {
                    let (got, want) = (buffer.read()?, bytes_of(loaded));
                    wrong += got.chunks(2).zip(want.chunks(2)).filter(|(got, want)| got != want).count();
                }
                let what = format!("values of bf16 as {code}, {scaled} scales");
                section.check(what, wrong == 0, format!("{wrong} values differ from the host's"));
                let mut packed = vec![0; shape.frames * layout.packed_bytes()];
                let all = [Run { start: FrameId(0), len: shape.frames as u32 }];
                // SAFETY: as above.
                unsafe { host.pack(&all, &mut packed)? };
                let (row, scale_row) = ((HEADS * HEAD_DIM) as usize, 4 * HEADS as usize);
                let mut parts = vec![(0, 0, row), (1, BLOCK_TOKENS as usize * row, row)];
                if mode == SCALES_PER_TOKEN_HEAD {
                    let scales_at = 2 * BLOCK_TOKENS as usize * row;
                    parts.push((2, scales_at, scale_row));
                    parts.push((3, scales_at + BLOCK_TOKENS as usize * scale_row, scale_row));
                }
                let mut wrong = 0;
                for (index, packed_at, row) in parts {
                    let there = gpu.read(plane(index), shape.frames * shape.tile_bytes as usize)?;
                    wrong += list
                        .iter()
                        .filter(|&&slot| {
                            let (frame, offset) = (
                                slot as usize / BLOCK_TOKENS as usize,
                                slot as usize % BLOCK_TOKENS as usize,
                            );
                            let got = &there[frame * shape.tile_bytes as usize + offset * row..][..row];
                            got != &packed[frame * layout.packed_bytes() + packed_at + offset * row..][..row]
                        })
                        .count();
                }
                let what = format!("codes and scales of bf16 as {code}, {scaled} scales");
                section.check(what, wrong == 0, format!("{wrong} rows differ from the host's"));
            }
        }
        stream.synchronize()?;
        Ok(())
    }
}
