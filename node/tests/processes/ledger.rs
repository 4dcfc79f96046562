//! Who owned which sequence when, by the events of all processes.
//!
//! # What must be true of each sequence
//!
//! - At no time two living processes may run it.
//! - In the end it was closed; else the process that had it was killed: the one that owned it last, or
//!   the client to which the server had moved it, before that client could say so.

use std::collections::BTreeMap;

use crate::crowd::client_of;
use crate::lines::{Event, What};

/// Time in which a client that lives says that a sequence has arrived.
const SAYING_NS: u64 = 10_000_000_000;

/// A process, as far as the ledger needs it.
#[derive(Clone, Debug)]
pub struct Owner {
    /// Numbers of its clients; none for the server.
    pub clients: std::ops::Range<usize>,
    /// When it was known to be dead.
    pub died: Option<u64>,
}

/// Events of all processes since the last time that nothing was open.
#[derive(Default)]
pub struct Ledger {
    pub owners: Vec<Owner>,
    /// By sequence, with the number of the process.
    events: BTreeMap<u64, Vec<(usize, Event)>>,
}

/// What a ledger has counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Totals {
    pub sequences: usize,
    pub moves: usize,
    /// Moves that failed, behind which the sequence stayed where it was.
    pub failures: usize,
    /// Sequences whose owner was killed.
    pub lost: usize,
    /// Sequences that came back to another process than that which had opened them.
    pub inherited: usize,
}

impl Ledger {
    /// Adds events of a process.
    pub fn add(&mut self, owner: usize, events: Vec<Event>) {
        for event in events {
            self.events.entry(event.id).or_default().push((owner, event));
        }
    }

    /// Checks all sequences, none of which may be open, and forgets them.
    pub fn settle(&mut self, totals: &mut Totals) {
        for (id, mut events) in std::mem::take(&mut self.events) {
            events.sort_by_key(|(_, event)| event.at);
            if let Err(what) = self.check(id, &events, totals) {
                let story: Vec<_> =
                    events.iter().map(|(owner, event)| format!("  {owner}: {event:?}")).collect();
                panic!("sequence {id:x}: {what}\n{}\n{:?}", story.join("\n"), self.owners);
            }
        }
    }

    fn check(&self, id: u64, events: &[(usize, Event)], totals: &mut Totals) -> Result<(), String> {
        let count = |what| events.iter().filter(|(_, event)| event.what == what).count();
        if count(What::Wrong) > 0 {
            return Err("its bytes are wrong".into());
        }
        let mut spans: Vec<(usize, u64, u64)> = Vec::new();
        for (owner, event) in events {
            let own = spans.iter_mut().rev().find(|(other, ..)| other == owner);
            match (event.what, own) {
                (What::Owns, _) => {
                    spans.push((*owner, event.at, self.owners[*owner].died.unwrap_or(u64::MAX)));
                }
                (What::Leaves | What::Closed, Some(span)) => span.2 = event.at,
                _ => {}
            }
        }
        for (place, a) in spans.iter().enumerate() {
            if let Some(b) = spans[place + 1..].iter().find(|b| a.0 != b.0 && a.1 < b.2 && b.1 < a.2) {
                return Err(format!("processes {} and {} may run it at the same time", a.0, b.0));
            }
        }
        totals.sequences += 1;
        totals.moves += count(What::Moved);
        totals.failures += count(What::Owns).saturating_sub(1 + count(What::Moved));
        let Some((owner, _)) = events.iter().find(|(_, event)| event.what == What::Closed) else {
            totals.lost += 1;
            return self.is_loss_permitted(id, events);
        };
        totals.inherited += usize::from(*owner != events[0].0);
        Ok(())
    }

    fn is_loss_permitted(&self, id: u64, events: &[(usize, Event)]) -> Result<(), String> {
        let died = |owner: usize| self.owners[owner].died.is_some();
        let (owner, last) = events.last().expect("a sequence has an event");
        match last.what {
            // It died with it, perhaps while it was on its way.
            What::Owns | What::Leaves if died(*owner) => Ok(()),
            What::Moved => {
                let left = events.iter().rev().find(|(_, event)| event.what == What::Leaves);
                let left = left.map_or(0, |(_, event)| event.at);
                let client = client_of(id);
                let until = last.at + SAYING_NS;
                let had_it = |one: &&Owner| {
                    one.clients.contains(&client)
                        && one.died.is_some_and(|died| left <= died && died <= until)
                };
                self.owners.iter().find(had_it).map(drop).ok_or("it was moved, and no process has it".into())
            }
            _ => Err("it is lost, and the process that had it lives".into()),
        }
    }
}
