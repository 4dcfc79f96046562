//! Pure functions on one bitmap word: its runs of set bits, which are free.

use crate::config::{FAN, FAN_LOG2};

pub(super) const ALL: u64 = ones(0, FAN as u32);

pub(super) const CLASSES: usize = FAN_LOG2 as usize + 1;

/// Number of orders for which leaf words are searched. The unit bit represents a wholly free leaf.
pub(super) const LEAF_CLASSES: usize = FAN_LOG2 as usize;

#[inline]
pub(super) const fn ones(pos: u32, len: u32) -> u64 {
    if len == 0 { 0 } else { (!0 >> (64 - len)) << pos }
}

/// Returns masks: element `k` has a bit at the start of every free aligned run of 2^k.
#[inline]
fn ladder(word: u64) -> [u64; 7] {
    let m0 = word;
    let m1 = m0 & (m0 >> 1) & 0x5555_5555_5555_5555;
    let m2 = m1 & (m1 >> 2) & 0x1111_1111_1111_1111;
    let m3 = m2 & (m2 >> 4) & 0x0101_0101_0101_0101;
    let m4 = m3 & (m3 >> 8) & 0x0001_0001_0001_0001;
    let m5 = m4 & (m4 >> 16) & 0x0000_0001_0000_0001;
    let m6 = m5 & (m5 >> 32) & 1;
    [m0, m1, m2, m3, m4, m5, m6]
}

/// Returns the *classes* of `word`: the number of orders, from 0 up, with a free aligned run.
#[inline]
pub(super) fn classes(word: u64) -> usize {
    let rungs = ladder(word);
    let mut count = 0;
    for rung in &rungs[..CLASSES] {
        // A run of 2^(k+1) contains two of 2^k, so the rungs empty from the top down.
        count += usize::from(*rung != 0);
    }
    count
}

/// Returns the lowest position for an aligned run of 2^`order`, preferably with a taken buddy.
#[inline]
pub(super) fn best_aligned(word: u64, order: usize) -> Option<u32> {
    let rungs = ladder(word);
    let runs = rungs[order];
    if runs == 0 {
        return None;
    }
    let paired = if order + 1 < CLASSES { rungs[order + 1] | rungs[order + 1] << (1 << order) } else { 0 };
    let lonely = runs & !paired;
    Some(if lonely != 0 { lonely } else { runs }.trailing_zeros())
}

/// Returns the best position for a run of `len`: in the shortest maximal run that holds it.
#[inline]
pub(super) fn best_run(word: u64, len: u32) -> Option<u32> {
    // Exits early if there is no such run. Each step doubles the length that a set bit represents.
    let (mut starts, mut have) = (word, 1);
    while have < len {
        let step = have.min(len - have);
        starts &= starts >> step;
        have += step;
    }
    if starts == 0 {
        return None;
    }
    // A maximal run of k leaves k - len + 1 consecutive bits: the shortest group is the best fit.
    let (mut best, mut best_slack) = (0, u32::MAX);
    while starts != 0 {
        let pos = starts.trailing_zeros();
        let slack = (starts >> pos).trailing_ones();
        if slack < best_slack {
            (best, best_slack) = (pos, slack);
            if slack == 1 {
                break;
            }
        }
        starts &= starts.wrapping_add(1 << pos);
    }
    Some(best)
}

/// Returns the longest run of set bits as `(pos, len)`, the lowest of several.
#[inline]
pub(super) fn longest_run(word: u64) -> Option<(u32, u32)> {
    runs(word)
        .fold(None, |best, run| if best.is_some_and(|(_, len)| len >= run.1) { best } else { Some(run) })
}

/// Returns every maximal run of set bits as `(pos, len)`, ascending.
#[inline]
pub(super) fn runs(mut word: u64) -> impl Iterator<Item = (u32, u32)> {
    std::iter::from_fn(move || {
        if word == 0 {
            return None;
        }
        let pos = word.trailing_zeros();
        let len = (word >> pos).trailing_ones();
        word &= !ones(pos, len);
        Some((pos, len))
    })
}

#[inline]
pub(super) fn low_bits(word: u64, count: u32) -> u64 {
    if count >= u64::BITS {
        return word;
    }
    let mut rest = word;
    for _ in 0..count {
        rest &= rest.wrapping_sub(1);
    }
    word & !rest
}

/// Returns the smallest class whose words *all* hold a run of `len`.
#[inline]
pub(super) fn class_that_holds(len: u32) -> usize {
    len.next_power_of_two().ilog2() as usize
}

/// Returns the largest class of every word that holds a run of `len`, at any alignment of the run.
#[inline]
pub(super) fn class_that_may_hold(len: u32) -> usize {
    len.div_ceil(2).ilog2() as usize
}

#[cfg(test)]
mod tests;
