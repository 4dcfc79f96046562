//! What a caller's code can do in the middle of a wave.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;
use crate::block::{AllocRequest, BlocksConfig};
use crate::ids::DeviceId;

fn blocks(frames: usize) -> Blocks {
    let config = BlocksConfig {
        frames,
        frames_max: frames,
        segment_frames: 64,
        magazine_blocks: 0,
        threads: 1,
        has_null_block: false,
        reserve: 0,
        run_frames: 0,
        device: DeviceId::Host,
    };
    Blocks::new(config, None)
}

fn sealed(blocks: &Blocks, count: usize) -> Vec<BlockId> {
    let mut ids = Vec::new();
    blocks.allocate(&AllocRequest::new(count), &mut |id| ids.push(id)).unwrap();
    ids.iter().for_each(|&id| blocks.seal(blocks.handle(id)));
    ids
}

fn never(from: FrameId, why: MoveCancelled) {
    panic!("frame {from} stays: {why:?}")
}

#[test]
fn a_caller_that_panics_leaves_nothing_half_moved() {
    let blocks = blocks(64);
    let ids = sealed(&blocks, 3);
    let wave = blocks.begin_wave((0..3).map(|at| (FrameId(at), FrameId(at + 40))), &mut never);
    blocks.pin(blocks.handle(ids[1])).unwrap();
    // SAFETY: there are no bytes, here and below.
    assert!(catch_unwind(AssertUnwindSafe(|| unsafe { wave.publish(&mut never) })).is_err());
    assert_eq!([0, 1, 2].map(|at| blocks.frame(ids[at]).0), [40, 1, 42]);
    let report = blocks.audit().unwrap();
    assert_eq!((report.owned, report.held, report.in_bitmap), (3, 0, 61));
    let mut moves = Vec::new();
    assert_eq!(blocks.moved_since(Ticket(0), &mut moves), Since::Listed);
    assert_eq!(moves.len(), 2);
    blocks.release(&ids);
    assert_eq!(blocks.audit().unwrap().in_bitmap, 64);
}

/// Two waves that move a block one after the other may log in the other order. A table that
/// followed the log would then name a frame of another owner.
#[test]
fn a_table_is_patched_with_where_a_block_is_whatever_the_order_in_the_log() {
    let blocks = blocks(64);
    let ids = sealed(&blocks, 1);
    let first = blocks.begin_wave([(FrameId(0), FrameId(10))], &mut never).moving.drain(..).next().unwrap();
    blocks.publish_move(first, |_| true).unwrap();
    // The first wave's thread is stopped here.
    let second = blocks.begin_wave([(FrameId(10), FrameId(20))], &mut never);
    // SAFETY: as above.
    assert_eq!(unsafe { second.publish(&mut never) }, 1);
    blocks.leave(&[first.block], &[Run { start: first.from, len: 1 }]);
    let mut moves = Vec::new();
    assert_eq!(blocks.moved_since(Ticket(0), &mut moves), Since::Listed);
    assert_eq!(moves.last(), Some(&Moved { block: ids[0], to: FrameId(20) }));
    assert_eq!(blocks.frame(ids[0]), FrameId(20));
    assert_eq!(blocks.audit().unwrap().in_bitmap, 63);
}

/// The time of a move does not grow with the pool: otherwise, the ratio is above 20.
#[test]
#[cfg_attr(miri, ignore = "measures time")]
fn a_move_in_a_large_pool_takes_as_long() {
    let time = |frames: usize, is_taken: bool| {
        let blocks = blocks(frames);
        sealed(&blocks, 128);
        let to = if is_taken { 64 } else { 512 };
        let round = || {
            let start = std::time::Instant::now();
            let mut taken = 0;
            let wave = blocks.begin_wave((0..64).map(|at| (FrameId(at), FrameId(at + to))), &mut |_, why| {
                assert_eq!(why, MoveCancelled::Taken);
                taken += 1;
            });
            assert_eq!((wave.len(), taken), if is_taken { (0, 64) } else { (64, 0) });
            drop(wave);
            start.elapsed()
        };
        (0..50).map(|_| round()).min().unwrap()
    };
    for is_taken in [false, true] {
        let (small, large) = (time(1 << 10, is_taken), time(1 << 18, is_taken));
        assert!(large < 8 * small, "{small:?} in a small pool, {large:?} in a large one");
    }
}
