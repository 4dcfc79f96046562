use kvpool::hints::HintLimits;
use kvpool::prefix::PrefixConfig;
use kvpool::{AdmitRequest, KvLayout, Tokens};
use serde_json::json;

use super::*;

fn pool() -> Pool {
    let builder = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(100);
    let cache = PrefixConfig::new().clock(|| Millis(1_000));
    let pool = builder.prefix_cache(cache).hints(HintLimits::new()).build().unwrap();
    let prompt: Vec<u32> = (0..41).collect();
    let request = AdmitRequest::new(SequenceId(5), &prompt).session(SessionId(u64::MAX));
    let mut sequence = pool.admit(&request).unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, Tokens::Announced(41)).unwrap();
    batch.finish();
    drop(sequence);
    pool
}

fn action(kind: &str, payload: Value) -> Value {
    json!({"action_id": kind, "action_type": kind, "action_version": "1.0", "payload": payload})
}

fn ask(pool: &Pool, actions: Vec<Value>) -> Value {
    let envelope = json!({"protocol_version": "0.1", "message_id": "m", "actions": actions});
    let envelope: HintsEnvelope = serde_json::from_value(envelope).unwrap();
    let packed = rmp_serde::to_vec_named(&envelope).unwrap();
    assert_eq!(HintsEnvelope::from_msgpack(&packed).unwrap(), envelope);
    serde_json::to_value(envelope.carry_out(pool).unwrap()).unwrap()
}

#[test]
fn each_action_has_an_outcome_of_its_own() {
    let pool = pool();
    let me = u64::MAX.to_string();
    let answer = ask(
        &pool,
        vec![
            action("kv.retain", json!({"session_id": me, "priority": 80, "ttl_seconds": 60})),
            action("kv.sing", json!({})),
            action("kv.pin", json!({"session_id": u64::MAX, "duration": 1e9})),
            action("kv.prefetch", json!({"session_id": me})),
            action("kv.evict", json!({"session_id": 7})),
            action("kv.release", json!({"session_id": me})),
        ],
    );
    let all = answer["outcomes"].as_array().unwrap();
    let of = |at: usize, field: &str| all[at][field].clone();
    assert_eq!((&answer["message_id"], all.len()), (&json!("m"), 6));
    assert_eq!((of(0, "outcome"), of(0, "blocks")), (json!("accepted"), json!(10)));
    assert_eq!((of(1, "outcome"), of(1, "reason")), (json!("rejected"), json!("malformed")));
    assert!(of(1, "detail").as_str().unwrap().contains("kv.sing"));
    assert_eq!((of(2, "outcome"), of(2, "limit")), (json!("clipped"), json!("longest")));
    assert_eq!(of(2, "until"), json!(3_601_000));
    assert_eq!((of(3, "outcome"), of(3, "reason")), (json!("rejected"), json!("no_tier")));
    assert_eq!(of(4, "outcome"), json!("missing"));
    assert_eq!((of(5, "outcome"), of(5, "blocks")), (json!("accepted"), json!(10)));
}

#[test]
fn payloads_that_are_not_understood_are_rejected_with_words() {
    let pool = pool();
    for (kind, payload, part) in [
        ("kv.retain", json!({}), "session_id, block_hashes and sequence_id"),
        ("kv.retain", json!([]), "payload"),
        ("kv.retain", json!({"session_id": 1, "color": 2}), "color"),
        ("kv.retain", json!({"session_id": "one"}), "no id"),
        ("kv.retain", json!({"session_id": 1, "priority": 101}), "from 0 to 100"),
        ("kv.retain", json!({"session_id": 1, "priority": -7}), "from 0 to 100"),
        ("kv.retain", json!({"sequence_id": 1, "directives": []}), "no directives"),
        ("kv.retain", json!({"session_id": 1, "ttl_seconds": -1}), "ttl_seconds -1"),
        ("kv.retain", json!({"session_id": 1, "ttl_seconds": 1e300}), "ttl_seconds"),
        ("kv.retain", json!({"session_id": 1, "block_hashes": []}), "one of"),
        ("kv.retain", json!({"session_id": 1, "start": 0}), "one of"),
        ("kv.demote", json!({"block_hashes": ["12"]}), "block hash"),
        ("kv.demote", json!({"sequence_id": 1, "directives": []}), "for kv.retain"),
        ("kv.retain", json!({"session_id": 1, "directives": []}), "sequence_id"),
        ("kv.retain", json!({"sequence_id": 1, "directives": [{"priority": 200}]}), "directives[0]"),
        ("kv.release", json!({"session_id": 1, "ttl_seconds": 600}), "ttl_seconds has no meaning"),
        ("kv.demote", json!({"session_id": 1, "ttl_seconds": -1}), "ttl_seconds has no meaning"),
        ("kv.evict", json!({"session_id": 1, "priority": 3}), "priority has no meaning"),
        ("kv.pin", json!({"session_id": 1, "priority": "high"}), "priority has no meaning"),
        ("kv.prefetch", json!({"session_id": 1, "priority": 3}), "priority has no meaning"),
        (
            "kv.retain",
            json!({"sequence_id": 1, "start": 3, "directives": [{"priority": 1}]}),
            "start and end",
        ),
        (
            "kv.retain",
            json!({"sequence_id": 1, "priority": 3, "directives": [{"priority": 1}]}),
            "priority has no",
        ),
    ] {
        let answer = ask(&pool, vec![action(kind, payload.clone())]);
        let outcome = &answer["outcomes"][0];
        assert_eq!((&outcome["outcome"], &outcome["reason"]), (&json!("rejected"), &json!("malformed")));
        assert!(outcome["detail"].as_str().unwrap().contains(part), "{payload}: {outcome}");
    }
    let envelope = |version: &str, actions: usize| HintsEnvelope {
        protocol_version: version.to_owned(),
        message_id: String::new(),
        actions: vec![serde_json::from_value(action("kv.evict", json!({"session_id": 1}))).unwrap(); actions],
    };
    assert!(matches!(envelope("2.0", 0).carry_out(&pool), Err(EnvelopeError::Version { .. })));
    assert_eq!(envelope("1", 300).carry_out(&pool), Err(EnvelopeError::Actions { got: 300 }));
    assert!(matches!(HintsEnvelope::from_msgpack(&[1, 2]), Err(EnvelopeError::Malformed(_))));
}

/// MessagePack has numbers that JSON does not have, and JSON ones that no type holds.
#[test]
fn times_that_are_no_times_are_rejected_by_themselves() {
    #[derive(Serialize)]
    struct Odd {
        protocol_version: &'static str,
        message_id: &'static str,
        actions: Vec<OddAction>,
    }
    #[derive(Clone, Serialize)]
    struct OddAction {
        action_id: &'static str,
        action_type: &'static str,
        action_version: &'static str,
        payload: OddPayload,
    }
    #[derive(Clone, Serialize)]
    struct OddPayload {
        session_id: u64,
        ttl_seconds: Option<f64>,
        priority: Option<f64>,
    }
    let pool = pool();
    let action = |kind, ttl_seconds, priority| OddAction {
        action_id: "a",
        action_type: kind,
        action_version: "1",
        payload: OddPayload { session_id: u64::MAX, ttl_seconds, priority },
    };
    let ask = |actions: Vec<OddAction>| {
        let envelope = Odd { protocol_version: "1", message_id: "m", actions };
        let packed = rmp_serde::to_vec_named(&envelope).unwrap();
        let answer = HintsEnvelope::from_msgpack(&packed).unwrap().carry_out(&pool).unwrap();
        let answer = serde_json::to_value(answer).unwrap();
        answer["outcomes"].as_array().unwrap().clone()
    };
    for (odd, part) in [
        (f64::NAN, "NaN"),
        (f64::INFINITY, "inf"),
        (f64::NEG_INFINITY, "-inf"),
        (-1.0, "negative"),
        (-f64::MIN_POSITIVE, "negative"),
        (1e300, "too big"),
        (f64::MAX, "too big"),
    ] {
        for kind in ["kv.retain", "kv.pin", "kv.prefetch"] {
            let good = action("kv.demote", None, None);
            let outcomes = ask(vec![action(kind, Some(odd), None), good]);
            assert_eq!(outcomes[0]["reason"], "malformed", "{kind} {odd}: {outcomes:?}");
            let detail = outcomes[0]["detail"].as_str().unwrap();
            assert!(detail.contains(part), "{kind} {odd}: {detail}");
            assert_eq!(outcomes[1]["outcome"], "accepted", "{outcomes:?}");
        }
    }
    let odd = ask(vec![action("kv.retain", None, Some(f64::NAN))]);
    assert_eq!(odd[0]["reason"], "malformed", "{odd:?}");
    assert!(pool.sessions()[0].retained_until.is_none());
    assert_eq!(ask(vec![action("kv.retain", None, None)])[0]["limit"], "longest", "no time is the longest");
    for odd in ["NaN", "Infinity", "1e999", "-1e999"] {
        let text = format!(
            r#"{{"protocol_version": "1", "message_id": "m", "actions": [{{"action_id": "a",
            "action_type": "kv.pin", "action_version": "1", "payload": {{"ttl_seconds": {odd}}}}}]}}"#
        );
        assert!(serde_json::from_str::<HintsEnvelope>(&text).is_err(), "{odd} is no JSON");
    }
}

#[test]
fn directives_are_hints_on_tokens() {
    let pool = pool();
    let open = pool.sequence(SequenceId(6)).tokens(&(0..41).collect::<Vec<_>>()).unwrap();
    let directives = json!([{"start": 0, "end": 16, "priority": 90, "duration": 60.0},
        {"start": 16, "priority": 0}]);
    let answer = ask(&pool, vec![action("kv.retain", json!({"sequence_id": 6, "directives": directives}))]);
    let blocks: Vec<_> = answer["outcomes"].as_array().unwrap().iter().map(|told| &told["blocks"]).collect();
    assert_eq!(blocks, [&json!(4), &json!(6)], "{answer}");
    drop(open);
}
