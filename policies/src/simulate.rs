//! Hit rates of eviction policies on a trace, by capacity, without a pool.
//!
//! Unless requests [run](Requests), they come one after the other. Each looks up its
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
//! | `turns` | which requests of a session follow which |
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
mod turns;

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
pub use turns::Turn;

use running::{Counts, Loop};

/// A policy of a pool, or one to compare with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Contender {
    /// A policy behind the pool's trait.
    Pooled(PolicyKind),
    /// `sessions`, which is told the think times of sessions.
    Told {
        /// And when a session is over.
        ends: bool,
    },
    /// S3-FIFO (SOSP 2023): a small queue that most blocks leave soon, a main queue, and a ghost
    /// queue of blocks evicted from the small one.
    S3Fifo,
    /// SIEVE (NSDI 2024): one queue, a visited bit, and a hand.
    Sieve,
    /// Evicts the block whose next use is last, and of one prompt the end first (Belady, 1966); in
    /// sessions, the block that is never used again, or whose session returns last.
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
    /// The same, in a closed loop: a request of a session arrives when the think time after the end
    /// of its last one is over.
    Sessions {
        /// The number of sessions at a time; where one ends, the next one begins.
        at_a_time: usize,
        /// The number of orders of sessions that are measured, that of the trace first.
        orders: u32,
    },
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
    /// With requests that run: blocks of prompts that were computed before and did not hit, over
    /// blocks of prompts.
    pub recomputed: Option<f64>,
}

/// The rates of one trace: for each contender, those at the same capacities in the same order.
pub type Rates = Vec<Vec<Rate>>;

impl Contender {
    /// The pool's default.
    pub const LRU: Self = Self::Pooled(PolicyKind::Lru);

    /// The contenders compared by default. On a trace without priorities, `priority` equals `lru`.
    pub const USUAL: [Self; 4] = [Self::LRU, Self::S3Fifo, Self::Sieve, Self::Clairvoyant];

    /// The contenders compared by default in [sessions](Requests::Sessions).
    pub const OF_SESSIONS: [Self; 5] = [
        Self::LRU,
        Self::Pooled(PolicyKind::Sessions),
        Self::Told { ends: false },
        Self::Told { ends: true },
        Self::Clairvoyant,
    ];

    const COMPARED: [Self; 5] =
        [Self::Told { ends: false }, Self::Told { ends: true }, Self::S3Fifo, Self::Sieve, Self::Clairvoyant];

    /// Returns all contenders.
    pub fn all() -> impl Iterator<Item = Self> {
        PolicyKind::ALL.into_iter().map(Self::Pooled).chain(Self::COMPARED)
    }

    /// Returns the name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pooled(policy) => policy.name(),
            Self::Told { ends: false } => "sessions-told",
            Self::Told { ends: true } => "sessions-told-ends",
            Self::S3Fifo => "s3-fifo",
            Self::Sieve => "sieve",
            Self::Clairvoyant => "clairvoyant",
        }
    }

    /// Returns whether it is simulated for such requests.
    pub fn is_simulated(self, requests: Requests) -> bool {
        match self {
            Self::Pooled(_) | Self::Clairvoyant => true,
            Self::Told { .. } => matches!(requests, Requests::Sessions { .. }),
            Self::S3Fifo | Self::Sieve => requests == Requests::AtOnce,
        }
    }

    /// Returns the rate with a capacity of `blocks` blocks; `None` if it is not
    /// [simulated](Self::is_simulated).
    pub fn rate(self, prompts: &Prompts, share: f64, blocks: usize, requests: Requests) -> Option<Rate> {
        if !self.is_simulated(requests) {
            return None;
        }
        let total = prompts.total().max(1) as f64;
        let rate = |hits: f64, recomputed: Option<f64>| {
            let (hit_rate, recomputed) = (hits / total, recomputed.map(|recomputed| recomputed / total));
            Some(Rate { contender: self, share, blocks, hit_rate, recomputed })
        };
        let orders = match requests {
            Requests::AtOnce => return rate(self.hits(prompts, blocks) as f64, None),
            Requests::Running => vec![None],
            Requests::Sessions { at_a_time, orders } => {
                let tells_returns = matches!(self, Self::Told { .. } | Self::Clairvoyant);
                let tells_ends = matches!(self, Self::Told { ends: true } | Self::Clairvoyant);
                (0..u64::from(orders.max(1)))
                    .map(|order| Some(Loop { at_a_time, order, tells_returns, tells_ends }))
                    .collect()
            }
        };
        let mut all = Counts::default();
        for &sessions in &orders {
            let counts = match self {
                Self::Clairvoyant => {
                    running::counts(prompts, blocks, sessions, Clairvoyant::new(prompts, sessions.is_some()))
                }
                _ => running::counts(prompts, blocks, sessions, Evictable::new(&*self.policy().build())),
            };
            all.hits += counts.hits;
            all.recomputed += counts.recomputed;
        }
        let mean = |count: usize| count as f64 / orders.len() as f64;
        rate(mean(all.hits), Some(mean(all.recomputed)))
    }

    /// Returns its policy of a pool; for others the default.
    const fn policy(self) -> PolicyKind {
        match self {
            Self::Pooled(policy) => policy,
            Self::Told { .. } => PolicyKind::Sessions,
            _ => PolicyKind::Lru,
        }
    }

    /// Returns the hits if requests take no time.
    fn hits(self, prompts: &Prompts, blocks: usize) -> usize {
        match self {
            Self::S3Fifo => s3fifo::hits(prompts, blocks),
            Self::Sieve => sieve::hits(prompts, blocks),
            Self::Clairvoyant => cache::hits(prompts, blocks, Clairvoyant::new(prompts, false)),
            _ => cache::hits(prompts, blocks, Evictable::new(&*self.policy().build())),
        }
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
/// each measurement. Returns the rates of each trace, without contenders that are not
/// [simulated](Contender::is_simulated).
pub fn measure(
    traces: &[&Prompts],
    contenders: &[Contender],
    shares: &[f64],
    requests: Requests,
    done: impl Fn() + Sync,
) -> Vec<Rates> {
    let contenders: Vec<Contender> =
        (contenders.iter().copied()).filter(|contender| contender.is_simulated(requests)).collect();
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
                    let rate = contender.rate(prompts, share, blocks, requests);
                    rates.lock().expect("no measurement panicked")[at] = rate;
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
