use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvpool::prefix::PrefixKeys;
use kvpool::transfer::PromptBlocks;
use kvpool::{Pool, PrefixError, TransferError};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::super::breaker::BreakerState;
use super::super::error::TierError;
use super::super::shared_tier::SharedTier;
use super::follow::Flushes;
use super::link::{Link, PUTS_AT_ONCE, TierReport, TieredCounters};
use super::settings::{TierPolicy, TieredSettings};

/// Polling interval of the breaker during a flush.
const LOOK: Duration = Duration::from_millis(50);

/// A pool whose cached blocks are shared through a tier.
///
/// Bring back the prefix of a request, within the time that a hit is worth, before admitting it:
///
/// ```no_run
/// # use std::sync::Arc;
/// # use std::time::{Duration, Instant};
/// # use kvpool::{AdmitRequest, Pool, SequenceId, prefix::PrefixKeys};
/// # use kvpool_node::tier::{InProcess, SharedTier, TierSettings, Tiered, TieredSettings};
/// # async fn run(pool: Pool, prompt: Vec<u32>) -> Result<(), Box<dyn std::error::Error>> {
/// let tier = SharedTier::new(InProcess::new(1 << 30), TierSettings::default())?;
/// let tiered = Tiered::new(pool.clone(), Arc::new(tier), TieredSettings::new("qwen2.5-7b, revision 3"))?;
/// let deadline = Instant::now() + Duration::from_millis(500);
/// tiered.bring_back(&PrefixKeys::new(), &prompt, deadline).await?;
/// let sequence = pool.admit(&AdmitRequest::new(SequenceId(7), &prompt))?;
/// # Ok(())
/// # }
/// ```
///
/// Clearing the prefix cache does not clear the tier: give other weights another namespace.
/// Dropping it ends the tasks that store blocks; values in flight may or may not be stored.
pub struct Tiered {
    link: Arc<Link>,
    task: Option<JoinHandle<()>>,
    /// To the task of [`TierPolicy::WriteThrough`].
    flushes: Flushes,
}

impl Tiered {
    /// Connects a pool with a tier, and starts the policy's task on the current tokio runtime.
    ///
    /// # Errors
    /// [`TierError::Namespace`]; [`TierError::Pool`] for a pool without storage or prefix cache;
    /// [`TierError::Events`].
    ///
    /// # Panics
    /// Outside of a tokio runtime, unless the policy is [`TierPolicy::Manual`].
    pub fn new(pool: Pool, tier: Arc<SharedTier>, settings: TieredSettings) -> Result<Self, TierError> {
        let link = Arc::new(Link::new(pool, tier, settings)?);
        let (flushes, asked) = mpsc::unbounded_channel();
        let task = match link.settings.policy {
            TierPolicy::Manual => None,
            TierPolicy::OnEviction => Some(tokio::spawn(link.clone().offload_on_eviction())),
            TierPolicy::WriteThrough => {
                let cache = link.pool.prefix_cache();
                let cache = cache.ok_or(TransferError::NoCache { pool: link.pool.tag() })?;
                let events = cache.events().subscribe()?;
                Some(tokio::spawn(link.clone().write_through(events, asked)))
            }
        };
        Ok(Self { link, task, flushes })
    }

    /// Returns the pool.
    pub fn pool(&self) -> &Pool {
        &self.link.pool
    }

    /// Returns the tier.
    pub fn tier(&self) -> &Arc<SharedTier> {
        &self.link.tier
    }

    pub(in super::super) fn downgrade(&self) -> Weak<Link> {
        Arc::downgrade(&self.link)
    }

    /// Returns counters since it was created.
    pub fn counters(&self) -> TieredCounters {
        self.link.read_counters()
    }

    /// Fetches the longest prefix of these tokens that the tier has, as far as it arrives in time.
    /// In a pool with several groups of layers, these are the blocks that an admission of these
    /// tokens needs in each, or nothing.
    ///
    /// Any failure is a miss. Cancel safe.
    ///
    /// # Errors
    /// As for [`Pool::prompt_blocks`].
    pub async fn bring_back(
        &self,
        keys: &PrefixKeys<'_>,
        tokens: &[u32],
        deadline: Instant,
    ) -> Result<TierReport, PrefixError> {
        Ok(self.bring_back_blocks(&self.link.pool.prompt_blocks(keys, tokens)?, deadline).await)
    }

    /// As [`bring_back`](Self::bring_back), for the blocks of a prefix, which are those of this
    /// pool.
    pub async fn bring_back_blocks(&self, blocks: &PromptBlocks, deadline: Instant) -> TierReport {
        self.link.bring_back(blocks, deadline).await
    }

    /// Moves up to `blocks_max` evictable blocks to the tier, in eviction order, if it accepts
    /// them.
    ///
    /// # Errors
    /// [`TransferError`] of the pool; all blocks stay.
    pub async fn offload(&self, blocks_max: usize, deadline: Instant) -> Result<TierReport, TransferError> {
        self.link.offload(blocks_max, deadline).await
    }

    /// Stores the cached blocks that the policy covers. Returns whether that finished by the
    /// deadline, also if the tier failed to store some. Gives up earlier once the breaker is open.
    ///
    /// With [`TierPolicy::OnEviction`], these are all evictable blocks, which leave the cache: for
    /// the shutdown of a node whose blocks the cluster keeps.
    pub async fn flush(&self, deadline: Instant) -> bool {
        let flushed = async {
            match self.link.settings.policy {
                TierPolicy::Manual => true,
                TierPolicy::WriteThrough => {
                    let (done, is_done) = oneshot::channel();
                    self.flushes.send(done).is_ok() && is_done.await.is_ok()
                }
                TierPolicy::OnEviction => loop {
                    match self.link.offload(PUTS_AT_ONCE, deadline).await {
                        Ok(report) if report.cached_blocks > 0 => {}
                        Ok(_) => break self.link.pool.stats().evictable == 0,
                        Err(_) => break false,
                    }
                },
            }
        };
        let is_down = async {
            // First, because a flush with nothing to store completes although the tier is down.
            tokio::time::sleep(LOOK).await;
            while self.link.tier.counters().breaker != BreakerState::Open {
                tokio::time::sleep(LOOK).await;
            }
        };
        tokio::select! {
            is_flushed = tokio::time::timeout_at(deadline.into(), flushed) => is_flushed.unwrap_or(false),
            () = is_down => false,
        }
    }
}

impl Tiered {
    /// Ends the task that stores blocks, and waits for it. Values in flight may or may not be
    /// stored.
    pub async fn close(mut self) {
        self.link.tier.close();
        if let Some(task) = self.task.take() {
            task.abort();
            let _ = task.await;
        }
    }
}

impl Drop for Tiered {
    fn drop(&mut self) {
        self.task.iter().for_each(JoinHandle::abort);
    }
}
