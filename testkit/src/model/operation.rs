//! Operations on a pool, as plain data. Every list of operations is valid, because each operation
//! picks its blocks from those that exist when it runs.

/// A pick from the existing items: an index that wraps around.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
pub struct Pick(pub u16);

impl Pick {
    /// Returns an index below `len`, or `None` if there is nothing to pick.
    pub fn index(self, len: usize) -> Option<usize> {
        (len != 0).then(|| self.0 as usize % len)
    }

    /// Returns one of `items`.
    pub fn of<T>(self, items: &[T]) -> Option<&T> {
        self.index(items.len()).map(|index| &items[index])
    }
}

/// Handles that no pool should accept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
pub enum Alien {
    /// Of a block that was freed since, once or many times.
    Freed(Pick),
    /// Of a block in use, one generation ahead.
    Future(Pick),
    /// Of a block in use, with another pool's tag.
    Foreign(Pick),
    /// Of a block in use, 2^16 generations ahead: a word keeps the low 16 bits only.
    Wrapped(Pick),
    /// Of a free block, with its current generation: never handed out.
    Free(Pick),
    /// Beyond the pool's last block.
    Beyond(u32),
    /// Of the null block.
    Null,
}

/// Use of a handle that should be refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
pub enum Doing {
    /// Pin it.
    Pin,
    /// Query its info.
    Info,
}

/// One step.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
#[non_exhaustive]
pub enum Operation {
    /// Allocate blocks as a lease.
    Lease {
        /// Number of blocks; 0 and more than the pool has must be refused.
        blocks: u16,
        /// As one run.
        contiguous: bool,
        /// Pinned from the start.
        pinned: bool,
        /// For this sequence.
        sequence: Option<u8>,
    },
    /// Drop a lease.
    Drop(Pick),
    /// Split a lease at one of its blocks.
    SplitLease(Pick, Pick),
    /// Free the blocks of a lease from one on.
    TruncateLease(Pick, Pick),
    /// Add a reference to each block of a lease: a second lease.
    Share(Pick),
    /// Pin a block.
    Pin(Pick),
    /// Drop one of the pins.
    Unpin(Pick),
    /// Query the info of a block.
    Info(Pick),
    /// Use a handle that must be refused.
    Misuse(Alien, Doing),
    /// Begin a batch.
    Begin,
    /// End one of the batches in flight.
    End(Pick),
    /// Grow the pool, also by zero and by too much.
    Grow(u16),
    /// Shrink the pool if no removed block is in use; possibly abandon the shrink even so. Includes
    /// sizes of zero and above the current one.
    Shrink {
        /// Number of blocks to keep.
        to: u16,
        /// Raise `to` as far as needed to remove no block in use.
        fits: bool,
        /// Abandon the shrink.
        gives_up: bool,
    },
    /// Compact the pool.
    Defragment {
        /// Order of the runs to gain; one larger than any pool must be refused.
        order: u8,
        /// Maximum number of blocks to move, if limited.
        blocks_max: Option<u8>,
        /// Number of blocks copied together, minus one.
        wave: u8,
    },
    /// Resize the pool, moving blocks that are in the way; completely, or not at all. Includes zero
    /// and too many.
    Resize {
        /// Number of blocks.
        to: u16,
        /// Count `to` in addition to the blocks in use.
        fits: bool,
    },
    /// Seal a number of blocks, from one on.
    Seal(Pick, u8),
    /// Open a sequence with this id, already open or not.
    Open(u8),
    /// Append tokens to a sequence in one of the batches in flight (one begins if there is none),
    /// and store them.
    Append {
        /// The sequence.
        sequence: Pick,
        /// The batch.
        batch: Pick,
        /// Number of tokens; 0 must be refused.
        tokens: u8,
        /// Whether the tokens are a draft, which may be truncated.
        draft: bool,
    },
    /// Commit the first tokens of a sequence: this share of them, in 255ths; 255 is one too many.
    Commit(Pick, u8),
    /// Truncate a sequence to this share of its tokens, in 255ths; 255 is one too many.
    Truncate(Pick, u8),
    /// Fork a sequence into a new one with this id, already open or not.
    Fork(Pick, u8),
    /// Drop a sequence.
    Close(Pick),
    /// Read all tokens of a sequence back, and build the tables of all sequences.
    Read(Pick),
}

#[cfg(feature = "proptest")]
mod strategy {
    use proptest::option;
    use proptest::prelude::*;

    use super::*;

    impl Arbitrary for Pick {
        type Parameters = ();
        type Strategy = BoxedStrategy<Self>;

        fn arbitrary_with((): ()) -> Self::Strategy {
            any::<u16>().prop_map(Pick).boxed()
        }
    }

    impl Arbitrary for Alien {
        type Parameters = ();
        type Strategy = BoxedStrategy<Self>;

        fn arbitrary_with((): ()) -> Self::Strategy {
            prop_oneof![
                4 => any::<Pick>().prop_map(Alien::Freed),
                1 => any::<Pick>().prop_map(Alien::Future),
                1 => any::<Pick>().prop_map(Alien::Foreign),
                1 => any::<Pick>().prop_map(Alien::Wrapped),
                1 => any::<Pick>().prop_map(Alien::Free),
                1 => any::<u32>().prop_map(Alien::Beyond),
                1 => Just(Alien::Null),
            ]
            .boxed()
        }
    }

    impl Arbitrary for Doing {
        type Parameters = ();
        type Strategy = BoxedStrategy<Self>;

        fn arbitrary_with((): ()) -> Self::Strategy {
            prop_oneof![Just(Doing::Pin), Just(Doing::Info),].boxed()
        }
    }

    /// Mostly a few blocks, sometimes many, rarely too many.
    fn size() -> impl Strategy<Value = u16> {
        prop_oneof![8 => 1..12_u16, 3 => 1..150_u16, 1 => any::<u16>(), 1 => Just(0)]
    }

    impl Arbitrary for Operation {
        type Parameters = ();
        type Strategy = BoxedStrategy<Self>;

        fn arbitrary_with((): ()) -> Self::Strategy {
            prop_oneof![
                12 => (size(), any::<[bool; 2]>(), option::of(0..4_u8)).prop_map(
                    |(blocks, [contiguous, pinned], sequence)| {
                        Operation::Lease { blocks, contiguous, pinned, sequence }
                    }
                ),
                9 => any::<Pick>().prop_map(Operation::Drop),
                3 => any::<[Pick; 2]>().prop_map(|[lease, at]| Operation::SplitLease(lease, at)),
                3 => any::<[Pick; 2]>().prop_map(|[lease, keep]| Operation::TruncateLease(lease, keep)),
                3 => any::<Pick>().prop_map(Operation::Share),
                2 => any::<Pick>().prop_map(Operation::Pin),
                2 => any::<Pick>().prop_map(Operation::Unpin),
                2 => any::<Pick>().prop_map(Operation::Info),
                3 => (any::<Alien>(), any::<Doing>()).prop_map(|(alien, doing)| Operation::Misuse(alien, doing)),
                2 => Just(Operation::Begin),
                3 => any::<Pick>().prop_map(Operation::End),
                1 => prop_oneof![3 => 1..80_u16, 1 => any::<u16>(), 1 => Just(0)].prop_map(Operation::Grow),
                2 => (prop_oneof![6 => 1..200_u16, 1 => any::<u16>(), 1 => Just(0)], any::<bool>(), any::<u8>())
                    .prop_map(|(to, fits, luck)| Operation::Shrink { to, fits, gives_up: luck < 60 }),
                2 => (prop_oneof![9 => 0..8_u8, 1 => any::<u8>()], option::of(any::<u8>()), 0..40_u8)
                    .prop_map(|(order, blocks_max, wave)| Operation::Defragment { order, blocks_max, wave }),
                2 => (prop_oneof![8 => 1..200_u16, 1 => any::<u16>(), 1 => Just(0)], any::<bool>())
                    .prop_map(|(to, fits)| Operation::Resize { to, fits }),
                4 => (any::<Pick>(), any::<u8>()).prop_map(|(pick, count)| Operation::Seal(pick, count)),
                3 => (0..12_u8).prop_map(Operation::Open),
                9 => (any::<[Pick; 2]>(), prop_oneof![8 => 0..10_u8, 2 => any::<u8>()], any::<bool>()).prop_map(
                    |([sequence, batch], tokens, draft)| Operation::Append { sequence, batch, tokens, draft }
                ),
                2 => (any::<Pick>(), any::<u8>()).prop_map(|(pick, share)| Operation::Commit(pick, share)),
                3 => (any::<Pick>(), any::<u8>()).prop_map(|(pick, share)| Operation::Truncate(pick, share)),
                3 => (any::<Pick>(), 0..12_u8).prop_map(|(pick, id)| Operation::Fork(pick, id)),
                2 => any::<Pick>().prop_map(Operation::Close),
                2 => any::<Pick>().prop_map(Operation::Read),
            ]
            .boxed()
        }
    }
}
