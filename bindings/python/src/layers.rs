//! `LayerCache` and `LayerGroups`: what the layers of a model keep, where they differ.

use std::path::PathBuf;
use std::sync::Arc;

use kvpool::storage::groups::{
    GroupId, GroupOptions, LayerCache, LayerGroup as Group, LayerGroups, LayersError, Reach, Row,
};
use kvpool::{Dtype, Pool};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping};

use crate::args::{Count, Place, Tokens};
use crate::error::{Outcome, fields, invalid, raise};
use crate::layout::dtype;
use crate::record::record;

/// One cache of a layer: the bytes of an entry, and the entries that a sequence keeps.
///
/// The entry is one of these: K and V of `kv_heads` heads with `head_dim` elements (`v_dim` of V,
/// if that differs); `latent` elements, one vector for all heads; or a number of `bytes`.
/// `side_bytes` lie beside a latent entry or one of bytes, for example the keys of a sparse index.
///
/// A sequence keeps an entry for each token, unless one of these is given: `window`, the tokens
/// that a token attends to, itself included, with the first `sinks` ones; `chunk`, the tokens since
/// the last multiple of that length; `ratio`, one entry for as many tokens; `state=True`, one entry
/// whatever the number of tokens. With `follows` the layer reads the cache of the layer of that
/// number, and has no entry, or `bytes` beside that one's.
#[pyclass(frozen, eq, name = "LayerCache", module = "kvpool._kvpool", from_py_object)]
#[derive(Clone, Copy, PartialEq)]
pub struct PyLayerCache(LayerCache);

/// Returns the one item that is given, or refuses several.
fn at_most_one<T>(items: Vec<(&str, Option<T>)>, what: &str) -> Outcome<Option<T>> {
    let all: Vec<_> = items.iter().map(|(name, _)| *name).collect();
    let mut given = items.into_iter().filter_map(|(name, item)| Some((name, item?)));
    match (given.next(), given.next()) {
        (Some((first, _)), Some((second, _))) => {
            let message = format!("{what} is one of {}, not both {first} and {second}", all.join(", "));
            Err(invalid(message))
        }
        (first, _) => Ok(first.map(|(_, item)| item)),
    }
}

#[pymethods]
impl PyLayerCache {
    #[new]
    #[pyo3(signature = (*, kv_heads=None, head_dim=None, v_dim=None, latent=None, bytes=None, side_bytes=Count(0), window=None, sinks=Count(0), chunk=None, ratio=None, state=false, follows=None), text_signature = "(*, kv_heads=None, head_dim=None, v_dim=None, latent=None, bytes=None, side_bytes=0, window=None, sinks=0, chunk=None, ratio=None, state=False, follows=None)")]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        kv_heads: Option<Count>,
        head_dim: Option<Count>,
        v_dim: Option<Count>,
        latent: Option<Count>,
        bytes: Option<Count>,
        side_bytes: Count,
        window: Option<Tokens>,
        sinks: Count,
        chunk: Option<Tokens>,
        ratio: Option<Tokens>,
        state: bool,
        follows: Option<Place>,
    ) -> Outcome<Self> {
        let number = |count: Count| count.0 as u64;
        let side = number(side_bytes);
        if kv_heads.is_some() != head_dim.is_some() || (v_dim.is_some() && head_dim.is_none()) {
            return Err(invalid(
                "the entry of a layer has `kv_heads` and `head_dim`, or neither, and no `v_dim`",
            ));
        }
        if side > 0 && kv_heads.is_some() {
            return Err(invalid(
                "`side_bytes` lie beside a `latent` entry, or one of `bytes`, not beside `kv_heads`",
            ));
        }
        if sinks.0 > 0 && window.is_none() {
            return Err(invalid("`sinks` are the first tokens beside a `window`: pass that too"));
        }
        let heads = kv_heads.zip(head_dim).map(|(heads, k)| Row::Heads {
            kv_heads: number(heads),
            k_dim: number(k),
            v_dim: number(v_dim.unwrap_or(k)),
        });
        let latent = latent.map(|elements| Row::Latent { elements: number(elements), side_bytes: side });
        let bytes = bytes.map(|bytes| Row::Bytes { bytes: number(bytes), side_bytes: side });
        let row = at_most_one(
            vec![("kv_heads", heads), ("latent", latent), ("bytes", bytes)],
            "the entry of a layer",
        )?;
        let window = window.map(|tokens| Reach::Window { tokens: tokens.0 as u64, sinks: number(sinks) });
        let reach = at_most_one(
            vec![
                ("window", window),
                ("chunk", chunk.map(|tokens| Reach::Chunk { tokens: tokens.0 as u64 })),
                ("ratio", ratio.map(|tokens| Reach::Compressed { ratio: tokens.0 as u64 })),
                ("state", state.then_some(Reach::State)),
                ("follows", follows.map(|layer| Reach::Follows { layer: layer.0 })),
            ],
            "what a sequence keeps",
        )?
        .unwrap_or(Reach::All);
        let row = match (row, reach) {
            (Some(row), _) => row,
            (None, Reach::Follows { .. }) => Row::bytes(0),
            (None, _) => {
                return Err(invalid("a layer has `kv_heads` and `head_dim`, `latent` elements, or `bytes`"));
            }
        };
        Ok(Self(LayerCache { row, reach }))
    }

    fn __repr__(&self) -> String {
        format!("<kvpool.LayerCache {:?}, {:?}>", self.0.row, self.0.reach)
    }
}

record! {
    /// Layers that keep the same entries with the same bytes: the blocks of one serve all.
    LayerGroup {
        /// What a sequence keeps: "all" tokens, "compressed" ones, a "window", a "chunk", or a
        /// "state".
        kind: String,
        /// Tokens of the window or chunk.
        tokens: Option<u64>,
        /// First tokens that a window keeps too (attention sinks).
        sinks: u64,
        /// Tokens per entry.
        ratio: u64,
        /// Layers, in order.
        layers: Vec<usize>,
        /// Bytes of an entry, over all layers.
        entry_bytes: u64,
        /// Tokens of a block; None of a state.
        block_tokens: Option<u64>,
        /// Frames of a block, or of a state: those of a state are consecutive.
        block_frames: u64,
        /// Bytes of a block, or of a state, with padding.
        block_bytes: u64,
        /// Share of a block that is padding, from 0 to 1.
        waste: f64,
        /// Earlier group in whose blocks these entries lie, if any. Such blocks are those of that
        /// group, and what is said of them here is said of both together.
        shares_blocks_of: Option<usize>,
        /// Lists of blocks of a sequence that have these layers: one for each frame of a block;
        /// none of a state.
        lists: Vec<usize>,
        /// Number of the state that a sequence has here.
        state: Option<usize>,
    }
}

record! {
    /// Where a cache of a layer lies.
    LayerPlace {
        /// Number of the group.
        group: usize,
        /// Number of the list whose frames have the layer; None of a state.
        list: Option<usize>,
        /// Number of the state; None of a layer with entries in blocks.
        state: Option<usize>,
        /// Position among the layers of the group in a frame of that list, or in the state.
        index: usize,
    }
}

/// Returns what a sequence keeps, in words for a picture.
pub fn keeps(reach: Reach) -> String {
    match reach {
        Reach::All => "all".to_owned(),
        Reach::Compressed { ratio } => format!("1 in {ratio}"),
        Reach::Window { tokens, sinks: 0 } => format!("window {tokens}"),
        Reach::Window { tokens, sinks } => format!("window {tokens} + {sinks}"),
        Reach::Chunk { tokens } => format!("chunk {tokens}"),
        other => format!("{other:?}").to_lowercase(),
    }
}

fn group(model: &LayerGroups, id: GroupId) -> LayerGroup {
    let group: &Group = &model.groups()[id.0];
    let (kind, tokens, sinks, ratio) = match group.reach() {
        Reach::Compressed { ratio } => ("compressed", None, 0, ratio),
        Reach::Window { tokens, sinks } => ("window", Some(tokens), sinks, 1),
        Reach::Chunk { tokens } => ("chunk", Some(tokens), 0, 1),
        Reach::State => ("state", None, 0, 1),
        _ => ("all", None, 0, 1),
    };
    LayerGroup {
        kind: kind.to_owned(),
        tokens,
        sinks,
        ratio,
        layers: group.layers().to_vec(),
        entry_bytes: group.entry_bytes(),
        block_tokens: group.block_tokens(),
        block_frames: group.block_frames(),
        block_bytes: group.block_bytes(),
        waste: group.waste(),
        shares_blocks_of: group.shares_blocks_of().map(|group| group.0),
        lists: Pool::layer_lists(model, id).collect(),
        state: Pool::layer_state(model, id),
    }
}

/// The layers of a model in groups, for a pool of a model whose layers differ (`Pool.layered`).
///
/// `LayerGroups(layers)` takes for each layer a `LayerCache`, a list of several, or None if it
/// caches nothing. `dtype` is that of K, V and latent vectors; `step_tokens` the largest number of
/// tokens by which a sequence grows in one step, for `frames_held` and `sequences_in`.
///
/// Raises BuildError, which names the layer.
#[pyclass(frozen, name = "LayerGroups", module = "kvpool._kvpool")]
pub struct PyLayerGroups(pub Arc<LayerGroups>);

fn options(dtype: Option<Dtype>, step_tokens: Tokens) -> GroupOptions {
    let options = GroupOptions::new().step_tokens(step_tokens.0 as u64);
    dtype.map_or(options, |dtype| options.dtype(dtype))
}

/// Reads the caches of one layer.
fn caches(layer: &Bound<'_, PyAny>, index: usize) -> Outcome<Vec<LayerCache>> {
    if layer.is_none() {
        return Ok(Vec::new());
    }
    if let Ok(cache) = layer.extract::<PyLayerCache>() {
        return Ok(vec![cache.0]);
    }
    let several = layer.extract::<Vec<PyLayerCache>>().map_err(|_| {
        let kind = layer.get_type();
        PyTypeError::new_err(format!(
            "layer {index} is of {kind}: it is a LayerCache, a list of them, or None"
        ))
    })?;
    Ok(several.into_iter().map(|cache| cache.0).collect())
}

/// Returns the text of a configuration, and the file that it is from.
fn config_text(config: &Bound<'_, PyAny>) -> Outcome<(String, Option<PathBuf>)> {
    if let Ok(mapping) = config.cast::<PyMapping>() {
        let entries = PyDict::new(config.py());
        entries.update(mapping)?;
        let written = config.py().import("json")?.call_method1("dumps", (entries,));
        let written = written.map_err(|error| invalid(format!("the configuration is not JSON: {error}")))?;
        return Ok((written.extract()?, None));
    }
    if let Ok(text) = config.extract::<String>()
        && text.trim_start().starts_with('{')
    {
        return Ok((text, None));
    }
    let mut path = config.extract::<PathBuf>().map_err(|_| {
        let kind = config.get_type();
        PyTypeError::new_err(format!("a configuration is a path, a mapping or its JSON text, not of {kind}"))
    })?;
    if path.is_dir() {
        path.push("config.json");
    }
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok((text, Some(path))),
        Err(error) => {
            let message = format!("{}: {error}", path.display());
            Err(raise("BuildError", message, fields![kind: "Unreadable", path: path]))
        }
    }
}

#[pymethods]
impl PyLayerGroups {
    #[new]
    #[pyo3(signature = (layers, *, dtype="bf16", step_tokens=Tokens(1)), text_signature = r#"(layers, *, dtype="bf16", step_tokens=1)"#)]
    fn new(layers: &Bound<'_, PyAny>, dtype: &str, step_tokens: Tokens) -> Outcome<Self> {
        let options = options(Some(self::dtype(dtype)?), step_tokens);
        let mut of_layers = Vec::new();
        for (index, layer) in layers.try_iter()?.enumerate() {
            of_layers.push(caches(&layer?, index)?);
        }
        Ok(Self(Arc::new(LayerGroups::of_layers(&of_layers, options)?)))
    }

    /// Groups the layers of a Hugging Face `config.json`: its path or that of its folder, a mapping
    /// with its keys, or its text. `dtype` is that of K and V, by default the configuration's.
    ///
    /// Layers that draft tokens are left out. Raises BuildError, with the field that is missing, or
    /// that hints at a kind of layer which is not known.
    #[staticmethod]
    #[pyo3(signature = (config, *, dtype=None, step_tokens=Tokens(1)), text_signature = "(config, *, dtype=None, step_tokens=1)")]
    fn from_config(config: &Bound<'_, PyAny>, dtype: Option<&str>, step_tokens: Tokens) -> Outcome<Self> {
        let options = options(dtype.map(self::dtype).transpose()?, step_tokens);
        let (text, path) = config_text(config)?;
        let model = LayerGroups::from_config(&text, options).map_err(|error| match path {
            Some(path) => refused(&error, format!("{}: {error}", path.display())),
            None => error.into(),
        })?;
        Ok(Self(Arc::new(model)))
    }

    /// The groups, in order of their numbers.
    #[getter]
    fn groups(&self) -> Vec<LayerGroup> {
        (0..self.0.groups().len()).map(|id| group(&self.0, GroupId(id))).collect()
    }

    /// Number of layers, with those that cache nothing.
    #[getter]
    fn layers(&self) -> usize {
        self.0.layers()
    }

    /// Number of lists of blocks that a sequence has.
    #[getter]
    fn lists(&self) -> usize {
        let ends = (0..self.0.groups().len()).map(|id| Pool::layer_lists(&self.0, GroupId(id)).end);
        ends.max().unwrap_or(0)
    }

    /// Tokens of a block in each list.
    #[getter]
    fn list_tokens(&self) -> Vec<u64> {
        let mut tokens = vec![0; self.lists()];
        for (id, group) in self.0.groups().iter().enumerate() {
            let lists = Pool::layer_lists(&self.0, GroupId(id));
            tokens[lists].fill(group.block_tokens().unwrap_or(0));
        }
        tokens
    }

    /// Number of states that a sequence has.
    #[getter]
    fn states(&self) -> usize {
        (0..self.0.groups().len()).filter(|&id| Pool::layer_state(&self.0, GroupId(id)).is_some()).count()
    }

    /// Name of the type of the elements of K, V and latent vectors.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.dtype().name()
    }

    /// Bytes of a frame: blocks of all groups, and states, are frames of this size.
    #[getter]
    fn frame_bytes(&self) -> u64 {
        self.0.frame_bytes()
    }

    /// Number of tokens of which a hit in the prefix cache is a multiple.
    #[getter]
    fn hit_tokens(&self) -> u64 {
        self.0.hit_tokens()
    }

    /// Bytes per token that a sequence keeps for as long as it grows.
    #[getter]
    fn bytes_per_token(&self) -> f64 {
        self.0.bytes_per_token()
    }

    /// Bytes of a long sequence that do not grow with it: states, and full windows.
    #[getter]
    fn fixed_bytes(&self) -> u64 {
        self.0.fixed_bytes()
    }

    /// Largest share of a group's blocks that is padding, from 0 to 1.
    #[getter]
    fn waste(&self) -> f64 {
        self.0.waste()
    }

    /// Returns where the caches of a layer lie: none if it caches nothing. A layer that follows
    /// another has that one's first place.
    fn places(&self, layer: Place) -> Outcome<Vec<LayerPlace>> {
        let model = &*self.0;
        if layer.0 >= model.layers() {
            let message = format!("layer {} is outside {} layers", layer.0, model.layers());
            return Err(raise("InvalidArgument", message, fields![layer: layer.0]));
        }
        let place = |place: kvpool::LayerPlace| LayerPlace {
            group: place.group.0,
            list: place.list,
            state: place.state,
            index: place.index,
        };
        Ok(Pool::layer_places(model, layer.0).into_iter().map(place).collect())
    }

    /// Returns the largest number of frames that a sequence has held by the time that it has
    /// `tokens` tokens.
    fn frames_held(&self, tokens: Tokens) -> u64 {
        self.0.frames_held(tokens.0 as u64)
    }

    /// Returns how many sequences of `tokens` tokens fit into `memory` bytes.
    fn sequences_in(&self, memory: Count, tokens: Tokens) -> u64 {
        self.0.sequences_in(memory.0 as u64, tokens.0 as u64)
    }

    fn __repr__(&self) -> String {
        let (groups, lists, states) = (self.0.groups().len(), self.lists(), self.states());
        format!(
            "<kvpool.LayerGroups: {} layers in {groups} groups, {lists} lists and {states} states, frames of {} bytes>",
            self.0.layers(),
            self.0.frame_bytes()
        )
    }
}

/// Returns the exception for layers that were refused.
fn refused(error: &LayersError, message: String) -> crate::error::Failure {
    let mut fields = match error {
        LayersError::OutOfBounds { field, layer, .. } | LayersError::UnknownKind { field, layer, .. } => {
            fields![field: *field, layer: *layer]
        }
        LayersError::Follows { layer, target } => fields![layer: *layer, target: *target],
        LayersError::LayerOutOfRange { field, .. }
        | LayersError::Length { field, .. }
        | LayersError::Missing { field, .. } => fields![field: *field],
        LayersError::Field { field, .. } => fields![field: &**field],
        LayersError::BlockTooLarge { group, frames, .. } => fields![group: *group, frames: *frames],
        _ => Vec::new(),
    };
    fields.push(("kind", crate::error::field(crate::error::kind(error))));
    raise("BuildError", message, fields)
}

impl From<LayersError> for crate::error::Failure {
    fn from(error: LayersError) -> Self {
        refused(&error, error.to_string())
    }
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyLayerCache>()?;
    module.add_class::<LayerGroup>()?;
    module.add_class::<LayerPlace>()?;
    module.add_class::<PyLayerGroups>()
}
