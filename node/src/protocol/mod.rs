//! The protocol by which a sequence or cached blocks move from one node to another.

mod bounded;
mod machine;
mod message;
mod migrations;
mod outcome;
mod places;
mod source;
mod target;
mod timing;

pub use bounded::{Bytes, List, Text, TooLong};
pub use machine::{Action as SideAction, Actions as SideActions, Event, Task, Work};
pub use message::*;
pub use migrations::{
    Action, Actions, CancelError, Command, Limits, LinkId, MachineId, MigrationStatus, Migrations, Request,
    RequestError, SideState,
};
pub use outcome::{Cause, Doubt, Origin, Outcome, Report, Resolution, Side};
pub use places::{Places, PlacesError, RANGES_MAX, Range};
pub use source::{Source, SourceState};
pub use target::{Target, TargetState};
pub use timing::{Millis, Timing};
