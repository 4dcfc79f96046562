//! Drafts beside states: lists grow over all of them, and states are stepped over those accepted.

use proptest::prelude::*;

use super::*;

/// A sequence behind a prompt, in its own state.
fn begun(engine: &Engine, all: &[u32]) -> kvpool::GroupedSequence {
    let mut sequence = engine.admit(1, all).unwrap();
    engine.prefill(&mut sequence, all).unwrap();
    sequence
}

/// One step of an engine: the token that is known, drafts, and how many of these are right.
fn draft(
    engine: &Engine,
    sequence: &mut kvpool::GroupedSequence,
    all: &mut Vec<u32>,
    drafts: &[u32],
    right: usize,
) {
    let length = sequence.len();
    all.truncate(length);
    all.push(length as u32 * 3);
    all.extend(drafts);
    let mut batch = engine.pool.begin_batch();
    engine.step(&mut batch, sequence, all, Tokens::Ids(&[length as u32 * 3])).unwrap();
    assert_eq!(sequence.state_tokens(), length + 1);
    engine.step(&mut batch, sequence, all, Tokens::Draft(drafts.len())).unwrap();
    assert_eq!((sequence.len(), sequence.state_tokens()), (length + 1 + drafts.len(), length + 1));
    batch.finish();
    engine.check(sequence, all);
    sequence.accept(&drafts[..right]).unwrap();
    assert_eq!((sequence.len(), sequence.committed()), (length + 1 + right, length + 1 + right));
    assert_eq!(sequence.state_tokens(), length + 1, "until the next append");
    engine.check(sequence, all);
    engine.check_states(sequence, all);
}

/// Accepted, in part, and rejected: the next append steps the states over what was accepted.
#[test]
fn states_are_stepped_over_accepted_drafts() {
    let (engine, mut all) = (Engine::new(400, 4), (0..40).collect::<Vec<u32>>());
    let mut sequence = begun(&engine, &all);
    for right in [4, 0, 2, 3, 1, 0, 0, 4] {
        draft(&engine, &mut sequence, &mut all, &[7, 8, 9, 10], right);
    }
    let (length, state) = (sequence.len(), sequence.state_tokens());
    assert_eq!(length, state + 4);
    let mut batch = engine.pool.begin_batch();
    all.truncate(length);
    all.push(5);
    let appended = batch.append_grouped(&mut sequence, Tokens::Ids(&[5])).unwrap();
    assert_eq!((appended.tokens, appended.stepped), (length..length + 1, state..length + 1));
    batch.finish();
    drop(sequence);
    engine.close();
}

/// A state behind drafts that it does not hold is no checkpoint; one after the next append is.
#[test]
fn a_checkpoint_is_behind_all_tokens() {
    let (engine, mut all) = (Engine::new(400, 4), (0..43).collect::<Vec<u32>>());
    let mut sequence = begun(&engine, &all);
    draft(&engine, &mut sequence, &mut all, &[7, 8, 9, 10], 4);
    assert_eq!(sequence.len(), 48);
    let mut batch = engine.pool.begin_batch();
    assert!(batch.checkpoint(&mut sequence).unwrap().is_empty());
    batch.finish();
    all.extend([1; 9]);
    drop(sequence);
    let mut again = engine.admit(2, &all).unwrap();
    assert_eq!((again.len(), again.cached_prefix()), (40, 48), "no state was kept there");
    // Also a draft alone is the first append behind a hit.
    let mut batch = engine.pool.begin_batch();
    engine.step(&mut batch, &mut again, &all, Tokens::Draft(3)).unwrap();
    batch.finish();
    assert_eq!((again.len(), again.committed(), again.state_tokens()), (43, 40, 40));
    engine.check_states(&again, &all);
    again.commit(42).unwrap();
    again.truncate(42).unwrap();
    let mut batch = engine.pool.begin_batch();
    engine.step(&mut batch, &mut again, &all, Tokens::Ids(&all[42..48])).unwrap();
    assert_eq!((again.len(), again.state_tokens()), (48, 48));
    engine.copies(&batch.checkpoint(&mut again).unwrap());
    batch.finish();
    drop(again);
    assert_eq!(engine.admit(3, &all).unwrap().len(), 48);
    engine.close();
}

/// Whatever was drafted, a truncation goes back to the states and no further.
#[test]
fn drafts_are_taken_back_to_the_states() {
    let (engine, mut all) = (Engine::new(400, 4), (0..41).collect::<Vec<u32>>());
    let mut sequence = begun(&engine, &all);
    draft(&engine, &mut sequence, &mut all, &[7, 8, 9, 10], 3);
    let state = sequence.state_tokens();
    let error = sequence.truncate(state - 1).unwrap_err();
    assert!(
        matches!(error, SequenceError::StateAhead { asked, tokens, .. } if (asked, tokens) == (state - 1, state))
    );
    sequence.truncate(state + 1).unwrap();
    sequence.truncate(state).unwrap();
    assert_eq!((sequence.len(), sequence.state_tokens()), (state, state));
    sequence.truncate(0).unwrap();
    assert_eq!((sequence.len(), sequence.state_tokens()), (0, 0));
    drop(sequence);
    engine.close();
}

/// A batch with drafts that is abandoned takes the states with it: what it computed from them could
/// become the state. No later checkpoint of the sequence is found.
#[test]
fn an_abandoned_draft_begins_again() {
    for accepted in [0, 2] {
        let (engine, mut all) = (Engine::new(400, 4), (0..41).collect::<Vec<u32>>());
        let mut sequence = begun(&engine, &all);
        all.extend([7, 8, 9, 10, 11, 12, 13]);
        let mut first = engine.pool.begin_batch();
        engine.step(&mut first, &mut sequence, &all, Tokens::Draft(2)).unwrap();
        sequence.accept(&all[41..41 + accepted]).unwrap();
        let mut second = engine.pool.begin_batch();
        let rest: Vec<u32> = all[41 + accepted..44].to_vec();
        engine.step(&mut second, &mut sequence, &all, Tokens::Ids(&rest)).unwrap();
        let copies = second.checkpoint(&mut sequence).unwrap();
        assert_eq!((sequence.state_tokens(), copies.len()), (44, 2));
        engine.copies(&copies);
        second.finish();
        drop(first);
        assert_eq!((sequence.len(), sequence.state_tokens()), (0, 0), "{accepted}");
        let mut again = engine.admit(2, &all).unwrap();
        assert_eq!(again.len(), 40, "{accepted}: the checkpoint of the prompt");
        engine.prefill(&mut again, &all).unwrap();
        sequence.truncate(0).unwrap();
        drop((again, sequence));
        engine.close();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// In any order, also over the ends of blocks and windows: each state that is read is that of
    /// the tokens before it, and so is each token that the next one sees.
    #[test]
    fn any_drafts(steps in prop::collection::vec((0usize..7, 0usize..7, 0u8..8), 1..40), from in 1usize..30) {
        let (engine, mut all) = (Engine::new(600, 4), (0..from as u32).collect::<Vec<u32>>());
        let mut sequence = begun(&engine, &all);
        for (at, (drafts, right, what)) in steps.into_iter().enumerate() {
            if sequence.is_empty() {
                all.truncate(from);
                all.resize(from, 0);
                drop(sequence);
                sequence = begun(&engine, &all);
            }
            let drafts: Vec<u32> = (0..drafts as u32).map(|draft| 1000 + draft + at as u32).collect();
            if drafts.is_empty() {
                let length = sequence.len();
                all.truncate(length);
                all.push(at as u32);
                let mut batch = engine.pool.begin_batch();
                engine.step(&mut batch, &mut sequence, &all, Tokens::Ids(&[at as u32])).unwrap();
                if sequence.len().is_multiple_of(4) {
                    engine.copies(&batch.checkpoint(&mut sequence).unwrap());
                }
                if what > 0 { batch.finish() } else { drop(batch) }
                continue;
            }
            draft(&engine, &mut sequence, &mut all, &drafts, right.min(drafts.len()));
            all.truncate(sequence.len());
            if what == 1 {
                drop(sequence);
                let mut longer = all.clone();
                longer.push(3);
                let hit = engine.admit(1, &longer).unwrap();
                engine.check(&hit, &longer);
                sequence = hit;
                engine.prefill(&mut sequence, &longer).unwrap();
                all = longer;
            }
        }
        drop(sequence);
        engine.close();
    }
}
