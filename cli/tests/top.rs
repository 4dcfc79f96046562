//! `kvpool top` in a terminal emulator: tmux.

use super::common;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use common::live::{Node, program, run, said, wait_until};
use rustix::process::{Pid, Signal, kill_process};

/// A terminal, whose shell runs one command and then waits.
struct Terminal {
    socket: String,
    folder: tempfile::TempDir,
}

impl Terminal {
    /// Starts a command on a terminal of this size; `None`, with a note, where there is no tmux.
    fn start((width, height): (u16, u16), variables: &str, command: &str) -> Option<Self> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        if Command::new("tmux").arg("-V").output().is_err() {
            eprintln!("SKIPPED: no tmux");
            return None;
        }
        let socket = format!("kvpool-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        let this = Self { socket, folder: tempfile::tempdir().unwrap() };
        let script = this.path("script");
        // The modes of the terminal must be the same afterwards. The process has the id of its shell.
        let text = format!(
            "cd {}\necho the usual screen\nstty -g >before\n\
             env {variables} sh -c 'echo $$ >pid; exec {command}'\n\
             echo exit code $?\nstty -g >after\nexec sleep 600\n",
            this.folder.path().display()
        );
        fs::write(&script, text).unwrap();
        let (width, height) = (width.to_string(), height.to_string());
        let script = format!("sh {}", script.display());
        this.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", &width, "-y", &height, &script]);
        Some(this)
    }

    /// Starts `kvpool top` with these arguments.
    fn top(size: (u16, u16), variables: &str, arguments: &str) -> Option<Self> {
        Self::start(size, variables, &format!("{} top {arguments}", env!("CARGO_BIN_EXE_kvpool")))
    }

    fn tmux(&self, arguments: &[&str]) -> String {
        let mut command = Command::new("tmux");
        command.args(["-u", "-L", &self.socket]).args(arguments).env_remove("TMUX").env("LC_ALL", "C.UTF-8");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn screen(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }

    fn send(&self, key: &str) {
        self.tmux(&["send-keys", key]);
    }

    #[track_caller]
    fn wait_for(&self, text: &str) -> String {
        let mut screen = String::new();
        let mut tries = 0;
        wait_until(text, || {
            screen = self.screen();
            tries += 1;
            assert!(tries < 600, "no {text:?} on\n{screen}");
            screen.contains(text)
        });
        screen
    }

    fn signal(&self, signal: Signal) {
        let pid = fs::read_to_string(self.path("pid")).unwrap().trim().parse().unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }

    /// Waits for the end with this exit code, and checks that the terminal is as it was before.
    #[track_caller]
    fn ends_with(&self, code: u8) -> String {
        let screen = self.wait_for(&format!("exit code {code}"));
        assert!(screen.contains("the usual screen"), "{screen}");
        assert!(!screen.contains("-- Memory map"), "nothing is left behind: {screen}");
        wait_until("the modes are noted", || {
            fs::read_to_string(self.path("after")).is_ok_and(|text| text.ends_with('\n'))
        });
        let modes = |name| fs::read_to_string(self.path(name)).unwrap();
        assert_eq!(modes("before"), modes("after"));
        let flags = self.tmux(&["display-message", "-p", "#{cursor_flag} #{alternate_on}"]);
        assert_eq!(flags.trim(), "1 0", "the cursor is shown, on the usual screen");
        screen
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = Command::new("tmux").args(["-L", &self.socket, "kill-server"]).env_remove("TMUX").output();
    }
}

#[test]
fn keys_work_in_terminals_of_two_sizes() {
    let node = Node::start(
        "serve --name n1 --size 4000 --load conversations --load-rest 20ms --peers away=127.0.0.1:1",
    );
    for size @ (width, height) in [(80, 24), (160, 50)] {
        let Some(terminal) = Terminal::top(size, "", &node.url) else { return };
        terminal.wait_for("Owners by blocks");
        terminal.wait_for("# owned");
        let screen = terminal.wait_for("peer away: down");
        assert!(screen.starts_with("n1  http://127.0.0.1:") && screen.contains("live"), "{screen}");
        for part in ["used ", "-- Memory map: 4,001 frames", "allocation p50", "-- Migrations", "sequence "] {
            assert!(screen.contains(part), "no {part:?} on\n{screen}");
        }
        let lines: Vec<_> = screen.lines().collect();
        assert_eq!(lines.len(), height as usize);
        assert!(lines.iter().all(|line| line.chars().count() <= width as usize), "{screen}");
        assert!(lines[height as usize - 1].starts_with("q quit"), "{screen}");
        terminal.send("s");
        terminal.wait_for("Owners by age");
        terminal.send("d");
        terminal.wait_for(" ms; fragmentation ");
        terminal.send("p");
        let first = terminal.wait_for("PAUSED ");
        let seconds =
            |screen: &str| -> Option<u64> { screen.split("PAUSED ").nth(1)?.split(' ').next()?.parse().ok() };
        let mut second = String::new();
        wait_until("the pause lasts", || {
            second = terminal.screen();
            seconds(&second) > seconds(&first).map(|first| first + 1)
        });
        let used = |screen: &str| screen.lines().nth(2).unwrap().to_owned();
        assert_eq!(used(&first), used(&second));
        terminal.send("p");
        terminal.wait_for("  live");
        terminal.send("?");
        terminal.wait_for("Help");
        terminal.send("Escape");
        wait_until("the help is closed", || !terminal.screen().contains("Help"));
        if width > 100 {
            terminal.wait_for("p99, 10 ns to 10 ms");
        }
        // The size changes meanwhile.
        terminal.tmux(&["resize-window", "-x", "30", "-y", "6"]);
        terminal.wait_for("too small: 30x6");
        terminal.tmux(&["resize-window", "-x", "100", "-y", "30"]);
        terminal.wait_for("-- Memory map");
        terminal.send("q");
        terminal.ends_with(0);
    }
    assert_eq!(node.end(Signal::TERM).0, Some(0));
}

#[test]
fn a_node_that_goes_away_and_comes_back() {
    // A port that the second process can have too.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |size: &str| Node::start(&format!("serve --name n1 --size {size} --admin 127.0.0.1:{port}"));
    let node = start("3000");
    let Some(terminal) = Terminal::top((80, 24), "", &node.url) else { return };
    terminal.wait_for("used 0 of 3,000");
    terminal.wait_for("live");
    node.signal(Signal::KILL);
    drop(node);
    let screen = terminal.wait_for("NOT REACHABLE");
    assert!(screen.contains("connecting again:"), "{screen}");
    assert!(screen.contains("figures of") && screen.contains("used 0 of 3,000"), "{screen}");
    let node = start("5000");
    let screen = terminal.wait_for("used 0 of 5,000");
    assert!(screen.contains("live") && !screen.contains("NOT REACHABLE"), "{screen}");
    terminal.send("C-c");
    terminal.ends_with(0);
    node.end(Signal::TERM);
}

#[test]
fn signals_and_panics_restore_the_terminal() {
    let node = Node::start("serve --name n1 --size 1000");
    for signal in [Signal::TERM, Signal::HUP, Signal::INT] {
        let Some(terminal) = Terminal::top((80, 24), "", &node.url) else { return };
        terminal.wait_for("used 0 of 1,000");
        terminal.signal(signal);
        terminal.ends_with(128 + signal.as_raw() as u8);
    }
    let program = std::env::current_exe().unwrap();
    let command = format!("{} --ignored --exact top::panics_on_a_terminal --nocapture", program.display());
    let Some(terminal) = Terminal::start((80, 24), "RUST_BACKTRACE=0", &command) else { return };
    let screen = terminal.ends_with(101);
    assert!(screen.contains("a panic while the terminal is taken"), "{screen}");
    node.end(Signal::TERM);
}

/// Not a test by itself: the one above runs it on a terminal.
#[test]
#[ignore = "another test runs it on a terminal"]
fn panics_on_a_terminal() {
    let _screen = kvpool_cli::top::Screen::open().unwrap();
    panic!("a panic while the terminal is taken");
}

#[test]
fn colours_are_left_out_on_request() {
    let node = Node::start("serve --name n1 --size 1000");
    for (variables, is_styled) in [("NO_COLOR=1", false), ("NO_COLOR=", true)] {
        let Some(terminal) = Terminal::top((80, 24), variables, &node.url) else { return };
        terminal.wait_for("-- Memory map: ");
        let escapes = terminal.tmux(&["capture-pane", "-p", "-e"]);
        assert_eq!(escapes.contains('\u{1b}'), is_styled, "{escapes:?}");
        terminal.send("q");
        terminal.ends_with(0);
    }
    node.end(Signal::TERM);
}

#[test]
fn what_cannot_be_shown_is_an_error_on_the_usual_screen() {
    let output = run("top http://127.0.0.1:1");
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("needs a terminal; `kvpool events`"), "{}", said(&output));
    let folder = tempfile::tempdir().unwrap();
    let token = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let (right, wrong) = (token("right", "0123456789abcdef0123"), token("wrong", "another-token-of-a-node"));
    let node = Node::start_with(program().args(["serve", "--name", "n1", "--token-file"]).arg(&right));
    let with = |path: &Path| format!("--token-file {} {}", path.display(), node.url);
    let Some(terminal) = Terminal::top((80, 24), "", "http://127.0.0.1:1") else { return };
    let screen = terminal.ends_with(1);
    assert!(screen.contains("127.0.0.1:1"), "{screen}");
    let screen = Terminal::top((80, 24), "", &with(&wrong)).unwrap().ends_with(1);
    assert!(screen.to_lowercase().contains("token"), "{screen}");
    let terminal = Terminal::top((80, 24), "", &with(&right)).unwrap();
    terminal.wait_for("live");
    terminal.send("q");
    terminal.ends_with(0);
    node.end(Signal::TERM);
}
