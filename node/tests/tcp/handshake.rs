//! Who is let in, and what both sides are told otherwise.

use std::sync::Arc;
use std::time::Duration;

use kvpool_node::transport::tcp::{
    Address, CertificateProblem, Endpoint, Identity, LinkError, ListenSettings, PeerSettings, Side, Tls,
    Token,
};
use kvpool_node::wire::{Denial, HEADER, Header, PROOF, Role, StreamPlace, WIRE_VERSION, Welcome, WireError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::*;

async fn meets(a: Identity, b: Identity, address: Address) {
    let b = b.fingerprint([7; 16]).incarnation(1234);
    let (a, b) = (silent(a, limits()).await, listen(b, address, limits()).await);
    let (here, there) = link(&a, &b).await;
    assert_eq!(here.peer().name, "b");
    assert_eq!((here.peer().incarnation, here.peer().fingerprint), (1234, [7; 16]));
    assert_eq!(here.peer().messages, 4);
    assert_eq!(there.peer().name, "a");
    here.send(&"to b").await.unwrap();
    there.send(&"to a").await.unwrap();
    assert_eq!(here.recv::<String>().await.unwrap(), "to a");
    assert_eq!(there.recv::<String>().await.unwrap(), "to b");
    assert_eq!((a.links(), b.links()), (1, 1));
    drop(here);
    assert_eq!(there.closed().await, LinkError::Ended);
    assert_eq!((a.links(), b.links()), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_meet_in_every_allowed_way() {
    meets(identity("a"), identity("b"), loopback()).await;
    meets(identity("a"), identity("b"), Address::Unix(socket_path())).await;
    let with_token = |name| identity(name).token(token("the token"));
    meets(with_token("a"), with_token("b"), loopback()).await;
    meets(with_token("a"), with_token("b"), Address::Unix(socket_path())).await;
    let authority = Authority::new();
    let mutual = |name: &str| identity(name).tls(authority.mutual(name));
    meets(mutual("a"), mutual("b"), loopback()).await;
    meets(mutual("a").token(token("t")), mutual("b").token(token("t")), loopback()).await;
    let acceptor = with_token("b").tls(authority.acceptor(&authority.certificate("b")));
    meets(with_token("a").tls(authority.connector()), acceptor, loopback()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_token_is_refused_and_both_sides_know() {
    let authority = Authority::new();
    for tls in [false, true] {
        let (mut a, mut b) = (identity("a").token(token("one")), identity("b").token(token("another")));
        if tls {
            a = a.tls(authority.connector());
            b = b.tls(authority.acceptor(&authority.certificate("b")));
        }
        let (a, b) = (silent(a, limits()).await, listen(b, loopback(), limits()).await);
        let (here, there) = refused(&a, &b, &peer_at("b", &b)).await;
        assert_eq!(here, LinkError::Token { side: Side::Ours, missing: false });
        assert_eq!(there, Some(LinkError::Token { side: Side::Theirs, missing: false }));
        assert_eq!((a.links(), b.links()), (0, 0));
    }
}

/// In each step of a rotation, nodes before and after it link in both directions.
#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_replaced_in_steps() {
    let (old, new) = ("the token of before", "the token of today");
    let both = |first, other| token(first).or(format!("{other}, of sixteen bytes").as_bytes()).unwrap();
    let steps = [token(old), both(old, new), both(new, old), token(new)];
    for pair in steps.windows(2) {
        for [one, other] in [[0, 0], [0, 1], [1, 0], [1, 1]] {
            let (a, b) = (pair[one].clone(), pair[other].clone());
            meets(identity("a").token(a), identity("b").token(b), loopback()).await;
        }
    }
    let (a, b) = (identity("a").token(token(old)), identity("b").token(token(new)));
    let (a, b) = (silent(a, limits()).await, listen(b, loopback(), limits()).await);
    assert_eq!(
        refused(&a, &b, &peer_at("b", &b)).await.0,
        LinkError::Token { side: Side::Ours, missing: false }
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_token_is_refused() {
    for with in [[true, false], [false, true]] {
        let of = |name, with| if with { identity(name).token(token("one")) } else { identity(name) };
        let (a, b) = (of("a", with[0]), of("b", with[1]));
        let (a, b) = (silent(a, limits()).await, listen(b, loopback(), limits()).await);
        let (here, there) = refused(&a, &b, &peer_at("b", &b)).await;
        let side = if with[0] { Side::Theirs } else { Side::Ours };
        assert_eq!(here, LinkError::Token { side, missing: true });
        assert!(there.is_some());
    }
    assert!(matches!(Token::new(b"short"), Err(LinkError::TokenLength { bytes: 5, min: 16 })));
}

/// The nonce of the acceptor makes a recorded proof worthless.
#[tokio::test(flavor = "multi_thread")]
async fn a_recorded_proof_is_refused() {
    let b = listen(identity("b").token(token("the token")), loopback(), limits()).await;
    // A relay that records what a true peer says.
    let relay = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = Address::Tcp(relay.local_addr().unwrap());
    let a = silent(identity("a").token(token("the token")), limits()).await;
    let peer = PeerSettings::new("b", at);
    let (_, recorded) = tokio::join!(a.connect(&peer), async {
        let (mut from, _) = relay.accept().await.unwrap();
        let mut to = TcpStream::connect(address_of(&b)).await.unwrap();
        let mut header = [0; HEADER];
        to.read_exact(&mut header).await.unwrap();
        from.write_all(&header).await.unwrap();
        let mut said = [0; HEADER + PROOF];
        from.read_exact(&mut said).await.unwrap();
        said
    });
    let mut stream = TcpStream::connect(address_of(&b)).await.unwrap();
    stream.read_exact(&mut [0; HEADER]).await.unwrap();
    stream.write_all(&recorded).await.unwrap();
    let mut verdict = [0; 1 + PROOF];
    stream.read_exact(&mut verdict).await.unwrap();
    assert_eq!(verdict[0], 2, "the replay was accepted");
    let told = LinkError::Token { side: Side::Theirs, missing: false };
    while b.accept().await.expect_err("the replay was accepted") != told {}
}

fn problem(side: Side, problem: CertificateProblem) -> LinkError {
    LinkError::Certificate { side, problem }
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_certificates_are_refused_and_both_sides_know() {
    use CertificateProblem::{Expired, Foreign, WrongName};
    let (ours, foreign) = (Authority::new(), Authority::new());
    let good = |name: &str| ours.mutual(name);
    let expired = |name: &str| ours.trusting(&ours.until(name, 2020));
    let other = |name: &str| ours.trusting(&foreign.certificate(name));
    // Who has the bad certificate, what the connector is told, and what the acceptor is told.
    let cases = [
        (good("a"), expired("b"), problem(Side::Theirs, Expired), problem(Side::Ours, Expired)),
        (expired("a"), good("b"), problem(Side::Ours, Expired), problem(Side::Theirs, Expired)),
        (good("a"), other("b"), problem(Side::Theirs, Foreign), problem(Side::Ours, Foreign)),
        (other("a"), good("b"), problem(Side::Ours, Foreign), problem(Side::Theirs, Foreign)),
        // The acceptor is `b`, with a certificate for another name, and the other way round.
        (good("a"), good("c"), problem(Side::Theirs, WrongName), problem(Side::Ours, WrongName)),
        (good("c"), good("b"), LinkError::Denied(Denial::Name), problem(Side::Theirs, WrongName)),
    ];
    for (number, (a, b, at_a, at_b)) in cases.into_iter().enumerate() {
        let (a, b) = (identity("a").tls(a), identity("b").tls(b));
        let (a, b) = (silent(a, limits()).await, listen(b, loopback(), limits()).await);
        let (here, there) = refused(&a, &b, &peer_at("b", &b)).await;
        assert_eq!(here, at_a, "case {number}");
        // The alert for a wrong name and a foreign signature is not specific in every version.
        match there.unwrap_or_else(|| panic!("case {number}: the acceptor was not told")) {
            LinkError::Certificate { side: Side::Ours, .. } => {
                assert!(matches!(at_b, LinkError::Certificate { side: Side::Ours, .. }), "case {number}");
            }
            there => assert_eq!(there, at_b, "case {number}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connector_without_a_certificate_is_refused() {
    let authority = Authority::new();
    let a = silent(identity("a").tls(authority.connector()), limits()).await;
    let b = listen(identity("b").tls(authority.mutual("b")), loopback(), limits()).await;
    let (here, there) = refused(&a, &b, &peer_at("b", &b)).await;
    assert_eq!(here, problem(Side::Ours, CertificateProblem::Missing));
    assert_eq!(there, Some(problem(Side::Theirs, CertificateProblem::Missing)));
}

#[tokio::test(flavor = "multi_thread")]
async fn unusable_files_are_named() {
    let authority = Authority::new();
    let good = authority.certificate("b");
    let (chain, key, ca) = (good.chain.as_bytes(), good.key.as_bytes(), authority.pem.as_bytes());
    let other = authority.certificate("c");
    let what = |tls: Result<Tls, LinkError>| match tls {
        Err(LinkError::TlsFile { what, .. }) => what,
        tls => panic!("{tls:?}"),
    };
    assert_eq!(what(Tls::mutual(b"", key, ca)), "certificate");
    assert_eq!(what(Tls::mutual(chain, b"no key", ca)), "key");
    assert_eq!(what(Tls::mutual(chain, key, b"")), "authority");
    assert_eq!(what(Tls::mutual(chain, other.key.as_bytes(), ca)), "certificate");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_version_is_refused_by_both_sides_with_both_versions() {
    let theirs = WireError::Version { ours: WIRE_VERSION, theirs: 9 };
    let header = |role| Header { version: 9, ..raw_header(role) }.encode();
    // As the acceptor.
    let b = listen(identity("b"), loopback(), limits()).await;
    let mut stream = TcpStream::connect(address_of(&b)).await.unwrap();
    stream.write_all(&header(Role::Control)).await.unwrap();
    assert_eq!(b.accept().await.unwrap_err(), LinkError::Wire(theirs.clone()));
    let mut got = [0; HEADER];
    stream.read_exact(&mut got).await.unwrap();
    assert_eq!(Header::decode(&got).unwrap().version, WIRE_VERSION, "the peer learns our version, too");
    // As the connector.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let peer = PeerSettings::new("b", Address::Tcp(listener.local_addr().unwrap()));
    let a = silent(identity("a"), limits()).await;
    let (connected, ()) = tokio::join!(a.connect(&peer), async {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(&header(Role::Acceptor)).await.unwrap();
        let mut got = [0; HEADER];
        stream.read_exact(&mut got).await.unwrap();
        assert_eq!(Header::decode(&got).unwrap().version, WIRE_VERSION);
    });
    assert_eq!(connected.unwrap_err(), LinkError::Wire(theirs));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_in_use_is_named() {
    let b = listen(identity("b"), loopback(), limits()).await;
    let address = b.addresses()[0].clone();
    let second = Endpoint::bind(ListenSettings::on(address.clone()), identity("c"), limits()).await;
    assert_eq!(second.unwrap_err(), LinkError::AddressInUse { address });

    let path = socket_path();
    let address = Address::Unix(path.clone());
    let first = listen(identity("b"), address.clone(), limits()).await;
    let second = Endpoint::bind(ListenSettings::on(address.clone()), identity("c"), limits()).await;
    assert_eq!(second.unwrap_err(), LinkError::AddressInUse { address: address.clone() });
    drop(first);
    assert!(!path.exists(), "the file goes with the endpoint");
    // A process that died leaves its file.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    drop(listen(identity("b"), address, limits()).await);
    // Anything else is left alone.
    std::fs::write(&path, "not a socket").unwrap();
    let refused =
        Endpoint::bind(ListenSettings::on(Address::Unix(path.clone())), identity("b"), limits()).await;
    assert_eq!(refused.unwrap_err(), LinkError::AddressInUse { address: Address::Unix(path.clone()) });
    assert_eq!(std::fs::read(&path).unwrap(), b"not a socket");
    std::fs::remove_file(path).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_text_stays_on_this_host() {
    let anywhere = Address::Tcp("0.0.0.0:0".parse().unwrap());
    let refused = |identity| Endpoint::bind(ListenSettings::on(anywhere.clone()), identity, limits());
    let plain = LinkError::PlainText { address: anywhere.clone() };
    assert_eq!(refused(identity("b")).await.unwrap_err(), plain);
    assert_eq!(refused(identity("b").token(token("t"))).await.unwrap_err(), plain);
    let authority = Authority::new();
    assert_eq!(refused(identity("b").tls(authority.connector())).await.unwrap_err(), plain);
    let open = identity("b").tls(authority.acceptor(&authority.certificate("b")));
    assert_eq!(refused(open).await.unwrap_err(), LinkError::Unauthenticated { address: anywhere.clone() });
    assert!(refused(identity("b").tls(authority.mutual("b"))).await.is_ok());

    // An address for documentation, which is never reached.
    let elsewhere = Address::Tcp("192.0.2.1:7".parse().unwrap());
    let a = silent(identity("a").token(token("t")), limits()).await;
    let refused = a.connect(&PeerSettings::new("b", elsewhere.clone())).await;
    assert_eq!(refused.unwrap_err(), LinkError::PlainText { address: elsewhere });
}

#[tokio::test(flavor = "multi_thread")]
async fn another_peer_is_refused() {
    let a = silent(identity("a"), limits()).await;
    let b = listen(identity("b"), loopback(), limits()).await;
    let wrong = a.connect(&peer_at("c", &b)).await.unwrap_err();
    assert_eq!(wrong, LinkError::OtherPeer { expected: "c".into(), got: "b".into() });
    assert!(matches!(Identity::new("a b", 1), Err(LinkError::Wire(WireError::Malformed { .. }))));
}

#[tokio::test(flavor = "multi_thread")]
async fn links_are_limited() {
    let mut few = limits();
    few.links_per_peer = 1;
    let a = silent(identity("a"), limits()).await;
    let b = listen(identity("b"), loopback(), few).await;
    let (first, there) = link(&a, &b).await;
    let (here, refusal) = refused(&a, &b, &peer_at("b", &b)).await;
    assert_eq!(here, LinkError::Denied(Denial::Links));
    assert_eq!(refusal, Some(LinkError::Limit { what: "links of a peer", max: 1 }));
    drop((first, there));
    drop(link(&a, &b).await);
}

/// Connections that say nothing are cut, and make room for others.
#[tokio::test(flavor = "multi_thread")]
async fn handshakes_are_limited_in_number_and_time() {
    let mut few = limits();
    few.handshakes = 2;
    // The link below has no more time for its own.
    few.handshake = Duration::from_secs(3);
    let b = listen(identity("b"), loopback(), few).await;
    let mut silent_ones = Vec::new();
    for _ in 0..3 {
        silent_ones.push(TcpStream::connect(address_of(&b)).await.unwrap());
    }
    let limit = LinkError::Limit { what: "connections without a handshake", max: 2 };
    assert_eq!(b.accept().await.unwrap_err(), limit);
    for _ in 0..2 {
        assert!(matches!(b.accept().await, Err(LinkError::Slow { .. })));
    }
    let a = silent(identity("a"), limits()).await;
    drop(link(&a, &b).await);
}

/// However many connections say nothing, a peer that says who it is comes in, long before they are
/// cut.
#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_keep_no_peer_out() {
    let mut few = limits();
    few.handshakes = 8;
    few.handshake = Duration::from_secs(60);
    let b = listen(identity("b"), loopback(), few.clone()).await;
    let mut silent_ones = Vec::new();
    for _ in 0..64 {
        silent_ones.push(TcpStream::connect(address_of(&b)).await.unwrap());
    }
    let a = silent(identity("a"), few).await;
    let linked = async {
        let accepted = async {
            loop {
                match b.accept().await {
                    Ok(link) => return link,
                    Err(LinkError::Limit { what: "connections without a handshake", .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        };
        let peer = peer_at("b", &b);
        let (here, there) = tokio::join!(a.connect(&peer), accepted);
        (here.unwrap(), there)
    };
    tokio::time::timeout(Duration::from_secs(30), linked).await.expect("a link among silent connections");
}

/// Links whose data streams do not come keep neither other links out nor their data streams.
#[tokio::test(flavor = "multi_thread")]
async fn links_without_data_streams_keep_no_peer_out() {
    let mut few = limits();
    few.handshakes = 4;
    few.handshake = Duration::from_secs(60);
    let b = listen(identity("b"), loopback(), few.clone()).await;
    let mut halves = Vec::new();
    for _ in 0..4 {
        halves.push(raw_connection(&b, StreamPlace::Control { streams: 2 }).await);
    }
    let a = silent(identity("a"), few).await;
    let accepted = async {
        loop {
            match b.accept().await {
                Ok(link) => return link,
                Err(LinkError::Limit { what: "links without their data streams", .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    };
    let peer = peer_at("b", &b);
    let linked = async { tokio::join!(a.connect(&peer), accepted) };
    let linked = tokio::time::timeout(Duration::from_secs(30), linked);
    linked.await.expect("a link among halves of links").0.unwrap();
}

/// Streams that come when their link has just given up are refused; they end nothing else.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn data_streams_of_a_link_that_gave_up_do_not_end_accepting() {
    let b = Arc::new(listen(identity("b"), loopback(), limits()).await);
    for _ in 0..100 {
        let (_control, welcome) = raw_connection(&b, StreamPlace::Control { streams: 2 }).await;
        let Welcome::Accepted { link, .. } = welcome else { panic!("{welcome:?}") };
        // All with the same number: the second ends the link.
        let streams: Vec<_> = (0..6)
            .map(|_| {
                let b = b.clone();
                tokio::spawn(async move { raw_connection(&b, StreamPlace::Data { link, index: 1 }).await })
            })
            .collect();
        for stream in streams {
            drop(stream.await.unwrap());
        }
        let quiet = Duration::from_millis(5);
        while let Ok(refused) = tokio::time::timeout(quiet, b.accept()).await {
            assert_ne!(refused.expect_err("a link of half its streams"), LinkError::Closed);
        }
    }
    let a = silent(identity("a"), limits()).await;
    drop(link(&a, &b).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_does_not_link_to_itself_nor_to_its_name() {
    let own = LinkError::OwnName { name: "b".into() };
    let b = listen(identity("b"), loopback(), limits()).await;
    for name in ["b", "x"] {
        let (here, there) = refused(&b, &b, &peer_at(name, &b)).await;
        assert_eq!((here, there), (own.clone(), Some(own.clone())), "as {name}");
    }
    // Another process that was given the same name.
    let other = silent(identity("b"), limits()).await;
    let (here, there) = refused(&other, &b, &peer_at("b", &b)).await;
    assert_eq!((here, there), (own.clone(), Some(own)));
    assert_eq!(b.links(), 0);
}

/// Only the peer of a link can add a data stream to it, and only where one is missing.
#[tokio::test(flavor = "multi_thread")]
async fn a_data_stream_needs_a_link() {
    let b = listen(identity("b"), loopback(), limits()).await;
    let (_stream, welcome) = raw_connection(&b, StreamPlace::Data { link: 5, index: 0 }).await;
    assert_eq!(welcome, Welcome::Denied(Denial::Stream));
    assert_eq!(b.accept().await.unwrap_err(), LinkError::Denied(Denial::Stream));
    let (_control, welcome) = raw_connection(&b, StreamPlace::Control { streams: 2 }).await;
    let Welcome::Accepted { link, .. } = welcome else { panic!("{welcome:?}") };
    let (_one, _) = raw_connection(&b, StreamPlace::Data { link, index: 1 }).await;
    let (_two, _) = raw_connection(&b, StreamPlace::Data { link, index: 1 }).await;
    assert!(matches!(b.accept().await, Err(LinkError::Wire(WireError::Invalid { got: 1, .. }))));
    assert_eq!(b.links(), 0);
}

/// A connection that ends, or carries garbage, at any point of the handshake.
#[tokio::test(flavor = "multi_thread")]
async fn a_handshake_that_breaks_off_leaves_nothing() {
    let b = listen(identity("b"), loopback(), limits()).await;
    let valid = [&raw_header(Role::Control).encode()[..], &[0; PROOF], &frame(&[1, b'a'])].concat();
    for end in (0..valid.len()).step_by(3) {
        let mut stream = TcpStream::connect(address_of(&b)).await.unwrap();
        stream.write_all(&valid[..end]).await.unwrap();
        drop(stream);
        b.accept().await.expect_err("half a handshake was accepted");
    }
    let mut random = fastrand::Rng::with_seed(5);
    for _ in 0..50 {
        let mut noise = vec![0; 400];
        random.fill(&mut noise);
        let keep = random.usize(..=96);
        noise[..keep].copy_from_slice(&valid[..keep]);
        let mut stream = TcpStream::connect(address_of(&b)).await.unwrap();
        let _ = stream.write_all(&noise).await;
        let _ = stream.shutdown().await;
        b.accept().await.expect_err("noise was accepted");
    }
    assert_eq!(b.links(), 0);
}
