//! Known members, whether or not etcd has them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use crate::membership::member::Member;

/// Most known members: more than a node has peers.
pub(super) const MEMBERS_MAX: usize = 1024;

pub(super) struct KnownMembers {
    grace: Duration,
    entries: BTreeMap<String, Known>,
}

struct Known {
    member: Member,
    missing_since: Option<Instant>,
}

impl KnownMembers {
    /// Creates an empty list. Members missing in a complete list stay for the time `grace`.
    pub(super) fn new(grace: Duration) -> Self {
        Self { grace, entries: BTreeMap::new() }
    }

    /// Applies a complete list. Returns the names for which there is no room.
    pub(super) fn relist(&mut self, members: Vec<Member>, now: Instant) -> Vec<String> {
        let listed: BTreeSet<_> = members.iter().map(|member| member.name.clone()).collect();
        for (name, known) in &mut self.entries {
            if !listed.contains(name) {
                known.missing_since.get_or_insert(now);
            }
        }
        members.into_iter().filter_map(|member| self.put(member).err()).collect()
    }

    /// Adds or replaces a member. Without room, it replaces the member that etcd has lacked
    /// longest, or else returns its name as the error.
    pub(super) fn put(&mut self, member: Member) -> Result<(), String> {
        if self.entries.len() >= MEMBERS_MAX && !self.entries.contains_key(&member.name) {
            let missing = self.entries.iter().filter_map(|(name, known)| Some((known.missing_since?, name)));
            let Some(oldest) = missing.min().map(|(_, name)| name.clone()) else { return Err(member.name) };
            self.entries.remove(&oldest);
        }
        self.entries.insert(member.name.clone(), Known { member, missing_since: None });
        Ok(())
    }

    /// Removes a member that etcd has reported as removed.
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
        assert!(known.relist(["a", "b", "c"].map(member).into(), begin).is_empty());
        assert_eq!((names(&known).as_str(), known.next_expiry()), ("abc", None));
        // etcd returns without data.
        assert!(known.relist(vec![], begin).is_empty());
        assert_eq!((names(&known).as_str(), known.next_expiry()), ("abc", Some(begin + 10 * second)));
        known.put(member("b")).unwrap();
        // The time counts from the first list without it.
        assert!(known.relist(vec![member("b")], begin + 5 * second).is_empty());
        known.expire(begin + 9 * second);
        assert_eq!(names(&known), "abc");
        known.expire(begin + 10 * second);
        assert_eq!((names(&known).as_str(), known.next_expiry()), ("b", None));
    }

    #[test]
    fn members_may_stay_for_ever() {
        let now = Instant::now();
        let mut known = KnownMembers::new(Duration::MAX);
        assert!(known.relist(vec![member("a")], now).is_empty());
        assert!(known.relist(vec![], now).is_empty());
        known.expire(now + Duration::from_secs(3600));
        assert_eq!((names(&known).as_str(), known.next_expiry()), ("a", None));
    }

    #[test]
    fn there_is_room_for_so_many_members() {
        let now = Instant::now();
        let of = |numbers: std::ops::Range<usize>| numbers.map(|at| member(&format!("m{at:04}"))).collect();
        let mut known = KnownMembers::new(Duration::from_secs(10));
        assert_eq!(known.relist(of(0..MEMBERS_MAX + 2), now), ["m1024", "m1025"]);
        assert_eq!(known.put(member("m0007")), Ok(()), "it is known");
        assert_eq!((known.put(member("x")), known.members().len()), (Err("x".into()), MEMBERS_MAX));
        known.remove("m0007");
        assert_eq!(known.put(member("x")), Ok(()));
        // Those that etcd lacks make room for those that it has.
        assert_eq!(known.relist(of(2000..2000 + MEMBERS_MAX), now), [""; 0]);
        assert_eq!((known.members().len(), known.next_expiry()), (MEMBERS_MAX, None));
    }

    #[test]
    fn a_reported_removal_counts_at_once() {
        let mut known = KnownMembers::new(Duration::from_secs(10));
        assert!(known.relist(["a", "b"].map(member).into(), Instant::now()).is_empty());
        known.remove("a");
        assert_eq!(names(&known), "b");
    }
}
