//! etcd over TLS: servers that are trusted, clients that present a certificate, users and passwords.

use std::path::PathBuf;

use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};
use kvpool_node::membership::{EtcdLocation, EtcdMembership, JoinState, JoinStatus, Joined, Membership};
use kvpool_node::transport::tcp::LinkError;

use super::{LEASE, Server, WAIT, joined, listed, member};

/// Certificates of a server and a client that one authority has signed, in a folder.
struct Certificates {
    folder: PathBuf,
    authority: String,
    client: [String; 2],
}

impl Certificates {
    fn in_folder(folder: PathBuf) -> Self {
        use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let authority = params.self_signed(&key).unwrap().pem();
        let issuer = Issuer::new(params, key);
        let signed = |name: &str| {
            let key = KeyPair::generate().unwrap();
            let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
            [params.signed_by(&key, &issuer).unwrap().pem(), key.serialize_pem()]
        };
        let ([certificate, key], client) = (signed("localhost"), signed("client"));
        for (name, text) in [("server.pem", &certificate), ("server.key", &key), ("ca.pem", &authority)] {
            std::fs::write(folder.join(name), text).unwrap();
        }
        Self { folder, authority, client }
    }

    /// Returns the arguments of a server that demands a certificate of its clients.
    fn arguments(&self) -> Vec<String> {
        let file = |name| self.folder.join(name).display().to_string();
        vec![
            format!("--cert-file={}", file("server.pem")),
            format!("--key-file={}", file("server.key")),
            format!("--trusted-ca-file={}", file("ca.pem")),
            "--client-cert-auth".to_owned(),
            "--auth-token-ttl=2".to_owned(),
        ]
    }

    fn client(&self) -> (&[u8], &[u8]) {
        let [certificate, key] = &self.client;
        (certificate.as_bytes(), key.as_bytes())
    }
}

/// Waits for the reason for which an entry is not joined.
async fn refused(entry: &mut Joined, parts: &[&str]) {
    let is_told = |state: &JoinState| match &state.status {
        JoinStatus::Waiting { reason } => parts.iter().any(|part| reason.contains(part)),
        _ => false,
    };
    let told = tokio::time::timeout(WAIT, entry.wait(is_told)).await;
    told.unwrap_or_else(|_| panic!("{parts:?}: {:?}", entry.state()));
}

/// A server over TLS that demands a client's certificate, a user and a password; tokens expire.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_over_tls_admits_users_with_certificates() {
    let Some(mut server) = Server::prepare() else { return };
    let certificates = Certificates::in_folder(server.data.path().to_owned());
    server.arguments = certificates.arguments();
    server.run();
    let [port, _] = server.ports;
    let at =
        move |user: &str| -> EtcdLocation { format!("etcds://{user}localhost:{port}/test").parse().unwrap() };
    let authority = certificates.authority.as_bytes();
    let trusted =
        |user: &str| EtcdMembership::new(at(user)).tls(Some(authority), Some(certificates.client())).unwrap();
    let mut open = trusted("").join(member("a", 1), LEASE).unwrap();
    joined(&mut open, 1).await;
    open.leave().await;
    let (ca, cert) = (
        Certificate::from_pem(authority),
        Identity::from_pem(&certificates.client[0], &certificates.client[1]),
    );
    let options = ConnectOptions::new().with_tls(TlsOptions::new().ca_certificate(ca).identity(cert));
    let mut client = Client::connect([format!("localhost:{port}")], Some(options)).await.unwrap();
    client.user_add("root", "p@ss", None).await.unwrap();
    client.role_add("root").await.unwrap();
    client.user_grant_role("root", "root").await.unwrap();
    client.auth_enable().await.unwrap();
    let mut entry = trusted("root:p%40ss@").join(member("a", 1), LEASE).unwrap();
    joined(&mut entry, 1).await;
    let mut members = trusted("root:p%40ss@").watch();
    listed(&mut members, "a").await;
    // Its tokens have expired several times.
    tokio::time::sleep(2 * LEASE).await;
    assert_eq!(entry.state().joins, 1);
    let mut second = trusted("root:p%40ss@").join(member("b", 2), LEASE).unwrap();
    joined(&mut second, 1).await;
    listed(&mut members, "a b").await;
    // A server that restarts has forgotten them.
    server.kill();
    server.run();
    second.leave().await;
    listed(&mut members, "a").await;
    assert_eq!(entry.state().joins, 1);
    let untrusted = EtcdMembership::new(at("")).tls(None, Some(certificates.client())).unwrap();
    let without = EtcdMembership::new(at("")).tls(Some(authority), None).unwrap();
    for (directory, parts) in [
        (trusted("root:secret@"), ["authentication failed"].as_slice()),
        (trusted(""), &["permission denied"]),
        (untrusted, &["UnknownIssuer"]),
        // The server says so after the handshake; its alert may be lost with the connection.
        (without, &["CertificateRequired", "connection closed", "broken pipe", "reset"]),
    ] {
        let mut entry = directory.join(member("c", 3), LEASE).unwrap();
        refused(&mut entry, parts).await;
        let shown = format!("{:?}{directory:?}", entry.state());
        let begin: String = certificates.client[1].bytes().take(8).map(|byte| format!("{byte}, ")).collect();
        assert!(!shown.contains("secret") && !shown.contains(&begin), "{shown}");
    }
    let bad = EtcdMembership::new(at("")).tls(Some(b"garbage"), None).unwrap_err();
    assert!(matches!(bad, LinkError::TlsFile { what: "authority", .. }), "{bad}");
}
