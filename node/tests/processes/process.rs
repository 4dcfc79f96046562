//! A child, as its parent has it: commands, events and signals.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::lines::{Event, Line, now, parse};

/// Says that a process is a child, and which.
pub const ROLE: &str = "KVPOOL_PROCESS_ROLE";

/// The longest time of any step.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Events of a child, in the order in which it printed them.
pub type Events = Arc<Mutex<Vec<Event>>>;

/// A child. Killed on drop.
pub struct Process {
    pub name: String,
    /// What it said when it had started.
    pub greeting: String,
    events: Events,
    reader: Option<JoinHandle<()>>,
    child: Child,
    to: ChildStdin,
    answers: Receiver<String>,
    /// When it was known to be dead.
    died: Option<u64>,
}

impl Process {
    /// Starts a child, and waits until it is ready. `role` selects what it does.
    pub fn start(name: &str, role: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (sender, answers) = channel();
        let events = Events::default();
        let kept = events.clone();
        let reader = Some(std::thread::spawn(move || read(from, &sender, &kept)));
        let (name, greeting) = (name.to_owned(), String::new());
        let mut process = Self { name, greeting, events, reader, child, to, answers, died: None };
        process.greeting = process.answer("start");
        process
    }

    fn answer(&self, to: &str) -> String {
        let answer = self.answers.recv_timeout(PATIENCE);
        answer.unwrap_or_else(|error| panic!("{}: no answer to `{to}`: {error}", self.name))
    }

    /// Gives a command, and returns the answer.
    pub fn ask(&mut self, command: &str) -> String {
        if let Err(error) = writeln!(self.to, "{command}") {
            panic!("{}: cannot be told `{command}`: {error}", self.name);
        }
        self.answer(command)
    }

    /// Returns the counts of its state.
    pub fn state(&mut self) -> HashMap<String, usize> {
        self.counts("state")
    }

    /// Gives a command whose answer consists of counts.
    pub fn counts(&mut self, command: &str) -> HashMap<String, usize> {
        let answer = self.ask(command);
        let count = |part: &str| {
            let (name, count) = part.split_once('=').expect("a count");
            (name.to_owned(), count.parse().expect("a count"))
        };
        answer.split(' ').map(count).collect()
    }

    /// Returns a copy of its events so far.
    pub fn events(&self) -> Vec<Event> {
        self.events.lock().unwrap().clone()
    }

    /// Takes its events so far.
    pub fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut self.events.lock().unwrap())
    }

    /// Returns all events of a dead process that were not taken.
    pub fn all_events(mut self) -> Vec<Event> {
        self.kill();
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
        self.take_events()
    }

    /// Stops it, and returns once all of its threads have stopped.
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let mut status = 0;
        // SAFETY: `status` is valid for a write, and the child is our own.
        let stopped = unsafe { libc::waitpid(self.child.id() as i32, &mut status, libc::WUNTRACED) };
        assert!(stopped > 0 && libc::WIFSTOPPED(status), "{} did not stop: {status}", self.name);
    }

    /// Lets it go on.
    pub fn go_on(&self) {
        self.signal(libc::SIGCONT);
    }

    /// Kills it, and returns once it is dead.
    pub fn kill(&mut self) {
        if self.died.is_none() {
            self.child.kill().unwrap();
            self.child.wait().unwrap();
            self.died = Some(now());
        }
    }

    /// Returns when it was known to be dead.
    pub fn died(&self) -> Option<u64> {
        self.died
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a signal to our own child, which was not waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read(from: ChildStdout, answers: &Sender<String>, events: &Events) {
    for line in BufReader::new(from).lines().map_while(Result::ok) {
        match parse(&line) {
            Some(Line::Answer(answer)) => drop(answers.send(answer)),
            Some(Line::Event(event)) => events.lock().unwrap().push(event),
            None => {}
        }
    }
}

/// Waits until something holds, and returns how long it took; fails if it never does.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) -> Duration {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
    began.elapsed()
}
