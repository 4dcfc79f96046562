//! A bucket: one cache line of slots, each of which is a separate atomic word.
//!
//! Searches have no branch per slot; on x86-64, they compare the upper halves of all words at once.

use crate::sync::{AtomicU64, Ordering, Ordering::*, prefetch};

use super::entry::Entry;

/// Slots of a bucket. Fewer under loom, so that buckets fill up.
pub(super) const WAYS: usize = if cfg!(kvpool_loom) { 2 } else { 8 };

/// Set of slots of a bucket, one bit each.
pub(super) type Slots = u32;

#[inline]
pub(super) fn each(mut slots: Slots) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let at = slots.trailing_zeros() as usize;
        slots &= slots.wrapping_sub(1);
        (at < WAYS).then_some(at)
    })
}

pub(super) struct Room {
    pub(super) is_there: bool,
    pub(super) has_alike: bool,
    pub(super) empty: Slots,
}

impl Room {
    /// Returns the bucket with more room, and what holds for both.
    pub(super) fn or_emptier<'b>(
        self,
        own: &'b Bucket,
        other: &'b Bucket,
        in_other: Self,
    ) -> (&'b Bucket, Self) {
        let is_own = self.empty.count_ones() >= in_other.empty.count_ones();
        let (bucket, empty) = if is_own { (own, self.empty) } else { (other, in_other.empty) };
        let is_there = self.is_there || in_other.is_there;
        (bucket, Self { is_there, has_alike: self.has_alike || in_other.has_alike, empty })
    }
}

#[repr(align(64))]
pub(super) struct Bucket([AtomicU64; WAYS]);

impl Bucket {
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(Entry::EMPTY.to_bits())))
    }

    #[cfg(any(test, not(target_arch = "x86_64"), miri, kvpool_loom))]
    #[inline]
    fn slots(&self, so: impl Fn(Entry) -> bool) -> Slots {
        // Relaxed: callers that act on a slot read it again.
        let bits = self.0.iter().map(|slot| Slots::from(so(Entry::from_bits(slot.load(Relaxed)))));
        bits.enumerate().fold(0, |slots, (at, bit)| slots | bit << at)
    }

    /// Returns the slots that are equal to this entry, which is not empty.
    #[inline]
    pub(super) fn equal(&self, entry: Entry) -> Slots {
        self.equal_among(self.like(entry), entry)
    }

    #[inline]
    fn equal_among(&self, slots: Slots, entry: Entry) -> Slots {
        each(slots).filter(|&at| self.entry(at) == entry).fold(0, |equal, at| equal | 1 << at)
    }

    #[inline]
    pub(super) fn room(&self, entry: Entry) -> Room {
        let (like, empty) = self.like_and_empty(entry);
        let equal = self.equal_among(like, entry);
        Room { is_there: equal != 0, has_alike: like != equal, empty }
    }

    /// Returns the slots with this fingerprint, and perhaps others: callers re-read them.
    #[inline]
    pub(super) fn like(&self, entry: Entry) -> Slots {
        self.like_and_empty(entry).0
    }

    /// Returns the slots as [`like`](Self::like) does, and the empty ones.
    #[cfg(not(all(target_arch = "x86_64", not(miri), not(kvpool_loom))))]
    #[inline]
    fn like_and_empty(&self, entry: Entry) -> (Slots, Slots) {
        (self.slots(|other| entry.is_like(other)), self.slots(|other| other == Entry::EMPTY))
    }

    /// Like the portable version: empty slots have upper halves of 0.
    #[cfg(all(target_arch = "x86_64", not(miri), not(kvpool_loom)))]
    #[inline]
    fn like_and_empty(&self, entry: Entry) -> (Slots, Slots) {
        let slots: Slots;
        // SAFETY: reads only the 64 bytes of the bucket, aligned to 64; every processor of this
        // architecture has these instructions. Assembly, because other threads change the words
        // concurrently: for the processor this is an ordinary load, in which each half of a word is
        // of one moment, and for the compiler it is opaque.
        unsafe {
            std::arch::asm!(
                "movd {wanted}, {high:e}",
                "pshufd {wanted}, {wanted}, 0",
                "pxor {low_empty}, {low_empty}",
                "pxor {high_empty}, {high_empty}",
                // The upper halves of words 0 to 3, and of 4 to 7.
                "movaps {low_four}, [{bucket}]",
                "shufps {low_four}, [{bucket} + 16], 0xdd",
                "movaps {high_four}, [{bucket} + 32]",
                "shufps {high_four}, [{bucket} + 48], 0xdd",
                // All ones where they match: 32 bits each, then 16, 8, one; like it, then empty.
                "pcmpeqd {low_empty}, {low_four}",
                "pcmpeqd {high_empty}, {high_four}",
                "pcmpeqd {low_four}, {wanted}",
                "pcmpeqd {high_four}, {wanted}",
                "packssdw {low_four}, {high_four}",
                "packssdw {low_empty}, {high_empty}",
                "packsswb {low_four}, {low_empty}",
                "pmovmskb {slots:e}, {low_four}",
                high = in(reg) entry.to_bits() >> 32,
                bucket = in(reg) self.0.as_ptr(),
                wanted = out(xmm_reg) _,
                low_four = out(xmm_reg) _,
                high_four = out(xmm_reg) _,
                low_empty = out(xmm_reg) _,
                high_empty = out(xmm_reg) _,
                slots = out(reg) slots,
                options(readonly, nostack, preserves_flags),
            );
        }
        (slots & 0xff, slots >> WAYS)
    }

    /// Acquire: pairs with the Release of the entry; shows the block's word of then, or newer.
    #[inline]
    pub(super) fn entry(&self, at: usize) -> Entry {
        Entry::from_bits(self.0[at].load(Acquire))
    }

    #[inline]
    pub(super) fn exchange(&self, at: usize, from: Entry, to: Entry, order: Ordering) -> bool {
        self.0[at].compare_exchange(from.to_bits(), to.to_bits(), order, Relaxed).is_ok()
    }

    #[inline]
    pub(super) fn fetch(&self) {
        prefetch(self);
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::super::entry::Key;
    use super::*;
    use crate::ids::BlockId;

    #[test]
    fn all_slots_of_a_fingerprint_are_found_and_no_others() {
        let (key, other) = (Key(0, 0x9123_4567_89ab_cdef), Key(0, 0x9123_4568_89ab_cdef));
        for set in 0..1 << WAYS {
            let bucket = Bucket::new();
            for at in 0..WAYS {
                let entry = match (set >> at & 1, at % 2) {
                    (1, _) => key.entry(BlockId(at as u32)),
                    (_, 1) => other.entry(BlockId(at as u32)),
                    _ => Entry::EMPTY,
                };
                bucket.0[at].store(entry.to_bits(), Relaxed);
            }
            let like = key.entry(BlockId(77));
            assert_eq!(bucket.like(like), set);
            assert_eq!(bucket.like_and_empty(like), (set, bucket.slots(|other| other == Entry::EMPTY)));
            assert_eq!(bucket.slots(|other| like.is_like(other)), set);
        }
    }

    /// `like` may report false positives that match in the upper half, but no false negatives.
    #[test]
    fn fingerprints_are_told_apart() {
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..if cfg!(miri) { 20 } else { 100_000 } {
            let bucket = Bucket::new();
            let keys: [Key; WAYS] =
                std::array::from_fn(|_| Key(0, random.u64(..4) << 60 | random.u64(..4) << 27));
            for (slot, key) in bucket.0.iter().zip(keys) {
                slot.store(key.entry(BlockId(random.u32(..1 << 27))).to_bits(), Relaxed);
            }
            let wanted = keys[random.usize(..WAYS)].entry(BlockId(0));
            let (exact, found) = (bucket.slots(|other| wanted.is_like(other)), bucket.like(wanted));
            assert_eq!(exact & !found, 0, "a matching slot is missing");
            assert_eq!(bucket.like_and_empty(wanted), (found, 0));
            assert_eq!(bucket.equal(wanted), bucket.slots(|other| other == wanted));
            let is_upper = |at: u32| (bucket.entry(at as usize).to_bits() ^ wanted.to_bits()) >> 32 == 0;
            assert!(
                (0..WAYS as u32).filter(|at| found >> at & 1 == 1).all(is_upper),
                "a slot differs in its upper half"
            );
        }
    }
}
