//! Measures how long the host waits for notifications of the device.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use cudarc::driver::result;
use kvpool::storage::{FrameMove, KvLayout};
use kvpool::{AllocRequest, FrameId, Pool};
use kvpool_cuda::CudaStorage;

use crate::Options;
use crate::gpu::{self, Gpu, Outcome, PATIENCE, took};
use crate::report::Section;

/// Baseline: the wait for a stream that has no work.
const IDLE: &str = "an idle stream waited for";
/// Baseline: the driver's own notification.
const CALLED: &str = "a host function called";
/// Baseline: the driver's copy of a block, and the wait for it.
const COPIED: &str = "the driver's copy of a block, from the call to its end";

/// Measures events, host functions, ends of batches, and small waves.
///
/// # Errors
/// An error of the device.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    let times = if options.quick { 20 } else { 2000 };
    let called = driver(gpu, times, section)?;
    batches(gpu, times, called, section)
}

/// Measures the driver's own calls.
///
/// Returns the median time until a host function was called.
fn driver(gpu: &Gpu, times: usize, section: &mut Section) -> Outcome<Duration> {
    unsafe extern "C" fn tell(to: *mut c_void) {
        // SAFETY: the box that was passed to the launch, once.
        let to = unsafe { Box::from_raw(to.cast::<SyncSender<Instant>>()) };
        let _ = to.send(Instant::now());
    }

    let (stream, _) = gpu.stream()?;
    let event = gpu.context.new_event(None)?;
    let (mut recorded, mut asked, mut woken, mut waited) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..times {
        // The shortest way to know that a stream is idle.
        waited.push(took(|| stream.synchronize())?);
        recorded.push(took(|| event.record(&stream))?);
        stream.synchronize()?;
        let mut complete = false;
        asked.push(took(|| event.try_is_complete().map(|is| complete = is))?);
        if !complete {
            return Err("the event is not complete although its stream has been waited for".into());
        }
        let (to, from): (_, Receiver<Instant>) = sync_channel(1);
        let begin = Instant::now();
        // SAFETY: a driver that has not failed calls it once, and the box is then taken back.
        unsafe {
            result::stream::launch_host_function(
                stream.cu_stream(),
                tell,
                Box::into_raw(Box::new(to)).cast(),
            )?
        };
        woken.push(from.recv_timeout(PATIENCE)?.duration_since(begin));
    }
    let idle = Some((section.latency(IDLE, waited, None), IDLE));
    section.latency("an event recorded", recorded, idle);
    section.latency("an event queried", asked, idle);
    Ok(section.latency(CALLED, woken, None))
}

/// Measures the waits of a pool's user.
fn batches(gpu: &Gpu, times: usize, called: Duration, section: &mut Section) -> Outcome<()> {
    let layout = KvLayout::named("qwen2.5-0.5b")?;
    let storage = CudaStorage::new(&gpu.device, layout.clone(), 65, 65)?;
    let pool = Pool::builder(layout).blocks(64).storage(Arc::new(storage)).build()?;
    let (_, stream) = gpu.stream()?;
    let runtime = gpu::runtime()?;
    let (mut ended, mut handed, mut copied) = (Vec::new(), Vec::new(), Vec::new());
    runtime.block_on(async {
        for _ in 0..times {
            let batch = pool.begin_batch_on(&stream)?;
            let begin = Instant::now();
            tokio::time::timeout(PATIENCE, batch.finish_on(&stream)?).await??;
            ended.push(begin.elapsed());

            // Blocks that a batch may see go to a waiting request once the device has ended the
            // batch.
            let all = pool.allocate_owned(AllocRequest::new(64))?;
            let batch = pool.begin_batch_on(&stream)?;
            drop(all);
            let begin = Instant::now();
            batch.finish();
            drop(tokio::time::timeout(PATIENCE, pool.allocate_async(AllocRequest::new(64))).await??);
            handed.push(begin.elapsed());
        }
        Outcome::Ok(())
    })?;
    let storage = pool.storage().ok_or("a pool with storage")?;
    for _ in 0..times {
        let (to, from) = sync_channel(1);
        let begin = Instant::now();
        let moves = [FrameMove::new(FrameId(1), FrameId(2))];
        // SAFETY: these frames are unowned, and no one allocates meanwhile.
        unsafe {
            storage.copy_then(
                &moves,
                Box::new(move |outcome| {
                    let _ = to.send(outcome);
                }),
            );
        }
        from.recv_timeout(PATIENCE)??;
        copied.push(begin.elapsed());
    }
    let bytes = storage.layout().bytes_per_block();
    let (from, to) = (gpu.buffer(bytes)?, gpu.buffer(bytes)?);
    let (stream, _) = gpu.stream()?;
    let mut alone = Vec::new();
    for _ in 0..times {
        alone.push(took(|| {
            // SAFETY: both buffers have this length, and are kept until the stream has been waited for.
            unsafe { result::memcpy_dtod_async(to.address(), from.address(), bytes, stream.cu_stream())? };
            stream.synchronize()
        })?);
    }
    let called = Some((called, "a host function called, p50"));
    section.latency("a batch on an idle stream, from its finish to the notification", ended, called);
    section.latency("blocks of a batch that ends, until a waiting request gets them", handed, called);
    let alone = Some((section.latency(COPIED, alone, None), "that copy, p50"));
    section.latency("a wave of one block, from the call to its end", copied, alone);
    Ok(())
}
