//! Manifests survive a round trip; those that lie are refused with the reason, and reserve nothing.

use kvpool::prefix::{ExtraKey, PrefixKeys};
use kvpool::transfer::Manifest;
use kvpool::{Pool, SequenceId, TransferError};
use serde_json::{Value, json};

use super::kv::{admit, builder, config, extend, is_idle, other, plain, pool, pools, prompt};

/// Returns the manifest of 42 tokens, 3 of which have a key, in 11 blocks.
fn manifest(from: &Pool) -> Manifest {
    let (tokens, keys) = (prompt(1, 42), [ExtraKey::new(37..40, b"image")]);
    let keys = PrefixKeys::new().extra_keys(&keys);
    let mut sequence = from.sequence(SequenceId(7)).keys(keys).tokens(&tokens).unwrap();
    let mut batch = from.begin_batch();
    extend(&mut batch, &mut sequence, &tokens).unwrap();
    batch.finish();
    from.export_copy(&sequence).unwrap().manifest().unwrap()
}

#[test]
fn a_manifest_survives_a_round_trip() {
    let from = pool(plain(), 50);
    let manifest = manifest(&from);
    assert_eq!((manifest.sequence(), manifest.blocks()), (Some(SequenceId(7)), 11));
    assert_eq!(manifest.checksums().len(), 11);
    assert_eq!(manifest.bytes(), 11 * plain().packed_bytes() as u64);
    assert_eq!(manifest.form().fingerprint(), kvpool::transfer::PackedForm::of(&other()).fingerprint());
    manifest.check().unwrap();
    let text = serde_json::to_string(&manifest).unwrap();
    assert_eq!(serde_json::from_str::<Manifest>(&text).unwrap(), manifest);
}

/// Changes a field of the manifest's JSON.
fn lie(manifest: &Manifest, path: &str, value: Value) -> Manifest {
    let mut json = serde_json::to_value(manifest).unwrap();
    *json.pointer_mut(path).unwrap_or_else(|| panic!("{path} is missing")) = value;
    serde_json::from_value(json).unwrap()
}

#[test]
fn manifests_that_lie() {
    let (from, to) = pools(50);
    let honest = manifest(&from);
    let hash = serde_json::to_value(&honest).unwrap()["contents"]["Sequence"]["lists"][0]["known"]["hashes"]
        [3]
    .clone();
    let contradiction = |what: &str, got: u64, want: u64| {
        format!("{what}: got {got}, expected {want}, by the other fields of the manifest")
    };
    let hash_at = |place| format!("hashes at index {place}: got another hash, expected that of");
    let key_is = |got| format!("extra key at index 0: got {got}, expected");
    let known = "/contents/Sequence/lists/0/known";
    let key =
        |start: u64, end: u64, key: &[u8]| json!([{"tokens": {"start": start, "end": end}, "key": key}]);
    let others = "versions at index 0: got others than those of the hashes";
    let ranges = |ranges: &[(usize, u64)]| {
        let range = |&(from, model): &(_, _)| json!({ "from": from, "model": model, "adapter": 0 });
        Value::Array(ranges.iter().map(range).collect())
    };
    let one = key(12, 30, &[1])[0].clone();
    for (path, value, want) in [
        ("/version", json!(1), "version of the manifest: got 1, expected 6".into()),
        ("known/origins", json!([{ "cache": 5, "era": 0 }, { "cache": 5, "era": 1 }]), {
            "origins at index 0: got one out of order".into()
        }),
        ("known/versions/ranges", json!([]), "versions at index 0: got another start".into()),
        ("known/versions/ranges", ranges(&[(1, 0)]), "versions at index 0: got another start".into()),
        ("known/versions/ranges", ranges(&[(0, 0), (9, 1), (9, 2)]), {
            "versions at index 2: got one out of order, or equal to the one before".into()
        }),
        ("known/versions/ranges", ranges(&[(0, 0), (9, 0)]), "versions at index 1: got one out".into()),
        ("known/versions/ranges", ranges(&[(0, 0), (42, 1)]), {
            "versions at index 1: got a start after the last token".into()
        }),
        ("known/versions/ranges", ranges(&[(0, 0), (9, 1)]), others.into()),
        ("known/versions/ranges", ranges(&[(0, 1)]), others.into()),
        ("known/versions/hashed/model", json!(1), others.into()),
        ("known/versions/adapter", json!([]), "adapter: got no bytes".into()),
        ("/contents/Sequence/length", json!(45), contradiction("checksums", 11, 12)),
        ("/contents/Sequence/committed", json!(43), {
            "committed tokens: got 43, expected at most 42".into()
        }),
        ("/checksums", json!([1, 2]), contradiction("checksums", 2, 11)),
        ("known/tokens", json!(vec![1; 44]), contradiction("hashes", 10, 11)),
        ("known/tokens", json!(vec![1; 41]), contradiction("announced tokens", 41, 42)),
        ("known/hashes", json!([]), contradiction("hashes", 0, 10)),
        ("known/hashes/5", hash, hash_at(5)),
        ("known/tokens/8", json!(9), hash_at(2)),
        ("known/tokens", json!([1]), contradiction("hashes", 10, 0)),
        ("known/extra_keys", key(12, 30, &[1]), hash_at(3)),
        ("known/extra_keys", key(12, 30, &[]), key_is("no bytes")),
        ("known/extra_keys", key(30, 12, &[1]), key_is("a key of tokens 30..12")),
        ("known/extra_keys", key(12, 1 << 31, &[1]), key_is("a key of tokens 12..2147483648")),
        ("known/extra_keys", json!(vec![one.clone(); 5000]), {
            "extra keys: got 5000, expected at most 4096".into()
        }),
        ("/hashing", Value::Null, "hashing: got that of another".into()),
    ] {
        let path =
            path.strip_prefix("known").map_or_else(|| path.to_string(), |rest| format!("{known}{rest}"));
        let error = to.import(&lie(&honest, &path, value)).unwrap_err();
        assert!(matches!(error, TransferError::Invalid(_)), "{path}: {error:?}");
        assert!(error.to_string().starts_with(&want), "{path}: {error}");
    }
    // Sizes that no memory has, and forms that are not the pool's.
    for (path, value) in [
        ("/contents/Sequence/length", json!(u32::MAX)),
        ("/form/head_dim", json!(u32::MAX)),
        ("/form/layers", json!(0)),
        ("/form/layers", json!(3)),
        ("/form/heads", json!(1)),
        ("/form/block_tokens", json!(8)),
        ("/form/dtype", json!("F16")),
        ("/form/is_latent", json!(true)),
        ("/form/scales", json!({"PerHead": {"k": [1], "v": []}})),
        ("/form/scales", json!("PerTokenHead")),
        ("/heads", json!({"first": 1, "count": 2, "total": 2})),
    ] {
        let path =
            path.strip_prefix("known").map_or_else(|| path.to_string(), |rest| format!("{known}{rest}"));
        let error = to.import(&lie(&honest, &path, value)).unwrap_err();
        assert!(matches!(error, TransferError::Invalid(_)), "{path}: {error:?}");
    }
    is_idle(&to);
    drop(to.import(&honest).unwrap());
    is_idle(&to);
}

#[test]
fn cached_blocks_of_another_cache_or_listed_twice() {
    let (from, to) = pools(50);
    drop(admit(&from, 7, &prompt(1, 42)).unwrap());
    let export = from.export_cached(5).unwrap();
    let honest = export.manifest().unwrap();
    let first = serde_json::to_value(&honest).unwrap()["contents"]["Cached"]["blocks"][1].clone();
    let twice = lie(&honest, "/contents/Cached/blocks/4", first);
    let refused = to.import(&twice).unwrap_err().to_string();
    assert_eq!(refused, "blocks at index 4: got the hash of the one at index 1, expected one of its own");
    let random = builder(plain(), 50).prefix_cache(kvpool::PrefixConfig::new()).build().unwrap();
    let is_other = |pool: &Pool| matches!(pool.import(&honest), Err(TransferError::Invalid(invalid)) if invalid.what == "hashing");
    assert!(is_other(&random));
    let none = builder(plain(), 50).build().unwrap();
    assert!(is_other(&none));
    let alike = builder(other(), 50).prefix_cache(config()).build().unwrap();
    drop(alike.import(&honest).unwrap());
    drop(export);
    [from, to, random, none, alike].iter().for_each(is_idle);
}

/// Numbers at which sums and products of 32 and 64 bits wrap.
const EDGES: [u64; 12] = [
    0,
    1,
    2,
    4,
    (1 << 16) - 1,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    u32::MAX as u64 - 1,
    u32::MAX as u64,
    u64::MAX - 1,
    u64::MAX,
];

/// Returns the places of all numbers in a value.
fn numbers(value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(_) => found.push(path.to_owned()),
        Value::Array(all) => {
            (0..).zip(all).for_each(|(at, value): (usize, _)| numbers(value, &format!("{path}/{at}"), found));
        }
        Value::Object(all) => {
            all.iter().for_each(|(key, value)| numbers(value, &format!("{path}/{key}"), found))
        }
        _ => {}
    }
}

/// Any numbers in a manifest: it is refused, or its blocks are reserved and can be given back. No sum
/// wraps, which would panic here.
#[test]
fn manifests_with_any_numbers() {
    let (from, to) = pools(50);
    let sequence = manifest(&from);
    drop(admit(&from, 8, &prompt(2, 42)).unwrap());
    let export = from.export_cached(5).unwrap();
    let mut random = fastrand::Rng::with_seed(17);
    for honest in [sequence, export.manifest().unwrap()] {
        let json = serde_json::to_value(&honest).unwrap();
        let mut places = Vec::new();
        numbers(&json, "", &mut places);
        for _ in 0..3_000 {
            let mut lie = json.clone();
            for _ in 0..random.usize(1..5) {
                let place = &places[random.usize(..places.len())];
                let value = EDGES[random.usize(..EDGES.len())];
                *lie.pointer_mut(place).unwrap() = json!(value);
            }
            let Ok(lie) = serde_json::from_value::<Manifest>(lie) else { continue };
            let (_, _, checked) = (lie.bytes(), lie.blocks(), lie.check());
            let Ok(import) = to.import(&lie) else { continue };
            checked.expect("an import was prepared of a manifest that is refused");
            drop(import);
            is_idle(&to);
        }
    }
}

#[test]
fn places_in_a_chain_are_those_of_a_pool() {
    let (from, to) = pools(50);
    drop(admit(&from, 7, &prompt(1, 42)).unwrap());
    let honest = from.export_cached(5).unwrap().manifest().unwrap();
    let deep = lie(&honest, "/contents/Cached/blocks/2/depth", json!(u32::MAX));
    let refused = to.import(&deep).unwrap_err();
    let what = "blocks before a cached block";
    assert!(matches!(&refused, TransferError::Invalid(invalid) if invalid.what == what), "{refused:?}");
}
