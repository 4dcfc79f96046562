//! An invalid argument, for errors that callers need not distinguish.

use std::fmt;

/// An argument that was refused: what it is, what was given and what is accepted. For people to
/// read: errors that a caller can act on are variants of the call's own enum.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Invalid {
    /// Name of the argument.
    pub what: &'static str,
    /// Position in the list that contains it, for example of slots, runs, planes or extra keys.
    pub index: Option<usize>,
    /// What was given, with its unit.
    pub got: Box<str>,
    /// What is accepted: a limit, or a condition.
    pub limit: Box<str>,
}

impl Invalid {
    /// Returns the error for an argument that is not in a list.
    #[cold]
    pub fn new(what: &'static str, got: impl fmt::Display, limit: impl fmt::Display) -> Self {
        Self { what, index: None, got: got.to_string().into(), limit: limit.to_string().into() }
    }

    /// Adds the position in the list.
    pub fn at(self, index: usize) -> Self {
        Self { index: Some(index), ..self }
    }
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.what)?;
        if let Some(index) = self.index {
            write!(f, " at index {index}")?;
        }
        write!(f, ": got {}, expected {}", self.got, self.limit)
    }
}

impl std::error::Error for Invalid {}

#[cfg(test)]
mod tests {
    use super::Invalid;

    #[test]
    fn it_says_what_and_where() {
        let layer = Invalid::new("layer", 9, format_args!("less than {}", 2));
        assert_eq!(layer.to_string(), "layer: got 9, expected less than 2");
        assert_eq!(layer.at(3).to_string(), "layer at index 3: got 9, expected less than 2");
    }
}
