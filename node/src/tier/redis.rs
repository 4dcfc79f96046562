//! Redis or Valkey as the store of a tier.
//!
//! The client is the crate `redis`. The other candidate, `fred`, was the faster one with values of
//! 1 MiB in most measurements, although their ranges overlap. But `redis` has releases every few
//! weeks, half of the dependencies, and calls that block with a time limit, as the threads of a tier
//! need them. The last release of `fred` is 21 months older.
//!
//! The answers to a batch of gets are read one by one: an array of values would be parsed again from its
//! start with every piece that arrives. Only a few gets are written ahead of their answers: the server copies
//! each value into the answer at once, and copies of a whole batch would leave its caches before they are sent.
//!
//! A get asks for one byte more than a value has: the answer is in memory before it is looked at, and
//! a key may have up to 512 MiB.
//!
//! # State of a connection
//!
//! ```text
//! open --[question]--> answers are due --[all read]--> open
//!                            |
//!                            +--[error, time limit]--> dropped: no later question takes a late answer for its own
//! ```

use std::time::Duration;

use redis::{Client, Connection, ErrorKind, RedisError, TlsCertificates, Value};

use super::error::TierError;
use super::key::TierKey;
use super::store::{Answer, Session, Store};
use super::store_error::StoreError;
use super::value::TierValue;
use crate::settings::without_password;

const NAME: &str = "redis";

/// Number of gets that are written ahead of their answers.
const AHEAD: usize = 4;

/// A Redis or Valkey server as a [`Store`].
///
/// The server must evict by itself: `maxmemory`, and `maxmemory-policy allkeys-lru`. It neither needs nor
/// should have persistence. Without TLS (`rediss`) it belongs in a private network.
pub struct Redis {
    client: Client,
    limit: Duration,
}

impl Redis {
    /// Creates the store from its address, `redis://user:password@host:port/database`,
    /// `rediss://...` for TLS, or `unix:///path`.
    ///
    /// `authorities` (PEM) are those of a server's certificate; without any, those of the system.
    /// `limit` bounds connecting, and each wait for the server.
    ///
    /// # Errors
    ///
    /// [`TierError::Address`]. Whether the server is there is found out later.
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
        Ok(Self { client, limit })
    }
}

fn unreachable(error: &RedisError) -> StoreError {
    StoreError::Unreachable { store: NAME, reason: error.to_string() }
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

impl Store for Redis {
    fn name(&self) -> &'static str {
        NAME
    }

    fn open(&self) -> Result<Box<dyn Session>, StoreError> {
        let open = || {
            let connection = self.client.get_connection_with_timeout(self.limit)?;
            connection.set_read_timeout(Some(self.limit))?;
            connection.set_write_timeout(Some(self.limit))?;
            Ok(connection)
        };
        let connection = open().map_err(|error: RedisError| unreachable(&error))?;
        Ok(Box::new(Connected(connection)))
    }
}

/// A connection to a server.
struct Connected(Connection);

impl Connected {
    /// Writes questions at once.
    fn ask(&mut self, questions: &[u8]) -> Result<(), StoreError> {
        self.0.send_packed_command(questions).map_err(|error| unreachable(&error))
    }

    /// Reads the answer to one question.
    fn answer(&mut self) -> Result<Result<Value, StoreError>, StoreError> {
        match self.0.recv_response() {
            Ok(Value::ServerError(error)) => {
                let reason = RedisError::from(error).to_string();
                Ok(Err(StoreError::Refused { store: NAME, reason }))
            }
            Ok(value) => Ok(Ok(value)),
            // The answer was read, and is an error of this question.
            Err(error) if matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension) => {
                Ok(Err(StoreError::Refused { store: NAME, reason: error.to_string() }))
            }
            Err(error) => Err(unreachable(&error)),
        }
    }
}

/// Returns a command for each key, with the same further arguments.
fn questions(command: &str, keys: &[TierKey], further: &[usize]) -> Vec<u8> {
    let mut all = Vec::new();
    for key in keys {
        all.extend(redis::cmd(command).arg(key.to_string()).arg(further).get_packed_command());
    }
    all
}

impl Session for Connected {
    fn exists(&mut self, keys: &[TierKey]) -> Result<Vec<bool>, StoreError> {
        self.ask(&questions("EXISTS", keys, &[]))?;
        let mut found = Vec::with_capacity(keys.len());
        for _ in keys {
            match self.answer()?? {
                Value::Int(count) => found.push(count == 1),
                other => return Err(unexpected(&other)),
            }
        }
        Ok(found)
    }

    fn put(&mut self, values: &[TierValue]) -> Result<Vec<Result<(), StoreError>>, StoreError> {
        let mut stored = Vec::with_capacity(values.len());
        for value in values {
            let mut command = redis::cmd("SET");
            command.arg(value.key().to_string()).arg(value.bytes());
            self.ask(&command.get_packed_command())?;
            stored.push(match self.answer()? {
                Ok(Value::Okay) => Ok(()),
                Ok(other) => return Err(unexpected(&other)),
                Err(refused) => Err(refused),
            });
        }
        Ok(stored)
    }

    fn get(
        &mut self,
        keys: &[TierKey],
        bytes: usize,
        answer: &mut dyn FnMut(usize, Answer<'_>),
    ) -> Result<(), StoreError> {
        // The end is inclusive.
        let ask = |keys: &[TierKey]| questions("GETRANGE", keys, &[0, bytes]);
        let (first, mut later) = keys.split_at(AHEAD.min(keys.len()));
        self.ask(&ask(first))?;
        for place in 0..keys.len() {
            let answered = self.answer()?;
            if let Some(next) = later.split_off(..1) {
                self.ask(&ask(next))?;
            }
            match answered {
                // Of a key that is not there.
                Ok(Value::BulkString(bytes)) if bytes.is_empty() => answer(place, Ok(None)),
                Ok(Value::BulkString(bytes)) => answer(place, Ok(Some(&bytes))),
                Ok(other) => return Err(unexpected(&other)),
                Err(refused) => answer(place, Err(refused)),
            }
        }
        Ok(())
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
