//! Frames in packed form: to a buffer of the host and back, and to other storages.
//!
//! ```text
//! pack      kernel: pieces -> scratch  copy engine: scratch -> pinned  host: pinned -> caller
//! unpack    the reverse
//! receive   kernel: pieces -> scratch  kernel: scratch -> pieces;  between devices: `crossing`
//! ```
//!
//! The data is transferred in *lots* of one buffer each: several whole frames, or, if a frame
//! exceeds a buffer, several of its pieces. [`DEPTH`] lots are in flight at a time, so that the
//! engines and the host work in parallel.

use std::collections::VecDeque;
use std::ops::Range;

use kvpool::Run;
use kvpool::StorageError;
use kvpool::storage::backend::{check, check_runs, through_host};
use kvpool::storage::{HostStorage, Storage};

use super::command_scope::{CommandScope, PinnedAt};
use super::launch::Work;
use super::memory::bytes_of;
use super::params::{PackParams, Piece, Way};
use super::pieces::Pieces;
use super::staging::{BYTES_MAX, SCRATCH_MAX};
use super::storage::{CudaStorage, StorageInner};

/// Maximum number of lots in flight on each device: the engines and the host work on different ones
/// at the same time.
pub(super) const DEPTH: usize = 4;

/// Maximum size of a lot that does not pass through a pinned buffer: each costs a round trip to the
/// host.
pub(super) const LOT_BYTES: usize = SCRATCH_MAX;

/// The data that passes through one buffer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Lot {
    /// Indices in the list of frames.
    pub(super) frames: Range<usize>,
    /// Indices in the table of pieces.
    pub(super) pieces: Range<usize>,
    /// Offset in the packed form of all frames.
    at: usize,
    pub(super) bytes: usize,
}

/// Writes a lot's packed bytes to a buffer, or reads them from it.
pub(super) type Host<'a> = &'a mut dyn FnMut(&Lot, &mut [u8]) -> Result<(), StorageError>;

/// Cuts the packed form of `frames` frames into lots of at most `most` bytes.
fn lots(pieces: &Pieces, packed_bytes: usize, frames: usize, most: usize) -> Vec<Lot> {
    let mut lots = Vec::new();
    if packed_bytes <= most {
        // The list of a lot's frames passes through a buffer, too.
        let step = (most / packed_bytes).min(BYTES_MAX / size_of::<u32>());
        for first in (0..frames).step_by(step) {
            let end = frames.min(first + step);
            let bytes = (end - first) * packed_bytes;
            let pieces = 0..pieces.list.len();
            lots.push(Lot { frames: first..end, pieces, at: first * packed_bytes, bytes });
        }
        return lots;
    }
    for frame in 0..frames {
        let mut first = 0;
        while first < pieces.list.len() {
            let (count, bytes) = pieces.group(first, most);
            let at = frame * packed_bytes + pieces.list[first].packed_at as usize;
            lots.push(Lot { frames: frame..frame + 1, pieces: first..first + count, at, bytes });
            first += count;
        }
    }
    lots
}

impl StorageInner {
    /// Cuts the packed form of `frames` frames of this storage.
    pub(super) fn lots(&self, frames: usize, most: usize) -> Vec<Lot> {
        lots(&self.pieces, self.layout.packed_bytes(), frames, most)
    }

    /// Enqueues the kernel for one lot, whose bytes are at `packed`.
    ///
    /// # Safety
    /// The frames exist; the bytes belong to the command scope; the frame rule, until the scope
    /// ends.
    pub(super) unsafe fn launch_lot(
        &self,
        commands: &mut CommandScope<'_>,
        way: Way,
        frames: &[u32],
        lot: &Lot,
        packed: u64,
    ) -> Result<(), StorageError> {
        let frames = commands.upload(bytes_of(&frames[lot.frames.clone()]))?;
        // SAFETY: the caller's promise.
        unsafe { self.launch_listed(commands, way, frames, lot, packed) }
    }

    /// Does the same for frames whose list is at an address of the device, in the scope's memory.
    ///
    /// # Safety
    /// As for [`launch_lot`](Self::launch_lot).
    pub(super) unsafe fn launch_listed(
        &self,
        commands: &mut CommandScope<'_>,
        way: Way,
        frames: u64,
        lot: &Lot,
        packed: u64,
    ) -> Result<(), StorageError> {
        let first = &self.pieces.list[lot.pieces.start];
        let params = PackParams {
            pieces: self.table.address() + (lot.pieces.start * size_of::<Piece>()) as u64,
            frames,
            // Pieces contain their offset in a whole frame.
            packed: packed.wrapping_sub(first.packed_at.into()),
            packed_stride: self.layout.packed_bytes() as u64,
            n_pieces: lot.pieces.len() as u32,
            n_frames: lot.frames.len() as u32,
            unit: self.pieces.pack_unit,
            way,
        };
        // SAFETY: the caller's promise.
        unsafe { commands.launch(way.work(), &params) }
    }
}

impl CudaStorage {
    /// Implements [`Storage::pack`].
    ///
    /// # Safety
    /// The frame rule.
    pub(super) unsafe fn pack_runs(&self, runs: &[Run], out: &mut [u8]) -> Result<(), StorageError> {
        self.check_packed(check::runs(runs, self.frames())?, out.len())?;
        // SAFETY: the caller's promise; the frames exist.
        unsafe {
            self.through_pinned(Way::Out, &frames_of(runs), &mut |lot, bytes| {
                out[lot.at..][..lot.bytes].copy_from_slice(bytes);
                Ok(())
            })
        }
    }

    /// Implements [`Storage::unpack`].
    ///
    /// # Safety
    /// The frame rule.
    pub(super) unsafe fn unpack_runs(&self, runs: &[Run], bytes: &[u8]) -> Result<(), StorageError> {
        self.check_packed(check::runs_disjoint(runs, self.frames())?, bytes.len())?;
        // SAFETY: the caller's promise; the frames exist and are distinct.
        unsafe {
            self.through_pinned(Way::In, &frames_of(runs), &mut |lot, buffer| {
                buffer.copy_from_slice(&bytes[lot.at..][..lot.bytes]);
                Ok(())
            })
        }
    }

    /// Copies frames through pinned buffers, one for each lot.
    ///
    /// `host` writes the packed bytes of a lot on the way in, and reads them on the way out.
    ///
    /// # Safety
    /// The frames exist, and are distinct on the way in; the frame rule.
    pub(super) unsafe fn through_pinned(
        &self,
        way: Way,
        frames: &[u32],
        host: Host<'_>,
    ) -> Result<(), StorageError> {
        let inner = &*self.inner;
        let _entered = inner.device.0.context.enter()?;
        let mut under_way: VecDeque<(CommandScope<'_>, PinnedAt, Lot)> = VecDeque::new();
        let arrive = |host: Host<'_>, (commands, pinned, lot): (CommandScope<'_>, PinnedAt, Lot)| {
            let mut buffers = commands.wait_and_return()?;
            if way == Way::In { Ok(()) } else { host(&lot, &mut buffers.bytes_mut(pinned)[..lot.bytes]) }
        };
        for lot in inner.lots(frames.len(), BYTES_MAX) {
            if under_way.len() == DEPTH {
                under_way.pop_front().map_or(Ok(()), |oldest| arrive(host, oldest))?;
            }
            let mut pinned = inner.device.0.staging.pinned(lot.bytes)?;
            if way == Way::In {
                host(&lot, &mut pinned.bytes_mut()[..lot.bytes])?;
            }
            // SAFETY: the stream lives as long as the storage.
            let mut commands = unsafe { CommandScope::on(&inner.device, self.stream_of(way.work()).raw()) };
            let (pinned, packed) = (commands.keep(pinned), commands.scratch(lot.bytes)?);
            // SAFETY: the caller's promise; the buffers are the scope's.
            unsafe {
                if way == Way::In {
                    commands.send(packed, pinned, lot.bytes)?;
                }
                inner.launch_lot(&mut commands, way, frames, &lot, packed)?;
                if way == Way::Out {
                    commands.fetch(pinned, packed, lot.bytes)?;
                }
            }
            commands.mark()?;
            under_way.push_back((commands, pinned, lot));
        }
        under_way.into_iter().try_for_each(|lot| arrive(host, lot))
    }

    /// Implements [`Storage::receive`] between devices, or within one, without the host.
    ///
    /// # Safety
    /// The frame rule, for the frames of both storages.
    pub(super) unsafe fn receive_from(
        &self,
        source: &dyn Storage,
        from: &[Run],
        to: &[Run],
    ) -> Result<(), StorageError> {
        if let Some(host) = source.as_any().downcast_ref::<HostStorage>() {
            // SAFETY: the caller's promise.
            return unsafe { self.exchange(host, Way::In, (to, from)) };
        }
        let Some(source) = source.as_any().downcast_ref::<Self>() else {
            // SAFETY: the caller's promise.
            return unsafe { through_host(self, source, from, to) };
        };
        // SAFETY: as above.
        match unsafe { self.receive_lots(source, from, to, LOT_BYTES) } {
            // A device that its pools fill has no room for long lots.
            Err(StorageError::Device { .. }) => {
                // SAFETY: as above.
                unsafe { self.receive_lots(source, from, to, BYTES_MAX) }
            }
            done => done,
        }
    }

    /// Does so in lots of at most `most` bytes.
    ///
    /// # Safety
    /// As for [`receive_from`](Self::receive_from).
    unsafe fn receive_lots(
        &self,
        source: &Self,
        from: &[Run],
        to: &[Run],
        most: usize,
    ) -> Result<(), StorageError> {
        let frames = check_runs(self, source, from, to)?;
        let (there, here) = (&*source.inner, &*self.inner);
        let (lots, landing_lots) = (there.lots(frames, most), here.lots(frames, most));
        // A frame that exceeds a buffer is cut between pieces, and the cuts differ if only one of
        // the storages joins K and V.
        if !lots.iter().map(|lot| (lot.at, lot.bytes)).eq(landing_lots.iter().map(|lot| (lot.at, lot.bytes)))
        {
            // SAFETY: the caller's promise.
            return unsafe { through_host(self, source, from, to) };
        }
        let (from, to) = (frames_of(from), frames_of(to));
        there.device.good()?;
        here.device.good()?;
        let lots = lots.into_iter().zip(landing_lots);
        if self.device() == source.device() {
            // SAFETY: the caller's promise; the frames are checked.
            unsafe { self.receive_within(source, lots, &from, &to) }
        } else {
            // SAFETY: as above.
            unsafe { self.receive_across(source, lots.collect(), &from, &to) }
        }
    }

    /// Copies lots within this device, in order on one stream.
    ///
    /// # Safety
    /// As for [`receive_from`](Self::receive_from); the frames exist.
    unsafe fn receive_within(
        &self,
        source: &Self,
        lots: impl Iterator<Item = (Lot, Lot)>,
        from: &[u32],
        to: &[u32],
    ) -> Result<(), StorageError> {
        let (there, here) = (&*source.inner, &*self.inner);
        let mut under_way: VecDeque<CommandScope<'_>> = VecDeque::new();
        for (lot, landing_lot) in lots {
            if under_way.len() == DEPTH {
                under_way.pop_front().map_or(Ok(()), CommandScope::wait)?;
            }
            // SAFETY: the stream lives as long as the storage.
            let mut commands = unsafe { CommandScope::on(&here.device, self.stream_of(Work::Unpack).raw()) };
            let packed = commands.scratch(lot.bytes)?;
            // SAFETY: the frames exist; destinations are distinct; the buffer is kept until the
            // scope ends; the rest is the caller's promise.
            unsafe {
                there.launch_lot(&mut commands, Way::Out, from, &lot, packed)?;
                here.launch_lot(&mut commands, Way::In, to, &landing_lot, packed)?;
            }
            commands.mark()?;
            under_way.push_back(commands);
        }
        under_way.into_iter().try_for_each(CommandScope::wait)
    }

    fn check_packed(&self, frames: usize, got: usize) -> Result<(), StorageError> {
        Ok(check::packed_bytes(got, frames.saturating_mul(self.inner.layout.packed_bytes()))?)
    }
}

pub(super) fn frames_of(runs: &[Run]) -> Vec<u32> {
    runs.iter().flat_map(|run| run.frames()).map(|frame| frame.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pieces::Placed;
    use kvpool::storage::KvLayout;

    #[test]
    fn lots_cover_the_packed_form_in_order() {
        let layout =
            KvLayout::builder().layers(4).kv_heads(8).head_dim(128).block_tokens(24).build().unwrap();
        let planes = layout.planes(3).unwrap().planes;
        let placed: Vec<Placed> =
            planes.into_iter().map(|plane| Placed { base: plane.base as u64, plane }).collect();
        let (pieces, packed) = (Pieces::new(&placed).unwrap(), layout.packed_bytes());
        for most in [16 << 10, 100_000, packed - 1, packed, 3 * packed + 1, 100 * packed] {
            let lots = lots(&pieces, packed, 7, most);
            let mut at = 0;
            for lot in &lots {
                assert_eq!(lot.at, at);
                assert!(lot.bytes > 0 && lot.bytes <= most);
                at += lot.bytes;
                let whole = lot.pieces == (0..pieces.list.len());
                assert_eq!(whole, packed <= most);
                assert!(whole || lot.frames.len() == 1);
            }
            assert_eq!(at, 7 * packed, "{most}");
        }
        assert!(lots(&pieces, packed, 0, packed).is_empty());
        // If a frame is shorter than its number, the list of frame numbers limits the lot.
        let lots = lots(&pieces, 1, 3 * BYTES_MAX, BYTES_MAX);
        assert!(lots.iter().all(|lot| lot.frames.len() * size_of::<u32>() <= BYTES_MAX));
        assert_eq!(lots.iter().map(|lot| lot.bytes).sum::<usize>(), 3 * BYTES_MAX);
    }
}
