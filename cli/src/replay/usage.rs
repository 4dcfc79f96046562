//! What open sequences hold, over all threads: tokens, and frames in each group of layers.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

/// See the [module](self). All counters are figures, and Relaxed.
pub struct Usage {
    /// Negative for a moment, if a sequence is closed in the step in which it grew.
    tokens: AtomicI64,
    peak_tokens: AtomicI64,
    groups: usize,
    /// Of each thread and group.
    frames: Vec<AtomicU64>,
}

impl Usage {
    pub fn new(threads: usize, groups: usize) -> Self {
        let frames = (0..threads * groups).map(|_| AtomicU64::new(0)).collect();
        Self { tokens: AtomicI64::new(0), peak_tokens: AtomicI64::new(0), groups, frames }
    }

    /// Adds tokens that have blocks: of a step, or of an admission.
    pub fn grow(&self, tokens: u64) {
        let now = self.tokens.fetch_add(tokens as i64, Relaxed) + tokens as i64;
        // Read first: the peak rarely changes, and all threads read it.
        if self.peak_tokens.load(Relaxed) < now {
            self.peak_tokens.fetch_max(now, Relaxed);
        }
    }

    /// Subtracts the tokens of a closed sequence.
    pub fn close(&self, tokens: u64) {
        self.tokens.fetch_sub(tokens as i64, Relaxed);
    }

    pub fn tokens(&self) -> u64 {
        self.tokens.load(Relaxed).max(0) as u64
    }

    pub fn peak_tokens(&self) -> u64 {
        self.peak_tokens.load(Relaxed).max(0) as u64
    }

    /// Publishes the frames of a thread's sequences in a group.
    pub fn set_frames(&self, thread: usize, group: usize, frames: usize) {
        self.frames[thread * self.groups + group].store(frames as u64, Relaxed);
    }

    /// Returns the frames in each group.
    pub fn frames(&self) -> impl Iterator<Item = u64> {
        let of = |group| self.frames.iter().skip(group).step_by(self.groups);
        (0..self.groups).map(move |group| of(group).map(|frames| frames.load(Relaxed)).sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_have_a_peak_and_frames_a_sum_over_threads() {
        let usage = Usage::new(2, 3);
        usage.grow(100);
        usage.grow(20);
        usage.close(100);
        usage.grow(30);
        assert_eq!((usage.tokens(), usage.peak_tokens()), (50, 120));
        for (thread, group, frames) in [(0, 0, 5), (1, 0, 7), (1, 2, 1), (1, 0, 6)] {
            usage.set_frames(thread, group, frames);
        }
        assert_eq!(usage.frames().collect::<Vec<_>>(), [11, 0, 1]);
        assert_eq!(Usage::new(2, 0).frames().count(), 0);
    }
}
