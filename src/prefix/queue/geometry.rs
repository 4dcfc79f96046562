//! Maps ranks to slots: pure arithmetic.

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Geometry {
    digit_bits: u32,
    /// log2 of the slots that a slot of the level above spans: half a level, or both of two slots.
    step: u32,
    levels: u32,
}

/// A slot, distinct from the slots at the same index in other turns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Slot {
    pub(super) level: usize,
    pub(super) number: u64,
}

/// Maximum: a summary word of 64 bits over 64 words of hints covers 2^12 slots.
const DIGIT_BITS_MAX: u32 = 12;

impl Geometry {
    pub(super) fn new(digit_bits: u32, levels: u32) -> Self {
        assert!((1..=DIGIT_BITS_MAX).contains(&digit_bits), "digits of {digit_bits} bits");
        assert!(levels > 0, "no level");
        let levels = levels.min(Self::levels_of(digit_bits));
        Self { digit_bits, step: Self::step_of(digit_bits), levels }
    }

    /// Covers all ranks, and level 1 spans at least twice the blocks of the pool.
    pub(super) fn suited(blocks: usize) -> Self {
        let digit_bits = (blocks.max(1).ilog2() / 2 + 2).clamp(6, DIGIT_BITS_MAX);
        Self::new(digit_bits, u32::MAX)
    }

    const fn step_of(digit_bits: u32) -> u32 {
        if digit_bits == 1 { 1 } else { digit_bits - 1 }
    }

    const fn levels_of(digit_bits: u32) -> u32 {
        1 + (u64::BITS - digit_bits).div_ceil(Self::step_of(digit_bits))
    }

    /// Returns whether the slot after the cursor's lies entirely in the window of the level below.
    #[inline]
    pub(super) fn overlaps(self) -> bool {
        self.step < self.digit_bits
    }

    pub(super) fn levels(self) -> usize {
        self.levels as usize
    }

    pub(super) fn slots(self) -> usize {
        1 << self.digit_bits
    }

    pub(super) fn rank_max(self) -> u64 {
        u64::MAX >> u64::BITS.saturating_sub(self.shift(self.levels() - 1) + self.digit_bits)
    }

    #[inline]
    pub(super) fn number(self, rank: u64, level: usize) -> u64 {
        rank >> self.shift(level)
    }

    #[inline]
    pub(super) fn index(self, number: u64) -> usize {
        number as usize & (self.slots() - 1)
    }

    /// Returns how many times the level has wrapped, truncated to the bits of a head.
    #[inline]
    pub(super) fn turn(self, number: u64) -> u8 {
        (number >> self.digit_bits) as u8
    }

    /// Returns the number of the slot at `index` within the window.
    pub(super) fn ahead(self, index: usize, level: usize, cursor: u64) -> u64 {
        let at = self.number(cursor, level);
        at.wrapping_add(self.index((index as u64).wrapping_sub(at)) as u64)
    }

    /// Returns the first rank of a slot; `u64::MAX` for a number beyond the last rank.
    #[inline]
    pub(super) fn start(self, slot: Slot) -> u64 {
        let shift = self.shift(slot.level);
        if slot.number > u64::MAX >> shift { u64::MAX } else { slot.number << shift }
    }

    #[inline]
    pub(super) fn start_above(self, rank: u64) -> u64 {
        rank & (!0 << self.step)
    }

    #[inline]
    pub(super) fn end(self, slot: Slot) -> u64 {
        self.start(slot) | ((1 << self.shift(slot.level)) - 1)
    }

    /// Returns the lowest slot for a rank, or `None` if the rank is below the cursor.
    #[inline]
    pub(super) fn place(self, rank: u64, cursor: u64) -> Option<Slot> {
        if rank < cursor {
            return None;
        }
        // The window of the top level contains all ranks.
        let level = (0..self.levels())
            .find(|&level| self.number(rank, level) - self.number(cursor, level) < self.slots() as u64)?;
        Some(Slot { level, number: self.number(rank, level) })
    }

    /// Less than 64: no level lies above the last bit.
    #[inline]
    fn shift(self, level: usize) -> u32 {
        level as u32 * self.step
    }
}
