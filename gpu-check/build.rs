//! Notes the commit that the program is built from.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=KVPOOL_COMMIT");
    let described = || {
        let output =
            Command::new("git").args(["describe", "--always", "--dirty", "--abbrev=12"]).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = std::env::var("KVPOOL_COMMIT").ok().filter(|commit| !commit.is_empty()).or_else(described);
    println!("cargo:rustc-env=KVPOOL_COMMIT={}", commit.unwrap_or_else(|| "unknown".into()));
}
