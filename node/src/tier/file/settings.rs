use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use percent_encoding::percent_decode_str;

use super::super::file_error::FileError;
use crate::settings::bytes;

/// Smallest size of a store, in bytes.
const SIZE_MIN: u64 = 1 << 20;

/// Most operations of a drive at a time.
const DEPTH_MAX: usize = 512;

/// Which values a full store takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Admission {
    /// Those that are put for the second time, so that values without reuse do not wear the drive.
    #[default]
    Second,
    /// All.
    Always,
}

/// Settings of a [`FileStore`](super::FileStore).
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct FileSettings {
    /// Directory of the files. It is created if its parent exists. On a local file system: the lock
    /// of the directory is not sound on all network file systems.
    pub directory: PathBuf,
    /// Bytes on the drive, of values and index; at least 1 MiB.
    pub size: u64,
    /// Reads of the drive at a time, from 1 to 512, and half as many writes. Default 8.
    pub depth: usize,
    /// Bytes per second that are written, on average over a second; further values are declined. A
    /// value larger than that is written, and later ones wait for it. Default: no limit.
    pub write_rate: Option<u64>,
    /// Which values a full store takes. Default [`Admission::Second`].
    pub admission: Admission,
}

impl FileSettings {
    /// Creates settings with defaults.
    pub fn new(directory: impl Into<PathBuf>, size: u64) -> Self {
        let (depth, admission) = (8, Admission::default());
        Self { directory: directory.into(), size, depth, write_rate: None, admission }
    }

    /// Reads an address, such as `file:///var/cache/kvpool?size=200GiB`.
    ///
    /// `size` is required. `depth`, `write_rate` (bytes per second) and `admit` (`second` or
    /// `always`) are optional.
    ///
    /// # Errors
    /// [`FileError::Address`].
    pub fn parse(address: &str) -> Result<Self, FileError> {
        let refuse = |reason: String| FileError::Address { address: address.to_owned(), reason };
        let rest = address.strip_prefix("file://").ok_or_else(|| refuse("expected file:///".to_owned()))?;
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let decoded: Vec<u8> = percent_decode_str(path).collect();
        if !path.starts_with('/') || decoded.iter().all(|byte| *byte == b'/') {
            return Err(refuse(
                "expected three slashes and a path, as in file:///var/cache/kvpool".to_owned(),
            ));
        }
        let mut settings = Self::new(PathBuf::from(OsString::from_vec(decoded)), 0);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let of = |reason: String| refuse(format!("{name}={value}: {reason}"));
            match name {
                "size" => settings.size = bytes(value).map_err(of)?,
                "write_rate" => settings.write_rate = Some(bytes(value).map_err(of)?),
                "depth" => settings.depth = value.parse().map_err(|_| of("not a whole number".to_owned()))?,
                "admit" if value == "second" => settings.admission = Admission::Second,
                "admit" if value == "always" => settings.admission = Admission::Always,
                "admit" => return Err(of("expected `second` or `always`".to_owned())),
                _ => return Err(of("expected size, depth, write_rate or admit".to_owned())),
            }
        }
        if settings.size == 0 {
            return Err(refuse("a size is missing, as in ?size=200GiB".to_owned()));
        }
        settings.check()?;
        Ok(settings)
    }

    pub(super) fn check(&self) -> Result<(), FileError> {
        let ranges = [
            ("the size of a tier", self.size, SIZE_MIN, u64::MAX / 2),
            ("the depth of a tier", self.depth as u64, 1, DEPTH_MAX as u64),
            ("the write rate of a tier", self.write_rate.unwrap_or(1), 1, u64::MAX),
        ];
        match ranges.into_iter().find(|&(_, value, min, max)| !(min..=max).contains(&value)) {
            Some((what, value, min, max)) => Err(FileError::OutOfRange { what, value, min, max }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_all_settings() {
        let parsed = FileSettings::parse("file:///var/cache/kvpool?size=200GiB").unwrap();
        assert_eq!(parsed, FileSettings::new("/var/cache/kvpool", 200 << 30));
        let address = "file:///a%20b?size=1MiB&depth=32&write_rate=100MB&admit=always";
        let mut all = FileSettings::new("/a b", 1 << 20);
        (all.depth, all.write_rate, all.admission) = (32, Some(100_000_000), Admission::Always);
        assert_eq!(FileSettings::parse(address), Ok(all));
    }

    #[test]
    fn an_address_that_cannot_work_is_refused_with_the_reason() {
        for (address, reason) in [
            ("file:///var/cache", "a size is missing"),
            ("file://host/var?size=1GiB", "three slashes"),
            ("file:///?size=1GiB", "three slashes"),
            ("file:///%2F/?size=1GiB", "three slashes"),
            ("file:///a?size=12", "with a unit"),
            ("file:///a?size=1KiB", "from 1048576 to"),
            ("file:///a?size=1GiB&depth=0", "from 1 to 512"),
            ("file:///a?size=1GiB&depth=two", "depth=two: not a whole number"),
            ("file:///a?size=1GiB&admit=never", "`second` or `always`"),
            ("file:///a?size=1GiB&write_rate=0B", "from 1 to"),
            ("file:///a?size=1GiB&colour=red", "expected size, depth"),
        ] {
            let error = FileSettings::parse(address).unwrap_err().to_string();
            assert!(error.contains(reason), "{address}: {error}");
        }
    }
}
