//! Notes the commit that the program is built from.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=KVPOOL_COMMIT");
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    // Changes with each commit and checkout.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|log| !log.is_empty()) {
        println!("cargo:rerun-if-changed={log}");
    }
    // `build.sh` says whether the tree has other changes; cargo does not run this again for these.
    let described = || Some(format!("{} (changes unknown)", git(&["rev-parse", "--short=12", "HEAD"])?));
    let commit = std::env::var("KVPOOL_COMMIT").ok().filter(|commit| !commit.is_empty()).or_else(described);
    println!("cargo:rustc-env=KVPOOL_COMMIT={}", commit.unwrap_or_else(|| "unknown".into()));
}
