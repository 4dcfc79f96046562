#!/usr/bin/env bash
# Runs every model and prints, for each, how many executions were explored in what time. Arguments go to cargo test,
# e.g. `loom-tests/run.sh --test merge`. The preemptions of an execution are bounded by what the
# model says, or by LOOM_MAX_PREEMPTIONS if that is more. With KVPOOL_LOOM_QUICK=1 the widest models explore one less.
set -euo pipefail
cd "$(dirname "$0")/.."
# Planted bugs can be chosen at run time; here none is, unless KVPOOL_MUTANT names one.
export RUSTFLAGS="--cfg kvpool_loom --cfg crossbeam_loom --cfg kvpool_planted ${RUSTFLAGS:-}"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/loom"
# Loom itself explores, and is optimized; optimizing the rest takes longer to build than it saves.
exec cargo test --release -p kvpool-loom-tests --config profile.release.package.kvpool.opt-level=1 \
    --config profile.release.package.kvpool-loom-tests.opt-level=0 "$@" -- --nocapture
