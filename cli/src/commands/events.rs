use std::io::{self, Write};
use std::time::{Duration, Instant};

use indicatif::{BinaryBytes, HumanCount};
use kvpool_node::admin::{ClientError, MigrationRecord, Notice, StatsSummary};
use serde_json::json;

use super::admin::connect;
use crate::EXIT_OK;
use crate::args::EventsArgs;
use crate::error::output_failed;
use crate::figures::{percent, word};
use crate::output::{complain, printable};

/// Time without a connection after which the command fails, and pause between attempts.
const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_secs(1);

pub fn events(args: &EventsArgs) -> anyhow::Result<u8> {
    let (runtime, client) = connect(&args.admin.reach)?;
    let mut follower = client.follow();
    let (mut printer, mut left) = (Printer::default(), args.count.unwrap_or(u64::MAX));
    runtime.block_on(async {
        let mut lost: Option<Instant> = None;
        let mut is_first = true;
        while left > 0 {
            match follower.next().await {
                Ok(notice) => {
                    (is_first, lost) = (false, None);
                    let line =
                        if args.admin.json { json!(notice).to_string() } else { printer.line(&notice) };
                    if !print(&printable(&line)).map_err(output_failed)? {
                        break;
                    }
                    left -= 1;
                }
                // The node was never reachable, or refuses.
                Err(error) if is_first => return Err(error.into()),
                Err(error @ (ClientError::Problem(_) | ClientError::Foreign { .. })) => {
                    return Err(error.into());
                }
                Err(error) => {
                    if lost.is_none() {
                        complain(format_args!("{error}; trying again"));
                    }
                    if lost.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                        return Err(error.into());
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
        Ok(EXIT_OK)
    })
}

/// Prints a line. Returns false if the reader of the standard output is gone.
fn print(line: &str) -> io::Result<bool> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}

#[derive(Default)]
struct Printer {
    before: Option<StatsSummary>,
}

impl Printer {
    fn line(&mut self, notice: &Notice) -> String {
        match notice {
            Notice::Stats(stats) => {
                let line = self.stats(stats);
                self.before = Some((**stats).clone());
                line
            }
            Notice::Map(map) => format!(
                "map: {} frames, {} a cell, runs of {}",
                HumanCount(map.frames as u64),
                map.group,
                1u64 << map.order.min(63)
            ),
            Notice::MapChanges(changes) => {
                let cells: usize = changes.changes.iter().map(|(_, cells)| cells.len()).sum();
                format!("map: {} cells changed", HumanCount(cells as u64))
            }
            Notice::Migrations(list) if list.migrations.is_empty() => "no migrations".to_owned(),
            Notice::Migrations(list) => list.migrations.iter().map(migration).collect::<Vec<_>>().join("\n"),
            _ => notice.name().to_owned(),
        }
    }

    fn stats(&self, stats: &StatsSummary) -> String {
        let count = |n: usize| HumanCount(n as u64);
        let rate = self.before.as_ref().filter(|before| stats.time_ms > before.time_ms).map(|before| {
            let seconds = (stats.time_ms - before.time_ms) as f64 / 1e3;
            let allocations = stats.allocations.saturating_sub(before.allocations) as f64 / seconds;
            format!("; {} allocations/s", HumanCount(allocations.round() as u64))
        });
        let (mut sequences, mut peers, mut p99) = (String::new(), String::new(), String::new());
        if let Some(of) = &stats.of_sequences {
            sequences = format!("{} sequences, ", count(of.sequences));
            peers = format!(", peers {}/{}", of.peers_up, of.peers);
            if of.allocation.samples > 0 {
                p99 = format!(", p99 {} ns", HumanCount(of.allocation.p99_ns));
            }
        }
        format!(
            "{}: used {} of {} ({}), free {}, evictable {}, fragmentation {}, {sequences}{} wait{peers}{}{p99}",
            stats.node,
            count(stats.used),
            count(stats.total),
            percent(100.0 * stats.used as f64 / stats.total.max(1) as f64),
            count(stats.free),
            count(stats.evictable),
            percent(100.0 * stats.fragmentation),
            count(stats.waiting),
            rate.unwrap_or_default(),
        )
    }
}

fn migration(record: &MigrationRecord) -> String {
    let sequence = record.sequence.map_or(String::new(), |id| format!(" of sequence {id}"));
    let reason = record.reason.as_ref().map_or(String::new(), |reason| format!(": {reason}"));
    format!(
        "migration {}: {}{sequence} {} {}, {}, {} blocks, {} in {} ms{reason}",
        record.id,
        word(&json!(record.kind)),
        record.way(),
        record.peer,
        word(&json!(record.state)),
        HumanCount(record.blocks as u64),
        BinaryBytes(record.bytes),
        record.time_ms,
    )
}
