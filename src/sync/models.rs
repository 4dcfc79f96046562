//! A door for the models.

/// An execution of a model, until it is dropped: [light and heavy fences](super::asymmetric) order each other, and nothing else.
/// To be begun first and dropped last.
pub struct Execution {
    _fences: super::asymmetric::Execution,
}

impl Execution {
    /// See [`Execution`].
    #[expect(clippy::new_without_default, reason = "it is an act")]
    pub fn new() -> Self {
        Self { _fences: super::asymmetric::Execution::begin() }
    }
}
