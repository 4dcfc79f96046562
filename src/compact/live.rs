//! Snapshots of a pool in use.

use crate::block::{Core, FrameUse};
use crate::ids::Order;
use crate::sequence::Sequences;

use super::{FrameKind, FrameState, Snapshot};

impl Snapshot {
    /// Returns the state of every frame, as of now or a moment ago.
    ///
    /// Scans the bitmaps, the block words and the open sequences, while the pool serves. A block
    /// shared by several sequences counts for the last of them, by id.
    pub fn of(sequences: &Sequences, order: Order) -> Self {
        let blocks: &Core = sequences.blocks();
        let mut frames = vec![FrameState::AWAY; blocks.total_frames()];
        blocks.for_each_free_run(&mut |run| {
            let free = frames.get_mut(run.start.index()..run.end() as usize).unwrap_or_default();
            free.fill(FrameState::FREE);
        });
        blocks.for_each_used_frame(&mut |frame, used| {
            let kind = match used {
                FrameUse::Movable => FrameKind::Movable,
                FrameUse::Fixed => FrameKind::Fixed,
            };
            if let Some(state) = frames.get_mut(frame.index()) {
                *state = FrameState::new(kind, None);
            }
        });
        let views = sequences.views();
        for (sequence, view) in (0..).zip(&views) {
            view.for_each_block(|place, block| {
                if let Some(state) = frames.get_mut(blocks.frame(block).index())
                    && matches!(state.kind(), FrameKind::Movable | FrameKind::Fixed)
                {
                    *state = FrameState::new(state.kind(), Some((sequence, place)));
                }
            });
        }
        let reserved = blocks.counts().reserved;
        Self::new(order, frames, views.iter().map(|view| view.id()).collect())
            .setting_aside(blocks.null_block().is_some(), reserved)
    }
}
