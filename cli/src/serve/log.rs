//! Log messages on the standard error: lines of text, or of JSON objects.
//!
//! An object has `timestamp` (RFC 3339), `level`, `target` (the module), and `fields`: `message`,
//! and others such as `peer` or `error`. A line of text is `kvpool: MESSAGE, NAME: VALUE`, with the
//! level before the message unless it is a warning or an error.
//!
//! A message that equals one of the last second, with all its fields, is suppressed.

use std::collections::HashMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvpool_node::log::Text;
use kvpool_node::settings::{LogFormat, LogLevels};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, fmt as layers};

use crate::output::printable;

const PERIOD: Duration = Duration::from_secs(1);

const REMEMBERED: usize = 1024;

pub(super) fn layer<S, W>(format: LogFormat, levels: &LogLevels, writer: W) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    // A closed or full standard error must not end the process.
    let layer = layers::layer().with_writer(writer).with_ansi(false).log_internal_errors(false);
    let targets = targets(levels);
    match format {
        LogFormat::Json => Once::new(layer.json().with_current_span(false).with_span_list(false))
            .with_filter(targets)
            .boxed(),
        _ => Once::new(layer.event_format(Line)).with_filter(targets).boxed(),
    }
}

fn targets(levels: &LogLevels) -> Targets {
    let others = Targets::new().with_default(levels.others.unwrap_or(LevelFilter::OFF));
    others.with_targets(levels.modules.clone())
}

/// Forwards a message unless it equals one of the last second.
struct Once<L> {
    layer: L,
    seen: Mutex<HashMap<u64, Instant>>,
}

impl<L> Once<L> {
    fn new(layer: L) -> Self {
        Self { layer, seen: Mutex::default() }
    }

    fn is_new(&self, event: &Event<'_>) -> bool {
        let text = Text::of(event);
        let mut hasher = DefaultHasher::new();
        (event.metadata().callsite(), text.message, text.fields).hash(&mut hasher);
        let (hash, now) = (hasher.finish(), Instant::now());
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.get(&hash).is_some_and(|last| now.duration_since(*last) < PERIOD) {
            return false;
        }
        if seen.len() >= REMEMBERED {
            seen.retain(|_, last| now.duration_since(*last) < PERIOD);
        }
        // More distinct messages within a second: further ones count as new.
        if seen.len() < REMEMBERED {
            seen.insert(hash, now);
        }
        true
    }
}

// Spans are not part of a message, so the layer can ignore them.
impl<S: Subscriber, L: Layer<S>> Layer<S> for Once<L> {
    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        if self.is_new(event) {
            self.layer.on_event(event, context);
        }
    }
}

struct Line;

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let text = Text::of(event);
        let level = match *event.metadata().level() {
            Level::ERROR | Level::WARN => "",
            Level::INFO => "info: ",
            Level::DEBUG => "debug: ",
            Level::TRACE => "trace: ",
        };
        writeln!(writer, "kvpool: {level}{}{}", printable(&text.message), printable(&text.fields))
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use serde_json::Value;
    use tracing_subscriber::layer::SubscriberExt;
    use tracing_subscriber::registry;

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn written(format: LogFormat, levels: &str, act: impl FnOnce()) -> Vec<String> {
        let written = Written::default();
        let to = written.clone();
        let layer = layer(format, &levels.parse().unwrap(), move || to.clone());
        tracing::subscriber::with_default(registry().with(layer), act);
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    fn messages() {
        tracing::warn!(target: "kvpool_node::node", peer = "b", error = %"refused\u{1b}[2J", "no link");
        tracing::info!(target: "kvpool_cli::serve", "reloaded; {}", "no changes\nof peers");
        tracing::debug!(target: "kvpool_node::tier", keys = 3_u64, is_up = false, "asked");
        let _span = tracing::info_span!(target: "kvpool_node", "a span", secret = "s").entered();
        tracing::error!(target: "kvpool_cli::serve", "the last audit");
    }

    #[test]
    fn a_line_of_text_has_the_message_and_its_fields() {
        let lines = written(LogFormat::Text, "warn,kvpool_cli=info", messages);
        assert_eq!(
            lines,
            [
                "kvpool: no link, peer: b, error: refused\\u{1b}[2J",
                "kvpool: info: reloaded; no changes",
                "of peers",
                "kvpool: the last audit"
            ]
        );
        assert_eq!(written(LogFormat::Text, "error", messages), ["kvpool: the last audit"]);
        assert_eq!(
            written(LogFormat::Text, "off,kvpool_node::tier=debug", messages),
            ["kvpool: debug: asked, keys: 3, is_up: false"]
        );
    }

    #[test]
    fn an_object_has_names_that_stay() {
        let lines = written(LogFormat::Json, "debug", messages);
        let objects: Vec<Value> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(objects.len(), 4, "a line each, also with line feeds in it: {lines:?}");
        for object in &objects {
            let mut names: Vec<_> = object.as_object().unwrap().keys().map(String::as_str).collect();
            names.sort_unstable();
            assert_eq!(names, ["fields", "level", "target", "timestamp"]);
            let time: jiff::Timestamp = object["timestamp"].as_str().unwrap().parse().unwrap();
            assert!(time.duration_until(jiff::Timestamp::now()).as_secs() < 600);
        }
        assert_eq!(
            (&objects[0]["level"], &objects[0]["target"]),
            (&"WARN".into(), &"kvpool_node::node".into())
        );
        let fields = serde_json::json!({ "message": "no link", "peer": "b", "error": "refused\u{1b}[2J" });
        assert_eq!(objects[0]["fields"], fields);
        assert_eq!(objects[1]["fields"]["message"], "reloaded; no changes\nof peers");
        assert_eq!(
            (&objects[2]["fields"]["keys"], &objects[2]["fields"]["is_up"]),
            (&3.into(), &false.into())
        );
        assert_eq!(objects[3]["level"], "ERROR");
    }

    #[test]
    fn one_reason_is_written_once_a_second() {
        let say = |reason: &str| tracing::warn!(target: "kvpool_node", reason, "refused");
        for format in [LogFormat::Text, LogFormat::Json] {
            let lines = written(format, "warn", || {
                for _ in 0..1000 {
                    say("a");
                    say("b");
                }
                std::thread::sleep(PERIOD + Duration::from_millis(50));
                say("a");
            });
            assert_eq!(lines.len(), 3, "{lines:?}");
        }
        // More messages than are remembered: none is lost.
        let many = 3 * REMEMBERED;
        let lines = written(LogFormat::Text, "warn", || (0..many).for_each(|at| say(&at.to_string())));
        assert_eq!(lines.len(), many);
    }
}
