//! The last step of each allocation: the block at a frame of the caller's becomes owned.

use crate::ids::{BlockHandle, BlockId, FrameId, PoolTag, SequenceId, Ticket};
use crate::sync::Ordering::*;

use crate::block::state::{InfoCell, Row, TableView};
use crate::block::{AllocRequest, BlockWord, Ownership};

/// A block that has just become owned.
pub(crate) struct Owned<'a> {
    /// Id of the block.
    pub(crate) id: BlockId,
    word: BlockWord,
    info: &'a InfoCell,
}

impl Owned<'_> {
    /// Returns its frame.
    #[inline]
    pub(crate) fn frame(&self) -> FrameId {
        self.word.frame()
    }

    /// Returns a handle of the block, in the pool with this tag.
    #[inline]
    pub(crate) fn handle(&self, pool: PoolTag) -> BlockHandle {
        BlockHandle { id: self.id, pool, generation: self.info.generation(self.word) }
    }
}

/// Makes the block at a frame of the caller's owned, by a request in which `now` was the newest
/// ticket.
#[inline(always)]
pub(in crate::block) fn own<'a>(
    table: TableView<'a>,
    frame: FrameId,
    request: &AllocRequest,
    now: Ticket,
    ownership: Ownership,
) -> Owned<'a> {
    let id = table.block_at(frame);
    own_row(table.row(id), id, frame, request, now, ownership)
}

/// As [`own`], with the row of the frame's block.
#[inline(always)]
pub(in crate::block) fn own_row<'a>(
    row: Row<'a>,
    id: BlockId,
    frame: FrameId,
    request: &AllocRequest,
    now: Ticket,
    ownership: Ownership,
) -> Owned<'a> {
    let Row { word: atomic, info } = row;
    // Relaxed: the frame came to us by an Acquire, and with it the word of its last owner.
    let word = BlockWord::from_bits(atomic.load(Relaxed));
    if !word.is_available() || word.frame() != frame {
        handed_out_twice(frame, word);
    }
    info.allocate(request.sequence.unwrap_or(SequenceId::NONE), request.priority, now);
    let word = word.allocate(request.pinned, ownership);
    // A plain store: no other thread writes the word of a free block whose frame is ours.
    // Release: pairs with the Acquire of a handle check, which then reads the info of this
    // generation.
    atomic.store(word.to_bits(), Release);
    Owned { id, word, info }
}

#[cold]
#[inline(never)]
fn handed_out_twice(frame: FrameId, word: BlockWord) -> ! {
    panic!("frame {frame} handed out while owned or held: {word:?}")
}
