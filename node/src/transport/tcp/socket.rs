use std::io::{self, IoSlice, IoSliceMut};
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustls::pki_types::CertificateDer;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, Interest, ReadBuf, ReadHalf, WriteHalf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsStream;

pub(crate) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// Kind of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SocketKind {
    /// TCP without encryption.
    Tcp,
    /// TCP with TLS.
    Tls,
    /// A Unix socket.
    Unix,
}

impl Socket {
    pub(super) fn kind(&self) -> SocketKind {
        match self {
            Self::Tcp(_) => SocketKind::Tcp,
            Self::Unix(_) => SocketKind::Unix,
            Self::Tls(_) => SocketKind::Tls,
        }
    }

    /// Returns keying material that only the two ends of a TLS connection know; zeros without TLS.
    pub(super) fn exported(&self) -> Result<[u8; 32], rustls::Error> {
        let Self::Tls(stream) = self else { return Ok([0; 32]) };
        const LABEL: &[u8] = b"EXPORTER-kvpool-node";
        match &**stream {
            TlsStream::Client(stream) => stream.get_ref().1.export_keying_material([0; 32], LABEL, None),
            TlsStream::Server(stream) => stream.get_ref().1.export_keying_material([0; 32], LABEL, None),
        }
    }

    pub(super) fn certificates(&self) -> Option<&[CertificateDer<'static>]> {
        let Self::Tls(stream) = self else { return None };
        stream.get_ref().1.peer_certificates()
    }

    pub(super) fn split(self) -> (ReadSide, WriteSide) {
        match self {
            Self::Tcp(stream) => {
                let stream = Arc::new(stream);
                (ReadSide::Tcp(stream.clone()), WriteSide::Tcp(stream))
            }
            Self::Unix(stream) => {
                let stream = Arc::new(stream);
                (ReadSide::Unix(stream.clone()), WriteSide::Unix(stream))
            }
            Self::Tls(stream) => {
                let (read, write) = tokio::io::split(*stream);
                (ReadSide::Tls(read), WriteSide::Tls(write))
            }
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Unix(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Unix(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Self::Unix(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

/// A non-blocking system call that may move a part of the bytes. After a part, the socket is
/// drained or full, and the next call would only fail with `WouldBlock`. Tokio clears a socket's
/// readiness if `try_io` returns that error, so a part is reported that way. Tokio compares with
/// the state before the call, so no later event is lost. Its own reads and writes of a single slice
/// do the same; vectored ones do not.
struct Part {
    whole: usize,
    moved: Option<usize>,
}

impl Part {
    /// Returns the result of the call, or `WouldBlock` after a part.
    fn note(&mut self, result: io::Result<usize>) -> io::Result<usize> {
        // Only where the system's notification is edge-triggered.
        const REPORTS_CHANGES: bool = cfg!(any(target_os = "linux", target_vendor = "apple"));
        match result {
            Ok(moved) if REPORTS_CHANGES && 0 < moved && moved < self.whole => {
                self.moved = Some(moved);
                Err(io::ErrorKind::WouldBlock.into())
            }
            result => result,
        }
    }
}

/// Makes a call for `whole` bytes, within which [`Part::note`] records the system's result.
fn part_of(whole: usize, call: impl FnOnce(&mut Part) -> io::Result<usize>) -> io::Result<usize> {
    let mut part = Part { whole, moved: None };
    let result = call(&mut part);
    part.moved.map_or(result, Ok)
}

fn length<S: std::ops::Deref<Target = [u8]>>(slices: &[S]) -> usize {
    slices.iter().map(|slice| slice.len()).sum()
}

pub(super) enum ReadSide {
    Tcp(Arc<TcpStream>),
    Unix(Arc<UnixStream>),
    Tls(ReadHalf<TlsStream<TcpStream>>),
}

impl ReadSide {
    /// Waits until the connection is readable; then makes one non-blocking read. `read` has the
    /// buffers of `buffers` only during that read. Returns `None` if `buffers` has no more.
    pub(super) fn poll_into<B: Buffers>(
        &mut self,
        cx: &mut Context<'_>,
        buffers: &mut B,
    ) -> Poll<io::Result<Option<usize>>> {
        loop {
            match self {
                Self::Tcp(stream) => ready!(stream.poll_read_ready(cx))?,
                Self::Unix(stream) => ready!(stream.poll_read_ready(cx))?,
                Self::Tls(_) => {}
            }
            let read = buffers.with(|slices| match self {
                Self::Tcp(stream) => Poll::Ready(part_of(length(slices), |part| {
                    stream.try_io(Interest::READABLE, || part.note(stream.try_read_vectored(slices)))
                })),
                Self::Unix(stream) => Poll::Ready(part_of(length(slices), |part| {
                    stream.try_io(Interest::READABLE, || part.note(stream.try_read_vectored(slices)))
                })),
                Self::Tls(stream) => {
                    let mut buffer = ReadBuf::new(&mut slices[0]);
                    Pin::new(stream).poll_read(cx, &mut buffer).map_ok(|()| buffer.filled().len())
                }
            });
            match read {
                None => return Poll::Ready(Ok(None)),
                Some(Poll::Pending) => return Poll::Pending,
                Some(Poll::Ready(Err(error))) if error.kind() == io::ErrorKind::WouldBlock => {}
                Some(Poll::Ready(Ok(0))) => return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())),
                Some(Poll::Ready(read)) => return Poll::Ready(read.map(Some)),
            }
        }
    }

    /// Reads up to the buffer's length.
    pub(super) async fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut own = Own(buffer);
        let read = std::future::poll_fn(|cx| self.poll_into(cx, &mut own)).await?;
        Ok(read.expect("an own buffer is always there"))
    }

    pub(super) async fn read_exact(&mut self, mut buffer: &mut [u8]) -> io::Result<()> {
        while !buffer.is_empty() {
            let read = self.read(buffer).await?;
            buffer = &mut buffer[read..];
        }
        Ok(())
    }
}

/// Lends memory for one read at a time.
pub(super) trait Buffers {
    /// Calls `read` with at least one non-empty slice; `None` if the memory is gone.
    fn with<R>(&mut self, read: impl FnOnce(&mut [IoSliceMut<'_>]) -> R) -> Option<R>;
}

struct Own<'a>(&'a mut [u8]);

impl Buffers for Own<'_> {
    fn with<R>(&mut self, read: impl FnOnce(&mut [IoSliceMut<'_>]) -> R) -> Option<R> {
        Some(read(&mut [IoSliceMut::new(self.0)]))
    }
}

/// The write half of a connection.
pub(super) enum WriteSide {
    Tcp(Arc<TcpStream>),
    Unix(Arc<UnixStream>),
    Tls(WriteHalf<TlsStream<TcpStream>>),
}

impl WriteSide {
    /// Waits until the connection is writable; then makes one non-blocking write, as
    /// [`ReadSide::poll_into`].
    pub(super) fn poll_from<S: Sources>(
        &mut self,
        cx: &mut Context<'_>,
        sources: &mut S,
    ) -> Poll<io::Result<Option<usize>>> {
        loop {
            match self {
                Self::Tcp(stream) => ready!(stream.poll_write_ready(cx))?,
                Self::Unix(stream) => ready!(stream.poll_write_ready(cx))?,
                Self::Tls(_) => {}
            }
            let written = sources.with(|slices| match self {
                Self::Tcp(stream) => Poll::Ready(part_of(length(slices), |part| {
                    stream.try_io(Interest::WRITABLE, || part.note(stream.try_write_vectored(slices)))
                })),
                Self::Unix(stream) => Poll::Ready(part_of(length(slices), |part| {
                    stream.try_io(Interest::WRITABLE, || part.note(stream.try_write_vectored(slices)))
                })),
                Self::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
            });
            match written {
                None => return Poll::Ready(Ok(None)),
                Some(Poll::Pending) => return Poll::Pending,
                Some(Poll::Ready(Err(error))) if error.kind() == io::ErrorKind::WouldBlock => {}
                Some(Poll::Ready(Ok(0))) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Some(Poll::Ready(written)) => return Poll::Ready(written.map(Some)),
            }
        }
    }

    pub(super) async fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut own = Bytes(bytes);
            let written = std::future::poll_fn(|cx| self.poll_from(cx, &mut own)).await?;
            bytes = &bytes[written.expect("own bytes are always there")..];
        }
        Ok(())
    }

    pub(super) async fn flush(&mut self) -> io::Result<()> {
        match self {
            // These do not buffer.
            Self::Tcp(_) | Self::Unix(_) => Ok(()),
            Self::Tls(stream) => AsyncWriteExt::flush(stream).await,
        }
    }

    /// Ends the write direction. The read direction stays open.
    pub(super) async fn shutdown(&mut self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => SockRef::from(&**stream).shutdown(Shutdown::Write),
            Self::Unix(stream) => SockRef::from(&**stream).shutdown(Shutdown::Write),
            Self::Tls(stream) => AsyncWriteExt::shutdown(stream).await,
        }
    }
}

/// Lends bytes for one write at a time.
pub(super) trait Sources {
    /// Calls `write` with at least one non-empty slice; `None` if the memory is gone.
    fn with<R>(&mut self, write: impl FnOnce(&[IoSlice<'_>]) -> R) -> Option<R>;
}

struct Bytes<'a>(&'a [u8]);

impl Sources for Bytes<'_> {
    fn with<R>(&mut self, write: impl FnOnce(&[IoSlice<'_>]) -> R) -> Option<R> {
        Some(write(&[IoSlice::new(self.0)]))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    /// Memory that counts its uses.
    struct Counted(Vec<u8>, usize);

    impl Buffers for Counted {
        fn with<R>(&mut self, read: impl FnOnce(&mut [IoSliceMut<'_>]) -> R) -> Option<R> {
            self.1 += 1;
            Some(read(&mut [IoSliceMut::new(&mut self.0)]))
        }
    }

    impl Sources for Counted {
        fn with<R>(&mut self, write: impl FnOnce(&[IoSlice<'_>]) -> R) -> Option<R> {
            self.1 += 1;
            Some(write(&[IoSlice::new(&self.0)]))
        }
    }

    /// After a part, no system call is made until the system reports the socket as ready.
    #[cfg(any(target_os = "linux", target_vendor = "apple"))]
    #[tokio::test]
    async fn a_full_or_drained_socket_is_not_asked_again() {
        let (one, other) = UnixStream::pair().unwrap();
        let ((_, mut write), (mut read, _)) = (Socket::Unix(one).split(), Socket::Unix(other).split());
        let mut from = Counted(vec![7; 8 << 20], 0);
        let written = poll_fn(|cx| write.poll_from(cx, &mut from)).await.unwrap().unwrap();
        assert!(written < 8 << 20, "more than a socket takes");
        let again = poll_fn(|cx| Poll::Ready(write.poll_from(cx, &mut from))).await;
        assert!(again.is_pending() && from.1 == 1, "{} writes", from.1);
        let (mut into, mut total) = (Counted(vec![0; 8 << 20], 0), 0);
        while total < written {
            total += poll_fn(|cx| read.poll_into(cx, &mut into)).await.unwrap().unwrap();
        }
        let calls = into.1;
        let again = poll_fn(|cx| Poll::Ready(read.poll_into(cx, &mut into))).await;
        assert!(again.is_pending() && into.1 == calls, "{} reads instead of {calls}", into.1);
        // Both continue when the socket is ready.
        let more = poll_fn(|cx| write.poll_from(cx, &mut from)).await.unwrap().unwrap();
        let got = poll_fn(|cx| read.poll_into(cx, &mut into)).await.unwrap().unwrap();
        assert!(more > 0 && got > 0);
    }
}
