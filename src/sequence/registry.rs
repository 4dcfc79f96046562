//! The open sequences of a pool by id, and views of them.

use std::fmt;
use std::time::{Duration, Instant};

use crate::block::{Accounts, Blocks, Priority, Sampler};
use crate::clock::BatchRef;
use crate::error::{SequenceError, StorageError};
use crate::hints::HintLimits;
use crate::ids::{BlockId, SequenceId, Ticket};
use crate::prefix::PrefixCache;
use crate::storage::groups::common_multiple;
use crate::storage::{DeviceStream, Storage};
use crate::sync::{Arc, AtomicU64, Map, Ordering::*, StatisticU64, call, fence_after_rmw};

use super::abandoned::Abandoned;
use super::closing::Closing;
use super::hinted::Hinted;
use super::list::{BlockList, ListOwner};
use super::sessions::Sessions;
use super::window::{ListKind, NULL};

/// Number of preempted sequences that are remembered: most come back soon, or never.
const PREEMPTED_MAX: usize = 1 << 16;

/// The open sequences of one pool. A clone refers to the same sequences.
#[derive(Clone)]
pub struct Sequences(pub(super) Arc<Shared>);

pub(super) struct Shared {
    pub(super) blocks: Blocks,
    pub(super) storage: Option<std::sync::Arc<dyn Storage>>,
    /// The list in each group of layers. A window requires a null block.
    kinds: Box<[ListKind]>,
    /// By list, whether it leaves whole units to the others.
    short: Box<[bool]>,
    has_windows: bool,
    /// The least common multiple of the tokens of their blocks.
    boundary_tokens: usize,
    /// The frames of the state of each group of layers that keeps one.
    states: Box<[usize]>,
    pub(super) cache: Option<Arc<PrefixCache>>,
    pub(super) sampler: Sampler,
    pub(super) abandoned: Abandoned,
    pub(super) closing: Closing,
    open: Map<SequenceId, Open>,
    /// Closed sequences that were preempted and have not come back.
    preempted: Map<SequenceId, ()>,
    pub(super) sessions: Sessions,
    pub(super) hinted: Option<Box<Hinted>>,
    pinned: Map<u64, (PinnedInfo, std::sync::Arc<[BlockId]>)>,
    /// Number of references that batches hold until their copies on write are done.
    pub(super) copying: StatisticU64,
    pins: AtomicU64,
    /// The pool above, set and read only by its module.
    #[cfg(not(kvpool_loom))]
    owner: std::sync::OnceLock<Owner>,
}

/// What a [`PinnedPrefix`](super::PinnedPrefix) holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PinnedInfo {
    /// Number of the pin, in the order of their creation.
    pub number: u64,
    /// Number of tokens in the pinned blocks.
    pub tokens: usize,
    /// Number of pinned blocks. A block of several pinned prefixes counts in each.
    pub blocks: usize,
    /// When it was pinned.
    pub since: Instant,
}

/// A weak reference to the pool above, whose type this module does not know.
#[cfg(not(kvpool_loom))]
pub(crate) type Owner = std::sync::Weak<dyn std::any::Any + Send + Sync>;

#[derive(Clone)]
struct Open {
    list: Arc<BlockList>,
    /// The lists in the other groups of layers.
    others: Option<std::sync::Arc<[Arc<BlockList>]>>,
    priority: Priority,
    opened: Ticket,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Threads that used the pool keep its blocks and cache alive until they end. But cached
        // blocks are unreachable now, so no more events can follow.
        if let Some(cache) = &self.cache {
            cache.events().close();
        }
    }
}

impl Sequences {
    /// Creates a registry without open sequences. `storage` holds the bytes of `blocks`, if any.
    ///
    /// # Panics
    /// If `block_tokens` is zero or exceeds the maximum length of a sequence.
    ///
    /// # Safety
    /// Only `blocks` hands out the frames of `storage`: [stores](super::Batch::store) rely on it.
    pub unsafe fn new(
        blocks: Blocks,
        storage: Option<std::sync::Arc<dyn Storage>>,
        block_tokens: usize,
    ) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self::with_cache(blocks, storage, block_tokens, None) }
    }

    /// As [`new`](Self::new), with the prefix cache that keeps these blocks.
    ///
    /// # Safety
    /// As [`new`](Self::new).
    pub unsafe fn with_cache(
        blocks: Blocks,
        storage: Option<std::sync::Arc<dyn Storage>>,
        block_tokens: usize,
        cache: Option<Arc<PrefixCache>>,
    ) -> Self {
        assert!(
            block_tokens > 0 && block_tokens <= super::TOKENS_MAX,
            "invalid block size: {block_tokens} tokens"
        );
        let kind = ListKind { window: None, block_tokens: block_tokens as u32 };
        let sampler = Sampler::new(0, blocks.latencies().clone());
        // SAFETY: guaranteed by the caller.
        unsafe { Self::sampled(blocks, storage, (&[kind], &[]), (cache, None), sampler) }
    }

    /// As [`with_cache`](Self::with_cache), with the list in each group of layers (for a window,
    /// the pool has a null block), the frames of each state, the limits of hints with the bytes of
    /// a block, and a sampler of allocation times.
    ///
    /// # Safety
    /// As [`new`](Self::new).
    pub(crate) unsafe fn sampled(
        blocks: Blocks,
        storage: Option<std::sync::Arc<dyn Storage>>,
        (kinds, states): (&[ListKind], &[usize]),
        (cache, hints): (Option<Arc<PrefixCache>>, Option<(HintLimits, u64)>),
        sampler: Sampler,
    ) -> Self {
        let has_windows = kinds.iter().any(|kind| kind.window.is_some());
        assert!(!has_windows || blocks.null_block() == Some(NULL), "a window needs a null block");
        let tokens = kinds.iter().map(|kind| u64::from(kind.block_tokens));
        let boundary_tokens = tokens.fold(1, common_multiple) as usize;
        let hinted = hints.map(|(limits, block_bytes)| Hinted::new(limits, block_bytes, blocks.total()));
        Self(Arc::new(Shared {
            blocks,
            storage,
            kinds: kinds.into(),
            short: ListKind::short_of(kinds),
            has_windows,
            boundary_tokens,
            states: states.into(),
            cache,
            sampler,
            abandoned: Abandoned::default(),
            closing: Closing::default(),
            open: Map::new(),
            preempted: Map::new(),
            sessions: Sessions::new(),
            hinted: hinted.map(Box::new),
            pinned: Map::new(),
            copying: StatisticU64::default(),
            pins: AtomicU64::new(1),
            #[cfg(not(kvpool_loom))]
            owner: std::sync::OnceLock::new(),
        }))
    }

    #[cfg(not(kvpool_loom))]
    pub(crate) fn set_owner(&self, owner: Owner) {
        let _ = self.0.owner.set(owner);
    }

    #[cfg(not(kvpool_loom))]
    pub(crate) fn owner(&self) -> Option<&Owner> {
        self.0.owner.get()
    }

    pub(super) fn check_stream(&self, stream: &DeviceStream) -> Result<(), StorageError> {
        match &self.0.storage {
            Some(storage) => self.noting_loss(storage.check_stream(stream)),
            None => {
                Err(StorageError::ForeignStream { stream: stream.device(), storage: self.0.blocks.device() })
            }
        }
    }

    /// Poisons the pool if the outcome reports a lost device.
    pub(super) fn noting_loss<T>(&self, outcome: Result<T, StorageError>) -> Result<T, StorageError> {
        if outcome.as_ref().is_err_and(StorageError::is_lost) {
            self.0.blocks.poison();
        }
        outcome
    }

    /// Returns a view of an open sequence, for threads other than its owner's.
    pub fn view(&self, id: SequenceId) -> Option<SequenceView> {
        self.0.open.get(&id).map(|open| self.view_of(id, open))
    }

    fn view_of(&self, id: SequenceId, open: Open) -> SequenceView {
        let Open { list, others, priority, opened } = open;
        SequenceView { sequences: self.clone(), id, list, others, priority, opened }
    }

    pub(crate) fn unfinished(&self) -> (u64, usize) {
        (self.0.abandoned.count(), self.0.closing.len())
    }

    /// Closes the sequences that waited for a batch, after it has ended.
    pub(crate) fn batch_ended(&self, batch: BatchRef) {
        // Pairs with the fence in `Closing::add`. The end changed the clock's word.
        fence_after_rmw();
        self.0.closing.look(batch, self.0.blocks.clock());
    }

    /// Returns a block for each reference of closed sequences that wait for batches.
    pub(crate) fn closing_blocks(&self) -> Vec<BlockId> {
        self.0.closing.blocks()
    }

    /// Returns the number of open sequences.
    pub fn count(&self) -> usize {
        self.0.open.len()
    }

    internal! {
        /// Returns the blocks of the pool.
        fn blocks(&self) -> &Blocks {
            &self.0.blocks
        }
    }

    /// Returns a view of each list of every open sequence, ordered by id and group.
    pub(crate) fn list_views(&self) -> Vec<SequenceView> {
        let groups = 0..self.0.kinds.len();
        self.views().iter().flat_map(|view| groups.clone().filter_map(|group| view.group(group))).collect()
    }

    /// Returns a view of every open sequence, ordered by id.
    pub fn views(&self) -> Vec<SequenceView> {
        let mut open = self.0.open.entries();
        open.sort_unstable_by_key(|(id, _)| *id);
        open.into_iter().map(|(id, open)| self.view_of(id, open)).collect()
    }

    /// Returns the prefix cache, if there is one.
    pub fn cache(&self) -> Option<&Arc<PrefixCache>> {
        self.0.cache.as_ref()
    }

    /// Returns the number of tokens per block, in the first group of layers.
    pub fn block_tokens(&self) -> usize {
        self.0.kinds[0].block_tokens as usize
    }

    /// Returns the number of tokens of which a boundary of blocks in all groups is a multiple.
    pub(super) fn boundary_tokens(&self) -> usize {
        self.0.boundary_tokens
    }

    #[inline]
    pub(super) fn is_short(&self, list: u32) -> bool {
        self.0.short.get(list as usize).is_some_and(|&is_short| is_short)
    }

    /// Returns the list in each group of layers.
    pub(crate) fn kinds(&self) -> &[ListKind] {
        &self.0.kinds
    }

    /// Returns the frames of the state of each group of layers that keeps one.
    pub fn states(&self) -> &[usize] {
        &self.0.states
    }

    /// Returns whether sequences have one list, of one group of layers.
    pub(crate) fn has_one_list(&self) -> bool {
        self.0.kinds.len() == 1 && self.0.states.is_empty()
    }

    pub(super) fn has_windows(&self) -> bool {
        self.0.has_windows
    }

    /// Returns whether a listed block is the null block, in place of one that was given up.
    #[inline]
    pub(super) fn is_null(&self, id: BlockId) -> bool {
        id == NULL && self.0.has_windows
    }

    /// Returns the storage, if the pool keeps bytes.
    pub fn storage(&self) -> Option<&std::sync::Arc<dyn Storage>> {
        self.0.storage.as_ref()
    }

    pub(crate) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Remembers that a sequence was preempted, unless there are too many, until it comes back.
    pub(super) fn note_preempted(&self, id: SequenceId) {
        let preempted = &self.0.preempted;
        if preempted.len() >= PREEMPTED_MAX {
            preempted.entries().iter().for_each(|(id, ())| preempted.remove(id));
        }
        preempted.insert_new(id, ());
    }

    pub(super) fn take_preempted(&self, id: SequenceId) -> bool {
        self.0.preempted.get(&id).inspect(|()| self.0.preempted.remove(&id)).is_some()
    }

    pub(super) fn list_pinned(&self, tokens: usize, blocks: &[BlockId]) -> u64 {
        // Relaxed: only uniqueness matters.
        let number = self.0.pins.fetch_add(1, Relaxed);
        let info = PinnedInfo { number, tokens, blocks: blocks.len(), since: Instant::now() };
        self.0.pinned.insert_new(number, (info, blocks.into()));
        number
    }

    pub(super) fn unlist_pinned(&self, number: u64) {
        self.0.pinned.remove(&number);
    }

    pub(crate) fn pinned_prefixes(&self) -> Vec<PinnedInfo> {
        let mut pinned = self.0.pinned.entries();
        pinned.sort_unstable_by_key(|&(number, _)| number);
        pinned.into_iter().map(|(_, (info, _))| info).collect()
    }

    pub(crate) fn accounts(&self) -> Accounts {
        let unlisted = self.0.copying.load(Relaxed) as usize;
        let mut accounts = Accounts { listed: Vec::new(), unlisted, lists_shared: unlisted == 0 };
        for view in self.views() {
            accounts.listed.extend(view.blocks());
            accounts.unlisted += view.reserved_blocks();
        }
        self.0.pinned.entries().iter().for_each(|(_, (_, blocks))| accounts.listed.extend(&**blocks));
        accounts.listed.extend(self.closing_blocks());
        accounts
    }

    pub(super) fn register(&self, id: SequenceId, priority: Priority) -> Result<ListOwner, SequenceError> {
        self.check_one_group(id)?;
        let owner = ListOwner::new(self.0.kinds[0].block_tokens);
        let opened = self.0.blocks.clock().newest();
        let (list, others) = (owner.list().clone(), None);
        if self.0.open.insert_new(id, Open { list, others, priority, opened }) {
            Ok(owner)
        } else {
            Err(SequenceError::AlreadyOpen { id })
        }
    }

    /// Creates the lists of [`register_grouped`](Self::register_grouped), without an id.
    pub(super) fn unregistered(&self) -> Vec<ListOwner> {
        let of_states = std::iter::repeat_n(&self.0.kinds[0], 2 * self.0.states.len());
        let kinds = self.0.kinds.iter().chain(of_states);
        kinds.map(|kind| ListOwner::new(kind.block_tokens)).collect()
    }

    /// Opens a list in each group of layers, and then two for each state, under one id: of its run,
    /// and of the checkpoint with which it begins.
    pub(super) fn register_grouped(
        &self,
        id: SequenceId,
        priority: Priority,
    ) -> Result<Vec<ListOwner>, SequenceError> {
        let owners = self.unregistered();
        let mut lists = owners.iter().map(|owner| owner.list().clone());
        let list = lists.next().expect("a pool has a group of layers");
        let opened = self.0.blocks.clock().newest();
        if self.0.open.insert_new(id, Open { list, others: Some(lists.collect()), priority, opened }) {
            Ok(owners)
        } else {
            Err(SequenceError::AlreadyOpen { id })
        }
    }

    /// Returns an error if the pool has several groups of layers, for a call that knows one list.
    pub(crate) fn check_one_group(&self, id: SequenceId) -> Result<(), SequenceError> {
        if self.has_one_list() {
            return Ok(());
        }
        let groups = self.0.kinds.len() + self.0.states.len();
        let limit = format_args!("a pool with one group of layers; this one has {groups}");
        Err(SequenceError::invalid(id, "call", "one for a sequence of one list", limit))
    }

    pub(super) fn unregister(&self, id: SequenceId) {
        self.0.open.remove(&id);
    }
}

impl fmt::Debug for Sequences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sequences")
            .field("pool", &self.0.blocks.tag())
            .field("kinds", &self.0.kinds)
            .finish_non_exhaustive()
    }
}

/// A view of a sequence, for threads other than its owner's. Each read is of some moment during the
/// call; the sequence is empty once it is closed and its writers' batches have ended. With a
/// [window](crate::Window), a table may show the null block for tokens that left it during the
/// read, also if they are in the window of the length that was read.
#[derive(Clone)]
pub struct SequenceView {
    pub(super) sequences: Sequences,
    id: SequenceId,
    pub(super) list: Arc<BlockList>,
    others: Option<std::sync::Arc<[Arc<BlockList>]>>,
    priority: Priority,
    opened: Ticket,
}

impl SequenceView {
    /// Returns the id of the sequence.
    pub fn id(&self) -> SequenceId {
        self.id
    }

    /// Returns the priority of the sequence.
    pub fn priority(&self) -> Priority {
        self.priority
    }

    /// Returns the newest batch when the sequence was opened, or 0: a larger ticket is younger.
    pub fn opened(&self) -> Ticket {
        self.opened
    }

    /// Returns a view of its list in a group of layers; of the first, it is what tables show of
    /// this view. `None`: the pool has no such group, apart from those that keep a state.
    pub fn group(&self, group: usize) -> Option<Self> {
        if group >= self.sequences.kinds().len() {
            return None;
        }
        let list = match group {
            0 => &self.list,
            _ => self.others.as_deref()?.get(group - 1)?,
        };
        Some(Self { list: list.clone(), others: None, ..self.clone() })
    }

    pub(super) fn lists(&self) -> impl Iterator<Item = &BlockList> {
        std::iter::once(&*self.list)
            .chain(self.others.as_deref().unwrap_or_default().iter().map(|list| &**list))
    }

    /// Returns the number of its tokens, including drafted ones; of several groups of layers, in
    /// the first one. The owner changes the groups one after the other, to the same number.
    pub fn len(&self) -> usize {
        let _call = call();
        self.list.tokens() as usize
    }

    /// Returns whether it has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the time since it was opened.
    pub fn age(&self) -> Duration {
        self.list.age()
    }

    /// Returns the number of blocks that it has reserved beyond its tokens.
    pub fn reserved_blocks(&self) -> usize {
        self.lists().map(BlockList::reserved).sum()
    }

    /// Returns its blocks, in order, group by group, then those of its states, without those given
    /// up behind the [window](crate::Window). They may have been released by the time this
    /// returns.
    pub fn blocks(&self) -> Vec<BlockId> {
        let _call = call();
        let mut blocks = Vec::new();
        for list in self.lists() {
            let before = blocks.len();
            list.read(|ids, _| {
                blocks.truncate(before);
                // Acquire: see `BlockList::read`.
                let ids = ids.iter().map(|id| BlockId(id.load(Acquire)));
                blocks.extend(ids.filter(|&id| !self.sequences.is_null(id)));
            });
        }
        blocks
    }

    /// Calls `f` with the place and id of each block of the first group, without those given up;
    /// again from the first if they change.
    pub fn for_each_block(&self, mut f: impl FnMut(u32, BlockId)) {
        self.list.read(|ids, _| {
            (0..)
                .zip(ids)
                .map(|(place, id)| (place, BlockId(id.load(Acquire))))
                .filter(|&(_, id)| !self.sequences.is_null(id))
                .for_each(|(place, id)| f(place, id));
        });
    }
}

impl fmt::Debug for SequenceView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SequenceView").field("id", &self.id).field("len", &self.len()).finish()
    }
}
