//! Shared code of the tests: the naive model of a pool, the scalar reference of storage, the
//! conformance suite.

pub mod conformance;
pub mod hints;
pub mod leases;
pub mod model;
pub mod prefix;
pub mod prompts;
pub mod rng;
pub mod scalar;
pub mod steps;
pub mod storages;
pub mod threads;
pub mod transport_suite;
