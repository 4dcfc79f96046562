//! The mock driver keeps CUDA's rules, and breaks whatever CUDA does not promise. Each test holds for one rule of
//! `cuda-tests/mock`, over cudarc's own path; each would fail if the rule were not there.
//!
//! Schedules that chance has a part in run with several seeds; a failure prints the seed, and `KVPOOL_SEED` runs it alone.

#[path = "mock/capture.rs"]
mod capture;
#[path = "mock/devices.rs"]
mod devices;
#[path = "mock/failure.rs"]
mod failure;
#[path = "mock/gpu.rs"]
mod gpu;
#[path = "mock/host.rs"]
mod host;
#[path = "mock/memory.rs"]
mod memory;
#[path = "mock/misuse.rs"]
mod misuse;
#[path = "mock/order.rs"]
mod order;
