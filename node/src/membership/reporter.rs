use serde_json::{Value, json};

use super::joined::{JoinStatus, Joined, JoinedState};
use super::members::Members;
use crate::admin::{Failures, Reporter};
use crate::metrics::{self, Scrape};

/// Reports the members of a cluster, and the entry of this node.
///
/// It follows the directory while both live.
#[derive(Debug)]
pub struct MembershipReporter {
    name: String,
    members: Members,
    joined: Option<JoinedState>,
}

impl MembershipReporter {
    /// Creates a reporter. Statistics and metrics have the directory under this name.
    pub fn new(name: impl Into<String>, members: &Members, joined: Option<&Joined>) -> Self {
        Self { name: name.into(), members: members.again(), joined: joined.map(Joined::watch) }
    }
}

impl Reporter for MembershipReporter {
    fn group(&self) -> &'static str {
        "membership"
    }

    fn name(&self) -> &str {
        &self.name
    }

    /// `members`, their names; `current`, whether the directory is in reach; `joined`, `reason` and
    /// `joins`, the entry of this node, absent without one.
    fn stats(&self) -> Option<Value> {
        if self.members.has_ended() {
            return None;
        }
        let list = self.members.current();
        let names: Vec<&str> = list.members.iter().map(|member| &*member.name).collect();
        let mut stats = json!({ "members": names, "current": list.is_current });
        if let Some(joined) = &self.joined {
            let state = joined.current();
            let reason = match state.status {
                JoinStatus::Joined => None,
                JoinStatus::Waiting { reason } => Some(reason),
            };
            stats["joined"] = reason.is_none().into();
            stats["reason"] = reason.into();
            stats["joins"] = state.joins.into();
        }
        Some(stats)
    }

    fn failures(&self) -> Option<Failures> {
        self.members.failures.clone().filter(|_| !self.members.has_ended())
    }

    fn scrape(&self, scrape: &mut Scrape) {
        if self.members.has_ended() {
            return;
        }
        let (name, list) = (&*self.name, self.members.current());
        scrape.count(&metrics::MEMBERS, &[name], list.members.len() as u64);
        scrape.count(&metrics::DIRECTORY_UP, &[name], list.is_current.into());
        if let Some(joined) = &self.joined {
            let state = joined.current();
            scrape.count(&metrics::JOINED, &[name], (state.status == JoinStatus::Joined).into());
            scrape.count(&metrics::JOINS, &[name], state.joins);
        }
    }
}
