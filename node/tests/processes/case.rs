//! One run with one fault, and what must be true afterwards.
//!
//! # What may be lost
//!
//! A sequence that migrates is lost only if the process that owned it was killed:
//!
//! | killed | lost, if and only if |
//! |---|---|
//! | the source | the target has not committed |
//! | the target | the source has heard of the commit; before, it takes its copy back |
//!
//! In every other case exactly one process has it. Of a copy, the source keeps its own unless it is
//! killed. Cached blocks are lost only if the node is killed that has them.

use std::fmt::Write;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use kvpool_node::protocol::MigrationId;
use tokio::runtime::Handle;

use crate::child::TRANSFER_DEADLINE;
use crate::content;
use crate::fault::{Action, Fault, Kind, Step, When};
use crate::lines::{Event, What};
use crate::process::{PATIENCE, Process, wait_until};
use crate::relay::Relay;

/// The sequence that moves.
const ID: u64 = 7;

/// Time in which a receiver handles what it got.
const HANDLING: Duration = Duration::from_millis(15);

/// Time for which a process stops, and links stay cut.
const LONG: Duration = TRANSFER_DEADLINE.saturating_mul(3).checked_div(2).expect("a half");

/// Two nodes, and the relay between them.
pub struct Case {
    fault: Fault,
    /// Of source and target. No other case has them: a host has one process of a name.
    names: [String; 2],
    relay: Relay,
    hits: Receiver<()>,
    source: Process,
    target: Process,
    /// Processes that were killed.
    dead: Vec<Process>,
}

impl Case {
    /// Starts both nodes and links them.
    pub fn start(fault: Fault, runtime: &Handle) -> Self {
        let (sender, hits) = channel();
        let relay = Relay::start(runtime, fault.step, fault.when, sender);
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Relaxed);
        let names = ["a", "b"].map(|side| format!("{side}-{}-{number}", std::process::id()));
        let target = start_target(&relay, &names);
        let source = start_source(&relay, &names);
        let mut case = Self { fault, names, relay, hits, source, target, dead: Vec::new() };
        case.wait_until_linked();
        case
    }

    /// Runs the case, and returns how it ended. Panics with what is not true.
    pub fn run(&mut self) -> String {
        self.source.ask(&format!("admit {ID}"));
        if self.fault.kind == Kind::Offload {
            self.source.ask(&format!("close {ID}"));
        }
        self.provoke();
        self.act();
        self.wait_until_linked();
        self.wait_until_settled();
        let end = match self.fault.kind {
            Kind::Migrate => self.check_owner(),
            Kind::Replicate => self.check_copies(),
            Kind::Offload => self.check_cached(),
        };
        let doubt = if self.source.state()["in_doubt"] > 0 { ", after a doubt" } else { "" };
        self.check_never_two();
        self.move_once_more();
        self.check_idle();
        format!("{end}{doubt}")
    }

    /// Returns the messages that passed, and the events of all processes.
    pub fn story(&self) -> String {
        let mut text = String::new();
        for seen in self.relay.seen() {
            let id = seen.id.map_or(String::new(), |id| id.to_string()[..6].to_owned());
            let _ = writeln!(text, "  {:>6} ms  {:16}  {id:6}  {}", seen.at.as_millis(), seen.way, seen.name);
        }
        for process in [&self.source, &self.target].into_iter().chain(&self.dead) {
            for Event { at, what, id, why } in process.events() {
                let name = if process.died().is_some() { "dead" } else { "alive" };
                let _ =
                    writeln!(text, "  {} ({name}), {} ms: {what:?} {id} {why}", process.name, at / 1_000_000);
            }
        }
        text
    }

    /// Begins the migration, again and again if it fails before the step of the fault is reached: a
    /// machine under load may cut a link.
    fn provoke(&mut self) {
        let verb = match self.fault.kind {
            Kind::Migrate => "migrate",
            Kind::Replicate => "replicate",
            Kind::Offload => "offload",
        };
        let command = format!("{verb} {ID} {}", self.names[1]);
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            let before = self.source.events().len();
            assert_eq!(self.source.ask(&command), "begun");
            let ends = |event: &Event| event.what != What::Leaves;
            let mut end = None;
            while end.is_none() && began.elapsed() < PATIENCE {
                end = self.source.events()[before..].iter().find(|event| ends(event)).cloned();
                // Behind its end, the last message may still be on its way.
                let wait = if end.is_some() { 300 } else { 2 };
                if self.hits.recv_timeout(Duration::from_millis(wait)).is_ok() {
                    self.relay.note(&self.fault.to_string());
                    return;
                }
            }
            let is_done = end.is_some_and(|end| matches!(end.what, What::Moved | What::Copied));
            assert!(!is_done, "it succeeded, and {:?} never passed", self.fault.step);
        }
        panic!("{:?} never passed", self.fault.step);
    }

    /// Does what the fault says. The relay passes nothing on until it is told to.
    fn act(&mut self) {
        if self.fault.when == When::After {
            std::thread::sleep(HANDLING);
        }
        let restart_after = if self.fault.when == When::After { LONG } else { Duration::ZERO };
        match self.fault.action {
            Action::StopSource => self.stop(true, false),
            Action::StopTarget => self.stop(false, true),
            Action::StopBoth => self.stop(true, true),
            Action::KillSource => {
                self.source.kill();
                self.relay.go_on();
                std::thread::sleep(restart_after);
                if self.fault.when == When::After {
                    self.target_holds_nothing();
                }
                let restarted = start_source(&self.relay, &self.names);
                self.dead.push(std::mem::replace(&mut self.source, restarted));
            }
            Action::KillTarget => {
                self.relay.lead_to(None);
                self.target.kill();
                self.relay.go_on();
                std::thread::sleep(restart_after);
                if self.fault.when == When::After {
                    self.source_waits_for_nothing();
                }
                let restarted = start_target(&self.relay, &self.names);
                self.dead.push(std::mem::replace(&mut self.target, restarted));
            }
            Action::DeclareTarget => {
                self.relay.lead_to(None);
                self.target.kill();
                self.relay.go_on();
                wait_until("the link is lost", || self.source.state()["up"] == 0);
                let doubts = self.source.state()["in_doubt"];
                let ended = self.source.ask(&format!("ended 0 {}", self.names[1]));
                let sequences = if doubts > 0 { format!("Ok([{ID}])") } else { "Ok([])".to_owned() };
                assert_eq!(ended, sequences, "what the declaration ended");
                wait_until("nothing waits for the target", || self.source.state()["requests"] == 0);
                let restarted = start_target(&self.relay, &self.names);
                self.dead.push(std::mem::replace(&mut self.target, restarted));
            }
            Action::Cut => {
                self.relay.cut(true);
                self.relay.go_on();
            }
            Action::CutLong => {
                self.relay.cut(false);
                self.relay.go_on();
                std::thread::sleep(LONG);
                self.target_holds_nothing();
                self.source_waits_for_nothing();
                self.relay.heal();
            }
        }
        self.relay.note("the fault is over");
    }

    /// The source is away for longer than the transfer deadline: the target has freed what it had
    /// reserved, unless it has committed.
    fn target_holds_nothing(&mut self) {
        wait_until("the target's reservation ends", || {
            let state = self.target.state();
            state["received"] > 0 || state["used"] == 0 && state["running"] == 0
        });
    }

    /// The target is away for longer than the transfer deadline: the source has its copy again, or
    /// is in doubt.
    fn source_waits_for_nothing(&mut self) {
        wait_until("the source gives up or is in doubt", || {
            let state = self.source.state();
            state["in_doubt"] > 0 || state["requests"] == 0
        });
    }

    fn stop(&self, source: bool, target: bool) {
        let stopped = [(source, &self.source), (target, &self.target)];
        let stopped = || stopped.iter().filter(|(is_stopped, _)| *is_stopped).map(|(_, process)| process);
        stopped().for_each(|process| process.stop());
        self.relay.go_on();
        std::thread::sleep(LONG);
        stopped().for_each(|process| process.go_on());
    }

    fn wait_until_linked(&mut self) {
        wait_until("both nodes are linked", || {
            self.source.state()["up"] == 1 && self.target.state()["up"] == 1
        });
    }

    /// Waits until no migration is under way, no request is without a result and no block is in
    /// transfer, on both sides.
    fn wait_until_settled(&mut self) {
        let mut last = String::new();
        let began = Instant::now();
        loop {
            let states = [self.source.state(), self.target.state()];
            let busy = ["running", "requests", "in_transfer", "quarantined"];
            let is_busy = |state: &std::collections::HashMap<_, _>| busy.iter().any(|&name| state[name] > 0);
            // What arrived is kept a moment later.
            if !states.iter().any(|state| is_busy(state) || state["open"] != state["kept"]) {
                break;
            }
            assert!(began.elapsed() < PATIENCE, "it never settles: {last}");
            last = format!("{states:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        for process in [&mut self.source, &mut self.target] {
            is_sound(process);
        }
    }

    fn has(process: &mut Process) -> bool {
        match process.ask(&format!("check {ID}")).as_str() {
            "right" => true,
            "absent" => false,
            other => panic!("{}: the sequence is {other}", process.name),
        }
    }

    /// Returns whether this message of the last migration was delivered.
    fn is_delivered(&self, step: Step) -> bool {
        let seen = self.relay.seen();
        let last: Option<MigrationId> =
            seen.iter().rev().find(|seen| seen.name == "Prepare").and_then(|seen| seen.id);
        seen.iter().any(|seen| seen.id == last && seen.name == format!("{step:?}"))
    }

    fn check_owner(&mut self) -> &'static str {
        let owners = [Self::has(&mut self.source), Self::has(&mut self.target)];
        let is_moved = self.source.events().iter().any(|event| event.what == What::Moved);
        let has_committed = self.target.state()["received"] > 0;
        let expected = match self.fault.action {
            Action::KillSource => {
                assert!(self.is_delivered(Step::Commit) || !has_committed, "a commit without `Commit`");
                [false, has_committed]
            }
            Action::KillTarget | Action::DeclareTarget => [!is_moved, false],
            _ => [!is_moved, is_moved],
        };
        assert!(self.is_delivered(Step::Committed) || !is_moved, "it moved without `Committed`");
        assert_eq!(owners, expected, "owners at source and target");
        let is_lost = owners == [false, false];
        let by_target = matches!(self.fault.action, Action::KillTarget | Action::DeclareTarget);
        let is_owner =
            if has_committed || is_moved { by_target } else { self.fault.action == Action::KillSource };
        assert!(!is_lost || is_owner, "it is lost, and its owner was not killed");
        match (owners, self.fault.action) {
            ([true, _], _) => "the source has it",
            ([_, true], _) => "the target has it",
            (_, Action::KillSource) => "lost with the source",
            _ => "lost with the target",
        }
    }

    fn check_copies(&mut self) -> &'static str {
        let has = [Self::has(&mut self.source), Self::has(&mut self.target)];
        assert_eq!(has[0], self.fault.action != Action::KillSource, "the original at the source");
        let is_copied = self.source.events().iter().any(|event| event.what == What::Copied);
        let has_committed = self.target.state()["received"] > 0;
        assert_eq!(has[1], has_committed, "the copy at the target");
        if is_copied && self.fault.action != Action::KillTarget {
            assert!(has_committed, "the source was told of a copy that is not there");
        }
        self.target.ask(&format!("close {ID}"));
        if has[1] { "there is a copy" } else { "there is no copy" }
    }

    fn check_cached(&mut self) -> &'static str {
        let cached = |process: &mut Process| -> usize {
            let answer = process.ask(&format!("cached {ID}"));
            answer.parse().unwrap_or_else(|_| panic!("{}: cached blocks are {answer}", process.name))
        };
        let [here, there] = [cached(&mut self.source), cached(&mut self.target)];
        let (all, action) = (content::full_blocks(ID), self.fault.action);
        let has_committed = self.target.state()["received"] > 0;
        if action == Action::KillTarget {
            let is_moved = self.source.events().iter().any(|event| event.what == What::Copied);
            assert_eq!((here, there), (if is_moved { 0 } else { all }, 0), "cached at source and target");
        } else {
            assert_eq!(there, if has_committed { all } else { 0 }, "cached at the target");
            if action != Action::KillSource {
                assert_eq!(here.max(there), all, "cached at one of them: {here} and {there}");
            }
        }
        match (here > 0, there > 0) {
            (true, false) => "cached at the source",
            (false, true) => "cached at the target",
            (true, true) => "cached at both",
            (false, false) => "cached nowhere",
        }
    }

    /// No process may run the sequence while another one that lives may.
    fn check_never_two(&self) {
        if self.fault.kind != Kind::Migrate {
            return;
        }
        let processes: Vec<_> = [&self.source, &self.target].into_iter().chain(&self.dead).collect();
        let spans: Vec<_> = processes.iter().map(|process| owned(process)).collect();
        for (place, process) in processes.iter().enumerate() {
            for (other, theirs) in processes.iter().zip(&spans).skip(place + 1) {
                for &(from, to) in &spans[place] {
                    let is_both = |span: &&(u64, u64)| span.0 < to && from < span.1;
                    let both = theirs.iter().find(is_both);
                    assert!(
                        both.is_none(),
                        "{} and {} may run it at the same time",
                        process.name,
                        other.name
                    );
                }
            }
        }
    }

    /// Moves the sequence to the other node, or a new one of the same id: neither side remembers the
    /// migration, or that another process has it.
    fn move_once_more(&mut self) {
        let is_there = Self::has(&mut self.target);
        if !is_there && !Self::has(&mut self.source) {
            self.source.ask(&format!("admit {ID}"));
        }
        let (from, to, name) = match is_there {
            true => (&mut self.target, &mut self.source, &self.names[0]),
            false => (&mut self.source, &mut self.target, &self.names[1]),
        };
        wait_until("it can be moved once more", || {
            let before = from.events().len();
            assert_eq!(from.ask(&format!("migrate {ID} {name}")), "begun");
            let ended = || from.events()[before..].iter().find(|event| event.what != What::Leaves).cloned();
            wait_until("the last move ends", || ended().is_some());
            ended().is_some_and(|event| event.what == What::Moved)
        });
        wait_until("it is there", || to.state()["kept"] == 1);
        assert!(Self::has(to), "it is not where it was moved to");
        to.ask(&format!("close {ID}"));
    }

    /// Neither node has anything left, and both are sound.
    fn check_idle(&mut self) {
        for process in [&mut self.source, &mut self.target] {
            let busy = ["running", "requests", "open", "used", "in_transfer", "quarantined", "unavailable"];
            let mut last = String::new();
            wait_until("nothing is left", || {
                let state = process.state();
                last = format!("{state:?}");
                busy.iter().all(|&name| state[name] == 0)
            });
            is_sound(process);
            assert_eq!(process.state()["bad_blocks"], 0, "{}", process.name);
        }
    }
}

/// Audits a pool. An audit needs a pool at rest, and what a migration had reserved when it ended may be
/// freed a moment later.
fn is_sound(process: &mut Process) {
    let mut last = String::new();
    let began = Instant::now();
    while last != "sound" {
        assert!(began.elapsed() < PATIENCE, "{}: {last}", process.name);
        last = process.ask("audit");
    }
}

/// Returns the times from and to which a process could run the sequence.
fn owned(process: &Process) -> Vec<(u64, u64)> {
    let end = process.died().unwrap_or(u64::MAX);
    let mut spans: Vec<(u64, u64)> = Vec::new();
    for event in process.events().iter().filter(|event| event.id == ID) {
        match event.what {
            What::Owns => spans.push((event.at, end)),
            What::Leaves | What::Closed => {
                if let Some(span) = spans.last_mut() {
                    span.1 = event.at;
                }
            }
            _ => {}
        }
    }
    spans
}

fn start_source(relay: &Relay, [name, target]: &[String; 2]) -> Process {
    Process::start("source", &format!("node {name} {target} {}", relay.address))
}

fn start_target(relay: &Relay, [_, name]: &[String; 2]) -> Process {
    let target = Process::start("target", &format!("node {name} - -"));
    relay.lead_to(Some(target.greeting.parse().unwrap()));
    target
}
