//! Members that are known, whether or not etcd has them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use crate::membership::member::Member;

/// The known members, by name.
pub(super) struct KnownMembers {
    grace: Duration,
    entries: BTreeMap<String, Known>,
}

struct Known {
    member: Member,
    /// Since when etcd lacks it; `None` while etcd has it.
    missing_since: Option<Instant>,
}

impl KnownMembers {
    /// Creates an empty list. Members that a complete list lacks stay for the time `grace`.
    pub(super) fn new(grace: Duration) -> Self {
        Self { grace, entries: BTreeMap::new() }
    }

    /// Takes over a complete list of etcd.
    pub(super) fn relist(&mut self, members: Vec<Member>, now: Instant) {
        let listed: BTreeSet<_> = members.iter().map(|member| member.name.clone()).collect();
        for (name, known) in &mut self.entries {
            if !listed.contains(name) {
                known.missing_since.get_or_insert(now);
            }
        }
        members.into_iter().for_each(|member| self.put(member));
    }

    /// Adds or replaces a member.
    pub(super) fn put(&mut self, member: Member) {
        self.entries.insert(member.name.clone(), Known { member, missing_since: None });
    }

    /// Removes a member whose removal etcd has reported.
    pub(super) fn remove(&mut self, name: &str) {
        self.entries.remove(name);
    }

    /// Removes members that have been missing for longer than the grace period.
    pub(super) fn expire(&mut self, now: Instant) {
        let grace = self.grace;
        let is_over = |since| now.saturating_duration_since(since) >= grace;
        self.entries.retain(|_, known| !known.missing_since.is_some_and(is_over));
    }

    /// Returns the time at which the next member expires; `None` also if that is too far away.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.entries.values().filter_map(|known| known.missing_since).min()?.checked_add(self.grace)
    }

    /// Returns the members, by name.
    pub(super) fn members(&self) -> Vec<Member> {
        self.entries.values().map(|known| known.member.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str) -> Member {
        Member::new(name, "h:1".parse().unwrap())
    }

    fn names(known: &KnownMembers) -> String {
        known.members().into_iter().map(|member| member.name).collect()
    }

    #[test]
    fn members_that_a_list_lacks_stay_for_the_grace_period() {
        let (begin, second) = (Instant::now(), Duration::from_secs(1));
        let mut known = KnownMembers::new(10 * second);
        known.relist(["a", "b", "c"].map(member).into(), begin);
        assert_eq!((names(&known).as_str(), known.next_expiry()), ("abc", None));
        // etcd comes back without data.
        known.relist(vec![], begin);
        assert_eq!((names(&known).as_str(), known.next_expiry()), ("abc", Some(begin + 10 * second)));
        known.put(member("b"));
        // The time counts from the first list without it.
        known.relist(vec![member("b")], begin + 5 * second);
        known.expire(begin + 9 * second);
        assert_eq!(names(&known), "abc");
        known.expire(begin + 10 * second);
        assert_eq!((names(&known).as_str(), known.next_expiry()), ("b", None));
    }

    #[test]
    fn members_may_stay_for_ever() {
        let now = Instant::now();
        let mut known = KnownMembers::new(Duration::MAX);
        known.relist(vec![member("a")], now);
        known.relist(vec![], now);
        known.expire(now + Duration::from_secs(3600));
        assert_eq!((names(&known).as_str(), known.next_expiry()), ("a", None));
    }

    #[test]
    fn a_reported_removal_counts_at_once() {
        let mut known = KnownMembers::new(Duration::from_secs(10));
        known.relist(["a", "b"].map(member).into(), Instant::now());
        known.remove("a");
        assert_eq!(names(&known), "b");
    }
}
