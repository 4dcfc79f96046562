//! Chooses the regions to empty: the sparsest, as many as the holes allow (see [`plan`](super)).
//!
//! If breaks have a price, regions whose borders no run of a sequence crosses come first: a
//! crossing run ends at the border, unless the blocks on both sides move together.

use crate::config::FAN_LOG2;
use crate::ids::{FrameId, Order, Run};

use super::super::goal::Shortfall;
use super::map::{self, Map};

pub(super) struct Chosen {
    /// Region numbers, cheapest first.
    pub regions: Vec<u32>,
    /// Number of blocks in the regions.
    pub moves: usize,
    /// The same without the limit.
    pub moves_full: usize,
}

impl Chosen {
    pub(super) fn shortfall(&self) -> Option<Shortfall> {
        (self.moves < self.moves_full).then_some(Shortfall::Budget { needed: self.moves_full })
    }
}

/// Price of a region that cannot be emptied, because a frame is neither free nor movable. A free
/// region costs 0; others cost their number of moves, plus `2^order` for each border that a run
/// crosses, if breaks have a price.
const NEVER: u32 = u32::MAX;

/// With `spares_runs`, regions whose borders no run crosses come first.
pub(super) fn sparsest(map: &Map<'_>, order: Order, moves_max: usize, spares_runs: bool) -> Chosen {
    let run_len = order.frames();
    // Regions of at least 2^26 frames: a pool has few, and prices must fit.
    let spares_runs = spares_runs && order.0 < 26;
    let price_max = if spares_runs { 3 * run_len } else { run_len };
    let regions = (map.len() >> order.0) as u32;
    let (free, movable) = (map::counts(&map.free, order), map::counts(&map.movable, order));
    let mut prices = Vec::with_capacity(regions as usize);
    // Number of regions by price; the last entry counts those that cannot be emptied.
    let mut by_price = vec![0_usize; price_max + 2];
    let (mut holes, mut is_crossed) = (0, false);
    let counts = free.iter().zip(&movable).take(regions as usize);
    for (index, (&free, &movable)) in (0..regions).zip(counts) {
        let mut price = movable;
        if spares_runs {
            let was_crossed = is_crossed;
            let last = ((index + 1) << order.0) - 1;
            is_crossed = !map::has(&map.free, last) && map.is_linked(last);
            price += (u32::from(was_crossed) + u32::from(is_crossed)) << order.0;
        }
        let is_clear = (free + movable) as usize == run_len;
        let price = if is_clear { price } else { NEVER };
        prices.push(price);
        by_price[(price as usize).min(price_max + 1)] += 1;
        holes += free as usize * usize::from(free < run_len as u32);
    }
    let candidates = by_price[1..=price_max].iter().sum::<usize>();
    let rest = regions << order.0;
    holes += map::count(&map.free, Run { start: FrameId(rest), len: map.len() as u32 - rest }) as usize;

    // The number of regions to take at each price: the cheapest, while holes and budget last.
    let (mut left, mut moves, mut moves_full) = (candidates.min(holes / run_len), 0, 0);
    let (mut dearest, mut of_dearest, mut count, mut is_spent) = (0, 0, 0, false);
    for (price, &there) in by_price[..=price_max].iter().enumerate().skip(1) {
        let wanted = there.min(left);
        // The number of blocks in the price: from 1 to the length of a run.
        let each = (price - 1) % run_len + 1;
        // Nothing after a region that exceeds the budget: the chosen ones are a prefix.
        let bought = if is_spent { 0 } else { wanted.min((moves_max - moves) / each) };
        is_spent |= bought < wanted;
        left -= wanted;
        moves_full += wanted * each;
        moves += bought * each;
        count += bought;
        if bought > 0 {
            (dearest, of_dearest) = (price as u32, bought);
        }
    }

    // Counting sort by price; `ties` decides among regions of the highest price.
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

/// Sorts regions of equal price, best first: those whose borders no run of a sequence crosses, and
/// among them those whose unit lacks the fewest regions to be free.
fn ties(map: &Map<'_>, order: Order, prices: &[u32], is_chosen: &[bool], equals: Vec<u32>) -> Vec<u32> {
    /// A unit that remains in use ranks after one that lacks this many regions.
    const LACKING_MAX: usize = 15;
    const RANKS: usize = LACKING_MAX + 2;
    // From the order of a unit on, the buddy region replaces the unit.
    let up = u32::from(order.0).max(FAN_LOG2 - 1) + 1 - u32::from(order.0);
    let rank = |index: u32| {
        let (run, price) = (region(index, order), prices[index as usize]);
        let stays = |frame: u32| !is_chosen[(frame >> order.0) as usize];
        let (before, last) = (run.start.0.wrapping_sub(1), run.end() - 1);
        let is_crossed_at_start = index > 0 && map.is_linked(before) && stays(before);
        // Beyond the last whole region, all blocks stay.
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
