//! Tests that the mock driver keeps CUDA's rules, and violates every expectation that CUDA does not
//! guarantee. Each test covers one rule of `cuda-tests/mock`, through cudarc, and fails without
//! that rule.
//!
//! Tests with random schedules run with several seeds; a failure prints the seed, and `KVPOOL_SEED`
//! runs that seed alone.

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
