//! A sequence leaves by an export and arrives by an import.

use kvpool_testkit::steps::exhausted;
use std::sync::Arc;

use kvpool::storage::Storage;
use kvpool::transfer::{Arriving, Export, Import, Piece};
use kvpool::{AllocError, AllocRequest, Pool, Run, SequenceError, SequenceId, TransferError};

use super::kv::{BLOCK_TOKENS, admit, cached, check, extend, is_idle, other, plain, pool, pools, prompt};

/// Copies places as a transport does.
pub fn send(export: &Export, import: &mut Import, places: &[u32]) {
    let (here, there) = (export.piece(places).unwrap(), import.piece(places).unwrap());
    // SAFETY: frames of pieces, whose holds live.
    unsafe { import.storage().receive(&**export.storage(), &here.runs, &there.runs) }.unwrap();
}

/// Sends all that is missing.
pub fn send_all(export: &Export, import: &mut Import) {
    let missing = import.missing().to_vec();
    send(export, import, &missing);
    assert!(import.verify().unwrap().is_empty());
}

fn packed(storage: &dyn Storage, runs: &[Run]) -> Vec<u8> {
    let frames: u32 = runs.iter().map(|run| run.len).sum();
    let mut bytes = vec![0; frames as usize * storage.layout().packed_bytes()];
    // SAFETY: the test holds the frames and has one thread.
    unsafe { storage.pack(runs, &mut bytes) }.unwrap();
    bytes
}

/// The sequence continues with its bytes, and with the hashes of what it appends.
#[test]
fn a_sequence_continues_after_the_import() {
    let (from, to) = pools(50);
    let (tokens, more) = (prompt(1, 42), prompt(2, 13));
    let export = from.export(admit(&from, 7, &tokens).unwrap()).unwrap();
    let mut import = to.import(&export.manifest().unwrap()).unwrap();
    assert_eq!((import.missing().len(), import.shared_blocks(), import.accepted().len()), (11, 0, 11));
    send_all(&export, &mut import);
    let mut sequence = import.commit().unwrap().sequence().unwrap();
    assert_eq!(export.finish(), kvpool::transfer::Finished::default());
    assert_eq!((sequence.id(), sequence.len(), sequence.committed()), (SequenceId(7), 42, 42));
    check(&to, &sequence, &tokens);
    assert_eq!(cached(&from, &tokens), 10, "it was closed there, and is cached");
    sequence.announce(&more).unwrap();
    let mut batch = to.begin_batch();
    extend(&mut batch, &mut sequence, &more).unwrap();
    batch.finish();
    let all = [tokens, more].concat();
    check(&to, &sequence, &all);
    drop(sequence);
    assert_eq!(cached(&to, &all), all.len() / BLOCK_TOKENS);
    [from, to].iter().for_each(is_idle);
}

/// What a transport adds while bytes arrive decides, until a later write begins.
#[test]
fn checksums_of_bytes_that_arrive_are_void_from_the_next_write_on() {
    let (from, to) = pools(50);
    let export = from.export(admit(&from, 7, &prompt(1, 8)).unwrap()).unwrap();
    let mut import = to.import(&export.manifest().unwrap()).unwrap();
    let bytes = [0, 1].map(|place| export.packed(place).unwrap());
    let piece = import.piece(&[0, 1]).unwrap();
    let (run, hold) = (piece.runs[0], piece.hold);
    assert_eq!((piece.runs.len(), run.len), (1, 2));
    let write = |import: &Import| {
        // SAFETY: frames of the import, which one thread uses.
        unsafe { import.storage().unpack(&[run], &bytes.concat()) }.unwrap();
    };
    let arrive = |hold: &_| {
        let mut arriving = Arriving::begin(hold, run).unwrap();
        for (index, bytes) in bytes.iter().enumerate() {
            bytes.chunks(7).for_each(|part| arriving.add(index, part));
        }
        arriving
    };
    // Nothing of it is in memory: what was added decides.
    arrive(&hold).finish(&hold);
    let other: Arc<dyn std::any::Any + Send + Sync> = Arc::new(());
    assert!(Arriving::begin(&other, run).is_none());
    // A write that begins, and does not end: memory decides.
    drop(arrive(&hold));
    assert!(matches!(import.verify(), Err(TransferError::InTransfer { .. })), "the hold is here");
    let Piece { hold: again, .. } = import.piece(&[0, 1]).unwrap();
    drop((hold, again));
    assert_eq!(import.verify().unwrap(), [0, 1]);
    // Given out again, to a transport that may compute no checksums: memory decides.
    let hold = import.piece(&[0, 1]).unwrap().hold;
    arrive(&hold).finish(&hold);
    drop(import.piece(&[0, 1]).unwrap());
    drop(hold);
    assert_eq!(import.verify().unwrap(), [0, 1]);
    // One block that arrived is wrong, although memory is right.
    let hold = import.piece(&[0, 1]).unwrap().hold;
    write(&import);
    let mut arriving = Arriving::begin(&hold, run).unwrap();
    arriving.add(0, &bytes[0]);
    arriving.add(1, &bytes[0]);
    arriving.finish(&hold);
    drop(hold);
    assert_eq!(import.verify().unwrap(), [1]);
    // Each verification takes what arrived before it.
    assert!(import.verify().unwrap().is_empty());
    let sequence = import.commit().unwrap().sequence().unwrap();
    check(&to, &sequence, &prompt(1, 8));
}

/// Blocks that the target has cached are shared there, and not sent.
#[test]
fn a_cached_prefix_is_shared() {
    let (from, to) = pools(50);
    let tokens = prompt(1, 42);
    let kept = admit(&to, 1, &tokens[..21]).unwrap();
    let sequence = admit(&from, 7, &tokens).unwrap();
    let export = from.export_copy(&sequence).unwrap();
    let mut import = to.import(&export.manifest().unwrap()).unwrap();
    assert_eq!((import.missing(), import.shared_blocks()), (&[5, 6, 7, 8, 9, 10][..], 5));
    assert_eq!(import.blocks()[..5], kept.blocks().collect::<Vec<_>>()[..5]);
    assert_eq!(import.piece(&[4]).err(), Some(super::not_transferred(4)));
    send_all(&export, &mut import);
    let copy = import.commit().unwrap().sequence().unwrap();
    check(&to, &copy, &tokens);
    check(&from, &sequence, &tokens);
    drop((copy, kept, export, sequence));
    [from, to].iter().for_each(is_idle);
}

/// At each step the transfer is given up: the source continues in its blocks, the target is empty.
#[test]
fn given_up_at_each_step() {
    let (from, to) = pools(50);
    let mut tokens = prompt(1, 42);
    let mut sequence = admit(&from, 7, &tokens).unwrap();
    for step in 0..6 {
        let blocks: Vec<_> = sequence.blocks().collect();
        let export = from.export(sequence).unwrap();
        let owners = from.owners();
        assert_eq!((owners.transfers.len(), owners.blocks()), (1, blocks.len()), "{owners:?}");
        let manifest = export.manifest().unwrap();
        let mut import = (step > 0).then(|| to.import(&manifest).unwrap());
        if let Some(import) = &mut import {
            assert_eq!(to.stats().in_transfer, import.blocks().len());
            let missing = import.missing().to_vec();
            match step {
                2 => drop((export.piece(&missing).unwrap(), import.piece(&missing).unwrap())),
                3 => send(&export, import, &missing[..missing.len() / 2]),
                4 => send(&export, import, &missing),
                5 => send_all(&export, import),
                _ => {}
            }
            from.audit().unwrap();
            to.audit().unwrap();
            assert_eq!(import.verify().unwrap().is_empty(), step >= 4);
        }
        drop(import);
        is_idle(&to);
        assert_eq!(to.owners(), Pool::owners(&to));
        sequence = export.cancel().unwrap();
        assert!(from.owners().transfers.is_empty() && from.stats().in_transfer == 0);
        check(&from, &sequence, &tokens);
        let next = [step];
        let mut batch = from.begin_batch();
        let appended = batch.append(&mut sequence, &next).unwrap();
        assert!(appended.copied.is_none(), "it continues in its own block");
        super::kv::store(&mut batch, &mut sequence, tokens.len(), &next);
        batch.finish();
        tokens.extend(next);
        assert!(sequence.blocks().zip(&blocks).all(|(now, &before)| now == before));
        from.audit().unwrap();
    }
    drop(sequence);
    assert_eq!(cached(&from, &tokens), tokens.len().div_ceil(BLOCK_TOKENS) - 1);
    is_idle(&from);
}

/// A block that arrives damaged is found, sent again, and only then committed.
#[test]
fn damaged_blocks_are_sent_again() {
    let (from, to) = pools(50);
    let tokens = prompt(1, 42);
    let export = from.export(admit(&from, 7, &tokens).unwrap()).unwrap();
    let mut import = to.import(&export.manifest().unwrap()).unwrap();
    let failed = import.commit().unwrap_err();
    assert_eq!(failed.error, TransferError::Incomplete { missing: 11 });
    import = *failed.import;
    send_all(&export, &mut import);
    for place in [3, 10] {
        let piece = import.piece(&[place]).unwrap();
        let mut bytes = packed(&**import.storage(), &piece.runs);
        bytes[17] ^= 4;
        // SAFETY: of a piece of an import.
        unsafe { import.storage().unpack(&piece.runs, &bytes) }.unwrap();
    }
    assert_eq!(import.verify().unwrap(), [3, 10]);
    assert_eq!(import.commit().map(drop).unwrap_err().error, TransferError::Incomplete { missing: 2 });
    is_idle(&to);

    // Bytes that are written one block at a time are verified at once.
    let mut import = to.import(&export.manifest().unwrap()).unwrap();
    for place in 0..11 {
        let mut bytes = export.packed(place).unwrap();
        bytes[0] ^= 1;
        assert_eq!(import.write(place, None, &bytes), Err(TransferError::Checksum { place }));
        assert!(matches!(import.write(place, None, &bytes[1..]), Err(TransferError::Invalid(_))));
        bytes[0] ^= 1;
        import.write(place, None, &bytes).unwrap();
    }
    assert!(import.verify().unwrap().is_empty());
    let sequence = import.commit().unwrap().sequence().unwrap();
    check(&to, &sequence, &tokens);
    drop((sequence, export));
    [from, to].iter().for_each(is_idle);
}

#[test]
fn refused_exports_and_imports() {
    let (from, to) = pools(20);
    let tokens = prompt(1, 42);
    let mut sequence = from.sequence(SequenceId(7)).tokens(&tokens).unwrap();
    let mut batch = from.begin_batch();
    let ticket = batch.ticket();
    extend(&mut batch, &mut sequence, &tokens).unwrap();
    let refused = from.export(sequence).unwrap_err();
    assert_eq!(refused.error, TransferError::BeingWritten { id: SequenceId(7), batch: ticket });
    batch.finish();
    let refused = to.export(*refused.sequence).unwrap_err();
    assert_eq!(refused.error, TransferError::ForeignSequence { id: SequenceId(7), pool: to.tag() });
    let export = from.export(*refused.sequence).unwrap();
    let manifest = export.manifest().unwrap();
    let open = to.sequence(SequenceId(7)).open().unwrap();
    let want = TransferError::Sequence(SequenceError::AlreadyOpen { id: SequenceId(7) });
    assert_eq!(to.import(&manifest).unwrap_err(), want);
    drop(open);
    let lease = to.allocate(AllocRequest::new(12)).unwrap();
    let want = exhausted(11, 8);
    assert_eq!(to.import(&manifest).unwrap_err(), TransferError::Alloc(want));
    drop(lease);
    assert_eq!(export.piece(&[11]).err(), Some(super::not_transferred(11)));
    drop(export);
    assert_eq!(from.sequence_count(), 0, "a dropped export closes its sequence");
    [from, to].iter().for_each(is_idle);
}

/// If the source's cache is cleared meanwhile, nothing may be found by the hashes of before.
#[test]
fn a_cleared_source() {
    let (from, to) = pools(50);
    let tokens = prompt(1, 42);
    let export = from.export(admit(&from, 7, &tokens).unwrap()).unwrap();
    let mut import = to.import(&export.manifest().unwrap()).unwrap();
    assert!(export.is_current());
    from.clear_prefix_cache();
    assert!(!export.is_current());
    import.forget();
    send_all(&export, &mut import);
    let sequence = import.commit().unwrap().sequence().unwrap();
    check(&to, &sequence, &tokens);
    drop((sequence, export));
    assert_eq!([cached(&from, &tokens), cached(&to, &tokens)], [0, 0]);
    [from, to].iter().for_each(is_idle);
}

/// Neither pool needs a cache, and a sequence may be empty.
#[test]
fn without_caches_and_without_tokens() {
    let build = |layout| super::kv::builder(layout, 30).build().unwrap();
    let (from, to) = (build(plain()), build(other()));
    for length in [0, 1, 8, 9] {
        let tokens = prompt(3, length);
        let mut sequence = from.sequence(SequenceId(9)).open().unwrap();
        let mut batch = from.begin_batch();
        if length > 0 {
            extend(&mut batch, &mut sequence, &tokens).unwrap();
        }
        batch.finish();
        let export = from.export(sequence).unwrap();
        let mut import = to.import(&export.manifest().unwrap()).unwrap();
        if !import.missing().is_empty() {
            send_all(&export, &mut import);
        }
        let sequence = import.commit().unwrap().sequence().unwrap();
        export.finish();
        check(&to, &sequence, &tokens);
    }
    [&from, &to].into_iter().for_each(is_idle);
    assert!(Arc::strong_count(from.storage().unwrap()) >= 1);
    let none = pool(plain(), 4);
    assert!(matches!(none.export_cached(0), Err(TransferError::Alloc(AllocError::Zero))));
}
