//! Pools in the memory of CUDA devices.
//!
//! The build needs no toolkit. On a machine without a driver, opening a device returns an error.
//!
//! [`CudaStorage`] is a [`Storage`](kvpool::storage::Storage), over which
//! [`PoolBuilder::storage`](kvpool::PoolBuilder::storage) builds a pool.
//!
//! ```text
//! driver ─ context ─ stream, event ─ watch      the device, and notifications of its progress
//!             │
//!             ├─ staging ─ kernels              transfer buffers, and the kernels
//!             │
//!             ├─ arena | adopted ─ pieces       the frames' memory: mapped, or an engine's tensors
//!             │
//!             └─ storage ─ moves, rows, packed, crossing, host_frames  the `Storage` backend;  tables: block tables
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `version`, `error`, `driver` | errors; the driver and its devices |
//! | `gate` | keeps calls that wait for all work of a device apart from copies to other devices |
//! | `capture`, `context` | isolation from graph captures; the device's primary context |
//! | `stream`, `event` | streams and events |
//! | `engines`, `watch` | pending events of engines; the thread that watches events complete |
//! | `staging`, [`params`], [`launch`], `kernels` | transfer buffers, kernel parameters, launches, kernels |
//! | `memory`, `command_scope` | long-lived allocations; commands in flight and their buffers |
//! | `device` | an open device, with all of the above |
//! | `pieces`, `arena`, `adopted` | planes cut for kernels; mapped frames; an engine's tensors |
//! | `config`, `storage` | configuration; the backend |
//! | `pending`, `moves`, `packed` | copies on write in progress; copies of frames; packed frames |
//! | `crossing` | packed frames on their way to another device |
//! | `host_pages`, `registered`, `host_rows`, `host_frames` | pages of the host, and locked ones; copies of rows; frames of host storages |
//! | `rows`, `device_rows` | stores and loads of tokens, from the host or on an engine's stream |
//! | `tables` | block tables and slots in device memory, updated in place |
//!
//! # Ordering
//!
//! One rule determines all others: **the host regards device work as complete when it has seen the
//! event behind it complete, and not before.** Only then is a frame published, a lease released, a
//! block sealed, or a buffer reused. Host functions of the driver are only hints to check; a failed
//! device never calls them.
//!
//! # Access rules
//!
//! Streams of an engine are enqueued to and queried, but never changed. Every driver call is made
//! with the device's primary context current and the thread's capture mode relaxed; both are
//! restored afterwards. A device whose context has failed is *lost* for good: no further work is
//! enqueued, and every waiter gets an error.

mod adopted;
mod arena;
mod capture;
mod command_scope;
mod config;
mod context;
mod crossing;
mod device;
mod device_rows;
mod driver;
mod engines;
mod error;
mod event;
mod gate;
mod host_frames;
mod host_pages;
mod host_rows;
mod kernels;
pub mod launch;
mod memory;
mod moves;
mod packed;
pub mod params;
mod pending;
mod pieces;
mod registered;
mod rows;
mod staging;
mod storage;
mod stream;
mod tables;
mod version;
mod watch;

pub use arena::MemorySharing;
pub use config::CudaConfig;
pub use device::Device;
pub use device_rows::DeviceRows;
pub use driver::{DeviceInfo, devices};
pub use error::CudaError;
pub use kernels::{KernelImage, Kernels};
pub use storage::CudaStorage;
pub use stream::StreamPriority;
pub use tables::{DeviceTable, TableError};
pub use version::Version;

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
