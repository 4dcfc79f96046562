//! The features of a released block, packed into its state.
//!
//! ```text
//!  63                          25 24    22 21  18 17  14 13 10 9   6 5   3 2   0
//! | order of release, low 39 bits | branch | chain | gap | new | tail | turn | hits |
//! ```
//!
//! | feature | of | meaning |
//! |---|---|---|
//! | hits | block | times that it was a hit, in eight classes |
//! | turn | request | times that its prefix was continued near its end before: the turn of a conversation |
//! | tail | block | log2 of the blocks behind it in its chain |
//! | new | request | log2 of the blocks of its prompt that were never seen |
//! | gap | request | log4 of the age of the chain that it continued |
//! | chain | request | log2 of its blocks |
//! | branch | request | distance from the end of the chain at which it was continued: a next turn, or another use of a common beginning |
//!
//! The chain of a state is never zero, so that no state is 0, which means "nothing known".

/// A feature: its position in the bits.
#[derive(Clone, Copy)]
pub(super) struct Feature {
    shift: u32,
    bits: u32,
}

impl Feature {
    const fn after(previous: Self, bits: u32) -> Self {
        Self { shift: previous.shift + previous.bits, bits }
    }

    /// Returns whether both are the same feature.
    pub(super) const fn is(self, other: Self) -> bool {
        self.shift == other.shift
    }

    /// Returns its greatest value.
    const fn max(self) -> u64 {
        (1 << self.bits) - 1
    }

    const fn put(self, value: u64) -> u64 {
        (if value > self.max() { self.max() } else { value }) << self.shift
    }
}

pub(super) const HITS: Feature = Feature { shift: 0, bits: 3 };
pub(super) const TURN: Feature = Feature::after(HITS, 3);
pub(super) const TAIL: Feature = Feature::after(TURN, 4);
pub(super) const NEW: Feature = Feature::after(TAIL, 4);
pub(super) const GAP: Feature = Feature::after(NEW, 4);
pub(super) const CHAIN: Feature = Feature::after(GAP, 4);
pub(super) const BRANCH: Feature = Feature::after(CHAIN, 3);

/// All of them.
pub(super) const ALL: [Feature; 7] = [HITS, TURN, TAIL, NEW, GAP, CHAIN, BRANCH];

const ORDER_SHIFT: u32 = BRANCH.shift + BRANCH.bits;

/// Number of values of a feature in the model.
pub(super) const VALUES: usize = 16;

const _: () = assert!(ORDER_SHIFT == 25 && TAIL.max() < VALUES as u64 && HITS.max() < VALUES as u64);

/// Returns the bits of a number: 0 for 0, else 1 + log2.
const fn bits_of(number: u32) -> u64 {
    (u32::BITS - number.leading_zeros()) as u64
}

/// The features of a request: the context of its releases, a state without the block's own
/// features.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Request(pub u64);

impl Request {
    /// Creates the features of a prompt with `new` blocks never seen, which continues a block of
    /// this state and of this age in [octaves](super::ages).
    pub(super) fn new(new: u32, taken_up: Option<(State, usize)>) -> Self {
        let mut bits = NEW.put(bits_of(new));
        if let Some((state, octaves)) = taken_up {
            let (tail, chain) = (state.get(TAIL) as u64, state.get(CHAIN) as u64);
            // A chain continued in its last quarter is the same conversation; one continued earlier
            // is a common beginning.
            let goes_on = tail <= 1 || tail + 2 <= chain;
            let turn = if goes_on { state.get(TURN) as u64 + 1 } else { 0 };
            bits |= TURN.put(turn) | GAP.put(1 + octaves as u64 / 2) | BRANCH.put(1 + tail.min(6));
        }
        Self(bits)
    }
}

/// A block's state. Any bits are valid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct State(pub u64);

impl State {
    /// Creates the state of a block of this request, at `depth` in a chain of `chain` blocks.
    pub(super) fn new(request: Request, order: u64, hits: u32, depth: u32, chain: u32) -> Self {
        const OF_REQUEST: u64 =
            ((1 << ORDER_SHIFT) - 1) & !(HITS.max() << HITS.shift | TAIL.max() << TAIL.shift);
        let hits = match hits {
            0..=3 => hits.into(),
            4..=5 => 4,
            6..=9 => 5,
            10..=14 => 6,
            _ => 7,
        };
        let tail = bits_of(chain.saturating_sub(depth).saturating_sub(1));
        let request = request.0 & OF_REQUEST & !(CHAIN.max() << CHAIN.shift);
        let own = HITS.put(hits) | TAIL.put(tail) | CHAIN.put(bits_of(chain.max(1)));
        Self(order << ORDER_SHIFT | request | own)
    }

    /// Returns the state of these bits; `None` for 0.
    pub(super) fn known(bits: u64) -> Option<Self> {
        (bits != 0).then_some(Self(bits))
    }

    /// Returns the value of a feature, below [`VALUES`].
    pub(super) const fn get(self, feature: Feature) -> usize {
        (self.0 >> feature.shift & feature.max()) as usize
    }

    /// Returns what a score depends on: all features, of the [tail](TAIL) only whether there is
    /// one. Never 0.
    pub(super) const fn score_key(self) -> u32 {
        let others = self.0 & ((1 << ORDER_SHIFT) - 1) & !(TAIL.max() << TAIL.shift);
        let tail = if self.get(TAIL) == 0 { 0 } else { 1 << TAIL.shift };
        (others | tail | 1 << ORDER_SHIFT) as u32
    }

    /// Returns the number of blocks released since, given the latest order; zero if that is
    /// earlier.
    pub(super) const fn age(self, latest: u64) -> u64 {
        const MASK: u64 = u64::MAX >> ORDER_SHIFT;
        let age = latest.wrapping_sub(self.0 >> ORDER_SHIFT) & MASK;
        // Orders are drawn before `latest` is updated: slightly negative ages count as zero.
        if age > MASK / 2 { 0 } else { age }
    }
}

/// Returns the number of blocks that the block at `depth` stands for, if it is noted: blocks at a
/// power of two from the end of the chain stand for those up to the next one, and the first block
/// for those before the last of them.
pub(super) const fn stands_for(depth: u32, chain: u32) -> Option<u32> {
    let to_end = chain.saturating_sub(depth);
    if to_end.is_power_of_two() {
        return Some(if to_end == 1 { 1 } else { to_end / 2 });
    }
    if depth > 0 || chain == 0 { None } else { Some(to_end - (1 << to_end.ilog2())) }
}
