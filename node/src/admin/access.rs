//! The token of a server, which can be replaced while it runs.

use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};

use thiserror::Error;

use crate::settings::Token;

/// An address is open to other hosts, and there is no token.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the admin interface is open to other hosts: it needs a token")]
pub struct NoToken;

/// The token that an admin interface asks for.
#[derive(Clone, Debug)]
pub struct AdminAccess {
    address: SocketAddr,
    token: Arc<RwLock<Option<Arc<Token>>>>,
}

impl AdminAccess {
    /// Creates the token of a server at an address.
    pub(super) fn new(address: SocketAddr, token: Option<Token>) -> Result<Self, NoToken> {
        let this = Self { address, token: Arc::default() };
        this.check(token.as_ref())?;
        this.replace(token)?;
        Ok(this)
    }

    /// Checks that the server may have this token, or none.
    ///
    /// # Errors
    ///
    /// [`NoToken`].
    pub fn check(&self, token: Option<&Token>) -> Result<(), NoToken> {
        let is_open = !self.address.ip().to_canonical().is_loopback();
        if is_open && token.is_none() { Err(NoToken) } else { Ok(()) }
    }

    /// Replaces the token. Requests that begin from now on need the new one.
    ///
    /// # Errors
    ///
    /// [`NoToken`]; then the former token stays.
    pub fn replace(&self, token: Option<Token>) -> Result<(), NoToken> {
        self.check(token.as_ref())?;
        *self.token.write().unwrap_or_else(PoisonError::into_inner) = token.map(Arc::new);
        Ok(())
    }

    pub(super) fn token(&self) -> Option<Arc<Token>> {
        self.token.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
