use std::any::Any;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use kvpool::compact::Snapshot;
use kvpool::{AuditError, ResizeError, ResizeOptions};
use parking_lot::RwLock;
use serde_json::{Map, Value};
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use super::api::{
    AuditOutcome, DefragOutcome, EndedOrder, EndedOutcome, Health, HealthState, MigrateOrder, MigrationList,
    MigrationRecord, ResizeOrder, ResizeOutcome, StatsReport,
};
use super::interface::{Admin, Answer};
use super::problem::AdminError;
use super::reporter::Reporters;
use super::served_pool::ServedPool;
use super::views::{NotReady, OwnersReport, Readiness, TrimOrder, TrimOutcome};
use crate::hints::{HintsAnswer, HintsEnvelope};
use crate::metrics::{self, Scrape};
use crate::topology::{PeerLink, TopologyReport, probe};

/// Time between two attempts at an audit, and the number of attempts.
const AUDIT_PAUSE: Duration = Duration::from_millis(10);
const AUDIT_ATTEMPTS: usize = 300;

/// Number of consecutive attempts with the same finding. While threads use the pool, an audit can
/// find transient contradictions; a persistent one is real.
const AUDIT_CONFIRMATIONS: usize = 30;

/// Time without progress after which a resize fails: longer than a step of an engine.
const RESIZE_PATIENCE: Duration = Duration::from_secs(2);

/// Path of the system's device tree.
const SYSFS: &str = "/sys";

/// Traffic on the pool that an audit can halt.
pub trait Quiet: Send + Sync + 'static {
    /// Stops the traffic; it resumes when the result is dropped.
    fn halt(self: Arc<Self>) -> Box<dyn Any + Send>;

    /// Returns whether all traffic has halted.
    fn is_quiet(&self) -> bool;

    /// Returns counters for the statistics, by name.
    fn counters(&self) -> Map<String, Value>;
}

/// A pool behind an admin interface.
pub struct PoolAdmin {
    name: String,
    pool: RwLock<ServedPool>,
    started: Instant,
    traffic: Option<Arc<dyn Quiet>>,
    reporters: Reporters,
    draining: AtomicBool,
    audits: AtomicU64,
    audit_failures: AtomicU64,
    /// Held by a walk over all blocks, so that concurrent callers use one thread.
    walking: Arc<Mutex<()>>,
}

impl PoolAdmin {
    /// Creates the admin interface of a node of this name over a pool.
    pub fn new(name: impl Into<String>, pool: impl Into<ServedPool>) -> Self {
        Self {
            name: name.into(),
            pool: RwLock::new(pool.into()),
            started: Instant::now(),
            traffic: None,
            reporters: Reporters::default(),
            draining: AtomicBool::new(false),
            audits: AtomicU64::new(0),
            audit_failures: AtomicU64::new(0),
            walking: Arc::default(),
        }
    }

    /// Adds traffic that audits halt and statistics count.
    pub fn traffic(mut self, traffic: Arc<dyn Quiet>) -> Self {
        self.traffic = Some(traffic);
        self
    }

    /// Sets the services beside the pool, whose counters statistics and metrics include.
    pub fn reporters(mut self, reporters: Reporters) -> Self {
        self.reporters = reporters;
        self
    }

    /// Serves another pool from now on, for an engine that made its pool anew.
    pub fn set_pool(&self, pool: impl Into<ServedPool>) {
        *self.pool.write() = pool.into();
    }

    fn pool(&self) -> ServedPool {
        self.pool.read().clone()
    }

    /// Reports from now on that the node is ending, and refuses requests that change the pool.
    pub fn drain(&self) {
        // Relaxed: it publishes nothing.
        self.draining.store(true, Relaxed);
    }

    /// Runs work that walks over all blocks on a blocking thread, one walk at a time.
    async fn walk<T: Send + 'static>(
        &self,
        work: impl FnOnce(&ServedPool) -> T + Send + 'static,
    ) -> Result<T, AdminError> {
        let (pool, turn) = (self.pool(), self.walking.clone().lock_owned().await);
        let walk = spawn_blocking(move || {
            // Also if the caller has gone meanwhile.
            let _turn = turn;
            work(&pool)
        });
        walk.await.map_err(|error| AdminError::Failed(error.to_string()))
    }

    /// Checks that the node is not ending.
    ///
    /// # Errors
    /// [`AdminError::Unavailable`].
    pub fn check_serving(&self) -> Result<(), AdminError> {
        if self.draining.load(Relaxed) {
            return Err(AdminError::Unavailable("this node is ending".to_owned()));
        }
        Ok(())
    }
}

impl Admin for PoolAdmin {
    fn health(&self) -> Health {
        let state = if self.pool().is_lost() {
            HealthState::DeviceLost
        } else if self.draining.load(Relaxed) {
            HealthState::Draining
        } else {
            HealthState::Ok
        };
        Health { state, node: self.name.clone(), version: env!("CARGO_PKG_VERSION").to_owned() }
    }

    fn ready(&self) -> Readiness {
        let mut reasons = Vec::new();
        if self.draining.load(Relaxed) {
            reasons.push(NotReady::Draining);
        }
        if self.pool().is_lost() {
            reasons.push(NotReady::DeviceLost);
        }
        Readiness { ready: reasons.is_empty(), reasons, node: self.name.clone() }
    }

    fn snapshot(&self) -> Answer<'_, Snapshot> {
        Box::pin(self.walk(ServedPool::snapshot))
    }

    fn sequences(&self) -> Answer<'_, Snapshot> {
        Box::pin(async {
            self.pool().with_sequences("sequences")?;
            self.snapshot().await
        })
    }

    fn owners(&self, limit: usize) -> Answer<'_, OwnersReport> {
        Box::pin(self.walk(move |pool| pool.owners(limit)))
    }

    fn peers(&self) -> Answer<'_, Vec<PeerLink>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    fn topology(&self) -> Answer<'_, TopologyReport> {
        let name = self.name.clone();
        Box::pin(self.walk(move |_| TopologyReport::of(probe(&name, Path::new(SYSFS), &[]))))
    }

    fn scrape(&self) -> Answer<'_, Scrape> {
        Box::pin(async {
            let mut scrape = Scrape::new();
            scrape.count(&metrics::BUILD, &[env!("CARGO_PKG_VERSION")], 1);
            scrape.number(&metrics::UPTIME, &[], self.started.elapsed().as_secs_f64());
            scrape.count(&metrics::SERVING, &[], u64::from(self.health().state == HealthState::Ok));
            let mut scrape = self
                .walk(move |pool| {
                    pool.scrape(&mut scrape);
                    scrape
                })
                .await?;
            scrape.count(&metrics::AUDITS, &[], self.audits.load(Relaxed));
            scrape.count(&metrics::AUDIT_FAILURES, &[], self.audit_failures.load(Relaxed));
            self.reporters.scrape(&mut scrape);
            if let Some(traffic) = &self.traffic {
                let counters = traffic.counters();
                let counters = counters.values().filter_map(Value::as_object).flatten();
                for (name, value) in counters.filter(|(name, _)| !name.ends_with("_sequence")) {
                    if let Some(value) = value.as_u64() {
                        scrape.count(&metrics::TRAFFIC, &[name], value);
                    }
                }
            }
            Ok(scrape)
        })
    }

    fn trim(&self, order: TrimOrder) -> Answer<'_, TrimOutcome> {
        Box::pin(async move {
            self.check_serving()?;
            if order.keep.is_some() {
                self.pool().with_sequences("evictions")?;
            }
            self.walk(move |pool| {
                let (begun, before) = (Instant::now(), pool.metrics().stats);
                pool.trim();
                let evicted = match (pool, order.keep) {
                    (ServedPool::Pool(pool), Some(keep)) => pool.evict_cached(keep),
                    _ => 0,
                };
                let time_ms = begun.elapsed().as_secs_f64() * 1e3;
                TrimOutcome::of(&before, &pool.metrics().stats, evicted, time_ms)
            })
            .await
        })
    }

    fn hints(&self, envelope: HintsEnvelope) -> Answer<'_, HintsAnswer> {
        Box::pin(async move {
            self.check_serving()?;
            let pool = self.pool().with_sequences("hints")?.clone();
            // Looks its blocks up, which may be many.
            let tiers = self.reporters.clone();
            let carried_out = spawn_blocking(move || envelope.carry_out_with(&pool, &tiers)).await;
            let carried_out = carried_out.map_err(|error| AdminError::Failed(error.to_string()))?;
            carried_out.map_err(|error| AdminError::Invalid(error.to_string()))
        })
    }

    fn stats(&self) -> Answer<'_, StatsReport> {
        Box::pin(async {
            let mut report = StatsReport::of(&self.name, self.started.elapsed(), &self.pool());
            if let Some(traffic) = &self.traffic {
                report.extra = traffic.counters();
            }
            self.reporters.stats(&mut report.extra);
            Ok(report)
        })
    }

    fn migrations(&self) -> Answer<'_, MigrationList> {
        Box::pin(async {
            self.pool().with_sequences("migrations")?;
            Ok(MigrationList::default())
        })
    }

    fn defragment(&self) -> Answer<'_, DefragOutcome> {
        Box::pin(async {
            self.check_serving()?;
            let report = self.pool().with_sequences("compaction")?.defragment().await;
            report.map(Into::into).map_err(|error| AdminError::Failed(error.to_string()))
        })
    }

    fn resize(&self, order: ResizeOrder) -> Answer<'_, ResizeOutcome> {
        Box::pin(async move {
            self.check_serving()?;
            let report = self
                .pool()
                .with_sequences("resize")?
                .resize_with(order.blocks, ResizeOptions::new().patience(RESIZE_PATIENCE))
                .await
                .map_err(|error| match error {
                    ResizeError::Defrag(error) => AdminError::Failed(error.to_string()),
                    error => AdminError::Conflict(error.to_string()),
                })?;
            let time_ms = report.time.as_secs_f64() * 1e3;
            let moved_blocks = report.moved.moved_blocks;
            Ok(ResizeOutcome { from: report.from, to: report.to, moved_blocks, time_ms })
        })
    }

    fn migrate(&self, order: MigrateOrder) -> Answer<'_, MigrationRecord> {
        Box::pin(async move {
            self.check_serving()?;
            if self.pool().with_sequences("sequences")?.view(kvpool::SequenceId(order.sequence)).is_none() {
                return Err(AdminError::NotFound(format!("there is no sequence {}", order.sequence)));
            }
            Err(AdminError::Unsupported(format!(
                "sequence {} cannot go to {}: this node has no peers",
                order.sequence, order.to
            )))
        })
    }

    fn declare_ended(&self, order: EndedOrder) -> Answer<'_, EndedOutcome> {
        let reason = format!("{} is nothing to this node, which has no peers", order.peer);
        Box::pin(async {
            self.pool().with_sequences("peers")?;
            Err(AdminError::Unsupported(reason))
        })
    }

    fn audit(&self) -> Answer<'_, AuditOutcome> {
        Box::pin(async {
            self.audits.fetch_add(1, Relaxed);
            let _halted = self.traffic.as_ref().map(|traffic| traffic.clone().halt());
            let pool = self.pool();
            let is_loud = || self.traffic.as_ref().is_some_and(|traffic| !traffic.is_quiet());
            let mut found: Option<(AuditError, usize)> = None;
            for _ in 0..AUDIT_ATTEMPTS {
                if is_loud() {
                    sleep(AUDIT_PAUSE).await;
                    continue;
                }
                found = match (pool.audit(), found) {
                    (Ok(report), _) => return Ok(AuditOutcome::sound(report)),
                    (Err(error @ AuditError::FenceRefused), _) => {
                        return Err(AdminError::Failed(error.to_string()));
                    }
                    (Err(AuditError::Busy), _) => None,
                    (Err(error), Some((last, times))) if error == last => Some((error, times + 1)),
                    (Err(error), _) => Some((error, 1)),
                };
                match found {
                    Some((finding, AUDIT_CONFIRMATIONS..)) => {
                        self.audit_failures.fetch_add(1, Relaxed);
                        return Ok(AuditOutcome::unsound(finding));
                    }
                    _ => sleep(AUDIT_PAUSE).await,
                }
            }
            Err(AdminError::Conflict(AuditError::Busy.to_string()))
        })
    }
}
