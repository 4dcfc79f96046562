use kvpool::{Fragmentation, FramePool, Metrics, Pool, Priority, TurnTask};

use super::families::*;
use super::scrape::Scrape;

/// Adds the values of a pool.
///
/// Scans counters, bitmaps, and the words of all blocks: some milliseconds per million blocks,
/// during which no other thread waits. Call it where blocking is permitted.
pub fn pool(pool: &Pool, scrape: &mut Scrape) {
    let metrics = pool.metrics();
    occupancy(&metrics, scrape);
    free_runs(&pool.fragmentation(), pool.available_fragmentation(), scrape);
    requests(&metrics, scrape);
    sequences(pool, &metrics, scrape);
    prefix(pool, &metrics, scrape);
    tenants(pool, scrape);
    moves(&metrics, scrape);
    turn(&metrics, scrape);
    transfers(&metrics, scrape);
}

/// Adds the values of a frame pool, as [`pool`](pool()) does: those that do not concern bytes,
/// sequences or tokens.
pub fn frames(pool: &FramePool, scrape: &mut Scrape) {
    let metrics = pool.metrics();
    occupancy(&metrics, scrape);
    free_runs(&pool.fragmentation(), pool.available_fragmentation(), scrape);
    requests(&metrics, scrape);
    // An engine that looks up keys itself asks the pool for none.
    if metrics.prefix.lookups > 0 {
        scrape.count(&LOOKUPS, &[], metrics.prefix.lookups);
    }
    cache("lru", &metrics, scrape);
    moves(&metrics, scrape);
}

fn occupancy(metrics: &Metrics, scrape: &mut Scrape) {
    let stats = &metrics.stats;
    for (state, blocks) in [
        ("used", stats.used),
        ("free", stats.free),
        ("evictable", stats.evictable),
        ("retired", stats.retired),
        ("reserved", stats.reserved),
        ("held", stats.held),
    ] {
        scrape.count(&BLOCKS, &[state], blocks as u64);
    }
    scrape.number(&USAGE, &[], stats.utilization);
    scrape.count(&IN_MAGAZINES, &[], stats.in_magazines as u64);
    scrape.count(&BATCHES, &[], stats.batches_in_flight);
    let age = stats.oldest_batch.as_ref().map_or(0.0, |batch| batch.age().as_secs_f64());
    scrape.number(&OLDEST_BATCH, &[], age);
    for (place, priority) in [Priority::Normal, Priority::High, Priority::Urgent].into_iter().enumerate() {
        scrape.count(&WAITING, &[&priority.to_string()], stats.waiting_by_priority[place] as u64);
    }
}

fn free_runs(fragmentation: &Fragmentation, available: f64, scrape: &mut Scrape) {
    scrape.number(&FRAGMENTATION, &[], fragmentation.rate);
    scrape.number(&AVAILABLE_FRAGMENTATION, &[], available);
    scrape.count(&LONGEST_RUN, &[], fragmentation.longest_run as u64);
    for (order, &runs) in fragmentation.free_by_order.iter().enumerate() {
        scrape.count(&FREE_RUNS, &[&order.to_string()], runs as u64);
    }
}

fn sequences(pool: &Pool, metrics: &Metrics, scrape: &mut Scrape) {
    let (stats, latencies) = (&metrics.stats, &metrics.latencies);
    scrape.count(&RESERVED_FOR_GROWTH, &[], stats.reserved_for_growth as u64);
    scrape.count(&UNWIPED, &[], stats.unwiped as u64);
    let block_bytes = pool.layout().bytes_per_block() as u64;
    scrape.count(&CAPACITY, &[], stats.total as u64 * block_bytes);
    if let Some(storage) = pool.storage() {
        scrape.count(&MAPPED, &[], storage.frames() as u64 * block_bytes);
    }
    scrape.count(&SEQUENCES, &[], pool.sequence_count() as u64);
    scrape.count(&ABANDONED, &[], stats.batches_abandoned);
    if let Some(state) = pool.compaction_state() {
        scrape.count(&COMPACTION, &[state.name()], 1);
    }
    let runs = pool.sequence_runs();
    scrape.number(&MEAN_RUN, &[], runs.mean_run);
    for (statistic, runs) in [("mean", runs.mean), ("p50", runs.p50 as f64), ("p99", runs.p99 as f64)] {
        scrape.number(&SEQUENCE_RUNS, &[statistic], runs);
    }
    scrape.times(&ALLOCATION, &["allocate"], &latencies.allocate);
    scrape.times(&ALLOCATION, &["append"], &latencies.append);
    scrape.times(&ADMISSION, &[], &latencies.admit);
    scrape.times(&RELEASE, &[], &latencies.free);
    scrape.times(&RESIZE, &[], &latencies.resize);
    scrape.count(&SAMPLED_EVERY, &[], latencies.sampled_every);
}

fn requests(metrics: &Metrics, scrape: &mut Scrape) {
    scrape.times(&WAIT, &[], &metrics.latencies.wait);
    scrape.count(&WAITS, &[], metrics.waits.waits);
    scrape.count(&MISSED_DEADLINES, &[], metrics.waits.missed_deadlines);
    scrape.count(&ALLOCATIONS, &[], metrics.allocations.requests);
    scrape.count(&ALLOCATED, &[], metrics.allocations.blocks);
    scrape.count(&FREED, &[], metrics.allocations.freed_blocks);
    let refusals = &metrics.refusals;
    for (reason, count) in [
        ("exhausted", refusals.exhausted),
        ("no_run", refusals.no_run),
        ("too_large", refusals.too_large),
        ("reserved", refusals.reserved),
        ("behind", refusals.behind),
        ("fence_refused", refusals.fence_refused),
        ("device_lost", refusals.device_lost),
        ("invalid", refusals.invalid),
        ("over_quota", refusals.over_quota),
    ] {
        scrape.count(&REFUSALS, &[reason], count);
    }
}

fn prefix(pool: &Pool, metrics: &Metrics, scrape: &mut Scrape) {
    let Some(of) = pool.prefix_cache() else { return };
    scrape.count(&LOOKUPS, &[], metrics.prefix.lookups);
    scrape.count(&QUERIES, &[], metrics.query_tokens);
    scrape.count(&HITS, &[], metrics.hit_tokens);
    scrape.count(&RESUMED, &["looked_up"], metrics.prefix.resumed_lookup_blocks);
    scrape.count(&RESUMED, &["found"], metrics.prefix.resumed_hit_blocks);
    scrape.count(&FULL, &[], metrics.prefix.full_blocks);
    cache(of.policy().name(), metrics, scrape);
}

fn tenants(pool: &Pool, scrape: &mut Scrape) {
    for tenant in pool.tenants() {
        let id = tenant.id.0.to_string();
        let kinds = [
            ("owned", Some(tenant.owned_bytes)),
            ("cached", Some(tenant.cached_bytes)),
            ("kept", Some(tenant.kept_bytes)),
            ("floor", Some(tenant.floor_bytes)),
            ("quota", tenant.quota_bytes),
        ];
        for (kind, bytes) in kinds {
            bytes.into_iter().for_each(|bytes| scrape.count(&TENANT_BYTES, &[&id, kind], bytes));
        }
        scrape.count(&TENANT_LOOKUPS, &[&id], tenant.lookup_blocks);
        scrape.count(&TENANT_HITS, &[&id], tenant.hit_tokens);
        scrape.count(&TENANT_EVICTIONS, &[&id, "evicted"], tenant.evicted_blocks);
        scrape.count(&TENANT_EVICTIONS, &[&id, "protected"], tenant.protected_evictions);
        scrape.count(&TENANT_REFUSALS, &[&id], tenant.refused_requests);
    }
}

fn cache(policy: &str, metrics: &Metrics, scrape: &mut Scrape) {
    let evictions = &metrics.evictions;
    scrape.count(&UNCACHED, &[], metrics.prefix.uncached_blocks);
    scrape.count(&REGISTERED, &[], metrics.prefix.registered_blocks);
    for (queue, &count) in evictions.by_queue.iter().enumerate() {
        scrape.count(&EVICTIONS, &[policy, &format!("queue_{queue}")], count);
    }
    for (reason, count) in [
        ("useless", evictions.useless),
        ("evict_first", evictions.evict_first),
        ("retained", evictions.retained),
        ("out_of_order", evictions.out_of_order),
    ] {
        scrape.count(&EVICTIONS, &[policy, reason], count);
    }
    scrape.count(&SUBSCRIBERS, &[], metrics.event_subscribers as u64);
    scrape.count(&LOST_EVENTS, &[], metrics.lost_events);
}

fn moves(metrics: &Metrics, scrape: &mut Scrape) {
    let moves = &metrics.moves;
    scrape.count(&COMPACTIONS, &[], moves.runs);
    scrape.count(&MOVES, &["published"], moves.moved_blocks);
    scrape.count(&MOVES, &["cancelled"], moves.given_up.total() as u64);
    scrape.count(&DROPPED, &[], moves.dropped_blocks);
}

fn turn(metrics: &Metrics, scrape: &mut Scrape) {
    if let Some(turn) = metrics.stats.turn {
        let task = match turn.task {
            TurnTask::Defragment => "defragment",
            TurnTask::Background => "background",
            TurnTask::Request => "request",
            TurnTask::Resize => "resize",
            _ => "other",
        };
        scrape.number(&TURN, &[task], turn.age().as_secs_f64());
    }
    scrape.count(&MOVED_BYTES, &[], metrics.moves.moved_bytes);
}

fn transfers(metrics: &Metrics, scrape: &mut Scrape) {
    let counts = metrics.migrations.unwrap_or_default();
    for (kind, count) in [
        ("migrate", counts.migrated),
        ("replicate", counts.replicated),
        ("swap_out", counts.swapped_out),
        ("swap_in", counts.swapped_in),
        ("offload", counts.offloads),
        ("bring_back", counts.brought_back),
    ] {
        scrape.count(&TRANSFERS, &[kind], count);
    }
    scrape.count(&TRANSFERS_FAILED, &[], counts.failed);
    scrape.count(&TRANSFERS_REFUSED, &[], counts.refused);
    scrape.count(&STALE_BLOCKS, &[], counts.stale_blocks);
    scrape.count(&TRANSFERRED_BLOCKS, &[], counts.blocks);
    scrape.count(&TRANSFERRED_BYTES, &[], counts.bytes);
    scrape.count(&IN_TRANSFER, &["active"], metrics.stats.in_transfer as u64);
    scrape.count(&IN_TRANSFER, &["quarantined"], metrics.stats.quarantined as u64);
}
