//! Counts of a node, by which its parent sees whether anything is left.

use kvpool_node::Node;
use kvpool_node::admin::MigrationState;

use crate::memory::Usage;

/// Returns the counts of a node.
pub async fn counts(node: &Node) -> Vec<(&'static str, usize)> {
    let is_running =
        |state: MigrationState| !matches!(state, MigrationState::Committed | MigrationState::Aborted);
    let records = node.migrations().await.unwrap();
    let running = records.iter().filter(|record| is_running(record.state)).count();
    let up = node.peers().await.unwrap().iter().filter(|(_, is_up)| *is_up).count();
    let grants = node.quarantined_grants().await.unwrap();
    let (pool, counters) = (node.pool(), node.counters());
    let stats = pool.stats();
    vec![
        ("up", up),
        ("running", running),
        ("open", pool.sequence_count()),
        ("used", stats.used),
        ("in_transfer", stats.in_transfer),
        ("quarantined", stats.quarantined + grants),
        ("unavailable", pool.total_blocks() - pool.available_blocks()),
        ("sent", counters.sent as usize),
        ("received", counters.received as usize),
        ("refused", counters.refused as usize),
        ("failed", counters.failed as usize),
        ("in_doubt", counters.in_doubt as usize),
        ("bad_blocks", counters.bad_blocks as usize),
    ]
}

/// Returns memory and descriptors of this process.
pub fn usage() -> Vec<(&'static str, usize)> {
    let Usage { heap, resident, descriptors } = Usage::now();
    vec![("heap", heap), ("resident", resident), ("descriptors", descriptors)]
}

/// Writes counts as an answer.
pub fn text(counts: &[(&str, usize)]) -> String {
    counts.iter().map(|(name, count)| format!("{name}={count}")).collect::<Vec<_>>().join(" ")
}
