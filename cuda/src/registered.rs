//! Pages of the host that are registered with the driver: the device reads and writes them itself.
//!
//! Registered *portably*: all devices of the process may access the pages. Child processes do not
//! get them: after a fork, the parent's next write to a page that the child shares would get a
//! copy, and the device would go on with the child's page.
//!
//! A registration may take seconds, during which the driver and the gates admit few other calls:
//! pages are registered in pieces, and others go on between two. The driver may refuse a copy
//! across the border of two pieces; borders are between two frames, and copies end there.
//!
//! **The pages stay registered, and their addresses reserved, while a copy may access them.** A
//! copy holds the registration until its end is known. If the context is stuck, a copy may go on at
//! any time, and if the driver refuses to forget the pages, it would take a later mapping at these
//! addresses for them: in both cases the addresses are never given back.

use std::any::Any;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use kvpool::StorageError;
use kvpool::storage::backend::{Pages, Refusal};

use super::context::Context;
use super::gate;
use super::host_pages::{page_size, set_inherited};

/// Registered pages; see the [module](self).
pub(super) struct Registered {
    context: Arc<Context>,
    /// Kept from child processes.
    hidden: Vec<Range<usize>>,
    /// Registered, in ascending order.
    pieces: Vec<Range<usize>>,
    memory: Option<Arc<dyn Any + Send + Sync>>,
}

impl Registered {
    /// Registers all of the pages, which takes memory for those that have none; in pieces of at
    /// most `most` bytes, unless there is no place where `is_border` allows a border.
    ///
    /// # Errors
    /// [`Refusal::ForNow`] if there is too little memory, or the gates do not open;
    /// [`Refusal::Final`], for example for pages that other code has registered;
    /// [`Refusal::OfCaller`] if the device is lost. No page is registered.
    pub(super) fn new(
        context: &Arc<Context>,
        pages: Pages,
        most: usize,
        is_border: impl Fn(usize) -> bool,
    ) -> Result<Self, Refusal> {
        let (hidden, pieces, memory) = (Vec::new(), Vec::new(), Some(pages.memory));
        let mut all = Self { context: context.clone(), hidden, pieces, memory };
        for range in pages.ranges {
            // Before: a fork in between would share the pages.
            if !set_inherited(&range, false) {
                return Err(Refusal::ForNow);
            }
            all.hidden.push(range.clone());
            for piece in cut(range, most, page_size(), &is_border) {
                all.register(piece)?;
                gate::admit_flights();
            }
        }
        Ok(all)
    }

    fn register(&mut self, piece: Range<usize>) -> Result<(), Refusal> {
        let refusal = |error: StorageError| if error.is_lost() { Refusal::OfCaller } else { Refusal::ForNow };
        let _passes = self.context.pass_all().map_err(refusal)?;
        let _entered = self.context.enter().map_err(refusal)?;
        let at = ptr::with_exposed_provenance_mut(piece.start);
        // Kernels access them, too.
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: mapped memory, which stays mapped while it is registered. The context is current.
        match unsafe { sys::cuMemHostRegister_v2(at, piece.len(), flags) } {
            CUresult::CUDA_SUCCESS => self.pieces.push(piece),
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(Refusal::ForNow),
            // Drivers may refuse by any error. If the context is lost, the next query will tell.
            _ => return Err(Refusal::Final),
        }
        Ok(())
    }

    /// Returns the index of the piece with an address: copies of frames of two pieces are apart.
    pub(super) fn piece_of(&self, address: u64) -> usize {
        self.pieces.partition_point(|piece| piece.start as u64 <= address)
    }

    /// Returns false if the device that has registered the pages is lost.
    pub(super) fn is_good(&self) -> bool {
        self.context.good().is_ok()
    }

    /// Unregisters all pages. Returns false if that is not certain.
    fn forget(&self) -> bool {
        if self.context.is_stuck() {
            return false;
        }
        self.pieces.iter().all(|piece| {
            let Ok(_passes) = self.context.pass_all() else { return false };
            let _entered = self.context.enter_even_if_lost();
            let at = ptr::with_exposed_provenance_mut(piece.start);
            // SAFETY: registered here, and no copy accesses the pages any more.
            unsafe { sys::cuMemHostUnregister(at) == CUresult::CUDA_SUCCESS }
        })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if !self.pieces.is_empty() && !self.forget() {
            return std::mem::forget(self.memory.take());
        }
        for range in &self.hidden {
            set_inherited(range, true);
        }
    }
}

/// Cuts a range of whole pages into pieces of at most `most` bytes. A piece is longer if no page of
/// it starts where a border is allowed.
fn cut(
    range: Range<usize>,
    most: usize,
    page: usize,
    is_border: impl Fn(usize) -> bool,
) -> Vec<Range<usize>> {
    let (mut pieces, mut start) = (Vec::new(), range.start);
    let is_end = |&at: &usize| is_border(at);
    while range.end - start > most {
        let (near, end) = (most / page, (range.end - start) / page);
        let place = |pages: usize| (start / page + pages) * page;
        let Some(at) =
            (1..=near).rev().map(place).find(is_end).or_else(|| (near.max(1)..end).map(place).find(is_end))
        else {
            break;
        };
        pieces.push(start..at);
        start = at;
    }
    pieces.push(start..range.end);
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_range_and_end_between_frames() {
        const PAGE: usize = 4096;
        // Frames of three pages, of which the first one starts at the second page.
        let is_border = |at: usize| (at - 5 * PAGE).is_multiple_of(3 * PAGE);
        let range = 4 * PAGE..40 * PAGE;
        for (most, lens) in [
            (40 * PAGE, vec![36]),
            (36 * PAGE, vec![36]),
            (14 * PAGE, vec![13, 12, 11]),
            (7 * PAGE, vec![7, 6, 6, 6, 6, 5]),
            // Too short for a frame.
            (2 * PAGE, vec![1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 2]),
        ] {
            let pieces = cut(range.clone(), most, PAGE, |at| at >= 5 * PAGE && is_border(at));
            assert_eq!(pieces.iter().map(|piece| piece.len() / PAGE).collect::<Vec<_>>(), lens);
            assert!(pieces.windows(2).all(|two| two[0].end == two[1].start && is_border(two[1].start)));
            assert_eq!(
                (pieces[0].start, pieces.last().map(|piece| piece.end)),
                (range.start, Some(range.end))
            );
        }
        assert_eq!(cut(range.clone(), PAGE, PAGE, |_| false), [range]);
    }
}
