use proptest::prelude::*;

use super::*;

/// Any word that a block can have.
fn words() -> impl Strategy<Value = BlockWord> {
    any::<u64>().prop_map(BlockWord)
}

proptest! {
    #[test]
    fn fields_do_not_touch_each_other(word in words()) {
        if let Some(shared) = word.share() {
            prop_assert_eq!(shared.refs(), word.refs() + 1);
            prop_assert_eq!(shared.to_bits() & !REFS_MASK, word.to_bits() & !REFS_MASK);
            prop_assert_eq!(shared.release(), Some(Released::Shared(word)));
        } else {
            prop_assert!(!word.is_owned() || word.refs() == BlockWord::REFS_MAX);
        }
        if let Some(pinned) = word.pin() {
            prop_assert_eq!(pinned.pins(), word.pins() + 1);
            prop_assert_eq!(pinned.unpin(), Some(word));
        } else {
            prop_assert!(!word.is_owned() || word.pins() == BlockWord::PINS_MAX);
        }
    }

    #[test]
    fn the_last_release_leaves_frame_and_generation(word in words()) {
        let word = BlockWord(word.0 & !(REFS_MASK | CACHED | MOVING) | ONE_REF);
        let Some(Released::Last { word: freed, carry }) = word.release() else { panic!("{word:?}") };
        prop_assert_eq!(freed.frame(), word.frame());
        prop_assert!(freed.is_free() && freed.pins() == 0);
        prop_assert!(!freed.is_sealed() && !freed.is_moving() && !freed.is_cached());
        prop_assert_eq!(freed.generation_low(), (word.generation_low() + 1) % (1 << GENERATION_BITS));
        prop_assert_eq!(carry, freed.generation_low() == 0);
        prop_assert_eq!(freed.release(), None);
    }

    #[test]
    fn a_first_share_in_place_pins_and_the_last_release_unpins(word in words()) {
        let shared = word.share_in_place();
        if word.is_evictable() {
            let evictable = BlockWord(word.0 & !PINS_MASK);
            let shared = evictable.share_in_place().unwrap();
            prop_assert_eq!((shared.refs(), shared.pins()), (1, 1));
            prop_assert!(shared.is_moving() == word.is_moving());
            prop_assert_eq!(shared.publish_move(FrameId(7)), None, "a pinned block stays");
            if let Some(kept) = shared.release_kept() {
                prop_assert_eq!((kept.is_evictable(), kept.pins()), (true, 0));
            }
        } else {
            prop_assert_eq!(shared, word.share());
        }
        if let Some(uncached) = word.uncache() {
            prop_assert!(word.is_owned() && word.is_cached() && !uncached.is_cached());
            prop_assert_eq!(uncached.0 | CACHED, word.0);
        } else {
            prop_assert!(!word.is_owned() || !word.is_cached());
        }
    }

    #[test]
    fn the_frequent_releases_are_releases(word in words()) {
        if let Some(kept) = word.release_kept() {
            prop_assert_eq!(word.outlived(), None);
            prop_assert_eq!(word.release(), Some(Released::Evictable { word: kept }));
        }
        if let Some(freed) = word.release_only() {
            prop_assert_eq!(word.release(), Some(Released::Last { word: freed, carry: false }));
        }
        // The generator of words seldom makes one of them.
        let only = BlockWord(word.0 & !(REFS_MASK | MOVING | CACHED) | ONE_REF);
        let kept = only.keep_only_in(only.frame());
        prop_assert_eq!(kept, only.seal_cached().unwrap().release_kept());
        prop_assert_eq!(kept.is_none(), only.release_only().is_none());
        let others = [only.share(), only.begin_move(), only.seal_cached(), Some(only.freed())];
        prop_assert!(others.into_iter().flatten().all(|word| word.keep_only_in(word.frame()).is_none()));
        prop_assert_eq!(only.keep_only_in(FrameId((only.frame().0 + 1) & FRAME_MASK as u32)), None);
        let kept = BlockWord(word.0 & !REFS_MASK | ONE_REF | CACHED);
        prop_assert_eq!(kept.release_kept().is_none(), kept.outlived().is_some());
    }

    #[test]
    fn a_private_release_is_a_release_of_the_same_word(
        word in words(),
        kept in prop_oneof![Just(0), Just(SEALED), Just(MOVING), Just(CACHED), Just(ONE_PIN), Just(ONE_REF)],
        is_last: bool,
    ) {
        prop_assert!(word.release_private().is_none_or(|next| word.release_only() == Some(next)));
        let plain = BlockWord(word.0 & (FRAME_MASK | GENERATION_MASK) | ONE_REF);
        let plain = if is_last { BlockWord(plain.0 | GENERATION_MASK) } else { plain };
        let Some(Released::Last { word: freed, carry }) = plain.release() else { panic!("{plain:?}") };
        prop_assert_eq!(plain.release_private(), (!carry).then_some(freed));
        prop_assert_eq!(plain.release_only(), (!carry).then_some(freed));
        for word in [word, plain, BlockWord(plain.0 + kept)] {
            prop_assert_eq!(word.release_only_in(word.frame()), word.release_only());
            let elsewhere = FrameId((word.frame().0 + 1) & FRAME_MASK as u32);
            prop_assert_eq!(word.release_only_in(elsewhere), None);
        }
        prop_assert!(kept == 0 || BlockWord(plain.0 + kept).release_private().is_none());
    }

    #[test]
    fn a_move_is_published_only_if_nothing_cancelled_it(word in words(), to in 0..FRAME_MASK as u32) {
        prop_assert_eq!(word.begin_move().is_some(),
            !word.is_free() && word.is_sealed() && word.pins() == 0 && !word.is_moving());
        if let Some(moving) = word.begin_move() {
            let moved = moving.publish_move(FrameId(to)).unwrap();
            prop_assert_eq!(moved.frame(), FrameId(to));
            prop_assert_eq!(moved.to_bits() & !FRAME_MASK, word.to_bits() & !FRAME_MASK);
            prop_assert_eq!(moving.end_move(), Some(word));
            prop_assert_eq!(moving.begin_move(), None);
            prop_assert_eq!(moving.reopen(), None);
            prop_assert_eq!(moving.pin().and_then(|w| w.publish_move(FrameId(to))), None);
            if word.refs() == 1 && !word.is_cached() {
                let Some(Released::ToMover { word: freed }) = moving.release() else { panic!("{moving:?}") };
                let Some(Released::Last { word: without, carry }) = word.release() else { panic!("{word:?}") };
                prop_assert_eq!(freed.publish_move(FrameId(to)).or(freed.end_move()), None);
                prop_assert_eq!(freed.take_left(), Some((without, carry)));
            }
        }
    }
}

#[test]
fn a_free_block_is_held_once() {
    let free = BlockWord::free(FrameId(77));
    let held = free.hold().unwrap();
    assert!(
        free.is_available() && !free.is_held() && held.is_held() && held.is_free() && !held.is_available()
    );
    assert_eq!(
        (held.frame(), held.unhold(), held.hold(), free.unhold()),
        (FrameId(77), Some(free), None, None)
    );
    let owned = free.allocate(false).seal().unwrap();
    assert_eq!((owned.hold(), owned.unhold()), (None, None));
    let moving = owned.begin_move().unwrap();
    assert!(!moving.is_held() && moving.unhold().is_none(), "an owner's move is not a hold");
    let Some(Released::ToMover { word }) = moving.release() else { panic!("{moving:?}") };
    assert!(word.is_held(), "held by the mover");
}

#[test]
fn an_allocated_block_has_one_owner_and_nothing_else() {
    let free = BlockWord::free(FrameId(77));
    let word = free.allocate(false);
    assert_eq!((word.frame(), word.refs(), word.pins()), (FrameId(77), 1, 0));
    assert!(!word.is_sealed() && !word.is_moving() && !word.is_cached());
    assert_eq!(free.allocate(true).pins(), 1);
    assert_eq!(word.seal().unwrap().share().unwrap().reopen(), None, "shared bytes must be copied first");
}
