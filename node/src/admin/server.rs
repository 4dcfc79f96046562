//! The server: binding, connections and their limits, and the end.

use std::convert::Infallible;
use std::future::pending;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tower_service::Service;

use crate::settings::{Address, Token};

use super::interface::Admin;
use super::limits::Limits;
use super::routes::{Shared, router};

/// Why an admin interface could not be bound.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BindError {
    /// The address is used by another program, or by another node.
    #[error(
        "cannot listen on {address} for the admin interface: the port is in use (choose another with --admin, or port 0)"
    )]
    InUse {
        /// The address.
        address: Address,
    },
    /// The address cannot be bound.
    #[error("cannot listen on {address} for the admin interface: {error}")]
    Bind {
        /// The address.
        address: Address,
        /// The system's error.
        error: io::Error,
    },
    /// The address is a Unix socket.
    #[error("the admin interface cannot listen on {address}: it needs a TCP address")]
    Unix {
        /// The address.
        address: Address,
    },
    /// The address is open to other hosts, and there is no token.
    #[error("the admin interface on {address} would be open to other hosts: it needs a token")]
    NoToken {
        /// The address.
        address: Address,
    },
}

/// An admin interface that is bound to its address.
#[derive(Debug)]
pub struct AdminServer {
    listener: StdListener,
    address: SocketAddr,
    token: Option<Arc<Token>>,
    limits: Limits,
}

impl AdminServer {
    /// Binds an address. Requests are served from [`run`](Self::run) on.
    ///
    /// # Errors
    ///
    /// [`BindError`].
    pub fn bind(address: &Address, token: Option<Token>, limits: Limits) -> Result<Self, BindError> {
        let Address::Tcp { host, port } = address else {
            return Err(BindError::Unix { address: address.clone() });
        };
        if token.is_none() && !address.is_loopback() {
            return Err(BindError::NoToken { address: address.clone() });
        }
        let bind = || {
            let mut last = io::Error::new(io::ErrorKind::AddrNotAvailable, "the name has no address");
            for at in (host.as_str(), *port).to_socket_addrs()? {
                // `localhost` may be configured to be another host.
                if token.is_none() && !at.ip().to_canonical().is_loopback() {
                    continue;
                }
                match StdListener::bind(at) {
                    Ok(listener) => {
                        listener.set_nonblocking(true)?;
                        let address = listener.local_addr()?;
                        return Ok((listener, address));
                    }
                    Err(error) => last = error,
                }
            }
            Err(last)
        };
        let (listener, bound) = bind().map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => BindError::InUse { address: address.clone() },
            _ => BindError::Bind { address: address.clone(), error },
        })?;
        Ok(Self { listener, address: bound, token: token.map(Arc::new), limits })
    }

    /// Returns the bound address, with the port that was chosen.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `end` is ready. Then requests under way have the time `drain` to finish.
    ///
    /// # Errors
    ///
    /// The system's error if the listener cannot be used on this runtime.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O and a timer.
    pub async fn run(
        self,
        admin: Arc<dyn Admin>,
        end: impl Future<Output = ()>,
        drain: Duration,
    ) -> io::Result<()> {
        let listener = TcpListener::from_std(self.listener)?;
        let routes = router(Shared { admin, token: self.token, limits: self.limits });
        let slots = Arc::new(Semaphore::new(self.limits.connections));
        let graceful = GracefulShutdown::new();
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(self.limits.header);
        http.max_buf_size(self.limits.header_bytes.max(8192));
        let accept = async {
            loop {
                // Never closed.
                let Ok(slot) = slots.clone().acquire_owned().await else { pending().await };
                let stream = accept(&listener).await;
                let routes = routes.clone();
                let service = service_fn(move |request: Request<Incoming>| {
                    let mut routes = routes.clone();
                    async move { Service::call(&mut routes, request).await.map_err(|never: Infallible| never) }
                });
                let connection = graceful.watch(http.serve_connection(TokioIo::new(stream), service));
                tokio::spawn(async move {
                    // A caller that breaks off is no matter of the node.
                    let _ = connection.await;
                    drop(slot);
                });
            }
        };
        tokio::select! {
            () = accept => {}
            () = end => {}
        }
        // Connections that do not end in time are dropped with the runtime.
        let _ = timeout(drain, graceful.shutdown()).await;
        Ok(())
    }
}

/// Accepts a connection. While the process has no descriptor left, waits for one.
async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
    }
}
