//! For any bytes, the readers of traces in JSON return requests within its bounds or an error.
#![no_main]

use kvpool_cli::trace::{Format, HashIds, ReadOptions, TOKENS_MAX, Trace};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    for format in [Format::Mooncake, Format::Bailian, Format::Dynamo, Format::Agents] {
        let options = ReadOptions { format, hash_ids: HashIds::Required, ..ReadOptions::default() };
        let Ok(trace) = Trace::read("fuzz".into(), bytes, &options) else { continue };
        assert!(trace.requests.is_sorted_by_key(|request| request.arrival));
        for request in &trace.requests {
            assert!((1..=TOKENS_MAX).contains(&request.input_tokens) && request.output_tokens <= TOKENS_MAX);
        }
    }
});
