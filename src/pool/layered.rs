//! Pools for models whose layers differ.

use std::ops::Range;

use crate::dtype::Dtype;
use crate::error::Invalid;
use crate::sequence::Window;
use crate::storage::KvLayout;
use crate::storage::groups::{GroupId, LayerGroup, LayerGroups, Place, Reach, common_divisor};

use super::{Pool, PoolBuilder};

/// A group of layers whose blocks are cached together: see [`Pool::cache_groups`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct CacheGroup {
    /// What its blocks keep.
    pub keeps: GroupKeeps,
    /// Number of tokens per block; of a state, that of the first group.
    pub block_tokens: u32,
    /// Number of blocks at one place of a sequence: 1, or all that a checkpoint of a state has. It is
    /// a hit only with all of them.
    pub blocks: usize,
}

/// What the blocks of a [`CacheGroup`] keep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum GroupKeeps {
    /// All tokens.
    All,
    /// The tokens of a window, or of a chunk, which is kept like a window of its length.
    Window(Window),
    /// A state: its cached blocks are [checkpoints](crate::Batch::checkpoint).
    State,
}

/// Where a layer of a model lies in a [layered](Pool::layered) pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct LayerPlace {
    /// Its group.
    pub group: GroupId,
    /// The list, by which [`GroupedSequence::group`](crate::GroupedSequence::group) names it; `None`
    /// for a state.
    pub list: Option<usize>,
    /// The state, by which [`GroupedSequence::state`](crate::GroupedSequence::state) names it.
    pub state: Option<usize>,
    /// Position among the layers of its group in a frame of that list, or in that state, from 0.
    pub index: usize,
}

impl Pool {
    /// Returns a builder of a pool for a model whose layers differ, without storage: the engine
    /// holds the bytes. Its sequences are [grouped](PoolBuilder::groups).
    ///
    /// A block of a group is as many frames as the group says. Each holds whole layers, and has a
    /// list of its own, with its tokens per block: those of [`layer_lists`](Self::layer_lists). So
    /// the frames of a block need not be adjacent. Groups that share their blocks have the same
    /// lists, and each frame has layers of all of them. A list of compressed tokens keeps all
    /// tokens, and a chunk is kept like a window of its length. The states of a group are one run
    /// of consecutive frames: see [`PoolBuilder::states`].
    ///
    /// ```
    /// use kvpool::Pool;
    /// use kvpool::storage::groups::{GroupId, GroupOptions, LayerCache, LayerGroups, Reach, Row};
    ///
    /// // gpt-oss-120b: 18 layers with a window of 128 tokens, alternating with 18 that keep all.
    /// let row = Row::Heads { kv_heads: 8, k_dim: 64, v_dim: 64 };
    /// let window = LayerCache { row, reach: Reach::Window { tokens: 128, sinks: 0 } };
    /// let layers: Vec<_> = (0..36).map(|i| vec![if i % 2 == 0 { window } else { LayerCache::all(row) }]).collect();
    /// let model = LayerGroups::of_layers(&layers, GroupOptions::new())?;
    /// let pool = Pool::layered(&model)?.blocks(1_000).build()?;
    /// assert_eq!(pool.layout().bytes_per_block() as u64, model.frame_bytes());
    /// assert_eq!(Pool::layer_lists(&model, GroupId(1)), 1..2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// For a group that keeps a ring: such models do not run yet. Also
    /// for states alone, and for a window or chunk that [`Window::new`] refuses. Each names a group by its index.
    pub fn layered(model: &LayerGroups) -> Result<PoolBuilder, Invalid> {
        let (mut windows, mut tokens, mut states) = (Vec::new(), Vec::new(), Vec::new());
        for (index, group) in model.groups().iter().enumerate() {
            let refused = |got: String, limit: String| Invalid::new("group of layers", got, limit).at(index);
            let window = |tokens: u64| {
                let tokens = usize::try_from(tokens).unwrap_or(usize::MAX);
                Window::new(tokens).map_err(|error| error.at(index))
            };
            let keeps = match group.reach() {
                // Drafts are appended in all groups: see `Tokens::Draft`.
                Reach::All | Reach::Compressed { .. } | Reach::Draft { .. } => None,
                Reach::Window { tokens, sinks } => {
                    let sinks = u32::try_from(sinks)
                        .map_err(|_| refused(format!("{sinks} sinks"), format!("at most {}", u32::MAX)))?;
                    Some(window(tokens)?.sinks(sinks))
                }
                Reach::Chunk { tokens } => Some(window(tokens)?),
                Reach::State => {
                    states.push(group.block_frames() as usize);
                    continue;
                }
                other => {
                    let limit = "all or compressed tokens, a window, a chunk, a state, or drafts \
                                 ahead: a pool does not keep others yet";
                    return Err(refused(format!("{other:?}"), limit.to_owned()));
                }
            };
            if group.shares_blocks_of().is_none() {
                let block_tokens = group.block_tokens().unwrap_or(1) as usize;
                let lists = group.block_frames() as usize;
                windows.extend(std::iter::repeat_n(keeps, lists));
                tokens.extend(std::iter::repeat_n(block_tokens, lists));
            }
        }
        if tokens.is_empty() {
            let limit = "a group that keeps tokens beside them";
            return Err(Invalid::new("group of layers", "states alone", limit).at(0));
        }
        let layout = layout(usize::try_from(model.frame_bytes()).unwrap_or(usize::MAX), &tokens)?;
        let builder = Self::builder(layout).without_storage().groups(windows).list_tokens(tokens);
        Ok(builder.states(states).layered())
    }

    /// Returns the groups of layers of which blocks are cached, as events number them: each list of
    /// a sequence, by which [`GroupedSequence::group`](crate::GroupedSequence::group) names it, and
    /// then each [state](PoolBuilder::states). [`layer_lists`](Self::layer_lists) and
    /// [`layer_state`](Self::layer_state) say which layers these are. In a
    /// [`FramePool`](crate::FramePool), whose keys have the group, all events have number 0.
    pub fn cache_groups(&self) -> Vec<CacheGroup> {
        let kinds = self.0.sequences.kinds();
        let lists = kinds.iter().map(|kind| CacheGroup {
            keeps: kind.window.map_or(GroupKeeps::All, GroupKeeps::Window),
            block_tokens: kind.block_tokens,
            blocks: 1,
        });
        let block_tokens = kinds[0].block_tokens;
        let state = |&blocks| CacheGroup { keeps: GroupKeeps::State, block_tokens, blocks };
        lists.chain(self.0.sequences.states().iter().map(state)).collect()
    }

    /// Returns the lists of a group in a [layered](Self::layered) pool, by which
    /// [`GroupedSequence::group`](crate::GroupedSequence::group) and
    /// [`Batch::store_grouped`](crate::Batch::store_grouped) name them: one for each frame of a
    /// block. Of `n` layers in `k` lists, each has the next `ceil(n / k)`, and the last ones fewer
    /// or none. Groups that share their blocks have the same lists. A group that keeps a state has
    /// none.
    ///
    /// # Panics
    /// If the model has no such group.
    pub fn layer_lists(model: &LayerGroups, group: GroupId) -> Range<usize> {
        let lists = |group: &LayerGroup| if is_state(group) { 0 } else { group.block_frames() as usize };
        let shared = model.groups()[group.0].shares_blocks_of().unwrap_or(group);
        let before = model.groups()[..shared.0].iter().filter(|group| group.shares_blocks_of().is_none());
        let first = before.map(lists).sum();
        first..first + lists(&model.groups()[shared.0])
    }

    /// Returns where the caches of a layer lie in a [layered](Self::layered) pool, in the order of
    /// [`LayerGroups::place`]. What else lies in a frame, and in which order, is the engine's choice.
    pub fn layer_places(model: &LayerGroups, layer: usize) -> Vec<LayerPlace> {
        let of = |&Place { group, plane }: &Place| {
            let (lists, state) = (Self::layer_lists(model, group), Self::layer_state(model, group));
            if lists.is_empty() {
                return LayerPlace { group, list: None, state, index: plane };
            }
            let each = model.groups()[group.0].layers().len().div_ceil(lists.len());
            LayerPlace { group, list: Some(lists.start + plane / each), state, index: plane % each }
        };
        model.place(layer).iter().map(of).collect()
    }

    /// Returns the number by which [`GroupedSequence::state`](crate::GroupedSequence::state) names
    /// the state of a group in a [layered](Self::layered) pool. `None`: the group keeps none.
    ///
    /// # Panics
    /// If the model has no such group.
    pub fn layer_state(model: &LayerGroups, group: GroupId) -> Option<usize> {
        let before = model.groups()[..group.0].iter().filter(|group| is_state(group)).count();
        is_state(&model.groups()[group.0]).then_some(before)
    }
}

fn is_state(group: &LayerGroup) -> bool {
    matches!(group.reach(), Reach::State)
}

/// Returns the layout of a frame. Its tokens are those of a block of the first list, or where these
/// do not divide the frame, the greatest common divisor of those of all lists and the frame.
fn layout(frame_bytes: usize, tokens: &[usize]) -> Result<KvLayout, Invalid> {
    let block_tokens = if frame_bytes.is_multiple_of(tokens[0]) {
        tokens[0]
    } else {
        tokens.iter().fold(frame_bytes as u64, |one, &other| common_divisor(one, other as u64)) as usize
    };
    let row = frame_bytes / block_tokens;
    // A byte per element: what they are is the engine's matter.
    KvLayout::builder().layers(1).latent(row).dtype(Dtype::Fp8E4M3).block_tokens(block_tokens).build()
}
