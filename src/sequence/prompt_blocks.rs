//! The blocks of a prompt in every group of layers, and which of them a hit needs, wherever they
//! are.
//!
//! A transfer looks for them in two places: a boundary is a hit where each block that the next
//! token sees, in every group, is in one of them. It is the same boundary at which an
//! [admission](super::grouped) finds these blocks afterwards.

use std::ops::Range;
use std::sync::Arc;

use crate::error::Invalid;
use crate::ids::{BlockId, SessionId};
use crate::prefix::{BlockHash, ChainHash, ExtraKey, KvEvent, PrefixCache, PrefixKeys, WindowBlocks};

use super::TOKENS_MAX;
use super::registry::Sequences;
use super::window::ListKind;

/// Most checkpoints of which all blocks are looked up at once.
const CHECKPOINTS: usize = 16;

/// The hashes of a prompt's blocks in every group of layers of a pool.
///
/// ```
/// # use kvpool::{Pool, Window, prefix::{PrefixConfig, PrefixKeys}, storage::KvLayout};
/// let layout = KvLayout::named("tiny")?; // blocks of 4 tokens
/// let pool = Pool::builder(layout).blocks(100).prefix_cache(PrefixConfig::new());
/// let pool = pool.groups([None, Some(Window::new(8)?)]).build()?;
/// let blocks = pool.prompt_blocks(&PrefixKeys::new(), &[7; 41])?;
/// assert_eq!(blocks.boundary(usize::MAX, &mut |_| true), 40);
/// assert_eq!(blocks.needed(40).len(), 10 + 2, "all of one group, a window of the other");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct PromptBlocks {
    lists: Vec<(ListKind, Arc<[BlockHash]>)>,
    /// Frames of each state.
    states: Vec<usize>,
    /// A boundary of blocks in all groups is a multiple of these tokens.
    boundary_tokens: usize,
    /// Tokens before the last boundary.
    longest: usize,
    /// The salt of the newest uncache call, which is part of the hashes of states.
    salt: u64,
}

/// One of the blocks that a hit needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PromptBlock {
    pub(crate) hash: BlockHash,
    pub(crate) group: u32,
    /// Number of blocks before it, in its list or checkpoint.
    pub(crate) depth: u32,
    without: usize,
}

impl PromptBlock {
    /// Returns the hash by which its block is found.
    pub fn hash(&self) -> BlockHash {
        self.hash
    }

    /// Returns the number of the prompt's first tokens that can be hit without this block.
    pub fn without(&self) -> usize {
        self.without
    }
}

impl PromptBlocks {
    /// Returns the tokens of the longest prefix, of at most `most` tokens, for which `has` returns
    /// true of what every group needs: all blocks, those of a window and its sinks, or all blocks
    /// of a checkpoint of each state. 0: there is none.
    pub fn boundary(&self, most: usize, has: &mut dyn FnMut(BlockHash) -> bool) -> usize {
        let mut tokens = self.whole(most.min(self.longest));
        for (kind, hashes) in self.lists.iter().filter(|(kind, _)| kind.window.is_none()) {
            let block_tokens = kind.block_tokens as usize;
            let lacks = hashes[..tokens / block_tokens].iter().position(|&hash| !has(hash));
            tokens = self.whole(lacks.map_or(tokens, |place| place * block_tokens));
        }
        loop {
            let before = tokens;
            for (kind, hashes) in &self.lists {
                let (Some(needs), block_tokens) = (kind.needs(), kind.block_tokens as usize) else {
                    continue;
                };
                tokens = self.whole(boundary_of(needs, &hashes[..tokens / block_tokens], has) * block_tokens);
            }
            for state in 0..self.states.len() {
                while tokens > 0 && !self.checkpoint(state, tokens).all(&mut *has) {
                    tokens -= self.boundary_tokens;
                }
            }
            if tokens == before {
                return tokens;
            }
        }
    }

    fn whole(&self, tokens: usize) -> usize {
        tokens / self.boundary_tokens * self.boundary_tokens
    }

    /// Returns the tokens before the last boundary at which a hit needs at most this many blocks.
    pub fn longest(&self, blocks_max: usize) -> usize {
        let mut tokens = self.longest;
        while self.needed_blocks(tokens) > blocks_max {
            tokens -= self.boundary_tokens;
        }
        tokens
    }

    /// Returns the hashes of a state's checkpoint at a boundary other than 0.
    fn checkpoint(&self, state: usize, tokens: usize) -> impl Iterator<Item = BlockHash> {
        let (kind, hashes) = &self.lists[0];
        let (behind, salt) = (hashes[tokens / kind.block_tokens as usize - 1], self.salt);
        (0..self.states[state]).map(move |block| behind.of_state(state, block, salt))
    }

    /// Returns the first blocks of the checkpoints that a prefix of at most `tokens` tokens may end
    /// with, the longest first: to look them up at once. None in a pool without states.
    pub fn checkpoints(&self, tokens: usize) -> impl Iterator<Item = BlockHash> {
        let boundaries = 1..=self.whole(tokens.min(self.longest)) / self.boundary_tokens;
        let states = boundaries.rev().filter(|_| !self.states.is_empty());
        states.flat_map(|boundary| self.checkpoint(0, boundary * self.boundary_tokens).next())
    }

    /// Returns whether any number of its first blocks is a hit.
    pub(crate) fn is_chain(&self) -> bool {
        matches!(self.lists[..], [(ListKind { window: None, .. }, _)]) && self.states.is_empty()
    }

    /// Returns the hashes of the blocks in lists that boundaries behind this one may need.
    pub(crate) fn behind(&self, boundary: usize) -> impl Iterator<Item = BlockHash> {
        self.lists.iter().flat_map(move |(kind, hashes)| {
            let of = |tokens| tokens / kind.block_tokens as usize;
            let gap = kind.needs().map_or(0..of(boundary), |needs| needs.gap(of(boundary)));
            hashes[..gap.start].iter().chain(&hashes[gap.end..of(self.longest)]).copied()
        })
    }

    fn boundaries_behind(&self, boundary: usize) -> impl Iterator<Item = usize> {
        let boundaries = boundary / self.boundary_tokens + 1..=self.longest / self.boundary_tokens;
        boundaries.rev().filter(|_| !self.states.is_empty()).map(|place| place * self.boundary_tokens)
    }

    /// Returns the first blocks of the checkpoints at boundaries behind this one, the longest
    /// first.
    pub(crate) fn checkpoints_behind(&self, boundary: usize) -> impl Iterator<Item = BlockHash> {
        self.boundaries_behind(boundary).filter_map(|tokens| self.checkpoint(0, tokens).next())
    }

    /// Returns the other blocks of the checkpoints at boundaries behind this one of whose first
    /// block `has` returns true: of the longest few.
    pub(crate) fn frames_behind(&self, boundary: usize, has: &dyn Fn(BlockHash) -> bool) -> Vec<BlockHash> {
        let is_there = |&tokens: &usize| self.checkpoint(0, tokens).next().is_some_and(has);
        let of =
            |tokens| (0..self.states.len()).flat_map(move |state| self.checkpoint(state, tokens)).skip(1);
        self.boundaries_behind(boundary).filter(is_there).take(CHECKPOINTS).flat_map(of).collect()
    }

    /// Returns the number of blocks that a hit at a [boundary](Self::boundary) needs.
    pub fn needed_blocks(&self, boundary: usize) -> usize {
        let of = |(kind, _): &(ListKind, _)| kind.held_of(boundary / kind.block_tokens as usize);
        let states = if boundary > 0 { self.states.iter().sum() } else { 0 };
        self.lists.iter().map(of).sum::<usize>() + states
    }

    /// Returns the blocks that a hit at a [boundary](Self::boundary) needs: of states first, then
    /// in the order of the tokens.
    pub fn needed(&self, boundary: usize) -> Vec<PromptBlock> {
        let boundary = self.whole(boundary.min(self.longest));
        let mut needed = Vec::with_capacity(self.needed_blocks(boundary));
        if boundary == 0 {
            return needed;
        }
        for state in 0..self.states.len() {
            let group = (self.lists.len() + state) as u32;
            let block = |(depth, hash)| PromptBlock { hash, group, depth, without: boundary - 1 };
            needed.extend((0..).zip(self.checkpoint(state, boundary)).map(block));
        }
        let lists = needed.len();
        for (group, (kind, hashes)) in (0..).zip(&self.lists) {
            let block_tokens = kind.block_tokens as usize;
            let end = boundary / block_tokens;
            let gap = kind.needs().map_or(end..end, |needs| needs.gap(end));
            let places = (0..gap.start).chain(gap.end..end);
            needed.extend(places.map(|place| {
                let (depth, without) = (place as u32, place * block_tokens);
                PromptBlock { hash: hashes[place], group, depth, without }
            }));
        }
        needed[lists..].sort_by_key(|block| block.without);
        needed
    }

    /// Returns the tokens of a block of the first list.
    pub fn block_tokens(&self) -> usize {
        self.lists[0].0.block_tokens as usize
    }

    /// Returns the event of a block that has come, with its tokens.
    pub(crate) fn stored(
        &self,
        cache: &PrefixCache,
        (of, block): (&PromptBlock, BlockId),
        (tokens, extra_keys): (&[u32], &[ExtraKey]),
    ) -> Option<Box<KvEvent>> {
        if !cache.events().is_subscribed() {
            return None;
        }
        let (hash, group) = (of.hash, of.group);
        let list = self.lists.get(group as usize);
        let block_tokens = list.map_or(self.block_tokens(), |(kind, _)| kind.block_tokens as usize);
        let (parent, range): (_, Range<usize>) = match list {
            Some((_, hashes)) => {
                let parent = of.depth.checked_sub(1).map(|parent| hashes[parent as usize]);
                (parent, of.without..of.without + block_tokens)
            }
            // Behind the last block of the first list before its boundary.
            None => (Some(self.lists[0].1[of.without / block_tokens]), 0..0),
        };
        Some(Box::new(KvEvent::Stored {
            block,
            hash,
            parent,
            tokens: tokens[range.clone()].into(),
            block_tokens: block_tokens as u32,
            group,
            extra_keys: ExtraKey::of_block(extra_keys, range),
        }))
    }
}

/// Returns the number of blocks before the boundary of a window's longest hit.
fn boundary_of(needs: WindowBlocks, hashes: &[BlockHash], has: &mut dyn FnMut(BlockHash) -> bool) -> usize {
    let sinks = hashes.iter().take(needs.sinks).take_while(|&&hash| has(hash)).count();
    // Without all sinks, only a boundary among them can be hit.
    let mut boundary = if sinks < needs.sinks { sinks } else { hashes.len() };
    while boundary > sinks {
        // The first block of the window, then the others from the end.
        let first = needs.gap(boundary).end;
        let mut places = std::iter::once(first).chain((first + 1..boundary).rev());
        match places.find(|&place| !has(hashes[place])) {
            Some(place) => boundary = place,
            None => break,
        }
    }
    boundary
}

impl Sequences {
    /// Returns the root from which a list hashes its tokens: no group's block is found as one of a
    /// pool in which a block has all layers.
    pub(super) fn root_group(&self, list: u32) -> u32 {
        if self.has_one_list() { 0 } else { list + 1 }
    }

    pub(crate) fn prompt_blocks(
        &self,
        cache: &PrefixCache,
        keys: &PrefixKeys<'_>,
        tokens: &[u32],
    ) -> Result<PromptBlocks, Invalid> {
        if tokens.len() > TOKENS_MAX {
            let limit = format_args!("at most {TOKENS_MAX}");
            return Err(Invalid::new("tokens of a prompt", tokens.len(), limit));
        }
        keys.check_extra(tokens.len())?;
        let (weights, _) = cache.weights_now(keys.adapter_name());
        let mut lists = Vec::with_capacity(self.kinds().len());
        for list in 0..self.kinds().len() as u32 {
            let (hasher, mut hashes) = (cache.hasher_of(list), Vec::new());
            let root = cache.root_of(list, keys, weights)?.of_group(self.root_group(list));
            let whole = tokens.len() / hasher.block_tokens() * hasher.block_tokens();
            let mut chain = ChainHash::after(root, 0).with(hasher, keys.extra());
            chain.fill(hasher, &tokens[..whole], |hash| hashes.push(hash));
            lists.push(hashes.into());
        }
        Ok(self.blocks_of_lists(lists, tokens.len()))
    }

    /// Returns the blocks of the last closed request of a session. `None`: it is not known.
    pub(crate) fn session_blocks(&self, id: SessionId) -> Option<PromptBlocks> {
        let lists = self.session_lists(id)?;
        (lists.len() == self.kinds().len()).then(|| self.blocks_of_lists(lists, usize::MAX))
    }

    /// Returns the blocks with these hashes, of a pool with one list.
    pub(crate) fn blocks_of_hashes(&self, hashes: &[BlockHash]) -> Result<PromptBlocks, Invalid> {
        self.check_one_list("hashes of a prefix")?;
        Ok(self.blocks_of_lists(vec![hashes.into()], usize::MAX))
    }

    /// Returns the blocks of a prompt of at most `tokens` tokens.
    fn blocks_of_lists(&self, lists: Vec<Arc<[BlockHash]>>, tokens: usize) -> PromptBlocks {
        let lists: Vec<_> = self.kinds().iter().copied().zip(lists).collect();
        // An admission computes the last token. All blocks before a boundary are also those of
        // shorter ones; other groups need other blocks there.
        let is_exact = self.has_windows() || !self.states().is_empty();
        let tokens = if is_exact { tokens.saturating_sub(1) } else { tokens };
        let of = |(kind, hashes): &(ListKind, Arc<[_]>)| hashes.len() * kind.block_tokens as usize;
        let tokens = lists.iter().map(of).fold(tokens, usize::min);
        let boundary_tokens = self.boundary_tokens();
        PromptBlocks {
            lists,
            states: self.states().to_vec(),
            boundary_tokens,
            longest: tokens / boundary_tokens * boundary_tokens,
            salt: self.cache().map_or(0, |cache| cache.salt_of(cache.uncached().newest())),
        }
    }

    /// Returns an error unless the pool has one list, of one group of layers.
    pub(crate) fn check_one_list(&self, what: &'static str) -> Result<(), Invalid> {
        if self.has_one_list() {
            return Ok(());
        }
        let groups = self.kinds().len() + self.states().len();
        let got = format_args!("of a pool with {groups} groups of layers");
        Err(Invalid::new(what, got, "those of a pool with one group"))
    }
}
