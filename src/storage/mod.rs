//! Where the bytes are: the layout of K and V in memory, and the operations that move them.
//!
//! This floor deals in frames and slots and knows nothing of block ids. A *slot* is one token's place,
//! `frame * block_tokens + offset`, as i64; a negative one is skipped, which is how padded batches are stored.
//!
//! | file | what |
//! |---|---|
//! | `elements`, `fp8`, `quant` | typed views of rows, 8-bit floats, codes and scales |
//! | `layout`, `models`, `planes` | the shape of a block, presets, the table of planes |
//! | `sizing` | how many frames the memory holds |
//! | `check`, `rows` | everything that can be refused, before any byte moves |
//! | `tiles`, `stream` | the routines that move bytes, the same for every layout |
//! | `memory`, `adopted`, `host` | a reservation, an engine's own tensors, and the backend over either |
//! | `exchange` | from one storage to another, through the host |
//! | `device_stream` | a device's queue of work, for backends on devices |
//!
//! # Who may touch what, and when
//!
//! Frames are written and read by many threads at once through `&self`, so exclusion is the caller's, by ownership
//! of frames: that is what the floors above are for. Each operation that touches bytes is therefore an `unsafe fn`
//! with one rule, [the frame rule](Storage#the-frame-rule). All else is checked, and checked first: an error means
//! that no byte was moved.
//!
//! # Backends on devices
//!
//! A host backend is done when a call returns, and so is a device's: [`store`](Storage::store), [`load`](Storage::load),
//! [`copy`](Storage::copy), [`pack`](Storage::pack), [`unpack`](Storage::unpack), [`zero`](Storage::zero) wait for the device.
//! They are for tools, tests and transfers. An engine's own kernels run on its streams and know slots and frames from
//! batches; for these there are
//! - [`copy_then`](Storage::copy_then): a copy on the backend's own stream, which tells when it is over;
//! - [`copy_on`](Storage::copy_on): a copy in the order of an engine's stream;
//! - [`after`](Storage::after): be told when the stream gets there.
//!
//! The frame rule holds until the *work* is done, not just the call. The batch clock sees to it: a frame is reused once
//! every batch that could touch it has ended, and a batch on a stream ends when the stream gets there.

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
pub use planes::{Plane, PlaneKind, PlanePart, PlaneTable, TILE_ALIGN};
pub use sizing::{Sizing, check_balance, host_free_bytes};

/// One frame's bytes to be copied to another: all layers, K and V, scales included.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct FrameMove {
    /// The frame that is read.
    pub src: FrameId,
    /// The frame that is written.
    pub dst: FrameId,
}

impl FrameMove {
    /// From `src` to `dst`.
    #[inline]
    pub const fn new(src: FrameId, dst: FrameId) -> Self {
        Self { src, dst }
    }
}

/// What [`copy_then`](Storage::copy_then) calls when the copy is over, and [`after`](Storage::after) when a stream got there.
pub type CopyDone = Box<dyn FnOnce(Result<(), StorageError>) + Send>;

/// The bytes of a pool's frames on one device.
///
/// Every call either does all that it says or returns an error and moves no byte.
///
/// # The frame rule
///
/// While an operation runs, nobody else writes a frame that it reads or writes, and nobody reads a frame that it
/// writes. For [`store`](Self::store) and [`load`](Self::load) the rule is about slots in place of whole frames: two
/// threads may store to different slots of one frame. It is the caller's to keep, by owning the frames; breaking it is
/// a data race.
pub trait Storage: Send + Sync + fmt::Debug {
    /// The layout of the frames.
    fn layout(&self) -> &KvLayout;

    /// Where the memory is.
    fn device(&self) -> DeviceId;

    /// Frames that may be used now.
    fn frames(&self) -> usize;

    /// The most frames that there may ever be: what [`grow`](Self::grow) can reach. Bases of planes never move.
    fn frames_max(&self) -> usize;

    /// Makes frames `0..total` usable; those that are already stay as they are. A `total` below
    /// [`frames`](Self::frames) changes nothing. May be called by several threads at once.
    ///
    /// # Errors
    /// [`GrowError::TooLarge`] past [`frames_max`](Self::frames_max); [`GrowError::Memory`] if there is none.
    fn grow(&self, total: usize) -> Result<(), GrowError>;

    /// Frames from `total` on are no longer usable, and their memory goes back to the system as far as it can be: whole
    /// pages, whole mappings. The others keep their bytes. A `total` of [`frames`](Self::frames) or more changes nothing.
    /// They can be had again by [`grow`](Self::grow); what they hold then is unspecified. Not while another thread
    /// grows or shrinks this storage.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), for the frames from `total` on.
    unsafe fn shrink(&self, total: usize);

    /// Stores one token's K and V in one layer for each slot. `k` and `v` are `[slots.len()][kv_heads][head_dim]`;
    /// rows of negative slots are skipped. Elements are of the layout's dtype, or of f32, f16 or bf16 where the layout
    /// is quantised; then they are quantised here. `v` is [`Elements::none`] in a latent layout.
    ///
    /// # Errors
    /// No such layer, wrong dtype or length, a slot out of range or repeated.
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

    /// Loads one token's K and V of one layer for each slot: the inverse of [`store`](Self::store). Rows of negative
    /// slots are left as they are. Slots may repeat.
    ///
    /// # Errors
    /// No such layer, wrong dtype or length, a slot out of range.
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

    /// Copies whole frames. One source may go to several destinations. No order is kept between moves, so a chain
    /// a -> b -> c takes two calls.
    ///
    /// # Errors
    /// A frame out of range, a destination that is repeated or is also a source.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule).
    unsafe fn copy(&self, moves: &[FrameMove]) -> Result<(), StorageError>;

    /// As [`copy`](Self::copy), and perhaps only enqueued when the call returns: `done` is called once, from any thread
    /// (also from this one, before the call returns), when no access to these frames is under way any more, and says
    /// whether the bytes are there. A backend that fails may drop it uncalled; that counts as a failure, and is
    /// allowed only when no access is under way any more either.
    ///
    /// Unless a backend has a better way, the bytes are copied here and now.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), until `done` is called or dropped.
    unsafe fn copy_then(&self, moves: &[FrameMove], done: CopyDone) {
        // SAFETY: the caller keeps the frame rule.
        done(unsafe { self.copy(moves) });
    }

    /// Whether work can be enqueued on this stream now.
    ///
    /// # Errors
    /// [`StorageError::ForeignStream`]: the stream is not of this storage's device, or the storage has none;
    /// [`StorageError::Capturing`], [`StorageError::DeviceLost`].
    fn check_stream(&self, stream: &DeviceStream) -> Result<(), StorageError> {
        Err(StorageError::ForeignStream { stream: stream.device(), storage: self.device() })
    }

    /// As [`copy`](Self::copy), but enqueued on a stream: behind what was enqueued there before, ahead of what comes after.
    ///
    /// # Errors
    /// As for [`copy`](Self::copy) and [`check_stream`](Self::check_stream); nothing was enqueued.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), until the stream has done the copy; what the stream does before and after it is in
    /// order with it.
    unsafe fn copy_on(&self, stream: &DeviceStream, moves: &[FrameMove]) -> Result<(), StorageError> {
        let _ = moves;
        self.check_stream(stream)
    }

    /// Calls `done` once, from any thread, when everything is over that was enqueued on the stream until now. An error says
    /// that the device has failed, or that this was no stream of it: then, too, nothing is under way any more that
    /// the storage could know of. May drop `done` uncalled where the process ends.
    fn after(&self, stream: &DeviceStream, done: CopyDone) {
        done(self.check_stream(stream));
    }

    /// Waits until everything is over that was enqueued on the stream until now.
    ///
    /// # Errors
    /// As for [`check_stream`](Self::check_stream).
    fn settle(&self, stream: &DeviceStream) -> Result<(), StorageError> {
        self.check_stream(stream)
    }

    /// Copies frames from another storage, of any device, whose blocks have the same packed form: the first of `from` to the
    /// first of `to`, and so on. Both name the same number of frames. Waits for the end.
    ///
    /// Unless a backend has a better way, the bytes go through a buffer of the host, some of them at a time.
    ///
    /// # Errors
    /// [`StorageError::OtherForm`], [`StorageError::RunsDiffer`], a run out of range, runs of `to` that overlap; and what a
    /// device says.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule), for the frames of both.
    unsafe fn receive(&self, source: &dyn Storage, from: &[Run], to: &[Run]) -> Result<(), StorageError> {
        // SAFETY: the caller's.
        unsafe { exchange::through_host(self, source, from, to) }
    }

    /// The backend itself, for another of its kind that knows a shorter way.
    fn as_any(&self) -> &dyn Any;

    /// Packs frames into `out`: run by run, frame by frame, plane by plane in canonical order, without padding:
    /// [`packed_bytes`](KvLayout::packed_bytes) a frame. The packed form of a block is the same for every arrangement,
    /// and for K and V joined or separate.
    ///
    /// # Errors
    /// A run out of range, a buffer of the wrong size.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule).
    unsafe fn pack(&self, runs: &[Run], out: &mut [u8]) -> Result<(), StorageError>;

    /// The inverse of [`pack`](Self::pack). Any bytes are accepted.
    ///
    /// # Errors
    /// A run out of range, runs that overlap, a buffer of the wrong size.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule).
    unsafe fn unpack(&self, runs: &[Run], bytes: &[u8]) -> Result<(), StorageError>;

    /// Fills frames with zero bytes. They are written, not given back: to fault pages in again costs several times as much.
    ///
    /// # Errors
    /// A run out of range, runs that overlap.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule).
    unsafe fn zero(&self, runs: &[Run]) -> Result<(), StorageError>;

    /// Gives the memory of frames back to the system as far as it can be: whole pages, whole mappings. The frames may be
    /// used again without a further call; until they are written, what they hold is unspecified.
    ///
    /// # Errors
    /// A run out of range, runs that overlap.
    ///
    /// # Safety
    /// [The frame rule](#the-frame-rule).
    unsafe fn discard(&self, runs: &[Run]) -> Result<(), StorageError>;
}
