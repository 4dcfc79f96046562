//! Errors of manifests: what a peer says about blocks is wrong, or does not fit here.

use thiserror::Error;

use crate::dtype::Dtype;

/// Difference between the packed forms of two pools' blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum FormError {
    /// A dimension of the packed block is zero, or the block exceeds the address space.
    #[error("no block has {value} {what}")]
    Impossible {
        /// The dimension.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// A dimension differs. Blocks of other sizes are not cut or joined.
    #[error("blocks of {from} {what} do not fit into blocks of {to}")]
    Dimension {
        /// The dimension.
        what: &'static str,
        /// Its value in the source.
        from: u32,
        /// Its value in the target.
        to: u32,
    },
    /// The element types differ. Values are not converted.
    #[error("blocks of {from} do not fit into blocks of {to}")]
    Dtype {
        /// Element type of the source.
        from: Dtype,
        /// Element type of the target.
        to: Dtype,
    },
    /// One end stores latent vectors, and the other K and V.
    #[error("blocks of latent vectors and blocks of K and V do not fit into each other")]
    Latent,
    /// One end has no scales, the other static ones or one per token and head.
    #[error("the blocks have different kinds of scales")]
    ScaleKind,
    /// A static scale differs: the same codes mean other values. Values are not converted.
    #[error("the static scales of {part} differ in layer {layer}, head {head} of the target")]
    StaticScale {
        /// `"K"` or `"V"`.
        part: &'static str,
        /// The layer.
        layer: u32,
        /// The head, counted within the target.
        head: u32,
    },
    /// One end does not state which heads it holds, and the numbers of heads differ.
    #[error("the heads of the {end} are not known, and the ends hold different numbers of heads")]
    HeadsUnknown {
        /// `"source"` or `"target"`.
        end: &'static str,
    },
    /// The ends hold different heads: bytes are accepted one block at a time, not from a transport.
    #[error("the ends hold different heads, so that blocks do not arrive as a whole")]
    Split,
    /// The heads of the two ends belong to models with different numbers of heads.
    #[error("heads of a model with {from} heads do not fit into a model with {to}")]
    HeadsTotal {
        /// Number of heads of the source's model.
        from: u32,
        /// Number of heads of the target's model.
        to: u32,
    },
    /// A range of heads is empty, or exceeds the model, or is not what the block holds.
    #[error("heads {first}..{end} of {total} are not what a block of {heads} heads holds")]
    HeadRange {
        /// First head.
        first: u32,
        /// Head behind the last one.
        end: u32,
        /// Heads of the model.
        total: u32,
        /// Heads of a block.
        heads: u32,
    },
    /// A packed block has another number of bytes than its form.
    #[error("a packed block of this form has {want} bytes, not {got}")]
    Bytes {
        /// Bytes given.
        got: usize,
        /// Bytes of the form.
        want: usize,
    },
}

/// Reason why a manifest was refused. Nothing was reserved for it.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// The manifest has a version that this library does not read.
    #[error("the manifest has version {got}; this end reads version {want}")]
    Version {
        /// Version of the manifest.
        got: u32,
        /// Version of this library.
        want: u32,
    },
    /// A length exceeds a limit of the target.
    #[error("the manifest states {got} {what}; this end accepts {max}")]
    TooLarge {
        /// The length.
        what: &'static str,
        /// Its value.
        got: u64,
        /// The limit.
        max: u64,
    },
    /// Two statements contradict each other.
    #[error("the manifest states {got} {what}, where its other fields require {want}")]
    Contradiction {
        /// What was counted.
        what: &'static str,
        /// The stated number.
        got: u64,
        /// The number that follows from the other fields.
        want: u64,
    },
    /// A hash is not that of the stated tokens.
    #[error("the hash of block {place} is not that of the manifest's tokens")]
    Hash {
        /// Place of the block in its sequence.
        place: u32,
    },
    /// An extra key has no bytes, or its range no tokens that a sequence can have.
    #[error("extra key {place} of the manifest is empty, or its range is none of a sequence")]
    ExtraKey {
        /// Place of the key in the list.
        place: u32,
    },
    /// The same cached block is listed twice.
    #[error("blocks {first} and {second} of the manifest have the same hash")]
    Repeated {
        /// Place of the first.
        first: u32,
        /// Place of the second.
        second: u32,
    },
    /// The origins of a block are out of order.
    #[error("origins {place} and {} of a block are out of order, or of one cache", place + 1)]
    Origins {
        /// Place of the first of the two.
        place: u32,
    },
    /// The blocks have another packed form.
    #[error("the blocks have another form: {0}")]
    Form(#[from] FormError),
    /// Cached blocks are hashed differently: they would never be found here.
    #[error("the source's prefix cache hashes differently; configure the same hashing and key for both")]
    Hashing,
    /// A further source of the same sequence states something else than the first.
    #[error("the manifests of two sources disagree about {what}")]
    Sources {
        /// The field.
        what: &'static str,
    },
}
