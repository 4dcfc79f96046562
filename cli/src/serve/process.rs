//! The process: a pool, its admin interface, traffic on request, signals, and the end.
//!
//! ```text
//! settings -> admin address bound -> pool built -> compaction, traffic, admin interface
//!                                                        | SIGTERM, SIGINT
//! exit code <- audit <- traffic ended <- requests finished
//! ```
//!
//! The address is bound first, so that a second node on the same port ends before it takes memory.

use std::io;
use std::sync::Arc;

use kvpool::prefix::PrefixConfig;
use kvpool::{BuildError, DefragConfig, DefragError, Pool, StorageError};
use kvpool_node::admin::{AdminServer, BindError, Limits, PoolAdmin};
use kvpool_node::settings::{Loaded, PeerAddress, PoolSettings, Settings, SettingsError, Sources};
use thiserror::Error;
use tokio::runtime::{self, Runtime};

use super::load::Load;
use crate::backend::Backend;
use crate::output::{complain, print};

/// Worker threads of the runtime: few, because they wait most of the time.
const WORKERS: usize = 2;

/// One allocation in so many is timed. A process that only serves has few, and each matters.
const LATENCY_SAMPLE: u32 = 16;

/// Why a node did not start.
#[derive(Debug, Error)]
pub enum ServeError {
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error("device {device}: {reason}")]
    Device { device: kvpool::DeviceId, reason: String },
    #[error(
        "a pool of {blocks} blocks of {block_bytes} bytes (metadata included) does not fit into the {free} free bytes (size, layout)"
    )]
    TooLarge { blocks: usize, block_bytes: usize, free: u64 },
    #[error("cannot allocate the memory of the pool: {0}")]
    Storage(#[from] StorageError),
    #[error("cannot build the pool: {0}")]
    Pool(#[from] BuildError),
    #[error("cannot compact in the background: {0}")]
    Defrag(#[from] DefragError),
    #[error("cannot serve traffic: {0}")]
    Load(String),
    #[error("cannot start: {0}")]
    System(#[from] io::Error),
}

/// Serves until a signal. Returns whether nothing was lost or corrupt.
pub fn serve(sources: &Sources) -> Result<bool, ServeError> {
    let Loaded { settings, warnings, .. } = sources.load()?;
    for warning in warnings {
        complain(format_args!("{warning}"));
    }
    let bind = |address| AdminServer::bind(address, settings.token.clone(), Limits::default());
    let server = settings.admin.as_ref().map(bind).transpose()?;
    let runtime = runtime()?;
    let _entered = runtime.enter();
    // From here on a signal ends the node in order.
    let signals = Signals::new()?;
    let (pool, backend) = build(&settings.pool)?;
    let compaction = settings.pool.defrag.map(|defrag| {
        pool.start_defragmenter(DefragConfig::new().threshold(defrag.threshold).interval(defrag.interval))
    });
    let compaction = compaction.transpose()?;
    let load = match settings.load_threads {
        Some(threads) => {
            let streams = backend.streams(threads)?;
            Some(Load::start(&pool, streams, threads).map_err(ServeError::Load)?)
        }
        None => None,
    };
    let mut admin = PoolAdmin::new(&settings.name, pool.clone());
    if let Some(load) = &load {
        admin = admin.traffic(load.quiet());
    }
    print(&greeting(&settings, server.as_ref()))?;
    runtime.block_on(run(&settings, sources, Arc::new(admin), server, signals))?;

    let mut findings = load.map(Load::end).unwrap_or_default();
    if let Some(compaction) = compaction {
        runtime.block_on(compaction.stop());
    }
    // The threads that used the pool have ended.
    if let Err(error) = pool.audit() {
        findings.push(format!("the last audit: {error}"));
    }
    for finding in &findings {
        complain(format_args!("{finding}"));
    }
    Ok(findings.is_empty())
}

/// Serves the admin interface until a signal to end, and then drains it.
async fn run(
    settings: &Settings,
    sources: &Sources,
    admin: Arc<PoolAdmin>,
    server: Option<AdminServer>,
    mut signals: Signals,
) -> io::Result<()> {
    let mut peers = settings.peers.clone();
    let end = async {
        while signals.next().await == Signal::Reload {
            reload(sources, &mut peers);
        }
        admin.drain();
    };
    match server {
        Some(server) => server.run(admin.clone(), end, settings.drain).await,
        None => {
            end.await;
            Ok(())
        }
    }
}

/// Reads the settings again and takes over the peers. Settings that are refused change nothing.
fn reload(sources: &Sources, peers: &mut Vec<PeerAddress>) {
    match sources.load() {
        Err(error) => complain(format_args!("not reloaded: {error}")),
        Ok(loaded) => {
            let new = loaded.settings.peers;
            let added = new.iter().filter(|peer| !peers.contains(peer));
            let removed = peers.iter().filter(|peer| !new.contains(peer));
            let shown =
                |sign: char| move |peer: &PeerAddress| format!(" {sign}{}={}", peer.name, peer.address);
            let changes: String = added.map(shown('+')).chain(removed.map(shown('-'))).collect();
            let changes = if changes.is_empty() { " none" } else { &changes };
            complain(format_args!("reloaded; changes of peers:{changes}"));
            *peers = new;
        }
    }
}

fn build(settings: &PoolSettings) -> Result<(Pool, Backend), ServeError> {
    let PoolSettings { blocks, blocks_max, ref layout, device, .. } = *settings;
    let backend = Backend::open(device).map_err(|reason| ServeError::Device { device, reason })?;
    if let Some((block_bytes, free)) = backend.lacks_room(layout, blocks) {
        return Err(ServeError::TooLarge { blocks, block_bytes, free });
    }
    // One frame more, for the null block.
    let storage = backend.storage(layout.clone(), blocks + 1, blocks_max + 1)?;
    let builder = Pool::builder(layout.clone()).storage(storage);
    let mut builder = builder.blocks(blocks).blocks_max(blocks_max).reserve(settings.reserve);
    builder = builder.latency_sample(LATENCY_SAMPLE);
    if let Some(policy) = settings.eviction {
        builder = builder.prefix_cache(PrefixConfig::new().policy_of(policy.build(blocks_max + 1)));
    }
    Ok((builder.build()?, backend))
}

fn runtime() -> io::Result<Runtime> {
    runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .thread_name("kvpool-serve")
        .enable_all()
        .build()
}

/// Returns the lines of the standard output: what is served, and where.
fn greeting(settings: &Settings, server: Option<&AdminServer>) -> String {
    let PoolSettings { blocks, layout, layout_name, device, .. } = &settings.pool;
    let node = format!(
        "node: {}, {blocks} blocks of {} tokens and {} bytes ({layout_name} on {device})",
        settings.name,
        layout.block_tokens(),
        layout.bytes_per_block()
    );
    match server {
        Some(server) => format!("{node}\nadmin: http://{}", server.address()),
        None => format!("{node}\nadmin: off"),
    }
}

/// A signal to this process.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Signal {
    End,
    Reload,
}

#[cfg(unix)]
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hang_up: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.terminate.recv() => Signal::End,
            _ = self.interrupt.recv() => Signal::End,
            _ = self.hang_up.recv() => Signal::Reload,
        }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) -> Signal {
        match tokio::signal::ctrl_c().await {
            Ok(()) => Signal::End,
            // Without the signal, only the end of the process ends the node.
            Err(_) => std::future::pending().await,
        }
    }
}
