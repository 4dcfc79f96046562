//! The program on a terminal, and interrupted.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::Value;

/// The longest time of any step.
const PATIENCE: Duration = Duration::from_secs(60);

fn kvpool(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvpool"));
    command.args(arguments).env_remove("NO_COLOR").env("TERM", "xterm-256color");
    command
}

/// Runs a command on a terminal and returns its output.
fn on_a_terminal(command: &mut Command) -> String {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
    let terminal = || OpenOptions::new().read(true).write(true).open(&name).unwrap();
    let mut child = command.stdin(terminal()).stdout(terminal()).stderr(terminal()).spawn().unwrap();
    // The command holds the terminal too; the reader would wait until it is dropped.
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut written = Vec::new();
    // Reading ends in an error when the last writer is gone.
    let _ = File::from(master).read_to_end(&mut written);
    child.wait().unwrap();
    String::from_utf8(written).unwrap()
}

#[test]
fn no_color_means_no_escape_sequences() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.jsonl");
    let line = "{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [1]}\n";
    fs::write(&trace, line.repeat(2)).unwrap();
    for arguments in [
        &["replay", "--requests", "100"][..],
        &["policy", trace.to_str().unwrap()],
        &["info"],
        &["replay", "--help"],
        &["replay", "--blocks", "x"],
    ] {
        let plain = on_a_terminal(kvpool(arguments).env("NO_COLOR", "1"));
        assert!(!plain.is_empty() && !plain.contains('\u{1b}'), "{arguments:?} writes {plain:?}");
        let styled = on_a_terminal(&mut kvpool(arguments));
        assert_eq!(styled.contains('\u{1b}'), arguments != ["info"], "{arguments:?} writes {styled:?}");
    }
    // Also the bar, which is on the standard error.
    let unset = on_a_terminal(kvpool(&["replay", "--requests", "50"]).env("NO_COLOR", ""));
    assert!(unset.contains('\u{1b}'), "an empty value counts as not set");
}

/// Returns the columns of the longest line, without escape sequences.
fn columns(text: &str) -> usize {
    let is_end = |char: char| char.is_ascii_alphabetic();
    let mut plain = String::new();
    for (at, part) in text.split('\u{1b}').enumerate() {
        plain += if at == 0 { part } else { part.split_once(is_end).map_or("", |(_, rest)| rest) };
    }
    // The bar, which is removed, ends with a carriage return.
    let lines = plain.lines().map(|line| line.trim_end_matches('\r').rsplit('\r').next().unwrap_or_default());
    lines.map(|line| line.chars().count()).max().unwrap_or(0)
}

#[test]
fn lines_fit_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let (trace, map) = (folder.path().join("trace.jsonl"), folder.path().join("map.svg"));
    let line = "{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [1]}\n";
    fs::write(&trace, line.repeat(20)).unwrap();
    let (trace, map) = (trace.to_str().unwrap(), map.to_str().unwrap());
    for arguments in [
        &["replay", "--requests", "100", "--policy", "lru", "--resize-at", "50%:40000"][..],
        &["policy", trace],
        &["info"],
        #[cfg(feature = "node")]
        &["topology"],
        &["map", "--requests", "60", "--output", map],
    ] {
        for width in [120, 80, 60, 40] {
            let text = on_a_terminal(kvpool(arguments).env("COLUMNS", width.to_string()));
            // The path of the map is one word.
            let widest = columns(&text.replace(folder.path().to_str().unwrap(), ""));
            assert!(widest <= width, "{arguments:?} at {width}: {widest}\n{text}");
        }
        let piped = kvpool(arguments).env_remove("COLUMNS").stderr(Stdio::null()).output().unwrap();
        let text = String::from_utf8(piped.stdout).unwrap();
        assert!(arguments[0] != "replay" || columns(&text) > 80, "a pipe has no width: {text}");
    }
    // The width of the terminal itself, in a session without another one.
    let script = format!("stty cols 50 && exec {} info", env!("CARGO_BIN_EXE_kvpool"));
    let mut command = Command::new("setsid");
    let text = on_a_terminal(command.args(["-w", "sh", "-c", &script]).env_remove("COLUMNS"));
    assert!(text.contains("device: host") && columns(&text) <= 50, "{text}");
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// A field of the process's status.
fn status(child: &Child, field: &str) -> String {
    let all = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    all.lines().find_map(|line| line.strip_prefix(field)).unwrap_or_default().trim().to_owned()
}

fn interrupt(child: &Child) {
    kill_process(Pid::from_child(child), Signal::INT).unwrap();
}

fn wait_until_it_catches_interrupts(child: &Child) {
    wait_until("no interrupt is caught", || {
        let caught = u64::from_str_radix(&status(child, "SigCgt:"), 16).unwrap_or(0);
        caught >> (Signal::INT.as_raw() - 1) & 1 == 1
    });
}

#[test]
fn an_interrupted_replay_prints_its_report() {
    for (options, is_json) in [(&["--json", "--policy", "lru"][..], true), (&["--resize-at", "50%:1"], false)]
    {
        let arguments = [&["replay", "--requests", "300000"][..], options].concat();
        let child = kvpool(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_until_it_catches_interrupts(&child);
        thread::sleep(Duration::from_millis(300));
        interrupt(&child);
        let output = child.wait_with_output().unwrap();
        let (text, said) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(130), "{text}{said}");
        if is_json {
            let report: Value = serde_json::from_str(&text).expect("one JSON object and nothing else");
            let completed = report["completed"].as_u64().unwrap();
            assert!(completed < 300_000 && report["interrupted"] == true, "{report}");
            // Nothing was lost, and every block was freed.
            assert_eq!((&report["sound"], &report["audit"]), (&Value::Bool(completed > 0), &"ok".into()));
            assert_eq!(
                (&report["blocks_allocated"], &report["blocks_leaked"]),
                (&report["blocks_freed"], &0.into())
            );
        } else {
            assert!(text.contains("INTERRUPTED after ") && text.contains(" of 300,000 requests"), "{text}");
        }
    }
}

/// The first interrupt has no effect once the report is being written.
#[test]
fn a_second_interrupt_ends_the_program() {
    let steps: Vec<String> = (1..=1000).map(|step| format!("{}%:20000", f64::from(step) / 20.0)).collect();
    let schedule = steps.join(",");
    let arguments = ["replay", "--requests", "50", "--blocks", "20000", "--json", "--resize-at", &schedule];
    let mut child = kvpool(&arguments).stdout(Stdio::piped()).spawn().unwrap();
    // The report exceeds the buffer of a pipe: after its first byte, the program waits for a
    // reader.
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let mut interrupts = 0;
    wait_until("it continues after the second interrupt", || {
        if child.try_wait().unwrap().is_none() {
            interrupt(&child);
            interrupts += 1;
        }
        child.try_wait().unwrap().is_some()
    });
    assert!(interrupts >= 2, "{interrupts}");
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn a_map_that_is_stopped_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pool.svg");
    let arguments = ["map", "--requests", "300000", "--output", path.to_str().unwrap()];
    let mut child = kvpool(&arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until("it does not begin", || status(&child, "Threads:").parse::<u32>().is_ok_and(|n| n > 2));
    // Not an interrupt: background jobs of a shell ignore it, and a map does not catch it.
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(Signal::TERM.as_raw()));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
