//! Compiles the kernels for the host: a static library for the tests, and the mock driver, which runs them.
//!
//! With `KVPOOL_SANITIZE=1` both are compiled with ASan and UBSan; `sanitize.sh` runs the tests so.

use std::env;
use std::path::{Path, PathBuf};

/// Codes must be those of the device to the bit, and bytes are read as what they are.
const FLAGS: [&str; 6] = [
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-Wno-unknown-pragmas",
    // Does not see that what is written and what is read hang on the same condition.
    "-Wno-maybe-uninitialized",
    "-g",
    "-pthread",
];
const SANITIZE: [&str; 3] =
    ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"];

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    for watched in ["host", "mock", "../kernels"] {
        println!("cargo:rerun-if-changed={watched}");
    }
    println!("cargo:rerun-if-env-changed=KVPOOL_SANITIZE");
    println!("cargo:rustc-check-cfg=cfg(kvpool_sanitize)");
    let is_sanitized = env::var_os("KVPOOL_SANITIZE").is_some_and(|value| value == "1");

    let mut build = compiler(&root, is_sanitized);
    build.files(sources(&root.join("host"))).compile("kvpool_host_kernels");
    if is_sanitized {
        // rustc links without the default libraries, and so without those of the flags.
        println!("cargo:rustc-cfg=kvpool_sanitize");
        println!("cargo:rustc-link-arg=-lasan");
        println!("cargo:rustc-link-arg=-lubsan");
    }
    mock_driver(&root, &out, is_sanitized);
}

fn compiler(root: &Path, is_sanitized: bool) -> cc::Build {
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").opt_level(2).include(root.join("../kernels")).include(root.join("host"));
    build.warnings(true).extra_warnings(true);
    FLAGS.iter().for_each(|flag| {
        build.flag(flag);
    });
    if is_sanitized {
        SANITIZE.iter().for_each(|flag| {
            build.flag(flag);
        });
    }
    build
}

/// A folder's C++ files, in order of their names.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = folder.read_dir() else { return Vec::new() };
    let paths = entries.map(|entry| entry.expect("a folder that can be read").path());
    let mut sources: Vec<_> = paths.filter(|path| path.extension().is_some_and(|end| end == "cpp")).collect();
    sources.sort();
    sources
}

/// One library that takes the place of libcuda: its soname is what a search for that finds already loaded.
fn mock_driver(root: &Path, out: &Path, is_sanitized: bool) {
    let mock = sources(&root.join("mock"));
    if mock.is_empty() {
        return;
    }
    let library = out.join("libkvpool_mock_cuda.so");
    let mut command = compiler(root, is_sanitized).pic(true).get_compiler().to_command();
    command.args(["-shared", "-Wl,-soname,libcuda.so", "-Wl,-Bsymbolic", "-o"]).arg(&library);
    command.args(mock).args(sources(&root.join("host")));
    let status = command.status().expect("the C++ compiler starts");
    assert!(status.success(), "the mock driver does not compile: {status}");
    println!("cargo:rustc-env=KVPOOL_MOCK_CUDA={}", library.display());
}
