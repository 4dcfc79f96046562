//! Which frames are filled: the holes of the fullest regions.
//!
//! A region's *vacancy* is what of it is free once everything that the plan empties is. Regions are filled in ascending
//! order of vacancy, whole buckets at a time, so that the placement can choose among equals; those that will be wholly
//! free come last, one at a time, and only if nothing else is left.

use crate::ids::{FrameId, Order, Run};

use super::map::{self, Map};

/// The free frames outside of `region` that the plan may fill: at least `needed` of them, if there are as many.
pub(super) fn open(map: &Map<'_>, order: Order, region: &[u64], needed: usize) -> Vec<u64> {
    let (len, run_len) = (map.len() as u32, order.frames() as u32);
    let regions = len.div_ceil(run_len);
    let run = |index: u32| {
        let start = index * run_len;
        Run { start: FrameId(start), len: run_len.min(len - start) }
    };
    let mut open: Vec<u64> = map.free.iter().zip(region).map(|(free, region)| free & !region).collect();
    let vacant: Vec<u64> = map.free.iter().zip(region).map(|(free, region)| free | region).collect();
    let (vacancies, mut counts) = (map::counts(&vacant, order), map::counts(&open, order));
    counts.truncate(regions as usize);
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
    let mut wanted = vec![false; regions as usize];
    if have < needed {
        // Free runs have to be filled: those first whose unit is not free in any case.
        let unit = |index: u32| {
            let first = index * run_len / 64;
            vacant[first as usize..(first + run_len.div_ceil(64)) as usize].iter().all(|word| *word == !0)
        };
        let (whole, broken): (Vec<u32>, Vec<u32>) =
            (0..regions).filter(spare).partition(|index| unit(*index));
        for index in broken.into_iter().chain(whole) {
            if have >= needed {
                break;
            }
            wanted[index as usize] = true;
            have += counts[index as usize] as usize;
        }
    }
    for index in 0..regions {
        if vacancies[index as usize] > limit && !wanted[index as usize] {
            map::words(run(index)).for_each(|(word, mask)| open[word] &= !mask);
        }
    }
    open
}
