use std::collections::VecDeque;

use kvpool_node::admin::{Cells, MigrationRecord, Notice, OwnersReport, StatsReport, StatsSummary};

use super::services::{Service, services};

/// Seconds of statistics that are kept, and over which rates are computed.
const HISTORY: usize = 300;
const RATE: usize = 10;

const MIGRATIONS_MAX: usize = 100;

#[derive(Clone, Default, Debug)]
pub(super) struct Figures {
    pub history: VecDeque<StatsSummary>,
    pub map: Option<Cells>,
    pub migrations: Vec<MigrationRecord>,
    /// The reason if the node did not answer.
    pub owners: Option<Result<OwnersReport, String>>,
    pub services: Vec<Service>,
    pub version: String,
}

impl Figures {
    pub fn last(&self) -> Option<&StatsSummary> {
        self.history.back()
    }

    pub fn take(&mut self, notice: Notice) {
        match notice {
            Notice::Stats(stats) => self.add(*stats),
            Notice::Map(map) => self.map = Some(map),
            Notice::MapChanges(changes) => {
                // Changes that do not fit belong to another map: a complete one follows.
                let fits = self.map.as_mut().is_none_or(|map| map.apply(&changes));
                if !fits {
                    self.map = None;
                }
            }
            Notice::Migrations(list) => {
                for record in list.migrations.into_iter().rev() {
                    let is_same =
                        |other: &MigrationRecord| other.id == record.id && other.side == record.side;
                    match self.migrations.iter_mut().find(|other| is_same(other)) {
                        Some(known) => *known = record,
                        None => self.migrations.insert(0, record),
                    }
                }
                self.migrations.truncate(MIGRATIONS_MAX);
            }
            // Of a later version.
            _ => {}
        }
    }

    fn add(&mut self, stats: StatsSummary) {
        // Another process: its counters restart.
        if self.last().is_some_and(|last| stats.uptime_s < last.uptime_s) {
            (self.history, self.migrations, self.owners) = Default::default();
        }
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(stats);
    }

    /// Takes what changes rarely.
    pub fn report(&mut self, stats: &StatsReport) {
        self.services = services(stats);
        self.version = crate::output::printable(&stats.version);
    }

    /// Returns the growth per second of a counter; `None` without two statistics that have it.
    pub fn rate(&self, counter: impl Fn(&StatsSummary) -> Option<u64>) -> Option<f64> {
        let (last, before) = self.lately()?;
        let seconds = (last.time_ms - before.time_ms) as f64 / 1e3;
        Some(counter(last)?.saturating_sub(counter(before)?) as f64 / seconds)
    }

    /// Returns the share of looked-up tokens that were cached; `None` without lookups.
    pub fn hit_rate(&self) -> Option<f64> {
        let (last, before) = self.lately()?;
        let (last, before) = (last.of_sequences.as_ref()?, before.of_sequences.as_ref()?);
        let asked = last.query_tokens.saturating_sub(before.query_tokens);
        let hits = last.hit_tokens.saturating_sub(before.hit_tokens);
        (asked > 0).then(|| hits as f64 / asked as f64)
    }

    /// Returns the latest statistics and those some seconds earlier.
    fn lately(&self) -> Option<(&StatsSummary, &StatsSummary)> {
        let last = self.last()?;
        let before = self.history.get(self.history.len().saturating_sub(RATE + 1))?;
        (last.time_ms > before.time_ms).then_some((last, before))
    }
}
