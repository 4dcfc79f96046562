//! The protocol by which a sequence or cached blocks move from one node to another.
//!
//! [`Migrations`] holds all migrations of a node: a [`Source`] or a [`Target`] for each. They are
//! pure state machines: they take timestamped events and return actions, which the node executes.
//! Since they use no clock, blocks or sockets, a simulation can drive them through every order of
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
//! A fetch begins with `Fetch` from the target; the rest is the same. For a copy in parts, each
//! source runs this exchange with its part; the target commits all of them at once:
//!
//! ```text
//!   source of part 0      target      source of part 1
//!      |------ Commit ------>|                |        part 0 has agreed
//!      |<-- Status(Agreed) --|                |
//!      |                     |<--- Commit ----|        part 1 has agreed: the one commit
//!      |<---- Committed -----|-- Committed -->|
//! ```
//!
//! # Terms
//!
//! - A **transfer deadline** is the time for which a target keeps its reservation: 30 s, renewed by
//!   each message of the source that names it. Each reservation has a new number.
//! - An **incarnation** is one start of a node's process. Its end destroys all copies in its
//!   memory.
//! - A copy is **in doubt** at a source that sent `Commit` and has no answer: held, not run.
//! - A **part** of a copy holds some heads of every block. The parts of a copy come from different
//!   nodes, ranks of another tensor-parallel split. They share the migration id; each has a
//!   separate machine and reservation at the target.
//! - A part has **agreed** when its source has sent `Commit` and the target has all of its bytes.
//!
//! # The source
//!
//! Rows are states, cells are `next state: actions`. Events that a row does not name change
//! nothing. *End* stands for: restore the copy, report the outcome, over; *abort* before it also
//! sends `Abort`.
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
//! | | no answer for the transfer deadline, link lost; only one side may continue | InDoubt: report, `Query` |
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
//! A sequence exists only once, so its migration waits for the next link while its reservation
//! lasts. Cached blocks do not wait: both sides keep what they had, and end immediately with
//! [`Cause::LinkLost`], so that a waiting caller can recompute or retry. A side that has not
//! noticed the loss learns of the end from the answer to its next message, or its reservation
//! expires. From `Commit` on the source is unconfirmed; a target that has begun to commit completes
//! it.
//!
//! # Cleared caches
//!
//! `Commit` states whether the source's cache was cleared between the export and this message. The
//! target uses the first one that it accepts; for a copy in parts, the copy is current only if all
//! parts are. A copy that is not current is not registered in the target's cache: the blocks of a
//! sequence arrive but cannot be found by their hashes, and cached blocks do not arrive. So nothing
//! that the source cleared before its commit is found at the target. What it clears later is found
//! there until the target is cleared too, as if the copy had moved first.
//!
//! # Never two owners
//!
//! The argument uses no clock: transfer deadlines only bound how long blocks stay reserved.
//!
//! 1. The target owns the copy from its single commit on, which follows a `Commit` of the source
//!    for this reservation. A source sends it only while it holds the copy, and restores the copy
//!    only for the reasons below.
//! 2. Before it sends `Commit`, the source may restore: its machine is then over, and sends none.
//! 3. After it, the source restores for two reasons. `Aborted` of the reservation: the target sends
//!    it after that reservation ended without a commit, and never reuses its number. Or the
//!    target's process has ended, and its copy with it, unless the copy had left that process.
//! 4. Therefore the target moves a sequence on only when its source has answered by `Forget`, or
//!    has ended ([`RequestError::Unconfirmed`]). So at any time at most one other process could
//!    continue.
//! 5. In a copy in parts, each part has its owner. The target owns all parts from its single commit
//!    on. It commits only while every part has agreed, so by 1 with the consent of each source. The
//!    machines of the parts change to Committing in the same step, and none sends `Aborted`
//!    afterwards unless that commit failed. Before this step, the end of any part ends all parts:
//!    each source gets `Aborted` for its reservation, and restores by 3. In no step is one part
//!    committed and another ended. By 4, the sequence moves on only when every source has answered
//!    or ended.
//! 6. Messages of or for another process are dropped, so reservations need to be unique only within
//!    an incarnation, and an answer never comes from a process that has ended.
//!
//! # Never none
//!
//! The owner of a sequence is the node that runs it, or else the source that holds it. While no
//! owner dies, a copy exists: a source drops its own only on `Committed`, which a target sends
//! after its commit. When the owner dies, its sequence is lost, unless a source in doubt still has
//! it. If a sequence ends at the target before its source receives the commit, the source holds it
//! until then; if the target dies, the source runs it again.
//!
//! For a copy in parts this holds for each part. If a source dies before the last part has agreed,
//! its part is lost and the copy ends: the others restore theirs. If it dies later, the target has
//! its part.
//!
//! # No leak
//!
//! Every state but two ends on its own, by the transfer deadline or by the limit, which no
//! heartbeat extends. The two are a source in doubt and a committed target. They end by an answer,
//! by another process of the peer, or by the operator ([`Migrations::peer_ended`]); until then
//! [`Migrations::status`] lists them. No exchange of answers is endless: without a machine,
//! `Abort`, `Aborted`, `Refused` and `Forget` have no answer, and every other message is an answer
//! or is repeated by a timer.
//!
//! Since their sources renew their reservations, parts that have agreed could wait for the others
//! until the limit. Therefore a part that does not arrive within the transfer deadline of the first
//! one ends the copy; one that arrived has a transfer deadline of its own.
//!
//! # Copies in parts
//!
//! A copy is complete at one target. When several targets receive a sequence, each has a separate
//! copy with its own id, and one may be committed while another ends. An engine that needs all of
//! them replicates, and closes its own once all have arrived. Only sequences move in parts. Ids of
//! copies are used once: a retry has another one.
//!
//! # Cache queries
//!
//! [`CacheQuestion`] asks which blocks a node has cached, and [`CacheAnswer`] answers. They belong
//! to no migration and change no state: either may be lost.
//!
//! # The node's part
//!
//! The node delivers results by [`Migrations::done`], calls [`Migrations::tick`] at
//! [`Migrations::deadline`] or later, and reports handshakes in their order
//! ([`Migrations::link_up`]). A result whose machine has ended is dropped. Memory that a transport
//! may still access is outside the protocol: the node restores and releases references, and the
//! transport keeps its own.

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
