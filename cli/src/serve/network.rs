use std::hash::{DefaultHasher, Hasher};
use std::path::Path;

use crate::error::named;
use anyhow::anyhow;
use kvpool_node::admin::AdminCredentials;
use kvpool_node::settings::{
    Address, NixlLocation, PeerAddress, Settings, TlsFiles, Tokens, default_socket, make_socket_folder,
    read_file,
};
use kvpool_node::transport::tcp::{LinkError, PeerSettings, Tls, Token};
use kvpool_node::wire::Limits;
use kvpool_node::{NodeBuilder, OffloadBelow};

const PEM_BYTES_MAX: u64 = 1 << 20;

/// How a node authenticates, and whom it admits.
pub struct Credentials {
    pub tls: Option<Tls>,
    pub token: Option<Token>,
    /// Tokens of the admin interface, and its certificate.
    pub admin: AdminCredentials,
    /// Digest of the files of certificates.
    pub certificates: u64,
}

impl Credentials {
    pub fn read(settings: &Settings) -> anyhow::Result<Self> {
        let mut digest = DefaultHasher::new();
        let tls = settings.tls.as_ref().map(|files| tls(files, &mut digest)).transpose()?;
        let (tls, of_admin) = tls.unzip();
        let of = |tokens: &Tokens| {
            let mut bytes = tokens.all().iter().map(|token| token.expose().as_bytes());
            let first = Token::new(bytes.next().unwrap_or_default())?;
            bytes.try_fold(first, Token::or)
        };
        let token = settings.token.as_ref().map(of).transpose().map_err(named("cannot use the token"))?;
        let (all, read) = (settings.token.clone(), settings.read_token.clone());
        let admin = AdminCredentials { all, read, tls: of_admin };
        Ok(Self { tls, token, admin, certificates: digest.finish() })
    }
}

/// Applies settings to a node.
pub fn configure(
    settings: &Settings,
    credentials: &Credentials,
    builder: NodeBuilder,
) -> anyhow::Result<NodeBuilder> {
    let mut builder = builder.name(&settings.name).peers(peers(&settings.peers));
    if let Some(address) = &settings.listen {
        let (socket, mut is_usable) = (default_socket(&settings.name), true);
        if let Some(folder) = socket.parent()
            && *address == Address::Unix(socket.clone())
            && let Err(error) = make_socket_folder(folder)
        {
            let folder = folder.display();
            tracing::warn!(
                %folder, %error,
                "peers cannot link to this node: its folder of sockets cannot be used; set listen"
            );
            is_usable = false;
        }
        if is_usable {
            builder = builder.listen(address.clone().into());
        }
    }
    if let Some(tls) = &credentials.tls {
        builder = builder.tls(tls.clone());
    }
    if let Some(token) = &credentials.token {
        builder = builder.token(token.clone());
    }
    if let Some(migrate) = &settings.migrate {
        builder = builder.offload(OffloadBelow { below: migrate.blocks, to: migrate.to.clone() });
    }
    builder = builder.restarts(settings.restarts);
    if let Some(limit) = settings.doubt_limit {
        builder = builder.doubt_limit(limit);
    }
    if let Some(location) = &settings.nixl {
        builder = nixl(builder, location)?;
    }
    let mut limits = Limits::default();
    limits.granted_bytes_per_peer = settings.peer_quota_bytes;
    Ok(builder.limits(limits))
}

#[cfg(feature = "nixl")]
fn nixl(builder: NodeBuilder, location: &NixlLocation) -> anyhow::Result<NodeBuilder> {
    use kvpool_node::transport::nixl::{NixlSettings, NixlTransport};
    let mut settings = NixlSettings::default();
    if let NixlLocation::At(path) = location {
        settings.location = Some(path.clone());
    }
    Ok(builder.nixl(NixlTransport::new(&settings).map_err(named("--nixl"))?))
}

#[cfg(not(feature = "nixl"))]
fn nixl(_: NodeBuilder, _: &NixlLocation) -> anyhow::Result<NodeBuilder> {
    Err(anyhow::anyhow!("--nixl: {}", crate::output::not_built("nixl")))
}

pub fn peers(peers: &[PeerAddress]) -> Vec<PeerSettings> {
    peers.iter().map(|peer| PeerSettings::new(&peer.name, peer.address.clone().into())).collect()
}

/// Reads certificates, for peers and for the admin interface. With an authority peers must present
/// one too; without, they present the token. Callers of the admin interface need none.
fn tls(files: &TlsFiles, digest: &mut DefaultHasher) -> anyhow::Result<(Tls, Tls)> {
    let mut read = |path: &Path| pem(path).inspect(|bytes| digest.write(bytes));
    let (cert, key) = (read(&files.cert)?, read(&files.key)?);
    let of_server = Tls::with_token(Some((&cert, &key)), None);
    let of_peers = match &files.ca {
        Some(ca) => Tls::mutual(&cert, &key, &read(ca)?),
        None => of_server.clone(),
    };
    let failed = |error| {
        let path = match (&error, &files.ca) {
            (LinkError::TlsFile { what: "key", .. }, _) => &files.key,
            (LinkError::TlsFile { what: "authority", .. }, Some(ca)) => ca,
            _ => &files.cert,
        };
        anyhow!("{}: {error}", path.display())
    };
    Ok((of_peers.map_err(failed)?, of_server.map_err(failed)?))
}

/// Reads the authorities by which a client checks servers.
pub fn authorities(path: &Path) -> anyhow::Result<Tls> {
    Tls::with_token(None, Some(&pem(path)?)).map_err(named(path.display()))
}

pub fn pem(path: &Path) -> anyhow::Result<Vec<u8>> {
    read_file(path, PEM_BYTES_MAX).map_err(named(format_args!("cannot read {}", path.display())))
}
