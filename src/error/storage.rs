//! Errors of the storage floor: layouts, sizes, and operations on bytes.

use thiserror::Error;

use crate::dtype::Dtype;
use crate::ids::{DeviceId, FrameId, Run};

/// Reason why a layout was refused.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A field is zero or missing.
    #[error("{field} is zero or missing")]
    Zero {
        /// Name of the field.
        field: &'static str,
    },
    /// The KV heads cannot be divided evenly among the tensor-parallel ranks.
    #[error("{kv_heads} KV heads cannot be divided among {tensor_parallel} tensor-parallel ranks")]
    Indivisible {
        /// Number of KV heads of the whole model.
        kv_heads: usize,
        /// Number of ranks.
        tensor_parallel: usize,
    },
    /// There are fewer heads than tensor-parallel ranks, and the layout does not replicate heads
    /// across ranks.
    #[error(
        "{kv_heads} KV heads cannot be divided among {tensor_parallel} tensor-parallel ranks; with `replicate_kv_heads`, \
         {} ranks keep each head",
        tensor_parallel / kv_heads
    )]
    FewerHeads {
        /// Number of KV heads of the whole model.
        kv_heads: usize,
        /// Number of ranks, a multiple of the heads.
        tensor_parallel: usize,
    },
    /// A latent layout has exactly one head.
    #[error("a latent layout has exactly one head, not {kv_heads}")]
    LatentHeads {
        /// Number of heads given.
        kv_heads: usize,
    },
    /// A size exceeds any address space.
    #[error("{what} is too large to be addressed")]
    TooLarge {
        /// `a block`, `the table of planes` or `the reservation`.
        what: &'static str,
    },
    /// Scales were given for a dtype that is not quantised.
    #[error("{dtype} is not quantised and takes no scales")]
    UnexpectedScales {
        /// Dtype of the layout.
        dtype: Dtype,
    },
    /// The number of static scales is wrong.
    #[error("{got} static scales for {which}; layers x heads needs {want}")]
    ScaleCount {
        /// `k` or `v`.
        which: &'static str,
        /// Number of scales given.
        got: usize,
        /// Number of scales needed.
        want: usize,
    },
    /// A static scale is not a positive normal number.
    #[error(
        "the static scale of {which}, layer {layer}, head {head} is {value:e}; it must be positive and normal"
    )]
    ScaleValue {
        /// `k` or `v`.
        which: &'static str,
        /// Index of the layer.
        layer: usize,
        /// Index of the head on this rank.
        head: usize,
        /// Value of the scale.
        value: f32,
    },
    /// No layout has this name.
    #[error("unknown model {name:?}; the known models are, the closest first, {known}")]
    UnknownModel {
        /// The unknown name.
        name: String,
        /// List of the known names, the most similar first.
        known: String,
    },
    /// The description of a layout, in numbers or a file, describes none.
    #[error("{part}: {reason}")]
    Description {
        /// The part that is wrong: an item, or the file.
        part: String,
        /// Why.
        reason: String,
    },
    /// No element type has this name.
    #[error("unknown element type {name:?}")]
    UnknownDtype {
        /// The unknown name.
        name: String,
    },
}

/// Reason why a pool's size could not be determined.
#[derive(Clone, Copy, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum SizingError {
    /// The share of memory to use is not in `(0, 1]`.
    #[error("the memory ratio is {ratio}; it must be above 0 and at most 1")]
    Ratio {
        /// The ratio given.
        ratio: f64,
    },
    /// The memory holds fewer frames than needed.
    #[error(
        "the memory holds {frames} frames ({bytes} bytes left after the model); at least {min} are needed"
    )]
    TooFew {
        /// Number of frames that fit.
        frames: usize,
        /// Bytes left for frames.
        bytes: u64,
        /// Minimum number of frames.
        min: usize,
    },
    /// The number of frames exceeds what a pool can address.
    #[error("{frames} frames requested; a pool addresses at most {max}")]
    TooMany {
        /// Number of frames requested.
        frames: usize,
        /// Maximum number of frames.
        max: usize,
    },
    /// No rank reported its free memory.
    #[error("no tensor-parallel rank reported its free memory")]
    NoRanks,
    /// The tolerance is not in `[0, 1)`.
    #[error("the tolerance is {tolerance}; it must be at least 0 and below 1")]
    Tolerance {
        /// The tolerance given.
        tolerance: f64,
    },
    /// A rank has much less free memory than another.
    #[error(
        "rank {rank} has {free} bytes free and rank {most_rank} has {most}; they differ by more than the tolerance {tolerance}"
    )]
    Unbalanced {
        /// Rank with the least free memory.
        rank: usize,
        /// Free bytes of that rank.
        free: u64,
        /// Rank with the most free memory.
        most_rank: usize,
        /// Free bytes of that rank.
        most: u64,
        /// Maximum difference between ranks, as a share of the most free memory.
        tolerance: f64,
    },
}

/// Reason why a storage operation failed. No byte was moved.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum StorageError {
    /// The layout is invalid for the number of frames.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The number of frames is zero, above the maximum, or not addressable.
    #[error(
        "{frames} frames with a maximum of {frames_max}; both must be 1 to {limit}, the first not above the second"
    )]
    FrameCount {
        /// Initial number of frames.
        frames: usize,
        /// Maximum number of frames.
        frames_max: usize,
        /// Number of frames that a pool can address.
        limit: usize,
    },
    /// The system provided no memory.
    #[error("could not reserve {bytes} bytes: {reason}")]
    Memory {
        /// Number of bytes requested.
        bytes: usize,
        /// Reason given by the system.
        reason: std::io::ErrorKind,
    },
    /// The layer does not exist.
    #[error("layer {layer} is outside {layers} layers")]
    Layer {
        /// Index of the layer.
        layer: usize,
        /// Number of layers.
        layers: usize,
    },
    /// A slot is out of range.
    #[error("slot {slot} at index {index} is outside {slots} slots")]
    SlotOutOfRange {
        /// Index in the list.
        index: usize,
        /// The slot.
        slot: i64,
        /// Number of slots.
        slots: i64,
    },
    /// Two tokens would be stored to one slot.
    #[error("slot {slot} at index {index} repeats index {first}")]
    SlotRepeated {
        /// Index of the first occurrence.
        first: usize,
        /// Index of the repeated occurrence.
        index: usize,
        /// The slot.
        slot: i64,
    },
    /// The number of bytes is not a multiple of the element size.
    #[error("{bytes} bytes are not a whole number of {dtype} elements")]
    PartialElement {
        /// Element type.
        dtype: Dtype,
        /// Number of bytes.
        bytes: usize,
    },
    /// The element type is neither the layout's nor convertible to it.
    #[error("{which} is {got}, but the layout is {layout}")]
    DtypeMismatch {
        /// `k` or `v`.
        which: &'static str,
        /// Type given.
        got: Dtype,
        /// Type of the layout.
        layout: Dtype,
    },
    /// Quantised codes were given without the dynamic scales that define their values.
    #[error(
        "{which} is {dtype} codes without scales; a layout with dynamic scales converts only f32, f16 and bf16"
    )]
    BareCodes {
        /// `k` or `v`.
        which: &'static str,
        /// Type given.
        dtype: Dtype,
    },
    /// A native type does not hold the layout's elements.
    #[error("elements of type {got} do not hold {layout}")]
    ElementType {
        /// Name of the type.
        got: &'static str,
        /// Type of the layout's elements.
        layout: Dtype,
    },
    /// The layout has no dynamic scales.
    #[error("the layout of {layout} has no dynamic scales")]
    NoScales {
        /// Type of the layout's elements.
        layout: Dtype,
    },
    /// The processor cannot reach the storage's memory.
    #[error("the memory of {device} is not within the processor's reach")]
    NotOnHost {
        /// Device of the storage.
        device: DeviceId,
    },
    /// The storage does not give out its memory.
    #[error("the storage on {device} does not give out its planes")]
    NoPlanes {
        /// Device of the storage.
        device: DeviceId,
    },
    /// Contiguous tensors of this form cannot hold the layout.
    #[error("{form} tensors cannot hold the layout: {reason}")]
    TensorForm {
        /// Form of the tensors.
        form: &'static str,
        /// What does not fit.
        reason: &'static str,
    },
    /// The number of tensors is not the number of layers.
    #[error("{got} tensors given for {which}; the layout has {want} layers")]
    TensorCount {
        /// `k`, `v`, or `k and v`.
        which: &'static str,
        /// Number of tensors given.
        got: usize,
        /// Number of layers.
        want: usize,
    },
    /// A contiguous tensor has the wrong size.
    #[error("the tensor of {which} in layer {layer} has {got} bytes; the frames need {want}")]
    TensorLength {
        /// `k`, `v`, or `k and v`.
        which: &'static str,
        /// Index of the layer.
        layer: usize,
        /// Size given, in bytes.
        got: usize,
        /// Size needed, in bytes.
        want: usize,
    },
    /// The number of elements is wrong.
    #[error("{which} has {got} elements; the slots need {want}")]
    Length {
        /// `k` or `v`.
        which: &'static str,
        /// Number of elements given.
        got: usize,
        /// Number of elements needed.
        want: usize,
    },
    /// A caller's buffer overlaps the storage's own memory.
    #[error("{which} overlaps the storage's own memory")]
    Aliases {
        /// Name of the buffer.
        which: &'static str,
    },
    /// A frame is out of range.
    #[error("frame {frame} at index {index} is outside {frames} frames")]
    FrameOutOfRange {
        /// Index in the list.
        index: usize,
        /// The frame.
        frame: FrameId,
        /// Number of frames.
        frames: usize,
    },
    /// Two copies would write one frame.
    #[error("frame {frame} is the destination of the moves at indices {first} and {index}")]
    DestinationRepeated {
        /// Index of the first occurrence.
        first: usize,
        /// Index of the repeated occurrence.
        index: usize,
        /// The frame.
        frame: FrameId,
    },
    /// One call would read and write the same frame.
    #[error("frame {frame} is the destination at index {index} and the source at index {source_index}")]
    DestinationIsSource {
        /// Index of the write.
        index: usize,
        /// Index of the read.
        source_index: usize,
        /// The frame.
        frame: FrameId,
    },
    /// A run extends past the last frame.
    #[error("the run of {} frames from {} at index {index} is outside {frames} frames", run.len, run.start)]
    RunOutOfRange {
        /// Index in the list.
        index: usize,
        /// The run.
        run: Run,
        /// Number of frames.
        frames: usize,
    },
    /// Two runs of one call would write one frame.
    #[error("the runs at indices {first} and {second} overlap in frame {frame}")]
    RunsOverlap {
        /// Index of the first run.
        first: usize,
        /// Index of the second run.
        second: usize,
        /// A frame in both runs.
        frame: FrameId,
    },
    /// The size of a packed buffer is wrong.
    #[error("the buffer has {got} bytes; the runs pack to {want}")]
    BufferLength {
        /// Number of bytes given.
        got: usize,
        /// Number of bytes needed.
        want: usize,
    },
    /// The number of adopted planes is wrong.
    #[error("{got} planes given; the layout has {want}")]
    PlaneCount {
        /// Number of planes given.
        got: usize,
        /// Number of planes of the layout.
        want: usize,
    },
    /// The address of an adopted plane is null.
    #[error("the base of plane {plane} is null")]
    PlaneNull {
        /// Index of the plane.
        plane: usize,
    },
    /// The base or stride of an adopted plane is not aligned to its elements.
    #[error("plane {plane} (base {base:#x}, stride {frame_stride}) is not aligned to {align} bytes")]
    PlaneMisaligned {
        /// Index of the plane.
        plane: usize,
        /// Address of the plane.
        base: usize,
        /// Stride between frames, in bytes.
        frame_stride: usize,
        /// Required alignment in bytes.
        align: usize,
    },
    /// The frames of an adopted plane overlap each other.
    #[error("the frame stride of plane {plane} is {frame_stride} bytes; its tiles have {tile_bytes}")]
    PlaneStride {
        /// Index of the plane.
        plane: usize,
        /// Stride between frames, in bytes.
        frame_stride: usize,
        /// Size of a tile in bytes.
        tile_bytes: usize,
    },
    /// An adopted plane extends past the end of the address space.
    #[error("plane {plane} does not fit the address space")]
    PlaneTooLarge {
        /// Index of the plane.
        plane: usize,
    },
    /// Two adopted planes overlap.
    #[error("planes {first} and {second} overlap")]
    PlanesOverlap {
        /// Index of the first plane.
        first: usize,
        /// Index of the second plane.
        second: usize,
    },
    /// The block formats of two storages differ: layers, heads, sizes, dtype or scales.
    #[error("blocks of {from} cannot be copied to {to}: the packed formats differ")]
    OtherForm {
        /// Layout of the source.
        from: Box<str>,
        /// Layout of the destination.
        to: Box<str>,
    },
    /// Source and destination have different numbers of frames.
    #[error("cannot copy {from} frames to {to}")]
    RunsDiffer {
        /// Number of frames to read.
        from: usize,
        /// Number of frames to write.
        to: usize,
    },
    /// The stream belongs to another device than the storage.
    #[error("a stream of {stream} was passed to storage on {storage}")]
    ForeignStream {
        /// Device of the stream.
        stream: DeviceId,
        /// Device of the storage.
        storage: DeviceId,
    },
    /// The stream is being captured into a graph, which cannot include this operation.
    #[error("{doing} is not possible on a stream of {device} that is being captured into a graph")]
    Capturing {
        /// The device.
        device: DeviceId,
        /// The operation.
        doing: &'static str,
    },
    /// The device has too little free memory.
    #[error("{device} has {free} of {total} bytes free; {bytes} more are needed")]
    DeviceMemory {
        /// The device.
        device: DeviceId,
        /// Number of bytes requested.
        bytes: u64,
        /// Number of bytes free.
        free: u64,
        /// Number of bytes in total.
        total: u64,
    },
    /// An adopted plane is not in device memory.
    #[error("plane {plane} (base {base:#x}) is not in the memory of {device}: {reason}")]
    PlaneNotOnDevice {
        /// Index of the plane.
        plane: usize,
        /// Address of the plane.
        base: usize,
        /// Device of the storage.
        device: DeviceId,
        /// Answer of the driver about the address.
        reason: Box<str>,
    },
    /// An adopted plane is in the memory of another device.
    #[error("plane {plane} is in the memory of {found}; the storage is on {device}")]
    PlaneOtherDevice {
        /// Index of the plane.
        plane: usize,
        /// Device that holds the plane.
        found: DeviceId,
        /// Device of the storage.
        device: DeviceId,
    },
    /// An adopted plane extends past the allocation in which it begins.
    #[error("plane {plane} needs {needed} bytes from its base; its allocation has {has} left")]
    PlaneOutside {
        /// Index of the plane.
        plane: usize,
        /// Number of bytes from the start of its first frame to the end of its last.
        needed: usize,
        /// Number of bytes from its base to the end of the allocation.
        has: usize,
    },
    /// A caller's device pointer is not aligned to its elements.
    #[error("{which} at {address:#x} with rows of {stride} bytes is not aligned to {align} bytes")]
    RowsMisaligned {
        /// `k`, `v` or `slots`.
        which: &'static str,
        /// The address.
        address: u64,
        /// Stride between rows, in bytes.
        stride: usize,
        /// Required alignment in bytes.
        align: usize,
    },
    /// Rows in a caller's device memory would overlap.
    #[error("the row stride of {which} is {stride} bytes; each row has {bytes}")]
    RowStride {
        /// `k` or `v`.
        which: &'static str,
        /// Stride between rows, in bytes.
        stride: usize,
        /// Size of a row in bytes.
        bytes: usize,
    },
    /// An operation failed; the device remains usable.
    #[error("{device}: {doing} failed: {reason}")]
    Device {
        /// The device.
        device: DeviceId,
        /// The operation.
        doing: &'static str,
        /// Error of the driver.
        reason: Box<str>,
    },
    /// The device or its context failed: it runs nothing any more, and its contents are lost.
    #[error("{device} is lost: {reason}")]
    DeviceLost {
        /// The device.
        device: DeviceId,
        /// Error of the driver.
        reason: Box<str>,
    },
    /// The device is lost, and the end of a copy is not known: the device may still access the frames
    /// of both storages, which must not be used again.
    #[error("{device} is lost, and may still be copying: {reason}")]
    LostWhileCopying {
        /// The device.
        device: DeviceId,
        /// Why the end is not known.
        reason: Box<str>,
    },
}

impl StorageError {
    /// Returns whether the storage's contents are lost.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::DeviceLost { .. } | Self::LostWhileCopying { .. })
    }
}
