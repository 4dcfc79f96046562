//! Tasks that accept links and connect to peers.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::driver::Input;
use super::reports::Reports;
use crate::transport::tcp::{Address, Endpoint, LinkError, PeerSettings, Refused};

/// Shortest and longest pause between attempts to connect to a peer.
const REDIAL: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// A link that lasts this long counts as a successful attempt.
const SETTLED: Duration = Duration::from_secs(5);

const NOT_TRIED: &str = "not reached yet";

pub(super) async fn accept(endpoint: Arc<Endpoint>, inputs: mpsc::Sender<Input>) {
    let mut reports = Reports::default();
    loop {
        tokio::select! {
            () = reports.over() => reports.sum_up(),
            accepted = endpoint.next() => match accepted {
                Some(Err(refused)) => log(&refused, &mut reports),
                Some(Ok(link)) if inputs.is_closed() => return drop(link),
                Some(Ok(link)) => drop(inputs.send(Input::LinkUp(Arc::new(link))).await),
                None => return,
            },
        }
    }
}

/// Logs a refusal, rate-limited by reason, host and name.
fn log(Refused { error, address, peer }: &Refused, reports: &mut Reports) {
    let host = if let Address::Tcp(at) = address { at.ip().to_string() } else { address.to_string() };
    if !reports.is_new(format!("{error} {host} {peer:?}")) {
        return;
    }
    match peer {
        Some(peer) => tracing::warn!(%error, %address, peer, "a connection was refused"),
        None => tracing::warn!(%error, %address, "a connection was refused"),
    }
}

pub(super) struct Dialers {
    /// `None` once the node has ended.
    endpoint: Option<Arc<Endpoint>>,
    inputs: mpsc::Sender<Input>,
    configured: Arc<Mutex<BTreeSet<String>>>,
    running: HashMap<String, Dialer>,
}

struct Dialer {
    peer: PeerSettings,
    task: JoinHandle<()>,
    /// Why there is no link; `None` while there is one.
    trouble: Trouble,
}

type Trouble = Arc<Mutex<Option<String>>>;

impl Dialers {
    pub(super) fn new(
        endpoint: Arc<Endpoint>,
        inputs: mpsc::Sender<Input>,
        configured: Arc<Mutex<BTreeSet<String>>>,
    ) -> Self {
        Self { endpoint: Some(endpoint), inputs, configured, running: HashMap::new() }
    }

    /// Connects to these peers, and stops connecting to others.
    pub(super) fn replace(&mut self, peers: Vec<PeerSettings>) {
        let names: BTreeSet<_> = peers.iter().map(|peer| peer.name.clone()).collect();
        self.configured.lock().clone_from(&names);
        let mut before = std::mem::take(&mut self.running);
        let Some(endpoint) = &self.endpoint else { return };
        endpoint.keep_places(names);
        for peer in peers {
            let is_same = before.get(&peer.name).is_some_and(|dialer| dialer.peer == peer);
            let kept = if is_same { before.remove(&peer.name) } else { None };
            let dialer = kept.unwrap_or_else(|| {
                let trouble = Trouble::new(Mutex::new(Some(NOT_TRIED.to_owned())));
                let dial = dial(endpoint.clone(), peer.clone(), self.inputs.clone(), trouble.clone());
                Dialer { peer: peer.clone(), task: tokio::spawn(dial), trouble }
            });
            if let Some(twice) = self.running.insert(peer.name, dialer) {
                twice.task.abort();
            }
        }
        before.into_values().for_each(|dialer| dialer.task.abort());
    }

    pub(super) fn endpoint(&self) -> Option<&Endpoint> {
        self.endpoint.as_deref()
    }

    pub(super) fn close(&mut self) {
        self.replace(Vec::new());
        self.running.drain().for_each(|(_, dialer)| dialer.task.abort());
        self.endpoint = None;
    }

    /// Returns whether every peer was reached, or one attempt at it failed.
    pub(super) fn have_tried(&self) -> bool {
        let is_tried = |dialer: &Dialer| dialer.trouble.lock().as_deref() != Some(NOT_TRIED);
        self.running.values().all(is_tried)
    }

    pub(super) fn addresses(&self) -> Vec<(String, Address)> {
        self.running.values().map(|dialer| (dialer.peer.name.clone(), dialer.peer.address.clone())).collect()
    }

    /// Returns the peers without a link, with the reason.
    pub(super) fn unreached(&self) -> Vec<(String, String)> {
        let trouble = |dialer: &Dialer| {
            let trouble = dialer.trouble.lock();
            Some((dialer.peer.name.clone(), trouble.clone()?))
        };
        self.running.values().filter_map(trouble).collect()
    }
}

/// Keeps a link to a peer. Logs each reason for having none once, until a link lasts.
async fn dial(endpoint: Arc<Endpoint>, peer: PeerSettings, inputs: mpsc::Sender<Input>, trouble: Trouble) {
    let (mut pause, mut said) = (REDIAL.0, None);
    let failed = |error: LinkError, said: &mut Option<LinkError>| {
        *trouble.lock() = Some(error.to_string());
        if said.as_ref() != Some(&error) {
            tracing::warn!(peer = peer.name, address = %peer.address, %error, "no link");
            *said = Some(error);
        }
    };
    if peer.name == endpoint.identity().name() {
        return failed(LinkError::OwnName { name: peer.name.clone() }, &mut said);
    }
    loop {
        match endpoint.connect(&peer).await {
            Ok(link) => {
                let (link, since) = (Arc::new(link), Instant::now());
                if inputs.send(Input::LinkUp(link.clone())).await.is_err() {
                    return;
                }
                *trouble.lock() = None;
                let error = link.closed().await;
                let is_refused = matches!(error, LinkError::Denied(_) | LinkError::Wire(_));
                pause = if is_refused { (pause * 2).min(REDIAL.1) } else { REDIAL.0 };
                if since.elapsed() >= SETTLED {
                    said = None;
                }
                failed(error, &mut said);
            }
            Err(error) => {
                pause = (pause * 2).min(REDIAL.1);
                failed(error, &mut said);
            }
        }
        tokio::time::sleep(pause).await;
    }
}
