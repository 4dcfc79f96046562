//! The server: binding, connections and their limits, and the end.

use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener, ToSocketAddrs};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tower_service::Service;

use crate::settings::Address;

use super::access::{AdminAccess, AdminTokens, NoToken};
use super::connections::{Connections, Guest};
use super::events::Hub;
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
    access: AdminAccess,
    limits: Limits,
}

impl AdminServer {
    /// Binds an address. Requests are served from [`run`](Self::run) on.
    ///
    /// # Errors
    ///
    /// [`BindError`].
    pub fn bind(
        address: &Address,
        tokens: impl Into<AdminTokens>,
        limits: Limits,
    ) -> Result<Self, BindError> {
        let tokens = tokens.into();
        let Address::Tcp { host, port } = address else {
            return Err(BindError::Unix { address: address.clone() });
        };
        if tokens.all.is_none() && !address.is_loopback() {
            return Err(BindError::NoToken { address: address.clone() });
        }
        let bind = || {
            let mut last = io::Error::new(io::ErrorKind::AddrNotAvailable, "the name has no address");
            for at in (host.as_str(), *port).to_socket_addrs()? {
                // `localhost` may be configured to be another host.
                if tokens.all.is_none() && !at.ip().to_canonical().is_loopback() {
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
        let refused = |NoToken| BindError::NoToken { address: address.clone() };
        let access = AdminAccess::new(bound, tokens).map_err(refused)?;
        Ok(Self { listener, address: bound, access, limits })
    }

    /// Returns the bound address, with the port that was chosen.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the means to change the token while the server runs.
    pub fn access(&self) -> AdminAccess {
        self.access.clone()
    }

    /// Serves until `end` is ready. Then requests under way have the time `drain` to finish.
    ///
    /// Dropping the future ends all connections.
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
        let limits = self.limits;
        let hub = Hub::new(limits);
        let routes = router(Shared { admin: admin.clone(), access: self.access, limits, hub: hub.clone() });
        let connections = Connections::new(limits.connections);
        let mut tasks = JoinSet::new();
        let mut news = pin!(hub.clone().run(admin));
        let mut end = pin!(end);
        loop {
            let admitted = async {
                let stream = accept(&listener).await;
                (stream, connections.admit().await)
            };
            tokio::select! {
                (stream, guest) = admitted => {
                    // Otherwise the results of connections would add up.
                    while tasks.try_join_next().is_some() {}
                    tasks.spawn(serve(stream, routes.clone(), guest, limits));
                }
                () = &mut news => break,
                () = &mut end => break,
            }
        }
        // The port is free from here on.
        drop(listener);
        connections.cut_waiting();
        // Otherwise followers would hold up the end.
        hub.close();
        // Connections that do not end in time are dropped with the set.
        let _ = timeout(drain, async { while tasks.join_next().await.is_some() {} }).await;
        Ok(())
    }
}

/// Serves one request of a connection.
async fn serve(stream: TcpStream, routes: Router, guest: Arc<Guest>, limits: Limits) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.header).keep_alive(false);
    http.max_buf_size(limits.header_bytes.max(8192));
    let visitor = guest.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        let (mut routes, guest) = (routes.clone(), visitor.clone());
        async move {
            request.extensions_mut().insert(guest.clone());
            let answer = Service::call(&mut routes, request).await;
            guest.writing();
            answer.map_err(|never: Infallible| never)
        }
    });
    tokio::select! {
        // A caller that breaks off is no matter of the node.
        _ = http.serve_connection(TokioIo::new(stream), service) => {}
        () = guest.expired(limits.write) => {}
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
