use std::sync::Arc;
use std::time::Duration;

use crate::block::{Blocks, BlocksConfig, Evictor, Sampler, Scrub};
use crate::compact::{Bytes, Compactor, FrameCopier};
use crate::error::Invalid;
use crate::hints::HintLimits;
use crate::ids::{DeviceId, Order, TenantId};
use crate::migrate::Transfers;
use crate::prefix::{CACHE_GROUPS_MAX, PrefixConfig};
use crate::sequence::{ListKind, Sequences, TOKENS_MAX, Window};
use crate::storage::groups::common_multiple;
use crate::storage::{HostStorage, KvLayout, Sizing, Storage};
use crate::sync::Arc as SharedArc;
use crate::tenants::TenantLimits;

use super::Pool;
use super::build_error::BuildError;
use super::cache::{shared_cache, shared_tenants};
use super::hints::check_limits;
use super::pool::Shared;
use super::scrub::{FrameScrub, SharedScrub};
use super::shape::{Shape, at_most};

const LATENCY_SAMPLE: u32 = 256;

/// Maximum number of groups of layers.
const GROUPS_MAX: usize = 64;
const _: () = assert!(2 * GROUPS_MAX <= CACHE_GROUPS_MAX);

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
    shape: Shape,
    backing: Backing,
    zero_on_free: bool,
    turn_patience: Option<Duration>,
    latency_sample: u32,
    prefix: Option<PrefixConfig>,
    hints: Option<HintLimits>,
    tenants: Option<Vec<(TenantId, TenantLimits)>>,
    /// The window of each group of layers.
    windows: Vec<Option<Window>>,
    /// The tokens of a block in each group of layers, unless those of the layout.
    list_tokens: Option<Vec<usize>>,
    /// The frames of each state.
    states: Vec<usize>,
    /// Those of a [layered](Pool::layered) pool, which are not to be set again.
    layered: Option<Lists>,
}

/// The lists of a sequence.
#[derive(PartialEq, Eq)]
struct Lists {
    windows: Vec<Option<Window>>,
    tokens: Vec<usize>,
    states: Vec<usize>,
}

impl Pool {
    /// Returns a builder of a pool for blocks of this layout.
    pub fn builder(layout: KvLayout) -> PoolBuilder {
        PoolBuilder::new(layout)
    }
}

impl PoolBuilder {
    fn new(layout: KvLayout) -> Self {
        Self {
            layout,
            size: None,
            shape: Shape::default(),
            backing: Backing::Host,
            zero_on_free: false,
            turn_patience: None,
            latency_sample: if cfg!(kvpool_loom) { 0 } else { LATENCY_SAMPLE },
            prefix: None,
            hints: None,
            tenants: None,
            windows: vec![None],
            list_tokens: None,
            states: Vec::new(),
            layered: None,
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

    /// Sets the size up to which the pool may [grow](Pool::grow); by default it cannot grow.
    /// Reserves address space for this many blocks; memory is taken as it is used.
    pub fn blocks_max(mut self, blocks: usize) -> Self {
        self.shape.blocks_max = Some(blocks);
        self
    }

    /// Sets the number of blocks kept in reserve for requests of
    /// [`Priority::Urgent`](super::Priority), and of sequences opened at that priority; none by
    /// default. They use it when no other block is left, unless they are contiguous. Freed blocks
    /// refill it first.
    pub fn reserve(mut self, blocks: usize) -> Self {
        self.shape.reserve = blocks;
        self
    }

    /// Sets the number of blocks per segment: a power of two, at least 64; 4096 by default.
    pub fn segment_blocks(mut self, blocks: usize) -> Self {
        self.shape.segment_blocks = blocks;
        self
    }

    /// Sets the number of blocks per magazine: at most 64; 0 disables magazines. By default all
    /// magazines together hold at most an eighth of the pool.
    pub fn magazine_blocks(mut self, blocks: usize) -> Self {
        self.shape.magazine_blocks = Some(blocks);
        self
    }

    /// Sets the expected number of allocating threads, at most 65,536; by default the number of
    /// CPUs. Further threads share regions.
    pub fn threads(mut self, threads: usize) -> Self {
        self.shape.threads = Some(threads);
        self
    }

    /// Builds the pool without a null block: frame 0 is allocated like any other, and tables are
    /// padded with -1.
    pub fn without_null_block(mut self) -> Self {
        self.shape.has_null_block = false;
        self
    }

    /// Uses the caller's storage, on another device or in an engine's memory. It must have the
    /// pool's layout, one frame more than there are blocks (for the null block), and no other
    /// reference.
    pub fn storage(mut self, storage: Arc<dyn Storage>) -> Self {
        self.backing = Backing::Given(storage);
        self
    }

    /// Keeps the bytes in host memory, as by default, but not for a [layered](Pool::layered) pool.
    pub fn host_storage(mut self) -> Self {
        self.backing = Backing::Host;
        self
    }

    /// Builds the pool without storage: it manages frames only, and the engine holds the bytes.
    pub fn without_storage(mut self) -> Self {
        self.backing = Backing::None;
        self
    }

    /// Builds the pool without storage, and copies frames through the engine when blocks move. A
    /// copier that does not make the requested copies loses the blocks' contents.
    pub fn engine_copies(mut self, copier: FrameCopier) -> Self {
        self.backing = Backing::Engine(copier);
        self
    }

    /// Fills every block with zeros once it is unowned and no batch can read it. A block that the
    /// storage fails to wipe is held permanently, and counted in
    /// [`Stats::unwiped`](crate::pool::Stats::unwiped).
    pub fn zero_on_free(mut self) -> Self {
        self.zero_on_free = true;
        self
    }

    /// Sets how long the first request in the queue may leave its turn unused; 100 ms by default.
    ///
    /// If a future is woken and not polled within this time, the next request gets the turn. The
    /// first request keeps its place, and is served first once it is polled. Threads that free,
    /// allocate, wait with a deadline or compact in the background detect this. The same holds for
    /// the turn of a [compactor run](crate::Pool::defragment) or a [resize](crate::Pool::resize)
    /// while it is not copying. `Duration::MAX` never lets another request overtake.
    pub fn turn_patience(mut self, patience: Duration) -> Self {
        self.turn_patience = Some(patience);
        self
    }

    /// Sets the order at which fragmentation is reported; 4 by default, which is runs of 16.
    pub fn fragmentation_order(mut self, order: Order) -> Self {
        self.shape.order = order;
        self
    }

    /// Times one allocation in `every` per thread, including appends that need blocks: rounded up
    /// to a power of two, at most 2^32; 0 disables the timing; 256 by default.
    pub fn latency_sample(mut self, every: u32) -> Self {
        self.latency_sample = every;
        self
    }

    /// Adds a prefix cache: blocks of known tokens outlive their sequences and can be hit again. By
    /// default a pool has no prefix cache, and hashes nothing.
    pub fn prefix_cache(mut self, config: PrefixConfig) -> Self {
        self.prefix = Some(config);
        self
    }

    /// Takes [hints](crate::hints) about sessions and cached blocks, within these limits. Needs a
    /// prefix cache. Costs 24 bytes for each block of the last request of each session.
    pub fn hints(mut self, limits: HintLimits) -> Self {
        self.hints = Some(limits);
        self
    }

    /// Gives the pool [tenants](crate::tenants) with these limits; further ones can be added by
    /// [`Pool::set_tenant`]. Needs a prefix cache. Costs 2 bytes per block, and some counting in
    /// calls that allocate, hit, release or evict blocks.
    pub fn tenants(mut self, limits: impl IntoIterator<Item = (TenantId, TenantLimits)>) -> Self {
        self.tenants = Some(limits.into_iter().collect());
        self
    }

    /// Sets the attention window of all layers: sequences give up the blocks behind it, and a hit
    /// needs only the blocks of the window before its boundary. Requires the null block, which
    /// stands in their place in tables. An append or reservation gives them up before it takes
    /// blocks, also if it is then refused.
    ///
    /// ```
    /// use kvpool::{KvLayout, Pool, SequenceId, Window};
    ///
    /// let layout = KvLayout::named("tiny")?; // blocks of 4 tokens
    /// let pool = Pool::builder(layout).blocks(100).window(Window::new(8)?).build()?;
    /// let mut sequence = pool.sequence(SequenceId(7)).open()?;
    /// for _ in 0..1_000 {
    ///     let mut batch = pool.begin_batch();
    ///     batch.append(&mut sequence, 1)?;
    ///     batch.finish();
    /// }
    /// assert_eq!((sequence.block_count(), sequence.blocks_given_up()), (250, 247));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn window(self, window: Window) -> Self {
        self.groups([Some(window)])
    }

    /// Divides the layers of the model into groups that share the pool's memory: each has its own
    /// attention window, or keeps all tokens. A block of any group is one frame, of the pool's
    /// layout: a layout of the layers of one group.
    ///
    /// Sequences have a list of blocks in each group, one length and one hit: they are opened by
    /// [`Pool::admit_grouped`], and grow by
    /// [`Batch::append_grouped`](crate::Batch::append_grouped). Calls for
    /// sequences of one list are refused. Of a model whose groups have unequal numbers of layers, a
    /// larger group is passed as several of the size of the smallest.
    ///
    /// [`build`](Self::build) requires 1 to 64 groups, and the null block, which tables show in
    /// place of blocks that were given up, if one of them has a window.
    ///
    /// ```
    /// use kvpool::{AdmitRequest, BlockTable, KvLayout, Pool, SequenceId, Tokens, Window};
    ///
    /// // gpt-oss-120b: 18 layers with a window of 128 tokens, and 18 that keep all.
    /// let layout = KvLayout::builder().layers(18).kv_heads(8).head_dim(64).build()?;
    /// let pool = Pool::builder(layout)
    ///     .blocks(400)
    ///     .without_storage()
    ///     .groups([Some(Window::new(128)?), None])
    ///     .build()?;
    /// let prompt: Vec<u32> = (0..1_600).collect();
    /// let mut sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(7), &prompt).chunk(512))?;
    /// while sequence.len() < prompt.len() {
    ///     let mut batch = pool.begin_batch();
    ///     batch.append_grouped(&mut sequence, Tokens::Final(400))?;
    ///     let mut tables = [BlockTable::new(), BlockTable::new()];
    ///     for (group, table) in tables.iter_mut().enumerate() {
    ///         batch.block_table([sequence.group(group)], table)?;
    ///     }
    ///     batch.finish();
    /// }
    /// let held = |group| sequence.group(group).block_count() - sequence.group(group).blocks_given_up();
    /// assert_eq!([held(0), held(1)], [33, 100]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn groups(mut self, windows: impl IntoIterator<Item = Option<Window>>) -> Self {
        self.windows = windows.into_iter().collect();
        self
    }

    /// Sets the tokens of a block in each [group](Self::groups), where the layers of one have fewer
    /// bytes per token than those of another. Default: those of the layout in all. A pool with
    /// storage copies and moves such blocks, but only the engine knows what lies in them: they are
    /// not [stored](crate::Batch::store), loaded or lent out as tiles.
    ///
    /// Tables, slots and [`Sequence::block_tokens`](crate::Sequence::block_tokens) of a group count
    /// in its own tokens. A prefix is hit up to a boundary of blocks in every group, so at
    /// multiples of the least common multiple, which must not exceed the maximum length of a
    /// sequence.
    ///
    /// ```
    /// use kvpool::{AdmitRequest, BlockTable, KvLayout, Pool, SequenceId, Tokens, Window};
    ///
    /// // Layers with a window have twice the bytes per token of those that keep all tokens.
    /// let layout = KvLayout::builder().layers(5).kv_heads(8).head_dim(256).block_tokens(16).build()?;
    /// let groups = [Some(Window::new(128)?), None];
    /// let builder = Pool::builder(layout).blocks(1_000).without_storage();
    /// let pool = builder.groups(groups).list_tokens([16, 32]).build()?;
    /// let prompt = vec![7; 100];
    /// let mut sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(7), &prompt))?;
    /// let mut batch = pool.begin_batch();
    /// batch.append_grouped(&mut sequence, Tokens::Final(100))?;
    /// let blocks = |group| sequence.group(group).block_count();
    /// assert_eq!((blocks(0), blocks(1)), (7, 4));
    /// # batch.finish();
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn list_tokens(mut self, tokens: impl IntoIterator<Item = usize>) -> Self {
        self.list_tokens = Some(tokens.into_iter().collect());
        self
    }

    /// Adds layers that keep one state of a sequence, whatever its length: each item is the number
    /// of frames of one. Each sequence then holds that many consecutive frames for it, beside its
    /// blocks in the [groups](Self::groups).
    ///
    /// Sequences are opened by [`Pool::admit_grouped`]. [`GroupedSequence::state`] names the
    /// frames, and they stay there. A prefix is hit where its states were kept: by
    /// [`Batch::checkpoint`](crate::Batch::checkpoint), and when a sequence is closed at the end of
    /// a block. A pool with storage makes the copies itself;
    /// [`Batch::store_state`](crate::Batch::store_state) writes the bytes there.
    ///
    /// [`GroupedSequence::state`]: crate::GroupedSequence::state
    ///
    /// ```
    /// use kvpool::{AdmitRequest, KvLayout, Pool, SequenceId, Tokens, prefix::PrefixConfig};
    ///
    /// let layout = KvLayout::builder().layers(16).kv_heads(4).head_dim(256).block_tokens(16).build()?;
    /// let pool = Pool::builder(layout)
    ///     .blocks(1_000)
    ///     .without_storage()
    ///     .prefix_cache(PrefixConfig::new())
    ///     .states([147])
    ///     .build()?;
    /// let prompt: Vec<u32> = (0..1_000).collect();
    /// let mut sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(7), &prompt))?;
    /// assert_eq!(sequence.state(0).len(), 147);
    /// // The state can be kept behind 992 tokens: the last one of a prompt is always computed.
    /// let cut = sequence.next_cut().expect("a boundary of blocks within the prompt");
    /// let mut batch = pool.begin_batch();
    /// batch.append_grouped(&mut sequence, Tokens::Announced(cut))?;
    /// // ... kernels run, then the engine makes the copies ...
    /// let copies = batch.checkpoint(&mut sequence)?;
    /// assert_eq!((cut, copies[0].frames.len()), (992, 147));
    /// batch.append_grouped(&mut sequence, Tokens::Announced(8))?;
    /// batch.finish();
    /// drop(sequence);
    /// let mut again = pool.admit_grouped(&AdmitRequest::new(SequenceId(8), &prompt))?;
    /// assert_eq!(again.len(), 992);
    /// // The first append names the copies that restore the state.
    /// let mut batch = pool.begin_batch();
    /// assert_eq!(batch.append_grouped(&mut again, Tokens::Announced(8))?.copies.len(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn states(mut self, frames: impl IntoIterator<Item = usize>) -> Self {
        self.states = frames.into_iter().collect();
        self
    }

    /// Returns the layout of a frame, for a [storage](Self::storage).
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Returns the window of each list of blocks that a sequence has; `None` keeps all tokens.
    pub fn windows(&self) -> &[Option<Window>] {
        &self.windows
    }

    /// Returns the tokens of a block in each list of blocks that a sequence has.
    pub fn tokens_per_block(&self) -> Vec<usize> {
        match &self.list_tokens {
            Some(tokens) => tokens.clone(),
            None => vec![self.layout.block_tokens(); self.windows.len()],
        }
    }

    pub(super) fn layered(mut self) -> Self {
        self.layered = Some(self.lists());
        self
    }

    fn lists(&self) -> Lists {
        Lists { windows: self.windows.clone(), tokens: self.tokens_per_block(), states: self.states.clone() }
    }

    /// Builds the pool.
    pub fn build(self) -> Result<Pool, BuildError> {
        let config = self.check()?;
        let kind = |(&window, &tokens)| ListKind { window, block_tokens: tokens as u32 };
        let kinds: Vec<_> = self.windows.iter().zip(&self.tokens_per_block()).map(kind).collect();
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
                // Stores through sequences are safe because no one else can access their frames.
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
        let tenants = shared_tenants(&config, self.tenants.as_deref(), self.layout.bytes_per_block())?;
        let cache = match self.prefix {
            Some(prefix) => Some(shared_cache(&config, &kinds, prefix, tenants.clone())?),
            None => None,
        };
        let blocks = Blocks::with_tenants(
            config,
            scrub.clone().map(|scrub| Box::new(SharedScrub(scrub)) as Box<dyn Scrub>),
            cache.clone().map(|cache| Box::new(cache) as Box<dyn Evictor>),
            tenants,
        );
        if let Some(scrub) = scrub {
            scrub.serve(&blocks);
        }
        if let Some(patience) = self.turn_patience {
            blocks.set_turn_patience(patience);
        }
        let hints = self.hints.map(|limits| (limits, self.layout.bytes_per_block() as u64));
        let sampler = Sampler::new(self.latency_sample, blocks.latencies().clone());
        // SAFETY: the storage was created here, or had no other reference; it serves one pool.
        let sequences = unsafe {
            Sequences::sampled(
                blocks.clone(),
                storage.clone(),
                (&kinds, &self.states),
                (cache, hints),
                sampler.clone(),
            )
        };
        // SAFETY: as above; or the engine promises to copy the frames' bytes.
        let pool =
            unsafe { assemble(sequences, blocks, self.layout, storage, bytes, sampler, self.shape.order) };
        #[cfg(not(kvpool_loom))]
        pool.own_sequences();
        Ok(pool)
    }

    fn check(&self) -> Result<BlocksConfig, Invalid> {
        let blocks = match &self.size {
            None => 0,
            Some(Size::Blocks(blocks)) => *blocks,
            Some(Size::By(sizing)) => {
                let null = self.shape.has_null_block as usize;
                sizing.frames(&self.layout, 1 + null)? - null
            }
        };
        if let Some(limits) = &self.hints {
            let has = (self.prefix.is_some(), self.tenants.is_some());
            check_limits(limits, has, (blocks, self.layout.bytes_per_block()))?;
        }
        if self.tenants.is_some() && self.prefix.is_none() {
            let limit = "a pool with `prefix_cache`";
            return Err(Invalid::new("tenants", "a pool without a prefix cache", limit));
        }
        at_most("block_tokens", self.layout.block_tokens(), TOKENS_MAX)?;
        if !(1..=GROUPS_MAX).contains(&self.windows.len()) {
            let limit = format_args!("from 1 to {GROUPS_MAX}");
            return Err(Invalid::new("groups", self.windows.len(), limit));
        }
        if let Some(tokens) = &self.list_tokens {
            self.check_list_tokens(tokens)?;
        }
        if self.layered.as_ref().is_some_and(|lists| *lists != self.lists()) {
            return Err(Invalid::new("groups", "set after `layered`", "the groups of the model"));
        }
        if self.windows.iter().any(Option::is_some) && !self.shape.has_null_block {
            return Err(Invalid::new("window", "a pool without a null block", "a pool with one"));
        }
        let has_storage = !matches!(self.backing, Backing::None | Backing::Engine(_));
        if !self.states.is_empty() {
            let refused = |got: &dyn std::fmt::Display, limit| Err(Invalid::new("states", got, limit));
            if self.states.len() > GROUPS_MAX {
                let limit = format_args!("at most {GROUPS_MAX}");
                return Err(Invalid::new("states", self.states.len(), limit));
            }
            let most = blocks.min(TOKENS_MAX / self.tokens_per_block()[0]);
            if let Some(at) = self.states.iter().position(|frames| !(1..=most).contains(frames)) {
                let limit = format_args!("from 1 to {most} frames");
                return Err(Invalid::new("states", self.states[at], limit).at(at));
            }
            let all = self.states.iter().sum::<usize>();
            if all > blocks {
                return refused(&format_args!("{all} frames in all"), "at most as many as the pool has");
            }
        }
        if self.zero_on_free && !has_storage {
            return Err(Invalid::new("zero_on_free", "a pool without storage", "a pool with storage"));
        }
        let device = match &self.backing {
            Backing::Given(storage) => storage.device(),
            _ => DeviceId::Host,
        };
        let config = self.shape.check(blocks, device)?;
        Ok(BlocksConfig { run_frames: self.states.iter().sum(), ..config })
    }
}

impl PoolBuilder {
    fn check_list_tokens(&self, tokens: &[usize]) -> Result<(), Invalid> {
        let refused =
            |got: &dyn std::fmt::Display, limit: String| Err(Invalid::new("list_tokens", got, limit));
        if tokens.len() != self.windows.len() {
            return refused(&tokens.len(), format!("{}, one for each group", self.windows.len()));
        }
        if let Some(at) = tokens.iter().position(|tokens| !(1..=TOKENS_MAX).contains(tokens)) {
            let limit = format_args!("from 1 to {TOKENS_MAX}");
            return Err(Invalid::new("list_tokens", tokens[at], limit).at(at));
        }
        // A prompt is hit at multiples of it.
        let multiple = tokens.iter().fold(1, |one, &other| common_multiple(one, other as u64));
        if multiple > TOKENS_MAX as u64 {
            let got = format_args!("{tokens:?}, with the least common multiple {multiple}");
            return refused(&got, format!("at most {TOKENS_MAX}"));
        }
        Ok(())
    }
}

/// # Safety
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
