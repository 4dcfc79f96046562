//! The default Unix socket at which a node listens, where peers need not be distinguished.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

fn user() -> u32 {
    // SAFETY: a query without arguments.
    unsafe { libc::geteuid() }
}

/// Returns the path of a node's socket: in `XDG_RUNTIME_DIR`, or else in a folder of this user in
/// the one for temporary files.
pub fn default_socket(name: &str) -> PathBuf {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = runtime.unwrap_or_else(|| std::env::temp_dir().join(format!("kvpool-{}", user())));
    folder.join(format!("kvpool-{name}.sock"))
}

/// Creates the folder of that socket if needed, and checks that no other user can write there.
///
/// # Errors
/// The system's error; [`io::ErrorKind::PermissionDenied`] for anything but a folder of this user
/// that is closed to others.
pub fn make_socket_folder(path: &Path) -> io::Result<()> {
    let made = std::fs::DirBuilder::new().mode(0o700).create(path);
    made.or_else(|error| if error.kind() == io::ErrorKind::AlreadyExists { Ok(()) } else { Err(error) })?;
    // A symbolic link is refused: its owner could redirect it.
    let found = std::fs::symlink_metadata(path)?;
    let refused = |reason: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    match found.mode() & 0o777 {
        _ if !found.is_dir() => refused("it is not a folder".to_owned()),
        _ if found.uid() != user() => refused(format!("it belongs to user {}", found.uid())),
        mode if mode & 0o077 != 0 => refused(format!("others may enter it (mode {mode:03o} instead of 700)")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn only_a_folder_that_is_closed_to_others_is_used() {
        let temporary = tempfile::tempdir().unwrap();
        let at = |name: &str| temporary.path().join(name);
        let refused = |name: &str| make_socket_folder(&at(name)).unwrap_err().to_string();
        for _ in 0..2 {
            make_socket_folder(&at("new")).unwrap();
        }
        assert_eq!(at("new").metadata().unwrap().mode() & 0o777, 0o700);
        symlink(at("new"), at("link")).unwrap();
        assert_eq!(refused("link"), "it is not a folder");
        std::fs::write(at("file"), "").unwrap();
        assert_eq!(refused("file"), "it is not a folder");
        std::fs::set_permissions(at("new"), std::fs::Permissions::from_mode(0o770)).unwrap();
        assert_eq!(refused("new"), "others may enter it (mode 770 instead of 700)");
        assert!(refused("none/new").contains("No such file"));
        if user() == 0 {
            std::fs::set_permissions(at("new"), std::fs::Permissions::from_mode(0o700)).unwrap();
            std::os::unix::fs::chown(at("new"), Some(65_534), None).unwrap();
            assert_eq!(refused("new"), "it belongs to user 65534");
        }
    }
}
