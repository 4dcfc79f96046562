use std::fmt;
use std::path::PathBuf;

/// Origin of a value, for errors.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Origin {
    /// The default.
    Default,
    /// An argument of the program that embeds the node.
    Argument,
    /// A flag, without its dashes.
    Flag(&'static str),
    /// An environment variable.
    Variable(String),
    /// A line of the settings file, from 1.
    File {
        /// Path of the file.
        path: PathBuf,
        /// The line.
        line: usize,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("the default"),
            Self::Argument => f.write_str("the argument"),
            Self::Flag(name) => write!(f, "--{name}"),
            Self::Variable(name) => write!(f, "the variable {name}"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
        }
    }
}
