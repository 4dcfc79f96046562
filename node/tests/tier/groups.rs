//! Pools with several groups of layers share blocks: what comes from the tier is a hit in all
//! groups.

use std::sync::Arc;
use std::time::Duration;

use kvpool::hints::HintLimits;
use kvpool::prefix::{HashKey, PrefixConfig, PrefixKeys};
use kvpool::{AdmitRequest, Dtype, GroupedSequence, KvLayout, Pool, SequenceId, SessionId, Tokens, Window};
use kvpool_node::admin::Reporters;
use kvpool_node::hints::HintsEnvelope;
use kvpool_node::tier::{Fingerprint, TierPolicy, TierReporter, Tiered, TieredSettings};
use serde_json::{Value, json};

use super::faulty::Fault;
use super::support::{NAMESPACE, WAIT, bring_back, hasty, idle, in_process, soon, tiered, until};

const WINDOWS: [Option<(usize, u32)>; 3] = [None, Some((24, 0)), Some((9, 5))];

/// Frames of 32 bytes.
const STATES: [usize; 2] = [3, 2];

fn pool(blocks: usize, states: &[usize], windows: &[Option<(usize, u32)>]) -> Pool {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).dtype(Dtype::F32).block_tokens(4);
    let window = |(tokens, sinks)| Window::new(tokens).unwrap().sinks(sinks);
    Pool::builder(layout.build().unwrap())
        .blocks(blocks)
        .threads(1)
        .prefix_cache(PrefixConfig::new().key(HashKey::from_bytes([7; 32])))
        .hints(HintLimits::new())
        .groups(windows.iter().map(|keeps| keeps.map(window)))
        .states(states.iter().copied())
        .build()
        .unwrap()
}

fn usual(blocks: usize) -> Pool {
    pool(blocks, &STATES, &WINDOWS)
}

fn stamp(of: usize, tokens: &[u32]) -> f32 {
    let mix = |sum: u32, token: &u32| sum.wrapping_mul(0x01000193) ^ token.wrapping_add(1);
    (tokens.iter().fold(0x811c9dc5 ^ of as u32, mix) >> 8) as f32
}

fn state_bytes(state: usize, tokens: &[u32]) -> Vec<u8> {
    (0..STATES[state] * 8).flat_map(|at| stamp(100 + state * 1000 + at, tokens).to_le_bytes()).collect()
}

/// Checks the bytes of all groups and states that the next token sees.
fn check(pool: &Pool, sequence: &GroupedSequence, all: &[u32]) {
    let (batch, length) = (&mut pool.begin_batch(), sequence.len());
    for (group, keeps) in WINDOWS.into_iter().enumerate() {
        let (window, sinks) = keeps.unwrap_or((usize::MAX, 0));
        let sees = |at: &usize| *at < sinks as usize || at.saturating_add(window) > length;
        for at in (0..length).filter(sees) {
            let (mut k, mut v) = ([0.0], [0.0]);
            let list = sequence.group(group);
            batch.load(list, 0, at..at + 1, (&mut k[..]).into(), (&mut v[..]).into()).unwrap();
            assert_eq!([k, v], [[stamp(group, &all[..=at])]; 2], "token {at} of {length} in group {group}");
        }
    }
    for state in (0..STATES.len()).filter(|_| length > 0) {
        let expected = state_bytes(state, &all[..length]);
        let mut read = vec![0; expected.len()];
        batch.load_state(sequence, state, &mut read).unwrap();
        assert_eq!(read, expected, "state {state} behind {length} tokens");
    }
}

/// Computes a prompt of a session, and closes it.
fn compute(pool: &Pool, session: u64, all: &[u32]) {
    let request = AdmitRequest::new(SequenceId(1), all).session(SessionId(session));
    let mut sequence = pool.admit_grouped(&request).unwrap();
    check(pool, &sequence, all);
    while sequence.len() < all.len() {
        let new = sequence.next_cut().unwrap_or(all.len()) - sequence.len();
        let mut batch = pool.begin_batch();
        let new = batch.append_grouped(&mut sequence, Tokens::Announced(new)).unwrap().tokens;
        for group in 0..WINDOWS.len() {
            let rows: Vec<f32> = new.clone().map(|at| stamp(group, &all[..=at])).collect();
            let rows = &rows[..];
            batch.store_grouped(&mut sequence, (group, 0), new.clone(), rows.into(), rows.into()).unwrap();
        }
        for state in 0..STATES.len() {
            batch.store_state(&mut sequence, state, &state_bytes(state, &all[..new.end])).unwrap();
        }
        if new.end.is_multiple_of(4) {
            batch.checkpoint(&mut sequence).unwrap();
        }
        batch.finish();
    }
}

/// Admits a prompt, checks its hit, and returns the hit's tokens.
fn hit(pool: &Pool, all: &[u32]) -> usize {
    let sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(2), all)).unwrap();
    check(pool, &sequence, all);
    sequence.len()
}

fn prompt(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|token| token * 7).collect()
}

fn needed(pool: &Pool, all: &[u32], tokens: usize) -> usize {
    pool.prompt_blocks(&PrefixKeys::new(), all).unwrap().needed_blocks(tokens)
}

#[tokio::test]
async fn a_prompt_of_all_groups_comes_back_by_each_policy() {
    for policy in [TierPolicy::Manual, TierPolicy::OnEviction, TierPolicy::WriteThrough] {
        let (store, tier) = in_process(hasty());
        let (a, b, all) = (usual(400), usual(400), prompt(103));
        let of_a = tiered(&a, &tier, policy);
        compute(&a, 3, &all);
        let cached = a.cached_blocks().len();
        assert!(of_a.flush(soon()).await);
        if policy == TierPolicy::Manual {
            assert_eq!(of_a.offload(400, soon()).await.unwrap().cached_blocks, cached);
        }
        assert_eq!(store.len(), cached, "{policy:?}: every block has a value of its own");
        assert_eq!(hit(&a, &all), if policy == TierPolicy::WriteThrough { 100 } else { 0 });
        let report = bring_back(&tiered(&b, &tier, TierPolicy::Manual), &all, WAIT).await;
        assert_eq!((report.cached_blocks, report.moved_blocks), (25, needed(&b, &all, 100)), "{report:?}");
        assert_eq!((hit(&b, &all), b.cached_blocks().len()), (100, needed(&b, &all, 100)));
        let report = bring_back(&tiered(&b, &tier, TierPolicy::Manual), &all, WAIT).await;
        assert_eq!((report.cached_blocks, report.moved_blocks), (25, 0));
        drop(of_a);
        for pool in [&a, &b] {
            idle(pool).await;
        }
    }
}

/// Where the tier lacks a block of one group, the hit is the next boundary at which it has all.
#[tokio::test]
async fn a_group_that_the_tier_lacks_shortens_the_hit() {
    for group in 0..5 {
        let (_store, tier) = in_process(hasty());
        let (a, b, all) = (usual(400), usual(400), prompt(90));
        [43, 83].iter().for_each(|&length| compute(&a, length as u64, &all[..length]));
        let lacks = a.prompt_blocks(&PrefixKeys::new(), &all).unwrap().needed(80);
        let cached = &a.cached_blocks_by_group()[group];
        let is_of_group = |hash| cached.iter().any(|&(_, of)| of == hash);
        let lost = lacks.iter().rev().find(|block| is_of_group(block.hash())).unwrap();
        assert_eq!(a.uncache(&[lost.hash()]).evicted_blocks, 1);
        tiered(&a, &tier, TierPolicy::Manual).offload(400, soon()).await.unwrap();
        let of_b = tiered(&b, &tier, TierPolicy::Manual);
        let report = bring_back(&of_b, &all, WAIT).await;
        assert_eq!((report.cached_blocks, report.moved_blocks), (10, needed(&b, &all, 40)), "{report:?}");
        assert_eq!(hit(&b, &all), 40, "group {group}");
        assert_eq!(of_b.counters().fetched_blocks as usize, needed(&b, &all, 40));
        idle(&b).await;
    }
}

/// Values that do not arrive, or are wrong, in any group: nothing of the boundary is kept.
#[tokio::test]
async fn values_that_do_not_come_leave_no_part_of_a_hit() {
    let (store, tier) = in_process(hasty());
    let (a, b, all) = (usual(400), usual(400), prompt(103));
    compute(&a, 3, &all);
    tiered(&a, &tier, TierPolicy::Manual).offload(400, soon()).await.unwrap();
    for fault in [Fault::Corrupt, Fault::Foreign, Fault::Short, Fault::HangInGets] {
        store.set_fault(fault);
        let report = bring_back(&tiered(&b, &tier, TierPolicy::Manual), &all, Duration::from_secs(1)).await;
        assert_eq!((report.cached_blocks, report.moved_blocks), (0, 0), "{fault:?}: {report:?}");
        store.set_fault(Fault::None);
        until("frames are free", || b.audit().is_ok_and(|report| report.owned == 0)).await;
        assert_eq!((hit(&b, &all), b.cached_blocks().len()), (0, 0));
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// With room for a part, or a limit, the longest boundary that fits.
#[tokio::test]
async fn as_much_as_fits() {
    let (_store, tier) = in_process(hasty());
    let (a, all) = (usual(400), prompt(90));
    [23, 43, 83].iter().for_each(|&length| compute(&a, length as u64, &all[..length]));
    tiered(&a, &tier, TierPolicy::Manual).offload(400, soon()).await.unwrap();
    for (room, limit, tokens) in [(34, 400, 40), (400, 34, 40), (24, 400, 20), (400, 24, 20), (18, 400, 0)] {
        let b = usual(420);
        let spare = b.free_blocks().saturating_sub(room).max(1);
        let held = b.allocate(kvpool::AllocRequest::new(spare)).unwrap();
        let mut settings = TieredSettings::new(NAMESPACE).policy(TierPolicy::Manual);
        settings.blocks_max = limit;
        let of_b = Tiered::new(b.clone(), tier.clone(), settings).unwrap();
        let report = bring_back(&of_b, &all, WAIT).await;
        assert_eq!(report.cached_blocks * 4, tokens, "{room}, {limit}: {report:?}");
        drop(held);
        assert_eq!((hit(&b, &all), b.cached_blocks().len()), (tokens, needed(&b, &all, tokens)));
        idle(&b).await;
    }
}

/// A hit that is here stays one, whatever fails or does not fit, and no more than the limit comes.
#[tokio::test]
async fn a_longer_hit_does_not_cost_the_one_that_is_here() {
    let (store, tier) = in_process(hasty());
    let (a, all) = (usual(400), prompt(103));
    [43, 83, 103].iter().for_each(|&length| compute(&a, length as u64, &all[..length]));
    tiered(&a, &tier, TierPolicy::Manual).offload(400, soon()).await.unwrap();
    for (fault, limit) in [(Fault::HangInGets, 400), (Fault::None, 400), (Fault::None, 20)] {
        let b = usual(60);
        let mut settings = TieredSettings::new(NAMESPACE).policy(TierPolicy::Manual);
        settings.blocks_max = limit;
        let of_b = Tiered::new(b.clone(), tier.clone(), settings).unwrap();
        bring_back(&tiered(&b, &tier, TierPolicy::Manual), &all[..43], WAIT).await;
        assert_eq!(hit(&b, &all[..43]), 40);
        let room = if limit < 400 { b.free_blocks() } else { 4 };
        let held = b.allocate(kvpool::AllocRequest::new(b.free_blocks() - room + 1)).ok();
        store.set_fault(fault);
        let report = bring_back(&of_b, &all, Duration::from_millis(500)).await;
        store.set_fault(Fault::None);
        assert!(report.moved_blocks <= limit, "{report:?}");
        drop(held);
        until("frames are free", || b.audit().is_ok_and(|report| report.owned == 0)).await;
        assert!(hit(&b, &all[..43]) == 40 || report.cached_blocks > 10, "{fault:?}, {limit}: {report:?}");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// What lies in a block depends on the groups.
#[test]
fn pools_of_other_groups_share_nothing() {
    let of = |pool: Pool| Fingerprint::of(&pool, NAMESPACE).unwrap();
    let all = [
        of(usual(100)),
        of(pool(100, &[3, 3], &WINDOWS)),
        of(pool(100, &[], &WINDOWS)),
        of(pool(100, &STATES, &[None, Some((24, 0)), Some((9, 0))])),
        of(pool(100, &[], &[None])),
    ];
    let apart = |at: usize| all[..at].iter().all(|other| *other != all[at]);
    assert!((0..all.len()).all(apart), "{all:?}");
    assert_eq!(of(usual(300)), all[0]);
}

/// A hint brings back what a session had in all groups; hashes of one group are refused with words.
#[tokio::test]
async fn a_hint_prefetches_all_groups_of_a_session() {
    let (_store, tier) = in_process(hasty());
    let (a, all) = (usual(400), prompt(103));
    compute(&a, 3, &all);
    let of_a = Arc::new(tiered(&a, &tier, TierPolicy::Manual));
    of_a.offload(400, soon()).await.unwrap();
    let reporters = Reporters::new();
    reporters.add(TierReporter::new("store", &of_a));
    let ask = |payload: Value| {
        let action = json!({"action_id": "a", "action_type": "kv.prefetch", "action_version": "1.0",
            "payload": payload});
        let envelope = json!({"protocol_version": "1.0", "message_id": "m", "actions": [action]});
        let envelope: HintsEnvelope = serde_json::from_value(envelope).unwrap();
        let answer = envelope.carry_out_with(&a, &reporters).unwrap();
        serde_json::to_value(answer).unwrap()["outcomes"][0].clone()
    };
    let refused = ask(json!({"block_hashes": [format!("{:032x}-{:016x}", 7, 7)]}));
    assert!(refused["detail"].as_str().is_some_and(|why| why.contains("name a session")), "{refused}");
    let deferred = ask(json!({"session_id": 3}));
    assert_eq!((&deferred["outcome"], &deferred["blocks"]), (&json!("deferred"), &json!(40)), "{deferred}");
    until("it is here", || a.cached_blocks().len() == 40).await;
    assert_eq!(hit(&a, &all), 100);
    idle(&a).await;
}
