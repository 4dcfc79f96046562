//! The command line.

mod comparison;
mod layout;
mod model;
#[cfg(feature = "node")]
mod peers;
mod prefix;
mod sessions;
mod size;

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;
use clap::builder::TypedValueParser;
use clap::{ArgGroup, Args, Parser, Subcommand};
use clap_complete::Shell;
use indicatif::HumanCount;

use kvpool::DeviceId;
use kvpool_policies::simulate::Contender;

#[cfg(not(feature = "top"))]
use crate::absent::AbsentCommand;
use crate::backend;
use crate::replay::Compaction;
use crate::schedule::{BLOCKS_MAX, Schedule, Share};
#[cfg(feature = "node")]
use crate::serve::SettingsArgs;
use crate::trace::{Columns, Format, Generated, HashIds, REQUESTS_MAX, ReadOptions, TimeUnit};

pub use comparison::{Baseline, ComparisonArgs};
pub use layout::LayoutArgs;
pub use model::{GroupingArgs, ModelArgs};
#[cfg(feature = "node")]
pub use peers::{AdminArgs, DeclareEndedArgs, MigrateArgs, ReachArgs};
pub use prefix::{PrefixArgs, Switch};
pub use sessions::SessionArgs;

/// A lock-free pool for the KV-cache blocks of LLM inference engines.
#[derive(Clone, Debug, Parser)]
#[command(name = "kvpool", version, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Replay a trace through many scheduler threads over one pool, and check every byte
    ///
    /// Each thread batches continuously, in virtual time: prompts are loaded in pieces, answers
    /// grow token by token, and when the pool is full the request that arrived last is preempted
    /// and restarts later. Every token's bytes are written through its slot and read back through
    /// the block table. Meanwhile the pool is compacted in the background.
    ///
    /// Without a trace, requests are generated: conversations of users and then, unless flags
    /// choose the requests or the pool, sessions of agents as with --sessions 16.
    ///
    /// An interrupt (Ctrl-C) ends the replay early and prints the report so far; a second one ends
    /// the program.
    ///
    /// Exit code: 0 for success, 1 if anything was lost or corrupt, or if nothing was replayed, 2
    /// for bad usage or input, 130 if interrupted.
    Replay(ReplayArgs),
    /// Draw a pool in the middle of a replay, before and after a defragmentation
    ///
    /// Replays without compaction up to a share of the requests, halts, and draws every frame
    /// before and after a defragmentation as one SVG. At the end, the tokens of all open sequences
    /// are read back.
    ///
    /// Exit code: 0 for success, 1 if anything was lost or corrupt, or if there was nothing to
    /// draw, 2 for bad usage or input.
    Map(MapArgs),
    /// Measure eviction policies on traces: hit rates by capacity
    ///
    /// Each request looks up the blocks of its prompt, by the hash_ids of the trace, and leaves
    /// them in the cache. lru and priority are called as a pool calls them; s3-fifo and
    /// sieve are for comparison, and clairvoyant knows the future: no policy can exceed its hit
    /// rate.
    ///
    /// Exit code: 0 for success, 1 if a trace repeats no block, so that no policy can hit, 2 for
    /// bad usage or input.
    Policy(PolicyArgs),
    /// Print the groups of layers of a model: what a sequence takes, and how many sequences fit
    ///
    /// The layers of some models differ: windows, states, an index beside K and V. Layers that keep
    /// the same tokens form a group, and a block of a group is a run of frames. `kvpool replay
    /// --model` runs those whose groups keep all tokens, windows, chunks or states.
    ///
    /// Exit code: 0 for success, 2 for bad usage, or a configuration that is not understood.
    Layout(LayoutArgs),
    /// List the devices for the memory of a pool, their free memory, and the reason if one is
    /// unusable
    Info(InfoArgs),
    /// Serve a pool, with an admin interface, until SIGTERM
    ///
    /// Each setting is a flag, a variable KVPOOL_NAME of the environment, or a key of the file that
    /// --config names; the first of these that has it decides. Without any, the pool is in host
    /// memory and everything is on the loopback. The addresses are printed on the standard output.
    ///
    /// SIGTERM and SIGINT let requests under way finish, and end the program. SIGHUP reads the
    /// settings again and takes over the peers.
    ///
    /// Exit code: 0 after a signal to end, 1 if anything was lost or corrupt, 2 for bad settings or
    /// an address in use.
    #[cfg(feature = "node")]
    Serve(ServeArgs),
    /// Print the statistics of a node: blocks, fragmentation, latency of allocations
    #[cfg(feature = "node")]
    Stats(AdminArgs),
    /// Compact the pool of a node
    ///
    /// Moves owned blocks so that free and evictable ones form long runs; evictable blocks in their
    /// way are dropped. Exit code: 1 if blocks were moved and fewer such runs are left, because of
    /// allocations and frees meanwhile.
    #[cfg(feature = "node")]
    Defrag(AdminArgs),
    /// Change the size of a node's pool
    #[cfg(feature = "node")]
    Resize(ResizeArgs),
    /// Migrate a sequence from a node to another one
    #[cfg(feature = "node")]
    Migrate(MigrateArgs),
    /// Print the migrations of a node
    #[cfg(feature = "node")]
    MigrationStatus(AdminArgs),
    /// Declare that a peer's process has ended, so that a node goes on with its sequences in doubt
    ///
    /// Make sure of it before: if the process lives behind a network that is cut, it may run the
    /// sequences too. A peer that has a link is refused. Of a name that another process has taken,
    /// the former process is declared.
    #[cfg(feature = "node")]
    DeclareEnded(DeclareEndedArgs),
    /// Print who holds the blocks of a node's pool, and since when
    #[cfg(feature = "node")]
    Owners(OwnersArgs),
    /// Follow a node: statistics each second, changes of the map, migrations
    ///
    /// After a lost connection it connects again, and continues behind the last event if the node
    /// still has what followed. With --json, each line is an object with the event's name and data.
    #[cfg(feature = "node")]
    Events(EventsArgs),
    /// Show a node on the terminal: occupancy, memory map, latencies, owners, migrations, peers and
    /// tiers
    ///
    /// Keys: q ends, h helps, s sorts the owners, d compacts the pool, p pauses. When the node goes
    /// away, the last figures stay, and it connects again by itself.
    ///
    /// Exit code: 0 after q, 1 if the node cannot be reached to begin with, 2 without a terminal,
    /// 128 and the number of the signal after a signal.
    #[cfg(feature = "top")]
    Top(TopArgs),
    /// Recount every frame of a node's pool
    ///
    /// Exit code: 0 if the recount agrees, 1 if it does not or was not possible, 2 for bad usage.
    #[cfg(feature = "node")]
    Audit(AdminArgs),
    /// Print devices, memory nodes, network interfaces and peers, and the paths between them
    ///
    /// Without FROM and TO, the path between any two ends is printed: `host`, `cuda:N`, or the name
    /// of a peer.
    #[cfg(feature = "node")]
    Topology(TopologyArgs),
    /// A command of a feature that this build lacks.
    #[cfg(not(feature = "top"))]
    #[command(flatten)]
    Absent(AbsentCommand),
    /// Print the completion script of a shell
    Completions(CompletionsArgs),
    /// Print the man page, or write it and a page for each command into a directory
    Man(ManArgs),
}

/// `kvpool replay`.
#[derive(Clone, Debug, Args)]
pub struct ReplayArgs {
    /// The trace and the pool.
    #[command(flatten)]
    pub workload: WorkloadArgs,
    /// The model, if its layers differ, and windows.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Sessions in a closed loop.
    #[command(flatten)]
    pub sessions: SessionArgs,
    /// Compaction.
    #[command(flatten)]
    pub compaction: CompactionArgs,
    /// Resize the pool during the replay: at a share of the requests, to a number of blocks, such
    /// as 30%:40000,60%:80000. Shrinking moves blocks that are in the way; if that fails, it is
    /// retried until the next step is due
    #[arg(long, value_name = "SHARE:N,...", allow_hyphen_values = true)]
    pub resize_at: Option<Schedule>,
    /// Comparisons.
    #[command(flatten)]
    pub comparison: ComparisonArgs,
    /// Do not read tokens back
    #[arg(long)]
    pub no_verify: bool,
    /// Print the report as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `kvpool map`.
#[derive(Clone, Debug, Args)]
pub struct MapArgs {
    /// The trace and the pool.
    #[command(flatten)]
    pub workload: WorkloadArgs,
    /// The layers of the pool.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Halt at this share of the requests
    #[arg(long, value_name = "SHARE", default_value = "60%", allow_hyphen_values = true)]
    pub at: Share,
    /// Write the picture to this file
    #[arg(long, short, value_name = "FILE", default_value = "kvpool-map.svg")]
    pub output: PathBuf,
}

/// `kvpool policy`.
#[derive(Clone, Debug, Args)]
#[command(group(ArgGroup::new("timed").args(["running", "sessions"]).multiple(true)))]
pub struct PolicyArgs {
    /// The traces; `-` is the standard input. They must have hash_ids
    #[arg(value_name = "TRACE", required = true)]
    pub traces: Vec<PathBuf>,
    /// The format of the traces.
    #[command(flatten)]
    pub format: FormatArgs,
    /// Capacities, as shares of the distinct blocks of a trace
    #[arg(long, value_name = "SHARE,...", value_delimiter = ',', default_value = "0.01,0.02,0.05,0.1,0.2", value_parser = capacity, allow_hyphen_values = true)]
    pub capacities: Vec<f64>,
    /// Policies: lru, priority, sessions, sessions-told, sessions-told-ends, s3-fifo, sieve,
    /// clairvoyant [default: lru, s3-fifo, sieve, clairvoyant; with --sessions lru, those of
    /// sessions, clairvoyant]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub policies: Option<Vec<Contender>>,
    /// Let requests hold their blocks while they run, MS milliseconds for each token of an answer:
    /// the hit rates that a pool can reach
    #[arg(long, value_name = "MS", value_parser = whole(0..=3_600_000), allow_negative_numbers = true)]
    pub running: Option<u64>,
    /// Run N sessions of the trace at a time, each request when the think time after the last
    /// answer is over, 15 ms for each token of an answer unless --running says otherwise. Prints
    /// the tokens of prompts that are computed again
    #[arg(long, value_name = "N", value_parser = whole(1..=1_000_000), allow_negative_numbers = true)]
    pub sessions: Option<u64>,
    /// Measure K orders of the sessions, and print the means
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = whole(1..=1000), allow_negative_numbers = true, requires = "sessions")]
    pub orders: u64,
    /// Tokens of prompts computed per second while requests run [default: 10,000 with --sessions,
    /// as in a replay otherwise]
    #[arg(long, value_name = "TOKENS", value_parser = whole(1..=1_000_000_000), allow_negative_numbers = true, requires = "timed")]
    pub prefill_rate: Option<u64>,
    /// Draw the rates as SVG
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
    /// Print a list of objects instead of tables
    #[arg(long)]
    pub json: bool,
}

/// `kvpool info`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Args)]
pub struct InfoArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `kvpool serve`.
#[cfg(feature = "node")]
#[derive(Clone, Debug, Args)]
pub struct ServeArgs {
    /// The settings.
    #[command(flatten)]
    pub settings: SettingsArgs,
}

/// `kvpool resize`.
#[cfg(feature = "node")]
#[derive(Clone, Debug, Args)]
pub struct ResizeArgs {
    /// The number of blocks
    #[arg(value_name = "BLOCKS", value_parser = whole(1..=BLOCKS_MAX), allow_negative_numbers = true)]
    pub blocks: u64,
    /// The node.
    #[command(flatten)]
    pub admin: AdminArgs,
}

/// `kvpool owners`.
#[cfg(feature = "node")]
#[derive(Clone, Debug, Args)]
pub struct OwnersArgs {
    /// Print at most N owners, those with the most blocks
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = whole(0..=BLOCKS_MAX), allow_negative_numbers = true)]
    pub limit: u64,
    /// The node.
    #[command(flatten)]
    pub admin: AdminArgs,
}

/// `kvpool events`.
#[cfg(feature = "node")]
#[derive(Clone, Debug, Args)]
pub struct EventsArgs {
    /// End after N events
    #[arg(long, value_name = "N", value_parser = whole(1..=u64::MAX), allow_negative_numbers = true)]
    pub count: Option<u64>,
    /// The node.
    #[command(flatten)]
    pub admin: AdminArgs,
}

/// `kvpool top`.
#[cfg(feature = "top")]
#[derive(Clone, Debug, Args)]
pub struct TopArgs {
    /// The node.
    #[command(flatten)]
    pub reach: ReachArgs,
}

/// `kvpool topology`.
#[cfg(feature = "node")]
#[derive(Clone, Debug, Args)]
pub struct TopologyArgs {
    /// One end of a transfer
    #[arg(value_name = "FROM", requires = "to")]
    pub from: Option<String>,
    /// The other end
    #[arg(value_name = "TO")]
    pub to: Option<String>,
    /// Use the record of another machine, which --json printed there
    #[arg(long, value_name = "FILE.json", conflicts_with_all = ["peers", "config", "sysfs"])]
    pub machine: Option<PathBuf>,
    /// Other nodes, as in `kvpool serve`
    #[arg(long, value_name = "NAME=ADDRESS,...")]
    pub peers: Option<String>,
    /// Read settings, of which the peers and the name count, from this file
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Read the devices of the system from this tree
    #[arg(long, value_name = "DIR", default_value = "/sys")]
    pub sysfs: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `kvpool completions`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_name = "SHELL")]
    pub shell: Shell,
}

/// `kvpool man`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub struct ManArgs {
    /// Write the pages to this directory, such as /usr/local/share/man/man1; without it, the
    /// program's page is printed
    #[arg(value_name = "DIR")]
    pub directory: Option<PathBuf>,
}

/// The format of a trace.
#[derive(Clone, Copy, Debug, Args)]
pub struct FormatArgs {
    /// The format of a trace; auto detects it by the first line
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
    /// Tokens for one of the hash_ids [default: 512, 16 in Bailian's traces, and the block_size of
    /// an agent's session]
    #[arg(long, value_name = "N", value_parser = whole(1..=1 << 16), allow_negative_numbers = true)]
    pub hash_tokens: Option<u64>,
    /// The unit of timestamps and delays in JSON [default: s for Bailian and agents, otherwise ms]
    #[arg(long, value_name = "UNIT", value_enum)]
    pub time_unit: Option<TimeUnit>,
}

impl FormatArgs {
    /// Returns a flag that is given, if one is.
    fn flag(self) -> Option<&'static str> {
        let given = [
            ("--format", self.format != Format::Auto),
            ("--hash-tokens", self.hash_tokens.is_some()),
            ("--time-unit", self.time_unit.is_some()),
        ];
        given.into_iter().find_map(|(flag, is_given)| is_given.then_some(flag))
    }

    /// Returns how to read a trace, without its hash ids.
    pub(crate) fn read_options(self) -> ReadOptions {
        let Self { format, hash_tokens, time_unit } = self;
        let hash_tokens = hash_tokens.map(|tokens| tokens as u32);
        ReadOptions { format, hash_tokens, time_unit, ..ReadOptions::default() }
    }
}

/// A trace, and the pool of its replay.
#[derive(Clone, Debug, Args)]
pub struct WorkloadArgs {
    /// The trace, or sessions of agents: a folder of them, or several files; `-` is the standard
    /// input. Without one, requests are generated from the seed
    #[arg(value_name = "TRACE")]
    pub trace: Vec<PathBuf>,
    /// The format of the trace.
    #[command(flatten)]
    pub format: FormatArgs,
    /// The names of the columns of a CSV trace, such as
    /// arrival=Timestamp,input=Prompt,output=Answer: the arrival of a request (a date and time, or
    /// seconds), and the tokens of its prompt and answer [default: the names in Azure's traces]
    #[arg(long, value_name = "FIELD=NAME,...", requires = "trace")]
    pub columns: Option<Columns>,
    /// Blocks of the pool [default: a number at which the pool is full only at the busiest moments]
    #[arg(long, value_name = "N", value_parser = whole(1..=BLOCKS_MAX), allow_negative_numbers = true)]
    pub blocks: Option<u64>,
    /// Tokens per block
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = whole(1..=4096), allow_negative_numbers = true)]
    pub block_tokens: u64,
    /// Scheduler threads [default: one per core]
    #[arg(long, value_name = "N", value_parser = whole(1..=1024), allow_negative_numbers = true)]
    pub threads: Option<u64>,
    /// Only the first N requests [default: all of a trace; of generated requests, 30000 of
    /// conversations or 10000 of agents]
    #[arg(long, value_name = "N", value_parser = whole(1..=u64::from(REQUESTS_MAX)), allow_negative_numbers = true)]
    pub requests: Option<u64>,
    /// The generated requests [default: agents with --sessions, otherwise conversations; both
    /// without flags]
    #[arg(long, value_name = "KIND", value_enum, conflicts_with = "trace")]
    pub load: Option<Generated>,
    /// The seed of generated requests
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "trace", value_parser = whole(0..=u64::MAX), allow_negative_numbers = true)]
    pub seed: u64,
    /// The layout: `probe` (16 bytes per token), a model such as `Qwen/Qwen2.5-7B`, the
    /// `config.json` of a model (or its folder), or numbers such as
    /// layers=32,kv-heads=8,head-dim=128,dtype=bf16
    #[arg(long, value_name = "LAYOUT", default_value = "probe")]
    pub layout: String,
    /// The device of the pool's memory: `host`, or `cuda:N` in a build with the feature `cuda` (see
    /// `kvpool info`)
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceId::Host, value_parser = backend::device)]
    pub device: DeviceId,
    /// Prefix reuse.
    #[command(flatten)]
    pub prefix: PrefixArgs,
}

impl WorkloadArgs {
    /// Returns how to read the trace. Columns for a format that has none, a format without a trace,
    /// and a policy without a cache, are errors.
    pub(crate) fn read_options(&self) -> anyhow::Result<ReadOptions> {
        if let (true, Some(flag)) = (self.trace.is_empty(), self.format.flag()) {
            bail!("{flag} tells how a trace is read, and none is given");
        }
        let format = match (self.format.format, &self.columns) {
            (Format::Auto | Format::Azure, Some(_)) => Format::Azure,
            (_, Some(_)) => bail!("--columns is for CSV traces, and --format names one in JSON"),
            (format, None) => format,
        };
        let hash_ids = self.prefix.eviction()?.map_or(HashIds::Ignored, |_| HashIds::Required);
        let limit = self.requests.map(|requests| requests as usize);
        let columns = self.columns.clone().unwrap_or_default();
        Ok(ReadOptions { format, columns, hash_ids, limit, ..self.format.read_options() })
    }
}

/// Compaction in the background of a replay.
#[derive(Clone, Copy, PartialEq, Debug, Args)]
pub struct CompactionArgs {
    /// Compact when fragmentation is above R, from 0 to 1: the share of free and evictable blocks
    /// outside long runs. In a pool full of evictable blocks: above 0.25, and at most 2 % of the
    /// allocated blocks
    #[arg(long, value_name = "R", default_value_t = 0.02, value_parser = threshold, allow_negative_numbers = true)]
    pub defrag_threshold: f64,
    /// Milliseconds between two checks of fragmentation
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = whole(1..=3_600_000), allow_negative_numbers = true)]
    pub defrag_interval_ms: u64,
    /// Do not compact in the background
    #[arg(long, conflicts_with_all = ["defrag_threshold", "defrag_interval_ms"])]
    pub no_defrag: bool,
}

impl CompactionArgs {
    /// Returns the compaction, if there is one.
    pub fn compaction(self) -> Option<Compaction> {
        let interval = Duration::from_millis(self.defrag_interval_ms);
        (!self.no_defrag).then_some(Compaction { threshold: self.defrag_threshold, interval })
    }
}

/// Parses a whole number in a range.
fn whole(range: RangeInclusive<u64>) -> impl TypedValueParser<Value = u64> {
    clap::builder::StringValueParser::new().try_map(move |text| match text.parse() {
        Ok(value) if range.contains(&value) => Ok(value),
        _ => {
            let [first, last] = [range.start(), range.end()].map(|&end| HumanCount(end));
            Err(format!("not a whole number from {first} to {last}"))
        }
    })
}

/// `--defrag-threshold`.
fn threshold(text: &str) -> Result<f64, String> {
    match text.parse() {
        // NaN is in no range.
        Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
        Ok(value) => Err(format!("{value} is not from 0 to 1")),
        Err(_) => Err("not a number from 0 to 1".to_owned()),
    }
}

/// One of `--capacities`.
fn capacity(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        // NaN is in no range.
        Ok(value) if value > 0.0 && value <= 1.0 => Ok(value),
        Ok(value) => Err(format!("{value} is not above 0 and at most 1")),
        Err(_) => Err("not a share, such as 0.05".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::Eviction;
    use clap::CommandFactory;
    use kvpool::prefix::policy::PolicyKind;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    fn replay(arguments: &[&str]) -> Result<ReplayArgs, clap::Error> {
        match Cli::try_parse_from(["kvpool", "replay"].iter().chain(arguments))?.command {
            Command::Replay(args) => Ok(args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_replay_compacts_by_default() {
        let compaction = |arguments: &[&str]| replay(arguments).unwrap().compaction.compaction();
        let usual = Compaction { threshold: 0.02, interval: Duration::from_millis(2) };
        assert_eq!(compaction(&[]), Some(usual));
        let other = Compaction { threshold: 0.0, interval: Duration::from_millis(50) };
        assert_eq!(compaction(&["--defrag-threshold", "0", "--defrag-interval-ms", "50"]), Some(other));
        assert_eq!(compaction(&["--no-defrag"]), None);
        assert!(replay(&["--no-defrag", "--defrag-threshold", "0.2"]).is_err(), "they contradict each other");
    }

    #[test]
    fn prefixes_are_reused_on_request() {
        let eviction = |arguments: &[&str]| replay(arguments).unwrap().workload.prefix.eviction();
        let policy = |arguments: &[&str]| eviction(arguments).unwrap().map(|eviction| eviction.policy);
        assert_eq!(policy(&[]), None);
        assert_eq!(policy(&["--prefix-cache", "on"]), Some(PolicyKind::Lru));
        assert_eq!(policy(&["--policy", "priority"]), Some(PolicyKind::Priority));
        assert_eq!(policy(&["--prefix-cache", "off"]), None);
        let exact = eviction(&["--policy", "lru", "--tolerance", "0"]).unwrap().unwrap();
        assert_eq!(exact, Eviction { policy: PolicyKind::Lru, tolerance: Some(0.0) });
        for without in [&["--tolerance", "0.1"][..], &["--policy", "priority", "--tolerance", "0"]] {
            let refused = eviction(without).unwrap_err().to_string();
            assert!(refused.starts_with("--tolerance is of LRU"), "{without:?}: {refused}");
        }
    }
}
