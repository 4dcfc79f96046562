//! Keys of ranges of tokens: sequences share exactly the blocks before a range whose key differs,
//! in every way in which blocks are found, and whatever happened to the sequence before.
#![cfg(not(kvpool_loom))]

use std::collections::BTreeSet;

use kvpool::prefix::{BlockHash, Chain, ExtraKey, HashKey, KvEvent, PrefixConfig, PrefixKeys};
use kvpool::storage::KvLayout;
use kvpool::{
    AdmitRequest, Invalid, Pool, PrefixError, Sequence, SequenceError, SequenceId, Tokens, TransferError,
};
use proptest::prelude::*;

fn pool(block_tokens: usize, blocks: usize) -> Pool {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(block_tokens);
    let cache = PrefixConfig::new().key(HashKey::from_bytes([5; 32]));
    let builder = Pool::builder(layout.build().unwrap()).blocks(blocks).magazine_blocks(0);
    builder.prefix_cache(cache).build().unwrap()
}

fn append(pool: &Pool, sequence: &mut Sequence, length: usize) {
    let mut batch = pool.begin_batch();
    batch.append(sequence, Tokens::Announced(length - sequence.len())).unwrap();
    batch.finish();
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

#[test]
fn a_later_turn_has_keys_too() {
    for block_tokens in [1, 2, 3, 16] {
        let pool = pool(block_tokens, 400);
        let turn = |key: &[u8]| {
            let (mut sequence, _) = serve(&pool, 1, &[7; 10], &[]);
            sequence.extra_key(12..30, key).unwrap();
            sequence.extra_key(12..30, key).unwrap();
            sequence.announce(&[7; 25]).unwrap();
            append(&pool, &mut sequence, 35);
        };
        turn(b"first");
        turn(b"second");
        for (key, other) in [(b"first" as &[u8], 34), (b"second", 34), (b"third", 12)] {
            let keys = image(12..30, key);
            let keys = PrefixKeys::new().extra_keys(&keys);
            let found = pool.sequence(SequenceId(2)).keys(keys).tokens(&[7; 35]).unwrap().len();
            assert_eq!(found, other / block_tokens * block_tokens, "{key:?}, {block_tokens}");
        }
    }
}

#[test]
fn bad_keys_are_refused_and_change_nothing() {
    let pool = pool(4, 50);
    let invalid = |got: &str, limit| SequenceError::Prefix(Invalid::new("extra key", got, limit).into());
    let refused = |key: ExtraKey, want: SequenceError| {
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
    let empty = invalid("no bytes", "at least one; omit it instead");
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
        assert_eq!(sequence.extra_key(tokens, key), Err(want));
    }
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, &[1; 4]).unwrap();
    batch.finish();
    drop(sequence);
    assert_eq!(serve(&pool, 1, &[1; 13], &[]).1, 12, "no key was added");
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (other, beyond) = (self::pool(4, 50), image(8..10, b"key"));
    let keys = PrefixKeys::new().extra_keys(&beyond);
    let error = runtime.block_on(other.bring_back(&pool, &keys, &[1; 9])).unwrap_err();
    assert_eq!(error.to_string(), outside.to_string());
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

/// One step of a schedule; numbers are taken modulo what there is.
#[derive(Clone, Debug)]
enum Step {
    /// Open a prompt of so many tokens, with keys at (start, length, key).
    Open {
        tokens: usize,
        keys: Vec<(usize, usize, u8)>,
    },
    /// Keys at these distances behind the end, and then tokens.
    Turn {
        which: u8,
        keys: Vec<(usize, usize, u8)>,
        tokens: usize,
    },
    Truncate {
        which: u8,
        length: usize,
    },
    Fork {
        which: u8,
    },
    Migrate {
        which: u8,
    },
    Close {
        which: u8,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let keys = || prop::collection::vec((0..40usize, 1..20usize, 0..2u8), 0..3);
    prop_oneof![
        4 => (1..40usize, keys()).prop_map(|(tokens, keys)| Step::Open { tokens, keys }),
        4 => (any::<u8>(), keys(), 1..20usize).prop_map(|(which, keys, tokens)| Step::Turn { which, keys, tokens }),
        2 => (any::<u8>(), 0..60usize).prop_map(|(which, length)| Step::Truncate { which, length }),
        1 => any::<u8>().prop_map(|which| Step::Fork { which }),
        2 => any::<u8>().prop_map(|which| Step::Migrate { which }),
        3 => any::<u8>().prop_map(|which| Step::Close { which }),
    ]
}

type Keys = BTreeSet<(usize, usize, u8)>;

/// All that the contents of a block depend on: the number of tokens up to its end, which are all
/// alike, and the keys that begin among them.
type Contents = (usize, Keys);

struct Open {
    side: usize,
    real: Sequence,
    tokens: usize,
    keys: Keys,
}

/// The naive model of one pool: what was computed in full blocks, and in unfinished ones of closed
/// sequences.
#[derive(Default)]
struct Cached {
    full: BTreeSet<Contents>,
    half: BTreeSet<Contents>,
}

fn contents(tokens: usize, keys: &Keys) -> Contents {
    (tokens, keys.iter().filter(|key| key.0 < tokens).copied().collect())
}

fn as_keys(keys: &Keys) -> Vec<ExtraKey> {
    keys.iter().map(|&(start, end, key)| ExtraKey::new(start..end, &[key])).collect()
}

impl Cached {
    fn has_computed(&mut self, open: &Open, block_tokens: usize) {
        let ends = (block_tokens..=open.tokens).step_by(block_tokens);
        self.full.extend(ends.map(|end| contents(end, &open.keys)));
    }

    /// Returns the least and the most tokens of a prompt that are found.
    fn found(&self, tokens: usize, keys: &Keys, block_tokens: usize) -> (usize, usize) {
        let is_full = |end: usize| self.full.contains(&contents(end, keys));
        let mut whole = 0;
        while whole + block_tokens < tokens && is_full(whole + block_tokens) {
            whole += block_tokens;
        }
        if whole + block_tokens == tokens && is_full(tokens) {
            return (tokens - 1, tokens - 1);
        }
        // Whether the tail of a fork or of a cut sequence was registered is not modelled.
        let halves = whole + 1..=tokens.min(whole + block_tokens - 1);
        let half = halves.rev().find(|&end| self.half.contains(&contents(end, keys)));
        (whole, half.unwrap_or(whole).min(tokens - 1))
    }
}

fn check_hashes(pool: &Pool, open: &Open) {
    let hasher = pool.prefix_cache().unwrap().hasher();
    let mut chain = Chain::new(hasher.root(&PrefixKeys::new()).unwrap());
    for &(start, end, key) in &open.keys {
        chain.extra_key(hasher, start as u64..end as u64, &[key]).unwrap();
    }
    let mut hashes: Vec<BlockHash> = Vec::new();
    chain.extend(hasher, &vec![7; open.tokens], |hash| hashes.push(hash));
    let cached: BTreeSet<_> = pool.cached_blocks().into_iter().map(|(_, hash)| hash).collect();
    assert!(hashes.iter().all(|hash| cached.contains(hash)), "{:?} of {:?}", open.keys, open.real);
    let list = as_keys(&open.keys);
    let within: Vec<_> = list.into_iter().filter(|key| key.tokens.end <= open.tokens).collect();
    if within.len() == open.keys.len() {
        let keys = PrefixKeys::new().extra_keys(&within);
        assert_eq!(hasher.hashes(&keys, &vec![7; open.tokens]).unwrap(), hashes);
    }
}

fn run(steps: Vec<Step>, block_tokens: usize) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    // Room for everything: nothing is evicted.
    let pools = [pool(block_tokens, 6000), pool(block_tokens, 6000)];
    let mut cached = [Cached::default(), Cached::default()];
    let mut open: Vec<Open> = Vec::new();
    for (number, step) in (1..).zip(steps) {
        let pick = |which: u8| (!open.is_empty()).then(|| usize::from(which) % open.len());
        match step {
            Step::Open { tokens, keys } => {
                let side = number as usize % 2;
                let begin = |&(start, length, key): &(usize, usize, u8)| {
                    let start = start % tokens;
                    (start, (start + length).min(tokens), key)
                };
                let keys: Keys = keys.iter().map(begin).collect();
                let (least, most) = cached[side].found(tokens, &keys, block_tokens);
                let (real, found) = serve(&pools[side], number, &vec![7; tokens], &as_keys(&keys));
                assert!((least..=most).contains(&found), "{found} of {least} to {most}: {tokens}, {keys:?}");
                open.push(Open { side, real, tokens, keys });
            }
            Step::Turn { which, keys, tokens } => {
                let Some(place) = pick(which) else { continue };
                let turn = &mut open[place];
                for (distance, length, key) in keys {
                    let start = turn.tokens + distance;
                    turn.real.extra_key(start..start + length, &[key]).unwrap();
                    turn.keys.insert((start, start + length, key));
                }
                let mut batch = pools[turn.side].begin_batch();
                batch.append(&mut turn.real, &vec![7; tokens]).unwrap();
                batch.finish();
                turn.tokens += tokens;
            }
            Step::Truncate { which, length } => {
                let Some(place) = pick(which) else { continue };
                let cut = &mut open[place];
                let length = length.min(cut.tokens);
                cut.real.truncate(length).unwrap();
                if length < cut.tokens {
                    cut.keys.retain(|key| key.0 < length);
                }
                cut.tokens = length;
            }
            Step::Fork { which } => {
                let Some(place) = pick(which) else { continue };
                let Open { side, tokens, ref keys, ref real } = open[place];
                let (real, keys) = (real.fork(SequenceId(number)).unwrap(), keys.clone());
                open.push(Open { side, real, tokens, keys });
            }
            Step::Migrate { which } => {
                let Some(place) = pick(which) else { continue };
                let Open { side, real, tokens, keys } = open.swap_remove(place);
                cached[side].half.insert(contents(tokens, &keys));
                let to = &pools[1 - side];
                let (real, _) = runtime.block_on(pools[side].migrate(real, to)).unwrap();
                open.push(Open { side: 1 - side, real, tokens, keys });
            }
            Step::Close { which } => {
                let Some(place) = pick(which) else { continue };
                let Open { side, tokens, keys, .. } = open.swap_remove(place);
                cached[side].half.insert(contents(tokens, &keys));
            }
        }
        for open in &open {
            cached[open.side].has_computed(open, block_tokens);
            check_hashes(&pools[open.side], open);
        }
    }
    drop(open);
    for pool in &pools {
        assert_eq!((pool.audit().unwrap().owned, pool.available_blocks()), (0, pool.total_blocks()));
        assert_eq!(pool.prefix_cache().unwrap().stats().evicted_blocks, 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 128 }, failure_persistence: None, ..Default::default() })]

    #[test]
    fn blocks_are_shared_up_to_the_first_other_key(
        steps in prop::collection::vec(step(), 1..40),
        block_tokens in prop::sample::select(vec![1usize, 2, 3, 16]),
    ) {
        run(steps, block_tokens);
    }
}
