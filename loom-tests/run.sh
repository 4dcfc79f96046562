#!/usr/bin/env bash
# Runs every model and prints for each the number of executions explored and the time. Arguments go
# to cargo test, e.g. `loom-tests/run.sh --test merge`. The preemptions of an execution are bounded
# by the model's own number, or by LOOM_MAX_PREEMPTIONS if that is larger. With KVPOOL_LOOM_QUICK=1
# the widest models explore one less.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTFLAGS="--cfg kvpool_loom --cfg crossbeam_loom ${RUSTFLAGS:-}"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/loom"
# Only loom itself is optimized; optimizing the rest costs more build time than it saves.
exec cargo test --release -p kvpool-loom-tests --config profile.release.package.kvpool.opt-level=1 \
    --config profile.release.package.kvpool-loom-tests.opt-level=0 "$@" -- --nocapture
