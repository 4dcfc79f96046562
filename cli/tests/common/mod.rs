//! Helpers of the program's tests.
#![allow(dead_code, reason = "each test uses a part")]

#[cfg(all(feature = "node", target_os = "linux"))]
pub mod authority;
#[cfg(all(feature = "node", target_os = "linux"))]
pub mod live;
#[cfg(feature = "node")]
pub mod openmetrics;
#[cfg(all(feature = "node", target_os = "linux"))]
pub mod peer;
#[cfg(all(feature = "node", target_os = "linux"))]
pub mod servers;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// Runs the program with these words as its arguments.
pub fn kvpool(arguments: &str) -> Output {
    kvpool_in(Path::new("."), arguments)
}

/// Runs the program in a directory.
pub fn kvpool_in(directory: &Path, arguments: &str) -> Output {
    let program = env!("CARGO_BIN_EXE_kvpool");
    Command::new(program)
        .current_dir(directory)
        .args(arguments.split_whitespace())
        .output()
        .expect("the program runs")
}

/// Runs the program, which must succeed, and returns the JSON that it prints.
pub fn json(arguments: &str) -> Value {
    parse(&kvpool(arguments))
}

/// Returns the JSON of a run that succeeded.
pub fn parse(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON and nothing else")
}

/// Returns the path of a model's configuration.
pub fn config(name: &str) -> String {
    format!("{}/../tests/configs/{name}.json", env!("CARGO_MANIFEST_DIR"))
}

/// Returns the sorted keys of an object.
pub fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<_> = value.as_object().expect("an object").keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

/// Returns the path of a published trace, in `KVPOOL_TRACES` or beside the repository. They are not
/// part of it.
pub fn published(name: &str) -> Option<PathBuf> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/traces");
    let path = std::env::var_os("KVPOOL_TRACES").map_or_else(beside, PathBuf::from).join(name);
    if !path.is_file() {
        eprintln!("SKIPPED: {} is not there; KVPOOL_TRACES names its directory", path.display());
        return None;
    }
    Some(path)
}
