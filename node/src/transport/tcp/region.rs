use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::Instant;

use kvpool::storage::{Arrangement, PlanePart, Storage, StoragePlanes};
use kvpool::transport::{Hold, TransportError};
use kvpool::{DeviceId, FrameId, Run};
use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;

use super::socket::{Buffers, Sources};
use crate::wire::Form;

pub(super) const NAME: &str = "tcp";

const SLICES: usize = 64;

/// Bytes per system call above which no piece is added, since the system checks every piece.
const BYTES: usize = 1 << 20;

pub(super) struct Region {
    storage: Arc<dyn Storage>,
    planes: Option<StoragePlanes>,
    /// Bytes of each part of a frame: K, V and their scales of each layer, in canonical order.
    parts: Vec<usize>,
    frame_bytes: usize,
}

impl Region {
    pub(super) fn new(storage: Arc<dyn Storage>) -> Result<Self, TransportError> {
        let layout = storage.layout();
        let table = layout.planes(1).map_err(|error| TransportError::Storage(error.to_string()))?;
        let parts: Vec<usize> = (table.planes.iter())
            .flat_map(|plane| {
                let halves = if plane.part == PlanePart::Joined { 2 } else { 1 };
                std::iter::repeat_n(plane.tile_bytes / halves, halves)
            })
            .collect();
        let frame_bytes = layout.packed_bytes();
        debug_assert_eq!(parts.iter().sum::<usize>(), frame_bytes, "parts of a packed block");
        if u32::try_from(frame_bytes).is_err() {
            let what = format!("send blocks of {frame_bytes} bytes");
            return Err(TransportError::Unsupported { name: NAME, what });
        }
        let planes = storage.planes().ok().filter(|planes| {
            let bytes = planes.tensors().map(|tensor| tensor.frame_bytes());
            planes.device() == DeviceId::Host && bytes.eq(parts.iter().copied())
        });
        Ok(Self { planes, parts, frame_bytes, storage })
    }

    pub(super) fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    pub(super) fn frame_bytes(&self) -> usize {
        self.frame_bytes
    }

    /// Checks that the storage has the runs. Returns their number of frames.
    pub(super) fn check(&self, runs: &[Run]) -> Result<usize, TransportError> {
        let frames = self.storage.frames() as u64;
        for run in runs {
            let (start, end) = (u64::from(run.start.0), u64::from(run.start.0) + u64::from(run.len));
            if end > frames {
                return Err(TransportError::OutOfRange { start, end, of: "the storage" });
            }
        }
        Ok(runs.iter().map(|run| run.len as usize).sum())
    }

    /// Returns the order in which frames of this storage are sent.
    pub(super) fn form(&self, run: Run) -> Form {
        let by_layer = self.storage.layout().arrangement() == Arrangement::LayerFirst;
        if self.planes.is_some() && by_layer && run.len > 1 { Form::Planes } else { Form::Packed }
    }

    /// Returns the memory of a run, in the order of `form`; `None` if the CPU cannot access it.
    pub(super) fn pieces(&self, run: Run, form: Form) -> Option<Pieces> {
        let planes = self.planes.as_ref()?;
        let mut pieces = Pieces::default();
        match form {
            Form::Packed => run.frames().enumerate().for_each(|(index, frame)| {
                planes.tensors().for_each(|tensor| {
                    let start = tensor.data.wrapping_add(frame.index() * tensor.frame_stride());
                    pieces.push(start, tensor.frame_bytes(), index..index + 1);
                });
            }),
            Form::Planes => planes.tensors().for_each(|tensor| {
                let start = tensor.data.wrapping_add(run.start.index() * tensor.frame_stride());
                let frames = 0..run.len as usize;
                if tensor.is_contiguous() {
                    pieces.push(start, frames.len() * tensor.frame_bytes(), frames);
                } else {
                    frames.for_each(|frame| {
                        let start = start.wrapping_add(frame * tensor.frame_stride());
                        pieces.push(start, tensor.frame_bytes(), frame..frame + 1);
                    });
                }
            }),
        }
        Some(pieces)
    }

    /// Converts bytes that were sent plane by plane to the order of packed blocks.
    pub(super) fn to_packed(&self, by_plane: &[u8]) -> Vec<u8> {
        let frames = by_plane.len() / self.frame_bytes;
        let mut packed = Vec::with_capacity(by_plane.len());
        for frame in 0..frames {
            let mut plane = 0;
            for &part in &self.parts {
                packed.extend_from_slice(&by_plane[plane + frame * part..][..part]);
                plane += frames * part;
            }
        }
        packed
    }
}

/// Pieces of frames' memory, and the transferred part of them.
#[derive(Default)]
pub(super) struct Pieces {
    list: Vec<(*mut u8, usize)>,
    /// The frames of each piece, by index in the run; all have the same number of bytes.
    frames: Vec<Range<usize>>,
    /// First incomplete piece, and its transferred bytes.
    at: (usize, usize),
    left: usize,
}

// SAFETY: addresses, used only under a reference that keeps the frames.
unsafe impl Send for Pieces {}
// SAFETY: as above.
unsafe impl Sync for Pieces {}

impl Pieces {
    fn push(&mut self, start: *mut u8, bytes: usize, frames: Range<usize>) {
        self.list.push((start, bytes));
        self.frames.push(frames);
        self.left += bytes;
    }

    pub(super) fn left(&self) -> usize {
        self.left
    }

    pub(super) fn advance(&mut self, bytes: usize) {
        self.advance_with(bytes, |_, _, _| {});
    }

    /// Advances, and calls `with` with the frame, address and length of each transferred part.
    pub(super) fn advance_with(&mut self, mut bytes: usize, mut with: impl FnMut(usize, *mut u8, usize)) {
        self.left -= bytes;
        while bytes > 0 {
            let ((start, length), done) = (self.list[self.at.0], self.at.1);
            let frames = &self.frames[self.at.0];
            let of_frame = length / frames.len();
            let part = bytes.min(of_frame - done % of_frame);
            with(frames.start + done / of_frame, start.wrapping_add(done), part);
            bytes -= part;
            self.at = if done + part == length { (self.at.0 + 1, 0) } else { (self.at.0, done + part) };
        }
    }

    /// Returns the next pieces for one system call.
    fn next(&self) -> impl Iterator<Item = (*mut u8, usize)> + '_ {
        let (first, done) = self.at;
        let rest = self.list[first..].iter().take(SLICES).enumerate();
        let rest = rest.map(move |(index, &(start, bytes))| match index {
            0 => (start.wrapping_add(done), bytes - done),
            _ => (start, bytes),
        });
        rest.scan(0, |before, (start, bytes)| {
            let within = *before < BYTES;
            *before += bytes;
            within.then_some((start, bytes))
        })
    }
}

/// Frames under transfer, and their hold. Dropping it drops the hold, which completes `Over`.
pub(super) struct Held {
    pub(super) region: Arc<Region>,
    hold: Option<Hold>,
    over: Arc<Over>,
}

impl Held {
    pub(super) fn new(region: Arc<Region>, hold: Hold, over: Arc<Over>) -> Self {
        Self { region, hold: Some(hold), over }
    }

    pub(super) fn hold(&self) -> &Hold {
        self.hold.as_ref().unwrap_or_else(|| unreachable!("only `drop` takes it"))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(self.hold.take());
        self.over.set();
    }
}

/// Whether the frames of a transfer were released.
pub(super) struct Over {
    state: Mutex<(bool, Option<Waker>)>,
    signal: Arc<Signal>,
}

impl Over {
    pub(super) fn new(signal: Arc<Signal>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), signal })
    }

    fn set(&self) {
        let waker = {
            let mut state = self.state.lock();
            state.0 = true;
            state.1.take()
        };
        self.signal.raise();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(super) fn is_set(&self) -> bool {
        self.state.lock().0
    }

    /// Returns whether it is over; if not, stores the waker.
    pub(super) fn poll(&self, waker: Option<&Waker>) -> bool {
        let mut waker = waker.cloned();
        let mut state = self.state.lock();
        if !state.0 && waker.is_some() {
            std::mem::swap(&mut state.1, &mut waker);
        }
        let over = state.0;
        // The replaced waker is dropped without the lock.
        drop(state);
        over
    }
}

/// Wakes a thread that waits for the end of transfers.
#[derive(Default)]
pub(super) struct Signal {
    count: Mutex<u64>,
    raised: Condvar,
}

impl Signal {
    fn raise(&self) {
        *self.count.lock() += 1;
        self.raised.notify_all();
    }

    /// Waits until `done`, evaluated after each end, or the deadline.
    pub(super) fn wait(&self, deadline: Instant, mut done: impl FnMut() -> bool) {
        loop {
            let before = *self.count.lock();
            if done() {
                return;
            }
            let mut count = self.count.lock();
            while *count == before {
                if self.raised.wait_until(&mut count, deadline).timed_out() {
                    return;
                }
            }
        }
    }
}

/// Memory into which a socket is read, while `grant` lives.
pub(super) struct Into<'a, G> {
    pub(super) grant: &'a Weak<G>,
    pub(super) pieces: &'a Pieces,
}

impl<G> Buffers for Into<'_, G> {
    fn with<R>(&mut self, read: impl FnOnce(&mut [IoSliceMut<'_>]) -> R) -> Option<R> {
        let _grant = self.grant.upgrade()?;
        let mut slices: SmallVec<[IoSliceMut<'_>; SLICES]> = (self.pieces.next())
            // SAFETY: a piece of granted frames: `_grant` has the hold, so no other thread accesses
            // them; the claim on the run excludes other items of the peer.
            .map(|(start, bytes)| IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(start, bytes) }))
            .collect();
        Some(read(&mut slices))
    }
}

/// Memory that is written to a socket, until the transfer is cancelled.
pub(super) struct From<'a> {
    pub(super) source: &'a Weak<Held>,
    pub(super) pieces: &'a Pieces,
}

impl Sources for From<'_> {
    fn with<R>(&mut self, write: impl FnOnce(&[IoSlice<'_>]) -> R) -> Option<R> {
        let _source = self.source.upgrade()?;
        let slices: SmallVec<[IoSlice<'_>; SLICES]> = (self.pieces.next())
            // SAFETY: a piece of frames that keep their bytes: `_source` has the hold.
            .map(|(start, bytes)| IoSlice::new(unsafe { std::slice::from_raw_parts(start, bytes) }))
            .collect();
        Some(write(&slices))
    }
}

/// Removes up to `frames` frames from the beginning of a run.
pub(super) fn split(run: &mut Run, frames: u32) -> Run {
    let taken = Run { start: run.start, len: run.len.min(frames) };
    *run = Run { start: FrameId(run.start.0 + taken.len), len: run.len - taken.len };
    taken
}
