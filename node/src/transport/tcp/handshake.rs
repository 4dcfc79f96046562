//! Authenticates connections: header, proof, first message.
//!
//! The docs of [`wire`](crate::wire) have the order of the messages.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use super::address::Address;
use super::error::{CertificateProblem, LinkError, Side, tls_error};
use super::random::random;
use super::settings::{Identity, PeerSettings};
use super::socket::{Socket, SocketKind};
use super::tls;
use crate::wire::{
    self, FRAME_HEAD, FrameHead, FrameKind, HEADER, Header, PROOF, Proof, Role, Verdict, WIRE_VERSION,
};

const HELLO_MAX: usize = 1024;

/// First bytes of TLS records from a side that expects TLS: an alert, a hello.
const TLS_RECORDS: [u8; 2] = [0x15, 0x16];

/// Bytes of such a peer that are read.
const DRAINED: usize = 16 << 10;

/// Time for discarding a TLS hello: closing with unread bytes would reset the connection.
const DRAIN: Duration = Duration::from_secs(1);

/// Opens a connection to a peer, encrypted if this node has certificates.
pub(super) async fn open(identity: &Identity, peer: &PeerSettings) -> Result<Socket, LinkError> {
    let what = || format!("connect to {}", peer.address);
    match &peer.address {
        Address::Unix(path) => {
            let stream = UnixStream::connect(path).await.map_err(|error| LinkError::io(&what(), error))?;
            same_user(&stream)?;
            Ok(Socket::Unix(stream))
        }
        Address::Named { .. } => unreachable!("a name is resolved before"),
        Address::Tcp(address) => {
            let stream = TcpStream::connect(address).await.map_err(|error| LinkError::io(&what(), error))?;
            stream.set_nodelay(true).map_err(|error| LinkError::io(&what(), error))?;
            let name = peer.server_name.as_deref().unwrap_or(&peer.name);
            tls::connect(identity.tls.as_deref(), name, stream).await
        }
    }
}

/// Checks that the process at the other end of a Unix socket has this user, or is root.
pub(super) fn same_user(stream: &UnixStream) -> Result<(), LinkError> {
    let theirs = stream.peer_cred().map_err(|error| LinkError::io("the peer's user", error))?.uid();
    // SAFETY: a query without arguments.
    let ours = unsafe { libc::geteuid() };
    if theirs == ours || theirs == 0 { Ok(()) } else { Err(LinkError::OtherUser { ours, theirs }) }
}

/// Exchanges headers and proofs as the connector. Returns the acceptor's header.
pub(super) async fn introduce(
    socket: &mut Socket,
    identity: &Identity,
    role: Role,
) -> Result<Header, LinkError> {
    let (ours, is_tls) = (header(identity, role)?, socket.kind() == SocketKind::Tls);
    if !is_tls {
        write(socket, &ours).await?;
    }
    let theirs = read_header(socket).await?;
    if is_tls {
        write(socket, &ours).await?;
    }
    let header = Header::decode(&theirs)?;
    check_token_sides(identity, &header)?;
    let exported = exported(socket)?;
    let prove = |of_connector| match &identity.token {
        Some(token) => token.0[0].prove(of_connector, [&ours, &theirs], &exported),
        None => Proof::NONE,
    };
    write(socket, prove(true).as_bytes()).await?;
    let mut answer = [0; 1 + PROOF];
    read(socket, &mut answer).await?;
    if Verdict::decode(answer[0])? == Verdict::WrongToken {
        return Err(LinkError::Token { side: Side::Ours, missing: false });
    }
    let proof = answer[1..].try_into().expect("as long as a proof");
    if Proof::from_bytes(proof) != prove(false) {
        return Err(LinkError::Token { side: Side::Theirs, missing: false });
    }
    Ok(header)
}

/// Exchanges headers and proofs as the acceptor. Returns the connector's header.
pub(super) async fn receive(socket: &mut Socket, identity: &Identity) -> Result<Header, LinkError> {
    let ours = header(identity, Role::Acceptor)?;
    write(socket, &ours).await?;
    let theirs = read_header(socket).await?;
    let header = Header::decode(&theirs)?;
    if header.role == Role::Acceptor {
        return Err(wire::WireError::Invalid { what: "the role of a connector", got: 0 }.into());
    }
    check_token_sides(identity, &header)?;
    let mut proof = [0; PROOF];
    read(socket, &mut proof).await?;
    let exported = exported(socket)?;
    // Answered with the token that the connector has proven to know.
    let answered = match &identity.token {
        Some(token) => token.0.iter().find_map(|secret| {
            let prove = |of_connector| secret.prove(of_connector, [&theirs, &ours], &exported);
            (Proof::from_bytes(proof) == prove(true)).then(|| prove(false))
        }),
        None => (Proof::from_bytes(proof) == Proof::NONE).then_some(Proof::NONE),
    };
    let mut answer = [Verdict::WrongToken as u8; 1 + PROOF];
    let Some(proof) = answered else {
        write(socket, &answer).await?;
        return Err(LinkError::Token { side: Side::Theirs, missing: false });
    };
    answer[0] = Verdict::Accepted as u8;
    answer[1..].copy_from_slice(proof.as_bytes());
    write(socket, &answer).await?;
    Ok(header)
}

fn header(identity: &Identity, role: Role) -> Result<[u8; HEADER], LinkError> {
    let header = Header {
        version: WIRE_VERSION,
        role,
        has_token: identity.token.is_some(),
        incarnation: identity.incarnation,
        nonce: random()?,
    };
    Ok(header.stating(identity.messages).encode())
}

/// Receives the peer's header. A TLS alert is shorter, so the first byte decides.
async fn read_header(socket: &mut Socket) -> Result<[u8; HEADER], LinkError> {
    let mut bytes = [0; HEADER];
    read(socket, &mut bytes[..1]).await?;
    if TLS_RECORDS.contains(&bytes[0]) {
        let rest = async {
            let mut left = DRAINED;
            while let Ok(read @ 1..) = socket.read(&mut bytes).await
                && left > 0
            {
                left = left.saturating_sub(read);
            }
        };
        let _ = tokio::time::timeout(DRAIN, rest).await;
        return Err(LinkError::PeerExpectsTls);
    }
    read(socket, &mut bytes[1..]).await?;
    Ok(bytes)
}

fn check_token_sides(identity: &Identity, theirs: &Header) -> Result<(), LinkError> {
    match (identity.token.is_some(), theirs.has_token) {
        (true, false) => Err(LinkError::Token { side: Side::Theirs, missing: true }),
        (false, true) => Err(LinkError::Token { side: Side::Ours, missing: true }),
        _ => Ok(()),
    }
}

fn exported(socket: &Socket) -> Result<[u8; 32], LinkError> {
    socket.exported().map_err(|error| tls_error(&error))
}

/// Returns the error for a connector whose certificate has another name.
pub(super) fn misnamed() -> LinkError {
    LinkError::Certificate { side: Side::Theirs, problem: CertificateProblem::WrongName }
}

pub(super) async fn tell<M: Serialize>(socket: &mut Socket, message: &M) -> Result<(), LinkError> {
    let message = wire::encode(message, HELLO_MAX)?;
    let head = FrameHead { kind: FrameKind::Message, length: message.len() };
    write(socket, &[&head.encode()[..], &message].concat()).await
}

/// Receives a first message of a peer that sent this header.
pub(super) async fn hear<M: DeserializeOwned>(socket: &mut Socket, of: &Header) -> Result<M, LinkError> {
    let mut head = [0; FRAME_HEAD];
    read(socket, &mut head).await?;
    let head = FrameHead::decode(&head, HELLO_MAX)?;
    let mut message = vec![0; head.length];
    read(socket, &mut message).await?;
    Ok(wire::decode_of(&message, of.stated().is_some())?)
}

async fn read(socket: &mut Socket, bytes: &mut [u8]) -> Result<(), LinkError> {
    let read = socket.read_exact(bytes).await;
    read.map(drop).map_err(|error| LinkError::io("read from the peer", error))
}

async fn write(socket: &mut Socket, bytes: &[u8]) -> Result<(), LinkError> {
    let written = async {
        socket.write_all(bytes).await?;
        socket.flush().await
    };
    written.await.map_err(|error| LinkError::io("write to the peer", error))
}

pub(super) async fn within<T>(
    time: Duration,
    what: &'static str,
    part: impl Future<Output = Result<T, LinkError>>,
) -> Result<T, LinkError> {
    let slow = LinkError::Slow { what, waited_ms: time.as_millis() as u64 };
    tokio::time::timeout(time, part).await.unwrap_or(Err(slow))
}
