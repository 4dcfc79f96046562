//! Planted errors that the sanitizers must report: each is made in a process of its own, which must
//! fail.

use std::process::Command;

use kvpool_cuda::params::{CopyParams, Lane, Move, Piece, RowsParams, Way};
use kvpool_cuda_tests::host::{Order, launch};

/// Names the error that a child makes.
const PLANTED: &str = "KVPOOL_PLANTED";

/// Stores one row to `slot` of a heap allocation of four slots, from `skew` bytes into a row of the
/// caller.
fn store(slot: i64, skew: usize, unit: u32) {
    let mut rows = vec![0u64; 16];
    let mut frames = vec![0u64; 32];
    let slots = [slot];
    let base = frames.as_mut_ptr().expose_provenance() as u64;
    let lane = Lane { base, frame_stride: 128 };
    let params = RowsParams {
        k: (rows.as_mut_ptr().expose_provenance() + skew) as u64,
        v: 0,
        k_stride: 64,
        v_stride: 0,
        slots: slots.as_ptr().expose_provenance() as u64,
        k_lane: lane,
        v_lane: lane,
        row_bytes: 64,
        block_tokens: 2,
        n_tokens: 1,
        unit,
        way: Way::In,
        row_type: 0,
    };
    // SAFETY: violated on purpose: the sanitizer must report it.
    unsafe { launch("kvp_rows", 1, params, Order::ASCENDING) };
    std::hint::black_box((&rows, &frames));
}

/// Copies to a frame one past the end.
fn copy() {
    let mut frames = vec![0u64; 32];
    let base = frames.as_mut_ptr().expose_provenance() as u64;
    let pieces = [Piece { base, frame_stride: 128, bytes: 128, packed_at: 0 }];
    let moves = [Move { src: 0, dst: 2 }];
    let [pieces, moves] =
        [pieces.as_ptr().expose_provenance(), moves.as_ptr().expose_provenance()].map(|at| (at as u64, 1));
    let params = CopyParams::new(pieces, moves, 4);
    // SAFETY: as above.
    unsafe { launch("kvp_copy", 1, params, Order::ASCENDING) };
    std::hint::black_box(&frames);
}

/// Makes the error in a child, whose report must contain `report` and a file of the kernels.
fn expect(mistake: &str, report: &str) {
    if !cfg!(kvpool_sanitize) {
        eprintln!("SKIPPED: {mistake} is only caught under sanitizers: run cuda-tests/sanitize.sh");
        return;
    }
    let child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "planted::child", "--nocapture", "--test-threads=1"])
        .env(PLANTED, mistake)
        .output()
        .expect("the child starts");
    let stderr = String::from_utf8_lossy(&child.stderr);
    assert!(!child.status.success(), "{mistake} was not detected");
    assert!(stderr.contains(report), "{mistake}: {report} is missing in {stderr}");
    assert!(
        stderr.contains("bytes.h") || stderr.contains("vector.h"),
        "{mistake}: no source line in {stderr}"
    );
}

/// Makes the error that the environment variable names; none without it.
#[test]
fn child() {
    match std::env::var(PLANTED).as_deref() {
        Ok("slot") => store(4, 0, 4),
        Ok("vector") => store(0, 8, 16),
        Ok("frame") => copy(),
        // The same calls without an error: the reports are caused by the errors alone.
        Ok("none") | Err(_) => {
            store(3, 0, 4);
            store(1, 8, 4);
        }
        Ok(other) => panic!("there is no error named {other}"),
    }
}

#[test]
fn a_slot_out_of_range_is_caught() {
    expect("slot", "AddressSanitizer: heap-buffer-overflow");
}

#[test]
fn a_frame_out_of_range_is_caught() {
    expect("frame", "AddressSanitizer: heap-buffer-overflow");
}

#[test]
fn a_misaligned_vector_is_caught() {
    expect("vector", "misaligned address");
}
