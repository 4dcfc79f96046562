//! Settings of nodes, from a file or a mapping, and the errors of the services that they name.

use std::path::PathBuf;

use kvpool_node::services::ServiceError;
use kvpool_node::settings::{self, SettingsError, Sources};
use kvpool_node::transport::tcp::Address;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping};
use tokio::task::spawn_blocking;

use crate::error::{Failure, Outcome, fields, invalid, kind, raise};

/// Reads the argument of a call: the path of a TOML file, or a mapping with its keys.
pub fn sources(settings: &Bound<'_, PyAny>) -> Outcome<Sources> {
    if let Ok(mapping) = settings.cast::<PyMapping>() {
        return Ok(Sources::new().text("settings", toml(mapping)?));
    }
    let path = settings.extract::<PathBuf>().map_err(|_| {
        invalid(format!("settings are the path of a file or a mapping, not {}", settings.get_type()))
    })?;
    Ok(Sources::new().file(path))
}

/// Writes a mapping as TOML, an entry on each line: what JSON writes with other separators.
fn toml(mapping: &Bound<'_, PyMapping>) -> Outcome<String> {
    let py = mapping.py();
    let form = PyDict::new(py);
    form.set_item("ensure_ascii", false)?;
    form.set_item("separators", (", ", " = "))?;
    // Of paths; others are refused.
    form.set_item("default", py.import("os")?.getattr("fspath")?)?;
    let dumps = py.import("json")?.getattr("dumps")?;
    let mut text = String::new();
    for item in mapping.items()?.iter() {
        let (key, value) = item.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
        let written = dumps.call((&value,), Some(&form)).and_then(|value| value.extract::<String>());
        let written = written.ok().filter(|written| written != "null").ok_or_else(|| {
            let message = format!("settings: {key}: a value cannot be of type {}", value.get_type());
            raise("InvalidArgument", message, fields![setting: key.to_string()])
        })?;
        let key: String = dumps.call((key.str()?,), Some(&form))?.extract()?;
        text += &format!("{key} = {written}\n");
    }
    Ok(text)
}

/// Reads `host:port` or `unix:/path`. A name is resolved when it is used.
pub fn address(text: &str) -> Outcome<Address> {
    let read = text.parse::<settings::Address>().map(Address::from);
    read.map_err(|error| invalid(format!("{text:?} is neither host:port nor unix:/path: {error}")))
}

/// Runs work that reads files or connects, on a blocking thread.
pub async fn apart<T: Send + 'static>(work: impl FnOnce() -> Outcome<T> + Send + 'static) -> Outcome<T> {
    spawn_blocking(work).await.map_err(|error| raise("Closed", error, Vec::new()))?
}

impl From<SettingsError> for Failure {
    fn from(error: SettingsError) -> Self {
        use SettingsError as E;
        let setting = match &error {
            E::Value { key, .. }
            | E::NotText { key, .. }
            | E::Needs { key, .. }
            | E::OfProgram { key, .. }
            | E::OfSequences { key, .. } => Some(key.in_file()),
            E::UnknownKeys { keys } => keys.first().map(|(key, _)| key.clone()),
            _ => None,
        };
        raise("InvalidArgument", &error, fields![kind: kind(&error), setting: setting])
    }
}

impl From<ServiceError> for Failure {
    fn from(error: ServiceError) -> Self {
        match error {
            ServiceError::NotBuilt { key, feature } => raise(
                "InvalidArgument",
                format!("{error}: `maturin build --features {feature}` makes one that has it"),
                fields![kind: "NotBuilt", setting: key.replace('-', "_"), feature: feature],
            ),
            ServiceError::Setting { key, .. } => {
                raise("NodeError", &error, fields![kind: "Setting", setting: key.replace('-', "_")])
            }
            ServiceError::Node(error) => error.into(),
            error => raise("NodeError", error, Vec::new()),
        }
    }
}
