#!/usr/bin/env bash
# Builds the stripped program `gpu_check` for this architecture, with the commit in its report, and
# prints its path. It needs no CUDA toolkit, and runs on any machine with the driver: it links only
# the C library. With KVPOOL_PTXAS, the path of the toolkit's assembler (also in the Python package
# nvidia-cuda-nvcc-cu12), it contains machine code for the kernels, which the driver need not compile.
set -euo pipefail
cd "$(dirname "$0")/.."
KVPOOL_COMMIT=${KVPOOL_COMMIT:-$(git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)}
export KVPOOL_COMMIT
export CARGO_PROFILE_RELEASE_STRIP=symbols CARGO_PROFILE_RELEASE_DEBUG=false
if [[ -n ${KVPOOL_PTXAS:-} ]]; then
    export KVPOOL_CUBINS=$PWD/target/cubins RUSTFLAGS="${RUSTFLAGS:-} --cfg kvpool_cubins"
    kernels/cubins.sh "$KVPOOL_PTXAS" "$KVPOOL_CUBINS" >&2
fi
cargo build --locked --release -p kvpool-gpu-check --features cuda --bin gpu_check >&2
echo "${CARGO_TARGET_DIR:-target}/release/gpu_check"
