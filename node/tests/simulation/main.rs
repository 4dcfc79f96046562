//! Seeded schedules of two to four nodes over a network that delays, doubles, reorders, loses,
//! cuts and heals, with nodes that stop and die at any step.
//!
//! At every step: no sequence runs on two nodes; none is lost unless a node died that owned it;
//! blocks are conserved; no migration commits twice, nor in a reservation that has ended; every
//! wait has a deadline; a commit says the truth about its source's cache, and a copy of a cleared
//! cache is not committed as current. A copy in parts commits with all of them, and each part has
//! one owner: the node that runs it, or the one that runs the whole. In the end, after all has
//! healed: each sequence runs on one node; no reservation, held copy, committed copy that waits to
//! be forgotten, or machine is left; each request has one outcome.
//!
//! `KVPOOL_SIM_SEED=17` runs one schedule and prints its steps; `KVPOOL_SIM_SCHEDULES` sets how many
//! are run.

mod check;
mod engine;
mod faults;
mod node;
mod pool;
mod work;
mod world;

use std::collections::BTreeMap;

use world::World;

/// Events that the schedules must reach; otherwise they check less than they say.
const REACHED: &[&str] = &[
    "Source: done, Migrate",
    "Source: done, Replicate",
    "Source: done, Cached",
    "Source: done, Fetch",
    "Target: done, Migrate",
    "Target: done, Replicate",
    "Target: done, Cached",
    "Target: done, Fetch",
    "Source: done, part of Migrate",
    "Source: done, part of Replicate",
    "Target: done, part of Migrate",
    "Target: done, part of Replicate",
    "Target: OtherPart",
    "Source: Peer OtherPart",
    "Source: refused, Part",
    "Source: Peer Cleared",
    "Target: Cleared",
    "commit of a cleared copy",
    "absent part",
    "Source: done with blocks sent again",
    "Source: refused, Full",
    "Source: refused, Exists",
    "Source: refused, Busy",
    "Source: refused, NotAsked",
    "Source: Checksums",
    "Source: Cancelled",
    "Source: Silent",
    "Source: Limit",
    "Source: PeerEnded",
    "Source: LinkLost",
    "Source: Transfer",
    "Source: Local",
    "Source: Peer Lapsed",
    "Source: Peer Local",
    "Target: Silent",
    "Target: Limit",
    "Target: PeerEnded",
    "Target: LinkLost",
    "Target: Cancelled",
    "Target: Peer Checksums",
    "Target: Peer Unknown",
    "Unconfirmed",
    "in doubt: Silent",
    "in doubt: LinkLost",
    "a doubt ended: committed",
    "a doubt ended: aborted",
    "a doubt ended: the peer's process is another",
    "message for an earlier process",
    "message of an earlier process",
    "transfer that never ends",
    "same id",
    "same sequence",
    "unconfirmed sequence",
    "stop",
    "death",
    "cut",
];

/// Prints the seed of a schedule that panics.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed: run it again with KVPOOL_SIM_SEED={}", self.0);
        }
    }
}

fn run(seed: u64, trace: bool, counts: &mut BTreeMap<String, u64>) {
    let _seed = Seed(seed);
    let mut world = World::new(seed, trace);
    if let Err(what) = world.run() {
        panic!("schedule {seed}, at {} ms: {what}", world.now);
    }
    for (what, count) in &world.checks.counts {
        *counts.entry(what.clone()).or_default() += count;
    }
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text} is not a number")))
}

#[test]
fn schedules() {
    let mut counts = BTreeMap::new();
    if let Some(seed) = number("KVPOOL_SIM_SEED") {
        return run(seed, true, &mut counts);
    }
    let schedules = number("KVPOOL_SIM_SCHEDULES").unwrap_or(10_000);
    for seed in 0..schedules {
        run(seed, false, &mut counts);
    }
    for (what, count) in &counts {
        println!("{count:>9} {what}");
    }
    let missed: Vec<_> = REACHED.iter().filter(|what| !counts.contains_key(**what)).collect();
    assert!(missed.is_empty() || schedules < 5_000, "no schedule reached: {missed:?}");
}
