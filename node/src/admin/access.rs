//! The tokens of a server, which can be replaced while it runs.

use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};

use thiserror::Error;

use crate::settings::{Token, Tokens};

/// An address is open to other hosts, and there is no token.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the admin interface is open to other hosts: it needs a token")]
pub struct NoToken;

/// The tokens that an admin interface accepts.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct AdminTokens {
    /// Tokens for every route. `None`: no token is asked for.
    pub all: Option<Tokens>,
    /// Tokens for the routes that only read figures. Without effect if there is none for all
    /// routes.
    pub read: Option<Tokens>,
}

impl From<Option<Token>> for AdminTokens {
    fn from(token: Option<Token>) -> Self {
        Self { all: token.map(Into::into), read: None }
    }
}

/// The tokens of an admin interface that runs.
#[derive(Clone, Debug)]
pub struct AdminAccess {
    address: SocketAddr,
    tokens: Arc<RwLock<Arc<AdminTokens>>>,
}

impl AdminAccess {
    /// Creates the tokens of a server at an address.
    pub(super) fn new(address: SocketAddr, tokens: AdminTokens) -> Result<Self, NoToken> {
        let this = Self { address, tokens: Arc::default() };
        this.replace(tokens)?;
        Ok(this)
    }

    /// Checks that the server may have these tokens, or none.
    ///
    /// # Errors
    ///
    /// [`NoToken`].
    pub fn check(&self, tokens: &AdminTokens) -> Result<(), NoToken> {
        let is_open = !self.address.ip().to_canonical().is_loopback();
        if is_open && tokens.all.is_none() { Err(NoToken) } else { Ok(()) }
    }

    /// Replaces the tokens. Requests that begin from now on need one of the new ones.
    ///
    /// # Errors
    ///
    /// [`NoToken`]; then the former tokens stay.
    pub fn replace(&self, tokens: AdminTokens) -> Result<(), NoToken> {
        self.check(&tokens)?;
        *self.tokens.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(tokens);
        Ok(())
    }

    pub(super) fn tokens(&self) -> Arc<AdminTokens> {
        self.tokens.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
