use std::fmt::Display;

use thiserror::Error;

use crate::node::NodeError;

/// Why the services that settings name do not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServiceError {
    /// A service cannot be started, or a file that it needs cannot be used.
    #[error("{}: {reason}", in_file(.key))]
    Setting {
        /// Name of the setting, as in a flag.
        key: &'static str,
        /// Why.
        reason: String,
    },
    /// This build lacks a service.
    #[error("{}: this build lacks the feature `{feature}`", in_file(.key))]
    NotBuilt {
        /// Name of the setting, as in a flag.
        key: &'static str,
        /// The feature.
        feature: &'static str,
    },
    /// The node does not start.
    #[error("cannot start the node: {0}")]
    Node(#[from] NodeError),
}

/// Returns a function that makes the error of a setting.
pub(super) fn of<E: Display>(key: &'static str) -> impl FnOnce(E) -> ServiceError {
    move |error| ServiceError::Setting { key, reason: error.to_string() }
}

fn in_file(key: &str) -> String {
    key.replace('-', "_")
}
