use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::directory::Membership;
use super::error::MembershipError;
use super::joined::{JoinSender, JoinState, JoinStatus, Joined};
use super::member::Member;
use super::members::{ListSender, MemberList, Members};

/// A list of members in memory, for tests and static clusters. Its entries do not expire; dropping
/// a [`Joined`] removes its entry. Clones share one list.
#[derive(Clone, Debug)]
pub struct FixedMembers(Arc<ListSender>);

impl FixedMembers {
    /// Creates a list.
    pub fn new(members: impl IntoIterator<Item = Member>) -> Self {
        let fixed = Self(Arc::new(watch::Sender::new(Arc::new(MemberList::default()))));
        fixed.change(|list| list.extend(members));
        fixed
    }

    /// Replaces the members.
    pub fn set(&self, members: impl IntoIterator<Item = Member>) {
        self.change(|list| {
            list.clear();
            list.extend(members);
        });
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Member>)) {
        self.0.send_modify(|list| {
            let mut members = list.members.clone();
            change(&mut members);
            members.sort_by(|a, b| a.name.cmp(&b.name).then(b.started_ms.cmp(&a.started_ms)));
            members.dedup_by(|a, b| a.name == b.name);
            *list = Arc::new(MemberList { members, is_current: true });
        });
    }
}

impl Membership for FixedMembers {
    fn join(&self, member: Member, _: Duration) -> Result<Joined, MembershipError> {
        member.check()?;
        self.change(|list| list.push(member.clone()));
        let list = self.clone();
        Ok(Joined::start(move |JoinSender { state, leaving }| async move {
            state.send_replace(JoinState { status: JoinStatus::Joined, joins: 1 });
            let _ = leaving.await;
            list.change(|list| list.retain(|other| *other != member));
        }))
    }

    fn watch(&self) -> Members {
        Members::new(self.0.subscribe(), None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &MemberList) -> Vec<&str> {
        list.members.iter().map(|member| member.name.as_str()).collect()
    }

    #[tokio::test]
    async fn members_come_and_go() {
        let member = |name: &str| Member::new(name, "h:1".parse().unwrap());
        let fixed = FixedMembers::new([member("b")]);
        let mut members = fixed.watch();
        assert_eq!(names(&members.next().await.unwrap()), ["b"]);
        let joined = fixed.join(member("a"), Duration::ZERO).unwrap();
        assert_eq!(names(&members.next().await.unwrap()), ["a", "b"]);
        joined.leave().await;
        assert_eq!(names(&members.next().await.unwrap()), ["b"]);
        let later = Member { started_ms: u64::MAX, ..member("b") };
        fixed.set([member("b"), later.clone(), member("c")]);
        assert_eq!(members.next().await.unwrap().members, [later, member_of(&fixed, "c")]);
        assert!(fixed.join(member("bad/name"), Duration::ZERO).is_err());
        drop(fixed);
        assert_eq!(members.next().await, None);
    }

    fn member_of(fixed: &FixedMembers, name: &str) -> Member {
        let list = fixed.watch().current();
        list.members.iter().find(|member| member.name == name).unwrap().clone()
    }
}
