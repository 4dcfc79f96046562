//! What operators read of a node: metrics, owners and events, end to end.

use super::common;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use common::live::{Node, program, run, said, wait_until};
use common::openmetrics::{Sample, read, value};
use rustix::process::Signal;
use serde_json::Value;

fn scrape(node: &Node) -> Vec<Sample> {
    let (head, body) = node.http("GET /metrics", "", "");
    assert!(
        head.starts_with("HTTP/1.1 200") && head.contains("application/openmetrics-text; version=1.0.0"),
        "{head}"
    );
    read(&body).unwrap_or_else(|error| panic!("{error}\n{body}"))
}

#[test]
fn metrics_agree_with_the_statistics() {
    let node = Node::start("serve --listen off --name n1 --size 3000 --load conversations --load-threads 2");
    wait_until("prefixes are hit", || node.json("stats")["metrics"]["hit_tokens"].as_u64() > Some(0));
    node.json("resize 4000");
    node.json("audit");
    // Counters lie between what the statistics say before and after.
    let before = node.json("stats");
    let samples = scrape(&node);
    let after = node.json("stats");
    assert!(samples.iter().all(|sample| sample.labels["pool"] == "n1"));
    let blocks: f64 =
        samples.iter().filter(|sample| sample.name == "kvpool_blocks").map(|sample| sample.value).sum();
    assert!((blocks - 4000.0).abs() < 500.0, "{blocks} blocks, while others allocate");
    for (name, labels, pointer) in [
        ("kvpool_allocations_total", &[][..], "/metrics/allocations/requests"),
        ("kvpool_allocated_blocks_total", &[], "/metrics/allocations/blocks"),
        ("kvpool_freed_blocks_total", &[], "/metrics/allocations/freed_blocks"),
        ("kvpool_prefix_queries_total", &[], "/metrics/query_tokens"),
        ("kvpool_prefix_hits_total", &[], "/metrics/hit_tokens"),
        ("kvpool_refusals_total", &[("reason", "exhausted")], "/metrics/refusals/exhausted"),
        ("kvpool_moves_total", &[("outcome", "published")], "/metrics/moves/moved_blocks"),
        ("kvpool_moved_bytes_total", &[], "/metrics/moves/moved_bytes"),
        ("kvpool_allocation_seconds_count", &[("operation", "append")], ""),
    ] {
        let found = value(&samples, name, labels);
        let of = |stats: &Value| match pointer {
            "" => {
                let buckets = stats["metrics"]["latencies"]["append"]["buckets"].as_array().unwrap();
                buckets.iter().map(|bucket| bucket["count"].as_f64().unwrap()).sum()
            }
            pointer => stats.pointer(pointer).unwrap_or_else(|| panic!("{pointer}")).as_f64().unwrap(),
        };
        let range = of(&before)..=of(&after);
        assert!(range.contains(&found), "{name} {labels:?}: {found} is not in {range:?}");
    }
    assert_eq!(value(&samples, "kvpool_capacity_bytes", &[]), 4000.0 * 256.0);
    assert_eq!(value(&samples, "kvpool_mapped_bytes", &[]), 4001.0 * 256.0);
    assert_eq!(value(&samples, "kvpool_resize_seconds_count", &[]), 1.0);
    assert_eq!(value(&samples, "kvpool_audits_total", &[]), 1.0);
    assert_eq!(value(&samples, "kvpool_audit_failures_total", &[]), 0.0);
    assert_eq!(value(&samples, "kvpool_build_info", &[("version", env!("CARGO_PKG_VERSION"))]), 1.0);
    assert!(value(&samples, "kvpool_traffic", &[("counter", "tokens")]) > 0.0);
    assert_eq!(node.end(Signal::TERM), (Some(0), String::new()));
}

#[test]
fn a_node_at_rest_has_exact_gauges() {
    let node = Node::start("serve --name at-rest --size 1000 --peers away=127.0.0.1:1");
    wait_until("the peer was tried", || node.http("GET /readyz", "", "").0.starts_with("HTTP/1.1 200"));
    let samples = scrape(&node);
    assert_eq!(value(&samples, "kvpool_blocks", &[("state", "free")]), 1000.0);
    assert_eq!(value(&samples, "kvpool_blocks", &[("state", "used")]), 0.0);
    assert_eq!(value(&samples, "kvpool_usage_ratio", &[]), 0.0);
    assert_eq!(value(&samples, "kvpool_peer_up", &[("peer", "away")]), 0.0);
    assert_eq!(value(&samples, "kvpool_waiting_requests", &[("priority", "urgent")]), 0.0);
    let (head, picture) = node.http("GET /map.svg", "", "");
    assert!(
        head.contains("image/svg+xml") && picture.contains("at-rest") && picture.ends_with("</svg>"),
        "{head}"
    );
    let topology: Value = serde_json::from_str(&node.http("GET /topology", "", "").1).unwrap();
    assert_eq!(topology["links"][0]["name"], "away");
    assert_eq!(topology["links"][0]["is_up"], false);
    assert!(topology["links"][0]["reason"].is_string(), "{topology}");
    assert_eq!(topology["machine"]["peers"][0]["address"], "127.0.0.1:1");
    assert!(node.text("owners").starts_with("0 owners of 0 blocks"));
    node.end(Signal::TERM);
}

#[test]
fn owners_are_listed_with_their_ages() {
    let node = Node::start("serve --listen off --size 4000 --load conversations --load-rest 20ms");
    let mut owners = Value::Null;
    wait_until("sequences have blocks", || {
        owners = node.json("owners --limit 2");
        let blocks = |at: usize| owners["owners"][at]["blocks"].as_u64();
        blocks(0) > Some(0) && blocks(1).is_some() && owners["total"].as_u64() > Some(2)
    });
    let first = &owners["owners"][0];
    assert_eq!(first["kind"], "sequence");
    assert!(first["blocks"].as_u64() >= owners["owners"][1]["blocks"].as_u64(), "{owners}");
    assert!(first["held_s"].as_f64() > Some(0.0) && first["tokens"].as_u64() > Some(0), "{owners}");
    let text = node.text("owners --limit 1");
    assert!(text.contains("sequence") && text.contains("more with as many blocks or fewer"), "{text}");
    assert_eq!(node.end(Signal::TERM), (Some(0), String::new()));
}

#[test]
fn events_are_followed_and_end_with_their_reader() {
    let node = Node::start("serve --name n1 --size 2000 --load conversations --load-rest 5ms");
    let lines = node.text("events --count 6 --json");
    let events: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(events.len(), 6);
    let names: Vec<_> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!(names[..3], ["stats", "map", "migrations"]);
    // Many changes come as the whole map.
    assert!(names[3..].iter().any(|name| ["map", "map_changes"].contains(name)), "{names:?}");
    assert_eq!(events[0]["data"]["node"], "n1");
    let text = node.text("events --count 3");
    assert!(text.starts_with("n1: used ") && text.contains("map: 2,001 frames, 1 a cell"), "{text}");
    assert!(text.contains("no migrations"), "{text}");
    // A reader that goes away ends the command.
    let mut command = program();
    let mut child = command.args(["events", &node.url]).stdout(Stdio::piped()).spawn().unwrap();
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    reader.read_line(&mut String::new()).unwrap();
    drop(reader);
    let mut status = None;
    wait_until("it ends with its reader", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    assert_eq!(status.unwrap().code(), Some(0));
    let url = node.url.clone();
    node.end(Signal::TERM);
    let gone = run(&format!("events {url}"));
    assert_eq!(gone.status.code(), Some(1));
    assert!(said(&gone).contains("cannot reach"), "{}", said(&gone));
}

#[test]
fn a_trim_gives_cached_blocks_up() {
    let node = Node::start("serve --listen off --size 4000 --load conversations");
    wait_until("blocks are cached", || node.json("stats")["evictable"].as_u64() > Some(100));
    // Cached blocks that a batch in flight may see stay, and those may be all.
    wait_until("a trim evicts", || {
        let (_, answer) = node.http("POST /trim", "Content-Type: application/json\r\n", "{\"keep\": 0}");
        let outcome: Value = serde_json::from_str(&answer).unwrap();
        outcome["evicted_blocks"].as_u64() > Some(0)
    });
    assert_eq!(node.json("audit")["sound"], true);
    assert_eq!(node.end(Signal::TERM), (Some(0), String::new()));
}

/// The reader refuses what the format does not permit: the tests above could fail.
#[test]
fn the_reader_is_strict() {
    let good = "# HELP a_seconds x\n# TYPE a_seconds gauge\n# UNIT a_seconds seconds\na_seconds{b=\"c\\\"\"} 1\n# EOF\n";
    assert_eq!(read(good).unwrap()[0].labels["b"], "c\"");
    for bad in [
        "# TYPE a gauge\na 1\n",
        "# TYPE a gauge\nb 1\n# EOF\n",
        "# TYPE a gauge\na x\n# EOF\n",
        "# TYPE a counter\na 1\n# EOF\n",
        "# TYPE a counter\na_total -1\n# EOF\n",
        "# TYPE a gauge\na 1\na 2\n# EOF\n",
        "# TYPE a gauge\na{b=\"c} 1\n# EOF\n",
        "# TYPE a gauge\na{b=\"\\x\"} 1\n# EOF\n",
        "# TYPE a gauge\na 1\n# TYPE c gauge\nc 1\n# HELP a late\n# EOF\n",
        "# TYPE a gauge\n# UNIT a seconds\na 1\n# EOF\n",
        "# TYPE a histogram\na_bucket{le=\"1\"} 2\na_bucket{le=\"+Inf\"} 1\na_sum 1\na_count 1\n# EOF\n",
        "# TYPE a histogram\na_bucket{le=\"1\"} 1\na_sum 1\na_count 1\n# EOF\n",
        "a 1\n# EOF\n",
    ] {
        assert!(read(bad).is_err(), "{bad}");
    }
}
