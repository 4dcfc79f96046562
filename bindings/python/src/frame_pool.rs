//! `FramePool`, for engines with their own ids and hashes. Calls take whole lists: one crossing a
//! list.
//!
//! | file | contents |
//! |---|---|
//! | `lists` | lists and buffers of frames, and hashes, from Python |
//! | `keys` | keys that are derived once |
//! | `work` | what a call does with its list, without the GIL if that is long |
//! | `moves` | compaction in two steps, and batches |
//! | `counts` | size, counts and audit |

mod counts;
mod keys;
mod lists;
mod moves;
mod work;

use std::num::NonZeroUsize;

use kvpool::compact::{FRAGMENTATION_PENALTY, Goal};
use kvpool::{
    AllocError, AllocRequest, FrameGroup, FramePool as Pool, HitGroup, Need, Order, Run, SequenceId,
    prefix::HashKey,
};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::args::{Count, Frame, Frames, Group, Id, Key, RunLength, RunOrder};
use crate::batch::check_batches;
use crate::error::{Outcome, invalid};
use crate::process::{Own, Process};

use keys::FrameKeys;
use lists::{Numbers, frames_of, keys_of, writable, write_frames};
use moves::{FrameBatch, FrameMoves};
use work::{detached, discard, searching, take};

/// A pool whose ids are frames, for engines with ids, hashes and schedulers of their own.
///
/// Frames are given as lists of integers or as buffers of u32, such as `array("I")` and numpy
/// arrays. A list is checked as a whole: it is refused with the position of the first wrong entry,
/// and changes nothing. A frame that is freed twice is refused by name. All methods may be called
/// from several threads at once.
///
/// `frames` is the number of frames beside the null block's, which is frame 0 unless
/// `null_block` is false.
#[pyclass(frozen, module = "kvpool")]
pub struct FramePool {
    made_in: Process,
    pool: Own<Pool>,
    numbers: Numbers,
}

impl FramePool {
    /// Returns the pool, in the process that made it.
    pub fn here(&self) -> Outcome<&Pool> {
        self.made_in.check()?;
        Ok(self.pool.get())
    }

    /// Evicts so many frames that `frames` can be chosen among more than that number.
    fn evict_ahead(pool: &Pool, frames: usize, ahead: usize) {
        if ahead == 0 {
            return;
        }
        let free = pool.counts().free();
        // A request that will be refused evicts nothing.
        if free >= frames.saturating_add(ahead) || frames > pool.available() {
            return;
        }
        // At least a part of `ahead`, so that single frames do not evict one by one.
        let mut missing = (frames.saturating_add(ahead) - free).max(ahead / 4);
        while missing > 0 {
            match pool.evict(missing) {
                0 => break,
                evicted => missing = missing.saturating_sub(evicted),
            }
        }
    }

    fn allocated(
        &self,
        py: Python<'_>,
        blocks: usize,
        runs: bool,
        ahead: usize,
        sequence: Option<Id>,
    ) -> Outcome<Vec<u32>> {
        let pool = self.here()?;
        let request = request(blocks, sequence);
        let frames = detached(py, blocks.saturating_add(ahead), || {
            Self::evict_ahead(pool, blocks, ahead);
            let mut frames = Vec::new();
            if runs && blocks > 1 {
                let mut found = Vec::new();
                pool.allocate_runs(request, &mut found)?;
                found.sort_unstable_by_key(|run| run.start);
                frames.extend(found.into_iter().flat_map(|run| run.start.0..run.end()));
            } else {
                pool.allocate(request, &mut frames)?;
            }
            Ok::<_, AllocError>(frames)
        });
        Ok(frames?)
    }
}

fn request(blocks: usize, sequence: Option<Id>) -> AllocRequest {
    let request = AllocRequest::new(blocks);
    sequence.map_or(request, |sequence| request.sequence(SequenceId(sequence.0)))
}

#[pymethods]
impl FramePool {
    #[new]
    #[pyo3(signature = (frames, *, frames_max=None, segment_frames=None, magazine_frames=None, threads=None,
                        null_block=true, fragmentation_order=None, hash_key=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        frames: Frames,
        frames_max: Option<Frames>,
        segment_frames: Option<Frames>,
        magazine_frames: Option<Frames>,
        threads: Option<Count>,
        null_block: bool,
        fragmentation_order: Option<RunOrder>,
        hash_key: Option<Key>,
    ) -> Outcome<Self> {
        let mut builder = Pool::builder(frames.0);
        if let Some(frames) = &frames_max {
            builder = builder.frames_max(frames.0);
        }
        if let Some(frames) = segment_frames {
            builder = builder.segment_frames(frames.0);
        }
        if let Some(frames) = magazine_frames {
            builder = builder.magazine_frames(frames.0);
        }
        if let Some(threads) = threads {
            builder = builder.threads(threads.0);
        }
        if !null_block {
            builder = builder.without_null_block();
        }
        if let Some(order) = fragmentation_order {
            builder = builder.fragmentation_order(Order(order.0));
        }
        if let Some(key) = hash_key {
            builder = builder.hash_key(HashKey::from_bytes(key.0));
        }
        let pool = builder.build()?;
        // With the null block.
        let frames_max = frames_max.map_or(0, |most| most.0 + 1).max(pool.frames());
        Ok(Self { made_in: Process::current(), pool: Own::new(pool), numbers: Numbers::new(frames_max) })
    }

    /// Allocates `blocks` frames, each with one reference.
    ///
    /// Free frames come first, then cached ones without references are evicted, in the order in
    /// which they were freed. With `runs`, the frames lie in few runs, in ascending order.
    /// `ahead` is the number of frames to keep free beyond the request, by eviction: more to
    /// choose from makes longer runs. `sequence` is noted for `owners`.
    #[pyo3(signature = (blocks, *, runs=false, ahead=Frames(0), sequence=None), text_signature = "($self, blocks, *, runs=False, ahead=0, sequence=None)")]
    fn allocate<'py>(
        &self,
        py: Python<'py>,
        blocks: Frames,
        runs: bool,
        ahead: Frames,
        sequence: Option<Id>,
    ) -> Outcome<Bound<'py, PyList>> {
        let frames = self.allocated(py, blocks.0, runs, ahead.0, sequence)?;
        Ok(self.numbers.list(py, &frames)?)
    }

    /// Fills a buffer of u32 with newly allocated frames, as `allocate` does.
    #[pyo3(signature = (frames, *, runs=false, ahead=Frames(0), sequence=None), text_signature = "($self, frames, *, runs=False, ahead=0, sequence=None)")]
    fn allocate_into(
        &self,
        frames: &Bound<'_, PyAny>,
        runs: bool,
        ahead: Frames,
        sequence: Option<Id>,
    ) -> Outcome<()> {
        // Held from here on, so that its size is that of the request.
        let buffer = writable(frames)?;
        let allocated = self.allocated(frames.py(), buffer.item_count(), runs, ahead.0, sequence)?;
        write_frames(&buffer, &allocated);
        Ok(())
    }

    /// Allocates `blocks` frames in few runs: pairs of first frame and length.
    #[pyo3(signature = (blocks, *, ahead=Frames(0), sequence=None), text_signature = "($self, blocks, *, ahead=0, sequence=None)")]
    fn allocate_runs(
        &self,
        py: Python<'_>,
        blocks: Frames,
        ahead: Frames,
        sequence: Option<Id>,
    ) -> Outcome<Vec<(u32, u32)>> {
        let pool = self.here()?;
        let mut found: Vec<Run> = Vec::new();
        detached(py, blocks.0, || {
            Self::evict_ahead(pool, blocks.0, ahead.0);
            pool.allocate_runs(request(blocks.0, sequence), &mut found)
        })?;
        Ok(found.into_iter().map(|run| (run.start.0, run.len)).collect())
    }

    /// Allocates `blocks` consecutive frames, and returns the first. Raises `NoRun` if there
    /// is no such run.
    #[pyo3(signature = (blocks, *, sequence=None))]
    fn allocate_run(&self, py: Python<'_>, blocks: Frames, sequence: Option<Id>) -> Outcome<u32> {
        let (pool, request) = (self.here()?, request(blocks.0, sequence).contiguous());
        let mut found: Vec<Run> = Vec::new();
        detached(py, blocks.0, || pool.allocate_runs(request, &mut found))?;
        Ok(found.first().map_or(0, |run| run.start.0))
    }

    /// Allocates `count` runs of `blocks` consecutive frames each, or none, and returns their first
    /// frames.
    #[pyo3(signature = (blocks, count, *, sequence=None))]
    fn allocate_equal_runs(
        &self,
        py: Python<'_>,
        blocks: Frames,
        count: Count,
        sequence: Option<Id>,
    ) -> Outcome<Vec<u32>> {
        let pool = self.here()?;
        detached(py, blocks.0.saturating_mul(count.0), || {
            let mut found: Vec<Run> = Vec::new();
            for _ in 0..count.0 {
                let mut run = Vec::with_capacity(1);
                if let Err(error) = pool.allocate_runs(request(blocks.0, sequence).contiguous(), &mut run) {
                    let frames: Vec<u32> = found.iter().flat_map(|run| run.start.0..run.end()).collect();
                    pool.free(&frames)?;
                    return Err(error.into());
                }
                found.extend(run);
            }
            Ok(found.into_iter().map(|run| run.start.0).collect())
        })
    }

    /// Allocates the named frames, each with one reference. They must have no references; cached
    /// ones are evicted.
    fn claim(&self, frames: &Bound<'_, PyAny>) -> Outcome<()> {
        let (pool, py, frames) = (self.here()?, frames.py(), frames_of(frames)?);
        Ok(detached(py, frames.len(), || pool.claim(&frames))?)
    }

    /// Drops one reference on each frame. Frames without further references become free, or are
    /// cached if they have hashes: to be evicted in this order.
    fn free(&self, frames: &Bound<'_, PyAny>) -> Outcome<()> {
        let (pool, py, frames) = (self.here()?, frames.py(), frames_of(frames)?);
        Ok(detached(py, frames.len(), || pool.free(&frames))?)
    }

    /// Drops one reference on each of `blocks` consecutive frames.
    fn free_run(&self, py: Python<'_>, first: Frame, blocks: RunLength) -> Outcome<()> {
        let (Frame(first), RunLength(blocks)) = (first, blocks);
        let pool = self.here()?;
        let end = u64::from(first) + u64::from(blocks);
        if end > pool.frames() as u64 {
            return Err(kvpool::FrameError::OutOfRange {
                index: (pool.frames() as u64).saturating_sub(first.into()) as usize,
                frame: kvpool::FrameId(first.max(pool.frames() as u32)),
                frames: pool.frames(),
            }
            .into());
        }
        Ok(detached(py, blocks as usize, || pool.free(&(first..end as u32).collect::<Vec<_>>()))?)
    }

    /// Frees frames like `free`, to be evicted before all that were freed in that way.
    fn free_evict_first(&self, frames: &Bound<'_, PyAny>) -> Outcome<()> {
        let (pool, py, frames) = (self.here()?, frames.py(), frames_of(frames)?);
        Ok(detached(py, frames.len(), || pool.free_evict_first(&frames))?)
    }

    /// Adds one reference to each frame, which must be referenced or cached.
    fn share(&self, frames: &Bound<'_, PyAny>) -> Outcome<()> {
        let (pool, py, frames) = (self.here()?, frames.py(), frames_of(frames)?);
        Ok(detached(py, frames.len(), || pool.share(&frames))?)
    }

    /// Drops one reference on each frame, and caches those without further references: for engines
    /// that look up hashes themselves. The pool needs to know that contents are worth keeping, and
    /// not by which hash. They are evicted in this order; `take` gets them back.
    fn keep(&self, frames: &Bound<'_, PyAny>) -> Outcome<()> {
        let (pool, py, frames) = (self.here()?, frames.py(), frames_of(frames)?);
        Ok(detached(py, frames.len(), || pool.keep(&frames))?)
    }

    /// Drops one reference on each frame, and forgets what it was cached by: the frame becomes free.
    fn discard(&self, frames: &Bound<'_, PyAny>) -> Outcome<()> {
        let (pool, py, frames) = (self.here()?, frames.py(), frames_of(frames)?);
        Ok(searching(py, frames.len(), || discard(pool, &frames))?)
    }

    /// Takes a reference on each frame, with its contents: of those that are in use or cached, and
    /// of those that were evicted since and not allocated again.
    ///
    /// For engines that know themselves which contents a frame still has: a frame keeps them until
    /// it is allocated.
    fn take(&self, frames: &Bound<'_, PyAny>) -> Outcome<()> {
        let (pool, py, frames) = (self.here()?, frames.py(), frames_of(frames)?);
        Ok(searching(py, frames.len(), || take(pool, &frames))?)
    }

    /// The number of references of each frame.
    fn references(&self, frames: &Bound<'_, PyAny>) -> Outcome<Vec<u32>> {
        let (pool, py, frames) = (self.here()?, frames.py(), frames_of(frames)?);
        let mut references = Vec::with_capacity(frames.len());
        detached(py, frames.len(), || pool.references(&frames, &mut references))?;
        Ok(references)
    }

    /// Whether the engine may write to a frame: it has one reference and no hash.
    fn is_writable(&self, frame: Frame) -> Outcome<bool> {
        Ok(self.here()?.is_writable(frame.0)?)
    }

    /// The frames with references, in ascending order: `(frame, references, sequence)`, with the
    /// sequence that the frame was allocated for, or None.
    fn owners(&self, py: Python<'_>) -> Outcome<Vec<(u32, u32, Option<u64>)>> {
        let pool = self.here()?;
        let mut owners = Vec::new();
        let mut info = Vec::with_capacity(1);
        detached(py, pool.frames(), || {
            for frame in 0..pool.frames() as u32 {
                info.clear();
                // The null block and free frames are refused.
                if pool.info(&[frame], &mut info).is_ok() && info[0].references > 0 {
                    owners.push((frame, info[0].references, info[0].sequence.map(|sequence| sequence.0)));
                }
            }
        });
        Ok(owners)
    }

    /// Derives the keys of hashes in a group of layers, for several calls.
    #[pyo3(signature = (hashes, group=Group(0)), text_signature = "($self, hashes, group=0)")]
    fn keys(&self, hashes: &Bound<'_, PyAny>, group: Group) -> Outcome<FrameKeys> {
        Ok(FrameKeys::new(keys_of(self.here()?, hashes, group.0)?))
    }

    /// Makes frames known by hashes: one each. Their contents must be final, and the caller has a
    /// reference on each.
    #[pyo3(signature = (frames, hashes, group=Group(0)), text_signature = "($self, frames, hashes, group=0)")]
    fn register(&self, frames: &Bound<'_, PyAny>, hashes: &Bound<'_, PyAny>, group: Group) -> Outcome<()> {
        let (pool, py, frames) = (self.here()?, frames.py(), frames_of(frames)?);
        let keys = keys_of(pool, hashes, group.0)?;
        if frames.len() != keys.len() {
            return Err(invalid(format!("{} frames and {} hashes", frames.len(), keys.len())));
        }
        let register = || pool.register(&frames.iter().copied().zip(keys).collect::<Vec<_>>());
        Ok(searching(py, frames.len(), register)?)
    }

    /// A frame for each of the leading hashes that are known, without references on them.
    #[pyo3(signature = (hashes, group=Group(0)), text_signature = "($self, hashes, group=0)")]
    fn lookup(&self, hashes: &Bound<'_, PyAny>, group: Group) -> Outcome<Vec<u32>> {
        let pool = self.here()?;
        let (keys, mut frames) = (keys_of(pool, hashes, group.0)?, Vec::new());
        searching(hashes.py(), keys.len(), || pool.cached_prefix(&keys, &mut frames))?;
        Ok(frames)
    }

    /// A frame for each of the leading hashes that are known, with one reference taken on each.
    #[pyo3(signature = (hashes, group=Group(0)), text_signature = "($self, hashes, group=0)")]
    fn hit(&self, hashes: &Bound<'_, PyAny>, group: Group) -> Outcome<Vec<u32>> {
        let pool = self.here()?;
        let (keys, mut frames) = (keys_of(pool, hashes, group.0)?, Vec::new());
        searching(hashes.py(), keys.len(), || pool.hit(&keys, &mut frames))?;
        Ok(frames)
    }

    /// Takes one reference on each frame that the groups of layers need at the longest boundary at
    /// which all of them have it. Returns the boundary and the frames of each group.
    ///
    /// Each of `groups` is `(hashes, group, last)`: the hashes of all blocks of a prompt, and the
    /// number of last blocks before a boundary that the layers need: None for all, the blocks of a
    /// window, 1 for a state. With 0 the group has no say. `block_units`: the number of units in
    /// a block of each group, 1 by default; the boundary is in units, and ends a block of each.
    #[pyo3(signature = (groups, block_units=None))]
    fn hit_groups(
        &self,
        py: Python<'_>,
        groups: Vec<(Bound<'_, PyAny>, Group, Option<Count>)>,
        block_units: Option<Vec<Count>>,
    ) -> Outcome<(usize, Vec<Vec<u32>>)> {
        let pool = self.here()?;
        let units = block_units.unwrap_or_else(|| groups.iter().map(|_| Count(1)).collect());
        if units.len() != groups.len() {
            return Err(invalid(format!("{} groups and {} block_units", groups.len(), units.len())));
        }
        let keys = groups.iter().map(|(hashes, group, _)| keys_of(pool, hashes, group.0));
        let keys = keys.collect::<Outcome<Vec<_>>>()?;
        let mut asked = Vec::with_capacity(groups.len());
        for ((keys, (_, _, last)), units) in keys.iter().zip(&groups).zip(units) {
            let Some(block_units) = NonZeroUsize::new(units.0) else {
                return Err(invalid("0 units in a block".to_owned()));
            };
            let need = last.as_ref().map_or(Need::All, |last| Need::Last(last.0));
            asked.push(HitGroup { keys, block_units, need });
        }
        let all = keys.iter().map(Vec::len).sum();
        Ok(searching(py, all, || pool.hit_groups(&asked))?)
    }

    /// Takes a hash away from all frames that are known by it. Returns their number.
    #[pyo3(signature = (hash, group=Group(0)), text_signature = "($self, hash, group=0)")]
    fn unregister(&self, hash: &[u8], group: Group) -> Outcome<usize> {
        let pool = self.here()?;
        Ok(pool.unregister(pool.key(FrameGroup(group.0), hash)?)?)
    }

    /// Takes all hashes of these frames away. Those without references become free. Returns the
    /// number of frames that had any.
    fn uncache(&self, frames: &Bound<'_, PyAny>) -> Outcome<usize> {
        let (pool, py, frames) = (self.here()?, frames.py(), frames_of(frames)?);
        Ok(searching(py, frames.len(), || pool.uncache(&frames))?)
    }

    /// Moves all hashes of a frame to another one. The caller has a reference on both.
    fn move_keys(&self, source: Frame, target: Frame) -> Outcome<usize> {
        Ok(self.here()?.move_keys(source.0, target.0)?)
    }

    /// Evicts up to `frames` cached frames without references, the oldest first. Returns their
    /// number.
    fn evict(&self, py: Python<'_>, frames: Frames) -> Outcome<usize> {
        let pool = self.here()?;
        Ok(searching(py, frames.0, || pool.evict(frames.0)))
    }

    /// Returns up to `frames` frames without references, in the order in which allocations use
    /// them, those after frame `cursor`, or the first ones: free frames, ascending, then cached
    /// ones in the order of eviction. To read on, pass the last frame as `cursor`.
    ///
    /// The list is no reservation: a frame whose state another thread changes meanwhile may be
    /// missing or appear twice. A cursor with references is refused. The first call visits every
    /// frame; later ones take time in proportion to the frames that they return, and to those that
    /// were listed, freed or evicted since.
    #[pyo3(signature = (frames, cursor=None))]
    fn available_after<'py>(
        &self,
        py: Python<'py>,
        frames: Frames,
        cursor: Option<Frame>,
    ) -> Outcome<Bound<'py, PyList>> {
        let pool = self.here()?;
        let mut found = Vec::new();
        // The first call sorts the cached frames.
        py.detach(|| pool.available_after(cursor.map(|frame| frame.0), frames.0, &mut found))?;
        Ok(self.numbers.list(py, &found)?)
    }

    /// Clears the cache if no frame has references, and returns the number of frames evicted. Raises
    /// `FrameRefused` otherwise.
    fn clear(&self, py: Python<'_>) -> Outcome<usize> {
        let pool = self.here()?;
        Ok(detached(py, pool.frames(), || pool.clear_idle())?)
    }

    /// Clears the cache if no frame has references. Returns whether it did.
    fn reset(&self, py: Python<'_>) -> Outcome<bool> {
        let pool = self.here()?;
        Ok(detached(py, pool.frames(), || pool.clear_idle()).is_ok())
    }

    /// Proposes at most `moves_max` moves of cached frames without references: towards free runs of
    /// `2**order` frames (16 by default), or towards one run of `run` frames.
    ///
    /// `fragmentation_penalty`: free runs that moves must gain for each two neighbouring cached
    /// frames that they separate (2 by default). At 0, all runs are gained that the free frames can
    /// form.
    #[pyo3(signature = (moves_max, *, order=None, run=None, fragmentation_penalty=None))]
    fn propose_moves(
        &self,
        py: Python<'_>,
        moves_max: Count,
        order: Option<RunOrder>,
        run: Option<RunLength>,
        fragmentation_penalty: Option<Count>,
    ) -> Outcome<FrameMoves> {
        let pool = self.here()?;
        let goal = match (order, run) {
            (Some(_), Some(_)) => {
                return Err(invalid("moves have one goal: pass `order` or `run`, not both"));
            }
            (None, Some(RunLength(len))) => Goal::Run { len },
            (order, None) => Goal::Fragmentation { order: Order(order.map_or(4, |order| order.0)) },
        };
        // Visits every frame.
        // A price above all runs is as high as any other.
        let price = fragmentation_penalty
            .map_or(FRAGMENTATION_PENALTY, |price| u32::try_from(price.0).unwrap_or(u32::MAX));
        Ok(FrameMoves::new(py.detach(|| pool.propose_moves_with_penalty(goal, moves_max.0, price))))
    }

    /// Begins a batch: frames that are freed before it ends are not reused before it ends. A context
    /// manager. Raises `KvPoolError`, of the kind `TooManyBatches`, if 4,096 batches are in flight.
    fn begin_batch(&self) -> Outcome<FrameBatch> {
        let pool = self.here()?;
        check_batches(pool.batches_in_flight())?;
        Ok(FrameBatch::new(pool.begin_batch()))
    }

    fn __repr__(&self) -> Outcome<String> {
        let counts = self.here()?.counts();
        Ok(format!(
            "FramePool(frames={}, free={}, evictable={}, used={})",
            counts.total,
            counts.free(),
            counts.evictable,
            counts.used()
        ))
    }
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<FramePool>()?;
    module.add_class::<FrameKeys>()?;
    module.add_class::<FrameMoves>()?;
    module.add_class::<FrameBatch>()
}
