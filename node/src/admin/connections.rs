//! The connections of a server: a bounded number, of which the oldest idle one makes room.
//!
//! ```text
//! Waiting -- header and body read --> Answering -- answer made --> Writing -- written --> closed
//!                                         |
//!                                         +-- an answer without end --> Following -- cut --> closed
//! ```
//!
//! A connection takes one request. While it is `Waiting` or `Writing`, its caller decides how long that
//! takes: it has deadlines, and when all places are taken, the oldest such connection is cut for a new
//! one. So a caller that sends nothing, or reads nothing, keeps no other caller out. While it is
//! `Answering`, the node decides, and the connection is not cut. The number of those that are
//! `Following` the events is bounded apart, and the events cut one that does not read.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::sleep;

/// What a connection waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// A request of the caller.
    Waiting,
    /// The answer of the node.
    Answering,
    /// The caller, which reads the answer.
    Writing,
    /// The caller, which reads an answer without end.
    Following,
}

/// An open connection.
struct Place {
    number: u64,
    stage: Stage,
    cut: Arc<Notify>,
}

impl Place {
    /// Returns whether the caller decides how long the connection takes.
    fn is_idle(&self) -> bool {
        matches!(self.stage, Stage::Waiting | Stage::Writing)
    }
}

#[derive(Default)]
struct Places {
    /// In the order of their arrival.
    open: Vec<Place>,
    next: u64,
}

/// All open connections.
pub(super) struct Connections {
    max: usize,
    places: Mutex<Places>,
    left: Notify,
}

/// The place of one connection, until it is dropped.
pub(super) struct Guest {
    connections: Arc<Connections>,
    number: u64,
    cut: Arc<Notify>,
    answered: Notify,
}

impl Connections {
    /// Creates places for `max` connections.
    pub fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max: max.max(1), places: Mutex::default(), left: Notify::new() })
    }

    /// Takes a place for a connection; cuts another one if all are taken.
    pub async fn admit(self: &Arc<Self>) -> Arc<Guest> {
        loop {
            {
                let mut places = self.places();
                if places.open.len() < self.max {
                    let (number, cut) = (places.next, Arc::new(Notify::new()));
                    places.next += 1;
                    places.open.push(Place { number, stage: Stage::Waiting, cut: cut.clone() });
                    return Arc::new(Guest {
                        connections: self.clone(),
                        number,
                        cut,
                        answered: Notify::new(),
                    });
                }
                if let Some(idle) = places.open.iter().find(|place| place.is_idle()) {
                    idle.cut.notify_one();
                }
            }
            // A place that is left before this line has left a permit.
            self.left.notified().await;
        }
    }

    /// Cuts the connections that have no complete request.
    pub fn cut_waiting(&self) {
        let places = self.places();
        let waiting = places.open.iter().filter(|place| place.stage == Stage::Waiting);
        waiting.for_each(|place| place.cut.notify_one());
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        // A thread that panicked has left nothing half done.
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Guest {
    /// States that the request was read as a whole.
    pub fn answering(&self) {
        self.enter(Stage::Answering);
    }

    fn is_answering(&self) -> bool {
        let places = self.connections.places();
        places.open.iter().any(|place| place.number == self.number && place.stage == Stage::Answering)
    }

    /// States that the answer has no end.
    pub fn following(&self) {
        self.enter(Stage::Following);
    }

    /// States that the answer was made.
    pub fn writing(&self) {
        if self.enter(Stage::Writing) {
            self.answered.notify_one();
            // One that waits for a place can cut this connection now.
            self.connections.left.notify_one();
        }
    }

    /// Ends the connection.
    pub fn cut(&self) {
        self.cut.notify_one();
    }

    /// Returns whether the connection is in this stage now: an answer without end stays one.
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

    /// Waits until the connection must end: it was cut, or the caller did not read the answer in time.
    pub async fn expired(&self, write: Duration) {
        let unread = async {
            self.answered.notified().await;
            sleep(write).await;
        };
        let cut = async {
            loop {
                self.cut.notified().await;
                if !self.is_answering() {
                    return;
                }
                // It was chosen while it waited for its request, which came: another one has to go.
                self.connections.left.notify_one();
            }
        };
        tokio::select! {
            () = cut => {}
            () = unread => {}
        }
    }
}

impl Drop for Guest {
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

    #[tokio::test]
    async fn the_oldest_idle_connection_makes_room() {
        let connections = Connections::new(3);
        let (first, second, third) =
            (connections.admit().await, connections.admit().await, connections.admit().await);
        first.answering();
        third.writing();
        let mut fourth = pin!(connections.admit());
        assert!(timeout(SHORT, &mut fourth).await.is_err(), "no place is free yet");
        timeout(LONG, second.expired(LONG)).await.expect("it is cut");
        drop(second);
        let fourth = timeout(LONG, fourth).await.expect("there is room");
        // Now the writer is the oldest one that is not being answered.
        fourth.answering();
        let mut fifth = pin!(connections.admit());
        assert!(timeout(SHORT, &mut fifth).await.is_err());
        timeout(LONG, third.expired(LONG)).await.expect("it is cut");
        drop(third);
        let fifth = timeout(LONG, fifth).await.expect("there is room");
        // Where all are being answered, a new one waits.
        fifth.answering();
        assert!(timeout(SHORT, connections.admit()).await.is_err());
        for guest in [&first, &fourth, &fifth] {
            assert!(timeout(SHORT, guest.expired(LONG)).await.is_err(), "none of them is cut");
        }
        drop(first);
        timeout(LONG, connections.admit()).await.expect("there is room");
    }

    #[tokio::test]
    async fn an_answer_must_be_read_in_time() {
        let connections = Connections::new(1);
        let guest = connections.admit().await;
        assert!(timeout(SHORT, guest.expired(Duration::ZERO)).await.is_err(), "nothing was answered");
        guest.answering();
        guest.writing();
        timeout(LONG, guest.expired(SHORT)).await.expect("the time is over");
    }

    #[tokio::test]
    async fn a_request_that_came_meanwhile_is_answered() {
        let all = Connections::new(1);
        let first = all.admit().await;
        let waiting = all.clone();
        let newcomer = tokio::spawn(async move { drop(waiting.admit().await) });
        // It chooses the first one, whose request comes now.
        tokio::task::yield_now().await;
        first.answering();
        assert!(timeout(SHORT, first.expired(LONG)).await.is_err(), "the node decides");
        first.writing();
        timeout(LONG, first.expired(LONG)).await.expect("it makes room");
        drop(first);
        timeout(LONG, newcomer).await.expect("a place").unwrap();
    }

    #[tokio::test]
    async fn an_answer_without_end_has_no_deadline_and_ends_when_it_is_cut() {
        let connections = Connections::new(1);
        let guest = connections.admit().await;
        guest.answering();
        guest.following();
        // The server says so when the head of the answer is made.
        guest.writing();
        assert!(timeout(SHORT, guest.expired(Duration::ZERO)).await.is_err(), "its caller reads for ever");
        // It makes no room for another, and the end of the server finds it elsewhere.
        assert!(timeout(SHORT, connections.admit()).await.is_err(), "there is one place");
        connections.cut_waiting();
        assert!(timeout(SHORT, guest.expired(LONG)).await.is_err(), "it is not cut");
        guest.cut();
        timeout(LONG, guest.expired(LONG)).await.expect("it is cut");
        drop(guest);
        timeout(LONG, connections.admit()).await.expect("there is room");
    }
}
