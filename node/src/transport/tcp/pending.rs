//! Unauthenticated connections: limited in number, per host, and in time.
//!
//! A new connection always gets a place. If none is free, it displaces the oldest connection of the
//! host that has most. So a host that opens silent connections displaces its own, while a handshake
//! that takes milliseconds completes.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Source {
    /// A process of this host, over a Unix socket.
    Local,
    /// An IP address; for IPv6 only the network part, since a host can choose the rest.
    Remote(IpAddr),
}

impl Source {
    pub(crate) fn of(address: IpAddr) -> Self {
        Self::Remote(match address.to_canonical() {
            IpAddr::V6(address) if !address.is_loopback() => {
                IpAddr::V6((address.to_bits() >> 64 << 64).into())
            }
            address => address,
        })
    }
}

#[derive(Debug)]
pub(crate) struct Pending {
    max: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// By age.
    all: BTreeMap<u64, (Source, oneshot::Sender<()>)>,
}

struct Place {
    pending: Arc<Pending>,
    number: u64,
}

/// A registered connection, with the signal that displaces it.
pub(crate) struct Entered {
    place: Place,
    kept: oneshot::Receiver<()>,
}

impl Entered {
    /// Waits until the connection is displaced, or for `time`. Never completes once the connection
    /// has a name, after which it takes no place of an unknown one.
    pub(crate) async fn displaced(self, is_known: oneshot::Receiver<()>, time: Duration) {
        tokio::select! {
            biased;
            _ = is_known => drop(self.place),
            _ = self.kept => return,
            () = tokio::time::sleep(time) => return,
        }
        std::future::pending().await
    }
}

impl Pending {
    pub(crate) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max: max.max(1), state: Mutex::default() })
    }

    /// Registers a connection; if all places are taken, displaces another.
    pub(crate) fn enter(self: &Arc<Self>, source: Source) -> Entered {
        let (keep, kept) = oneshot::channel();
        let mut state = self.state.lock();
        let displaced = if state.all.len() >= self.max { state.displace() } else { None };
        let number = state.next;
        state.next += 1;
        state.all.insert(number, (source, keep));
        drop(state);
        // Wakes its task: not under the lock.
        drop(displaced);
        Entered { place: Place { pending: self.clone(), number }, kept }
    }
}

impl State {
    fn displace(&mut self) -> Option<oneshot::Sender<()>> {
        let mut counts: HashMap<Source, usize> = HashMap::new();
        self.all.values().for_each(|(source, _)| *counts.entry(*source).or_default() += 1);
        let most = counts.values().copied().max()?;
        let oldest = self.all.iter().find(|(_, (source, _))| counts[source] == most);
        let number = *oldest?.0;
        self.all.remove(&number).map(|(_, keep)| keep)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let left = self.pending.state.lock().all.remove(&self.number);
        drop(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(host: u8) -> Source {
        Source::of(IpAddr::from([10, 0, 0, host]))
    }

    #[test]
    fn a_host_with_many_connections_displaces_its_own() {
        let pending = Pending::new(4);
        let honest = pending.enter(from(1));
        let mut silent: Vec<_> = (0..20).map(|_| pending.enter(from(2))).collect();
        let mut late = pending.enter(from(3));
        let is_displaced =
            |kept: &mut oneshot::Receiver<()>| kept.try_recv() == Err(oneshot::error::TryRecvError::Closed);
        let mut honest = honest;
        assert!(!is_displaced(&mut honest.kept) && !is_displaced(&mut late.kept));
        let left =
            silent.iter_mut().map(|entered| is_displaced(&mut entered.kept)).filter(|gone| !gone).count();
        assert_eq!(left, 2, "of twenty");
        drop(silent);
        assert_eq!(pending.state.lock().all.len(), 2);
    }

    #[test]
    fn addresses_of_one_network_are_one_host() {
        let of = |text: &str| Source::of(text.parse().unwrap());
        assert_eq!(of("2001:db8:1:2:3::4"), of("2001:db8:1:2::5"));
        assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }
}
