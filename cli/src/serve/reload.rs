//! Reloading of settings while the node runs: peers, certificates and token.
//!
//! They are read on a separate thread: a file system that hangs delays neither signals nor
//! transfers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::{io, thread};

use kvpool_node::settings::{Loaded, PeerAddress, Settings, Sources};
use kvpool_node::{Node, NodeError};
use tokio::sync::mpsc;

use super::network::{self, Credentials};
use super::services::Membership;

pub(super) struct Reread {
    settings: Settings,
    credentials: Credentials,
}

pub(super) struct Reloader<T> {
    orders: SyncSender<()>,
    results: mpsc::UnboundedReceiver<Result<T, String>>,
    is_reading: Arc<AtomicBool>,
}

impl Reloader<Reread> {
    pub fn start(sources: &Sources) -> io::Result<Self> {
        let sources = sources.clone();
        Self::start_as(move || read(&sources))
    }
}

impl<T: Send + 'static> Reloader<T> {
    /// Starts the thread. It ends with the process, or when idle after this is dropped.
    fn start_as(read: impl Fn() -> Result<T, String> + Send + 'static) -> io::Result<Self> {
        // One pending order covers all later ones.
        let (orders, ordered) = sync_channel(1);
        let (sender, results) = mpsc::unbounded_channel();
        let is_reading = Arc::new(AtomicBool::new(false));
        let flag = is_reading.clone();
        thread::Builder::new().name("kvpool-reload".to_owned()).spawn(move || {
            while ordered.recv().is_ok() {
                // Relaxed: for a message only.
                flag.store(true, Relaxed);
                let result = read();
                flag.store(false, Relaxed);
                if sender.send(result).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { orders, results, is_reading })
    }

    pub fn order(&self) {
        if self.is_reading.load(Relaxed) {
            tracing::info!(
                "settings are still being read for the SIGHUP before; they will be read once more after that"
            );
        }
        match self.orders.try_send(()) {
            Ok(()) | Err(TrySendError::Full(())) => {}
            Err(TrySendError::Disconnected(())) => {
                tracing::error!("not reloaded: the thread that reads settings has ended");
            }
        }
    }

    pub async fn read(&mut self) -> Result<T, String> {
        match self.results.recv().await {
            Some(read) => read,
            None => std::future::pending().await,
        }
    }
}

fn read(sources: &Sources) -> Result<Reread, String> {
    let Loaded { settings, warnings, .. } = sources.load().map_err(|error| error.to_string())?;
    let credentials = Credentials::read(&settings).map_err(|error| error.to_string())?;
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    Ok(Reread { settings, credentials })
}

pub(super) struct Taken {
    /// The settings of the start; other keys than these need a restart.
    first: Settings,
    peers: Vec<PeerAddress>,
    credentials: Credentials,
}

impl Taken {
    pub fn new(settings: Settings, credentials: Credentials) -> Self {
        Self { peers: settings.peers.clone(), first: settings, credentials }
    }

    /// Applies a reload completely or not at all, and reports which.
    pub fn take_over(&mut self, read: Result<Reread, String>, node: &Node, membership: Option<&Membership>) {
        let taken = read.and_then(|read| {
            self.replace(&read, node, membership).map_err(|error| error.to_string())?;
            Ok(self.changes(read))
        });
        match taken {
            Ok(changes) => tracing::info!("reloaded; {changes}"),
            Err(reason) => tracing::error!("not reloaded: {reason}"),
        }
    }

    fn replace(&self, read: &Reread, node: &Node, membership: Option<&Membership>) -> Result<(), NodeError> {
        let Credentials { tls, token, admin, .. } = &read.credentials;
        node.set_access(tls.clone(), token.clone(), admin.clone())?;
        let peers = network::peers(&read.settings.peers);
        match membership {
            // It adds the members.
            Some(membership) => membership.configure(peers),
            None => node.set_peers(peers),
        }
        Ok(())
    }

    /// Returns the changes as text, and keeps the new values.
    fn changes(&mut self, read: Reread) -> String {
        let Reread { settings, credentials, .. } = read;
        let new = settings.peers.clone();
        let added = new.iter().filter(|peer| !self.peers.contains(peer));
        let removed = self.peers.iter().filter(|peer| !new.contains(peer));
        let shown = |sign: char| move |peer: &PeerAddress| format!(" {sign}{}={}", peer.name, peer.address);
        let peers: String = added.map(shown('+')).chain(removed.map(shown('-'))).collect();
        let peers = if peers.is_empty() { " none" } else { &peers };
        let mut text = format!("changes of peers:{peers}");
        if credentials.certificates != self.credentials.certificates {
            text += "; new certificates";
        }
        let tokens = |of: &Credentials| (of.admin.all.clone(), of.admin.read.clone());
        if tokens(&credentials) != tokens(&self.credentials) {
            text += "; other tokens";
        }
        let others = others(&self.first, &settings);
        if !others.is_empty() {
            text += &format!("; changes that need a restart: {}", others.join(", "));
        }
        (self.peers, self.credentials) = (new, credentials);
        text
    }
}

fn others(first: &Settings, now: &Settings) -> Vec<&'static str> {
    let (a, b) = (&first.pool, &now.pool);
    let all = [
        ("name", first.name != now.name),
        ("size", a.blocks != b.blocks),
        ("size_max", a.blocks_max != b.blocks_max),
        ("layout", a.layout != b.layout),
        ("device", a.device != b.device),
        ("defrag", a.defrag != b.defrag),
        ("eviction", a.eviction != b.eviction),
        ("reserve", a.reserve != b.reserve),
        ("listen", first.listen != now.listen),
        ("admin", first.admin != now.admin),
        ("admin_connections", first.admin_connections != now.admin_connections),
        ("peer_quota", first.peer_quota_bytes != now.peer_quota_bytes),
        ("nixl", first.nixl != now.nixl),
        ("migrate", first.migrate != now.migrate),
        ("restarts", first.restarts != now.restarts),
        ("doubt_limit", first.doubt_limit != now.doubt_limit),
        ("tier", first.tier != now.tier),
        ("membership", first.membership != now.membership),
        ("kv_events", first.kv_events != now.kv_events),
        ("load", first.load != now.load),
        ("hash_key_file", first.hash_key != now.hash_key),
        ("drain", first.drain != now.drain),
        ("log", first.log != now.log),
        ("log_level", first.log_levels != now.log_levels),
        ("otel_endpoint", first.traces != now.traces),
    ];
    all.into_iter().filter(|&(_, is_other)| is_other).map(|(name, _)| name).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn a_file_that_hangs_keeps_only_the_thread() {
        let (go_on, hanging) = sync_channel::<u32>(1);
        let hanging = Mutex::new(hanging);
        let mut reloader = Reloader::start_as(move || {
            let number = hanging.lock().unwrap().recv();
            number.map_err(|error| error.to_string())
        })
        .unwrap();
        reloader.order();
        while !reloader.is_reading.load(Relaxed) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // Many signals arrive while the first reading hangs: none of these calls waits.
        for _ in 0..100 {
            reloader.order();
        }
        assert!(timeout(Duration::from_millis(50), reloader.read()).await.is_err(), "it hangs");
        go_on.send(1).unwrap();
        assert_eq!(timeout(Duration::from_secs(20), reloader.read()).await.unwrap(), Ok(1));
        // The others are one.
        go_on.send(2).unwrap();
        assert_eq!(timeout(Duration::from_secs(20), reloader.read()).await.unwrap(), Ok(2));
        assert!(timeout(Duration::from_millis(50), reloader.read()).await.is_err(), "no third reading");
        // Failures are reported as well.
        reloader.order();
        drop(go_on);
        assert!(timeout(Duration::from_secs(20), reloader.read()).await.unwrap().is_err());
    }
}
