#[cfg(feature = "etcd")]
use std::path::PathBuf;
use std::sync::Arc;
#[cfg(feature = "etcd")]
use std::time::Duration;

#[cfg(feature = "etcd")]
use super::credentials::pem;
use super::error::ServiceError;
#[cfg(feature = "etcd")]
use super::error::of;
use crate::admin::Reporters;
#[cfg(feature = "etcd")]
use crate::membership::EtcdMembership;
use crate::membership::{Follower, Joined};
use crate::node::Node;
use crate::settings::MembershipSettings;
#[cfg(feature = "etcd")]
use crate::transport::tcp::LinkError;
use crate::transport::tcp::PeerSettings;

/// A node's entry in a directory, and the members that are its peers.
#[cfg_attr(not(feature = "etcd"), allow(dead_code, reason = "this build has no directory"))]
pub(super) struct Membership {
    follower: Follower,
    joined: Joined,
}

impl Membership {
    /// Joins the directory, and follows its members.
    #[cfg(feature = "etcd")]
    pub fn start(
        node: &Arc<Node>,
        settings: &MembershipSettings,
        peers: Vec<PeerSettings>,
        reporters: &Reporters,
    ) -> Result<Self, ServiceError> {
        use crate::membership::{Member, Membership, MembershipReporter};
        use crate::settings::Address;
        let address = advertised(node, settings);
        let mut member = Member::new(node.name(), address.clone());
        if let Some(admin) = node.admin_address() {
            member = match (&address, admin.address()) {
                // Other hosts cannot reach it.
                (_, Address::Unix(_)) => member,
                (Address::Tcp { host, .. }, all @ Address::Tcp { port, .. }) if all.is_unspecified() => {
                    member.admin(admin.at(Address::Tcp { host: host.clone(), port: *port }).to_string())
                }
                _ => member.admin(admin.to_string()),
            };
        }
        let directory = of_etcd(settings).map_err(of("membership"))?.grace(GRACE.max(settings.lease));
        let joined = directory.join(member, settings.lease).map_err(of("membership"))?;
        let members = directory.watch();
        reporters.add(MembershipReporter::new("etcd", &members, Some(&joined)));
        Ok(Self { follower: Follower::start(node, members, peers), joined })
    }

    /// Fails: this build lacks the client of etcd.
    #[cfg(not(feature = "etcd"))]
    pub fn start(
        _: &Arc<Node>,
        _: &MembershipSettings,
        _: Vec<PeerSettings>,
        _: &Reporters,
    ) -> Result<Self, ServiceError> {
        Err(NO_ETCD)
    }

    pub fn configure(&self, peers: Vec<PeerSettings>) {
        self.follower.configure(peers);
    }

    /// Removes the entry, so that members drop this node immediately.
    pub async fn leave(self) {
        drop(self.follower);
        self.joined.leave().await;
    }
}

#[cfg(not(feature = "etcd"))]
pub(super) const NO_ETCD: ServiceError = ServiceError::NotBuilt { key: "membership", feature: "etcd" };

/// Minimum time for which lost members stay after etcd was unreachable.
#[cfg(feature = "etcd")]
const GRACE: Duration = Duration::from_secs(10);

/// Creates the directory, and reads its certificates.
#[cfg(feature = "etcd")]
fn of_etcd(settings: &MembershipSettings) -> Result<EtcdMembership, String> {
    let (cert, key) = settings.certificate.as_ref().map(|(cert, key)| (cert, key)).unzip();
    let read = |path: Option<&PathBuf>| path.map(|path| pem(path)).transpose();
    let (authorities, chain, secret) = (read(settings.ca.as_ref())?, read(cert)?, read(key)?);
    let directory = EtcdMembership::new(settings.location.clone());
    directory.tls(authorities.as_deref(), chain.as_deref().zip(secret.as_deref())).map_err(|error| {
        let path = match &error {
            LinkError::TlsFile { what: "authority", .. } => settings.ca.as_ref(),
            LinkError::TlsFile { what: "key", .. } => key,
            _ => cert,
        };
        format!("{}: {error}", path.cloned().unwrap_or_default().display())
    })
}

#[cfg(feature = "etcd")]
fn advertised(node: &Node, settings: &MembershipSettings) -> crate::settings::Address {
    use crate::settings::Address;
    let bound = node.addresses().first().expect("a membership needs an address to listen on");
    let bound: Address = bound.to_string().parse().expect("an address that is in use");
    match (&settings.advertise, bound) {
        (Some(Address::Tcp { host, port: 0 }), Address::Tcp { port, .. }) => {
            Address::Tcp { host: host.clone(), port }
        }
        (Some(address), _) => address.clone(),
        (None, bound) => bound,
    }
}
