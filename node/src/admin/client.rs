use std::error::Error as _;
use std::io;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde_json::Value;
use thiserror::Error;
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::settings::{Address, AdminUrl, Token};
use crate::transport::tcp::{self, Socket, Tls};

use super::problem::Problem;

const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Timeouts of connecting, and of an answer: longer than any answer of a server takes.
const CONNECT: Duration = Duration::from_secs(10);
const ANSWER: Duration = Duration::from_secs(180);

/// Why a request got no answer, or which error it got.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClientError {
    /// There is no server at this address.
    #[error("cannot reach {url}: {error} (is `kvpool serve` running there?)")]
    Connect {
        /// The address.
        url: AdminUrl,
        /// The system's error.
        error: io::Error,
    },
    /// The server did not answer in time.
    #[error("{url} did not answer in time")]
    Timeout {
        /// The address.
        url: AdminUrl,
    },
    /// An `https` address, without an authority by which to check the server.
    #[error("{url} needs the certificate of an authority (`--tls-ca`), by which the server is checked")]
    NoAuthority {
        /// The address.
        url: AdminUrl,
    },
    /// The server does not speak TLS, or lacks a trusted certificate for this host.
    #[error("{url} cannot be trusted: {reason}")]
    Tls {
        /// The address.
        url: AdminUrl,
        /// What happened.
        reason: String,
    },
    /// The server does not speak HTTP.
    #[error(
        "{url} does not speak HTTP: it is perhaps the port for peers (`--listen`); the admin interface has another (`--admin`), or begins with https"
    )]
    NotHttp {
        /// The address.
        url: AdminUrl,
    },
    /// The server closed the connection early.
    #[error("{url} broke off: {reason}")]
    Broken {
        /// The address.
        url: AdminUrl,
        /// What happened.
        reason: String,
    },
    /// The answer is not from an admin interface.
    #[error("{url} is no admin interface, or that of another version: {reason}")]
    Foreign {
        /// The address.
        url: AdminUrl,
        /// What is wrong with the answer.
        reason: String,
    },
    /// The server refused.
    #[error("{0}")]
    Problem(Problem),
}

pub(super) struct Opened {
    pub(super) status: u16,
    pub(super) content_type: String,
    pub(super) body: Incoming,
    _driver: Driver,
}

/// Returns whether a request failed because of what the server sent, perhaps unasked.
fn is_foreign(error: &hyper::Error) -> bool {
    // A request that was not sent yet is cancelled with the error of its connection.
    let cause = error.source().and_then(|cause| cause.downcast_ref()).unwrap_or(error);
    let is_unexpected = || cause.source().is_none() && !cause.is_canceled() && !cause.is_incomplete_message();
    cause.is_parse() || is_unexpected() && !cause.is_closed()
}

/// The task of a connection, aborted on drop.
struct Driver(JoinHandle<()>);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A client of an admin interface.
#[derive(Clone, Debug)]
pub struct Client {
    url: AdminUrl,
    token: Option<Token>,
    tls: Option<Tls>,
}

impl Client {
    /// Creates a client; nothing is sent yet.
    pub fn new(url: AdminUrl, token: Option<Token>) -> Self {
        Self { url, token, tls: None }
    }

    /// Sets the authorities of `https` servers, as of [`Tls::with_token`].
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Gets an answer.
    ///
    /// # Panics
    /// Outside of a tokio runtime with I/O and a timer.
    pub async fn get(&self, path: &str) -> Result<Value, ClientError> {
        self.send(Method::GET, path, Bytes::new()).await
    }

    /// Posts an order and returns the answer.
    ///
    /// # Panics
    /// As for [`get`](Self::get).
    pub async fn post(&self, path: &str, order: &impl Serialize) -> Result<Value, ClientError> {
        let order = serde_json::to_vec(order).map_err(|error| self.broken(error))?;
        self.send(Method::POST, path, order.into()).await
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Value, ClientError> {
        let answer = timeout(ANSWER, self.exchange(method, path, body)).await;
        let (status, content_type, bytes) =
            answer.map_err(|_| ClientError::Timeout { url: self.url.clone() })??;
        if content_type.starts_with("application/problem+json") {
            return Err(ClientError::Problem(
                serde_json::from_slice(&bytes).map_err(|error| self.foreign(error))?,
            ));
        }
        // 503 of /healthz has a body, too.
        if !content_type.starts_with("application/json") {
            return Err(self.foreign(format!("status {status} with the content type {content_type:?}")));
        }
        serde_json::from_slice(&bytes).map_err(|error| self.foreign(error))
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(u16, String, Bytes), ClientError> {
        let answer = self.open(method, path, body, None).await?;
        let (status, content_type) = (answer.status, answer.content_type);
        let body = Limited::new(answer.body, ANSWER_BYTES_MAX).collect().await;
        Ok((status, content_type, body.map_err(|error| self.broken(error))?.to_bytes()))
    }

    /// Sends a request, with the id of the last event if any; returns the answer's head and unread
    /// body.
    pub(super) async fn open(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        last_event: Option<&str>,
    ) -> Result<Opened, ClientError> {
        let slow = |_| ClientError::Timeout { url: self.url.clone() };
        let stream = timeout(CONNECT, self.connect()).await.map_err(slow)??;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| self.broken(error))?;
        let host = match self.url.address() {
            Address::Unix(_) => "localhost".to_owned(),
            address => address.to_string(),
        };
        let mut request = Request::builder().method(&method).uri(path).header(HOST, host);
        if method == Method::POST {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {}", token.expose()));
        }
        if let Some(id) = last_event {
            request = request.header("last-event-id", id);
        }
        let request = request.body(Full::new(body)).map_err(|error| self.broken(error))?;
        let driver = Driver(tokio::spawn(async { drop(connection.await) }));
        let response = sender.send_request(request).await.map_err(|error| match is_foreign(&error) {
            true => ClientError::NotHttp { url: self.url.clone() },
            false => self.broken(error),
        })?;
        let content_type = response.headers().get(CONTENT_TYPE);
        Ok(Opened {
            status: response.status().as_u16(),
            content_type: content_type.and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned(),
            body: response.into_body(),
            _driver: driver,
        })
    }

    async fn connect(&self) -> Result<Socket, ClientError> {
        let url = || self.url.clone();
        let failed = |error| ClientError::Connect { url: url(), error };
        let tls = self.tls.as_ref().filter(|tls| self.url.is_tls() && tls.connector().is_some());
        if self.url.is_tls() && tls.is_none() {
            return Err(ClientError::NoAuthority { url: url() });
        }
        match self.url.address() {
            Address::Unix(path) => UnixStream::connect(path).await.map(Socket::Unix).map_err(failed),
            Address::Tcp { host, port } => {
                let stream = TcpStream::connect((host.as_str(), *port)).await.map_err(failed)?;
                let secured = tcp::connect(tls, host, stream).await;
                secured.map_err(|error| ClientError::Tls { url: url(), reason: error.to_string() })
            }
        }
    }

    /// Returns the address.
    pub fn url(&self) -> &AdminUrl {
        &self.url
    }

    pub(super) fn broken(&self, reason: impl ToString) -> ClientError {
        ClientError::Broken { url: self.url.clone(), reason: reason.to_string() }
    }

    pub(super) fn foreign(&self, reason: impl ToString) -> ClientError {
        ClientError::Foreign { url: self.url.clone(), reason: reason.to_string() }
    }
}
