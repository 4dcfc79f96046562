use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvpool::hints::Rejection;
use kvpool::transfer::PromptBlocks;
use serde_json::{Map, Value};
use tokio::runtime::Handle;

use super::failures::Failures;
use crate::hints::Prefetch;
use crate::metrics::{self, Scrape};

/// A fetch from a tier, whose outcome is what is cached then.
pub type Fetching = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Counters of a service beside a pool.
pub trait Reporter: Send + Sync + 'static {
    /// Returns the name of the group in `/stats`: `tiers`, `membership`, `kv_events` or `traces`.
    fn group(&self) -> &'static str;

    /// Returns the name of the service, unique in its group.
    fn name(&self) -> &str;

    /// Returns its counters for `/stats`; `None` once the service has ended.
    fn stats(&self) -> Option<Value>;

    /// Adds its counters to a scrape, or nothing once the service has ended.
    fn scrape(&self, scrape: &mut Scrape);

    /// Returns the work of fetching the prefix with these blocks by a deadline.
    ///
    /// # Errors
    /// [`Rejection::NoTier`] if the service is no tier of a pool, or has ended;
    /// [`Rejection::Busy`].
    fn prefetch(&self, blocks: &PromptBlocks, deadline: Instant) -> Result<Fetching, Rejection> {
        _ = (blocks, deadline);
        Err(Rejection::NoTier)
    }

    /// Returns its failures, which are added to both; `None` once the service has ended.
    fn failures(&self) -> Option<Failures> {
        None
    }
}

/// The services beside a pool. Clones share one list.
///
/// An admin interface gets the list before it starts, and services can be added at any time: a
/// follower of a membership, for example, needs a running node.
#[derive(Clone, Default)]
pub struct Reporters(Arc<Mutex<Vec<Arc<dyn Reporter>>>>);

impl Reporters {
    /// Returns an empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a service. It replaces one of the same group and name.
    pub fn add(&self, reporter: impl Reporter) {
        let mut list = self.list();
        list.retain(|other| (other.group(), other.name()) != (reporter.group(), reporter.name()));
        list.push(Arc::new(reporter));
    }

    /// Adds the counters of all services to an object: group, name, counters.
    pub(super) fn stats(&self, stats: &mut Map<String, Value>) {
        for reporter in self.all() {
            let Some(mut counters) = reporter.stats() else { continue };
            if let Some(failures) = reporter.failures() {
                failures.add_to(&mut counters);
            }
            let group = stats.entry(reporter.group()).or_insert_with(|| Map::new().into());
            if let Some(group) = group.as_object_mut() {
                group.insert(reporter.name().to_owned(), counters);
            }
        }
    }

    pub(super) fn scrape(&self, scrape: &mut Scrape) {
        for reporter in self.all() {
            reporter.scrape(scrape);
            if let Some(failures) = reporter.failures() {
                let labels = [reporter.group(), reporter.name()];
                scrape.count(&metrics::SERVICE_FAILURES, &labels, failures.count());
            }
        }
    }

    /// Returns the services, so that none is called under the lock.
    fn all(&self) -> Vec<Arc<dyn Reporter>> {
        self.list().clone()
    }

    fn list(&self) -> MutexGuard<'_, Vec<Arc<dyn Reporter>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// By the first tier of a pool, in a task of the runtime in which it is called.
impl Prefetch for Reporters {
    fn prefetch(&self, blocks: PromptBlocks, within: Duration) -> Result<(), Rejection> {
        let (deadline, all) = (Instant::now() + within, self.all());
        let runtime = Handle::try_current().map_err(|_| Rejection::NoTier)?;
        let mut answers = all.iter().map(|reporter| reporter.prefetch(&blocks, deadline));
        let is_tier = |answer: &Result<_, _>| !matches!(answer, Err(Rejection::NoTier));
        runtime.spawn(answers.find(is_tier).unwrap_or(Err(Rejection::NoTier))?);
        Ok(())
    }
}

impl fmt::Debug for Reporters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.all().iter().map(|reporter| (reporter.group(), reporter.name()))).finish()
    }
}
