use std::fmt;
use std::path::{Path, PathBuf};

use subtle::{Choice, ConstantTimeEq};
use thiserror::Error;

use super::files::read_file;

/// Minimum and maximum length of a token in bytes.
const BYTES_MIN: usize = 16;
const BYTES_MAX: usize = 256;

/// Maximum size of a file of tokens in bytes, and maximum number of tokens in it.
const FILE_BYTES_MAX: u64 = 4096;
const TOKENS_MAX: usize = 8;

/// A secret of 16 to 256 visible ASCII characters. `Debug` does not print it.
#[derive(Clone)]
pub struct Token {
    /// The bytes, padded with zeros, so that comparisons read the same number for all tokens.
    padded: [u8; BYTES_MAX],
    len: u16,
}

/// Why a token was refused. The message does not contain the token.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TokenError {
    /// The file cannot be read.
    #[error("cannot read the token's file {}: {error}", .path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// The token is too short or too long.
    #[error("a token has {BYTES_MIN} to {BYTES_MAX} characters; this one has {bytes}{}", if *.bytes > BYTES_MAX { " or more" } else { "" })]
    Length {
        /// Number of bytes; one more than the maximum for all longer tokens.
        bytes: usize,
    },
    /// A file has no token, or too many.
    #[error("{} has {tokens} tokens, a line each; 1 to {TOKENS_MAX} are needed", .path.display())]
    Number {
        /// Path of the file.
        path: PathBuf,
        /// Number of lines that are not empty.
        tokens: usize,
    },
    /// A line of a file is not a token.
    #[error("{}, line {line}: {error}", .path.display())]
    Line {
        /// Path of the file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// What is wrong with it.
        error: Box<TokenError>,
    },
    /// The token contains a space, a control character, or one outside of ASCII.
    #[error("character {at} of the token is not a visible ASCII character")]
    Character {
        /// Place of the character, from 1.
        at: usize,
    },
}

impl Token {
    /// Checks a token.
    ///
    /// # Errors
    /// [`TokenError::Length`], [`TokenError::Character`].
    pub fn new(token: &str) -> Result<Self, TokenError> {
        let bytes = token.as_bytes();
        if !(BYTES_MIN..=BYTES_MAX).contains(&bytes.len()) {
            return Err(TokenError::Length { bytes: bytes.len().min(BYTES_MAX + 1) });
        }
        if let Some(at) = bytes.iter().position(|byte| !byte.is_ascii_graphic()) {
            return Err(TokenError::Character { at: at + 1 });
        }
        Ok(Self { padded: pad(bytes), len: bytes.len() as u16 })
    }

    /// Returns whether these bytes are the token, in constant time.
    pub fn is(&self, given: &[u8]) -> bool {
        let fits = Choice::from(u8::from(given.len() <= BYTES_MAX));
        let len = given.len().min(BYTES_MAX);
        let same = self.padded.ct_eq(&pad(&given[..len])) & self.len.ct_eq(&(len as u16));
        (same & fits).into()
    }

    /// Derives a key for one purpose, which reveals nothing about the token.
    pub fn key(&self, purpose: &str) -> [u8; 32] {
        blake3::derive_key(purpose, self.expose().as_bytes())
    }

    /// Returns the token, for a client that presents it.
    pub fn expose(&self) -> &str {
        std::str::from_utf8(&self.padded[..usize::from(self.len)]).unwrap_or_default()
    }
}

/// Tokens that are all accepted. A client presents the first.
///
/// To replace a token without refusals: append the new one at all nodes, then swap the two, then
/// remove the old one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tokens(Vec<Token>);

impl Tokens {
    /// Reads 1 to 8 tokens from a file, one per line, ignoring empty lines and trailing white
    /// space.
    pub fn read(path: &Path) -> Result<Self, TokenError> {
        let file = || path.to_owned();
        let read = read_file(path, FILE_BYTES_MAX);
        let text = read.map_err(|error| TokenError::File { path: file(), error })?;
        let text = String::from_utf8_lossy(&text);
        let lines = (1..).zip(text.lines().map(str::trim_end)).filter(|(_, text)| !text.is_empty());
        let tokens = lines.clone().count();
        if !(1..=TOKENS_MAX).contains(&tokens) {
            return Err(TokenError::Number { path: file(), tokens });
        }
        let token = |(line, text)| {
            Token::new(text).map_err(|error| TokenError::Line { path: file(), line, error: Box::new(error) })
        };
        lines.map(token).collect::<Result<_, _>>().map(Self)
    }

    /// Returns the token that a client presents.
    pub fn first(&self) -> &Token {
        &self.0[0]
    }

    /// Returns all tokens, the first one first.
    pub fn all(&self) -> &[Token] {
        &self.0
    }

    /// Returns whether these bytes are one of the tokens. The time depends only on their number.
    pub fn accept(&self, given: &[u8]) -> bool {
        self.0.iter().fold(false, |accepted, token| accepted | token.is(given))
    }
}

impl From<Token> for Tokens {
    fn from(token: Token) -> Self {
        Self(vec![token])
    }
}

fn pad(bytes: &[u8]) -> [u8; BYTES_MAX] {
    let mut padded = [0; BYTES_MAX];
    padded[..bytes.len()].copy_from_slice(bytes);
    padded
}

impl PartialEq for Token {
    /// Constant time.
    fn eq(&self, other: &Self) -> bool {
        self.is(other.expose().as_bytes())
    }
}

impl Eq for Token {}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}
