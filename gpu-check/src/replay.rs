//! Runs scheduler threads over a pool on the device end to end, under compaction, and reads every
//! token back.

use std::ops::ControlFlow;
use std::time::Duration;

use kvpool::storage::{Dtype, KvLayout};
use kvpool_cli::backend::Backend;
use kvpool_cli::replay::{self, Compaction, Layers, ReplayPool};
use kvpool_cli::trace::Generated;
use kvpool_load::Shape;

use crate::Options;
use crate::gpu::{Gpu, Outcome};
use crate::report::Section;

/// Replays generated conversations.
///
/// # Errors
/// An error of the pool or of the device.
pub fn run(gpu: &Gpu, options: &Options, section: &mut Section) -> Outcome<()> {
    let quick = options.quick;
    let requests = if quick { 12 } else { 400 };
    let trace = Generated::Conversations.trace(7, requests);
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(4).dtype(Dtype::F16).build()?;
    let shape = Shape::of(&layout);
    let blocks = replay::blocks_for(&trace.requests, |tokens| shape.blocks(tokens));
    let pool = ReplayPool::new(
        &Backend::Cuda(gpu.device.clone()),
        &Layers::Alike(layout, None),
        blocks,
        blocks,
        None,
    )?;
    let compaction = Compaction { threshold: 0.02, interval: Duration::from_millis(2) };
    let usual = replay::Options::new(&trace, 4);
    let options = replay::Options { compaction: Some(compaction), ..usual };
    let outcome = replay::replay(&pool, &trace, &options, |_| ControlFlow::Continue(()));
    let tally = &outcome.tally;
    section.check(
        "no block lost, no byte corrupt",
        outcome.is_sound(requests),
        format!("{} blocks leaked; audit: {:?}", outcome.blocks_leaked, outcome.audit),
    );
    section.figure("requests", requests as f64, "requests");
    section.figure("tokens appended", tally.tokens as f64, "tokens");
    section.figure("time", outcome.wall.as_secs_f64(), "s");
    let compacted = outcome.compaction.as_ref();
    section.figure(
        "blocks moved by compaction",
        compacted.map_or(0.0, |totals| totals.moved_blocks as f64),
        "blocks",
    );
    section.check(
        "compaction had work to do",
        // A quick run may be over before the task finds any.
        compacted.is_some_and(|totals| totals.failed == 0 && (quick || totals.runs > 0)),
        format!("{compacted:?}"),
    );
    Ok(())
}
