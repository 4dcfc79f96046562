//! The process: a pool with the [services](kvpool_node::services) of its settings, optional
//! traffic, signals, and shutdown.
//!
//! ```text
//! services prepared -> pool built -> compaction -> tier, events -> traffic -> node, membership
//!          | SIGTERM, SIGINT; a second one ends at once
//!          v
//! membership and node left -> traffic ended -> tier, events ended -> audit -> exit code
//! ```

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use indicatif::{BinaryBytes, HumanCount};
use kvpool::hints::HintLimits;
use kvpool::prefix::{HashKey, PrefixConfig};
use kvpool::{AuditError, DefragConfig, Pool};
use kvpool_load::traffic::{Exchange, Fetching, Load, fresh_seed};
use kvpool_node::admin::Reporters;
use kvpool_node::services::{Prepared, Reread, Served, ServiceError};
use kvpool_node::settings::{LoadSettings, Loaded, PoolSettings, Settings, Sources};
use kvpool_node::{Arrivals, NodeBuilder, Offers as _};
use tokio::runtime::{self, Runtime};
use tokio::time::timeout;

use super::reload::Reloader;
use super::signals::{Signal, Signals};
use super::telemetry::Telemetry;
use crate::backend::Backend;
use crate::error::named;
use crate::output::{not_built, print};
use crate::{EXIT_OK, EXIT_UNSOUND, EXIT_USAGE};

/// Worker threads of the runtime: few, because they mostly wait.
const WORKERS: usize = 2;

/// One in this many allocations is timed. A process that only serves has few allocations.
const LATENCY_SAMPLE: u32 = 16;

/// Audits at the end whose findings may be transient, and the pause between two.
const AUDITS: usize = 20;
const AUDIT_PAUSE: Duration = Duration::from_millis(10);

const ROOM_PAUSE: Duration = Duration::from_millis(50);

/// Serves until a signal. Returns errors from before logging is set up.
pub fn serve(sources: &Sources) -> anyhow::Result<u8> {
    let loaded = sources.load()?;
    let runtime = runtime().map_err(named("cannot start"))?;
    let telemetry = Telemetry::start(&loaded.settings, runtime.handle())?;
    let code = match serve_with(loaded, sources, &runtime, &telemetry) {
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
    loaded: Loaded,
    sources: &Sources,
    runtime: &Runtime,
    telemetry: &Telemetry,
) -> anyhow::Result<bool> {
    #[cfg(any(target_os = "linux", target_vendor = "apple"))]
    super::descriptors::raise(&loaded.settings);
    let _entered = runtime.enter();
    // From here on a signal ends the node gracefully.
    let signals = Signals::new().map_err(named("cannot start"))?;
    let settings = loaded.settings.clone();
    let prepared = Prepared::new(loaded).map_err(by_flag)?;
    let (pool, backend) = build(&settings.pool, settings.block_hash_key())?;
    let compaction = settings.pool.defrag.map(|defrag| {
        pool.start_defragmenter(DefragConfig::new().threshold(defrag.threshold).interval(defrag.interval))
    });
    let compaction = compaction.transpose().map_err(named("cannot compact in the background"))?;
    let reporters = Reporters::new();
    telemetry.report(&reporters);
    let services = runtime.block_on(prepared.start(&pool, reporters)).map_err(by_flag)?;
    let fetching = services.tiered().zip(settings.tier.as_ref()).map(|(tiered, tier)| Fetching {
        tiered: tiered.clone(),
        runtime: runtime.handle().clone(),
        wait: tier.wait,
    });
    let exchange = Arc::new(Exchange::new(settings.load.map_or(0, |load| load.threads)));
    let start = |load: LoadSettings| {
        let streams =
            backend.streams(load.threads).map_err(named("cannot allocate the memory of the pool"))?;
        let started = Load::start(&pool, streams, load, fresh_seed(), exchange.clone(), fetching);
        started.map_err(named("cannot serve traffic"))
    };
    let load = settings.load.map(start).transpose()?;
    let with_traffic = |builder: NodeBuilder| {
        let builder = builder.offers(exchange.clone());
        load.iter().fold(builder, |builder, load| builder.traffic(load.quiet()))
    };
    let (served, arrivals) = runtime.block_on(services.serve(with_traffic)).map_err(by_flag)?;
    let mut arriving = runtime.spawn(take_in(arrivals, exchange.clone()));
    print(&greeting(&settings, &served)).map_err(named("cannot start"))?;
    let reloader = Reloader::start(sources).map_err(named("cannot start"))?;
    let drain = settings.drain;
    let (is_drained, deadline) = runtime.block_on(async {
        run(&served, reloader, signals).await;
        let deadline = Instant::now() + drain;
        let left = || deadline.saturating_duration_since(Instant::now());
        let is_drained = served.leave(deadline).await;
        // The stream ends with the node. Sequences without room are closed.
        if timeout(left(), &mut arriving).await.is_err() {
            arriving.abort();
            let _ = arriving.await;
        }
        (is_drained, deadline)
    });

    let mut findings = load.map(Load::end).unwrap_or_default();
    exchange.close_kept();
    runtime.block_on(served.end(deadline));
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
async fn run(served: &Served, mut reloader: Reloader<Reread>, mut signals: Signals) {
    loop {
        tokio::select! {
            signal = signals.next() => match signal {
                Signal::End => return,
                Signal::Reload => reloader.order(),
            },
            read = reloader.read() => {
                match read.and_then(|read| served.apply(read).map_err(|error| error.to_string())) {
                    Ok(changes) => tracing::info!("reloaded; {changes}"),
                    Err(reason) => tracing::error!("not reloaded: {reason}"),
                }
            }
        }
    }
}

/// Names a setting as the flag that it is here.
fn by_flag(error: ServiceError) -> anyhow::Error {
    match error {
        ServiceError::Setting { key, reason } => anyhow!("--{key}: {reason}"),
        ServiceError::NotBuilt { key, feature } => anyhow!("--{key}: {}", not_built(feature)),
        error => error.into(),
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
        let limits = HintLimits::new();
        builder = builder.hints(settings.tenant_hints.map_or(limits, |bytes| limits.tenant_bytes(bytes)));
        if let Some(tenants) = &settings.tenants {
            builder = builder.tenants(tenants.iter().copied());
        }
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
fn greeting(settings: &Settings, served: &Served) -> String {
    let PoolSettings { blocks, layout, layout_name, device, .. } = &settings.pool;
    let pool = format!(
        "node: {}, {} blocks of {} tokens and {} ({layout_name} on {device})",
        settings.name,
        HumanCount(*blocks as u64),
        layout.block_tokens(),
        BinaryBytes(layout.bytes_per_block() as u64)
    );
    let node = served.node();
    let admin = node.admin_address().map_or("off".to_owned(), ToString::to_string);
    let listen = node.addresses().first().map_or("off".to_owned(), ToString::to_string);
    let mut text = format!("{pool}\nadmin: {admin}\nlisten: {listen}");
    let (events, replay) = served.event_addresses();
    for (name, address) in [("kv_events", events), ("kv_events_replay", replay)] {
        if let Some(address) = address {
            text += &format!("\n{name}: tcp://{address}");
        }
    }
    text
}
