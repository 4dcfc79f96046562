use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kvpool::{AllocRequest, FrameGroup, FramePool, SequenceId};
use serde_json::json;

use super::super::description_tests::Description;
use super::super::routes::ROUTES;
use super::{JSON, Served};
use crate::admin::{Limits, Notice, OwnersReport, PoolAdmin, StatsReport};

/// A pool of 100 frames: 10 of sequence 7, of which 2 are shared, and 3 cached ones.
fn frames() -> FramePool {
    let pool = FramePool::builder(100).magazine_frames(0).build().unwrap();
    let (mut of_seven, mut cached) = (Vec::new(), Vec::new());
    pool.allocate(AllocRequest::new(10).sequence(SequenceId(7)), &mut of_seven).unwrap();
    pool.share(&of_seven[..2]).unwrap();
    pool.allocate(AllocRequest::new(3), &mut cached).unwrap();
    for &frame in &cached {
        pool.register(&[(frame, pool.key(FrameGroup(0), &frame.to_le_bytes()).unwrap())]).unwrap();
    }
    pool.free(&cached).unwrap();
    pool
}

fn served(pool: &FramePool, limits: Limits) -> (Served, Arc<PoolAdmin>) {
    let admin = Arc::new(PoolAdmin::new("engine", pool.clone()));
    let of_server = admin.clone();
    (Served::start_as(None, limits, |_| of_server), admin)
}

#[tokio::test]
async fn every_route_is_answered_or_refused_by_name() {
    let (served, admin) = served(&frames(), Limits::default());
    let mut description = Description::new();
    let mut asked = BTreeSet::new();
    for (line, body, status) in [
        ("GET /", "", 200),
        ("GET /healthz", "", 200),
        ("GET /readyz", "", 200),
        ("GET /stats", "", 200),
        ("GET /metrics", "", 200),
        ("GET /map.svg", "", 200),
        ("GET /owners", "", 200),
        ("GET /history", "", 200),
        ("GET /topology", "", 200),
        ("GET /openapi.json", "", 200),
        ("POST /audit", "{}", 200),
        ("POST /trim", "{}", 200),
        ("POST /trim", "{\"keep\": 0}", 501),
        ("POST /hints", r#"{"protocol_version": "1", "message_id": "", "actions": []}"#, 501),
        ("GET /sequences", "", 501),
        ("GET /migrations", "", 501),
        ("POST /defrag", "{}", 501),
        ("POST /resize", "{\"blocks\": 10}", 501),
        ("POST /migrate", "{\"sequence\": 7, \"to\": \"b\"}", 501),
        ("POST /declare-ended", "{\"peer\": \"b\"}", 501),
    ] {
        let headers = if line.starts_with("POST") { JSON } else { "" };
        let (got, content_type, answer) = served.exchange(line, headers, body).await;
        assert_eq!(got, status, "{line} {body}: {answer}");
        description.check_answer(line, status, &content_type, &answer);
        if status == 501 {
            assert_eq!(answer["type"], "urn:kvpool:problem:unsupported");
            assert!(answer["detail"].as_str().unwrap().contains("a pool of frames"), "{answer}");
        }
        let (method, path) = line.split_once(' ').unwrap();
        asked.insert((method.to_lowercase(), path.to_owned()));
    }
    // Events have a test of their own.
    asked.insert(("get".to_owned(), "/events".to_owned()));
    let routes = ROUTES.iter().map(|&(method, path)| (method.to_owned(), path.to_owned()));
    assert_eq!(asked, routes.collect());
    admin.drain();
    served.refuses("POST /trim", JSON, "{}", 503, "unavailable").await;
    served.stop().await;
}

#[tokio::test]
async fn figures_are_those_of_the_frames_and_others_are_absent() {
    let pool = frames();
    let (served, admin) = served(&pool, Limits::default());
    let client = served.client(None);
    let answer = client.get("/stats").await.unwrap();
    for absent in ["block_bytes", "block_tokens", "layout", "sequences", "sequence_runs", "allocation"] {
        assert!(answer.get(absent).is_none(), "{absent}: {answer}");
    }
    let metrics = &answer["metrics"];
    for absent in [
        "/migrations",
        "/query_tokens",
        "/hit_tokens",
        "/moves/moved_bytes",
        "/stats/latency",
        "/stats/batches_abandoned",
        "/stats/closing",
        "/stats/in_transfer",
        "/stats/quarantined",
        "/stats/unwiped",
    ] {
        let (group, field) = absent.rsplit_once('/').unwrap();
        let group = metrics.pointer(group).unwrap().as_object().unwrap();
        assert!(!group.contains_key(field), "{absent}: {metrics}");
    }
    let timed: Vec<_> = metrics["latencies"].as_object().unwrap().keys().collect();
    assert_eq!(timed, ["wait"]);
    let stats: StatsReport = serde_json::from_value(answer).unwrap();
    assert_eq!((stats.total, stats.used, stats.free, stats.evictable), (100, 10, 87, 3));
    assert_eq!((stats.of_sequences, stats.fragmentation), (None, pool.fragmentation()));

    let owners: OwnersReport = serde_json::from_value(client.get("/owners").await.unwrap()).unwrap();
    let [owner] = &owners.owners[..] else { panic!("{owners:?}") };
    assert_eq!(
        (json!(owner.kind), owner.sequence, owner.blocks, owner.shared_blocks),
        (json!("engine"), Some(7), 10, 2)
    );

    let audit = client.post("/audit", &json!({})).await.unwrap();
    assert_eq!((&audit["sound"], &audit["report"]["owned"]), (&json!(true), &json!(10)));
    let trimmed = client.post("/trim", &json!({})).await.unwrap();
    assert_eq!((&trimmed["evicted_blocks"], &trimmed["evictable"]), (&json!(0), &json!(3)));

    let text = served.raw("GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await;
    for line in [
        "kvpool_blocks{pool=\"engine\",state=\"used\"} 10",
        "kvpool_blocks{pool=\"engine\",state=\"evictable\"} 3",
        "kvpool_longest_free_run_blocks{pool=\"engine\"} 87",
        "kvpool_audits_total{pool=\"engine\"} 1",
        "kvpool_registered_blocks_total{pool=\"engine\"} 3",
    ] {
        assert!(text.contains(line), "no {line} in {text}");
    }
    for absent in ["_bytes", "sequence", "transfer", "prefix_queries", "allocation_seconds", "peer_up"] {
        let found = text.lines().find(|line| line.starts_with("kvpool_") && line.contains(absent));
        assert_eq!(found, None);
    }

    // The engine makes its pool anew.
    admin.set_pool(FramePool::builder(50).build().unwrap());
    let answer = client.get("/stats").await.unwrap();
    assert_eq!((&answer["total"], &answer["used"]), (&json!(50), &json!(0)));
    served.stop().await;
}

#[tokio::test]
async fn events_are_as_described_without_migrations() {
    let limits = Limits { event_period: Duration::from_millis(10), ..Limits::default() };
    let pool = frames();
    let (served, _) = served(&pool, limits);
    let mut description = Description::new();
    let mut follower = served.client(None).follow();
    let mut names = BTreeSet::new();
    for _ in 0..40 {
        pool.allocate(AllocRequest::new(1), &mut Vec::new()).unwrap();
        let notice = follower.next().await.unwrap();
        if let Notice::Stats(stats) = &notice {
            assert_eq!(stats.of_sequences, None);
            description.check("/components/schemas/StatsSummary", &json!(notice)["data"]);
        }
        names.insert(notice.name());
    }
    assert_eq!(names, BTreeSet::from(["map", "map_changes", "stats"]));
    served.stop().await;
}
