//! What can be done to a pool, as plain data: every list of operations is valid, because each picks its blocks from
//! what there is when its turn comes.

/// One of those that there are: an index that wraps around.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
pub struct Pick(pub u16);

impl Pick {
    /// As an index below `len`; `None` where there is nothing to pick.
    pub fn index(self, len: usize) -> Option<usize> {
        (len != 0).then(|| self.0 as usize % len)
    }

    /// One of `items`.
    pub fn of<T>(self, items: &[T]) -> Option<&T> {
        self.index(items.len()).map(|index| &items[index])
    }
}

/// Handles that no pool should accept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
pub enum Alien {
    /// Of a block that has been freed since, once or many times.
    Freed(Pick),
    /// Of a block in use, one generation ahead.
    Future(Pick),
    /// Of a block in use, by another pool's tag.
    Foreign(Pick),
    /// Of a block in use, 2^16 generations ahead: a word keeps the low 16 bits only.
    Wrapped(Pick),
    /// Of a block that is free now, with its generation now: never handed out.
    Free(Pick),
    /// Beyond the pool's last block.
    Beyond(u32),
    /// Of the null block.
    Null,
    /// Of a block that a lease owns: good to ask about it, and for nothing else.
    Leased(Pick),
}

/// What is done with a handle that should be refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
pub enum Doing {
    /// Free it, after so many handles that are in order.
    Free(u8),
    /// Share it, after so many handles that are in order.
    Share(u8),
    /// Pin it.
    Pin,
    /// Unpin it.
    Unpin,
    /// Ask about it.
    Info,
}

/// One step.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
#[non_exhaustive]
pub enum Operation {
    /// Allocate blocks as a lease.
    Lease {
        /// How many; 0 and more than there are must be refused.
        blocks: u16,
        /// In one run.
        contiguous: bool,
        /// Pinned from the start.
        pinned: bool,
        /// For this sequence.
        sequence: Option<u8>,
    },
    /// Allocate blocks as raw handles.
    Raw {
        /// How many; 0 and more than there are must be refused.
        blocks: u16,
        /// In one run.
        contiguous: bool,
        /// Pinned from the start.
        pinned: bool,
        /// Through the explicit handle instead of the thread's own cache.
        through_handle: bool,
    },
    /// Drop a lease.
    Drop(Pick),
    /// Turn a lease into raw handles.
    IntoRaw(Pick),
    /// Turn raw handles into a lease. One whose block has other references must be refused, with the whole list.
    FromRaw(Vec<Pick>),
    /// Free raw handles in one call. One that is picked more often than it has references must be refused, with the
    /// whole list.
    Free {
        /// Which.
        picks: Vec<Pick>,
        /// Through the explicit handle.
        through_handle: bool,
    },
    /// One more reference to each of these blocks. A lease's must be refused, with the whole list.
    Share(Vec<Pick>),
    /// Pin a block; a lease's in a scope, at the end of which it is not pinned any more.
    Pin(Pick),
    /// Unpin a block, pinned or not; a lease's must be refused.
    Unpin(Pick),
    /// Ask about a block.
    Info(Pick),
    /// Use a handle that must be refused.
    Misuse(Alien, Doing),
    /// Begin a batch.
    Begin,
    /// End one of the batches in flight.
    End(Pick),
    /// Grow the pool, by nothing and by too much included.
    Grow(u16),
    /// Shrink the pool to so many blocks, if nobody has a block that must go; perhaps give it up though nobody has. To
    /// nothing, and to more than there are, included.
    Shrink {
        /// How many stay.
        to: u16,
        /// As many more as have to, for nobody to be in the way.
        fits: bool,
        /// Give it up.
        gives_up: bool,
    },
    /// Move blocks together.
    Defragment {
        /// The order of the runs to gain; larger than any pool must be refused.
        order: u8,
        /// The most blocks to move, if there is a most.
        blocks_max: Option<u8>,
        /// Blocks that are copied together, but for one.
        wave: u8,
    },
    /// Give the pool so many blocks, moving what is in the way; at once, or not at all. None, and too many, included.
    Resize {
        /// How many.
        to: u16,
        /// As many more as are in use.
        fits: bool,
    },
    /// Seal blocks that are held raw or by a lease: so many of them, from one on.
    Seal(Pick, u8),
    /// Drop the explicit handle and take a new one: what it had cached goes back.
    RenewHandle,
    /// Open a sequence of this id, open already or not.
    Open(u8),
    /// Append tokens to a sequence in one of the batches in flight (one begins if there is none), and store them.
    Append {
        /// Which sequence.
        sequence: Pick,
        /// Which batch.
        batch: Pick,
        /// How many tokens; 0 must be refused.
        tokens: u8,
        /// Whether they may be taken back.
        draft: bool,
    },
    /// Call the first tokens of a sequence final: this share of them, in 255ths; 255 is one too many.
    Commit(Pick, u8),
    /// Take back all but the first tokens of a sequence: this share of them stays, in 255ths; 255 is one too many.
    Truncate(Pick, u8),
    /// Share a sequence's blocks with a new one of this id, open already or not.
    Fork(Pick, u8),
    /// Drop a sequence.
    Close(Pick),
    /// Read all tokens of a sequence back, and build the tables of all sequences.
    Read(Pick),
}

#[cfg(feature = "proptest")]
mod strategy {
    use proptest::collection::vec;
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
                3 => any::<Pick>().prop_map(Alien::Leased),
            ]
            .boxed()
        }
    }

    impl Arbitrary for Doing {
        type Parameters = ();
        type Strategy = BoxedStrategy<Self>;

        fn arbitrary_with((): ()) -> Self::Strategy {
            prop_oneof![
                (0..4_u8).prop_map(Doing::Free),
                (0..4_u8).prop_map(Doing::Share),
                Just(Doing::Pin),
                Just(Doing::Unpin),
                Just(Doing::Info),
            ]
            .boxed()
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
            let few = || any::<[bool; 3]>();
            prop_oneof![
                6 => (size(), few(), option::of(0..4_u8)).prop_map(|(blocks, [contiguous, pinned, _], sequence)| {
                    Operation::Lease { blocks, contiguous, pinned, sequence }
                }),
                6 => (size(), few()).prop_map(|(blocks, [contiguous, pinned, through_handle])| {
                    Operation::Raw { blocks, contiguous, pinned, through_handle }
                }),
                5 => any::<Pick>().prop_map(Operation::Drop),
                2 => any::<Pick>().prop_map(Operation::IntoRaw),
                2 => vec(any::<Pick>(), 1..20).prop_map(Operation::FromRaw),
                7 => (vec(any::<Pick>(), 1..40), any::<bool>())
                    .prop_map(|(picks, through_handle)| Operation::Free { picks, through_handle }),
                3 => vec(any::<Pick>(), 1..8).prop_map(Operation::Share),
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
                1 => Just(Operation::RenewHandle),
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
