//! Plans for goals at a given place.

use crate::frame::cheapest_window;
use crate::ids::{FrameId, Order, Run};

use super::super::goal::{Move, Plan, Shortfall, Step};
use super::super::snapshot::FrameKind;
use super::map::{self, Map};
use super::place::place;

/// Plans for [`Goal::Run`](crate::compact::Goal::Run): a sliding window finds the run with the
/// fewest blocks. There are enough destinations if at least as many frames are free as the run is
/// long: the free frames inside the run are among them.
pub(super) fn run(map: &Map<'_>, len: u32, moves_max: usize) -> Plan {
    let frames = map.len();
    let refused = |shortfall| Plan { shortfall: Some(shortfall), ..Plan::default() };
    if len == 0 {
        return Plan { window: Some(Run { start: FrameId(0), len }), ..Plan::default() };
    }
    if len as usize > frames {
        return refused(Shortfall::Outside { frames });
    }
    let free = map.free.iter().map(|word| word.count_ones() as usize).sum();
    if free < len as usize {
        return refused(Shortfall::Free { free, needed: len as usize });
    }
    let Some((window, needed)) = with_fewest_blocks(map, len) else { return refused(Shortfall::Fixed) };
    if needed > moves_max {
        return refused(Shortfall::Budget { needed });
    }
    Plan { window: Some(window), ..vacate(map, window, needed) }
}

pub(super) fn empty(map: &Map<'_>, region: Run, moves_max: usize) -> Plan {
    let frames = map.len();
    // In 64 bits: the end of an arbitrary region may exceed a frame number.
    if u64::from(region.start.0) + u64::from(region.len) > frames as u64 {
        return Plan { shortfall: Some(Shortfall::Outside { frames }), ..Plan::default() };
    }
    let needed = map::count(&map.movable, region) as usize;
    let all: usize = map.free.iter().map(|word| word.count_ones() as usize).sum();
    let free = all - map::count(&map.free, region) as usize;
    let shortfall = if needed > free {
        Some(Shortfall::Free { free, needed })
    } else {
        (needed > moves_max).then_some(Shortfall::Budget { needed })
    };
    let of_kind =
        |kind| region.frames().filter(move |frame| map.state(frame.0).kind() == kind).collect::<Vec<_>>();
    Plan {
        fixed: of_kind(FrameKind::Fixed),
        away: of_kind(FrameKind::Away),
        shortfall,
        ..vacate(map, region, needed.min(free).min(moves_max))
    }
}

fn vacate(map: &Map<'_>, region: Run, count: usize) -> Plan {
    let mut moves = Vec::with_capacity(count);
    map.each_movable(region, |from| {
        if moves.len() < count {
            moves.push(Move::unplaced(from));
        }
    });
    if moves.is_empty() {
        return Plan::default();
    }
    let (mut closed, mut leaving) = (map.none(), map.none());
    map::set(&mut closed, region);
    moves.iter().for_each(|one| map::put(&mut leaving, one.from, true));
    // A pool shorter than its own runs still has fuller and emptier parts.
    let order = Order(map.snapshot.order().0.min(map.len().ilog2() as u8));
    let links = place(map, order, &closed, &leaving, &mut moves);
    let mut free = map.free.clone();
    for &Move { from, to } in &moves {
        map::put(&mut free, from, true);
        map::put(&mut free, to, false);
    }
    Plan {
        free_joins: map.free_joins(&moves),
        rooms_gained: map.rooms_gained(&moves),
        moves,
        steps: vec![Step { region, end: count }],
        runs_gained: map::free_runs(&free, order) as isize - map::free_runs(&map.free, order) as isize,
        joins: links.joins,
        breaks: links.breaks,
        ..Plan::default()
    }
}

/// Returns the run of `len` frames with the fewest blocks, all movable, and their number. Prefers
/// borders that few runs of sequences cross.
fn with_fewest_blocks(map: &Map<'_>, len: u32) -> Option<(Run, usize)> {
    let moves = |frame: usize| match frame as u32 {
        frame if map::has(&map.movable, frame) => Some(1),
        frame => map::has(&map.free, frame).then_some(0),
    };
    let crossings = |start: usize| {
        let start = start as u32;
        u32::from(start > 0 && map.is_linked(start - 1)) + u32::from(map.is_linked(start + len - 1))
    };
    let (start, moves) = cheapest_window(map.len(), len as usize, moves, crossings)?;
    Some((Run { start: FrameId(start as u32), len }, moves as usize))
}
