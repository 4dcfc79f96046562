//! The tasks that accept links and connect to peers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::driver::Input;
use crate::transport::tcp::{Endpoint, LinkError, PeerSettings};

/// Shortest and longest pause between two attempts to reach a peer.
const REDIAL: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Accepts links for as long as the node lives.
pub(super) async fn accept(endpoint: Arc<Endpoint>, inputs: mpsc::Sender<Input>) {
    loop {
        match endpoint.accept().await {
            Ok(link) => {
                if inputs.send(Input::LinkUp(Arc::new(link))).await.is_err() {
                    return;
                }
            }
            Err(LinkError::Closed) => return,
            Err(error) => tracing::warn!(%error, "a connection was refused"),
        }
    }
}

/// The tasks that connect to peers.
pub(super) struct Dialers {
    /// `None` once the node has ended: then it listens no more.
    endpoint: Option<Arc<Endpoint>>,
    inputs: mpsc::Sender<Input>,
    running: HashMap<String, Dialer>,
}

/// The task that connects to one peer.
struct Dialer {
    peer: PeerSettings,
    task: JoinHandle<()>,
    /// Why there is no link; `None` while there is one.
    trouble: Trouble,
}

type Trouble = Arc<Mutex<Option<String>>>;

impl Dialers {
    pub(super) fn new(endpoint: Arc<Endpoint>, inputs: mpsc::Sender<Input>) -> Self {
        Self { endpoint: Some(endpoint), inputs, running: HashMap::new() }
    }

    /// Connects to these peers from now on, and to no others.
    pub(super) fn replace(&mut self, peers: Vec<PeerSettings>) {
        let mut before = std::mem::take(&mut self.running);
        let Some(endpoint) = &self.endpoint else { return };
        for peer in peers {
            let is_same = before.get(&peer.name).is_some_and(|dialer| dialer.peer.address == peer.address);
            let kept = if is_same { before.remove(&peer.name) } else { None };
            let dialer = kept.unwrap_or_else(|| {
                let trouble = Trouble::new(Mutex::new(Some("not reached yet".to_owned())));
                let dial = dial(endpoint.clone(), peer.clone(), self.inputs.clone(), trouble.clone());
                Dialer { peer: peer.clone(), task: tokio::spawn(dial), trouble }
            });
            self.running.insert(peer.name, dialer);
        }
        before.into_values().for_each(|dialer| dialer.task.abort());
    }

    /// Returns the endpoint, until the node has ended.
    pub(super) fn endpoint(&self) -> Option<&Endpoint> {
        self.endpoint.as_deref()
    }

    /// Ends all connecting, and gives up the endpoint.
    pub(super) fn close(&mut self) {
        self.replace(Vec::new());
        self.endpoint = None;
    }

    /// Returns the peers without a link, with the reason.
    pub(super) fn unreached(&self) -> Vec<(String, String)> {
        let trouble = |dialer: &Dialer| {
            let trouble = dialer.trouble.lock().unwrap_or_else(PoisonError::into_inner);
            Some((dialer.peer.name.clone(), trouble.clone()?))
        };
        self.running.values().filter_map(trouble).collect()
    }
}

/// Keeps a link to a peer.
async fn dial(endpoint: Arc<Endpoint>, peer: PeerSettings, inputs: mpsc::Sender<Input>, trouble: Trouble) {
    let mut pause = REDIAL.0;
    // Replaces the reason, and returns whether it is another one.
    let note = |reason: Option<String>| {
        let mut trouble = trouble.lock().unwrap_or_else(PoisonError::into_inner);
        let is_other = *trouble != reason;
        *trouble = reason;
        is_other
    };
    loop {
        match endpoint.connect(&peer).await {
            Ok(link) => {
                pause = REDIAL.0;
                let link = Arc::new(link);
                if inputs.send(Input::LinkUp(link.clone())).await.is_err() {
                    return;
                }
                note(None);
                tracing::info!(peer = peer.name, "linked");
                let error = link.closed().await;
                note(Some(error.to_string()));
                tracing::warn!(peer = peer.name, %error, "the link is lost");
            }
            Err(error) => {
                if note(Some(error.to_string())) {
                    tracing::warn!(peer = peer.name, %error, "not reached");
                }
                pause = (pause * 2).min(REDIAL.1);
            }
        }
        tokio::time::sleep(pause).await;
    }
}
