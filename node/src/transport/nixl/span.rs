use kvpool::storage::{Storage, StoragePlanes};
use kvpool::transport::TransportError;
use kvpool::{DeviceId, Run};
use serde::{Deserialize, Serialize};

/// Largest piece of one request. Over shared memory, posting a request copies its bytes, on the
/// only thread that polls.
pub(super) const PIECE_BYTES: usize = 8 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum Memory {
    Host,
    Cuda(u32),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Span {
    pub(super) start: usize,
    pub(super) len: usize,
}

/// Local bytes, and as many bytes at the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Pair {
    pub(super) local: usize,
    pub(super) remote: usize,
    pub(super) len: usize,
}

impl Pair {
    pub(super) fn local(&self) -> Span {
        Span { start: self.local, len: self.len }
    }

    pub(super) fn remote(&self) -> Span {
        Span { start: self.remote, len: self.len }
    }
}

/// One tensor over all frames: K or V of a layer, or their scales.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Plane {
    base: u64,
    frame_stride: u64,
    frame_bytes: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Region {
    pub(super) memory: Memory,
    frames: u32,
    planes: Vec<Plane>,
}

impl Region {
    /// Describes the current frames of a storage, and returns the owner of their memory.
    pub(super) fn of(storage: &dyn Storage) -> Result<(Self, StoragePlanes), TransportError> {
        let owner = storage.planes().map_err(|error| TransportError::Storage(error.to_string()))?;
        let memory = match storage.device() {
            DeviceId::Host => Memory::Host,
            DeviceId::Cuda(device) => Memory::Cuda(device.into()),
            other => {
                let what = format!("reach the memory of {other}");
                return Err(TransportError::Unsupported { name: "nixl", what });
            }
        };
        let planes = owner.tensors().map(|tensor| Plane {
            base: tensor.data.addr() as u64,
            frame_stride: tensor.frame_stride() as u64,
            frame_bytes: tensor.frame_bytes() as u64,
        });
        Ok((Self { memory, frames: owner.frames() as u32, planes: planes.collect() }, owner))
    }

    /// Returns the memory of all frames, merged where adjacent or interleaved.
    pub(super) fn spans(&self) -> Vec<Span> {
        let whole = |plane: &Plane| {
            let len = (u64::from(self.frames).saturating_sub(1)) * plane.frame_stride + plane.frame_bytes;
            Span { start: plane.base as usize, len: len as usize }
        };
        let mut spans: Vec<Span> = self.planes.iter().map(whole).collect();
        spans.sort_unstable_by_key(|span| span.start);
        spans.dedup_by(|next, last| {
            let joined = next.start <= last.start + last.len;
            if joined {
                last.len = last.len.max(next.start + next.len - last.start);
            }
            joined
        });
        spans
    }

    /// Checks that a peer's region has the same tensors as this one, and possible addresses.
    pub(super) fn check_peer(&self, peer: &Self) -> Result<(), TransportError> {
        let bytes = |region: &Self| region.planes.iter().map(|plane| plane.frame_bytes).collect::<Vec<_>>();
        if bytes(self) != bytes(peer) {
            let what = "write between frames of different tensors".into();
            return Err(TransportError::Unsupported { name: "nixl", what });
        }
        Ok(())
    }

    /// Checks the arithmetic of a region from a peer.
    pub(super) fn check(&self) -> Result<(), TransportError> {
        let is_possible = |plane: &Plane| {
            let span = u64::from(self.frames).checked_mul(plane.frame_stride);
            plane.frame_bytes > 0
                && plane.frame_bytes <= plane.frame_stride
                && span.and_then(|span| span.checked_add(plane.base)).is_some_and(|end| end < 1 << 57)
        };
        match self.planes.iter().all(is_possible) && self.frames > 0 && !self.planes.is_empty() {
            true => Ok(()),
            false => Err(TransportError::Metadata("a region with impossible addresses".into())),
        }
    }

    pub(super) fn check_runs(&self, runs: &[Run], of: &'static str) -> Result<usize, TransportError> {
        let mut frames = 0;
        for run in runs {
            let (start, end) = (u64::from(run.start.0), u64::from(run.start.0) + u64::from(run.len));
            if end > u64::from(self.frames) || run.len == 0 {
                return Err(TransportError::OutOfRange { start, end, of });
            }
            frames += run.len as usize;
        }
        Ok(frames)
    }
}

/// Splits a transfer into requests of at most [`PIECE_BYTES`], with as few pairs as possible. Both
/// lists of runs have the same number of frames, and lie within the regions.
pub(super) fn requests(here: &Region, there: &Region, local: &[Run], remote: &[Run]) -> Vec<Vec<Pair>> {
    let mut requests: Vec<Vec<Pair>> = vec![Vec::new()];
    let mut room = PIECE_BYTES;
    let mut put = |mut pair: Pair| {
        while pair.len > 0 {
            if room == 0 {
                requests.push(Vec::new());
                room = PIECE_BYTES;
            }
            let piece = Pair { len: pair.len.min(room), ..pair };
            let request = requests.last_mut().expect("never empty");
            match request.last_mut() {
                Some(last)
                    if last.local + last.len == piece.local && last.remote + last.len == piece.remote =>
                {
                    last.len += piece.len;
                }
                _ => request.push(piece),
            }
            room -= piece.len;
            pair = Pair {
                local: pair.local + piece.len,
                remote: pair.remote + piece.len,
                len: pair.len - piece.len,
            };
        }
    };
    for segment in segments(local, remote) {
        merged(here, there, segment).into_iter().for_each(&mut put);
    }
    requests
}

/// Returns the bytes of consecutive frames `(local, remote, frames)`, merged where adjacent.
fn merged(here: &Region, there: &Region, (from, to, frames): (u32, u32, u32)) -> Vec<Pair> {
    let address = |plane: &Plane, frame: u32| (plane.base + u64::from(frame) * plane.frame_stride) as usize;
    let mut pairs: Vec<Pair> = (here.planes.iter().zip(&there.planes))
        .flat_map(|(here, there)| {
            (0..frames).map(move |frame| Pair {
                local: address(here, from + frame),
                remote: address(there, to + frame),
                len: here.frame_bytes as usize,
            })
        })
        .collect();
    // Tensors may interleave: K and V of a frame, or all its layers.
    pairs.sort_unstable_by_key(|pair| pair.local);
    pairs.dedup_by(|next, last| {
        let touch = last.local + last.len == next.local && last.remote + last.len == next.remote;
        if touch {
            last.len += next.len;
        }
        touch
    });
    pairs
}

/// Splits both lists of runs into pieces that are consecutive in both: `(local, remote, frames)`.
fn segments(local: &[Run], remote: &[Run]) -> Vec<(u32, u32, u32)> {
    let mut segments = Vec::new();
    let (mut local, mut remote) = (local.iter().copied(), remote.iter().copied());
    let (mut from, mut to) = (local.next(), remote.next());
    while let (Some(a), Some(b)) = (from, to) {
        let len = a.len.min(b.len);
        segments.push((a.start.0, b.start.0, len));
        let rest = |run: Run| Run { start: kvpool::FrameId(run.start.0 + len), len: run.len - len };
        from = if a.len > len { Some(rest(a)) } else { local.next() };
        to = if b.len > len { Some(rest(b)) } else { remote.next() };
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool::FrameId;

    fn run(start: u32, len: u32) -> Run {
        Run { start: FrameId(start), len }
    }

    fn region(base: u64, frame_bytes: u64, frame_stride: u64) -> Region {
        let plane = |place: u64| Plane { base: base + place * 1_000_000, frame_stride, frame_bytes };
        Region { memory: Memory::Host, frames: 100, planes: vec![plane(0), plane(1)] }
    }

    #[test]
    fn runs_are_cut_where_either_side_breaks() {
        let pieces = segments(&[run(0, 5), run(9, 3)], &[run(20, 2), run(40, 6)]);
        assert_eq!(pieces, [(0, 20, 2), (2, 40, 3), (9, 43, 3)]);
    }

    #[test]
    fn a_run_is_one_pair_for_each_tensor_if_frames_are_dense() {
        let (here, there) = (region(0, 64, 64), region(1 << 30, 64, 64));
        let all = requests(&here, &there, &[run(2, 3)], &[run(7, 3)]);
        let pair = |plane: usize| Pair {
            local: plane * 1_000_000 + 2 * 64,
            remote: (1 << 30) + plane * 1_000_000 + 7 * 64,
            len: 3 * 64,
        };
        assert_eq!(all, [vec![pair(0), pair(1)]]);
        let apart = requests(&here, &region(1 << 30, 64, 128), &[run(2, 3)], &[run(7, 3)]);
        assert_eq!(apart[0].len(), 6, "a pair for each frame and tensor");
    }

    #[test]
    fn requests_are_bounded_and_lose_no_byte() {
        let bytes = (PIECE_BYTES / 3) as u64;
        let plane = |base| Plane { base, frame_stride: bytes, frame_bytes: bytes };
        let of = |base| Region { memory: Memory::Host, frames: 100, planes: vec![plane(base)] };
        let all = requests(&of(0), &of(1 << 40), &[run(0, 10)], &[run(50, 10)]);
        let len = |request: &Vec<Pair>| request.iter().map(|pair| pair.len).sum::<usize>();
        assert!(all.iter().all(|request| len(request) <= PIECE_BYTES && len(request) > 0));
        assert_eq!(all.iter().map(len).sum::<usize>(), 10 * bytes as usize);
        assert_eq!(all.len(), 4);
    }

    #[test]
    fn impossible_regions_of_a_peer_are_refused() {
        assert!(region(0, 64, 64).check().is_ok());
        assert!(region(0, 64, 32).check().is_err(), "frames overlap");
        assert!(region(u64::MAX - 10_000_000, 64, 1 << 40).check().is_err(), "beyond the address space");
        assert!(Region { frames: 0, ..region(0, 64, 64) }.check().is_err());
        assert!(region(0, 64, 64).check_peer(&region(0, 32, 64)).is_err());
        assert!(region(0, 64, 64).check_runs(&[run(98, 3)], "the peer's frames").is_err());
    }
}
