use std::sync::{Arc, PoisonError, RwLock};

use thiserror::Error;

use crate::settings::{Address, AdminUrl, Token, Tokens};
use crate::transport::tcp::Tls;

/// Why an address cannot be served with these tokens and certificates.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum AccessError {
    /// The address is open to other hosts, but there is no token.
    #[error("the admin interface is open to other hosts: it needs a token")]
    NoToken,
    /// An `https` address without a certificate.
    #[error("the admin interface speaks TLS: it needs a certificate")]
    NoCertificate,
}

/// The tokens that an admin interface accepts, and its certificate.
#[derive(Clone, Debug, Default)]
pub struct AdminCredentials {
    /// Tokens for every route. `None`: none is required, as always over a Unix socket.
    pub all: Option<Tokens>,
    /// Tokens for the routes that only read. No effect without a token for all routes.
    pub read: Option<Tokens>,
    /// The certificate for `https`; with [`Tls::mutual`], callers must present one too.
    pub tls: Option<Tls>,
}

impl From<Option<Token>> for AdminCredentials {
    fn from(token: Option<Token>) -> Self {
        Self { all: token.map(Into::into), ..Self::default() }
    }
}

/// The tokens and the certificate of a running admin interface.
#[derive(Clone, Debug)]
pub struct AdminAccess {
    address: AdminUrl,
    credentials: Arc<RwLock<Arc<AdminCredentials>>>,
}

impl AdminAccess {
    pub(super) fn new(address: AdminUrl, credentials: AdminCredentials) -> Result<Self, AccessError> {
        let this = Self { address, credentials: Arc::default() };
        this.replace(credentials)?;
        Ok(this)
    }

    pub(super) fn at(self, address: AdminUrl) -> Self {
        Self { address, ..self }
    }

    /// Checks that the server may have these tokens and this certificate, or none.
    pub fn check(&self, credentials: &AdminCredentials) -> Result<(), AccessError> {
        let has_certificate = credentials.tls.as_ref().is_some_and(|tls| tls.acceptor().is_some());
        if !self.address.address().is_loopback() && credentials.all.is_none() {
            return Err(AccessError::NoToken);
        }
        if self.address.is_tls() && !has_certificate { Err(AccessError::NoCertificate) } else { Ok(()) }
    }

    /// Replaces them for new connections and requests.
    ///
    /// # Errors
    /// [`AccessError`]; then the former ones stay.
    pub fn replace(&self, mut credentials: AdminCredentials) -> Result<(), AccessError> {
        self.check(&credentials)?;
        if matches!(self.address.address(), Address::Unix(_)) {
            (credentials.all, credentials.read) = (None, None);
        }
        *self.credentials.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(credentials);
        Ok(())
    }

    pub(super) fn address(&self) -> &AdminUrl {
        &self.address
    }

    pub(super) fn credentials(&self) -> Arc<AdminCredentials> {
        self.credentials.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
