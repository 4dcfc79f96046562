//! Carries out plans in waves of moves, while the pool serves.
//!
//! ```text
//! run     a turn, so that runs exclude each other; one that was passed over takes another
//!         look (empty magazines, snapshot) -> plan -> wave, wave, ...
//!         -> look again, until nothing is gained
//!         as many waves are in flight as the storage prefers: one on the host, more on a device
//! wave    begin: mark the blocks, hold the destinations     (block floor)
//!         copy                                              (another thread, or a device's stream)
//!         publish, retire                                   (where the copy completes)
//! ```
//!
//! Waves in flight are independent: each is published when its copy completes, in any order. A wave
//! with a destination that an earlier one vacates begins after that one has ended.
//!
//! # Runs that are dropped, not polled, or stuck
//!
//! - A run can be dropped at every await. A wave under copy belongs to its copy, which publishes
//!   it, or undoes it on failure. Only then does the run's [turn](super::turns) end.
//! - A run that is not polled is passed over once none of its copies is in progress. Each wave
//!   first checks that the run still has its turn. If not, an explicit run takes another turn and
//!   plans anew; a run of the background task or for a waiting request ends.
//! - A copy past its [deadline](DefragOptions::copy_deadline) gives up its share of the turn, and
//!   its run ends with [`DefragError::CopyOverdue`]. The wave keeps its frames, which may still be
//!   read and written, until the copier reports the outcome or drops the callback. Until then no
//!   other wave begins, so that a stuck copier gets no further frames.
//!
//! # Memory and evictable blocks
//!
//! A wave under copy holds its destinations, and the frames of its blocks that are released
//! meanwhile; the storage limits the bytes and the number of waves. Vacated frames stay retired
//! until the batches in flight have ended. An explicit run does all it can; the background task
//! moves at most a [share](ROOM) of the available blocks until then.
//!
//! An allocation takes free and evictable frames alike, so runs of both are the goal. An evictable
//! block stays, or is evicted when another block moves to its frame. A shrink moves those in its
//! region while there is room, and a run for a request those that a batch may see. A block can also
//! become evictable between its plan and its copy.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_channel::oneshot;

use crate::block::Blocks;
use crate::error::{TurnHolder, TurnTask};
use crate::ids::{FrameId, Order};
use crate::sequence::Sequences;
use crate::storage::{FrameMove, KvLayout};
use crate::sync::runtime::{now, sleep_until, timeout_at, yield_now};

use super::bytes::Bytes;
use super::copies::Copies;
use super::copying::{Copied, Copying, Failure, Flight, count};
use super::options::DefragOptions;
use super::report::{CompactionState, GivenUp, MoveCounts};
use super::snapshot::FrameState;
use super::stop::Stop;
use super::turns::{Turn, Turns};
use super::{DefragError, DefragReport, FrameKind, Goal, Move, OverdueCopy, Plan, Snapshot, plan};

/// Maximum number of blocks per wave: a longer mark makes a move likelier to be cancelled.
const WAVE_BLOCKS: usize = 256;

const LOOKS: usize = 4;

/// The background task moves one block per this many available ones, then waits for batches.
const ROOM: usize = 4;

/// Moves a pool's blocks. Clones belong to the same pool, and take turns.
#[derive(Clone, Debug)]
pub struct Compactor {
    sequences: Sequences,
    bytes: Bytes,
    block_bytes: usize,
    order: Order,
    turns: Arc<Turns>,
    /// `None` once the pool is gone.
    tasks: Arc<Mutex<Option<Vec<Weak<Stop>>>>>,
    copies: Arc<Copies>,
    counts: Arc<Mutex<MoveCounts>>,
    state: Arc<Mutex<Option<CompactionState>>>,
}

pub(super) struct CompactionPass<'a> {
    compactor: &'a Compactor,
    pub(super) turn: Arc<Turn>,
    wave_blocks: usize,
    depth: usize,
    copy_deadline: Duration,
    background: Option<Background>,
    pub(super) report: DefragReport,
}

pub(super) struct Background {
    pub(super) stop: Arc<Stop>,
    pub(super) trims_caches: bool,
    pub(super) moves_max: usize,
}

impl Compactor {
    internal! {
        /// Returns a compactor that measures free runs at `order` by default.
        ///
        /// # Safety
        /// `bytes` must refer to the pool's frames: the contents of moved blocks depend on it.
        unsafe fn new(sequences: Sequences, bytes: Bytes, layout: &KvLayout, order: Order) -> Self {
            let block_bytes = layout.bytes_per_block().max(1);
            Self {
                sequences,
                bytes,
                block_bytes,
                order,
                turns: Arc::default(),
                tasks: Arc::new(Mutex::new(Some(Vec::new()))),
                copies: Arc::default(),
                counts: Arc::default(),
                state: Arc::default(),
            }
        }
    }

    /// Stops the background tasks, which would keep a dropped pool alive.
    pub fn close(&self) {
        let tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner).take();
        for task in tasks.iter().flatten().filter_map(Weak::upgrade) {
            task.give();
        }
    }

    pub(super) fn stop_at_close(&self, task: &Arc<Stop>) {
        match &mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(tasks) => {
                tasks.retain(|task| task.strong_count() > 0);
                tasks.push(Arc::downgrade(task));
            }
            None => task.give(),
        }
    }

    /// Returns the counts of moves since the pool was built.
    pub fn move_counts(&self) -> MoveCounts {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what the background task does, or why it pauses; `None` without one.
    pub fn state(&self) -> Option<CompactionState> {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_state(&self, state: Option<CompactionState>) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    /// Returns the order at which free runs are counted.
    pub fn order(&self) -> Order {
        self.order
    }

    /// Returns the current content of every frame.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::of(&self.sequences, self.order)
    }

    pub(super) fn blocks(&self) -> &Blocks {
        self.sequences.blocks()
    }

    pub(super) fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Moves blocks to gain as many free runs as the options allow.
    ///
    /// # Errors
    /// [`DefragError`].
    pub async fn defragment(&self, options: DefragOptions) -> Result<DefragReport, DefragError> {
        options.check()?;
        self.defragment_for(options, None).await
    }

    pub(super) async fn defragment_for(
        &self,
        options: DefragOptions,
        background: Option<Background>,
    ) -> Result<DefragReport, DefragError> {
        if !self.bytes.are_known() {
            return Err(DefragError::NoBytes);
        }
        let order = options.order.unwrap_or(self.order);
        let stop = background.as_ref().map(|background| background.stop.clone());
        let is_stopped = async {
            match stop {
                Some(stop) => stop.given().await,
                None => std::future::pending().await,
            }
        };
        let task = if background.is_some() { TurnTask::Background } else { TurnTask::Defragment };
        match self.begin_unless(&options, task, is_stopped).await {
            Some(run) => {
                let turn = run.turn.clone();
                let run = CompactionPass { background, ..run };
                turn.attend(self.compact(Goal::Fragmentation { order }, options, run)).await
            }
            None => Ok(DefragReport::default()),
        }
    }

    /// Makes one free run of `len` frames for an allocation that finds none: evicts as many blocks as
    /// are missing, and moves others. It is available once every batch that was in flight has ended.
    /// Returns `None` if `unless` completed while another run had its turn.
    ///
    /// # Errors
    /// [`DefragError`].
    pub async fn make_run(
        &self,
        len: u32,
        unless: impl Future<Output = ()>,
    ) -> Option<Result<DefragReport, DefragError>> {
        if !self.bytes.are_known() {
            return Some(Err(DefragError::NoBytes));
        }
        let options = DefragOptions::default();
        let run = self.begin_unless(&options, TurnTask::Request, unless).await?;
        let blocks = self.blocks();
        // Moves do not take frames of the reserve that may lie in between.
        blocks.renew_reserve();
        // No window of evictable blocks was found: those of a window are moved into these frames.
        blocks.evict_free((len as usize).saturating_sub(blocks.counts().free()));
        let turn = run.turn.clone();
        Some(turn.attend(self.compact(Goal::Run { len }, options, run)).await)
    }

    async fn compact(
        &self,
        goal: Goal,
        options: DefragOptions,
        mut run: CompactionPass<'_>,
    ) -> Result<DefragReport, DefragError> {
        if let Some(copy) = self.overdue_copy() {
            // Even if no remaining move would gain a run: the goal may not have been reached.
            return Err(DefragError::CopyOverdue { copy, report: Box::default() });
        }
        let order = if let Goal::Fragmentation { order } = goal { order } else { self.order };
        let budget = options.budget_bytes.map_or(usize::MAX, |bytes| {
            usize::try_from(bytes / self.block_bytes as u64).unwrap_or(usize::MAX)
        });
        let started = Instant::now();
        let runs_before;
        (run.report.fragmentation_before, run.report.available_fragmentation_before, runs_before) =
            self.measure(order);
        if run.background.as_ref().is_none_or(|background| background.trims_caches) {
            run.trim_caches();
        }
        let mut outcome = Ok(());
        for _ in 0..LOOKS {
            if !run.turn.is_held() {
                // It was not polled, and was passed over. Reached by `hostile_waiting`.
                if run.background.is_some() || matches!(goal, Goal::Run { .. }) {
                    break;
                }
                self.take(&run.turn, options.copy_deadline).await;
            }
            let left = budget.saturating_sub(run.report.moved_blocks);
            let room = match &run.background {
                Some(background) => {
                    let available = self.blocks().counts().free() + self.blocks().evictable();
                    (available / ROOM).min(background.moves_max.saturating_sub(run.report.moved_blocks))
                }
                None => usize::MAX,
            };
            let plan = run.look(goal, left.min(room), options.fragmentation_penalty);
            if plan.moves.is_empty() || run.is_stopped() {
                break;
            }
            let moved = run.report.moved_blocks;
            outcome = run.carry_out(&plan.moves).await;
            let is_done = run.report.moved_blocks == moved && run.turn.is_held();
            if outcome.is_err() || is_done || run.leaves_room() {
                break;
            }
        }
        let runs_after;
        (run.report.fragmentation_after, run.report.available_fragmentation_after, runs_after) =
            self.measure(order);
        run.report.runs_gained = runs_after as isize - runs_before as isize;
        run.report.time = started.elapsed();
        let report = run.report;
        match outcome {
            Ok(()) => Ok(report),
            Err(failure) => Err(failure.told(report)),
        }
    }

    /// Returns the copy that has passed its deadline, if there is one.
    pub fn overdue_copy(&self) -> Option<OverdueCopy> {
        self.copies.overdue()
    }

    /// Returns whose turn it is to move blocks.
    pub fn turn_holder(&self) -> Option<TurnHolder> {
        self.turns.holder()
    }

    pub(crate) fn copies_for_request(&self) -> bool {
        let holder = self.turns.holder();
        holder.is_some_and(|holder| holder.task == TurnTask::Request && holder.unpolled().is_none())
    }

    /// Passes over a run or resize that is not polled, and undoes the open shrink that it left.
    pub(crate) fn look_after_turns(&self) {
        self.copies.expire();
        self.turns.look_after(self.blocks().turn_patience());
    }

    pub(super) fn turn(&self, task: TurnTask) -> Arc<Turn> {
        Arc::new(self.turns.turn(task, self.blocks().turn_patience()))
    }

    /// Waits for the right to move blocks. Passes over holders that are unpolled or overdue.
    pub(super) async fn take(&self, turn: &Turn, copy_deadline: Duration) {
        let every = self.blocks().turn_patience().max(Duration::from_millis(1)).min(copy_deadline);
        let mut alarm = None;
        poll_fn(|context| {
            loop {
                self.copies.expire();
                if turn.poll_held(context).is_ready() {
                    return Poll::Ready(());
                }
                // A copy that begins later has a later deadline.
                let look = now().checked_add(every);
                let next = self.copies.next_deadline().into_iter().chain(look).min();
                let Some(next) = next else { return Poll::Pending };
                let mut sleep = alarm.take().unwrap_or_else(|| sleep_until(next));
                if sleep.as_mut().poll(context).is_pending() {
                    alarm = Some(sleep);
                    return Poll::Pending;
                }
            }
        })
        .await
    }

    async fn begin_unless(
        &self,
        options: &DefragOptions,
        task: TurnTask,
        unless: impl Future<Output = ()>,
    ) -> Option<CompactionPass<'_>> {
        let turn = self.turn(task);
        {
            let (mut taken, mut unless) = (pin!(self.take(&turn, options.copy_deadline)), pin!(unless));
            let taken = poll_fn(|context| match taken.as_mut().poll(context) {
                Poll::Ready(()) => Poll::Ready(Some(())),
                Poll::Pending => unless.as_mut().poll(context).map(|()| None),
            });
            taken.await?;
        }
        Some(self.run(options, turn))
    }

    pub(super) fn run(&self, options: &DefragOptions, turn: Arc<Turn>) -> CompactionPass<'_> {
        let wave_bytes = options.wave_bytes.unwrap_or_else(|| self.bytes.wave_bytes());
        let wave_blocks = (wave_bytes / self.block_bytes).clamp(1, WAVE_BLOCKS);
        let depth = self.bytes.waves_in_flight().max(1);
        let report = DefragReport::default();
        let copy_deadline = options.copy_deadline;
        count(&self.counts, |counts| counts.runs += 1);
        CompactionPass { compactor: self, turn, wave_blocks, depth, copy_deadline, background: None, report }
    }

    /// Returns the fragmentation of free frames and of available ones, and the latter's runs.
    fn measure(&self, order: Order) -> (f64, f64, usize) {
        let census = self.blocks().census(order);
        let (available, runs) = self.blocks().available_runs(&census);
        (self.blocks().rate(&census), available, runs)
    }
}

impl CompactionPass<'_> {
    fn is_stopped(&self) -> bool {
        self.background.as_ref().is_some_and(|background| background.stop.is_given()) || !self.turn.is_held()
    }

    /// Whether vacated frames stay retired: further moves would take free frames from allocations.
    fn leaves_room(&self) -> bool {
        self.background.is_some() && self.compactor.blocks().clock().in_flight() > 0
    }

    pub(super) fn trim_caches(&self) {
        self.compactor.blocks().trim();
    }

    /// Plans for the current state of the pool. For evictable blocks, see the module docs.
    pub(super) fn look(&mut self, goal: Goal, moves_max: usize, fragmentation_penalty: u32) -> Plan {
        let (blocks, mut snapshot) = (self.compactor.blocks(), self.compactor.snapshot());
        let null = usize::from(blocks.null_block().is_some());
        self.report.fixed_blocks = snapshot.count(FrameKind::Fixed).saturating_sub(null);
        let oldest = blocks.clock().oldest();
        let can_go = |frame| blocks.can_evict_at(frame, oldest);
        match goal {
            Goal::Empty { .. } => {}
            // A block that a batch may see is in the way of the request: it moves.
            Goal::Run { .. } => snapshot = snapshot.without_evictable(can_go, None),
            Goal::Fragmentation { .. } => {
                snapshot = snapshot.without_evictable(can_go, Some(FrameState::AWAY));
            }
        }
        plan(&snapshot, goal, moves_max, fragmentation_penalty)
    }

    pub(super) async fn carry_out(&mut self, moves: &[Move]) -> Result<(), Failure> {
        let mut flights = VecDeque::new();
        let mut outcome = self.begin_waves(moves, &mut flights).await;
        for flight in flights {
            if let Err(Failure::Overdue(_)) = &outcome {
                // The other copies are likely stuck as well; they end without this run.
                break;
            }
            outcome = outcome.and(self.end_wave(flight).await);
        }
        outcome
    }

    /// Begins all waves, and ends all but the last ones, which remain in `flights`.
    async fn begin_waves(&mut self, moves: &[Move], flights: &mut VecDeque<Flight>) -> Result<(), Failure> {
        for moves in moves.chunks(self.wave_blocks) {
            while flights.len() >= self.depth || flights.iter().any(|flight| flight.vacates(moves)) {
                let Some(oldest) = flights.pop_front() else { break };
                self.end_wave(oldest).await?;
            }
            if self.is_stopped() {
                break;
            }
            match self.begin_wave(moves)? {
                Some(flight) => flights.push_back(flight),
                // All moves of this wave were cancelled, as may be those of the whole plan.
                None => yield_now().await,
            }
        }
        Ok(())
    }

    /// Starts the copy of a wave. Returns `None` if none of the blocks can move now.
    fn begin_wave(&mut self, moves: &[Move]) -> Result<Option<Flight>, Failure> {
        let under_way = &self.compactor.copies;
        if let Some(overdue) = under_way.overdue() {
            return Err(Failure::Overdue(overdue));
        }
        let mut given_up = GivenUp::default();
        let pairs = moves.iter().map(|moved| (moved.from, moved.to));
        let wave = self.compactor.blocks().begin_wave(pairs, &mut |_, why| given_up.count(why));
        self.report.dropped_blocks += wave.dropped();
        self.report.given_up.add(&given_up);
        count(&self.compactor.counts, |counts| {
            counts.dropped_blocks += wave.dropped() as u64;
            counts.given_up.add(&given_up);
        });
        if wave.is_empty() {
            return Ok(None);
        }
        let copies: Vec<FrameMove> = wave.moves().map(|(from, to)| FrameMove::new(from, to)).collect();
        let mut sources: Vec<FrameId> = copies.iter().map(|step| step.src).collect();
        sources.sort_unstable();
        let (tell, told) = oneshot::channel();
        let blocks = self.compactor.blocks().clone();
        let bytes = copies.len() * self.compactor.block_bytes;
        let deadline = now().checked_add(self.copy_deadline);
        let under_way = under_way.begin(copies.len(), bytes as u64, deadline, self.turn.share());
        let (counts, block_bytes) = (self.compactor.counts.clone(), self.compactor.block_bytes);
        let copying = Copying {
            blocks,
            wave: Some(wave),
            block_bytes,
            counts,
            _under_way: under_way,
            tell: Some(tell),
        };
        // SAFETY: until the wave is published or dropped, the sources are marked, so that they are
        // not written, and the destinations are held. Both happen after the copy, because the
        // callback owns the wave.
        unsafe {
            self.compactor.bytes.copy_then(copies, bytes, Box::new(move |outcome| copying.end(outcome)))
        };
        Ok(Some(Flight { told, deadline, sources }))
    }

    async fn end_wave(&mut self, flight: Flight) -> Result<(), Failure> {
        let copied = self.end_of_copy(flight.told, flight.deadline).await?;
        self.report.given_up.add(&copied.given_up);
        if let Some(error) = copied.failed {
            return Err(Failure::Copy(error));
        }
        self.report.moved_blocks += copied.moved;
        self.report.moved_bytes += (copied.moved * self.compactor.block_bytes) as u64;
        self.report.waves += 1;
        yield_now().await;
        Ok(())
    }

    async fn end_of_copy(
        &self,
        mut told: oneshot::Receiver<Copied>,
        deadline: Option<Instant>,
    ) -> Result<Copied, Failure> {
        match told.try_recv() {
            Ok(Some(copied)) => return Ok(copied),
            Err(oneshot::Canceled) => return Err(Failure::Dropped),
            Ok(None) => {}
        }
        let Some(deadline) = deadline else {
            return told.await.map_err(|_| Failure::Dropped);
        };
        loop {
            if let Some(told) = timeout_at(deadline, &mut told).await {
                return told.map_err(|_| Failure::Dropped);
            }
            // This thread's clock may be behind that of the timer: check again.
            if let Some(copy) = self.compactor.copies.overdue() {
                return Err(Failure::Overdue(copy));
            }
            yield_now().await;
        }
    }
}
