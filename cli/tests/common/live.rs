//! Nodes in processes of their own.

use std::fs;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::parse;

/// The longest time of any step.
const PATIENCE: Duration = Duration::from_secs(120);

/// Runs the program without settings of the environment.
pub fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvpool"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("KVPOOL_")) {
        command.env_remove(name);
    }
    // Tests run at the same time: each node takes free ports, unless a flag says otherwise.
    command.env("KVPOOL_ADMIN", "127.0.0.1:0").env("KVPOOL_LISTEN", "127.0.0.1:0");
    // On a busy machine, migrations may take longer than the default.
    command.env("KVPOOL_DRAIN", "60s");
    command
}

pub fn run(arguments: &str) -> Output {
    program().args(arguments.split_whitespace()).output().unwrap()
}

pub fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A node on a free port.
pub struct Node {
    child: Child,
    /// What it has written to its standard error, and the thread that reads it.
    errors: Arc<Mutex<String>>,
    reading: Option<JoinHandle<()>>,
    lines: Mutex<Lines<BufReader<ChildStdout>>>,
    pub greeting: String,
    pub url: String,
    /// Address for peers.
    pub listen: String,
}

impl Node {
    pub fn start(arguments: &str) -> Self {
        Self::start_with(program().args(arguments.split_whitespace()))
    }

    pub fn start_with(command: &mut Command) -> Self {
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let errors = Arc::new(Mutex::new(String::new()));
        let (mut stderr, read) = (BufReader::new(child.stderr.take().unwrap()), errors.clone());
        let reading = thread::spawn(move || {
            let mut line = String::new();
            while stderr.read_line(&mut line).unwrap() > 0 {
                read.lock().unwrap().push_str(&line);
                line.clear();
            }
        });
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let greeting = lines.next().expect("the node starts").unwrap();
        let mut line = |name: &str| lines.next().unwrap().unwrap().strip_prefix(name).unwrap().to_owned();
        let (url, listen) = (line("admin: "), line("listen: "));
        Self { child, errors, reading: Some(reading), lines: Mutex::new(lines), greeting, url, listen }
    }

    /// Reads the next line of the standard output, which begins with a name; returns the rest.
    pub fn line(&self, name: &str) -> String {
        let line = self.lines.lock().unwrap().next().unwrap().unwrap();
        line.strip_prefix(name).unwrap_or_else(|| panic!("{line}")).to_owned()
    }

    /// Returns what the node has written to its standard error.
    pub fn errors(&self) -> String {
        self.errors.lock().unwrap().clone()
    }

    /// Tells the node to read its settings again, and waits until it says something with this part
    /// about it.
    pub fn reload(&self, part: &str) {
        let before = self.errors().len();
        self.signal(Signal::HUP);
        let mut told = String::new();
        wait_until(&format!("the node says {part:?}"), || {
            told = self.errors().split_off(before);
            told.contains(part)
        });
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Runs a command on this node.
    pub fn run(&self, command: &str) -> Output {
        run(&format!("{command} {}", self.url))
    }

    pub fn json(&self, command: &str) -> Value {
        parse(&self.run(&format!("{command} --json")))
    }

    /// Compacts the pool. Beside traffic this can leave it worse, which the exit code tells.
    pub fn defragment(&self) {
        let output = self.run("defrag --json");
        let outcome: Value = serde_json::from_slice(&output.stdout).expect("JSON and nothing else");
        let is_worse = outcome["is_worse"].as_bool().expect("it says so");
        assert_eq!(output.status.code(), Some(is_worse.into()), "{outcome}");
    }

    /// Runs a command that must succeed, and returns its text.
    pub fn text(&self, command: &str) -> String {
        let output = self.run(command);
        assert_eq!(output.status.code(), Some(0), "{command}: {}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns a counter of the statistics beyond the pool.
    pub fn counter(&self, of: &str, name: &str) -> u64 {
        self.json("stats")["extra"][of][name].as_u64().unwrap_or_else(|| panic!("{of} has no {name}"))
    }

    /// Returns the migrations that the node knows. `flags` has its token, if it needs one.
    pub fn records(&self, flags: &str) -> Vec<Value> {
        self.json(&format!("migration-status {flags}"))["migrations"].as_array().unwrap().clone()
    }

    /// Sends a request such as `GET /metrics`, and returns the head and the body of the answer.
    pub fn http(&self, request: &str, headers: &str, body: &str) -> (String, String) {
        let authority = self.url.strip_prefix("http://").unwrap();
        let mut stream = TcpStream::connect(authority).unwrap();
        let length = body.len();
        write!(
            stream,
            "{request} HTTP/1.1\r\nHost: {authority}\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.to_owned(), body.to_owned())
    }

    /// Checks that the audit agrees and that no byte was wrong, ends the node, and returns its
    /// errors.
    pub fn end_well(self, flags: &str) -> String {
        assert_eq!(self.json(&format!("audit {flags}"))["sound"], true);
        let load = &self.json(&format!("stats {flags}"))["extra"]["load"];
        if !load.is_null() {
            assert_eq!((&load["blocks_corrupt"], &load["findings"]), (&0.into(), &0.into()), "{load}");
        }
        let (code, errors) = self.end(Signal::TERM);
        assert_eq!(code, Some(0), "{errors}");
        errors
    }

    /// Ends the node by a signal, and returns its exit code and errors.
    pub fn end(mut self, signal: Signal) -> (Option<i32>, String) {
        self.signal(signal);
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < PATIENCE, "it ends");
            thread::sleep(Duration::from_millis(5));
        };
        self.reading.take().unwrap().join().unwrap();
        (status.code(), self.errors())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes a file that only this user can read.
pub fn secret(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}

/// Writes a token, and returns the flag that names its file.
pub fn token(folder: &Path, text: &str) -> String {
    let path = folder.join(text);
    secret(&path, text);
    format!("--token-file {}", path.display())
}

/// Makes a named pipe.
pub fn pipe(path: &Path) {
    rustix::fs::mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        thread::sleep(Duration::from_millis(50));
    }
}
