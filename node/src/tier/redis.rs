//! Redis or Valkey as the store of a tier.
//!
//! The client is the crate `redis`. The alternative, `fred`, was faster with values of 1 MiB in
//! most measurements, with overlapping ranges, but its last release is 21 months older, and it has
//! twice the dependencies.
//!
//! Each call has its own connection. The answers to a batch of gets are read one by one. Only a few
//! gets are pipelined, because the server copies each value into its answer immediately, and copies
//! of a whole batch would be evicted from the CPU cache before they are sent.
//!
//! A get asks for one byte more than a value has, because the whole answer is buffered before it is
//! checked, and a key may have up to 512 MiB.
//!
//! # State of a connection
//!
//! ```text
//! idle --[a call takes it]--> answers are due --[all came]--> idle
//!   |                                |
//!   |                                +--[error, time limit]--> dropped
//!   +--[after a second: no answer to a PING]--> dropped
//! ```

use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Client, Cmd, ErrorKind, Pipeline, RedisError, TlsCertificates, Value};

use super::error::TierError;
use super::key::TierKey;
use super::store::{Answer, Store, StoreFuture};
use super::store_error::StoreError;
use super::value::TierValue;
use crate::settings::without_password;

const NAME: &str = "redis";

const AHEAD: usize = 4;

/// Idle time after which a connection is checked by a PING, because the server may have closed it.
const FRESH: Duration = Duration::from_secs(1);

/// A Redis or Valkey server as a [`Store`].
///
/// The server must evict by itself: `maxmemory`, and `maxmemory-policy allkeys-lru`. It should have
/// no persistence. Without TLS (`rediss`) it belongs in a private network.
pub struct Redis {
    client: Client,
    config: AsyncConnectionConfig,
    limit: Duration,
    /// Connections without outstanding answers, each with the time since when.
    idle: Mutex<Vec<(MultiplexedConnection, Instant)>>,
}

impl Redis {
    /// Creates the store from its address, `redis://user:password@host:port/database`,
    /// `rediss://...` for TLS, or `unix:///path`. Does not connect yet.
    ///
    /// `authorities` (PEM) sign the server's certificate; by default those of the system. `limit`
    /// bounds connecting, and the wait for each answer.
    ///
    /// # Errors
    /// [`TierError::Address`].
    pub fn new(address: &str, authorities: Option<&[u8]>, limit: Duration) -> Result<Self, TierError> {
        let root_cert = authorities.map(<[u8]>::to_vec);
        let client = match address.split_once("://") {
            Some(("rediss" | "valkeys", _)) => {
                Client::build_with_tls(address, TlsCertificates { client_tls: None, root_cert })
            }
            _ => Client::open(address),
        };
        let client = client.map_err(|error| TierError::Address {
            store: NAME,
            address: without_password(address),
            reason: error.to_string(),
        })?;
        let config = AsyncConnectionConfig::new();
        let config = config.set_connection_timeout(Some(limit)).set_response_timeout(Some(limit));
        Ok(Self { client, config, limit, idle: Mutex::default() })
    }

    async fn take(&self) -> Result<MultiplexedConnection, StoreError> {
        let idle = self.idle.lock().pop();
        if let Some((mut connection, since)) = idle {
            let is_fresh = since.elapsed() < FRESH;
            if is_fresh || self.is_alive(&mut connection).await {
                return Ok(connection);
            }
            // Connections of that age are dead too.
            self.idle.lock().retain(|(_, at)| *at > since);
        }
        let opened = self.client.get_multiplexed_async_connection_with_config(&self.config);
        opened.await.map_err(|error| unreachable(&error))
    }

    /// Whether the server answers on a connection, in time to open another one.
    async fn is_alive(&self, connection: &mut MultiplexedConnection) -> bool {
        let ping = redis::cmd("PING");
        let answer = tokio::time::timeout(self.limit / 4, connection.req_packed_command(&ping));
        matches!(answer.await, Ok(Ok(_)))
    }

    /// Returns a connection without outstanding answers to the idle ones.
    fn give_back(&self, connection: MultiplexedConnection) {
        self.idle.lock().push((connection, Instant::now()));
    }
}

fn unreachable(error: &RedisError) -> StoreError {
    StoreError::Unreachable { store: NAME, reason: error.to_string() }
}

fn is_refusal(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension)
}

fn refused(error: &RedisError) -> StoreError {
    StoreError::Refused { store: NAME, reason: error.to_string() }
}

fn unexpected(value: &Value) -> StoreError {
    let kind = match value {
        Value::Nil => "nothing",
        Value::Int(_) => "a number",
        Value::BulkString(_) => "bytes",
        Value::Array(_) => "an array",
        _ => "another kind of value",
    };
    StoreError::Answer { store: NAME, reason: format!("{kind} to a question of another kind") }
}

/// Sends a command. The inner error is the server's, for this command only.
async fn ask(
    mut connection: MultiplexedConnection,
    question: Cmd,
) -> Result<Result<Value, StoreError>, StoreError> {
    match connection.req_packed_command(&question).await {
        Ok(Value::ServerError(error)) => Ok(Err(refused(&error.into()))),
        Ok(value) => Ok(Ok(value)),
        Err(error) if is_refusal(&error) => Ok(Err(refused(&error))),
        Err(error) => Err(unreachable(&error)),
    }
}

impl Store for Redis {
    fn name(&self) -> &'static str {
        NAME
    }

    fn exists<'a>(&'a self, keys: &'a [TierKey]) -> StoreFuture<'a, Vec<bool>> {
        Box::pin(async move {
            let mut connection = self.take().await?;
            let mut questions = Pipeline::with_capacity(keys.len());
            for key in keys {
                questions.cmd("EXISTS").arg(key.to_string());
            }
            let answers = connection.req_packed_commands(&questions, 0, keys.len()).await;
            let failed = |error| if is_refusal(&error) { refused(&error) } else { unreachable(&error) };
            let mut found = Vec::with_capacity(keys.len());
            for answer in answers.map_err(failed)? {
                found.push(match answer {
                    Value::Int(count) => count == 1,
                    Value::ServerError(error) => return Err(refused(&error.into())),
                    other => return Err(unexpected(&other)),
                });
            }
            self.give_back(connection);
            Ok(found)
        })
    }

    fn put(&self, values: Vec<TierValue>) -> StoreFuture<'_, Vec<Result<(), StoreError>>> {
        Box::pin(async move {
            let connection = self.take().await?;
            let mut stored = Vec::with_capacity(values.len());
            for value in values {
                let mut command = redis::cmd("SET");
                command.arg(value.key().to_string()).arg(value.bytes());
                stored.push(match ask(connection.clone(), command).await? {
                    Ok(Value::Okay) => Ok(()),
                    Ok(other) => return Err(unexpected(&other)),
                    Err(refused) => Err(refused),
                });
            }
            self.give_back(connection);
            Ok(stored)
        })
    }

    fn get<'a>(
        &'a self,
        keys: &'a [TierKey],
        bytes: usize,
        answer: &'a mut (dyn FnMut(usize, Answer) + Send),
    ) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let connection = self.take().await?;
            let question = |key: &TierKey| {
                let mut command = redis::cmd("GETRANGE");
                // The end is inclusive.
                command.arg(key.to_string()).arg(0).arg(bytes);
                command
            };
            let asked: Vec<_> = keys.iter().map(|key| ask(connection.clone(), question(key))).collect();
            let mut answers = stream::iter(asked).buffered(AHEAD).enumerate();
            while let Some((place, answered)) = answers.next().await {
                match answered? {
                    // The key does not exist.
                    Ok(Value::BulkString(bytes)) if bytes.is_empty() => answer(place, Ok(None)),
                    Ok(Value::BulkString(bytes)) => answer(place, Ok(Some(Box::new(bytes)))),
                    Ok(other) => return Err(unexpected(&other)),
                    Err(refused) => answer(place, Err(refused)),
                }
            }
            drop(answers);
            self.give_back(connection);
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_refused_without_its_password() {
        for address in [
            "http://user:secret@host",
            "redis://user:secret@host:port",
            "rediss://user:secret@host:port",
            "http+unix:///path?pass=secret",
            "nonsense",
        ] {
            let error = Redis::new(address, None, Duration::from_secs(1)).err().unwrap();
            assert!(!error.to_string().contains("secret"), "{error}");
        }
        assert!(Redis::new("redis://127.0.0.1:6379/3", None, Duration::from_secs(1)).is_ok());
    }
}
