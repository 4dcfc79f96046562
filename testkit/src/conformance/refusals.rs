//! Invalid input: each error says what and where, and no byte moves.

use kvpool::storage::{Elements, ElementsMut, FrameMove, KvPlanes, Scales, Storage};
use kvpool::{Dtype, FrameId, Run, StorageError};

use super::FRAMES;
use super::ops::{all, load, pack_all, rows, store};
use crate::scalar::{Rows, ScalarStorage};

const fn run(start: u32, len: u32) -> Run {
    Run { start: FrameId(start), len }
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
        (vec![0, 1, end], StorageError::SlotOutOfRange { index: 2, slot: end, slots: end }),
        (vec![i64::MAX, 0], StorageError::SlotOutOfRange { index: 0, slot: i64::MAX, slots: end }),
        (vec![3, 0, -1, 3], StorageError::SlotRepeated { first: 0, index: 3, slot: 3 }),
        (vec![0, 1, 1], StorageError::SlotRepeated { first: 1, index: 2, slot: 1 }),
    ] {
        assert_eq!(store(storage, 0, &rows(&slots), &slots), Err(refusal.clone()));
        if matches!(refusal, StorageError::SlotOutOfRange { .. }) {
            let (mut got, want) = (rows(&slots), rows(&slots));
            assert_eq!(load(storage, 0, &slots, &mut got), Err(refusal));
            assert_eq!(got, want, "a refused load wrote");
        }
    }
}

fn elements(storage: &dyn Storage) {
    let layout = storage.layout();
    let reference = ScalarStorage::new(layout.clone(), FRAMES);
    let (dtype, row, layers) = (reference.dtypes()[0], layout.row_elements(), layout.layers());
    let rows = |dtype: Dtype, elements: usize| Rows { dtype, bytes: vec![0; elements * dtype.bytes()] };
    let try_both = |layer: usize, k: &Rows, v: &Rows| -> StorageError {
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
        stored.expect_err("invalid elements")
    };
    let latent = layout.parts() == KvPlanes::Latent;
    let v = |dtype, elements| rows(dtype, if latent { 0 } else { elements });
    let good = (rows(dtype, 2 * row), v(dtype, 2 * row));

    assert_eq!(try_both(layers, &good.0, &good.1), StorageError::Layer { layer: layers, layers });
    for got in [0, row, 2 * row - 1, 2 * row + 1] {
        let refusal = StorageError::Length { which: "k", got, want: 2 * row };
        assert_eq!(try_both(0, &rows(dtype, got), &good.1), refusal);
        let want = if latent { 0 } else { 2 * row };
        if got != want {
            let refusal = StorageError::Length { which: "v", got, want };
            assert_eq!(try_both(0, &good.0, &rows(dtype, got)), refusal);
        }
    }
    for other in Dtype::ALL.into_iter().filter(|other| !reference.dtypes().contains(other)) {
        let refusal = |which| {
            if other == layout.dtype() && *layout.scales() == Scales::PerTokenHead {
                StorageError::BareCodes { which, dtype: other }
            } else {
                StorageError::DtypeMismatch { which, got: other, layout: layout.dtype() }
            }
        };
        assert_eq!(try_both(0, &rows(other, 2 * row), &good.1), refusal("k"));
        if !latent {
            assert_eq!(try_both(0, &good.0, &rows(other, 2 * row)), refusal("v"));
        }
    }
    let partial = Elements::new(Dtype::F32, &[0; 7]).map(|elements| elements.len());
    assert_eq!(partial, Err(StorageError::PartialElement { dtype: Dtype::F32, bytes: 7 }));
}

fn frames(storage: &dyn Storage) {
    let frames = storage.frames();
    let outside = FrameId(frames as u32);
    let step = |src, dst| FrameMove::new(FrameId(src), FrameId(dst));
    for (moves, refusal) in [
        (
            vec![step(0, 1), step(2, outside.0)],
            StorageError::FrameOutOfRange { index: 1, frame: outside, frames },
        ),
        (
            vec![step(u32::MAX, 1)],
            StorageError::FrameOutOfRange { index: 0, frame: FrameId(u32::MAX), frames },
        ),
        (
            vec![step(0, 3), step(1, 2), step(2, 3)],
            StorageError::DestinationRepeated { first: 0, index: 2, frame: FrameId(3) },
        ),
        (
            vec![step(0, 1), step(1, 2)],
            StorageError::DestinationIsSource { index: 0, source_index: 1, frame: FrameId(1) },
        ),
        (
            vec![step(4, 4)],
            StorageError::DestinationIsSource { index: 0, source_index: 0, frame: FrameId(4) },
        ),
    ] {
        // SAFETY: one thread.
        assert_eq!(unsafe { storage.copy(&moves) }, Err(refusal.clone()));
        assert_eq!(super::ops::copy_then(storage, &moves), Err(refusal));
    }

    let packed = storage.layout().packed_bytes();
    let mut buffer = vec![9; 3 * packed];
    for bad in [run(5, 2), run(u32::MAX, u32::MAX), run(frames as u32 + 1, 0)] {
        let refusal = Err(StorageError::RunOutOfRange { index: 1, run: bad, frames });
        let runs = [run(0, 1), bad];
        // SAFETY: one thread.
        unsafe {
            assert_eq!(storage.pack(&runs, &mut buffer), refusal);
            assert_eq!(storage.unpack(&runs, &buffer), refusal);
            assert_eq!(storage.zero(&runs), refusal);
        }
    }
    let overlap = [run(1, 2), run(0, 2)];
    let refusal = Err(StorageError::RunsOverlap { first: 1, second: 0, frame: FrameId(1) });
    // SAFETY: one thread.
    unsafe {
        assert_eq!(storage.unpack(&overlap, &[9].repeat(4 * packed)), refusal);
        assert_eq!(storage.zero(&overlap), refusal);
    }
    for got in [0, 2 * packed - 1, 2 * packed + 1] {
        let refusal = Err(StorageError::BufferLength { got, want: 2 * packed });
        // SAFETY: one thread.
        unsafe {
            assert_eq!(storage.pack(&[run(2, 2)], &mut buffer[..got]), refusal);
            assert_eq!(storage.unpack(&[run(2, 2)], &buffer[..got]), refusal);
        }
    }
    assert!(buffer.iter().all(|&byte| byte == 9), "a refused pack wrote");
}
