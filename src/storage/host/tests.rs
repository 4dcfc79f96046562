use super::*;
use crate::ids::{FRAMES_MAX, FrameId};
use crate::storage::{AdoptedPlane, Arrangement, Dtype};

const fn run(start: u32, len: u32) -> Run {
    Run { start: FrameId(start), len }
}

fn aliases(which: &'static str) -> StorageError {
    Invalid::new(which, "memory of the storage", "memory outside of it").into()
}

#[test]
fn counts_are_checked() {
    let layout = KvLayout::named("tiny").unwrap();
    for (frames, frames_max) in [(0, 0), (0, 4), (5, 4), (1, FRAMES_MAX + 1)] {
        let refused = HostStorage::new(layout.clone(), frames, frames_max).unwrap_err();
        assert!(
            refused.to_string().starts_with(&format!("number of frames: got {frames} with")),
            "{refused}"
        );
    }
    // More than a process can address, but a valid number of frames.
    if cfg!(not(miri)) {
        let huge = KvLayout::named("llama-3.1-405b").unwrap();
        let refused = HostStorage::new(huge, 1, FRAMES_MAX).unwrap_err();
        assert!(matches!(refused, StorageError::Memory { .. }), "{refused}");
    }
}

#[test]
fn grows_up_to_the_reservation() {
    let storage = HostStorage::new(KvLayout::named("tiny").unwrap(), 2, 5).unwrap();
    assert_eq!(storage.grow(4), Ok(()));
    assert_eq!(storage.grow(3), Ok(()), "`grow` never shrinks");
    assert_eq!(storage.frames(), 4);
    assert_eq!(storage.grow(6), Err(GrowError::TooLarge { asked: 2, total: 4, max: 5 }));
    assert_eq!(storage.grow(5), Ok(()));
    assert_eq!(storage.frames(), 5);
}

#[test]
#[cfg_attr(miri, ignore = "Miri does not support mappings")]
fn a_shrink_spares_the_remaining_frames() {
    for arrangement in [Arrangement::LayerFirst, Arrangement::BlockFirst] {
        // Tiles of 1536 bytes: frames begin and end inside pages.
        let layout =
            KvLayout::builder().layers(2).kv_heads(2).head_dim(48).block_tokens(8).dtype(Dtype::Bf16);
        let layout = layout.arrangement(arrangement).build().unwrap();
        let block = layout.packed_bytes();
        let storage = HostStorage::new(layout, 40, 40).unwrap();
        let bytes: Vec<u8> = (0..40 * block).map(|i| (i % 251) as u8 + 1).collect();
        let mut back = vec![0; 40 * block];
        // SAFETY: one thread.
        unsafe {
            storage.unpack(&[run(0, 40)], &bytes).unwrap();
            storage.shrink(7);
            storage.grow(40).unwrap();
            storage.pack(&[run(0, 40)], &mut back).unwrap();
        }
        assert_eq!(back[..7 * block], bytes[..7 * block]);
        assert!(back[15 * block..16 * block].iter().filter(|&&byte| byte == 0).count() > block / 2);
        // SAFETY: one thread.
        unsafe {
            storage.unpack(&[run(7, 20)], &bytes[7 * block..27 * block]).unwrap();
            storage.pack(&[run(7, 20)], &mut back[..20 * block]).unwrap();
        }
        assert_eq!(back[..20 * block], bytes[7 * block..27 * block]);
    }
}

#[test]
fn buffers_inside_the_frames_are_refused() {
    let layout = KvLayout::named("tiny").unwrap();
    let plane = layout.planes(3).unwrap();
    let mut memory = vec![0u64; plane.bytes / 8];
    let base = memory.as_mut_ptr().cast::<u8>();
    let planes: Vec<_> = plane
        .planes
        .iter()
        .map(|plane| AdoptedPlane { base: base.wrapping_add(plane.base), frame_stride: plane.frame_stride })
        .collect();
    // SAFETY: the memory outlives the storage; no slice of it exists while the storage is used.
    let storage =
        unsafe { HostStorage::adopt_tensors(layout, AdoptedTensors::Planes(&planes), 3, ()) }.unwrap();
    // SAFETY: initialised, and only its address is used.
    let inside = unsafe { std::slice::from_raw_parts(base, storage.layout().packed_bytes()) };
    // SAFETY: one thread; the call is refused.
    let refused = unsafe { storage.unpack(&[run(0, 1)], inside) };
    assert_eq!(refused, Err(aliases("packed buffer")));
    let row = Elements::new(Dtype::Bf16, &inside[..32]).unwrap();
    let outside = [0u8; 32];
    let other = Elements::new(Dtype::Bf16, &outside).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { storage.store(0, row, other, &[0]) }, Err(aliases("k")));
    // SAFETY: as above.
    assert_eq!(unsafe { storage.store(0, other, row, &[0]) }, Err(aliases("v")));
    // SAFETY: one thread.
    assert_eq!(unsafe { storage.store(0, other, other, &[0]) }, Ok(()));
}

#[test]
fn spans_merge() {
    assert_eq!(*merged(vec![5..6, 0..2, 1..3, 3..4, 8..9, 5..7]), [0..4, 5..7, 8..9]);
}

/// Enough bytes for streaming stores; frames in scattered order.
#[test]
#[cfg_attr(miri, ignore = "Miri streams nothing")]
fn many_frames_at_once() {
    for arrangement in [Arrangement::LayerFirst, Arrangement::BlockFirst] {
        let layout =
            KvLayout::named_builder("qwen2.5-0.5b").unwrap().block_tokens(5).arrangement(arrangement);
        let layout = layout.build().unwrap();
        let block = layout.packed_bytes();
        assert!(100 * block > 5 << 20);
        let storage = HostStorage::new(layout, 200, 200).unwrap();
        let bytes: Vec<u8> =
            (0..100 * block as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let order = |frame: u32| FrameId(100 + frame * 37 % 100);
        let moves: Vec<_> = (0..100).map(|frame| FrameMove::new(FrameId(frame), order(frame))).collect();
        let runs: Vec<_> = (0..100).map(|frame| Run { start: order(frame), len: 1 }).collect();
        let mut back = vec![0; bytes.len()];
        // SAFETY: one thread.
        unsafe {
            storage.unpack(&[run(0, 100)], &bytes).unwrap();
            storage.copy(&moves).unwrap();
            storage.pack(&runs, &mut back).unwrap();
        }
        assert!(back == bytes);
    }
}
