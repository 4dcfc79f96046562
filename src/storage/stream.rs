//! Copies that bypass the caches, for many frames at once.
//!
//! A plain copy of a tile reads the destination into the cache, and evicts data that the engine's
//! threads use. A large `memcpy` avoids both with streaming stores, but a tile is far below its
//! threshold. Tiles are therefore streamed here if one call moves more than the caches hold.

/// Smaller calls use the caches, where their bytes are read next.
const BYTES_MIN: usize = 4 << 20;

#[derive(Clone, Copy, Debug)]
struct Piece {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
}

/// Copies the pieces of memory of one call.
///
/// Delays each piece until the next one is known: a tile ends before the hardware prefetcher has
/// adapted to it, so the start of the next tile is fetched while the end of this one is copied.
#[derive(Debug)]
#[must_use = "`finish` copies the last piece"]
pub(super) struct Copier {
    streaming: bool,
    kept: Option<Piece>,
}

impl Copier {
    pub(super) fn new(bytes: usize) -> Self {
        Self { streaming: imp::STREAMS && bytes >= BYTES_MIN, kept: None }
    }

    /// Copies `bytes` bytes, now or in [`finish`](Self::finish).
    ///
    /// # Safety
    /// Until `finish` has been called, both pieces are valid, no one writes the source or accesses
    /// the destination, and neither the two pieces nor two destinations overlap.
    #[inline]
    pub(super) unsafe fn copy(&mut self, from: *const u8, to: *mut u8, bytes: usize) {
        if !self.streaming {
            // SAFETY: the caller's promise.
            return unsafe { from.copy_to_nonoverlapping(to, bytes) };
        }
        if let Some(piece) = self.kept.replace(Piece { from, to, bytes }) {
            // SAFETY: the promise of the call that passed this piece.
            unsafe { imp::stream(piece, from) }
        }
    }

    /// Copies the rest, and orders all copies before later operations of this thread.
    pub(super) fn finish(self) {
        if let Some(piece) = self.kept {
            // SAFETY: the promise of the caller of `copy`.
            unsafe { imp::stream(piece, piece.from) }
        }
        if self.streaming {
            imp::fence();
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod imp {
    use std::arch::x86_64::{
        __m128i, _MM_HINT_NTA, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_stream_si128,
    };

    use super::Piece;

    pub(super) const STREAMS: bool = true;

    const VECTOR: usize = size_of::<__m128i>();
    const LINE: usize = 64;
    /// Prefetch distance: the bytes that memory delivers in about the time of one access.
    const AHEAD: usize = 16 * LINE;

    /// Copies a piece, and fetches the beginning of the `next` source.
    ///
    /// # Safety
    /// As for [`Copier::copy`](super::Copier::copy).
    pub(super) unsafe fn stream(Piece { from, to, bytes }: Piece, next: *const u8) {
        let head = to.align_offset(LINE).min(bytes);
        let lines = (bytes - head) / LINE;
        let tail = head + lines * LINE;
        // SAFETY: head, lines and tail are within the pieces; every destination line is aligned.
        unsafe {
            from.copy_to_nonoverlapping(to, head);
            for at in (head..tail).step_by(LINE) {
                let ahead = at + AHEAD;
                let fetched = if ahead < bytes {
                    from.add(ahead)
                } else {
                    next.wrapping_add((ahead - bytes).min(AHEAD))
                };
                _mm_prefetch::<_MM_HINT_NTA>(fetched.cast());
                for part in 0..LINE / VECTOR {
                    let at = at + part * VECTOR;
                    _mm_stream_si128(to.add(at).cast(), _mm_loadu_si128(from.add(at).cast()));
                }
            }
            from.add(tail).copy_to_nonoverlapping(to.add(tail), bytes - tail);
        }
    }

    pub(super) fn fence() {
        // SAFETY: every x86-64 processor has this instruction.
        unsafe { _mm_sfence() };
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
mod imp {
    use super::Piece;

    pub(super) const STREAMS: bool = false;

    /// # Safety
    /// As for [`Copier::copy`](super::Copier::copy).
    pub(super) unsafe fn stream(Piece { from, to, bytes }: Piece, _next: *const u8) {
        // SAFETY: the caller's promise.
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
                let piece = Piece { from: from[7..].as_ptr(), to: to[phase..].as_mut_ptr(), bytes };
                // SAFETY: within both buffers.
                unsafe { imp::stream(piece, piece.from) };
                imp::fence();
                assert_eq!(to[phase..phase + bytes], from[7..7 + bytes]);
                assert!(to[..phase].iter().chain(&to[phase + bytes..]).all(|&byte| byte == 0));
            }
        }
    }
}
