//! A router in Python, and the comparison of its set with the pool.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Lines, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use kvpool::Pool;
use kvpool_node::events::KvEventPublisher;
use serde::Deserialize;
use serde_json::Value;

/// A router in another process.
pub struct Router {
    child: Child,
    to: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Router {
    /// Starts a router; `None` if there is no Python for it.
    pub fn start(events: SocketAddr, replay: SocketAddr) -> Option<Self> {
        let named = std::env::var("KVPOOL_ZMQ_PYTHON").ok();
        let python = named.clone().unwrap_or_else(|| "python3".into());
        let has_it = Command::new(&python).args(["-c", "import zmq, msgpack"]).output();
        if !has_it.as_ref().is_ok_and(|output| output.status.success()) {
            assert!(named.is_none(), "{python}: {has_it:?}");
            eprintln!("SKIPPED: there is no Python with pyzmq and msgpack ({python})");
            return None;
        }
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kv_events/subscriber.py");
        let addresses = [events, replay].map(|address| format!("tcp://{address}"));
        let mut command = Command::new(python);
        command.arg(script).args(addresses).arg(crate::TOPIC).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let to = child.stdin.take().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut router = Self { child, to, lines };
        assert!(router.line()["ready"].is_u64());
        Some(router)
    }

    fn line(&mut self) -> Value {
        let line = self.lines.next().expect("the router goes on").unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// Waits until the router's set is the pool's. Returns its counts.
    pub async fn agrees(&mut self, pool: &Pool, publisher: &KvEventPublisher) -> Value {
        let start = Instant::now();
        loop {
            settled(publisher).await;
            writeln!(self.to, "{}", publisher.counters().newest).unwrap();
            let answer = tokio::task::block_in_place(|| self.line());
            let wanted: BTreeSet<u64> =
                pool.cached_blocks().iter().map(|(_, hash)| hash.words()[0]).collect();
            let hashes = BTreeSet::deserialize(&answer["hashes"]).unwrap();
            if hashes == wanted {
                break answer;
            }
            // On a loaded machine, the publisher's listing of the pool may take longer than silence
            // is waited for. A set that is wrong stays wrong: nothing changes the pool any more.
            let may_still_agree = start.elapsed() < crate::WAIT;
            assert!(may_still_agree, "{hashes:?}\n{wanted:?}\n{answer}\n{:?}", publisher.counters());
        }
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until nothing is published any more.
pub async fn settled(publisher: &KvEventPublisher) {
    let mut before = publisher.counters();
    let mut since = Instant::now();
    while since.elapsed() < Duration::from_millis(300) {
        tokio::time::sleep(Duration::from_millis(20)).await;
        let now = publisher.counters();
        if (now.batches, now.events, now.resyncs) != (before.batches, before.events, before.resyncs) {
            (before, since) = (now, Instant::now());
        }
    }
}
