//! Copies that go around the caches, for many frames at once.
//!
//! A plain copy of a tile reads the destination into the cache before it overwrites it, and drives out what the engine's
//! threads were working on. A large `memcpy` avoids both by streaming stores, but a tile is far below its threshold. So
//! when one call moves more than the caches hold, tiles are streamed here.

/// Calls that move fewer bytes stay in the caches, where they are read next.
const BYTES_MIN: usize = 4 << 20;

/// Copies pieces of memory; chosen once a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copier {
    streaming: bool,
}

impl Copier {
    /// For a call that copies `bytes` in all.
    pub(super) fn new(bytes: usize) -> Self {
        Self { streaming: imp::STREAMS && bytes >= BYTES_MIN }
    }

    /// Copies `bytes` bytes.
    ///
    /// # Safety
    /// Both pieces are valid and do not overlap. The bytes are visible to others only once [`finish`](Self::finish) has
    /// been called.
    #[inline]
    pub(super) unsafe fn copy(self, from: *const u8, to: *mut u8, bytes: usize) {
        if self.streaming {
            // SAFETY: as promised by the caller.
            unsafe { imp::stream(from, to, bytes) }
        } else {
            // SAFETY: as promised by the caller.
            unsafe { from.copy_to_nonoverlapping(to, bytes) }
        }
    }

    /// Orders all that was copied before whatever this thread does next.
    pub(super) fn finish(self) {
        if self.streaming {
            imp::fence();
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod imp {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    pub(super) const STREAMS: bool = true;

    const VECTOR: usize = size_of::<__m128i>();
    const LINE: usize = 64;

    /// # Safety
    /// As for [`Copier::copy`](super::Copier::copy).
    pub(super) unsafe fn stream(from: *const u8, to: *mut u8, bytes: usize) {
        let head = to.align_offset(LINE).min(bytes);
        let lines = (bytes - head) / LINE;
        let tail = head + lines * LINE;
        // SAFETY: head, lines and tail are within the pieces; every line of the destination is aligned.
        unsafe {
            from.copy_to_nonoverlapping(to, head);
            for at in (head..tail).step_by(LINE) {
                for part in 0..LINE / VECTOR {
                    let at = at + part * VECTOR;
                    _mm_stream_si128(to.add(at).cast(), _mm_loadu_si128(from.add(at).cast()));
                }
            }
            from.add(tail).copy_to_nonoverlapping(to.add(tail), bytes - tail);
        }
    }

    pub(super) fn fence() {
        // SAFETY: every x86-64 has it.
        unsafe { _mm_sfence() };
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
mod imp {
    pub(super) const STREAMS: bool = false;

    /// # Safety
    /// As for [`Copier::copy`](super::Copier::copy).
    pub(super) unsafe fn stream(from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: as promised by the caller.
        unsafe { from.copy_to_nonoverlapping(to, bytes) }
    }

    pub(super) fn fence() {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_and_length() {
        let from: Vec<u8> = (0..400).map(|index| index as u8 | 1).collect();
        for phase in [0, 1, 15, 16, 63] {
            for bytes in [0, 1, 15, 63, 64, 65, 127, 128, 200] {
                let mut to = vec![0u8; 400];
                // SAFETY: within both.
                unsafe { imp::stream(from[7..].as_ptr(), to[phase..].as_mut_ptr(), bytes) };
                imp::fence();
                assert_eq!(to[phase..phase + bytes], from[7..7 + bytes]);
                assert!(to[..phase].iter().chain(&to[phase + bytes..]).all(|&byte| byte == 0));
            }
        }
    }
}
