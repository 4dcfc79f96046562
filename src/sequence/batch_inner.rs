//! The state of a batch until it ends, and its end: on the host, or on a device's stream.
//!
//! ```text
//! on the host   register and seal the promised blocks;  end the lease;  release the copied blocks
//! on a stream   the storage calls back when the stream gets there;  then, on that thread: as above
//! abandoned     log the batch, so that its sequences withdraw what it wrote;  end the lease;  release the copied blocks
//! on failure    no work runs there any more: as abandoned, and the pool hands out no blocks
//! ```
//!
//! A batch seals the blocks that it filled when it ends: before that, a kernel may not have written
//! them. Until then the lease holds back released blocks, which a kernel may still read.

use std::fmt;
use std::pin::Pin;
use std::sync::PoisonError;
use std::task::{Context, Poll};

use futures_channel::oneshot;

use crate::clock::{BatchRef, InFlight};
use crate::error::StorageError;
use crate::ids::{BlockHandle, BlockId, DeviceId, Ticket};
use crate::prefix::{KvEvent, Since, WeightsStamp};
use crate::storage::{CopyDone, DeviceStream, Storage};
use crate::sync::{Arc, Mutex, Ordering::Relaxed, call};

use super::registry::Sequences;
use super::sequence::Sequence;

/// Ends the batch when dropped.
pub(super) struct BatchInner {
    pub(super) sequences: Sequences,
    /// `None` only during the drop.
    lease: Option<InFlight>,
    /// An ended batch that wrote to a sequence before.
    ended: BatchRef,
    pub(super) promised: Vec<Promise>,
    /// Sources of copies in progress, with a reference on each.
    pub(super) copied: Vec<BlockId>,
    /// Without one, the batch ends when it is dropped.
    pub(super) stream: Option<DeviceStream>,
    has_written: bool,
    /// Otherwise it is [abandoned](super::abandoned).
    pub(super) is_finished: bool,
    /// The versions that it computes with.
    weights: WeightsStamp,
}

pub(super) struct Promise {
    pub(super) handle: BlockHandle,
    /// For a block that is noted, to be registered with the prefix cache: the newest uncache call
    /// when no block of its chain was uncached.
    pub(super) checked: Option<u64>,
    pub(super) stored: Option<Box<KvEvent>>,
}

/// The end of a batch that was finished on a stream. The batch also ends if this is dropped.
#[derive(Debug)]
pub struct Finish {
    told: oneshot::Receiver<Result<(), StorageError>>,
    device: DeviceId,
}

type Tell = oneshot::Sender<Result<(), StorageError>>;

impl Finish {
    pub(super) fn pair(device: DeviceId) -> (Tell, Self) {
        let (tell, told) = oneshot::channel();
        (tell, Self { told, device })
    }
}

impl Future for Finish {
    type Output = Result<(), StorageError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let told = std::task::ready!(Pin::new(&mut self.told).poll(context));
        Poll::Ready(told.unwrap_or_else(|_| {
            let reason = "the storage dropped the callback".into();
            Err(StorageError::Device { device: self.device, doing: "the end of a batch", reason })
        }))
    }
}

impl BatchInner {
    pub(super) fn begin(sequences: Sequences) -> Self {
        let _call = call();
        let lease = Some(sequences.0.blocks.begin_batch());
        let weights = sequences.0.cache.as_ref().map(|cache| cache.weights_stamp()).unwrap_or_default();
        Self {
            weights,
            sequences,
            lease,
            ended: BatchRef::default(),
            promised: Vec::new(),
            copied: Vec::new(),
            stream: None,
            has_written: false,
            is_finished: false,
        }
    }

    #[inline]
    fn lease(&self) -> &InFlight {
        self.lease.as_ref().expect("a batch holds a lease until it is dropped")
    }

    #[inline]
    pub(super) fn ticket(&self) -> Ticket {
        self.lease().ticket()
    }

    /// Records this batch as a writer of a sequence, from a position on; `appended`: the tokens
    /// from this position on, which it appends.
    #[inline(always)]
    pub(super) fn note(&mut self, sequence: &mut Sequence, from: u32, appended: Option<u32>) {
        let batch = self.lease().batch();
        self.has_written = true;
        if sequence.known.as_ref().is_some_and(|known| known.versions.differ(self.weights)) {
            self.note_weights(sequence, appended);
        }
        self.sequences.0.blocks.clock().note(&mut sequence.writers, batch, &mut self.ended);
        sequence.note_write(batch, from, self.ended);
    }

    #[cold]
    #[inline(never)]
    fn note_weights(&self, sequence: &mut Sequence, appended: Option<u32>) {
        if let (Some(known), Some(cache)) = (&mut sequence.known, &self.sequences.0.cache) {
            known.written(cache, self.weights, appended.map(|from| from as usize));
        }
    }

    pub(super) fn end_after(mut self, streams: &[&DeviceStream], tell: Option<Tell>) {
        let Some(storage) = self.sequences.0.storage.clone() else { return };
        let blocks = self.sequences.0.blocks.clone();
        // Set again by the callback if the work was done.
        let is_finished = std::mem::take(&mut self.is_finished);
        if !is_finished {
            // Now, not when the streams get there: the step may be tried again at once.
            self.log_abandoned();
        }
        let end: CopyDone = Box::new(move |outcome| {
            self.is_finished = is_finished && outcome.is_ok();
            let outcome = self.sequences.noting_loss(outcome);
            drop(self);
            let _ = tell.map(|tell| tell.send(outcome));
        });
        match streams {
            [stream] => storage.after(stream, end),
            _ => after_all(&*storage, streams, end),
        }
        blocks.reclaim_slice();
    }

    /// Logs the batch once, if it has written, so that its sequences withdraw its writes.
    fn log_abandoned(&mut self) {
        if std::mem::take(&mut self.has_written) {
            self.sequences.0.abandoned.add(self.lease().batch());
        }
    }

    /// Seals the promised blocks, and registers the noted ones.
    fn seal_promised(&mut self) {
        let (blocks, cache) = (&self.sequences.0.blocks, self.sequences.0.cache.as_ref());
        // Blocks noted before the newest call may have been computed from a block that it uncached.
        let newest = cache.map(|cache| cache.uncached().newest());
        let is_found = |promise: &Promise| promise.checked.is_some() && promise.checked == newest;
        // A block released meanwhile has another generation, and is skipped.
        if let Some((cache, newest)) = cache.zip(newest) {
            let found = self.promised.iter_mut().filter(|promise| is_found(promise));
            let found = found.map(|promise| (promise.handle, promise.stored.take()));
            cache.register(blocks, Since::Checked(newest), found);
        }
        for promise in self.promised.drain(..).filter(|promise| !is_found(promise)) {
            blocks.seal(promise.handle);
        }
    }

    fn end(&mut self) {
        let _call = call();
        if !self.is_finished {
            self.promised.clear();
            self.log_abandoned();
        }
        if !self.promised.is_empty() {
            self.seal_promised();
        }
        let blocks = &self.sequences.0.blocks;
        if let Some(lease) = self.lease.take() {
            let batch = lease.batch();
            blocks.end_batch(lease);
            self.sequences.batch_ended(batch);
            // Frames left by moves, which this batch may have been the last to read. Announces,
            // also for frames that it held only briefly because they wait for another batch.
            blocks.reclaim_due_retired();
            // Not on the thread that reports the ends of device work, where evictions would delay
            // other reports: there, the thread that finished the batch has done a slice.
            if self.sequences.0.storage.as_ref().is_none_or(|storage| !storage.must_not_wait()) {
                blocks.reclaim_slice();
            }
        }
        if !self.copied.is_empty() {
            // Unlinked from their sequences, where a view's reader may have found them. No fence,
            // unlike `Sequence::release_unlinked`: this batch's end changed the clock's word after
            // that. The release sees a batch that began before it; one that began after it read
            // from it, and sees them unlinked.
            blocks.release_listed(&self.copied);
            // Relaxed, and above: as all counts of references.
            self.sequences.0.copying.fetch_sub(self.copied.len() as u64, Relaxed);
        }
    }
}

/// Calls `end` when the last of these streams gets there, or drops it if one never reports.
fn after_all(storage: &dyn Storage, streams: &[&DeviceStream], end: CopyDone) {
    let rest = Arc::new(Mutex::new((streams.len(), Ok(()), Some(end))));
    for stream in streams {
        let rest = rest.clone();
        let told = move |outcome: Result<(), StorageError>| {
            let mut rest = rest.lock().unwrap_or_else(PoisonError::into_inner);
            rest.0 -= 1;
            if outcome.is_err() {
                rest.1 = outcome;
            }
            let last = if rest.0 == 0 { rest.2.take() } else { None };
            let outcome = rest.1.clone();
            // The callback may run arbitrary code, so the lock is released first.
            drop(rest);
            let _ = last.map(|end| end(outcome));
        };
        storage.after(stream, Box::new(told));
    }
}

impl Drop for BatchInner {
    fn drop(&mut self) {
        match self.stream.take() {
            None => self.end(),
            Some(stream) => {
                let rest = Self {
                    sequences: self.sequences.clone(),
                    lease: self.lease.take(),
                    ended: self.ended,
                    promised: std::mem::take(&mut self.promised),
                    copied: std::mem::take(&mut self.copied),
                    stream: None,
                    has_written: self.has_written,
                    is_finished: self.is_finished,
                    weights: self.weights,
                };
                rest.end_after(&[&stream], None);
            }
        }
    }
}

impl fmt::Debug for BatchInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lease, promised, stream, .. } = self;
        f.debug_struct("Batch")
            .field("lease", lease)
            .field("promised", &promised.len())
            .field("stream", stream)
            .finish()
    }
}
