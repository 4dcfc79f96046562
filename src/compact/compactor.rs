//! Carrying plans out: waves of moves, one after the other, while the pool goes on.
//!
//! ```text
//! run     the compaction lock, so that runs exclude each other
//!         look (bring free frames thread cache, snapshot) -> plan -> wave, wave, ... -> look again, until nothing is gained
//! wave    begin: mark the blocks, hold the destinations         (block floor)
//!         copy                                                  somebody else's thread, or a device's stream
//!         publish, retire                                       where the copy ends
//! ```
//!
//! # Cancellation
//!
//! A run can be dropped at every await. Between waves nothing is under way. A wave that is being copied does not belong to
//! the run that began it, but to the copy: when that ends the wave is published, or put back if the copy failed, and only
//! then the compaction lock is free again; or when the copy is overdue.
//!
//! # A copy that does not end
//!
//! A copy has a [deadline](DefragOptions::copy_deadline). Past it the copy gives up its share of the compaction lock, and the run that
//! began it, if there still is one, ends with [`DefragError::CopyOverdue`]. The wave goes on to hold its frames, because they
//! may still be read and written: it is published or put back when the copier says so, or drops what it was to call. Until
//! then no other wave begins: a copier that is stuck gets no more frames than those, and each run ends with the error at once.
//!
//! # Memory in moves
//!
//! While a wave is being copied it keeps its destinations, and the frames of those of its blocks that are released meanwhile.
//! So waves are short. And while batches are in flight, the frames that blocks left are retired until those have ended: a run
//! may put aside as many frames as it moves blocks. One by hand is asked to do all it can. The background task does not take
//! from allocations what they were about to get: it moves a [share](ROOM) of what is free, and goes on when those batches
//! have ended.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, PoisonError, Weak};
use std::task::Poll;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::{Mutex, OwnedMutexGuard, oneshot, watch};
use tokio::time::{Instant as Tick, Sleep, sleep_until, timeout_at};

use crate::block::{Blocks, Wave};
use crate::config::FRAME_BITS;
use crate::error::StorageError;
use crate::ids::Order;
use crate::sequence::Sequences;
use crate::storage::{FrameMove, KvLayout};

use super::bytes::Bytes;
use super::copies::{Copies, UnderWay};
use super::report::GivenUp;
use super::{DefragError, DefragReport, Goal, Move, OverdueCopy, Plan, Snapshot, plan};

/// Bytes of a wave unless configured otherwise: about a millisecond on host memory.
pub const WAVE_BYTES: usize = 8 << 20;

/// How long the copy of a wave may take unless configured otherwise.
pub const COPY_DEADLINE: Duration = Duration::from_secs(30);

/// Blocks of a wave, at most: of small blocks more would fit, but what is marked for long is often wanted by somebody else
/// before it is copied.
const WAVE_BLOCKS: usize = 256;

/// Looks at the pool in one run: others allocate and free meanwhile, and some moves are given up.
const LOOKS: usize = 4;

/// The background task moves as many blocks as one in so many are free, and then waits for the batches that are in flight.
const ROOM: usize = 4;

/// How much a compaction may do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct DefragOptions {
    /// The order of the free runs to gain; the pool's own unless given.
    pub order: Option<Order>,
    /// The most bytes to move; all that is worth it unless given.
    pub budget_bytes: Option<u64>,
    /// Bytes that are copied together; at least one block is. While a wave is being copied, as many free ones are held.
    pub wave_bytes: usize,
    /// How long the copy of a wave may take: then the run ends with [`DefragError::CopyOverdue`], and does not keep others
    /// from their turn any more.
    pub copy_deadline: Duration,
}

impl Default for DefragOptions {
    fn default() -> Self {
        Self { order: None, budget_bytes: None, wave_bytes: WAVE_BYTES, copy_deadline: COPY_DEADLINE }
    }
}

impl DefragOptions {
    /// The pool's order, no budget, short waves.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gain free runs of this order.
    pub fn order(mut self, order: Order) -> Self {
        self.order = Some(order);
        self
    }

    /// Move no more than so many bytes.
    pub fn budget_bytes(mut self, bytes: u64) -> Self {
        self.budget_bytes = Some(bytes);
        self
    }

    /// Copy so many bytes together.
    pub fn wave_bytes(mut self, bytes: usize) -> Self {
        self.wave_bytes = bytes;
        self
    }

    /// Let the copy of a wave take so long.
    pub fn copy_deadline(mut self, deadline: Duration) -> Self {
        self.copy_deadline = deadline;
        self
    }

    pub(super) fn check(&self) -> Result<(), DefragError> {
        if self.order.is_some_and(|order| u32::from(order.0) > FRAME_BITS) {
            return Err(DefragError::Option { option: "order", reason: "larger than any pool" });
        }
        if self.wave_bytes == 0 {
            return Err(DefragError::Option { option: "wave_bytes", reason: "a wave of zero bytes" });
        }
        if self.copy_deadline.is_zero() {
            return Err(DefragError::Option { option: "copy_deadline", reason: "no time for a copy" });
        }
        Ok(())
    }
}

/// What stops a task in the background.
type StopTask = Weak<watch::Sender<bool>>;

/// What moves a pool's blocks. Clones move those of the same pool, and take turns.
#[derive(Clone, Debug)]
pub struct Compactor {
    sequences: Sequences,
    bytes: Bytes,
    block_bytes: usize,
    order: Order,
    lock: Arc<Mutex<()>>,
    /// What stops the tasks in the background; none once the pool is gone.
    tasks: Arc<std::sync::Mutex<Option<Vec<StopTask>>>>,
    copies: Arc<Copies>,
}

/// The right to move blocks. The copy of a wave has a share in it, until it is over or overdue.
pub(super) type CompactionLock = Arc<OwnedMutexGuard<()>>;

/// A run under way.
pub(super) struct CompactionPass<'a> {
    compactor: &'a Compactor,
    lock: CompactionLock,
    wave_blocks: usize,
    copy_deadline: Duration,
    background: Option<Background>,
    pub(super) report: DefragReport,
}

/// How a run goes that nobody asked for by hand.
pub(super) struct Background {
    /// Becomes true when nothing else is to be begun.
    pub(super) stopped: watch::Receiver<bool>,
    /// Whether it may empty threads' magazines.
    pub(super) trims_caches: bool,
}

/// A wave and what is to be told when its copy ends.
struct Copying {
    blocks: Blocks,
    wave: Option<Wave>,
    /// Has the copy's share of the compaction lock, and is the last to go.
    _under_way: UnderWay,
    tell: Option<oneshot::Sender<Copied>>,
}

/// How the copy of a wave ended.
struct Copied {
    moved: usize,
    given_up: GivenUp,
    failed: Option<StorageError>,
}

impl Copying {
    fn end(mut self, outcome: Result<(), StorageError>) {
        let Some(wave) = self.wave.take() else { return };
        let mut copied = Copied { moved: 0, given_up: GivenUp::default(), failed: None };
        match outcome {
            // SAFETY: whoever copies says that the copy is done.
            Ok(()) => copied.moved = unsafe { wave.publish(&mut |_, why| copied.given_up.count(why)) },
            Err(error) => {
                copied.given_up.copy_failed = wave.len();
                // Before its destinations are free again, or somebody would get one.
                if error.is_lost() {
                    self.blocks.poison();
                }
                drop(wave);
                copied.failed = Some(error);
            }
        }
        // Whoever began the run may be gone.
        let _ = self.tell.take().map(|tell| tell.send(copied));
    }
}

impl Compactor {
    /// Of the blocks of these sequences' pool. `order` is the one that free runs are counted at unless a run says otherwise.
    ///
    /// # Safety
    ///
    /// `bytes` are those of the pool's frames: moving them is what makes the moved blocks what they were.
    pub unsafe fn new(sequences: Sequences, bytes: Bytes, layout: &KvLayout, order: Order) -> Self {
        let block_bytes = layout.bytes_per_block().max(1);
        Self {
            sequences,
            bytes,
            block_bytes,
            order,
            lock: Arc::default(),
            tasks: Arc::new(std::sync::Mutex::new(Some(Vec::new()))),
            copies: Arc::default(),
        }
    }

    /// The pool is gone: tasks in the background stop, and do not keep what is left of it.
    pub fn close(&self) {
        let tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner).take();
        for task in tasks.iter().flatten().filter_map(Weak::upgrade) {
            task.send_replace(true);
        }
    }

    /// A task that [`close`](Self::close) stops.
    pub(super) fn stop_at_close(&self, task: &Arc<watch::Sender<bool>>) {
        match &mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(tasks) => {
                tasks.retain(|task| task.strong_count() > 0);
                tasks.push(Arc::downgrade(task));
            }
            // The pool is gone already.
            None => drop(task.send_replace(true)),
        }
    }

    /// The order that free runs are counted at.
    pub fn order(&self) -> Order {
        self.order
    }

    /// What every frame holds now.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::of(&self.sequences, self.order)
    }

    pub(super) fn blocks(&self) -> &Blocks {
        self.sequences.blocks()
    }

    pub(super) fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Gains as many free runs as the options allow.
    ///
    /// # Errors
    ///
    /// [`DefragError`].
    pub async fn defragment(&self, options: DefragOptions) -> Result<DefragReport, DefragError> {
        options.check()?;
        self.defragment_until(options, None).await
    }

    /// The same in the background, until it is stopped: the wave that is under way then is the last.
    pub(super) async fn defragment_until(
        &self,
        options: DefragOptions,
        background: Option<Background>,
    ) -> Result<DefragReport, DefragError> {
        if !self.bytes.are_known() {
            return Err(DefragError::NoBytes);
        }
        let order = options.order.unwrap_or(self.order);
        let stop = background.as_ref().map(|background| background.stopped.clone());
        let is_stopped = async {
            match stop {
                // An error: there is nobody left to stop it, and nobody who waits for it.
                Some(mut stop) => drop(stop.wait_for(|&stop| stop).await),
                None => std::future::pending().await,
            }
        };
        match self.begin_unless(&options, is_stopped).await {
            Some(run) => {
                self.compact(Goal::Fragmentation { order }, options, CompactionPass { background, ..run })
                    .await
            }
            None => Ok(DefragReport::default()),
        }
    }

    /// Makes one free run of `len` frames, if moving blocks can: for an allocation that finds none, though enough is free.
    /// It is to be had once every batch has ended that was in flight when the blocks moved.
    ///
    /// `None`: somebody else's run took its time, and `unless` ended before it.
    ///
    /// # Errors
    ///
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
        let run = self.begin_unless(&options, unless).await?;
        // The reserve's frames may lie in between, and no move takes them away.
        self.blocks().renew_reserve();
        Some(self.compact(Goal::Run { len }, options, run).await)
    }

    async fn compact(
        &self,
        goal: Goal,
        options: DefragOptions,
        mut run: CompactionPass<'_>,
    ) -> Result<DefragReport, DefragError> {
        if let Some(copy) = self.overdue_copy() {
            // Also where what is left to move gains nothing: that is no reason to be content.
            return Err(DefragError::CopyOverdue { copy, report: Box::default() });
        }
        let order = match goal {
            Goal::Fragmentation { order } => order,
            _ => self.order,
        };
        let budget = options.budget_bytes.map_or(usize::MAX, |bytes| {
            usize::try_from(bytes / self.block_bytes as u64).unwrap_or(usize::MAX)
        });
        let started = Instant::now();
        let (before, runs_before) = self.measure(order);
        run.report.fragmentation_before = before;
        if run.background.as_ref().is_none_or(|background| background.trims_caches) {
            run.trim_caches();
        }
        let mut outcome = Ok(());
        for _ in 0..LOOKS {
            let left = budget.saturating_sub(run.report.moved_blocks);
            let room =
                if run.background.is_some() { self.blocks().counts().free() / ROOM } else { usize::MAX };
            let plan = run.look(goal, left.min(room));
            if plan.moves.is_empty() || run.is_stopped() {
                break;
            }
            let moved = run.report.moved_blocks;
            outcome = run.carry_out(&plan.moves).await;
            if outcome.is_err() || run.report.moved_blocks == moved || run.leaves_room() {
                break;
            }
        }
        let (after, runs_after) = self.measure(order);
        run.report.fragmentation_after = after;
        run.report.runs_gained = runs_after as isize - runs_before as isize;
        run.report.time = started.elapsed();
        let report = run.report;
        match outcome {
            Ok(()) => Ok(report),
            Err(failure) => Err(failure.told(report)),
        }
    }

    /// The copy that is not over although its deadline has passed, if there is one.
    pub fn overdue_copy(&self) -> Option<OverdueCopy> {
        self.copies.overdue()
    }

    /// Waits for its turn.
    pub(super) async fn begin(&self, options: &DefragOptions) -> CompactionPass<'_> {
        self.run(options, self.turn(options).await)
    }

    /// The compaction lock; at the latest when the copy that has it is overdue. Outside of a tokio runtime that is found when this is
    /// polled.
    async fn turn(&self, options: &DefragOptions) -> OwnedMutexGuard<()> {
        let mut lock = pin!(self.lock.clone().lock_owned());
        let mut alarm: Option<Pin<Box<Sleep>>> = None;
        poll_fn(|context| {
            loop {
                self.copies.expire();
                if let Poll::Ready(lock) = lock.as_mut().poll(context) {
                    return Poll::Ready(lock);
                }
                if Handle::try_current().is_err() {
                    return Poll::Pending;
                }
                // A copy that begins later has a later deadline, or is looked at again this much later.
                let next = self.copies.next_deadline();
                let next = next.or_else(|| Tick::now().checked_add(options.copy_deadline));
                let Some(next) = next else { return Poll::Pending };
                let mut sleep = alarm.take().unwrap_or_else(|| Box::pin(sleep_until(next)));
                if sleep.as_mut().poll(context).is_pending() {
                    alarm = Some(sleep);
                    return Poll::Pending;
                }
            }
        })
        .await
    }

    /// Waits for its turn, but not beyond the end of `unless`.
    async fn begin_unless(
        &self,
        options: &DefragOptions,
        unless: impl Future<Output = ()>,
    ) -> Option<CompactionPass<'_>> {
        let (mut lock, mut unless) = (pin!(self.turn(options)), pin!(unless));
        let lock = poll_fn(|context| match lock.as_mut().poll(context) {
            Poll::Ready(lock) => Poll::Ready(Some(lock)),
            Poll::Pending => unless.as_mut().poll(context).map(|()| None),
        });
        Some(self.run(options, lock.await?))
    }

    fn run(&self, options: &DefragOptions, lock: OwnedMutexGuard<()>) -> CompactionPass<'_> {
        let wave_blocks = (options.wave_bytes / self.block_bytes).clamp(1, WAVE_BLOCKS);
        let (lock, report) = (Arc::new(lock), DefragReport::default());
        let copy_deadline = options.copy_deadline;
        CompactionPass { compactor: self, lock, wave_blocks, copy_deadline, background: None, report }
    }

    /// Fragmentation, and free aligned runs.
    fn measure(&self, order: Order) -> (f64, usize) {
        let blocks = self.blocks();
        (blocks.fragmentation(order), blocks.census(order).free_in_order >> order.0)
    }
}

/// Why a wave was put back.
pub(super) enum Failure {
    Copy(StorageError),
    Dropped,
    Overdue(OverdueCopy),
}

impl Failure {
    /// To the caller, with what had been done before.
    pub(super) fn told(self, report: DefragReport) -> DefragError {
        let report = Box::new(report);
        match self {
            Self::Copy(error) => DefragError::Copy { error, report },
            Self::Dropped => DefragError::CopyDropped { report },
            Self::Overdue(copy) => DefragError::CopyOverdue { copy, report },
        }
    }
}

impl CompactionPass<'_> {
    fn is_stopped(&self) -> bool {
        self.background.as_ref().is_some_and(|background| *background.stopped.borrow())
    }

    /// Whether what has moved is not free for a while, so that others would want for what moves next.
    fn leaves_room(&self) -> bool {
        self.background.is_some() && self.compactor.blocks().clock().in_flight() > 0
    }

    /// Brings free frames thread cache from threads' caches, where no plan sees them. It costs each thread its magazines.
    pub(super) fn trim_caches(&self) {
        self.compactor.blocks().trim();
    }

    /// A plan for the pool as it is now.
    pub(super) fn look(&self, goal: Goal, moves_max: usize) -> Plan {
        plan(&self.compactor.snapshot(), goal, moves_max)
    }

    /// Moves, wave by wave.
    pub(super) async fn carry_out(&mut self, moves: &[Move]) -> Result<(), Failure> {
        for moves in moves.chunks(self.wave_blocks) {
            if self.is_stopped() {
                break;
            }
            self.wave(moves).await?;
            // On a thread that others wait for, they go between waves.
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    async fn wave(&mut self, moves: &[Move]) -> Result<(), Failure> {
        let under_way = &self.compactor.copies;
        if let Some(overdue) = under_way.overdue() {
            // It would get stuck, too.
            return Err(Failure::Overdue(overdue));
        }
        let given_up = &mut self.report.given_up;
        let pairs = moves.iter().map(|moved| (moved.from, moved.to));
        let wave = self.compactor.blocks().begin_wave(pairs, &mut |_, why| given_up.count(why));
        if wave.is_empty() {
            return Ok(());
        }
        let copies: Vec<FrameMove> = wave.moves().map(|(from, to)| FrameMove::new(from, to)).collect();
        let (tell, told) = oneshot::channel();
        let blocks = self.compactor.blocks().clone();
        let bytes = copies.len() * self.compactor.block_bytes;
        let deadline = Tick::now().checked_add(self.copy_deadline);
        let under_way = under_way.begin(copies.len(), bytes as u64, deadline, self.lock.clone());
        let copying = Copying { blocks, wave: Some(wave), _under_way: under_way, tell: Some(tell) };
        // SAFETY: the sources are marked, so that nobody writes them, and the destinations are held, until the wave is
        // published or dropped, which is after the copy: the wave goes with it.
        unsafe {
            self.compactor.bytes.copy_then(copies, bytes, Box::new(move |outcome| copying.end(outcome)))
        };
        let copied = self.end_of_copy(told, deadline).await?;
        self.report.given_up.add(&copied.given_up);
        if let Some(error) = copied.failed {
            return Err(Failure::Copy(error));
        }
        self.report.moved_blocks += copied.moved;
        self.report.moved_bytes += (copied.moved * self.compactor.block_bytes) as u64;
        self.report.waves += 1;
        Ok(())
    }

    /// What is told of the copy, unless that takes too long.
    async fn end_of_copy(
        &self,
        mut told: oneshot::Receiver<Copied>,
        deadline: Option<Tick>,
    ) -> Result<Copied, Failure> {
        // Most copies are over by now: those need no timer.
        match told.try_recv() {
            Ok(copied) => return Ok(copied),
            Err(oneshot::error::TryRecvError::Closed) => return Err(Failure::Dropped),
            Err(oneshot::error::TryRecvError::Empty) => {}
        }
        let Some(deadline) = deadline.filter(|_| Handle::try_current().is_ok()) else {
            return told.await.map_err(|_| Failure::Dropped);
        };
        loop {
            if let Ok(told) = timeout_at(deadline, &mut told).await {
                return told.map_err(|_| Failure::Dropped);
            }
            // The clocks agree that it is late, or else it is looked at again.
            if let Some(copy) = self.compactor.copies.overdue() {
                return Err(Failure::Overdue(copy));
            }
            tokio::task::yield_now().await;
        }
    }
}
