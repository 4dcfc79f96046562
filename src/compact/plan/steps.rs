//! The gain of each step of a plan. A link counts for the step that moves its second block, or else
//! its first. The sums are estimates: links and free runs that depend on two steps are inexact.

use crate::ids::FrameId;

use super::super::goal::{Move, Plan};
use super::super::snapshot::FrameState;
use super::map::{self, Map};

const NONE: u32 = 0;

#[derive(Clone, Copy, Default)]
pub(super) struct Gain {
    free_joins: i64,
    pub joins: usize,
    pub breaks: usize,
    rooms: i64,
}

impl Gain {
    pub(super) const fn worth(&self, price: i64) -> i64 {
        self.free_joins + price * (self.joins as i64 - self.breaks as i64 + self.rooms)
    }
}

pub(super) fn gains(map: &Map<'_>, plan: &Plan) -> Vec<Gain> {
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
    let free_after = map.free_after(&plan.moves);
    let mut start = 0;
    let gained = |step: &[Move]| {
        let mut gain = Gain::default();
        for one in step {
            let (from, to, moved) = (one.from.0, one.to.0, key(one.from.0));
            let had_last = from > 0 && key(from - 1) + 1 == moved;
            let has_last = to > 0 && after(to - 1).0 + 1 == moved;
            let had_next = from < last && !leaves(from + 1) && moved + 1 == key(from + 1);
            let has_next = to < last && after(to + 1) == (moved + 1, false);
            gain.joins += usize::from(has_last && !had_last) + usize::from(has_next);
            gain.breaks += usize::from(had_last && !has_last) + usize::from(had_next);
            gain.rooms += room_gained(map, &after, one.from, one.to);
            gain.free_joins += starts_removed(&map.free, &free_after, one.to, one.from, last);
        }
        gain
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

fn starts_removed(before: &[u64], after: &[u64], filled: FrameId, vacated: FrameId, last: u32) -> i64 {
    let is_start =
        |free: &[u64], frame: u32| map::has(free, frame) && (frame == 0 || !map::has(free, frame - 1));
    let removed = |frame: u32| i64::from(is_start(before, frame)) - i64::from(is_start(after, frame));
    // A frame after another one that changes is counted there, if it changes as well.
    let is_counted = |frame: u32| map::has(before, frame) != map::has(after, frame);
    let behind = |frame: u32| if frame < last && !is_counted(frame + 1) { removed(frame + 1) } else { 0 };
    removed(filled.0) + behind(filled.0) + removed(vacated.0) + behind(vacated.0)
}

/// Returns the rooms gained by a move: the block's, and that of a list that ends before `to`.
fn room_gained(map: &Map<'_>, after: &impl Fn(u32) -> (u64, bool), from: FrameId, to: FrameId) -> i64 {
    let ends = map.snapshot.ends();
    if ends.is_empty() {
        return 0;
    }
    let is_room = |frame: u32, has_block: bool| map.is_room(frame) && !has_block;
    let mut gained = -i64::from(to.0 > 0 && map::has(ends, to.0 - 1));
    if map::has(ends, from.0) {
        let next = to.0 + 1;
        let is_taken = (next as usize) < map.len() && after(next).1;
        gained += i64::from(is_room(next, is_taken)) - i64::from(is_room(from.0 + 1, false));
    }
    gained
}
