//! `kvpool replay --sweep`, end to end.

use super::common;
use std::fs;
use std::process::Command;

use common::{keys, kvpool_in};
use serde_json::Value;

/// Rows by use and placement, the same however many replays run at a time.
#[test]
fn a_sweep_measures_contiguity_by_use() {
    let folder = tempfile::tempdir().unwrap();
    let sweep = |options: &str| {
        let output =
            kvpool_in(folder.path(), &format!("replay --sweep --requests 300 --blocks 5000 {options}"));
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let text = sweep("--json --threads 1 --plot sweep.svg");
    assert_eq!(text, sweep("--json --threads 3"));
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(keys(&report).join(" "), "block_tokens blocks_total requests rows trace");
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(
        keys(&rows[0]).join(" "),
        "hit_rate placement run_len_mean runs_per_sequence sequences use used_mean"
    );
    let place = |row: &Value| (row["use"].as_f64().unwrap(), row["placement"].as_str().unwrap().to_owned());
    let uses = [0.3, 0.5, 0.65, 0.8, 0.9, 0.95];
    let placements = ["cache_on", "cache_off", "free_list"];
    let expected = uses.into_iter().flat_map(|at| placements.map(|placement| (at, placement.to_owned())));
    assert_eq!(rows.iter().map(place).collect::<Vec<_>>(), expected.collect::<Vec<_>>());
    for rows in rows.chunks(3) {
        let [on, off, list] = [0, 1, 2].map(|placement| &rows[placement]);
        let run = |row: &Value| row["run_len_mean"].as_f64().unwrap();
        assert!(run(on) > run(list) && run(off) > run(list), "{rows:?}");
        assert_eq!([on, off, list].map(|row| row["hit_rate"].is_null()), [false, true, false]);
        // The list serves the same requests as the pool with the cache.
        assert_eq!((&on["sequences"], &on["used_mean"]), (&list["sequences"], &list["used_mean"]));
        let used = on["used_mean"].as_f64().unwrap();
        assert!((used - on["use"].as_f64().unwrap()).abs() < 0.2, "{rows:?}");
    }
    let svg = fs::read_to_string(folder.path().join("sweep.svg")).unwrap();
    for text in ["<svg", "mean run of a sequence", "cache on", "cache off", "free list", "95 %", "</svg>"] {
        assert!(svg.contains(text), "no {text:?} in {svg}");
    }
    let table = sweep("--threads 2");
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    for text in ["300 requests, 5,000 blocks of 16 tokens", "free list", "hit rate", "65 %"] {
        assert!(table.contains(text), "no {text:?} in\n{table}");
    }
    let mut narrow = Command::new(env!("CARGO_BIN_EXE_kvpool"));
    narrow.args(["replay", "--sweep", "--requests", "300", "--blocks", "5000"]).env("COLUMNS", "40");
    let lines = String::from_utf8(narrow.output().unwrap().stdout).unwrap();
    let count = |beginning| lines.lines().filter(|line| line.starts_with(beginning)).count();
    assert_eq!([count("use: 65 %"), count("mean use: "), count("placement: ")], [3, 18, 18], "{lines}");
}

/// Of a model whose layers differ, also each group; it has no free list.
#[test]
fn a_sweep_of_a_model_measures_each_group() {
    let folder = tempfile::tempdir().unwrap();
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/configs/gpt-oss-120b.json");
    let sweep = |options: &str| {
        let command = format!("replay --sweep --requests 100 --memory 1GiB --model {config} {options}");
        let output = kvpool_in(folder.path(), &command);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let report: Value = serde_json::from_str(&sweep("--json --plot sweep.svg")).unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 12);
    for row in rows {
        assert_ne!(row["placement"], "free_list");
        let groups = row["groups"].as_array().unwrap();
        let keeps: Vec<_> = groups.iter().map(|group| group["keeps"].as_str().unwrap()).collect();
        assert_eq!(keeps, ["window 128", "all"]);
        assert_eq!(keys(&groups[0]).join(" "), "keeps layers lists run_len_mean runs_per_list");
        let runs = |value: &Value, at: &str| value[at]["mean"].as_f64().unwrap();
        // A run of the whole sequence may go on in the next list.
        let sum: f64 = groups.iter().map(|group| runs(group, "runs_per_list")).sum();
        let whole = runs(row, "runs_per_sequence");
        assert!(whole <= sum + 1e-9 && sum <= whole + 1.0, "{row}");
    }
    let svg = fs::read_to_string(folder.path().join("sweep.svg")).unwrap();
    assert!(svg.contains("cache off") && !svg.contains("free list"), "{svg}");
    let table = sweep("");
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    assert!(table.contains("window 128") && !table.contains("free list"), "{table}");
}
