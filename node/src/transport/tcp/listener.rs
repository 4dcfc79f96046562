use std::fs::{self, File, Permissions};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::{Path, PathBuf};

use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use super::address::Address;
use super::pending::Source;

/// File of a Unix socket, with its device and inode; removed on drop.
#[derive(Debug)]
pub(crate) struct SocketFile(PathBuf, Option<(u64, u64)>);

impl SocketFile {
    fn new(path: &Path) -> Self {
        Self(path.to_owned(), file_of(path))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Another process may have bound the path meanwhile.
        if self.1.is_some() && file_of(&self.0) == self.1 {
            // It may be gone; an error cannot be reported here.
            let _ = fs::remove_file(&self.0);
        }
    }
}

fn file_of(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// Binds a Unix socket that only this user may open. Replaces a stale file.
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
    // On Linux the file gets the mode of the socket, so no connection can precede it.
    File::from(OwnedFd::from(socket.try_clone()?)).set_permissions(only_ours())?;
    socket.bind(&address)?;
    let file = SocketFile::new(path);
    fs::set_permissions(path, only_ours())?;
    socket.listen(1024)?;
    Ok((OwnedFd::from(socket).into(), file))
}

pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

pub(crate) enum Accepted {
    Tcp(TcpStream, SocketAddr),
    Unix(UnixStream),
}

impl Accepted {
    pub(super) fn source(&self) -> Source {
        match self {
            Self::Tcp(_, address) => Source::of(address.ip()),
            Self::Unix(_) => Source::Local,
        }
    }

    /// Returns the address of the other end; for a Unix socket, that of the listener.
    pub(super) fn address(&self, listener: &Address) -> Address {
        match self {
            Self::Tcp(_, address) => Address::Tcp(*address),
            Self::Unix(_) => listener.clone(),
        }
    }
}

impl Listener {
    pub(crate) async fn accept(&self) -> io::Result<Accepted> {
        Ok(match self {
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                Accepted::Tcp(stream, address)
            }
            Self::Unix(listener) => Accepted::Unix(listener.accept().await?.0),
        })
    }
}
