/// Prefix of the environment variables.
pub const VARIABLE_PREFIX: &str = "KVPOOL_";

/// The key of the settings file's path: a flag and a variable, but no key of the file.
pub const CONFIG: Key = Key {
    name: "config",
    value: "FILE",
    default: None,
    accepted: "the path of a TOML file",
    help: "Read settings from this file",
};

/// A key of the settings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Key {
    /// Name as in a flag, with hyphens.
    pub name: &'static str,
    /// Name of the value in a help text.
    pub value: &'static str,
    /// Default, as text.
    pub default: Option<&'static str>,
    /// Accepted values.
    pub accepted: &'static str,
    /// Meaning of the key.
    pub help: &'static str,
}

impl Key {
    /// Returns the name of the environment variable.
    pub fn variable(&self) -> String {
        format!("{VARIABLE_PREFIX}{}", self.name.replace('-', "_").to_ascii_uppercase())
    }

    /// Returns the name in the settings file.
    pub fn in_file(&self) -> String {
        self.name.replace('-', "_")
    }

    /// Returns the key of this name, with hyphens or underscores.
    pub fn find(name: &str) -> Option<&'static Self> {
        KEYS.iter().find(|key| same_name(key.name, name))
    }

    /// Returns the key whose name is closest to a misspelt one, if any is close.
    pub fn nearest(name: &str) -> Option<&'static Self> {
        let name = name.replace('_', "-").to_ascii_lowercase();
        let near = KEYS.iter().map(|key| (distance(key.name, &name), key));
        near.min_by_key(|&(distance, _)| distance)
            .filter(|&(distance, _)| distance <= (name.len() / 3).clamp(1, 3))
            .map(|(_, key)| key)
    }
}

const fn key(
    name: &'static str,
    value: &'static str,
    default: Option<&'static str>,
    accepted: &'static str,
    help: &'static str,
) -> Key {
    Key { name, value, default, accepted, help }
}

/// All keys of the settings file.
#[rustfmt::skip]
pub const KEYS: &[Key] = &[
    key("name", "NAME", None, "1 to 64 letters, digits, dots, hyphens and underscores",
        "Name of this node, by which its peers know it; by default the host's name"),
    key("size", "SIZE", Some("20000"), "a number of blocks such as 20000, or of bytes such as 8GiB",
        "Size of the pool, in blocks, or in bytes with a unit"),
    key("size-max", "SIZE", None, "a number of blocks such as 40000, or of bytes such as 16GiB; at least the size",
        "Size up to which the pool can be resized; by default twice its size"),
    key("block-tokens", "N", Some("16"), "a whole number from 1 to 4096",
        "Tokens per block"),
    key("layout", "LAYOUT", Some("probe"), "`probe` (16 bytes per token), the name of a model such as qwen2.5-7b, the path of its config.json, or numbers such as layers=32,kv-heads=8,head-dim=128",
        "Layout of the blocks"),
    key("dtype", "NAME", None, "f32, f16, bf16, fp8_e4m3, fp8_e5m2 or int8",
        "Element type of K and V; by default the layout's"),
    key("device", "DEVICE", Some("host"), "host, or cuda:N in a build with the feature `cuda`",
        "Device of the pool's memory"),
    key("defrag-threshold", "R", Some("0.02"), "a number from 0 to 1, or `off`",
        "Compact in the background while fragmentation is above R: the share of the possible runs of free and evictable blocks that is missing; in a pool full of evictable blocks above 0.25, and at most 2 % of the allocated blocks. `stats` says why it rests"),
    key("defrag-interval", "TIME", Some("2ms"), "a time from 1ms to 1h, such as 2ms or 1s",
        "Time between two checks of fragmentation"),
    key("eviction", "POLICY", Some("lru"), "lru, priority, or `off` for no prefix cache",
        "Eviction policy of the prefix cache"),
    key("tenants", "ID=LIMITS,...", None, "ID=FLOOR..QUOTA with bytes such as 7=2GiB..8GiB, separated by commas; either may be left out",
        "Tenants of the pool: the bytes below which others' requests do not evict each, and those that it may hold"),
    key("tenant-hints", "BYTES", None, "a number of bytes such as 1GiB",
        "Bytes of each tenant's blocks that hints may retain or pin; by default no limit"),
    key("reserve", "N", Some("0"), "a number of blocks, below the pool's size",
        "Blocks that are set aside for urgent requests"),
    key("listen", "ADDRESS", None, "IP:PORT, localhost:PORT, unix:PATH, or `off`",
        "Address for peers; other addresses than the loopback's need TLS; by default 127.0.0.1:7411 with a token or TLS, and else a Unix socket in $XDG_RUNTIME_DIR or the folder for temporary files"),
    key("admin", "ADDRESS", Some("127.0.0.1:7410"), "IP:PORT, localhost:PORT, either after https://, unix:PATH, or `off`; port 0 takes a free one",
        "Address of the admin interface (HTTP; with https:// over TLS); other addresses than the loopback's need a token"),
    key("admin-connections", "N", Some("64"), "a whole number from 8 to 1024",
        "Connections to the admin interface at a time; a quarter of them, and at most 16, may follow the events"),
    key("peers", "NAME=ADDRESS,...", None, "NAME=HOST:PORT or NAME=unix:PATH, separated by commas; in the file also a table",
        "Other nodes, by name and address"),
    key("tls-cert", "FILE", None, "the path of a PEM file",
        "Certificate of this node, with its chain"),
    key("tls-key", "FILE", None, "the path of a PEM file",
        "Private key of the certificate"),
    key("tls-ca", "FILE", None, "the path of a PEM file",
        "Certificates of the authorities that sign peers' certificates"),
    key("token-file", "FILE", None, "the path of a file with 1 to 8 lines of 16 to 256 visible characters",
        "Tokens, of which clients of the admin interface and peers must present one; this node presents the first"),
    key("read-token-file", "FILE", None, "the path of a file with 1 to 8 lines of 16 to 256 visible characters",
        "Tokens with which clients may read /metrics and /stats, and nothing else"),
    key("hash-key-file", "FILE", None, "the path of a file with one line of 16 to 256 visible characters",
        "Secret from which the hashes of cached blocks are made; nodes with the same one share blocks; by default the first token"),
    key("peer-quota", "BYTES", Some("256MiB"), "a number of bytes such as 256MiB; at least 1MiB",
        "Bytes that one peer may have under transfer to this node at a time"),
    key("nixl", "WHERE", Some("off"), "auto, the path of the library or of a folder of Python packages, or `off`",
        "Transfer by NIXL (RDMA, GPU memory) with peers that have it too; needs a build with the feature `nixl`"),
    key("migrate-below", "N", None, "a number of blocks, below the pool's size",
        "Move blocks to another node: cached ones while fewer than N blocks are free, and sequences while fewer than N are free or evictable"),
    key("migrate-to", "PEER", None, "the name of one of the peers",
        "Node that blocks move to when they run short"),
    key("restarts", "WHEN", Some("proven"), "proven or by-name",
        "When another process of a peer's name shows that the former one has ended: if it proves it, or always, where at most one process of a name lives (as in a StatefulSet)"),
    key("doubt-limit", "TIME", None, "a time from 1s to 24h, such as 10min, or `off`",
        "Time without a link to its target after which a sequence in doubt is this node's again without a declaration by an operator; by default never. If the target lives and has taken it, both nodes run the sequence"),
    key("tier", "ADDRESS", None, "redis://HOST:PORT/DATABASE, rediss:// for TLS, either with USER:PASSWORD@ before the host, redis+unix:///PATH, mooncake://HOST:PORT of a master, file:///PATH?size=200GiB of a local drive, or `off`",
        "Share cached blocks through a store of the cluster (needs a build with the feature `redis` or `mooncake`), or keep them on a local drive"),
    key("tier-ca", "FILE", None, "the path of a PEM file",
        "Certificates of the authorities of a tier's server that is reached by rediss://; by default the system's"),
    key("tier-namespace", "TEXT", None, "1 to 256 bytes: the model, and the revision of its weights",
        "What nodes have in common that share blocks through the tier, beside layout and token"),
    key("tier-policy", "POLICY", Some("write-through"), "write-through, on-eviction or read-only",
        "Blocks go to the tier when they are computed, before they are evicted, or never"),
    key("tier-wait", "TIME", Some("500ms"), "a time from 1ms to 10s, such as 500ms",
        "Longest time that a request waits for its prefix from the tier"),
    key("tier-patience", "TIME", Some("1s"), "a time from 10ms to 1min, such as 1s",
        "Time after which a call of the store counts as failed"),
    key("tier-threads", "N", Some("2"), "a whole number from 1 to 64",
        "Calls of the store at a time, each over a connection of its own"),
    key("membership", "ADDRESS", None, "etcd://HOST:PORT[,HOST:PORT...]/CLUSTER, etcds:// for TLS, either with USER:PASSWORD@ before the hosts, or `off`",
        "Join a directory of nodes, and connect to its other members; needs a build with the feature `etcd`"),
    key("membership-ca", "FILE", None, "the path of a PEM file",
        "Certificates of the authorities of servers that are reached by etcds://; by default the system's"),
    key("membership-cert", "FILE", None, "the path of a PEM file",
        "Certificate that this node presents to servers that are reached by etcds://, with its chain"),
    key("membership-key", "FILE", None, "the path of a PEM file",
        "Private key of that certificate"),
    key("membership-lease", "TIME", Some("10s"), "a time from 1s to 1h, such as 10s",
        "Time after which the directory drops a node that does not renew its entry"),
    key("advertise", "ADDRESS", None, "HOST:PORT or unix:PATH; port 0 stands for the port of `listen`",
        "Address at which members reach this node; by default that of `listen`"),
    key("kv-events", "ADDRESS", None, "tcp://IP:PORT, tcp://*:PORT, or `off`; port 0 takes a free one",
        "Publish events of the prefix cache over ZeroMQ in vLLM's format"),
    key("kv-events-replay", "ADDRESS", None, "tcp://IP:PORT, tcp://*:PORT, or `off`; port 0 takes a free one",
        "Answer requests for replays of these events"),
    key("kv-events-topic", "TEXT", Some(""), "at most 255 bytes",
        "Topic of these events"),
    key("kv-events-hashes", "FORM", Some("integer"), "integer or bytes",
        "Form of block hashes in these events: 64 bits as vLLM's default, or all 24 bytes"),
    key("load", "KIND", None, "conversations, arrivals, or `off`",
        "Serve synthetic traffic on the pool: sequences that grow, share prefixes, and are read back; or only those that arrive from peers"),
    key("load-threads", "N", Some("2"), "a whole number from 1 to 64",
        "Threads of the synthetic traffic"),
    key("load-rest", "TIME", Some("0s"), "a time from 0s to 1s, such as 20ms",
        "Shortest time that a thread of the synthetic traffic rests between two steps"),
    key("drain", "TIME", Some("10s"), "a time from 0s to 1h, such as 10s",
        "Time that requests and transfers have to finish after a signal to end"),
    key("log", "FORMAT", Some("text"), "text or json",
        "Form of the messages on the standard error: lines of text, or of JSON objects"),
    key("log-level", "LEVELS", Some("warn,kvpool_cli=info"), "off, error, warn, info, debug or trace, also by module, such as warn,kvpool_node::tier=debug",
        "Messages that are printed"),
    key("otel-endpoint", "URL", None, "http://HOST:PORT or https://HOST:PORT, with a path if it has one, or `off`",
        "Send traces to this OpenTelemetry collector, by OTLP over HTTP; by default to that of OTEL_EXPORTER_OTLP_ENDPOINT; needs a build with the feature `otel`"),
];

/// Keys of the pool, the traffic and the messages of `kvpool serve`: an engine has its own.
#[rustfmt::skip]
pub(super) const OF_PROGRAM: [&str; 18] = [
    "size", "size-max", "layout", "block-tokens", "dtype", "device", "defrag-threshold", "defrag-interval", "eviction",
    "tenants", "tenant-hints", "reserve", "load", "load-threads", "load-rest", "log", "log-level", "otel-endpoint",
];

/// Keys of the admin interface: all that the pool of frames of an engine can have.
#[rustfmt::skip]
pub(super) const OF_ADMIN: [&str; 8] = [
    "name", "admin", "admin-connections", "tls-cert", "tls-key", "token-file", "read-token-file", "drain",
];

fn same_name(a: &str, b: &str) -> bool {
    a.len() == b.len() && a.bytes().zip(b.bytes()).all(|(a, b)| a == b || (a == b'-' && b == b'_'))
}

fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, a) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, &b) in b.iter().enumerate() {
            let cost = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = cost.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
