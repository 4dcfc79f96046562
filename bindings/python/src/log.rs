//! Messages of nodes and their services, for Python's `logging`: `kvpool_node::tier` logs to
//! `kvpool.node.tier`.
//!
//! A message can come from any thread, also from one that has a lock for which another thread waits
//! with the GIL. So messages go through a queue to a task of the runtime.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use arc_swap::ArcSwapOption;
use kvpool_node::log::Text;
use pyo3::prelude::*;
use tokio::sync::mpsc::{self, Receiver, Sender};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::error::Outcome;
use crate::process::Process;
use crate::runtime::runtime;

/// Messages that wait for the GIL; further ones are dropped and counted.
const QUEUED: usize = 1024;

static QUEUE: ArcSwapOption<(Process, Sender<Message>)> = ArcSwapOption::const_empty();

static DROPPED: AtomicU64 = AtomicU64::new(0);

struct Message {
    level: u8,
    logger: String,
    text: String,
}

/// Starts to pass messages on, in this process.
pub fn start() -> Outcome<()> {
    let made_in = Process::current();
    if QUEUE.load().as_ref().is_some_and(|queue| queue.0 == made_in) {
        return Ok(());
    }
    let (sender, receiver) = mpsc::channel(QUEUED);
    // That of the parent of a fork is the parent's to drop.
    std::mem::forget(QUEUE.swap(Some(Arc::new((made_in, sender)))));
    runtime()?.spawn(pass_on(receiver));
    // Fails if the parent of a fork has set it.
    let _ = tracing::subscriber::set_global_default(Forward);
    Ok(())
}

async fn pass_on(mut messages: Receiver<Message>) {
    while let Some(first) = messages.recv().await {
        let mut all = vec![first];
        while let Ok(message) = messages.try_recv() {
            all.push(message);
        }
        let dropped = DROPPED.swap(0, Relaxed);
        if dropped > 0 {
            let text = format!("{dropped} messages were dropped");
            all.push(Message { level: 30, logger: "kvpool".to_owned(), text });
        }
        // A handler may block.
        let logged = tokio::task::spawn_blocking(|| {
            Python::try_attach(|py| all.into_iter().try_for_each(|message| log(py, message)))
        });
        if let Ok(Some(Err(error))) = logged.await {
            Python::try_attach(|py| error.write_unraisable(py, None));
        }
    }
}

fn log(py: Python<'_>, message: Message) -> PyResult<()> {
    let logger = py.import("logging")?.call_method1("getLogger", (message.logger,))?;
    logger.call_method1("log", (message.level, "%s", message.text)).map(drop)
}

struct Forward;

impl Subscriber for Forward {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::INFO && metadata.target().starts_with("kvpool")
    }

    fn event(&self, event: &Event<'_>) {
        let queue = QUEUE.load();
        let Some((_, sender)) = queue.as_deref().filter(|queue| queue.0 == Process::current()) else {
            return;
        };
        let level = match *event.metadata().level() {
            Level::ERROR => 40,
            Level::WARN => 30,
            _ => 20,
        };
        let logger = event.metadata().target().replacen('_', ".", 1).replace("::", ".");
        let text = Text::of(event);
        if sender.try_send(Message { level, logger, text: text.message + &text.fields }).is_err() {
            DROPPED.fetch_add(1, Relaxed);
        }
    }

    // Spans are not enabled.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
