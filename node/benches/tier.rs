//! Time and throughput of bringing prefixes back from each tier, with eight clients at a time. Redis
//! beside the plain client over as many connections, in turns.
//!
//! The plain client gets the same values one after another, and looks at their length only. The ratio is
//! the median over rounds. Every block that came back is compared with what was computed.
//!
//! `cargo bench -p kvpool-node --features redis --bench tier [ROUNDS]`

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpool::prefix::{BlockHash, HashKey, PrefixConfig};
use kvpool::{Dtype, KvLayout, Pool};
use kvpool_node::Node;
use kvpool_node::tier::{InProcess, Peer, SharedTier, TierPolicy, TierSettings, Tiered, TieredSettings};
use kvpool_node::transport::tcp::{Address, PeerSettings};

const CLIENTS: usize = 8;
/// Blocks of one prefix.
const BLOCKS: usize = 24;
/// Free blocks of a pool that has all prefixes: a thread that is stopped while it allocates can keep a few from
/// the others, which then evict.
const SPARE: usize = 64;
const THREADS: usize = 2;
const LIMIT: Duration = Duration::from_secs(60);

/// Blocks of 1 MiB.
fn pool(blocks: usize) -> Pool {
    let layout = KvLayout::builder().layers(16).kv_heads(8).head_dim(128).block_tokens(16).dtype(Dtype::F16);
    let config = PrefixConfig::new().key(HashKey::from_bytes([7; 32]));
    Pool::builder(layout.build().unwrap()).blocks(blocks).prefix_cache(config).build().unwrap()
}

fn hashes(client: usize) -> Vec<BlockHash> {
    let mut random = fastrand::Rng::with_seed(client as u64);
    (0..BLOCKS).map(|_| BlockHash::new(random.u128(..), random.u64(..))).collect()
}

fn bytes_of(pool: &Pool, hash: BlockHash) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(hash.key() as u64);
    let mut bytes = vec![0; pool.layout().packed_bytes()];
    random.fill(&mut bytes);
    bytes
}

/// Caches the blocks of all clients.
fn fill(pool: &Pool) {
    for client in 0..CLIENTS {
        for hash in hashes(client) {
            let mut import = pool.import_prefix(0, &[hash]).unwrap();
            import.write(0, None, &bytes_of(pool, hash)).unwrap();
            import.commit().unwrap();
        }
    }
}

fn check(pool: &Pool) {
    for client in 0..CLIENTS {
        for hash in hashes(client) {
            let export = pool.export_prefix(&[hash]).unwrap();
            assert_eq!(export.packed(0).unwrap(), bytes_of(pool, hash), "a wrong byte");
        }
    }
}

#[derive(Default)]
struct Measured {
    gigabytes: Vec<f64>,
    times: Vec<Duration>,
    /// Of each round, beside the plain client.
    ratios: Vec<f64>,
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

impl Measured {
    fn print(mut self, name: &str) {
        self.times.sort_unstable();
        let at = |share: f64| self.times[((self.times.len() - 1) as f64 * share) as usize];
        print!(
            "{name:12} {:6.2} GB/s   p50 {:8.2?}   p99 {:8.2?}",
            median(&self.gigabytes),
            at(0.5),
            at(0.99)
        );
        if !self.ratios.is_empty() {
            print!("   {:.2} of the plain client", median(&self.ratios));
        }
        println!("   ({} calls)", self.times.len());
    }
}

/// Brings all prefixes back, one per client. Returns the throughput.
async fn round(tiered: &Arc<Tiered>, measured: &mut Measured) -> f64 {
    tiered.pool().clear_prefix_cache();
    let began = Instant::now();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let tiered = tiered.clone();
            tokio::spawn(async move {
                let blocks = tiered.pool().blocks_of_hashes(&hashes(client)).unwrap();
                let report = tiered.bring_back_blocks(&blocks, Instant::now() + LIMIT).await;
                assert_eq!(report.moved_blocks, BLOCKS, "{report:?}");
                report.took
            })
        })
        .collect();
    for client in clients {
        measured.times.push(client.await.unwrap());
    }
    let bytes = CLIENTS * BLOCKS * tiered.pool().layout().packed_bytes();
    let rate = bytes as f64 / began.elapsed().as_secs_f64() / 1e9;
    measured.gigabytes.push(rate);
    rate
}

/// Stores the blocks, and returns a pool that has none of them.
async fn prepared(tier: SharedTier) -> Arc<Tiered> {
    let tier = Arc::new(tier);
    let settings = || TieredSettings::new("bench").policy(TierPolicy::Manual);
    let source = pool(CLIENTS * BLOCKS + SPARE);
    fill(&source);
    let from = Tiered::new(source, tier.clone(), settings()).unwrap();
    for _ in 0..CLIENTS * BLOCKS / 32 {
        let report = from.offload(32, Instant::now() + LIMIT).await.unwrap();
        assert_eq!(report.moved_blocks, 32, "{report:?}");
    }
    Arc::new(Tiered::new(pool(CLIENTS * BLOCKS + SPARE), tier, settings()).unwrap())
}

fn settings() -> TierSettings {
    let mut settings = TierSettings::default();
    (settings.calls, settings.patience) = (THREADS, LIMIT);
    settings
}

async fn measure(name: &str, tier: SharedTier, rounds: usize) {
    let (tiered, mut measured) = (prepared(tier).await, Measured::default());
    for _ in 0..rounds {
        round(&tiered, &mut measured).await;
    }
    check(tiered.pool());
    measured.print(name);
}

async fn peer(rounds: usize) {
    let address = Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    let cache = Node::builder(pool(CLIENTS * BLOCKS + SPARE)).name("cache").listen(address);
    let (cache, _arrivals) = cache.start().await.unwrap();
    let link = PeerSettings::new("cache", cache.addresses()[0].clone());
    // Two calls of 16 blocks, and the blocks that they leave behind.
    let (window, _of_window) =
        Node::builder(pool(64)).name("window").peers(vec![link]).start().await.unwrap();
    while !window.peers().await.unwrap().contains(&("cache".to_owned(), true)) {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let store = Peer::new(Arc::new(window), "cache", "bench", LIMIT).unwrap();
    measure("peer", SharedTier::new(store, settings()).unwrap(), rounds).await;
}

#[cfg(feature = "redis")]
mod redis_server {
    use std::process::{Child, Command, Stdio};

    use kvpool_node::tier::{Fingerprint, Redis, TierKey};

    use super::*;

    struct Server(Child);

    impl Drop for Server {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// Gets all values over as many connections as the tier has threads.
    fn plain(url: &str, fingerprint: Fingerprint, bytes: usize) -> f64 {
        let mut connections: Vec<_> =
            (0..THREADS).map(|_| redis::Client::open(url).unwrap().get_connection().unwrap()).collect();
        let keys: Vec<String> =
            (0..CLIENTS).flat_map(hashes).map(|hash| TierKey { fingerprint, hash }.to_string()).collect();
        let began = Instant::now();
        std::thread::scope(|scope| {
            for (connection, keys) in connections.iter_mut().zip(keys.chunks(keys.len().div_ceil(THREADS))) {
                scope.spawn(move || {
                    for key in keys {
                        let value: Vec<u8> = redis::cmd("GET").arg(key).query(connection).unwrap();
                        assert_eq!(value.len(), kvpool_node::tier::value_bytes(bytes));
                    }
                });
            }
        });
        (CLIENTS * BLOCKS * bytes) as f64 / began.elapsed().as_secs_f64() / 1e9
    }

    pub async fn measure(rounds: usize) {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = Command::new("redis-server");
        command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""]);
        command.args(["--appendonly", "no", "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"]);
        let Ok(child) = command.stdout(Stdio::null()).spawn() else {
            return println!("redis        SKIPPED: there is no program redis-server");
        };
        let _server = Server(child);
        let url = format!("redis://127.0.0.1:{port}");
        while redis::Client::open(&*url).unwrap().get_connection().is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let tier = SharedTier::new(Redis::new(&url, None, LIMIT).unwrap(), settings()).unwrap();
        let (tiered, mut measured) = (prepared(tier).await, Measured::default());
        let fingerprint = Fingerprint::of(tiered.pool(), "bench").unwrap();
        let bytes = tiered.pool().layout().packed_bytes();
        for number in 0..rounds {
            // In turns, so that a drift of the machine favours neither.
            let before = (number % 2 == 0).then(|| plain(&url, fingerprint, bytes));
            let rate = round(&tiered, &mut measured).await;
            let raw = before.unwrap_or_else(|| plain(&url, fingerprint, bytes));
            measured.ratios.push(rate / raw);
        }
        check(tiered.pool());
        measured.print("redis");
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("tier: to measure, run `cargo bench -p kvpool-node --features redis --bench tier`");
        return;
    }
    let rounds = std::env::args().filter_map(|argument| argument.parse().ok()).next().unwrap_or(9);
    println!("{CLIENTS} clients, prefixes of {BLOCKS} blocks of 1 MiB, {THREADS} threads a tier");
    let store = InProcess::new(1 << 30);
    measure("in process", SharedTier::new(store, settings()).unwrap(), rounds).await;
    peer(rounds).await;
    #[cfg(feature = "redis")]
    redis_server::measure(rounds).await;
    #[cfg(not(feature = "redis"))]
    println!("redis        SKIPPED: built without the feature `redis`");
}
