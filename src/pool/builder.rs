//! Building a pool: every number checked before anything is allocated.

use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::block::{Blocks, BlocksConfig, Evictor, Sampler, Scrub};
use crate::compact::{Bytes, Compactor, FrameCopier};
use crate::config::{FAN, FRAGMENTATION_ORDER, MAGAZINE_BLOCKS_MAX, SEGMENT_FRAMES, magazine_blocks};
use crate::error::{PrefixError, SizingError, StorageError};
use crate::ids::{DeviceId, FRAMES_MAX, Order};
use crate::prefix::{PrefixCache, PrefixConfig};
use crate::sequence::{Sequences, TOKENS_MAX};
use crate::storage::{HostStorage, KvLayout, Sizing, Storage};
use crate::sync::{Arc as SharedArc, available_parallelism};

use super::Pool;
use super::pool::Shared;

/// One allocation in this many is timed, unless configured otherwise.
const LATENCY_SAMPLE: u32 = 256;

/// The most threads that can be expected. More may come.
const THREADS_MAX: usize = 1 << 16;

/// Why a pool was not built.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BuildError {
    /// No number of blocks was given, or zero.
    #[error("a pool needs at least one block; give `blocks` or `sizing`")]
    NoBlocks,
    /// More blocks than a block word can number.
    #[error("{blocks} blocks asked for; a pool has {max} at most")]
    TooManyBlocks {
        /// Blocks asked for, at the start or at the most.
        blocks: usize,
        /// The most that a pool can have.
        max: usize,
    },
    /// The pool may not grow to less than it starts with.
    #[error("the pool starts with {blocks} blocks and may have {max} at most")]
    MaxBelowStart {
        /// Blocks at the start.
        blocks: usize,
        /// The most.
        max: usize,
    },
    /// The reserve leaves nothing for requests that are not urgent.
    #[error("a reserve of {reserve} blocks in a pool of {blocks}: it must be smaller")]
    Reserve {
        /// Blocks to set aside.
        reserve: usize,
        /// Blocks at the start.
        blocks: usize,
    },
    /// A segment is a power of two of frames, and at least a word.
    #[error("a segment of {frames} frames: it must be a power of two, at least {min}")]
    Segment {
        /// Frames asked for.
        frames: usize,
        /// The fewest.
        min: usize,
    },
    /// A magazine has a fixed most.
    #[error("magazines of {blocks} blocks: at most {max}")]
    Magazine {
        /// Blocks asked for.
        blocks: usize,
        /// The most.
        max: usize,
    },
    /// Each thread expected costs memory at once.
    #[error("{threads} threads expected; at most {max}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// The most.
        max: usize,
    },
    /// A block holds more tokens than a sequence may have.
    #[error("blocks of {tokens} tokens; a sequence has {max} at most")]
    BlockTokens {
        /// Tokens of a block, by the layout.
        tokens: usize,
        /// The most tokens of a sequence.
        max: usize,
    },
    /// The order of fragmentation is larger than the pool could ever be.
    #[error("fragmentation at order {order}: at most {max}")]
    Order {
        /// The order asked for.
        order: u8,
        /// The most.
        max: u8,
    },
    /// The storage that was handed over is of another layout.
    #[error("the storage is laid out otherwise than the pool: {storage} there, {pool} here")]
    OtherLayout {
        /// The storage's layout.
        storage: Box<KvLayout>,
        /// The pool's.
        pool: Box<KvLayout>,
    },
    /// The storage that was handed over cannot hold the pool.
    #[error("the storage holds {storage} frames; the pool needs {frames}")]
    StorageTooSmall {
        /// Frames that it has, or can have.
        storage: usize,
        /// Frames that the pool needs, the null block's among them.
        frames: usize,
    },
    /// The storage that was handed over is known to somebody else too, perhaps to another pool: two pools would hand
    /// out the same bytes.
    #[error("the storage is shared; a pool needs one of its own")]
    StorageShared,
    /// Blocks were to be zeroed in a pool that has no bytes of its own.
    #[error("a pool without storage has nothing to zero on free")]
    NothingToZero,
    /// The prefix cache cannot be built so.
    #[error(transparent)]
    Prefix(#[from] PrefixError),
    /// The sizing cannot be met.
    #[error(transparent)]
    Sizing(#[from] SizingError),
    /// The memory could not be had.
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

/// Builds a [`Pool`]. Only the number of blocks must be given.
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

    /// Blocks to start with; the null block comes on top.
    pub fn blocks(mut self, blocks: usize) -> Self {
        self.size = Some(Size::Blocks(blocks));
        self
    }

    /// As many blocks as memory allows, by the usual rule. The null block comes out of the same memory.
    pub fn sizing(mut self, sizing: Sizing) -> Self {
        self.size = Some(Size::By(sizing));
        self
    }

    /// The most blocks that the pool may [grow](Pool::grow) to; without it, it does not grow. Address space is reserved
    /// for so many; memory is taken as it is used.
    pub fn blocks_max(mut self, blocks: usize) -> Self {
        self.blocks_max = Some(blocks);
        self
    }

    /// A low-water reserve: so many of the blocks are set aside for requests of [`Priority::Urgent`](super::Priority), also
    /// those of sequences opened at that priority, which get them when nothing else is left. Contiguous requests do not.
    /// What is freed fills the reserve up first. None unless given.
    pub fn reserve(mut self, blocks: usize) -> Self {
        self.reserve = blocks;
        self
    }

    /// Blocks in a segment: a power of two, 64 or more; 4096 unless given.
    pub fn segment_blocks(mut self, blocks: usize) -> Self {
        self.segment_blocks = blocks;
        self
    }

    /// Blocks in a magazine, 64 at most; 0 goes without magazines. Unless given: by the pool's size, so that all
    /// magazines together keep an eighth of it at most.
    pub fn magazine_blocks(mut self, blocks: usize) -> Self {
        self.magazine_blocks = Some(blocks);
        self
    }

    /// Threads that will allocate, 65,536 at most; the machine's, unless given. More may come; they share regions.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// No null block: every frame can be handed out, frame 0 among them, and tables are padded with -1.
    pub fn without_null_block(mut self) -> Self {
        self.has_null_block = false;
        self
    }

    /// Storage of the caller's: another device, or memory that an engine allocated itself. It must have the pool's
    /// layout, and room for one frame more than there are blocks (the null block's). It becomes the pool's: there may be no
    /// other reference to it yet; [`Pool::storage`] gives some.
    pub fn storage(mut self, storage: Arc<dyn Storage>) -> Self {
        self.backing = Backing::Given(storage);
        self
    }

    /// No bytes at all: the pool manages places, and the engine knows what is there.
    pub fn without_storage(mut self) -> Self {
        self.backing = Backing::None;
        self
    }

    /// No storage: the engine keeps the bytes, and copies frames when blocks move. A copier that does not do as it is
    /// told loses them.
    pub fn engine_copies(mut self, copier: FrameCopier) -> Self {
        self.backing = Backing::Engine(copier);
        self
    }

    /// Fill every block with zeros once nobody owns it and no batch sees it. Blocks for which the storage fails to are held for
    /// good, and counted as [`Stats::unwiped`](crate::pool::Stats::unwiped).
    pub fn zero_on_free(mut self) -> Self {
        self.zero_on_free = true;
        self
    }

    /// How long the request that is first in line may leave its turn unused: a tenth of a second unless given. A future that
    /// was woken, and is not polled within this time, is passed over: the next in line has its turn. The first keeps its
    /// place, and goes before all behind it when it is polled. A thread that frees, allocates, waits with a deadline or compacts
    /// in the background finds it; [`Stats::head_of_line`](crate::pool::Stats::head_of_line) says which request it is.
    ///
    /// `Duration::MAX` keeps the order at any price.
    pub fn turn_patience(mut self, patience: Duration) -> Self {
        self.turn_patience = Some(patience);
        self
    }

    /// The order at which fragmentation is reported: 4 unless given, that is runs of 16.
    pub fn fragmentation_order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// Times one allocation in `every` of a thread's, appends that need blocks among them (rounded
    /// up to a power of two, up to 2^32); 0 times none; 256 unless given.
    pub fn latency_sample(mut self, every: u32) -> Self {
        self.latency_sample = every;
        self
    }

    /// With a prefix cache: blocks of sequences whose tokens are known outlive them, and are found again. Without one,
    /// which is how a pool is built unless told otherwise, nothing is hashed.
    pub fn prefix_cache(mut self, config: PrefixConfig) -> Self {
        self.prefix = Some(config);
        self
    }

    /// Builds the pool.
    ///
    /// # Errors
    ///
    /// [`BuildError`]; nothing was kept.
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
                // What makes a sequence's stores safe is that its blocks' frames are nobody else's.
                if Arc::get_mut(&mut storage).is_none() {
                    return Err(BuildError::StorageShared);
                }
                if *storage.layout() != self.layout {
                    let (storage, pool) = (Box::new(storage.layout().clone()), Box::new(self.layout));
                    return Err(BuildError::OtherLayout { storage, pool });
                }
                for (has, frames) in
                    [(storage.frames(), config.frames), (storage.frames_max(), config.frames_max)]
                {
                    if has < frames {
                        return Err(BuildError::StorageTooSmall { storage: has, frames });
                    }
                }
                Some(storage)
            }
        };
        let scrub = storage.as_ref().filter(|_| self.zero_on_free).map(|storage| -> Scrub {
            // Weak: the blocks live on in the threads that used them, and must not keep the bytes.
            let storage = Arc::downgrade(storage);
            Box::new(move |run| {
                // The pool and its sequences are gone, and nobody can read what is left of it.
                let Some(storage) = storage.upgrade() else { return };
                // SAFETY: the blocks floor passes frames that nobody owns and no batch sees, before it frees them.
                let zeroed = unsafe { storage.zero(&[run]) };
                // What a lost device held nobody reads any more, nor anything that comes after it there.
                if let Err(error) = zeroed.or_else(|error| if error.is_lost() { Ok(()) } else { Err(error) })
                {
                    panic!("{run} of this pool: {error}");
                }
            })
        });
        if let Some(storage) = &storage {
            bytes = Bytes::Storage(storage.clone());
        }
        let block_tokens = self.layout.block_tokens();
        let cache = match self.prefix {
            Some(prefix) => Some(SharedArc::new(PrefixCache::new(
                config.frames,
                config.frames_max,
                block_tokens,
                prefix,
            )?)),
            None => None,
        };
        let blocks = Blocks::with_evictor(
            config,
            scrub,
            cache.clone().map(|cache| Box::new(cache) as Box<dyn Evictor>),
        );
        if let Some(patience) = self.turn_patience {
            blocks.set_turn_patience(patience);
        }
        let sampler = Sampler::new(self.latency_sample);
        // SAFETY: the storage was made here, or nobody else knew it; it gets one pool.
        let sequences = unsafe {
            Sequences::sampled(blocks.clone(), storage.clone(), block_tokens, cache, sampler.clone())
        };
        Ok(Pool(crate::sync::Arc::new(Shared {
            // SAFETY: as above; or the engine says that it copies the frames' bytes.
            compactor: unsafe { Compactor::new(sequences.clone(), bytes, &self.layout, self.order) },
            sequences,
            blocks,
            layout: self.layout,
            storage,
            sampler,
            order: self.order,
        })))
    }

    fn check(&self) -> Result<BlocksConfig, BuildError> {
        let null = self.has_null_block as usize;
        let most = FRAMES_MAX - null;
        let blocks = match self.size.as_ref().ok_or(BuildError::NoBlocks)? {
            Size::Blocks(0) => return Err(BuildError::NoBlocks),
            Size::Blocks(blocks) => *blocks,
            // The null block comes out of the same memory.
            Size::By(sizing) => sizing.frames(&self.layout, 1 + null)? - null,
        };
        let blocks_max = self.blocks_max.unwrap_or(blocks);
        if let Some(&blocks) = [blocks, blocks_max].iter().find(|&&blocks| blocks > most) {
            return Err(BuildError::TooManyBlocks { blocks, max: most });
        }
        if blocks_max < blocks {
            return Err(BuildError::MaxBelowStart { blocks, max: blocks_max });
        }
        if self.reserve >= blocks {
            return Err(BuildError::Reserve { reserve: self.reserve, blocks });
        }
        let segment_frames = self.segment_blocks;
        if !segment_frames.is_power_of_two() || !(FAN..=FRAMES_MAX).contains(&segment_frames) {
            return Err(BuildError::Segment { frames: segment_frames, min: FAN });
        }
        let threads = self.threads.unwrap_or_else(available_parallelism).max(1);
        if threads > THREADS_MAX {
            return Err(BuildError::Threads { threads, max: THREADS_MAX });
        }
        if self.layout.block_tokens() > TOKENS_MAX {
            return Err(BuildError::BlockTokens { tokens: self.layout.block_tokens(), max: TOKENS_MAX });
        }
        let magazine_blocks = self.magazine_blocks.unwrap_or_else(|| magazine_blocks(blocks, threads));
        if magazine_blocks > MAGAZINE_BLOCKS_MAX {
            return Err(BuildError::Magazine { blocks: magazine_blocks, max: MAGAZINE_BLOCKS_MAX });
        }
        let order_max = crate::config::FRAME_BITS as u8;
        if self.order.0 > order_max {
            return Err(BuildError::Order { order: self.order.0, max: order_max });
        }
        if self.zero_on_free && matches!(self.backing, Backing::None | Backing::Engine(_)) {
            return Err(BuildError::NothingToZero);
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
