//! `kvpool replay` on pools of models whose layers differ, and of windows, end to end.

use std::fs;

use serde_json::Value;

use super::common::{config, json, keys, kvpool, kvpool_in};

fn number(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("no number {name} in {report}"))
}

/// Generated conversations in little memory: sequences wait, are refused and preempted; every token
/// that the next one sees is there in every group, and nothing is lost.
#[test]
fn models_whose_layers_differ_are_replayed_in_little_memory() {
    for (name, options, block_bytes, groups) in [
        (
            "gpt-oss-120b",
            "--memory 512MiB --requests 200 --step-tokens 256",
            589_824,
            [("window 128", 18, 1), ("all", 18, 1)],
        ),
        (
            "gemma-4-31b",
            "--memory 3GiB --requests 100 --step-tokens 256 --prefix-cache on",
            1_310_720,
            [("window 1,024", 50, 10), ("all", 10, 1)],
        ),
    ] {
        let model = config(name);
        let [report, beside] = [1, 2]
            .map(|threads| json(&format!("replay --model {model} {options} --threads {threads} --json")));
        assert_eq!((&beside["sound"], &beside["audit"]), (&Value::Bool(true), &"ok".into()), "{beside}");
        assert_eq!((&report["sound"], &report["audit"]), (&Value::Bool(true), &"ok".into()), "{report}");
        assert_eq!((&report["model"], &report["layout"]), (&model.as_str().into(), &Value::Null));
        assert_eq!((number(&report, "block_bytes"), number(&report, "block_tokens")), (block_bytes, 16));
        let memory = number(&report, "blocks_total") * block_bytes;
        let is_of = |mib: u64| (mib << 20).checked_sub(memory).is_some_and(|rest| rest < block_bytes);
        assert!([512, 3072].into_iter().any(is_of), "{report}");
        let settled = number(&report, "completed") + number(&report, "rejected");
        assert_eq!(settled, number(&report, "requests"));
        assert!(number(&report, "refused") > 0, "{report}");
        assert!(number(&report, "tokens_verified") > number(&report, "tokens") / 2, "{report}");
        let (peak, refused) =
            (number(&report, "peak_tokens_held"), number(&report, "tokens_held_at_first_refusal"));
        assert!(0 < refused && refused <= peak, "{report}");
        assert!(report["free_list"].is_null());
        let found = report["groups"].as_array().unwrap();
        assert_eq!(found.len(), groups.len());
        for (group, (keeps, layers, frames)) in found.iter().zip(groups) {
            assert_eq!(
                keys(group).join(" "),
                "block_frames block_tokens blocks_given_up frames_mean frames_peak keeps layers"
            );
            let described = (&group["keeps"], &group["layers"], &group["block_frames"]);
            assert_eq!(described, (&keeps.into(), &layers.into(), &frames.into()));
            assert!(number(group, "frames_peak") > 0, "{group}");
            assert_eq!(number(group, "blocks_given_up") > 0, keeps != "all", "{group}");
        }
    }
}

/// The window costs less memory than all tokens would: more tokens are held in as many blocks.
#[test]
fn a_pool_with_windows_holds_more_tokens() {
    let run = |options: &str| {
        json(&format!("replay --requests 400 --blocks 2000 --threads 2 --compare none --json {options}"))
    };
    let (all, window) = (run(""), run("--window 256 --sinks 4 --step-tokens 512"));
    assert_eq!((&all["sound"], &window["sound"]), (&Value::Bool(true), &Value::Bool(true)), "{window}");
    assert!(number(&window, "peak_tokens_held") > 2 * number(&all, "peak_tokens_held"), "{all} {window}");
    assert!(number(&all, "rejected") > number(&window, "rejected"), "{all} {window}");
    let group = &window["groups"][0];
    assert_eq!((&group["keeps"], &group["layers"]), (&"window 256 + 4".into(), &1.into()));
    assert!(number(group, "blocks_given_up") > 0 && number(group, "frames_peak") <= 2000, "{group}");
}

/// A named model whose layers are all alike, while the pool is resized and compacted; and a chunk.
#[test]
fn other_models_are_replayed_beside_resizes() {
    for (model, more, keeps) in [
        ("qwen2.5-7b", "--blocks 4000 --resize-at 30%:2500,60%:4000 --prefix-cache on", &["all"][..]),
        (&config("llama-4-scout"), "--memory 4GiB", &["chunk 8,192", "all"]),
        (&config("qwen3.5-35b-a3b"), "--memory 4GiB --prefix-cache on", &["state", "all"]),
        (&config("mimo-v2-flash"), "--memory 4GiB --prefix-cache on", &["all", "window 128"]),
        (
            &config("deepseek-v4-flash"),
            "--memory 4GiB --prefix-cache on",
            &["window 128", "1 in 4 · 1 in 128", "window 8"],
        ),
    ] {
        let options = format!("--model {model} {more} --requests 150 --threads 2 --defrag-interval-ms 1");
        let report = json(&format!("replay {options} --json"));
        assert_eq!(report["sound"], Value::Bool(true), "{report}");
        let found: Vec<_> =
            report["groups"].as_array().unwrap().iter().map(|group| &group["keeps"]).collect();
        assert_eq!(found, keeps);
        let has_checkpoints = report["states"]["checkpoints"].as_u64().is_some_and(|kept| kept > 0);
        assert_eq!(has_checkpoints, keeps.contains(&"state"), "{report}");
    }
}

#[test]
fn the_table_names_the_model_and_its_groups() {
    for (model, texts) in [
        ("gpt-oss-120b", &["peak tokens held", "groups", "window 128, 18", "all, 18 layers"][..]),
        ("kimi-linear-48b", &["groups", "state, 20 layers", "checkpoints", "kept at cuts"]),
    ] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvpool"));
        command.args(["replay", "--requests", "50", "--prefix-cache", "on", "--model", &config(model)]);
        let table = String::from_utf8(command.env("COLUMNS", "80").output().unwrap().stdout).unwrap();
        for text in texts.iter().chain([&model, &"nothing lost, nothing corrupt"]) {
            assert!(table.contains(text), "no {text:?} in\n{table}");
        }
        let is_wide = |line: &&str| line.chars().count() > 80;
        assert_eq!(table.lines().skip(1).find(is_wide), None, "{table}");
    }
}

/// Each group has a shade, and states are told from blocks that are open.
#[test]
fn groups_are_told_apart_on_a_map() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("groups.svg");
    for (model, captions) in [
        ("gpt-oss-120b", &["owned, window 128", "owned, all"][..]),
        ("qwen3.5-35b-a3b", &["owned, all", "of a state"]),
        ("deepseek-v4-flash", &["owned, window 128", "owned, 1 in 4, 1 in 128", "owned, window 8"]),
    ] {
        let options = "--requests 100 --memory 2GiB --threads 1 --prefix-cache on";
        let path = path.display();
        let output = kvpool(&format!("map --model {} {options} --output {path}", config(model)));
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains("mean sequence run") && !said.contains("single blocks"), "{said}");
        let svg = std::fs::read_to_string(folder.path().join("groups.svg")).unwrap();
        for caption in captions.iter().chain([&format!("model {model}.json").as_str()]) {
            assert!(svg.contains(caption), "no {caption:?} in {svg}");
        }
    }
}

/// The pool that a replay chooses by itself holds its largest request, with its states.
#[test]
fn the_largest_request_of_a_model_with_states_fits() {
    let report = json(&format!("replay --requests 1 --model {} --json", config("qwen3.5-27b")));
    assert_eq!((&report["completed"], &report["rejected"]), (&1.into(), &0.into()), "{report}");
}

#[test]
fn models_that_do_not_run_and_bad_options_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["gpt-oss-120b", "qwen3.5-27b"] {
        fs::copy(config(name), folder.path().join(format!("{name}.json"))).unwrap();
    }
    // Arguments of a replay, and a part of the error.
    let cases = "
        --model none.json => --model none.json: 
        --model no-such-model => expected one of these
        --model gpt-oss-120b.json --dtype int3 => int3
        --model gpt-oss-120b.json --layout tiny => cannot be used with '--layout <LAYOUT>'
        --model gpt-oss-120b.json --block-tokens 32 => cannot be used with '--block-tokens <N>'
        --model gpt-oss-120b.json --window 8 => cannot be used with '--window <N>'
        --model gpt-oss-120b.json --compare free-list => --compare free-list has one list that keeps all tokens
        --model gpt-oss-120b.json --memory 4GB => such as 40GiB
        --model gpt-oss-120b.json --memory 500KiB => --memory 500.00 KiB: 0 blocks of 589,824 bytes
        --model gpt-oss-120b.json --memory 99999TiB => which are not from 1 to 134,217,727
        --memory 1GiB --blocks 5 => cannot be used with '--blocks <N>'
        --memory 1GiB --sweep --sessions 3 => cannot be used with '--sessions <N>'
        --dtype bf16 => --dtype and --drafts are of --model
        --drafts => --dtype and --drafts are of --model
        --sinks 4 => --window <N>
        --window 0 => '--window <N>': not a whole number from 1 to
        --window 8 --compare free-list => --compare free-list has one list
        --step-tokens 0 => '--step-tokens <N>': not a whole number from 1 to";
    for case in cases.lines().skip(1) {
        let (arguments, complaint) = case.split_once(" => ").unwrap();
        let output = kvpool_in(folder.path(), &format!("replay --requests 9 {arguments}"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments}: {said}");
        assert!(said.contains(complaint) && output.stdout.is_empty(), "{arguments}: {said}");
    }
    // Layers that draft run beside states.
    let output = kvpool_in(folder.path(), "replay --requests 9 --model qwen3.5-27b.json --drafts");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    // A pool that holds no request replays nothing.
    let output = kvpool(&format!("replay --requests 20 --model {} --memory 6MiB", config("gpt-oss-120b")));
    let table = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{table}");
    assert!(table.contains("nothing was replayed: every request was rejected (20)"), "{table}");
}
