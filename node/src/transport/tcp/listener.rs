//! Listeners, and the files of Unix sockets.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::{Path, PathBuf};

use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use super::pending::Source;

/// File of a Unix socket; removed on drop.
#[derive(Debug)]
pub(crate) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // It may be gone; there is no other way to say so here.
        let _ = fs::remove_file(&self.0);
    }
}

/// Binds a Unix socket that only this user may open. Replaces the file of a process that is gone.
///
/// # Errors
/// The system's error; [`io::ErrorKind::AddrInUse`] if a process listens there.
pub(crate) fn bind_unix(path: &Path) -> io::Result<(StdUnixListener, SocketFile)> {
    let address = SockAddr::unix(path)?;
    let open = || {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true).map(|()| socket)
    };
    if fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket()) {
        match open()?.connect(&address) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path)?,
            _ => return Err(io::ErrorKind::AddrInUse.into()),
        }
    }
    let socket = open()?;
    let only_ours = || Permissions::from_mode(0o600);
    // On Linux the file is made with the mode of the socket: nobody gets in before it is set.
    File::from(OwnedFd::from(socket.try_clone()?)).set_permissions(only_ours())?;
    socket.bind(&address)?;
    let file = SocketFile(path.to_owned());
    fs::set_permissions(path, only_ours())?;
    socket.listen(1024)?;
    Ok((OwnedFd::from(socket).into(), file))
}

/// A listener of either kind.
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// A connection that was accepted.
pub(crate) enum Accepted {
    Tcp(TcpStream, Source),
    Unix(UnixStream),
}

impl Accepted {
    pub(super) fn source(&self) -> Source {
        match self {
            Self::Tcp(_, source) => *source,
            Self::Unix(_) => Source::Local,
        }
    }
}

impl Listener {
    pub(crate) async fn accept(&self) -> io::Result<Accepted> {
        Ok(match self {
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                Accepted::Tcp(stream, Source::of(address.ip()))
            }
            Self::Unix(listener) => Accepted::Unix(listener.accept().await?.0),
        })
    }
}
