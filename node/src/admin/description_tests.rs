use std::collections::BTreeSet;

use boon::{Compiler, SchemaIndex, Schemas};
use kvpool::{AllocRequest, SequenceId};
use serde_json::{Value, json};

use super::routes::{OPENAPI, ROUTES};
use super::tests::Served;
use super::{Limits, Notice};

const URL: &str = "http://kvpool.example/openapi.json";

pub(super) struct Description {
    json: Value,
    compiler: Compiler,
    schemas: Schemas,
}

impl Description {
    pub(super) fn new() -> Self {
        let json: Value = serde_json::from_str(OPENAPI).unwrap();
        let mut compiler = Compiler::new();
        compiler.add_resource(URL, json.clone()).unwrap();
        Self { json, compiler, schemas: Schemas::new() }
    }

    fn compile(&mut self, pointer: &str) -> SchemaIndex {
        let place = format!("{URL}#{pointer}");
        self.compiler
            .compile(&place, &mut self.schemas)
            .unwrap_or_else(|error| panic!("{pointer}: {error:#}"))
    }

    pub(super) fn check(&mut self, pointer: &str, value: &Value) {
        let index = self.compile(pointer);
        if let Err(error) = self.schemas.validate(value, index) {
            panic!("{pointer}: {error:#}\n{value:#}");
        }
    }

    pub(super) fn check_answer(&mut self, line: &str, status: u16, content_type: &str, answer: &Value) {
        let (method, path) = line.split_once(' ').unwrap();
        let path = path.split('?').next().unwrap();
        let operation = format!("/paths/{}/{}", path.replace('/', "~1"), method.to_lowercase());
        let described =
            self.json.pointer(&format!("{operation}/responses")).unwrap_or_else(|| panic!("{line}"));
        let status = status.to_string();
        let status = if described.get(&status).is_some() { status } else { "default".to_owned() };
        let content_type = content_type.split(';').next().unwrap();
        let content = &described[&status]["content"];
        assert!(content.get(content_type).is_some(), "{line}: {status} {content_type} is not in {content}");
        let content_type = content_type.replace('/', "~1");
        let pointer = format!("{operation}/responses/{status}/content/{content_type}/schema");
        if answer.is_null() {
            self.compile(&pointer);
        } else {
            self.check(&pointer, answer);
        }
    }
}

#[test]
fn the_description_has_the_routes_and_no_others() {
    let description = Description::new();
    let of_routes: BTreeSet<_> = ROUTES.iter().map(|&(method, path)| (method, path)).collect();
    let paths = description.json["paths"].as_object().unwrap();
    let described = paths.iter().flat_map(|(path, methods)| {
        methods.as_object().unwrap().keys().map(|method| (method.as_str(), path.as_str()))
    });
    assert_eq!(described.collect::<BTreeSet<_>>(), of_routes);
    assert_eq!(description.json["openapi"], "3.1.0");
    assert_eq!(description.json["info"]["version"], env!("CARGO_PKG_VERSION"));
    let public = of_routes
        .iter()
        .filter(|(method, path)| description.json["paths"][path][method]["security"] == json!([]));
    assert_eq!(public.collect::<Vec<_>>(), [&("get", "/"), &("get", "/healthz"), &("get", "/readyz")]);
}

#[test]
fn every_schema_is_used_and_valid() {
    let mut description = Description::new();
    let names: Vec<_> =
        description.json["components"]["schemas"].as_object().unwrap().keys().cloned().collect();
    for name in names {
        description.compile(&format!("/components/schemas/{name}"));
        let reference = format!("\"#/components/schemas/{name}\"");
        assert!(OPENAPI.contains(&reference), "{name} is not used");
    }
}

#[tokio::test]
async fn answers_are_as_described() {
    let served = Served::start(None, Limits::default());
    let mut description = Description::new();
    let pool = served.pool.clone();
    let _lease = pool.allocate(AllocRequest::new(7)).unwrap();
    let _pinned = pool.allocate(AllocRequest::new(3).pinned()).unwrap();
    let _sequence = pool.sequence(SequenceId(9)).open().unwrap();
    let _batch = pool.begin_batch();
    const HINTS: &str = r#"{"protocol_version": "1.0", "message_id": "m", "actions": [{"action_id": "a",
        "action_type": "kv.evict", "action_version": "1.0", "payload": {"session_id": 7}}]}"#;
    const JSON: &str = "Content-Type: application/json\r\n";
    for (line, body, status) in [
        ("GET /", "", 200),
        ("GET /healthz", "", 200),
        ("GET /readyz", "", 200),
        ("GET /stats", "", 200),
        ("GET /metrics", "", 200),
        ("GET /map.svg", "", 200),
        ("GET /owners", "", 200),
        ("GET /owners?limit=1", "", 200),
        ("GET /owners?limit=-1", "", 400),
        ("GET /owners?all", "", 400),
        ("GET /history", "", 200),
        ("GET /sequences", "", 200),
        ("GET /migrations", "", 200),
        ("GET /topology", "", 200),
        ("GET /openapi.json", "", 200),
        ("POST /defrag", "{}", 200),
        ("POST /resize", "{\"blocks\": 300}", 200),
        ("POST /resize", "{\"blocks\": 1000}", 409),
        ("POST /migrate", "{\"sequence\": 9, \"to\": \"b\"}", 501),
        ("POST /declare-ended", "{\"peer\": \"b\"}", 501),
        ("POST /declare-ended", "{}", 422),
        ("POST /hints", HINTS, 200),
        ("POST /hints", "{}", 422),
        ("POST /trim", "{}", 200),
        ("POST /trim", "{\"keep\": 0}", 200),
        ("POST /trim", "{\"keep\": -1}", 422),
        ("POST /trim", "{\"all\": true}", 422),
        ("POST /trim", "", 422),
        ("POST /audit", "{}", 200),
    ] {
        let headers = if line.starts_with("POST") { JSON } else { "" };
        let (got, content_type, answer) = served.exchange(line, headers, body).await;
        assert_eq!(got, status, "{line} {body}: {answer}");
        description.check_answer(line, status, &content_type, &answer);
    }
    served.admin.drain();
    for (line, status) in [("GET /healthz", 503), ("GET /readyz", 503), ("POST /trim", 503)] {
        let (got, content_type, answer) = served.exchange(line, JSON, "{}").await;
        assert_eq!(got, status, "{line}: {answer}");
        description.check_answer(line, status, &content_type, &answer);
    }
    served.stop().await;
}

#[tokio::test]
async fn events_are_as_described() {
    let served = Served::start(
        None,
        Limits { event_period: std::time::Duration::from_millis(10), ..Limits::default() },
    );
    let mut description = Description::new();
    let mut follower = served.client(None).follow();
    let pool = served.pool.clone();
    let (mut names, mut leases) = (BTreeSet::new(), Vec::new());
    while names.len() < 4 {
        leases.push(pool.allocate(AllocRequest::new(1)).unwrap());
        let notice = follower.next().await.unwrap();
        let schema = match notice {
            Notice::Stats(_) => "StatsSummary",
            Notice::Map(_) => "MapView",
            Notice::MapChanges(_) => "MapChanges",
            Notice::Migrations(_) => "MigrationList",
        };
        let pointer = format!(
            "/paths/~1events/get/responses/200/content/text~1event-stream/x-events/{}",
            notice.name()
        );
        let reference = description.json.pointer(&pointer).unwrap_or_else(|| panic!("{pointer}"));
        assert_eq!(reference["$ref"], format!("#/components/schemas/{schema}"));
        description.check(&format!("/components/schemas/{schema}"), &json!(notice)["data"]);
        names.insert(notice.name());
    }
    drop(leases);
    served.stop().await;
}

/// The schemas are strict: the test above could fail.
#[test]
#[should_panic(expected = "Health")]
fn an_answer_with_an_unknown_field_is_refused() {
    let health = json!({ "state": "ok", "node": "n", "version": "1", "more": 1 });
    Description::new().check("/components/schemas/Health", &health);
}
