//! Blocks that a transport holds longer than the export or the import lives.

use std::collections::HashSet;

use kvpool::transfer::{Finished, TransferDirection};
use kvpool::transport::Hold;
use kvpool::{AllocRequest, FrameId, Pool, Run, SequenceId, TransferError};

use super::halves::send_all;
use super::kv::{admit, cached, check, is_idle, pools, prompt};

fn frames(runs: &[Run]) -> HashSet<FrameId> {
    runs.iter().flat_map(|run| run.frames()).collect()
}

/// Checks that a pool under pressure hands out none of these frames, and all others.
fn are_kept(pool: &Pool, kept: &HashSet<FrameId>) {
    for _ in 0..3 {
        let rest = pool.total_blocks() - kept.len();
        let all = pool.allocate(AllocRequest::new(rest)).unwrap();
        assert!(all.blocks().iter().all(|&block| !kept.contains(&pool.blocks().frame(block))));
        assert!(pool.allocate(AllocRequest::new(1)).is_err());
        pool.audit().unwrap();
    }
}

fn quarantined(pool: &Pool, direction: TransferDirection, blocks: usize) {
    let (owners, stats) = (pool.owners(), pool.stats());
    assert_eq!((stats.quarantined, stats.in_transfer), (blocks, 0));
    let [transfer] = &owners.transfers[..] else { panic!("{owners:?}") };
    assert_eq!((transfer.direction, transfer.quarantined, transfer.blocks.len()), (direction, true, blocks));
    assert!(owners.leases.is_empty(), "{owners:?}");
}

/// A late write reaches no other owner: the frames are not reused while the hold lives.
#[test]
fn a_hold_that_outlives_the_import() {
    let (from, to) = pools(50);
    let export = from.export(admit(&from, 7, &prompt(1, 42)).unwrap()).unwrap();
    let mut import = to.import(&export.manifest().unwrap()).unwrap();
    let piece = import.piece(&[2, 3, 4]).unwrap();
    assert_eq!(import.verify(), Err(TransferError::InTransfer { holds: 1 }));
    let all: HashSet<FrameId> = import.blocks().iter().map(|&block| to.blocks().frame(block)).collect();
    assert_eq!(to.stats().in_transfer, 11);
    drop(import);
    quarantined(&to, TransferDirection::Import, 11);
    assert!(frames(&piece.runs).is_subset(&all));
    are_kept(&to, &all);
    assert_eq!(to.sequence_count(), 0, "the id is free at once");
    let again = to.import(&export.manifest().unwrap()).unwrap();
    drop(again);
    let hold: Hold = piece.hold;
    std::thread::spawn(move || drop(hold)).join().unwrap();
    assert!(to.owners().transfers.is_empty());
    drop(export);
    [from, to].iter().for_each(is_idle);
}

/// An import that a transport holds is not committed, and can be later.
#[test]
fn no_commit_while_a_transport_holds() {
    let (from, to) = pools(50);
    let tokens = prompt(1, 42);
    let export = from.export(admit(&from, 7, &tokens).unwrap()).unwrap();
    let mut import = to.import(&export.manifest().unwrap()).unwrap();
    send_all(&export, &mut import);
    let piece = import.piece(&[5]).unwrap();
    let hold = piece.hold.clone();
    drop(piece);
    let failed = import.commit().unwrap_err();
    assert_eq!(failed.error, TransferError::Incomplete { missing: 1 }, "it is to be written again");
    let mut import = *failed.import;
    drop(hold);
    assert!(import.verify().unwrap().is_empty());
    let sequence = import.commit().unwrap().sequence().unwrap();
    check(&to, &sequence, &tokens);
    drop((sequence, export));
    [from, to].iter().for_each(is_idle);
}

/// What is being read keeps its frames and bytes, although the sequence is closed.
#[tokio::test]
async fn a_hold_that_outlives_the_export() {
    for finishes in [true, false] {
        let (from, to) = pools(50);
        let tokens = prompt(1, 42);
        let export = from.export(admit(&from, 7, &tokens).unwrap()).unwrap();
        let mut import = to.import(&export.manifest().unwrap()).unwrap();
        send_all(&export, &mut import);
        let piece = export.piece(&[8, 9, 10]).unwrap();
        let all: HashSet<FrameId> = export.blocks().iter().map(|&block| from.blocks().frame(block)).collect();
        assert_eq!(from.owners().pinned.len(), 3);
        if finishes {
            export.finish();
        } else {
            drop(export);
        }
        assert_eq!(from.sequence_count(), 0);
        quarantined(&from, TransferDirection::Export, 11);
        are_kept(&from, &all);
        from.defragment().await.unwrap();
        let now: HashSet<FrameId> =
            from.owners().pinned.iter().map(|pinned| from.blocks().frame(pinned.block)).collect();
        assert_eq!(now, frames(&piece.runs), "pinned blocks do not move");
        drop(piece);
        assert_eq!(cached(&from, &tokens), 10);
        let sequence = import.commit().unwrap().sequence().unwrap();
        check(&to, &sequence, &tokens);
        drop(sequence);
        [from, to].iter().for_each(is_idle);
    }
}

/// A sequence that comes back is written in copies, while a transport reads its blocks.
#[test]
fn a_cancelled_export_that_is_still_read() {
    let (from, to) = pools(50);
    let mut tokens = prompt(1, 42);
    let export = from.export(admit(&from, 7, &tokens).unwrap()).unwrap();
    let piece = export.piece(&[10]).unwrap();
    let mut sequence = export.cancel().unwrap();
    let mut batch = from.begin_batch();
    let appended = batch.append(&mut sequence, &[5]).unwrap();
    assert!(appended.copied.is_some());
    super::kv::store(&mut batch, &mut sequence, 42, &[5]);
    batch.finish();
    tokens.push(5);
    drop(piece);
    check(&from, &sequence, &tokens);
    drop(sequence);
    [from, to].iter().for_each(is_idle);
}

/// Cached blocks that a transport still reads are evicted when it lets go of them.
#[test]
fn cached_blocks_that_are_still_read() {
    let (from, to) = pools(50);
    let tokens = prompt(1, 21);
    drop(admit(&from, 7, &tokens).unwrap());
    let mut export = from.export_cached(10).unwrap();
    let mut import = to.import(&export.manifest().unwrap()).unwrap();
    send_all(&export, &mut import);
    export.retain(&import.accepted()).unwrap();
    let piece = export.piece(&[1]).unwrap();
    assert_eq!(export.retain(&[1]), Err(TransferError::InTransfer { holds: 1 }));
    import.commit().unwrap();
    assert_eq!(export.finish().leaving_blocks, 5);
    quarantined(&from, TransferDirection::Export, 5);
    drop(piece);
    assert_eq!([cached(&from, &tokens), cached(&to, &tokens)], [0, 5]);
    assert_eq!(from.stats().evictable, 0);
    let _ = (Finished::default(), SequenceId(0));
    [from, to].iter().for_each(is_idle);
}
