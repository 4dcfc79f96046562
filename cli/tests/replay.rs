//! `kvpool replay`, end to end: exit codes, the JSON, and the errors of bad input.

use super::common;
use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use common::{json, keys, kvpool, kvpool_in, parse, published};
use kvpool::prefix::policy::PolicyKind;
use kvpool_cli::trace::{HashIds, ReadOptions, Request, Trace};
use serde_json::Value;

#[test]
fn json_has_exactly_its_keys() {
    let report = json("replay --requests 200 --threads 2 --prefix-cache on --resize-at 50%:1 --json");
    for (object, expected) in [
        (
            &report,
            "agents audit block_bytes block_tokens blocks_allocated blocks_corrupt blocks_freed blocks_leaked \
             blocks_total completed cpu_s defrag findings fragmentation free_list groups hit_rate interrupted latency_ns layout \
             model peak_tokens_held preempted prefix refused rejected requests resize run_len_mean \
             runs_per_sequence sessions sound speedup states threads tokens tokens_held_at_first_refusal tokens_verified trace trace_s utilization wall_s",
        ),
        (&report["utilization"], "at_first_refusal mean owned_at_first_refusal peak"),
        (&report["fragmentation"], "final max mean reserved_for_growth"),
        (&report["runs_per_sequence"], "mean p50 p99"),
        (
            &json("replay --requests 50 --json")["free_list"],
            "blocks_added hit_rate run_len_mean runs_per_sequence",
        ),
        (
            &report["defrag"],
            "available_fragmentation_after available_fragmentation_before dropped_blocks errors fragmentation_after fragmentation_before given_up moved_blocks moved_bytes runs time_ms",
        ),
        (
            &report["prefix"],
            "evicted_blocks hit_blocks hit_rate lookup_blocks policy resumed_hit_blocks resumed_lookup_blocks",
        ),
        (&report["resize"][0], "at_request attempts from outcome time_ms to"),
        (&report["latency_ns"], "allocate free"),
        (&report["latency_ns"]["allocate"], "max p50 p99 p999"),
        (&report["latency_ns"]["free"], "max p50 p99 p999"),
    ] {
        assert_eq!(keys(object).join(" "), expected);
    }
    let recorded = json("replay --requests 50 --json");
    for empty in ["resize", "groups"] {
        assert_eq!(recorded[empty], Value::Array(vec![]));
    }
    assert!(recorded["sessions"].is_null() && recorded["agents"].is_null());
}

#[test]
fn a_sound_replay_adds_up() {
    let report = json("replay --requests 300 --seed 5 --threads 3 --json");
    assert_eq!(report["audit"], "ok");
    assert_eq!(report["sound"], true);
    assert_eq!(report["requests"], 300);
    assert_eq!(report["completed"], 300);
    assert_eq!(report["threads"], 3);
    assert_eq!(report["blocks_leaked"], 0);
    assert_eq!(report["blocks_corrupt"], 0);
    assert_eq!(report["blocks_allocated"], report["blocks_freed"]);
    assert!(report["tokens_verified"].as_u64() > report["tokens"].as_u64());
    let [mean, p50, p99] = ["mean", "p50", "p99"].map(|name| report["runs_per_sequence"][name].as_f64());
    assert!(mean >= Some(1.0) && p50 >= Some(1.0) && p50 <= p99, "{report}");
    if cfg!(target_os = "linux") {
        assert!(report["cpu_s"].as_f64() > Some(0.0), "{report}");
    }
}

/// The free list serves the same requests, with or without a cache, and is off for traces and
/// sizes.
#[test]
fn a_replay_is_compared_with_a_free_list() {
    let of = |options: &str| json(&format!("replay --requests 400 --threads 1 --no-defrag --json {options}"));
    for cache in ["off", "on"] {
        let report = of(&format!("--blocks 6000 --prefix-cache {cache}"));
        let list = &report["free_list"];
        let mean = |figures: &Value| figures["run_len_mean"].as_f64().unwrap();
        assert!(mean(&report) > 1.5 * mean(list) && mean(list) >= 1.0, "{report}");
        let p99 = |figures: &Value| figures["runs_per_sequence"]["p99"].as_u64().unwrap();
        assert!(p99(&report) < p99(list), "{report}");
        assert_eq!(list["hit_rate"].is_null(), cache == "off", "{report}");
        if let (Some(ours), Some(theirs)) = (report["hit_rate"].as_f64(), list["hit_rate"].as_f64()) {
            assert!((ours - theirs).abs() < 0.05, "{report}");
        }
    }
    for options in ["--compare none", "--resize-at 50%:9000"] {
        assert!(of(options)["free_list"].is_null(), "{options}");
    }
    // In a pool that is never full, every hit of one is a hit of the other.
    let roomy = of("--blocks 200000 --prefix-cache on");
    assert_eq!(
        (&roomy["hit_rate"], &roomy["free_list"]["blocks_added"]),
        (&roomy["free_list"]["hit_rate"], &0.into())
    );
    let table = String::from_utf8(kvpool("replay --requests 50 --policy lru").stdout).unwrap();
    assert!(table.contains("free list") && table.contains("evicted in exact LRU order"), "{table}");
}

#[test]
fn the_size_of_the_pool_decides_what_is_refused() {
    let roomy = json("replay --requests 50 --blocks 200000 --json");
    assert!(roomy["utilization"]["at_first_refusal"].is_null());
    assert_eq!(roomy["preempted"], 0);
    let narrow = json("replay --requests 200 --blocks 3000 --threads 2 --json");
    assert!(narrow["preempted"].as_u64() > Some(0), "{narrow}");
    assert!(narrow["utilization"]["at_first_refusal"].as_f64() > Some(0.5));
    assert!(narrow["utilization"]["peak"].as_f64() > Some(0.9));
    // A request larger than the pool is rejected, which is no failure.
    let tiny = json("replay --requests 200 --blocks 100 --json");
    assert!(tiny["rejected"].as_u64() > Some(0));
    assert_eq!(tiny["completed"].as_u64().unwrap() + tiny["rejected"].as_u64().unwrap(), 200);
}

#[test]
fn other_layouts_and_block_sizes_hold_their_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("short.csv");
    let rows: String = (10..50).map(|i| format!("2023-11-16 18:17:{i},{},{}\n", 3 * i, i / 2)).collect();
    fs::write(&path, format!("TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")).unwrap();
    let config = directory.path().join("config.json");
    let text =
        r#"{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}"#;
    fs::write(&config, text).unwrap();
    let (config, folder) = (config.display().to_string(), directory.path().display().to_string());
    for (layout, token_bytes) in [
        ("tiny", 128),
        ("Qwen/Qwen2.5-0.5B-Instruct", 12_288),
        ("deepseek-v2-lite", 31_104),
        ("layers=3,kv-heads=2,head-dim=8,dtype=f32", 384),
        ("layers=2,latent=24", 96),
        (&config, 192),
        (&folder, 192),
    ] {
        let trace = path.display();
        let report = json(&format!("replay {trace} --layout {layout} --block-tokens 8 --blocks 25 --json"));
        assert_eq!((&report["sound"], &report["block_tokens"]), (&Value::Bool(true), &8.into()), "{layout}");
        assert!(report["block_bytes"].as_u64().unwrap() >= 8 * token_bytes, "{layout}: {report}");
    }
}

/// Prompts of conversations begin with the turns before: most blocks are found, and no byte is
/// wrong.
#[test]
fn prefixes_are_reused_by_every_policy() {
    let run =
        |options: &str| json(&format!("replay --requests 400 --threads 2 --json --blocks 60000 {options}"));
    let off = run("--prefix-cache off");
    assert_eq!((&off["prefix"], &off["sound"]), (&Value::Null, &Value::Bool(true)));
    assert!(off["hit_rate"].is_null());
    for policy in PolicyKind::ALL {
        let on = run(&format!("--prefix-cache on --policy {}", policy.name()));
        let prefix = &on["prefix"];
        assert_eq!((&on["sound"], &prefix["policy"]), (&Value::Bool(true), &policy.name().into()));
        let count = |name: &str| prefix[name].as_u64().unwrap();
        assert!(count("hit_blocks") > count("lookup_blocks") / 4, "{prefix}");
        let rate = count("hit_blocks") as f64 / count("lookup_blocks") as f64;
        assert_eq!((&prefix["hit_rate"], on["hit_rate"].as_f64()), (&on["hit_rate"], Some(rate)));
        // Tokens found in the cache are not written.
        let found = 16 * (count("hit_blocks") + count("resumed_hit_blocks"));
        let tokens = |report: &Value| report["tokens"].as_u64().unwrap();
        assert!(on["preempted"] != 0 || tokens(&on) + found == tokens(&off), "{on}");
    }
}

/// A narrow pool is compacted all the time, and every byte is read back.
#[test]
fn compaction_moves_blocks_and_no_byte_is_lost() {
    let run = |options: &str| json(&format!("replay --requests 1000 --blocks 6000 --json {options}"));
    let report = run("--defrag-threshold 0 --defrag-interval-ms 1");
    assert_eq!((&report["sound"], &report["blocks_corrupt"]), (&Value::Bool(true), &0.into()));
    let defrag = &report["defrag"];
    assert!(defrag["runs"].as_u64() > Some(0) && defrag["moved_blocks"].as_u64() > Some(0), "{defrag}");
    assert_eq!(
        defrag["moved_bytes"].as_u64(),
        defrag["moved_blocks"].as_u64().map(|blocks| blocks * report["block_bytes"].as_u64().unwrap())
    );
    let off = run("--no-defrag");
    assert_eq!((&off["sound"], &off["defrag"]), (&Value::Bool(true), &Value::Null));
}

#[test]
fn a_pool_gets_other_sizes_while_it_is_used() {
    let sizes = "20%:9000,45%:5000,70%:7000";
    for more in ["--defrag-interval-ms 1 --prefix-cache on", "--no-defrag"] {
        let options = format!("--requests 1500 --blocks 7000 --resize-at {sizes} {more}");
        let report = json(&format!("replay --json {options}"));
        assert_eq!((&report["sound"], &report["blocks_total"]), (&Value::Bool(true), &7000.into()));
        // Preempted requests leave their blocks in the cache, and other requests evict them.
        let prefix = |name: &str| report["prefix"][name].as_u64();
        assert_eq!(prefix("evicted_blocks") > Some(0), more.contains("prefix"), "{report}");
        assert_eq!(prefix("hit_blocks") > Some(0), more.contains("prefix"), "{report}");
        let steps = report["resize"].as_array().unwrap();
        assert_eq!(steps.len(), 3, "{report}");
        for (step, (from_request, to)) in steps.iter().zip([(300, 9000), (675, 5000), (1050, 7000)]) {
            assert_eq!(step["to"], to);
            assert!(step["at_request"].as_u64() >= Some(from_request), "{step}");
            let outcome = step["outcome"].as_str().unwrap();
            // Growing succeeds at once; blocks in use may prevent shrinking until the next step is
            // due.
            assert!(outcome == "done" || to == 5000 && outcome.starts_with("blocked: "), "{step}");
        }
    }
}

/// Until the last request has ended, more blocks are in use than asked for: the step is retried,
/// and does not fail.
#[test]
fn a_step_blocked_to_the_end_succeeds_then() {
    let report = json("replay --requests 300 --resize-at 5%:1 --json");
    let step = &report["resize"][0];
    assert_eq!((&step["outcome"], &step["to"]), (&"done".into(), &1.into()), "{report}");
    assert_eq!(report["sound"], true);
    let table = String::from_utf8(kvpool("replay --requests 300 --resize-at 5%:1").stdout).unwrap();
    for word in ["defrag", "resize", "done", "given up"] {
        assert!(table.contains(word), "no {word:?} in\n{table}");
    }
}

/// A run that completes no request fails in every form of output, and leaves no picture.
#[test]
fn a_run_that_completes_nothing_fails() {
    let reason = "nothing was replayed: every request was rejected (100), the smallest needs 31 blocks";
    for option in ["", "--no-verify"] {
        let run = |option: &str| kvpool(&format!("replay --requests 100 --blocks 5 {option}"));
        let output = run(option);
        let table = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(1), "{table}");
        assert!(table.contains("NOT SOUND") && table.contains(reason), "{table}");
        assert!(!table.contains("nothing lost"), "{table}");
        let output = run(&format!("--json {option}"));
        assert_eq!(output.status.code(), Some(1));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&report["sound"], &report["completed"]), (&Value::Bool(false), &0.into()));
        assert!(report["findings"][0].as_str().unwrap().starts_with(reason), "{report}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pool.svg");
    let output = kvpool(&format!("map --requests 100 --blocks 5 --output {}", path.display()));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("nothing was drawn: nothing was replayed: every request was rejected"), "{said}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "an empty picture");
}

#[test]
fn columns_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("other.csv");
    fs::write(&path, "at,in,out\n0,40,10\n1.5,33,5\n").unwrap();
    let columns = "--columns arrival=at,input=in,output=out";
    let report = json(&format!("replay {} {columns} --json", path.display()));
    assert_eq!((&report["tokens"], &report["trace_s"]), (&88.into(), &1.5.into()));
}

#[test]
fn completions_and_pages_know_every_command() {
    let commands = ["replay", "map", "policy", "info", "completions", "man"];
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let output = kvpool(&format!("completions {shell}"));
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(0));
        for word in commands.into_iter().chain(["resize-at"]) {
            assert!(text.contains(word), "{shell}: no {word}");
        }
    }
    let page = String::from_utf8(kvpool("man").stdout).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("share/man1");
    assert_eq!(kvpool(&format!("man {}", pages.display())).status.code(), Some(0));
    assert_eq!(fs::read_to_string(pages.join("kvpool.1")).unwrap().trim_end(), page.trim_end());
    for command in commands {
        assert!(page.contains(&format!("kvpool\\-{command}(1)")), "no {command} in {page}");
        let text = fs::read_to_string(pages.join(format!("kvpool-{command}.1"))).unwrap();
        assert!(text.contains(".SH NAME"), "{command}: {text}");
    }
    assert_eq!(kvpool("man /dev/null/pages").status.code(), Some(2));
}

#[test]
fn a_map_is_drawn() {
    let directory = tempfile::tempdir().unwrap();
    for cache in ["off", "on"] {
        let options = format!("--requests 1500 --blocks 6000 --at 50% --prefix-cache {cache}");
        let output = kvpool_in(directory.path(), &format!("map {options} --output pool.svg"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{said}");
        assert!(output.stderr.is_empty(), "{said}");
        let line = String::from_utf8(output.stdout).unwrap();
        assert!(line.contains("pool.svg: fragmentation") && line.lines().count() == 1, "{line}");
        assert!(line.contains(", mean sequence run ") && line.contains(", moved blocks "), "{line}");
        let svg = fs::read_to_string(directory.path().join("pool.svg")).unwrap();
        let texts = ["<svg", "mean run", "Before", "After", "6,000 blocks of 16 tokens"];
        for text in texts.into_iter().chain(["of 1,500 requests (50 %)", "</svg>"]) {
            assert!(svg.contains(text), "no {text:?} in {svg}");
        }
    }
}

#[test]
fn the_table_is_for_people_and_the_bar_for_terminals() {
    let output = kvpool("replay --requests 100 --policy lru");
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    let labels = ["requests", "hit rate", "speedup", "blocks leaked", "blocks corrupt", "at first refusal"];
    for label in labels.into_iter().chain(["by policy lru", "p99.9", "nothing lost"]) {
        assert!(text.contains(label), "no {label:?} in\n{text}");
    }
    assert!(!text.contains('\u{1b}'), "colours, although this is no terminal");
    assert!(output.stderr.is_empty(), "a bar, although this is no terminal");
    let unverified = kvpool("replay --requests 50 --no-verify");
    assert!(String::from_utf8_lossy(&unverified.stdout).contains("not verified"));
}

#[test]
fn traces_are_read_from_files_and_from_the_standard_input() {
    let text =
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04,40,10\n2023-11-16 18:17:03,33,5\n";
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace.csv");
    fs::write(&path, text).unwrap();
    let output = kvpool(&format!("replay {} --json", path.display()));
    let report = parse(&output);
    assert_eq!((&report["requests"], &report["tokens"]), (&2.into(), &88.into()));
    assert_eq!(report["trace"], "trace.csv");
    assert!(String::from_utf8_lossy(&output.stderr).contains("1 lines are out of order"));

    let mut child = Command::new(env!("CARGO_BIN_EXE_kvpool"))
        .args(["replay", "-", "--format", "azure", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert_eq!(parse(&child.wait_with_output().unwrap())["requests"], 2);
}

/// Each format is known by its first line, and its hash ids find the prefixes of earlier prompts.
#[test]
fn traces_of_every_format_are_replayed_with_a_prefix_cache() {
    let folder = tempfile::tempdir().unwrap();
    let agent = r#"{"block_size": 64, "requests": [{"t": 0, "in": 130, "out": 5, "hash_ids": [1, 2]},
        {"t": 500, "requests": [{"t": 0, "in": 200, "out": 5, "hash_ids": [1, 2, 3]}]}]}"#;
    let json_lines = |fields: [&str; 2], lengths: [(u32, u64); 2]| -> String {
        let line = |(fields, (tokens, ids)): (&str, (u32, u64))| {
            let ids: Vec<_> = (0..ids).collect();
            format!("{{{fields}, \"input_length\": {tokens}, \"output_length\": 5, \"hash_ids\": {ids:?}}}\n")
        };
        fields.into_iter().zip(lengths).map(line).collect()
    };
    let bailian =
        [r#""chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5"#, r#""chat_id": 2, "timestamp": 500.5"#];
    let dynamo = [r#""session_id": "a", "timestamp": 0"#, r#""session_id": "a", "delay": 499850"#];
    let mooncake = [r#""timestamp": 0"#, r#""timestamp": 500000"#];
    for (name, text, hit_blocks) in [
        ("mooncake.jsonl", json_lines(mooncake, [(512, 1), (600, 2)]), 32),
        ("bailian.jsonl", json_lines(bailian, [(130, 9), (200, 13)]), 8),
        ("dynamo.jsonl", json_lines(dynamo, [(1024, 2), (1100, 3)]), 64),
        ("agent.json", agent.to_owned(), 8),
        ("sessions", String::new(), 8),
    ] {
        let path = folder.path().join(name);
        if name == "sessions" {
            fs::create_dir(&path).unwrap();
            fs::write(path.join("1.json"), agent).unwrap();
        } else {
            fs::write(&path, text).unwrap();
        }
        let report =
            json(&format!("replay {} --prefix-cache on --blocks 200 --threads 1 --json", path.display()));
        let found = (&report["sound"], &report["prefix"]["hit_blocks"], &report["trace_s"], &report["trace"]);
        assert_eq!(found, (&Value::Bool(true), &hit_blocks.into(), &500.0.into(), &name.into()));
    }
}

/// The sessions of agents repeat most of their prompts.
#[test]
fn published_sessions_of_agents_are_replayed() {
    let Some(first) = published("agentic/trace_0001.json") else { return };
    let folder = first.parent().unwrap();
    let trace =
        Trace::load(folder, &ReadOptions { hash_ids: HashIds::Required, ..ReadOptions::default() }).unwrap();
    assert_eq!((trace.hash_tokens, trace.out_of_order), (64, 0));
    assert!(trace.requests.iter().any(|request| request.hashed_tokens < request.input_tokens));
    let report =
        json(&format!("replay {} --requests 8 --prefix-cache on --threads 1 --json", first.display()));
    assert_eq!(report["sound"], Value::Bool(true));
    assert!(report["hit_rate"].as_f64().unwrap() > 0.5, "{report}");
}

#[test]
fn bad_usage_and_bad_input_are_told_apart_from_failures() {
    let directory = tempfile::tempdir().unwrap();
    let good = "{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [1]}\n";
    let header = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
    for (name, bytes) in [
        ("cut.jsonl", [good, &good[..40]].concat().as_bytes()),
        ("negative.csv", [header, "2023-11-16 18:17:03,-1,5\n"].concat().as_bytes()),
        ("binary.jsonl", b"{\"timestamp\": \xff\xfe}\n"),
        ("empty.csv", b""),
        ("header.csv", b"TIMESTAMP,Tokens\n"),
        (
            "half.jsonl",
            good.replace("0", "0.5").replace("\"input_length\": 1", "\"input_length\": 40").as_bytes(),
        ),
        ("short.csv", [header, "5,1,5\n"].concat().as_bytes()),
        (
            "config.json",
            b"{\"num_hidden_layers\": 2, \"layer_types\": [\"full_attention\", \"linear_attention\"]}",
        ),
        ("other.csv", b"TIMESTAMP,in,GeneratedTokens\n2023-11-16 18:17:03,1,5\n"),
        ("\u{1b}[31m.jsonl", b""),
        ("bare.jsonl", b"{\"timestamp\": 0, \"input_length\": 9, \"output_length\": 1}\n"),
    ] {
        fs::write(directory.path().join(name), bytes).unwrap();
    }
    // A command line, and a part of its error.
    let cases = "
        replay cut.jsonl => cut.jsonl:2: not valid JSON: EOF while parsing
        replay negative.csv => negative.csv:2: ContextTokens is -1
        replay binary.jsonl => binary.jsonl:1: not UTF-8
        replay empty.csv => empty.csv: empty
        replay header.csv => header.csv:1: the header has no column ContextTokens
        replay half.jsonl => half.jsonl:1: timestamp 0.5 is not a whole number of milliseconds: --time-unit s or
        replay half.jsonl --hash-tokens 16 --time-unit s --prefix-cache on => half.jsonl:1: 1 hash_ids for 40 tokens, which have 3 blocks of 16
        replay short.csv --time-unit s => --hash-tokens and --time-unit are for traces in JSON
        replay --hash-tokens 0 => '--hash-tokens <N>': not a whole number from 1 to 65,536
        replay --time-unit us => [possible values: s, ms]
        replay --hash-tokens 16 => --hash-tokens tells how a trace is read, and none is given
        replay --time-unit s --sweep => --time-unit tells how a trace is read, and none is given
        map --format bailian => --format tells how a trace is read, and none is given
        replay bare.jsonl --seed 1 => cannot be used with
        replay other.csv => other.csv:1: the header has no column ContextTokens; its columns are TIMESTAMP, in
        replay other.csv --columns input=i => no column i; its columns are TIMESTAMP, in, GeneratedTokens
        replay other.csv --columns inn=in => no field is called \"inn\"
        replay other.csv --columns input=in --format mooncake => --columns is for CSV traces
        replay --columns input=in => <TRACE>
        replay \u{1b}[31m.jsonl => \\u{1b}[31m.jsonl: empty
        replay bare.jsonl --prefix-cache on => bare.jsonl:1: no hash_ids
        replay . => ./config.json:1: missing field `block_size`
        replay missing => cannot open
        replay --layout none-such => none-such
        replay --layout Qwen/Qwen2.5-8B => the closest first: qwen2.5-3b, qwen2.5-7b,
        replay --layout layers=2,heads=3 => layout: got \"heads=3\", expected a part of layers=32,kv-heads=8
        replay --layout layers=2 => --layout layers=2: kv_heads: got 0, or nothing, expected at least 1
        replay --layout config.json => the layers of this model differ (layer types full_attention, linear_attention)
        replay --layout none.json => none.json: No such file
        replay --blocks 0 => '--blocks <N>': not a whole number from 1 to 134,217,727
        replay --blocks -5 => '--blocks <N>': not a whole number from 1 to 134,217,727
        replay --blocks 134217728 => '--blocks <N>': not a whole number from 1 to 134,217,727
        replay --blocks 1e3 => '--blocks <N>': not a whole number from 1 to 134,217,727
        replay --blocks 99999999999999999999 => not a whole number from 1 to 134,217,727
        replay --blocks --json => a value is required for '--blocks <N>'
        replay --block-tokens 0 => '--block-tokens <N>': not a whole number from 1 to 4,096
        replay --block-tokens -1 => '--block-tokens <N>': not a whole number from 1 to 4,096
        replay --threads 0 => '--threads <N>': not a whole number from 1 to 1,024
        replay --threads 70000 => '--threads <N>': not a whole number from 1 to 1,024
        replay --requests 10000001 => '--requests <N>': not a whole number from 1 to 10,000,000
        replay --requests 0 => '--requests <N>': not a whole number from 1 to 10,000,000
        replay --seed -1 => '--seed <N>': not a whole number from 0 to 18,446,744,073,709,551,615
        replay --defrag-interval-ms 0 => not a whole number from 1 to 3,600,000
        replay --defrag-interval-ms -1 => not a whole number from 1 to 3,600,000
        replay --defrag-threshold -0.1 => -0.1 is not from 0 to 1
        replay --defrag-threshold nan => NaN is not from 0 to 1
        replay --defrag-threshold 10% => not a number from 0 to 1
        replay --defrag-threshold 2 => 2 is not from 0 to 1
        replay --resize-at -3%:5 => item 1, \"-3%:5\": not written as 60%:80000
        replay --resize-at 30%:5,x => item 2, \"x\": not written as 60%:80000
        replay --resize-at 60%:5,30%:5 => not after the item before it, at 60 %
        replay --layout llama-3.1-405b --blocks 100000000 => a pool of 100,000,000 blocks of 7.88 MiB (metadata included) does not fit into the
        replay --nonsense => --nonsense
        replay --sweep --requests 5 --blocks 20000 => 5 requests are too few: none begins after open sequences hold
        replay --sweep --compare free-list => cannot be used with '--compare <WHAT>'
        replay --sweep --prefix-cache off => cannot be used with '--prefix-cache <WHETHER>'
        replay --sweep --plot /nowhere/at/all.svg => cannot write /nowhere/at/all.svg
        replay --plot all.svg => --sweep
        replay --sweep bare.jsonl => bare.jsonl:1: no hash_ids
        replay --compare mutex => [possible values: free-list, none]
        replay --compare free-list --resize-at 30%:5 => --compare free-list does not follow --resize-at
        replay --prefix-cache perhaps => [possible values: on, off]
        replay --format xml => [possible values: auto, mooncake, bailian, dynamo, agents, azure]
        replay --device cuda:x => neither host nor cuda:N
        replay --policy LRU => no eviction policy is called \"LRU\"
        replay --policy mru => no eviction policy is called \"mru\"; there are lru
        replay --prefix-cache off --policy lru => --policy lru has no effect with --prefix-cache off
        map --prefix-cache off --policy lru => --policy lru has no effect with --prefix-cache off
        map --at 100% => not more than 0%
        map --at -3% => \"-3%\" is not more than 0%
        map --at 0% => not more than 0%
        map --requests 50 --output /nowhere/at/all.svg => cannot write /nowhere/at/all.svg
        frobnicate => frobnicate
        => Usage";
    for case in cases.lines().skip(1) {
        let (arguments, complaint) = case.split_once("=> ").unwrap();
        let output = kvpool_in(directory.path(), arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments}: {said}");
        assert!(said.contains(complaint), "{arguments}: {said}");
        assert!(!said.contains('\u{1b}'), "{arguments}: {said:?}");
        assert!(output.stdout.is_empty(), "{arguments}");
    }
}

/// Without a place for the message, the exit code still tells.
#[cfg(target_os = "linux")]
#[test]
fn a_full_standard_error_is_no_panic() {
    let full = || fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvpool"));
        command.args(arguments).stdout(Stdio::null()).stderr(full()).status().unwrap().code()
    };
    assert_eq!(run(&["replay", "/no/such/trace"]), Some(2));
    assert_eq!(run(&["replay", "--nonsense"]), Some(2));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("unsorted.csv");
    let rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04,4,1\n2023-11-16 18:17:03,3,5\n";
    fs::write(&path, rows).unwrap();
    assert_eq!(run(&["replay", path.to_str().unwrap()]), Some(0));
}

#[test]
fn published_traces_are_read_whole_and_their_beginning_replayed() {
    for (name, requests, input, output) in [
        ("mooncake_conversation.jsonl", 12_031, 144_793_823, 4_122_048),
        ("azure2023_code.csv", 8_819, 18_059_974, 245_896),
    ] {
        let Some(path) = published(name) else { continue };
        let trace = Trace::load(&path, &ReadOptions::default()).unwrap();
        let sum =
            |of: fn(&Request) -> u32| trace.requests.iter().map(|each| u64::from(of(each))).sum::<u64>();
        assert_eq!((trace.requests.len(), trace.out_of_order), (requests, 0), "{name}");
        assert_eq!(
            (sum(|each| each.input_tokens), sum(|each| each.output_tokens)),
            (input, output),
            "{name}"
        );
        let report = json(&format!("replay {} --requests 150 --threads 2 --json", path.display()));
        assert_eq!((&report["completed"], &report["sound"]), (&150.into(), &Value::Bool(true)), "{name}");
    }
}
