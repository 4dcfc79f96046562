use super::*;
use crate::block::{AllocRequest, AuditError, BlockWord, BlocksConfig, FramePlace};
use crate::error::HandleError;
use crate::ids::{BlockHandle, BlockId, DeviceId, FrameId, Generation};

fn blocks(blocks: usize, blocks_max: usize, magazine_blocks: usize) -> Blocks {
    let config = BlocksConfig {
        frames: blocks + 1,
        frames_max: blocks_max + 1,
        segment_frames: 64,
        magazine_blocks,
        threads: 2,
        has_null_block: true,
        reserve: 0,
        run_frames: 0,
        device: DeviceId::Host,
    };
    Blocks::new(config, None)
}

fn take(blocks: &Blocks, count: usize) -> Vec<BlockId> {
    let mut ids = Vec::new();
    blocks.allocate(&AllocRequest::new(count), &mut |id| ids.push(id)).unwrap();
    ids
}

fn shrink(blocks: &Blocks, to: usize) {
    let mut shrinking = blocks.begin_shrink(to).unwrap();
    assert_eq!(shrinking.collect(), 0);
    let region = shrinking.region();
    let mut released = None;
    shrinking.commit(|run| released = Some(run)).unwrap();
    assert_eq!(released, Some(region));
}

#[test]
fn frames_in_magazines_and_retire_list_are_collected() {
    let pool = blocks(150, 150, 8);
    let all = take(&pool, 150);
    let (kept, rest): (Vec<BlockId>, Vec<BlockId>) = all.iter().partition(|id| id.0 <= 20);
    let mut shrinking = pool.begin_shrink(20).unwrap();
    assert_eq!(shrinking.collect(), 130, "all blocks are owned");
    // One by one, so that magazines, including another thread's, and the depot hold some.
    let (first, second) = rest.split_at(60);
    first.iter().for_each(|id| pool.release(&[*id]));
    let other = pool.clone();
    let second = second.to_vec();
    let evictor = std::thread::spawn(move || {
        let batch = other.clock().begin();
        second.iter().for_each(|id| other.release(&[*id]));
        (other, batch)
    });
    let (_other, batch) = evictor.join().unwrap();
    assert!(shrinking.collect() >= 70, "a batch may see these");
    pool.audit().unwrap();
    pool.end_batch(batch);
    assert_eq!(shrinking.collect(), 0);
    let report = pool.audit().unwrap();
    assert_eq!((report.held, report.owned, report.in_magazines), (130, 20, 0));
    assert_eq!((pool.counts().held, pool.counts().used()), (130, 20));
    shrinking.commit(|_| ()).unwrap();
    assert_eq!(pool.audit().unwrap().owned, 20);
    pool.release(&kept);
    assert_eq!(take(&pool, 20).len(), 20);
}

#[test]
fn handles_of_removed_blocks_are_stale() {
    let pool = blocks(100, 100, 0);
    let all = take(&pool, 100);
    let handles: Vec<BlockHandle> = all.iter().map(|&id| pool.handle(id)).collect();
    pool.release(&all);
    shrink(&pool, 10);
    let handle = handles[90];
    let stale = HandleError::Stale { handle, now: Generation(1) };
    assert_eq!(pool.pin(handle), Err(stale));
    assert_eq!(pool.info(handle), Err(stale));
    let beyond = BlockHandle { id: BlockId(101), ..handle };
    assert_eq!(pool.pin(beyond), Err(HandleError::OutOfRange { handle: beyond, total: 100 }));
    pool.grow(90, &mut |_| Ok(())).unwrap();
    let again = take(&pool, 100);
    assert_eq!(pool.pin(handle), Err(HandleError::Stale { handle, now: Generation(1) }));
    pool.release(&again);
}

#[test]
fn the_audit_finds_a_removed_frame_in_use() {
    let pool = blocks(100, 100, 0);
    shrink(&pool, 49);
    pool.audit().unwrap();
    let (frame, block) = (FrameId(70), BlockId(70));
    pool.space.set_held(frame, BlockWord::unhold);
    assert_eq!(pool.audit(), Err(AuditError::Beyond { frame, block }));
    pool.space.set_held(frame, BlockWord::hold);
    pool.shared_retire_list.push(Run { start: frame, len: 1 }, pool.clock().newest());
    let doubled = AuditError::Doubled { frame, first: FramePlace::Retired, second: FramePlace::Gone };
    assert_eq!(pool.audit(), Err(doubled));
}

/// Blocks outlive the frames of their numbers; a free block leaves with its frame.
#[test]
fn a_block_keeps_its_id_when_its_frame_goes() {
    let pool = blocks(100, 120, 4);
    let all = take(&pool, 100);
    let (stays, going): (Vec<BlockId>, Vec<BlockId>) = all.into_iter().partition(|&id| id == BlockId(90));
    let handle = pool.handle(stays[0]);
    pool.seal(handle);
    pool.release(&going);
    pool.trim();
    let mut shrinking = pool.begin_shrink(10).unwrap();
    assert_eq!(shrinking.collect(), 1, "frame 90");
    let mut cancelled = |frame: FrameId, why| panic!("{frame}: {why:?}");
    let wave = pool.begin_wave([(FrameId(90), FrameId(3))], &mut cancelled);
    assert_eq!(shrinking.collect(), 1, "its move is not published");
    let report = pool.audit().unwrap();
    assert_eq!((report.held, report.owned), (89 + 1, 1), "the collected frames, and the destination");
    // SAFETY: there are no bytes.
    assert_eq!(unsafe { wave.publish(&mut cancelled) }, 1);
    assert_eq!(shrinking.collect(), 0);
    shrinking.commit(|_| ()).unwrap();

    let report = pool.audit().unwrap();
    assert_eq!((report.total, report.owned, report.held), (11, 1, 0));
    assert_eq!((pool.frame(BlockId(90)), pool.block_at(FrameId(90))), (FrameId(3), BlockId(3)));
    assert_eq!(pool.info(handle).unwrap().frame, FrameId(3));
    let nine = take(&pool, 9);
    assert!(!nine.contains(&BlockId(3)) && nine.iter().all(|id| id.0 <= 10), "{nine:?}");
    pool.release(&[handle.id]);
    assert_eq!(take(&pool, 1), [BlockId(90)], "the block in frame 3");
    // Frame 90 comes back, and block 3 with it; the others are new.
    pool.grow(110, &mut |_| Ok(())).unwrap();
    let mut back = take(&pool, 110);
    back.sort_unstable();
    let expected = (3..=120).filter(|&id| id == 3 || id > 10 && id != 90);
    assert!(back.iter().map(|id| id.0).eq(expected), "{back:?}");
    assert_eq!(pool.frame(BlockId(3)), FrameId(90));
    assert_eq!(pool.audit().unwrap().owned, 120);
}
