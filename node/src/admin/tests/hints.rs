//! Hints over HTTP: what is refused as a whole, and what by itself.

use kvpool::hints::HintLimits;
use kvpool::prefix::PrefixConfig;
use kvpool::{AdmitRequest, SequenceId, SessionId, Tokens as Appended};

use super::*;

/// A pool with a budget of 4 pinned blocks, and a session 7 of 10 cached blocks.
fn hinted() -> Pool {
    let layout = KvLayout::named("tiny").unwrap();
    let limits = HintLimits::new().pinned_bytes(4 * layout.bytes_per_block() as u64);
    let builder = Pool::builder(layout).blocks(100).prefix_cache(PrefixConfig::new());
    let pool = builder.hints(limits).build().unwrap();
    let prompt: Vec<u32> = (0..41).collect();
    let mut sequence = pool.admit(&AdmitRequest::new(SequenceId(5), &prompt).session(SessionId(7))).unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, Appended::Announced(41)).unwrap();
    batch.finish();
    drop(sequence);
    pool
}

fn envelope(version: &str, actions: &[(&str, &str)]) -> String {
    let action = |(kind, payload): &(&str, &str)| {
        format!(
            r#"{{"action_id": "{kind}", "action_type": "{kind}", "action_version": "1.0", "payload": {payload}}}"#
        )
    };
    let actions: Vec<String> = actions.iter().map(action).collect();
    let actions = actions.join(", ");
    format!(r#"{{"protocol_version": "{version}", "message_id": "m", "actions": [{actions}]}}"#)
}

#[tokio::test]
async fn each_action_has_its_outcome() {
    let pool = hinted();
    let admin = Arc::new(PoolAdmin::new("n1", pool.clone()));
    let served = Served::serve(bound(None, Limits::default()), admin);
    let actions = [
        ("kv.retain", r#"{"session_id": 7, "ttl_seconds": 0}"#),
        ("kv.retain", r#"{"session_id": 7, "ttl_seconds": 31536000}"#),
        ("kv.retain", r#"{"session_id": 7, "ttl_seconds": -5}"#),
        ("kv.pin", r#"{"session_id": 7, "ttl_seconds": 1e300}"#),
        ("kv.pin", r#"{"session_id": 7, "ttl_seconds": "NaN"}"#),
        ("kv.pin", r#"{"session_id": 7, "ttl_seconds": 60}"#),
        ("kv.pin", r#"{"session_id": 8, "ttl_seconds": 60}"#),
        ("kv.sing", r#"{"session_id": 7}"#),
        ("kv.prefetch", r#"{"session_id": 7}"#),
        ("kv.demote", r#"{"session_id": 7}"#),
    ];
    let (status, _, answer) = served.exchange("POST /hints", JSON, &envelope("1.7", &actions)).await;
    assert_eq!(status, 200, "{answer}");
    let outcomes = answer["outcomes"].as_array().unwrap();
    let told: Vec<_> = outcomes
        .iter()
        .map(|told| {
            let more = ["reason", "limit"].iter().find_map(|field| told[field].as_str());
            (told["outcome"].as_str().unwrap(), more.unwrap_or_default())
        })
        .collect();
    let malformed = ("rejected", "malformed");
    assert_eq!(
        told,
        [
            ("rejected", "ended"),
            ("clipped", "longest"),
            malformed,
            malformed,
            malformed,
            ("clipped", "pinned_bytes"),
            ("missing", ""),
            malformed,
            ("rejected", "no_tier"),
            ("accepted", ""),
        ],
        "{answer}"
    );
    assert_eq!(pool.sessions()[0].retained_until, None, "the last one counts");
    served.stop().await;
}

#[tokio::test]
async fn envelopes_are_refused_as_a_whole() {
    let pool = hinted();
    let admin = Arc::new(PoolAdmin::new("n1", pool.clone()));
    let served = Served::serve(bound(Some(TOKEN), Limits::default()), admin);
    let headers = format!("{JSON}Authorization: Bearer {TOKEN}\r\n");
    let release = ("kv.release", r#"{"session_id": 7}"#);
    let many = vec![release; 257];
    for (body, status) in [
        (envelope("2.0", &[release]), 422),
        (envelope("", &[release]), 422),
        (envelope("1", &many), 422),
        (envelope("1", &[release, ("kv.pin", r#"{"ttl_seconds": NaN}"#)]), 422),
        (envelope("1", &[release, ("kv.pin", r#"{"ttl_seconds": 1e999}"#)]), 422),
        ("[]".to_owned(), 422),
    ] {
        let (got, _, answer) = served.exchange("POST /hints", &headers, &body).await;
        assert_eq!(got, status, "{body}: {answer}");
        assert!(answer["detail"].as_str().is_some_and(|detail| !detail.is_empty()), "{answer}");
    }
    // Callers without the right.
    let body = envelope("1", &[release]);
    assert_eq!(served.exchange("POST /hints", JSON, &body).await.0, 401);
    let folder = tempfile::tempdir().unwrap();
    let reader = "a-token-that-reads-figures";
    fs::write(folder.path().join("tokens"), reader).unwrap();
    let read = Tokens::read(&folder.path().join("tokens")).ok();
    let all = Some(Token::new(TOKEN).unwrap().into());
    served.access.replace(AdminCredentials { all, read, tls: None }).unwrap();
    let reading = format!("{JSON}Authorization: Bearer {reader}\r\n");
    assert_eq!(served.exchange("POST /hints", &reading, &body).await.0, 403);
    assert_eq!(pool.sessions().len(), 1, "nothing was done");
    assert_eq!(served.exchange("POST /hints", &headers, &body).await.0, 200);
    assert!(pool.sessions().is_empty());
    served.stop().await;
}
