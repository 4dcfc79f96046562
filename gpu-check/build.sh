#!/usr/bin/env bash
# Builds the stripped program `gpu_check` for this architecture, with the commit in its report, and
# prints its path. It needs no CUDA toolkit, and runs on any machine with the driver: it links only
# the C library, of version 2.17 or later if zig can be had as the linker, or of this machine's. (A
# static program cannot load the driver.) With KVPOOL_PTXAS, the path of the toolkit's assembler
# (also in the Python package nvidia-cuda-nvcc-cu12), it contains machine code for the kernels,
# which the driver need not compile.
set -euo pipefail
cd "$(dirname "$0")/.."
KVPOOL_COMMIT=${KVPOOL_COMMIT:-$(git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)}
export KVPOOL_COMMIT
export CARGO_PROFILE_DIST_STRIP=symbols
if [[ -n ${KVPOOL_PTXAS:-} ]]; then
    export KVPOOL_CUBINS=$PWD/target/cubins RUSTFLAGS="${RUSTFLAGS:-} --cfg kvpool_cubins"
    kernels/cubins.sh "$KVPOOL_PTXAS" "$KVPOOL_CUBINS" >&2
fi
venv=$PWD/target/packaging build=(cargo build) target=$(uname -m)-unknown-linux-gnu
if { [[ -x $venv/bin/python ]] || python3 -m venv "$venv"; } >&2 &&
    "$venv/bin/python" -m pip install --quiet cargo-zigbuild==0.24.1 ziglang==0.17.1 >&2; then
    # zig links against the symbols of an older C library than this machine's.
    build=(env "PATH=$venv/bin:$PATH" cargo zigbuild --target "$target.2.17")
else
    echo "zig cannot be had: the program needs the C library of this machine" >&2 && build+=(--target "$target")
fi
"${build[@]}" --locked --profile dist -p kvpool-gpu-check --features cuda --bin gpu_check >&2
echo "${CARGO_TARGET_DIR:-target}/$target/dist/gpu_check"
