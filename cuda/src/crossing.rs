//! Packed frames on their way from one device to another.
//!
//! ```text
//! source, stream of sending     list of frames ─ pack ─ copy to the other device ─ event
//! host                                                          polls the event, then enqueues:
//! target, stream up                                             list of frames ─ unpack ─ event
//! ```
//!
//! The host enqueues the last kernel when it has seen the copy complete. No stream of one device
//! waits for an event of the other, which would never come if that device failed. The copy itself
//! may never end then. It is therefore on a stream of its own, the source's *sending* stream, for
//! which no one waits in the driver: threads that pack or wipe other frames go on.
//!
//! Calls that may wait for all work of the source are kept apart from the copies by its
//! [gate](super::gate). The thread in flight makes none itself: all buffers are taken before, and
//! go from lot to lot. If such a call waits, the lots that have left land first, and then it goes
//! on.

use std::collections::VecDeque;

use cudarc::driver::sys;

use kvpool::StorageError;

use super::command_scope::CommandScope;
use super::gate::Flight;
use super::launch::Work;
use super::memory::bytes_of;
use super::packed::{DEPTH, Lot};
use super::params::Way;
use super::staging::{LotBuffers, Staging};
use super::storage::CudaStorage;

/// Maximum number of lots that are being unpacked while [`DEPTH`] others are on their way.
const LANDING: usize = 2;

/// Position of the source's buffers among those of a scope; the target's come next.
const LEFT: usize = 0;
/// The same for the only ones of the target's scope.
const ARRIVED: usize = 0;

/// A transfer in progress. The scopes come before the flight, which ends after them.
struct Crossing<'a> {
    /// Scopes that pack and copy lots, which follow as the target's layout cuts them.
    leaving: VecDeque<(CommandScope<'a>, Lot)>,
    /// Scopes that unpack lots.
    landing: VecDeque<CommandScope<'a>>,
    flight: Option<Flight>,
    source: &'a CudaStorage,
    target: &'a CudaStorage,
    stock: Stock,
}

/// Unused buffers on both sides.
struct Stock {
    source: Vec<LotBuffers>,
    target: Vec<LotBuffers>,
}

impl Stock {
    /// Takes buffers for as many lots as are under way at a time, or for fewer, but at least one.
    fn new(source: &CudaStorage, target: &CudaStorage, lots: &[(Lot, Lot)]) -> Result<Self, StorageError> {
        let bytes = lots.iter().map(|(lot, _)| lot.bytes).max().unwrap_or(0);
        let frames = lots.iter().map(|(lot, _)| lot.frames.len()).max().unwrap_or(0);
        let take = |storage: &CudaStorage, count: usize| {
            let staging = &storage.inner.device.0.staging;
            let mut taken = Vec::new();
            while taken.len() < count.min(lots.len()) {
                match Staging::lot(staging, bytes, frames * size_of::<u32>()) {
                    Ok(buffers) => taken.push(buffers),
                    // A device that its pools fill has room for fewer lots.
                    Err(StorageError::Device { .. }) if !taken.is_empty() => break,
                    Err(error) => return Err(error),
                }
            }
            Ok(taken)
        };
        Ok(Self { source: take(source, DEPTH)?, target: take(target, DEPTH + LANDING)? })
    }
}

impl CudaStorage {
    /// Copies lots from another device; each as the source's layout cuts it, and as this one's
    /// does.
    ///
    /// # Safety
    /// As for [`receive_from`](Self::receive_from); the frames exist, and the lots are those of the
    /// lists of frames.
    pub(super) unsafe fn receive_across(
        &self,
        source: &Self,
        lots: Vec<(Lot, Lot)>,
        from: &[u32],
        to: &[u32],
    ) -> Result<(), StorageError> {
        let stock = Stock::new(source, self, &lots)?;
        let (here, there) = (&self.inner.device.0.context, &source.inner.device.0.context);
        there.befriend(here)?;
        here.befriend(there)?;
        let (leaving, landing) = (VecDeque::new(), VecDeque::new());
        let mut crossing = Crossing { leaving, landing, flight: None, source, target: self, stock };
        for lot in lots {
            // SAFETY: the caller's promise.
            unsafe { crossing.send(lot, from, to)? };
        }
        // SAFETY: as above.
        unsafe { crossing.end_flight(to)? };
        crossing.landing.into_iter().try_for_each(CommandScope::wait)
    }
}

impl Crossing<'_> {
    /// Enqueues the packing and the copy of a lot.
    ///
    /// # Safety
    /// As for [`receive_across`](CudaStorage::receive_across).
    unsafe fn send(
        &mut self,
        (lot, landing_lot): (Lot, Lot),
        from: &[u32],
        to: &[u32],
    ) -> Result<(), StorageError> {
        if self.flight.as_ref().is_some_and(Flight::is_awaited) {
            // SAFETY: the caller's promise.
            unsafe { self.end_flight(to)? };
        }
        let (left, arrived) = loop {
            match (self.stock.source.pop(), self.stock.target.pop()) {
                (Some(left), Some(arrived)) => break (left, arrived),
                (left, arrived) => {
                    self.stock.source.extend(left);
                    self.stock.target.extend(arrived);
                    // SAFETY: as above.
                    unsafe { self.return_some(to)? };
                }
            }
        };
        let (source, target) = (self.source, self.target);
        if self.flight.is_none() {
            self.flight = Some(source.inner.device.0.context.fly()?);
        }
        let (packed, landed) = (left.packed.address(), arrived.packed.address());
        // SAFETY: the stream lives as long as its storage.
        let mut commands =
            unsafe { CommandScope::on(&source.inner.device, source.stream_of(Work::Send).raw()) };
        // SAFETY: as above.
        unsafe { commands.beside(&target.inner.device, target.stream_of(Work::Unpack).raw()) };
        // Also if this fails half-way: the copy may access them until it ends.
        commands.hold(left);
        commands.hold(arrived);
        let list = commands.list(LEFT, bytes_of(&from[lot.frames.clone()]))?;
        // SAFETY: the frames exist; the buffers are kept until the copy is complete; the rest is
        // the caller's promise.
        unsafe {
            source.inner.launch_listed(&mut commands, Way::Out, list, &lot, packed)?;
            let (here, there) = (&source.inner.device.0.context, &target.inner.device.0.context);
            let _entered = here.enter()?;
            let (on, bytes) = (source.stream_of(Work::Send).raw(), lot.bytes);
            let sent = sys::cuMemcpyPeerAsync(landed, there.raw, packed, here.raw, bytes, on);
            here.check(sent, "copying to another device")?;
        }
        commands.mark()?;
        self.leaving.push_back((commands, landing_lot));
        Ok(())
    }

    /// Waits until the buffers of some lot are unused. The stock lacks those of one side, so that
    /// some lot is under way.
    ///
    /// # Safety
    /// As for [`send`](Self::send).
    unsafe fn return_some(&mut self, to: &[u32]) -> Result<(), StorageError> {
        if self.stock.source.is_empty() || self.landing.is_empty() {
            // SAFETY: the caller's promise.
            return unsafe { self.land(to) };
        }
        let landed =
            self.landing.pop_front().map_or(Ok(Default::default()), CommandScope::wait_and_return)?;
        self.stock.target.extend(landed.lots);
        Ok(())
    }

    /// Waits until the oldest lot has arrived, and enqueues its unpacking.
    ///
    /// # Safety
    /// As for [`send`](Self::send).
    unsafe fn land(&mut self, to: &[u32]) -> Result<(), StorageError> {
        let Some((left, lot)) = self.leaving.pop_front() else { return Ok(()) };
        let mut buffers = left.wait_and_return()?.lots.into_iter();
        self.stock.source.extend(buffers.next());
        let target = self.target;
        // SAFETY: the stream lives as long as the storage.
        let mut landed =
            unsafe { CommandScope::on(&target.inner.device, target.stream_of(Work::Unpack).raw()) };
        let Some(arrived) = buffers.next() else { unreachable!("a lot leaves with buffers of both sides") };
        let packed = arrived.packed.address();
        landed.hold(arrived);
        let list = landed.list(ARRIVED, bytes_of(&to[lot.frames.clone()]))?;
        // SAFETY: the frames exist; destinations are distinct; the lot has arrived, and its buffer
        // is kept until the scope ends; the rest is the caller's promise.
        unsafe { target.inner.launch_listed(&mut landed, Way::In, list, &lot, packed)? };
        landed.mark()?;
        self.landing.push_back(landed);
        Ok(())
    }

    /// Waits until all lots that have left have arrived, and lets others pass the gate.
    ///
    /// # Safety
    /// As for [`send`](Self::send).
    unsafe fn end_flight(&mut self, to: &[u32]) -> Result<(), StorageError> {
        while !self.leaving.is_empty() {
            // SAFETY: the caller's promise.
            unsafe { self.land(to)? };
        }
        self.flight = None;
        Ok(())
    }
}
