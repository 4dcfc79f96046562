//! Traces of `kvpool serve`, as a collector gets them.
#![cfg(target_os = "linux")]

mod common;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::live::{Node, program, run, said, wait_until};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use rustix::process::Signal;

/// What a collector does with a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Manner {
    Takes,
    Hangs,
    Fails,
}

/// A request: its first line and headers in small letters, and what was sent.
type Taken = (String, ExportTraceServiceRequest);

/// A collector on the loopback.
struct Collector {
    url: String,
    taken: Arc<Mutex<Vec<Taken>>>,
}

impl Collector {
    fn start(manner: Manner) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let taken: Arc<Mutex<Vec<Taken>>> = Arc::default();
        let all = taken.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let all = all.clone();
                thread::spawn(move || serve(&stream.unwrap(), manner, &all));
            }
        });
        Self { url, taken }
    }

    fn spans(&self) -> Vec<Span> {
        let taken = self.taken.lock().unwrap();
        let scopes =
            taken.iter().flat_map(|(_, request)| &request.resource_spans).flat_map(|of| &of.scope_spans);
        scopes.flat_map(|of| of.spans.clone()).collect()
    }
}

fn serve(stream: &TcpStream, manner: Manner, taken: &Mutex<Vec<Taken>>) {
    let mut reader = BufReader::new(stream);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head).unwrap_or(0) == 0 {
                return;
            }
        }
        if manner == Manner::Hangs {
            thread::sleep(Duration::from_secs(600));
        }
        let head = head.to_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
        let mut body = vec![0; length.trim().parse().unwrap()];
        reader.read_exact(&mut body).unwrap();
        let request = ExportTraceServiceRequest::decode(&*body).unwrap();
        let status = if manner == Manner::Fails { "500 Internal Server Error" } else { "200 OK" };
        taken.lock().unwrap().push((head, request));
        let answer =
            format!("HTTP/1.1 {status}\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n");
        (&*stream).write_all(answer.as_bytes()).unwrap();
    }
}

/// Returns attributes as text.
fn attributes(of: &[KeyValue]) -> HashMap<String, String> {
    let text = |value: &KeyValue| match value.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::BoolValue(is)) => is.to_string(),
        other => format!("{other:?}"),
    };
    of.iter().map(|one| (one.key.clone(), text(one))).collect()
}

/// `kvpool serve`, without settings of the environment, and with batches that are sent soon.
fn serving(arguments: &str) -> Command {
    let mut command = program();
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("OTEL_")) {
        command.env_remove(name);
    }
    command.arg("serve").args(arguments.split_whitespace()).env("OTEL_BSP_SCHEDULE_DELAY", "200");
    command
}

#[test]
fn operations_requests_and_migrations_are_spans() {
    let collector = Collector::start(Manner::Takes);
    let there = Node::start_with(&mut serving("--name b --size 4000 --load arrivals"));
    let here = Node::start_with(&mut serving(&format!(
        "--name a --size 4000 --load conversations --load-rest 20ms --peers b={} --otel-endpoint {}",
        there.listen, collector.url
    )));
    here.defragment();
    here.json("resize 5000");
    let mut moved = false;
    wait_until("a sequence moves", || {
        if !moved {
            let longest = here.json("stats")["extra"]["load"]["longest_sequence"].as_u64();
            moved = longest.is_some_and(|id| {
                here.run(&format!("migrate --sequence-id {id} --target-node b")).status.success()
            });
        }
        here.records("").iter().any(|record| record["state"] == "committed")
    });
    assert_eq!(run(&format!("stats {}/", here.url)).status.code(), Some(0));
    // The end sends what is left.
    assert_eq!(here.end(Signal::TERM), (Some(0), String::new()));
    there.end(Signal::TERM);

    let taken = collector.taken.lock().unwrap().clone();
    for (head, request) in &taken {
        assert!(head.starts_with("post /v1/traces http/1.1"), "{head}");
        assert!(head.contains("content-type: application/x-protobuf"), "{head}");
        for of in &request.resource_spans {
            let resource = attributes(&of.resource.as_ref().unwrap().attributes);
            assert_eq!(
                (resource["service.name"].as_str(), resource["service.instance.id"].as_str()),
                ("kvpool", "a")
            );
            assert_eq!(resource["service.version"], env!("CARGO_PKG_VERSION"));
        }
    }
    let spans = collector.spans();
    let names: Vec<_> = spans.iter().map(|span| span.name.as_str()).collect();
    for name in ["kvpool.defragment", "kvpool.resize", "kvpool.migrate", "kvpool.node.migration"] {
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
    for span in &spans {
        assert!(span.end_time_unix_nano >= span.start_time_unix_nano, "{span:?}");
        assert_eq!((span.trace_id.len(), span.span_id.len()), (16, 8));
    }
    let is_moved =
        |span: &&Span| attributes(&span.attributes).get("state").is_some_and(|state| state == "committed");
    let migration = spans.iter().filter(|span| span.name == "kvpool.node.migration").find(is_moved).unwrap();
    let of = attributes(&migration.attributes);
    assert_eq!((of["side"].as_str(), of["kind"].as_str(), of["peer"].as_str()), ("source", "migrate", "b"));
    assert!(of["blocks"].parse::<u64>().unwrap() > 0 && of["transport"] == "tcp", "{of:?}");
    assert_eq!(of["migration"].len(), 32);
    let request = spans.iter().find(|span| span.name == "POST /resize").unwrap();
    let of = attributes(&request.attributes);
    assert_eq!((of["http.request.method"].as_str(), of["url.path"].as_str()), ("POST", "/resize"));
    assert_eq!((of["http.response.status_code"].as_str(), request.kind), ("200", 2), "{request:?}");
    // What a request does is below it.
    let resize = spans.iter().find(|span| span.name == "kvpool.resize").unwrap();
    assert_eq!(resize.parent_span_id, request.span_id, "{resize:?}");
}

#[test]
fn the_standard_variables_hold() {
    let collector = Collector::start(Manner::Takes);
    let node = Node::start_with(
        serving("--name a --size 1000")
            .env("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url)
            .env("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=one")
            .env("OTEL_SERVICE_NAME", "engine")
            .env("OTEL_RESOURCE_ATTRIBUTES", "rack=r7"),
    );
    node.json("stats");
    assert_eq!(node.end(Signal::TERM), (Some(0), String::new()));
    let taken = collector.taken.lock().unwrap();
    let (head, request) = taken.first().expect("spans were sent");
    assert!(head.starts_with("post /v1/traces ") && head.contains("x-tenant: one"), "{head}");
    let resource = attributes(&request.resource_spans[0].resource.as_ref().unwrap().attributes);
    assert_eq!((resource["service.name"].as_str(), resource["rack"].as_str()), ("engine", "r7"));
    drop(taken);
    // A setting decides before the environment.
    let before = collector.spans().len();
    let node = Node::start_with(
        serving("--size 1000 --otel-endpoint off").env("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url),
    );
    node.json("stats");
    assert_eq!(node.end(Signal::TERM), (Some(0), String::new()));
    assert_eq!(collector.spans().len(), before);
}

#[test]
fn a_collector_that_takes_nothing_slows_nothing() {
    let (hanging, failing) = (Collector::start(Manner::Hangs), Collector::start(Manner::Fails));
    for (url, reason) in
        [("http://127.0.0.1:1", "refused"), (&*hanging.url, "elapsed"), (&*failing.url, "500")]
    {
        let node = Node::start_with(&mut serving(&format!("--size 1000 --otel-endpoint {url}")));
        // More spans than the queue takes.
        let start = Instant::now();
        for _ in 0..3000 {
            let mut stream = TcpStream::connect(node.url.strip_prefix("http://").unwrap()).unwrap();
            stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
        let each = start.elapsed() / 3000;
        assert!(each < Duration::from_millis(20), "{each:?} a request");
        // Longer than a batch may take.
        let patience = if reason == "elapsed" { 6 } else { 1 };
        thread::sleep(Duration::from_secs(patience).saturating_sub(start.elapsed()));
        let told = || node.json("stats")["extra"]["traces"]["otlp"]["last_error"].clone();
        wait_until("it is told", || told().as_str().is_some_and(|told| told.contains(reason)));
        let start = Instant::now();
        let (code, errors) = node.end(Signal::TERM);
        assert!(start.elapsed() < Duration::from_secs(15), "the end is bounded: {:?}", start.elapsed());
        assert_eq!(code, Some(0), "{errors}");
        let lines: Vec<_> = errors.lines().filter(|line| line.contains("does not take spans")).collect();
        assert_eq!(lines.len(), 1, "once a minute: {errors}");
        assert!(lines[0].contains(reason), "{errors}");
    }
}

#[test]
fn addresses_that_cannot_be_used_are_refused() {
    for (url, reason) in [
        ("127.0.0.1:4318", "neither http:// nor https://"),
        ("http://", "the host is missing"),
        ("http://a b", "--otel-endpoint"),
    ] {
        let output = serving("--size 1000").args(["--otel-endpoint", url]).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(said(&output).contains(reason), "{}", said(&output));
    }
}
