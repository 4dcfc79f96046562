//! The process: a pool, a node over it, its admin interface, optional traffic, signals, and
//! shutdown.
//!
//! ```text
//! settings, certificates -> admin address bound, store of the tier -> pool built
//!     -> compaction, tier, events -> traffic -> node -> membership
//!          | SIGTERM, SIGINT; a second one ends at once
//!          v
//! membership left -> transfers finished or handed back -> requests finished -> traffic ended
//!     -> events, tier -> audit -> exit code
//! ```
//!
//! The address is bound first, so that a second node on the same port fails before it takes memory.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{BinaryBytes, HumanCount};
use kvpool::prefix::{HashKey, PrefixConfig};
use kvpool::{AuditError, DefragConfig, Pool};
use kvpool_load::traffic::{Exchange, Load, fresh_seed};
use kvpool_node::admin::{AdminServer, Limits, Reporters};
use kvpool_node::settings::{LoadSettings, Loaded, PoolSettings, Settings, Sources};
use kvpool_node::{Arrivals, Node, Offers as _};
use tokio::runtime::{self, Runtime};
use tokio::time::timeout;

use super::network::{self, Credentials};
use super::reload::{Reloader, Reread, Taken};
use super::services::{self, Membership, Services};
use super::signals::{Signal, Signals};
use super::telemetry::Telemetry;
use crate::backend::Backend;
use crate::error::named;
use crate::output::print;
use crate::{EXIT_OK, EXIT_UNSOUND, EXIT_USAGE};

/// Worker threads of the runtime: few, because they mostly wait.
const WORKERS: usize = 2;

/// One in this many allocations is timed. A process that only serves has few allocations.
const LATENCY_SAMPLE: u32 = 16;

/// Audits at the end whose findings may be transient, and the pause between two.
const AUDITS: usize = 20;
const AUDIT_PAUSE: Duration = Duration::from_millis(10);

const ROOM_PAUSE: Duration = Duration::from_millis(50);

/// Purpose of the key that is derived from the token of a cluster.
const HASH_KEY: &str = "kvpool 2026 hashes of cached blocks";

/// Serves until a signal. Returns errors from before logging is set up.
pub fn serve(sources: &Sources) -> anyhow::Result<u8> {
    let Loaded { settings, warnings, .. } = sources.load()?;
    let runtime = runtime().map_err(named("cannot start"))?;
    let telemetry = Telemetry::start(&settings, runtime.handle())?;
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    let code = match serve_with(settings, sources, &runtime, &telemetry) {
        Ok(true) => EXIT_OK,
        Ok(false) => EXIT_UNSOUND,
        Err(error) => {
            tracing::error!("{error}");
            EXIT_USAGE
        }
    };
    telemetry.end();
    Ok(code)
}

fn serve_with(
    settings: Settings,
    sources: &Sources,
    runtime: &Runtime,
    telemetry: &Telemetry,
) -> anyhow::Result<bool> {
    #[cfg(any(target_os = "linux", target_vendor = "apple"))]
    super::descriptors::raise(&settings);
    let credentials = Credentials::read(&settings)?;
    let limits = Limits::default().connections(settings.admin_connections);
    let bind = |address| AdminServer::bind(address, credentials.admin.clone(), limits);
    let server = settings.admin.as_ref().map(bind).transpose()?;
    let _entered = runtime.enter();
    // From here on a signal ends the node gracefully.
    let signals = Signals::new().map_err(named("cannot start"))?;
    let tier = services::prepare(&settings)?;
    let key = settings.hash_key.as_ref().map(|key| HashKey::from_bytes(key.key(HASH_KEY)));
    let (pool, backend) = build(&settings.pool, key)?;
    let compaction = settings.pool.defrag.map(|defrag| {
        pool.start_defragmenter(DefragConfig::new().threshold(defrag.threshold).interval(defrag.interval))
    });
    let compaction = compaction.transpose().map_err(named("cannot compact in the background"))?;
    let reporters = Reporters::new();
    telemetry.report(&reporters);
    let services = runtime.block_on(Services::start(&pool, &settings, tier, &reporters))?;
    let exchange = Arc::new(Exchange::new(settings.load.map_or(0, |load| load.threads)));
    let start = |load: LoadSettings| {
        let streams =
            backend.streams(load.threads).map_err(named("cannot allocate the memory of the pool"))?;
        let fetching = services.fetching.clone();
        let started = Load::start(&pool, streams, load, fresh_seed(), exchange.clone(), fetching);
        started.map_err(named("cannot serve traffic"))
    };
    let load = settings.load.map(start).transpose()?;
    let mut builder = network::configure(&settings, &credentials, Node::builder(pool.clone()))?;
    builder = builder.offers(exchange.clone()).reporters(reporters.clone());
    if let Some(server) = server {
        builder = builder.admin(server);
    }
    if let Some(load) = &load {
        builder = builder.traffic(load.quiet());
    }
    let (node, arrivals) = runtime.block_on(builder.start()).map_err(named("cannot start the node"))?;
    let node = Arc::new(node);
    let mut arriving = runtime.spawn(take_in(arrivals, exchange.clone()));
    let join = |member| Membership::start(&node, member, network::peers(&settings.peers), &reporters);
    let membership = settings.membership.as_ref().map(join).transpose()?;
    print(&greeting(&settings, &node, &services)).map_err(named("cannot start"))?;
    let (reloader, drain) = (Reloader::start(sources).map_err(named("cannot start"))?, settings.drain);
    let (is_drained, deadline) = runtime.block_on(async {
        run(&node, membership.as_ref(), Taken::new(settings, credentials), reloader, signals).await;
        let deadline = Instant::now() + drain;
        let left = || deadline.saturating_duration_since(Instant::now());
        if let Some(membership) = membership {
            // It has a limit of its own, too.
            let _ = timeout(left(), membership.leave()).await;
        }
        let is_drained = node.shutdown(left()).await;
        // The stream ends with the node. Sequences without room are closed.
        if timeout(left(), &mut arriving).await.is_err() {
            arriving.abort();
            let _ = arriving.await;
        }
        (is_drained, deadline)
    });

    let mut findings = load.map(Load::end).unwrap_or_default();
    exchange.close_kept();
    runtime.block_on(services.end(deadline));
    if !is_drained {
        findings.push(format!("migrations were under way after {drain:?}: what became of them is unknown"));
    }
    if let Some(compaction) = compaction {
        runtime.block_on(compaction.stop());
    }
    if let Err(error) = audit(&pool) {
        findings.push(format!("the last audit: {error}"));
    }
    for finding in &findings {
        tracing::error!("{finding}");
    }
    Ok(findings.is_empty())
}

/// Recounts the pool. The threads of the traffic have ended; a landing value of the tier may still
/// return a frame, so only persistent findings are errors.
fn audit(pool: &Pool) -> Result<(), AuditError> {
    for _ in 0..AUDITS {
        match pool.audit() {
            Ok(_) => return Ok(()),
            Err(_) => thread::sleep(AUDIT_PAUSE),
        }
    }
    pool.audit().map(drop)
}

/// Passes arriving sequences to the traffic, or keeps them while there is room. Test:
/// `sequences_that_no_engine_takes_are_bounded`.
async fn take_in(mut arrivals: Arrivals, exchange: Arc<Exchange>) {
    loop {
        while !exchange.has_room() {
            tokio::time::sleep(ROOM_PAUSE).await;
        }
        let Some(arrival) = arrivals.recv().await else { return };
        exchange.take_back(arrival.sequence);
    }
}

/// Reloads settings at each SIGHUP, until a termination signal.
async fn run(
    node: &Node,
    membership: Option<&Membership>,
    mut taken: Taken,
    mut reloader: Reloader<Reread>,
    mut signals: Signals,
) {
    loop {
        tokio::select! {
            signal = signals.next() => match signal {
                Signal::End => return,
                Signal::Reload => reloader.order(),
            },
            read = reloader.read() => taken.take_over(read, node, membership),
        }
    }
}

/// Builds the pool. Nodes need the same hash key to exchange cached blocks.
fn build(settings: &PoolSettings, key: Option<HashKey>) -> anyhow::Result<(Pool, Backend)> {
    let PoolSettings { blocks, blocks_max, ref layout, device, .. } = *settings;
    let backend = Backend::open(device).map_err(named(format_args!("device {device}")))?;
    backend.check_room(layout, blocks, "--size")?;
    // One additional frame for the null block.
    let storage = backend.storage(layout.clone(), blocks + 1, blocks_max + 1);
    let storage = storage.map_err(named("cannot allocate the memory of the pool"))?;
    let builder = Pool::builder(layout.clone()).storage(storage);
    let mut builder = builder.blocks(blocks).blocks_max(blocks_max).reserve(settings.reserve);
    builder = builder.latency_sample(LATENCY_SAMPLE);
    if let Some(policy) = settings.eviction {
        let config = PrefixConfig::new().policy(policy);
        builder = builder.prefix_cache(match key {
            Some(key) => config.key(key),
            None => config,
        });
    }
    Ok((builder.build().map_err(named("cannot build the pool"))?, backend))
}

fn runtime() -> io::Result<Runtime> {
    runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .thread_name("kvpool-serve")
        .enable_all()
        .build()
}

/// Returns the lines of the standard output: what is served, and where.
fn greeting(settings: &Settings, node: &Node, services: &Services) -> String {
    let PoolSettings { blocks, layout, layout_name, device, .. } = &settings.pool;
    let pool = format!(
        "node: {}, {} blocks of {} tokens and {} ({layout_name} on {device})",
        settings.name,
        HumanCount(*blocks as u64),
        layout.block_tokens(),
        BinaryBytes(layout.bytes_per_block() as u64)
    );
    let admin = node.admin_address().map_or("off".to_owned(), ToString::to_string);
    let listen = node.addresses().first().map_or("off".to_owned(), ToString::to_string);
    let mut text = format!("{pool}\nadmin: {admin}\nlisten: {listen}");
    if let Some(publisher) = &services.publisher {
        text += &format!("\nkv_events: tcp://{}", publisher.address());
        if let Some(replay) = publisher.replay_address() {
            text += &format!("\nkv_events_replay: tcp://{replay}");
        }
    }
    text
}
