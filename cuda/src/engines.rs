//! Engine streams with pending events, and the stream of nudges of each.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvpool::storage::{CopyDone, DeviceStream};

/// Number of streams of nudges. Engines use few streams; each further stream here would occupy one of
/// the device's hardware queues.
pub(super) const NUDGES: usize = 4;

/// The engine streams on which events are pending.
#[derive(Debug, Default)]
pub(super) struct Engines(Mutex<Pending>);

#[derive(Debug, Default)]
struct Pending {
    /// By the stream's handle: the index of its stream of nudges, and the number of its events.
    streams: HashMap<usize, (usize, usize)>,
    /// Number of engine streams by stream of nudges.
    load: [usize; NUDGES],
}

/// Counts an event until it is dropped.
struct Counted {
    engines: Arc<Engines>,
    stream: usize,
}

impl Engines {
    fn lock(&self) -> MutexGuard<'_, Pending> {
        // No code panics while this lock is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if events are pending.
    pub(super) fn is_busy(&self) -> bool {
        !self.lock().streams.is_empty()
    }

    /// Counts an event on a stream until the returned callback is called or dropped. Also returns the
    /// index of the stream's stream of nudges.
    pub(super) fn counted(self: &Arc<Self>, stream: &DeviceStream, done: CopyDone) -> (usize, CopyDone) {
        let stream = stream.as_raw().addr();
        let place = self.lock().begin(stream);
        let counted = Counted { engines: self.clone(), stream };
        let done = Box::new(move |outcome| {
            drop(counted);
            done(outcome);
        });
        (place, done)
    }
}

impl Pending {
    fn begin(&mut self, stream: usize) -> usize {
        let Self { streams, load } = self;
        let (place, events) = streams.entry(stream).or_insert_with(|| {
            let place = (0..NUDGES).min_by_key(|&place| load[place]).unwrap_or(0);
            load[place] += 1;
            (place, 0)
        });
        *events += 1;
        *place
    }

    fn end(&mut self, stream: usize) {
        let Some((place, events)) = self.streams.get_mut(&stream) else { return };
        *events -= 1;
        if *events == 0 {
            self.load[*place] -= 1;
            self.streams.remove(&stream);
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.engines.lock().end(self.stream);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_share_nudges_only_if_there_are_many() {
        let mut pending = Pending::default();
        let places: Vec<usize> = (0..NUDGES + 1).map(|stream| pending.begin(stream)).collect();
        assert_eq!(places, [0, 1, 2, 3, 0]);
        assert_eq!(pending.begin(2), 2, "its own again");
        pending.end(2);
        pending.end(1);
        assert_eq!(pending.begin(77), 1, "the one that became free");
        pending.end(2);
        assert_eq!(pending.begin(78), 2);
    }
}
