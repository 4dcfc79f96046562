//! A reservation of address space for the maximum number of frames. Its base never moves, so
//! pointers and descriptors stay valid while the pool grows. Physical memory is taken page by page
//! when bytes are first written (in huge pages where available), reads as zeros at first, and is
//! returned by [`discard`](Reservation::discard). Under Miri, it is a zeroed allocation.

use crate::error::StorageError;

pub(super) use imp::Reservation;

#[cfg(not(miri))]
mod imp {
    use std::ops::Range;

    use memmap2::{MmapOptions, MmapRaw};

    use super::super::planes::HUGE_PAGE;
    use super::StorageError;

    #[derive(Debug)]
    pub(in crate::storage) struct Reservation {
        map: MmapRaw,
        /// Offset of the used part in the mapping, to a huge-page boundary if it is that large.
        offset: usize,
    }

    impl Reservation {
        pub(in crate::storage) fn new(bytes: usize) -> Result<Self, StorageError> {
            let failed = |reason| StorageError::Memory { bytes, reason };
            let slack = if bytes >= HUGE_PAGE { HUGE_PAGE } else { 0 };
            let len = bytes.checked_add(slack).ok_or(failed(std::io::ErrorKind::OutOfMemory))?;
            let map = MmapOptions::new()
                .len(len.max(1))
                .no_reserve_swap()
                .map_anon()
                .map_err(|error| failed(error.kind()))?;
            let map = MmapRaw::from(map);
            let offset = if slack == 0 { 0 } else { map.as_ptr().align_offset(HUGE_PAGE) };
            // Only advice: a kernel without huge pages uses small pages.
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage);
            Ok(Self { map, offset })
        }

        #[inline]
        pub(in crate::storage) fn base(&self) -> *mut u8 {
            // SAFETY: the offset is inside the mapping, which exceeds the used part by a huge page.
            unsafe { self.map.as_mut_ptr().add(self.offset) }
        }

        /// Returns the number of bytes from the base on, including the padding at the end.
        pub(in crate::storage) fn len(&self) -> usize {
            self.map.len() - self.offset
        }

        pub(in crate::storage) fn pages_of(&self, range: Range<usize>) -> Range<usize> {
            // The mapping consists of whole pages.
            #[cfg(target_os = "linux")]
            let page = page_size();
            #[cfg(not(target_os = "linux"))]
            let page = 1;
            range.start / page * page..range.end.next_multiple_of(page)
        }

        /// Returns the whole pages in a range, in bytes from the base, to the system; they then
        /// read as zeros.
        ///
        /// # Safety
        /// No other thread reads or writes these bytes meanwhile.
        pub(in crate::storage) unsafe fn discard(&self, range: Range<usize>) {
            #[cfg(target_os = "linux")]
            {
                let page = page_size();
                // The mapping starts on a page, and the base on a page or a huge page.
                let start = (self.offset + range.start).next_multiple_of(page);
                let end = (self.offset + range.end) / page * page;
                if start < end {
                    // SAFETY: only whole pages inside the range, which the caller owns exclusively.
                    // If it fails, the bytes remain, which is allowed.
                    let _ = unsafe {
                        self.map.unchecked_advise_range(
                            memmap2::UncheckedAdvice::DontNeed,
                            start,
                            end - start,
                        )
                    };
                }
            }
            #[cfg(not(target_os = "linux"))]
            let _ = range;
        }
    }

    #[cfg(target_os = "linux")]
    fn page_size() -> usize {
        // SAFETY: a query that passes no pointers.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(page).unwrap_or(HUGE_PAGE)
    }
}

#[cfg(miri)]
mod imp {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::ops::Range;

    use super::StorageError;

    #[derive(Debug)]
    pub(in crate::storage) struct Reservation {
        base: *mut u8,
        layout: Layout,
    }

    // SAFETY: an owned allocation; its bytes are only touched under the frame rule.
    unsafe impl Send for Reservation {}
    // SAFETY: as above.
    unsafe impl Sync for Reservation {}

    impl Reservation {
        pub(in crate::storage) fn new(bytes: usize) -> Result<Self, StorageError> {
            let failed = StorageError::Memory { bytes, reason: std::io::ErrorKind::OutOfMemory };
            let layout = Layout::from_size_align(bytes.max(1), 64).map_err(|_| failed.clone())?;
            // SAFETY: the size is not zero.
            let base = unsafe { alloc_zeroed(layout) };
            if base.is_null() { Err(failed) } else { Ok(Self { base, layout }) }
        }

        pub(in crate::storage) fn base(&self) -> *mut u8 {
            self.base
        }

        pub(in crate::storage) fn len(&self) -> usize {
            self.layout.size()
        }

        pub(in crate::storage) fn pages_of(&self, range: Range<usize>) -> Range<usize> {
            range
        }

        /// # Safety
        /// As for a mapping.
        pub(in crate::storage) unsafe fn discard(&self, _range: Range<usize>) {}
    }

    impl Drop for Reservation {
        fn drop(&mut self) {
            // SAFETY: allocated above with this layout.
            unsafe { dealloc(self.base, self.layout) };
        }
    }
}
