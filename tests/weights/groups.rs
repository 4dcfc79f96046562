//! Groups of layers, two of which keep a state: none is hit with other weights than the others.

use std::collections::HashMap;

use kvpool::{GroupCopy, Tokens, WeightsVersion};
use kvpool_testkit::prompts::prompt;

use crate::states::engine::Engine;

/// The version of what a place holds; nothing: computed with several.
type Ghost = Option<u64>;

fn copy(frames: &mut HashMap<usize, Ghost>, copies: &[GroupCopy]) {
    for frame in copies.iter().flat_map(|copy| &copy.frames) {
        let ghost = frames[&frame.src.index()];
        frames.insert(frame.dst.index(), ghost);
    }
}

/// Serves one prompt, in chunks that end where a state can be kept, while the version changes.
/// Returns the tokens of its hit.
fn serve(
    engine: &Engine,
    random: &mut fastrand::Rng,
    id: u64,
    tokens: &mut HashMap<usize, Ghost>,
    frames: &mut HashMap<usize, Ghost>,
) -> usize {
    let change = |random: &mut fastrand::Rng, one_in| {
        if random.u32(..one_in) == 0 {
            engine.pool.begin_version(WeightsVersion(random.u64(..3))).unwrap();
        }
    };
    let current = || engine.pool.prefix_cache().unwrap().weights(None).model.0;
    change(random, 3);
    let all = prompt(random.u32(..2), 70);
    let mut sequence = engine.admit(id, &all).unwrap();
    let hit = sequence.len();
    let mut computed: Option<Ghost> = (hit > 0).then(|| Some(current()));
    let batch = engine.pool.begin_batch();
    for list in 0..engine.lists.len() {
        // What the next token sees of the list with a window.
        let first = if list == 0 { 0 } else { hit.saturating_sub(8) };
        let mut slots = Vec::new();
        batch.slot_mapping(sequence.group(list), first..hit, &mut slots).unwrap();
        for slot in slots {
            let ghost = tokens[&engine.cell(list, slot)];
            assert_eq!(ghost, Some(current()), "list {list} of a hit of {hit}");
        }
    }
    batch.finish();
    while sequence.len() < all.len() {
        change(random, 12);
        let (version, mut batch) = (current(), engine.pool.begin_batch());
        change(random, 12);
        let end = sequence.next_cut().unwrap_or(all.len());
        let count = (end - sequence.len()).min(16);
        let appended = batch.append_grouped(&mut sequence, Tokens::Announced(count)).unwrap();
        copy(frames, &appended.copies);
        let before = computed;
        let is_same = before.is_none_or(|before| before == Some(version));
        let now = is_same.then_some(version);
        computed = Some(now);
        for list in 0..engine.lists.len() {
            let mut slots = Vec::new();
            batch.slot_mapping(sequence.group(list), appended.tokens.clone(), &mut slots).unwrap();
            tokens.extend(slots.into_iter().map(|slot| (engine.cell(list, slot), now)));
        }
        for frame in (0..engine.states.len()).flat_map(|state| sequence.state(state)) {
            if appended.tokens.start > 0 {
                assert_eq!(Some(frames[&frame]), before, "a state behind {} tokens", appended.tokens.start);
            }
            frames.insert(frame, now);
        }
        if sequence.len() == end
            && end < all.len()
            && let Ok(copies) = batch.checkpoint(&mut sequence)
        {
            copy(frames, &copies);
        }
        batch.finish();
    }
    let ranges = sequence.versions().count();
    assert_eq!(ranges == 1, computed != Some(None), "{ranges} ranges");
    hit
}

#[test]
fn no_group_is_hit_with_other_weights() {
    let (mut hits, seeds) = (0, if cfg!(debug_assertions) { 4 } else { 60 });
    for seed in 0..seeds {
        let mut random = fastrand::Rng::with_seed(seed);
        let engine = Engine::new(220, [1, 2, 3, 4][seed as usize % 4]);
        let (mut tokens, mut frames) = (HashMap::new(), HashMap::new());
        for id in 0..40 {
            hits += serve(&engine, &mut random, id, &mut tokens, &mut frames);
        }
        engine.close();
    }
    assert!(hits > 100 * seeds as usize, "only {hits} tokens were hit");
}
