#!/usr/bin/env bash
# Tests the simulation of the protocol: activates one planted bug at a time and requires that a
# schedule fails because of it, or, for those in `rare`, a unit test: the simulation reaches these
# seldom or not at all. Arguments name the bugs; the default is all of them. The bugs are
# patches in node/mutants, applied to a copy of the tree (loom-tests/plant.sh). One build serves all:
# KVPOOL_MUTANT chooses the bug at run time.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUST_BACKTRACE=0
export CARGO_TARGET_DIR=$PWD/target/node-mutants
cd "$(loom-tests/plant.sh)"
test=(cargo test --locked --quiet -p kvpool-node --test simulation)
unit=(cargo test --locked --quiet -p kvpool-node --lib protocol::)
"${test[@]}" --lib --no-run
# The patched tree passes while no bug is active.
KVPOOL_SIM_SCHEDULES=2000 "${test[@]}"
"${unit[@]}"
bugs=(abort_behind_commit doubt_given_up bad_committed attempts_unbounded reservation_not_renewed on_behind_abort
    unknown_not_forgotten commit_lapsed commit_twice forgotten_early abort_answered reservation_end_leaks
    process_unchecked ended_is_committed moved_on part_alone part_late part_twice part_clear part_failed
    part_untold part_moved_on part_early clear_unsaid clear_unheard)
rare=(part_late part_moved_on)
# Every bug of a patch is in the list.
for bug in $(grep -rhoE --exclude=planted.rs 'kvpool_mutant = "[a-z_]+"' node/src | cut -d '"' -f 2 | sort -u); do
    [[ " ${bugs[*]} " == *" $bug "* ]] || { echo "BROKEN    $bug is in no list" && exit 1; }
done
survivors=0
for bug in "${bugs[@]}"; do
    [[ $# -eq 0 || " $* " == *" $bug "* ]] || continue
    if ! grep -rqF "cfg!(kvpool_mutant = \"$bug\")" node/src; then
        echo "BROKEN    $bug is in no patch"
    elif [[ " ${rare[*]} " == *" $bug "* ]]; then
        if output=$(KVPOOL_MUTANT=$bug "${unit[@]}" 2>&1); then
            echo "SURVIVED  $bug"
        elif grep -q '^protocol::.* FAILED' <<<"$output"; then
            echo "caught    $bug: $(grep -m1 '^protocol::.* FAILED' <<<"$output")"
            continue
        else
            echo "BROKEN    $bug"
            tail -20 <<<"$output"
        fi
    elif output=$(KVPOOL_SIM_SCHEDULES=200000 KVPOOL_MUTANT=$bug timeout 600 "${test[@]}" 2>&1); then
        echo "SURVIVED  $bug"
    elif grep -q '^schedule [0-9]*, at\|an abort behind the commit' <<<"$output"; then
        echo "caught    $bug: $(grep -m1 '^schedule [0-9]*, at\|an abort behind the commit' <<<"$output" | cut -c1-140)"
        continue
    else
        echo "BROKEN    $bug"
        tail -20 <<<"$output"
    fi
    survivors=$((survivors + 1))
done
exit "$survivors"
