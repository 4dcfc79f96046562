//! Checksums of packed blocks.
//!
//! Host memory is read in place, by several threads if there are many bytes; other storages are
//! first packed into a buffer.

use std::hash::Hasher;
use std::sync::{Mutex, PoisonError};

use twox_hash::xxhash3_64::{Hasher as XxHash3_64, RawHasher, SecretBuffer};

use crate::error::StorageError;
use crate::ids::{DeviceId, FrameId, Run};
use crate::storage::{PlaneTensor, Storage, StoragePlanes};
use crate::sync::{available_parallelism, on_threads};

/// Bytes that are packed at once.
const PACKED_AT_ONCE: usize = 8 << 20;

/// Bytes that are worth a thread.
const BYTES_PER_THREAD: usize = 8 << 20;

const THREADS_MAX: usize = 4;

pub(super) struct Checksum(RawHasher<&'static [u8; 192]>);

impl Checksum {
    pub(super) fn new() -> Self {
        Self(RawHasher::new(SecretBuffer::default()))
    }

    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    pub(super) fn finish(self) -> u64 {
        self.0.finish()
    }
}

/// Returns the checksum of a packed block: its XXH3-64.
pub(super) fn checksum(packed: &[u8]) -> u64 {
    XxHash3_64::oneshot(packed)
}

/// Returns the checksum of the block in each frame of some runs, in order.
///
/// # Safety
/// As for [`Storage::pack`].
pub(super) unsafe fn checksums(storage: &dyn Storage, runs: &[Run]) -> Result<Vec<u64>, StorageError> {
    let bytes = storage.layout().packed_bytes();
    let frames: Vec<FrameId> = runs.iter().flat_map(|run| run.frames()).collect();
    if let Some(planes) = host_planes(storage, bytes) {
        return Ok(in_place(&planes.tensors().collect::<Vec<_>>(), &frames, bytes));
    }
    let mut sums = Vec::with_capacity(frames.len());
    let mut packed = vec![0; bytes * (PACKED_AT_ONCE / bytes).clamp(1, frames.len().max(1))];
    for frames in frames.chunks(packed.len() / bytes) {
        let runs: Vec<_> = frames.iter().map(|&start| Run { start, len: 1 }).collect();
        let packed = &mut packed[..frames.len() * bytes];
        // SAFETY: the caller's.
        unsafe { storage.pack(&runs, packed) }?;
        sums.extend(packed.chunks_exact(bytes).map(checksum));
    }
    Ok(sums)
}

/// Returns the planes of a storage in host memory; a packed block is a frame of each in turn.
fn host_planes(storage: &dyn Storage, bytes: usize) -> Option<StoragePlanes> {
    let planes = storage.planes().ok().filter(|planes| planes.device() == DeviceId::Host)?;
    let sum: usize = planes.tensors().map(|tensor| tensor.frame_bytes()).sum();
    (sum == bytes).then_some(planes)
}

fn in_place(tensors: &[PlaneTensor], frames: &[FrameId], bytes: usize) -> Vec<u64> {
    let threads = (frames.len() * bytes / BYTES_PER_THREAD).min(available_parallelism()).min(THREADS_MAX);
    if threads < 2 {
        return frames.iter().map(|&frame| of_frame(tensors, frame)).collect();
    }
    let mut sums = vec![0; frames.len()];
    let part = frames.len().div_ceil(threads);
    let parts = Mutex::new(sums.chunks_mut(part).zip(frames.chunks(part)));
    let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some((sums, frames)) = next() {
            sums.iter_mut().zip(frames).for_each(|(sum, &frame)| *sum = of_frame(tensors, frame));
        }
    };
    on_threads(threads, work);
    sums
}

fn of_frame(tensors: &[PlaneTensor], frame: FrameId) -> u64 {
    let mut sum = Checksum::new();
    for tensor in tensors {
        let start = tensor.data.wrapping_add(frame.index() * tensor.frame_stride());
        // SAFETY: a frame of the storage, initialised host memory; no thread writes it, by the
        // contract of `checksums`.
        sum.add(unsafe { std::slice::from_raw_parts(start, tensor.frame_bytes()) });
    }
    sum.finish()
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::storage::{Arrangement, HostStorage, KvLayout, KvPlanes, Scales};

    /// Reading in place, whole or in pieces, yields the checksum of the packed block.
    #[test]
    fn memory_in_place_has_the_checksum_of_its_packed_form() {
        let large = BYTES_PER_THREAD.div_ceil(40 << 10) * 3;
        let arrangements = [Arrangement::LayerFirst, Arrangement::BlockFirst];
        for (arrangement, frames) in arrangements.into_iter().zip([large, 9]) {
            for parts in [KvPlanes::Separate, KvPlanes::Joined] {
                for (dtype, scales) in [(Dtype::Bf16, Scales::Unit), (Dtype::Int8, Scales::PerTokenHead)] {
                    let layout = KvLayout::builder().layers(3).kv_heads(5).head_dim(80).block_tokens(9);
                    let layout = layout.dtype(dtype).scales(scales).arrangement(arrangement).parts(parts);
                    let layout = layout.build().unwrap();
                    let storage = HostStorage::new(layout.clone(), frames, frames).unwrap();
                    let run = |start, len| Run { start: FrameId(start), len };
                    let all = run(0, frames as u32);
                    let mut bytes = vec![0; frames * layout.packed_bytes()];
                    let mut rng = fastrand::Rng::with_seed(frames as u64);
                    rng.fill(&mut bytes);
                    // SAFETY: one thread.
                    unsafe { storage.unpack(&[all], &bytes) }.unwrap();
                    let expected: Vec<_> = bytes.chunks(layout.packed_bytes()).map(checksum).collect();
                    assert!(host_planes(&storage, layout.packed_bytes()).is_some());
                    // SAFETY: one thread writes.
                    assert!(unsafe { checksums(&storage, &[all]) }.unwrap() == expected, "{layout}");
                    let some = [run(7, 2), run(0, 1), run(7, 1)];
                    // SAFETY: as above.
                    let got = unsafe { checksums(&storage, &some) }.unwrap();
                    assert_eq!(got, [7, 8, 0, 7].map(|frame| expected[frame]), "{layout}");
                    let mut pieces = Checksum::new();
                    let mut rest = &bytes[..layout.packed_bytes()];
                    while !rest.is_empty() {
                        let (piece, next) = rest.split_at(rng.usize(0..=rest.len().min(700)));
                        pieces.add(piece);
                        rest = next;
                    }
                    assert_eq!(pieces.finish(), expected[0]);
                }
            }
        }
    }
}
