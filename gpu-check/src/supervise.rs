//! Sections in child processes: each has a time limit, and the failure of one costs only itself.
//!
//! ```text
//! parent   for each section: start a child, wait for its line, or kill it at its limit
//! child    opens the device, runs one section, prints one line of JSON: its `SectionReport`
//! ```
//!
//! A device error that ends a context ends it for the process that caused it. A section that was
//! killed, crashed, or printed no line is reported as a section that ended early, with the results that
//! it has told so far; the lines of the others have been handed over by then. No child outlives its
//! parent: the system kills it.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::report::{self, SO_FAR, Section, SectionReport};

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
    pub name: &'static str,
    /// Time after which the child is killed.
    pub limit: Duration,
    /// The program to run, with its arguments.
    pub command: Command,
}

/// Runs the jobs one after another, and calls `done` with each report as soon as it is there.
pub fn run(jobs: impl IntoIterator<Item = Job>, mut done: impl FnMut(&SectionReport)) -> Vec<SectionReport> {
    jobs.into_iter()
        .map(|job| {
            let report = one(job);
            done(&report);
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
    exit_of(&mut child, limit).ok_or_else(|| format!("no answer within {:.0} s", limit.as_secs_f64()))
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

fn one(job: Job) -> SectionReport {
    let Job { name, limit, mut command } = job;
    let begin = Instant::now();
    let so_far = Arc::new(Mutex::new(None::<Section>));
    let early = |reason: String| {
        let told = so_far.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut section = told.unwrap_or_else(|| Section::new(name));
        section.error = Some(reason);
        section.seconds = begin.elapsed().as_secs_f64();
        SectionReport { device: None, section }
    };
    let command = command.env(PARENT, std::process::id().to_string());
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => return early(format!("the section's process did not start: {error}")),
    };
    let Some(output) = child.stdout.take() else {
        return early("the section's process has no output".into());
    };
    let (tell, told) = mpsc::channel();
    let latest = so_far.clone();
    let reader = thread::spawn(move || {
        // The output of a killed process may end in the middle of a character.
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).into_owned();
            if let Some(json) = line.find(SO_FAR).map(|at| &line[at + SO_FAR.len()..]) {
                if let Ok(section) = serde_json::from_str(json) {
                    *latest.lock().unwrap_or_else(PoisonError::into_inner) = Some(section);
                }
                continue;
            }
            match line.find(LINE).map(|at| &line[at + LINE.len()..]) {
                // At once: the process may hang while it ends.
                Some(json) => drop(tell.send(Some(serde_json::from_str::<SectionReport>(json)))),
                // The standard error may be closed.
                None => drop(writeln!(io::stderr(), "{line}")),
            }
        }
        let _ = tell.send(None);
    });
    let found = told.recv_timeout(limit);
    if let Err(RecvTimeoutError::Timeout) = found {
        let end = if reap(&mut child) { "" } else { ", and has not ended" };
        // A grandchild may hold the output open: the reader is then left behind.
        return early(format!("killed after {:.0} s{end}", limit.as_secs_f64()));
    }
    let left = limit.saturating_sub(begin.elapsed()).max(Duration::from_secs(1));
    let status = exit_of(&mut child, left);
    if status.is_some() {
        let _ = reader.join();
    }
    match (found, status) {
        (Ok(Some(Ok(report))), Some(status)) if status.success() || !report.section.passed() => report,
        (Ok(Some(Ok(mut report))), status) => {
            // A crash at the end, in a destructor: the results are good, the section is not.
            report.section.error = Some(format!("its process failed after the report: {}", said(status)));
            report
        }
        (Ok(Some(Err(error))), status) => {
            early(format!("its report is not valid: {error}; {}", said(status)))
        }
        (_, status) => early(format!("its process ended without a report: {}", said(status))),
    }
}

/// Waits until the child exits; kills it after `limit`.
fn exit_of(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let begin = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if begin.elapsed() < limit => thread::sleep(PAUSE),
            Ok(None) | Err(_) => {
                reap(child);
                return None;
            }
        }
    }
}

/// Kills the child, and waits for a moment; returns whether it has ended. A process inside a call of
/// a driver that hangs does not end.
fn reap(child: &mut Child) -> bool {
    let (_, begin) = (child.kill(), Instant::now());
    while matches!(child.try_wait(), Ok(None)) {
        if begin.elapsed() > REAP {
            return false;
        }
        thread::sleep(PAUSE);
    }
    true
}

fn said(status: Option<ExitStatus>) -> String {
    status.map_or_else(|| "it did not exit".into(), |status| status.to_string())
}
