//! `gpu_check` itself, on the mock driver: its checks pass there, and it reports broken kernels.

use kvpool_cuda_tests::mock::session;
use kvpool_gpu_check::report::render;
use kvpool_gpu_check::{Options, SECTIONS, run};

/// Runs every section; the figures are those of the mock, and meaningless.
#[test]
fn a_quick_run_passes() {
    let session = session();
    session.seed(11);
    let options = Options { quick: true, ..Options::default() };
    let report = run(&options).expect("the mock driver is found").expect("no device failure");
    let text = render(&report);
    println!("{text}");
    assert!(report.passed, "{text}");
    assert_eq!(report.sections.len(), SECTIONS.len());
    assert!(report.sections.iter().all(|section| !section.checks.is_empty() || !section.figures.is_empty()));
}

#[test]
fn a_device_that_is_not_there_is_said() {
    let _session = session();
    let refused = run(&Options { ordinal: 9, ..Options::default() });
    assert!(
        matches!(refused, Err(kvpool::cuda::CudaError::NoDevice { ordinal: 9, .. })),
        "{:?}",
        refused.is_ok()
    );
}
