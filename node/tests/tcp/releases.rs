//! Links between releases: of one that states no versions, of today's, and of later ones.

use kvpool_node::transport::tcp::{Address, Endpoint, Identity, LinkError, PeerSettings, Token};
use kvpool_node::wire::{
    self, Denial, FRAME_HEAD, FrameHead, HEADER, Header, Hello, PROOF, Proof, Role, Statement, StreamPlace,
    Verdict, Versions, Welcome, WireError,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::*;

/// What a release without versions sent as the connector of a control stream with four data
/// streams: header, proof and `Hello`, recorded from its program. Its name was `old`.
const CONTROL: &str = "6b76706f6f6c0d0a0200010000000000bb23a487b33f1b0cd8d95867e6c9934772d6b67a9d8718a1d01e2f8b6b4a22433fd7d432c7ae425e000000000000000000000000000000000000000000000000000000000000000000000000000000003200000001000000036f6c640444447ee8e9fffa3f0047a183c719aee9d8ca89eaa13401dc237f455850bb6176952ff901170864808080020004";

/// The same for the first data stream of link 5.
const DATA: &str = "6b76706f6f6c0d0a0200020000000000bb23a487b33f1b0c1aa64fb678dfdce8f0aa435154449bb04cdf29d1831f628459724ddcb4d22654000000000000000000000000000000000000000000000000000000000000000000000000000000003300000001000000036f6c640444447ee8e9fffa3f0047a183c719aee9d8ca89eaa13401dc237f455850bb6176952ff90117086480808002010500";

/// What it sent as the acceptor of a control stream with one data stream: header, verdict, proof
/// and `Welcome`.
const ACCEPTED: &str = "6b76706f6f6c0d0a0200000000000000bb23a487b33f1b0cbad5da2ec81016d3929301a0f8c4daf2cc2d3cc2191e040d9e750377002b2f580000000000000000010000000000000000000000000000000000000000000000000000000000000000450000000100000000036f6c640444447ee8e9fffa3f0047a183c719aee9d8ca89eaa13401dc237f455850bb6176952ff90117086480808002e0e0e9ed81b7d292b4d1abd9a0a6ebc69afd0301";

const LINK_OF_ACCEPTED: u128 = 338_426_398_187_296_976_332_721_652_530_404_814_944;

/// Place of the length of the frame behind header and proof, and behind header, verdict and proof.
const HELLO_AT: usize = HEADER + PROOF;
const WELCOME_AT: usize = HEADER + 1 + PROOF;

fn bytes_of(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn versions(min: u16, max: u16) -> Versions {
    Versions { min, max }
}

fn speaking(name: &str, versions: Versions) -> Identity {
    Identity::new(name, versions).unwrap()
}

async fn read_frame(stream: &mut TcpStream) -> Vec<u8> {
    let mut head = [0; FRAME_HEAD];
    stream.read_exact(&mut head).await.unwrap();
    let mut message = vec![0; FrameHead::decode(&head, 1024).unwrap().length];
    stream.read_exact(&mut message).await.unwrap();
    message
}

/// Replays a recorded connector, whose `Hello` may end otherwise. Returns what the acceptor
/// answers.
async fn replay(to: &Endpoint, recorded: &str, end: Option<(usize, Vec<u8>)>) -> (TcpStream, Vec<u8>) {
    let mut bytes = bytes_of(recorded);
    if let Some((cut, end)) = end {
        bytes.truncate(bytes.len() - cut);
        bytes.extend(end);
        let length = u32::try_from(bytes.len() - HELLO_AT - FRAME_HEAD).unwrap();
        bytes[HELLO_AT..HELLO_AT + 4].copy_from_slice(&length.to_le_bytes());
    }
    let mut stream = TcpStream::connect(address_of(to)).await.unwrap();
    stream.write_all(&bytes).await.unwrap();
    stream.read_exact(&mut [0; HEADER + 1 + PROOF]).await.unwrap();
    let mut head = [0; FRAME_HEAD];
    let read = stream.read_exact(&mut head).await;
    let mut message = Vec::new();
    if read.is_ok() {
        message = vec![0; FrameHead::decode(&head, 1024).unwrap().length];
        stream.read_exact(&mut message).await.unwrap();
    }
    (stream, message)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recorded_former_release_connects_as_it_did() {
    let endpoint = listen(speaking("new", versions(4, 6)), loopback(), limits()).await;
    let (_control, welcome) = replay(&endpoint, CONTROL, None).await;
    // The former release decodes it like this: no byte is left.
    let Welcome::Accepted { name, messages, link, streams, .. } = wire::decode(&welcome).unwrap() else {
        panic!("{welcome:?}")
    };
    assert_eq!((&*name, messages, streams), ("new", 4, 4));
    let mut data = Vec::new();
    for index in 0..4_u16 {
        let end = postcard::to_allocvec(&(link, index)).unwrap();
        let (stream, welcome) = replay(&endpoint, DATA, Some((2, end))).await;
        assert!(matches!(wire::decode(&welcome), Ok(Welcome::Accepted { messages: 4, .. })));
        data.push(stream);
    }
    let link = endpoint.accept().await.unwrap();
    let peer = link.peer();
    assert_eq!((&*peer.name, peer.messages, peer.versions), ("old", 4, None));
    assert_eq!(peer.statement.message_bytes, 4 << 20);
}

/// It never appended anything, so that bytes behind its `Hello` are an error, as before.
#[tokio::test(flavor = "multi_thread")]
async fn a_former_release_is_decoded_strictly() {
    let endpoint = listen(speaking("new", versions(4, 6)), loopback(), limits()).await;
    replay(&endpoint, CONTROL, Some((0, vec![0]))).await;
    let error = endpoint.accept().await.unwrap_err();
    let LinkError::Wire(WireError::Malformed { reason, .. }) = error else { panic!("{error:?}") };
    assert!(reason.contains("1 of 51 bytes are left over"), "{reason}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recorded_former_release_accepts_as_it_did() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let peer = PeerSettings::new("old", Address::Tcp(listener.local_addr().unwrap()));
    let a = silent(speaking("new", versions(3, 9)), limits()).await;
    let former = async {
        let (mut streams, mut said) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().await.unwrap();
            let recorded = bytes_of(ACCEPTED);
            stream.write_all(&recorded[..HEADER]).await.unwrap();
            let mut first = [0; HEADER + PROOF];
            stream.read_exact(&mut first).await.unwrap();
            assert_eq!(first[56..HEADER], [0; 8], "a spare field is an error there");
            stream.write_all(&recorded[HEADER..WELCOME_AT]).await.unwrap();
            let hello: Hello = wire::decode(&read_frame(&mut stream).await).unwrap();
            stream.write_all(&recorded[WELCOME_AT..]).await.unwrap();
            said.push(hello);
            streams.push(stream);
        }
        (streams, said)
    };
    let (link, (_streams, said)) = tokio::join!(a.connect(&peer), former);
    let link = link.unwrap();
    assert_eq!((link.peer().messages, link.peer().versions), (4, None));
    assert!(said.iter().all(|hello| hello.messages == 4), "{said:?}");
    assert_eq!(said[1].place, StreamPlace::Data { link: LINK_OF_ACCEPTED, index: 0 });
}

#[tokio::test(flavor = "multi_thread")]
async fn the_version_of_a_link_is_the_greatest_that_both_speak() {
    for (a, b, common) in [
        ((4, 4), (4, 4), 4),
        ((4, 6), (5, 9), 6),
        ((4, 4), (4, 9), 4),
        ((5, 9), (4, 5), 5),
        ((4, u16::MAX), (0, u16::MAX), u16::MAX),
    ] {
        let (a, b) = (versions(a.0, a.1), versions(b.0, b.1));
        let connector = silent(speaking("a", a), limits()).await;
        let acceptor = listen(speaking("b", b), loopback(), limits()).await;
        let (here, there) = link(&connector, &acceptor).await;
        assert_eq!((here.peer().messages, here.peer().versions), (common, Some(b)));
        assert_eq!((there.peer().messages, there.peer().versions), (common, Some(a)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_common_version_both_sides_name_both_ranges() {
    let (older, newer) = (versions(4, 5), versions(6, 7));
    for (a, b) in [(older, newer), (newer, older)] {
        for token in [None, Some(Token::new(b"a token of sixteen").unwrap())] {
            let of = |name, versions| {
                let identity = speaking(name, versions);
                token.iter().fold(identity, |identity, token| identity.token(token.clone()))
            };
            let (connector, acceptor) =
                (silent(of("a", a), limits()).await, listen(of("b", b), loopback(), limits()).await);
            let (here, there) = refused(&connector, &acceptor, &peer_at("b", &acceptor)).await;
            assert_eq!(here, LinkError::Versions { ours: a, theirs: b });
            assert_eq!(there, Some(LinkError::Versions { ours: b, theirs: a }));
        }
    }
    let error = LinkError::Versions { ours: older, theirs: 9.into() };
    assert_eq!(error.to_string(), "the peer speaks version 9 of the messages, and this node 4 to 5");
}

/// A release that no longer speaks the version of those that state none tells it, in their words.
#[tokio::test(flavor = "multi_thread")]
async fn a_former_release_is_told_of_a_version_that_is_gone() {
    let endpoint = listen(speaking("new", versions(5, 6)), loopback(), limits()).await;
    let (_, welcome) = replay(&endpoint, CONTROL, None).await;
    assert_eq!(wire::decode(&welcome), Ok(Welcome::Denied(Denial::Messages { ours: 4, theirs: 6 })));
    let told = LinkError::Versions { ours: versions(5, 6), theirs: 4.into() };
    assert_eq!(endpoint.accept().await.unwrap_err(), told);
}

/// The range is a part of the header, which the proof covers.
#[tokio::test(flavor = "multi_thread")]
async fn a_range_that_was_changed_under_way_is_refused() {
    let token = || Token::new(b"a token of sixteen").unwrap();
    let b = listen(speaking("b", versions(4, 9)).token(token()), loopback(), limits()).await;
    let relay = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let a = silent(speaking("a", versions(4, 9)).token(token()), limits()).await;
    let peer = PeerSettings::new("b", Address::Tcp(relay.local_addr().unwrap()));
    let (connected, ()) = tokio::join!(a.connect(&peer), async {
        let (mut from, _) = relay.accept().await.unwrap();
        let mut to = TcpStream::connect(address_of(&b)).await.unwrap();
        let mut header = [0; HEADER];
        to.read_exact(&mut header).await.unwrap();
        let changed = Header::decode(&header).unwrap().stating(versions(4, 4));
        from.write_all(&changed.encode()).await.unwrap();
        let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
    });
    assert!(matches!(connected, Err(LinkError::Token { .. })), "{connected:?}");
}

/// A later release: it states more versions, uses spare fields, and appends fields.
fn later(role: Role) -> [u8; HEADER] {
    let mut bytes = raw_header(role).stating(versions(4, 9)).encode();
    (bytes[12], bytes[60]) = (7, 7);
    bytes
}

async fn later_connects(to: &Endpoint, place: StreamPlace) -> (TcpStream, Welcome) {
    let mut stream = TcpStream::connect(address_of(to)).await.unwrap();
    let role = if matches!(place, StreamPlace::Control { .. }) { Role::Control } else { Role::Data };
    stream.write_all(&later(role)).await.unwrap();
    stream.write_all(Proof::NONE.as_bytes()).await.unwrap();
    stream.read_exact(&mut [0; HEADER + 1 + PROOF]).await.unwrap();
    let statement = Statement { message_bytes: 4 << 20, ..Statement::default() };
    let hello = Hello { name: "later".into(), messages: 5, fingerprint: [0; 16], statement, place };
    let appended = [&wire::encode(&hello, 1024).unwrap()[..], b"appended"].concat();
    stream.write_all(&frame(&appended)).await.unwrap();
    let welcome = wire::decode(&read_frame(&mut stream).await).unwrap();
    (stream, welcome)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_later_connector_appends_is_skipped() {
    let endpoint = listen(speaking("b", versions(4, 5)), loopback(), limits()).await;
    let (mut control, welcome) = later_connects(&endpoint, StreamPlace::Control { streams: 1 }).await;
    let Welcome::Accepted { link, messages: 5, .. } = welcome else { panic!("{welcome:?}") };
    let (_data, welcome) = later_connects(&endpoint, StreamPlace::Data { link, index: 0 }).await;
    assert!(matches!(welcome, Welcome::Accepted { .. }), "{welcome:?}");
    let link = endpoint.accept().await.unwrap();
    let message = [&wire::encode(&"known", 100).unwrap()[..], b"unknown"].concat();
    control.write_all(&frame(&message)).await.unwrap();
    assert_eq!(link.recv::<String>().await.unwrap(), "known");
}

/// Accepts one connection as a later release, and answers its `Hello` with these bytes.
async fn later_answers(listener: &TcpListener, welcome: &[u8]) -> TcpStream {
    let (mut stream, _) = listener.accept().await.unwrap();
    stream.write_all(&later(Role::Acceptor)).await.unwrap();
    stream.read_exact(&mut [0; HEADER + PROOF]).await.unwrap();
    stream.write_all(&[Verdict::Accepted as u8]).await.unwrap();
    stream.write_all(Proof::NONE.as_bytes()).await.unwrap();
    read_frame(&mut stream).await;
    stream.write_all(&frame(welcome)).await.unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_later_acceptor_appends_is_skipped() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let peer = PeerSettings::new("later", Address::Tcp(listener.local_addr().unwrap()));
    let a = silent(speaking("a", versions(4, 5)), limits()).await;
    let statement = Statement { message_bytes: 4 << 20, ..Statement::default() };
    let accepted = |messages| {
        let (name, fingerprint) = ("later".to_owned(), [0; 16]);
        let welcome = Welcome::Accepted { name, messages, fingerprint, statement, link: 1, streams: 1 };
        [&wire::encode(&welcome, 1024).unwrap()[..], b"appended"].concat()
    };
    let answers = async {
        (later_answers(&listener, &accepted(5)).await, later_answers(&listener, &accepted(5)).await)
    };
    let (link, mut answers) = tokio::join!(a.connect(&peer), answers);
    let link = link.unwrap();
    assert_eq!((link.peer().messages, link.peer().versions), (5, Some(versions(4, 9))));
    let message = [&wire::encode(&"known", 100).unwrap()[..], b"unknown"].concat();
    answers.0.write_all(&frame(&message)).await.unwrap();
    assert_eq!(link.recv::<String>().await.unwrap(), "known");
    // It must keep to the version of the link, too.
    let other = accepted(4);
    let (refused, _answered) = tokio::join!(a.connect(&peer), later_answers(&listener, &other));
    let invalid = WireError::Invalid { what: "the version of the messages", got: 4 };
    assert_eq!(refused.unwrap_err(), invalid.into());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reason_of_a_later_release_is_shown_by_its_number() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let peer = PeerSettings::new("later", Address::Tcp(listener.local_addr().unwrap()));
    let a = silent(speaking("a", versions(4, 5)), limits()).await;
    // The ninth reason has a number of fields that this release cannot know.
    let (refused, _answered) = tokio::join!(a.connect(&peer), later_answers(&listener, &[1, 9, 1, 2, 3]));
    let error = refused.unwrap_err();
    assert_eq!(error, LinkError::Denied(Denial::Unknown(9)));
    let text = "the peer refused the link: for a reason that this release does not know: 9";
    assert_eq!(error.to_string(), text);
}
