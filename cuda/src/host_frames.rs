//! Frames between a device and a storage in host memory.
//!
//! | the host's pages | both cut a frame alike | copies |
//! |---|---|---|
//! | locked | yes | copy engine: frames <-> frames |
//! | locked | no | kernel: frames <-> scratch; copy engine: scratch <-> the host's frames |
//! | locked, and the copies would be short | | kernel: frames <-> scratch; kernel: scratch <-> the host's frames |
//! | not locked, or the device cannot reach pages | | kernel: frames <-> scratch; copy engine: scratch <-> pinned buffer; host: pinned buffer <-> frames |
//!
//! Neighbouring frames are one copy per contiguous part of a frame. All but the first way have
//! several lots enqueued: the device does not wait for the host between two.
//!
//! # Late copies
//!
//! The device writes the host's frames when it gets to it, whatever the host believes meanwhile.
//! The invariant: **a direct copy returns when its commands are complete, or when the device runs
//! nothing any more.** Until then the caller owns the frames (the frame rule), their pages are
//! locked by the registration that the copy holds, and no wait ends earlier: a dropped future
//! leaves the frames with the thread that copies. If the context is stuck, the end is never known.
//! The copy then returns [`StorageError::LostWhileCopying`], after which its caller keeps the
//! frames for good, and so does the registration their addresses.

use std::collections::VecDeque;

use kvpool::StorageError;
use kvpool::storage::backend::{Extent, PageLock, Refusal, check_runs, through_host};
use kvpool::storage::{HostStorage, Storage, host_free_bytes};
use kvpool::{FrameId, Run};

use super::command_scope::CommandScope;
use super::host_pages::resident_bytes;
use super::host_rows::{Pairs, Rows, between, count, fit};
use super::memory::bytes_of;
use super::packed::{DEPTH, LOT_BYTES, Lot, frames_of};
use super::params::{PackParams, Way};
use super::pieces::Pieces;
use super::registered::Registered;
use super::staging::BYTES_MAX;
use super::storage::CudaStorage;

/// Mean size of a piece below which frames pass through a pinned buffer instead of a kernel's
/// accesses to the host: each CTA has one piece in flight.
const PIECE_BYTES_MIN: usize = 4 << 10;

/// Mean size of a copy below which a kernel accesses the host's frames instead of the copy engine:
/// the driver takes microseconds for each.
const COPY_BYTES_MIN: usize = 64 << 10;

/// A direct copy.
struct Direct<'a> {
    way: Way,
    host: Vec<Extent>,
    /// For a kernel that accesses the host's frames.
    pieces: Option<Pieces>,
    pairs: Pairs<'a>,
    /// Locks the host's pages.
    registered: PageLock,
}

/// Runs of frames on the device, and of as many on the host.
pub(super) type Sides<'a> = (&'a [Run], &'a [Run]);

impl CudaStorage {
    /// Copies frames from this storage to one in host memory, or from there.
    ///
    /// # Errors
    /// As for [`Storage::receive`].
    ///
    /// # Safety
    /// The frame rule, for the frames of both storages.
    pub(super) unsafe fn exchange(
        &self,
        host: &HostStorage,
        way: Way,
        (here, there): Sides<'_>,
    ) -> Result<(), StorageError> {
        let (target, source, from, to): (&dyn Storage, &dyn Storage, _, _) = match way {
            Way::Out => (host, self, here, there),
            Way::In => (self, host, there, here),
        };
        check_runs(target, source, from, to)?;
        self.inner.device.good()?;
        let pairs: Vec<(u32, u32)> = frames_of(here).into_iter().zip(frames_of(there)).collect();
        if pairs.is_empty() {
            return Ok(());
        }
        let (extents, own) = (host.extents().collect::<Vec<_>>(), self.extents());
        let packed_bytes = self.inner.layout.packed_bytes();
        let is_long = |copies: usize| pairs.len() * packed_bytes / copies >= COPY_BYTES_MIN;
        let is_straight = fit(&own, &extents) && is_long(count(&pairs, own.len()));
        // The numbers of the packed frames ascend.
        let numbered: Vec<(u32, u32)> = (0..).zip(&pairs).map(|(at, &(_, host))| (at, host)).collect();
        let fits_lot = packed_bytes <= LOT_BYTES;
        let is_near = fits_lot && fit(&extents, &extents) && is_long(count(&numbered, extents.len()));
        let device = &self.inner.device;
        let may_launch = device.0.reaches_pages && device.kernels().choices.host_ctas > 0;
        let by_kernel = fits_lot && !is_straight && !is_near && may_launch;
        let pieces = by_kernel
            .then(|| Pieces::of(extents.iter().copied()))
            .transpose()?
            .filter(|pieces| pieces.pack_unit == 16 && packed_bytes >= pieces.list.len() * PIECE_BYTES_MIN);
        let is_direct = is_straight || is_near || pieces.is_some();
        if let Some(registered) = is_direct.then(|| self.registered(host)).flatten() {
            let direct = Direct { way, host: extents, pieces, pairs: &pairs, registered };
            // SAFETY: the caller's promise; the frames are checked.
            let copied =
                unsafe { if is_straight { self.straight(&direct, &own) } else { self.packed(&direct) } };
            // The driver has refused, for example for lack of memory, and nothing is under way.
            if !matches!(copied, Err(StorageError::Device { .. })) {
                return copied;
            }
        }
        if packed_bytes > BYTES_MAX {
            // SAFETY: the caller's promise.
            return unsafe { through_host(target, source, from, to) };
        }
        let frames: Vec<u32> = pairs.iter().map(|pair| pair.0).collect();
        // SAFETY: the caller's promise; the frames are checked.
        unsafe {
            self.through_pinned(way, &frames, &mut |lot, bytes| {
                let hosts: Vec<Run> = (pairs[lot.frames.clone()].iter())
                    .map(|&(_, host)| Run { start: FrameId(host), len: 1 })
                    .collect();
                if way == Way::Out { host.unpack(&hosts, bytes) } else { host.pack(&hosts, bytes) }
            })
        }
    }

    /// Locks the pages of a pool's memory on the host, which the first copy would do otherwise:
    /// that takes time in proportion to their number. Returns false if they cannot be locked now;
    /// frames are then copied through pinned buffers.
    pub fn lock_pages(&self, host: &HostStorage) -> bool {
        self.registered(host).is_some()
    }

    /// Returns the registration of the host's pages; makes it if necessary. `None` if there is
    /// none, or a device that is lost has made it.
    fn registered(&self, host: &HostStorage) -> Option<PageLock> {
        let lock = host.page_lock(|pages| {
            let bytes: usize = pages.ranges.iter().map(|range| range.len()).sum();
            if bytes > self.config.host_bytes_max {
                return Err(Refusal::OfCaller);
            }
            // Locked pages take memory, which unused ones of a pool do not.
            let missing = bytes.saturating_sub(resident_bytes(&pages.ranges));
            if host_free_bytes().is_some_and(|free| missing as u64 > free) {
                return Err(Refusal::ForNow);
            }
            let (extents, frames) = (host.extents().collect::<Vec<_>>(), host.frames_max() as u64);
            // No frame is on both sides.
            let is_border = |at: usize| {
                extents.iter().all(|extent| {
                    let (stride, from) =
                        (extent.frame_stride as u64, (at as u64).saturating_sub(extent.base));
                    from >= frames * stride || from % stride == 0 || from % stride >= extent.bytes as u64
                })
            };
            let most = self.inner.device.kernels().choices.registration_bytes;
            Registered::new(&self.inner.device.0.context, pages, most, is_border)
        })?;
        lock.lock::<Registered>().is_some_and(Registered::is_good).then_some(lock)
    }

    /// Copies frames as they are.
    ///
    /// # Safety
    /// As for [`exchange`](Self::exchange); the frames exist, and the extents fit.
    unsafe fn straight(&self, direct: &Direct<'_>, own: &[Extent]) -> Result<(), StorageError> {
        // SAFETY: the stream lives as long as the storage.
        let mut commands =
            unsafe { CommandScope::on(&self.inner.device, self.stream_of(direct.way.work()).raw()) };
        // SAFETY: the caller's promise; the registration outlives the scope.
        let copied = unsafe {
            between(own, &direct.host, direct.pairs, &|at| direct.piece_of(at))
                .try_for_each(|rows| commands.copy_rows(direct.way, &rows))
                .and_then(|()| commands.mark().map(drop))
        };
        self.ended([commands].into(), copied)
    }

    /// Copies frames through their packed form on the device, a lot at a time.
    ///
    /// # Safety
    /// As for [`exchange`](Self::exchange); the frames exist.
    unsafe fn packed(&self, direct: &Direct<'_>) -> Result<(), StorageError> {
        let inner = &*self.inner;
        let frames: Vec<u32> = direct.pairs.iter().map(|pair| pair.0).collect();
        let mut under_way: VecDeque<CommandScope<'_>> = VecDeque::new();
        let mut one = |lot: Lot| {
            if under_way.len() == DEPTH
                && let Some(oldest) = under_way.front_mut()
            {
                oldest.wait_marked()?;
                under_way.pop_front();
            }
            // SAFETY: the stream lives as long as the storage.
            let mut commands =
                unsafe { CommandScope::on(&inner.device, self.stream_of(direct.way.work()).raw()) };
            // SAFETY: the caller's promise.
            let enqueued = unsafe { self.enqueue(&mut commands, direct, &frames, &lot) };
            // Also after an error: some of its commands may be under way.
            under_way.push_back(commands);
            enqueued
        };
        let lots = inner.lots(frames.len(), LOT_BYTES);
        let copied = lots.into_iter().try_for_each(&mut one);
        self.ended(under_way, copied)
    }

    /// Enqueues the commands for a lot of `frames`.
    ///
    /// # Safety
    /// As for [`packed`](Self::packed), until the [end](CommandScope::end) of the scope.
    unsafe fn enqueue(
        &self,
        commands: &mut CommandScope<'_>,
        direct: &Direct<'_>,
        frames: &[u32],
        lot: &Lot,
    ) -> Result<(), StorageError> {
        let inner = &*self.inner;
        let packed = commands.scratch(lot.bytes)?;
        // SAFETY: the caller's promise, for frames that exist. The registration and the scratch
        // memory outlive the scope.
        unsafe {
            if direct.way == Way::Out {
                inner.launch_lot(commands, Way::Out, frames, lot, packed)?;
            }
            match &direct.pieces {
                Some(pieces) => direct.launch(commands, pieces, lot, packed)?,
                None => (direct.rows(lot, packed, inner.layout.packed_bytes()).iter())
                    .try_for_each(|rows| commands.copy_rows(direct.way, rows))?,
            }
            if direct.way == Way::In {
                inner.launch_lot(commands, Way::In, frames, lot, packed)?;
            }
        }
        commands.mark().map(drop)
    }

    /// Waits for the commands under way. After an error, and if their end is not known, the error
    /// is [`StorageError::LostWhileCopying`].
    fn ended(
        &self,
        under_way: VecDeque<CommandScope<'_>>,
        copied: Result<(), StorageError>,
    ) -> Result<(), StorageError> {
        let (mut copied, mut unended) = (copied, None);
        for mut commands in under_way {
            if copied.is_ok() {
                copied = commands.wait_marked();
            }
            unended = commands.end().err().or(unended);
        }
        match (copied, unended) {
            (copied, None) => copied,
            (copied, Some(error)) => {
                let (error, device) = (copied.err().unwrap_or(error), self.device());
                // The frames are lost to both pools, and the device with them.
                let lost = self.inner.device.0.context.lose_stuck(error.to_string().into());
                Err(StorageError::LostWhileCopying { device, reason: lost.to_string().into() })
            }
        }
    }
}

impl Direct<'_> {
    /// Enqueues the kernel that copies a lot between its packed form and the host's frames.
    ///
    /// # Safety
    /// As for [`CudaStorage::enqueue`]; the lot has whole frames.
    unsafe fn launch(
        &self,
        commands: &mut CommandScope<'_>,
        pieces: &Pieces,
        lot: &Lot,
        packed: u64,
    ) -> Result<(), StorageError> {
        let frames: Vec<u32> = self.pairs[lot.frames.clone()].iter().map(|&(_, host)| host).collect();
        let params = PackParams {
            pieces: commands.upload(bytes_of(&pieces.list))?,
            frames: commands.upload(bytes_of(&frames))?,
            packed,
            packed_stride: (lot.bytes / frames.len()) as u64,
            n_pieces: pieces.list.len() as u32,
            n_frames: frames.len() as u32,
            unit: pieces.pack_unit,
            way: self.way.reversed(),
        };
        // SAFETY: the caller's promise; the registration keeps the pages locked.
        unsafe { commands.launch(self.way.work_on_pages(), &params) }
    }

    /// Returns the copies of a lot's frames, whose packed form is at `packed`.
    fn rows(&self, lot: &Lot, packed: u64, packed_bytes: usize) -> Vec<Rows> {
        let mut at = packed;
        let mut cut = Vec::with_capacity(self.host.len());
        for extent in &self.host {
            cut.push(Extent { base: at, frame_stride: packed_bytes, bytes: extent.bytes });
            at += extent.bytes as u64;
        }
        let hosts = self.pairs[lot.frames.clone()].iter().map(|&(_, host)| host);
        let pairs: Vec<(u32, u32)> = (0..).zip(hosts).collect();
        between(&cut, &self.host, &pairs, &|at| self.piece_of(at)).collect()
    }

    /// Returns the number of the registration with an address of the host.
    fn piece_of(&self, address: u64) -> usize {
        self.registered.lock::<Registered>().map_or(0, |registered| registered.piece_of(address))
    }
}
