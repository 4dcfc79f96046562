use crate::config::SEGMENT_FRAMES;
use crate::dtype::Dtype;

/// Fewest tokens of a block, unless a window is shorter.
pub(super) const BLOCK_TOKENS: u64 = 16;

/// Whether layers that draft tokens (multi-token prediction) cache in the same pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum DraftLayers {
    /// They are left out.
    #[default]
    Omitted,
    /// They come behind the layers of the model, with a group of their own.
    Included,
}

/// Options of a grouping of layers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct GroupOptions {
    /// Type of the elements of K, V and latent vectors; by default that of the configuration, or
    /// bf16. States have types of their own.
    pub dtype: Option<Dtype>,
    /// Whether layers that draft tokens are included.
    pub drafts: DraftLayers,
    /// Largest number of tokens that a sequence grows by in one step.
    pub step_tokens: u64,
    /// Number of frames of a segment, the longest run of a state.
    pub segment_frames: u64,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            dtype: None,
            drafts: DraftLayers::default(),
            step_tokens: 1,
            segment_frames: SEGMENT_FRAMES as u64,
        }
    }
}

impl GroupOptions {
    /// Returns the defaults: one token a step, no draft layers, the segments of a pool.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the type of the elements of K, V and latent vectors.
    pub fn dtype(mut self, dtype: Dtype) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Sets whether layers that draft tokens are included.
    pub fn drafts(mut self, drafts: DraftLayers) -> Self {
        self.drafts = drafts;
        self
    }

    /// Sets the largest number of tokens that a sequence grows by in one step.
    pub fn step_tokens(mut self, tokens: u64) -> Self {
        self.step_tokens = tokens;
        self
    }

    /// Sets the number of frames of a segment.
    pub fn segment_frames(mut self, frames: u64) -> Self {
        self.segment_frames = frames;
        self
    }
}
