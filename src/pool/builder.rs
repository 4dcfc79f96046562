//! The builder of a pool. Every number is checked before anything is allocated.

use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::block::{Blocks, BlocksConfig, Evictor, Sampler, Scrub};
use crate::compact::{Bytes, Compactor, FrameCopier};
use crate::config::{FAN, FRAGMENTATION_ORDER, MAGAZINE_BLOCKS_MAX, SEGMENT_FRAMES, magazine_blocks};
use crate::error::{Invalid, PrefixError, StorageError};
use crate::ids::{DeviceId, FRAMES_MAX, Order};
use crate::migrate::Transfers;
use crate::prefix::{PrefixCache, PrefixConfig};
use crate::sequence::{Sequences, TOKENS_MAX};
use crate::storage::{HostStorage, KvLayout, Sizing, Storage};
use crate::sync::{Arc as SharedArc, available_parallelism};

use super::Pool;
use super::pool::Shared;
use super::scrub::{FrameScrub, SharedScrub};

/// By default, one allocation in this many is timed.
const LATENCY_SAMPLE: u32 = 256;

/// Maximum for [`PoolBuilder::threads`]. More threads than that may use the pool.
const THREADS_MAX: usize = 1 << 16;

/// Why a pool could not be built.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A number, the sizing, or the given storage is invalid.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The given storage has other references, perhaps from another pool. Two pools would hand out
    /// the same bytes.
    #[error("the storage has other references; a pool needs exclusive storage")]
    StorageShared,
    /// The configuration of the prefix cache is invalid.
    #[error(transparent)]
    Prefix(#[from] PrefixError),
    /// The storage could not be allocated.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

enum Size {
    Blocks(usize),
    By(Sizing),
}

enum Backing {
    Host,
    Given(Arc<dyn Storage>),
    None,
    Engine(FrameCopier),
}

/// Builds a [`Pool`]. Only the number of blocks is required.
#[must_use]
pub struct PoolBuilder {
    layout: KvLayout,
    size: Option<Size>,
    blocks_max: Option<usize>,
    segment_blocks: usize,
    magazine_blocks: Option<usize>,
    threads: Option<usize>,
    has_null_block: bool,
    backing: Backing,
    zero_on_free: bool,
    turn_patience: Option<Duration>,
    order: Order,
    latency_sample: u32,
    reserve: usize,
    prefix: Option<PrefixConfig>,
}

impl Pool {
    /// Returns a builder of a pool for blocks of this layout.
    pub fn builder(layout: KvLayout) -> PoolBuilder {
        PoolBuilder::new(layout)
    }
}

impl PoolBuilder {
    pub(super) fn new(layout: KvLayout) -> Self {
        Self {
            layout,
            size: None,
            blocks_max: None,
            segment_blocks: SEGMENT_FRAMES,
            magazine_blocks: None,
            threads: None,
            has_null_block: true,
            backing: Backing::Host,
            zero_on_free: false,
            turn_patience: None,
            order: Order(FRAGMENTATION_ORDER),
            latency_sample: if cfg!(kvpool_loom) { 0 } else { LATENCY_SAMPLE },
            reserve: 0,
            prefix: None,
        }
    }

    /// Sets the initial number of blocks. The null block is added to it.
    pub fn blocks(mut self, blocks: usize) -> Self {
        self.size = Some(Size::Blocks(blocks));
        self
    }

    /// Sizes the pool by the available memory. The null block comes out of the same memory.
    pub fn sizing(mut self, sizing: Sizing) -> Self {
        self.size = Some(Size::By(sizing));
        self
    }

    /// Sets the size up to which the pool may [grow](Pool::grow). Without it, the pool cannot grow.
    ///
    /// Address space is reserved for this many blocks; memory is taken only as it is used.
    pub fn blocks_max(mut self, blocks: usize) -> Self {
        self.blocks_max = Some(blocks);
        self
    }

    /// Sets the number of blocks kept in reserve for urgent requests; none by default.
    ///
    /// Requests of [`Priority::Urgent`](super::Priority), and of sequences opened at that priority,
    /// take from the reserve when no other block is left; contiguous requests do not. Freed blocks
    /// refill the reserve first.
    pub fn reserve(mut self, blocks: usize) -> Self {
        self.reserve = blocks;
        self
    }

    /// Sets the number of blocks per segment: a power of two, at least 64; 4096 by default.
    pub fn segment_blocks(mut self, blocks: usize) -> Self {
        self.segment_blocks = blocks;
        self
    }

    /// Sets the number of blocks per magazine: at most 64; 0 disables magazines.
    ///
    /// The default depends on the pool's size: all magazines together hold at most an eighth of it.
    pub fn magazine_blocks(mut self, blocks: usize) -> Self {
        self.magazine_blocks = Some(blocks);
        self
    }

    /// Sets the expected number of allocating threads, at most 65,536.
    ///
    /// The default is the number of CPUs. More threads may use the pool; they then share regions.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Builds the pool without a null block.
    ///
    /// Frame 0 is then allocated like any other, and tables are padded with -1.
    pub fn without_null_block(mut self) -> Self {
        self.has_null_block = false;
        self
    }

    /// Uses the caller's storage: on another device, or in memory that an engine has allocated.
    ///
    /// It must have the pool's layout, and room for one frame more than there are blocks (for the
    /// null block). The pool takes it over: no other reference to it may exist yet.
    /// [`Pool::storage`] returns references to it.
    pub fn storage(mut self, storage: Arc<dyn Storage>) -> Self {
        self.backing = Backing::Given(storage);
        self
    }

    /// Builds the pool without storage: it manages frames only, and the engine holds the bytes.
    pub fn without_storage(mut self) -> Self {
        self.backing = Backing::None;
        self
    }

    /// Builds the pool without storage, and copies frames through the engine when blocks move.
    ///
    /// A copier that does not copy as told loses the blocks' contents.
    pub fn engine_copies(mut self, copier: FrameCopier) -> Self {
        self.backing = Backing::Engine(copier);
        self
    }

    /// Fills every block with zeros once it is unowned and no batch can read it.
    ///
    /// A block that the storage fails to wipe is held for good, and is counted in
    /// [`Stats::unwiped`](crate::pool::Stats::unwiped).
    pub fn zero_on_free(mut self) -> Self {
        self.zero_on_free = true;
        self
    }

    /// Sets how long the first request in line may leave its turn unused; 100 ms by default.
    ///
    /// If a future is woken and not polled within this time, the next request in line gets the
    /// turn. The first request keeps its place, and is served before all others once it is polled.
    /// Threads that free, allocate, wait with a deadline or compact in the background detect this;
    /// [`Stats::head_of_line`](crate::pool::Stats::head_of_line) shows the request.
    ///
    /// The same holds for the turn to move blocks of a [run](crate::Pool::defragment) or a
    /// [resize](crate::Pool::resize), while none of its copies is under way.
    ///
    /// `Duration::MAX` never lets another request overtake.
    pub fn turn_patience(mut self, patience: Duration) -> Self {
        self.turn_patience = Some(patience);
        self
    }

    /// Sets the order at which fragmentation is reported; 4 by default, which is runs of 16.
    pub fn fragmentation_order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// Times one allocation in `every` per thread, including appends that need blocks.
    ///
    /// Rounded up to a power of two, at most 2^32; 0 disables the timing; 256 by default.
    pub fn latency_sample(mut self, every: u32) -> Self {
        self.latency_sample = every;
        self
    }

    /// Adds a prefix cache: blocks of sequences with known tokens outlive them and can be hit
    /// again.
    ///
    /// By default a pool has no prefix cache, and hashes nothing.
    pub fn prefix_cache(mut self, config: PrefixConfig) -> Self {
        self.prefix = Some(config);
        self
    }

    /// Builds the pool.
    ///
    /// # Errors
    ///
    /// [`BuildError`]; no resource is kept.
    pub fn build(self) -> Result<Pool, BuildError> {
        let config = self.check()?;
        let mut bytes = Bytes::Unknown;
        let storage: Option<Arc<dyn Storage>> = match self.backing {
            Backing::None => None,
            Backing::Engine(copier) => {
                bytes = Bytes::Engine(copier);
                None
            }
            Backing::Host => {
                Some(Arc::new(HostStorage::new(self.layout.clone(), config.frames, config.frames_max)?))
            }
            Backing::Given(mut storage) => {
                // A sequence's stores are safe because no one else can reach its blocks' frames.
                if Arc::get_mut(&mut storage).is_none() {
                    return Err(BuildError::StorageShared);
                }
                if *storage.layout() != self.layout {
                    let limit = format_args!("that of the pool, {}", self.layout);
                    return Err(Invalid::new("layout of the storage", storage.layout(), limit).into());
                }
                for (has, frames) in
                    [(storage.frames(), config.frames), (storage.frames_max(), config.frames_max)]
                {
                    if has < frames {
                        let limit = format_args!("at least {frames}");
                        return Err(Invalid::new("frames of the storage", has, limit).into());
                    }
                }
                Some(storage)
            }
        };
        let scrub = storage.as_ref().filter(|_| self.zero_on_free).map(FrameScrub::new);
        if let Some(storage) = &storage {
            bytes = Bytes::Storage(storage.clone());
        }
        let block_tokens = self.layout.block_tokens();
        let cache = match self.prefix {
            Some(prefix) => Some(shared_cache(&config, block_tokens, prefix)?),
            None => None,
        };
        let blocks = Blocks::with_evictor(
            config,
            scrub.clone().map(|scrub| Box::new(SharedScrub(scrub)) as Box<dyn Scrub>),
            cache.clone().map(|cache| Box::new(cache) as Box<dyn Evictor>),
        );
        if let Some(scrub) = scrub {
            scrub.serve(&blocks);
        }
        if let Some(patience) = self.turn_patience {
            blocks.set_turn_patience(patience);
        }
        let sampler = Sampler::new(self.latency_sample, blocks.latencies().clone());
        // SAFETY: the storage was made here, or had no other reference; it serves one pool.
        let sequences = unsafe {
            Sequences::sampled(blocks.clone(), storage.clone(), block_tokens, cache, sampler.clone())
        };
        // SAFETY: as above; or the engine promises to copy the frames' bytes.
        let pool = unsafe { assemble(sequences, blocks, self.layout, storage, bytes, sampler, self.order) };
        #[cfg(not(kvpool_loom))]
        pool.own_sequences();
        Ok(pool)
    }

    pub(super) fn check(&self) -> Result<BlocksConfig, Invalid> {
        let null = self.has_null_block as usize;
        let most = FRAMES_MAX - null;
        let blocks = match &self.size {
            None | Some(Size::Blocks(0)) => {
                return Err(Invalid::new("blocks", "0, or nothing", "at least 1, by `blocks` or `sizing`"));
            }
            Some(Size::Blocks(blocks)) => *blocks,
            // The null block comes out of the same memory.
            Some(Size::By(sizing)) => sizing.frames(&self.layout, 1 + null)? - null,
        };
        let blocks_max = self.blocks_max.unwrap_or(blocks);
        at_most("blocks", blocks, most)?;
        at_most("blocks_max", blocks_max, most)?;
        at_most("blocks", blocks, blocks_max)?;
        if self.reserve >= blocks {
            let limit = format_args!("less than the pool's {blocks} blocks");
            return Err(Invalid::new("reserve", self.reserve, limit));
        }
        let segment_frames = self.segment_blocks;
        if !segment_frames.is_power_of_two() || !(FAN..=FRAMES_MAX).contains(&segment_frames) {
            let limit = format_args!("a power of two from {FAN} to {FRAMES_MAX}");
            return Err(Invalid::new("segment_blocks", segment_frames, limit));
        }
        let threads = self.threads.unwrap_or_else(available_parallelism).max(1);
        at_most("threads", threads, THREADS_MAX)?;
        at_most("block_tokens", self.layout.block_tokens(), TOKENS_MAX)?;
        let magazine_blocks = self.magazine_blocks.unwrap_or_else(|| magazine_blocks(blocks, threads));
        at_most("magazine_blocks", magazine_blocks, MAGAZINE_BLOCKS_MAX)?;
        at_most("fragmentation_order", self.order.0.into(), crate::config::FRAME_BITS as usize)?;
        if self.zero_on_free && matches!(self.backing, Backing::None | Backing::Engine(_)) {
            return Err(Invalid::new("zero_on_free", "a pool without storage", "a pool with storage"));
        }
        let device = match &self.backing {
            Backing::Given(storage) => storage.device(),
            _ => DeviceId::Host,
        };
        Ok(BlocksConfig {
            frames: blocks + null,
            frames_max: blocks_max + null,
            segment_frames,
            magazine_blocks,
            threads,
            has_null_block: self.has_null_block,
            reserve: self.reserve,
            device,
        })
    }
}

fn at_most(what: &'static str, got: usize, max: usize) -> Result<(), Invalid> {
    if got <= max { Ok(()) } else { Err(Invalid::new(what, got, format_args!("at most {max}"))) }
}

/// Creates the prefix cache. Out of line, as below: a model has a small stack.
#[inline(never)]
fn shared_cache(
    config: &BlocksConfig,
    block_tokens: usize,
    prefix: PrefixConfig,
) -> Result<SharedArc<PrefixCache>, BuildError> {
    let (frames, frames_max) = (config.frames, config.frames_max);
    Ok(SharedArc::new(PrefixCache::new(frames, frames_max, block_tokens, prefix)?))
}

/// # Safety
///
/// As for [`Compactor::new`].
#[inline(never)]
unsafe fn assemble(
    sequences: Sequences,
    blocks: Blocks,
    layout: KvLayout,
    storage: Option<Arc<dyn Storage>>,
    bytes: Bytes,
    sampler: Sampler,
    order: Order,
) -> Pool {
    Pool(SharedArc::new(Shared {
        // SAFETY: the caller's promise.
        compactor: unsafe { Compactor::new(sequences.clone(), bytes, &layout, order) },
        sequences,
        blocks,
        layout,
        storage,
        sampler,
        order,
        migrations: std::sync::Mutex::default(),
        transfers: Transfers::default(),
        remotes: std::sync::RwLock::default(),
    }))
}
