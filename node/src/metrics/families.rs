use super::family::{Family, FamilyKind};

/// Declares metrics: `CONSTANT: Kind name [labels] help`.
macro_rules! families {
    ($($constant:ident: $kind:ident $name:literal [$($label:literal),*] $help:literal;)*) => {
        $(
            #[doc = concat!("`", $name, "`: ", $help, ".")]
            pub const $constant: Family = Family {
                name: $name,
                kind: FamilyKind::$kind,
                labels: &[$($label),*],
                help: $help,
            };
        )*

        /// All metrics, in the order of the text.
        pub const FAMILIES: &[&Family] = &[$(&$constant),*];
    };
}

families! {
    BUILD: Info "build" ["version"] "Version of the program";
    UPTIME: Gauge "uptime_seconds" [] "Seconds since the node started";
    SERVING: Gauge "serving" [] "Whether the node serves, 0 or 1: not while it ends, or after it lost its device";

    BLOCKS: Gauge "blocks" ["state"] "Blocks of the pool by state: used, free, evictable, retired, reserved, held; their sum is the size";
    USAGE: Gauge "usage_ratio" [] "Share of the blocks that are used, 0 to 1";
    IN_MAGAZINES: Gauge "magazine_blocks" [] "Free blocks in threads' magazines and in the depot";
    RESERVED_FOR_GROWTH: Gauge "reserved_for_growth_blocks" [] "Free blocks that sequences reserve behind their last blocks";
    UNWIPED: Gauge "unwiped_blocks" [] "Blocks held for good because they could not be wiped";
    CAPACITY: Gauge "capacity_bytes" [] "Bytes of all blocks of the pool";
    MAPPED: Gauge "mapped_bytes" [] "Bytes of the usable frames of the pool's storage, with the null block's";
    SEQUENCES: Gauge "sequences" [] "Open sequences";
    BATCHES: Gauge "batches_in_flight" [] "Batches in flight";
    ABANDONED: Counter "batches_abandoned" [] "Batches that wrote to a sequence and did not finish";
    OLDEST_BATCH: Gauge "oldest_batch_seconds" [] "Lower bound of the age of the oldest batch in flight; 0 without any";

    FRAGMENTATION: Gauge "fragmentation_ratio" [] "Share of the possible free runs of the pool's order that is missing, 0 to 1";
    AVAILABLE_FRAGMENTATION: Gauge "available_fragmentation_ratio" [] "The same over free and evictable blocks";
    LONGEST_RUN: Gauge "longest_free_run_blocks" [] "Length of the longest free run";
    FREE_RUNS: Gauge "free_runs" ["order"] "Free aligned runs of 2^order blocks, in the smallest set that covers the free blocks";
    MEAN_RUN: Gauge "mean_sequence_run_blocks" [] "Mean length of the runs of adjacent blocks in the tables of open sequences; one descriptor of a transfer moves one run";
    SEQUENCE_RUNS: Gauge "sequence_runs" ["statistic"] "Number of these runs of an open sequence, the descriptors that its transfer needs: mean, p50, p99";

    WAITING: Gauge "waiting_requests" ["priority"] "Requests that wait in the queue";
    WAIT: Histogram "wait_seconds" [] "Waits in the queue that ended with blocks; every wait is timed";
    WAITS: Counter "waits" [] "Requests that joined the queue";
    MISSED_DEADLINES: Counter "missed_deadlines" [] "Waits that ended at their deadline without blocks";
    ALLOCATION: Histogram "allocation_seconds" ["operation"] "Sampled times of allocations: allocate for leases, append for sequences that grow";
    ADMISSION: Histogram "admission_seconds" [] "Sampled times to open sequences with a prompt, with the lookup of its prefix";
    RELEASE: Histogram "release_seconds" [] "Sampled times to release leases and to close sequences";
    SAMPLED_EVERY: Gauge "sampled_every" [] "Operations per timed one in the sampled histograms; 0 if none is timed";
    ALLOCATIONS: Counter "allocations" [] "Requests that got blocks";
    ALLOCATED: Counter "allocated_blocks" [] "Blocks that were handed out";
    FREED: Counter "freed_blocks" [] "Blocks that were freed";
    REFUSALS: Counter "refusals" ["reason"] "Refused requests for blocks";

    QUERIES: Counter "prefix_queries" [] "Tokens of the full blocks of prompts that were looked up in the prefix cache, once per request, resumed ones excepted";
    HITS: Counter "prefix_hits" [] "Tokens of the full blocks that were found there";
    LOOKUPS: Counter "prefix_lookups" [] "Prompts that were looked up";
    RESUMED: Counter "prefix_resumed_blocks" ["outcome"] "Full blocks of prompts that came back after a preemption: looked_up, and of these, found";
    FULL: Counter "full_blocks" [] "Lookups that ended at a cached block that had the maximal number of references";
    UNCACHED: Counter "uncached_blocks" [] "Blocks that were taken out of the prefix cache because they were wrong";
    REGISTERED: Counter "registered_blocks" [] "Blocks that were registered in the prefix cache";
    EVICTIONS: Counter "evictions" ["policy", "reason"] "Evicted blocks: in the order of the policy (queue_N), useless, evict_first, retained, out_of_order";
    TENANT_BYTES: Gauge "tenant_bytes" ["tenant", "kind"] "Bytes of each tenant (up to 64): owned by sequences, cached, kept (retained or pinned by hints), its floor, and its quota if it has one";
    TENANT_LOOKUPS: Counter "tenant_lookup_blocks" ["tenant"] "Full blocks of prompts of the tenant that were looked up in the prefix cache";
    TENANT_HITS: Counter "tenant_hit_tokens" ["tenant"] "Tokens of prompts of the tenant that were found in the prefix cache";
    TENANT_EVICTIONS: Counter "tenant_evictions" ["tenant", "outcome"] "Blocks of the tenant that were evicted, and evictions that passed over it because of its floor (protected)";
    TENANT_REFUSALS: Counter "tenant_refusals" ["tenant"] "Requests that were refused because of the quota of the tenant";
    SUBSCRIBERS: Gauge "cache_event_subscribers" [] "Subscribers of the events of the prefix cache";
    LOST_EVENTS: Counter "lost_cache_events" [] "Events of the prefix cache that subscribers found lost because they received too slowly";

    TURN: Gauge "turn_seconds" ["task"] "Age of the turn to move blocks, of the task that has it: defragment, background, request, resize; absent while none has it";
    COMPACTIONS: Counter "compactions" [] "Turns of compactions and shrinks, with those that moved nothing";
    MOVES: Counter "moves" ["outcome"] "Planned moves of blocks: published, or cancelled because of an owner or a failure";
    MOVED_BYTES: Counter "moved_bytes" [] "Bytes of the blocks that compactions and shrinks moved";
    DROPPED: Counter "compaction_dropped_blocks" [] "Evictable blocks that were dropped from the frames to which compactions moved others";
    COMPACTION: Gauge "compaction_state" ["state"] "1 for what the background task does: moving; or for why it rests: contiguous (not fragmented), batches (of its last run are in flight), no_gain (no move pays), share (of the allocated blocks was moved); absent without a task";
    RESIZE: Histogram "resize_seconds" [] "Times of resizes, with refused ones; every resize is timed";
    AUDITS: Counter "audits" [] "Audits on request";
    AUDIT_FAILURES: Counter "audit_failures" [] "Audits on request that found a contradiction";

    TRANSFERS: Counter "pool_transfers" ["kind"] "Transfers that this pool began and that ended well: migrate, replicate, swap_out, swap_in, offload, bring_back";
    TRANSFERS_FAILED: Counter "pool_transfer_failures" [] "Transfers that this pool began and that failed";
    TRANSFERS_REFUSED: Counter "pool_transfer_refusals" [] "Transfers that this pool was asked for and that were refused before anything was copied";
    STALE_BLOCKS: Counter "stale_blocks" [] "Cached blocks that were not taken up, because they were computed before a cache was cleared";
    TRANSFERRED_BLOCKS: Counter "transferred_blocks" [] "Blocks that transfers of this pool copied";
    TRANSFERRED_BYTES: Counter "transferred_bytes" [] "Bytes that transfers of this pool copied";
    IN_TRANSFER: Gauge "transfer_blocks" ["state"] "Owned blocks whose bytes are being transferred (active), or that a given-up transfer may still access (quarantined)";
    MIGRATIONS: Gauge "migrations" ["side", "state"] "Migrations under way";
    NODE_MIGRATIONS: Counter "node_migrations" ["outcome"] "Migrations of this node that ended: sent, received, refused, failed";
    SENT_BYTES: Counter "node_sent_bytes" [] "Bytes that this node wrote to peers";
    GRANTED_BYTES: Counter "node_granted_bytes" [] "Bytes that peers were permitted to write here";
    BAD_BLOCKS: Counter "node_bad_blocks" [] "Blocks that arrived with a wrong checksum";
    DAMAGED_BLOCKS: Counter "node_damaged_blocks" [] "Cached blocks that were dropped when a peer asked for them, because the memory of this node had damaged them";
    IN_DOUBT: Counter "node_in_doubt" [] "Times that the owner of a sequence was in doubt";
    OLDEST_DOUBT: Gauge "node_oldest_doubt_seconds" [] "Time for which the oldest sequence in doubt has been so; 0 without any";
    DROPPED_MESSAGES: Counter "node_dropped_messages" [] "Messages that found the queue of a link full";
    QUARANTINES: Counter "node_quarantines" [] "Transfers of this node that were quarantined";
    QUARANTINED_GRANTS: Gauge "node_quarantined_grants" [] "Grants into which a peer may still write although their migrations have ended";
    PEER_UP: Gauge "peer_up" ["peer"] "Whether a link to the peer is up, 0 or 1";
    SERVICE_FAILURES: Counter "service_failures" ["group", "name"] "Failures of a service beside the pool: of the groups tiers, membership, kv_events and traces; `kvpool stats` has the last one";
    TIER_UP: Gauge "tier_up" ["tier"] "Whether the tier is asked: 0 while its circuit breaker is open, 1 otherwise";
    TIER_KEYS: Counter "tier_keys" ["tier", "outcome"] "Keys that a tier was asked for: stored, hit, miss, failed, overdue, declined by the settings of a local drive, or dropped because too many waited";
    TIER_BYTES: Counter "tier_bytes" ["tier", "direction"] "Bytes of the values that were read and verified (read), or stored (written)";
    TIER_BAD_VALUES: Counter "tier_bad_values" ["tier"] "Values that were not what their keys say, found here or by the node that held them; none of them was used";
    TIER_FETCHED: Counter "tier_fetched_blocks" ["tier"] "Blocks that were brought back into the prefix cache";
    TIER_IN_FLIGHT: Gauge "tier_keys_in_flight" ["tier"] "Keys of calls that the tier has not answered";
    TIER_BREAKER_OPENED: Counter "tier_breaker_opened" ["tier"] "Times that the circuit breaker opened";
    TIER_SLOTS: Gauge "tier_slots" ["tier", "state"] "Slots of a tier on a local drive, used or free; none before the first value tells their size";
    TIER_EVICTED: Counter "tier_evicted_values" ["tier"] "Values of a tier on a local drive that made room for others";
    TIER_DRIVE_WRITTEN: Counter "tier_drive_written_bytes" ["tier"] "Bytes that a tier wrote to its local drive, with headers and padding: what wears it";
    TIER_DAMAGED_SLOTS: Counter "tier_damaged_slots" ["tier"] "Slots of a local drive whose record or value was damaged, or cut by a power failure; each was a miss, and is free";
    TIER_DISK_FULL: Gauge "tier_disk_full" ["tier"] "Whether the disk of a tier was full within the last minute, 0 or 1";
    MEMBERS: Gauge "members" ["directory"] "Members of the cluster that are known";
    DIRECTORY_UP: Gauge "directory_up" ["directory"] "Whether the directory of members is in reach, 0 or 1";
    JOINED: Gauge "joined" ["directory"] "Whether this node has an entry in the directory, 0 or 1";
    JOINS: Counter "joins" ["directory"] "Times that this node joined; above 1, it had lost its entry";
    EVENT_BATCHES: Counter "event_batches" [] "Batches of cache events that were published";
    EVENT_SUBSCRIBERS: Gauge "event_subscribers" [] "Connected subscribers of the published events";
    EVENTS_SKIPPED: Counter "event_batches_skipped" [] "Batches for which subscribers were too slow, once for each of them";
    EVENT_RESYNCS: Counter "event_resyncs" [] "Times that the publisher lost events of the cache, and listed it again";
    EVENT_REPLAYS: Counter "event_replays" [] "Replays that subscribers asked for";
    ENGINE: Gauge "engine" ["engine", "counter"] "Counters that the engine of a pool of frames reports";
    TRAFFIC: Gauge "traffic" ["counter"] "Counters of the synthetic traffic of `kvpool serve --load`";
}
