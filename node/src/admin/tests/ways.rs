//! Access other than plain TCP: TLS, and a Unix socket.

use std::os::unix::fs::PermissionsExt;

use rcgen::{CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

use super::*;
use crate::transport::tcp::Tls;

/// An authority, and a certificate of it for the loopback.
fn certificates() -> (String, String, String) {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "tests");
    params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["127.0.0.1".to_owned(), "localhost".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &authority).unwrap();
    (authority.pem(), certificate.pem(), key.serialize_pem())
}

fn credentials((_, certificate, key): &(String, String, String)) -> AdminCredentials {
    let tls = Tls::with_token(Some((certificate.as_bytes(), key.as_bytes())), None).unwrap();
    AdminCredentials { tls: Some(tls), ..Token::new(TOKEN).ok().into() }
}

#[tokio::test]
async fn https_presents_a_certificate_which_can_be_replaced() {
    let (ours, others) = (certificates(), certificates());
    let address = "https://127.0.0.1:0".parse().unwrap();
    let server = AdminServer::bind(&address, credentials(&ours), Limits::default()).unwrap();
    let url = server.address().clone();
    let served = Served::serve(server, Arc::new(PoolAdmin::new("n1", pool())));
    let client = |ca: &str| {
        let tls = Tls::with_token(None, Some(ca.as_bytes())).unwrap();
        Client::new(url.clone(), Token::new(TOKEN).ok()).tls(tls)
    };
    client(&ours.0).get("/stats").await.unwrap();
    let error = client(&others.0).get("/stats").await.unwrap_err();
    assert!(matches!(error, ClientError::Tls { .. }), "{error}");
    // The token is not sent in plain text to such an address, nor without a check of the server.
    let error = Client::new(url.clone(), Token::new(TOKEN).ok()).get("/stats").await.unwrap_err();
    assert!(matches!(error, ClientError::NoAuthority { .. }), "{error}");
    let error = served.client(Some(TOKEN)).get("/stats").await.unwrap_err();
    assert!(matches!(error, ClientError::NotHttp { .. } | ClientError::Broken { .. }), "{error}");
    // New connections get the new certificate.
    let mut follower = client(&ours.0).follow();
    timeout(Duration::from_secs(10), follower.next()).await.expect("an event").unwrap();
    served.access.replace(credentials(&others)).unwrap();
    client(&others.0).get("/stats").await.unwrap();
    assert!(matches!(client(&ours.0).get("/stats").await, Err(ClientError::Tls { .. })));
    timeout(Duration::from_secs(10), follower.next()).await.expect("it goes on").unwrap();
    assert_eq!(served.access.replace(AdminCredentials::default()), Err(AccessError::NoCertificate));
    served.stop().await;
}

#[tokio::test]
async fn silent_callers_of_https_keep_nobody_out() {
    let ours = certificates();
    let address = "https://127.0.0.1:0".parse().unwrap();
    let limits = Limits { connections: 2, header: Duration::from_secs(60), ..Limits::default() };
    let server = AdminServer::bind(&address, credentials(&ours), limits).unwrap();
    let (url, at) = (server.address().clone(), port(&server));
    let served = Served::serve(server, Arc::new(PoolAdmin::new("n1", pool())));
    let mut silent = Vec::new();
    for _ in 0..8 {
        silent.push(TcpStream::connect(at).await.unwrap());
    }
    let tls = Tls::with_token(None, Some(ours.0.as_bytes())).unwrap();
    let client = Client::new(url, Token::new(TOKEN).ok()).tls(tls);
    timeout(Duration::from_secs(10), client.get("/stats")).await.expect("it is kept out").unwrap();
    served.stop().await;
}

#[tokio::test]
async fn a_unix_socket_is_of_its_user_and_needs_no_token() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.sock");
    let address: AdminUrl = format!("unix:{}", path.display()).parse().unwrap();
    let bind = || AdminServer::bind(&address, Token::new(TOKEN).ok(), Limits::default());
    // The file of a dead process.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let server = bind().unwrap();
    assert_eq!(server.address(), &address);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let error = bind().unwrap_err();
    assert!(matches!(error, BindError::InUse { .. }) && error.to_string().contains("the path"), "{error}");
    let (end, ended) = oneshot::channel::<()>();
    let admin = Arc::new(PoolAdmin::new("n1", pool()));
    let run = server.run(admin, async { drop(ended.await) }, Duration::from_secs(5));
    let running = tokio::spawn(run);
    let client = Client::new(address.clone(), None);
    client.get("/stats").await.unwrap();
    client.post("/defrag", &json!({})).await.unwrap();
    timeout(Duration::from_secs(10), client.follow().next()).await.expect("an event").unwrap();
    end.send(()).unwrap();
    timeout(Duration::from_secs(10), running).await.expect("it ends").unwrap().unwrap();
    assert!(!path.exists(), "the file is left behind");
    let error = client.get("/stats").await.unwrap_err();
    assert!(matches!(error, ClientError::Connect { .. }), "{error}");
    // A file that is not a socket stays.
    fs::write(&path, "kept").unwrap();
    assert!(matches!(bind(), Err(BindError::InUse { .. })));
    assert_eq!(fs::read_to_string(&path).unwrap(), "kept");
}
