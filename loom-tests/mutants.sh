#!/usr/bin/env bash
# Tests of the tests: builds kvpool with one planted bug at a time and requires that a model fails for each.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUST_BACKTRACE=0
survivors=0
# mutant, and the models that must catch it
while read -r mutant models; do
    args=()
    for model in $models; do args+=(--test "$model"); done
    # A target directory of its own, so that the models proper need not be built again.
    if output=$(CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/mutants" RUSTFLAGS="--cfg kvpool_mutant=\"$mutant\"" \
        loom-tests/run.sh "${args[@]}" 2>&1); then
        echo "SURVIVED  $mutant ($models)"
        survivors=$((survivors + 1))
    elif grep -qE "could not compile|no test target" <<<"$output"; then
        echo "BROKEN    $mutant"
        tail -20 <<<"$output"
        survivors=$((survivors + 1))
    else
        echo "caught    $mutant: $(grep -m1 -A1 panicked <<<"$output" | tail -1)"
    fi
done <<'LIST'
no_fence hints
no_recheck hints
relaxed_free claim_free merge
store_merge merge
rollback named_claim
no_transit runs
refill_swap refill
grow_unpublished growth
LIST
exit "$survivors"
