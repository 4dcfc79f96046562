#!/usr/bin/env bash
# Counts the instructions of one iteration on each path (an allocate + free, the life of a sequence, a
# batch, an appended token): valgrind runs the loop n and 2n times, and the difference divided by n
# is one iteration without start-up and shut-down. Unlike a time, it is the same on every run.
# Usage: benches/instructions.sh [path ...]
set -euo pipefail
cd "$(dirname "$0")/.."

cargo build --quiet --profile dist -p kvpool-benches --bin loops
loops="${CARGO_TARGET_DIR:-target}/dist/loops"

collected() {
    valgrind --tool=callgrind --callgrind-out-file=/dev/null "$loops" "$1" "$2" 2>&1 |
        sed -n 's/.*Collected : //p'
}

if [ $# -eq 0 ]; then
    set -- lease ten-lease sequence sequence-ten cached-sequence cached-sequence-ten \
        cached-request open admit batch decode appends decode-step std-mutex parking-lot array-queue
fi
n=100000
printf '%-20s %s\n' path 'instructions of one iteration'
for path in "$@"; do
    once=$(collected "$path" $n)
    twice=$(collected "$path" $((2 * n)))
    awk -v path="$path" -v d=$((twice - once)) -v n=$n 'BEGIN { printf "%-20s %.1f\n", path, d / n }'
done
