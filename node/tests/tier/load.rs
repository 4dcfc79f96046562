//! Pools under load while their tier changes from one fault to another.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use kvpool::{Pool, SequenceError};
use kvpool_node::tier::{SharedTier, TierPolicy, Tiered};

use super::faulty::Fault;
use super::kv;
use super::support::{bring_back, hasty, idle, in_process, tiered};

const PROMPTS: u32 = 12;
const LIMIT: Duration = Duration::from_millis(100);

/// Two pools, each smaller than the prompts, that share a tier.
pub struct Cluster {
    pub pools: [Pool; 2],
    pub tiered: [Arc<Tiered>; 2],
    /// Blocks that came from the tier.
    pub fetched: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    clients: Vec<tokio::task::JoinHandle<()>>,
}

impl Cluster {
    /// Starts four clients, which compute prompts, bring them back, and check every byte.
    pub fn start(tier: &Arc<SharedTier>) -> Self {
        let pools: [Pool; 2] = kv::pools(60).into();
        let policies = [TierPolicy::WriteThrough, TierPolicy::OnEviction];
        let tiered = [0, 1].map(|at| Arc::new(tiered(&pools[at], tier, policies[at])));
        let (fetched, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let mut cluster = Self { pools, tiered, fetched, stop, clients: Vec::new() };
        for client in 0..4 {
            let work = client_of(&cluster, client);
            cluster.clients.push(tokio::spawn(work));
        }
        cluster
    }

    /// Ends the clients, which fail here if one of them did, and checks the pools.
    pub async fn stop(mut self) {
        self.stop.store(true, Relaxed);
        for client in self.clients.drain(..) {
            client.await.unwrap();
        }
        let Self { pools, tiered, .. } = self;
        drop(tiered);
        for pool in &pools {
            idle(pool).await;
        }
    }
}

fn client_of(cluster: &Cluster, client: u64) -> impl Future<Output = ()> + Send + use<> {
    let place = client as usize % 2;
    let (pool, tiered) = (cluster.pools[place].clone(), cluster.tiered[place].clone());
    let (fetched, stop) = (cluster.fetched.clone(), cluster.stop.clone());
    async move {
        let mut random = fastrand::Rng::with_seed(client);
        while !stop.load(Relaxed) {
            let tokens = kv::prompt(1 + random.u32(..PROMPTS), 41);
            let tokens = &tokens[..random.usize(5..42)];
            let report = bring_back(&tiered, tokens, LIMIT).await;
            fetched.fetch_add(report.moved_blocks as u64, Relaxed);
            // Checks the cached part as it computes the rest; four of them have room.
            match kv::admit(&pool, 100 + client, tokens) {
                Ok(sequence) => kv::check(&pool, &sequence, tokens),
                // Frames that another client's batch may see.
                Err(SequenceError::Alloc(_)) => {}
                Err(error) => panic!("{error}"),
            }
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_that_change() {
    let (store, tier) = in_process(hasty());
    let cluster = Cluster::start(&tier);
    let faults = [
        Fault::None,
        Fault::Hang,
        Fault::None,
        Fault::Foreign,
        Fault::Refuse,
        Fault::None,
        Fault::Corrupt,
        Fault::StoresNothing,
        Fault::Short,
        Fault::Slow(Duration::from_millis(20)),
        Fault::ClaimsAll,
        Fault::Panic,
        Fault::Long,
    ];
    for fault in faults {
        store.set_fault(fault);
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    store.set_fault(Fault::None);
    // Blocks come back again once the faults are over.
    let (before, began) = (cluster.fetched.load(Relaxed), Instant::now());
    while cluster.fetched.load(Relaxed) < before + 20 {
        assert!(began.elapsed() < super::support::WAIT, "{:?}", tier.counters());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    cluster.stop().await;
}
