//! Which fault happens at which step.

use std::fmt;

/// What passes between the nodes: a message, or the first bytes of a data item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    Prepare,
    Prepared,
    Bytes,
    Sent,
    Verified,
    Commit,
    Committed,
    Forget,
}

pub const STEPS: [Step; 8] = [
    Step::Prepare,
    Step::Prepared,
    Step::Bytes,
    Step::Sent,
    Step::Verified,
    Step::Commit,
    Step::Committed,
    Step::Forget,
];

/// Whether the fault comes before the receiver gets it or afterwards. Of the bytes of an item, one half
/// was delivered afterwards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum When {
    Before,
    After,
}

/// What happens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// The process stops for one and a half times the transfer deadline.
    StopSource,
    StopTarget,
    StopBoth,
    /// The process is killed, and started again.
    KillSource,
    KillTarget,
    /// The process is killed, the source's operator declares that it has ended, and it starts
    /// again.
    DeclareTarget,
    /// All connections are cut, and can be made again at once.
    Cut,
    /// All connections are cut, and can be made again after one and a half times the transfer
    /// deadline.
    CutLong,
}

pub const ACTIONS: [Action; 8] = [
    Action::StopSource,
    Action::StopTarget,
    Action::StopBoth,
    Action::KillSource,
    Action::KillTarget,
    Action::DeclareTarget,
    Action::Cut,
    Action::CutLong,
];

/// What is migrated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Migrate,
    Replicate,
    Offload,
}

/// A kind of migration with one fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    pub kind: Kind,
    pub step: Step,
    pub when: When,
    pub action: Action,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, step, when, action } = self;
        let action = match action {
            Action::StopSource => "source/stop",
            Action::StopTarget => "target/stop",
            Action::StopBoth => "both/stop",
            Action::KillSource => "source/kill",
            Action::KillTarget => "target/kill",
            Action::DeclareTarget => "target/kill-declared",
            Action::Cut => "links/cut",
            Action::CutLong => "links/cut-long",
        };
        f.write_str(&format!("{kind:?}/{step:?}/{when:?}/{action}").to_lowercase())
    }
}
