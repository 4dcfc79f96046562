//! The depot: a bounded lock-free stock of magazines, through which a thread that mostly frees feeds one that
//! mostly allocates without either touching the bitmaps.
//!
//! Frames in the depot are free, and hidden from coalescing; the depot is therefore small (two magazines a thread),
//! and is emptied before an allocation is refused.

use crate::sync::{AtomicUsize, Ordering::*, Queue};

use super::{Frames, Magazine};

/// See the [module](self).
pub struct Depot {
    magazines: Queue<Magazine>,
    /// Frames in the stock. Counted up before a push and down after a pop, so that it never reads too low.
    frames: AtomicUsize,
}

impl Depot {
    /// A depot for up to `magazines` magazines.
    pub fn new(magazines: usize) -> Self {
        Self { magazines: Queue::new(magazines.max(1)), frames: AtomicUsize::new(0) }
    }

    /// Takes a magazine in, or hands it back when the depot is full.
    #[expect(clippy::result_large_err, reason = "a magazine is handed back by value: nothing is allocated")]
    pub fn push(&self, magazine: Magazine) -> Result<(), Magazine> {
        let len = magazine.len();
        // Relaxed: a statistic; the queue orders the frames themselves.
        self.frames.fetch_add(len, Relaxed);
        self.magazines.push(magazine).inspect_err(|_| {
            self.frames.fetch_sub(len, Relaxed);
        })
    }

    /// A magazine, if there is one.
    pub fn pop(&self) -> Option<Magazine> {
        let magazine = self.magazines.pop()?;
        self.frames.fetch_sub(magazine.len(), Relaxed);
        Some(magazine)
    }

    /// Gives every frame back to the global structure.
    pub fn flush(&self, frames: &Frames) {
        while let Some(mut magazine) = self.pop() {
            magazine.flush(frames);
        }
    }

    /// Free frames in the depot; exact when nobody is pushing or popping.
    pub fn frames(&self) -> usize {
        self.frames.load(Relaxed)
    }
}
