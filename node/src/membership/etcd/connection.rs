//! Connections to etcd, and calls with a deadline.

use std::time::Duration;

use etcd_client::{Client, ConnectOptions};
use tokio::time::timeout;

use crate::settings::EtcdLocation;

/// Longest time of a call.
const CALL: Duration = Duration::from_secs(2);

/// Pings on connections: time between two, and time for the answer. etcd closes connections with pings
/// less than 5 s apart.
const PING: (Duration, Duration) = (Duration::from_secs(6), Duration::from_secs(3));

/// Shortest and longest pause between two attempts.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(3));

/// Reason for which etcd does not serve.
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

/// Connects to the servers of a location. Returns at once; the first call waits.
pub(super) async fn connect(location: &EtcdLocation) -> Result<Client, Trouble> {
    let options = ConnectOptions::new()
        .with_connect_timeout(CALL)
        .with_keep_alive(PING.0, PING.1)
        .with_keep_alive_while_idle(true)
        .with_require_leader(true);
    call(Client::connect(location.endpoints(), Some(options))).await
}

/// Waits for an answer, but not for long.
pub(super) async fn call<T>(
    answer: impl Future<Output = Result<T, etcd_client::Error>>,
) -> Result<T, Trouble> {
    Ok(timeout(CALL, answer).await.map_err(|_| Trouble::Silent)??)
}

/// Pauses between attempts, which become longer.
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
