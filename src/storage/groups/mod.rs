//! Groups of layers: the memory of models whose layers differ.
//!
//! Some layers of a model keep all tokens of a sequence, others a window of them, others one state.
//! Layers that keep the same entries with the same bytes form a *group*: one block id stands for a
//! part of the sequence in all of them. Bytes beside an entry (an index, scales) are columns of a
//! group, not groups. Groups that keep the same tokens share their blocks: those that keep all, one
//! entry per token or one per several, and those with equal windows or equal chunks.
//!
//! ```text
//! held(tokens)   == sum over shared blocks of blocks_held(tokens) * block_frames * frame_bytes
//! block_bytes    == block_frames * frame_bytes  >=  packed_bytes
//! waste          == 1 - packed_bytes / block_bytes
//! ```
//!
//! Frames have one size for all groups. A block of tokens is some frames, each with whole layers; a
//! block of states is a run of them. Of a model whose layers are alike a block is one frame, as in
//! a pool. A prompt is hit up to a boundary of blocks in every group, so blocks are short.
//!
//! This module describes and counts. [`Pool::layered`](crate::Pool::layered) runs models without
//! rings and drafts, with a list for each frame of a block.
//!
//! | file | contents |
//! |---|---|
//! | `options` | types of elements, draft layers, steps, segments |
//! | `layer` | the entry of a layer, and which entries a sequence keeps |
//! | `shape` | the bytes of a group |
//! | `shared` | the blocks that groups share |
//! | `frame` | the choice of the frame and of the tokens of a block |
//! | `group`, `layer_groups` | one group, and all of a model |

mod frame;
mod group;
mod layer;
mod layer_groups;
mod options;
mod shape;
mod shared;

pub use crate::error::LayersError;
pub use group::{GroupId, LayerGroup, Place};
pub use layer::{LayerCache, Reach, Row};
pub use layer_groups::LayerGroups;
pub use options::{DraftLayers, GroupOptions};
pub use shape::Column;
pub(crate) use shared::{common_divisor, common_multiple};

#[cfg(test)]
mod tests;
