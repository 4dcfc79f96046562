#!/usr/bin/env bash
# Runs every model and prints, for each, how many executions were explored in what time. Arguments go to cargo test,
# e.g. `loom-tests/run.sh --test merge`. LOOM_MAX_PREEMPTIONS (default 2) bounds the preemptions of an execution.
set -euo pipefail
cd "$(dirname "$0")/.."
export LOOM_MAX_PREEMPTIONS="${LOOM_MAX_PREEMPTIONS:-2}"
export RUSTFLAGS="--cfg kvpool_loom --cfg crossbeam_loom ${RUSTFLAGS:-}"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/loom"
echo "at most $LOOM_MAX_PREEMPTIONS preemptions an execution" >&2
exec cargo test --release -p kvpool-loom-tests "$@" -- --nocapture
