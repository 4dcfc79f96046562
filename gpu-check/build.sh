#!/usr/bin/env bash
# Builds the stripped program `gpu_check` for this architecture, with the commit in its report, and
# prints its path. It needs no CUDA toolkit, and runs on any machine with the driver: it links only
# the C library.
set -euo pipefail
cd "$(dirname "$0")/.."
KVPOOL_COMMIT=${KVPOOL_COMMIT:-$(git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)}
export KVPOOL_COMMIT
export CARGO_PROFILE_RELEASE_STRIP=symbols CARGO_PROFILE_RELEASE_DEBUG=false
cargo build --locked --release -p kvpool-gpu-check --features cuda --bin gpu_check >&2
echo "${CARGO_TARGET_DIR:-target}/release/gpu_check"
