#!/usr/bin/env bash
# The tests of this crate, or those named (`--test kernels`), with the C++ under ASan and UBSan.
#
# The sanitizers' libraries must be the first that a test program loads, and no business of cargo's or the compiler's: a
# runner preloads them for the tests alone. Leaks are the mock driver's own affair.
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
