use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::path::Path;

/// Reads a regular file of at most `max` bytes.
///
/// A pipe is refused immediately: opening it would wait for a writer, and it could not be read
/// again at a reload.
///
/// # Errors
/// The system's error; [`io::ErrorKind::InvalidInput`] for anything but a file, and
/// [`io::ErrorKind::FileTooLarge`].
pub fn read_file(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is a folder"));
    }
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is a pipe or a device, not a file"));
    }
    let mut bytes = Vec::new();
    file.take(max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max {
        let size = metadata.len().max(bytes.len() as u64);
        let reason = format!("it has {size} bytes; the maximum is {max}");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, reason));
    }
    Ok(bytes)
}

#[cfg(unix)]
fn open(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    // Without it, opening a pipe waits for its writer.
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

#[cfg(not(unix))]
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).open(path)
}
