//! Keys of ranges of tokens: sequences share exactly the blocks before a range whose key differs,
//! in every way in which blocks are found, and whatever happened to the sequence before.
#![cfg(not(kvpool_loom))]

use kvpool::prefix::{ExtraKey, HashKey, KvEvent, PrefixConfig, PrefixKeys};
use kvpool::storage::KvLayout;
use kvpool::{
    AdmitRequest, Invalid, Pool, PrefixError, Sequence, SequenceError, SequenceId, Tokens, TransferError,
};
use kvpool_testkit::steps;

fn pool(block_tokens: usize, blocks: usize) -> Pool {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(block_tokens);
    let cache = PrefixConfig::new().key(HashKey::from_bytes([5; 32]));
    let builder = Pool::builder(layout.build().unwrap()).blocks(blocks).magazine_blocks(0);
    builder.prefix_cache(cache).build().unwrap()
}

fn append(pool: &Pool, sequence: &mut Sequence, length: usize) {
    steps::append(pool, sequence, Tokens::Announced(length - sequence.len()));
}

/// Opens a prompt, and appends what was not cached. Returns the number of cached tokens too.
fn serve(pool: &Pool, id: u64, prompt: &[u32], keys: &[ExtraKey]) -> (Sequence, usize) {
    let keys = PrefixKeys::new().extra_keys(keys);
    let mut sequence = pool.sequence(SequenceId(id)).keys(keys).reuse_tail().tokens(prompt).unwrap();
    let cached = sequence.len();
    append(pool, &mut sequence, prompt.len());
    (sequence, cached)
}

fn image(tokens: std::ops::Range<usize>, key: &[u8]) -> [ExtraKey; 1] {
    [ExtraKey::new(tokens, key)]
}

/// Forty-one placeholders, of which 13 to 29 are an image.
#[test]
fn a_second_image_shares_the_blocks_before_it() {
    for block_tokens in [1, 2, 3, 16] {
        let pool = pool(block_tokens, 400);
        let prompt = [7; 41];
        let (first, second) = (image(13..29, b"first"), image(13..29, b"second"));
        assert_eq!(serve(&pool, 1, &prompt, &first).1, 0);
        assert_eq!(serve(&pool, 1, &prompt, &first).1, 40, "the same image");
        let before = 13 / block_tokens * block_tokens;
        let request =
            |keys| AdmitRequest::new(SequenceId(1), &prompt).keys(PrefixKeys::new().extra_keys(keys));
        let needed = pool.blocks_needed(&request(&second)).unwrap();
        assert_eq!(needed, 41usize.div_ceil(block_tokens), "the blocks before the image are evictable");
        let admitted = pool.admit(&request(&second)).unwrap();
        let shared = before / block_tokens;
        assert_eq!((admitted.len(), admitted.reserved_blocks()), (before, needed - shared));
        drop(admitted);
        for other in [
            &second[..],
            &image(13..28, b"first"),
            &image(13..30, b"first"),
            &[ExtraKey::new(13..29, b"first"), ExtraKey::new(13..29, b"second")],
            &[],
        ] {
            let keys = PrefixKeys::new().extra_keys(other);
            let found = pool.sequence(SequenceId(2)).keys(keys).tokens(&prompt).unwrap().len();
            assert_eq!(found, before, "{other:?} in blocks of {block_tokens}");
        }
        let pinned = pool.pin_prefix(&PrefixKeys::new().extra_keys(&first), &prompt).unwrap();
        assert_eq!(pinned.tokens(), 41 / block_tokens * block_tokens);
        match pool.pin_prefix(&PrefixKeys::new().extra_keys(&second), &prompt) {
            Ok(pinned) => assert_eq!(pinned.tokens(), before),
            Err(error) => {
                assert_eq!((before, error), (0, PrefixError::NotCached { tokens: 41 }.into()));
            }
        }
        drop(pinned);
        assert_eq!(serve(&pool, 1, &prompt, &second).1, before);
        assert_eq!(serve(&pool, 1, &prompt, &second).1, 40);
        assert_eq!(serve(&pool, 1, &prompt, &first).1, 40, "both are cached");
        assert_eq!(pool.audit().unwrap().owned, 0);
    }
}

/// An unfinished block is found by the keys of its own tokens: those of later ranges do not matter.
#[test]
fn unfinished_blocks_have_the_keys_of_their_tokens() {
    let pool = pool(16, 50);
    drop(serve(&pool, 1, &[7; 20], &[]));
    let later = image(20..40, b"image");
    let keys = PrefixKeys::new().extra_keys(&later);
    let found = pool.sequence(SequenceId(2)).keys(keys).reuse_tail().tokens(&[7; 41]).unwrap().len();
    assert_eq!(found, 20, "the image begins behind the cached tail");
    let earlier = image(19..40, b"image");
    let keys = PrefixKeys::new().extra_keys(&earlier);
    let found = pool.sequence(SequenceId(2)).keys(keys).reuse_tail().tokens(&[7; 41]).unwrap().len();
    assert_eq!(found, 16);
}

/// The keys of later turns are known after a swap there and back, too.
#[test]
fn a_later_turn_has_keys_too() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for (block_tokens, swaps) in [1, 2, 3, 16].into_iter().flat_map(|size| [(size, false), (size, true)]) {
        let (pool, other) = (pool(block_tokens, 400), self::pool(block_tokens, 400));
        let turn = |key: &[u8]| {
            let (mut sequence, _) = serve(&pool, 1, &[7; 10], &[]);
            sequence.extra_key(12..30, key).unwrap();
            sequence.extra_key(12..30, key).unwrap();
            sequence.announce(&[7; 10]).unwrap();
            append(&pool, &mut sequence, 20);
            if swaps {
                let (out, _) = runtime.block_on(pool.migrate(sequence, &other).into_future()).unwrap();
                (sequence, _) = runtime.block_on(other.migrate(out, &pool).into_future()).unwrap();
            }
            sequence.announce(&[7; 15]).unwrap();
            append(&pool, &mut sequence, 35);
        };
        turn(b"first");
        turn(b"second");
        for (key, shared) in [(b"first" as &[u8], 34), (b"second", 34), (b"third", 12)] {
            let keys = image(12..30, key);
            let keys = PrefixKeys::new().extra_keys(&keys);
            let found = pool.sequence(SequenceId(2)).keys(keys).tokens(&[7; 35]).unwrap().len();
            assert_eq!(
                found,
                shared / block_tokens * block_tokens,
                "{key:?}, {block_tokens}, swaps: {swaps}"
            );
        }
    }
}

#[test]
fn bad_keys_are_refused_and_change_nothing() {
    let pool = pool(4, 50);
    let invalid = |got: &str, limit| Invalid::new("extra key", got, limit);
    let refused = |key: ExtraKey, want: Invalid| {
        let want = SequenceError::Prefix(want.at(1).into());
        let list = [ExtraKey::new(1..2, b"good"), key];
        let keys = PrefixKeys::new().extra_keys(&list);
        let opened = pool.sequence(SequenceId(1)).keys(keys).tokens(&[1; 9]);
        assert_eq!(opened.map(drop).unwrap_err(), want);
        let request = AdmitRequest::new(SequenceId(1), &[1; 9]).keys(keys);
        assert_eq!(pool.admit(&request).map(drop).unwrap_err(), want);
        assert_eq!(pool.blocks_needed(&request).unwrap_err(), want);
        assert_eq!(pool.pin_prefix(&keys, &[1; 9]).map(drop).unwrap_err(), want);
        assert_eq!((pool.sequence_count(), pool.available_blocks()), (0, 50));
    };
    let empty = invalid("no bytes", "at least one");
    let no_tokens = |tokens| invalid(tokens, "a range that is not empty");
    let outside = invalid("a key of tokens 8..10", "an end of at most 9");
    refused(ExtraKey::new(1..2, b""), empty.clone());
    refused(ExtraKey::new(3..3, b"key"), no_tokens("a key of tokens 3..3"));
    #[expect(clippy::reversed_empty_ranges, reason = "the error that is tested")]
    refused(ExtraKey::new(5..3, b"key"), no_tokens("a key of tokens 5..3"));
    refused(ExtraKey::new(8..10, b"key"), outside.clone());
    let (mut sequence, _) = serve(&pool, 1, &[1; 9], &[]);
    for (tokens, key, want) in [
        (9..10, b"" as &[u8], empty),
        (9..9, b"key", no_tokens("a key of tokens 9..9")),
        (8..10, b"key", {
            invalid("a key of tokens 8..10", "a start from 9 on, as the tokens before are hashed")
        }),
        (9..1 << 31, b"key", invalid("a key of tokens 9..2147483648", "an end of at most 2147483647")),
    ] {
        assert_eq!(sequence.extra_key(tokens, key), Err(SequenceError::Prefix(want.into())));
    }
    steps::append(&pool, &mut sequence, &[1; 4]);
    drop(sequence);
    assert_eq!(serve(&pool, 1, &[1; 13], &[]).1, 12, "no key was added");
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (other, beyond) = (self::pool(4, 50), image(8..10, b"key"));
    let keys = PrefixKeys::new().extra_keys(&beyond);
    let error = runtime.block_on(other.bring_back(&pool, &keys, &[1; 9])).unwrap_err();
    assert_eq!(error.to_string(), outside.at(0).to_string());
    assert!(matches!(error, TransferError::Invalid(_)));
}

/// Events have the keys that touch each block, with their positions.
#[test]
fn events_have_the_keys_of_each_block() {
    let (near, far) = (pool(4, 50), pool(4, 50));
    let keys = [ExtraKey::new(2..6, b"a"), ExtraKey::new(5..13, b"b")];
    let expected = [vec![(2, &keys[0])], vec![(-2, &keys[0]), (1, &keys[1])], vec![(-3, &keys[1])], vec![]];
    let mut near_events = near.prefix_cache().unwrap().events().subscribe().unwrap();
    // The fourth block has the last token of the second range.
    let expected_last = vec![(-7, &keys[1])];
    let expected = [&expected[..3], &[expected_last]].concat();
    drop(serve(&near, 1, &[7; 17], &keys));
    let check = |numbered: kvpool::prefix::Numbered, place: usize| {
        let KvEvent::Stored { extra_keys, .. } = numbered.event else { panic!("{numbered:?}") };
        let got: Vec<_> = extra_keys.iter().map(|(at, key)| (*at, key)).collect();
        assert_eq!(got, expected[place], "block {place}");
    };
    (0..4).for_each(|place| check(near_events.try_recv().unwrap(), place));
    let mut far_events = far.prefix_cache().unwrap().events().subscribe().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let with = PrefixKeys::new().extra_keys(&keys);
    let came = runtime.block_on(far.bring_back(&near, &PrefixKeys::new(), &[7; 17])).unwrap();
    assert_eq!(came.cached_blocks, 0, "other keys");
    let came = runtime.block_on(far.bring_back(&near, &with, &[7; 17])).unwrap();
    assert_eq!(came.cached_blocks, 4);
    (0..4).for_each(|place| check(far_events.try_recv().unwrap(), place));
    assert_eq!(serve(&far, 1, &[7; 17], &keys).1, 16);
}
