//! Append-only rows by number: per-block data of a pool that grows. The first bucket is as large as
//! the initial pool, each further one as large as all before it together. Rows neither move nor are
//! removed before the table is dropped, so reading one needs no epoch.

use std::ptr;

use crate::ids::FRAMES_MAX;
use crate::sync::{AtomicPtr, Ordering::*};

/// Number of doublings after the first bucket: enough for any frame number. Fewer in a model.
const BUCKETS_MORE: usize = if cfg!(kvpool_loom) { 3 } else { crate::config::FRAME_BITS as usize };

/// Rows with consecutive numbers, usually one array per field.
pub(crate) trait TablePart: Send + Sync {
    /// Creates rows `base .. base + len` in their initial state.
    fn new(base: usize, len: usize) -> Self;

    fn len(&self) -> usize;
}

pub(crate) struct GrowTable<B: TablePart> {
    first: B,
    more: [AtomicPtr<B>; BUCKETS_MORE],
}

impl<B: TablePart> GrowTable<B> {
    pub(crate) fn new(rows: usize) -> Self {
        Self { first: B::new(0, rows.max(1)), more: std::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())) }
    }

    /// Grows to at least `rows` rows. Threads may call it concurrently.
    pub(crate) fn grow(&self, rows: usize) {
        let mut have = self.first.len();
        for slot in &self.more {
            if have >= rows {
                return;
            }
            if slot.load(Relaxed).is_null() {
                let bucket = Box::into_raw(Box::new(B::new(have, have.min(FRAMES_MAX - have))));
                // Release: publishes the rows; pairs with the Acquire in `locate_grown`.
                if slot.compare_exchange(ptr::null_mut(), bucket, Release, Relaxed).is_err() {
                    // SAFETY: ours and unpublished; another thread published its bucket first.
                    drop(unsafe { Box::from_raw(bucket) });
                }
            }
            have *= 2;
        }
    }

    #[inline]
    pub(crate) fn first(&self) -> &B {
        &self.first
    }

    /// Returns the bucket of a row, and the index in it. Panics if the row does not exist.
    #[inline]
    pub(crate) fn locate(&self, row: usize) -> (&B, usize) {
        if row < self.first.len() { (&self.first, row) } else { self.locate_grown(row) }
    }

    #[cold]
    #[inline(never)]
    fn locate_grown(&self, row: usize) -> (&B, usize) {
        let first = self.first.len();
        // `more[k]` has the rows [first * 2^k, first * 2^(k + 1)).
        let log2 = (row / first).ilog2();
        // SAFETY: made by `grow`, lives as long as `self`. Acquire: pairs with its Release.
        let bucket = unsafe { self.more[log2 as usize].load(Acquire).as_ref() };
        let row = row - (first << log2);
        // The maximum number of frames may truncate the last bucket.
        let bucket = bucket.filter(|bucket| row < bucket.len());
        (bucket.expect("a row of this pool"), row)
    }

    pub(crate) fn len(&self) -> usize {
        // SAFETY: as in `locate_grown`. Acquire: as there.
        let more = self.more.iter().filter_map(|slot| unsafe { slot.load(Acquire).as_ref() });
        self.first.len() + more.map(B::len).sum::<usize>()
    }
}

impl<B: TablePart> Drop for GrowTable<B> {
    fn drop(&mut self) {
        for slot in &self.more {
            let bucket = slot.load(Relaxed);
            if !bucket.is_null() {
                // SAFETY: made by `Box::into_raw` in `grow`, published once, freed once.
                drop(unsafe { Box::from_raw(bucket) });
            }
        }
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    struct Numbers(Vec<usize>);

    impl TablePart for Numbers {
        fn new(base: usize, len: usize) -> Self {
            Self((base..base + len).collect())
        }

        fn len(&self) -> usize {
            self.0.len()
        }
    }

    fn number(rows: &GrowTable<Numbers>, row: usize) -> usize {
        let (bucket, at) = rows.locate(row);
        bucket.0[at]
    }

    #[test]
    fn every_row_is_found_by_its_number_also_after_growth() {
        let rows: GrowTable<Numbers> = GrowTable::new(5);
        assert_eq!(rows.len(), 5);
        rows.grow(70);
        assert_eq!(rows.len(), 80, "5, then 5, 10, 20 and 40");
        for row in 0..80 {
            assert_eq!(number(&rows, row), row);
        }
        rows.grow(3);
        assert_eq!(rows.len(), 80, "rows are never taken away");
    }

    #[test]
    fn no_rows_at_all_are_one() {
        assert_eq!(GrowTable::<Numbers>::new(0).len(), 1);
    }

    #[test]
    fn threads_that_grow_at_once_get_the_same_rows() {
        let rows: GrowTable<Numbers> = GrowTable::new(3);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for to in 1..200 {
                        rows.grow(to);
                        assert_eq!(number(&rows, to - 1), to - 1);
                    }
                });
            }
        });
        assert_eq!(rows.len(), 384);
    }

    #[test]
    #[should_panic(expected = "a row of this pool")]
    fn a_row_that_was_not_made_is_refused() {
        let rows: GrowTable<Numbers> = GrowTable::new(5);
        rows.grow(10);
        rows.locate(10);
    }

    /// In a pool that grows to the maximum, the last bucket is shorter than a full one.
    #[test]
    #[should_panic(expected = "a row of this pool")]
    fn a_row_past_a_bucket_that_is_cut_short_is_refused() {
        let rows: GrowTable<Numbers> = GrowTable::new(5);
        rows.more[0].store(Box::into_raw(Box::new(Numbers::new(5, 2))), Release);
        assert_eq!(number(&rows, 6), 6);
        rows.locate(8);
    }
}
