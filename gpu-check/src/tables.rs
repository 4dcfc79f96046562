//! An engine's kernel that reads block tables on the device, while the pool is defragmented and resized
//! and sequences are preempted: the bytes that it finds are those that were stored.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::DeviceRepr;
use half::bf16;
use kvpool::compact::DefragOptions;
use kvpool::storage::{Dtype, Elements, KvLayout, Storage as _};
use kvpool::{Order, Pool, Sequence, SequenceError, SequenceId};
use kvpool_cuda::{CudaConfig, CudaStorage, DeviceTable};
use kvpool_testkit::rng::Rng;

use crate::Options;
use crate::gpu::{self, Gpu, Outcome, launch};
use crate::report::Section;

/// Bytes of a block that the kernel reads.
const READ: usize = 16;
/// Time within which a block must move.
const MOVES_WITHIN: Duration = Duration::from_secs(5);

/// Parameters of the kernel, as in `kernels/probes.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct GatherParams {
    table: u64,
    lengths: u64,
    base: u64,
    frame_stride: u64,
    to: u64,
    rows: u32,
    columns: u32,
    block_tokens: u32,
    reserved: u32,
}

const _: () = assert!(size_of::<GatherParams>() == 56);

// SAFETY: C layout without references, identical on the device.
unsafe impl DeviceRepr for GatherParams {}

/// Takes steps beside a thread that moves the pool's blocks.
///
/// # Errors
/// An error of the device or of the pool.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    let (steps_min, rows, blocks) = if options.quick { (60, 6, 512) } else { (1500, 32, 4096) };
    let layout = KvLayout::builder().layers(1).kv_heads(2).head_dim(64).dtype(Dtype::Bf16).block_tokens(16);
    let layout = layout.build()?;
    let config = CudaConfig::default().segment_frames(blocks / 16);
    let storage = CudaStorage::with_config(&gpu.device, layout.clone(), blocks + 1, blocks + 1, config)?;
    let k = storage.planes()?.tensors().next().map(|tensor| tensor.data.addr() as u64);
    let base = k.ok_or("a storage without planes")?;
    let pool = Pool::builder(layout.clone()).blocks(blocks).storage(Arc::new(storage)).build()?;
    let (is_over, has_moved) = (AtomicBool::new(false), AtomicBool::new(false));
    let (stepped, moved) = std::thread::scope(|scope| {
        let moving = scope
            .spawn(|| move_blocks(&pool, blocks, &is_over, &has_moved).map_err(|error| error.to_string()));
        let stepped = step(gpu, &pool, base, (steps_min, rows, blocks), &has_moved);
        is_over.store(true, Ordering::Relaxed);
        Outcome::Ok((stepped?, moving.join().map_err(|_| "the moves panicked")??))
    })?;
    let Stepped { steps, preempted, read, wrong } = stepped;
    let Moved { blocks: moved, resizes } = moved;
    section.figure("steps", steps as f64, "steps");
    section.check("blocks moved beside the steps", moved > 0, format!("{moved} blocks"));
    section.check("resizes beside the steps", resizes > 1, format!("{resizes} resizes"));
    section.check("sequences preempted", preempted > 0, format!("{preempted} times"));
    let what = "bytes that the kernel found by the tables";
    section.check(what, wrong == 0 && read > 0, format!("{wrong} of {read} blocks differ"));
    pool.audit()?;
    Ok(())
}

struct Moved {
    blocks: usize,
    resizes: usize,
}

/// Defragments and resizes until the steps are over.
fn move_blocks(pool: &Pool, blocks: usize, is_over: &AtomicBool, has_moved: &AtomicBool) -> Outcome<Moved> {
    let runtime = gpu::runtime()?;
    let mut moved = Moved { blocks: 0, resizes: 0 };
    while !is_over.load(Ordering::Relaxed) {
        for total in [blocks / 2, blocks] {
            // Refused if the used blocks do not fit.
            if let Ok(report) = runtime.block_on(pool.resize(total)) {
                moved.blocks += report.moved.moved_blocks;
                moved.resizes += 1;
            }
            let options = DefragOptions::new().order(Order(4)).fragmentation_penalty(0);
            moved.blocks += runtime.block_on(pool.defragment_with(options))?.moved_blocks;
        }
        has_moved.fetch_or(moved.blocks > 0, Ordering::Relaxed);
        std::thread::yield_now();
    }
    Ok(moved)
}

struct Stepped {
    steps: usize,
    preempted: usize,
    read: usize,
    wrong: usize,
}

/// Returns K of a token: numbers that differ between sequences and tokens.
fn row(layout: &KvLayout, id: u64, token: usize) -> impl Iterator<Item = bf16> {
    let elements = layout.row_elements();
    (0..elements).map(move |at| bf16::from_bits((id as usize * 8191 + token * 31 + at * 7) as u16 & 0x7F7F))
}

/// Decodes sequences, and preempts one now and then, for some steps, and until a block has moved.
fn step(
    gpu: &Gpu,
    pool: &Pool,
    base: u64,
    (steps_min, rows, blocks): (usize, usize, usize),
    has_moved: &AtomicBool,
) -> Outcome<Stepped> {
    let (layout, (stream, shared)) = (pool.layout().clone(), gpu.stream()?);
    let (block_tokens, mut rng) = (layout.block_tokens(), Rng(23));
    let columns = blocks / rows;
    let mut table = DeviceTable::new(&gpu.device, rows, columns, 1)?;
    let found = gpu.buffer(rows * columns * READ)?;
    let kernel = gpu.probe("kvp_probe_gather")?;
    let runtime = gpu::runtime()?;
    let mut next_id = 0;
    let mut open = || -> Outcome<Sequence> {
        next_id += 1;
        Ok(pool.sequence(SequenceId(next_id)).open()?)
    };
    let mut sequences = (0..rows).map(|_| open()).collect::<Outcome<Vec<Sequence>>>()?;
    let mut done = Stepped { steps: 0, preempted: 0, read: 0, wrong: 0 };
    let begin = Instant::now();
    while done.steps < steps_min || !has_moved.load(Ordering::Relaxed) && begin.elapsed() < MOVES_WITHIN {
        let mut batch = pool.begin_batch_on(&shared)?;
        for sequence in &mut sequences {
            // A quarter of the pool; a preempted sequence begins again, with other tokens.
            if sequence.len() > columns * block_tokens / 4 || rng.below(64) == 0 && !sequence.is_empty() {
                *sequence = open()?;
                done.preempted += 1;
                continue;
            }
            let (from, tokens) = (sequence.len(), 1 + rng.below(3 * block_tokens));
            match batch.append(sequence, tokens) {
                // No room for now.
                Err(SequenceError::Alloc(_)) => continue,
                appended => appended?,
            };
            let id = sequence.id().0;
            let k: Vec<bf16> = (from..from + tokens).flat_map(|token| row(&layout, id, token)).collect();
            batch.store(sequence, 0, from..from + tokens, Elements::from(&k), Elements::from(&k))?;
        }
        // Rows of sequences without tokens are empty.
        table.fill(&shared, &batch, &sequences)?;
        found.fill(&stream, 0xEE)?;
        let params = GatherParams {
            table: table.entries(),
            lengths: table.lengths(),
            base,
            frame_stride: (block_tokens * layout.row_elements() * size_of::<bf16>()) as u64,
            to: found.address(),
            rows: rows as u32,
            columns: columns as u32,
            block_tokens: block_tokens as u32,
            reserved: 0,
        };
        // SAFETY: the table and the buffer are kept until the stream has been waited for, and the batch
        // keeps the frames of its table.
        unsafe { launch(&stream, &kernel, gpu.multiprocessors, &params)? };
        let ended = batch.finish_on(&shared)?;
        gpu::wait(&runtime, ended)?;
        let got = found.read()?;
        for (at, sequence) in sequences.iter().enumerate() {
            for column in 0..sequence.len().div_ceil(block_tokens) {
                let want = row(&layout, sequence.id().0, column * block_tokens).take(READ / 2);
                let want: Vec<u8> = want.flat_map(|value| value.to_le_bytes()).collect();
                done.read += 1;
                done.wrong += usize::from(got[(at * columns + column) * READ..][..READ] != want);
            }
        }
        done.steps += 1;
    }
    Ok(done)
}
