use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use super::address::Address;
use super::error::LinkError;
use super::random::random;
use super::tls::Tls;
use crate::wire::{Limits, Secret, Statement, Versions, check_name};

/// Minimum length of a token in bytes.
pub const TOKEN_MIN: usize = 16;

/// A secret of all nodes of a cluster, which proves membership, with further secrets that are
/// accepted from peers. `Debug` omits its contents.
#[derive(Clone, Debug)]
pub struct Token(pub(super) Vec<Secret>);

impl Token {
    /// Takes a token of at least [`TOKEN_MIN`] bytes.
    ///
    /// # Errors
    /// [`LinkError::TokenLength`].
    pub fn new(token: &[u8]) -> Result<Self, LinkError> {
        Self(Vec::with_capacity(1)).or(token)
    }

    /// Also accepts another token from peers, for the rotation of tokens.
    pub fn or(mut self, token: &[u8]) -> Result<Self, LinkError> {
        if token.len() < TOKEN_MIN {
            return Err(LinkError::TokenLength { bytes: token.len(), min: TOKEN_MIN });
        }
        self.0.push(Secret::of_token(token));
        Ok(self)
    }
}

/// A node's identity and credentials.
///
/// A certificate proves a node's name. A token proves only that a node belongs to the cluster:
/// nodes that share a token trust each other with their names.
#[derive(Clone, Debug)]
pub struct Identity {
    pub(super) name: String,
    pub(super) incarnation: u64,
    pub(super) messages: Versions,
    pub(super) fingerprint: [u8; 16],
    began_ms: u64,
    lock: Option<[u8; 16]>,
    pub(super) tls: Option<Arc<Tls>>,
    pub(super) token: Option<Token>,
}

impl Identity {
    /// Creates an identity with a random incarnation. `messages` are the versions of the messages
    /// that the node speaks.
    ///
    /// # Errors
    /// [`LinkError::Wire`] for an invalid name, [`LinkError::Io`] without random numbers.
    pub fn new(name: &str, messages: impl Into<Versions>) -> Result<Self, LinkError> {
        check_name(name)?;
        let incarnation = u64::from_le_bytes(random()?);
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Self {
            name: name.into(),
            incarnation,
            messages: messages.into(),
            fingerprint: [0; 16],
            began_ms: since_1970.as_millis() as u64,
            lock: None,
            tls: None,
            token: None,
        })
    }

    /// Returns the node's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sets the fingerprint of the node's block layout.
    #[must_use]
    pub fn fingerprint(mut self, fingerprint: [u8; 16]) -> Self {
        self.fingerprint = fingerprint;
        self
    }

    /// Sets the incarnation, if the process chose it elsewhere.
    #[must_use]
    pub fn incarnation(mut self, incarnation: u64) -> Self {
        self.incarnation = incarnation;
        self
    }

    /// Sets when the node began, in milliseconds since 1970; by default now.
    #[must_use]
    pub fn began_ms(mut self, began_ms: u64) -> Self {
        self.began_ms = began_ms;
        self
    }

    /// Sets the number of a lock that no other living process has.
    #[must_use]
    pub fn lock(mut self, lock: Option<[u8; 16]>) -> Self {
        self.lock = lock;
        self
    }

    /// Returns the statement that the node sends to peers.
    pub(super) fn statement(&self, limits: &Limits) -> Statement {
        let message_bytes = u32::try_from(limits.message_bytes).unwrap_or(u32::MAX);
        Statement { began_ms: self.began_ms, lock: self.lock, message_bytes }
    }

    /// Returns the incarnation.
    pub fn incarnation_number(&self) -> u64 {
        self.incarnation
    }

    /// Sets the certificates. All TCP connections then use TLS.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(Arc::new(tls));
        self
    }

    /// Sets the token. Both sides of a link must have one, or neither.
    #[must_use]
    pub fn token(mut self, token: Token) -> Self {
        self.token = Some(token);
        self
    }

    /// Checks that a peer at this address can be authenticated.
    pub(super) fn check(&self, address: &Address, listens: bool) -> Result<(), LinkError> {
        let unauthenticated = || LinkError::Unauthenticated { address: address.clone() };
        match &self.tls {
            _ if matches!(address, Address::Unix(_)) => Ok(()),
            Some(tls) if listens => {
                let acceptor =
                    tls.acceptor().ok_or_else(|| LinkError::PlainText { address: address.clone() })?;
                if acceptor.verifies || self.token.is_some() { Ok(()) } else { Err(unauthenticated()) }
            }
            Some(tls) if tls.connector().is_none() => Err(LinkError::PlainText { address: address.clone() }),
            Some(_) => Ok(()),
            None if address.is_local() => Ok(()),
            None => Err(LinkError::PlainText { address: address.clone() }),
        }
    }
}

/// Listening addresses. An endpoint without any only connects.
#[derive(Clone, Debug, Default)]
pub struct ListenSettings {
    /// The addresses. Port 0 selects a free port.
    pub addresses: Vec<Address>,
}

impl ListenSettings {
    /// Creates settings with one address.
    pub fn on(address: Address) -> Self {
        Self { addresses: vec![address] }
    }
}

/// A peer to connect to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PeerSettings {
    /// Name that the peer must have; with TLS, also its certificate.
    pub name: String,
    /// Address of the peer.
    pub address: Address,
    /// Name in the peer's certificate, if different.
    pub server_name: Option<String>,
}

impl PeerSettings {
    /// Describes a peer whose certificate has its name.
    pub fn new(name: &str, address: Address) -> Self {
        Self { name: name.into(), address, server_name: None }
    }
}
