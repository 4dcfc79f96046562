//! Choices of launches, streams and sizes that one run compares with the default.

use kvpool_cuda::launch::Choices;

/// Sections run once more, with other choices or another environment.
#[derive(Debug)]
pub struct Variant {
    /// Its name.
    pub name: &'static str,
    /// Choices of the device.
    pub choices: Choices,
    /// A variable of the environment.
    pub env: Option<(&'static str, &'static str)>,
    /// Names of the sections that show the difference.
    pub sections: &'static [&'static str],
}

const DEFAULT: Choices = Choices::DEFAULT;

/// Variants, beginning with the default once more: its ratios are the spread of all figures.
pub static VARIANTS: [Variant; 12] = [
    of(
        "again",
        DEFAULT,
        &["bandwidth", "compaction", "host", "crossing", "graph", "interference", "latency"],
    ),
    of("bulk-beside", Choices { is_bulk_beside: true, ..DEFAULT }, &["compaction", "graph", "interference"]),
    of("six-ctas", Choices { converting_ctas: 6, ..DEFAULT }, &["bandwidth"]),
    of("eight-ctas", Choices { converting_ctas: 8, ..DEFAULT }, &["bandwidth"]),
    of("long-waves", Choices { wave_bytes: 2 * DEFAULT.wave_bytes, ..DEFAULT }, &["compaction", "graph"]),
    of("one-stream", Choices { are_streams_apart: false, ..DEFAULT }, &["host", "crossing"]),
    of("whole-ranges", Choices { registration_bytes: usize::MAX, ..DEFAULT }, &["host"]),
    of("no-host-kernel", Choices { host_ctas: 0, ..DEFAULT }, &["host"]),
    of("host-ctas-8", Choices { host_ctas: 8, ..DEFAULT }, &["host"]),
    of("host-ctas-64", Choices { host_ctas: 64, ..DEFAULT }, &["host"]),
    connections("connections-1", "1"),
    connections("connections-32", "32"),
];

const fn of(name: &'static str, choices: Choices, sections: &'static [&'static str]) -> Variant {
    Variant { name, choices, env: None, sections }
}

/// Returns a variant of the number of queues between host and device; the driver's own is 8.
const fn connections(name: &'static str, count: &'static str) -> Variant {
    let env = Some(("CUDA_DEVICE_MAX_CONNECTIONS", count));
    Variant { env, ..of(name, DEFAULT, &["compaction", "graph", "interference", "latency"]) }
}
