use std::time::Duration;

/// When blocks are stored in the tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum TierPolicy {
    /// When they are computed: the tier gets every block, and other nodes find it soon.
    #[default]
    WriteThrough,
    /// Before they are evicted: fewer bytes move, but the blocks of a node that dies are lost.
    OnEviction,
    /// When [`Tiered::offload`](super::Tiered::offload) is called.
    Manual,
}

/// Settings of a [`Tiered`](super::Tiered) pool.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct TieredSettings {
    /// Identifies what the layout does not: the model, and the revision of its weights. Pools with
    /// the same namespace, layout and hashing share blocks.
    pub namespace: String,
    /// When blocks are stored in the tier.
    pub policy: TierPolicy,
    /// Most blocks of one prefix that are brought back. Default 4,096.
    pub blocks_max: usize,
    /// On eviction: blocks move while fewer are free. Default: a sixteenth of the pool.
    pub keep_free: Option<usize>,
    /// Time limit of one batch of puts. Default 5 s.
    pub put_limit: Duration,
    /// Capacity of the queue of blocks to store; further ones are dropped. Default 4,096.
    pub waiting_max: usize,
}

impl TieredSettings {
    /// Creates settings with a namespace.
    pub fn new(namespace: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            policy: TierPolicy::default(),
            blocks_max: 4096,
            keep_free: None,
            put_limit: Duration::from_secs(5),
            waiting_max: 4096,
        }
    }

    /// Sets when blocks are stored in the tier.
    #[must_use]
    pub fn policy(mut self, policy: TierPolicy) -> Self {
        self.policy = policy;
        self
    }
}
