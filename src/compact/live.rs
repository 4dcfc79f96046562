use crate::block::{Core, FrameUse};
use crate::ids::Order;
use crate::sequence::Sequences;

use super::{FrameKind, FrameState, Snapshot};

impl Snapshot {
    /// Returns the current or a very recent state of every frame. Scans the bitmaps, the block
    /// words and the open sequences while the pool serves. A block shared by several sequences
    /// counts for the last of them, by id. A sequence is named once for each of its lists, in their
    /// order.
    pub fn of(sequences: &Sequences, order: Order) -> Self {
        let blocks: &Core = sequences.blocks();
        let mut frames = frames_of(blocks);
        let views = sequences.list_views();
        let mut ends = Vec::with_capacity(views.len());
        for (sequence, view) in (0..).zip(&views) {
            let mut end = None;
            view.for_each_block(|place, block| {
                let frame = blocks.frame(block);
                end = Some(frame);
                if let Some(state) = frames.get_mut(frame.index())
                    && matches!(state.kind(), FrameKind::Movable | FrameKind::Fixed)
                {
                    *state = FrameState::new(state.kind(), Some((sequence, place)));
                }
            });
            ends.extend(end);
        }
        let reserved = blocks.counts().reserved;
        Self::new(order, frames, views.iter().map(|view| view.id()).collect())
            .with_ends(ends)
            .setting_aside(blocks.null_block().is_some(), reserved)
    }

    pub(crate) fn of_frames(blocks: &Core, order: Order) -> Self {
        Self::new(order, frames_of(blocks), Vec::new())
            .setting_aside(blocks.null_block().is_some(), blocks.counts().reserved)
    }
}

fn frames_of(blocks: &Core) -> Vec<FrameState> {
    let mut frames = vec![FrameState::AWAY; blocks.total_frames()];
    blocks.for_each_free_run(&mut |run| {
        let free = frames.get_mut(run.start.index()..run.end() as usize).unwrap_or_default();
        free.fill(FrameState::FREE);
    });
    blocks.for_each_growth_unit(&mut |unit| {
        let unit =
            frames.get_mut(unit.start.index()..).unwrap_or_default().iter_mut().take(unit.len as usize);
        unit.filter(|state| **state == FrameState::FREE)
            .for_each(|state| *state = FrameState::RESERVED_FOR_GROWTH);
    });
    blocks.for_each_used_frame(&mut |frame, used| {
        if let Some(state) = frames.get_mut(frame.index()) {
            *state = match used {
                FrameUse::Movable => FrameState::new(FrameKind::Movable, None),
                FrameUse::Evictable => FrameState::evictable(frame),
                FrameUse::Fixed => FrameState::new(FrameKind::Fixed, None),
            };
        }
    });
    frames
}
