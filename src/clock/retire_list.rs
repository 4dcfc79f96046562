use std::collections::VecDeque;

use crate::ids::{Run, Ticket};

#[derive(Clone, Copy)]
struct Entry {
    run: Run,
    tag: Ticket,
}

/// One thread's retired frames, oldest first. Plain memory, in the thread's cell. Frames freed in
/// sequence (a sequence's run, forwards or backwards) form one entry.
#[derive(Default)]
pub struct RetireList {
    entries: VecDeque<Entry>,
    frames: usize,
}

impl RetireList {
    /// Returns the number of frames.
    #[inline]
    pub fn len(&self) -> usize {
        self.frames
    }

    /// Returns whether the list is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.frames == 0
    }

    /// Retires a run until every batch with a ticket up to `tag` has ended.
    pub fn retire(&mut self, run: Run, tag: Ticket) {
        self.frames += run.len as usize;
        // A run with an older tag may join the last entry: it waits longer, never shorter.
        if let Some(last) = self.entries.back_mut()
            && tag <= last.tag
            && let Some(joined) = last.run.join(run)
        {
            last.run = joined;
            return;
        }
        self.entries.push_back(Entry { run, tag });
    }

    /// Removes the runs at the front with a tag below `oldest`, and passes them to `free`.
    pub fn reclaim(&mut self, oldest: Ticket, mut free: impl FnMut(Run)) {
        while let Some(&entry) = self.entries.front()
            && entry.tag < oldest
        {
            self.entries.pop_front();
            self.frames -= entry.run.len as usize;
            free(entry.run);
        }
    }

    /// Returns the retired runs.
    pub fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        self.entries.iter().map(|entry| entry.run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::FrameId;

    fn run(start: u32, len: u32) -> Run {
        Run { start: FrameId(start), len }
    }

    #[test]
    fn runs_are_joined_and_wait_for_their_tag() {
        let mut retire_list = RetireList::default();
        for frame in [4, 5, 6, 3] {
            retire_list.retire(run(frame, 1), Ticket(1));
        }
        retire_list.retire(run(7, 1), Ticket(2));
        assert_eq!((retire_list.len(), retire_list.runs().count()), (5, 2));
        let mut freed = vec![];
        retire_list.reclaim(Ticket(1), |run| freed.push(run));
        assert!(freed.is_empty());
        retire_list.reclaim(Ticket(2), |run| freed.push(run));
        assert_eq!(freed, [run(3, 4)]);
        retire_list.reclaim(Ticket(3), |run| freed.push(run));
        assert_eq!(freed[1], run(7, 1));
        assert!(retire_list.is_empty());
    }
}
