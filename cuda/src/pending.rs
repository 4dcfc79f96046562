//! Copies on write that an engine's stream has not executed yet.
//!
//! The pool enqueues such a copy on the stream of one batch; under another batch the host may store
//! to the copy, or read it, before that stream gets there. An operation of the host on frames in
//! this list therefore waits for their copies first. Operations on other frames do not wait, so that
//! an engine's stream holds back only what depends on it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvpool::StorageError;
use kvpool::storage::FrameMove;

use super::event::Event;

/// Destinations of copies in progress, each with the event behind its copy.
#[derive(Debug, Default)]
pub(super) struct PendingCopies(Mutex<HashMap<u32, Arc<Event>>>);

impl PendingCopies {
    fn lock(&self) -> MutexGuard<'_, HashMap<u32, Arc<Event>>> {
        // No code panics while this lock is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the destinations of copies that the event is behind.
    pub(super) fn begin(&self, moves: &[FrameMove], event: &Arc<Event>) {
        self.lock().extend(moves.iter().map(|step| (step.dst.0, event.clone())));
    }

    /// Removes the destinations that this event is behind.
    pub(super) fn end(&self, event: &Arc<Event>) {
        let mut list = self.lock();
        // Dropped after the lock, because it calls the driver.
        let _ended: Vec<_> = list.extract_if(|_, other| Arc::ptr_eq(other, event)).collect();
        drop(list);
    }

    /// Waits for the copies to these frames.
    ///
    /// # Errors
    /// [`StorageError::DeviceLost`]; or a capture interferes.
    pub(super) fn wait(&self, frames: impl Iterator<Item = u32>) -> Result<(), StorageError> {
        let mut events: Vec<Arc<Event>> = Vec::new();
        {
            let list = self.lock();
            if list.is_empty() {
                return Ok(());
            }
            for event in frames.filter_map(|frame| list.get(&frame)) {
                if !events.iter().any(|other| Arc::ptr_eq(other, event)) {
                    events.push(event.clone());
                }
            }
        }
        events.iter().try_for_each(|event| event.wait())
    }
}
