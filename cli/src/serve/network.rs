//! Settings for the network side of a node: addresses, certificates, token and limits.

use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};

use kvpool_node::admin::AdminTokens;
use kvpool_node::settings::{
    Address, NixlLocation, PeerAddress, Settings, TlsFiles, Tokens, default_socket, make_socket_folder,
    read_file,
};
use kvpool_node::transport::tcp::{LinkError, PeerSettings, Tls, Token};
use kvpool_node::wire::Limits;
use kvpool_node::{NodeBuilder, Spill};
use thiserror::Error;

/// Why the network side cannot be configured.
#[derive(Debug, Error)]
pub enum NetworkError {
    #[error("cannot read {}: {error}", .path.display())]
    File { path: PathBuf, error: std::io::Error },
    #[error("{}: {error}", .path.display())]
    Tls { path: PathBuf, error: LinkError },
    #[error("cannot listen in {}: {error} (choose another address for peers with --listen)", .path.display())]
    SocketFolder { path: PathBuf, error: std::io::Error },
    #[error("cannot use the token: {0}")]
    Token(LinkError),
    #[cfg(not(feature = "nixl"))]
    #[error("--nixl: {}", crate::output::not_built("nixl"))]
    NoNixl,
    #[cfg(feature = "nixl")]
    #[error("--nixl: {0}")]
    Nixl(kvpool::transport::TransportError),
}

/// Maximum size of a file of certificates or a key in bytes.
const PEM_BYTES_MAX: u64 = 1 << 20;

/// How a node proves who it is, and whom it admits.
pub struct Credentials {
    pub tls: Option<Tls>,
    /// Token of the cluster.
    pub token: Option<Token>,
    /// Tokens of the admin interface.
    pub admin: AdminTokens,
    /// Tells files of certificates apart.
    pub certificates: u64,
}

impl Credentials {
    /// Reads the files that settings name.
    pub fn read(settings: &Settings) -> Result<Self, NetworkError> {
        let mut digest = DefaultHasher::new();
        let tls = settings.tls.as_ref().map(|files| tls(files, &mut digest)).transpose()?;
        let of = |tokens: &Tokens| {
            let mut bytes = tokens.all().iter().map(|token| token.expose().as_bytes());
            let first = Token::new(bytes.next().unwrap_or_default())?;
            bytes.try_fold(first, Token::or)
        };
        let token = settings.token.as_ref().map(of).transpose().map_err(NetworkError::Token)?;
        let admin = AdminTokens { all: settings.token.clone(), read: settings.read_token.clone() };
        Ok(Self { tls, token, admin, certificates: digest.finish() })
    }
}

/// Gives a node its settings.
pub fn configure(
    settings: &Settings,
    credentials: &Credentials,
    builder: NodeBuilder,
) -> Result<NodeBuilder, NetworkError> {
    let mut builder = builder.name(&settings.name).peers(peers(&settings.peers));
    if let Some(address) = &settings.listen {
        let socket = default_socket(&settings.name);
        if let (Some(folder), true) = (socket.parent(), *address == Address::Unix(socket.clone())) {
            let failed = |error| NetworkError::SocketFolder { path: folder.to_owned(), error };
            make_socket_folder(folder).map_err(failed)?;
        }
        builder = builder.listen(address.clone().into());
    }
    if let Some(tls) = &credentials.tls {
        builder = builder.tls(tls.clone());
    }
    if let Some(token) = &credentials.token {
        builder = builder.token(token.clone());
    }
    if let Some(migrate) = &settings.migrate {
        builder = builder.spill(Spill { below: migrate.blocks, to: migrate.to.clone() });
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
fn nixl(builder: NodeBuilder, location: &NixlLocation) -> Result<NodeBuilder, NetworkError> {
    use kvpool_node::transport::nixl::{NixlSettings, NixlTransport};
    let mut settings = NixlSettings::default();
    if let NixlLocation::At(path) = location {
        settings.location = Some(path.clone());
    }
    Ok(builder.nixl(NixlTransport::new(&settings).map_err(NetworkError::Nixl)?))
}

#[cfg(not(feature = "nixl"))]
fn nixl(_: NodeBuilder, _: &NixlLocation) -> Result<NodeBuilder, NetworkError> {
    Err(NetworkError::NoNixl)
}

/// Returns the peers of settings.
pub fn peers(peers: &[PeerAddress]) -> Vec<PeerSettings> {
    peers.iter().map(|peer| PeerSettings::new(&peer.name, peer.address.clone().into())).collect()
}

/// Reads certificates. With an authority peers must present one too; without, they present the token.
fn tls(files: &TlsFiles, digest: &mut DefaultHasher) -> Result<Tls, NetworkError> {
    let mut read = |path: &Path| {
        let bytes = read_file(path, PEM_BYTES_MAX);
        let bytes = bytes.map_err(|error| NetworkError::File { path: path.to_owned(), error })?;
        digest.write(&bytes);
        Ok::<_, NetworkError>(bytes)
    };
    let (cert, key) = (read(&files.cert)?, read(&files.key)?);
    let (made, path) = match &files.ca {
        Some(ca) => (Tls::mutual(&cert, &key, &read(ca)?), ca),
        None => (Tls::with_token(Some((&cert, &key)), None), &files.cert),
    };
    made.map_err(|error| {
        let path = match &error {
            LinkError::TlsFile { what: "certificate", .. } => &files.cert,
            LinkError::TlsFile { what: "key", .. } => &files.key,
            _ => path,
        };
        NetworkError::Tls { path: path.clone(), error }
    })
}
