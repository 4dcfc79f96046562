//! Storage of blocks' bytes: the layout of K and V in memory, and the operations on it.
//!
//! This floor handles frames and slots, and does not know block ids. A *slot* is one token's place,
//! `frame * block_tokens + offset`, as i64. Negative slots are skipped, which allows padded
//! batches.
//!
//! | file | contents |
//! |---|---|
//! | `elements`, `fp8`, `quant` | typed views of rows, 8-bit floats, codes and scales |
//! | `plane`, `layout`, `models`, `planes` | planes, the shape of a block, presets, the table of planes |
//! | `sizing` | the number of frames that fit into memory |
//! | `check`, `rows` | validation, before any byte moves |
//! | `tiles`, `stream` | routines that move bytes, for every layout |
//! | `memory`, `adopted`, `host` | a reservation, an engine's tensors, the host backend |
//! | `exchange` | copies between storages, through the host |
//! | `device_stream` | a device's work queue, for device backends |
//!
//! # Exclusion
//!
//! Many threads read and write frames through `&self`; the caller provides exclusion by owning
//! frames, which is the purpose of the floors above. Each operation that touches bytes is therefore
//! an `unsafe fn` with one rule, [the frame rule](Storage#the-frame-rule). Everything else is
//! checked, and checked first: an error means that no byte was moved.
//!
//! # Device backends
//!
//! The synchronous operations, [`store`](Storage::store), [`load`](Storage::load),
//! [`copy`](Storage::copy), [`pack`](Storage::pack), [`unpack`](Storage::unpack) and
//! [`zero`](Storage::zero), are complete when the call returns, on devices too: the call waits for
//! the device. They are meant for tools, tests and transfers. An engine's own kernels run on its
//! streams, and get slots and frames from batches. For these there are
//! - [`copy_then`](Storage::copy_then): a copy on the backend's own stream, which reports its
//!   completion;
//! - [`copy_on`](Storage::copy_on): a copy in the order of an engine's stream;
//! - [`after`](Storage::after): a notification when the stream has reached this point.
//!
//! The frame rule holds until the *work* is complete, not just the call. The batch clock ensures
//! this: a frame is reused once every batch that could access it has ended, and a batch on a stream
//! ends when the stream reaches its end.

use std::any::Any;
use std::fmt;

pub use crate::dtype::Dtype;
use crate::error::{GrowError, StorageError};
use crate::ids::{DeviceId, FrameId, Run};

pub(crate) mod adopted;
pub(crate) mod check;
mod device_stream;
mod elements;
pub(crate) mod exchange;
mod fp8;
pub(crate) mod host;
mod layout;
mod memory;
mod models;
mod plane;
mod planes;
mod quant;
pub(crate) mod rows;
mod sizing;
mod stream;
mod tiles;

pub use adopted::AdoptedPlane;
pub use device_stream::DeviceStream;
pub use elements::{Elements, ElementsMut};
pub(crate) use exchange::check_form;
pub use host::HostStorage;
pub use layout::{Arrangement, KvLayout, KvLayoutBuilder, KvPlanes, Scales};
pub use plane::{Plane, PlaneKind, PlanePart, TILE_ALIGN};
pub use planes::PlaneTable;
pub use sizing::{Sizing, check_balance, host_free_bytes};

/// A copy of one frame's bytes to another frame: all layers, K and V, with scales.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct FrameMove {
    /// Frame to read.
    pub src: FrameId,
    /// Frame to write.
    pub dst: FrameId,
}

impl FrameMove {
    /// Returns the move from `src` to `dst`.
    #[inline]
    pub const fn new(src: FrameId, dst: FrameId) -> Self {
        Self { src, dst }
    }
}

/// Callback for the end of a [`copy_then`](Storage::copy_then), or for [`after`](Storage::after).
pub type CopyDone = Box<dyn FnOnce(Result<(), StorageError>) + Send>;

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
    /// [`StorageError::OtherForm`], [`StorageError::RunsDiffer`], a run out of range, runs of `to`
    /// that overlap; and errors of the device.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), for the frames of both storages.
    unsafe fn receive(&self, source: &dyn Storage, from: &[Run], to: &[Run]) -> Result<(), StorageError> {
        // SAFETY: the caller's promise.
        unsafe { exchange::through_host(self, source, from, to) }
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
}
