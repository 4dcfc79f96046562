//! `gpu_check` itself, on the mock driver: its checks pass there, and the failure of one section
//! costs only that section.
//!
//! The children are this program, run again with the name of a section in the environment.

use std::process::Command;
use std::time::{Duration, Instant};

use kvpool::cuda::CudaError;
use kvpool_cuda_tests::mock::session;
use kvpool_gpu_check::report::{Section, SectionReport, Summary, render_section};
use kvpool_gpu_check::supervise::{self, Job};
use kvpool_gpu_check::{Options, SECTIONS, run};

/// Names the section that a child runs.
const SECTION: &str = "KVPOOL_GPU_CHECK_SECTION";

fn job(name: &'static str, limit: Duration) -> Job {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "child", "--nocapture", "--test-threads=1"]).env(SECTION, name);
    Job { name, limit, command }
}

/// Runs the section that the environment names; nothing without it.
#[test]
fn child() {
    let Ok(name) = std::env::var(SECTION) else { return };
    let session = session();
    session.seed(11);
    match name.as_str() {
        // Stand for a section that hangs, that crashes, and that prints half a report.
        "hangs" => loop {
            std::thread::sleep(Duration::from_secs(1));
        },
        "aborts" => std::process::abort(),
        "stammers" => println!("{}{{\"device\":", supervise::LINE),
        // The device fails in the middle of a section.
        "sticky" => {
            session.fail_call("cuLaunchKernel", 5, 719);
            let part = SECTIONS.iter().find(|part| part.name == "latency").expect("a section");
            supervise::print(&run(part, &Options { quick: true, ..Options::default() }).expect("a driver"));
        }
        name => {
            let part = SECTIONS.iter().find(|part| part.name == name).expect("a section");
            supervise::print(&run(part, &Options { quick: true, ..Options::default() }).expect("a driver"));
        }
    }
}

/// Runs every section; the figures are those of the mock, and meaningless.
#[test]
fn a_quick_run_passes() {
    let jobs = SECTIONS.map(|part| job(part.name, Duration::from_secs(300)));
    let begin = Instant::now();
    let reports = supervise::run(jobs, |report| println!("{}", render_section(&report.section)));
    let summary = Summary::of(&reports, begin.elapsed());
    assert!(summary.passed, "{summary:?}");
    assert_eq!(summary.sections, SECTIONS.len());
    for SectionReport { device, section } in &reports {
        assert!(!section.checks.is_empty() || !section.figures.is_empty(), "{}", section.name);
        let device = device.as_ref().expect("the mock has a device");
        assert!(!device.commit.is_empty() && device.clock_mhz > 0 && device.open_ms > 0.0, "{device:?}");
    }
}

/// Sections that are killed, crash, or lose their device: the others report, each as soon as it is
/// done.
#[test]
fn a_section_that_fails_costs_only_itself() {
    let limit = Duration::from_secs(2);
    let long = Duration::from_secs(120);
    let jobs = [
        job("latency", long),
        job("hangs", limit),
        job("aborts", long),
        job("stammers", long),
        job("sticky", long),
        job("mapping", long),
    ];
    let mut told = Vec::new();
    let reports = supervise::run(jobs, |report| told.push(report.section.name.clone()));
    let names: Vec<&str> = reports.iter().map(|report| report.section.name.as_str()).collect();
    assert_eq!(names, ["latency", "hangs", "aborts", "stammers", "latency", "mapping"]);
    assert_eq!(told, names);
    let error = |at: usize| reports[at].section.error.as_deref().unwrap_or("");
    assert!(reports[0].section.passed() && reports[5].section.passed(), "{reports:?}");
    assert!(error(1).contains("killed after 2 s"), "{}", error(1));
    assert!(error(2).contains("without a report"), "{}", error(2));
    assert!(error(3).contains("not valid"), "{}", error(3));
    assert!(error(4).contains("LAUNCH_FAILED"), "{}", error(4));
    let summary = Summary::of(&reports, Duration::ZERO);
    assert_eq!(summary.failed, ["hangs", "aborts", "stammers", "latency"]);
}

#[test]
fn a_device_that_is_not_there_is_said() {
    let _session = session();
    let refused = run(&SECTIONS[0], &Options { ordinal: 9, ..Options::default() });
    assert!(matches!(refused, Err(CudaError::NoDevice { ordinal: 9, .. })), "{refused:?}");
    let section = Section::new("none");
    assert!(section.passed());
}
