//! Invalid input: each error says what and where, and no byte moves.

use kvpool::storage::{Elements, ElementsMut, FrameMove, KvPlanes, Scales, Storage};
use kvpool::{Dtype, FrameId, Run, StorageError};

use super::FRAMES;
use super::ops::{all, load, pack_all, rows, store};
use crate::scalar::{Rows, ScalarStorage};

const fn run(start: u32, len: u32) -> Run {
    Run { start: FrameId(start), len }
}

/// Refusal of runs of which the first has the second frame of the other.
pub(super) const OVERLAP: &str =
    "run at index 0: got frame 1, expected frames that the run at index 1 does not have";

pub(super) fn run_outside(index: usize, run: Run, frames: usize) -> String {
    let Run { start, len } = run;
    format!("run at index {index}: got {len} frames from {start}, expected frames below {frames}")
}

fn message(outcome: Result<(), StorageError>) -> String {
    outcome.expect_err("a refusal").to_string()
}

pub(super) fn every_refusal(storage: &dyn Storage) {
    let bytes: Vec<u8> = (0..pack_all(storage).len()).map(|index| index as u8 | 1).collect();
    // SAFETY: one thread.
    unsafe { storage.unpack(&[all(FRAMES)], &bytes) }.expect("all frames can be unpacked");
    slots(storage);
    elements(storage);
    frames(storage);
    assert!(pack_all(storage) == bytes, "a refused operation moved bytes");
}

fn slots(storage: &dyn Storage) {
    let end = (FRAMES * storage.layout().block_tokens()) as i64;
    let reference = ScalarStorage::new(storage.layout().clone(), FRAMES);
    let dtype = reference.dtypes()[0];
    let rows = |slots: &[i64]| rows(storage.layout(), reference.halves(), dtype, slots.len(), 1);
    for (slots, refusal) in [
        (vec![0, 1, end], format!("slot at index 2: got {end}, expected less than {end}")),
        (vec![i64::MAX, 0], format!("slot at index 0: got {}, expected less than {end}", i64::MAX)),
        (vec![3, 0, -1, 3], "slot at index 3: got 3, expected another than at index 0".to_owned()),
        (vec![0, 1, 1], "slot at index 2: got 1, expected another than at index 1".to_owned()),
    ] {
        assert_eq!(message(store(storage, 0, &rows(&slots), &slots)), refusal);
        if refusal.contains("less than") {
            let (mut got, want) = (rows(&slots), rows(&slots));
            assert_eq!(message(load(storage, 0, &slots, &mut got)), refusal);
            assert_eq!(got, want, "a refused load wrote");
        }
    }
}

fn elements(storage: &dyn Storage) {
    let layout = storage.layout();
    let reference = ScalarStorage::new(layout.clone(), FRAMES);
    let (dtype, row, layers) = (reference.dtypes()[0], layout.row_elements(), layout.layers());
    let rows = |dtype: Dtype, elements: usize| Rows { dtype, bytes: vec![0; elements * dtype.bytes()] };
    let try_both = |layer: usize, k: &Rows, v: &Rows| -> String {
        let view = |rows: &Rows| rows.clone();
        let (mut load_k, mut load_v) = (view(k), view(v));
        let slots = [0, 1];
        // SAFETY: one thread.
        let stored = unsafe {
            let k = Elements::new(k.dtype, &k.bytes).expect("whole elements");
            let v = Elements::new(v.dtype, &v.bytes).expect("whole elements");
            storage.store(layer, k, v, &slots)
        };
        // SAFETY: one thread.
        let loaded = unsafe {
            let k = ElementsMut::new(k.dtype, &mut load_k.bytes).expect("whole elements");
            let v = ElementsMut::new(v.dtype, &mut load_v.bytes).expect("whole elements");
            storage.load(layer, &slots, k, v)
        };
        assert_eq!(stored, loaded);
        message(stored)
    };
    let latent = layout.parts() == KvPlanes::Latent;
    let v = |dtype, elements| rows(dtype, if latent { 0 } else { elements });
    let good = (rows(dtype, 2 * row), v(dtype, 2 * row));

    let outside = format!("layer: got {layers}, expected less than {layers}");
    assert_eq!(try_both(layers, &good.0, &good.1), outside);
    for got in [0, row, 2 * row - 1, 2 * row + 1] {
        let refusal = format!("k: got {got} elements, expected {}", 2 * row);
        assert_eq!(try_both(0, &rows(dtype, got), &good.1), refusal);
        let want = if latent { 0 } else { 2 * row };
        if got != want {
            let refusal = format!("v: got {got} elements, expected {want}");
            assert_eq!(try_both(0, &good.0, &rows(dtype, got)), refusal);
        }
    }
    for other in Dtype::ALL.into_iter().filter(|other| !reference.dtypes().contains(other)) {
        let refusal = |which: &str| {
            if other == layout.dtype() && *layout.scales() == Scales::PerTokenHead {
                format!(
                    "{which}: got {other} codes without scales, \
                     expected f32, f16 or bf16, as the layout has dynamic scales"
                )
            } else {
                format!("{which}: got {other}, expected {}, as in the layout", layout.dtype())
            }
        };
        assert_eq!(try_both(0, &rows(other, 2 * row), &good.1), refusal("k"));
        if !latent {
            assert_eq!(try_both(0, &good.0, &rows(other, 2 * row)), refusal("v"));
        }
    }
    let partial = Elements::new(Dtype::F32, &[0; 7]).unwrap_err();
    assert_eq!(partial.to_string(), "bytes: got 7, expected a multiple of 4, the bytes of f32");
}

fn frames(storage: &dyn Storage) {
    let frames = storage.frames();
    let outside = frames as u32;
    let outside_at =
        |index, frame: u32| format!("frame at index {index}: got {frame}, expected less than {frames}");
    let repeated = |index, frame: u32, what| {
        format!("destination at index {index}: got {frame}, expected another frame than {what}")
    };
    let step = |src, dst| FrameMove::new(FrameId(src), FrameId(dst));
    for (moves, refusal) in [
        (vec![step(0, 1), step(2, outside)], outside_at(1, outside)),
        (vec![step(u32::MAX, 1)], outside_at(0, u32::MAX)),
        (vec![step(0, 3), step(1, 2), step(2, 3)], repeated(2, 3, "at index 0")),
        (vec![step(0, 1), step(1, 2)], repeated(0, 1, "the source at index 1")),
        (vec![step(4, 4)], repeated(0, 4, "the source at index 0")),
    ] {
        // SAFETY: one thread.
        assert_eq!(message(unsafe { storage.copy(&moves) }), refusal);
        assert_eq!(message(super::ops::copy_then(storage, &moves)), refusal);
    }

    let packed = storage.layout().packed_bytes();
    let mut buffer = vec![9; 3 * packed];
    for bad in [run(5, 2), run(u32::MAX, u32::MAX), run(frames as u32 + 1, 0)] {
        let refusal = run_outside(1, bad, frames);
        let runs = [run(0, 1), bad];
        // SAFETY: one thread.
        unsafe {
            assert_eq!(message(storage.pack(&runs, &mut buffer)), refusal);
            assert_eq!(message(storage.unpack(&runs, &buffer)), refusal);
            assert_eq!(message(storage.zero(&runs)), refusal);
        }
    }
    let overlap = [run(1, 2), run(0, 2)];
    // SAFETY: one thread.
    unsafe {
        assert_eq!(message(storage.unpack(&overlap, &[9].repeat(4 * packed))), OVERLAP);
        assert_eq!(message(storage.zero(&overlap)), OVERLAP);
    }
    for got in [0, 2 * packed - 1, 2 * packed + 1] {
        let refusal = format!("packed buffer: got {got} bytes, expected {}", 2 * packed);
        // SAFETY: one thread.
        unsafe {
            assert_eq!(message(storage.pack(&[run(2, 2)], &mut buffer[..got])), refusal);
            assert_eq!(message(storage.unpack(&[run(2, 2)], &buffer[..got])), refusal);
        }
    }
    assert!(buffer.iter().all(|&byte| byte == 9), "a refused pack wrote");
}
