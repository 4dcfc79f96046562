//! Output: text for the terminal, without control characters of the input or unwanted escape
//! sequences, and files that are replaced atomically.

use std::fmt;
use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use comfy_table::Table;
use tempfile::NamedTempFile;

/// Prints a text and a line feed on the standard output. A closed pipe is not an error.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}

/// Prints a message on the standard error. If that fails, only the exit code reports the error.
pub fn complain(what: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "kvpool: {}", printable(&what.to_string()));
}

/// Escapes the control characters of a text, except line feeds.
pub fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        if char.is_control() && char != '\n' { out.extend(char.escape_default()) } else { out.push(char) }
    }
    out
}

pub fn not_built(feature: &str) -> String {
    format!(
        "this program was built without the feature `{feature}`: build it with `cargo install --path cli --features {feature}`"
    )
}

/// Returns whether escape sequences are disabled even on a terminal: `NO_COLOR` is set and not
/// empty.
pub fn is_plain() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

/// Creates a table that is styled only on a terminal.
pub fn table(preset: &str) -> Table {
    let mut table = Table::new();
    table.load_preset(preset);
    if is_plain() {
        // The library itself then omits colours, but not bold and dim.
        table.force_no_tty();
    }
    table
}

pub struct Destination {
    /// Its path, with symbolic links resolved.
    path: PathBuf,
    /// Whether the file can be replaced; devices and pipes are written in place.
    is_replaced: bool,
}

impl Destination {
    /// Checks that a file can be written, without changing it.
    pub fn new(path: &Path) -> io::Result<Self> {
        let this = match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            Ok(metadata) if metadata.is_file() => Self { path: fs::canonicalize(path)?, is_replaced: true },
            Ok(_) => Self { path: path.to_owned(), is_replaced: false },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Self { path: path.to_owned(), is_replaced: true }
            }
            Err(error) => return Err(error),
        };
        if this.is_replaced {
            this.temporary()?;
        }
        Ok(this)
    }

    /// Writes the whole file or, on failure, nothing.
    pub fn write(&self, text: &str) -> io::Result<()> {
        if !self.is_replaced {
            return fs::write(&self.path, text);
        }
        let mut file = self.temporary()?;
        file.write_all(text.as_bytes())?;
        file.persist(&self.path)?;
        Ok(())
    }

    /// Creates a temporary file in the same folder.
    fn temporary(&self) -> io::Result<NamedTempFile> {
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let mut builder = tempfile::Builder::new();
        let permissions = fs::metadata(&self.path).ok().map(|metadata| metadata.permissions());
        if let Some(permissions) = permissions.or_else(usual) {
            builder.permissions(permissions);
        }
        builder.prefix(".kvpool").tempfile_in(folder.unwrap_or(Path::new(".")))
    }
}

/// Returns the permissions of a new file, before the umask is applied.
#[cfg(unix)]
fn usual() -> Option<Permissions> {
    use std::os::unix::fs::PermissionsExt;
    Some(Permissions::from_mode(0o666))
}

#[cfg(not(unix))]
fn usual() -> Option<Permissions> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        let text = printable("a\u{1b}[31m\r\n\u{9b}b\0\u{7f}");
        assert_eq!(text, "a\\u{1b}[31m\\r\n\\u{9b}b\\u{0}\\u{7f}");
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_file_is_written_as_a_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new.svg");
        let destination = Destination::new(&path).unwrap();
        assert!(names(folder.path()).is_empty(), "nothing is left behind before the file is written");
        destination.write("one").unwrap();
        Destination::new(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one", "an old file stays until there is another");
        Destination::new(&path).unwrap().write("two").unwrap();
        assert_eq!(
            (fs::read_to_string(&path).unwrap().as_str(), names(folder.path())),
            ("two", vec!["new.svg".to_owned()])
        );
        assert!(Destination::new(folder.path()).is_err());
        assert!(Destination::new(&folder.path().join("none/new.svg")).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn links_modes_and_devices_are_kept() {
        use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file.svg"), folder.path().join("link.svg"));
        fs::write(&file, "old").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
        symlink(&file, &link).unwrap();
        Destination::new(&link).unwrap().write("new").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
        let device = Path::new("/dev/null");
        Destination::new(device).unwrap().write("nothing").unwrap();
        assert!(fs::metadata(device).unwrap().file_type().is_char_device());
    }
}
