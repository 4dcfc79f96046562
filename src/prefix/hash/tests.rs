use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

fn key() -> HashKey {
    HashKey::from_bytes(std::array::from_fn(|i| i as u8))
}

fn hasher_of(hashing: Hashing, block_tokens: usize) -> PrefixHasher {
    PrefixHasher::new(hashing, &key(), block_tokens).unwrap()
}

fn hasher() -> PrefixHasher {
    hasher_of(Hashing::Fast, 16)
}

fn bare(hasher: &PrefixHasher) -> Chain {
    Chain::new(hasher.root(&PrefixKeys::new()).unwrap())
}

fn hashes(hasher: &PrefixHasher, chain: &mut Chain, tokens: &[u32]) -> Vec<BlockHash> {
    let mut hashes = Vec::new();
    chain.extend(hasher, tokens, |hash| hashes.push(hash));
    hashes
}

fn one_shot(hasher: &PrefixHasher, keys: &PrefixKeys<'_>, tokens: &[u32]) -> Vec<BlockHash> {
    hashes(hasher, &mut Chain::new(hasher.root(keys).unwrap()), tokens)
}

fn every() -> [Hashing; 2] {
    [Hashing::Fast, Hashing::Keyed]
}

/// The values that other processes and other versions of this library compute.
#[test]
fn known_answers() {
    let tokens: Vec<u32> = (0..40u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    let keys = PrefixKeys::new().salt(b"salt").adapter(b"lora-1");
    for (hashing, block_tokens, want) in [
        (
            Hashing::Fast,
            16,
            [
                "94acb7a0202fe550c84805142e25f388-170a650dbff20b92",
                "0c44a4f5b8d0dec7b6024f5849931f89-07275b90dfe00ae9",
                "6b167bf962de4d30921cfb55e1b66598-a94f9c2ec46a3958",
            ],
        ),
        (
            Hashing::Keyed,
            16,
            [
                "8334334d225bab0123bab5b8b59a2ebd-1ab382eb6b2e6e1f",
                "92baef47c9ade2d09dba33b726b3862b-1ef4369a21d819bd",
                "8938944156839198bc97f8ed86e32dad-08b23ec145d65d28",
            ],
        ),
        (
            Hashing::Fast,
            12,
            [
                "c9f01e230356fcc3f65df91a5e089557-07ddb77591970ecd",
                "3edf2f03e7aea229ea05613b26e4cf20-151ba2355b1df19b",
                "e59d3869861e6cb8519533707cee21c4-90376904e6fc5f42",
            ],
        ),
        (
            Hashing::Keyed,
            12,
            [
                "a5e9e185d529dabd12061f57078e1444-095e2e7e6b721da7",
                "20abdd2a9fe5896f4aba695abd176a74-063daf6176b51e63",
                "b59d1bbe8acce3708cc966644ac67ee9-0b07a03dc9536943",
            ],
        ),
    ] {
        let hasher = hasher_of(hashing, block_tokens);
        let mut chain = Chain::new(hasher.root(&keys).unwrap());
        chain.extra_key(&hasher, 20..30, b"image").unwrap();
        let hashes = hashes(&hasher, &mut chain, &tokens);
        let got = [hashes[0], hashes[1], chain.partial(&hasher).unwrap()].map(|hash| hash.to_string());
        assert_eq!(got, want, "{hashing:?}, blocks of {block_tokens}");
    }
}

/// Compares with XXH3 and BLAKE3 of the same bytes, without the fast paths for blocks of 16 tokens.
#[test]
fn keys_are_those_of_the_crates() {
    for block_tokens in [1, 3, 4, 5, 16, 17, 32, 256] {
        let tokens: Vec<u32> = (0..block_tokens as u32).map(|i| i * 77 + 3).collect();
        let root = hasher_of(Hashing::Fast, block_tokens).root(&PrefixKeys::new()).unwrap().hash();
        let mut bytes = root.key().to_le_bytes().to_vec();
        bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
        // The parent's key is XORed into the last four tokens, or precedes fewer.
        let mut added = bytes[if block_tokens < 4 { 0 } else { 16 }..].to_vec();
        if block_tokens >= 4 {
            let last = added.len() - 16;
            added[last..].iter_mut().zip(&bytes).for_each(|(byte, parent)| *byte ^= parent);
        }
        let secret: [u8; 192] = key().derive(function::Fast::PURPOSE);
        let want = twox_hash::XxHash3_128::oneshot_with_secret(&secret, &added).unwrap();
        let got = one_shot(&hasher_of(Hashing::Fast, block_tokens), &PrefixKeys::new(), &tokens)[0];
        assert_eq!(got.key(), want, "{block_tokens}");

        let root = hasher_of(Hashing::Keyed, block_tokens).root(&PrefixKeys::new()).unwrap().hash();
        bytes[..16].copy_from_slice(&root.key().to_le_bytes());
        let keyed = blake3::keyed_hash(&key().derive(function::Keyed::PURPOSE), &bytes);
        let got = one_shot(&hasher_of(Hashing::Keyed, block_tokens), &PrefixKeys::new(), &tokens)[0];
        assert_eq!(got.key().to_le_bytes(), keyed.as_bytes()[..16], "{block_tokens}");
    }
}

proptest! {
    #[test]
    fn streaming_is_one_shot(
        tokens in prop::collection::vec(any::<u32>(), 0..200),
        cuts in prop::collection::vec(1..40usize, 0..30),
        block_tokens in prop_oneof![Just(1), Just(4), Just(16), Just(24)],
        image in 0..200u64,
    ) {
        for hashing in every() {
            let hasher = hasher_of(hashing, block_tokens);
            let mut at_once = bare(&hasher);
            at_once.extra_key(&hasher, image..image + 7, b"image").unwrap();
            let want = hashes(&hasher, &mut at_once, &tokens);
            let mut chain = bare(&hasher);
            chain.extra_key(&hasher, image..image + 7, b"image").unwrap();
            let mut got = Vec::new();
            let mut rest = tokens.as_slice();
            for cut in cuts.iter().copied().chain([tokens.len()]) {
                let (some, later) = rest.split_at(cut.min(rest.len()));
                got.extend(hashes(&hasher, &mut chain, some));
                rest = later;
                hashes(&hasher, &mut chain.clone(), &[7; 50]);
            }
            prop_assert_eq!(&got, &want);
            prop_assert_eq!(chain.partial(&hasher), at_once.partial(&hasher));
            prop_assert_eq!(chain.tail(), at_once.tail());
            prop_assert_eq!(chain.tokens(&hasher), tokens.len() as u64);
            prop_assert_eq!(chain.parent(), want.last().copied().unwrap_or(bare(&hasher).parent()));
        }
    }

    #[test]
    fn a_changed_token_changes_its_block_and_all_after(
        mut tokens in prop::collection::vec(any::<u32>(), 65..150),
        at in any::<prop::sample::Index>(),
        flip in 1..=u32::MAX,
    ) {
        for hashing in [Hashing::Fast, Hashing::Keyed] {
            let hasher = hasher_of(hashing, 16);
            let before = one_shot(&hasher, &PrefixKeys::new(), &tokens);
            let at = at.index(before.len() * 16);
            tokens[at] ^= flip;
            let after = one_shot(&hasher, &PrefixKeys::new(), &tokens);
            for (block, (before, after)) in before.iter().zip(&after).enumerate() {
                let changed = block >= at / 16;
                prop_assert_eq!(before.key() != after.key(), changed, "block {}", block);
                prop_assert_eq!(before.check() != after.check(), changed, "block {}", block);
            }
        }
    }

    #[test]
    fn texts_and_bytes_come_back(key in any::<u128>(), check in any::<u64>()) {
        let hash = BlockHash::new(key, check);
        prop_assert_eq!(hash.to_string().parse::<BlockHash>().unwrap(), hash);
        prop_assert_eq!(BlockHash::from_bytes(hash.to_bytes()), hash);
        prop_assert_eq!((hash.key(), hash.check()), (key, check));
        prop_assert_eq!(hash.words(), [key as u64, (key >> 64) as u64]);
    }

    #[test]
    fn no_text_panics(text in ".*", hex in "[0-9a-fA-F+-]{45,52}") {
        for text in [text, hex] {
            if let Ok(hash) = text.parse::<BlockHash>() {
                prop_assert_eq!(hash.to_string(), text.to_lowercase());
            }
        }
    }
}

#[test]
fn the_check_alone_tells_prefixes_apart() {
    let hasher = hasher_of(Hashing::Fast, 4);
    let mut checks = HashSet::new();
    for a in 0..5000 {
        for hash in one_shot(&hasher, &PrefixKeys::new(), &[a, 1, 2, 3, a % 7, 5, 6, 7]) {
            checks.insert(hash.check());
        }
    }
    assert_eq!(checks.len(), 10_000, "two different prefixes have the same check");
}

#[test]
fn keys_never_collide_by_concatenation() {
    let hasher = hasher();
    let none = PrefixKeys::new();
    let all = [
        none,
        none.salt(b"a"),
        none.adapter(b"a"),
        none.salt(b"ab"),
        none.salt(b"a").adapter(b"b"),
        none.salt(b"b").adapter(b"a"),
        none.salt(b"ab").adapter(b"c"),
        none.salt(b"a").adapter(b"bc"),
        none.salt(b"a\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0b"),
        none.salt(&[0]),
        none.salt(&[0, 0]),
        none.adapter(&[0]),
        none.salt(&[1]),
    ];
    let mut seen = HashSet::new();
    for keys in &all {
        assert!(seen.insert(hasher.root(keys).unwrap().hash()), "{keys:?}");
        assert!(one_shot(&hasher, keys, &[1; 32]).into_iter().all(|hash| seen.insert(hash)), "{keys:?}");
    }
    let distinct_checks: HashSet<_> = seen.iter().map(|hash| hash.check()).collect();
    assert_eq!(distinct_checks.len(), 3 * all.len(), "keys enter the check too");
}

#[test]
fn an_extra_key_enters_the_blocks_that_it_touches_and_all_after() {
    let hasher = hasher();
    let tokens = [9; 80];
    let with = |extras: &[(std::ops::Range<u64>, &[u8])]| {
        let mut chain = bare(&hasher);
        for (range, key) in extras {
            chain.extra_key(&hasher, range.clone(), key).unwrap();
        }
        hashes(&hasher, &mut chain, &tokens)
    };
    let plain = with(&[]);
    let image = with(&[(20..40, b"cat")]);
    assert_eq!(image[0], plain[0], "blocks before the image are unchanged");
    let mut all: HashSet<BlockHash> = plain.iter().chain(&image[1..]).copied().collect();
    assert_eq!(all.len(), 9);
    for (others, extras) in [
        ("another image", vec![(20..40, b"dog".as_slice())]),
        ("elsewhere in its block", vec![(21..40, b"cat")]),
        ("a shorter one", vec![(20..39, b"cat")]),
        ("two", vec![(20..40, b"cat"), (20..40, b"dog")]),
        ("two in a row", vec![(20..30, b"cat"), (30..40, b"cat")]),
        ("names that join", vec![(20..40, b"catcat")]),
    ] {
        let others_hashes = with(&extras);
        assert_eq!(others_hashes[0], plain[0], "{others}");
        assert!(others_hashes[1..].iter().all(|&hash| all.insert(hash)), "{others}");
    }
    assert_eq!(with(&[(20..40, b"cat"), (20..40, b"cat")]), image, "a repeated key counts once");
    let two = with(&[(20..40, b"cat"), (18..25, b"dog")]);
    assert_eq!(with(&[(18..25, b"dog"), (20..40, b"cat")]), two, "the order of calls does not matter");
    // The range ends in the third block; the time of the call affects no other block's hash.
    let mut late = bare(&hasher);
    let mut got = hashes(&hasher, &mut late, &tokens[..18]);
    late.extra_key(&hasher, 20..40, b"cat").unwrap();
    got.extend(hashes(&hasher, &mut late, &tokens[18..]));
    assert_eq!(got, image, "given after its first block had begun");
}

/// A block in the second half of an image depends on it itself, not only through its parent.
#[test]
fn an_image_over_many_blocks_enters_each() {
    let hasher = hasher();
    let resume = |image: Option<&[u8]>| {
        let mut chain = Chain::after(BlockHash::new(5, 5), 10);
        if let Some(image) = image {
            chain.extra_key(&hasher, 160..200, image).unwrap();
        }
        hashes(&hasher, &mut chain, &[9; 48])
    };
    let (plain, cat, dog) = (resume(None), resume(Some(b"cat")), resume(Some(b"dog")));
    let distinct: HashSet<_> = [plain, cat, dog].concat().into_iter().collect();
    assert_eq!(distinct.len(), 9);
}

#[test]
fn an_unfinished_block_is_never_a_full_one() {
    for hashing in every() {
        let hasher = hasher_of(hashing, 8);
        let mut seen = HashSet::new();
        let mut chain = bare(&hasher);
        assert_eq!(chain.partial(&hasher), None, "no tokens, so no hash");
        for _ in 0..64 {
            hashes(&hasher, &mut chain, &[0]).into_iter().for_each(|hash| assert!(seen.insert(hash)));
            chain.partial(&hasher).into_iter().for_each(|hash| assert!(seen.insert(hash)));
        }
        assert_eq!(seen.len(), 8 + 56);
    }
    let hasher = hasher();
    let mut chain = bare(&hasher);
    hashes(&hasher, &mut chain, &[1; 5]);
    let before = chain.partial(&hasher);
    chain.extra_key(&hasher, 5..9, b"cat").unwrap();
    assert_eq!(chain.partial(&hasher), before);
    hashes(&hasher, &mut chain, &[1]);
    let with = chain.partial(&hasher);
    chain.truncate(&hasher, 5).unwrap();
    hashes(&hasher, &mut chain, &[1]);
    assert_ne!(chain.partial(&hasher), with, "removed together with the token at which it began");
}

#[test]
fn chains_are_cut_and_resumed() {
    let hasher = hasher();
    let tokens: Vec<u32> = (0..100).collect();
    let mut chain = bare(&hasher);
    let all = hashes(&hasher, &mut chain, &tokens);
    assert_eq!((chain.tail().len(), chain.blocks()), (4, 6));
    chain.truncate(&hasher, 98).unwrap();
    assert_eq!(chain.tail(), [96, 97]);
    for tokens in [95, 99] {
        assert_eq!(
            chain.truncate(&hasher, tokens).unwrap_err().to_string(),
            format!("tokens to keep: got {tokens}, expected 96 to 98, the tokens of the unfinished block")
        );
    }
    let mut again = Chain::resume(&hasher, all[1], 2, &tokens[32..40]).unwrap();
    assert_eq!(again.tokens(&hasher), 40);
    assert_eq!(hashes(&hasher, &mut again, &tokens[40..]), all[2..]);
    assert_eq!(
        Chain::resume(&hasher, all[1], 2, &[0; 16]).unwrap_err().to_string(),
        "tokens of an unfinished block: got 16, expected less than a block of 16"
    );
}

#[test]
fn another_key_function_or_block_size_gives_other_hashes() {
    let roots = |hasher: PrefixHasher| hasher.root(&PrefixKeys::new()).unwrap().hash();
    let mut distinct: HashSet<_> = every().into_iter().map(|hashing| roots(hasher_of(hashing, 16))).collect();
    distinct.insert(roots(hasher_of(Hashing::Fast, 32)));
    let random = || HashKey::random().unwrap();
    distinct.insert(roots(PrefixHasher::new(Hashing::Fast, &random(), 16).unwrap()));
    distinct.insert(roots(PrefixHasher::new(Hashing::Fast, &random(), 16).unwrap()));
    assert_eq!(distinct.len(), 5);
    // The secrets of the block functions differ too, not only the roots.
    let other = PrefixHasher::new(Hashing::Fast, &random(), 16).unwrap();
    let begin = BlockHash::new(1, 1);
    let (a, b) = (hasher().block(begin, &[1; 16]), other.block(begin, &[1; 16]));
    assert!(a.key() != b.key() && a.check() != b.check());
}

#[test]
fn bad_input_is_refused() {
    let hasher = hasher();
    for (keys, field) in [(PrefixKeys::new().salt(b""), "salt"), (PrefixKeys::new().adapter(b""), "adapter")]
    {
        assert_eq!(hasher.root(&keys).unwrap_err().what, field);
    }
    let none = PrefixHasher::new(Hashing::Fast, &key(), 0);
    assert_eq!(none.unwrap_err().to_string(), "tokens of a block: got 0, expected at least 1");
    let mut chain = bare(&hasher);
    hashes(&hasher, &mut chain, &[0; 20]);
    let mut extra = |range, key| chain.extra_key(&hasher, range, key).unwrap_err();
    for (range, key, limit) in [
        (20..30, b"" as &[u8], "at least one"),
        (20..20, b"x", "a range that is not empty"),
        (15..30, b"x", "a start from 16 on, as the tokens before are hashed"),
    ] {
        let refused = extra(range, key);
        assert_eq!((refused.what, &*refused.limit), ("extra key", limit));
    }
    let keys = [ExtraKey::new(0..4, b"x"), ExtraKey::new(4..9, b"y")];
    let refused = PrefixKeys::new().extra_keys(&keys).check_extra(8).unwrap_err();
    assert_eq!((refused.what, refused.index, &*refused.limit), ("extra key", Some(1), "an end of at most 8"));
    for text in
        ["", "-", &"0".repeat(49), &format!("{:032x}+{:016x}", 1, 2), &format!("+{:031x}-{:016x}", 1, 2)]
    {
        assert!(text.parse::<BlockHash>().is_err(), "{text}");
    }
    let key = HashKey::from_bytes([0xab; 32]);
    assert_eq!(format!("{key:?}"), "HashKey(..)", "the key is not printed");
}
