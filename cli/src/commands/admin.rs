//! The commands over a live pool: each sends one request to an admin interface and prints the
//! answer.

use std::path::PathBuf;

use indicatif::HumanCount;
use kvpool_node::admin::{
    AuditOutcome, Client, ClientError, DefragOutcome, EndedOrder, EndedOutcome, MigrateOrder, MigrationList,
    MigrationRecord, OwnersReport, ResizeOrder, ResizeOutcome, StatsReport,
};
use kvpool_node::services::authorities;
use kvpool_node::settings::Tokens;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::tables;
use crate::args::{AdminArgs, DeclareEndedArgs, MigrateArgs, OwnersArgs, ReachArgs, ResizeArgs};
use crate::error::{named, output_failed};
use crate::fit;
use crate::output::{self, printable};
use crate::{EXIT_OK, EXIT_UNSOUND};

pub fn stats(args: &AdminArgs) -> anyhow::Result<u8> {
    let answer = ask(args, Ask::Get("/stats".to_owned()))?;
    show(args, &answer, |stats: &StatsReport| Ok(tables::stats(stats, fit::width())))
}

/// Compacts the pool of a node. Fails if the pool is more fragmented afterwards.
pub fn defrag(args: &AdminArgs) -> anyhow::Result<u8> {
    let answer = ask(args, Ask::Post("/defrag", json!({})))?;
    let code = if answer["is_worse"] == true { EXIT_UNSOUND } else { EXIT_OK };
    show(args, &answer, |outcome: &DefragOutcome| {
        let DefragOutcome { moved_blocks, time_ms, report, .. } = outcome;
        let rates = [report.available_fragmentation_before, report.available_fragmentation_after]
            .map(|rate| format!("{:.2} %", 100.0 * rate));
        let mut lines = format!(
            "moved {} blocks in {time_ms:.2} ms, dropped {} evictable ones\n\
             fragmentation of free and evictable blocks: {} before, {} after",
            HumanCount(*moved_blocks as u64),
            HumanCount(report.dropped_blocks as u64),
            rates[0],
            rates[1],
        );
        if report.given_up.total() > 0 {
            lines.push_str(&format!("\nmoves given up: {}", report.given_up));
        }
        if outcome.is_worse {
            lines.push_str("\nworse than before: allocations and frees meanwhile undid more than it gained");
        }
        Ok(lines)
    })?;
    Ok(code)
}

pub fn resize(args: &ResizeArgs) -> anyhow::Result<u8> {
    let order = ResizeOrder { blocks: args.blocks as usize };
    let answer = ask(&args.admin, Ask::Post("/resize", json!(order)))?;
    show(&args.admin, &answer, |outcome: &ResizeOutcome| {
        let [from, to, moved] =
            [outcome.from, outcome.to, outcome.moved_blocks].map(|n| HumanCount(n as u64));
        Ok(format!("{from} blocks before, {to} after; moved {moved} blocks in {:.2} ms", outcome.time_ms))
    })
}

pub fn migrate(args: &MigrateArgs) -> anyhow::Result<u8> {
    let order = MigrateOrder { sequence: args.sequence_id, to: args.target_node.clone() };
    let answer = ask(&args.admin, Ask::Post("/migrate", json!(order)))?;
    show(&args.admin, &answer, |record: &MigrationRecord| {
        Ok(tables::migrations(std::slice::from_ref(record), fit::width()))
    })
}

pub fn migration_status(args: &AdminArgs) -> anyhow::Result<u8> {
    let answer = ask(args, Ask::Get("/migrations".to_owned()))?;
    show(args, &answer, |list: &MigrationList| Ok(tables::migrations(&list.migrations, fit::width())))
}

pub fn declare_ended(args: &DeclareEndedArgs) -> anyhow::Result<u8> {
    let order = EndedOrder { peer: args.peer.clone() };
    let answer = ask(&args.admin, Ask::Post("/declare-ended", json!(order)))?;
    show(&args.admin, &answer, |outcome: &EndedOutcome| {
        let ids: Vec<_> = outcome.sequences.iter().map(u64::to_string).collect();
        Ok(match &ids[..] {
            [] => format!("{} has ended; no sequence was in doubt", outcome.peer),
            ids => format!("{} has ended; the node goes on with: {}", outcome.peer, ids.join(", ")),
        })
    })
}

pub fn owners(args: &OwnersArgs) -> anyhow::Result<u8> {
    let answer = ask(&args.admin, Ask::Get(format!("/owners?limit={}", args.limit)))?;
    show(&args.admin, &answer, |report: &OwnersReport| Ok(tables::owners(report, fit::width())))
}

pub fn audit(args: &AdminArgs) -> anyhow::Result<u8> {
    let answer = ask(args, Ask::Post("/audit", json!({})))?;
    let mut code = EXIT_OK;
    show(args, &answer, |outcome: &AuditOutcome| {
        Ok(match (&outcome.report, &outcome.finding) {
            (Some(report), _) if outcome.sound => {
                let [total, owned, evictable] =
                    [report.total, report.owned, report.evictable].map(|n| HumanCount(n as u64));
                let others = report.in_bitmap + report.in_magazines + report.retired + report.held;
                let has_null = report.total > others + report.reserved + report.evictable + report.owned;
                let null = if has_null { "; one is the null block's" } else { "" };
                format!("ok: {total} frames, {owned} of them owned and {evictable} evictable{null}")
            }
            (_, finding) => format!("UNSOUND: {}", finding.as_deref().unwrap_or("no reason given")),
        })
    })?;
    if answer["sound"] != true {
        code = EXIT_UNSOUND;
    }
    Ok(code)
}

#[cfg(feature = "top")]
pub fn top(args: &crate::args::TopArgs) -> anyhow::Result<u8> {
    let (runtime, client) = connect(&args.reach)?;
    crate::top::run(&runtime, &client)
}

enum Ask {
    Get(String),
    Post(&'static str, Value),
}

fn ask(args: &AdminArgs, ask: Ask) -> anyhow::Result<Value> {
    let (runtime, client) = connect(&args.reach)?;
    let answer = runtime.block_on(async {
        match ask {
            Ask::Get(path) => client.get(&path).await,
            Ask::Post(path, order) => client.post(path, &order).await,
        }
    });
    Ok(answer?)
}

/// Returns a client of a node, and its runtime. Nothing is sent yet.
pub(super) fn connect(reach: &ReachArgs) -> anyhow::Result<(Runtime, Client)> {
    let path = |flag: &Option<PathBuf>, variable| {
        flag.clone().or_else(|| std::env::var_os(variable).filter(|path| !path.is_empty()).map(Into::into))
    };
    let token = path(&reach.token_file, "KVPOOL_TOKEN_FILE").map(|path| Tokens::read(&path));
    let token = token.transpose().map_err(named("--token-file"))?;
    let mut client = Client::new(reach.url.clone(), token.map(|tokens| tokens.first().clone()));
    if reach.url.is_tls()
        && let Some(path) = path(&reach.tls_ca, "KVPOOL_TLS_CA")
    {
        client = client.tls(authorities(&path).map_err(named("--tls-ca"))?);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    Ok((runtime.map_err(output_failed)?, client))
}

/// Prints an answer, as JSON or as text.
fn show<T: DeserializeOwned>(
    args: &AdminArgs,
    answer: &Value,
    render: impl FnOnce(&T) -> anyhow::Result<String>,
) -> anyhow::Result<u8> {
    let text = if args.json {
        format!("{answer:#}")
    } else {
        let reason = |error: serde_json::Error| ClientError::Foreign {
            url: args.reach.url.clone(),
            reason: error.to_string(),
        };
        let text = render(&serde_json::from_value(answer.clone()).map_err(reason)?)?;
        fit::text(&printable(&text), fit::width())
    };
    output::print(&text).map_err(output_failed)?;
    Ok(EXIT_OK)
}
