//! The start of a connection: greeting and `READY`.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::frame::{Inbound, ZmtpError, command_bytes, read};

/// Timeout of a handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// Bytes of a greeting, and offsets in it.
const GREETING: usize = 64;
const SIGNATURE_END: usize = 9;
const VERSION: usize = 10;
const MECHANISM: std::ops::Range<usize> = 12..32;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::events) enum SocketType {
    Pub,
    Router,
}

impl SocketType {
    fn name(self) -> &'static [u8] {
        match self {
            Self::Pub => b"PUB",
            Self::Router => b"ROUTER",
        }
    }

    fn peers(self) -> &'static [&'static [u8]] {
        match self {
            Self::Pub => &[b"SUB", b"XSUB"],
            Self::Router => &[b"REQ", b"DEALER", b"ROUTER"],
        }
    }
}

pub(in crate::events) async fn handshake(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    own: SocketType,
) -> Result<(), ZmtpError> {
    timeout(HANDSHAKE, greet(stream, own)).await.map_err(|_| ZmtpError::Slow(HANDSHAKE))?
}

async fn greet(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), own: SocketType) -> Result<(), ZmtpError> {
    stream.write_all(&greeting()).await?;
    let mut theirs = [0; GREETING];
    // Other protocols send less than 64 bytes: the signature is checked first.
    let (signature, rest) = theirs.split_at_mut(SIGNATURE_END + 1);
    stream.read_exact(signature).await?;
    if signature[0] != 0xff || signature[SIGNATURE_END] != 0x7f {
        return Err(ZmtpError::Greeting("no signature"));
    }
    stream.read_exact(rest).await?;
    if theirs[VERSION] < 3 {
        return Err(ZmtpError::Greeting("an older version"));
    }
    if theirs[MECHANISM] != greeting()[MECHANISM] {
        return Err(ZmtpError::Greeting("another mechanism than NULL"));
    }
    let mut properties = property(b"Socket-Type", own.name());
    if own == SocketType::Router {
        properties.extend(property(b"Identity", b""));
    }
    stream.write_all(&command_bytes(b"READY", &properties)).await?;
    match read(stream).await? {
        Inbound::Command { name, body } if name == b"READY" => check(own, &body),
        _ => Err(ZmtpError::Malformed("no READY")),
    }
}

fn greeting() -> [u8; GREETING] {
    let mut bytes = [0; GREETING];
    (bytes[0], bytes[SIGNATURE_END], bytes[VERSION]) = (0xff, 0x7f, 3);
    bytes[MECHANISM][..4].copy_from_slice(b"NULL");
    bytes
}

fn property(name: &[u8], value: &[u8]) -> Vec<u8> {
    let length = (value.len() as u32).to_be_bytes();
    [&[name.len() as u8][..], name, &length, value].concat()
}

fn check(own: SocketType, mut properties: &[u8]) -> Result<(), ZmtpError> {
    let short = || ZmtpError::Malformed("a short property");
    while let Some((&length, rest)) = properties.split_first() {
        let (name, rest) = rest.split_at_checked(length.into()).ok_or_else(short)?;
        let (length, rest) = rest.split_first_chunk::<4>().ok_or_else(short)?;
        let length = u32::from_be_bytes(*length) as usize;
        let (value, rest) = rest.split_at_checked(length).ok_or_else(short)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return match own.peers().contains(&value) {
                true => Ok(()),
                false => Err(ZmtpError::SocketType(String::from_utf8_lossy(value).into_owned())),
            };
        }
        properties = rest;
    }
    Err(ZmtpError::Malformed("no Socket-Type"))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn answer(bytes: Vec<u8>) -> String {
        let (mut here, mut there) = tokio::io::duplex(4096);
        there.write_all(&bytes).await.unwrap();
        there.shutdown().await.unwrap();
        match greet(&mut here, SocketType::Pub).await {
            Ok(()) => "ok".into(),
            Err(error) => error.to_string(),
        }
    }

    fn ready(properties: &[u8]) -> Vec<u8> {
        [&greeting()[..], &command_bytes(b"READY", properties)].concat()
    }

    #[tokio::test]
    async fn only_fitting_sockets_are_greeted() {
        let sub = [property(b"Identity", b"me"), property(b"socket-type", b"SUB")].concat();
        assert_eq!(answer(ready(&sub)).await, "ok");
        assert!(answer(ready(&property(b"Socket-Type", b"REQ"))).await.contains("REQ"));
        assert!(answer(ready(b"")).await.contains("no Socket-Type"));
        assert!(answer(ready(&sub[..5])).await.contains("a short property"));
        let huge = [&[1, b'x'][..], &[0xff; 4]].concat();
        assert!(answer(ready(&huge)).await.contains("a short property"));
        assert!(answer(b"GET / HTTP/1.1\r\n\r\n".to_vec()).await.contains("no signature"));
        let mut old = greeting();
        old[VERSION] = 1;
        assert!(answer(old.into()).await.contains("an older version"));
        let mut plain = greeting();
        plain[MECHANISM][..5].copy_from_slice(b"PLAIN");
        assert!(answer(plain.into()).await.contains("NULL"));
        assert!(answer(vec![0xff; 3]).await.contains("eof"));
    }
}
