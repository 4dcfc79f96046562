//! What the storage floor refuses: layouts, sizes, and operations on bytes.

use thiserror::Error;

use crate::dtype::Dtype;
use crate::ids::{DeviceId, FrameId, Run};

/// Why a layout was refused.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A field is zero, or was not given.
    #[error("{field} is zero or was not given")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// The tensor-parallel ranks cannot share the heads evenly.
    #[error("{kv_heads} KV heads cannot be divided among {tensor_parallel} tensor-parallel ranks")]
    Indivisible {
        /// KV heads of the whole model.
        kv_heads: usize,
        /// Ranks.
        tensor_parallel: usize,
    },
    /// There are fewer heads than tensor-parallel ranks, and the layout does not say that ranks
    /// keep the same ones.
    #[error(
        "{kv_heads} KV heads cannot be divided among {tensor_parallel} tensor-parallel ranks; `replicate_kv_heads` has \
         {} ranks keep each head",
        tensor_parallel / kv_heads
    )]
    FewerHeads {
        /// KV heads of the whole model.
        kv_heads: usize,
        /// Ranks: a multiple of them.
        tensor_parallel: usize,
    },
    /// A latent layout has one head.
    #[error("a latent layout has one head, not {kv_heads}")]
    LatentHeads {
        /// Heads that were given.
        kv_heads: usize,
    },
    /// Something is larger than any address space.
    #[error("{what} is too large to be addressed")]
    TooLarge {
        /// A block, the table of planes, or the reservation.
        what: &'static str,
    },
    /// Scales were given for a dtype that keeps values as they are.
    #[error("{dtype} is not quantised and takes no scales")]
    UnexpectedScales {
        /// The layout's dtype.
        dtype: Dtype,
    },
    /// Too few or too many static scales.
    #[error("{got} static scales for {which}; layers x heads is {want}")]
    ScaleCount {
        /// `k` or `v`.
        which: &'static str,
        /// Scales that were given.
        got: usize,
        /// Scales that are needed.
        want: usize,
    },
    /// A static scale that nothing can be divided by.
    #[error(
        "the static scale of {which}, layer {layer}, head {head} is {value:e}; it must be positive and normal"
    )]
    ScaleValue {
        /// `k` or `v`.
        which: &'static str,
        /// The layer.
        layer: usize,
        /// The head, on this rank.
        head: usize,
        /// The scale.
        value: f32,
    },
    /// No layout is known by this name.
    #[error("no model is known as {name:?}; known are {known}")]
    UnknownModel {
        /// The name.
        name: String,
        /// The names that are known.
        known: String,
    },
    /// No element type has this name.
    #[error("no element type is called {name:?}")]
    UnknownDtype {
        /// The name.
        name: String,
    },
}

/// Why a pool's size could not be found.
#[derive(Clone, Copy, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum SizingError {
    /// The share of memory to use is not in `(0, 1]`.
    #[error("the memory ratio is {ratio}; it must be above 0 and at most 1")]
    Ratio {
        /// The ratio.
        ratio: f64,
    },
    /// The memory holds fewer frames than needed.
    #[error("room for {frames} frames ({bytes} bytes left after the model); at least {min} are needed")]
    TooFew {
        /// Frames that fit.
        frames: usize,
        /// Bytes left for frames.
        bytes: u64,
        /// Frames needed.
        min: usize,
    },
    /// More frames than a pool can address.
    #[error("{frames} frames; a pool addresses {max} at most")]
    TooMany {
        /// Frames asked for.
        frames: usize,
        /// The most there can be.
        max: usize,
    },
    /// No rank reported its free memory.
    #[error("no tensor-parallel rank reported its free memory")]
    NoRanks,
    /// The tolerance is not in `[0, 1)`.
    #[error("the tolerance is {tolerance}; it must be at least 0 and below 1")]
    Tolerance {
        /// The tolerance.
        tolerance: f64,
    },
    /// A rank has much less free memory than another.
    #[error(
        "rank {rank} has {free} bytes free and rank {most_rank} has {most}: more than a share of {tolerance} apart"
    )]
    Unbalanced {
        /// The rank with the least.
        rank: usize,
        /// Its free bytes.
        free: u64,
        /// The rank with the most.
        most_rank: usize,
        /// Its free bytes.
        most: u64,
        /// The share of the most by which ranks may differ.
        tolerance: f64,
    },
}

/// Why the storage refused. No byte was moved.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum StorageError {
    /// The layout cannot be laid out for so many frames.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Zero frames, more to begin with than ever, or more than can be addressed.
    #[error("{frames} frames of at most {frames_max}; there must be at least one, and no more than {limit}")]
    FrameCount {
        /// Frames to begin with.
        frames: usize,
        /// The most that there may ever be.
        frames_max: usize,
        /// The most that a pool addresses.
        limit: usize,
    },
    /// The system gave no memory.
    #[error("could not reserve {bytes} bytes: {reason}")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// What the system said.
        reason: std::io::ErrorKind,
    },
    /// There is no such layer.
    #[error("layer {layer} of {layers}")]
    Layer {
        /// The layer.
        layer: usize,
        /// Layers that there are.
        layers: usize,
    },
    /// A slot past the last frame.
    #[error("slot {slot} at index {index} is outside {slots} slots")]
    SlotOutOfRange {
        /// Where in the list.
        index: usize,
        /// The slot.
        slot: i64,
        /// Slots that there are.
        slots: i64,
    },
    /// Two tokens would be stored to one slot.
    #[error("slot {slot} at index {index} also stands at index {first}")]
    SlotRepeated {
        /// Where it stands first.
        first: usize,
        /// Where it stands again.
        index: usize,
        /// The slot.
        slot: i64,
    },
    /// The bytes are no whole number of elements.
    #[error("{bytes} bytes are no whole number of {dtype} elements")]
    PartialElement {
        /// The element type.
        dtype: Dtype,
        /// How many bytes.
        bytes: usize,
    },
    /// The elements are of a type that the layout neither is nor converts.
    #[error("{which} is {got}; the layout keeps {layout}")]
    DtypeMismatch {
        /// `k` or `v`.
        which: &'static str,
        /// The type given.
        got: Dtype,
        /// The layout's type.
        layout: Dtype,
    },
    /// Codes without the dynamic scales that give them their meaning.
    #[error(
        "{which} is bare {dtype} codes; the layout scales dynamically and converts from f32, f16 and bf16 only"
    )]
    BareCodes {
        /// `k` or `v`.
        which: &'static str,
        /// The type given.
        dtype: Dtype,
    },
    /// The wrong number of elements.
    #[error("{which} has {got} elements; so many slots need {want}")]
    Length {
        /// `k` or `v`.
        which: &'static str,
        /// Elements given.
        got: usize,
        /// Elements needed.
        want: usize,
    },
    /// A caller's buffer lies inside the storage's own memory.
    #[error("{which} lies inside the storage's own memory")]
    Aliases {
        /// Which buffer.
        which: &'static str,
    },
    /// A frame that does not exist.
    #[error("frame {frame} at index {index} is outside {frames} frames")]
    FrameOutOfRange {
        /// Where in the list.
        index: usize,
        /// The frame.
        frame: FrameId,
        /// Frames that there are.
        frames: usize,
    },
    /// Two copies would write one frame.
    #[error("frame {frame} is the destination of the moves at {first} and {index}")]
    DestinationRepeated {
        /// Where it stands first.
        first: usize,
        /// Where it stands again.
        index: usize,
        /// The frame.
        frame: FrameId,
    },
    /// A frame would be read and written by one call.
    #[error("frame {frame} is the destination at index {index} and the source at index {source_index}")]
    DestinationIsSource {
        /// Where it is written.
        index: usize,
        /// Where it is read.
        source_index: usize,
        /// The frame.
        frame: FrameId,
    },
    /// A run that reaches past the last frame.
    #[error("the run of {} frames from {} at index {index} is outside {frames} frames", run.len, run.start)]
    RunOutOfRange {
        /// Where in the list.
        index: usize,
        /// The run.
        run: Run,
        /// Frames that there are.
        frames: usize,
    },
    /// Two runs of one call would write one frame.
    #[error("the runs at {first} and {second} overlap in frame {frame}")]
    RunsOverlap {
        /// The index of one run.
        first: usize,
        /// The index of the other.
        second: usize,
        /// A frame that is in both.
        frame: FrameId,
    },
    /// A packed buffer of the wrong size.
    #[error("the buffer has {got} bytes; these runs pack to {want}")]
    BufferLength {
        /// Bytes given.
        got: usize,
        /// Bytes needed.
        want: usize,
    },
    /// The wrong number of adopted planes.
    #[error("{got} planes were given; the layout has {want}")]
    PlaneCount {
        /// Planes given.
        got: usize,
        /// Planes of the layout.
        want: usize,
    },
    /// An adopted plane has no address.
    #[error("plane {plane} has a null base")]
    PlaneNull {
        /// The plane's index.
        plane: usize,
    },
    /// An adopted plane does not start on, or step by, whole elements.
    #[error("plane {plane} (base {base:#x}, stride {frame_stride}) is not aligned to {align} bytes")]
    PlaneMisaligned {
        /// The plane's index.
        plane: usize,
        /// Its address.
        base: usize,
        /// Bytes between its frames.
        frame_stride: usize,
        /// The alignment that it needs.
        align: usize,
    },
    /// The frames of an adopted plane overlap each other.
    #[error("plane {plane} steps by {frame_stride} bytes; its tiles have {tile_bytes}")]
    PlaneStride {
        /// The plane's index.
        plane: usize,
        /// Bytes between its frames.
        frame_stride: usize,
        /// Bytes of a tile.
        tile_bytes: usize,
    },
    /// An adopted plane reaches past the end of the address space.
    #[error("plane {plane} does not fit the address space")]
    PlaneTooLarge {
        /// The plane's index.
        plane: usize,
    },
    /// Two adopted planes share bytes.
    #[error("planes {first} and {second} overlap")]
    PlanesOverlap {
        /// The index of one plane.
        first: usize,
        /// The index of the other.
        second: usize,
    },
    /// Blocks of another storage are not what these are: other layers, heads, sizes, dtype or scales.
    #[error("blocks of {from} cannot be copied to {to}: the packed forms differ")]
    OtherForm {
        /// The layout that was to be read.
        from: Box<str>,
        /// The layout that was to be written.
        to: Box<str>,
    },
    /// One side names more frames than the other.
    #[error("{from} frames to be copied to {to}")]
    RunsDiffer {
        /// Frames to read.
        from: usize,
        /// Frames to write.
        to: usize,
    },
    /// The stream is not one of the storage's device.
    #[error("a stream of {stream} was given to storage on {storage}")]
    ForeignStream {
        /// The stream's device.
        stream: DeviceId,
        /// The storage's.
        storage: DeviceId,
    },
    /// The stream is being captured into a graph, of which this cannot be part.
    #[error("{doing} on a stream of {device} that is being captured into a graph")]
    Capturing {
        /// The device.
        device: DeviceId,
        /// What was asked for.
        doing: &'static str,
    },
    /// The device has too little memory.
    #[error("{device} has {free} of {total} bytes free; {bytes} more are needed")]
    DeviceMemory {
        /// The device.
        device: DeviceId,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes that are free.
        free: u64,
        /// Bytes that it has.
        total: u64,
    },
    /// An adopted plane is not in the memory of a device.
    #[error("plane {plane} (base {base:#x}) is not in the memory of {device}: {reason}")]
    PlaneNotOnDevice {
        /// The plane's index.
        plane: usize,
        /// Its address.
        base: usize,
        /// The storage's device.
        device: DeviceId,
        /// What the driver said of the address.
        reason: Box<str>,
    },
    /// An adopted plane is in the memory of another device.
    #[error("plane {plane} is in the memory of {found}; the storage is on {device}")]
    PlaneOtherDevice {
        /// The plane's index.
        plane: usize,
        /// Where it is.
        found: DeviceId,
        /// The storage's device.
        device: DeviceId,
    },
    /// An adopted plane reaches past the allocation that it begins in.
    #[error("plane {plane} needs {needed} bytes from its base; its allocation has {has}")]
    PlaneOutside {
        /// The plane's index.
        plane: usize,
        /// Bytes from its first frame's first byte to its last frame's last.
        needed: usize,
        /// Bytes from its first byte to the allocation's end.
        has: usize,
    },
    /// A caller's device pointer is not aligned to its elements.
    #[error("{which} at {address:#x} with rows of {stride} bytes is not aligned to {align} bytes")]
    RowsMisaligned {
        /// `k`, `v` or `slots`.
        which: &'static str,
        /// The address.
        address: u64,
        /// Bytes from one row to the next.
        stride: usize,
        /// The alignment that it needs.
        align: usize,
    },
    /// Rows of a caller's device memory that would overlap.
    #[error("rows of {which} are {stride} bytes apart; each has {bytes}")]
    RowStride {
        /// `k` or `v`.
        which: &'static str,
        /// Bytes from one row to the next.
        stride: usize,
        /// Bytes of a row.
        bytes: usize,
    },
    /// The device refused, and goes on.
    #[error("{device}: {doing} failed: {reason}")]
    Device {
        /// The device.
        device: DeviceId,
        /// What was asked for.
        doing: &'static str,
        /// What its driver said.
        reason: Box<str>,
    },
    /// The device, or its context, has failed: nothing runs there any more, and what it held is lost.
    #[error("{device} is lost: {reason}")]
    DeviceLost {
        /// The device.
        device: DeviceId,
        /// What its driver said.
        reason: Box<str>,
    },
}

impl StorageError {
    /// Whether everything that the storage held is lost.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::DeviceLost { .. })
    }
}
