use std::time::{Duration, Instant};

use kvpool_node::admin::{Notice, OwnersReport, StatsReport};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Cell;
use ratatui::style::{Color, Modifier};
use serde_json::{Value, json};

use super::cells::{self, CLASSES};
use super::panels;
use super::sort::OwnerOrder;
use super::state::{Effect, Input, Key, Link, State};
use super::view::{self, Styles};

/// Returns statistics at a second since the node started.
fn summary(second: u64) -> Notice {
    let times = |samples| json!({ "samples": samples, "p50_ns": 120, "p99_ns": 1_250, "p999_ns": 80_000, "max_ns": 80_000 });
    notice(
        "stats",
        json!({
            "node": "gpu-node-1", "time_ms": 1_000_000 + 1_000 * second, "uptime_s": second,
            "block_bytes": 256, "total": 20_000, "used": 10_000, "free": 5_000, "evictable": 4_000,
            "retired": 700, "reserved": 200, "held": 100, "sequences": 128, "waiting": 3,
            "batches_in_flight": 2, "oldest_batch_s": 0.8, "fragmentation": 0.012,
            "available_fragmentation": 0.023, "longest_free_run": 640, "mean_sequence_run": 37.2,
            "sequence_runs": { "sequences": 128, "mean": 3.4, "p50": 3, "p99": 9, "mean_run": 37.2 },
            "allocation": times(16), "wait": times(0), "allocations": 10 * second,
            "allocated_blocks": 1_234 * second, "refusals": 0, "query_tokens": 1_000 * second,
            "hit_tokens": 250 * second, "evicted_blocks": 12 * second, "moved_blocks": 7 * second,
            "transferred_blocks": 0, "transferred_bytes": 2_048 * second, "migrations_running": 0,
            "peers_up": 1, "peers": 2,
        }),
    )
}

fn notice(event: &str, data: Value) -> Notice {
    serde_json::from_value(json!({ "event": event, "data": data })).unwrap()
}

/// Returns a map of cells of eight frames, each of one class.
fn map(cells: &str) -> Notice {
    let text: String = cells.chars().flat_map(|letter| [letter; 2]).collect();
    notice("map", json!({ "frames": 8 * cells.len(), "group": 8, "order": 4, "cells": text }))
}

fn migration(id: &str, state: &str) -> Value {
    json!({
        "id": id, "kind": "migrate", "side": "source", "peer": "gpu-node-2", "sequence": 7, "state": state,
        "blocks": 40, "transport": "tls", "bytes": 10_240, "runs": 3, "time_ms": 12, "reason": null,
    })
}

fn owners(number: u64) -> OwnersReport {
    let owner = |at: u64| {
        json!({
            "kind": "sequence", "sequence": at, "blocks": 1_000 - at, "reserved_blocks": 0,
            "shared_blocks": at % 3, "pinned_blocks": 0, "tokens": 100 * (at % 7), "priority": "normal",
            "held_s": (at * 37 % 100) as f64, "allocated_at": null,
        })
    };
    let owners: Vec<_> = (0..number).map(owner).collect();
    serde_json::from_value(json!({
        "owners": owners, "total": 1_500, "blocks": 9_000, "pinned_blocks": 0, "retired_blocks": 700,
        "batches_in_flight": 2, "oldest_batch_s": 0.8,
    }))
    .unwrap()
}

/// Returns the statistics of a pool, with these counters of other services.
fn report(extra: Value) -> Input {
    let pool = kvpool::Pool::builder(kvpool::KvLayout::named("tiny").unwrap()).blocks(10).build().unwrap();
    let mut stats = StatsReport::of("gpu-node-1", Duration::from_secs(1), &pool.into());
    stats.extra = extra.as_object().unwrap().clone();
    Input::Stats(Box::new(stats))
}

fn services() -> Value {
    json!({
        "peers": { "gpu-node-2": "up", "gpu-node-3": "down: refused" },
        "tiers": {
            "redis": { "breaker": "closed", "hits": 30, "misses": 10, "stored": 1_200, "failed": 0, "overdue": 0 },
            "far": { "breaker": "open", "hits": 0, "misses": 0, "stored": 0, "failed": 4, "overdue": 1 },
        },
        "traces": { "otlp": { "failures": 2, "last_error": "refused", "last_error_s": 65 } },
        "membership": { "etcd": { "members": ["a", "b"], "current": false, "joined": true, "reason": null } },
    })
}

fn serving() -> (State, Instant) {
    let (mut state, now) = (State::new("http://127.0.0.1:7410"), Instant::now());
    for second in 0..30 {
        state.update(Input::Notice(summary(second)), now);
    }
    state.update(Input::Notice(map(&"0011rrcceeuuffss".repeat(256))), now);
    let list = json!({ "migrations": [migration("b", "transferring"), migration("a", "committed")] });
    state.update(Input::Notice(notice("migrations", list)), now);
    state.update(Input::Owners(Ok(owners(50))), now);
    state.update(report(services()), now);
    (state, now)
}

fn drawn(state: &State, (width, height): (u16, u16), styles: Styles, now: Instant) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| view::draw(frame, state, styles, now)).unwrap();
    let buffer = terminal.backend().buffer();
    if styles == Styles::None {
        let is_plain = |cell: &Cell| {
            (cell.fg, cell.bg, cell.modifier) == (Color::Reset, Color::Reset, Modifier::empty())
        };
        assert!(buffer.content.iter().all(is_plain), "colours or attributes");
    }
    let line = |row: u16| (0..width).map(|column| buffer[(column, row)].symbol()).collect::<String>();
    (0..height).map(|row| line(row).trim_end().to_owned()).collect()
}

#[test]
fn a_screen_of_80_by_24_has_all_parts() {
    let (state, now) = serving();
    let lines = drawn(&state, (80, 24), Styles::None, now);
    let all = lines.join("\n");
    assert!(lines[0].starts_with("gpu-node-1  http://127.0.0.1:7410  kvpool 0.1.0  up 29 s"), "{all}");
    assert!(lines[0].ends_with("live"), "{all}");
    // 78 characters: half used, a fifth cached, a quarter free, and the rest.
    let bar = ["#".repeat(39), "+".repeat(16), ".".repeat(19), "~".repeat(4)].concat();
    assert_eq!(lines[1], format!("[{bar}]"));
    for part in [
        "used 10,000 of 20,000 (50.0 %)",
        "cached 4,000",
        "fragmentation 1.2 %",
        "allocation p50 120 ns p99 1.2 us max 80.0 us",
        "wait p99 -",
        "batches 2, oldest 0.8 s",
        "blocks/s 1,234",
        "prefix hits 25.0 %",
        "transferred/s 2.00 KiB",
        "-- Memory map: 32,768 frames",
        "# owned 25.0 %",
        "-- Owners by blocks: 1,500 of 9,000 blocks",
        "-- Peers and tiers",
        "peer gpu-node-2: up",
        "-- Migrations",
        "transferring to gpu-node-2",
    ] {
        assert!(all.contains(part), "no {part:?} in\n{all}");
    }
    assert!(lines[23].starts_with("q quit  h help"), "{all}");
}

/// Of a pool of frames, whose node sends nothing about bytes, sequences and peers.
#[test]
fn a_pool_of_frames_has_neither_sequences_nor_peers() {
    let (mut state, now) = (State::new("http://127.0.0.1:7410"), Instant::now());
    for second in 0..30 {
        let Notice::Stats(mut stats) = summary(second) else { panic!() };
        stats.of_sequences = None;
        let sent = notice("stats", json!(stats));
        state.update(Input::Notice(sent), now);
    }
    state.update(Input::Notice(map(&"rrccff".repeat(256))), now);
    state.update(Input::Owners(Ok(owners(50))), now);
    for size in [(80, 24), (120, 40)] {
        let all = drawn(&state, size, Styles::None, now).join("\n");
        for part in
            ["used 10,000 of 20,000", "longest free run 640", "blocks/s 1,234", "evicted/s 12", "-- Owners"]
        {
            assert!(all.contains(part), "no {part:?} in\n{all}");
        }
        for absent in [
            "sequences",
            "allocation",
            "prefix",
            "transferred",
            "compaction",
            "Peers",
            "Migrations",
            "p99, 10",
        ] {
            assert!(!all.contains(absent), "{absent:?} in\n{all}");
        }
    }
}

#[test]
fn a_larger_screen_has_more_of_each_part_and_the_history() {
    let (state, now) = serving();
    let (small, large) =
        (drawn(&state, (80, 24), Styles::None, now), drawn(&state, (120, 40), Styles::Used, now));
    let all = large.join("\n");
    for part in
        ["used, 0 to 100 %", "▅▅▅", "tier redis: up, hits 75.0 %, 1,200 stored", "tier far: DOWN", "5 failed"]
    {
        assert!(all.contains(part), "no {part:?} in\n{all}");
    }
    assert!(all.contains("members etcd: 2 known, joined"), "{all}");
    assert!(all.contains("traces otlp: on, last error 1 min 5 s ago: refused"), "{all}");
    let owners = |lines: &[String]| lines.iter().filter(|line| line.starts_with("sequence ")).count();
    assert!(owners(&large) > owners(&small) && owners(&small) >= 4, "{all}\n{}", small.join("\n"));
}

/// Owners with large ids and counts: `of` is the number of digits of an id.
fn large_owners(of: usize) -> OwnersReport {
    let mut report = owners(20);
    for owner in &mut report.owners {
        owner.sequence = Some("5807663367585850123"[..of].parse().unwrap());
        (owner.blocks, owner.tokens, owner.shared_blocks) = (12_345_678, Some(197_530_848), 2_153);
        owner.held_s = Some(3_599.0);
    }
    report
}

#[test]
fn no_number_is_cut_at_any_width() {
    let (mut state, now) = serving();
    for digits in [3, 16, 19] {
        state.update(Input::Owners(Ok(large_owners(digits))), now);
        let whole =
            ["5807663367585850123"[..digits].to_owned(), "12,345,678".to_owned(), "197,530,848".to_owned()];
        for (width, height) in [(80, 24), (60, 20), (120, 40), (76, 24), (44, 30)] {
            let all = drawn(&state, (width, height), Styles::None, now);
            let rows: Vec<_> = all.iter().filter(|line| line.starts_with("sequence ")).collect();
            assert!(rows.len() >= 3 || height < 24, "{width}x{height}\n{}", all.join("\n"));
            for row in rows {
                for word in row.split_whitespace().skip(1).take(2) {
                    let is_whole =
                        whole.iter().any(|number| number == word) || ["12M", "198M"].contains(&word);
                    assert!(is_whole, "{word} at {width}x{height}\n{}", all.join("\n"));
                }
            }
        }
    }
    // Without large numbers, every column has room at 80 columns.
    state.update(Input::Owners(Ok(owners(50))), now);
    let all = drawn(&state, (80, 24), Styles::None, now).join("\n");
    assert!(all.contains("kind      sequence  blocks  tokens    held shared"), "{all}");
    let large = drawn(&state, (120, 40), Styles::None, now).join("\n");
    for runs in ["mean run of a sequence 37.2", "runs a sequence 3.4 p50 3 p99 9"] {
        assert!(large.contains(runs), "no {runs:?} in {large}");
    }
    for (width, height) in [(80, 24), (60, 20), (46, 24), (40, 12)] {
        let all = drawn(&state, (width, height), Styles::None, now).join("\n");
        for whole in ["used 10,000 of 20,000 (50.0 %)", "allocation p50 120 ns p99 1.2 us"] {
            assert!(all.contains(whole), "no {whole:?} at {width}x{height}\n{all}");
        }
    }
}

#[test]
fn lines_are_cut_between_words_and_not_between_a_number_and_its_unit() {
    let line = "tier redis: up, hits 75.0 %, 1,200 stored";
    for (width, text) in [
        (41, line),
        (40, "tier redis: up, hits 75.0 %…"),
        (27, "tier redis: up, hits…"),
        (15, "tier redis…"),
        (16, "tier redis: up…"),
        (3, "…"),
    ] {
        assert_eq!(panels::cut(line, width), text, "{width}");
    }
}

#[test]
fn every_size_is_drawn_and_tiny_ones_say_so() {
    let (mut state, now) = serving();
    for round in 0..3 {
        for width in (1..=9).chain((38..=130).step_by(6)).chain([40, 75, 76, 77]) {
            for height in (1..=28).chain([40, 60]) {
                let lines = drawn(&state, (width, height), Styles::None, now);
                let all = lines.join("\n");
                if width < view::WIDTH_MIN || height < view::HEIGHT_MIN {
                    let begin = &"too small:"[..10.min(usize::from(width))];
                    assert!(lines[0].starts_with(begin.trim_end()), "{all}");
                } else if !state.shows_help {
                    assert!(all.contains("used 10,000") && all.contains("q quit"), "{width}x{height}\n{all}");
                }
            }
        }
        match round {
            0 => state.shows_help = true,
            _ => state.update(Input::Lost("refused".to_owned()), now).map_or((), |_| panic!()),
        }
        if round == 0 {
            let lines = drawn(&state, (80, 24), Styles::None, now).join("\n");
            assert!(lines.contains("Help") && lines.contains("+  cached"), "{lines}");
            state.update(Input::Key(Key::Escape), now);
            assert!(!state.shows_help);
        }
    }
}

#[test]
fn a_node_that_goes_away_leaves_its_last_figures() {
    let (mut state, heard) = serving();
    let later = |seconds: u64| heard + Duration::from_secs(seconds);
    assert_eq!(state.link(later(1)), Link::Live);
    assert_eq!(state.link(later(7)), Link::Silent(Duration::from_secs(7)));
    let lines = drawn(&state, (80, 24), Styles::None, later(7)).join("\n");
    assert!(lines.contains("SILENT") && lines.contains("nothing came for 7 s"), "{lines}");
    state.update(Input::Lost("connection refused\u{1b}[2J".to_owned()), later(8));
    state.update(Input::Lost("connection refused\u{1b}[2J".to_owned()), later(9));
    let lines = drawn(&state, (80, 24), Styles::None, later(70)).join("\n");
    assert!(lines.contains("NOT REACHABLE"), "{lines}");
    assert!(
        lines.contains("figures of 1 min 10 s ago; connecting again: connection refused\\u{1b}"),
        "{lines}"
    );
    assert!(lines.contains("used 10,000 of 20,000"), "{lines}");
    // The pool cannot be compacted meanwhile.
    assert_eq!(state.update(Input::Key(Key::Compact), later(70)), None);
    assert!(state.message().unwrap().contains("not reachable"));
    // It is back.
    state.update(Input::Notice(summary(31)), later(71));
    assert_eq!(state.link(later(71)), Link::Live);
    // Another process under the same address: rates do not mix the two.
    state.update(Input::Notice(summary(0)), later(72));
    assert_eq!((state.figures().history.len(), state.figures().migrations.len()), (1, 0));
    assert!(state.figures().rate(|stats| Some(stats.allocated_blocks)).is_none());
}

#[test]
fn nothing_heard_yet_is_no_loss_of_figures() {
    let (mut state, now) = (State::new("http://127.0.0.1:1"), Instant::now());
    let lines = drawn(&state, (80, 24), Styles::None, now).join("\n");
    assert!(lines.contains("connecting") && lines.contains("no figures yet"), "{lines}");
    state.update(Input::Lost("refused".to_owned()), now);
    let lines = drawn(&state, (80, 24), Styles::None, now).join("\n");
    assert!(lines.contains("connecting again for 0 s: refused") && !lines.contains("figures of"), "{lines}");
}

#[test]
fn a_pause_keeps_the_figures_and_events_are_not_lost() {
    let (mut state, now) = serving();
    state.update(Input::Key(Key::Pause), now);
    state.update(Input::Notice(summary(40)), now);
    state.update(Input::Notice(notice("map_changes", json!({ "changes": [[0, "ee"]] }))), now);
    assert_eq!(state.figures().last().unwrap().uptime_s, 29);
    let lines = drawn(&state, (80, 24), Styles::None, now + Duration::from_secs(3));
    assert!(lines[0].ends_with("PAUSED 3 s"), "{lines:?}");
    state.update(Input::Key(Key::Pause), now);
    assert_eq!(state.figures().last().unwrap().uptime_s, 40);
    assert!(state.figures().map.as_ref().unwrap().cells.starts_with("ee001111"), "changes meanwhile count");
}

#[test]
fn a_compaction_is_ordered_once_and_its_outcome_is_told() {
    let (mut state, now) = serving();
    assert_eq!(state.update(Input::Key(Key::Compact), now), Some(Effect::Compact));
    assert_eq!(state.message(), Some("compacting"));
    assert_eq!(state.update(Input::Key(Key::Compact), now), None, "one at a time");
    state.update(Input::Compacted(Err("409: it is ending".to_owned())), now);
    assert_eq!(state.message(), Some("not compacted: 409: it is ending"));
    assert_eq!(state.update(Input::Key(Key::Compact), now), Some(Effect::Compact));
    state.update(Input::Tick, now + Duration::from_secs(60));
    assert_eq!(state.message(), Some("compacting"), "for as long as it takes");
}

#[test]
fn owners_are_sorted_and_scrolled() {
    let (mut state, now) = serving();
    let mut names = Vec::new();
    for _ in 0..5 {
        names.push(state.order.name());
        state.update(Input::Key(Key::Sort), now);
    }
    assert_eq!(names, ["blocks", "age", "tokens", "shared blocks", "sequence"]);
    assert_eq!(state.order, OwnerOrder::Blocks);
    let report = owners(50);
    let ages: Vec<_> =
        OwnerOrder::Age.sorted(&report.owners).iter().map(|owner| owner.held_s.unwrap()).collect();
    assert!(ages.is_sorted_by(|a, b| a >= b), "{ages:?}");
    let ids: Vec<_> =
        OwnerOrder::Sequence.sorted(&report.owners).iter().map(|owner| owner.sequence).collect();
    assert!(ids.is_sorted());
    for _ in 0..100 {
        state.update(Input::Key(Key::PageDown), now);
    }
    assert_eq!(state.scrolled, 49);
    let (_, lines) = panels::owners(&state, 11, 65);
    assert_eq!(lines.len(), 11, "the last page is full");
    assert!(lines[10].contains(" 951 "), "{lines:?}");
    state.update(Input::Key(Key::Up), now);
    assert_eq!(state.scrolled, 48);
    // Fewer owners than before.
    state.update(Input::Owners(Ok(owners(2))), now);
    assert_eq!(panels::owners(&state, 11, 65).1.len(), 3);
    state.update(Input::Owners(Err("503: busy".to_owned())), now);
    assert_eq!(panels::owners(&state, 11, 65).1, ["no answer: 503: busy"]);
    assert_eq!(state.update(Input::Key(Key::Quit), now), Some(Effect::Quit));
}

#[test]
fn migrations_are_replaced_by_their_later_states() {
    let (mut state, now) = serving();
    let list = json!({ "migrations": [migration("c", "preparing"), migration("b", "committed")] });
    state.update(Input::Notice(notice("migrations", list)), now);
    let ids: Vec<_> = state.figures().migrations.iter().map(|record| record.id.as_str()).collect();
    assert_eq!(ids, ["c", "b", "a"]);
    let lines = panels::migrations(state.figures());
    assert!(lines[0].starts_with("preparing to gpu-node-2 migrate of 7, 40 blocks, 10.00 KiB"), "{lines:?}");
}

#[test]
fn a_character_shows_the_most_common_class_of_its_cells() {
    let Notice::Map(map) = map("001reeeeeruuuuuz") else { panic!() };
    let drawn = cells::draw(&map, 2, 2);
    assert_eq!((drawn.rows, drawn.group), (vec!["#+".to_owned(), "@@".to_owned()], 32));
    let drawn = cells::draw(&map, 16, 3);
    assert_eq!((drawn.rows, drawn.group), (vec!["###.+++++.@@@@@?".to_owned()], 8));
    assert_eq!(drawn.counts, [3, 5, 0, 5, 2, 0, 0, 0]);
    // Two letters of a cell, and several cells of a character.
    let map = serde_json::from_value(json!({ "frames": 32, "group": 8, "order": 4, "cells": "0ceer000" }));
    let map = map.unwrap();
    assert_eq!(cells::draw(&map, 4, 1).rows, ["#+##"], "half is enough");
    assert_eq!(cells::draw(&map, 2, 1).rows, ["+#"]);
    assert_eq!(cells::draw(&map, 1, 1).rows, ["#"]);
    let Notice::Map(map) = super::tests::map("00reea") else { panic!() };
    assert_eq!(cells::draw(&map, 1, 1).rows, ["%"]);
    let symbols: std::collections::HashSet<_> = CLASSES.iter().map(|class| class.symbol).collect();
    assert_eq!(symbols.len(), CLASSES.len(), "each class has its own");
}
