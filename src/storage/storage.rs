use std::any::Any;
use std::fmt;

use crate::error::{GrowError, Invalid, StorageError};
use crate::ids::{DeviceId, FrameId, Run};

use super::exchange::{check_form, count, take};
use super::{
    CopyDone, DeviceStream, Elements, ElementsMut, FrameMove, HostTile, KvLayout, StoragePlanes, check,
};

/// Default of [`Storage::wave_bytes`]: about a millisecond in host memory.
pub const WAVE_BYTES: usize = 8 << 20;

const ON_HOST: &str = "memory within the processor's reach";

/// Bytes per transfer, but at least one frame.
const CHUNK_BYTES: usize = 8 << 20;

/// The bytes of a pool's frames on one device. Each operation either succeeds in full, or returns
/// an error and moves no byte.
///
/// # The frame rule
/// While an operation runs, no one else writes a frame that it reads or writes, and no one else
/// reads a frame that it writes. For [`store`](Self::store) and [`load`](Self::load) the rule
/// applies to slots instead of frames. The caller must ensure this by owning the frames; a
/// violation is a data race.
pub trait Storage: Send + Sync + fmt::Debug {
    /// Returns the layout of the frames.
    fn layout(&self) -> &KvLayout;

    /// Returns the device that holds the memory.
    fn device(&self) -> DeviceId;

    /// Returns the number of usable frames.
    fn frames(&self) -> usize;

    /// Returns the maximum number of frames. The base addresses of planes never change.
    fn frames_max(&self) -> usize;

    /// Returns the planes of each layer's K and V as tensors, with an owner of their memory;
    /// unsupported by default. [`StoragePlanes`] says which frames are accessible, and for how
    /// long. Access is unsafe, and subject to [the frame rule](#the-frame-rule): no other access to
    /// the same slots, from the pool or through a tile, may conflict.
    fn planes(&self) -> Result<StoragePlanes, StorageError> {
        Err(StorageError::Unsupported { device: self.device(), what: "planes" })
    }

    /// Returns the memory of one frame in one layer, if the processor can reach it (by default
    /// not).
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), for every access through the result.
    unsafe fn tile(&self, layer: usize, frame: FrameId) -> Result<HostTile, StorageError> {
        let _ = (layer, frame);
        Err(StorageError::Unsupported { device: self.device(), what: ON_HOST })
    }

    /// Makes frames `0..total` usable; the contents of usable frames do not change. A `total` below
    /// [`frames`](Self::frames) has no effect. Several threads may call this at once.
    fn grow(&self, total: usize) -> Result<(), GrowError>;

    /// Makes frames from `total` on unusable, if there are any, and returns whole pages of their
    /// memory to the system. [`grow`](Self::grow) makes them usable again, with unspecified
    /// contents. No other thread may grow or shrink this storage meanwhile.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), for the frames from `total` on.
    unsafe fn shrink(&self, total: usize);

    /// Stores one token's K and V in one layer for each slot: `k` and `v` are
    /// `[slots.len()][kv_heads][head_dim]`. Skips rows of negative slots; others must not repeat.
    /// Elements have the dtype of the layout; if that is quantised, f32, f16 and bf16 are quantised
    /// here. `v` is [`Elements::none`] in a latent layout.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), for these slots.
    unsafe fn store(
        &self,
        layer: usize,
        k: Elements<'_>,
        v: Elements<'_>,
        slots: &[i64],
    ) -> Result<(), StorageError>;

    /// Loads one token's K and V of one layer for each slot, like [`store`](Self::store). Rows of
    /// negative slots are not written. Slots may repeat.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), for these slots.
    unsafe fn load(
        &self,
        layer: usize,
        slots: &[i64],
        k: ElementsMut<'_>,
        v: ElementsMut<'_>,
    ) -> Result<(), StorageError>;

    /// Copies whole frames. A source may have several destinations, but no destination may repeat
    /// or be a source. Moves are unordered: a chain a -> b -> c takes two calls.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule).
    unsafe fn copy(&self, moves: &[FrameMove]) -> Result<(), StorageError>;

    /// Copies like [`copy`](Self::copy), possibly asynchronously (not by default), and calls `done`
    /// once at the end: on any thread, possibly on this one before the call returns, when no access
    /// to these frames is in progress. Its argument says whether the copy succeeded. A failing
    /// backend may drop `done`, which counts as a failure, but only when no access is in progress.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), until `done` is called or dropped.
    unsafe fn copy_then(&self, moves: &[FrameMove], done: CopyDone) {
        // SAFETY: the caller keeps the frame rule.
        done(unsafe { self.copy(moves) });
    }

    /// Returns the number of bytes that compaction copies per [`copy_then`](Self::copy_then).
    /// Meanwhile as many bytes of free blocks are held, and the copied blocks are not written;
    /// between two copies, the storage may be idle.
    fn wave_bytes(&self) -> usize {
        WAVE_BYTES
    }

    /// Returns the maximum number of [`copy_then`](Self::copy_then) calls of compaction in flight.
    fn waves_in_flight(&self) -> usize {
        1
    }

    /// Checks that work can be enqueued on this stream now. A storage without a device fails with
    /// [`StorageError::ForeignStream`].
    fn check_stream(&self, stream: &DeviceStream) -> Result<(), StorageError> {
        Err(StorageError::ForeignStream { stream: stream.device(), storage: self.device() })
    }

    /// Enqueues a [`copy`](Self::copy) on a stream, after [`check_stream`](Self::check_stream).
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), until the stream has executed the copy. Work on the same
    /// stream before and after it is ordered with it.
    unsafe fn copy_on(&self, stream: &DeviceStream, moves: &[FrameMove]) -> Result<(), StorageError> {
        let _ = moves;
        self.check_stream(stream)
    }

    /// Calls `done` once, on any thread, when the work enqueued on the stream so far is complete.
    /// An error means that the device has failed, or that the stream is not of this device; then,
    /// too, no work that the storage knows of is in progress. At process exit `done` may be
    /// dropped.
    fn after(&self, stream: &DeviceStream, done: CopyDone) {
        done(self.check_stream(stream));
    }

    /// Waits until the work enqueued on the stream so far is complete.
    fn settle(&self, stream: &DeviceStream) -> Result<(), StorageError> {
        self.check_stream(stream)
    }

    /// Copies frames from another storage, on any device, whose blocks have the same packed form,
    /// and waits for the end of the copy; by default in pieces, through a host buffer.
    ///
    /// The first frame of `from` is copied to the first of `to`, and so on; both must have the same
    /// number of frames, and the runs of `to` must not overlap. After
    /// [`StorageError::LostWhileCopying`], the frames of both storages must never be used again,
    /// and the rule for them holds permanently.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), for the frames of both storages.
    unsafe fn receive(&self, source: &dyn Storage, from: &[Run], to: &[Run]) -> Result<(), StorageError> {
        // SAFETY: the caller's promise.
        unsafe { through_host(self, source, from, to) }
    }

    /// Implements [`receive`](Self::receive) for a `target` that has no direct path from this
    /// storage; `None`, the default, if this storage has none either.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), for the frames of both storages.
    unsafe fn send(
        &self,
        target: &dyn Storage,
        from: &[Run],
        to: &[Run],
    ) -> Option<Result<(), StorageError>> {
        let _ = (target, from, to);
        None
    }

    /// Returns the backend itself, so that a backend of the same type can copy more directly.
    fn as_any(&self) -> &dyn Any;

    /// Packs frames into `out`, [`packed_bytes`](KvLayout::packed_bytes) per frame, without
    /// padding: by run, by frame, then by plane in canonical order. The packed form of a block is
    /// the same for every arrangement, and for joined and separate K and V.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule).
    unsafe fn pack(&self, runs: &[Run], out: &mut [u8]) -> Result<(), StorageError>;

    /// Unpacks any bytes into disjoint runs of frames: the inverse of [`pack`](Self::pack).
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule).
    unsafe fn unpack(&self, runs: &[Run], bytes: &[u8]) -> Result<(), StorageError>;

    /// Fills disjoint runs of frames with zeros. Does not return the memory to the system: faulting
    /// pages in again costs several times as much.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule).
    unsafe fn zero(&self, runs: &[Run]) -> Result<(), StorageError>;

    /// Zeroes like [`zero`](Self::zero), possibly asynchronously, and calls `done` as for
    /// [`copy_then`](Self::copy_then). The default zeroes synchronously.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), until `done` is called or dropped.
    unsafe fn zero_then(&self, runs: &[Run], done: CopyDone) {
        // SAFETY: the caller keeps the frame rule.
        done(unsafe { self.zero(runs) });
    }

    /// Returns whether the calling thread reports the ends of device work, and must not wait for
    /// them.
    fn must_not_wait(&self) -> bool {
        false
    }
}

/// Checks the layouts and runs of a [`Storage::receive`]. Returns the number of frames.
pub fn check_runs<S: Storage + ?Sized>(
    target: &S,
    source: &dyn Storage,
    from: &[Run],
    to: &[Run],
) -> Result<usize, StorageError> {
    check_form(source.layout(), target.layout())?;
    let (frames, want) = (count(from), count(to));
    if frames != want {
        return Err(Invalid::new("frames to copy", frames, want).into());
    }
    check::runs(from, source.frames())?;
    check::runs_disjoint(to, target.frames())?;
    Ok(frames)
}

/// Implements [`Storage::receive`] through a host buffer, by [`Storage::pack`] and
/// [`Storage::unpack`].
///
/// # Safety
/// The frame rule, for the frames of both storages.
pub unsafe fn through_host<S: Storage + ?Sized>(
    target: &S,
    source: &dyn Storage,
    from: &[Run],
    to: &[Run],
) -> Result<(), StorageError> {
    let frames = check_runs(target, source, from, to)?;
    let per_frame = source.layout().packed_bytes();
    let chunk = (CHUNK_BYTES / per_frame).clamp(1, frames.max(1));
    let mut buffer = vec![0; chunk * per_frame];
    // Reversed, because `take` removes from the end.
    let reversed = |runs: &[Run]| runs.iter().rev().copied().filter(|run| run.len > 0).collect::<Vec<_>>();
    let (mut from, mut to) = (reversed(from), reversed(to));
    while !from.is_empty() {
        let (here, there) = (take(&mut from, chunk), take(&mut to, chunk));
        let bytes = &mut buffer[..count(&here) * per_frame];
        // SAFETY: the caller's promise.
        unsafe {
            source.pack(&here, bytes)?;
            target.unpack(&there, bytes)?;
        }
    }
    Ok(())
}
