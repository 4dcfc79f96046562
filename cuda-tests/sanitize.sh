#!/usr/bin/env bash
# Runs the tests of this crate, or only those named (`--test kernels`), with ASan and UBSan on the
# C++.
#
# A test program must load the sanitizers' libraries first; cargo and the compiler must not load
# them. So a runner preloads them for the tests alone. Leaks are checked by the mock driver itself.
set -euo pipefail
cd "$(dirname "$0")/.."

compiler=${CXX:-g++}
asan=$("$compiler" -print-file-name=libasan.so)
ubsan=$("$compiler" -print-file-name=libubsan.so)
for library in "$asan" "$ubsan"; do
    if [[ $library != /* ]]; then
        echo "sanitize.sh: $compiler has no $library" >&2
        exit 1
    fi
done

host=$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')
export KVPOOL_SANITIZE=1
export "CARGO_TARGET_${host}_RUNNER=env LD_PRELOAD=$asan:$ubsan"
export ASAN_OPTIONS="${ASAN_OPTIONS:-detect_leaks=0:abort_on_error=0}"
export UBSAN_OPTIONS="${UBSAN_OPTIONS:-print_stacktrace=1}"
exec cargo test -p kvpool-cuda-tests --locked "$@"
