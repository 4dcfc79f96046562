//! Who waits for blocks, in which order, and who tells them.
//!
//! Requests that wait stand in one line: urgent before high before normal, and in each of these in the order in which they
//! came. Only the head of the line tries; when it succeeds or gives up, it hands its turn on. An allocation that does
//! not wait stands in no line, and may get blocks before the head does: sequences that run go before those that are to be
//! admitted.
//!
//! # State
//!
//! | where | what | meaning |
//! |---|---|---|
//! | the clock's word | `awaited` | somebody waits, or the [reserve](super::reserve) is short: announce what becomes available |
//! | [`Waiters`] | `news` | something became available, and the line was not told yet |
//! | the line, under its lock | `signal` | the head has reason to try |
//! | the line, under its lock | `places`, `passed` | requests by priority and arrival; the head is the first of `places` |
//! | a place in line | `waker` | its future sleeps, and is to be woken by this |
//! | a place in line | `absent` | since when its future has had reason to run and was not polled, and how long that may take |
//! | a place in line | `is_fenced` | its owner has made a heavy fence since it came, so that its searches find everything |
//! | a place in line | `is_sure` | its last search visited every thread cache and found nothing: all that came since was announced |
//!
//! # Protocol
//!
//! ```text
//! wait:      enter the line, word |= awaited, head => signal;  heavy_fence
//! turn:      passed => back into its place, and if that is the head's, signal;  look after the line
//!            head and signal => signal := 0, go;  else leave a waker, sleep
//! try:       search everywhere;  got it => leave the line;  met an owner inside its thread cache => signal, yield;  else sleep
//! leave:     the next head: signal, wake;  line empty and reserve full => word &= !awaited;  reserve short after all => |=
//! look after the line:  signal, and the head absent for too long, and another behind it => head to `passed`, wake the next
//! announce:  (what was freed is where others find it);  light_fence;  word.awaited => top up the reserve, tell
//! tell:      news := 1;  fence;  lock free? => news := 0, signal, wake the head;  unlock;  fence;  news again? => again
//! ```
//!
//! # Nobody sleeps beside a free block
//!
//! What is freed goes one of three ways.
//!
//! - *The short way*, into the loaded magazine, if the clock's word is quiet. The word is read inside the owner's section,
//!   so that by the asymmetric fence either the owner sees that somebody waits, and goes the long way, or who waits, and
//!   visits the thread cache after its fence, meets the owner inside or finds the frame. A waiter that meets an owner inside does
//!   not sleep, but wakes itself and looks again: the owner is there for nanoseconds, or until its thread, if it was
//!   stopped there, goes on.
//! - *The long way*, which ends with `announce`. Either the announcer sees the bit, or the waiter's search, which begins after
//!   its fence, sees what was freed.
//! - *Into limbo*. The end of a batch tells by the very word by which it ends, so that no fence is needed. (It is also
//!   announced: the batch that it was tagged with may have ended before it got there.)
//!
//! A frame that is free can be in a thread's hands for a moment, and then nobody finds it: whoever had it announces. Steps that
//! take frames out of where a search looks, and put them back, cannot be called without a [`Custody`](super::custody::Custody),
//! which announces when it ends. These are all who announce:
//!
//! | what | where |
//! |---|---|
//! | a block becomes evictable, or is put back by an eviction that passed over it | `Core::release_cached`, `allocate_at` |
//! | the cache is cleared | `Core::evict_all` |
//! | a free the long way, by release, by handle, of a sequence or a lease | `Core::give_back` |
//! | an allocation the long way: frames of a split, of a walk in transit, taken back from others, of a request undone | `Core::allocate_at`, [`Waiting::allocate`] |
//! | magazines given back: `flush`, a thread that ends, a handle that is dropped | `CacheHandle` |
//! | trim, and an audit | `Core::trim`, `audit` |
//! | what moves left is looked through: by the background task, at the end of a batch | `Core::reclaim_shared_limbo` |
//! | the pool grows | `Core::grow` |
//! | moves end: frames that were left, destinations that were not used | [`Wave`](super::Wave) |
//! | a shrink looks for what is free, gives back what it had, or is done, so that some wait in vain | [`Shrinking`](super::Shrinking) |
//! | a batch ends; or it begins, and its slot no longer stands for tickets before its own | `Core::end_batch`, `begin_batch` |
//! | the reserve is looked through by a shrink, or is topped up | `Core::vacate_reserve`, and within `tell` |
//! | the device has failed, so that all wait in vain | `Core::poison` |
//! | a block can be moved that could not, for whoever waits for a run: sealed by hand, or unpinned | `Core::seal`, `unpin` |
//!
//! (Pins, shares and forks make nothing available.)
//!
//! # A head that does not come
//!
//! A future that is kept without being polled (in a `select!` that went another way, in a task that is stuck) would hold up the
//! whole line. So a head that was woken, and was not polled within the [patience](Core::set_turn_patience), is *passed
//! over*: the signal goes to the next place, and it keeps its own. When it is polled it is back in front of all that came
//! after it, and has a turn at once, because the one that it was woken for went to others. So:
//!
//! - a signal is never lost: it is pending until a head takes it that is being polled, and whenever it moves to another head
//!   that one is woken;
//! - a request that is polled within the patience, when it is woken, is never overtaken by one behind it;
//! - a request that is passed over is not starved: each of its polls gives it a turn before all behind it.
//!
//! There is no timer for this. The line is looked after by each thread that comes by: an announcement while a signal is
//! pending, a request that enters the line or is polled in it (one with a deadline polls itself that often), and the
//! background task of the compactor. A place whose future is at work (it looks for a run, or rests between two looks) says how long it may be
//! absent. Which request is first, and since when it has not been polled, is in [`Core::head_of_line`].
//!
//! # Who waits for whom
//!
//! The line's lock is held for a few instructions, by those who wait and by those who tell. Who tells never waits for it:
//! it leaves `news` behind, and whoever has the lock looks for that after unlocking; of the two, one sees the other, by
//! their fences. Wakers are called, and dropped, without the lock: they may run anything. (What a waker does is its
//! runtime's: tokio's takes a lock of its own for a moment.) A stopped waiter stops no free, and no allocation that does
//! not wait. A future that is neither polled nor dropped holds up those behind it for as long as the patience.
//!
//! Models: `loom-tests/tests/waiters.rs`, `loom-tests/tests/in_hand.rs`.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::{PoisonError, TryLockError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::batch::InFlight;
use crate::error::{AllocError, HeadOfLine};
use crate::ids::BlockId;
use crate::sync::{
    AtomicBool, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering::*, fence, heavy_fence, light_fence,
};

use super::allocate::Grab;
use super::blocks::Core;
use super::{AllocRequest, Blocks, Priority};

/// How long a head may be absent that was woken, unless the pool says otherwise.
pub(crate) const TURN_PATIENCE: Duration = Duration::from_millis(100);

/// See the [module](self).
pub(super) struct Waiters {
    line: Mutex<Line>,
    news: AtomicBool,
    /// Places in line, for those who count.
    count: AtomicUsize,
    /// In nanoseconds; all ones: for ever.
    patience: AtomicU64,
}

impl Default for Waiters {
    fn default() -> Self {
        Self {
            line: Mutex::default(),
            news: AtomicBool::new(false),
            count: AtomicUsize::new(0),
            patience: AtomicU64::new(TURN_PATIENCE.as_nanos() as u64),
        }
    }
}

/// A place in line: the first one is the head.
type Key = (Reverse<Priority>, u64);

struct Place {
    asked: usize,
    came: Instant,
    waker: Option<Waker>,
    absent: Option<Absence>,
}

/// A future that has reason to run, and was not polled since.
#[derive(Clone, Copy)]
struct Absence {
    since: Instant,
    allowed: Duration,
}

impl Absence {
    fn is_too_long(&self) -> bool {
        if cfg!(kvpool_loom) {
            // A model has no time: at once, or never.
            return self.allowed.is_zero();
        }
        self.since.elapsed() >= self.allowed
    }
}

#[derive(Default)]
struct Line {
    places: BTreeMap<Key, Place>,
    /// Those that were passed over.
    passed: BTreeMap<Key, Place>,
    /// Places that there ever were.
    came: u64,
    signal: bool,
}

impl Line {
    fn is_head(&self, key: Key) -> bool {
        self.places.first_key_value().is_some_and(|(&head, _)| head == key)
    }

    fn len(&self) -> usize {
        self.places.len() + self.passed.len()
    }

    /// The head has reason to try; who must be woken for it. If the one before it had reason, and did not come, it is
    /// another by now.
    #[must_use = "a head that has a reason to try must be woken"]
    fn signal(&mut self, patience: Duration) -> Option<Waker> {
        if std::mem::replace(&mut self.signal, true) {
            let passed = self.pass_over();
            if passed && cfg!(kvpool_mutant = "next_unwoken") {
                return None;
            }
        }
        self.wake_head(patience)
    }

    /// Another head, if this one has reason to try and does not come; it must be woken, unless it is about to look by
    /// itself.
    #[must_use = "a head that has a reason to try must be woken"]
    fn pass_over(&mut self) -> bool {
        let mut passed = false;
        while self.places.len() > 1 {
            let Some(head) = self.places.first_entry() else { break };
            if !head.get().absent.is_some_and(|absence| absence.is_too_long()) {
                break;
            }
            let (key, place) = head.remove_entry();
            self.passed.insert(key, place);
            // Also what it was woken for before, and took, and did not come to look for.
            (passed, self.signal) = (true, true);
        }
        passed
    }

    #[must_use = "a head that has a reason to try must be woken"]
    fn wake_head(&mut self, patience: Duration) -> Option<Waker> {
        let mut head = self.places.first_entry()?;
        let place = head.get_mut();
        // Without a waker it was woken already, or has not slept yet: it will see the signal.
        let waker = place.waker.take()?;
        place.absent = Some(Absence { since: Instant::now(), allowed: patience });
        Some(waker)
    }

    /// The future of this place is being polled: it is back, if it was passed over, and has a turn if it is the head.
    fn is_polled(&mut self, key: Key) {
        if let Some(place) = self.passed.remove(&key) {
            self.places.insert(key, place);
            // What it was woken for went to others, and they may have left some.
            self.signal |= self.is_head(key) && !cfg!(kvpool_mutant = "passed_silent");
        }
        if let Some(place) = self.places.get_mut(&key) {
            place.absent = None;
        }
    }

    fn remove(&mut self, key: Key) -> Option<Place> {
        self.places.remove(&key).or_else(|| self.passed.remove(&key))
    }
}

impl Waiters {
    fn lock(&self) -> MutexGuard<'_, Line> {
        // A waker's `clone` and `drop` run without the lock: nothing panics inside.
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, Line>> {
        if cfg!(kvpool_loom) {
            // The checker plays this against a holder of the lock only where both access something else, too.
            self.count.load(Relaxed);
        }
        match self.line.try_lock() {
            Ok(line) => Some(line),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Places in line.
    pub(super) fn count(&self) -> usize {
        // Relaxed: a statistic.
        self.count.load(Relaxed)
    }
}

impl Core {
    /// To be called by whoever made blocks available, or had free frames in its hands where nobody finds them, after they
    /// are where others find them: tells those who wait, if anybody does.
    #[inline]
    pub fn announce(&self) {
        // Pairs with the heavy fence of who waits: it finds what was freed, or we see that it waits.
        light_fence();
        if self.clock.read().is_awaited() {
            self.tell();
        }
    }

    /// The pool's device has failed: from now on every request is refused, also those that wait. What is owned can be freed.
    pub fn poison(&self) {
        let awaited = self.clock.lose();
        if awaited && !cfg!(kvpool_mutant = "silent_poison") {
            self.tell();
        }
    }

    /// Whether the pool's device has failed.
    pub fn is_lost(&self) -> bool {
        self.clock.read().is_lost()
    }

    /// Begins a batch. While it began, it may have stood for older tickets than its own, and held back what no batch sees:
    /// who looked for blocks at that moment is told to look again.
    ///
    /// # Panics
    ///
    /// If 131,072 batches are in flight. Nothing has begun then.
    pub fn begin_batch(&self) -> InFlight {
        let batch = self.clock.begin();
        if !cfg!(kvpool_mutant = "silent_begin") {
            self.announce();
        }
        batch
    }

    /// Ends a batch, and tells those who wait that what it held back may be free.
    ///
    /// # Panics
    ///
    /// If the batch is another pool's.
    pub fn end_batch(&self, batch: InFlight) {
        if self.clock.end(batch) && !cfg!(kvpool_mutant = "silent_end") {
            self.tell();
        }
    }

    /// Whether somebody waits for blocks, or the reserve is short.
    #[inline]
    pub fn is_awaited(&self) -> bool {
        self.clock.read().is_awaited()
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.waiters.count()
    }

    /// How long the first in line may be absent after it was woken, before the next one has its turn.
    pub(crate) fn set_turn_patience(&self, patience: Duration) {
        let nanos = u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX);
        // Relaxed: nothing depends on when it is seen.
        self.waiters.patience.store(nanos, Relaxed);
    }

    pub(crate) fn turn_patience(&self) -> Duration {
        match self.waiters.patience.load(Relaxed) {
            u64::MAX => Duration::MAX,
            nanos => Duration::from_nanos(nanos),
        }
    }

    /// The request that is first in line, also one that was passed over.
    pub fn head_of_line(&self) -> Option<HeadOfLine> {
        self.first_in_line().map(|(_, head)| head)
    }

    /// The same, with the number of its place.
    pub(crate) fn first_in_line(&self) -> Option<(u64, HeadOfLine)> {
        if self.waiting() == 0 {
            return None;
        }
        self.with_line(|line| {
            let firsts = [line.places.first_key_value(), line.passed.first_key_value()];
            let (&(Reverse(priority), number), place) =
                firsts.into_iter().flatten().min_by_key(|&(&key, _)| key)?;
            let unpolled = place.absent.map(|absence| absence.since.elapsed());
            Some((number, HeadOfLine::new(priority, place.asked, place.came.elapsed(), unpolled)))
        })
    }

    /// Requests that were passed over, and have not been polled since.
    pub fn passed_over(&self) -> usize {
        if self.waiting() == 0 { 0 } else { self.with_line(|line| line.passed.len()) }
    }

    /// Passes over the first in line if it was woken and does not come: for those who look at the pool now and then.
    pub(crate) fn look_after_line(&self) {
        if self.waiting() > 1 {
            let woken = self
                .with_line(|line| if line.pass_over() { line.wake_head(self.turn_patience()) } else { None });
            woken.into_iter().for_each(crate::sync::wake);
        }
    }

    #[cold]
    #[inline(never)]
    fn tell(&self) {
        self.top_up();
        // Release: pairs with the Acquire in `deliver`. A swap, so that it goes on with what others have told.
        self.waiters.news.swap(true, Release);
        self.deliver();
    }

    /// Tells the line what is new, unless somebody has it: they look here after unlocking.
    fn deliver(&self) {
        loop {
            // Between `news` and the lock on one side, the unlocking and `news` on the other: one sees the other.
            fence(SeqCst);
            if !self.waiters.news.load(Relaxed) {
                return;
            }
            let Some(mut line) = self.waiters.try_lock() else { return };
            // Acquire: pairs with the Release in `tell`, so that the head's search sees what is new.
            let woken =
                if self.waiters.news.swap(false, Acquire) { line.signal(self.turn_patience()) } else { None };
            self.settle(&line);
            drop(line);
            woken.into_iter().for_each(crate::sync::wake);
        }
    }

    /// Clears the bit when there is nobody left to tell. The line's lock is held.
    fn settle(&self, line: &Line) {
        if line.len() == 0 && self.clock.read().is_awaited() && !self.reserve.is_short() {
            self.clock.clear_awaited();
            // An urgent request may have taken from the reserve, and set the bit that we cleared.
            if self.reserve.is_short() && !cfg!(kvpool_mutant = "settle_no_second_look") {
                self.clock.set_awaited();
            }
        }
    }

    /// Changes the line. What `f` returns is dropped without the lock.
    fn with_line<R>(&self, f: impl FnOnce(&mut Line) -> R) -> R {
        let mut line = self.waiters.lock();
        let result = f(&mut line);
        self.waiters.count.store(line.len(), Relaxed);
        drop(line);
        if !cfg!(kvpool_mutant = "no_second_look") {
            self.deliver();
        }
        result
    }
}

/// A place in line. Dropping it leaves the line and hands the turn on.
#[must_use = "a place that is dropped is given up"]
pub(crate) struct Waiting<'a> {
    blocks: &'a Blocks,
    key: Key,
    is_fenced: bool,
    is_sure: bool,
    /// It has had a turn: who came before it in line meanwhile may have looked for what we had in our hands.
    has_tried: bool,
}

impl Blocks {
    /// Takes a place in line, behind all of the request's priority.
    pub(crate) fn wait_in_line(&self, request: &AllocRequest) -> Waiting<'_> {
        let came = Instant::now();
        let key = self.with_line(|line| {
            let key = (Reverse(request.priority), line.came);
            line.came += 1;
            line.places.insert(key, Place { asked: request.blocks, came, waker: None, absent: None });
            if line.is_head(key) {
                // What was freed before the bit was set was announced to nobody: look once more.
                line.signal = !cfg!(kvpool_mutant = "no_look_after_bit");
            }
            // Under the lock, under which it is cleared.
            self.clock.set_awaited();
            key
        });
        Waiting { blocks: self, key, is_fenced: false, is_sure: false, has_tried: false }
    }
}

impl<'a> Waiting<'a> {
    /// By which its future says that it is at work.
    pub(crate) fn pulse(&self) -> Pulse<'a> {
        Pulse { blocks: self.blocks, key: self.key }
    }
}

impl Waiting<'_> {
    /// Waits until it is this place's turn to try.
    pub(crate) async fn turn(&mut self) {
        if self.has_tried && !self.is_sure {
            // Somebody was inside its thread cache, where there may be something. Let it run, and look again.
            yield_once().await;
        }
        poll_fn(|context| self.poll_turn(context)).await;
    }

    fn poll_turn(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let mut waker = Some(context.waker().clone());
        let (has_turn, woken) = self.blocks.with_line(|line| {
            line.is_polled(self.key);
            let is_other = line.pass_over() && !line.is_head(self.key);
            let woken = if is_other { line.wake_head(self.blocks.turn_patience()) } else { None };
            let has_turn = line.is_head(self.key) && std::mem::take(&mut line.signal);
            if !has_turn && let Some(place) = line.places.get_mut(&self.key) {
                // The one before it is dropped without the lock.
                std::mem::swap(&mut place.waker, &mut waker);
            }
            (has_turn, woken)
        });
        woken.into_iter().for_each(crate::sync::wake);
        if has_turn { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Tries, in its turn, for a lease. On success every block is passed to `take`; else there is nothing to be had now, and another
    /// turn will come.
    ///
    /// # Errors
    ///
    /// [`AllocError`]; nothing was taken.
    pub(crate) fn allocate(
        &mut self,
        request: &AllocRequest,
        take: &mut dyn FnMut(BlockId),
    ) -> Result<(), AllocError> {
        self.has_tried = true;
        if !self.is_fenced {
            // Pairs with the light fences of those who free: they see the bit, or we find what they freed.
            self.is_fenced = cfg!(kvpool_mutant = "waiter_no_fence") || heavy_fence();
        }
        // The pool may have shrunk since, or its device been lost.
        self.blocks.check_request(request)?;
        if self.is_sure {
            // A look from afar first: who waits for many blocks is told of each one.
            let counts = self.blocks.recount();
            let reserved = self.blocks.reserved_for(request);
            if counts.free() + counts.retired + counts.evictable + reserved < request.blocks {
                self.tried();
                return Err(self.blocks.exhausted(request.blocks));
            }
        }
        let mut grab = Grab::new();
        let custody = self.blocks.custody();
        let gathered = self
            .blocks
            .with_thread_cache(|cache| self.blocks.gather(cache, request, None, &mut grab, &custody));
        // An announcement would signal the first in line, which is this place: it would search again for ever. `tried`
        // and the end of the place tell the line what it needs to know.
        custody.leave_to_line();
        self.is_sure = self.is_fenced && grab.is_sure;
        let is_refused = !self.is_fenced || grab.is_refused;
        match gathered {
            Ok(()) => self.blocks.hand_out(&grab, request, true, take),
            // Without its fences it may sleep beside a free block, and would look for ever. Reached by `fence_refused`.
            Err(AllocError::Exhausted { asked, .. } | AllocError::NoRun { asked, .. }) if is_refused => {
                return Err(AllocError::FenceRefused { asked, free: self.blocks.counts().free() });
            }
            Err(_) => self.tried(),
        }
        gathered
    }

    /// Gives back a turn that was not used: the first in line, perhaps another by now, has reason to try.
    pub(crate) fn hand_back(&self) {
        let woken = self.blocks.with_line(|line| line.signal(self.blocks.turn_patience()));
        woken.into_iter().for_each(crate::sync::wake);
    }

    /// After a search in vain: announces what this place had in its hands to the head, unless it is the head itself.
    fn tried(&self) {
        let woken = self.blocks.with_line(|line| {
            if !self.is_sure {
                // It yields, and is to be polled again soon; by then it may be the head again.
                self.pulse().is_absent(line, Duration::ZERO);
            }
            if line.is_head(self.key) {
                line.signal |= !self.is_sure;
                return None;
            }
            line.signal(self.blocks.turn_patience())
        });
        woken.into_iter().for_each(crate::sync::wake);
    }
}

/// A sign of life of a future that does something else than wait for its turn.
#[derive(Clone, Copy)]
pub(crate) struct Pulse<'a> {
    blocks: &'a Blocks,
    key: Key,
}

impl Pulse<'_> {
    /// The future is being polled, and will be again within so long, or it is not going to be.
    pub(crate) fn beat(&self, within: Duration) {
        self.blocks.with_line(|line| {
            line.is_polled(self.key);
            self.is_absent(line, within);
        });
    }

    fn is_absent(&self, line: &mut Line, within: Duration) {
        if let Some(place) = line.places.get_mut(&self.key) {
            let allowed = self.blocks.turn_patience().saturating_add(within);
            place.absent = Some(Absence { since: Instant::now(), allowed });
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let (own, woken) = self.blocks.with_line(|line| {
            let was_head = line.is_head(self.key);
            let own = line.remove(self.key);
            let hands_on = (was_head || self.has_tried) && !cfg!(kvpool_mutant = "turn_kept");
            let woken = if hands_on { line.signal(self.blocks.turn_patience()) } else { None };
            self.blocks.settle(line);
            (own, woken)
        });
        drop(own);
        woken.into_iter().for_each(crate::sync::wake);
    }
}

/// Lets other tasks run.
async fn yield_once() {
    let mut yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
