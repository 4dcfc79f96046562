use std::path::PathBuf;

use thiserror::Error;

use super::keys::Key;
use super::origin::Origin;
use super::token::TokenError;

/// Why settings were refused. None takes effect.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// The settings file cannot be read.
    #[error("cannot read the settings file {} (named by {origin}): {error}", .path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Origin of the path.
        origin: Origin,
        /// The system's error.
        error: std::io::Error,
    },
    /// The settings file is not UTF-8.
    #[error("{}:{line}: not UTF-8", .path.display())]
    FileNotUtf8 {
        /// Path of the file.
        path: PathBuf,
        /// Line of the first invalid byte, from 1.
        line: usize,
    },
    /// The settings file is not TOML.
    #[error("{}:{line}: not TOML: {message}", .path.display())]
    Syntax {
        /// Path of the file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The parser's message.
        message: String,
    },
    /// The settings file has keys that do not exist.
    #[error("{}", unknown(.keys))]
    UnknownKeys {
        /// Each key with its origin, in the file's order.
        keys: Vec<(String, Origin)>,
    },
    /// An environment variable is not UTF-8.
    #[error("the variable {name} is not UTF-8")]
    NotUtf8 {
        /// Name of the variable.
        name: String,
    },
    /// The value of a key is not accepted.
    #[error("{origin}: {} = {value:?}: {reason}; accepted: {}", .key.in_file(), .key.accepted)]
    Value {
        /// The key.
        key: &'static Key,
        /// Origin of the value.
        origin: Origin,
        /// The value.
        value: String,
        /// Why it is not accepted.
        reason: String,
    },
    /// The value of a key is no text, number, or list or table of the kind that it takes.
    #[error("{origin}: {}: {reason}; accepted: {}", .key.in_file(), .key.accepted)]
    NotText {
        /// The key.
        key: &'static Key,
        /// Origin of the value.
        origin: Origin,
        /// What it is, without its text, which may have a password.
        reason: String,
    },
    /// A key needs another one.
    #[error("{origin}: {} needs {} as well: {reason}", .key.in_file(), .needs.in_file())]
    Needs {
        /// The key.
        key: &'static Key,
        /// Origin of its value.
        origin: Origin,
        /// The missing key.
        needs: &'static Key,
        /// Why it is needed.
        reason: &'static str,
    },
    /// A setting of `kvpool serve` was given to an engine, whose pool and messages are its own.
    #[error("{origin}: {} is a setting of `kvpool serve` alone: the engine has its own pool, traffic and log", .key.in_file())]
    OfProgram {
        /// The key.
        key: &'static Key,
        /// Origin of the value.
        origin: Origin,
    },
    /// A setting of bytes, sequences or peers was given for a pool of frames.
    #[error("{origin}: {} needs a pool with sequences and bytes: of a pool of frames, the engine has both", .key.in_file())]
    OfSequences {
        /// The key.
        key: &'static Key,
        /// Origin of the value.
        origin: Origin,
    },
    /// The token's file was refused.
    #[error("{origin}: {error}")]
    Token {
        /// Origin of the key `token_file`.
        origin: Origin,
        /// The error.
        error: TokenError,
    },
}

fn unknown(keys: &[(String, Origin)]) -> String {
    let mut out = String::new();
    for (at, (key, origin)) in keys.iter().enumerate() {
        let near = Key::nearest(key).map(|near| format!("; did you mean `{}`?", near.in_file()));
        let separator = if at == 0 { "" } else { "\n" };
        out += &format!("{separator}{origin}: there is no key `{key}`{}", near.unwrap_or_default());
    }
    out
}
