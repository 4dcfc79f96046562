use std::path::PathBuf;
use std::thread;

use anyhow::bail;
use indicatif::{BinaryBytes, HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvpool::storage::KvLayout;
use kvpool_load::Shape;

use crate::args::{ModelArgs, WorkloadArgs};
use crate::backend::Backend;
use crate::error::named;
use crate::output::{complain, is_plain};
use crate::replay::{self, Eviction, Layers, Lists, Progress, ReplayPool, probe};
use crate::schedule::BLOCKS_MAX;
use crate::trace::{Generated, HashIds, Trace};

/// The name of the default layout of replays.
const PROBE: &str = "probe";

pub struct Workload {
    pub trace: Trace,
    pub shape: Shape,
    pub blocks: usize,
    pub threads: usize,
    /// Eviction of the prefix cache, if there is one.
    pub eviction: Option<Eviction>,
    layers: Layers,
    backend: Backend,
}

impl Workload {
    /// Returns the workload for a pool of a model.
    pub fn of_model(args: &WorkloadArgs, model: &ModelArgs) -> anyhow::Result<Self> {
        Self::of_sessions(args, model, None)
    }

    /// Returns the workload of a number of sessions at a time, if there is a number.
    pub fn of_sessions(
        args: &WorkloadArgs,
        model: &ModelArgs,
        at_once: Option<usize>,
    ) -> anyhow::Result<Self> {
        let eviction = args.prefix.eviction()?;
        let device = args.device;
        let backend = Backend::open(device).map_err(named(format_args!("--device {device}")))?;
        let layers = model.layers(device, || layout(&args.layout, args.block_tokens as usize))?;
        let (shape, lists) = (Shape::of(&layers.stored()?), Lists::of(&layers)?);
        let trace = trace(args, at_once.map_or(Generated::Conversations, |_| Generated::Agents))?;
        if at_once.is_some() && trace.requests.iter().all(|request| request.turn.is_none()) {
            bail!(
                "{}: no request has a session, and --sessions needs them (sessions of agents, or Dynamo's with session_id)",
                trace.name
            );
        }
        let blocks_of = |tokens| lists.blocks_with_states(tokens, model.step_tokens());
        let blocks = match (args.blocks, model.memory, at_once) {
            (Some(blocks), ..) => blocks as usize,
            (None, Some(bytes), _) => blocks_in(bytes, &layers)?,
            (None, None, Some(at_once)) => replay::blocks_for_sessions(&trace.requests, at_once, blocks_of),
            (None, None, None) => replay::blocks_for(&trace.requests, blocks_of),
        };
        let threads = args
            .threads
            .map_or_else(|| thread::available_parallelism().map_or(1, usize::from), |n| n as usize);
        Ok(Self { trace, shape, blocks, threads, eviction, layers, backend })
    }

    pub fn pool(&self, blocks_max: usize) -> anyhow::Result<ReplayPool> {
        self.pool_with(self.eviction, blocks_max)
    }

    /// Builds a pool with another prefix cache, or without one.
    pub fn pool_with(&self, eviction: Option<Eviction>, blocks_max: usize) -> anyhow::Result<ReplayPool> {
        let (blocks, blocks_max) = (self.blocks, blocks_max.max(self.blocks));
        self.backend.check_room(&self.layers.stored()?, blocks_max, "--blocks")?;
        ReplayPool::new(&self.backend, &self.layers, blocks, blocks_max, eviction)
            .map_err(named(format_args!("cannot build a pool of {} blocks", HumanCount(blocks as u64))))
    }
}

/// Returns the number of blocks in this much memory.
fn blocks_in(bytes: u64, layers: &Layers) -> anyhow::Result<usize> {
    let block_bytes = layers.block_bytes();
    match bytes / block_bytes {
        blocks @ 1..=BLOCKS_MAX => Ok(blocks as usize),
        blocks => bail!(
            "--memory {}: {} blocks of {} bytes, which are not from 1 to {}",
            BinaryBytes(bytes),
            HumanCount(blocks),
            HumanCount(block_bytes),
            HumanCount(BLOCKS_MAX)
        ),
    }
}

fn layout(name: &str, block_tokens: usize) -> anyhow::Result<KvLayout> {
    let layout = if name.eq_ignore_ascii_case(PROBE) {
        probe(block_tokens)
    } else {
        KvLayout::described(name).and_then(|builder| builder.block_tokens(block_tokens).build())
    };
    layout.map_err(named(format_args!("--layout {name}")))
}

/// Reads the trace, or generates one, by default of this kind.
fn trace(args: &WorkloadArgs, default: Generated) -> anyhow::Result<Trace> {
    let (options, generated) = (args.read_options()?, args.load.unwrap_or(default));
    match &*args.trace {
        [] => Ok(generated.trace(args.seed, options.limit.unwrap_or(generated.requests()))),
        paths => {
            let trace = Trace::load_all(paths, &options)?;
            if options.hash_ids == HashIds::Required && trace.has_no_hash_ids() {
                complain(format_args!(
                    "{}: no request has hash_ids, so no two prompts have a common prefix",
                    trace.name
                ));
            }
            if trace.out_of_order > 0 {
                let lines = HumanCount(trace.out_of_order as u64);
                complain(format_args!("{}: {lines} lines are out of order, and were sorted", trace.name));
            }
            let name = PathBuf::from(&trace.name);
            let name =
                name.file_name().map_or(trace.name.clone(), |file| file.to_string_lossy().into_owned());
            Ok(Trace { name, ..trace })
        }
    }
}

/// Creates a progress bar on the standard error, shown only on a terminal with escape sequences
/// enabled.
pub fn progress_bar(requests: u64) -> ProgressBar {
    let target = if is_plain() { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(Some(requests), target);
    let style =
        "{bar:30.cyan/dim} {percent:>3} %  {human_pos}/{human_len} requests  {msg}  {elapsed}, {eta} to go";
    // The template is fixed, and a test draws it.
    bar.with_style(ProgressStyle::with_template(style).expect("a valid template"))
}

pub fn show(bar: &ProgressBar, progress: Progress) {
    let used = 100.0 * (1.0 - progress.blocks_free as f64 / progress.blocks_total as f64);
    bar.set_message(format!(
        "{} million tokens, pool {used:.0} % full",
        HumanCount(progress.tokens / 1_000_000)
    ));
    bar.set_position(progress.settled);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_can_be_drawn() {
        let bar = progress_bar(10);
        let progress =
            Progress { settled: 3, tokens: 5_000_000, blocks_free: 5, blocks_total: 10, is_halted: false };
        show(&bar, progress);
        assert_eq!(bar.message(), "5 million tokens, pool 50 % full");
    }

    #[test]
    fn every_layout_has_a_shape() {
        for name in KvLayout::names().chain([PROBE]) {
            let layout = layout(name, 16).unwrap();
            let shape = Shape::of(&layout);
            assert_eq!(shape.layers * (shape.k_bytes + shape.v_bytes) * 16, layout.packed_bytes(), "{name}");
        }
        assert_eq!(layout("Probe", 16).unwrap(), layout(PROBE, 16).unwrap(), "case does not matter");
        assert!(layout("no-such-model", 16).is_err());
    }
}
