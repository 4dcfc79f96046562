//! The bounded queue between callers and the threads of a tier.
//!
//! Reads go first. Puts are dropped where they find no room: a tier that is slower than the pool keeps a
//! part of the blocks, and delays nothing.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::work::{Task, Work};

#[derive(Default)]
struct Waiting {
    reads: VecDeque<Task>,
    puts: VecDeque<Task>,
    /// Keys of `reads`, and values of `puts`.
    read_keys: usize,
    put_values: usize,
    is_closed: bool,
}

pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    ready: Condvar,
    reads_max: usize,
    puts_max: usize,
}

impl Queue {
    pub(super) fn new(reads_max: usize, puts_max: usize) -> Self {
        Self { waiting: Mutex::default(), ready: Condvar::new(), reads_max, puts_max }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a task, or returns it if there is no room or the queue is closed.
    pub(super) fn push(&self, task: Task) -> Result<(), Task> {
        let (mut waiting, keys) = (self.waiting(), task.work.len());
        let is_put = matches!(task.work, Work::Put(_));
        let (wait, max) =
            if is_put { (waiting.put_values, self.puts_max) } else { (waiting.read_keys, self.reads_max) };
        if waiting.is_closed || wait + keys > max {
            return Err(task);
        }
        if is_put {
            waiting.put_values += keys;
            waiting.puts.push_back(task);
        } else {
            waiting.read_keys += keys;
            waiting.reads.push_back(task);
        }
        drop(waiting);
        self.ready.notify_one();
        Ok(())
    }

    /// Waits for a task; `None` once the queue is closed.
    pub(super) fn pop(&self) -> Option<Task> {
        let mut waiting = self.waiting();
        loop {
            if waiting.is_closed {
                return None;
            }
            if let Some(task) = waiting.reads.pop_front() {
                waiting.read_keys -= task.work.len();
                return Some(task);
            }
            if let Some(task) = waiting.puts.pop_front() {
                waiting.put_values -= task.work.len();
                return Some(task);
            }
            waiting = self.ready.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Removes the tasks of calls that are over, and returns them: their memory is free again, even
    /// if no thread ever takes a task.
    pub(super) fn sweep(&self) -> Vec<Task> {
        let mut waiting = self.waiting();
        let is_over = |task: &Task| task.results.is_over();
        let (mut over, reads): (VecDeque<_>, _) = waiting.reads.drain(..).partition(is_over);
        let (puts_over, puts): (VecDeque<_>, _) = waiting.puts.drain(..).partition(is_over);
        (waiting.reads, waiting.puts) = (reads, puts);
        let keys = |tasks: &VecDeque<Task>| tasks.iter().map(|task| task.work.len()).sum::<usize>();
        waiting.read_keys -= keys(&over);
        waiting.put_values -= keys(&puts_over);
        over.extend(puts_over);
        over.into()
    }

    /// Accepts no further tasks, and returns those that wait.
    pub(super) fn close(&self) -> Vec<Task> {
        let mut waiting = self.waiting();
        waiting.is_closed = true;
        let (reads, puts) = (std::mem::take(&mut waiting.reads), std::mem::take(&mut waiting.puts));
        drop(waiting);
        self.ready.notify_all();
        reads.into_iter().chain(puts).collect()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.waiting().is_closed
    }
}

#[cfg(test)]
mod tests {
    use kvpool::prefix::BlockHash;

    use super::super::key::{Fingerprint, TierKey};
    use super::super::value::TierValue;
    use super::super::work::Results;
    use super::*;

    fn task(keys: usize, is_put: bool) -> Task {
        let fingerprint = Fingerprint::from_bytes([0; 16]);
        let key = |hash| TierKey { fingerprint, hash: BlockHash::new(hash, 0) };
        let all = (0..keys).map(|hash| key(hash as u128));
        let value = |key| TierValue::new(key, &[], 0, |_| Ok::<_, ()>(())).unwrap();
        let work = if is_put { Work::Put(all.map(value).collect()) } else { Work::Exists(all.collect()) };
        Task { work, places: (0..keys).collect(), results: Results::new(keys) }
    }

    fn shape(task: &Task) -> (bool, usize) {
        (matches!(task.work, Work::Put(_)), task.work.len())
    }

    #[test]
    fn reads_go_first_and_both_are_bounded() {
        let queue = Queue::new(10, 4);
        for (keys, is_put, has_room) in
            [(3, true, true), (2, true, false), (1, true, true), (10, false, true), (1, false, false)]
        {
            assert_eq!(queue.push(task(keys, is_put)).is_ok(), has_room, "{keys} {is_put}");
        }
        let next = || shape(&queue.pop().unwrap());
        assert_eq!([next(), next(), next()], [(false, 10), (true, 3), (true, 1)]);
        let (over, put) = (task(7, false), task(4, true));
        drop(over.results.clone().wait(std::time::Instant::now()));
        assert!(queue.push(over).is_ok() && queue.push(put).is_ok());
        assert_eq!(queue.sweep().iter().map(shape).collect::<Vec<_>>(), [(false, 7)]);
        assert!(queue.push(task(11, false)).is_err() && queue.push(task(1, true)).is_err());
        assert_eq!(queue.close().iter().map(shape).collect::<Vec<_>>(), [(true, 4)]);
        assert!(queue.pop().is_none() && queue.push(task(1, false)).is_err());
    }
}
