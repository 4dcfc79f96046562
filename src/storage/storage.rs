//! The trait of all storage backends.

use std::any::Any;
use std::fmt;

use crate::error::{GrowError, Invalid, StorageError};
use crate::ids::{DeviceId, FrameId, Run};

use super::exchange::{check_form, count, take};
use super::{
    CopyDone, DeviceStream, Elements, ElementsMut, FrameMove, HostTile, KvLayout, StoragePlanes, check,
};

/// Default of [`Storage::wave_bytes`]: about a millisecond on host memory.
pub const WAVE_BYTES: usize = 8 << 20;

/// What a storage lacks whose memory the processor cannot reach.
const ON_HOST: &str = "memory within the processor's reach";

/// Bytes per transfer, but at least one frame.
const CHUNK_BYTES: usize = 8 << 20;

/// The bytes of a pool's frames on one device.
///
/// Each operation either succeeds in full, or returns an error and moves no byte.
///
/// # The frame rule
///
/// While an operation runs, no one else writes a frame that it reads or writes, and no one else
/// reads a frame that it writes. For [`store`](Self::store) and [`load`](Self::load) the rule
/// applies to slots instead of whole frames: two threads may store to different slots of one frame.
/// The caller must ensure this by owning the frames; a violation is a data race.
pub trait Storage: Send + Sync + fmt::Debug {
    /// Returns the layout of the frames.
    fn layout(&self) -> &KvLayout;

    /// Returns the device that holds the memory.
    fn device(&self) -> DeviceId;

    /// Returns the number of usable frames.
    fn frames(&self) -> usize;

    /// Returns the maximum number of frames, up to which [`grow`](Self::grow) works.
    ///
    /// The base addresses of planes never change.
    fn frames_max(&self) -> usize;

    /// Returns the planes of each layer's K and V as tensors, with an owner of their memory.
    ///
    /// Addresses never change. [`StoragePlanes`] says which frames are accessible, and for how
    /// long. To access them is unsafe, and subject to [the frame rule](#the-frame-rule): no other
    /// access to the same slots, from the pool or through a tile, may conflict.
    ///
    /// # Errors
    /// [`StorageError::Unsupported`] if the backend does not give out its memory, which is the
    /// default.
    fn planes(&self) -> Result<StoragePlanes, StorageError> {
        Err(StorageError::Unsupported { device: self.device(), what: "planes" })
    }

    /// Returns the memory of one frame in one layer, where the processor can reach it.
    ///
    /// # Errors
    /// [`StorageError::Unsupported`] if the processor cannot, which is the default;
    /// [`StorageError::Invalid`] if the layer or the frame does not exist.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), for every access through the result.
    unsafe fn tile(&self, layer: usize, frame: FrameId) -> Result<HostTile, StorageError> {
        let _ = (layer, frame);
        Err(StorageError::Unsupported { device: self.device(), what: ON_HOST })
    }

    /// Makes frames `0..total` usable; the contents of usable frames do not change.
    ///
    /// A `total` below [`frames`](Self::frames) has no effect. Several threads may call this at
    /// once.
    ///
    /// # Errors
    /// [`GrowError::TooLarge`] above [`frames_max`](Self::frames_max); [`GrowError::Memory`] if
    /// memory is exhausted.
    fn grow(&self, total: usize) -> Result<(), GrowError>;

    /// Makes frames from `total` on unusable, and returns their memory to the system.
    ///
    /// Whole pages or whole mappings are returned. Other frames keep their bytes. A `total` of
    /// [`frames`](Self::frames) or more has no effect. [`grow`](Self::grow) makes the frames usable
    /// again, with unspecified contents. No other thread may grow or shrink this storage at the
    /// same time.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), for the frames from `total` on.
    unsafe fn shrink(&self, total: usize);

    /// Stores one token's K and V in one layer for each slot.
    ///
    /// `k` and `v` are `[slots.len()][kv_heads][head_dim]`; rows of negative slots are skipped.
    /// Elements have the layout's dtype, or f32, f16 or bf16 if the layout is quantised; they are
    /// then quantised here. `v` is [`Elements::none`] in a latent layout.
    ///
    /// # Errors
    /// A layer out of range, a wrong dtype or length, a slot out of range or repeated.
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

    /// Loads one token's K and V of one layer for each slot: the inverse of [`store`](Self::store).
    ///
    /// Rows of negative slots are not written. Slots may repeat.
    ///
    /// # Errors
    /// A layer out of range, a wrong dtype or length, a slot out of range.
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

    /// Copies whole frames. A source may have several destinations.
    ///
    /// Moves have no order among each other, so that a chain a -> b -> c takes two calls.
    ///
    /// # Errors
    /// A frame out of range, a destination that is repeated or is also a source.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule).
    unsafe fn copy(&self, moves: &[FrameMove]) -> Result<(), StorageError>;

    /// Copies like [`copy`](Self::copy), possibly asynchronously, and calls `done` once at the end.
    ///
    /// `done` runs on any thread, possibly on this one before the call returns, when no access to
    /// these frames is in progress any more; its argument says whether the copy succeeded. A
    /// backend that fails may drop `done` without calling it, which counts as a failure, and is
    /// only allowed when no access is in progress any more.
    ///
    /// The default implementation copies synchronously.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), until `done` is called or dropped.
    unsafe fn copy_then(&self, moves: &[FrameMove], done: CopyDone) {
        // SAFETY: the caller keeps the frame rule.
        done(unsafe { self.copy(moves) });
    }

    /// Returns the number of bytes that compaction copies per call of
    /// [`copy_then`](Self::copy_then): [`WAVE_BYTES`] by default.
    ///
    /// While a copy is in progress, as many bytes of free blocks are held, and the copied blocks are
    /// not written; between two copies, the storage may be idle.
    fn wave_bytes(&self) -> usize {
        WAVE_BYTES
    }

    /// Returns the maximum number of copies by [`copy_then`](Self::copy_then) that compaction keeps
    /// in progress: 1 by default.
    fn waves_in_flight(&self) -> usize {
        1
    }

    /// Checks that work can be enqueued on this stream now.
    ///
    /// # Errors
    /// [`StorageError::ForeignStream`] if the stream is not of this storage's device, or the
    /// storage has no device; [`StorageError::Capturing`], [`StorageError::DeviceLost`].
    fn check_stream(&self, stream: &DeviceStream) -> Result<(), StorageError> {
        Err(StorageError::ForeignStream { stream: stream.device(), storage: self.device() })
    }

    /// Enqueues a [`copy`](Self::copy) on a stream, in order with the other work on it.
    ///
    /// # Errors
    /// As for [`copy`](Self::copy) and [`check_stream`](Self::check_stream); no work is enqueued.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), until the stream has executed the copy. Work on the same
    /// stream before and after it is ordered with it.
    unsafe fn copy_on(&self, stream: &DeviceStream, moves: &[FrameMove]) -> Result<(), StorageError> {
        let _ = moves;
        self.check_stream(stream)
    }

    /// Calls `done` once when the work enqueued on the stream so far is complete.
    ///
    /// `done` runs on any thread. An error means that the device has failed, or that the stream is
    /// not of this device; in that case, too, no work that the storage knows of is in progress. At
    /// process exit `done` may be dropped without a call.
    fn after(&self, stream: &DeviceStream, done: CopyDone) {
        done(self.check_stream(stream));
    }

    /// Waits until the work enqueued on the stream so far is complete.
    ///
    /// # Errors
    /// As for [`check_stream`](Self::check_stream).
    fn settle(&self, stream: &DeviceStream) -> Result<(), StorageError> {
        self.check_stream(stream)
    }

    /// Copies frames from another storage, on any device, whose blocks have the same packed form.
    ///
    /// The first frame of `from` goes to the first of `to`, and so on; both must have the same
    /// number of frames. Waits for the end of the copy.
    ///
    /// The default implementation copies through a host buffer, in pieces.
    ///
    /// # Errors
    /// [`StorageError::OtherForm`]; [`StorageError::Invalid`] for different numbers of frames, a run
    /// out of range, or runs of `to` that overlap; and errors of the device. After [`StorageError::LostWhileCopying`], the frames of
    /// both storages must not be used again, and the rule for them holds for good.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), for the frames of both storages.
    unsafe fn receive(&self, source: &dyn Storage, from: &[Run], to: &[Run]) -> Result<(), StorageError> {
        // SAFETY: the caller's promise.
        unsafe { through_host(self, source, from, to) }
    }

    /// Implements [`receive`](Self::receive) of a `target` that knows no direct way from this storage,
    /// if this one knows a way. `None`, the default, if not.
    ///
    /// # Errors
    /// As for [`receive`](Self::receive).
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
    /// padding.
    ///
    /// The order is by run, then by frame, then by plane in canonical order. The packed form of a
    /// block is the same for every arrangement, and for joined and separate K and V.
    ///
    /// # Errors
    /// A run out of range, a buffer of the wrong size.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule).
    unsafe fn pack(&self, runs: &[Run], out: &mut [u8]) -> Result<(), StorageError>;

    /// Unpacks frames: the inverse of [`pack`](Self::pack). Any bytes are accepted.
    ///
    /// # Errors
    /// A run out of range, runs that overlap, a buffer of the wrong size.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule).
    unsafe fn unpack(&self, runs: &[Run], bytes: &[u8]) -> Result<(), StorageError>;

    /// Fills frames with zero bytes.
    ///
    /// The bytes are written, not returned to the system, because faulting pages in again costs
    /// several times as much.
    ///
    /// # Errors
    /// A run out of range, runs that overlap.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule).
    unsafe fn zero(&self, runs: &[Run]) -> Result<(), StorageError>;

    /// Zeroes like [`zero`](Self::zero), possibly asynchronously, and calls `done` once at the end.
    ///
    /// `done` is as for [`copy_then`](Self::copy_then). The default implementation zeroes
    /// synchronously.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), until `done` is called or dropped.
    unsafe fn zero_then(&self, runs: &[Run], done: CopyDone) {
        // SAFETY: the caller keeps the frame rule.
        done(unsafe { self.zero(runs) });
    }

    /// Returns true if the calling thread reports the ends of device work, and so must not wait for
    /// such work itself.
    fn must_not_wait(&self) -> bool {
        false
    }
}

/// Checks the layouts and the runs of a [`Storage::receive`]. Returns the number of frames.
///
/// # Errors
/// [`StorageError::OtherForm`], or [`StorageError::Invalid`].
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
/// # Errors
/// As for [`Storage::receive`].
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
