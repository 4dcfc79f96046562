//! `kvpool layout`, end to end: the text, the JSON, and the errors of bad input.

use super::common::{config, keys, kvpool, parse};

#[test]
fn the_groups_of_a_model_and_the_sequences_that_fit() {
    let output = kvpool(&format!("layout {} --memory 80GiB", config("qwen3.5-27b")));
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text, QWEN, "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

const QWEN: &str = "\
64 layers, bf16, frames of 1,048,576 bytes
per sequence: 65,536 bytes a token, and 146.81 MiB of windows and states
prefixes are hit in multiples of 16 tokens
┌───────┬───────┬────────┬────────┬────────┬─────────────┬────────┐
│ group ┆ keeps ┆ layers ┆ tokens ┆ frames ┆ entry bytes ┆ waste  │
╞═══════╪═══════╪════════╪════════╪════════╪═════════════╪════════╡
│     0 ┆ state ┆     48 ┆      - ┆    147 ┆ 153,944,064 ┆ 0.13 % │
│     1 ┆ all   ┆     16 ┆     16 ┆      1 ┆      65,536 ┆ 0.00 % │
└───────┴───────┴────────┴────────┴────────┴─────────────┴────────┘
sequences that fit into 80.00 GiB
┌─────────┬──────────────────┬───────────┬───────────────┐
│ tokens  ┆ a sequence holds ┆ sequences ┆ tokens in all │
╞═════════╪══════════════════╪═══════════╪═══════════════╡
│     600 ┆       185.00 MiB ┆       442 ┆       265,200 │
│   4,096 ┆       403.00 MiB ┆       203 ┆       831,488 │
│  32,768 ┆         2.14 GiB ┆        37 ┆     1,212,416 │
│ 131,072 ┆         8.14 GiB ┆         9 ┆     1,179,648 │
└─────────┴──────────────────┴───────────┴───────────────┘
";

#[test]
fn eight_bits_an_index_and_drafts_are_counted() {
    let parsed = |arguments: &str| parse(&kvpool(&format!("layout {arguments} --json")));
    let v32 = parsed(&format!("{} --dtype fp8_e4m3 --tokens 1000", config("deepseek-v3.2")));
    assert_eq!(
        keys(&v32),
        [
            "bytes_per_token",
            "dtype",
            "fits",
            "fixed_bytes",
            "frame_bytes",
            "groups",
            "hit_tokens",
            "layers",
            "memory_bytes",
            "waste"
        ]
    );
    assert_eq!(v32["bytes_per_token"], 48_068.0);
    let fits = &v32["fits"][0];
    assert_eq!(keys(fits), ["bytes_held", "sequences", "tokens", "tokens_in_all"]);
    assert_eq!(fits["bytes_held"], 63 * 16 * 48_068);
    let groups = v32["groups"].as_array().unwrap();
    assert_eq!(groups.len(), 1);
    assert_eq!(groups[0]["columns"][1]["bytes"], 132);
    let drafts = parsed(&format!("{} --drafts", config("qwen3.5-27b")));
    assert_eq!(drafts["groups"][2]["keeps"], "all, 1 ahead");
    let named = parsed("meta-llama/Llama-3.1-70B-Instruct --tokens 16,17");
    assert_eq!((&named["waste"], &named["frame_bytes"]), (&0.0.into(), &(16 * 327_680).into()));
    assert_eq!(named["fits"][1]["bytes_held"], 2 * 16 * 327_680);
}

/// Groups with compressed tokens share their blocks, and so do those with equal windows.
#[test]
fn frames_of_shared_blocks_are_shown_once() {
    let command = format!("layout {} --dtype fp8_e4m3", config("deepseek-v4-flash"));
    let text = String::from_utf8(kvpool(&command).stdout).unwrap();
    let group = |start: &str| text.lines().find(|line| line.starts_with(start)).unwrap_or_default();
    assert!(group("│     3 ┆ 1 in 128   ┆").contains("┆    128 ┆   of 1 ┆"), "{text}");
    assert!(group("│     4 ┆ window 128 ┆").contains("┆     16 ┆   of 0 ┆"), "{text}");
    let layout = parse(&kvpool(&format!("{command} --tokens 4096 --json")));
    let groups = layout["groups"].as_array().unwrap();
    let shared: Vec<_> = groups.iter().map(|group| group["shares_blocks_of"].as_u64()).collect();
    assert_eq!(shared, [None, None, None, Some(1), Some(0)]);
    // Nine blocks of 16 tokens, 32 of 128, and three of 4.
    assert_eq!(layout["fits"][0]["bytes_held"], (9 * 4 + 32 + 3 * 2) * 492_992);
}

#[test]
fn bad_input_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.json");
    std::fs::write(&file, r#"{"num_hidden_layers": 1, "layer_types": ["convolution"]}"#).unwrap();
    let path = file.display().to_string();
    for (arguments, with) in [
        (path.as_str(), "config.json: layer_types: the kind \"convolution\" of layer 0 is not known"),
        ("no/such/config.json", "No such file"),
        ("no-such-model", "expected one of these"),
        ("qwen2.5-7b --memory 40", ""),
        ("qwen2.5-7b --memory 40GB", "such as 40GiB"),
        ("qwen2.5-7b --tokens 0", "not a whole number"),
        ("qwen2.5-7b --dtype int3", "int3"),
    ] {
        let output = kvpool(&format!("layout {arguments}"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(with), "{arguments}: {said}");
        assert_eq!(output.status.code(), Some(if with.is_empty() { 0 } else { 2 }), "{arguments}: {said}");
    }
}
