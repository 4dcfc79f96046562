use std::sync::Arc;

use rustls::client::verify_server_name;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, DEFAULT_VERSIONS, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::error::LinkError;
use super::socket::Socket;

/// Validated certificates of a node.
#[derive(Clone, Debug)]
pub struct Tls {
    acceptor: Option<Acceptor>,
    connector: Option<Connector>,
}

#[derive(Clone)]
pub(crate) struct Acceptor {
    pub(super) tls: TlsAcceptor,
    /// Whether peers must present a certificate.
    pub(super) verifies: bool,
}

#[derive(Clone)]
pub(crate) struct Connector(pub(super) TlsConnector);

impl std::fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Acceptor").field("verifies", &self.verifies).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Connector(..)")
    }
}

impl Tls {
    /// Mutual TLS: presents a certificate, and accepts those that the authorities have signed. All
    /// three are PEM. Peers' certificates must contain their names.
    pub fn mutual(certificates: &[u8], key: &[u8], authorities: &[u8]) -> Result<Self, LinkError> {
        let (certificates, key) = (chain(certificates)?, private_key(key)?);
        let roots = Arc::new(roots(authorities)?);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider())
            .build()
            .map_err(|error| unusable("authority", &error))?;
        let server = server()
            .with_client_cert_verifier(verifier)
            .with_single_cert(certificates.clone(), key.clone_key())
            .map_err(|error| unusable("certificate", &error))?;
        let client = client(&roots)
            .with_client_auth_cert(certificates, key)
            .map_err(|error| unusable("certificate", &error))?;
        let acceptor = Acceptor { tls: TlsAcceptor::from(Arc::new(server)), verifies: true };
        Ok(Self {
            acceptor: Some(acceptor),
            connector: Some(Connector(TlsConnector::from(Arc::new(client)))),
        })
    }

    /// TLS with a certificate of the acceptor only, for links that are authenticated by a token.
    ///
    /// `certificate` is the chain and the key of this node, needed to listen; `authorities` sign
    /// those of peers, needed to connect. All are PEM.
    pub fn with_token(
        certificate: Option<(&[u8], &[u8])>,
        authorities: Option<&[u8]>,
    ) -> Result<Self, LinkError> {
        let acceptor = match certificate {
            None => None,
            Some((certificates, key)) => {
                let config = server()
                    .with_no_client_auth()
                    .with_single_cert(chain(certificates)?, private_key(key)?)
                    .map_err(|error| unusable("certificate", &error))?;
                Some(Acceptor { tls: TlsAcceptor::from(Arc::new(config)), verifies: false })
            }
        };
        let connector = match authorities {
            None => None,
            Some(authorities) => {
                let config = client(&roots(authorities)?).with_no_client_auth();
                Some(Connector(TlsConnector::from(Arc::new(config))))
            }
        };
        Ok(Self { acceptor, connector })
    }

    pub(crate) fn acceptor(&self) -> Option<&Acceptor> {
        self.acceptor.as_ref()
    }

    pub(crate) fn connector(&self) -> Option<&Connector> {
        self.connector.as_ref()
    }
}

pub(crate) async fn accept(tls: Option<&Tls>, stream: TcpStream) -> Result<Socket, LinkError> {
    stream.set_nodelay(true).map_err(|error| LinkError::io("configure a connection", error))?;
    let Some(acceptor) = tls.and_then(Tls::acceptor) else { return Ok(Socket::Tcp(stream)) };
    let stream = acceptor.tls.accept(stream).await;
    let stream = stream.map_err(|error| LinkError::io("the TLS handshake", error))?;
    Ok(Socket::Tls(Box::new(stream.into())))
}

/// Encrypts a connection to a host of this name, if there are authorities.
pub(crate) async fn connect(tls: Option<&Tls>, name: &str, stream: TcpStream) -> Result<Socket, LinkError> {
    let Some(connector) = tls.and_then(Tls::connector) else { return Ok(Socket::Tcp(stream)) };
    let stream = connector.0.connect(server_name(name)?, stream).await;
    let stream = stream.map_err(|error| LinkError::io("the TLS handshake", error))?;
    Ok(Socket::Tls(Box::new(stream.into())))
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn server() -> rustls::ConfigBuilder<ServerConfig, rustls::WantsVerifier> {
    ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(DEFAULT_VERSIONS)
        .expect("the provider supports TLS 1.3")
}

fn client(roots: &RootCertStore) -> rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert> {
    ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(DEFAULT_VERSIONS)
        .expect("the provider supports TLS 1.3")
        .with_root_certificates(roots.clone())
}

fn unusable(what: &'static str, error: &dyn std::fmt::Display) -> LinkError {
    LinkError::TlsFile { what, reason: error.to_string() }
}

fn chain(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, LinkError> {
    certificates("certificate", pem)
}

fn certificates(what: &'static str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, LinkError> {
    let all: Vec<_> = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(|error| unusable(what, &error))?;
    if all.is_empty() { Err(unusable(what, &"there is none in the file")) } else { Ok(all) }
}

fn private_key(pem: &[u8]) -> Result<PrivateKeyDer<'static>, LinkError> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|error| unusable("key", &error))
}

fn roots(pem: &[u8]) -> Result<RootCertStore, LinkError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates("authority", pem)? {
        roots.add(certificate).map_err(|error| unusable("authority", &error))?;
    }
    Ok(roots)
}

pub(super) fn server_name(name: &str) -> Result<ServerName<'static>, LinkError> {
    ServerName::try_from(name.to_owned()).map_err(|error| unusable("name of the peer", &error))
}

pub(super) fn is_named(certificates: &[CertificateDer<'_>], name: &str) -> bool {
    let (Some(first), Ok(name)) = (certificates.first(), server_name(name)) else { return false };
    ParsedCertificate::try_from(first).is_ok_and(|first| verify_server_name(&first, &name).is_ok())
}
