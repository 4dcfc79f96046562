#!/usr/bin/env bash
# Tests of the tests: builds kvpool with one planted bug at a time and requires that a model fails for each. Arguments name the
# bugs; without any it is all of them.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUST_BACKTRACE=0
survivors=0
wrappers=$PWD/${CARGO_TARGET_DIR:-target}/loom/mutants
mkdir -p "$wrappers"
# mutant, and the models that must catch it
while read -r mutant models; do
    [[ $# -eq 0 || " $* " == *" $mutant "* ]] || continue
    # What is built anew for each bug is built fast; loom itself, which explores, stays as it is.
    args=(--config profile.release.package.kvpool.opt-level=0 --config profile.release.package.kvpool-loom-tests.opt-level=0)
    for model in $models; do args+=(--test "$model"); done
    # Only the workspace's own crates are built with the bug: a wrapper of its own per mutant makes cargo rebuild
    # those, and nothing else.
    wrapper="$wrappers/$mutant"
    printf '#!/bin/sh\nexec "$@" --cfg "kvpool_mutant=\\"%s\\""\n' "$mutant" >"$wrapper"
    chmod +x "$wrapper"
    if output=$(RUSTC_WORKSPACE_WRAPPER="$wrapper" loom-tests/run.sh "${args[@]}" 2>&1); then
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
relaxed_free merge
store_merge merge
rollback named_claim
no_transit runs
refill_swap refill
grow_unpublished growth
owner_no_fence owner_cell
visitor_no_fence owner_cell
leave_relaxed owner_cell
refused_by_depot magazines
no_visit magazines
depot_no_count magazines
depot_relaxed magazines
release_relaxed share_release
same_generation share_release
unchecked_retry share_release
begin_no_fence retire_reclaim
late_slot retire_reclaim
bound_relaxed retire_reclaim
late_rows growth_of_the_pool
late_total growth_of_the_pool
undo_half user_scheduler
publish_pinned moves
release_from_mover moves
publish_released moves
publish_relaxed moves
publish_no_fence moves
reopen_moving moves
keep_destination moves
log_overwritten moved_since
shrink_uncollected shrink
shrink_beside_growth shrink
collect_store shrink
cut_no_passage shrink
cut_relaxed shrink
cut_no_recheck shrink
no_look_after_bit waiters
early_clock waiters
turn_kept waiters
no_second_look waiters
silent_undo waiters
silent_begin waiters
silent_end waiters
silent_strays waiters
silent_poison waiters
index_relaxed prefix_index
index_insert_no_fence prefix_index
index_restore_no_fence prefix_index
index_no_second_look prefix_index
index_replace_live prefix_index
index_one_table prefix_index
index_grow_no_fence prefix_index
index_early_switch prefix_index
events_early_report kv_events
events_relaxed_stamp kv_events
events_no_fence kv_events
events_no_second_look kv_events
events_silent_loss kv_events
events_not_late kv_events
events_late_unchecked kv_events
wheel_no_tag eviction_queue
wheel_no_second_read eviction_queue
wheel_no_look_behind eviction_queue
wheel_clear_no_recheck eviction_queue
wheel_no_look eviction_queue
evict_owned evictable
evict_seen evictable
filed_twice evictable
hit_evicted evictable
unchecked_hit evictable
give_up_rewritten evictable
unlinked_no_fence sequences
reopen_relaxed moves
unfiled_relaxed evictable
settle_no_second_look announced
directory_relaxed growth
silent_wave announced
silent_resident announced
chunk_relaxed sequences
replace_relaxed sequences
slot_relaxed retire_reclaim
other_chunk_relaxed retire_reclaim
left_relaxed moves
stray_relaxed moves
stray_taken_relaxed moves
log_head_relaxed moved_since
own_relaxed share_release
handle_relaxed share_release
LIST
exit "$survivors"
