use std::collections::HashSet;

use super::beginning::BEGINNING_BYTES;
use super::*;
use proptest::prelude::*;

mod csv;

const MOONCAKE: &str = r#"{"timestamp": 10, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 27, "input_length": 512, "output_length": 0, "hash_ids": [0]}
"#;

const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n\r\n2023-11-16 18:17:04.0319600,3180,8";

const BAILIAN: &str = r#"{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.25, "input_length": 40, "output_length": 5, "type": "text", "turn": 1, "hash_ids": [7, 7, 9]}
{"chat_id": 160, "parent_chat_id": 159, "timestamp": 63, "input_length": 33, "output_length": 1, "type": "text", "turn": 2, "hash_ids": [7, 9, 9]}
"#;

const DYNAMO: &str = r#"{"session_id": "a", "timestamp": 10.5, "input_length": 600, "output_length": 100, "hash_ids": [0, 1]}
{"session_id": "a", "delay": 500, "input_length": 700, "output_length": 1, "hash_ids": [0, 2]}
{"session_id": "b", "timestamp": 20.5, "input_length": 1100, "output_length": 3, "hash_ids": [0, 3]}
"#;

const AGENT: &str = r#"{"id": "x", "block_size": 64, "hash_id_scope": "local", "requests": [
  {"t": 0.0, "type": "n", "in": 130, "out": 5, "hash_ids": [1, 2], "think_time": 0.0},
  {"t": 2.5, "type": "subagent", "requests": [{"t": 1.0, "type": "s", "in": 64, "out": 2, "hash_ids": [3]}]},
  {"t": 3.0, "type": "n", "in": 150, "out": 5, "hash_ids": [1, 2, 4]}
]}"#;

fn read(text: impl AsRef<[u8]>, format: impl Into<Option<Format>>) -> Result<Trace, TraceError> {
    Trace::read(
        "trace".into(),
        text.as_ref(),
        &ReadOptions { format: format.into().unwrap_or_default(), hash_ids: HashIds::Required, ..usual() },
    )
}

fn usual() -> ReadOptions {
    ReadOptions::default()
}

fn complaint(text: impl AsRef<[u8]>, format: impl Into<Option<Format>>) -> String {
    read(text, format).expect_err("must be refused").to_string()
}

#[test]
fn mooncake_lines_become_requests() {
    for format in [None, Some(Format::Mooncake)] {
        let trace = read(MOONCAKE, format).unwrap();
        assert_eq!(trace.requests.len(), 2);
        assert_eq!(trace.span(), Duration::from_millis(17));
        let first = &trace.requests[0];
        assert_eq!((first.arrival, first.input_tokens, first.output_tokens), (Duration::ZERO, 600, 5));
        assert_eq!((first.tokens(), first.hash_ids.as_slice()), (605, [0, 1].as_slice()));
    }
}

/// Seconds, 16 tokens, and ids of separately hashed blocks.
#[test]
fn bailian_lines_become_requests() {
    for format in [None, Some(Format::Bailian)] {
        let trace = read(BAILIAN, format).unwrap();
        assert_eq!((trace.span(), trace.hash_tokens), (Duration::from_millis(1750), 16));
        let [a, b] = [0, 1].map(|at| &trace.requests[at]);
        assert_eq!((a.input_tokens, a.hashed_tokens, a.hash_ids.len()), (40, 40, 3));
        assert_eq!((a.hash_ids[0], b.hashed_tokens), (b.hash_ids[0], 33));
        // The same block after another text is another prefix.
        assert!(a.hash_ids[1] != a.hash_ids[0] && !a.hash_ids.contains(&b.hash_ids[1]));
    }
    // Read as Mooncake's, its times and blocks would be different.
    assert!(complaint(BAILIAN, Format::Mooncake).contains("--time-unit s"));
}

#[test]
fn the_unit_of_times_and_the_tokens_of_hash_ids_can_be_told() {
    let text = BAILIAN.replace("chat_id", "id");
    assert!(complaint(&text, None).starts_with("trace:1: timestamp 61.25 is not a whole number"));
    let told = |unit, hash_tokens| ReadOptions {
        time_unit: Some(unit),
        hash_tokens: Some(hash_tokens),
        ..ReadOptions::default()
    };
    let load = |text: &str, options| Trace::read("trace".into(), text.as_bytes(), &options);
    assert_eq!(load(&text, told(TimeUnit::S, 16)).unwrap().span(), Duration::from_millis(1750));
    assert_eq!(load(&text, told(TimeUnit::Ms, 16)).unwrap().span(), Duration::from_micros(1750));
    assert_eq!(load(BAILIAN, told(TimeUnit::Ms, 16)).unwrap().span(), Duration::from_micros(1750));
    let required = |tokens| ReadOptions { hash_ids: HashIds::Required, ..told(TimeUnit::Ms, tokens) };
    assert_eq!(load(MOONCAKE, required(300)).unwrap().hash_tokens, 300);
    let error = load(MOONCAKE, required(16)).unwrap_err().to_string();
    assert!(error.contains("2 hash_ids for 600 tokens, which have 38 blocks of 16"), "{error}");
    assert!(matches!(load(AZURE, required(16)).unwrap_err().reason, Reason::OptionsOfJson));
}

/// A turn with a delay arrives that long after the previous answer.
#[test]
fn turns_of_sessions_follow_one_another() {
    for format in [None, Some(Format::Dynamo)] {
        let trace = read(DYNAMO, format).unwrap();
        let arrivals: Vec<_> = trace.requests.iter().map(|request| request.arrival).collect();
        assert_eq!(arrivals, [0, 10, 3500].map(Duration::from_millis), "10.5, 20.5, 10.5 + 100 * 30 + 500");
        assert_eq!((trace.out_of_order, trace.hash_tokens), (0, 512));
        // The last tokens of a prompt may be without an id.
        let hashed: Vec<_> = trace.requests.iter().map(|request| request.hashed_tokens).collect();
        assert_eq!(hashed, [600, 1024, 700]);
    }
    let later = DYNAMO.replace("\"delay\": 500", "\"delay\": -1");
    assert!(complaint(later, None).starts_with("trace:2: delay \"-1\": outside 0..=3.1536e10 ms"));
    let late = DYNAMO
        .replace("\"timestamp\": 10.5", "\"timestamp\": 9e12")
        .replace("\"delay\": 500", "\"delay\": 3e10");
    assert!(complaint(late, None).contains(": more than 285 years after"), "the sum does not fit");
    let longer = DYNAMO.replace("\"delay\": 500", "\"delay\": 4e10");
    assert!(complaint(longer, None).starts_with("trace:2: delay \"40000000000\": outside"), "over a year");
    let without = read(DYNAMO.replace("\"timestamp\": 10.5, ", ""), None).unwrap();
    assert_eq!(without.requests[2].arrival, Duration::from_millis(3500), "the first turn begins at zero");
}

fn turns(trace: &Trace) -> Vec<Option<(u64, Option<u64>, u128)>> {
    let turn = |turn: Turn| (turn.session.0, turn.parent.map(SessionId::get), turn.think.as_millis());
    trace.requests.iter().map(|request| request.turn.map(turn)).collect()
}

/// The think time is recorded, or the time since the end of the previous answer.
#[test]
fn requests_know_their_sessions_and_think_times() {
    let (first, other) = (Some((0, None, 0)), Some((1, None, 0)));
    let dynamo = read(format!("{DYNAMO}{MOONCAKE}"), None).unwrap();
    assert_eq!(turns(&dynamo), [None, first, other, None, Some((0, None, 500))]);
    let recorded = read(DYNAMO.replace("\"delay\": 500", "\"timestamp\": 4010.5"), None).unwrap();
    assert_eq!(turns(&recorded)[2], Some((0, None, 1000)), "4010.5 - 10.5 - 100 * 30");
    let early = read(DYNAMO.replace("\"delay\": 500", "\"timestamp\": 11"), None).unwrap();
    assert_eq!(turns(&early)[1], first, "before the end of the answer");
    assert_eq!(turns(&read(MOONCAKE, None).unwrap()), [None, None]);

    // The subagent begins 2.35 s after the first answer, which takes 5 * 30 ms.
    let agent = read(AGENT, None).unwrap();
    assert_eq!(turns(&agent), [first, Some((0, None, 2850)), Some((1, Some(0), 3350))]);
    let recorded = AGENT
        .replace("\"think_time\": 0.0", "\"api_time\": 1.0, \"think_time\": 0.0")
        .replace("\"t\": 3.0", "\"t\": 3.0, \"think_time\": 0.25");
    assert_eq!(
        turns(&read(recorded, None).unwrap()),
        [first, Some((0, None, 250)), Some((1, Some(0), 2500))]
    );
    for (field, value) in [("think_time", "-1.0"), ("think_time", "4e7"), ("api_time", "-0.5")] {
        let text = AGENT.replace("\"t\": 3.0", &format!("\"t\": 3.0, \"{field}\": {value}"));
        let error = complaint(text, None);
        assert!(error.starts_with(&format!("trace: requests[2]: {field} \"")), "{error}");
        assert!(error.ends_with(": outside 0..=3.1536e7 s"), "{error}");
    }
}

/// Lines of two formats have other times and ids under the same names.
#[test]
fn lines_of_different_formats_are_told_apart() {
    let whole = BAILIAN.replace("61.25", "61");
    for (text, before, found) in [
        (format!("{MOONCAKE}{whole}"), "mooncake", "bailian"),
        (format!("{whole}{MOONCAKE}"), "bailian", "mooncake"),
        (format!("{DYNAMO}{whole}"), "dynamo", "bailian"),
        (format!("{MOONCAKE}{DYNAMO}"), "mooncake", "dynamo"),
    ] {
        let message = format!("a line of the format {found} in a trace that begins as {before} (--format");
        assert!(complaint(&text, None).contains(&message), "{text}");
    }
    // Without an id, a request stands alone.
    assert_eq!(read(format!("{DYNAMO}{MOONCAKE}"), None).unwrap().requests.len(), 5);
    assert_eq!(read(format!("{MOONCAKE}{DYNAMO}"), Format::Dynamo).unwrap().requests.len(), 5);
}

/// The unit is in the name of the field.
#[test]
fn delay_ms_is_in_milliseconds() {
    let text = DYNAMO.replace("10.5", "0").replace("20.5", "1").replace("delay", "delay_ms");
    let options = ReadOptions { time_unit: Some(TimeUnit::S), ..usual() };
    let trace = Trace::read("trace".into(), text.as_bytes(), &options).unwrap();
    assert_eq!(trace.span(), Duration::from_millis(100 * 30 + 500));
}

#[test]
fn sessions_of_agents_become_requests() {
    for (text, format) in [(AGENT.to_owned(), None), (AGENT.replace('\n', ""), Some(Format::Agents))] {
        let trace = read(text, format).unwrap();
        let found: Vec<_> = trace
            .requests
            .iter()
            .map(|request| (request.arrival.as_millis(), request.input_tokens, request.hashed_tokens))
            .collect();
        assert_eq!(found, [(0, 130, 128), (3000, 150, 150), (3500, 64, 64)]);
        assert_eq!((trace.hash_tokens, trace.out_of_order), (64, 0));
    }
    for (from, to, reason) in [
        ("\"in\": 64", "\"in\": 0", "trace: requests[1]: requests[0]: in is 0"),
        ("[1, 2, 4]", "[1, 2]", "3"),
        ("[1, 2, 4]", "[1]", "trace: requests[2]: 1 hash_ids for 150 tokens, which have 3 blocks of 64"),
        ("\"out\": 2", "\"up\": 2", "trace: requests[1]: requests[0]: missing field `out`"),
        ("\"t\": 2.5", "\"t\": -2.5", "trace: requests[1]: t \"-2.5\": outside"),
        ("\"t\": 2.5,", "", "trace:3: missing field `t`, at column"),
        (": 64, \"hash", ": 0, \"hash", "trace:1: invalid value: integer `0`, expected a nonzero u32"),
    ] {
        let text = AGENT.replace(from, to);
        match read(&text, None) {
            Ok(trace) => assert_eq!(trace.requests.len().to_string(), reason, "whole blocks are enough"),
            Err(error) => assert!(error.to_string().starts_with(reason), "{error}"),
        }
    }
    let marked = read(format!("\u{feff}{AGENT}"), None).unwrap();
    assert_eq!(marked.requests.len(), 3, "with a byte order mark");
    let bytes = AGENT.replace("subagent", "\u{1}").into_bytes();
    let bytes: Vec<_> = bytes.into_iter().map(|byte| if byte == 1 { 0xff } else { byte }).collect();
    assert_eq!(complaint(bytes, None), "trace:3: not UTF-8, at byte 22 of the line");
    let large = AGENT.replace("\"x\"", &format!("{:?}", "x".repeat(1 << 20)));
    assert!(complaint(large, Format::Agents).contains("larger than 1,048,576 bytes"));
}

/// Hash ids of one session are not those of another, unless the sessions say so.
#[test]
fn a_folder_of_sessions_is_one_trace() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
    let options = ReadOptions { hash_ids: HashIds::Required, ..usual() };
    let distinct = || {
        let trace = Trace::load(directory.path(), &options).unwrap();
        assert_eq!(trace.requests.len(), 6);
        trace.requests.iter().flat_map(|request| &request.hash_ids).collect::<HashSet<_>>().len()
    };
    write("notes.txt", "no trace");
    std::fs::create_dir(directory.path().join("older.json")).unwrap();
    write("older.json/a.json", AGENT);
    for (scope, ids) in [("local", 8), ("global", 4)] {
        write("a.json", &AGENT.replace("local", scope));
        write("b.json", &AGENT.replace("local", scope));
        assert_eq!(distinct(), ids, "{scope}");
    }
    let trace = Trace::load(directory.path(), &options).unwrap();
    let mut sessions: Vec<_> =
        turns(&trace).into_iter().flatten().map(|(id, parent, _)| (id, parent)).collect();
    sessions.sort_unstable();
    assert_eq!(sessions, [(0, None), (0, None), (1, Some(0)), (2, None), (2, None), (3, Some(2))]);
    let first = Trace::load(directory.path(), &ReadOptions { limit: Some(3), ..options.clone() }).unwrap();
    assert_eq!(first.span(), Duration::from_secs(3), "the first requests of all sessions");
    write("b.json", &AGENT.replace("64, \"hash_id", "32, \"hash_id").replace("\"hash_ids\"", "\"other\""));
    let error = Trace::load(directory.path(), &usual()).unwrap_err().to_string();
    assert!(error.ends_with("b.json: block_size is 32, and 64 in the sessions before"), "{error}");
}

#[cfg(feature = "compressed")]
#[test]
fn compressed_traces_are_read() {
    use std::io::Write;
    let gzip = |text: &str| {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(text.as_bytes()).unwrap();
        gzip.finish().unwrap()
    };
    let zstd = |text: &str| zstd::encode_all(text.as_bytes(), 1).unwrap();
    for text in [MOONCAKE, AZURE, BAILIAN, DYNAMO, AGENT] {
        let plain = read(text, None).unwrap();
        assert_eq!(read(gzip(text), None).unwrap(), plain);
        assert_eq!(read(zstd(text), None).unwrap(), plain);
    }
    // Compressed members of an appended file follow one another.
    let lines: Vec<_> = MOONCAKE.split_inclusive('\n').collect();
    let appended = |one: &dyn Fn(&str) -> Vec<u8>| [one(lines[0]), one(lines[1])].concat();
    for bytes in [appended(&gzip), appended(&zstd)] {
        assert_eq!(read(bytes, None).unwrap(), read(MOONCAKE, None).unwrap());
    }
    let error = complaint(&gzip(BAILIAN)[..60], None);
    assert!(error.contains("cannot read"), "{error}");
    let twice = gzip("\u{1f}").into_iter().chain(gzip(MOONCAKE)).collect::<Vec<_>>();
    assert!(read(twice, None).is_err());
    let message = complaint(&b"PK\x03\x04"[..], None);
    assert!(message.contains("with zip; decompress it first"), "{message}");
}

/// A number is quoted in an error without its three hundred zeros.
#[test]
fn errors_quote_briefly() {
    let message =
        complaint("{\"timestamp\":1e308,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}", None);
    assert!(message.len() < 150, "{message}");
}

/// A pipe delivers a trace in pieces of any size.
#[test]
fn the_format_is_known_from_a_pipe() {
    struct Pieces<'t>(&'t [u8], usize);
    impl io::Read for Pieces<'_> {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            let length = self.1.min(out.len());
            (&mut self.0).read(&mut out[..length])
        }
    }
    let options = ReadOptions { hash_ids: HashIds::Required, ..usual() };
    let long = AGENT.replace("\"x\"", &format!("{:?}", "x".repeat(40_000)));
    for text in [MOONCAKE, AZURE, BAILIAN, DYNAMO, AGENT, &AGENT.replace('{', "{\n"), &long] {
        for piece in [1, 7, 8192] {
            let input = io::BufReader::new(Pieces(text.as_bytes(), piece));
            let found = Trace::read("trace".into(), input, &options);
            assert_eq!(found.unwrap(), read(text, None).unwrap(), "{piece} bytes of {text:.40}");
        }
    }
    // Requests are taken from a pipe as they arrive.
    struct Ends(bool);
    impl io::Read for Ends {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            assert!(!self.0, "no line is needed after the first two");
            self.0 = true;
            MOONCAKE.as_bytes().read(out)
        }
    }
    let options = ReadOptions { limit: Some(2), ..usual() };
    assert_eq!(
        Trace::read("pipe".into(), io::BufReader::new(Ends(false)), &options).unwrap().requests.len(),
        2
    );
}

/// An endless input must not exhaust the memory.
#[test]
fn an_endless_trace_is_refused() {
    struct Endless(usize);
    impl io::Read for Endless {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            const LINE: &[u8] =
                b"{\"timestamp\":0,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}\n";
            for byte in &mut *out {
                *byte = LINE[self.0 % LINE.len()];
                self.0 += 1;
            }
            Ok(out.len())
        }
    }
    let error = Trace::read("endless".into(), io::BufReader::new(Endless(0)), &usual()).unwrap_err();
    let expected = "endless: more than 20,000 requests; --requests takes the first ones";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn lines_out_of_order_are_sorted_and_counted() {
    let text = AZURE.replace("04.03", "01.03") + "\n2023-11-16 18:17:09,1,1\n";
    let trace = read(&text, None).unwrap();
    assert_eq!(trace.out_of_order, 1);
    assert_eq!(trace.requests[0].input_tokens, 3180, "the earlier stands first");
    assert!(trace.requests.is_sorted_by_key(|request| request.arrival));
}

#[test]
fn a_limit_reads_no_further() {
    let text = format!("{MOONCAKE}not json");
    assert_eq!(
        Trace::read("trace".into(), text.as_bytes(), &ReadOptions { limit: Some(2), ..usual() })
            .unwrap()
            .requests
            .len(),
        2
    );
    assert!(read(&text, None).is_err());
}

#[test]
fn bad_mooncake_lines_are_refused_with_line_and_reason() {
    let line = |timestamp: &str, input: &str, output: &str, ids: &str| {
        format!("{{\"timestamp\": {timestamp}, \"input_length\": {input}, \"output_length\": {output}{ids}}}")
    };
    let one = ", \"hash_ids\": [1]";
    let good = line("0", "1", "1", one);
    for (line, reason) in [
        (good[..42].to_owned(), "not valid JSON: EOF while parsing"),
        ("{".to_owned(), "EOF while parsing an object (a request is one line), at column 1"),
        ("TIMESTAMP,x".to_owned(), "not valid JSON: expected value, at column 1"),
        (good.replace("output", "out"), "missing field `output_length`"),
        ("[]".to_owned(), "invalid length 0"),
        ("7".to_owned(), "invalid type"),
        (line("0", "-4", "1", one), "input_length is -4"),
        (line("0", "0", "1", one), "input_length is 0"),
        (line("0", "1", "99999999999", one), "output_length"),
        (line("0", "1e30", "1", one), "invalid type"),
        (line("-1", "1", "1", one), "timestamp \"-1\""),
        (line("1e300", "1", "1", one), "timestamp"),
        (
            line("0", "1025", "1", one),
            "1 hash_ids for 1025 tokens, which have 3 blocks of 512 (--hash-tokens",
        ),
        (line("0.5", "1", "1", one), "--time-unit s or --time-unit ms"),
        (good.replace("timestamp", "time"), "no timestamp"),
        (line("0", "1", "1", ""), "no hash_ids"),
        (line("0", "1", "1", ", \"hash_ids\": [-1]"), "hash_ids: invalid value"),
        (
            line("0", "2000", "1", ", \"hash_ids\": [4, 7, 5, 7]"),
            "hash_ids repeat 7 within one prompt, at places 2 and 4",
        ),
    ] {
        let message = complaint(format!("{good}\n\n{line}\n{good}"), Format::Mooncake);
        assert!(message.starts_with("trace:3: ") && message.contains(reason), "{line} gives {message}");
    }
}

#[test]
fn hash_ids_are_required_only_for_prefix_reuse() {
    let line =
        |ids: &str| format!("{{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 1{ids}}}\n");
    for ids in ["", ", \"hash_ids\": null", ", \"hash_ids\": [7, 7, 7]", ", \"hash_ids\": [-1]"] {
        let trace = Trace::read("trace".into(), line(ids).as_bytes(), &usual()).unwrap();
        assert!(trace.has_no_hash_ids() && trace.requests[0].hashed_tokens == 0, "{ids}");
        let error = read(line(ids), None).unwrap_err();
        assert_eq!(error.line, Some(1), "{error}");
    }
    let trace = Trace::read("trace".into(), MOONCAKE.as_bytes(), &usual()).unwrap();
    assert!(trace.has_no_hash_ids());
}

/// Compressed files are detected in every format, and the error quotes no byte of them.
#[test]
fn compressed_and_utf_16_files_are_refused_by_name() {
    #[cfg(not(feature = "compressed"))]
    for (bytes, reason) in
        [(&b"\x1f\x8b\x08\x08\x1b[31m"[..], "gzip"), (b"\x28\xb5\x2f\xfd\x04\x1b[31m", "zstd")]
    {
        let message = complaint(bytes, None);
        assert!(message.starts_with(&format!("trace: compressed with {reason}; decompress it first")));
        assert!(message.contains("`cargo install --path cli --features compressed`"), "{message:?}");
    }
    for (bytes, reason) in [
        (&b"PK\x03\x04\x1b[31m"[..], "compressed with zip; decompress it first"),
        (b"\xff\xfe{\0\"\0", "text in UTF-16; convert it to UTF-8"),
    ] {
        for format in [None, Some(Format::Mooncake), Some(Format::Azure)] {
            let message = complaint(bytes, format);
            assert!(message.starts_with("trace: ") && message.contains(reason), "{message:?}");
        }
    }
    assert_eq!(complaint(b"ab\xfe\x1b[31m\n", None), "trace:1: not UTF-8, at byte 2 of the line");
}

/// No input sends control characters to the terminal or floods it.
#[test]
fn errors_are_short_and_printable() {
    let evil = "\u{1b}[31m\r\u{9b}".repeat(100_000);
    let json = serde_json::to_string(&evil).unwrap();
    for text in [
        evil.clone(),
        format!("{{\"{evil}"),
        format!("{{\"timestamp\": {json}}}"),
        format!("{{\"timestamp\": 0, \"input_length\": {json}}}"),
        format!("TIMESTAMP,ContextTokens,{evil}\n"),
        format!("TIMESTAMP,ContextTokens,GeneratedTokens\n\"{evil}\",1,1\n"),
        format!("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,\"{evil}\",1\n"),
        format!("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00{evil},1,1\n"),
    ] {
        let message = complaint(&text, None);
        assert!(!message.contains(char::is_control) && message.len() < 600, "{message:?}");
    }
}

#[test]
fn bad_files_are_refused() {
    assert!(complaint("", None).contains("empty"));
    assert!(complaint("", Some(Format::Azure)).contains("empty"));
    assert!(complaint("\n\n", Some(Format::Mooncake)).contains("empty"));
    assert!(complaint("TIMESTAMP,ContextTokens,GeneratedTokens\n", None).contains("empty"));
    for blank in ["\n \r\n", "\u{feff}", "\u{feff}\n"] {
        assert_eq!(complaint(blank, None), "trace: empty: it has no request", "{blank:?}");
    }
    let late = format!("{}{MOONCAKE}", "\n".repeat(BEGINNING_BYTES + 1));
    assert_eq!(read(late, None).unwrap().requests.len(), 2);
    assert!(complaint("\n\n<html>", None).starts_with("trace:3: neither"));
    for format in [Format::Auto, Format::Mooncake, Format::Agents] {
        let array = complaint(format!("\n[{}]", MOONCAKE.trim().replace('\n', ",")), format);
        assert!(array.starts_with("trace:2: a JSON array; a trace in JSON has one object a line"), "{array}");
    }
    assert!(complaint("<html>", None).contains("begins with \"<html>\""));
    let header = complaint("TIMESTAMP,GeneratedTokens\n", None);
    assert!(header.contains("trace:1: the header has no column ContextTokens"), "{header}");
    let format = complaint(MOONCAKE, Some(Format::Azure));
    assert!(format.contains("the header has no column TIMESTAMP"), "{format}");
}

#[test]
fn bytes_that_are_no_text_are_refused() {
    let message = complaint([AZURE.as_bytes(), b"\n2023\xff,1,1\n"].concat(), None);
    assert_eq!(message, "trace:5: not UTF-8, at byte 4 of the line");
    let message = complaint([MOONCAKE.as_bytes(), b"{\"\xc3(\": 1}"].concat(), None);
    assert_eq!(message, "trace:3: not UTF-8, at byte 2 of the line");
}

/// The reader of an endless line must stop at the bound of its buffer.
#[test]
fn an_endless_line_is_refused_within_bounded_memory() {
    for (beginning, format) in [("{", Format::Mooncake), ("TIMESTAMP", Format::Azure)] {
        let endless = io::BufReader::new(io::Read::chain(beginning.as_bytes(), io::repeat(b'x')));
        let error = Trace::read("endless".into(), endless, &usual()).unwrap_err();
        assert!(matches!(error.reason, Reason::LineTooLong(LINE_BYTES_MAX)), "{format:?} gives {error}");
        assert_eq!(error.line, Some(1));
    }
}

#[test]
fn a_line_of_exactly_the_bound_is_read() {
    let mut line = MOONCAKE.lines().next().unwrap().as_bytes().to_vec();
    line.resize(LINE_BYTES_MAX - 1, b' ');
    line.push(b'\n');
    assert_eq!(read(&line, None).unwrap().requests.len(), 1);
    line.insert(line.len() - 1, b' ');
    assert!(complaint(&line, None).contains("longer than"));
}

#[test]
fn directories_and_missing_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let error = Trace::load(directory.path(), &usual()).unwrap_err();
    assert!(matches!(error.reason, Reason::Directory));
    std::fs::write(directory.path().join("a.json"), AGENT).unwrap();
    let lines = ReadOptions { format: Format::Mooncake, ..usual() };
    assert!(matches!(Trace::load(directory.path(), &lines).unwrap_err().reason, Reason::Directory));
    let error = Trace::load(&directory.path().join("none"), &usual()).unwrap_err();
    assert!(matches!(error.reason, Reason::Open(_)));
}

proptest! {
    /// A reader of any bytes ends with rows or with an error.
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        for format in Format::value_variants() {
            let _ = read(&bytes, *format);
        }
    }

    /// A valid trace with one changed byte is read or refused, and the requests are within the
    /// bounds.
    #[test]
    fn damaged_traces_are_read_or_refused(at in 0usize..400, byte in any::<u8>(), which in 0usize..5) {
        let mut bytes = [AZURE, MOONCAKE, BAILIAN, DYNAMO, AGENT][which].as_bytes().to_vec();
        let at = at % bytes.len();
        bytes[at] = byte;
        if let Ok(trace) = read(&bytes, None) {
            for request in &trace.requests {
                prop_assert!((1..=TOKENS_MAX).contains(&request.input_tokens));
                prop_assert!(request.output_tokens <= TOKENS_MAX);
            }
        }
    }

    /// Written rows are read unchanged.
    #[test]
    fn rows_survive_a_round_trip(rows in proptest::collection::vec((0u32..1 << 30, 1u32..5000, 0u32..5000), 1..20)) {
        let text: String = rows
            .iter()
            .map(|&(at, input, output)| {
                let ids: Vec<u32> = (0..input.div_ceil(HASH_BLOCK_TOKENS)).collect();
                format!("{{\"timestamp\":{at},\"input_length\":{input},\"output_length\":{output},\"hash_ids\":{ids:?}}}\n")
            })
            .collect();
        let read = Trace::read("rows".into(), text.as_bytes(), &usual()).unwrap();
        let mut rows = rows;
        rows.sort_by_key(|row| row.0);
        let zero = rows[0].0;
        let rows: Vec<Request> = rows
            .iter()
            .map(|&(at, input, output)| Request::new(Duration::from_millis(u64::from(at - zero)), input, output))
            .collect();
        prop_assert_eq!(read.requests, rows);
    }
}

#[test]
fn a_step_of_a_subagent_is_not_later_than_any_time() {
    let text = r#"{"id": "a", "block_size": 64, "requests": [{"t": 8e9, "requests": [{"t": 8e9, "in": 64, "out": 1}]}]}"#;
    assert!(complaint(text, None).contains("requests[0]: requests[0]: more than 285 years"));
}
