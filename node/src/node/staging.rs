//! Memory for the bytes of parts until they are verified.
//!
//! The blocks of a part have other heads than those of this pool, so a peer cannot write them into
//! the pool's frames. It writes frames of a [`Staging`] instead, a storage that allocates the
//! memory of a frame when its bytes arrive. There is one for each size of the sources' blocks; all
//! of a node share one budget of bytes.
//!
//! ```text
//! reserve -> Staged: frames, and their bytes in the budget      dropped: both are free again
//!              a peer writes a frame: its bytes are kept
//!              take: the bytes of a frame go to the import
//! ```
//!
//! Frames are accessed under a lock, so late bytes of a peer cannot race with a reader. If their
//! frame is still staged, they are verified like others; otherwise they are refused.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kvpool::storage::backend::check;
use kvpool::storage::{Elements, ElementsMut, FrameMove, KvLayout, KvPlanes, Scales, Storage};
use kvpool::transport::{RegionId, TransportError};
use kvpool::{DeviceId, FrameId, GrowError, Invalid, Run, StorageError};
use parking_lot::Mutex;

/// Frames of the largest staging. A frame costs memory only when it is written.
const FRAMES: u32 = 1 << 24;

/// Why nothing is staged.
#[derive(Debug, thiserror::Error)]
pub(super) enum StagingError {
    #[error("{needed} bytes are needed, and {free} are free")]
    Full { needed: u64, free: u64 },
    /// No layout has blocks of this size.
    #[error(transparent)]
    Layout(#[from] Invalid),
    #[error(transparent)]
    Transport(#[from] TransportError),
}

/// Registers a storage with the transport whose peers write it.
type Register = dyn Fn(&Arc<dyn Storage>) -> Result<RegionId, TransportError> + Send + Sync;

/// The stagings of a node, by the number of heads of a source's blocks.
pub(super) struct Stagings {
    register: Box<Register>,
    layout: KvLayout,
    budget: Arc<Budget>,
    by_heads: Mutex<HashMap<u32, (RegionId, Arc<Staging>)>>,
}

#[derive(Debug)]
struct Budget {
    max: u64,
    used: Mutex<u64>,
}

impl Stagings {
    pub(super) fn new(register: Box<Register>, layout: KvLayout, bytes_max: u64) -> Self {
        let budget = Arc::new(Budget { max: bytes_max, used: Mutex::new(0) });
        Self { register, layout, budget, by_heads: Mutex::default() }
    }

    /// Reserves frames for blocks with this number of heads, and their bytes in the budget.
    pub(super) fn reserve(&self, heads: u32, frames: u32) -> Result<Arc<Staged>, StagingError> {
        let (region, staging) = self.of(heads)?;
        let needed = u64::from(frames) * staging.layout.packed_bytes() as u64;
        let mut used = self.budget.used.lock();
        let free = self.budget.max - *used;
        let full = StagingError::Full { needed, free };
        if needed > free {
            return Err(full);
        }
        let start = staging.add(frames).ok_or(full)?;
        *used += needed;
        let run = Run { start: FrameId(start), len: frames };
        Ok(Arc::new(Staged { staging, budget: self.budget.clone(), region, run, bytes: needed }))
    }

    fn of(&self, heads: u32) -> Result<(RegionId, Arc<Staging>), StagingError> {
        let mut all = self.by_heads.lock();
        if let Some((region, staging)) = all.get(&heads) {
            return Ok((*region, staging.clone()));
        }
        let staging =
            Arc::new(Staging { layout: with_heads(&self.layout, heads)?, staged: Mutex::default() });
        let region = (self.register)(&(staging.clone() as Arc<dyn Storage>))?;
        all.insert(heads, (region, staging.clone()));
        Ok((region, staging))
    }
}

/// Returns a layout whose packed blocks are those of another one with this number of heads.
fn with_heads(layout: &KvLayout, heads: u32) -> Result<KvLayout, Invalid> {
    if layout.parts() == KvPlanes::Latent {
        return Ok(layout.clone());
    }
    let count = layout.layers() * heads as usize;
    let ones = || vec![1.0; count].into_boxed_slice();
    let scales = match layout.scales() {
        // Static scales are not packed; only their number must match.
        Scales::PerHead { .. } => Scales::PerHead { k: ones(), v: ones() },
        scales => scales.clone(),
    };
    let builder = KvLayout::builder().layers(layout.layers()).kv_heads(heads as usize);
    let builder = builder.head_dim(layout.head_dim()).block_tokens(layout.block_tokens());
    builder.dtype(layout.dtype()).scales(scales).build()
}

type StagedFrames = Vec<Option<Box<[u8]>>>;

/// A storage that holds the bytes of frames until they are verified.
#[derive(Debug)]
struct Staging {
    layout: KvLayout,
    /// Each reservation's frames, by its first frame.
    staged: Mutex<BTreeMap<u32, StagedFrames>>,
}

impl Staging {
    /// Reserves the first gap that is large enough.
    fn add(&self, frames: u32) -> Option<u32> {
        let mut staged = self.staged.lock();
        let mut start = 0;
        for (&next, taken) in staged.iter() {
            if next - start >= frames {
                break;
            }
            start = next + taken.len() as u32;
        }
        if FRAMES - start < frames {
            return None;
        }
        staged.insert(start, vec![None; frames as usize]);
        Some(start)
    }

    /// Calls `with` with the slot of a staged frame.
    fn with<T>(&self, frame: u32, with: impl FnOnce(&mut Option<Box<[u8]>>) -> T) -> Option<T> {
        let mut staged = self.staged.lock();
        let (&start, frames) = staged.range_mut(..=frame).next_back()?;
        frames.get_mut((frame - start) as usize).map(with)
    }

    /// Its frames are accessed as packed blocks only.
    fn unreachable<T>(&self) -> Result<T, StorageError> {
        Err(StorageError::Unsupported { device: self.device(), what: "memory of its own" })
    }
}

#[derive(Debug)]
pub(super) struct Staged {
    staging: Arc<Staging>,
    budget: Arc<Budget>,
    region: RegionId,
    run: Run,
    bytes: u64,
}

impl Staged {
    pub(super) fn region(&self) -> RegionId {
        self.region
    }

    pub(super) fn frame(&self, index: u32) -> FrameId {
        FrameId(self.run.start.0 + index)
    }

    pub(super) fn take(&self, index: u32) -> Option<Box<[u8]>> {
        self.staging.with(self.frame(index).0, Option::take).flatten()
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.staging.staged.lock().remove(&self.run.start.0);
        *self.budget.used.lock() -= self.bytes;
    }
}

impl Storage for Staging {
    fn layout(&self) -> &KvLayout {
        &self.layout
    }

    fn device(&self) -> DeviceId {
        DeviceId::Host
    }

    fn frames(&self) -> usize {
        FRAMES as usize
    }

    fn frames_max(&self) -> usize {
        FRAMES as usize
    }

    fn grow(&self, total: usize) -> Result<(), GrowError> {
        let max = FRAMES as usize;
        if total <= max { Ok(()) } else { Err(GrowError::TooLarge { asked: total - max, total: max, max }) }
    }

    unsafe fn shrink(&self, _total: usize) {}

    unsafe fn store(
        &self,
        _layer: usize,
        _k: Elements<'_>,
        _v: Elements<'_>,
        _slots: &[i64],
    ) -> Result<(), StorageError> {
        self.unreachable()
    }

    unsafe fn load(
        &self,
        _layer: usize,
        _slots: &[i64],
        _k: ElementsMut<'_>,
        _v: ElementsMut<'_>,
    ) -> Result<(), StorageError> {
        self.unreachable()
    }

    unsafe fn copy(&self, _moves: &[FrameMove]) -> Result<(), StorageError> {
        self.unreachable()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    unsafe fn pack(&self, _runs: &[Run], _out: &mut [u8]) -> Result<(), StorageError> {
        self.unreachable()
    }

    unsafe fn unpack(&self, runs: &[Run], bytes: &[u8]) -> Result<(), StorageError> {
        let size = self.layout.packed_bytes();
        check::packed_bytes(bytes.len(), runs.iter().map(|run| run.len as usize * size).sum())?;
        let frames = runs.iter().flat_map(|run| run.frames());
        for (index, (frame, bytes)) in frames.zip(bytes.chunks_exact(size)).enumerate() {
            let kept = self.with(frame.0, |place| *place = Some(bytes.into()));
            kept.ok_or_else(|| Invalid::new("frame", frame, "one that is staged").at(index))?;
        }
        Ok(())
    }

    unsafe fn zero(&self, _runs: &[Run]) -> Result<(), StorageError> {
        self.unreachable()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use kvpool::storage::Dtype;

    fn stagings(bytes_max: u64) -> Stagings {
        let layout = KvLayout::builder().layers(2).kv_heads(4).head_dim(8).block_tokens(4).dtype(Dtype::Bf16);
        let regions = AtomicU32::new(0);
        let register = move |_: &Arc<dyn Storage>| Ok(RegionId(regions.fetch_add(1, Ordering::Relaxed)));
        Stagings::new(Box::new(register), layout.build().unwrap(), bytes_max)
    }

    /// Two layers, K and V, four tokens, eight elements of two bytes.
    const HEAD: u64 = 2 * 2 * 4 * 8 * 2;

    #[test]
    fn one_budget_serves_all_sizes_and_is_given_back() {
        let all = stagings(10 * HEAD);
        let two = all.reserve(2, 3).unwrap();
        let one = all.reserve(1, 2).unwrap();
        assert!(matches!(all.reserve(1, 3), Err(StagingError::Full { needed, free })
            if (needed, free) == (3 * HEAD, 2 * HEAD)));
        assert_ne!(two.region(), one.region());
        let other = all.reserve(2, 1).unwrap();
        assert_eq!((other.region(), other.frame(0)), (two.region(), FrameId(3)));
        drop(two);
        // The first gap.
        assert_eq!(all.reserve(2, 2).unwrap().frame(1), FrameId(1));
        drop((one, other));
        assert_eq!(*all.budget.used.lock(), 0);
        assert_eq!(all.reserve(2, 5).unwrap().frame(0), FrameId(0));
    }

    #[test]
    fn bytes_of_frames_that_are_not_staged_are_refused() {
        let all = stagings(10 * HEAD);
        let staged = all.reserve(1, 2).unwrap();
        let block = vec![7; HEAD as usize];
        let runs = |start| [Run { start: FrameId(start), len: 1 }];
        // SAFETY: each frame is written under a lock.
        let write = |start, bytes: &[u8]| unsafe { staged.staging.unpack(&runs(start), bytes) };
        write(1, &block).unwrap();
        for (refused, what) in [(write(2, &block), "frame"), (write(1, &block[1..]), "packed buffer")] {
            assert!(matches!(refused, Err(StorageError::Invalid(error)) if error.what == what));
        }
        assert_eq!((staged.take(0), staged.take(1).as_deref()), (None, Some(&block[..])));
        assert_eq!(staged.take(1), None);
    }
}
