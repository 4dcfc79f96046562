use std::sync::{Arc, Weak};
#[cfg(not(kvpool_loom))]
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

#[cfg(not(kvpool_loom))]
use crate::block::WeakBlocks;
use crate::block::{Blocks, Scrub};
use crate::error::StorageError;
use crate::ids::Run;
use crate::storage::Storage;
#[cfg(not(kvpool_loom))]
use crate::sync::caught;

/// Wipes freed frames of one pool.
///
/// A thread that reports the ends of device work only begins a wipe: waiting for the device would
/// delay all other reports, including that of the wipe. One deferred wipe is in flight at a time.
/// The next one takes all runs that are freed meanwhile, so launches and buffers do not grow with
/// the number of runs.
///
/// ```text
/// Idle ──begin_wipe: take the queue──> Starting ──zero_then returned──> InFlight ──its end──> Idle,
///   ^                                     │ its end                                      start again
///   └──── the thread that started it ── Ended
/// ```
///
/// Each run is reported once, at the end of its last wipe; a dropped callback counts as a failure.
/// If a wipe fails, each of its runs is wiped once more, alone; only those that fail again are
/// reported as failed, and held permanently.
pub(super) struct FrameScrub {
    /// Weak: thread caches keep the block metadata alive, and must not keep the bytes alive.
    storage: Weak<dyn Storage>,
    #[cfg(not(kvpool_loom))]
    blocks: OnceLock<WeakBlocks>,
    #[cfg(not(kvpool_loom))]
    deferred: Mutex<Deferred>,
}

#[cfg(not(kvpool_loom))]
#[derive(Default)]
struct Deferred {
    /// Runs of the next wipe.
    queue: Vec<Run>,
    /// Runs of failed wipes, each of which is wiped next, alone.
    again: Vec<Run>,
    stage: Stage,
}

#[cfg(not(kvpool_loom))]
#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Stage {
    #[default]
    Idle,
    /// A thread is in [`Storage::zero_then`].
    Starting,
    /// The wipe ended before that call returned.
    Ended,
    /// The call returned, and the wipe has not ended.
    InFlight,
}

/// A wipe in progress. Dropping it ends the wipe.
#[cfg(not(kvpool_loom))]
struct Wipe {
    scrub: Arc<FrameScrub>,
    runs: Vec<Run>,
    /// Whether this is the second wipe, of one run alone.
    is_last: bool,
    is_wiped: bool,
}

pub(super) struct SharedScrub(pub(super) Arc<FrameScrub>);

impl FrameScrub {
    pub(super) fn new(storage: &Arc<dyn Storage>) -> Arc<Self> {
        Arc::new(Self {
            storage: Arc::downgrade(storage),
            #[cfg(not(kvpool_loom))]
            blocks: OnceLock::new(),
            #[cfg(not(kvpool_loom))]
            deferred: Mutex::default(),
        })
    }

    /// Sets the blocks whose frames are wiped; without them wipes are not deferred.
    pub(super) fn serve(&self, blocks: &Blocks) {
        #[cfg(not(kvpool_loom))]
        let _ = self.blocks.set(blocks.downgrade());
        #[cfg(kvpool_loom)]
        let _ = blocks;
    }
}

#[cfg(not(kvpool_loom))]
impl FrameScrub {
    fn deferred(&self) -> MutexGuard<'_, Deferred> {
        // No code panics while this lock is held.
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(self: &Arc<Self>) -> Option<Wipe> {
        let mut deferred = self.deferred();
        if deferred.stage != Stage::Idle || (deferred.queue.is_empty() && deferred.again.is_empty()) {
            return None;
        }
        deferred.stage = Stage::Starting;
        let again = deferred.again.pop();
        let is_last = again.is_some();
        let runs = again.map_or_else(|| std::mem::take(&mut deferred.queue), |run| vec![run]);
        Some(Wipe { scrub: self.clone(), runs, is_last, is_wiped: false })
    }

    fn start(self: &Arc<Self>) {
        // In a loop: wipes may end before the call returns.
        while let Some(mut wipe) = self.next() {
            let runs = wipe.runs.clone();
            match self.storage.upgrade() {
                Some(storage) => {
                    let end = move |outcome| {
                        wipe.is_wiped = is_wiped(&outcome);
                        drop(wipe);
                    };
                    // A panic drops the callback: its runs count as not wiped, and the next wipe
                    // begins. SAFETY: frames that are unowned and seen by no batch, held until the
                    // end.
                    let _ = caught(|| unsafe { storage.zero_then(&runs, Box::new(end)) });
                }
                None => {
                    wipe.is_wiped = true;
                    drop(wipe);
                }
            }
            let mut deferred = self.deferred();
            match deferred.stage {
                Stage::Ended => deferred.stage = Stage::Idle,
                _ => {
                    deferred.stage = Stage::InFlight;
                    return;
                }
            }
        }
    }
}

#[cfg(not(kvpool_loom))]
impl Drop for Wipe {
    fn drop(&mut self) {
        if !self.is_wiped && !self.is_last {
            self.scrub.deferred().again.append(&mut self.runs);
        } else if let Some(blocks) = self.scrub.blocks.get().and_then(WeakBlocks::upgrade) {
            for &run in &self.runs {
                // Frees the frames, and may wake tasks.
                let _ = caught(|| blocks.wiped(run, self.is_wiped));
            }
        }
        let mut deferred = self.scrub.deferred();
        if deferred.stage == Stage::Starting {
            deferred.stage = Stage::Ended;
        } else {
            deferred.stage = Stage::Idle;
            drop(deferred);
            self.scrub.start();
        }
    }
}

fn is_wiped(outcome: &Result<(), StorageError>) -> bool {
    // Neither old nor later contents of a lost device can be read.
    outcome.as_ref().err().is_none_or(StorageError::is_lost)
}

impl Scrub for SharedScrub {
    fn wipe(&self, run: Run) {
        // The pool and its sequences are gone, so the frames have no readers.
        let Some(storage) = self.0.storage.upgrade() else { return };
        // SAFETY: the caller passes frames that are unowned and seen by no batch, before it frees
        // them.
        let outcome = unsafe { storage.zero(&[run]) };
        if !is_wiped(&outcome) {
            panic!("zeroing {run} of this pool failed: {outcome:?}");
        }
    }

    #[cfg(not(kvpool_loom))]
    fn is_deferred(&self) -> bool {
        let storage = self.0.storage.upgrade();
        self.0.blocks.get().is_some() && storage.is_some_and(|storage| storage.must_not_wait())
    }

    #[cfg(not(kvpool_loom))]
    fn begin_wipe(&self, run: Run) {
        self.0.deferred().queue.push(run);
        self.0.start();
    }
}
