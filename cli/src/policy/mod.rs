//! How well eviction policies do on a trace: hit rates by capacity, and nothing else of a pool.
//!
//! Requests come one after the other. Each looks up its prompt block by block; the blocks before the first that is not
//! cached are its hits. Then it has all blocks of its prompt, and releases them, the last one first; and what is over the
//! capacity is evicted. The hit rate is hits over all blocks of all prompts. A capacity is a share of the trace's distinct
//! blocks.
//!
//! | file | what |
//! |---|---|
//! | `prompts` | a trace as lists of small numbers |
//! | `pooled` | the pool's own policies, through the very interface that the pool has, over exact queues |
//! | `s3fifo`, `sieve` | what others do, for comparison |
//! | `clairvoyant` | the best that could be done if the future were known: a bound |
//! | `chart`, `draw` | the rates as a chart for a terminal, and as SVG |

mod chart;
mod clairvoyant;
mod draw;
mod pooled;
mod prompts;
mod s3fifo;
mod sieve;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

use kvpool::prefix::policy::PolicyKind;

pub use chart::chart;
pub use draw::draw;
pub use prompts::Prompts;

/// A policy of the pool, or one to compare with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Contender {
    /// One that a pool can have.
    Pooled(PolicyKind),
    /// S3-FIFO (SOSP 2023): a small queue that most blocks leave at once, a main queue, and a ghost of the small one.
    S3Fifo,
    /// SIEVE (NSDI 2024): one queue, a visited bit, and a hand.
    Sieve,
    /// Evicts what is used last from now on, and of one prompt the end first (Belady, 1966).
    Clairvoyant,
}

/// How a contender did at one capacity.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rate {
    /// Who.
    pub contender: Contender,
    /// The capacity, as a share of the trace's distinct blocks.
    pub share: f64,
    /// The capacity.
    pub blocks: usize,
    /// Hits over blocks of prompts.
    pub hit_rate: f64,
}

impl Contender {
    /// The pool's default.
    pub const LRU: Self = Self::Pooled(PolicyKind::Lru);

    /// The policy that learns, which tables and pictures set off from the others.
    pub const FORESIGHT: Self = Self::Pooled(PolicyKind::Foresight);

    /// Those that a table has unless told otherwise. Without priorities in the trace, `priority` is `lru`.
    pub const USUAL: [Self; 5] = [Self::LRU, Self::S3Fifo, Self::Sieve, Self::FORESIGHT, Self::Clairvoyant];

    const COMPARED: [Self; 3] = [Self::S3Fifo, Self::Sieve, Self::Clairvoyant];

    /// All that there are.
    pub fn all() -> impl Iterator<Item = Self> {
        PolicyKind::ALL.into_iter().map(Self::Pooled).chain(Self::COMPARED)
    }

    /// The name, as `--policies` takes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pooled(kind) => kind.name(),
            Self::S3Fifo => "s3-fifo",
            Self::Sieve => "sieve",
            Self::Clairvoyant => "clairvoyant",
        }
    }

    /// Its hit rate with so many blocks.
    pub fn hit_rate(self, prompts: &Prompts, blocks: usize) -> f64 {
        let hits = match self {
            Self::Pooled(kind) => pooled::hits(prompts, blocks, &*kind.build(blocks)),
            Self::S3Fifo => s3fifo::hits(prompts, blocks),
            Self::Sieve => sieve::hits(prompts, blocks),
            Self::Clairvoyant => clairvoyant::hits(prompts, blocks),
        };
        hits as f64 / prompts.total().max(1) as f64
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

/// The leading blocks of a prompt that are cached.
fn leading(prompt: &[u32], is_cached: impl Fn(usize) -> bool) -> usize {
    prompt.iter().take_while(|&&block| is_cached(block as usize)).count()
}
