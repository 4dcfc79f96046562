//! The links that each step of a plan joins and breaks, to find the steps that do not pay.
//!
//! A link counts for the step that moves its second block, or else its first one. The sums are
//! estimates for one step without the others: a link between blocks of two steps depends on both.

use crate::ids::FrameId;

use super::super::goal::{Move, Plan};
use super::super::snapshot::FrameState;
use super::map::{self, Map};

/// Stands for a frame to which no block moves.
const NONE: u32 = 0;

/// Returns the number of links that each step joins, less those that it breaks.
pub(super) fn links_gained(map: &Map<'_>, plan: &Plan) -> Vec<i64> {
    // For each frame, one more than the index of the move to it.
    let mut arrivals = vec![NONE; map.len()];
    let mut leaving = map.none();
    for (index, one) in (1..).zip(&plan.moves) {
        arrivals[one.to.index()] = index;
        map::put(&mut leaving, one.from, true);
    }
    let key = |frame: u32| map.state(frame).key();
    let leaves = |frame: u32| map::has(&leaving, frame);
    // The key of a frame after the moves, and whether its block has moved there.
    let after = |frame: u32| match arrivals[frame as usize] {
        NONE if leaves(frame) => (FrameState::FREE.key(), false),
        NONE => (key(frame), false),
        index => (key(plan.moves[index as usize - 1].from.0), true),
    };
    let last = map.len() as u32 - 1;
    let mut start = 0;
    let gained = |step: &[Move]| {
        let mut gained = 0;
        for one in step {
            let (from, to, moved) = (one.from.0, one.to.0, key(one.from.0));
            gained -= i64::from(from > 0 && key(from - 1) + 1 == moved);
            gained -= i64::from(from < last && !leaves(from + 1) && moved + 1 == key(from + 1));
            gained += i64::from(to > 0 && after(to - 1).0 + 1 == moved);
            gained += i64::from(to < last && after(to + 1) == (moved + 1, false));
            gained += room_gained(map, &after, one.from, one.to);
        }
        gained
    };
    plan.steps
        .iter()
        .map(|step| {
            let moves = &plan.moves[start..step.end];
            start = step.end;
            gained(moves)
        })
        .collect()
}

/// Returns the rooms gained by one move: that of the block itself, and that of a list which ends in
/// front of the destination.
fn room_gained(map: &Map<'_>, after: &impl Fn(u32) -> (u64, bool), from: FrameId, to: FrameId) -> i64 {
    let ends = map.snapshot.ends();
    if ends.is_empty() {
        return 0;
    }
    let is_room = |frame: u32, has_block: bool| {
        let is_free = |frame: u32| (frame as usize) < map.len() && map.state(frame).kind().is_free();
        is_free(frame) && !has_block
    };
    let mut gained = -i64::from(to.0 > 0 && map::has(ends, to.0 - 1));
    if map::has(ends, from.0) {
        let next = to.0 + 1;
        let is_taken = (next as usize) < map.len() && after(next).1;
        gained += i64::from(is_room(next, is_taken)) - i64::from(is_room(from.0 + 1, false));
    }
    gained
}
