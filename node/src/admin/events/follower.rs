use std::time::Duration;

use http_body_util::BodyExt;
use hyper::Method;
use hyper::body::Bytes;
use tokio::time::timeout;

use super::super::client::{Client, ClientError, Opened};
use super::super::problem::Problem;
use super::notice::Notice;

const EVENT_BYTES_MAX: usize = 4 << 20;

/// Time without an event after which the node counts as gone: many periods.
const SILENCE: Duration = Duration::from_secs(30);

/// Follows the events of a node.
///
/// After an error, the next call reconnects, and continues after the last event if the node still
/// has the following ones. Otherwise it starts with a complete [`Map`](Notice::Map) and all
/// migrations.
pub struct Follower {
    client: Client,
    answer: Option<Opened>,
    lines: Lines,
    last: Option<String>,
}

impl Client {
    /// Creates a follower; nothing is sent yet.
    pub fn follow(&self) -> Follower {
        Follower { client: self.clone(), answer: None, lines: Lines::default(), last: None }
    }
}

impl Follower {
    /// Waits for the next event. Skips events that this version does not know. Cancel safe.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Broken`] if the connection ended.
    ///
    /// # Panics
    /// Outside of a tokio runtime with I/O and a timer.
    pub async fn next(&mut self) -> Result<Notice, ClientError> {
        let result = self.receive().await;
        if result.is_err() {
            (self.answer, self.lines) = (None, Lines::default());
        }
        result
    }

    async fn receive(&mut self) -> Result<Notice, ClientError> {
        loop {
            while let Some(event) = self.lines.event() {
                if let Some(id) = event.id {
                    self.last = Some(id);
                }
                if Notice::is_known(&event.name) {
                    return self.notice(&event.name, &event.data);
                }
            }
            if self.lines.len() > EVENT_BYTES_MAX {
                return Err(self.client.foreign(format!("an event of more than {EVENT_BYTES_MAX} bytes")));
            }
            let gone = || ClientError::Timeout { url: self.client.url().clone() };
            if self.answer.is_none() {
                self.answer = Some(timeout(SILENCE, self.connect()).await.map_err(|_| gone())??);
            }
            let Some(answer) = &mut self.answer else { continue };
            match timeout(SILENCE, answer.body.frame()).await.map_err(|_| gone())? {
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        self.lines.add(data);
                    }
                }
                Some(Err(error)) => return Err(self.client.broken(error)),
                None => return Err(self.client.broken("the events have ended")),
            }
        }
    }

    async fn connect(&self) -> Result<Opened, ClientError> {
        let opened = self.client.open(Method::GET, "/events", Bytes::new(), self.last.as_deref()).await?;
        if opened.content_type.starts_with("text/event-stream") {
            return Ok(opened);
        }
        let body = http_body_util::Limited::new(opened.body, 1 << 16).collect().await;
        let body = body.map_err(|error| self.client.broken(error))?.to_bytes();
        match serde_json::from_slice::<Problem>(&body) {
            Ok(problem) => Err(ClientError::Problem(problem)),
            Err(_) => {
                let (status, content_type) = (opened.status, opened.content_type);
                Err(self.client.foreign(format!("status {status} with the content type {content_type:?}")))
            }
        }
    }

    fn notice(&self, name: &str, data: &str) -> Result<Notice, ClientError> {
        let foreign = |error: serde_json::Error| self.client.foreign(format!("event {name}: {error}"));
        let data: serde_json::Value = serde_json::from_str(data).map_err(foreign)?;
        serde_json::from_value(serde_json::json!({ "event": name, "data": data })).map_err(foreign)
    }
}

#[derive(Debug, PartialEq)]
struct Raw {
    name: String,
    data: String,
    id: Option<String>,
}

#[derive(Default)]
struct Lines {
    bytes: Vec<u8>,
    /// Number of leading bytes without the end of an event.
    searched: usize,
}

impl Lines {
    fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    fn len(&self) -> usize {
        self.bytes.len()
    }

    fn event(&mut self) -> Option<Raw> {
        // Its last byte may begin the end.
        let from = self.searched.saturating_sub(1);
        let Some(end) = self.bytes[from..].windows(2).position(|pair| pair == b"\n\n") else {
            self.searched = self.bytes.len();
            return None;
        };
        let event: Vec<u8> = self.bytes.drain(..from + end + 2).collect();
        self.searched = 0;
        let text = String::from_utf8_lossy(&event);
        let mut raw = Raw { name: "message".to_owned(), data: String::new(), id: None };
        for line in text.lines() {
            let (field, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match field {
                "event" => raw.name = value.to_owned(),
                "data" if raw.data.is_empty() => raw.data = value.to_owned(),
                "data" => raw.data += &format!("\n{value}"),
                "id" => raw.id = Some(value.to_owned()),
                // A comment, or a field of another version.
                _ => {}
            }
        }
        Some(raw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_ends_wherever_the_bytes_are_split() {
        let text = b": a comment\n\nid: 1\nevent: map\ndata: a\ndata: b\n\ndata: c\n\n";
        let mut one_by_one = Lines::default();
        let mut events = Vec::new();
        for byte in text {
            one_by_one.add(&[*byte]);
            events.extend(one_by_one.event());
        }
        let mut at_once = Lines::default();
        at_once.add(text);
        let all: Vec<_> = std::iter::from_fn(|| at_once.event()).collect();
        assert_eq!(events, all);
        assert_eq!(all.len(), 3);
        assert_eq!((all[1].name.as_str(), all[1].data.as_str()), ("map", "a\nb"));
        assert_eq!((one_by_one.len(), at_once.len()), (0, 0));
    }
}
