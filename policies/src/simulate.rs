//! Hit rates of eviction policies on a trace, by capacity, without a pool.
//!
//! Unless requests [run](Requests::Running), they come one after the other. Each looks up its
//! prompt block by block; the blocks before the first that is not cached are its hits. Then it
//! holds all blocks of its prompt and releases them, the last one first, and the blocks above the
//! capacity are evicted. The hit rate is hits over the blocks of all prompts. A capacity is a share
//! of the distinct blocks of the trace.
//!
//! | file | content |
//! |---|---|
//! | `prompts` | the requests of a trace as lists of small numbers |
//! | `cache` | policies behind the pool's own trait, and the bound: the best that is possible with the future known |
//! | `running` | the same, and the bound, in a pool whose blocks belong to running requests for a time |
//! | `s3fifo`, `sieve` | policies of other systems, for comparison |
//! | `chart`, `draw` | the rates as a chart for a terminal, and as SVG, like any other curves |

mod cache;
mod chart;
mod draw;
mod prompts;
mod running;
mod s3fifo;
mod sieve;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use kvpool::prefix::policy::PolicyKind;

use crate::evictable::Evictable;
use cache::Clairvoyant;

pub use chart::chart;
pub use draw::{Curve, Look, Panel, draw, picture};
pub use prompts::{Arrival, Prompts};

/// A policy of a pool, or one to compare with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Contender {
    /// A policy behind the pool's trait.
    Pooled(PolicyKind),
    /// S3-FIFO (SOSP 2023): a small queue that most blocks leave soon, a main queue, and a ghost
    /// queue of blocks evicted from the small one.
    S3Fifo,
    /// SIEVE (NSDI 2024): one queue, a visited bit, and a hand.
    Sieve,
    /// Evicts the block whose next use is last, and of one prompt the end first (Belady, 1966).
    Clairvoyant,
}

/// How long requests hold their blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Requests {
    /// For no time: the capacity is for the cache alone.
    #[default]
    AtOnce,
    /// From their start to their end, as in a pool: the capacity is for them and the cache.
    Running,
}

/// The hit rate of a contender at one capacity.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rate {
    /// The contender.
    pub contender: Contender,
    /// The capacity, as a share of the distinct blocks of the trace.
    pub share: f64,
    /// The capacity in blocks.
    pub blocks: usize,
    /// Hits over blocks of prompts.
    pub hit_rate: f64,
}

/// The rates of one trace: for each contender, those at the same capacities in the same order.
pub type Rates = Vec<Vec<Rate>>;

impl Contender {
    /// The pool's default.
    pub const LRU: Self = Self::Pooled(PolicyKind::Lru);

    /// The contenders compared by default. On a trace without priorities, `priority` equals `lru`.
    pub const USUAL: [Self; 4] = [Self::LRU, Self::S3Fifo, Self::Sieve, Self::Clairvoyant];

    const COMPARED: [Self; 3] = [Self::S3Fifo, Self::Sieve, Self::Clairvoyant];

    /// Returns all contenders.
    pub fn all() -> impl Iterator<Item = Self> {
        PolicyKind::ALL.into_iter().map(Self::Pooled).chain(Self::COMPARED)
    }

    /// Returns the name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pooled(policy) => policy.name(),
            Self::S3Fifo => "s3-fifo",
            Self::Sieve => "sieve",
            Self::Clairvoyant => "clairvoyant",
        }
    }

    /// Returns the hit rate with a capacity of `blocks` blocks; `None` for policies that are not
    /// simulated with [running requests](Requests::Running).
    pub fn hit_rate(self, prompts: &Prompts, blocks: usize, requests: Requests) -> Option<f64> {
        let hits = match (self, requests) {
            (Self::Pooled(policy), Requests::AtOnce) => {
                cache::hits(prompts, blocks, Evictable::new(&*policy.build()))
            }
            (Self::Pooled(policy), Requests::Running) => {
                running::hits(prompts, blocks, Evictable::new(&*policy.build()))
            }
            (Self::Clairvoyant, Requests::AtOnce) => cache::hits(prompts, blocks, Clairvoyant::new(prompts)),
            (Self::Clairvoyant, Requests::Running) => {
                running::hits(prompts, blocks, Clairvoyant::new(prompts))
            }
            (Self::S3Fifo, Requests::AtOnce) => s3fifo::hits(prompts, blocks),
            (Self::Sieve, Requests::AtOnce) => sieve::hits(prompts, blocks),
            (Self::S3Fifo | Self::Sieve, Requests::Running) => return None,
        };
        Some(hits as f64 / prompts.total().max(1) as f64)
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Contender {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::all().find(|contender| contender.name() == name).ok_or_else(|| {
            let names: Vec<_> = Self::all().map(Self::name).collect();
            format!("no policy is called {name:?}; there are {}", names.join(", "))
        })
    }
}

/// Measures each contender at each capacity on each trace, on all cores. `done` is called after
/// each measurement. Returns the rates of each trace, without contenders that are not simulated
/// with running requests, if these are chosen.
pub fn measure(
    traces: &[&Prompts],
    contenders: &[Contender],
    shares: &[f64],
    requests: Requests,
    done: impl Fn() + Sync,
) -> Vec<Rates> {
    let can_run = |contender: &Contender| !matches!(contender, Contender::S3Fifo | Contender::Sieve);
    let contenders: Vec<Contender> = (contenders.iter().copied())
        .filter(|contender| requests == Requests::AtOnce || can_run(contender))
        .collect();
    let jobs: Vec<(&Prompts, Contender, f64)> = (traces.iter())
        .flat_map(|&prompts| contenders.iter().map(move |&contender| (prompts, contender)))
        .flat_map(|(prompts, contender)| shares.iter().map(move |&share| (prompts, contender, share)))
        .collect();
    let (next, rates) = (AtomicUsize::new(0), Mutex::new(vec![None; jobs.len()]));
    let cores = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..cores.min(jobs.len()) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Relaxed);
                    let Some(&(prompts, contender, share)) = jobs.get(at) else { break };
                    let blocks = prompts.capacity(share);
                    let hit_rate = contender.hit_rate(prompts, blocks, requests).unwrap_or_default();
                    let rate = Rate { contender, share, blocks, hit_rate };
                    rates.lock().expect("no measurement panicked")[at] = Some(rate);
                    done();
                }
            });
        }
    });
    let rates = rates.into_inner().expect("no measurement panicked");
    let mut rates = rates.into_iter().map(|rate| rate.expect("every job was done"));
    let mut policy = || rates.by_ref().take(shares.len()).collect();
    let mut trace = || contenders.iter().map(|_| policy()).collect();
    traces.iter().map(|_| trace()).collect()
}

/// Returns the number of leading blocks of a prompt that are cached.
fn leading(prompt: &[u32], is_cached: impl Fn(usize) -> bool) -> usize {
    prompt.iter().take_while(|&&block| is_cached(block as usize)).count()
}
