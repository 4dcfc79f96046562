//! Pools in the memory of CUDA devices.
//!
//! Built with the feature `cuda`, which needs no toolkit; a machine without a driver is told so by an error.
//!
//! ```text
//! driver ─ context ─ stream, event ─ watch      the device, and who is told when it got somewhere
//!             │
//!             ├─ staging ─ kernels              buffers on the way, and the programs that run there
//!             │
//!             ├─ arena | adopted ─ pieces       the frames' memory: mapped here, or an engine's tensors
//!             │
//!             └─ storage ─ moves, rows, packed  kvpool's `Storage` over it;  tables: what kernels read
//! ```
//!
//! | file | what |
//! |---|---|
//! | `version`, `error`, `driver` | what can be wrong; whether there is a driver, and which devices it has |
//! | `capture`, `context` | somebody's graph that is being captured is left alone; the device's primary context, and whether it is lost |
//! | `stream`, `event`, `watch` | queues of work, marks in them, and the thread that sees the marks reached |
//! | `staging`, [`params`], `kernels` | buffers between host and device, what kernels are given, the kernels |
//! | `memory`, `commands` | allocations that last; commands and the buffers that they name, until they are over |
//! | `device` | all of that, opened |
//! | `pieces`, `arena`, `adopted` | planes cut for kernels; frames mapped by segments; an engine's own tensors |
//! | `config`, `storage` | how a device is used; the backend |
//! | `moves`, `rows`, `device_rows`, `packed` | frames copied; tokens stored and loaded, from the host and on an engine's stream; frames packed |
//! | `tables` | block tables and slots in the device's memory, patched in place |
//!
//! # Order
//!
//! One rule, and all else follows: **the host believes that device work is over when it has seen the event behind it
//! complete, and not before.** A frame is published, a lease given back, a block sealed, a buffer handed out again only
//! then. Host functions of the driver are hints that it is worth looking; a device that has failed never calls them.
//!
//! # Who may touch what, and when
//!
//! Streams of an engine are enqueued to and asked, never changed. Every call of the driver is made with the device's primary
//! context current, and with the thread's capture mode relaxed, both of which are put back. A device
//! whose context has failed is *lost*, once and for all: nothing is enqueued any more, and everybody who waits is told.

mod adopted;
mod arena;
mod capture;
mod command_scope;
mod config;
mod context;
mod device;
mod device_rows;
mod driver;
mod error;
mod event;
mod kernels;
mod memory;
mod moves;
mod packed;
pub mod params;
mod pieces;
mod rows;
mod staging;
mod storage;
mod stream;
mod tables;
mod version;
mod watch;

pub use config::CudaConfig;
pub use device::Device;
pub use device_rows::DeviceRows;
pub use driver::{DeviceInfo, devices};
pub use error::CudaError;
pub use storage::{CudaStorage, DevicePlane};
pub use stream::StreamPriority;
pub use tables::{DeviceTable, TableError};
pub use version::Version;
