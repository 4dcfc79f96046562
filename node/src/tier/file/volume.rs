//! The files below a store: positioned reads and writes, direct where the file system allows it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// A file, or what replaces it in tests.
pub(super) trait Volume: Send + Sync + 'static {
    /// Fills `into` from an offset; an error of kind `UnexpectedEof` if the file is shorter.
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()>;

    /// Writes all bytes at an offset.
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;

    /// Returns the size in bytes.
    fn size(&self) -> io::Result<u64>;

    /// Cuts the file, or extends it by zeros that take no space.
    fn set_size(&self, bytes: u64) -> io::Result<()>;

    /// Returns when all bytes and the size are on the medium.
    fn sync(&self) -> io::Result<()>;
}

impl Volume for File {
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.read_exact_at(into, at)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.write_all_at(bytes, at)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn set_size(&self, bytes: u64) -> io::Result<()> {
        self.set_len(bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }
}

/// A file without the page cache, until its file system refuses an operation: from then on, with
/// it.
#[cfg(target_os = "linux")]
pub(super) struct Direct(File);

#[cfg(target_os = "linux")]
impl Direct {
    fn try_direct(&self, operation: &mut dyn FnMut(&File) -> io::Result<()>) -> io::Result<()> {
        use std::os::fd::AsRawFd;
        match operation(&self.0) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                // SAFETY: a system call without pointers, on a descriptor that `self` keeps open.
                let flags = unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_GETFL) };
                let buffered = flags & !libc::O_DIRECT;
                // SAFETY: as above.
                if flags < 0 || unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_SETFL, buffered) } < 0 {
                    return Err(error);
                }
                operation(&self.0)
            }
            result => result,
        }
    }
}

#[cfg(target_os = "linux")]
impl Volume for Direct {
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.try_direct(&mut |file| file.read_exact_at(into, at))
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.try_direct(&mut |file| file.write_all_at(bytes, at))
    }

    fn size(&self) -> io::Result<u64> {
        self.0.size()
    }

    fn set_size(&self, bytes: u64) -> io::Result<()> {
        self.0.set_size(bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options
}

/// Opens a file that the page cache holds. It may not be a symbolic link, nor a device.
pub(super) fn open(path: &Path) -> io::Result<File> {
    open_with(path, 0)
}

fn open_with(path: &Path, flags: libc::c_int) -> io::Result<File> {
    let file = options().custom_flags(libc::O_NOFOLLOW | flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    Ok(file)
}

/// Opens a file without the page cache if its file system has direct I/O (tmpfs, for example, has
/// none). Buffers, offsets and sizes must be multiples of [`ALIGN`](super::buffers::ALIGN).
#[cfg(target_os = "linux")]
pub(super) fn open_direct(path: &Path) -> io::Result<Direct> {
    // Some file systems refuse the flag, and others the first operation.
    match open_with(path, libc::O_DIRECT) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => open(path).map(Direct),
        result => result.map(Direct),
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn open_direct(path: &Path) -> io::Result<File> {
    open(path)
}

/// A locked file. Dropping it releases the lock; the system does when the process ends, however it
/// ends.
#[derive(Debug)]
pub(super) struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing would not do: a process that another thread forks has a copy of the descriptor,
        // at least until it executes a program, and the lock is held as long as any copy is open.
        let _ = flock(&self.0, libc::LOCK_UN);
    }
}

/// Opens and locks a file. `None` if another handle has the lock.
pub(super) fn lock(path: &Path) -> io::Result<Option<Lock>> {
    let file = open(path)?;
    match flock(&file, libc::LOCK_EX | libc::LOCK_NB) {
        Ok(()) => Ok(Some(Lock(file))),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

fn flock(file: &File, operation: libc::c_int) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    // SAFETY: a system call without pointers, on a descriptor that `file` keeps open.
    match unsafe { libc::flock(file.as_raw_fd(), operation) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::buffers::{ALIGN, Buffers};
    use super::*;

    #[test]
    fn a_file_with_and_without_the_page_cache() {
        // On Linux, /dev/shm refuses direct I/O.
        for folder in [std::env::temp_dir(), "/dev/shm".into()].iter().filter(|folder| folder.is_dir()) {
            let folder = tempfile::tempdir_in(folder).unwrap();
            let file = open_direct(&folder.path().join("values")).unwrap();
            let mut buffer = Buffers::new(0).take(2 * ALIGN);
            buffer.fill(9);
            Volume::write_at(&file, &buffer, ALIGN as u64).unwrap();
            buffer.fill(0);
            Volume::read_at(&file, &mut buffer, ALIGN as u64).unwrap();
            assert!(buffer.iter().all(|byte| *byte == 9));
            assert_eq!(file.size().unwrap(), 3 * ALIGN as u64);
            let error = Volume::read_at(&file, &mut buffer, 2 * ALIGN as u64).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        }
    }

    /// What direct I/O refuses goes through the page cache, from then on.
    #[test]
    fn direct_operations_that_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = open_direct(&folder.path().join("values")).unwrap();
        let mut buffer = Buffers::new(0).take(ALIGN);
        buffer.fill(7);
        file.write_at(&buffer, 0).unwrap();
        file.write_at(&buffer[..100], 50).unwrap();
        file.read_at(&mut buffer[1..], 1).unwrap();
        assert!(buffer.iter().all(|byte| *byte == 7));
    }

    #[test]
    fn links_and_devices_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("index");
        std::os::unix::fs::symlink(folder.path().join("other"), &path).unwrap();
        assert!(open(&path).is_err() && open_direct(&path).is_err());
        assert!(open(Path::new("/dev/null")).unwrap_err().to_string().contains("regular"));
    }

    #[test]
    fn a_lock_is_for_one_handle() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let first = lock(&path).unwrap().unwrap();
        assert!(lock(&path).unwrap().is_none());
        // What a process that is being forked has.
        let copy = first.0.try_clone().unwrap();
        drop(first);
        assert!(lock(&path).unwrap().is_some());
        drop(copy);
    }
}
