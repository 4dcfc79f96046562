use std::sync::Arc;

use tokio::sync::watch;

use super::member::Member;
use crate::admin::Failures;

/// The members of a cluster at one time.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct MemberList {
    /// The members, by name.
    pub members: Vec<Member>,
    /// Whether the directory was reachable. If not, this is the last known list.
    pub is_current: bool,
}

pub(super) type ListSender = watch::Sender<Arc<MemberList>>;

/// Receives the newest list of members, whenever it changes.
///
/// Lists are complete: a slow receiver misses lists, but no member.
#[derive(Debug)]
pub struct Members {
    lists: watch::Receiver<Arc<MemberList>>,
    /// Of the directory.
    pub(super) failures: Option<Failures>,
}

impl Members {
    pub(super) fn new(mut lists: watch::Receiver<Arc<MemberList>>, failures: Option<Failures>) -> Self {
        // The first list counts as a change.
        lists.mark_changed();
        Self { lists, failures }
    }

    /// Returns another receiver of the lists.
    pub(super) fn again(&self) -> Self {
        Self::new(self.lists.clone(), self.failures.clone())
    }

    pub(super) fn has_ended(&self) -> bool {
        self.lists.has_changed().is_err()
    }

    /// Returns the newest list.
    pub fn current(&self) -> Arc<MemberList> {
        self.lists.borrow().clone()
    }

    /// Waits for a list that was not returned before; the first call returns the current one.
    /// `None` once the directory was dropped. Cancel safe.
    pub async fn next(&mut self) -> Option<Arc<MemberList>> {
        self.lists.changed().await.ok()?;
        Some(self.lists.borrow_and_update().clone())
    }
}

#[cfg(feature = "etcd")]
pub(super) fn publish(lists: &ListSender, list: MemberList) {
    lists.send_if_modified(|current| {
        let is_other = **current != list;
        if is_other {
            *current = Arc::new(list);
        }
        is_other
    });
}
