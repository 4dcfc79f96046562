//! Frames for several lists by one request: all of them or none.
//!
//! Each list takes frames [at its end](super::growth), as if it had asked alone, except that blocks
//! are evicted only if that can satisfy the whole request. The rest comes from the other steps of
//! the ladder, for all lists together. Only the whole request is refused or granted, so no list
//! holds frames while another one is refused.

use std::cell::Cell;

use crate::error::AllocError;
use crate::ids::BlockId;

use super::grab::Grab;
use super::growth::ListEnd;
use super::ladder::Aim;
use crate::block::core::{Blocks, Core};
use crate::block::request::AllocRequest;

/// What one of several lists asks for.
pub struct ListShare {
    end: ListEnd,
    blocks: usize,
    /// Number of frames found at its end, or in units for it alone.
    own: Cell<usize>,
}

impl ListShare {
    /// Asks for a number of blocks, which may be 0, for the list that ends there.
    pub fn new(end: ListEnd, blocks: usize) -> Self {
        Self { end, blocks, own: Cell::new(0) }
    }
}

impl Blocks {
    /// Allocates blocks for several lists, all or nothing, like
    /// [`allocate_listed`](Self::allocate_listed) for one. Passes on the index of the list and a
    /// block of it, in the list's order. `request` is for the sum.
    pub fn allocate_for_lists(
        &self,
        request: &AllocRequest,
        shares: &[ListShare],
        take: &mut dyn FnMut(usize, BlockId),
    ) -> Result<(), AllocError> {
        debug_assert_eq!(request.blocks, shares.iter().map(|share| share.blocks).sum::<usize>());
        self.check_turn(request)?;
        let mut grab = Grab::new();
        self.allocate_into(request, Aim::Lists(shares), &mut grab)?;
        self.count_further(-(request.blocks as isize));
        // The frames of each list alone come first, in the order of the lists.
        let own = shares.iter().map(|share| share.own.get());
        let rest = shares.iter().map(|share| share.blocks - share.own.get());
        let of = |(list, blocks)| std::iter::repeat_n(list, blocks);
        let mut lists = own.enumerate().chain(rest.enumerate()).flat_map(of);
        self.hand_out(&grab, request, |id| {
            take(lists.next().expect("a request gets as many blocks as it asked for"), id);
        });
        Ok(())
    }
}

impl Core {
    /// Takes frames for each list at its end, and whole units.
    pub(super) fn gather_lists(&self, shares: &[ListShare], request: &AllocRequest, grab: &mut Grab) {
        for share in shares {
            let before = grab.frames;
            self.gather_list(share.end, share.blocks, request, grab);
            share.own.set(grab.frames - before);
        }
    }
}
