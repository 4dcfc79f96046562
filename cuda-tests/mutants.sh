#!/usr/bin/env bash
# Tests of the tests: builds kvpool with one planted bug of order at a time and requires that the schedules catch it. Arguments
# name the bugs; without any it is all of them. KVPOOL_SCHEDULES sets how many schedules are run for each (120).
set -euo pipefail
cd "$(dirname "$0")/.."
export RUST_BACKTRACE=0
export KVPOOL_SCHEDULES="${KVPOOL_SCHEDULES:-120}"
survivors=0
target=${CARGO_TARGET_DIR:-target}/cuda-mutants
mkdir -p "$target/wrappers"
target=$(cd "$target" && pwd)
# mutant, the file of the test that must catch it, and the test
while read -r mutant test name; do
    [[ $# -eq 0 || " $* " == *" $mutant "* ]] || continue
    # Only the workspace's own crates are built with the bug: a wrapper of its own per mutant makes cargo rebuild
    # those, and nothing else.
    wrapper="$target/wrappers/$mutant"
    printf '#!/bin/sh\nexec "$@" --cfg "kvpool_mutant=\\"%s\\""\n' "$mutant" >"$wrapper"
    chmod +x "$wrapper"
    # Bounded: a bug of order may also leave somebody waiting.
    if output=$(RUSTC_WORKSPACE_WRAPPER="$wrapper" CARGO_TARGET_DIR="$target" timeout 900 \
        cargo test -p kvpool-cuda-tests --test "$test" -- --nocapture "$name" 2>&1); then
        echo "SURVIVED  $mutant ($test)"
        survivors=$((survivors + 1))
    elif ! grep -q "^running 1 test" <<<"$output"; then
        echo "BROKEN    $mutant"
        tail -20 <<<"$output"
        survivors=$((survivors + 1))
    else
        echo "caught    $mutant: $(grep -m1 "^caught in" <<<"$output" || echo "the test was ended: $(tail -1 <<<"$output")")"
    fi
done <<'LIST'
seal_unfenced schedules what_is_read
publish_unfenced schedules what_is_read
reuse_unfenced schedules what_is_read
copy_unordered schedules what_is_read
staging_early schedules what_is_read
table_early schedules what_is_read
scales_left schedules what_is_read
store_unordered order a_store_comes_behind
LIST
exit "$survivors"
