use std::collections::HashSet;

use kvpool::{AllocRequest, KvLayout, LatencyHistogram, Pool};

use super::histogram::{bounds, seconds};
use super::*;

#[test]
fn names_follow_the_conventions() {
    let names: HashSet<_> = FAMILIES.iter().map(|family| family.full_name()).collect();
    assert_eq!(names.len(), FAMILIES.len());
    for family in FAMILIES {
        let name = family.full_name();
        let is_name = |name: &str| name.chars().all(|char| char.is_ascii_lowercase() || char == '_');
        assert!(is_name(&name) && family.labels.iter().all(|label| is_name(label)), "{name}");
        assert!(!family.help.ends_with('.') && !family.help.is_empty(), "{name}");
        assert!(!family.name.ends_with("_total") && !family.labels.contains(&"pool"), "{name}");
        assert!(family.kind != FamilyKind::Histogram || family.unit() == Some("seconds"), "{name}");
    }
}

fn histogram(buckets: &[(u64, u64)]) -> LatencyHistogram {
    let buckets =
        buckets.iter().map(|&(up_to_ns, count)| format!("{{\"up_to_ns\":{up_to_ns},\"count\":{count}}}"));
    let buckets: Vec<_> = buckets.collect();
    serde_json::from_str(&format!("{{\"buckets\":[{}],\"sum_ns\":5000}}", buckets.join(","))).unwrap()
}

#[test]
fn histograms_keep_every_time_on_its_side_of_a_bound() {
    let times = seconds(&histogram(&[(63, 1), (64, 2), (95, 4), (99, 8), ((1 << 30) - 1, 16)]));
    assert_eq!((times.sum, times.count), (5e-6, 31));
    assert_eq!(times.intervals[..3], [(63e-9, 1), (95e-9, 6), (127e-9, 8)]);
    assert_eq!(*times.intervals.last().unwrap(), (f64::INFINITY, 16), "a second or more");
    assert_eq!(times.intervals.iter().map(|&(_, count)| count).sum::<u64>(), 31);
    assert_eq!(seconds(&LatencyHistogram::default()).count, 0);
}

/// Returns the end of the pool's interval of a time: a sixteenth of a power of two, from 16 ns on.
fn end(time: u64) -> u64 {
    let width = 1 << time.ilog2().saturating_sub(4);
    time / width * width + width - 1
}

#[test]
fn bounds_are_ends_of_the_pools_intervals() {
    for bound in bounds() {
        assert_eq!(end(bound), bound, "{bound} is inside of an interval");
    }
}

#[test]
fn real_times_fit_the_bounds() {
    let pool = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(100).latency_sample(1).build().unwrap();
    for _ in 0..500 {
        drop(pool.allocate(AllocRequest::new(3)).unwrap());
    }
    let histogram = pool.metrics().latencies.allocate;
    for bucket in &histogram.buckets {
        assert_eq!(end(bucket.up_to_ns), bucket.up_to_ns, "the pool has other intervals");
    }
    let times = seconds(&histogram);
    assert_eq!(times.count, 500);
    assert_eq!(times.intervals.iter().map(|&(_, count)| count).sum::<u64>(), 500);
    // Each cumulative count is that of the pool up to the same time.
    let mut cumulated = 0;
    for (bound, (_, count)) in bounds().zip(&times.intervals) {
        cumulated += count;
        let of_pool = histogram.buckets.iter().filter(|bucket| bucket.up_to_ns <= bound);
        assert_eq!(cumulated, of_pool.map(|bucket| bucket.count).sum::<u64>(), "{bound}");
    }
}

#[test]
fn a_pool_has_a_value_of_every_family_of_a_pool() {
    let layout = KvLayout::named("tiny").unwrap();
    let with_cache =
        Pool::builder(layout).blocks(100).prefix_cache(kvpool::PrefixConfig::new()).build().unwrap();
    let _lease = with_cache.allocate(AllocRequest::new(25)).unwrap();
    let mut scrape = Scrape::new();
    pool(&with_cache, &mut scrape);
    let text = scrape.encode("a \"pool\"\\");
    let others = [
        BUILD,
        UPTIME,
        SERVING,
        AUDITS,
        AUDIT_FAILURES,
        TURN,
        COMPACTION,
        MIGRATIONS,
        NODE_MIGRATIONS,
        SENT_BYTES,
        GRANTED_BYTES,
        BAD_BLOCKS,
        DAMAGED_BLOCKS,
        IN_DOUBT,
        OLDEST_DOUBT,
        DROPPED_MESSAGES,
        QUARANTINES,
        QUARANTINED_GRANTS,
        PEER_UP,
        SERVICE_FAILURES,
        TIER_UP,
        TIER_KEYS,
        TIER_BYTES,
        TIER_BAD_VALUES,
        TIER_FETCHED,
        TIER_IN_FLIGHT,
        TIER_BREAKER_OPENED,
        TIER_SLOTS,
        TIER_EVICTED,
        TIER_DRIVE_WRITTEN,
        TIER_DAMAGED_SLOTS,
        TIER_DISK_FULL,
        TENANT_BYTES,
        TENANT_LOOKUPS,
        TENANT_HITS,
        TENANT_EVICTIONS,
        TENANT_REFUSALS,
        MEMBERS,
        DIRECTORY_UP,
        JOINED,
        JOINS,
        EVENT_BATCHES,
        EVENT_SUBSCRIBERS,
        EVENTS_SKIPPED,
        EVENT_RESYNCS,
        EVENT_REPLAYS,
        ENGINE,
        TRAFFIC,
    ];
    for family in FAMILIES {
        let is_there = text.lines().any(|line| line.starts_with(&format!("{}{{", family.full_name())))
            || text.contains(&format!("{}_bucket{{", family.full_name()));
        assert_eq!(is_there, !others.contains(family), "{}", family.full_name());
    }
    for line in [
        r#"kvpool_blocks{pool="a \"pool\"\\",state="used"} 25"#,
        r#"kvpool_blocks{pool="a \"pool\"\\",state="free"} 75"#,
        r#"kvpool_usage_ratio{pool="a \"pool\"\\"} 0.25"#,
        "# TYPE kvpool_evictions counter",
        "# UNIT kvpool_wait_seconds seconds",
        "# EOF",
    ] {
        assert!(text.lines().any(|other| other == line), "no {line} in {text}");
    }
}

/// A resize that is polled once and kept holds the turn, because a lease has blocks of the tail.
#[test]
fn the_holder_of_the_turn_is_named_with_its_age() {
    let built = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(100).build().unwrap();
    let turns = || {
        let mut scrape = Scrape::new();
        pool(&built, &mut scrape);
        let text = scrape.encode("p");
        text.lines()
            .filter(|line| line.starts_with("kvpool_turn_seconds{"))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    assert_eq!(turns(), [""; 0]);
    let below = built.allocate(AllocRequest::new(60)).unwrap();
    let _in_the_way = built.allocate(AllocRequest::new(40)).unwrap();
    drop(below);
    let mut resize = Box::pin(built.resize(50));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(resize.as_mut().poll(&mut context).is_pending());
    std::thread::sleep(std::time::Duration::from_millis(30));
    let found = turns();
    assert!(
        found.len() == 1 && found[0].starts_with(r#"kvpool_turn_seconds{pool="p",task="resize"} 0.0"#),
        "{found:?}"
    );
    drop(resize);
    assert_eq!(turns(), [""; 0]);
}

#[test]
#[should_panic(expected = "the labels of kvpool_blocks")]
fn a_value_needs_all_labels() {
    Scrape::new().count(&BLOCKS, &[], 1);
}

fn family_of(name: &str) -> Option<&'static Family> {
    FAMILIES.iter().copied().find(|family| {
        let full = family.full_name();
        let suffixes: &[&str] =
            if family.kind == FamilyKind::Histogram { &["_bucket", "_sum", "_count"] } else { &[""] };
        suffixes.iter().any(|suffix| name == format!("{full}{suffix}"))
    })
}

/// Returns the words of a text that consist of small letters, digits and underscores.
fn words(text: &str) -> Vec<&str> {
    let is_of_word = |char: char| char.is_ascii_lowercase() || char.is_ascii_digit() || char == '_';
    text.split(|char| !is_of_word(char)).filter(|word| !word.is_empty()).collect()
}

/// Checks that a query names existing metrics with labels that they have. Returns the names.
fn check_query(query: &str, legend: &str) -> Result<Vec<String>, String> {
    let names: Vec<_> = words(query).into_iter().filter(|word| word.starts_with("kvpool_")).collect();
    if names.is_empty() {
        return Err(format!("{query} names no metric"));
    }
    let mut labels = vec!["pool"];
    for name in &names {
        let family = family_of(name).ok_or_else(|| format!("{query}: there is no {name}"))?;
        labels.extend(family.labels);
        if family.kind == FamilyKind::Histogram {
            labels.push("le");
        }
    }
    // Labels are in braces before an operator, in `by (...)`, and in a legend.
    let in_braces = query.split('{').skip(1).map(|rest| rest.split('}').next().unwrap_or_default());
    let matched = in_braces
        .flat_map(|list| list.split(','))
        .map(|one| one.split(['=', '!']).next().unwrap_or_default());
    let grouped =
        query.split("by (").skip(1).flat_map(|rest| words(rest.split(')').next().unwrap_or_default()));
    let shown = legend.split("{{").skip(1).map(|rest| rest.split("}}").next().unwrap_or_default());
    for label in matched.chain(grouped).chain(shown).map(str::trim) {
        if !labels.contains(&label) {
            return Err(format!("{query} ({legend}): no label {label} among {labels:?}"));
        }
    }
    Ok(names.into_iter().map(str::to_owned).collect())
}

#[test]
fn every_query_of_the_dashboard_names_a_metric_and_its_labels() {
    let dashboard: serde_json::Value =
        serde_json::from_str(include_str!("../../../docs/grafana.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let rows = panels.iter().filter(|panel| panel["type"] == "row").map(|row| row["title"].as_str().unwrap());
    assert_eq!(
        rows.collect::<Vec<_>>(),
        [
            "Occupancy",
            "Fragmentation and runs",
            "Latencies and waits",
            "Prefix cache",
            "Compaction",
            "Migrations and peers",
            "Tiers",
            "Membership and published events"
        ]
    );
    let (mut ids, mut queries) = (HashSet::new(), 0);
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "an id is there twice");
        let place = &panel["gridPos"];
        assert!(place["x"].as_u64().unwrap() + place["w"].as_u64().unwrap() <= 24, "{place}");
        for target in panel["targets"].as_array().into_iter().flatten() {
            let (query, legend) =
                (target["expr"].as_str().unwrap(), target["legendFormat"].as_str().unwrap());
            check_query(query, legend).unwrap_or_else(|error| panic!("{}: {error}", panel["title"]));
            queries += 1;
        }
    }
    assert!(queries > 30, "{queries}");
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        if variable["type"] == "query" {
            check_query(variable["query"]["query"].as_str().unwrap(), "").unwrap();
        }
    }
    assert!(check_query("rate(kvpool_blocks_total[1m])", "").is_err());
    assert!(check_query("kvpool_blocks{kind=\"x\"}", "").is_err());
    assert!(check_query("sum by (order) (kvpool_blocks)", "").is_err());
    assert!(check_query("kvpool_blocks", "{{order}}").is_err());
}

/// Each expression is on one line; `up` is of Prometheus itself.
#[test]
fn every_alert_names_metrics_and_their_labels() {
    let text = include_str!("../../../docs/alerts.yml");
    let value = |line: &'static str, key| line.trim().strip_prefix(key).map(str::trim);
    let (mut names, mut expression, mut described) = (HashSet::new(), None, 0);
    for line in text.lines() {
        if let Some(name) = value(line, "- alert:") {
            assert!(names.insert(name), "{name} is there twice");
        } else if let Some(found) = value(line, "expr:") {
            expression = Some(found);
        } else if let Some(summary) = value(line, "summary:") {
            let query = expression.take().unwrap_or_else(|| panic!("no expression before {summary}"));
            if !query.starts_with("up{") {
                let labels = summary.replace("{{ $value", "").replace("{{ $labels.", "{{");
                check_query(query, &labels).unwrap();
            }
            described += 1;
        }
    }
    assert!(names.len() > 20 && described == names.len() && expression.is_none(), "{described} {names:?}");
}

/// Returns the texts of a type's variants up to their first value.
fn texts(source: &'static str, begin: &str) -> Vec<&'static str> {
    let body = source.split_once(begin).expect("the type").1.split_once("\n}").expect("its end").0;
    let texts = body.split("#[error(\"").skip(1).filter_map(|rest| rest.split(['{', '"']).next());
    texts.map(str::trim).filter(|text| !text.is_empty()).collect()
}

/// Returns the variants of a type, as they are serialised in snake case.
fn names(source: &str, begin: &str) -> Vec<String> {
    let body = source.split_once(begin).expect("the type").1.split_once("\n}").expect("its end").0;
    let variants = body.lines().filter_map(|line| line.trim().strip_suffix(','));
    let snake = |variant: &str| {
        variant
            .char_indices()
            .flat_map(|(at, c)| {
                let line = (at > 0 && c.is_uppercase()).then_some('_');
                line.into_iter().chain(c.to_lowercase())
            })
            .collect()
    };
    variants.map(snake).collect()
}

/// The operators' table has exactly the existing alerts, and every reason why a link or certificate
/// is refused, or a node is not ready.
#[test]
fn what_an_operator_sees_is_in_the_table() {
    let text = include_str!("../../../docs/serve.md");
    let table = text.split_once("## What you see, and what to do").expect("the section").1;
    let table = table.split("\n## ").next().unwrap();
    let seen: Vec<&str> =
        table.lines().filter_map(|row| row.strip_prefix("| ")?.split(" | ").next()).collect();
    let is_there = |what: &str| seen.iter().any(|cell| cell.contains(what));
    let rules = include_str!("../../../docs/alerts.yml");
    let alerts: Vec<_> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    let missing = alerts.iter().map(|name| format!("**{name}**")).filter(|name| !is_there(name));
    assert_eq!(missing.collect::<Vec<_>>(), Vec::<String>::new());
    let named = seen.iter().flat_map(|cell| cell.split("**").skip(1).step_by(2));
    assert_eq!(named.filter(|name| !alerts.contains(name)).collect::<Vec<_>>(), Vec::<&str>::new());
    let denials = texts(include_str!("../wire/hello.rs"), "pub enum Denial {");
    let certificates = texts(include_str!("../transport/tcp/error.rs"), "pub enum CertificateProblem {");
    assert!(denials.len() >= 8 && certificates.len() >= 5, "{denials:?} {certificates:?}");
    let reasons = names(include_str!("../admin/views.rs"), "pub enum NotReady {");
    assert_eq!(reasons, ["draining", "device_lost", "peers_not_tried"]);
    let all = denials.iter().chain(&certificates).map(|&text| text.to_owned()).chain(reasons);
    assert_eq!(all.filter(|text| !is_there(text)).collect::<Vec<_>>(), Vec::<String>::new());
}

#[test]
fn the_table_of_the_documentation_is_complete() {
    let text = include_str!("../../../docs/operate.md");
    let rows = text.lines().filter(|line| line.starts_with("| `kvpool_"));
    let rows: Vec<_> = rows.map(|row| row.split('|').map(str::trim).collect::<Vec<_>>()).collect();
    let expected: Vec<_> = FAMILIES
        .iter()
        .map(|family| {
            let labels: Vec<_> = family.labels.iter().map(|label| format!("`{label}`")).collect();
            let kind = format!("{:?}", family.kind).to_lowercase();
            [
                "".to_owned(),
                format!("`{}`", family.full_name()),
                kind,
                labels.join(", "),
                family.help.to_owned(),
                "".to_owned(),
            ]
        })
        .collect();
    assert_eq!(rows, expected);
}
