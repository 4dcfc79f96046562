//! Peers that lie, fail, or are others than they say; engines that do not take what arrives;
//! storages that fail. A node stays within its bounds, and each sequence has one owner.

#[path = "../../../tests/migration/kv.rs"]
#[allow(dead_code)]
mod kv;

mod bounds;
mod doubts;
mod ends;
#[path = "../hooked/mod.rs"]
mod hooked;
mod peers;
mod questions;
mod storage;
mod stress;
mod support;
