use std::fmt;
use std::time::Duration;

use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};
use tokio::time::timeout;

use crate::settings::EtcdLocation;

const CALL: Duration = Duration::from_secs(2);

/// Interval and timeout of pings. etcd closes connections with pings less than 5 s apart.
const PING: (Duration, Duration) = (Duration::from_secs(6), Duration::from_secs(3));

const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(3));

/// Why etcd does not serve.
#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error("etcd: {0}")]
    Client(#[from] etcd_client::Error),
    #[error("etcd did not answer in time")]
    Silent,
    #[error("etcd ended the stream: {0}")]
    Ended(String),
    #[error("another process has joined as {name}, at {address}; it started later")]
    Displaced { name: String, address: String },
    #[error("another process joins as {name} at this moment")]
    Raced { name: String },
}

/// The servers of a directory, and the TLS settings for an `etcds://` location.
#[derive(Clone)]
pub(super) struct Servers {
    pub location: EtcdLocation,
    /// By default, those of the system.
    pub authorities: Option<Certificate>,
    pub identity: Option<Identity>,
}

impl fmt::Debug for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Omits the key of the identity.
        f.debug_tuple("Servers").field(&self.location).finish()
    }
}

impl Servers {
    /// Connects. Without a user it returns immediately, and the first call waits.
    pub async fn connect(&self) -> Result<Client, Trouble> {
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CALL)
            .with_keep_alive(PING.0, PING.1)
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        if let Some((name, password)) = self.location.user() {
            // Tokens of users expire after 5 minutes, or with the server that issued them.
            options = options.with_user(name, password).with_auto_token_refresh(true);
        }
        if self.location.is_tls() {
            options = options.with_tls(self.tls());
        }
        call(Client::connect(self.location.endpoints(), Some(options))).await
    }

    fn tls(&self) -> TlsOptions {
        let options = match &self.authorities {
            Some(authorities) => TlsOptions::new().ca_certificate(authorities.clone()),
            None => TlsOptions::new().with_native_roots(),
        };
        match &self.identity {
            Some(identity) => options.identity(identity.clone()),
            None => options,
        }
    }
}

pub(super) async fn call<T>(
    answer: impl Future<Output = Result<T, etcd_client::Error>>,
) -> Result<T, Trouble> {
    Ok(timeout(CALL, answer).await.map_err(|_| Trouble::Silent)??)
}

/// Growing pauses between attempts.
pub(super) struct Pauses(Duration);

impl Pauses {
    pub(super) fn new() -> Self {
        Self(PAUSE.0)
    }

    pub(super) fn reset(&mut self) {
        *self = Self::new();
    }

    pub(super) async fn next(&mut self) {
        let pause = self.0;
        self.0 = (pause * 2).min(PAUSE.1);
        // Up to a half more, so that nodes do not return all at once.
        tokio::time::sleep(pause.mul_f64(1.0 + fastrand::f64() / 2.0)).await;
    }
}
