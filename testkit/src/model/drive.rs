//! Runs the real pool and the model side by side.

use std::collections::HashSet;
use std::fmt;

use kvpool::storage::{Dtype, KvLayout};
use kvpool::{
    AllocError, AllocRequest, Batch, BlockHandle, BlockId, BlockPin, Generation, GrowError, HandleError,
    Lease, Pool, PoolTag, Sequence, SequenceId, Window,
};

use super::{Alien, Doing, Model, Operation, Pick};

/// Tokens per block with which the model is compared: a block a token, odd and even numbers, and
/// the usual number.
pub const BLOCK_TOKENS: [usize; 4] = [1, 2, 3, 16];

/// Number of handles of freed blocks kept for misuse.
const FREED_MAX: usize = 256;

/// Shape of the pool under test.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Initial number of blocks.
    pub blocks: usize,
    /// Maximum number of blocks.
    pub blocks_max: usize,
    /// Frames per segment.
    pub segment_blocks: usize,
    /// Tokens per block.
    pub block_tokens: usize,
    /// Attention window of the layers, if they have one.
    pub window: Option<Window>,
}

impl Default for Setup {
    /// A little more than two segments, so that runs and growth cross segments.
    fn default() -> Self {
        Self { blocks: 150, blocks_max: 700, segment_blocks: 64, block_tokens: 4, window: None }
    }
}

/// A result of the pool that differs from the model's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mismatch {
    /// Index of the operation, from 0.
    pub step: usize,
    /// The operation, and the difference.
    pub what: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "operation {}: {}", self.step, self.what)
    }
}

impl std::error::Error for Mismatch {}

/// Result of one step.
pub(super) type Checked = Result<(), String>;

/// Runs the operations on a new pool and on the model, and returns the first difference.
///
/// # Errors
///
/// Any result that differs from the model's; a finding of the final audit.
pub fn run(setup: Setup, operations: &[Operation]) -> Result<(), Mismatch> {
    let mut side_by_side = Drive::new(setup);
    for (step, operation) in operations.iter().enumerate() {
        side_by_side
            .step(operation)
            .and_then(|()| side_by_side.counts())
            .map_err(|what| Mismatch { step, what: format!("{operation:?}: {what}") })?;
    }
    side_by_side.finish().map_err(|what| Mismatch { step: operations.len(), what })
}

/// A sequence, and its expected state.
pub(super) struct Opened {
    pub(super) real: Sequence,
    pub(super) tokens: Vec<f32>,
    pub(super) committed: usize,
    /// The null block for each that was given up.
    pub(super) blocks: Vec<BlockId>,
}

pub(super) struct Drive {
    pub(super) pool: Pool,
    pub(super) block_tokens: usize,
    pub(super) window: Option<Window>,
    pub(super) model: Model,
    leases: Vec<Lease<'static>>,
    pins: Vec<BlockPin>,
    pub(super) batches: Vec<(u64, Batch)>,
    pub(super) sequences: Vec<Opened>,
    pub(super) tokens_stored: u32,
    /// Blocks in use with all slots written.
    pub(super) full_once: HashSet<BlockId>,
    freed: Vec<BlockHandle>,
    tag: PoolTag,
}

impl Drive {
    fn new(setup: Setup) -> Self {
        let layout = KvLayout::builder()
            .layers(1)
            .kv_heads(1)
            .head_dim(1)
            .block_tokens(setup.block_tokens)
            .dtype(Dtype::F32);
        let mut builder = Pool::builder(layout.build().expect("a valid layout"))
            .blocks(setup.blocks)
            .blocks_max(setup.blocks_max)
            .segment_blocks(setup.segment_blocks);
        if let Some(window) = setup.window {
            builder = builder.window(window);
        }
        let pool = builder.build().expect("a valid pool");
        Self {
            model: Model::new(setup.blocks, setup.blocks_max),
            tag: pool.tag(),
            pool,
            block_tokens: setup.block_tokens,
            window: setup.window,
            leases: Vec::new(),
            pins: Vec::new(),
            batches: Vec::new(),
            sequences: Vec::new(),
            tokens_stored: 0,
            full_once: HashSet::new(),
            freed: Vec::new(),
        }
    }

    fn step(&mut self, operation: &Operation) -> Checked {
        match *operation {
            Operation::Lease { blocks, contiguous, pinned, sequence } => {
                let sequence = sequence.map(|sequence| SequenceId(sequence.into()));
                self.lease(request(blocks, contiguous, pinned, sequence))
            }
            Operation::Drop(pick) => self.drop_lease(pick),
            Operation::SplitLease(pick, at) => self.split_lease(pick, at),
            Operation::TruncateLease(pick, keep) => self.truncate_lease(pick, keep),
            Operation::Share(pick) => self.share(pick),
            Operation::Pin(pick) => self.pin(pick),
            Operation::Unpin(pick) => self.unpin(pick),
            Operation::Info(pick) => pick.of(&self.held()).map_or(Ok(()), |&handle| self.info(handle)),
            Operation::Misuse(alien, doing) => self.misuse(alien, doing),
            Operation::Begin => {
                self.begin();
                Ok(())
            }
            Operation::End(pick) => {
                if let Some(index) = pick.index(self.batches.len()) {
                    let (number, batch) = self.batches.swap_remove(index);
                    batch.finish();
                    self.model.end(number);
                }
                Ok(())
            }
            Operation::Grow(blocks) => self.grow(blocks.into()),
            Operation::Shrink { to, fits, gives_up } => {
                let least = if fits { self.model.last_in_the_way().index() } else { 0 };
                self.shrink(least.max(to.into()), gives_up)
            }
            Operation::Defragment { order, blocks_max, wave } => {
                self.defragment(order, blocks_max.map(usize::from), usize::from(wave) + 1)
            }
            Operation::Resize { to, fits } => {
                let least = if fits { self.model.used() } else { 0 };
                self.resize(least.max(to.into()))
            }
            Operation::Seal(pick, count) => self.seal(pick, count.into()),
            Operation::Open(id) => self.open(SequenceId(id.into())),
            Operation::Append { sequence, batch, tokens, draft } => {
                self.append(sequence, batch, tokens.into(), draft)
            }
            Operation::Commit(pick, share) => self.commit(pick, share),
            Operation::Truncate(pick, share) => self.truncate(pick, share),
            Operation::Fork(pick, id) => self.fork(pick, SequenceId(id.into())),
            Operation::Close(pick) => self.close(pick),
            Operation::Read(pick) => self.read(pick),
        }
    }

    pub(super) fn begin(&mut self) {
        self.batches.push((self.model.begin(), self.pool.begin_batch()));
    }

    fn lease(&mut self, request: AllocRequest) -> Checked {
        let expected = self.model.may_allocate(request.blocks, request.contiguous);
        let got = self.pool.allocate_owned(request);
        same("allocate", &expected, &got.as_ref().map(drop).map_err(|error| without_batch(*error)))?;
        let Ok(lease) = got else { return Ok(()) };
        self.handed_out(request, &lease.handles().collect::<Vec<_>>())?;
        self.leases.push(lease);
        Ok(())
    }

    fn handed_out(&mut self, request: AllocRequest, handles: &[BlockHandle]) -> Checked {
        same("blocks allocated", &request.blocks, &handles.len())?;
        let frames: Vec<_> = handles.iter().map(|handle| self.model.frame(handle.id)).collect();
        if request.contiguous && frames.windows(2).any(|pair| pair[1].0 != pair[0].0 + 1) {
            return Err(format!("not a run: {frames:?}"));
        }
        for &handle in handles {
            if !self.model.allocate(handle.id, request.sequence, request.pinned) {
                return Err(format!("{handle} was not free"));
            }
            let expected =
                BlockHandle { generation: self.model.generation(handle.id), pool: self.tag, ..handle };
            same("handle", &expected, &handle)?;
            self.info(handle)?;
        }
        Ok(())
    }

    fn drop_lease(&mut self, pick: Pick) -> Checked {
        if let Some(index) = pick.index(self.leases.len()) {
            let lease = self.leases.swap_remove(index);
            let handles = lease.handles().collect::<Vec<_>>();
            drop(lease);
            handles.into_iter().for_each(|handle| self.released(handle));
        }
        Ok(())
    }

    fn split_lease(&mut self, pick: Pick, at: Pick) -> Checked {
        let Some(index) = pick.index(self.leases.len()) else { return Ok(()) };
        let lease = &mut self.leases[index];
        let all = lease.blocks().to_vec();
        let at = at.index(all.len() + 1).expect("a place");
        let tail = lease.split_off(at);
        same("the parts of a lease", &(&all[..at], &all[at..]), &(lease.blocks(), tail.blocks()))?;
        self.leases.push(tail);
        Ok(())
    }

    fn truncate_lease(&mut self, pick: Pick, keep: Pick) -> Checked {
        let Some(index) = pick.index(self.leases.len()) else { return Ok(()) };
        let lease = &mut self.leases[index];
        let keep = keep.index(lease.blocks().len() + 1).expect("a place");
        let gone: Vec<_> = lease.handles().skip(keep).collect();
        lease.truncate(keep);
        same("the rest of a lease", &keep, &lease.blocks().len())?;
        gone.into_iter().for_each(|handle| self.released(handle));
        Ok(())
    }

    /// The model's part of releasing one reference.
    fn released(&mut self, handle: BlockHandle) {
        self.model.release(handle.id);
        if self.model.owned(handle.id).is_none() {
            if self.freed.len() == FREED_MAX {
                self.freed.swap_remove(handle.id.index() % FREED_MAX);
            }
            self.freed.push(handle);
        }
    }

    fn share(&mut self, pick: Pick) -> Checked {
        let Some(lease) = pick.of(&self.leases) else { return Ok(()) };
        let shared = lease.share().map_err(|error| format!("share: {error}"))?;
        same("shared blocks", lease.blocks(), shared.blocks())?;
        shared.blocks().iter().for_each(|&id| self.model.share(id));
        shared.handles().try_for_each(|handle| self.info(handle))?;
        self.leases.push(shared);
        Ok(())
    }

    fn pin(&mut self, pick: Pick) -> Checked {
        const PINS_MAX: u32 = 15;
        let Some(&handle) = pick.of(&self.held()) else { return Ok(()) };
        let is_full = self.model.owned(handle.id).is_some_and(|owned| owned.pins == PINS_MAX);
        let full = HandleError::TooManyPins { id: handle.id, max: PINS_MAX };
        let expected = if is_full { Err(full) } else { Ok(()) };
        let got = self.pool.pin_scoped(handle);
        same("pin", &expected, &got.as_ref().map(drop).map_err(|error| *error))?;
        if let Ok(pin) = got {
            self.model.pin(handle.id);
            self.pins.push(pin);
        }
        self.info(handle)
    }

    fn unpin(&mut self, pick: Pick) -> Checked {
        let Some(index) = pick.index(self.pins.len()) else { return Ok(()) };
        let pin = self.pins.swap_remove(index);
        let handle = pin.handle();
        drop(pin);
        // The pins of a freed block ended with it.
        let is_owned = self.model.owned(handle.id).is_some();
        if !is_owned || self.model.generation(handle.id) != handle.generation {
            return Ok(());
        }
        self.model.unpin(handle.id);
        self.info(handle)
    }

    fn seal(&mut self, pick: Pick, count: usize) -> Checked {
        let held = self.held();
        let first = pick.index(held.len()).unwrap_or(0);
        for &handle in held.iter().cycle().skip(first).take(count.min(held.len())) {
            let mut leases = self.leases.iter_mut();
            let (place, lease) = leases
                .find_map(|lease| Some((lease.blocks().iter().position(|&id| id == handle.id)?, lease)))
                .expect("a lease's block");
            lease.seal(place..=place);
            let sealed = self.pool.info(handle).is_ok_and(|info| info.sealed);
            same("sealed", &true, &sealed)?;
        }
        Ok(())
    }

    fn info(&self, handle: BlockHandle) -> Checked {
        let info = self.pool.info(handle).map_err(|error| format!("info: {error}"))?;
        let owned = self.model.owned(handle.id).ok_or_else(|| format!("{handle} has info but no owner"))?;
        same("id", &handle.id, &info.id)?;
        same("frame", &self.model.frame(handle.id), &info.frame)?;
        same("references", &owned.refs, &info.refs)?;
        same("pins", &owned.pins, &info.pins)?;
        same("sequence", &owned.sequence, &info.sequence)?;
        same("generation", &self.model.generation(handle.id), &info.generation)
    }

    fn misuse(&mut self, alien: Alien, doing: Doing) -> Checked {
        let Some((handle, expected)) = self.alien(alien) else { return Ok(()) };
        let got = match doing {
            Doing::Pin => self.pool.pin_scoped(handle).map(drop),
            Doing::Info => self.pool.info(handle).map(drop),
        };
        refused(&got, &expected)?;
        self.held().into_iter().take(4).try_for_each(|handle| self.info(handle))
    }

    /// Returns the handle, and the errors that are correct for it.
    fn alien(&self, alien: Alien) -> Option<(BlockHandle, Vec<HandleError>)> {
        let held = self.held();
        let ahead = |handle: &BlockHandle, by: u64| BlockHandle {
            generation: Generation(handle.generation.0 + by),
            ..*handle
        };
        let handle = match alien {
            Alien::Freed(pick) => *pick.of(&self.freed)?,
            Alien::Future(pick) => ahead(pick.of(&held)?, 1),
            Alien::Wrapped(pick) => ahead(pick.of(&held)?, 1 << 16),
            Alien::Foreign(pick) => BlockHandle { pool: PoolTag(self.tag.0 ^ 1), ..*pick.of(&held)? },
            Alien::Free(pick) => {
                let free: Vec<BlockId> = self.model.free_ids().collect();
                let &id = pick.of(&free)?;
                BlockHandle { id, pool: self.tag, generation: self.model.generation(id) }
            }
            Alien::Beyond(by) => {
                let id = BlockId((self.model.ever() as u32 + 1).saturating_add(by));
                BlockHandle { id, pool: self.tag, generation: Generation(0) }
            }
            Alien::Null => BlockHandle { id: BlockId(0), pool: self.tag, generation: Generation(0) },
        };
        let stale = HandleError::Stale { handle, now: self.model.generation(handle.id) };
        let outside = HandleError::OutOfRange { handle, total: self.model.ever() };
        let expected = match alien {
            Alien::Foreign(_) => HandleError::Foreign { handle, pool: self.tag },
            Alien::Beyond(_) | Alien::Null => outside,
            _ => stale,
        };
        Some((handle, vec![expected]))
    }

    fn grow(&mut self, blocks: usize) -> Checked {
        let expected = self.model.may_grow(blocks);
        let got = self.pool.grow(blocks).map(drop);
        same("grow", &expected, &got)?;
        if got.is_ok() {
            self.model.grow(blocks);
        }
        Ok(())
    }

    fn shrink(&mut self, to: usize, gives_up: bool) -> Checked {
        let expected = self.model.may_shrink(to);
        let begun = self.pool.blocks().begin_shrink(to);
        same("begin_shrink", &expected, &begun.as_ref().map(drop).map_err(|error| *error))?;
        let Ok(mut shrinking) = begun else { return Ok(()) };
        same("grow meanwhile", &Err(GrowError::Busy), &self.pool.grow(1))?;
        let missing = shrinking.collect();
        same("frames in the way", &self.model.in_the_way(to), &missing)?;
        let counts = self.pool.blocks().counts();
        same("collected", &(self.model.total() - to - missing), &counts.held)?;
        self.audit()?;
        if gives_up {
            return Ok(());
        }
        let storage = self.pool.storage().expect("built with storage");
        // SAFETY: the shrinker owns all removed frames.
        match shrinking.commit(|gone| unsafe { storage.shrink(gone.start.index()) }) {
            Ok(()) if missing == 0 => self.model.shrink(to),
            Ok(()) => return Err(format!("committed with {missing} frames in the way")),
            Err(_) if missing == 0 => {
                return Err("not committed, although no frame was in the way".to_owned());
            }
            Err(given_up) => drop(given_up),
        }
        self.audit()
    }

    /// Every reference.
    fn held(&self) -> Vec<BlockHandle> {
        self.leases.iter().flat_map(Lease::handles).collect()
    }

    /// Checks the fast counters. Blocks held back by a batch that has just ended may still count as
    /// retired if newer batches hold back more; the sum is exact, and so is each count once no
    /// batch is in flight.
    fn counts(&self) -> Checked {
        let counts = self.pool.blocks().counts();
        let (free, retired) = (self.model.free(), self.model.retired());
        same("free and retired blocks", &(free + retired), &(counts.free() + counts.retired))?;
        if counts.free() > free || self.batches.is_empty() {
            same("free blocks", &free, &self.pool.free_blocks())?;
        }
        same("blocks", &self.model.total(), &counts.total)
    }

    /// Releases everything, batches last, and audits before and after.
    fn finish(mut self) -> Checked {
        self.audit()?;
        self.read_all()?;
        self.sequences.clear();
        self.leases.clear();
        std::mem::take(&mut self.batches).into_iter().for_each(|(_, batch)| batch.finish());
        self.audit()?;
        same("free blocks at the end", &self.model.total(), &self.pool.free_blocks())
    }

    pub(super) fn audit(&self) -> Checked {
        self.pool.audit().map(drop).map_err(|finding| format!("audit: {finding}"))
    }
}

fn request(blocks: u16, contiguous: bool, pinned: bool, sequence: Option<SequenceId>) -> AllocRequest {
    let mut request = AllocRequest::new(blocks.into());
    request.contiguous = contiguous;
    request.pinned = pinned;
    request.sequence = sequence;
    request
}

/// Removes the fields that the model does not know: the oldest batch, and blocks held by a shrink.
fn without_batch(error: AllocError) -> AllocError {
    match error {
        AllocError::Exhausted { asked, free, retired, evictable, .. } => {
            let (held, in_transfer) = (0, 0);
            AllocError::Exhausted { asked, free, retired, evictable, held, in_transfer, oldest_batch: None }
        }
        other => other,
    }
}

pub(super) fn same<T: PartialEq + fmt::Debug + ?Sized>(what: &str, expected: &T, got: &T) -> Checked {
    if expected == got { Ok(()) } else { Err(format!("{what}: expected {expected:?}, got {got:?}")) }
}

fn refused(got: &Result<(), HandleError>, expected: &[HandleError]) -> Checked {
    match got {
        Err(error) if expected.contains(error) => Ok(()),
        _ => Err(format!("expected one of {expected:?}, got {got:?}")),
    }
}
