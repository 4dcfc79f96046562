#!/usr/bin/env bash
# Tests the schedules: activates one planted ordering bug at a time and requires that a test catches
# it. Arguments name the bugs; the default is all of them. The bugs are patches in
# cuda-tests/mutants, applied to a copy of the tree (loom-tests/plant.sh). One build serves all:
# KVPOOL_MUTANT chooses the bug at run time. KVPOOL_SCHEDULES sets the number of schedules tried per
# bug (120); the first failing schedule ends the test.
#
# KVPOOL_MUTANTS_SECONDS bounds the time: at least five bugs are planted, and more until it has
# elapsed. The commit's hash chooses the first.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUST_BACKTRACE=0
export KVPOOL_SCHEDULES="${KVPOOL_SCHEDULES:-120}"
export CARGO_TARGET_DIR=$PWD/target/cuda-mutants
cd "$(loom-tests/plant.sh)"
cargo test --locked --quiet -p kvpool-cuda-tests --test schedules --test order --test transfers --test host_frames \
    --test gate --test buffers --test registration --no-run
# The patched tree passes while no bug is active.
KVPOOL_SCHEDULES=20 cargo test --locked --quiet -p kvpool-cuda-tests --test schedules --test order --test host_frames \
    --test gate --test buffers --test registration
ready=$SECONDS
# mutant, the file of the test that must catch it, and the test
mapfile -t list <<'LIST'
seal_unfenced schedules what_is_read
publish_unfenced schedules what_is_read
reuse_unfenced schedules what_is_read
copy_unordered schedules what_is_read
staging_early schedules what_is_read
table_early schedules what_is_read
scales_left schedules what_is_read
store_unordered order a_store_comes_behind
wave_marked_early schedules what_is_read
nudges_shared order a_wave_is_told
copy_unawaited host_frames a_dropped_future
late_copy_freed host_frames whose_end_is_unknown
pages_returned_early host_frames pages_are_given_back
nudge_in_line order waves_go_on
sending_shared transfers a_source_serves
landing_early gate a_copy_goes_on
wiped_early order a_copy_after_a_wipe
wipes_overlap order runs_that_are_freed
wipes_left order runs_that_are_freed
wipes_lost order a_wipe_that_fails
gate_left gate no_copy_begins
gate_of_handle gate no_copy_begins
buffers_late gate a_copy_takes_all
pinned_early buffers may_still_write
shelf_untrimmed buffers not_used_any_more
locked_early registration registered_again
refusal_final registration a_lack_of_memory
pages_inherited registration child_processes
border_crossed registration registered_in_pieces
flights_grounded registration copies_to_other_devices
LIST
budget=${KVPOOL_MUTANTS_SECONDS:-}
if [[ -n $budget ]]; then
    hash=$(git rev-parse HEAD 2>/dev/null || echo 0)
    first=$((16#${hash:0:7} % ${#list[@]}))
    list=("${list[@]:first}" "${list[@]:0:first}")
fi
survivors=0
planted=0
left=()
for line in "${list[@]}"; do
    read -r mutant test name <<<"$line"
    [[ $# -eq 0 || " $* " == *" $mutant "* ]] || continue
    start=$SECONDS
    if [[ -n $budget ]] && ((planted >= 5 && start - ready > budget)); then
        left+=("$mutant")
        continue
    fi
    planted=$((planted + 1))
    # Bounded: an ordering bug may also make a thread wait forever.
    if ! grep -rqF "cfg!(kvpool_mutant = \"$mutant\")" src cuda/src; then
        echo "BROKEN    $mutant: is in no patch"
        survivors=$((survivors + 1))
    elif output=$(KVPOOL_MUTANT=$mutant timeout 900 \
        cargo test --locked -p kvpool-cuda-tests --test "$test" -- --nocapture "$name" 2>&1); then
        echo "SURVIVED  $mutant ($test)"
        survivors=$((survivors + 1))
    elif ! grep -q "^running 1 test" <<<"$output"; then
        echo "BROKEN    $mutant"
        tail -20 <<<"$output"
        survivors=$((survivors + 1))
    else
        echo "caught    $mutant in $((SECONDS - start)) s: $(grep -m1 "^caught in" <<<"$output" | cut -c1-120 || true)"
    fi
done
if ((${#left[@]} > 0)); then
    echo "left to an unbounded run (${#left[@]} of ${#list[@]}): ${left[*]}"
fi
exit "$survivors"
