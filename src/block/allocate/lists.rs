//! Frames for several lists by one request: all of them or none.
//!
//! Each list takes frames [at its end](super::growth), as if it had asked alone, except that blocks
//! are evicted only if that can satisfy the whole request. The rest comes from the other steps of
//! the ladder, for all lists together. Only the whole request is refused or granted, so no list
//! holds frames while another one is refused.

use std::cell::Cell;

use super::grab::Grab;
use super::growth::ListEnd;
use crate::block::core::Core;
use crate::block::request::AllocRequest;
use crate::block::tenants::Tenant;

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

/// Returns the tenant of the lists, which are of one sequence.
pub(super) fn tenant_of(shares: &[ListShare]) -> Tenant {
    shares.first().map_or(Tenant::NONE, |share| share.end.tenant)
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

/// Returns the list of each frame that a granted request has gathered, in their order: those of each
/// list alone come first.
pub(in crate::block) fn lists_of(shares: &[ListShare]) -> impl Iterator<Item = usize> {
    let own = shares.iter().map(|share| share.own.get());
    let rest = shares.iter().map(|share| share.blocks - share.own.get());
    own.enumerate().chain(rest.enumerate()).flat_map(|(list, blocks)| std::iter::repeat_n(list, blocks))
}
