//! Manifests of several lists that contradict themselves are refused with what differs, and reserve
//! nothing; what is not refused is committed, goes on and ends without a panic.
#![cfg(feature = "serde")]

use kvpool::transfer::{Imported, Manifest};
use kvpool::{PoolBuilder, TransferError};
use serde_json::{Value, json};

use super::moving::{compute, is_idle, plain, pool, tokens};
use super::*;

const STATES: [usize; 2] = [3, 2];
const LISTS: &str = "/contents/Sequence/lists";

/// The manifest of this many tokens, with the checksums of zeros, and their sum.
fn honest(tokens: usize, states: &[usize]) -> Value {
    let near = pool(400, states);
    let all = super::moving::tokens(tokens);
    let mut sequence = near.admit_grouped(&AdmitRequest::new(SequenceId(1), &all)).unwrap();
    while sequence.len() < tokens {
        let mut batch = near.begin_batch();
        let left = (tokens - sequence.len()).min(16);
        batch.append_grouped(&mut sequence, Tokens::Announced(left)).unwrap();
        batch.finish();
    }
    let manifest = near.export_copy(&sequence).unwrap().manifest().unwrap();
    serde_json::to_value(manifest).unwrap()
}

/// Sets a list's number of blocks given up, and the number of checksums that follows.
fn front(lie: &mut Value, list: usize, front: usize) {
    let path = format!("{LISTS}/{list}/front");
    let before = lie.pointer(&path).unwrap().as_u64().unwrap() as usize;
    let sums = lie["checksums"].as_array().unwrap();
    let (sum, blocks) = (sums[0].clone(), sums.len() + before - front);
    lie["checksums"] = json!(vec![sum; blocks]);
    *lie.pointer_mut(&path).unwrap() = json!(front);
}

fn read(lie: &Value) -> Manifest {
    serde_json::from_value(lie.clone()).unwrap()
}

/// Asserts that a manifest is refused with this beginning of the words.
fn refused(far: &Pool, lie: &Value, want: &str) {
    let error = far.import(&read(lie)).map(drop).unwrap_err();
    assert!(matches!(error, TransferError::Invalid(_)), "{error}");
    assert!(error.to_string().starts_with(want), "{error}");
    is_idle(far);
}

fn arrive(far: &Pool, manifest: &Manifest) -> Imported {
    let mut import = far.import(manifest).unwrap();
    let bytes = vec![0; far.layout().packed_bytes()];
    for place in import.missing().to_vec() {
        import.write(place, None, &bytes).unwrap();
    }
    assert!(import.verify().unwrap().is_empty());
    import.commit().unwrap()
}

/// A list has the blocks of the window behind its final tokens: no tail is the null block.
#[test]
fn blocks_that_the_next_token_sees_are_not_given_up() {
    for length in [62, 64] {
        let (far, manifest) = (pool(400, &[]), honest(length, &[]));
        for (list, window) in [(1, 24), (2, 9)] {
            let path = format!("{LISTS}/{list}/front");
            let most = manifest.pointer(&path).unwrap().as_u64().unwrap() as usize;
            let left = (length / 4 * 4 + 1 - window) / 4;
            assert!(most <= left);
            for given_up in left + 1..=16 {
                let mut lie = manifest.clone();
                front(&mut lie, list, given_up);
                refused(&far, &lie, &format!("blocks given up: got {given_up}, expected at most {left}"));
            }
            // As many as the window leaves: it arrives and grows.
            let mut most = manifest.clone();
            front(&mut most, list, left);
            let Imported::Grouped(mut grouped) = arrive(&far, &read(&most)) else { panic!("one list") };
            assert_eq!(grouped.len(), length);
            let mut batch = far.begin_batch();
            batch.append_grouped(&mut grouped, Tokens::Final(9)).unwrap();
            batch.finish();
            drop(grouped);
            is_idle(&far);
            far.evict_cached(0);
        }
        // Drafts may be taken back.
        let mut lie = manifest.clone();
        *lie.pointer_mut("/contents/Sequence/committed").unwrap() = json!(12);
        refused(&far, &lie, "blocks given up: got ");
    }
}

/// A list without a window gives up none; otherwise blocks would lack a checksum.
#[test]
fn a_list_without_a_window_has_all_blocks() {
    let far = pool(400, &[]);
    let manifest = honest(62, &[]);
    let mut lie = manifest.clone();
    front(&mut lie, 0, 9);
    // One checksum for each block, whatever is stated.
    refused(&far, &lie, "checksums: got ");
    lie["checksums"] = manifest["checksums"].clone();
    refused(&far, &lie, "blocks given up: got 9, expected at most 0");
}

/// The same in a pool of one list with a window, whose sequences arrive over the network.
#[test]
fn a_window_of_one_list_keeps_its_tail() {
    let one = || {
        let cache = PrefixConfig::new().key(HashKey::from_bytes([7; 32]));
        let builder: PoolBuilder = Pool::builder(plain()).blocks(100).threads(1);
        builder.window(Window::new(9).unwrap()).prefix_cache(cache).build().unwrap()
    };
    let (near, far, all) = (one(), one(), tokens(62));
    let mut sequence = near.sequence(SequenceId(1)).tokens(&all).unwrap();
    let mut batch = near.begin_batch();
    batch.append(&mut sequence, Tokens::Announced(62)).unwrap();
    batch.finish();
    let manifest = near.export_copy(&sequence).unwrap().manifest().unwrap();
    let mut lie = serde_json::to_value(manifest).unwrap();
    front(&mut lie, 0, 16);
    refused(&far, &lie, "blocks given up: got 16, expected at most 13");
}

/// All lists are of one sequence: its tokens, keys, versions and roots are those of all of them.
#[test]
fn lists_of_a_manifest_agree() {
    let far = pool(400, &STATES);
    let (manifest, other) = (honest(64, &STATES), {
        let (pool, all) = (pool(400, &STATES), (0..64).map(|token| token * 11 + 3).collect::<Vec<u32>>());
        let export = pool.export(compute(&pool, 1, &all)).unwrap();
        serde_json::to_value(export.manifest().unwrap()).unwrap()
    });
    let known = |manifest: &Value, list: usize| manifest.pointer(&format!("{LISTS}/{list}/known")).cloned();
    let differs = |what: &str, list| format!("list of blocks at index {list}: got one with other {what}, ");
    for list in 1..3 {
        let changed = |place: &str, value: Value| {
            let mut lie = manifest.clone();
            *lie.pointer_mut(&format!("{LISTS}/{list}/known{place}")).unwrap() = value;
            lie
        };
        // Another prompt; another group; no tokens at all.
        refused(&far, &changed("", known(&other, list).unwrap()), &differs("tokens", list));
        refused(&far, &changed("", known(&manifest, 0).unwrap()), &differs("roots of hashes", list));
        refused(&far, &changed("", Value::Null), &differs("known tokens", list));
        let key = json!([{"tokens": {"start": 60, "end": 64}, "key": [1]}]);
        refused(&far, &changed("/extra_keys", key), &differs("extra keys", list));
        refused(&far, &changed("/is_stale", json!(true)), &differs("stale hashes", list));
        refused(&far, &changed("/versions/adapter", json!([1])), &differs("versions", list));
        refused(&far, &changed("/session", json!(5)), &differs("session", list));
        refused(&far, &changed("/keep_left_ms", json!(5)), &differs("retention", list));
        // A cut, behind which the list knows fewer tokens: commit would level all lists.
        let mut cut = changed("/is_cut", json!(true));
        refused(&far, &cut, "announced tokens: got 64, expected fewer than the 64 committed tokens");
        for field in ["tokens", "hashes"] {
            *cut.pointer_mut(&format!("{LISTS}/{list}/known/{field}")).unwrap() = json!([]);
        }
        refused(&far, &cut, &differs("tokens", list));
    }
    let mut lie = manifest.clone();
    *lie.pointer_mut(&format!("{LISTS}/0/known")).unwrap() = Value::Null;
    refused(&far, &lie, &differs("known tokens", 1));
    assert!(matches!(arrive(&far, &read(&manifest)), Imported::Grouped(_)));
    is_idle(&far);
}

/// What one list lost is lost for all, also in the manifest: the honest one is taken.
#[test]
fn uncached_blocks_of_one_list_do_not_contradict_the_others() {
    let (near, far, all) = (pool(400, &[]), pool(400, &[]), tokens(64));
    let mut sequence = near.admit_grouped(&AdmitRequest::new(SequenceId(1), &all)).unwrap();
    let mut batch = near.begin_batch();
    batch.append_grouped(&mut sequence, Tokens::Announced(64)).unwrap();
    batch.finish();
    let hash = sequence.group(1).block_hashes()[12];
    let _ = near.uncache(&[hash]);
    let manifest = near.export_copy(&sequence).unwrap().manifest().unwrap();
    let Imported::Grouped(arrived) = arrive(&far, &manifest) else { panic!("one list") };
    drop(arrived);
    let again = far.admit_grouped(&AdmitRequest::new(SequenceId(2), &tokens(80))).unwrap();
    assert_eq!(again.len(), 0, "stale hashes find nothing");
    drop(again);
    is_idle(&far);
}

/// The places of numbers and flags in a manifest, but those of tokens, hashes and checksums.
fn places(value: &Value, path: &str, found: &mut Vec<String>) {
    let named = |name: &str| !["tokens", "hashes", "root", "checksums"].contains(&name);
    match value {
        Value::Number(_) | Value::Bool(_) => found.push(path.to_owned()),
        Value::Array(all) => {
            for (at, value) in all.iter().enumerate() {
                places(value, &format!("{path}/{at}"), found);
            }
        }
        Value::Object(all) => {
            for (name, value) in all.iter().filter(|(name, _)| named(name)) {
                places(value, &format!("{path}/{name}"), found);
            }
        }
        _ => {}
    }
}

/// Whatever numbers, flags and cuts are in a manifest, it is refused with nothing taken, or the
/// sequence arrives, grows and is closed.
#[test]
fn sequences_of_any_manifest_grow() {
    let mut random = fastrand::Rng::with_seed(23);
    let (mut taken, mut changed) = (0, Vec::new());
    for states in [&[][..], &STATES] {
        let (far, honest) = (pool(200, states), honest(62, states));
        let sum = honest["checksums"][0].clone();
        places(&honest, "", &mut changed);
        for _ in 0..2_000 {
            let mut lie = honest.clone();
            for _ in 0..random.usize(1..4) {
                let path = &changed[random.usize(..changed.len())];
                let Some(value) = lie.pointer_mut(path) else { continue };
                *value = match value.as_bool() {
                    Some(flag) => json!(!flag),
                    None => {
                        json!([random.u64(..20), random.u64(40..70), u64::from(u32::MAX)][random.usize(..3)])
                    }
                };
            }
            if random.bool() {
                let (cut, only) = (random.usize(..63), random.usize(..6));
                for list in (0..3).filter(|&list| only > 2 || list == only) {
                    let known = lie.pointer_mut(&format!("{LISTS}/{list}/known")).unwrap();
                    known["is_cut"] = json!(true);
                    known["tokens"].as_array_mut().unwrap().truncate(cut);
                    known["hashes"].as_array_mut().unwrap().truncate(cut / 4);
                }
            }
            let Ok(manifest) = serde_json::from_value::<Manifest>(lie.clone()) else { continue };
            lie["checksums"] = json!(vec![sum.clone(); manifest.blocks().min(1000)]);
            let manifest = read(&lie);
            if far.import(&manifest).map(drop).is_ok() {
                taken += 1;
                let Imported::Grouped(mut grouped) = arrive(&far, &manifest) else { panic!("one list") };
                let mut batch = far.begin_batch();
                batch.append_grouped(&mut grouped, Tokens::Final(9)).unwrap();
                batch.finish();
                let _ = grouped.announce(&[1, 2, 3]);
                let tokens = grouped.len() - 1;
                let _ = grouped.truncate(tokens);
                drop(grouped);
            }
            is_idle(&far);
        }
        changed.clear();
    }
    assert!(taken > 100, "{taken} manifests were taken");
}

/// A cached block is of a list or a state of its pool, and its pool has the groups of the target.
#[test]
fn cached_blocks_of_other_groups() {
    let (near, far) = (pool(400, &STATES), pool(400, &STATES));
    drop(compute(&near, 1, &tokens(43)));
    let export = near.export_cached(9).unwrap();
    let manifest = serde_json::to_value(export.manifest().unwrap()).unwrap();
    far.import(&read(&manifest)).map(drop).unwrap();
    let lies = [
        (
            "blocks/3/group",
            json!(5),
            "group of layers at index 3: got 5, expected less than 5, the lists and states",
        ),
        ("groups/lists/1/window", json!(null), "list of blocks at index 1: got"),
        ("groups/lists/0/block_tokens", json!(8), "list of blocks at index 0: got"),
        ("groups/states", json!([3, 3]), "states: got"),
        ("groups/lists", json!([]), "group of layers at index "),
    ];
    for (at, value, want) in lies {
        let mut lie = manifest.clone();
        *lie.pointer_mut(&format!("/contents/Cached/{at}")).unwrap() = value;
        refused(&far, &lie, want);
    }
}
