//! Sections in child processes: each has a time limit, and the failure of one costs only itself.
//!
//! ```text
//! parent   for each section: start a child, wait for its line, or kill it at its limit
//! child    opens the device, measures a fixed job, runs one section; prints its results so far after
//!          each of these, and at the end one line of JSON: its `SectionReport`
//! ```
//!
//! The limit is that of [`Start`]: one until the child has told the time of the job, and then
//! another one, which depends on it.
//!
//! A device error that ends a context ends it for the process that caused it. A section that was
//! killed, crashed, or printed no line is reported as a section that ended early, with the results
//! that it has told so far; the lines of the others have been handed over by then. No child
//! outlives its parent: the system kills it.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use crate::report::{self, SO_FAR, Section, SectionReport};
use crate::start::Start;

/// Prefix of the line with a child's report; other lines of its output are passed on.
pub const LINE: &str = "gpu_check-section ";

/// Names the parent's process to a child.
const PARENT: &str = "KVPOOL_GPU_CHECK_PARENT";

/// Pause between two looks at a child that should exit.
const PAUSE: Duration = Duration::from_millis(5);

/// Time in which a killed child must end.
const REAP: Duration = Duration::from_secs(2);

/// A section to run in a child.
pub struct Job {
    /// Name of the section.
    pub name: String,
    /// Time after which the child is killed on a fast machine.
    pub limit: Duration,
    /// Factor of all limits.
    pub factor: f64,
    /// The program to run, with its arguments.
    pub command: Command,
}

/// Runs the jobs one after another, and calls `done` with each report as soon as it is there.
pub fn run(
    jobs: impl IntoIterator<Item = Job>,
    mut done: impl FnMut(&mut SectionReport),
) -> Vec<SectionReport> {
    jobs.into_iter()
        .map(|job| {
            let mut report = one(job);
            done(&mut report);
            report
        })
        .collect()
}

/// Prints a child's report on its standard output.
pub fn print(report: &SectionReport) {
    println!("{LINE}{}", report::line(report));
}

/// Makes this process, a child, end with its parent.
pub fn end_with_parent() {
    let Some(parent) = std::env::var(PARENT).ok().and_then(|parent| parent.parse::<u32>().ok()) else {
        return;
    };
    #[cfg(target_os = "linux")]
    // SAFETY: sets a property of this process.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
    }
    // The parent may have ended before.
    #[cfg(unix)]
    if std::os::unix::process::parent_id() != parent {
        std::process::exit(1);
    }
    let _ = parent;
}

/// Runs a program that must end within a limit.
///
/// # Errors
/// Why there is no exit status.
pub fn ask(mut command: Command, limit: Duration) -> Result<ExitStatus, String> {
    let child = command.stdin(Stdio::null()).env(PARENT, std::process::id().to_string()).spawn();
    let mut child = child.map_err(|error| format!("the process did not start: {error}"))?;
    let status = exit_of(&mut child, limit);
    reap(&mut child);
    status.ok_or_else(|| format!("no answer within {:.0} s", limit.as_secs_f64()))
}

/// A program that runs until its input ends, or this is dropped.
pub struct Held(Option<Child>);

impl Held {
    /// Starts the program. Without it, all goes on.
    #[must_use]
    pub fn start(mut command: Command) -> Self {
        let command = command.env(PARENT, std::process::id().to_string());
        Self(command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().ok())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            reap(child);
        }
    }
}

/// What a child has printed.
enum Told {
    SoFar(Section),
    Report(serde_json::Result<Box<SectionReport>>),
}

fn one(job: Job) -> SectionReport {
    let Job { name, limit, factor, mut command } = job;
    let begin = Instant::now();
    let early = |so_far: Section, reason: String| {
        let seconds = begin.elapsed().as_secs_f64();
        SectionReport { device: None, section: Section { error: Some(reason), seconds, ..so_far } }
    };
    let mut so_far = Section::new(&name);
    let command = command.env(PARENT, std::process::id().to_string());
    let mut child = match command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn() {
        Ok(child) => child,
        Err(error) => return early(so_far, format!("the section's process did not start: {error}")),
    };
    let Some(output) = child.stdout.take() else {
        return early(so_far, "the section's process has no output".into());
    };
    let (tell, told) = mpsc::channel();
    let reader = thread::spawn(move || read(output, &tell));
    let (mut since, mut applied) = (begin, Start::before(factor));
    let found = loop {
        match told.recv_timeout(applied.time.saturating_sub(since.elapsed())) {
            Ok(Told::SoFar(section)) => {
                if let (None, Some(start)) = (so_far.start, section.start) {
                    (since, applied) = (Instant::now(), start.limit(limit, factor));
                }
                so_far = section;
            }
            Ok(Told::Report(report)) => break Some(report),
            Err(RecvTimeoutError::Disconnected) => break None,
            Err(RecvTimeoutError::Timeout) => {
                let end = if reap(&mut child) { "" } else { ", and has not ended" };
                let seconds = applied.time.as_secs_f64();
                so_far.limit_s = seconds;
                // A grandchild may hold the output open: the reader is then left behind.
                return early(so_far, format!("killed after {seconds:.0} s{end}: {}", applied.why));
            }
        }
    };
    so_far.limit_s = applied.time.as_secs_f64();
    let left = applied.time.saturating_sub(since.elapsed()).max(Duration::from_secs(1));
    let status = exit_of(&mut child, left);
    if status.is_some() {
        let _ = reader.join();
    }
    reap(&mut child);
    match found {
        Some(Ok(mut report)) => {
            report.section.limit_s = so_far.limit_s;
            // A crash at the end, in a destructor: the results are good, the section is not.
            if report.section.passed() && !status.is_some_and(|status| status.success()) {
                report.section.error = Some(format!("its process failed after the report: {}", said(status)));
            }
            *report
        }
        Some(Err(error)) => early(so_far, format!("its report is not valid: {error}; {}", said(status))),
        None => early(so_far, format!("its process ended without a report: {}", said(status))),
    }
}

/// Hands over what a child prints, at once: it may hang while it ends.
fn read(output: ChildStdout, tell: &Sender<Told>) {
    // The output of a killed process may end in the middle of a character.
    for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        if let Some((_, json)) = line.split_once(SO_FAR) {
            serde_json::from_str(json).into_iter().for_each(|section| drop(tell.send(Told::SoFar(section))));
        } else if let Some((_, json)) = line.split_once(LINE) {
            let _ = tell.send(Told::Report(serde_json::from_str(json)));
        } else {
            // The standard error may be closed.
            let _ = writeln!(io::stderr(), "{line}");
        }
    }
}

/// Waits until the child exits; `None` if it does not within the limit.
fn exit_of(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let begin = Instant::now();
    loop {
        match child.try_wait() {
            Ok(None) if begin.elapsed() < limit => thread::sleep(PAUSE),
            exited => return exited.ok().flatten(),
        }
    }
}

/// Kills the child, and waits for a moment; returns whether it has ended. A process inside a call
/// of a driver that hangs does not end.
fn reap(child: &mut Child) -> bool {
    let _ = child.kill();
    exit_of(child, REAP).is_some()
}

fn said(status: Option<ExitStatus>) -> String {
    status.map_or_else(|| "it did not exit".into(), |status| status.to_string())
}
