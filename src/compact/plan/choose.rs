//! Which regions are emptied: the sparsest, as many as there are holes for (see [`plan`](super)).

use crate::config::FAN_LOG2;
use crate::ids::{FrameId, Order, Run};

use super::Shortfall;
use super::map::{self, Map};

/// What is emptied, and what for.
pub(super) struct Chosen {
    /// The regions, by number, cheapest first.
    pub regions: Vec<u32>,
    /// Blocks in them.
    pub moves: usize,
    /// Blocks that would move without a limit.
    pub moves_full: usize,
}

impl Chosen {
    /// What the limit has cost.
    pub(super) fn shortfall(&self) -> Option<Shortfall> {
        (self.moves < self.moves_full).then_some(Shortfall::Budget { needed: self.moves_full })
    }
}

/// The price of a region that cannot be emptied: something in it stays. A price is a number of moves; one that is free
/// costs 0.
const NEVER: u32 = u32::MAX;

/// The regions of `2^order` frames to be emptied with at most `moves_max` moves.
pub(super) fn sparsest(map: &Map<'_>, order: Order, moves_max: usize) -> Chosen {
    let run_len = order.frames();
    let regions = (map.len() >> order.0) as u32;
    let (free, movable) = (map::counts(&map.free, order), map::counts(&map.movable, order));
    let mut prices = Vec::with_capacity(regions as usize);
    // By price, and at the end those that have none.
    let mut by_price = vec![0_usize; run_len + 2];
    let mut holes = 0;
    for (&free, &movable) in free.iter().zip(&movable).take(regions as usize) {
        // Arithmetic instead of branches that nothing could foresee.
        let is_clear = (free + movable) as usize == run_len;
        prices.push(if is_clear { movable } else { NEVER });
        by_price[if is_clear { movable as usize } else { run_len + 1 }] += 1;
        holes += free as usize * usize::from(free < run_len as u32);
    }
    let candidates = by_price[1..=run_len].iter().sum::<usize>();
    let rest = regions << order.0;
    holes += map::count(&map.free, Run { start: FrameId(rest), len: map.len() as u32 - rest }) as usize;

    // How many regions of each price: the cheapest, while there are holes and budget.
    let (mut left, mut moves, mut moves_full) = (candidates.min(holes / run_len), 0, 0);
    let (mut dearest, mut of_dearest, mut count) = (0, 0, 0);
    for (price, &there) in by_price[..=run_len].iter().enumerate().skip(1) {
        let wanted = there.min(left);
        let bought = wanted.min((moves_max - moves) / price);
        left -= wanted;
        moves_full += wanted * price;
        moves += bought * price;
        count += bought;
        if bought > 0 {
            (dearest, of_dearest) = (price as u32, bought);
        }
    }

    // Counting sort by price; the last price is decided by `ties`.
    let mut at = vec![0; dearest as usize + 1];
    for price in 1..dearest as usize {
        at[price + 1] = at[price] + by_price[price];
    }
    let mut chosen = vec![0; count - of_dearest];
    let mut is_chosen = vec![false; regions as usize];
    let mut equals = Vec::new();
    for index in 0..regions {
        match prices[index as usize] {
            0 => {}
            price if price < dearest => {
                chosen[at[price as usize]] = index;
                at[price as usize] += 1;
                is_chosen[index as usize] = true;
            }
            price if price == dearest => equals.push(index),
            _ => {}
        }
    }
    if of_dearest < equals.len() {
        equals = ties(map, order, &prices, &is_chosen, equals);
    }
    chosen.extend_from_slice(&equals[..of_dearest]);
    Chosen { regions: chosen, moves, moves_full }
}

fn region(index: u32, order: Order) -> Run {
    Run { start: FrameId(index << order.0), len: order.frames() as u32 }
}

/// Equally dear regions, the most welcome first: those that no run of a sequence crosses into, and among them those
/// whose unit is the nearest to being free.
fn ties(map: &Map<'_>, order: Order, prices: &[u32], is_chosen: &[bool], equals: Vec<u32>) -> Vec<u32> {
    /// A unit that stays in use for certain is worse than one that lacks this many regions.
    const LACKING_MAX: usize = 15;
    const RANKS: usize = LACKING_MAX + 2;
    // Past the order of a unit, the buddy is what there is to be completed.
    let up = u32::from(order.0).max(FAN_LOG2 - 1) + 1 - u32::from(order.0);
    let rank = |index: u32| {
        let (run, price) = (region(index, order), prices[index as usize]);
        let stays = |frame: u32| !is_chosen[(frame >> order.0) as usize];
        let (before, last) = (run.start.0.wrapping_sub(1), run.end() - 1);
        let is_crossed_at_start = index > 0 && map.is_linked(before) && stays(before);
        // Past the last whole region, everything stays.
        let is_crossed_at_end =
            map.is_linked(last) && is_chosen.get(index as usize + 1).is_none_or(|is_chosen| !is_chosen);
        let crossings = usize::from(is_crossed_at_start) + usize::from(is_crossed_at_end);
        let first = (index >> up << up) as usize;
        let mut lacking = 0;
        for at in first..first + (1 << up) {
            lacking += match prices.get(at) {
                _ if is_chosen.get(at) == Some(&true) => 0,
                Some(0) => 0,
                Some(other) if *other == price => 1,
                _ => RANKS,
            };
        }
        crossings * RANKS + lacking.min(RANKS - 1)
    };
    let ranks: Vec<u8> = equals.iter().map(|index| rank(*index) as u8).collect();
    let mut at = [0; 3 * RANKS + 1];
    ranks.iter().for_each(|rank| at[*rank as usize + 1] += 1);
    (1..at.len()).for_each(|rank| at[rank] += at[rank - 1]);
    let mut sorted = vec![0; equals.len()];
    for (index, rank) in equals.into_iter().zip(ranks) {
        sorted[at[rank as usize]] = index;
        at[rank as usize] += 1;
    }
    sorted
}
