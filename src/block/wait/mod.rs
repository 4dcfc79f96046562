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
//! | the clock's word | `awaited` | somebody waits, or the [reserve](crate::block::reserve) is short: announce what becomes available |
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
//! take frames out of where a search looks, and put them back, cannot be called without a [`Custody`](crate::block::custody::Custody),
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
//! | moves end: frames that were left, destinations that were not used | [`Wave`](crate::block::Wave) |
//! | a shrink looks for what is free, gives back what it had, or is done, so that some wait in vain | [`Shrinking`](crate::block::Shrinking) |
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

mod announce;
mod waiting;
