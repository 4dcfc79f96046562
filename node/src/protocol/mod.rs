//! The protocol by which a sequence or cached blocks move from one node to another.
//!
//! [`Migrations`] holds all migrations of a node: a [`Source`] or a [`Target`] for each. They are pure:
//! events with their time go in, actions come out, and the node does the rest. They read no clock,
//! allocate no blocks and know no sockets, so that a simulation drives them through every order of
//! faults (`tests/simulation`).
//!
//! ```text
//!   source                                   target
//!   export the copy
//!      |---------------- Prepare ---------------->|  reserve blocks, a reservation begins
//!      |<------- Prepared(reservation, missing) ---------|
//!      |================ bytes ==================>|
//!      |----------------- Sent ------------------>|  verify checksums
//!      |<------------ Verified(bad) --------------|  bad places: again, at most twice
//!      |---------------- Commit ----------------->|  in doubt from here on
//!      |                                          |  commit: the copy is the target's
//!      |<-------------- Committed ----------------|
//!   close, keep or evict
//!      |---------------- Forget ----------------->|
//! ```
//!
//! A fetch begins with `Fetch` from the target; the rest is the same. Of a copy in parts, each source
//! does the same with its part; the target commits all of them at once:
//!
//! ```text
//!   source of part 0      target      source of part 1
//!      |------ Commit ------>|                |        part 0 has agreed
//!      |<-- Status(Agreed) --|                |
//!      |                     |<--- Commit ----|        part 1 has agreed: the one commit
//!      |<---- Committed -----|-- Committed -->|
//! ```
//!
//! # Words
//!
//! - A **transfer deadline** is the time for which a target promises to keep its reservation: 30 s,
//!   renewed by each message of the source that names it. Its number is new in each reservation.
//! - An **incarnation** is one start of a node's process. Its end takes all copies in its memory.
//! - A copy is **in doubt** at a source that sent `Commit` and has no answer: held, not run.
//! - A **part** of a copy holds some heads of every block. The parts of a copy come from different
//!   nodes, ranks of another tensor-parallel split; they have the same migration id, and each has a
//!   machine and a reservation of its own at the target.
//! - A part has **agreed** when its source has said `Commit` and the target has all of its bytes.
//!
//! # The source
//!
//! Rows are states, cells are `next state: actions`. Events that a row does not name change nothing.
//! *End* stands for: restore the copy, report the outcome, over; with *abort* in front, the target is
//! told.
//!
//! | state | event | next: actions |
//! |---|---|---|
//! | Exporting | exported | Preparing: `Prepare` |
//! | | export failed or refused, cancel, limit | abort, end |
//! | Preparing | `Prepared` with missing places | Sending(0): transfer |
//! | | `Prepared` without | Checking(0): `Sent` |
//! | | `Refused` | end |
//! | | time, link up | `Prepare` |
//! | Sending(n) | bytes of n written | Checking(n): `Sent` |
//! | | bytes of n not written | abort, end |
//! | | time, link up | `Heartbeat` |
//! | Checking(n) | `Verified(n)`, none bad | Committing: `Commit` |
//! | | `Verified(n)`, some bad, n < 2 | Sending(n + 1): transfer of these |
//! | | `Verified(n)`, some bad, n = 2 | abort, end |
//! | | time, link up | `Sent` |
//! | Preparing to Checking | silence for the transfer deadline, limit, cancel | abort, end |
//! | Sending and Checking | `Aborted` | end |
//! | Exporting to Checking | link lost; cached blocks | end |
//! | all above | the peer's process ended | end |
//! | Committing | `Committed` | over: close, keep or evict; `Forget`; report |
//! | | `Aborted`, the peer's process ended | end |
//! | | `Status(Agreed)` | the time without an answer begins anew |
//! | | no answer for the transfer deadline, link lost; only one side may go on | InDoubt: report, `Query` |
//! | | the same; both sides may | end as unconfirmed |
//! | | time, link up | `Commit` |
//! | InDoubt | `Committed` | over: close; `Forget`; report |
//! | | `Aborted`, the peer's process ended | end |
//! | | `Status(Ready)` | `Commit` |
//! | | time, link up | `Query` |
//! | any with a reservation | `Prepared` of another reservation | `Abort` of that reservation |
//! | no machine | `Fetch` | Exporting: export |
//! | | `Prepared`, `Verified`, `Status` | `Abort` |
//! | | `Committed` | `Forget` |
//!
//! # The target
//!
//! *End* stands for: release what was reserved, report, over. *Answer* stands for the last one:
//! `Prepared`, or `Verified`; `Status` while one is being made.
//!
//! | state | event | next: actions |
//! |---|---|---|
//! | no machine | `Prepare` | Reserving: reserve; `Refused` if the peer has too many, or if it is a fetch |
//! | | `Sent`, `Commit`, `Query`, `Heartbeat` | `Aborted` |
//! | Asking | `Prepare` of a fetch | Reserving: reserve |
//! | | `Abort`, silence for the transfer deadline, cancel, the peer's process ended | end |
//! | | time, link up | `Fetch` |
//! | Reserving | reserved | Receiving(0): `Prepared` |
//! | | refused | over: `Refused`, report |
//! | Receiving(n) | `Sent(n)`, n <= 2 | Verifying(n): verify |
//! | Verifying(n) | verified, none bad | Ready(n): `Verified(n)` |
//! | | verified, some bad | Receiving(n + 1): `Verified(n)` |
//! | | verification failed | end, `Aborted` |
//! | Ready(n) | `Commit` of all of a copy | Committing: commit |
//! | | `Commit` of cached blocks that are not current | end, `Aborted` |
//! | | `Commit` of a part | Agreed(n): `Status` |
//! | Agreed(n) | the last part has agreed | Committing: commit, by the machine of the first part |
//! | | `Commit` | `Status` |
//! | Reserving to Agreed | `Prepare`, `Query`, other `Sent` | answer |
//! | | `Heartbeat`, link up | `Status` |
//! | | the transfer deadline, limit, cancel, `Commit` before Ready | end, `Aborted` |
//! | | `Abort`, the peer's process ended | end |
//! | | another part ended, or one is absent for the transfer deadline | end, `Aborted` |
//! | Asking to Ready | link lost; cached blocks | end |
//! | Committing | committed, by this machine or another of the copy | Committed: `Committed`, report |
//! | | committed, and the peer's process has ended | over: report |
//! | | commit failed | over: `Aborted`, report |
//! | | `Abort` | nothing: each answer would cause the next abort |
//! | | others | `Status` |
//! | Committed | `Forget`, the peer's process ended | over |
//! | | any other message, time, link up | `Committed` |
//! | any | a message of another reservation | `Aborted` of that reservation; neither state nor deadline change |
//!
//! # Lost links
//!
//! A sequence waits for the next link, as long as its reservation lasts: it is one of a kind.
//! Cached blocks do not: both sides keep what they had, and end at once with [`Cause::LinkLost`],
//! so that a caller that waits for them can compute, or ask again. A side that has not noticed the
//! loss hears of the end by the answer to its next message, or its reservation ends. From `Commit`
//! on the source is unconfirmed, as before; a target that has begun to commit completes it.
//!
//! # Cleared caches
//!
//! `Commit` says whether the source's cache was not cleared since the export, as it is when the
//! message is sent; the target acts on the first one that it takes, and of a copy in parts, on the
//! conjunction of all. A copy that is not current is not registered in the target's cache: of a
//! sequence, its blocks arrive and are not found by their hashes; cached blocks do not arrive. What
//! was cleared at the source before it said its commit is therefore not found at the target. What is
//! cleared afterwards is found there until the target is cleared too, as if the copy had moved first.
//!
//! # Never two owners
//!
//! The argument uses no clock: transfer deadlines bound how long blocks stay reserved, and nothing
//! else.
//!
//! 1. The target owns the copy from its one commit on, which follows a `Commit` of the source for this
//!    reservation. A source sends none before it holds the copy, and restores none without one of the
//!    reasons below.
//! 2. Before it sends `Commit`, the source may restore: it sends none afterwards, since it is over.
//! 3. After it, the source restores for two reasons. `Aborted` of the reservation: the target said
//!    so behind the end of that reservation without a commit, and the number of a reservation is
//!    never used again. Or the target's process has ended, and its copy with it: unless the copy
//!    had left that process.
//! 4. Therefore the target passes a sequence on only when its source has answered by `Forget`, or has
//!    ended itself ([`RequestError::Unconfirmed`]). At any time at most one other process would go on.
//! 5. Of a copy in parts, each part has its owner. The target owns all parts from its one commit on.
//!    It commits only while every part has agreed, by 1 with the leave of each source. The machines of
//!    the parts change to Committing in the same step, and none of them says `Aborted` afterwards
//!    unless that commit failed. Before this step, the end of any part ends all parts: each is told
//!    `Aborted` for its reservation, and by 3 restores. There is no step in which one part is
//!    committed and another has ended. By 4, the sequence moves on only when every source has
//!    answered or ended.
//! 6. Messages of, and for, another process are dropped, so that reservations need to be unique
//!    only within an incarnation, and an answer never speaks for a process that has ended.
//!
//! # Never none
//!
//! The owner of a sequence is the node that runs it; else the source that holds it. As long as no
//! owner dies, a copy exists: a source gives its own up only for `Committed`, which a target says
//! behind its commit. When the owner dies, its sequence is lost, unless a source in doubt still has it.
//! A sequence that ended at the target before its source heard of the commit is held at the source
//! until then; if the target dies, the source runs it once more.
//!
//! Of a copy in parts this holds for each part: a source keeps its own until `Committed`, which no
//! target says before the one commit. A source that dies before the last part has agreed takes its
//! part along, and the copy ends: the others restore theirs. One that dies later has given its part
//! to the target.
//!
//! # No leak
//!
//! Every state but two ends by itself: by the transfer deadline, or by the limit, which no
//! heartbeat moves. The two are a source in doubt and a committed target. They end by an answer, by
//! another process of the peer, or by the operator's word ([`Migrations::peer_ended`]), and
//! [`Migrations::status`] lists them until then. No message is answered for ever: `Abort`,
//! `Aborted`, `Refused` and `Forget` have no answer where there is no machine, and every other one
//! is an answer, or is repeated by a timer.
//!
//! Parts that have agreed could wait for others until their limit, renewed by their sources. A part
//! that does not come within the transfer deadline of the first one therefore ends the copy; one
//! that came has a term of its own.
//!
//! # Copies in parts
//!
//! A copy is the whole at one target. Where several targets receive a sequence of one source, or of
//! several, each has a copy of its own, with its own id, and one may be committed while another ends.
//! An engine that needs all of them replicates, and closes its own once all have arrived. Only
//! sequences come in parts. Ids of copies are used once: a second try has another one.
//!
//! # Questions
//!
//! [`CacheQuestion`] asks which blocks a node has cached, and [`CacheAnswer`] says it. They belong to
//! no migration, begin none and change nothing: either may be lost.
//!
//! # Who does what
//!
//! The node delivers results by [`Migrations::done`], calls [`Migrations::tick`] at
//! [`Migrations::deadline`] or later, and reports handshakes in their order
//! ([`Migrations::link_up`]). A result whose machine has ended is given up. Memory that a transport may
//! still touch is not the protocol's concern: the node restores and releases by references, and
//! the transport keeps its own.

mod bounded;
mod copies;
mod machine;
mod message;
mod migrations;
mod outcome;
mod places;
mod question;
mod request;
mod source;
mod table;
mod target;
mod timing;

pub use bounded::{Bytes, List, Text, TooLong};
pub use copies::{CopyEvent, CopyNumber, CopyPart};
pub use machine::{Action as SideAction, Actions as SideActions, Event, Task, Work};
pub use message::*;
pub use migrations::{Action, Actions, Migrations};
pub use outcome::{Cause, Doubt, Origin, Outcome, Report, Side};
pub use places::{Places, PlacesError, RANGES_MAX, Range};
pub use question::{CacheAnswer, CacheQuestion, QUESTION_MAX};
pub use request::{CancelError, Command, Limits, LinkId, MachineId, Request, RequestError};
pub use source::{Source, SourceState};
pub use table::{MigrationStatus, SideState};
pub use target::{Target, TargetState};
pub use timing::{Millis, Timing};
