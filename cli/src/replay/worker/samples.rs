//! Samples of the pool over virtual time.

use super::super::layers::Group;
use super::super::scheduler::Running;
use super::{Open, Worker};

impl Worker<'_> {
    /// Returns false in a closed loop until the pool is filled, and once no request waits.
    pub(super) fn is_steady(&self) -> bool {
        self.at.options.fill.is_none() || self.is_filled && self.scheduler.has_waiting()
    }

    /// Samples the pool at intervals, on the first thread; in a closed loop at each step.
    pub(super) fn sample(&mut self) {
        let is_due = self.at.options.fill.is_some() || self.clock_ns >= self.next_sample_ns;
        if self.thread != 0 || !is_due || !self.is_steady() {
            return;
        }
        self.next_sample_ns = self.clock_ns + self.at.options.sample_ns;
        let free = self.at.pool.free_blocks();
        self.tally.utilization.add(1.0 - free as f64 / self.at.pool.total_blocks() as f64);
        let fragmentation = self.at.pool.fragmentation();
        self.tally.fragmentation.add(fragmentation.rate);
        self.tally
            .reserved_for_growth
            .add(fragmentation.reserved_for_growth as f64 / self.at.pool.total_blocks() as f64);
        for (group, frames) in self.tally.groups.iter_mut().zip(self.at.usage.frames()) {
            group.frames.add(frames as f64);
        }
    }

    /// Publishes the frames of this thread's sequences in each group.
    pub(super) fn publish_frames(&mut self) {
        for (index, Group { lists, state_frames, .. }) in self.at.pool.groups().iter().enumerate() {
            let frames = match lists.len() {
                0 => self.scheduler.running().len() * state_frames,
                lists_of_group => {
                    let held = |running: &Running<Open>| running.sequence.sequence.held_blocks(lists.start);
                    self.scheduler.running().iter().map(held).sum::<usize>() * lists_of_group
                }
            };
            self.at.usage.set_frames(self.thread, index, frames);
        }
    }
}
