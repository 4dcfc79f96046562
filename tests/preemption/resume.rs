//! Swapped sequences that come back, and blocks that admissions leave to running ones.

use std::task::{Context, Poll, Waker};

use kvpool::{
    AdmitRequest, AllocError, AllocRequest, Append, Pool, Preempt, ResumeOptions, SequenceError, SequenceId,
    TransferError,
};

use super::kv::{admit, check, is_idle, plain, pool, pools, prompt};
use super::past;

/// Tokens of a block.
const BLOCK: usize = 4;

/// It comes back with its headroom, leaves the blocks that it was asked to leave, or has no effect.
#[tokio::test]
async fn a_resumed_sequence_gets_all_of_its_room_or_none() {
    let (pool, host) = pools(20);
    let tokens = prompt(1, 42);
    let sequence = admit(&pool, 7, &tokens).unwrap();
    let swapped = pool.preempt(sequence, Preempt::Swap(&host)).await.unwrap().swapped.unwrap().sequence;
    // 11 blocks of tokens, 3 of headroom (of which the first is in the last one), and 6 or 7 to leave.
    let room = |leave| ResumeOptions::new().headroom(2 + 3 * BLOCK).leave(leave);
    let refused = pool.resume(&swapped, room(7)).await.unwrap_err();
    assert_eq!(refused, TransferError::Alloc(AllocError::TooLarge { asked: 21, total: 20 }));
    let held = pool.allocate(AllocRequest::new(1)).unwrap();
    let refused = pool.resume(&swapped, room(6)).until(past()).await.unwrap_err();
    assert!(matches!(refused, TransferError::Alloc(AllocError::Deadline { asked: 20, .. })), "{refused}");
    check(&host, &swapped, &tokens);
    let mut waiting = Box::pin(pool.resume(&swapped, room(6)).into_future());
    let mut context = Context::from_waker(Waker::noop());
    assert!(waiting.as_mut().poll(&mut context).is_pending());
    drop(held);
    let Poll::Ready(resumed) = waiting.as_mut().poll(&mut context) else { panic!("there is room") };
    let (back, _) = resumed.unwrap();
    check(&pool, &back, &tokens);
    assert_eq!((back.reserved_blocks(), pool.free_blocks()), (3, 6));
    drop(waiting);
    drop((back, swapped));
    [pool, host].iter().for_each(is_idle);
}

/// Blocks are left by admissions that wait, too, and count as needed.
#[tokio::test]
async fn an_admission_leaves_blocks() {
    let pool = pool(plain(), 10);
    let tokens = prompt(1, 4 * BLOCK);
    let request = |id| AdmitRequest::new(SequenceId(id), &tokens).headroom(BLOCK).leave(5);
    assert_eq!(pool.blocks_needed(&request(1)).unwrap(), 10);
    let first = pool.admit(&request(1)).unwrap();
    assert_eq!((first.reserved_blocks(), pool.free_blocks()), (5, 5));
    let refused = pool.admit(&request(2)).unwrap_err();
    assert!(matches!(refused, SequenceError::Alloc(AllocError::Exhausted { asked: 10, free: 5, .. })));
    let second = request(2);
    let mut waiting = Box::pin(pool.admit_async(&second).into_future());
    let mut context = Context::from_waker(Waker::noop());
    assert!(waiting.as_mut().poll(&mut context).is_pending());
    drop(first);
    let Poll::Ready(second) = waiting.as_mut().poll(&mut context) else { panic!("all are free") };
    assert_eq!(pool.free_blocks(), 5);
    drop(second);
    drop(waiting);
    is_idle(&pool);
}

/// Serves two requests of six blocks each over eight blocks: each round admits the waiting one, then
/// steps. If a block is missing, the second one is preempted, and computed again. Returns the number
/// of preemptions, or None if no token was appended in ten rounds.
fn serve(leave: usize) -> Option<usize> {
    let pool: Pool = pool(plain(), 8);
    let mut known = [3 * BLOCK; 2];
    let mut open = [None, None];
    let (mut preemptions, mut idle) = (0, 0);
    while known != [6 * BLOCK; 2] {
        for id in (0..2).filter(|&id| known[id] < 6 * BLOCK) {
            if open[id].is_none() {
                let tokens = prompt(id as u32, known[id]);
                let request = AdmitRequest::new(SequenceId(id as u64), &tokens);
                // Beside no other sequence there is none to leave blocks to.
                let leave = if open[1 - id].is_some() { leave } else { 0 };
                open[id] = pool.admit(&request.leave(leave)).ok();
                let Some(sequence) = &mut open[id] else { continue };
                let mut batch = pool.begin_batch();
                batch.append(sequence, known[id] - sequence.len()).unwrap();
                batch.finish();
            }
        }
        let mut batch = pool.begin_batch();
        let mut appends: Vec<_> =
            open.iter_mut().flatten().map(|sequence| Append::new(sequence, 1)).collect();
        let has_room = batch.step(&mut appends).is_ok();
        batch.finish();
        if has_room {
            idle = 0;
            (0..2).filter(|&id| open[id].is_some()).for_each(|id| known[id] += 1);
            (0..2).filter(|&id| known[id] == 6 * BLOCK).for_each(|id| open[id] = None);
        } else {
            idle += 1;
            preemptions += 1;
            open[1] = None;
        }
        if idle == 10 {
            return None;
        }
    }
    Some(preemptions)
}

/// Without blocks left to the running one, the preempted request takes back what it lacked.
#[test]
fn a_preempted_request_does_not_take_its_blocks_back() {
    assert_eq!(serve(0), None, "neither of the two proceeds");
    assert_eq!(serve(1), Some(1));
    assert_eq!(serve(2), Some(1));
}
