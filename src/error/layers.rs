use std::fmt;

use thiserror::Error;

/// Reason why the layers of a model cannot be grouped. Layers are counted from 0.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum LayersError {
    /// No layer caches anything.
    #[error("no layer caches anything")]
    Empty,
    /// A number is zero, or too large.
    #[error("{field} of layer {layer} is {got}, expected {min} to {max}")]
    OutOfBounds {
        /// Name of the number.
        field: &'static str,
        /// The layer.
        layer: usize,
        /// What was given.
        got: u64,
        /// Smallest value.
        min: u64,
        /// Largest value.
        max: u64,
    },
    /// A layer follows one that keeps no blocks of its own.
    #[error("layer {layer} follows layer {target}, which keeps no blocks of its own")]
    Follows {
        /// The layer.
        layer: usize,
        /// The layer that it follows.
        target: usize,
    },
    /// A field names a layer that the model does not have.
    #[error("{field} names layer {layer}, and the model has {layers}, from {first}")]
    LayerOutOfRange {
        /// The field.
        field: &'static str,
        /// The layer, as the field counts.
        layer: u64,
        /// Number of the first layer, as the field counts.
        first: u64,
        /// Number of layers.
        layers: usize,
    },
    /// A list has another length than there are layers.
    #[error("{field} has {got} entries, and the model has {layers} layers")]
    Length {
        /// The list.
        field: &'static str,
        /// Its length.
        got: usize,
        /// Number of layers.
        layers: usize,
    },
    /// The kind of a layer is unknown.
    #[error("{field}: the kind {kind:?} of layer {layer} is not known")]
    UnknownKind {
        /// The field that names the kind.
        field: &'static str,
        /// The layer.
        layer: usize,
        /// The kind.
        kind: Box<str>,
    },
    /// A field is missing.
    #[error("it has no {field}{hint}")]
    Missing {
        /// The field.
        field: &'static str,
        /// Why the field is needed, or where it may be; can be empty.
        hint: Box<str>,
    },
    /// A field has a value of another type, or one that is not supported.
    #[error("{field}: {reason}")]
    Field {
        /// The field.
        field: Box<str>,
        /// Why its value was refused.
        reason: Box<str>,
    },
    /// The text is not a JSON object.
    #[error("{0}")]
    Json(Box<str>),
    /// A state or ring is longer than a segment, in which its frames must be consecutive.
    #[error("a run of group {group} takes {frames} frames, and a segment has {segment_frames}")]
    BlockTooLarge {
        /// Number of the group.
        group: usize,
        /// Frames of the state or ring.
        frames: u64,
        /// Frames of a segment.
        segment_frames: u64,
    },
}

impl LayersError {
    #[cold]
    pub(crate) fn field(field: &str, reason: impl fmt::Display) -> Self {
        Self::Field { field: field.into(), reason: reason.to_string().into() }
    }
}
