//! The tests of the library, in one program: `cargo test --release --test all stress::` runs those of
//! one file. Beside it are the tests that need a process or features of their own.

mod abandoned;
mod accounts;
mod admission;
mod announced;
mod bad_input;
mod clearing;
mod compaction;
mod compaction_faults;
mod compaction_runs;
mod contiguity;
mod edges;
mod evicted_runs;
mod eviction_order;
mod extra_keys;
mod fence_refused;
mod floors;
mod frame_placement;
mod frame_pool;
mod frame_stress;
mod grouped;
mod growth_hostile;
mod hostile_code;
mod hostile_waiting;
mod metrics;
mod migration;
#[cfg(feature = "model-config")]
mod model_configs;
mod observed;
mod preemption;
mod prefix;
mod prefix_edges;
mod prefix_faults;
mod prefix_hostile;
mod properties;
mod reclaim_stalled;
mod reclaim_task;
mod request_counts;
mod resize;
mod sequence_runs;
#[cfg(feature = "serde")]
mod serde;
mod simulation;
mod storage_conformance;
mod storage_faults;
mod streams;
mod stress;
mod stress_compaction;
mod stress_prefix;
mod stress_waiting;
mod tiles;
mod transfer;
mod uncaching;
mod waiting;
mod window_edges;
mod windows;
