//! Every operation that changes a word: claims and frees.
//!
//! | operation | on the word | linearises at |
//! |---|---|---|
//! | claim | compare-exchange: all bits taken were free | the exchange |
//! | drain | `fetch_and`: takes the wanted bits that are free | the `fetch_and` |
//! | free | `fetch_or`; a leaf that becomes full is moved up | the `fetch_or` |
//! | merge | leaf compare-exchange ALL -> 0, then unit `fetch_or` | its frames are in transit in between |
//! | named claim | word by word, low to high; a conflict rolls it back | its frames are in transit until it is decided |
//!
//! Orderings: frees are Release and claims Acquire, so that a new owner sees the old owner's
//! writes. Every change is a read-modify-write, so that a claim reads from all frees whose bits it
//! takes, not only from the last. An operation that puts frames in transit is also Release, so that
//! a searcher that misses the frames sees the passage.

use super::bits::{ALL, ones};
use super::map::{Level, Map};
use super::scan::Attempt;
use super::transit::Passage;
use crate::config::{FAN, FAN_LOG2};
use crate::ids::{FrameId, Run};
use crate::sync::Ordering;

/// Passages begun by a failing [`Map::claim_run`] that has nothing to roll back.
pub(super) const CLAIM_PASSAGES: u64 = 1;

#[must_use]
pub(super) struct Claimed<'a> {
    pub(super) index: usize,
    pub(super) mask: u64,
    /// Passage that stays open until the claimer has freed the rest.
    pub(super) passage: Option<Passage<'a>>,
}

#[derive(Clone, Copy)]
enum Piece {
    Frames { leaf: usize, mask: u64 },
    Units { group: usize, mask: u64 },
}

impl<'a> Map<'a> {
    /// Claims the bits that `pick` chooses from an open word. With `gives_back`, the claim is a
    /// passage until the caller drops it.
    #[inline]
    pub(super) fn claim_word(
        self,
        level: Level,
        index: usize,
        gives_back: bool,
        pick: impl Fn(u64) -> Option<u64>,
    ) -> Option<Claimed<'a>> {
        let word = self.word(level, index)?;
        let mut passage = None;
        let mut old = word.bits.load(Ordering::Relaxed);
        loop {
            let mask = pick(old & !word.closed)?;
            if gives_back && passage.is_none() {
                passage = Some(word.transit.enter());
            }
            // Acquire: pairs with the frees of these bits. Release: publishes the passage.
            match word.bits.compare_exchange_weak(old, old & !mask, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Some(Claimed { index, mask, passage }),
                // Lost to another claim or a free. Reached by the models in `claim_free`.
                Err(now) => old = now,
            }
        }
    }

    /// Claims up to `want` of an open leaf's frames in one `fetch_and`. Not `swap(0)`, which would
    /// also take frames freed concurrently, beyond `want`.
    #[inline]
    pub(super) fn drain(self, leaf: usize, want: u32) -> Option<u64> {
        let word = self.word(Level::Leaf, leaf)?;
        let wanted = super::bits::low_bits(word.open(), want);
        if wanted == 0 {
            return None;
        }
        // Acquire: pairs with the Release of the frees of these bits.
        let got = word.bits.fetch_and(!wanted, Ordering::Acquire) & wanted;
        // Zero if other threads took all of them first. Reached by the models in `refill`.
        (got != 0).then_some(got)
    }

    #[inline]
    pub(super) fn free_mask(self, leaf: usize, mask: u64) {
        let word = self.directory.leaf(leaf).unwrap_or_else(|| no_such("leaf", leaf, mask));
        // Release: pairs with the Acquire of the claim that takes these bits.
        let old = word.fetch_or(mask, Ordering::Release);
        assert!(old & mask == 0, "double free: leaf {leaf} holds {old:#018x}, freed {mask:#018x}");
        let new = old | mask;
        if new != ALL || !self.merge(leaf) {
            self.offer(Level::Leaf, leaf, old, new);
        }
    }

    /// Merges a full leaf into its unit bit. False: another thread claimed from it or merged it.
    fn merge(self, leaf: usize) -> bool {
        let (group, bit) = self.directory.shape.unit_place(leaf);
        let (Some(word), Some(group)) = (self.directory.leaf(leaf), self.directory.group(group)) else {
            no_such("leaf", leaf, ALL)
        };
        let passage = group.transit.enter();
        // One of the threads that saw the leaf full merges it. Reached by the models in `merge`.
        let moved = word.compare_exchange(ALL, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if moved {
            self.free_units_in(leaf, 1 << bit, passage);
        }
        moved
    }

    fn free_units_in(self, unit: usize, mask: u64, passage: impl Sized) {
        let (index, _) = self.directory.shape.unit_place(unit);
        let group = self.directory.group(index).unwrap_or_else(|| no_such("group", index, mask));
        // Release: pairs with the Acquire of the claim of these units.
        let old = group.units.fetch_or(mask, Ordering::Release);
        assert!(old & mask == 0, "double free: group {index} holds {old:#018x}, freed {mask:#018x}");
        drop(passage);
        self.offer(Level::Unit, index, old, old | mask);
    }

    #[inline]
    pub(super) fn free_run(self, run: Run) {
        let pos = run.start.0 & (FAN as u32 - 1);
        if pos + run.len < FAN as u32 {
            return self.free_mask(run.start.index() >> FAN_LOG2, ones(pos, run.len));
        }
        self.for_each_piece(run, |piece| {
            match piece {
                Piece::Frames { leaf, mask } => self.free_mask(leaf, mask),
                Piece::Units { group, mask } => {
                    self.free_units_in(self.directory.shape.first_unit(group), mask, ());
                }
            }
            true
        });
    }

    /// Splits a run by word, ascending. Returns the first frame of a part that `visit` rejects.
    #[inline]
    fn for_each_piece(self, run: Run, mut visit: impl FnMut(Piece) -> bool) -> Option<usize> {
        let shape = self.directory.shape;
        let (mut at, end) = (run.start.index(), run.end() as usize);
        while at < end {
            let (leaf, pos) = (at >> FAN_LOG2, at & (FAN - 1));
            let (piece, len) = if pos == 0 && end - at >= FAN {
                let (group, bit) = shape.unit_place(leaf);
                let units = ((end - at) >> FAN_LOG2).min(shape.units_in_group() - bit as usize);
                (Piece::Units { group, mask: ones(bit, units as u32) }, units << FAN_LOG2)
            } else {
                let len = (end - at).min(FAN - pos);
                (Piece::Frames { leaf, mask: ones(pos as u32, len as u32) }, len)
            };
            if !visit(piece) {
                return Some(at);
            }
            at += len;
        }
        None
    }

    /// Claims exactly this run, closed or not, or nothing. Claims words low to high: of several
    /// threads that claim overlapping runs, the one furthest ahead is not obstructed.
    /// [`Attempt::Missed`] is conclusive only if no other frame was in transit, apart from its own
    /// [`CLAIM_PASSAGES`], and no rolled-back frames merged.
    pub(super) fn claim_run(self, run: Run) -> Attempt<()> {
        let first = self.directory.shape.unit_place(run.start.index() >> FAN_LOG2).0;
        let Some(group) = self.directory.group(first) else { return Attempt::Missed };
        let _passage = group.transit.enter();
        let refused = self.for_each_piece(run, |piece| match piece {
            Piece::Frames { leaf, mask } => self.claim_frames(leaf, mask),
            Piece::Units { group, mask } => self.claim_units(group, mask),
        });
        let Some(refused) = refused else { return Attempt::Found(()) };
        // A frame was taken: roll back. Reached by the models in `named_claim`.
        self.free_run(Run { start: run.start, len: refused as u32 - run.start.0 });
        Attempt::Missed
    }

    fn claim_frames(self, leaf: usize, mask: u64) -> bool {
        let Some(word) = self.directory.leaf(leaf) else { return false };
        let mut old = word.load(Ordering::Relaxed);
        while old & mask == mask {
            match word.compare_exchange_weak(old, old & !mask, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => old = now,
            }
        }
        let (index, bit) = self.directory.shape.unit_place(leaf);
        let Some(group) = self.directory.group(index) else { return false };
        // The load keeps a claim that must fail from writing to the group.
        if group.units.load(Ordering::Relaxed) >> bit & 1 == 0
            || group.units.fetch_and(!(1 << bit), Ordering::AcqRel) >> bit & 1 == 0
        {
            return false;
        }
        if mask != ALL {
            self.free_mask(leaf, ALL & !mask);
        }
        true
    }

    fn claim_units(self, index: usize, mask: u64) -> bool {
        let Some(group) = self.directory.group(index) else { return false };
        let mut old = group.units.load(Ordering::Relaxed);
        while old & mask == mask {
            match group.units.compare_exchange_weak(old, old & !mask, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => old = now,
            }
        }
        // A unit may be full in its leaf and not merged yet: claim the units one by one. Reached by
        // the models in `named_claim`.
        let first = self.directory.shape.first_unit(index);
        for bit in (0..u64::BITS).filter(|bit| mask >> bit & 1 == 1) {
            if !self.claim_frames(first + bit as usize, ALL) {
                for taken in (0..bit).filter(|bit| mask >> bit & 1 == 1) {
                    self.free_units_in(first, 1 << taken, ());
                }
                return false;
            }
        }
        true
    }

    pub(super) fn run_of_frames(leaf: usize, mask: u64) -> Run {
        let start = (leaf << FAN_LOG2) as u32 + mask.trailing_zeros();
        Run { start: FrameId(start), len: mask.count_ones() }
    }

    /// Keeps the first `len` frames of claimed units and frees the rest at once.
    pub(super) fn keep(self, claimed: Claimed<'a>, len: u32) -> Run {
        let unit = self.directory.shape.first_unit(claimed.index) + claimed.mask.trailing_zeros() as usize;
        let run = Run { start: FrameId((unit << FAN_LOG2) as u32), len };
        let rest = (claimed.mask.count_ones() << FAN_LOG2) - len;
        if rest > 0 {
            self.free_run(Run { start: FrameId(run.end()), len: rest });
        }
        drop(claimed.passage);
        run
    }
}

#[cold]
fn no_such(what: &str, index: usize, mask: u64) -> ! {
    panic!("freed {mask:#018x} of {what} {index}, which the pool does not have")
}
