use std::future::Future;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use super::address::Address;
use super::error::LinkError;

/// Timeout of a name's resolution.
const RESOLVE: Duration = Duration::from_secs(2);

/// Most concurrent resolutions by the system: each takes a thread, even after its timeout.
const RESOLVED_AT_ONCE: usize = 64;

/// The future of a name's addresses.
pub type Resolved<'a> = Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'a>>;

/// Resolves host names, at each attempt to connect to a peer.
pub trait Resolve: Send + Sync + std::fmt::Debug + 'static {
    /// Returns the addresses of a host, in the order in which they are tried.
    fn resolve(&self, host: &str, port: u16) -> Resolved<'_>;
}

#[derive(Debug)]
pub(super) struct SystemResolver(Arc<Semaphore>);

impl Default for SystemResolver {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(RESOLVED_AT_ONCE)))
    }
}

impl Resolve for SystemResolver {
    fn resolve(&self, host: &str, port: u16) -> Resolved<'_> {
        let (host, places) = (host.to_owned(), self.0.clone());
        Box::pin(async move {
            let place = places.acquire_owned().await.map_err(io::Error::other)?;
            let found = spawn_blocking(move || {
                let _place = place;
                (host.as_str(), port).to_socket_addrs().map(Vec::from_iter)
            });
            found.await.map_err(io::Error::other)?
        })
    }
}

/// Resolves an address: one, or those of a name. [`LinkError::Io`] without any, or at a timeout.
pub(super) async fn resolve(resolver: &dyn Resolve, address: &Address) -> Result<Vec<Address>, LinkError> {
    let Address::Named { host, port } = address else { return Ok(vec![address.clone()]) };
    let found = tokio::time::timeout(RESOLVE, resolver.resolve(host, *port)).await;
    let found = found.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    let none = || io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    let found = found.and_then(|found| if found.is_empty() { Err(none()) } else { Ok(found) });
    let failed = |error: io::Error| LinkError::Io {
        what: format!("find the address of {address}"),
        kind: error.kind(),
        reason: error.to_string(),
    };
    Ok(found.map_err(failed)?.into_iter().map(Address::Tcp).collect())
}
