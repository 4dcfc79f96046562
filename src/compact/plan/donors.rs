//! Chooses the frames to fill: the holes of the fullest regions.
//!
//! A region's *vacancy* is the number of its frames that are free once the plan has emptied its
//! regions. Regions are filled in ascending order of vacancy, all of one vacancy together, so that
//! the placement can choose. Entirely free regions come last, one at a time. The rooms of growing
//! lists stay free if the other holes suffice.

use crate::ids::Order;

use super::map::{self, Map};

/// Returns the frames outside of `region` that the plan may fill: at least `needed`, if possible.
pub(super) fn open(map: &Map<'_>, order: Order, region: &[u64], needed: usize) -> Vec<u64> {
    let all: Vec<u64> = map.free.iter().zip(region).map(|(free, region)| free & !region).collect();
    let rooms = map.rooms(&all, map.snapshot.ends());
    if rooms.is_empty() {
        return fullest(map, order, region, needed, all);
    }
    let others: Vec<u64> = all.iter().zip(&rooms).map(|(all, rooms)| all & !rooms).collect();
    let in_runs = map::free_runs(&all, order) << order.0;
    let free: usize = others.iter().map(|word| word.count_ones() as usize).sum();
    let open = if free >= needed + in_runs { others } else { all };
    fullest(map, order, region, needed, open)
}

fn fullest(map: &Map<'_>, order: Order, region: &[u64], needed: usize, mut open: Vec<u64>) -> Vec<u64> {
    let run_len = order.frames() as u32;
    let regions = (map.len() as u32).div_ceil(run_len);
    let vacant: Vec<u64> = map.free.iter().zip(region).map(|(free, region)| free | region).collect();
    let (mut vacancies, counts) = (map::counts(&vacant, order), map::counts(&open, order));
    let mut holes = vec![0; run_len as usize + 1];
    for (vacancy, count) in vacancies.iter().zip(&counts) {
        holes[*vacancy as usize] += *count as usize;
    }
    let mut have = 0;
    let last = (0..run_len as usize).find(|vacancy| {
        have += holes[*vacancy];
        have >= needed
    });
    let limit = last.map_or(run_len - 1, |vacancy| vacancy as u32);
    let spare = |index: &u32| vacancies[*index as usize] == run_len;
    if have < needed {
        // Free runs have to be filled: first those whose unit stays in use anyway.
        let unit = |index: u32| {
            let first = (index * run_len / 64) as usize;
            vacant[first..first + run_len.div_ceil(64) as usize].iter().all(|word| *word == !0)
        };
        let (whole, broken): (Vec<u32>, Vec<u32>) =
            (0..regions).filter(spare).partition(|index| unit(*index));
        for index in broken.into_iter().chain(whole) {
            if have >= needed {
                break;
            }
            vacancies[index as usize] = 0;
            have += counts[index as usize] as usize;
        }
    }
    if order.0 < 6 {
        // Without a branch, because the vacancies of regions are unpredictable.
        let ones = (1 << run_len) - 1_u64;
        for (index, vacancy) in vacancies.iter().enumerate() {
            let at = index << order.0;
            open[at / 64] &= !((ones * u64::from(*vacancy > limit)) << (at % 64));
        }
    } else {
        let words = open.chunks_mut(1 << (order.0 - 6)).zip(&vacancies);
        words.filter(|(_, vacancy)| **vacancy > limit).for_each(|(run, _)| run.fill(0));
    }
    open
}
