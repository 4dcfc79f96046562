//! The snapshot as bitmaps, 64 frames per word.

use crate::ids::{FrameId, Order, Run};

use super::super::goal::Move;
use super::super::snapshot::{FrameKind, FrameState, KIND_SHIFT, Snapshot};

pub(super) struct Map<'a> {
    pub snapshot: &'a Snapshot,
    /// Frames that a block can move to.
    pub free: Vec<u64>,
    /// Frames whose block can move.
    pub movable: Vec<u64>,
    takes_growth: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ReservedForGrowth {
    Kept,
    Taken,
}

impl<'a> Map<'a> {
    pub(super) fn of(snapshot: &'a Snapshot, reserved_for_growth: ReservedForGrowth) -> Self {
        let words = snapshot.frames().len().div_ceil(64);
        let (mut free, mut movable) = (Vec::with_capacity(words), Vec::with_capacity(words));
        let (whole, rest) = snapshot.frames().as_chunks::<64>();
        let mut last = [FrameState::new(FrameKind::Fixed, None); 64];
        last[..rest.len()].copy_from_slice(rest);
        for chunk in whole.iter().chain((!rest.is_empty()).then_some(&last)) {
            // Branchless, and vectorized at first: one byte per frame, then one bit per byte.
            let mut kinds = chunk.map(|state| (state.bits() >> KIND_SHIFT) as u8);
            if reserved_for_growth == ReservedForGrowth::Taken {
                // Makes frames reserved for growth free: only 0b101 loses its lowest bit.
                kinds = kinds.map(|kind| kind & !(kind >> 2));
            }
            let (mut high, mut low) = (0, 0);
            for (at, eight) in kinds.as_chunks::<8>().0.iter().enumerate() {
                let eight = u64::from_le_bytes(*eight);
                high |= gather(eight >> 1) << (at * 8);
                low |= gather(eight) << (at * 8);
            }
            free.push(!high & !low);
            movable.push(high & !low);
        }
        Self { snapshot, free, movable, takes_growth: reserved_for_growth == ReservedForGrowth::Taken }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.snapshot.frames().len()
    }

    pub(super) fn none(&self) -> Vec<u64> {
        vec![0; self.free.len()]
    }

    pub(super) fn order(&self, order: Order) -> Option<Order> {
        (order.0 < 32 && order.frames() <= self.len()).then_some(order)
    }

    #[inline]
    pub(super) fn state(&self, frame: u32) -> FrameState {
        self.snapshot.frames()[frame as usize]
    }

    /// Returns whether the frame after this one holds the next block of the same sequence.
    #[inline]
    pub(super) fn is_linked(&self, frame: u32) -> bool {
        matches!(self.snapshot.frames()[frame as usize..], [this, next, ..] if this.is_linked_to(next))
    }

    /// Returns the frames after growing lists that are free in `free`, except
    /// [dropped](Snapshot::dropped) ones.
    pub(super) fn rooms(&self, free: &[u64], ends: &[u64]) -> Vec<u64> {
        let mut last = 0;
        let behind = ends.iter().map(|word| *word << 1 | std::mem::replace(&mut last, word >> 63));
        let dropped = self.snapshot.dropped().iter().chain(std::iter::repeat(&0));
        behind.zip(free).zip(dropped).map(|((behind, free), dropped)| behind & free & !dropped).collect()
    }

    pub(super) fn is_room(&self, frame: u32) -> bool {
        let is_dropped = |frame| {
            self.snapshot.dropped().get(frame as usize / 64).is_some_and(|word| word >> (frame % 64) & 1 == 1)
        };
        (frame as usize) < self.len() && self.state(frame).kind().is_free() && !is_dropped(frame)
    }

    pub(super) fn free_after(&self, moves: &[Move]) -> Vec<u64> {
        let mut free = self.free.clone();
        for &Move { from, to } in moves {
            put(&mut free, from, true);
            put(&mut free, to, false);
        }
        free
    }

    pub(super) fn free_joins(&self, moves: &[Move]) -> isize {
        runs(&self.free) as isize - runs(&self.free_after(moves)) as isize
    }

    pub(super) fn rooms_gained(&self, moves: &[Move]) -> isize {
        let ends = self.snapshot.ends();
        if ends.is_empty() {
            return 0;
        }
        let count = |rooms: Vec<u64>| rooms.iter().map(|word| word.count_ones() as isize).sum::<isize>();
        // Frames reserved for growth are rooms too.
        let is_reserved_for_growth =
            |frame: u32| self.is_room(frame) && self.state(frame).kind() == FrameKind::ReservedForGrowth;
        let before = count(self.rooms(&self.free, ends));
        let (free, mut after) = (self.free_after(moves), ends.to_vec());
        let mut in_growth_units = 0;
        for &Move { from, to } in moves {
            if has(ends, from.0) {
                put(&mut after, from, false);
                put(&mut after, to, true);
                let next = |frame: FrameId| is_reserved_for_growth(frame.0 + 1);
                in_growth_units += isize::from(next(to)) - isize::from(next(from));
            }
        }
        // Frames reserved for growth that the bitmap counts as free are in both counts.
        let in_growth_units = if self.takes_growth { 0 } else { in_growth_units };
        count(self.rooms(&free, &after)) - before + in_growth_units
    }

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

/// Returns the lowest bits of eight bytes as one byte, in the same order.
#[inline]
const fn gather(eight: u64) -> u64 {
    // Each bit is multiplied by the factor that shifts it to its place in the highest byte.
    (eight & 0x0101_0101_0101_0101).wrapping_mul(0x0102_0408_1020_4080) >> 56
}

const _: () = {
    // The encoding that `Map::of` relies on. In the two lower bits, reserved for growth is like
    // away, and evictable like movable.
    assert!(FrameKind::Free as u8 == 0 && FrameKind::Away as u8 == 1);
    assert!(FrameKind::Movable as u8 == 2 && FrameKind::Fixed as u8 == 3);
    assert!(FrameKind::ReservedForGrowth as u8 == 5 && FrameKind::Evictable as u8 == 6);
};

#[inline]
pub(super) fn words(run: Run) -> impl Iterator<Item = (usize, u64)> {
    let (start, end) = (run.start.index(), run.end() as usize);
    (start / 64..end.div_ceil(64)).map(move |word| {
        let from = start.saturating_sub(word * 64);
        let to = (end - word * 64).min(64);
        (word, if from < to { (!0 >> (64 - (to - from))) << from } else { 0 })
    })
}

#[inline]
pub(super) fn count(bitmap: &[u64], run: Run) -> u32 {
    words(run).map(|(word, mask)| (bitmap[word] & mask).count_ones()).sum()
}

/// Returns the number of set bits in each aligned run of `2^order`; the last run may be cut off.
pub(super) fn counts(bitmap: &[u64], order: Order) -> Vec<u32> {
    fn fields<const ORDER: usize>(bitmap: &[u64]) -> Vec<u32> {
        const EVEN: [u64; 5] = [!0 / 3, !0 / 5, !0 / 17, !0 / 257, !0 / 65537];
        let (run_len, mask) = (1 << ORDER, (1 << (1 << ORDER)) - 1);
        let mut counts = vec![0; bitmap.len() * (64 >> ORDER)];
        for (runs, &word) in counts.chunks_exact_mut(64 >> ORDER).zip(bitmap) {
            let mut fields = word;
            for (step, even) in EVEN.iter().enumerate().take(ORDER) {
                fields = (fields & even) + (fields >> (1 << step) & even);
            }
            for (at, run) in runs.iter_mut().enumerate() {
                *run = (fields >> (at * run_len) & mask) as u32;
            }
        }
        counts
    }
    match order.0 {
        0 => fields::<0>(bitmap),
        1 => fields::<1>(bitmap),
        2 => fields::<2>(bitmap),
        3 => fields::<3>(bitmap),
        4 => fields::<4>(bitmap),
        5 => fields::<5>(bitmap),
        _ => {
            let ones = |run: &[u64]| run.iter().map(|word| word.count_ones()).sum();
            bitmap.chunks(1 << (order.0 - 6)).map(ones).collect()
        }
    }
}

#[inline]
pub(super) fn set(bitmap: &mut [u64], run: Run) {
    words(run).for_each(|(word, mask)| bitmap[word] |= mask);
}

#[inline]
pub(super) fn put(bitmap: &mut [u64], frame: FrameId, is_set: bool) {
    let (word, bit) = (frame.index() / 64, frame.index() % 64);
    bitmap[word] = bitmap[word] & !(1 << bit) | u64::from(is_set) << bit;
}

#[inline]
pub(super) fn has(bitmap: &[u64], frame: u32) -> bool {
    bitmap[frame as usize / 64] >> (frame % 64) & 1 == 1
}

/// Returns the number of aligned runs of `2^order` ones. Bits beyond the last frame are zeros.
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

pub(super) fn runs(bitmap: &[u64]) -> usize {
    let mut last = 0;
    let firsts = |&word: &u64| (word & !(word << 1 | std::mem::replace(&mut last, word >> 63))).count_ones();
    bitmap.iter().map(firsts).sum::<u32>() as usize
}

/// Calls `found` with the start and the end of each maximal run of ones, ascending.
pub(super) fn each_run(bitmap: &[u64], mut found: impl FnMut(u32, u32)) {
    let (mut last, mut start) = (0, None);
    for (word, &bits) in bitmap.iter().enumerate() {
        // A set bit differs from the previous one: a run begins or ends there, in alternation.
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

            let (mut found, mut pieces) = (vec![false; bits.len()], 0);
            each_run(&bitmap, |start, end| {
                pieces += 1;
                assert!(start == 0 || !bits[start as usize - 1]);
                assert!(bits.get(end as usize).is_none_or(|bit| !bit));
                found[start as usize..end as usize].fill(true);
            });
            prop_assert_eq!(&found, &bits);
            prop_assert_eq!(pieces, super::runs(&bitmap));

            let mut counted = counts(&bitmap, Order(order));
            counted.truncate(bits.len().div_ceil(1 << order));
            let ones: Vec<u32> =
                bits.chunks(1 << order).map(|run| run.iter().map(|bit| u32::from(*bit)).sum()).collect();
            prop_assert_eq!(counted, ones);

            let third = Run { start: FrameId(bits.len() as u32 / 3), len: bits.len() as u32 / 3 };
            let inside = third.frames().filter(|frame| bits[frame.index()]).count();
            prop_assert_eq!(count(&bitmap, third) as usize, inside);
            set(&mut bitmap, third);
            prop_assert_eq!(count(&bitmap, third), third.len);
        }
    }
}
