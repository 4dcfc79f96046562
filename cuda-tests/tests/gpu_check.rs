//! `gpu_check` itself, on the mock driver: its checks pass there, and the failure of one section
//! costs only that section.
//!
//! The children are this program, run again with the name of a section in the environment.

use std::process::Command;
use std::time::{Duration, Instant};

use kvpool_cuda::CudaError;
use kvpool_cuda::launch::{Choices, Work};
use kvpool_cuda_tests::mock::{Kind, Session, session};
use kvpool_gpu_check::clocks::{self, Clocks, Sampler};
use kvpool_gpu_check::report::{Section, SectionReport, Summary, render_device, render_section};
use kvpool_gpu_check::start::{JOB_MS, Start};
use kvpool_gpu_check::supervise::{self, Job};
use kvpool_gpu_check::variants::{VARIANTS, Variant};
use kvpool_gpu_check::{Options, Part, SECTIONS, held, run};

/// Names the file to which a child writes its process id.
const PID_FILE: &str = "KVPOOL_GPU_CHECK_PID";

/// Names the section that a child runs.
const SECTION: &str = "KVPOOL_GPU_CHECK_SECTION";

fn job(name: &str, limit: Duration) -> Job {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "child", "--nocapture", "--test-threads=1"]).env(SECTION, name);
    command.envs(SECTIONS.iter().filter(|part| part.name == name).flat_map(|part| part.env(None)));
    Job { name: name.into(), limit, factor: 1.0, command }
}

/// Asserts that the section has launched what it lists, and nothing else of the pool's kernels;
/// `shapes` varies the shapes.
fn as_pools_launch(session: &Session, part: &Part, variant: Option<&Variant>) {
    let launches = session.launches();
    let choices = variant.map_or(Choices::DEFAULT, |variant| variant.choices);
    let is = |work: Work, (name, [ctas, threads, shared], _): &(String, [u32; 3], u32)| {
        [true, false].map(|bulk| choices.rule(work, bulk)).iter().any(|rule| {
            let most = rule.shape(usize::MAX, 4);
            let is_shape = *ctas <= most.ctas && (*threads, *shared) == (rule.threads, rule.shared_bytes);
            *name == rule.kernel.to_string() && is_shape
        })
    };
    let own = || launches.iter().filter(|launch| !launch.0.starts_with("kvp_probe"));
    // A compaction may end before a batch begins.
    let is_wave = |work: &Work| matches!(work, Work::Wave | Work::WaveBeside { .. });
    for &work in part.works.iter().filter(|work| variant.is_none() && !is_wave(work)) {
        assert!(own().any(|launch| is(work, launch)), "{}: no {work:?}: {launches:?}", part.name);
    }
    for launch in own().filter(|_| part.name != "shapes") {
        let is_sized = |work: &&Work| match work {
            // `interference` varies the number.
            Work::WaveBeside { .. } => is(Work::WaveBeside { ctas: 64 }, launch),
            &&work => is(work, launch),
        };
        assert!(part.works.iter().any(|work| is_sized(&work)), "{}: {launch:?} is not listed", part.name);
    }
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
        // Killed in the middle: it has told a part of its results.
        "half" => {
            let mut section = Section { tells: true, ..Section::new("half") };
            section.start = Some(Start { opened_s: 0.5, job_ms: 2.0 * JOB_MS });
            section.check("the first half", true, "");
            section.figure("the first half", 0.5, "");
            loop {
                std::thread::sleep(Duration::from_secs(1));
            }
        }
        // A child with a child: says who it is, and hangs.
        "parent" => drop(supervise::run([job("orphan", Duration::from_secs(600))], |_| ())),
        "orphan" => {
            supervise::end_with_parent();
            let path = std::env::var(PID_FILE).expect("the test names it");
            std::fs::write(format!("{path}.new"), std::process::id().to_string()).expect("a file");
            std::fs::rename(format!("{path}.new"), path).expect("a file");
            loop {
                std::thread::sleep(Duration::from_secs(1));
            }
        }
        "stammers" => println!("{}{{\"device\":", supervise::LINE),
        // The device fails in the middle of a section.
        "sticky" => {
            session.fail_call("cuLaunchKernel", 5, 719);
            let part = SECTIONS.iter().find(|part| part.name == "latency").expect("a section");
            supervise::print(
                &run(part, &Options { quick: true, tells: true, ..Options::default() }).expect("a driver"),
            );
        }
        title => {
            let (name, variant) = title.split_once(", ").unwrap_or((title, ""));
            let part = SECTIONS.iter().find(|part| part.name == name).expect("a section");
            let variant = VARIANTS.iter().find(|one| one.name == variant);
            let report = run(part, &Options { quick: true, variant, tells: true, ..Options::default() })
                .expect("a driver");
            assert_eq!(report.section.name, title);
            as_pools_launch(&session, part, variant);
            // The pool's kernels and the probes: each image is compiled once for each device.
            let compiled = ["cuModuleLoadDataEx", "cuModuleLoadData"].map(|call| session.calls(call));
            assert_eq!(compiled, [if name == "crossing" { 2 } else { 1 }; 2], "{name}");
            let start = report.section.start.expect("it has measured the machine");
            assert!(start.opened_s > 0.0 && start.job_ms > 0.0, "{start:?}");
            supervise::print(&report);
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

/// Variants run the same sections with other choices, by which pools launch then; their figures are
/// related to those of the default.
#[test]
fn variants_are_compared_with_the_default() {
    let mut jobs = Vec::new();
    for variant in &VARIANTS {
        let known = |name: &&str| SECTIONS.iter().any(|part| part.name == *name);
        assert!(!variant.sections.is_empty() && variant.sections.iter().all(known), "{}", variant.name);
        let Some(name) = variant.sections.iter().find(|name| **name != "bandwidth") else { continue };
        let part = SECTIONS.iter().find(|part| part.name == *name).expect("it is known");
        if variant.choices != Choices::DEFAULT {
            jobs.push(job(&part.title(Some(variant)), Duration::from_secs(300)));
        } else if variant.env.is_some() {
            assert_eq!(part.env(Some(variant)).collect::<Vec<_>>(), Vec::from_iter(variant.env));
        }
    }
    let count = jobs.len();
    let reports = supervise::run(jobs, |report| println!("{}", render_section(&report.section)));
    let summary = Summary::of(&reports, Duration::ZERO);
    assert!(count > 5 && summary.passed, "{summary:?}");

    let section = |rate: f64, only: &str| {
        let mut section = Section::new("host");
        section.ratio("copies", rate, "GB/s", 0.9, "one copy");
        section.figure(only, 1.0, "ms");
        section
    };
    let mut other = section(3.0, "here");
    other.relate(&section(2.0, "there"), "the default");
    let ratios: Vec<_> = other.figures.iter().map(|figure| (figure.ratio, figure.of.as_deref())).collect();
    assert_eq!(ratios, [(Some(1.5), Some("the default")), (None, None)]);
}

/// Sections that are killed, crash, or lose their device: the others report, each as soon as it is
/// done.
#[test]
fn a_section_that_fails_costs_only_itself() {
    let long = Duration::from_secs(120);
    let jobs = [
        job("latency", long),
        // Not even the device is open.
        Job { factor: 0.1, ..job("hangs", long) },
        job("aborts", long),
        job("stammers", long),
        job("sticky", long),
        Job { factor: 1.5, ..job("half", Duration::from_secs(1)) },
        job("mapping", long),
    ];
    let mut told = Vec::new();
    let reports = supervise::run(jobs, |report| told.push(report.section.name.clone()));
    let names: Vec<&str> = reports.iter().map(|report| report.section.name.as_str()).collect();
    assert_eq!(names, ["latency", "hangs", "aborts", "stammers", "latency", "half", "mapping"]);
    assert_eq!(told, names);
    let error = |at: usize| reports[at].section.error.as_deref().unwrap_or("");
    assert!(reports[0].section.passed() && reports[6].section.passed(), "{reports:?}");
    assert!(
        error(1).contains("killed after 2 s: it has 20 s, times 0.1 by --limit-factor, to open"),
        "{}",
        error(1)
    );
    assert!(error(2).contains("without a report"), "{}", error(2));
    assert!(error(3).contains("not valid"), "{}", error(3));
    assert!(error(4).contains("LAUNCH_FAILED"), "{}", error(4));
    // What it had told remains.
    let why = "killed after 3 s: its limit is 1 s, times 2.0 because this machine took 50 ms for a job that may take 25, \
               times 1.5 by --limit-factor; the device was opened before, in 0.5 s";
    assert_eq!(error(5), why);
    let half = &reports[5].section;
    assert!(half.checks.len() == 1 && half.figures.len() == 1 && !half.passed(), "{half:?}");
    let summary = Summary::of(&reports, Duration::ZERO);
    assert_eq!(summary.failed, ["hangs", "aborts", "stammers", "latency", "half"]);
}

/// The process that runs the sections is killed: so is the section.
#[test]
#[cfg(target_os = "linux")]
fn no_section_outlives_its_parent() {
    let file = std::env::temp_dir().join(format!("kvpool-gpu-check-{}", std::process::id()));
    let Job { mut command, .. } = job("parent", Duration::ZERO);
    let mut parent = command.env(PID_FILE, &file).spawn().expect("this program");
    let until = Instant::now() + Duration::from_secs(120);
    let mut pid = String::new();
    while pid.is_empty() {
        assert!(Instant::now() < until, "the section does not begin");
        std::thread::sleep(Duration::from_millis(5));
        pid = std::fs::read_to_string(&file).unwrap_or_default();
    }
    std::fs::remove_file(&file).expect("it was read");
    // Gone, or dead and not waited for.
    let is_over = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_none_or(|state| state.is_empty() || state.starts_with('Z'))
    };
    assert!(!is_over(), "it runs");
    parent.kill().expect("a process");
    parent.wait().expect("a killed process");
    while !is_over() {
        assert!(Instant::now() < until, "the section has outlived its parent");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A driver that does not start costs a process, and the limit.
#[test]
fn a_question_has_a_limit() {
    let asked = |name, limit| supervise::ask(job(name, Duration::ZERO).command, limit);
    let late = asked("hangs", Duration::from_secs(1)).expect_err("it hangs");
    assert!(late.contains("no answer within 1 s"), "{late}");
    let status = asked("aborts", Duration::from_secs(120)).expect("it ends");
    assert!(!status.success(), "{status}");
}

#[test]
fn clocks_are_those_of_the_management_library() {
    // SAFETY: the mock's initialisers only fill its own tables.
    let library = unsafe { libloading::Library::new(env!("KVPOOL_MOCK_CUDA")) }.expect("the mock");
    let now = || clocks::read(&library, "0000:01:00.0").expect("the device");
    let (sm_mhz, memory_mhz) = ([1980; 2], [2619; 2]);
    let expected = Clocks { samples: 1, sm_mhz, memory_mhz, celsius: Some(41), reasons: Some(1) };
    assert_eq!(now(), expected);
    assert_eq!(clocks::read(&library, "0000:07:00.0"), None);
    // SAFETY: as above.
    let again = unsafe { libloading::Library::new(env!("KVPOOL_MOCK_CUDA")) }.expect("the mock");
    let session = session();
    let before = session.calls("nvmlDeviceGetClockInfo");
    let sampler = Sampler::start_with(again, "0000:01:00.0").expect("the device");
    // While the section runs: two questions a sample.
    let until = Instant::now() + Duration::from_secs(60);
    while session.calls("nvmlDeviceGetClockInfo") < before + 8 {
        assert!(Instant::now() < until, "nothing is sampled during the section");
        std::thread::sleep(Duration::from_millis(5));
    }
    let found = sampler.stop().expect("samples");
    assert!(found.samples >= 3, "{found:?}");
    assert_eq!((found.sm_mhz, found.celsius), ([1980, 1980], Some(41)));
    let mut section = Section::new("clocks");
    assert!(render_section(&section).contains("clocks unknown"));
    section.clocks = Some(found);
    let text = render_section(&section);
    assert!(text.contains("1980 MHz, memory 2619 MHz, up to 41 C, clock reasons 0x1, in "), "{text}");
}

/// In compute mode EXCLUSIVE_PROCESS, a process that keeps the device open would make every section
/// fail.
#[test]
fn a_device_for_one_process_is_not_held() {
    const EXCLUSIVE_PROCESS: i32 = 3;
    let session = session();
    let contexts = || session.live()[Kind::Context as usize];
    let before = contexts();
    let device = held(0).expect("a driver").expect("a device for several processes");
    assert!(!device.info().is_exclusive && contexts() > before);
    drop(device);
    session.set_compute_mode(0, EXCLUSIVE_PROCESS);
    let retained = session.calls("cuDevicePrimaryCtxRetain");
    assert!(held(0).expect("a driver").is_none());
    assert_eq!(session.calls("cuDevicePrimaryCtxRetain"), retained);
    assert!(held(1).expect("a driver").is_some(), "the other device is for all");
    let report = run(&SECTIONS[1], &Options { quick: true, ..Options::default() }).expect("a driver");
    assert!(render_device(&report.device.expect("a device")).contains("exclusive to one process"));
    assert!(matches!(held(9), Err(CudaError::NoDevice { ordinal: 9, .. })));
}

#[test]
fn a_device_that_is_not_there_is_said() {
    let _session = session();
    let refused = run(&SECTIONS[0], &Options { ordinal: 9, ..Options::default() });
    assert!(matches!(refused, Err(CudaError::NoDevice { ordinal: 9, .. })), "{refused:?}");
    let section = Section::new("none");
    assert!(section.passed());
}
