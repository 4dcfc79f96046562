//! The wait queue: the order of waiting requests, their turns, and announcements that wake them.
//!
//! The order is: urgent before high before normal; within each, running sequences that reserve
//! blocks before leases and admissions; then FIFO. Only the head searches; when it succeeds or
//! gives up, it passes on its turn. A request that does not wait has no place in the queue:
//!
//! | request | gets no block while the queue contains |
//! |---|---|
//! | an append, a reservation | a request of higher priority |
//! | an admission | a request of its priority or a higher one |
//! | a lease, handles | |
//!
//! So growth of running sequences precedes admissions of no higher priority, and running sequences
//! can finish. A head that is absent for too long does not count.
//!
//! To *announce* is to report, after making blocks available, that a search may find more. If a
//! request waits, the announcement *notifies* the queue: it signals the head and wakes it. The
//! light and heavy fence are the two sides of an [asymmetric fence](crate::sync).
//!
//! # State
//!
//! | where | what | meaning |
//! |---|---|---|
//! | the clock's word | `awaited` | a request waits, or the [reserve](super::space::Reserve) is short: announcements must notify |
//! | [`Waiters`](super::state::Waiters) | `pending` | a notification that the queue has not received yet |
//! | [`Waiters`](super::state::Waiters) | `highest` | the highest priority in the queue, for requests that do not wait |
//! | the queue, under its lock | `signal` | the head has a reason to search |
//! | the queue, under its lock | `places`, `passed` | requests by priority and arrival; the head is the first of `places` |
//! | a place in the queue | `waker` | its future sleeps, and this wakes it |
//! | a place in the queue | `absent` | since when its future has had a reason to run and was not polled, and how long that may take |
//! | a place in the queue | `is_fenced` | its owner has made a heavy fence since it entered the queue, so that its searches find everything |
//! | a place in the queue | `is_sure` | its last search visited every thread cache and found nothing: whatever became free since was announced |
//!
//! # Protocol
//!
//! ```text
//! wait:      enter the queue, word |= awaited, head => signal;  heavy_fence
//! turn:      passed => back into its place, and if that is the head's, signal;  look after the queue
//!            head and signal => signal := 0, go;  else leave a waker, sleep
//! try:       search everywhere;  success => leave the queue;  an owner inside its thread cache => signal, yield;  else sleep
//! leave:     the next head: signal, wake;  queue empty and reserve full => word &= !awaited;  reserve short after all => |=
//! look after the queue:  signal, and the head absent for too long, and another behind it => head to `passed`, wake the next
//! announce:  (freed frames are where searches find them);  light_fence;  word.awaited => top up the reserve,
//!            from bitmaps, then from retire lists of which no batch sees a frame;  notify
//! notify:    pending := 1;  fence;  lock free? => pending := 0, signal, wake the head;  unlock;  fence;  pending again? => again
//! ```
//!
//! # No request sleeps while a block is free
//!
//! A freed frame takes one of three paths.
//!
//! - *The fast path*, into the loaded magazine, if the clock's word is quiet. The word is read
//!   inside the owner's section. By the asymmetric fence, either the owner sees that a request
//!   waits and takes the slow path, or the waiter, which visits the thread cache after its fence,
//!   encounters the owner inside or finds the frame. A waiter that encounters an owner wakes itself
//!   and searches again: the owner is inside for nanoseconds or, if its thread was stopped, until
//!   it resumes.
//! - *The slow path*, which ends with `announce`. Either the announcer sees the bit, or the
//!   waiter's search, which begins after its fence, finds the frame.
//! - *Into a retire list*. The end of a batch reads `awaited` in the very word by which it ends.
//!   The retirement is also announced: the batch of its tag may have ended before.
//!
//! A thread that takes free frames out of reach of searches announces them afterwards, through a
//! [`WakeGuard`](super::space::WakeGuard). The complete list of announcements:
//!
//! | event | where |
//! |---|---|
//! | a block becomes evictable, or an eviction that passed over it puts it back | `Core::release_cached`, `allocate_into` |
//! | blocks are evicted by their ids, also those that a batch may see | `Core::evict_these` |
//! | a free on the slow path, of a sequence or a lease | `Core::give_back` |
//! | an allocation on the slow path: frames in transit in a split or a walk, reclaimed from other threads, or returned by a request that failed | `Core::allocate_into`, `Waiting::allocate` |
//! | magazines are flushed: `flush`, the end of a thread, its use of another pool after this one was closed | `CacheHandle` |
//! | the shared retire list is sifted: by the background task, at the end of a batch | `Core::reclaim_retired` |
//! | a trim, or an audit; the pool grows | `Core::trim`, `audit`, `grow` |
//! | moves end: vacated frames, unused destinations | [`Wave`](crate::block::Wave) |
//! | a shrink collects free frames, gives them back, or commits, so that some requests can no longer be met | [`Shrinking`](crate::block::Shrinking) |
//! | a batch ends; or it begins, and its slot no longer stands for tickets before its own | `Core::end_batch`, `begin_batch` |
//! | a shrink sifts the reserve, or it is topped up | `Core::vacate_reserve`, and within `notify` |
//! | an admission that has lost its place at the head puts back the cached blocks that it held while it searched | `Waiting::kept_no_longer` |
//! | the device has failed, so that no waiting request can be met | `Core::poison` |
//! | a block becomes movable, for requests that wait for a run: sealed by hand, or unpinned | `Core::seal`, `unpin` |
//!
//! # A head that is not polled
//!
//! A head that was woken and not polled within the
//! [patience](crate::block::Core::set_turn_patience) is *passed over*: the signal moves to the next
//! place. A poll restores its place and its turn:
//!
//! - a signal is never lost: it is pending until a head takes it while being polled, and a head to
//!   which it moves is woken;
//! - a request that is polled within the patience after it is woken is never overtaken;
//! - a request that is passed over is not starved: each poll gives it a turn before all behind it.
//!
//! There is no timer. Each thread that accesses the queue checks the head, and so does the
//! compactor's background task. A place whose future does other work than wait (it moves blocks, or
//! pauses between two searches) records how long it may be absent while it sleeps.
//!
//! # Blocking
//!
//! The lock is held for a few instructions. An announcer never waits for it: it leaves `pending`
//! set, and the holder checks `pending` after unlocking. Wakers run without the lock.
//!
//! Models: `loom-tests/tests/waiters.rs`, `in_hand.rs`, `admission.rs`.

mod announce;
mod ended;
mod waiting;

pub(crate) use ended::BatchesEnd;
pub(crate) use waiting::Waiting;
