//! From a pool's snapshot to what is drawn.

use kvpool::compact::{FrameKind, Snapshot};

use super::{Frame, Owner};

/// The frames of a snapshot.
pub fn frames(snapshot: &Snapshot) -> Vec<Frame> {
    let owner = |(sequence, place): (u32, u32)| {
        let id = snapshot.sequences().get(sequence as usize)?;
        Some(Owner { sequence: id.0, place })
    };
    let frame = |state: &kvpool::compact::FrameState| match state.kind() {
        FrameKind::Free => Frame::Free,
        FrameKind::Away => Frame::Away,
        FrameKind::Movable => Frame::Movable(state.block().and_then(owner)),
        FrameKind::Fixed => Frame::Fixed(state.block().and_then(owner)),
    };
    snapshot.frames().iter().map(frame).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Figures;
    use kvpool::compact::FrameState;
    use kvpool::ids::{Order, SequenceId};

    /// What is drawn is what the planner sees, and its figures are the snapshot's own.
    #[test]
    fn a_snapshot_is_drawn_as_it_is() {
        let of = |kind, place| FrameState::new(kind, Some((1, place)));
        let states = vec![
            FrameState::new(FrameKind::Fixed, None),
            FrameState::FREE,
            FrameState::AWAY,
            of(FrameKind::Movable, 4),
            of(FrameKind::Fixed, 5),
            FrameState::new(FrameKind::Movable, None),
            FrameState::FREE,
            FrameState::FREE,
        ];
        let snapshot = Snapshot::new(Order(1), states, vec![SequenceId(70), SequenceId(71)]);
        let owner = |place| Some(Owner { sequence: 71, place });
        let frames = frames(&snapshot);
        let expected = [
            Frame::Fixed(None),
            Frame::Free,
            Frame::Away,
            Frame::Movable(owner(4)),
            Frame::Fixed(owner(5)),
            Frame::Movable(None),
            Frame::Free,
            Frame::Free,
        ];
        assert_eq!(frames, expected);
        let figures = Figures::of(&frames, 1);
        assert_eq!(figures.runs, snapshot.free_runs(Order(1)));
        assert_eq!(figures.fragmentation, snapshot.fragmentation(Order(1)));
        assert_eq!(figures.sequence_run_mean, snapshot.mean_sequence_run());
        assert_eq!(snapshot.longest_free_run().map(|run| run.len as usize), Some(figures.longest_run));
    }
}
