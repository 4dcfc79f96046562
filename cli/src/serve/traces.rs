//! Traces by OTLP over HTTP.
//!
//! ```text
//! spans of kvpool, kvpool_node, kvpool_cli --> queue --> a thread, in batches --> collector
//!                                              (full: spans are dropped)
//! ```
//!
//! A span that ends is put into a bounded queue, so a collector that refuses, hangs or is
//! unreachable delays nothing. Spans that it does not accept are lost, with a warning once a
//! minute. OpenTelemetry's standard variables for headers, batches, samplers and attributes apply.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hyper_rustls::HttpsConnectorBuilder;
use kvpool_node::admin::{Failures, Reporter};
use kvpool_node::metrics::Scrape;
use kvpool_node::settings::{Settings, TraceTarget};
use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider;
use opentelemetry_http::hyper::HyperClient;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tokio::runtime::Handle;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::{Layer, Registry};

const ANSWER: Duration = Duration::from_secs(5);

const FLUSH: Duration = Duration::from_secs(3);

type Started = (Traces, Box<dyn Layer<Registry> + Send + Sync>);

pub(super) struct Traces {
    provider: SdkTracerProvider,
    failures: Failures,
}

pub(super) struct TraceReporter(Failures);

impl Reporter for TraceReporter {
    fn group(&self) -> &'static str {
        "traces"
    }

    fn name(&self) -> &str {
        "otlp"
    }

    fn stats(&self) -> Option<serde_json::Value> {
        Some(serde_json::json!({}))
    }

    fn scrape(&self, _: &mut Scrape) {}

    fn failures(&self) -> Option<Failures> {
        Some(self.0.clone())
    }
}

impl Traces {
    /// Begins to send traces, if there is a collector, reachable or not.
    pub fn start(settings: &Settings, runtime: &Handle) -> Result<Option<Started>, String> {
        let named = match &settings.traces {
            TraceTarget::Url(url) => Some(url.clone()),
            TraceTarget::Environment => in_environment(|name| std::env::var(name).ok()),
            _ => None,
        };
        let Some(url) = named else { return Ok(None) };
        let client = OnRuntime::new(&url, runtime.clone())?;
        let failures = client.failures.clone();
        let mut exporter = SpanExporter::builder().with_http().with_http_client(client);
        if let TraceTarget::Url(url) = &settings.traces {
            exporter = exporter.with_endpoint(format!("{url}/v1/traces"));
        }
        // Otherwise the library takes the address of the environment, by its own rules.
        let exporter = exporter.with_timeout(ANSWER).build().map_err(|error| error.to_string())?;
        let mut resource = Resource::builder()
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .with_attribute(KeyValue::new("service.instance.id", settings.name.clone()));
        if std::env::var_os("OTEL_SERVICE_NAME").is_none() {
            resource = resource.with_service_name("kvpool");
        }
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(resource.build())
            .build();
        let layer = tracing_opentelemetry::layer()
            .with_tracer(provider.tracer("kvpool"))
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false);
        let ours = Targets::new()
            .with_targets(["kvpool", "kvpool_node", "kvpool_cli"].map(|target| (target, LevelFilter::INFO)));
        Ok(Some((Self { provider, failures }, layer.with_filter(ours).boxed())))
    }

    pub fn reporter(&self) -> TraceReporter {
        TraceReporter(self.failures.clone())
    }

    pub fn end(self) {
        if let Err(error) = self.provider.shutdown_with_timeout(FLUSH) {
            tracing::warn!(%error, "the last spans were not sent");
        }
    }
}

/// Returns the collector that the standard variables name, if traces are enabled.
fn in_environment(read: impl Fn(&str) -> Option<String>) -> Option<String> {
    let is = |name: &str, value: &str| read(name).is_some_and(|text| text.eq_ignore_ascii_case(value));
    if is("OTEL_SDK_DISABLED", "true") || is("OTEL_TRACES_EXPORTER", "none") {
        return None;
    }
    let names = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
    names.iter().find_map(|name| read(name).filter(|url| !url.trim().is_empty()))
}

/// A client whose requests run on the process's runtime: the thread that sends spans has none.
#[derive(Debug)]
struct OnRuntime {
    client: Arc<dyn HttpClient>,
    runtime: Handle,
    failures: Failures,
}

impl OnRuntime {
    /// Creates a client of an address, with TLS if required.
    fn new(url: &str, runtime: Handle) -> Result<Self, String> {
        let client: Arc<dyn HttpClient> = if url.starts_with("https://") {
            let connector = HttpsConnectorBuilder::new()
                .with_native_roots()
                .map_err(|error| format!("no certificates of authorities: {error}"))?
                .https_only()
                .enable_http1()
                .build();
            Arc::new(HyperClient::new(connector, ANSWER, None))
        } else {
            Arc::new(HyperClient::with_default_connector(ANSWER, None))
        };
        Ok(Self { client, runtime, failures: Failures::new("traces", "otlp") })
    }

    fn warn(&self, reason: &str) {
        self.failures.note(format!("the collector does not take spans, which are lost: {reason}"));
    }
}

impl HttpClient for OnRuntime {
    fn send_bytes<'a, 'b>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async move {
            let client = self.client.clone();
            let sent = self.runtime.spawn(async move { client.send_bytes(request).await }).await;
            let answer = sent.map_err(HttpError::from).and_then(|answer| answer);
            match &answer {
                Ok(answer) if answer.status().is_success() => {}
                Ok(answer) => self.warn(&format!("status {}", answer.status())),
                Err(error) => self.warn(&reasons(&**error)),
            }
            answer
        })
    }
}

fn reasons(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standard_variables_decide_without_a_setting() {
        let asked = |variables: &[(&str, &str)]| {
            in_environment(|name| {
                let found = variables.iter().find(|(other, _)| *other == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        let (all, traces) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
        assert_eq!(asked(&[]), None);
        assert_eq!(asked(&[(all, "http://a:4318")]).unwrap(), "http://a:4318");
        assert_eq!(asked(&[(all, "http://a:4318"), (traces, "https://b/x")]).unwrap(), "https://b/x");
        assert_eq!(asked(&[(all, " ")]), None);
        assert_eq!(asked(&[(all, "http://a"), ("OTEL_SDK_DISABLED", "TRUE")]), None);
        assert_eq!(asked(&[(all, "http://a"), ("OTEL_TRACES_EXPORTER", "none")]), None);
    }
}
