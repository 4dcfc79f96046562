//! Pages of this process: whether they have memory, and whether child processes get them.

use std::ops::Range;

/// Returns the number of bytes of these page-aligned ranges that have physical memory; 0 if
/// unknown.
pub(super) fn resident_bytes(ranges: &[Range<usize>]) -> usize {
    #[cfg(target_os = "linux")]
    {
        /// Pages of one question.
        const PAGES: usize = 1 << 16;
        let page = page_size();
        let mut states = vec![0u8; PAGES];
        let mut resident = 0;
        for range in ranges {
            for start in range.clone().step_by(PAGES * page) {
                let bytes = (range.end - start).min(PAGES * page);
                let at = std::ptr::with_exposed_provenance_mut(start);
                // SAFETY: the call only looks up the pages; the list has a place for each.
                if unsafe { libc::mincore(at, bytes, states.as_mut_ptr()) } == 0 {
                    let states = &states[..bytes.div_ceil(page)];
                    resident += states.iter().filter(|&&state| state & 1 != 0).count() * page;
                }
            }
        }
        resident
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = ranges;
        0
    }
}

/// Sets whether child processes get the pages of a page-aligned range when this process forks.
/// Returns false if the system refuses.
///
/// After a fork, the process that writes a shared page first gets a copy: the pages that a device
/// accesses would be the child's.
pub(super) fn set_inherited(range: &Range<usize>, is_inherited: bool) -> bool {
    #[cfg(target_os = "linux")]
    {
        let advice = if is_inherited { libc::MADV_DOFORK } else { libc::MADV_DONTFORK };
        let at = std::ptr::with_exposed_provenance_mut(range.start);
        // SAFETY: changes nothing in this process.
        unsafe { libc::madvise(at, range.len(), advice) == 0 }
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (range, is_inherited);
        true
    }
}

/// Returns the size of a page, or a multiple of it.
pub(super) fn page_size() -> usize {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: a query that passes no pointers.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(page).unwrap_or(1 << 12)
    }
    #[cfg(not(target_os = "linux"))]
    {
        1 << 16
    }
}

#[cfg(test)]
mod tests {
    use kvpool::storage::backend::Refusal;
    use kvpool::storage::{HostStorage, Storage};
    use kvpool::{FrameId, KvLayout};

    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn pages_have_memory_once_they_were_written() {
        let host = HostStorage::new(KvLayout::named("tiny").unwrap(), 600, 600).unwrap();
        let mut ranges = Vec::new();
        let refused = host.page_lock(|pages| {
            ranges = pages.ranges;
            Err::<(), _>(Refusal::ForNow)
        });
        assert!(refused.is_none());
        let (before, all) = (resident_bytes(&ranges), ranges.iter().map(Range::len).sum());
        // SAFETY: no one else has the frame.
        let tile = unsafe { host.tile(0, FrameId(300)).unwrap() };
        // SAFETY: as above.
        unsafe { tile.values()[0].cast::<u8>().write(1) };
        assert!(before < all && resident_bytes(&ranges) > before);
        assert!(set_inherited(&ranges[0], false) && set_inherited(&ranges[0], true));
    }
}
