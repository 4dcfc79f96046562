//! How the parts of a copy affect each other.

use crate::protocol::bounded::Text;
use crate::protocol::copies::CopyEvent;
use crate::protocol::machine::Event;
use crate::protocol::message::AbortReason;
use crate::protocol::message::MigrationId;
use crate::protocol::outcome::{Cause, Outcome};
use crate::protocol::request::MachineId;
use crate::protocol::table::Machine;
use crate::protocol::target::Target;
use crate::protocol::timing::Millis;

use super::{Actions, Migrations};

impl Migrations {
    fn target(&self, machine: MachineId) -> &Target {
        match &self.entries[&machine].machine {
            Machine::Target(target) => target,
            Machine::Source(_) => unreachable!("a source among the parts of a copy"),
        }
    }

    /// Handles the commit of a part's source: the last one commits the copy.
    pub(super) fn agreed(&mut self, now: Millis, id: MigrationId, machine: MachineId) -> Actions {
        let Some(parts) = self.copies.agree(id, machine) else { return Actions::new() };
        // A reservation that expired unnoticed ends all parts.
        if let Some(&late) = parts.iter().find(|&&part| self.target(part).is_late(now)) {
            return self.target_event(now, late, Event::Tick);
        }
        let is_current = parts.iter().all(|&part| self.target(part).is_current());
        let mut actions = Actions::new();
        for (place, part) in parts.into_iter().enumerate() {
            let event = CopyEvent::Commits { leads: place == 0, is_current };
            actions.extend(self.target_event(now, part, Event::Copy(event)));
        }
        actions
    }

    /// Gives the outcome of a part to the others.
    pub(super) fn part_ended(
        &mut self,
        now: Millis,
        (id, machine): (MigrationId, MachineId),
        was_undecided: bool,
        outcome: &Outcome,
    ) -> Actions {
        let event = match outcome {
            Outcome::Done => CopyEvent::Committed,
            outcome if was_undecided => CopyEvent::Ended(reason(outcome)),
            outcome => CopyEvent::Failed(reason(outcome)),
        };
        // Forgotten first, because the others end too, and find it gone.
        let others = self.copies.forget(id, machine);
        self.tell(now, others, &event)
    }

    /// Ends copies that lack a part past its deadline.
    pub(super) fn end_incomplete(&mut self, now: Millis) -> Actions {
        let mut actions = Actions::new();
        for part in self.copies.late(now, self.timing.transfer_deadline_ms) {
            let event = CopyEvent::Ended(Text::new("a part did not come"));
            // All parts get the same outcome.
            actions.extend(self.target_event(now, part, Event::Copy(event)));
        }
        actions
    }

    fn tell(&mut self, now: Millis, parts: Vec<MachineId>, event: &CopyEvent) -> Actions {
        let tell = |part| self.target_event(now, part, Event::Copy(event.clone()));
        parts.into_iter().flat_map(tell).collect()
    }
}

/// Returns why a part ended, for the sources of the other parts.
fn reason(outcome: &Outcome) -> Text {
    match outcome {
        // Avoids nested reasons.
        Outcome::Failed(Cause::Own(AbortReason::OtherPart(reason) | AbortReason::Local(reason))) => {
            reason.clone()
        }
        Outcome::Failed(cause) => Text::new(cause.to_string()),
        Outcome::Refused { reason, .. } => Text::new(reason.to_string()),
        outcome => Text::new(format!("{outcome:?}")),
    }
}
