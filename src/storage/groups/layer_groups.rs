use crate::dtype::Dtype;
use crate::error::LayersError;
use crate::storage::layout::{KvLayout, KvPlanes};
use crate::storage::plane::PlaneKind;

use super::frame;
use super::group::{GroupId, LayerGroup, Place};
use super::layer::{LayerCache, Reach, Row};
use super::options::GroupOptions;
use super::shape::Shape;
use super::shared::{Block, SharedBlock, common_multiple};

/// Maximum number of layers.
const LAYERS_MAX: u64 = 1 << 16;
/// Maximum number of groups, which bounds the time to choose a frame.
const GROUPS_MAX: usize = 32;
/// Maximum of other numbers.
const NUMBER_MAX: u64 = 1 << 32;

/// The layers of a model as groups, and their cost in memory.
#[derive(Clone, Debug)]
pub struct LayerGroups {
    groups: Vec<LayerGroup>,
    places: Vec<Vec<Place>>,
    frame_bytes: u64,
    dtype: Dtype,
}

/// A group under construction. `main` is what its layers have in common beside the reach.
struct Gathered {
    reach: Reach,
    main: [u64; 2],
    layers: Vec<usize>,
    /// The widths of the planes of each layer.
    widths: Vec<Vec<u64>>,
}

impl LayerGroups {
    /// Groups layers by the entries that they keep and the bytes of an entry.
    ///
    /// A layer can have several caches, or none. Bytes beside an entry do not divide a group:
    /// layers with and without them have the same block ids.
    pub fn of_layers(layers: &[Vec<LayerCache>], options: GroupOptions) -> Result<Self, LayersError> {
        let dtype = options.dtype.unwrap_or_default();
        for (field, value, max) in [
            ("layers", layers.len().max(1) as u64, LAYERS_MAX),
            ("step_tokens", options.step_tokens, NUMBER_MAX),
            ("segment_frames", options.segment_frames, NUMBER_MAX),
        ] {
            if !(1..=max).contains(&value) {
                return Err(LayersError::field(field, format_args!("{value} is not from 1 to {max}")));
            }
        }
        let mut gathered = Vec::new();
        let mut places = vec![Vec::new(); layers.len()];
        for (layer, caches) in layers.iter().enumerate() {
            for cache in caches {
                cache.check(layer, dtype)?;
                if !matches!(cache.reach, Reach::Follows { .. }) {
                    places[layer].push(add(&mut gathered, layer, *cache, dtype));
                    if gathered.len() > GROUPS_MAX {
                        let reason = format_args!("{layer} begins more than {GROUPS_MAX} groups");
                        return Err(LayersError::field("layer", reason));
                    }
                }
            }
        }
        // Last, because a layer can follow a later one.
        let own = places.clone();
        for (layer, caches) in layers.iter().enumerate() {
            for cache in caches {
                let Reach::Follows { layer: target } = cache.reach else { continue };
                let followed = own.get(target).and_then(|places| places.first().copied());
                let place = followed.ok_or(LayersError::Follows { layer, target })?;
                gathered[place.group.0].widths[place.plane].extend(planes(cache.row.widths(dtype)));
                places[layer].push(place);
            }
        }
        if gathered.is_empty() {
            return Err(LayersError::Empty);
        }
        Self::in_frames(gathered, places, options)
    }

    fn in_frames(
        gathered: Vec<Gathered>,
        places: Vec<Vec<Place>>,
        options: GroupOptions,
    ) -> Result<Self, LayersError> {
        let GroupOptions { segment_frames, step_tokens, .. } = options;
        let shape = |one: Gathered| Shape::new(one.reach, one.layers, one.widths);
        let shapes: Vec<Shape> = gathered.into_iter().map(shape).collect();
        let shared = SharedBlock::all(&shapes);
        let choice = frame::choose(&shared, segment_frames);
        let frame_bytes = choice.frame_bytes;
        let mut groups = Vec::with_capacity(shapes.len());
        for (group, shape) in shapes.into_iter().enumerate() {
            let has_group = |(of, _): &(&SharedBlock, &Block)| of.groups.contains(&group);
            let (of, &block) =
                shared.iter().zip(&choice.blocks).find(has_group).expect("every group is in one");
            if of.reach.is_run() && block.frames > segment_frames {
                return Err(LayersError::BlockTooLarge { group, frames: block.frames, segment_frames });
            }
            let shares_blocks_of = (of.groups[0] < group).then_some(GroupId(of.groups[0]));
            groups.push(LayerGroup { shape, block, shares_blocks_of, frame_bytes, step_tokens });
        }
        Ok(Self { groups, places, frame_bytes, dtype: options.dtype.unwrap_or_default() })
    }

    /// Returns the one group of a layout, with a block of 16 tokens as the frame.
    pub fn of_layout(layout: &KvLayout, options: GroupOptions) -> Result<Self, LayersError> {
        let dim = layout.head_dim() as u64;
        let row = match layout.parts() {
            KvPlanes::Latent => Row::Latent { elements: dim, side_bytes: 0 },
            _ => Row::Heads { kv_heads: layout.kv_heads() as u64, k_dim: dim, v_dim: dim },
        };
        let options = GroupOptions { dtype: options.dtype.or(Some(layout.dtype())), ..options };
        let layer = |layer| {
            let mut caches = vec![LayerCache::all(row)];
            if layout.has_scale_planes() {
                let parts = if layout.parts() == KvPlanes::Latent { 1 } else { 2 };
                let scales = Row::bytes(parts * layout.row_bytes(PlaneKind::Scales) as u64);
                caches.push(LayerCache { row: scales, reach: Reach::Follows { layer } });
            }
            caches
        };
        Self::of_layers(&(0..layout.layers()).map(layer).collect::<Vec<_>>(), options)
    }

    /// Returns the groups, in the order of their first layers.
    pub fn groups(&self) -> &[LayerGroup] {
        &self.groups
    }

    /// Returns the places of a layer's caches: none if it caches nothing, or does not exist.
    ///
    /// A layer that follows another has that one's first place.
    pub fn place(&self, layer: usize) -> &[Place] {
        self.places.get(layer).map_or(&[], Vec::as_slice)
    }

    /// Returns the number of layers, with those that cache nothing.
    pub fn layers(&self) -> usize {
        self.places.len()
    }

    /// Returns the type of the elements of K, V and latent vectors.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the size of a frame in bytes.
    pub fn frame_bytes(&self) -> u64 {
        self.frame_bytes
    }

    /// Returns the number of tokens of which a hit is a multiple: a prompt is hit up to a boundary of
    /// blocks in every group.
    pub fn hit_tokens(&self) -> u64 {
        self.groups.iter().filter_map(LayerGroup::block_tokens).fold(1, common_multiple)
    }

    /// Returns the bytes per token that a sequence keeps for as long as it grows. A fraction where
    /// several tokens share an entry.
    pub fn bytes_per_token(&self) -> f64 {
        self.groups.iter().map(LayerGroup::bytes_per_token).sum()
    }

    /// Returns the bytes of a long sequence that do not grow with it: states, and full windows,
    /// without rounding to blocks.
    pub fn fixed_bytes(&self) -> u64 {
        self.groups.iter().map(LayerGroup::fixed_bytes).fold(0, u64::saturating_add)
    }

    /// Returns the largest share of a group's blocks that is padding, from 0 to 1.
    pub fn waste(&self) -> f64 {
        self.groups.iter().map(LayerGroup::waste).fold(0.0, f64::max)
    }

    /// Returns the largest number of frames that a sequence has held by the time that it has
    /// `tokens` tokens. Blocks that groups share are counted once.
    pub fn frames_held(&self, tokens: u64) -> u64 {
        let with_blocks = self.groups.iter().filter(|group| group.shares_blocks_of().is_none());
        let of = |group: &LayerGroup| group.blocks_held(tokens).saturating_mul(group.block_frames());
        with_blocks.map(of).fold(0, u64::saturating_add)
    }

    /// Returns the bytes of these frames.
    pub fn bytes_held(&self, tokens: u64) -> u64 {
        self.frames_held(tokens).saturating_mul(self.frame_bytes)
    }

    /// Returns how many sequences of `tokens` tokens fit into memory. Of zero tokens, none count.
    pub fn sequences_in(&self, bytes: u64, tokens: u64) -> u64 {
        (bytes / self.frame_bytes).checked_div(self.frames_held(tokens)).unwrap_or(0)
    }

    /// Returns how many tokens these sequences have together.
    pub fn tokens_in(&self, bytes: u64, tokens: u64) -> u64 {
        self.sequences_in(bytes, tokens).saturating_mul(tokens)
    }
}

/// Adds a cache to its group, which may be new, and returns its place.
fn add(gathered: &mut Vec<Gathered>, layer: usize, cache: LayerCache, dtype: Dtype) -> Place {
    let widths = cache.row.widths(dtype);
    let main = [widths[0], widths[1]];
    let is_same = |one: &Gathered| one.reach == cache.reach && one.main == main;
    let index = gathered.iter().position(is_same).unwrap_or_else(|| {
        gathered.push(Gathered { reach: cache.reach, main, layers: Vec::new(), widths: Vec::new() });
        gathered.len() - 1
    });
    let group = &mut gathered[index];
    group.layers.push(layer);
    group.widths.push(planes(widths).collect());
    Place { group: GroupId(index), plane: group.layers.len() - 1 }
}

/// Returns the widths that a row has.
fn planes(widths: [u64; 3]) -> impl Iterator<Item = u64> {
    widths.into_iter().filter(|&bytes| bytes > 0)
}
