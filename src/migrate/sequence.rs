//! Copies of sequences between pools of the process.

use std::time::Instant;

use crate::block::{AllocRequest, Waiting};
use crate::error::{AllocError, TransferError};
use crate::sequence::{AnySequence, Arrival, BlockRefs, ResumeOptions};

use super::carry::forget_cleared;
use super::export::Export;
use super::import::Import;
use super::job;
use super::report::MigrationReport;
use super::route::Route;

/// Transfers of fewer bytes run in the calling thread: waking another would take longer.
const COPIED_AT_ONCE: usize = 256 << 10;

/// A sequence on its way to another pool: its id is open there, and its blocks here are held.
///
/// ```text
/// begin -> take_now, or take_in_turn in each turn of the queue -> copy
/// ```
///
/// Only reads the source. Dropping the copy undoes it.
pub(crate) struct SequenceCopy<S: AnySequence> {
    began: Instant,
    tokens: usize,
    route: Route,
    export: Export<S>,
    arrival: Arrival,
    refs: BlockRefs,
}

impl<S: AnySequence> SequenceCopy<S> {
    /// Opens the copy, with the same id, tokens, committed length and priority.
    pub(crate) fn begin(route: Route, sequence: &S, room: ResumeOptions) -> Result<Self, TransferError> {
        let began = Instant::now();
        // Before the source's: what is cleared here first, and then there, is not found there.
        let era = route.to.era();
        let export = Export::copy_of(&route.from, sequence)?;
        let arrival = Arrival::open(export.outline_for(&route.to), &route.to.sequences, era, room)?;
        let refs = BlockRefs::new(&route.to.sequences);
        Ok(Self { began, tokens: sequence.lists().length(), route, export, arrival, refs })
    }

    pub(crate) fn request(&self) -> AllocRequest {
        self.arrival.request(0)
    }

    /// Takes its blocks in the target, cached or fresh, without waiting. `is_first`: only if no
    /// request of its priority waits.
    pub(crate) fn take_now(&mut self, is_first: bool) -> Result<(), AllocError> {
        self.refs = self.arrival.take_now(is_first)?;
        Ok(())
    }

    pub(crate) fn take_in_turn(&mut self, place: &mut Waiting<'_>) -> Result<(), AllocError> {
        self.refs = self.arrival.take_in_turn(place)?;
        Ok(())
    }

    /// Copies the bytes, and completes the sequence: blocks found in the source's cache can then be
    /// found in the target's. If the future is dropped or fails, there is no effect.
    pub(crate) async fn copy(self) -> Result<(S, MigrationReport), TransferError> {
        let Self { began, tokens, route, export, arrival, refs } = self;
        let mut import = Import::arriving(&route.to, arrival, refs);
        let shared_blocks = import.shared_blocks();
        let is_short = route.is_on_host() && import.missing().len() * route.block_bytes() < COPIED_AT_ONCE;
        let done = job::run(is_short, move |is_abandoned| {
            let carried = route.carry(&export, &mut import, is_abandoned)?;
            Ok((export, import, carried))
        });
        let (export, mut import, mut carried) = done.await?;
        // No await from here on: the caller receives the new sequence, or nothing has happened.
        forget_cleared(&export, &mut import);
        let arrived = import.commit_as(&|_, _| None)?.0.into_grouped();
        let arrived = arrived.unwrap_or_else(|| unreachable!("of the outline of a sequence"));
        drop(export);
        carried.took = began.elapsed();
        Ok((S::of_lists(arrived), MigrationReport { tokens, shared_blocks, carried }))
    }
}
