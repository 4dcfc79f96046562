//! The layers of the model whose pool is replayed: what a sequence keeps in each list of its
//! blocks.

use std::collections::HashSet;
use std::ops::Range;

use kvpool::storage::groups::{GroupId, LayerGroups, Reach};
use kvpool::storage::{Dtype, KvLayout};
use kvpool::{Invalid, Pool, PoolBuilder, Window};
use kvpool_load::Shape;

/// The layers of a model.
#[derive(Clone, Debug)]
pub enum Layers {
    /// All have the same layout, and the same window if they have one. The pool has their bytes.
    Alike(KvLayout, Option<Window>),
    /// Groups, whose frames have a [few bytes](probe) for each token instead of their own.
    Groups(LayerGroups),
}

impl Layers {
    /// Returns the layout of the bytes that are written and read back.
    pub fn stored(&self) -> Result<KvLayout, Invalid> {
        match self {
            Self::Alike(layout, _) => Ok(layout.clone()),
            Self::Groups(model) => {
                // A frame has room for a block of each group.
                let tokens = model.groups().iter().filter_map(|group| group.block_tokens()).max();
                probe(tokens.unwrap_or(1) as usize)
            }
        }
    }

    /// Returns a builder of the pool, without its number of blocks.
    ///
    /// # Errors
    /// For a model that does not run yet.
    pub fn builder(&self) -> Result<PoolBuilder, Invalid> {
        match self {
            Self::Alike(layout, None) => Ok(Pool::builder(layout.clone())),
            Self::Alike(layout, Some(window)) => Ok(Pool::builder(layout.clone()).window(*window)),
            Self::Groups(model) => Pool::layered(model),
        }
    }

    /// Returns the groups, of which those that share blocks are one. None if a sequence has one
    /// list that keeps all tokens.
    pub fn groups(&self) -> Vec<Group> {
        match self {
            Self::Alike(_, None) => Vec::new(),
            Self::Alike(layout, Some(window)) => {
                let (tokens, sinks) = (window.tokens() as u64, window.sink_tokens() as u64);
                let reach = Reach::Window { tokens, sinks };
                let (layers, block_tokens) = (layout.layers(), Some(layout.block_tokens()));
                vec![Group { keeps: vec![reach], layers, block_tokens, lists: 0..1, state_frames: 0 }]
            }
            Self::Groups(model) => {
                let ids = (0..model.groups().len()).map(GroupId);
                ids.filter(|id| model.groups()[id.0].shares_blocks_of().is_none())
                    .map(|id| Group::of(model, id))
                    .collect()
            }
        }
    }

    /// Returns the bytes of a block, as the model has them.
    pub fn block_bytes(&self) -> u64 {
        match self {
            Self::Alike(layout, _) => {
                let shape = Shape::of(layout);
                (shape.layers * (shape.k_bytes + shape.v_bytes) * shape.block_tokens) as u64
            }
            Self::Groups(model) => model.frame_bytes(),
        }
    }
}

/// Layers whose entries lie in the same blocks: a group, or all that share its blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Group {
    /// What a sequence keeps, without repetitions.
    pub keeps: Vec<Reach>,
    /// The number of layers.
    pub layers: usize,
    /// The tokens of a block; `None` of states.
    pub block_tokens: Option<usize>,
    /// The lists of a sequence: one for each frame of a block. None of states.
    pub lists: Range<usize>,
    /// The frames of a sequence's state.
    pub state_frames: usize,
}

impl Group {
    /// Returns this group with those that share its blocks.
    fn of(model: &LayerGroups, id: GroupId) -> Self {
        let first = &model.groups()[id.0];
        let (mut keeps, mut layers) = (vec![first.reach()], HashSet::<usize>::new());
        layers.extend(first.layers());
        for group in model.groups().iter().filter(|group| group.shares_blocks_of() == Some(id)) {
            if !keeps.contains(&group.reach()) {
                keeps.push(group.reach());
            }
            layers.extend(group.layers());
        }
        let state_frames = match first.reach() {
            Reach::State => first.block_frames() as usize,
            _ => 0,
        };
        let (layers, block_tokens) = (layers.len(), first.block_tokens().map(|tokens| tokens as usize));
        Self { keeps, layers, block_tokens, lists: Pool::layer_lists(model, id), state_frames }
    }
}

/// Returns the blocks that a list takes to grow from one length to another.
pub fn added(tokens: &Range<u64>, block_tokens: usize) -> usize {
    let blocks = |tokens: u64| tokens.div_ceil(block_tokens as u64);
    (blocks(tokens.end) - blocks(tokens.start)) as usize
}

/// Returns the default layout of replays, with just enough bytes per token to distinguish all
/// tokens, so that a replay measures the pool and not the memory.
pub fn probe(block_tokens: usize) -> Result<KvLayout, Invalid> {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(4).dtype(Dtype::F16);
    layout.block_tokens(block_tokens).build()
}

/// The lists of blocks of a sequence.
#[derive(Clone, Debug)]
pub struct Lists {
    /// The window of each, and the tokens of its blocks.
    kinds: Vec<(Option<Window>, usize)>,
    /// The frames of its states.
    state_frames: usize,
}

impl Lists {
    /// Returns the lists of sequences in the pool of a model.
    ///
    /// # Errors
    /// For a model that does not run yet.
    pub fn of(layers: &Layers) -> Result<Self, Invalid> {
        let builder = layers.builder()?;
        let kinds = builder.windows().iter().copied().zip(builder.tokens_per_block()).collect();
        let state_frames = layers.groups().iter().map(|group| group.state_frames).sum();
        Ok(Self { kinds, state_frames })
    }

    /// Returns the number of lists.
    pub fn count(&self) -> usize {
        self.kinds.len()
    }

    /// Returns the window of a list; `None` if it keeps all tokens.
    pub fn window(&self, list: usize) -> Option<Window> {
        self.kinds[list].0
    }

    /// Returns the frames of a sequence's states, whatever its length.
    pub fn state_frames(&self) -> usize {
        self.state_frames
    }

    /// Returns the most blocks that a sequence has held by the time that it has `tokens` tokens,
    /// with its states, if it grows by up to `step_tokens` at a time.
    pub fn blocks_with_states(&self, tokens: u64, step_tokens: u64) -> usize {
        self.blocks(tokens, step_tokens) + self.state_frames
    }

    /// Returns the same without states.
    pub fn blocks(&self, tokens: u64, step_tokens: u64) -> usize {
        let of_list = |&(window, block_tokens): &(Option<Window>, usize)| {
            let all = tokens.div_ceil(block_tokens as u64) as usize;
            window.map_or(all, |window| all.min(window.blocks_for(step_tokens as usize, block_tokens)))
        };
        self.kinds.iter().map(of_list).sum()
    }

    /// Returns the blocks that a sequence takes in all lists to grow from one length to another.
    pub fn added(&self, tokens: Range<u64>) -> usize {
        self.kinds.iter().map(|&(_, block_tokens)| added(&tokens, block_tokens)).sum()
    }

    /// Returns the tokens by which a sequence of `held` tokens can grow, at least, in this number of
    /// blocks.
    pub fn fitting(&self, held: u64, blocks: usize) -> u64 {
        let more = (blocks / self.count()) as u64;
        let of_list = |block_tokens: u64| (held.div_ceil(block_tokens) + more) * block_tokens - held;
        self.kinds.iter().map(|&(_, block_tokens)| of_list(block_tokens as u64)).min().unwrap_or(0)
    }
}
