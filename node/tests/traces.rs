//! Calls of a tier and requests to the admin interface are spans.

#[path = "tier/faulty.rs"]
#[allow(dead_code)]
mod faulty;
#[path = "../../tests/migration/kv.rs"]
#[allow(dead_code)]
mod kv;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use faulty::{Fault, Faulty};
use kvpool::prefix::PrefixKeys;
use kvpool_node::admin::{AdminServer, Client, Limits, PoolAdmin};
use kvpool_node::tier::{SharedTier, TierPolicy, TierSettings, Tiered, TieredSettings};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

type Fields = BTreeMap<&'static str, String>;

/// All spans, with their fields.
static SPANS: Mutex<Vec<(&'static str, Fields)>> = Mutex::new(Vec::new());

struct Recorder;

struct Fill<'a>(&'a mut Fields);

impl Visit for Fill<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}").trim_matches('"').to_owned());
    }
}

impl Subscriber for Recorder {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span() && metadata.target().starts_with("kvpool")
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut fields = Fields::new();
        span.record(&mut Fill(&mut fields));
        let mut spans = SPANS.lock().unwrap();
        spans.push((span.metadata().name(), fields));
        Id::from_u64(spans.len() as u64)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        let mut spans = SPANS.lock().unwrap();
        values.record(&mut Fill(&mut spans[span.into_u64() as usize - 1].1));
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Returns the fields of the spans of this name for which a field has a value.
fn spans(name: &str, field: &str, value: &str) -> Vec<Fields> {
    let spans = SPANS.lock().unwrap();
    let is_it = |(other, fields): &&(&str, Fields)| {
        *other == name && fields.get(field).is_some_and(|other| other == value)
    };
    spans.iter().filter(is_it).map(|(_, fields)| fields.clone()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_a_tier_and_requests_are_spans() {
    tracing::subscriber::set_global_default(Recorder).unwrap();
    let pool = kv::pool(kv::plain(), 100);
    let store = Faulty::new(1 << 20);
    let tier = SharedTier::new(store.clone(), TierSettings::default()).unwrap();
    let settings = TieredSettings::new("traces").policy(TierPolicy::Manual);
    let tiered = Tiered::new(pool.clone(), Arc::new(tier), settings).unwrap();
    let tokens = kv::prompt(1, 41);
    drop(kv::admit(&pool, 7, &tokens).unwrap());
    let soon = Instant::now() + Duration::from_secs(60);
    tiered.offload(100, soon).await.unwrap();
    assert_eq!(tiered.bring_back(&PrefixKeys::new(), &tokens, soon).await.unwrap().moved_blocks, 10);
    for operation in ["put", "get"] {
        // A caller gets its outcomes before the thread of the tier ends the span.
        let found = loop {
            let found = spans("kvpool.tier", "operation", operation);
            if found.iter().all(|of| of.contains_key("served")) {
                break found;
            }
            assert!(Instant::now() < soon, "{found:?}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        };
        let sum = |field: &str| found.iter().map(|of| of[field].parse::<u64>().unwrap()).sum::<u64>();
        assert_eq!((sum("keys"), sum("served")), (10, 10), "{operation}: {found:?}");
        assert!(found.iter().all(|of| of["tier"] == "in-process" && !of.contains_key("error")), "{found:?}");
    }
    store.set_fault(Fault::Refuse);
    drop(kv::admit(&pool, 8, &kv::prompt(2, 41)).unwrap());
    let _ = tiered.offload(100, Instant::now() + Duration::from_secs(5)).await;
    let failed = spans("kvpool.tier", "otel.status_code", "ERROR");
    assert!(!failed.is_empty() && failed.iter().all(|of| !of["error"].is_empty()), "{failed:?}");

    let server = AdminServer::bind(&"127.0.0.1:0".parse().unwrap(), None, Limits::default()).unwrap();
    let client = Client::new(server.address().to_string().parse().unwrap(), None);
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let admin = Arc::new(PoolAdmin::new("a", pool));
    let serving = tokio::spawn(server.run(admin, async { drop(ended.await) }, Duration::from_secs(1)));
    client.get("/stats").await.unwrap();
    client.get(&format!("/{}", "x".repeat(500))).await.unwrap_err();
    let [stats] = &spans("kvpool.admin", "url.path", "/stats")[..] else { panic!("one request") };
    assert_eq!(
        (stats["otel.name"].as_str(), stats["http.response.status_code"].as_str()),
        ("GET /stats", "200")
    );
    let [unknown] = &spans("kvpool.admin", "http.response.status_code", "404")[..] else {
        panic!("one request")
    };
    assert_eq!(unknown["url.path"].len(), 64, "what callers send is bounded");
    assert!(!unknown.contains_key("otel.status_code"), "the caller's mistake");
    drop(end);
    serving.await.unwrap().unwrap();
}
