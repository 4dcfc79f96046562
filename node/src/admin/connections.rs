//! The connections of a server: a bounded number. A new one displaces the oldest without a request.
//!
//! ```text
//! Waiting -- header and body read --> Answering -- answer made --> Writing -- written --> closed
//!                                         |
//!                                         +-- an answer without end --> Following -- cut --> closed
//! ```
//!
//! A connection takes one request. `Waiting` and `Writing` depend on the caller, and have a
//! deadline. When all places are taken, a new connection closes the oldest `Waiting` one, so that a
//! silent caller locks no other out; if there is none, the new caller is asked to retry. No answer
//! in progress is cut. The number of those that are `Following` the events is bounded apart, and
//! the events cut one that does not read.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::sleep;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Waiting,
    Answering,
    Writing,
    /// The caller, which reads an endless answer.
    Following,
}

struct Place {
    number: u64,
    stage: Stage,
    cut: Arc<Notify>,
}

#[derive(Default)]
struct Places {
    /// In the order of arrival.
    open: Vec<Place>,
    next: u64,
}

pub(super) struct Connections {
    max: usize,
    places: Mutex<Places>,
    left: Notify,
}

/// The place of one connection, released on drop.
pub(super) struct ConnectionPermit {
    connections: Arc<Connections>,
    number: u64,
    cut: Arc<Notify>,
    answered: Notify,
}

impl Connections {
    pub fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max: max.max(1), places: Mutex::default(), left: Notify::new() })
    }

    /// Takes a place for a connection; if all are taken, closes one without a request. `None` if
    /// all others are being answered.
    pub async fn admit(self: &Arc<Self>) -> Option<Arc<ConnectionPermit>> {
        loop {
            {
                let mut places = self.places();
                if places.open.len() < self.max {
                    let (number, cut) = (places.next, Arc::new(Notify::new()));
                    places.next += 1;
                    places.open.push(Place { number, stage: Stage::Waiting, cut: cut.clone() });
                    return Some(Arc::new(ConnectionPermit {
                        connections: self.clone(),
                        number,
                        cut,
                        answered: Notify::new(),
                    }));
                }
                places.open.iter().find(|place| place.stage == Stage::Waiting)?.cut.notify_one();
            }
            // A place that was released before this line has left a permit.
            self.left.notified().await;
        }
    }

    /// Closes the connections without a complete request.
    pub fn cut_waiting(&self) {
        let places = self.places();
        let waiting = places.open.iter().filter(|place| place.stage == Stage::Waiting);
        waiting.for_each(|place| place.cut.notify_one());
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        // A thread that panics leaves the state consistent.
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionPermit {
    /// The request was read completely.
    pub fn answering(&self) {
        self.enter(Stage::Answering);
    }

    fn is_answered(&self) -> bool {
        let places = self.connections.places();
        let is_answered = |place: &Place| matches!(place.stage, Stage::Answering | Stage::Writing);
        places.open.iter().any(|place| place.number == self.number && is_answered(place))
    }

    /// The answer is endless.
    pub fn following(&self) {
        self.enter(Stage::Following);
    }

    /// The answer was made.
    pub fn writing(&self) {
        if self.enter(Stage::Writing) {
            self.answered.notify_one();
        }
    }

    /// Ends the connection.
    pub fn cut(&self) {
        self.cut.notify_one();
    }

    /// Enters a stage; returns whether it is in it now, since an endless answer stays one.
    fn enter(&self, stage: Stage) -> bool {
        let mut places = self.connections.places();
        let place = places.open.iter_mut().find(|place| place.number == self.number);
        place.is_some_and(|place| {
            if place.stage != Stage::Following {
                place.stage = stage;
            }
            place.stage == stage
        })
    }

    /// Waits until the connection is cut, or the caller has not read the answer in time.
    pub async fn expired(&self, write: Duration) {
        let unread = async {
            self.answered.notified().await;
            sleep(write).await;
        };
        let cut = async {
            loop {
                self.cut.notified().await;
                if !self.is_answered() {
                    return;
                }
                // It was chosen, but its request arrived: another one has to go.
                self.connections.left.notify_one();
            }
        };
        tokio::select! {
            () = cut => {}
            () = unread => {}
        }
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.connections.places().open.retain(|place| place.number != self.number);
        self.connections.left.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use tokio::time::timeout;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(20);

    async fn admitted(connections: &Arc<Connections>) -> Arc<ConnectionPermit> {
        let admitted = timeout(LONG, connections.admit()).await.expect("it is decided");
        admitted.expect("there is room")
    }

    #[tokio::test]
    async fn the_oldest_connection_without_a_request_makes_room() {
        let connections = Connections::new(3);
        let (first, second, third) =
            (admitted(&connections).await, admitted(&connections).await, admitted(&connections).await);
        first.answering();
        let mut fourth = pin!(connections.admit());
        assert!(timeout(SHORT, &mut fourth).await.is_err(), "no place is free yet");
        timeout(LONG, second.expired(LONG)).await.expect("it is cut");
        drop(second);
        let fourth = timeout(LONG, fourth).await.expect("it is decided").expect("there is room");
        // If all are being answered, a new one is refused, and no connection is cut.
        third.answering();
        third.writing();
        fourth.answering();
        assert!(timeout(LONG, connections.admit()).await.expect("it is decided").is_none());
        for permit in [&first, &third, &fourth] {
            assert!(timeout(SHORT, permit.expired(LONG)).await.is_err(), "none of them is cut");
        }
        drop(first);
        admitted(&connections).await;
    }

    #[tokio::test]
    async fn an_answer_must_be_read_in_time() {
        let connections = Connections::new(1);
        let permit = admitted(&connections).await;
        assert!(timeout(SHORT, permit.expired(Duration::ZERO)).await.is_err(), "nothing was answered");
        permit.answering();
        permit.writing();
        timeout(LONG, permit.expired(SHORT)).await.expect("the time is over");
    }

    #[tokio::test]
    async fn a_request_that_came_meanwhile_is_answered() {
        let all = Connections::new(1);
        let first = admitted(&all).await;
        let waiting = all.clone();
        let newcomer = tokio::spawn(async move { waiting.admit().await.is_none() });
        // It chooses the first one, whose request arrives now.
        tokio::task::yield_now().await;
        first.answering();
        assert!(timeout(SHORT, first.expired(LONG)).await.is_err(), "the node decides");
        assert!(timeout(LONG, newcomer).await.expect("it is decided").unwrap(), "it is refused");
        first.writing();
        assert!(timeout(SHORT, first.expired(LONG)).await.is_err(), "the answer is written as a whole");
    }

    #[tokio::test]
    async fn an_answer_without_end_has_no_deadline_and_ends_when_it_is_cut() {
        let connections = Connections::new(1);
        let permit = admitted(&connections).await;
        permit.answering();
        permit.following();
        // Called when the head of the answer is made.
        permit.writing();
        assert!(timeout(SHORT, permit.expired(Duration::ZERO)).await.is_err(), "its caller reads for ever");
        // It is not displaced, but the end of the server reaches it another way.
        assert!(connections.admit().await.is_none(), "there is one place");
        connections.cut_waiting();
        assert!(timeout(SHORT, permit.expired(LONG)).await.is_err(), "it is not cut");
        permit.cut();
        timeout(LONG, permit.expired(LONG)).await.expect("it is cut");
        drop(permit);
        admitted(&connections).await;
    }
}
