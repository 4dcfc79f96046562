//! The snapshot as bitmaps, 64 frames a word: counting and finding runs goes by words.

use crate::ids::{FrameId, Order, Run};

use super::super::snapshot::{FrameState, Snapshot};

/// A bit for each frame of a snapshot.
pub(super) struct Map<'a> {
    pub snapshot: &'a Snapshot,
    /// Frames that a block can move to.
    pub free: Vec<u64>,
    /// Frames whose block can move.
    pub movable: Vec<u64>,
    /// Frames whose block has its successor in the next frame.
    pub linked: Vec<u64>,
}

impl<'a> Map<'a> {
    pub(super) fn of(snapshot: &'a Snapshot) -> Self {
        let words = snapshot.frames().len().div_ceil(64);
        let mut map = Self {
            snapshot,
            free: Vec::with_capacity(words),
            movable: Vec::with_capacity(words),
            linked: Vec::with_capacity(words),
        };
        // The key after the one at hand; past the end, one that nothing is linked to.
        const END: u64 = 0;
        let frames = snapshot.frames();
        for (word, chunk) in frames.chunks(64).enumerate() {
            let after = frames.get(word * 64 + 64).map_or(END, |state| state.key());
            let mut next = after;
            let (mut high, mut low, mut linked) = (0_u64, 0_u64, 0_u64);
            // From the last to the first, so that each frame is shifted to its place: no branch and no variable shift.
            for state in chunk.iter().rev() {
                let bits = state.bits();
                high = high << 1 | bits >> 63;
                low = low << 1 | bits >> 62 & 1;
                linked = linked << 1 | u64::from(state.key() + 1 == next);
                next = state.key();
            }
            let all = !0 >> (64 - chunk.len());
            map.free.push(!high & !low & all);
            map.movable.push(high & !low);
            map.linked.push(linked);
        }
        map
    }

    /// How many frames there are.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.snapshot.frames().len()
    }

    /// A bitmap of the same size with no bit set.
    pub(super) fn none(&self) -> Vec<u64> {
        vec![0; self.free.len()]
    }

    /// The order to plan at: `None` if the pool has no region of it.
    pub(super) fn order(&self, order: Order) -> Option<Order> {
        (order.0 < 32 && order.frames() <= self.len()).then_some(order)
    }

    /// What a frame holds.
    #[inline]
    pub(super) fn state(&self, frame: u32) -> FrameState {
        self.snapshot.frames()[frame as usize]
    }

    /// Calls `found` with each movable frame of `region`, ascending.
    pub(super) fn each_movable(&self, region: Run, mut found: impl FnMut(FrameId)) {
        for (word, mask) in words(region) {
            let mut rest = self.movable[word] & mask;
            while rest != 0 {
                found(FrameId((word * 64) as u32 + rest.trailing_zeros()));
                rest &= rest - 1;
            }
        }
    }
}

const _: () = {
    // What `Map::of` takes apart: free 0, away 1, movable 2, fixed 3.
    use super::super::snapshot::FrameKind;
    assert!(FrameKind::Free as u8 == 0 && FrameKind::Away as u8 == 1);
    assert!(FrameKind::Movable as u8 == 2 && FrameKind::Fixed as u8 == 3);
};

/// The words that `run` touches, each with the bits of it that belong to the run.
#[inline]
pub(super) fn words(run: Run) -> impl Iterator<Item = (usize, u64)> {
    let (start, end) = (run.start.index(), run.end() as usize);
    (start / 64..end.div_ceil(64)).map(move |word| {
        let from = start.saturating_sub(word * 64);
        let to = (end - word * 64).min(64);
        (word, if from < to { (!0 >> (64 - (to - from))) << from } else { 0 })
    })
}

/// How many bits of `run` are set.
#[inline]
pub(super) fn count(bitmap: &[u64], run: Run) -> u32 {
    words(run).map(|(word, mask)| (bitmap[word] & mask).count_ones()).sum()
}

/// Sets all bits of `run`.
#[inline]
pub(super) fn set(bitmap: &mut [u64], run: Run) {
    words(run).for_each(|(word, mask)| bitmap[word] |= mask);
}

/// Sets or clears one bit.
#[inline]
pub(super) fn put(bitmap: &mut [u64], frame: FrameId, is_set: bool) {
    let (word, bit) = (frame.index() / 64, frame.index() % 64);
    bitmap[word] = bitmap[word] & !(1 << bit) | u64::from(is_set) << bit;
}

/// Whether one bit is set.
#[inline]
pub(super) fn has(bitmap: &[u64], frame: u32) -> bool {
    bitmap[frame as usize / 64] >> (frame % 64) & 1 == 1
}

/// How many of the aligned runs of `2^order` are all ones. Bits past the last frame are zeros.
pub(super) fn free_runs(bitmap: &[u64], order: Order) -> usize {
    if order.0 >= 6 {
        let words = 1 << (order.0 - 6);
        return bitmap.chunks_exact(words).filter(|run| run.iter().all(|word| *word == !0)).count();
    }
    let firsts = !0 / ((1_u128 << order.frames()) - 1) as u64;
    let ones = |word: u64| {
        let mut runs = word;
        (0..order.0).for_each(|step| runs &= runs >> (1 << step));
        (runs & firsts).count_ones() as usize
    };
    bitmap.iter().map(|word| ones(*word)).sum()
}

/// Calls `found` with the start and the end of each maximal run of ones, ascending. The last bit of the last word may
/// be set.
pub(super) fn each_run(bitmap: &[u64], mut found: impl FnMut(u32, u32)) {
    let (mut last, mut start) = (0, None);
    for (word, &bits) in bitmap.iter().enumerate() {
        // A bit for each frame that differs from the one before: where runs begin and end by turns.
        let mut turns = bits ^ (bits << 1 | last);
        last = bits >> 63;
        while turns != 0 {
            let at = (word * 64) as u32 + turns.trailing_zeros();
            match start.take() {
                Some(start) => found(start, at),
                None => start = Some(at),
            }
            turns &= turns - 1;
        }
    }
    if let Some(start) = start {
        found(start, (bitmap.len() * 64) as u32);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bitmaps_agree_with_counting(bits in proptest::collection::vec(prop::bool::weighted(0.8), 1..300), order in 0u8..9) {
            let mut bitmap = vec![0; bits.len().div_ceil(64)];
            for (frame, &is_set) in bits.iter().enumerate() {
                put(&mut bitmap, FrameId(frame as u32), is_set);
            }
            let runs = bits.chunks_exact(1 << order).filter(|run| run.iter().all(|bit| *bit)).count();
            prop_assert_eq!(free_runs(&bitmap, Order(order)), runs);

            let mut found = vec![false; bits.len()];
            each_run(&bitmap, |start, end| {
                assert!(start == 0 || !bits[start as usize - 1]);
                assert!(bits.get(end as usize).is_none_or(|bit| !bit));
                found[start as usize..end as usize].fill(true);
            });
            prop_assert_eq!(&found, &bits);

            let third = Run { start: FrameId(bits.len() as u32 / 3), len: bits.len() as u32 / 3 };
            let inside = third.frames().filter(|frame| bits[frame.index()]).count();
            prop_assert_eq!(count(&bitmap, third) as usize, inside);
            set(&mut bitmap, third);
            prop_assert_eq!(count(&bitmap, third), third.len);
        }
    }
}
