use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

/// Maximum length of a received body: subscriptions and requests are short.
pub(in crate::events) const BODY_MAX: usize = 1024;

pub(in crate::events) const FRAMES_MAX: usize = 4;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
pub(in crate::events) enum ZmtpError {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error("the peer does not speak ZMTP 3: {0}")]
    Greeting(&'static str),
    #[error("the peer is a {0:?} socket")]
    SocketType(String),
    #[error("malformed: {0}")]
    Malformed(&'static str),
    #[error("{0} of {1} at most")]
    TooLong(&'static str, usize),
    #[error("no handshake within {0:?}")]
    Slow(std::time::Duration),
    #[error("it said nothing, and another one came or its time was over")]
    Silent,
    #[error("there is no place")]
    Full,
    #[error("it took nothing of what was sent for {0:?}")]
    Stuck(std::time::Duration),
}

#[derive(PartialEq, Eq, Debug)]
pub(in crate::events) enum Inbound {
    Message(Vec<Vec<u8>>),
    Command { name: Vec<u8>, body: Vec<u8> },
}

pub(in crate::events) async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Result<Inbound, ZmtpError> {
    let mut frames = Vec::new();
    loop {
        let flags = stream.read_u8().await?;
        if flags & !(MORE | LONG | COMMAND) != 0 {
            return Err(ZmtpError::Malformed("unknown flags of a frame"));
        }
        let length = match flags & LONG {
            0 => u64::from(stream.read_u8().await?),
            _ => stream.read_u64().await?,
        };
        if length > BODY_MAX as u64 {
            return Err(ZmtpError::TooLong("bytes of a frame", BODY_MAX));
        }
        let mut body = vec![0; length as usize];
        stream.read_exact(&mut body).await?;
        if flags & COMMAND != 0 {
            if flags & MORE != 0 || !frames.is_empty() {
                return Err(ZmtpError::Malformed("a command within a message"));
            }
            return command(body);
        }
        frames.push(body);
        if flags & MORE == 0 {
            return Ok(Inbound::Message(frames));
        }
        if frames.len() == FRAMES_MAX {
            return Err(ZmtpError::TooLong("frames of a message", FRAMES_MAX));
        }
    }
}

fn command(bytes: Vec<u8>) -> Result<Inbound, ZmtpError> {
    let short = ZmtpError::Malformed("a command without a name");
    let Some((&length, rest)) = bytes.split_first() else { return Err(short) };
    let Some((name, body)) = rest.split_at_checked(length.into()) else { return Err(short) };
    Ok(Inbound::Command { name: name.into(), body: body.into() })
}

fn head(to: &mut Vec<u8>, flags: u8, length: usize) {
    match u8::try_from(length) {
        Ok(length) => to.extend([flags, length]),
        Err(_) => {
            to.push(flags | LONG);
            to.extend((length as u64).to_be_bytes());
        }
    }
}

/// Returns the frames `first` and the head of the last one, whose body is not copied.
pub(in crate::events) fn multipart(first: &[&[u8]], last: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for body in first {
        head(&mut bytes, MORE, body.len());
        bytes.extend_from_slice(body);
    }
    head(&mut bytes, 0, last);
    bytes
}

pub(super) fn command_bytes(name: &[u8], body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    head(&mut bytes, COMMAND, 1 + name.len() + body.len());
    bytes.push(name.len() as u8);
    bytes.extend_from_slice(name);
    bytes.extend_from_slice(body);
    bytes
}

/// Answers a heartbeat. Its body has a time of 2 bytes, and data that is returned.
pub(in crate::events) async fn write_pong(
    stream: &mut (impl AsyncWrite + Unpin),
    ping: &[u8],
    patience: Duration,
) -> Result<(), ZmtpError> {
    let context = ping.get(2..).ok_or(ZmtpError::Malformed("a short PING"))?;
    write_all(stream, &command_bytes(b"PONG", context), patience).await
}

/// Writes all bytes. Fails if the peer accepts none for this time.
pub(in crate::events) async fn write_all(
    stream: &mut (impl AsyncWrite + Unpin),
    mut bytes: &[u8],
    patience: Duration,
) -> Result<(), ZmtpError> {
    while !bytes.is_empty() {
        let written = timeout(patience, stream.write(bytes)).await;
        match written.map_err(|_| ZmtpError::Stuck(patience))?? {
            0 => return Err(std::io::Error::from(std::io::ErrorKind::WriteZero).into()),
            written => bytes = &bytes[written..],
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn parse(bytes: &[u8]) -> Result<Inbound, String> {
        read(&mut &bytes[..]).await.map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn messages_are_read_as_they_were_written() {
        for last in [0, 1, 255, 256, BODY_MAX] {
            let body = vec![7; last];
            let bytes = [multipart(&[b"topic", b""], last), body.clone()].concat();
            assert_eq!(parse(&bytes).await, Ok(Inbound::Message(vec![b"topic".into(), vec![], body])));
        }
        let ping = command_bytes(b"PING", b"\0\x05context");
        assert_eq!(
            parse(&ping).await,
            Ok(Inbound::Command { name: b"PING".into(), body: b"\0\x05context".into() })
        );
        let mut pong = Vec::new();
        let patience = Duration::from_secs(20);
        write_pong(&mut pong, b"\0\x05context", patience).await.unwrap();
        assert_eq!(pong, command_bytes(b"PONG", b"context"));
        assert!(write_pong(&mut pong, b"\0", patience).await.is_err());
    }

    #[tokio::test]
    async fn what_is_too_long_or_malformed_is_refused_before_it_is_read() {
        for (bytes, reason) in [
            (&[2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff][..], "bytes of a frame"),
            (&[2, 0, 0, 0, 0, 0, 0, 4, 1][..], "bytes of a frame"),
            (&[8, 0][..], "unknown flags"),
            (&[5, 0][..], "a command within"),
            (&[1, 0, 4, 2, 1, b'x'][..], "a command within"),
            (&[4, 0][..], "without a name"),
            (&[4, 2, 9, b'x'][..], "without a name"),
            (&[1, 0, 1, 0, 1, 0, 1, 0, 0, 0][..], "frames of a message"),
            (&[0, 5, 1][..], "eof"),
            (&[][..], "end of file"),
        ] {
            let error = parse(bytes).await.unwrap_err();
            assert!(error.contains(reason), "{bytes:?}: {error}");
        }
    }

    /// Random bytes, some of them almost valid.
    #[tokio::test]
    async fn no_bytes_panic() {
        let mut rng = fastrand::Rng::with_seed(3);
        for _ in 0..20_000 {
            let length = rng.usize(0..40);
            let mut bytes: Vec<u8> = std::iter::repeat_with(|| rng.u8(0..9)).take(length).collect();
            if rng.bool() && length > 3 {
                let at = rng.usize(0..length);
                bytes[at] = rng.u8(..);
            }
            let _ = parse(&bytes).await;
        }
    }
}
