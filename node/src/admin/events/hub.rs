use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};

use super::super::connections::ConnectionPermit;
use super::super::interface::Admin;
use super::super::limits::Limits;
use super::super::problem::AdminError;
use super::notice::{Notice, StatsSummary};
use super::view::View;

pub(super) const EVENTS_MAX: usize = 256;

/// Bytes of the ring above which a new event drops the oldest.
pub(super) const BYTES_MAX: usize = 1 << 20;

/// Statistics that are kept, and the periods from one to the next: 15 minutes.
const HISTORY: usize = 180;
const HISTORY_PERIODS: u32 = 5;

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) number: u64,
    pub(super) name: &'static str,
    pub(super) data: Arc<str>,
}

pub(in super::super) struct Hub {
    /// Distinguishes this process's numbers from those of an earlier one.
    pub(super) epoch: u64,
    limits: Limits,
    ring: Mutex<Ring>,
    /// The number of the next event; its receivers end with the hub's [`close`](Self::close).
    news: Mutex<Option<watch::Sender<u64>>>,
    /// Notified of the first follower.
    wanted: Notify,
}

struct Ring {
    entries: VecDeque<Entry>,
    bytes: usize,
    next: u64,
    view: Option<(Arc<View>, Instant)>,
    history: VecDeque<StatsSummary>,
    followers: HashMap<u64, (Arc<AtomicU64>, Option<Arc<ConnectionPermit>>)>,
    followers_ever: u64,
}

/// A follower's position in the ring.
pub(super) struct Place {
    hub: Arc<Hub>,
    id: u64,
    /// The number of its next event; with [`WHOLE`], it begins with a complete view.
    next: Arc<AtomicU64>,
    pub(super) news: watch::Receiver<u64>,
}

/// Not a number of an event.
pub(super) const WHOLE: u64 = u64::MAX;

pub(super) enum Next {
    Events(Vec<Entry>),
    Nothing,
    /// The ring has overtaken it.
    Lost,
}

impl Hub {
    pub(in super::super) fn new(limits: Limits) -> Arc<Self> {
        let epoch = std::time::SystemTime::now().duration_since(std::time::SystemTime::UNIX_EPOCH);
        Arc::new(Self {
            epoch: epoch.unwrap_or_default().as_millis() as u64,
            limits,
            ring: Mutex::new(Ring {
                entries: VecDeque::new(),
                bytes: 0,
                next: 1,
                view: None,
                history: VecDeque::new(),
                followers: HashMap::new(),
                followers_ever: 0,
            }),
            news: Mutex::new(Some(watch::Sender::new(1))),
            wanted: Notify::new(),
        })
    }

    /// Fills the ring while it is polled.
    pub(in super::super) async fn run(self: Arc<Self>, admin: Arc<dyn Admin>) {
        loop {
            if self.ring().followers.is_empty() {
                // The history continues.
                let _ = timeout(self.limits.event_period * HISTORY_PERIODS, self.wanted.notified()).await;
            }
            let before = self.ring().view.as_ref().map(|(view, _)| view.clone());
            let view = timeout(self.limits.answer, View::of(&*admin, before.as_deref())).await;
            // A node without an answer has no events, but may have some later.
            if let Ok(Ok(view)) = view {
                self.publish(view, before.as_deref());
            }
            sleep(self.limits.event_period).await;
        }
    }

    fn publish(&self, view: View, before: Option<&View>) {
        let notices = before.map_or_else(|| view.whole(), |before| view.since(before));
        let mut ring = self.ring();
        notices.iter().for_each(|notice| ring.push(notice));
        let distance_ms = (self.limits.event_period * HISTORY_PERIODS).as_millis() as u64;
        if ring.history.back().is_none_or(|last| view.summary.time_ms >= last.time_ms + distance_ms) {
            ring.history.push_back(view.summary.clone());
            if ring.history.len() > HISTORY {
                ring.history.pop_front();
            }
        }
        ring.view = Some((Arc::new(view), Instant::now()));
        ring.cut_lost();
        let next = ring.next;
        drop(ring);
        if let Some(news) = &*self.news.lock().unwrap_or_else(PoisonError::into_inner) {
            news.send_replace(next);
        }
    }

    /// Adds a follower, which has read up to the event of this id if there is one.
    pub(super) fn place(
        self: &Arc<Self>,
        last: Option<&str>,
        permit: Option<Arc<ConnectionPermit>>,
    ) -> Result<Place, AdminError> {
        let news = self.news.lock().unwrap_or_else(PoisonError::into_inner);
        let news = news.as_ref().map(watch::Sender::subscribe);
        let news = news.ok_or_else(|| AdminError::Unavailable("this node is ending".to_owned()))?;
        let mut ring = self.ring();
        if ring.followers.len() >= self.limits.followers {
            let max = self.limits.followers;
            return Err(AdminError::TooMany(format!("{max} callers follow the events already")));
        }
        let last =
            last.and_then(|id| id.split_once('-')).filter(|(epoch, _)| *epoch == self.epoch.to_string());
        let next = last.and_then(|(_, number)| number.parse::<u64>().ok()?.checked_add(1));
        let is_there = |&next: &u64| ring.first() <= next && next <= ring.next;
        let next = Arc::new(AtomicU64::new(next.filter(is_there).unwrap_or(WHOLE)));
        ring.followers_ever += 1;
        let id = ring.followers_ever;
        ring.followers.insert(id, (next.clone(), permit));
        drop(ring);
        self.wanted.notify_one();
        Ok(Place { hub: self.clone(), id, next, news })
    }

    pub(in super::super) fn close(&self) {
        *self.news.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub(in super::super) fn history(&self) -> VecDeque<StatsSummary> {
        self.ring().history.clone()
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a view of this age counts as current.
    fn is_fresh(&self, taken: Instant) -> bool {
        taken.elapsed() < self.limits.event_period + Duration::from_millis(500)
    }
}

impl Ring {
    fn first(&self) -> u64 {
        self.entries.front().map_or(self.next, |entry| entry.number)
    }

    fn push(&mut self, notice: &Notice) {
        let entry = Entry { number: self.next, name: notice.name(), data: data(notice) };
        self.next += 1;
        self.bytes += entry.data.len();
        self.entries.push_back(entry);
        while self.entries.len() > EVENTS_MAX || (self.bytes > BYTES_MAX && self.entries.len() > 1) {
            let oldest = self.entries.pop_front();
            self.bytes -= oldest.map_or(0, |entry| entry.data.len());
        }
    }

    /// Closes the connections of followers whose next event is gone.
    fn cut_lost(&mut self) {
        let first = self.first();
        for (next, permit) in self.followers.values() {
            // Relaxed: a stale position only delays the cut by a period.
            if let Some(permit) = permit.as_ref().filter(|_| next.load(Relaxed) < first) {
                permit.cut();
            }
        }
    }
}

fn data(notice: &Notice) -> Arc<str> {
    let text = match notice {
        Notice::Stats(summary) => serde_json::to_string(summary),
        Notice::Map(map) => serde_json::to_string(map),
        Notice::MapChanges(changes) => serde_json::to_string(changes),
        Notice::Migrations(list) => serde_json::to_string(list),
    };
    // These types can be serialized.
    text.unwrap_or_default().into()
}

impl Place {
    /// Returns the next events, and advances.
    pub(super) fn take(&mut self) -> Next {
        self.news.borrow_and_update();
        let ring = self.hub.ring();
        let next = self.next.load(Relaxed);
        if next == WHOLE {
            let Some((view, _)) = ring.view.as_ref().filter(|(_, taken)| self.hub.is_fresh(*taken)) else {
                return Next::Nothing;
            };
            let number = ring.next - 1;
            let entry = |notice: &Notice| Entry { number, name: notice.name(), data: data(notice) };
            self.next.store(ring.next, Relaxed);
            return Next::Events(view.whole().iter().map(entry).collect());
        }
        if next < ring.first() {
            return Next::Lost;
        }
        // One at a time: a taken event is in the buffers of the connection.
        match ring.entries.get((next - ring.first()) as usize) {
            Some(entry) => {
                self.next.store(next + 1, Relaxed);
                Next::Events(vec![entry.clone()])
            }
            None => Next::Nothing,
        }
    }

    pub(super) fn epoch(&self) -> u64 {
        self.hub.epoch
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.hub.ring().followers.remove(&self.id);
    }
}
