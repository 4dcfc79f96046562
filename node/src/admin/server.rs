use std::convert::Infallible;
use std::io;
use std::net::{TcpListener as StdTcpListener, ToSocketAddrs};
use std::os::unix::net::UnixListener as StdUnixListener;
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
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tower_service::Service;

use crate::settings::{Address, AdminUrl};
use crate::transport::tcp::{self, Accepted, LinkError, Listener, Socket, SocketFile, bind_unix};

use super::access::{AccessError, AdminAccess, AdminCredentials};
use super::connections::{ConnectionPermit, Connections};
use super::events::Hub;
use super::interface::Admin;
use super::limits::Limits;
use super::routes::{Shared, refusals, router};

/// Concurrent answers to callers beyond the connection limit, and the time for each.
const REFUSALS: usize = 16;
const REFUSAL: Duration = Duration::from_secs(2);

/// Why an admin interface could not be bound.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BindError {
    /// The address is used by another program, or by another node.
    #[error(
        "cannot listen on {address} for the admin interface: the {} is in use (choose another{})",
        if matches!(.address.address(), Address::Unix(_)) { "path" } else { "port" },
        if matches!(.address.address(), Address::Unix(_)) { "" } else { ", or port 0" }
    )]
    InUse {
        /// The address.
        address: AdminUrl,
    },
    /// The address cannot be bound.
    #[error("cannot listen on {address} for the admin interface: {error}")]
    Bind {
        /// The address.
        address: AdminUrl,
        /// The system's error.
        error: io::Error,
    },
    /// The address lacks a required token or certificate.
    #[error("cannot listen on {address}: {error}")]
    Access {
        /// The address.
        address: AdminUrl,
        /// What is missing.
        error: AccessError,
    },
}

/// An admin interface that is bound to its address.
#[derive(Debug)]
pub struct AdminServer {
    listener: Bound,
    access: AdminAccess,
    limits: Limits,
}

#[derive(Debug)]
enum Bound {
    Tcp(StdTcpListener),
    Unix(StdUnixListener, SocketFile),
}

impl AdminServer {
    /// Binds an address: a port, or a Unix socket that only the user of this process can open.
    /// Requests are served from [`run`](Self::run) on.
    pub fn bind(
        address: &AdminUrl,
        credentials: impl Into<AdminCredentials>,
        limits: Limits,
    ) -> Result<Self, BindError> {
        let refused = |error| BindError::Access { address: address.clone(), error };
        let access = AdminAccess::new(address.clone(), credentials.into()).map_err(refused)?;
        let bound = match address.address() {
            Address::Tcp { host, port } => bind_tcp(host, *port, &access).map(Bound::Tcp),
            Address::Unix(path) => bind_unix(path).map(|(listener, file)| Bound::Unix(listener, file)),
        };
        let listener = bound.map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => BindError::InUse { address: address.clone() },
            _ => BindError::Bind { address: address.clone(), error },
        })?;
        let access = match &listener {
            Bound::Unix(..) => access,
            Bound::Tcp(listener) => {
                let failed = |error| BindError::Bind { address: address.clone(), error };
                let at = listener.local_addr().map_err(failed)?;
                access.at(address.at(Address::Tcp { host: at.ip().to_string(), port: at.port() }))
            }
        };
        Ok(Self { listener, access, limits })
    }

    /// Returns the bound address, with the selected port.
    pub fn address(&self) -> &AdminUrl {
        self.access.address()
    }

    /// Returns a handle that replaces tokens and certificate while the server runs.
    pub fn access(&self) -> AdminAccess {
        self.access.clone()
    }

    /// Serves until `end` is ready. Then requests in progress have the time `drain` to finish.
    /// Dropping the future ends all connections.
    ///
    /// # Errors
    /// The system's error if the listener cannot be used on this runtime.
    ///
    /// # Panics
    /// Outside of a tokio runtime with I/O and a timer.
    pub async fn run(
        self,
        admin: Arc<dyn Admin>,
        end: impl Future<Output = ()>,
        drain: Duration,
    ) -> io::Result<()> {
        let (listener, file) = match self.listener {
            Bound::Tcp(listener) => (Listener::Tcp(TcpListener::from_std(listener)?), None),
            Bound::Unix(listener, file) => (Listener::Unix(UnixListener::from_std(listener)?), Some(file)),
        };
        let (limits, access) = (self.limits, self.access);
        let hub = Hub::new(limits);
        let shared = Shared { admin: admin.clone(), access: access.clone(), limits, hub: hub.clone() };
        let limits_of_refusals = Limits { header: REFUSAL, write: REFUSAL, ..limits };
        let served = (Connections::new(limits.connections), router(shared.clone()), limits);
        let refused = (Connections::new(REFUSALS), refusals(shared), limits_of_refusals);
        let mut tasks = JoinSet::new();
        let mut news = pin!(hub.clone().run(admin));
        let mut end = pin!(end);
        loop {
            let admitted = async {
                let connection = accept(&listener).await;
                let permit = served.0.admit().await;
                let (permit, (_, routes, limits)) = match permit {
                    None => (refused.0.admit().await, &refused),
                    permit => (permit, &served),
                };
                Some((connection, permit?, routes.clone(), *limits))
            };
            tokio::select! {
                admitted = admitted => {
                    // Otherwise results of connections would accumulate.
                    while tasks.try_join_next().is_some() {}
                    if let Some((connection, permit, routes, limits)) = admitted {
                        tasks.spawn(serve(connection, access.clone(), routes, permit, limits));
                    }
                }
                () = &mut news => break,
                () = &mut end => break,
            }
        }
        // The port is free from here on, and the socket file is gone.
        drop((listener, file));
        served.0.cut_waiting();
        refused.0.cut_waiting();
        // Otherwise followers would delay the end.
        hub.close();
        // Connections that do not end in time are dropped with the set.
        let _ = timeout(drain, async { while tasks.join_next().await.is_some() {} }).await;
        Ok(())
    }
}

/// Binds the first usable address of a host.
fn bind_tcp(host: &str, port: u16, access: &AdminAccess) -> io::Result<StdTcpListener> {
    let mut last = io::Error::new(io::ErrorKind::AddrNotAvailable, "the name has no address");
    for at in (host, port).to_socket_addrs()? {
        // `localhost` may be configured to be another host.
        if access.credentials().all.is_none() && !at.ip().to_canonical().is_loopback() {
            continue;
        }
        match StdTcpListener::bind(at) {
            Ok(listener) => return listener.set_nonblocking(true).map(|()| listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

async fn secure(connection: Accepted, access: &AdminAccess) -> Result<Socket, LinkError> {
    let credentials = access.credentials();
    match connection {
        Accepted::Unix(stream) => Ok(Socket::Unix(stream)),
        Accepted::Tcp(stream, _) => {
            let tls = credentials.tls.as_ref().filter(|_| access.address().is_tls());
            tcp::accept(tls, stream).await
        }
    }
}

async fn serve(
    connection: Accepted,
    access: AdminAccess,
    routes: Router,
    permit: Arc<ConnectionPermit>,
    limits: Limits,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.header).keep_alive(false);
    http.max_buf_size(limits.header_bytes.max(8192));
    let visitor = permit.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        let (mut routes, permit) = (routes.clone(), visitor.clone());
        async move {
            request.extensions_mut().insert(permit.clone());
            let answer = Service::call(&mut routes, request).await;
            permit.writing();
            answer.map_err(|never: Infallible| never)
        }
    });
    let answered = async {
        match timeout(limits.header, secure(connection, &access)).await {
            // A caller that disconnects does not concern the node.
            Ok(Ok(socket)) => drop(http.serve_connection(TokioIo::new(socket), service).await),
            Ok(Err(error)) => tracing::debug!(%error, "a caller of the admin interface was lost"),
            Err(_) => {}
        }
    };
    tokio::select! {
        () = answered => {}
        () = permit.expired(limits.write) => {}
    }
}

/// Accepts a connection. While the process has no free descriptor, waits for one.
async fn accept(listener: &Listener) -> Accepted {
    loop {
        match listener.accept().await {
            Ok(connection) => return connection,
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
    }
}
