//! State shared by the threads of the traffic: turn numbers, the exchange with the node, counters,
//! and halts.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use kvpool_node::admin::Quiet;
use serde_json::{Map, Value, json};

use super::exchange::Exchange;
use super::running::Turn;

/// Findings that are kept; further ones are only counted.
const FINDINGS_MAX: usize = 16;

pub(super) struct Shared {
    /// Differs from those of other processes.
    pub seed: u32,
    next: AtomicU32,
    pub exchange: Arc<Exchange>,
    ended: AtomicBool,
    gate: Mutex<Gate>,
    resumed: Condvar,
    findings: Mutex<Vec<String>>,
    pub counters: Counters,
}

/// Which threads are inside the pool, and how many audits exclude them.
#[derive(Default)]
struct Gate {
    halts: usize,
    /// Threads that may be inside a call of the pool.
    inside: usize,
}

/// Permission of a thread to use the pool, until it is dropped.
pub(super) struct Inside<'a>(&'a Shared);

/// Counters of the traffic, read independently, so all accesses are relaxed.
#[derive(Default)]
pub(super) struct Counters {
    pub completed: AtomicU64,
    pub preempted: AtomicU64,
    pub rejected: AtomicU64,
    pub tokens: AtomicU64,
    pub cached_tokens: AtomicU64,
    pub tokens_verified: AtomicU64,
    pub blocks_corrupt: AtomicU64,
    /// Sequences that came from other nodes.
    pub arrived: AtomicU64,
    /// Sequences of this node that returned: they could not move, or another node moved them here.
    pub returned: AtomicU64,
    /// Blocks of arrived or returned sequences, compared before these continued.
    pub arrived_blocks_verified: AtomicU64,
    /// Sequences from other nodes whose answer was completed here.
    pub arrived_completed: AtomicU64,
    pub findings: AtomicU64,
    pub open: AtomicU64,
    /// Calls to the storage.
    pub transfers: AtomicU64,
}

impl Shared {
    /// Creates the state of threads that share an exchange. Processes that exchange sequences need
    /// different seeds.
    pub fn new(seed: u32, exchange: Arc<Exchange>) -> Self {
        Self {
            seed,
            next: AtomicU32::new(0),
            exchange,
            ended: AtomicBool::new(false),
            gate: Mutex::default(),
            resumed: Condvar::new(),
            findings: Mutex::new(Vec::new()),
            counters: Counters::default(),
        }
    }

    pub fn end(&self) {
        self.ended.store(true, Relaxed);
        // Under the lock, so that no thread decides to wait in between.
        drop(lock(&self.gate));
        self.resumed.notify_all();
    }

    /// Returns the next turn of a conversation.
    pub fn turn(&self) -> Turn {
        // The highest bit marks tokens of no conversation.
        Turn { seed: self.seed, number: self.next.fetch_add(1, Relaxed) & (u32::MAX >> 1) }
    }

    pub fn is_ended(&self) -> bool {
        self.ended.load(Relaxed)
    }

    pub fn is_halted(&self) -> bool {
        lock(&self.gate).halts > 0
    }

    /// Waits until no audit halts the traffic, and enters; `None` once the traffic ends.
    pub fn enter(&self) -> Option<Inside<'_>> {
        let is_halted = |gate: &mut Gate| gate.halts > 0 && !self.is_ended();
        let gate = self.resumed.wait_while(lock(&self.gate), is_halted);
        let mut gate = gate.unwrap_or_else(PoisonError::into_inner);
        if self.is_ended() {
            return None;
        }
        gate.inside += 1;
        Some(Inside(self))
    }

    pub fn find(&self, finding: String) {
        self.counters.findings.fetch_add(1, Relaxed);
        let mut findings = lock(&self.findings);
        if findings.len() < FINDINGS_MAX {
            findings.push(finding);
        }
    }

    pub fn take_findings(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.findings))
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        lock(&self.0.gate).inside -= 1;
    }
}

/// Halts the traffic until it is dropped.
struct Halt(Arc<Shared>);

impl Drop for Halt {
    fn drop(&mut self) {
        lock(&self.0.gate).halts -= 1;
        self.0.resumed.notify_all();
    }
}

impl Quiet for Shared {
    fn halt(self: Arc<Self>) -> Box<dyn Any + Send> {
        lock(&self.gate).halts += 1;
        Box::new(Halt(self))
    }

    fn is_quiet(&self) -> bool {
        let gate = lock(&self.gate);
        gate.halts > 0 && gate.inside == 0
    }

    fn counters(&self) -> Map<String, Value> {
        let at = &self.counters;
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        let mut counters = json!({
            "load": {
                "open": read(&at.open).saturating_sub(read(&self.exchange.taken)),
                "completed": read(&at.completed),
                "preempted": read(&at.preempted),
                "rejected": read(&at.rejected),
                "tokens": read(&at.tokens),
                "cached_tokens": read(&at.cached_tokens),
                "tokens_verified": read(&at.tokens_verified),
                "blocks_corrupt": read(&at.blocks_corrupt),
                "findings": read(&at.findings),
                "arrived": read(&at.arrived),
                "returned": read(&at.returned),
                "arrived_blocks_verified": read(&at.arrived_blocks_verified),
                "arrived_completed": read(&at.arrived_completed),
            }
        });
        if let Some(id) = self.exchange.longest() {
            counters["load"]["longest_sequence"] = id.0.into();
        }
        counters.as_object().cloned().unwrap_or_default()
    }
}

/// Locks; a thread that panics leaves the state consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
