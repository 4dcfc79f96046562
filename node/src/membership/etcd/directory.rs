use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Certificate, Identity};
use tokio::sync::watch;

use super::connection::Servers;
use super::entry::keep;
use super::watch::follow;
use crate::admin::Failures;
use crate::membership::directory::Membership;
use crate::membership::error::MembershipError;
use crate::membership::joined::Joined;
use crate::membership::member::Member;
use crate::membership::members::{MemberList, Members};
use crate::settings::EtcdLocation;
use crate::transport::tcp::{LinkError, Tls};

/// Limits of the lease time.
const LEASE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3600));

/// A directory in etcd, which is reached in the background.
#[derive(Clone, Debug)]
pub struct EtcdMembership {
    servers: Servers,
    grace: Duration,
    failures: Failures,
}

impl EtcdMembership {
    /// Creates a directory.
    pub fn new(location: EtcdLocation) -> Self {
        let servers = Servers { location, authorities: None, identity: None };
        Self { servers, grace: Duration::from_secs(10), failures: Failures::new("membership", "etcd") }
    }

    /// Sets the TLS identity, all PEM: `authorities` sign the servers' certificates, by default
    /// those of the system; `certificate` is the chain and key that this node presents, by default
    /// none. No effect without an `etcds://` location.
    ///
    /// # Errors
    /// [`LinkError::TlsFile`].
    pub fn tls(
        mut self,
        authorities: Option<&[u8]>,
        certificate: Option<(&[u8], &[u8])>,
    ) -> Result<Self, LinkError> {
        // The etcd client would report this at each connection, or ignore a missing authority.
        Tls::with_token(certificate, authorities)?;
        self.servers.authorities = authorities.map(Certificate::from_pem);
        self.servers.identity = certificate.map(|(chain, key)| Identity::from_pem(chain, key));
        Ok(self)
    }

    /// Sets the time for which lost members stay after etcd was unreachable. Default: 10 s.
    ///
    /// Choose at least the lease of the members, so that all of them can join again.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }
}

impl Membership for EtcdMembership {
    fn join(&self, member: Member, lease: Duration) -> Result<Joined, MembershipError> {
        member.check()?;
        if !(LEASE.0..=LEASE.1).contains(&lease) {
            return Err(MembershipError::Lease { lease });
        }
        let (servers, failures) = (self.servers.clone(), self.failures.clone());
        Ok(Joined::start(move |sender| keep(servers, member, lease, (sender, failures))))
    }

    fn watch(&self) -> Members {
        let (lists, receiver) = watch::channel(Arc::new(MemberList::default()));
        tokio::spawn(follow(self.servers.clone(), self.grace, lists, self.failures.clone()));
        Members::new(receiver, Some(self.failures.clone()))
    }
}
