#!/usr/bin/env bash
# Tests the models: activates one planted bug at a time and requires that a model fails because of
# it. Arguments name the bugs; the default is all of them. The bugs are patches in
# loom-tests/mutants, applied to a copy of the tree (plant.sh). One build serves all: the bug is
# chosen at run time.
#
# KVPOOL_MUTANTS_SECONDS bounds the time: at least ten bugs are planted, and more until it has
# elapsed. The commit's hash chooses the first; bugs in files that the last 50 commits touched come
# before the others. The bugs left out are listed at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUST_BACKTRACE=0
# Full bounds: a planted bug may need every preemption of its model.
unset KVPOOL_LOOM_QUICK
tree=$(loom-tests/plant.sh)
export CARGO_TARGET_DIR=$PWD/target/planted
"$tree/loom-tests/run.sh" --locked --no-run --quiet
budget=${KVPOOL_MUTANTS_SECONDS:-}
# Every bug of a patch is in a list.
for mutant in $(grep -rhoE --exclude=planted.patch 'kvpool_mutant = "[a-z_]+"' loom-tests/mutants cuda-tests/mutants | cut -d '"' -f 2 | sort -u); do
    grep -qE "^$mutant " loom-tests/mutants.sh cuda-tests/mutants.sh || { echo "BROKEN    $mutant is in no list" && exit 1; }
done
survivors=0
planted=0

# mutant, and the models that must catch it
mapfile -t list <<'LIST'
no_fence hints
no_recheck hints
hint_raised_relaxed hints
hint_cleared_relaxed hints
relaxed_free merge
store_merge merge
rollback named_claim
spare_two_owners spare
no_transit runs
refill_swap refill
grow_unpublished growth
owner_no_fence owner_cell
visitor_no_fence owner_cell
leave_relaxed owner_cell
refused_by_depot magazines
no_visit magazines
caches_seen_relaxed announced
cache_published_relaxed announced
cache_taken_relaxed magazines
cache_left_relaxed magazines
depot_no_count magazines
depot_relaxed magazines
release_relaxed share_release
same_generation share_release
unchecked_retry share_release
private_sealed unseen
seen_unnoted unseen
seen_forgotten unseen
shared_unseen unseen
begin_no_fence retire_reclaim
late_slot retire_reclaim
mark_unraised retire_reclaim
mark_kept retire_reclaim
lowered_open retire_reclaim
lowered_relaxed retire_reclaim
found_beyond_bound retire_reclaim
found_relaxed retire_reclaim
late_rows growth_of_the_pool
late_total growth_of_the_pool
rows_published_relaxed growth_of_the_pool
rows_read_relaxed growth_of_the_pool
rows_counted_relaxed growth_of_the_pool
undo_half in_hand
publish_pinned moves
release_from_mover moves
publish_released moves
publish_relaxed moves
publish_no_fence moves
reopen_moving moves
keep_destination moves
drop_seen evictable
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
silent_poison waiters
silent_reclaim in_hand
passed_silent waiters
next_unwoken waiters
index_relaxed prefix_index
index_insert_no_fence prefix_index
index_restore_no_fence prefix_index
index_no_second_look prefix_index
index_replace_live prefix_index
index_one_table prefix_index
index_grow_no_fence prefix_index
index_early_switch prefix_index
events_relaxed_entry kv_events
events_overtaking kv_events
events_lost_to_the_tail kv_events
events_lost_unordered kv_events
events_lost_early kv_events
events_wake_early kv_events
events_wake_one kv_events
events_asleep_relaxed kv_events
events_no_fence kv_events
events_not_late kv_events
events_late_to_none kv_events
events_late_number kv_events
events_late_begin kv_events
events_early_to_all kv_events
events_two_at_once kv_events
events_late_unchecked kv_events
events_after_clear kv_events
events_early_era kv_events
wheel_no_tag eviction_queue
wheel_no_second_read eviction_queue
wheel_no_look_behind eviction_queue
wheel_clear_no_recheck eviction_queue
wheel_no_look eviction_queue
wheel_push_relaxed eviction_queue
wheel_mark_relaxed eviction_queue
wheel_summary_relaxed eviction_queue
wheel_summary_no_second_look eviction_queue
front_taken_relaxed queues
evict_owned evictable
evict_seen evictable
enqueued_twice evictable
entry_rest_lost entries
entry_seen_lost entries
entry_outdated_lost entries
hit_evicted evictable
unchecked_hit evictable
give_up_rewritten evictable
uncache_no_fence uncached
uncached_once uncached
registered_uncached uncached
renoted_uncached uncached
chain_registered uncached
run_rest_lost evictable
mixed_place evictable
weights_mixed weights
root_torn weights
root_unfenced weights
root_unpublished weights
checkpoint_in_part grouped
reopen_unlisted moved_since kept_frames
checkpoint_without_notes grouped
unlinked_no_fence sequences
reopen_relaxed moves
dequeued_relaxed evictable
settle_no_second_look announced
directory_relaxed growth
silent_wave announced
silent_flush announced
chunk_relaxed sequences
replace_relaxed sequences
window_released_listed sequences
other_chunk_relaxed retire_reclaim
left_relaxed moves
retire_list_put_relaxed moves
retire_list_taken_relaxed moves
log_head_relaxed moved_since
frames_unchecked kept_frames
frames_late_count kept_frames
count_relaxed kept_frames
visit_overwritten kept_frames
own_relaxed share_release
handle_relaxed share_release
left_uncounted moves_of_sequences
shared_uncounted unseen
end_unheard settled
end_awaited_relaxed settled
ended_relaxed settled
bound_unmarked settled
ends_early_look settled
ends_no_second_look settled
ends_bit_cleared settled
append_bypasses admission
admission_bypasses admission
admission_first admission
highest_unpublished admission
unpublished_silent admission
prefix_not_given_back admission
kept_silent admission
name_no_recheck frame_pool
moved_over_contents frame_pool
given_turn_lost turns
polled_turn_passed turns
copying_turn_passed turns
turn_before_undone turns
stop_read_first turns
hit_unpinned frame_pool
abandoned_late abandoned
abandoned_unseen_by_seal abandoned
abandoned_unseen_by_promise abandoned
promise_beside_writers abandoned
closing_no_fence abandoned
closing_end_no_fence abandoned
closing_unchecked abandoned
closing_not_moved abandoned
slice_awaits_on reclaim
written_early abandoned
replaced_early abandoned
tally_late tally
tally_relaxed tally
tally_read_once tally
runs_uncounted refused
refused_uncounted refused
refused_unreleased refused
refused_assumed refused
refused_relaxed refused
window_uncounted refused
refused_at_floor tenants
quota_in_two_steps tenants
floor_in_two_steps tenants
room_not_given_back tenants
evicted_still_charged tenants
hidden_by_protected tenants
LIST

if [[ -n $budget ]]; then
    hash=$(git rev-parse HEAD 2>/dev/null || echo 0)
    first=$((16#${hash:0:7} % ${#list[@]}))
    list=("${list[@]:first}" "${list[@]:0:first}")
    touched=$(git log -50 --format= --name-only -- src 2>/dev/null | sort -u || true)
    recent=()
    others=()
    for line in "${list[@]}"; do
        file=$(cd "$tree" && grep -rlF "cfg!(kvpool_mutant = \"${line%% *}\")" src | head -1 || true)
        if grep -qxF "$file" <<<"$touched"; then recent+=("$line"); else others+=("$line"); fi
    done
    list=(${recent[@]+"${recent[@]}"} ${others[@]+"${others[@]}"})
fi

left=()
for line in "${list[@]}"; do
    read -r mutant models <<<"$line"
    [[ $# -eq 0 || " $* " == *" $mutant "* ]] || continue
    if [[ -n $budget ]] && ((planted >= 10 && SECONDS > budget)); then
        left+=("$mutant")
        continue
    fi
    planted=$((planted + 1))
    # A bounded run gives a bug three minutes; slower bugs are left to an unbounded run.
    limit=()
    [[ -z $budget ]] || limit=(timeout 180)
    run=(${limit[@]+"${limit[@]}"} "$tree/loom-tests/run.sh" --locked)
    for model in $models; do run+=(--test "$model"); done
    start=$SECONDS
    status=0
    if ! grep -rqF "cfg!(kvpool_mutant = \"$mutant\")" "$tree/src"; then
        echo "BROKEN    $mutant is in no patch"
        survivors=$((survivors + 1))
        continue
    fi
    # Zero or one preemption suffices for most bugs, and takes a fraction of the time.
    for most in 0 1 9; do
        output=$(KVPOOL_MUTANT=$mutant KVPOOL_LOOM_PREEMPTIONS_MAX=$most "${run[@]}" 2>&1) || status=$?
        [[ $status == 0 ]] || break
    done
    if [[ $status == 0 ]]; then
        echo "SURVIVED  $mutant ($models)"
        survivors=$((survivors + 1))
    elif grep -q panicked <<<"$output"; then
        by=$(grep -om1 "thread '[^']*'" <<<"$output" || true)
        echo "caught    $mutant in $((SECONDS - start)) s by ${by#thread }: $(grep -m1 -A1 panicked <<<"$output" | tail -1)"
    elif [[ $status == 124 ]]; then
        echo "SLOW      $mutant: not decided in $((SECONDS - start)) s ($models)"
        left+=("$mutant")
    else
        echo "BROKEN    $mutant"
        tail -20 <<<"$output"
        survivors=$((survivors + 1))
    fi
done
if ((${#left[@]} > 0)); then
    echo "left to an unbounded run (${#left[@]} of ${#list[@]}): ${left[*]}"
fi
exit "$survivors"
