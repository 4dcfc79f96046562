use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

const LEAVE: Duration = Duration::from_secs(3);

/// Whether a node is a member.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum JoinStatus {
    /// The directory has the entry, as far as known.
    Joined,
    /// The entry could not be made or renewed, and is retried.
    Waiting {
        /// Why.
        reason: String,
    },
}

/// State of an entry.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct JoinState {
    /// Whether the node is a member.
    pub status: JoinStatus,
    /// Number of times that the entry was made: above 1 if it was lost, for example because the
    /// process was paused for longer than the lease.
    pub joins: u64,
}

/// The directory's side of an entry.
pub(super) struct JoinSender {
    pub(super) state: watch::Sender<JoinState>,
    /// Completes with `Ok` when the node leaves, and with an error when [`Joined`] was dropped.
    pub(super) leaving: oneshot::Receiver<()>,
}

/// An entry in a directory, kept alive by a task until this value is dropped.
///
/// After a drop the entry expires. [`leave`](Self::leave) removes it immediately.
#[derive(Debug)]
pub struct Joined {
    state: watch::Receiver<JoinState>,
    leave: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Joined {
    pub(super) fn start<F>(keep: impl FnOnce(JoinSender) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let waiting = JoinStatus::Waiting { reason: "not entered yet".into() };
        let (state, receiver) = watch::channel(JoinState { status: waiting, joins: 0 });
        let (leave, leaving) = oneshot::channel();
        let task = tokio::spawn(keep(JoinSender { state, leaving }));
        Self { state: receiver, leave, task }
    }

    /// Returns the state.
    pub fn state(&self) -> JoinState {
        self.state.borrow().clone()
    }

    pub(super) fn watch(&self) -> JoinedState {
        JoinedState(self.state.clone())
    }

    /// Waits until the state satisfies a condition. Cancel safe.
    pub async fn wait(&mut self, condition: impl FnMut(&JoinState) -> bool) {
        // The task, which has the sender, ends after this value.
        let _ = self.state.wait_for(condition).await;
    }

    /// Removes the entry, if the directory answers within some seconds.
    pub async fn leave(self) {
        let _ = self.leave.send(());
        let _ = tokio::time::timeout(LEAVE, self.task).await;
    }
}

/// A view of an entry's state that does not keep the entry.
#[derive(Debug)]
pub(super) struct JoinedState(watch::Receiver<JoinState>);

impl JoinedState {
    pub(super) fn current(&self) -> JoinState {
        self.0.borrow().clone()
    }
}
