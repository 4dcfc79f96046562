//! Lines that a child prints for its parent, and the clock that all processes share.

use std::fmt::Display;

/// Begins a line for the parent. The test harness of the child prints lines of its own.
const MARK: &str = "@@ ";

/// Returns the nanoseconds of the system's monotonic clock, which is the same for all processes.
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for a write.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) }, 0);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// What happened to a sequence in a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    /// The process may run it from now on.
    Owns,
    /// It is given to a migration.
    Leaves,
    /// The migration has succeeded.
    Moved,
    /// A copy was made elsewhere.
    Copied,
    /// No copy was made, as far as the process knows.
    Uncopied,
    /// It was closed.
    Closed,
    /// Its bytes are not those that were written.
    Wrong,
}

const ALL: [(What, &str); 7] = [
    (What::Owns, "owns"),
    (What::Leaves, "leaves"),
    (What::Moved, "moved"),
    (What::Copied, "copied"),
    (What::Uncopied, "uncopied"),
    (What::Closed, "closed"),
    (What::Wrong, "wrong"),
];

/// An event of a child.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Event {
    /// When, by [`now`].
    pub at: u64,
    pub what: What,
    /// The sequence.
    pub id: u64,
    /// Reason of a failure.
    pub why: String,
}

/// A line of a child.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Line {
    Answer(String),
    Event(Event),
}

/// Reads a line; `None` if it is not for the parent.
pub fn parse(line: &str) -> Option<Line> {
    let (_, line) = line.split_once(MARK)?;
    let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
    if first == "answer" {
        return Some(Line::Answer(rest.to_owned()));
    }
    let (at, rest) = rest.split_once(' ')?;
    let (id, why) = rest.split_once(' ').unwrap_or((rest, ""));
    let &(what, _) = ALL.iter().find(|(_, name)| *name == first)?;
    Some(Line::Event(Event { at: at.parse().ok()?, what, id: id.parse().ok()?, why: why.to_owned() }))
}

/// Answers a command.
pub fn answer(text: impl Display) {
    println!("{MARK}answer {}", text.to_string().replace('\n', " "));
}

/// Tells of an event that happens now.
pub fn tell(what: What, id: u64, why: impl Display) {
    let &(_, name) = ALL.iter().find(|(one, _)| *one == what).expect("all are in the list");
    println!("{MARK}{name} {} {id} {}", now(), why.to_string().replace('\n', " "));
}
