//! The engine's memory.
//!
//! *The stream* executes the commands that batches enqueue, in order, and some time later: writes,
//! copies of shared blocks, reads. A read checks the token when it is executed, and again until its
//! batch ends, because kernels take time. Meanwhile no write may change it, except in the block of
//! the read itself, if its owner truncated and rewrote it: that write is ordered after the read in
//! the stream.
//!
//! *The copy engine* executes the pool's copies, beside the stream, token by token.

use std::collections::{BTreeMap, VecDeque};

use kvpool::storage::{CopyDone, FrameMove};
use kvpool::{BlockHandle, FrameId};

/// Content of a frame that was removed, or is partly copied.
const POISON: u64 = u64::MAX;

/// A token's place and content.
#[derive(Clone, Copy, Debug)]
pub struct Token {
    /// Its slot.
    pub slot: usize,
    /// Its block.
    pub block: BlockHandle,
    /// Its content.
    pub value: u64,
}

enum Op {
    Write(Token),
    Read(Token),
    Copy { frames: FrameMove, to: BlockHandle },
}

/// A copy that the pool asked for.
struct Copying {
    moves: Vec<FrameMove>,
    done: CopyDone,
    /// Number of tokens copied so far.
    copied: usize,
}

/// A device with a stream and a copy engine.
#[derive(Default)]
pub struct Device {
    /// Tokens per block.
    block_tokens: usize,
    slots: Vec<u64>,
    /// Readers of each slot, with the content that they expect.
    readers: Vec<Vec<(u64, Token)>>,
    /// Slots that a batch reads.
    reads: BTreeMap<u64, Vec<usize>>,
    stream: VecDeque<(u64, Op)>,
    /// By frame: number of enqueued commands that change it.
    changes: Vec<u32>,
    copies: Vec<Copying>,
    /// Current number of frames.
    frames: usize,
}

impl Device {
    pub fn new(frames: usize, frames_max: usize, block_tokens: usize) -> Self {
        Self {
            block_tokens,
            slots: vec![POISON; frames_max * block_tokens],
            readers: vec![Vec::new(); frames_max * block_tokens],
            changes: vec![0; frames_max],
            frames,
            ..Self::default()
        }
    }

    fn frame_of(&self, slot: usize) -> FrameId {
        FrameId((slot / self.block_tokens) as u32)
    }

    fn slots_of(&self, frame: FrameId) -> std::ops::Range<usize> {
        frame.index() * self.block_tokens..(frame.index() + 1) * self.block_tokens
    }

    /// Sets the pool's current number of frames.
    pub fn resize(&mut self, frames: usize) {
        for frame in (frames..self.frames).map(|frame| FrameId(frame as u32)) {
            assert_eq!(self.changes[frame.index()], 0, "frame {frame} was removed, and will be written");
            self.is_not_copied(frame);
            for slot in self.slots_of(frame) {
                assert!(
                    self.readers[slot].is_empty(),
                    "slot {slot} was removed while read: {:?}",
                    self.readers[slot]
                );
                self.slots[slot] = POISON;
            }
        }
        self.frames = frames;
    }

    /// Enqueues a write.
    pub fn write(&mut self, batch: u64, token: Token) {
        let frame = self.frame_of(token.slot).index();
        self.changes[frame] += 1;
        self.stream.push_back((batch, Op::Write(token)));
    }

    /// Enqueues a read.
    pub fn read(&mut self, batch: u64, token: Token) {
        self.stream.push_back((batch, Op::Read(token)));
    }

    /// Enqueues the copy of a block that cannot be written.
    pub fn copy(&mut self, batch: u64, frames: FrameMove, to: BlockHandle) {
        self.changes[frames.dst.index()] += 1;
        self.stream.push_back((batch, Op::Copy { frames, to }));
    }

    /// Executes up to `count` enqueued commands.
    pub fn work(&mut self, count: usize) {
        for _ in 0..count {
            let Some((batch, op)) = self.stream.pop_front() else { return };
            match op {
                Op::Write(token) => self.do_write(token),
                Op::Read(token) => self.do_read(batch, token),
                Op::Copy { frames, to } => {
                    self.is_there(frames.src);
                    for (from, slot) in self.slots_of(frames.src).zip(self.slots_of(frames.dst)) {
                        self.changes[frames.dst.index()] += 1;
                        self.do_write(Token { slot, block: to, value: self.slots[from] });
                    }
                    self.changes[frames.dst.index()] -= 1;
                }
            }
        }
    }

    /// Executes all commands of a batch, whose reads end with it.
    pub fn end_batch(&mut self, batch: u64) {
        let last = self.stream.iter().rposition(|(of, _)| *of == batch);
        self.work(last.map_or(0, |last| last + 1));
        self.check_reads(batch);
        for slot in self.reads.remove(&batch).unwrap_or_default() {
            self.readers[slot].retain(|(reader, _)| *reader != batch);
        }
    }

    /// Checks that the content of a batch's reads is unchanged.
    pub fn check_reads(&self, batch: u64) {
        for &slot in self.reads.get(&batch).into_iter().flatten() {
            for (_, token) in self.readers[slot].iter().filter(|(reader, _)| *reader == batch) {
                assert_eq!(self.slots[slot], token.value, "batch {batch} reads {token:?}");
            }
        }
    }

    fn is_there(&self, frame: FrameId) {
        assert!(frame.index() < self.frames, "frame {frame} was removed");
        let half = self.copies.iter().any(|copy| copy.moves.iter().any(|moved| moved.dst == frame));
        assert!(!half, "frame {frame} is read while a block is being copied to it");
    }

    fn is_not_copied(&self, frame: FrameId) {
        for moved in self.copies.iter().flat_map(|copy| &copy.moves) {
            assert!(moved.src != frame && moved.dst != frame, "frame {frame} changes during {moved:?}");
        }
    }

    fn do_read(&mut self, batch: u64, token: Token) {
        self.is_there(self.frame_of(token.slot));
        assert_eq!(self.slots[token.slot], token.value, "batch {batch} reads {token:?}");
        self.readers[token.slot].push((batch, token));
        self.reads.entry(batch).or_default().push(token.slot);
    }

    fn do_write(&mut self, token: Token) {
        let (slot, frame) = (token.slot, self.frame_of(token.slot));
        self.is_there(frame);
        self.is_not_copied(frame);
        for (batch, read) in self.readers[slot].drain(..) {
            assert_eq!(read.block, token.block, "{token:?} is written while batch {batch} reads {read:?}");
        }
        self.slots[slot] = token.value;
        self.changes[frame.index()] -= 1;
    }

    /// Begins a copy that the pool asked for.
    pub fn ask(&mut self, moves: Vec<FrameMove>, done: CopyDone) {
        assert!(!moves.is_empty());
        for &FrameMove { src, dst } in &moves {
            for frame in [src, dst] {
                assert!(frame.index() < self.frames, "frame {frame} was removed");
                assert_eq!(self.changes[frame.index()], 0, "frame {frame} will be written");
                self.is_not_copied(frame);
            }
            for slot in self.slots_of(dst) {
                assert!(self.readers[slot].is_empty(), "frame {dst} is read: {:?}", self.readers[slot]);
                self.slots[slot] = POISON;
            }
            let alone = moves.iter().filter(|other| [other.src, other.dst].contains(&dst)).count();
            assert_eq!(alone, 1, "{dst} in {moves:?}");
        }
        self.copies.push(Copying { moves, done, copied: 0 });
    }

    /// Returns the number of copies under way.
    pub fn copies(&self) -> usize {
        self.copies.len()
    }

    /// Returns whether a copy reads or writes this frame.
    pub fn is_source(&self, frame: FrameId) -> bool {
        self.copies.iter().any(|copy| copy.moves.iter().any(|moved| moved.src == frame))
    }

    /// Copies some tokens of one copy; returns its callback if those were the last.
    #[must_use]
    pub fn copy_some(&mut self, index: usize, tokens: usize) -> Option<(Vec<FrameMove>, CopyDone)> {
        let (copy, block_tokens) = (&mut self.copies[index], self.block_tokens);
        let all = copy.moves.len() * block_tokens;
        for at in copy.copied..all.min(copy.copied + tokens) {
            let FrameMove { src, dst } = copy.moves[at / block_tokens];
            let [src, dst] = [src, dst].map(|frame| frame.index() * block_tokens + at % block_tokens);
            self.slots[dst] = self.slots[src];
            copy.copied = at + 1;
        }
        (copy.copied == all).then(|| {
            let copy = self.copies.swap_remove(index);
            (copy.moves, copy.done)
        })
    }

    /// Abandons one of the copies midway.
    #[must_use]
    pub fn break_off(&mut self, index: usize) -> CopyDone {
        self.copies.swap_remove(index).done
    }

    /// Returns whether all commands are done, and no slot is read.
    pub fn is_idle(&self) -> bool {
        self.stream.is_empty() && self.copies.is_empty() && self.reads.is_empty()
    }
}
