//! The last step of each allocation: the block at a frame of the caller's becomes owned.

use crate::ids::{BlockId, FrameId, SequenceId, Ticket};
use crate::sync::Ordering::*;

use crate::block::request::AllocRequest;
use crate::block::state::{BlockWord, Row, TableView};

#[inline(always)]
pub(in crate::block) fn own(
    table: TableView<'_>,
    frame: FrameId,
    request: &AllocRequest,
    now: Ticket,
) -> BlockId {
    let id = table.block_at(frame);
    own_row(table.row(id), frame, request, now);
    id
}

#[inline(always)]
pub(in crate::block) fn own_row(row: Row<'_>, frame: FrameId, request: &AllocRequest, now: Ticket) {
    let Row { word: atomic, info } = row;
    // Relaxed: the frame came to us by an Acquire, and with it the word of its last owner.
    let word = BlockWord::from_bits(atomic.load(Relaxed));
    if !word.is_available() || word.frame() != frame {
        handed_out_twice(frame, word);
    }
    info.allocate(request.sequence.unwrap_or(SequenceId::NONE), request.priority, now);
    let word = word.allocate(request.pinned);
    // A plain store: no other thread writes the word of a free block whose frame is ours. Release:
    // pairs with the Acquire of a handle check, which then reads the info of this generation.
    atomic.store(word.to_bits(), Release);
}

#[cold]
#[inline(never)]
fn handed_out_twice(frame: FrameId, word: BlockWord) -> ! {
    panic!("frame {frame} handed out while owned or held: {word:?}")
}
