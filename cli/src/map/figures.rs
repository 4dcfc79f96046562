//! What can be counted in a panel.

use super::Frame;

/// The figures of a panel.
#[derive(Clone, PartialEq, Debug)]
pub struct Figures {
    /// Frames.
    pub frames: usize,
    /// Free ones, those that are away among them.
    pub free: usize,
    /// Of the free aligned runs of 2^k that there could be, the share that there is not. Frames
    /// that are away are free, and in none; where the first frame stays, being the null block's,
    /// there could be none.
    pub fragmentation: f64,
    /// Free aligned runs of 2^k.
    pub runs: usize,
    /// The longest free run, at any alignment.
    pub longest_run: usize,
    /// Blocks of sequences for each run of theirs: neighbours in a sequence that lie in neighbouring frames. 0 if no
    /// sequence has a block.
    pub sequence_run_mean: f64,
    /// Free frames by the order of the aligned run that they are in, when every free run is cut into as few as can be.
    pub by_order: Vec<usize>,
}

impl Figures {
    /// Counts. `order` is the pool's k.
    pub fn of(frames: &[Frame], order: u8) -> Self {
        let (mut in_runs, mut longest_run, mut by_order) = (0, 0, Vec::new());
        for (start, end) in free_runs(frames) {
            longest_run = longest_run.max(end - start);
            let (from, until) = aligned_part(start, end, order);
            in_runs += until - from;
            let mut at = start;
            while at < end {
                let order = at.trailing_zeros().min((end - at).ilog2()) as usize;
                by_order.resize(by_order.len().max(order + 1), 0);
                by_order[order] += 1 << order;
                at += 1 << order;
            }
        }
        let free = frames.iter().filter(|frame| frame.is_free()).count();
        let (blocks, sequence_runs) = sequence_runs(frames);
        let broken = usize::from(frames.first() == Some(&Frame::Fixed(None)));
        let possible = (free >> order).min((frames.len() >> order).saturating_sub(broken));
        let runs = in_runs >> order;
        Self {
            frames: frames.len(),
            free,
            fragmentation: if possible == 0 { 0.0 } else { 1.0 - runs as f64 / possible as f64 },
            runs,
            longest_run,
            sequence_run_mean: if sequence_runs == 0 { 0.0 } else { blocks as f64 / sequence_runs as f64 },
            by_order,
        }
    }
}

/// Blocks of sequences, and the runs that they are.
fn sequence_runs(frames: &[Frame]) -> (usize, usize) {
    let (mut blocks, mut runs, mut before) = (0, 0, None);
    for frame in frames {
        let owner = frame.owner();
        if let Some(owner) = owner {
            blocks += 1;
            let goes_on = |before: super::Owner| {
                before.sequence == owner.sequence && before.place.checked_add(1) == Some(owner.place)
            };
            runs += usize::from(!before.is_some_and(goes_on));
        }
        before = owner;
    }
    (blocks, runs)
}

/// The maximal runs of frames that are free and can be had: start and end.
pub(super) fn free_runs(frames: &[Frame]) -> impl Iterator<Item = (usize, usize)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at + frames[at..].iter().position(|&frame| frame == Frame::Free)?;
        let run = frames[start..].iter().position(|&frame| frame != Frame::Free);
        at = run.map_or(frames.len(), |run| start + run);
        Some((start, at))
    })
}

/// The part of a run that lies in aligned runs of 2^order: start and end, equal if there is none.
pub(super) fn aligned_part(start: usize, end: usize, order: u8) -> (usize, usize) {
    let from = start.next_multiple_of(1 << order);
    let until = end >> order << order;
    if from < until { (from, until) } else { (start, start) }
}
