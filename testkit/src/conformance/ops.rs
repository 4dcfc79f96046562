//! Valid operations, and random valid and invalid ones, on a storage and its reference.

use std::sync::mpsc;
use std::time::Duration;

use kvpool::storage::{Elements, ElementsMut, FrameMove, KvLayout, Storage};
use kvpool::{Dtype, FrameId, Run, StorageError};

use crate::rng::Rng;
use crate::scalar::{Rows, ScalarStorage, same};

use super::{FRAMES, FRAMES_MAX, elements};

/// Time limit of a copy of a few small frames on a busy device.
const COPY_MAX: Duration = Duration::from_secs(30);

/// One operation, valid or not.
#[derive(Clone, Debug)]
pub enum Op {
    /// Stores random rows of the `dtype`-th type that the layout accepts.
    Store {
        /// Layer, modulo the number of layers.
        layer: usize,
        /// Index of the element type.
        dtype: usize,
        /// Destination slots.
        slots: Vec<i64>,
        /// Seed of the rows.
        seed: u64,
    },
    /// Loads rows and compares them.
    Load {
        /// Layer, modulo the number of layers.
        layer: usize,
        /// Index of the element type.
        dtype: usize,
        /// Source slots.
        slots: Vec<i64>,
    },
    /// Copies frames.
    Copy(Vec<FrameMove>),
    /// Copies frames, possibly asynchronously.
    CopyThen(Vec<FrameMove>),
    /// Zeroes frames.
    Zero(Vec<Run>),
    /// Packs frames and compares the bytes.
    Pack(Vec<Run>),
    /// Unpacks random bytes.
    Unpack(Vec<Run>, u64),
}

impl Op {
    /// Returns an operation on about `frames` frames, occasionally one that must be refused.
    pub fn random(layout: &KvLayout, frames: usize, rng: &mut Rng) -> Self {
        let reach = frames + usize::from(rng.below(8) == 0);
        let slots = |rng: &mut Rng| -> Vec<i64> {
            let end = (reach * layout.block_tokens()) as i64;
            let mut slots = Vec::new();
            for _ in 0..rng.below(4) {
                let start = rng.below(end as usize + 2) as i64 - 2;
                slots.extend((start..end).take(1 + rng.below(2 * layout.block_tokens())));
            }
            slots
        };
        let frame = |rng: &mut Rng| FrameId(rng.below(reach) as u32);
        let runs = |rng: &mut Rng| -> Vec<Run> {
            (0..rng.below(4)).map(|_| Run { start: frame(rng), len: rng.below(3) as u32 }).collect()
        };
        match rng.below(8) {
            0..3 => {
                Self::Store { layer: rng.below(9), dtype: rng.below(9), slots: slots(rng), seed: rng.bits() }
            }
            3 => Self::Load { layer: rng.below(9), dtype: rng.below(9), slots: slots(rng) },
            4 => {
                let moves = (0..rng.below(4)).map(|_| FrameMove::new(frame(rng), frame(rng))).collect();
                if rng.below(2) == 0 { Self::Copy(moves) } else { Self::CopyThen(moves) }
            }
            5 => Self::Zero(runs(rng)),
            6 => Self::Pack(runs(rng)),
            _ => Self::Unpack(runs(rng), rng.bits()),
        }
    }
}

/// A storage, and the reference with its expected contents.
pub struct Pair<'a> {
    storage: &'a dyn Storage,
    reference: ScalarStorage,
}

impl<'a> Pair<'a> {
    /// Takes the storage's current contents as the expected ones.
    ///
    /// # Panics
    /// If the storage cannot be packed.
    pub fn new(storage: &'a dyn Storage) -> Self {
        let mut reference = ScalarStorage::new(storage.layout().clone(), storage.frames());
        let held = pack_all(storage);
        reference.unpack(&[all(storage.frames())], &held);
        Self { storage, reference }
    }

    /// Applies `op` to both, and compares the results and all frames.
    ///
    /// # Panics
    /// If they differ, or a valid operation was refused, or an invalid one was not.
    pub fn apply(&mut self, op: &Op) {
        let Self { storage, reference } = self;
        let layers = storage.layout().layers();
        let pick = |dtypes: Vec<Dtype>, index: usize| dtypes[index % dtypes.len()];
        let (good, done) = match op {
            Op::Store { layer, dtype, slots, seed } => {
                let (layer, dtype) = (layer % layers, pick(reference.dtypes(), *dtype));
                let rows = rows(storage.layout(), reference.halves(), dtype, slots.len(), *seed);
                let good = reference.slots_are_good(slots, true);
                if good {
                    for (half, rows) in rows.iter().enumerate() {
                        reference.store(layer, half, rows, slots);
                    }
                }
                (good, store(*storage, layer, &rows, slots))
            }
            Op::Load { layer, dtype, slots } => {
                let (layer, dtype) = (layer % layers, pick(reference.dtypes(), *dtype));
                let mut got = rows(storage.layout(), reference.halves(), dtype, slots.len(), 5);
                let mut want = got.clone();
                let good = reference.slots_are_good(slots, false);
                if good {
                    for (half, rows) in want.iter_mut().enumerate() {
                        reference.load(layer, half, slots, rows);
                    }
                }
                let done = load(*storage, layer, slots, &mut got);
                for (got, want) in got.iter().zip(&want) {
                    assert!(same(got, want), "{op:?}: loaded {got:?}, expected {want:?}");
                }
                (good, done)
            }
            Op::Copy(moves) => {
                let good = reference.moves_are_good(moves);
                if good {
                    reference.copy(moves);
                }
                // SAFETY: one thread.
                (good, unsafe { storage.copy(moves) })
            }
            Op::CopyThen(moves) => {
                let good = reference.moves_are_good(moves);
                if good {
                    reference.copy(moves);
                }
                (good, copy_then(*storage, moves))
            }
            Op::Zero(runs) => {
                let good = reference.runs_are_good(runs, true);
                if good {
                    reference.zero(runs);
                }
                // SAFETY: one thread.
                (good, unsafe { storage.zero(runs) })
            }
            Op::Pack(runs) => {
                let good = reference.runs_are_good(runs, false);
                let want =
                    if good { reference.pack(runs) } else { vec![7; packed_bytes(storage.layout(), runs)] };
                let mut got = vec![7; want.len()];
                // SAFETY: one thread.
                let done = unsafe { storage.pack(runs, &mut got) };
                assert_eq!(got, want, "{op:?}");
                (good, done)
            }
            Op::Unpack(runs, seed) => {
                let good = reference.runs_are_good(runs, true);
                let bytes = Rng(*seed).bytes(packed_bytes(storage.layout(), runs));
                if good {
                    reference.unpack(runs, &bytes);
                }
                // SAFETY: one thread.
                (good, unsafe { storage.unpack(runs, &bytes) })
            }
        };
        assert_eq!(done.is_ok(), good, "{op:?}: {done:?}");
        self.compare(op);
    }

    fn compare(&self, after: &dyn std::fmt::Debug) {
        let want = self.reference.pack(&[all(self.reference.frames())]);
        assert!(pack_all(self.storage) == want, "the bytes differ from the reference's after {after:?}");
    }
}

pub(super) const fn all(frames: usize) -> Run {
    Run { start: FrameId(0), len: frames as u32 }
}

pub(super) fn packed_bytes(layout: &KvLayout, runs: &[Run]) -> usize {
    runs.iter().map(|run| run.len as usize).sum::<usize>() * layout.packed_bytes()
}

/// Returns the whole contents of a storage.
pub(super) fn pack_all(storage: &dyn Storage) -> Vec<u8> {
    let mut bytes = vec![0; storage.frames() * storage.layout().packed_bytes()];
    // SAFETY: the suite shares a storage among threads only in `neighbours_at_once`, after they are
    // joined.
    unsafe { storage.pack(&[all(storage.frames())], &mut bytes) }.expect("all frames can be packed");
    bytes
}

/// Rows for K, and for V unless the layout is latent.
pub(super) fn rows(layout: &KvLayout, halves: usize, dtype: Dtype, slots: usize, seed: u64) -> Vec<Rows> {
    let mut rng = Rng(seed);
    (0..halves).map(|_| elements(dtype, slots * layout.row_elements(), &mut rng)).collect()
}

pub(super) fn store(
    storage: &dyn Storage,
    layer: usize,
    rows: &[Rows],
    slots: &[i64],
) -> Result<(), StorageError> {
    let k = Elements::new(rows[0].dtype, &rows[0].bytes)?;
    let v = rows.get(1).map_or(Ok(Elements::none()), |rows| Elements::new(rows.dtype, &rows.bytes))?;
    // SAFETY: one thread, or threads that store to different slots.
    unsafe { storage.store(layer, k, v, slots) }
}

pub(super) fn load(
    storage: &dyn Storage,
    layer: usize,
    slots: &[i64],
    rows: &mut [Rows],
) -> Result<(), StorageError> {
    let (k, v) = rows.split_at_mut(1);
    let k = ElementsMut::new(k[0].dtype, &mut k[0].bytes)?;
    let v = match v.first_mut() {
        Some(rows) => ElementsMut::new(rows.dtype, &mut rows.bytes)?,
        None => ElementsMut::none(),
    };
    // SAFETY: one thread, or no thread stores to these slots.
    unsafe { storage.load(layer, slots, k, v) }
}

/// Copies frames and waits for completion.
pub(super) fn copy_then(storage: &dyn Storage, moves: &[FrameMove]) -> Result<(), StorageError> {
    let (send, over) = mpsc::channel();
    // SAFETY: one thread, which waits until the copy is complete.
    unsafe {
        storage
            .copy_then(moves, Box::new(move |outcome| send.send(outcome).expect("the receiver is waiting")))
    };
    over.recv_timeout(COPY_MAX).expect("the copy completes in time")
}

/// Each operation once in each of its shapes.
pub(super) fn every_operation(storage: &dyn Storage, seed: u64) {
    let mut pair = Pair::new(storage);
    let tokens = storage.layout().block_tokens() as i64;
    let run = |start, len| Run { start: FrameId(start), len };
    let step = |src, dst| FrameMove::new(FrameId(src), FrameId(dst));
    let whole: Vec<i64> = (0..FRAMES as i64 * tokens).collect();
    let backwards: Vec<i64> = whole.iter().rev().copied().collect();
    let padded: Vec<i64> =
        (0..3 * tokens).map(|slot| if slot % 3 == 1 { -1 - slot } else { slot + tokens }).collect();
    let dtypes = if cfg!(miri) { 1 } else { pair.reference.dtypes().len() };
    for dtype in 0..dtypes {
        for layer in 0..storage.layout().layers() {
            // Miri checks the addresses, which are the same for every list.
            for slots in [&padded, &whole, &backwards, &vec![], &vec![-1, -1], &vec![2 * tokens]]
                .into_iter()
                .take(if cfg!(miri) { 1 } else { usize::MAX })
            {
                let slots = slots.clone();
                pair.apply(&Op::Store { layer, dtype, slots: slots.clone(), seed: seed + dtype as u64 });
                pair.apply(&Op::Load { layer, dtype, slots: slots.clone() });
                // A slot may be read twice.
                pair.apply(&Op::Load { layer, dtype: dtype + 1, slots: [slots.clone(), slots].concat() });
            }
        }
    }
    // One apart; neighbours to neighbours; one to many; back to front; none.
    for moves in [
        vec![step(0, 5)],
        vec![step(0, 3), step(1, 4), step(2, 5)],
        vec![step(1, 0), step(1, 2), step(1, 4)],
        vec![step(5, 0), step(4, 1), step(3, 2)],
        vec![],
    ] {
        pair.apply(&Op::Unpack(vec![all(FRAMES)], seed));
        pair.apply(&Op::Copy(moves.clone()));
        pair.apply(&Op::Unpack(vec![all(FRAMES)], seed + 1));
        pair.apply(&Op::CopyThen(moves));
    }
    for runs in [vec![run(2, 3)], vec![run(4, 2), run(0, 1)], vec![run(6, 0)], vec![], vec![all(FRAMES)]] {
        pair.apply(&Op::Unpack(runs.clone(), seed));
        pair.apply(&Op::Pack([runs.clone(), runs.clone()].concat()));
        pair.apply(&Op::Zero(runs));
    }
}

/// Random operations, invalid ones among them.
pub(super) fn random_operations(storage: &dyn Storage, seed: u64, count: usize) {
    let mut rng = Rng(seed);
    let mut pair = Pair::new(storage);
    for _ in 0..count {
        pair.apply(&Op::random(storage.layout(), FRAMES, &mut rng));
    }
}

/// Growth keeps existing contents; the new frames are usable.
pub(super) fn growing(storage: &dyn Storage) {
    let mut pair = Pair::new(storage);
    pair.apply(&Op::Unpack(vec![all(FRAMES)], 3));
    storage.grow(1).expect("growing to fewer frames has no effect");
    assert_eq!(storage.frames(), FRAMES);
    if storage.frames_max() > FRAMES {
        storage.grow(FRAMES + 1).expect("one more");
        storage.grow(FRAMES_MAX).expect("all of them");
        assert_eq!(storage.frames(), FRAMES_MAX);
        let mut grown = Pair::new(storage);
        grown.apply(&Op::Unpack(vec![Run { start: FrameId(FRAMES as u32), len: 3 }], 4));
        grown.apply(&Op::Copy(vec![FrameMove::new(FrameId(0), FrameId(8))]));
        // The contents before growth.
        let first = pair.reference.pack(&[all(FRAMES)]);
        assert!(pack_all(storage)[..first.len()] == first, "growing changed existing bytes");
    }
    storage.grow(storage.frames_max() + 1).expect_err("above the maximum");
}

/// Shrinking keeps every byte of the remaining frames and refuses the others; growth brings them
/// back.
pub(super) fn shrinking(storage: &dyn Storage) {
    const KEPT: usize = 2;
    let mut pair = Pair::new(storage);
    pair.apply(&Op::Unpack(vec![all(FRAMES)], 8));
    let kept = pair.reference.pack(&[all(KEPT)]);
    // The second call repeats the first, the third shrinks by nothing.
    for total in [KEPT, KEPT, KEPT + 1] {
        // SAFETY: one thread.
        unsafe { storage.shrink(total) };
        assert_eq!(storage.frames(), KEPT);
        assert!(pack_all(storage) == kept, "shrinking changed the remaining frames");
    }
    let mut small = Pair::new(storage);
    // The last frame, and the first one past the end.
    for frame in [KEPT - 1, KEPT] {
        let (one, frame) = (Run { start: FrameId(frame as u32), len: 1 }, FrameId(frame as u32));
        small.apply(&Op::Unpack(vec![one], 9));
        small.apply(&Op::Copy(vec![FrameMove::new(FrameId(0), frame)]));
        let slot = frame.index() * storage.layout().block_tokens();
        small.apply(&Op::Store { layer: 0, dtype: 0, slots: vec![slot as i64], seed: 10 });
    }
    let kept = small.reference.pack(&[all(KEPT)]);
    storage.grow(FRAMES).expect("the storage had this size before");
    assert_eq!(storage.frames(), FRAMES);
    assert!(pack_all(storage)[..kept.len()] == kept, "growing again changed existing bytes");
    let mut grown = Pair::new(storage);
    grown.apply(&Op::Unpack(vec![Run { start: FrameId(KEPT as u32), len: (FRAMES - KEPT) as u32 }], 11));
    grown.apply(&Op::Copy(vec![FrameMove::new(FrameId(FRAMES as u32 - 1), FrameId(0))]));
}

/// Threads store to, and load from, different slots of the same frames at once.
pub(super) fn neighbours_at_once(storage: &dyn Storage) {
    let mut reference = Pair::new(storage).reference;
    let slots = (FRAMES * storage.layout().block_tokens()) as i64;
    let dtype = reference.dtypes()[0];
    let shares: Vec<Vec<i64>> =
        (0..2).map(|rest| (0..slots).filter(|slot| slot % 2 == rest).collect()).collect();
    let all_rows: Vec<Vec<Rows>> = (0..)
        .zip(&shares)
        .map(|(seed, share)| rows(storage.layout(), reference.halves(), dtype, share.len(), seed))
        .collect();
    crate::threads::scope(|scope| {
        for (share, rows) in shares.iter().zip(&all_rows) {
            scope.spawn(move || {
                for layer in 0..storage.layout().layers() {
                    store(storage, layer, rows, share).expect("valid slots");
                    let mut back: Vec<Rows> =
                        rows.iter().map(|rows| Rows { dtype, bytes: vec![0; rows.bytes.len()] }).collect();
                    load(storage, layer, share, &mut back).expect("valid slots");
                }
            });
        }
    });
    for (share, rows) in shares.iter().zip(&all_rows) {
        for layer in 0..storage.layout().layers() {
            for (half, rows) in rows.iter().enumerate() {
                reference.store(layer, half, rows, share);
            }
        }
    }
    Pair { storage, reference }.compare(&"two threads");
}
