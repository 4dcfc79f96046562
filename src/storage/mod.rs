//! Storage of blocks' bytes: the layout of K and V in memory, and the operations on it.
//!
//! This layer handles frames and slots, and does not know block ids. A *slot* is one token's place,
//! `frame * block_tokens + offset`. Negative slots are skipped, which allows padded batches.
//!
//! | file | contents |
//! |---|---|
//! | `elements`, `fp8`, `quant` | typed views of rows, 8-bit floats, codes and scales |
//! | `plane`, `layout`, `models`, `model_config`, `planes` | planes, the shape of a block, presets, shapes from configurations, the table of planes |
//! | [`groups`] | groups of layers, for models whose layers differ: their memory |
//! | `sizing` | the number of frames that fit into memory |
//! | `check` | validation, before any byte moves |
//! | `host_memory` | the memory that the system and the container have left |
//! | `tiles`, `stream` | routines that move bytes, for every layout |
//! | `memory`, `page_lock`, `adopted`, `adopted_tensors`, `host` | a reservation, its locked pages, an engine's memory, the host backend |
//! | `tensors`, `host_tile` | planes for other libraries, one frame's memory in reach of the processor |
//! | `frame_move`, `storage` | a copy between frames, the trait of all backends |
//! | `exchange` | the form and the runs of copies between storages |
//! | `device_stream`, [`backend`] | a device's work queue; what backends in other crates use |
//!
//! # Exclusion
//!
//! Many threads access frames through `&self`; the caller provides exclusion by owning frames. Each
//! operation on bytes is therefore an `unsafe fn` with one rule, [the frame
//! rule](Storage#the-frame-rule). All else is checked first: an error means that no byte was moved.
//!
//! # Device backends
//!
//! [`store`](Storage::store), [`load`](Storage::load), [`copy`](Storage::copy),
//! [`pack`](Storage::pack), [`unpack`](Storage::unpack) and [`zero`](Storage::zero) are synchronous
//! on devices too, for tools, tests and transfers. An engine's kernels run on its streams, and get
//! slots and frames from batches; for these there are [`copy_then`](Storage::copy_then) on the
//! backend's own stream, [`copy_on`](Storage::copy_on) on an engine's stream, and notifications
//! [`after`](Storage::after) a point in a stream.
//!
//! The frame rule holds until the *work* is complete, not just the call. The batch clock ensures
//! this: a frame is reused once every batch that could access it has ended, and a batch on a stream
//! ends when the stream reaches its end.

mod adopted;
mod adopted_tensors;
pub mod backend;
mod check;
mod device_stream;
mod elements;
mod exchange;
mod fp8;
mod frame_move;
pub mod groups;
mod host;
mod host_memory;
mod host_tile;
mod layout;
mod memory;
#[cfg(feature = "model-config")]
mod model_config;
mod models;
mod page_lock;
mod plane;
mod planes;
mod quant;
mod sizing;
#[expect(clippy::module_inception, reason = "the floor is named after its main trait")]
mod storage;
mod stream;
mod tensors;
mod tiles;

pub use crate::dtype::Dtype;
pub use adopted::AdoptedPlane;
pub use adopted_tensors::{AdoptedTensor, AdoptedTensors};
pub use device_stream::DeviceStream;
pub use elements::{Element, Elements, ElementsMut};
pub(crate) use exchange::check_form;
pub use frame_move::{CopyDone, FrameMove};
pub use host::HostStorage;
pub use host_memory::host_free_bytes;
pub use host_tile::HostTile;
pub use layout::{Arrangement, KvLayout, KvLayoutBuilder, KvPlanes, Scales};
pub use plane::{Plane, PlaneKind, PlanePart, TILE_ALIGN};
pub use planes::PlaneTable;
pub use sizing::{Sizing, check_balance};
pub use storage::{Storage, WAVE_BYTES};
pub use tensors::{LayerPlanes, PlaneTensor, StoragePlanes};
