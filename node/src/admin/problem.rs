use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why a request to an admin interface was refused or failed.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum AdminError {
    /// The request contradicts itself or the interface.
    #[error("{0}")]
    BadRequest(String),
    /// The token is missing or wrong.
    #[error("a bearer token is needed, and the one given is missing or wrong")]
    Unauthorized,
    /// The request came from a web page.
    #[error("{0}")]
    Forbidden(String),
    /// There is no such route, sequence or peer.
    #[error("{0}")]
    NotFound(String),
    /// The route has another method.
    #[error("{0}")]
    Method(String),
    /// The state of the pool or the node does not permit it now.
    #[error("{0}")]
    Conflict(String),
    /// The body is larger than the limit.
    #[error("the body has more than {max} bytes")]
    TooLarge {
        /// Maximum number of bytes.
        max: usize,
    },
    /// The body has another content type.
    #[error("the content type must be application/json")]
    ContentType,
    /// The body is not what the route needs.
    #[error("{0}")]
    Invalid(String),
    /// It took longer than the limit. Nothing is left half done.
    #[error("{0}")]
    Timeout(String),
    /// There are too many callers of this kind.
    #[error("{0}")]
    TooMany(String),
    /// All connections are being answered.
    #[error("all {connections} connections are being answered (admin_connections)")]
    Busy {
        /// Their number.
        connections: usize,
    },
    /// The node cannot do this.
    #[error("{0}")]
    Unsupported(String),
    /// The node is ending.
    #[error("{0}")]
    Unavailable(String),
    /// It failed.
    #[error("{0}")]
    Failed(String),
}

impl AdminError {
    const fn kind(&self) -> (u16, &'static str, &'static str) {
        match self {
            Self::BadRequest(_) => (400, "bad-request", "Bad request"),
            Self::Unauthorized => (401, "unauthorized", "Token missing or wrong"),
            Self::Forbidden(_) => (403, "forbidden", "Forbidden"),
            Self::NotFound(_) => (404, "not-found", "Not found"),
            Self::Method(_) => (405, "method-not-allowed", "Method not allowed"),
            Self::Conflict(_) => (409, "conflict", "Not possible now"),
            Self::TooLarge { .. } => (413, "too-large", "Body too large"),
            Self::ContentType => (415, "content-type", "Wrong content type"),
            Self::Invalid(_) => (422, "invalid", "Invalid body"),
            Self::TooMany(_) => (429, "too-many", "Too many callers"),
            Self::Failed(_) => (500, "failed", "Failed"),
            Self::Unsupported(_) => (501, "unsupported", "Not supported"),
            Self::Unavailable(_) => (503, "unavailable", "Not serving"),
            Self::Busy { .. } => (503, "busy", "Too many requests at a time"),
            Self::Timeout(_) => (504, "timeout", "Took too long"),
        }
    }

    /// Returns the form on the wire.
    pub fn problem(&self) -> Problem {
        let (status, kind, title) = self.kind();
        Problem {
            kind: format!("urn:kvpool:problem:{kind}"),
            title: title.to_owned(),
            status,
            detail: self.to_string(),
        }
    }
}

/// An error as `application/problem+json` (RFC 9457).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Problem {
    /// A URN of the kind of error, such as `urn:kvpool:problem:not-found`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The kind as text.
    pub title: String,
    /// Status of the answer.
    pub status: u16,
    /// What happened.
    pub detail: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.title.to_lowercase(), self.status, self.detail)
    }
}
