//! Tasks: waiting allocations, compaction and resizes; polled, dropped, and checked when they end.

use std::cmp::Reverse;
use std::task::Poll;
use std::time::Duration;

use kvpool::compact::{
    DefragConfig, DefragError, DefragOptions, DefragReport, Defragmenter, ResizeError, ResizeOptions,
};
use kvpool::{AllocError, AllocRequest, GrowError, Order, Priority, ShrinkError};
use tokio::time::Instant;

use super::tasks::{Kind, Outcome, Task};
use super::world::World;

/// Maximum number of tasks at a time.
const TASKS_MAX: usize = 12;

impl Task {
    pub fn is_resize(&self) -> bool {
        matches!(self.kind, Kind::Resize(_)) && self.came.is_some()
    }

    /// Returns the place in the queue, as a sort key, and the request.
    fn in_line(&self) -> Option<((Reverse<Priority>, u64), AllocRequest)> {
        match self.kind {
            Kind::Allocate { request, .. } => Some(((Reverse(request.priority), self.came?), request)),
            _ => None,
        }
    }
}

impl World {
    fn spawn(&mut self, kind: Kind, future: impl Future<Output = Outcome> + 'static) {
        let number = self.number();
        self.note(format_args!("task {number}: {kind:?}"));
        self.tasks.push(Task::new(number, kind, future));
    }

    pub fn allocate_and_wait(&mut self) {
        if self.tasks.len() >= TASKS_MAX {
            return;
        }
        let (request, pool) = (self.some_request(), self.pool.clone());
        let has_deadline = self.rng.u8(..4) == 0;
        let kind = Kind::Allocate { request, has_deadline };
        if has_deadline {
            let deadline = (Instant::now() + Duration::from_millis(self.rng.u64(..60))).into_std();
            self.spawn(kind, async move {
                Outcome::Allocated(pool.allocate_async(request).until(deadline).await)
            });
        } else {
            self.spawn(kind, async move { Outcome::Allocated(pool.allocate_async(request).await) });
        }
    }

    fn some_options(&mut self) -> DefragOptions {
        let price = self.rng.u32(..3);
        let mut options = DefragOptions::new().wave_bytes(1 + self.wave_bytes()).fragmentation_penalty(price);
        options.order = self.rng.bool().then(|| Order(self.rng.u8(..6)));
        options.budget_bytes = (self.rng.u8(..3) == 0).then(|| self.wave_bytes() as u64);
        options
    }

    fn wave_bytes(&mut self) -> usize {
        let blocks = if self.rng.bool() { 4 } else { 100 };
        self.rng.usize(..blocks * self.pool.layout().bytes_per_block())
    }

    pub fn defragment(&mut self) {
        if self.tasks.len() < TASKS_MAX {
            let (options, pool) = (self.some_options(), self.pool.clone());
            self.spawn(Kind::Defragment(options), async move {
                Outcome::Defragmented(pool.defragment_with(options).await)
            });
        }
    }

    pub fn resize(&mut self) {
        if self.tasks.len() >= TASKS_MAX {
            return;
        }
        let (total, max) = (self.pool.total_blocks(), self.pool.blocks().config().frames_max);
        let blocks = match self.rng.u8(..10) {
            0 => self.rng.usize(..=max),
            1..4 => self.rng.usize(total..=max.max(total)),
            // Most of the free blocks go, or slightly more.
            _ => self
                .rng
                .usize(total - self.pool.available_blocks()..=total)
                .saturating_sub(self.rng.usize(..3)),
        };
        let options = ResizeOptions::new()
            .patience(Duration::from_millis(self.rng.u64(..50)))
            .moves(DefragOptions::new().wave_bytes(1 + self.wave_bytes()));
        let pool = self.pool.clone();
        self.spawn(
            Kind::Resize(blocks),
            async move { Outcome::Resized(pool.resize_with(blocks, options).await) },
        );
    }

    /// Starts a background task, or stops it.
    pub fn background(&mut self) {
        if let Some(defragmenter) = self.defragmenter.take() {
            self.note(format_args!("stops"));
            if self.rng.bool() {
                self.stop(defragmenter);
            }
            return;
        }
        let options = self.some_options();
        let config = DefragConfig::new()
            .threshold(self.rng.f64())
            .interval(Duration::from_millis(self.rng.u64(1..20)))
            .moves(options);
        self.note(format_args!("{config:?}"));
        self.defragmenter = Some(self.pool.start_defragmenter(config).unwrap());
    }

    pub fn stop(&mut self, defragmenter: Defragmenter) {
        self.spawn(Kind::Stop, async move { Outcome::Stopped(defragmenter.stop().await) });
    }

    pub fn cancel(&mut self) {
        if let Some(index) = self.pick(self.tasks.len()) {
            let task = self.tasks.swap_remove(index);
            self.note(format_args!("dropped: {task:?}"));
            self.tally.cancelled += 1;
        }
    }

    pub fn poll_woken(&mut self) {
        let woken: Vec<usize> = (0..self.tasks.len()).filter(|&index| self.tasks[index].is_woken()).collect();
        if let Some(chosen) = self.pick(woken.len()) {
            self.poll(woken[chosen]);
        }
    }

    pub fn poll_any(&mut self) {
        if let Some(index) = self.pick(self.tasks.len()) {
            self.poll(index);
        }
    }

    fn poll(&mut self, index: usize) {
        if self.tasks[index].came.is_none() {
            self.tasks[index].came = Some(self.number());
        }
        let total = self.pool.total_blocks();
        let polled = self.tasks[index].poll();
        let number = self.tasks[index].number;
        self.note(format_args!("polled {number}, ready: {}", polled.is_ready()));
        let Poll::Ready(outcome) = polled else { return };
        let task = self.tasks.swap_remove(index);
        match (outcome, task.kind) {
            (Outcome::Allocated(outcome), Kind::Allocate { request, has_deadline }) => {
                match &outcome {
                    // The ages in it depend on the machine.
                    Err(AllocError::Deadline { asked, free, retired, .. }) => {
                        self.note(format_args!("late: {asked}, {free}, {retired}"));
                    }
                    other => self.note(format_args!("{other:?}")),
                }
                match outcome {
                    Ok(lease) => {
                        self.is_first(&task);
                        self.take_in(request, lease);
                    }
                    Err(AllocError::Deadline { asked, .. }) => {
                        assert!(asked == request.blocks && has_deadline);
                        self.tally.deadlines += 1;
                    }
                    Err(AllocError::Exhausted { .. } | AllocError::NoRun { .. }) => {
                        panic!("{outcome:?} must not end a wait")
                    }
                    Err(error) => self.is_refused_rightly(&error, request.contiguous),
                }
            }
            (Outcome::Defragmented(outcome), Kind::Defragment(options)) => {
                self.note_defragmented(&outcome);
                let report = match outcome {
                    Ok(report) => report,
                    Err(error) => self.has_failed(&error),
                };
                let block_bytes = self.pool.layout().bytes_per_block() as u64;
                assert!(options.budget_bytes.is_none_or(|bytes| report.moved_bytes <= bytes));
                assert_eq!(report.moved_bytes, report.moved_blocks as u64 * block_bytes);
                self.add(&report);
            }
            (Outcome::Resized(outcome), Kind::Resize(blocks)) => {
                let now = self.pool.total_blocks();
                match &outcome {
                    // The age of the turn is real time.
                    Err(ResizeError::NoTurn { .. }) => self.note(format_args!("{now} blocks: no turn")),
                    outcome => self.note(format_args!("{now} blocks: {:?}", outcome.as_ref().map(drop))),
                }
                assert_eq!(now, if outcome.is_ok() { blocks } else { total });
                self.resized(outcome.map(|report| report.moved), blocks, total);
            }
            (Outcome::Stopped(totals), Kind::Stop) => self.tally.background_runs += totals.runs as u64,
            (_, kind) => unreachable!("{kind:?} has another result"),
        }
    }

    fn note_defragmented(&mut self, outcome: &Result<DefragReport, DefragError>) {
        // All fields but the duration.
        let said = outcome.as_ref().map(|report| (report.moved_blocks, report.given_up, report.waves));
        self.note(format_args!("{:?}", said.map_err(|error| error.to_string())));
    }

    fn add(&mut self, report: &DefragReport) {
        self.tally.runs += u64::from(report.moved_blocks > 0);
    }

    /// Checks that only copies fail that were made to fail.
    fn has_failed(&self, error: &DefragError) -> DefragReport {
        assert_ne!(self.tally.copies_failed, 0, "{error}");
        match error {
            DefragError::Copy { report, .. } | DefragError::CopyDropped { report } => **report,
            _ => panic!("{error}"),
        }
    }

    fn resized(&mut self, outcome: Result<DefragReport, ResizeError>, blocks: usize, total: usize) {
        match outcome {
            Ok(report) => {
                self.tally.shrinks += u64::from(blocks < total);
                self.add(&report);
                return;
            }
            Err(ResizeError::NoRoom { asked, used }) => assert!(asked == blocks && used > blocks),
            Err(ResizeError::Blocked { asked, blocks: ref by, retired }) => {
                assert!(asked == blocks && by.len() + retired > 0);
            }
            Err(ResizeError::NoTurn { .. }) => {}
            Err(ResizeError::Shrink(ShrinkError::TooFew { min, .. })) => assert!(blocks < min),
            // The size was different when it was requested.
            Err(ResizeError::Shrink(ShrinkError::NotSmaller { .. })) => assert!(blocks >= total),
            Err(ResizeError::Grow(GrowError::TooLarge { max, .. })) => assert!(blocks > max),
            Err(ResizeError::Grow(GrowError::Busy)) => assert!(self.is_resizing()),
            Err(ResizeError::Defrag(error)) => drop(self.has_failed(&error)),
            Err(error) => panic!("{error}"),
        }
        self.tally.shrinks_given_up += 1;
    }

    /// Checks that no waiting request is ahead of the one that was served.
    fn is_first(&self, served: &Task) {
        let place = served.in_line().map(|(place, _)| place);
        for other in self.tasks.iter().filter_map(Task::in_line) {
            assert!(place < Some(other.0), "{served:?} was served before {other:?}");
        }
    }

    /// Returns whether a request of this priority waits.
    pub fn is_in_line(&self, priority: Priority) -> bool {
        self.tasks.iter().filter_map(Task::in_line).any(|((Reverse(other), _), _)| other == priority)
    }

    /// Checks that no request sleeps beside free blocks: if none was woken, the first cannot be
    /// served.
    pub fn check_queue(&self) {
        let waiting = || self.tasks.iter().filter(|task| task.in_line().is_some());
        let Some(first) = waiting().min_by_key(|task| task.in_line().map(|(place, _)| place)) else { return };
        if waiting().any(Task::is_woken) || self.is_resizing() {
            return;
        }
        let Some((_, request)) = first.in_line() else { return };
        let counts = self.pool.blocks().counts();
        let reserved = if request.priority == Priority::Urgent { counts.reserved } else { 0 };
        assert!(
            request.contiguous || request.blocks > counts.free() + self.evictable_now() + reserved,
            "{first:?} sleeps beside {counts:?}"
        );
    }
}
