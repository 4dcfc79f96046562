//! Cached blocks leave by an export and arrive by an import.

use kvpool::prefix::{Chain, PrefixKeys};
use kvpool::transfer::{Imported, TransferDirection};
use kvpool::{AllocRequest, Pool, TransferError};

use super::halves::send_all;
use super::kv::{admit, cached, is_idle, other, plain, pool, pools, prompt};

fn hashes(pool: &Pool, tokens: &[u32]) -> Vec<kvpool::prefix::BlockHash> {
    let hasher = pool.prefix_cache().unwrap().hasher();
    let (mut chain, mut hashes) = (Chain::new(hasher.root(&PrefixKeys::new()).unwrap()), Vec::new());
    chain.extend(hasher, tokens, |hash| hashes.push(hash));
    hashes
}

/// With less room there, only accepted blocks go; the others return to their places.
#[test]
fn as_many_as_are_accepted() {
    let (from, to) = (pool(plain(), 50), pool(other(), 7));
    let prompts = [prompt(1, 21), prompt(2, 21)];
    prompts.iter().for_each(|prompt| drop(admit(&from, 7, prompt).unwrap()));
    let mut export = from.export_cached(50).unwrap();
    assert_eq!((export.len(), from.stats().evictable), (10, 0));
    let mut import = to.import(&export.manifest().unwrap()).unwrap();
    assert_eq!((import.accepted(), import.missing().len()), ((0..7).collect(), 7));
    assert_eq!(export.retain(&[3, 99]), Err(super::not_transferred(99)));
    export.retain(&import.accepted()).unwrap();
    assert_eq!((export.len(), from.stats().evictable), (7, 3));
    assert_eq!(export.piece(&[8]).err(), Some(super::not_transferred(8)));
    send_all(&export, &mut import);
    assert!(matches!(import.commit().unwrap(), Imported::Cached(7)));
    let finished = export.finish();
    assert_eq!((finished.evicted_blocks, finished.leaving_blocks, finished.warm_blocks), (7, 0, 0));
    assert_eq!([0, 1].map(|at: usize| cached(&from, &prompts[at])), [0, 3]);
    assert_eq!(cached(&to, &prompts[0]), 5);
    [from, to].iter().for_each(is_idle);
}

/// Without a commit everything is as before, in the same order of eviction.
#[test]
fn cached_blocks_that_do_not_go() {
    let (from, to) = pools(50);
    let prompts = [prompt(1, 21), prompt(2, 21)];
    prompts.iter().for_each(|prompt| drop(admit(&from, 7, prompt).unwrap()));
    for step in 0..3 {
        let export = from.export_cached(7).unwrap();
        let mut import = (step > 0).then(|| to.import(&export.manifest().unwrap()).unwrap());
        if let (2, Some(import)) = (step, &mut import) {
            send_all(&export, import);
        }
        assert_eq!(from.audit().unwrap().owned, 7);
        drop((import, export));
        is_idle(&to);
    }
    drop(from.allocate(AllocRequest::new(50 - 10 + 5)).unwrap());
    assert_eq!([0, 1].map(|at: usize| cached(&from, &prompts[at])), [0, 5]);
    is_idle(&from);
}

/// A prefix is copied up to the first block that is missing; the source keeps it.
#[test]
fn a_prefix() {
    let (from, to) = pools(50);
    let tokens = prompt(1, 42);
    drop(admit(&to, 1, &tokens[..13]).unwrap());
    drop(admit(&from, 7, &tokens[..30]).unwrap());
    let hashes = hashes(&to, &tokens);
    let export = from.export_prefix(&hashes[3..]).unwrap();
    let mut import = to.import(&export.manifest().unwrap()).unwrap();
    assert_eq!((export.len(), import.missing().len()), (4, 4));
    send_all(&export, &mut import);
    assert!(matches!(import.commit().unwrap(), Imported::Cached(4)));
    assert_eq!(export.finish().evicted_blocks, 0);
    assert_eq!([cached(&from, &tokens), cached(&to, &tokens)], [7, 7]);
    let none = from.export_prefix(&[]).unwrap();
    assert!(none.is_empty());
    drop(none);
    [from, to].iter().for_each(is_idle);
}

/// Blocks of a store outside of any pool: the caller verifies, and says what is right.
#[test]
fn hashes_without_a_manifest() {
    let (from, to) = pools(50);
    let tokens = prompt(1, 30);
    drop(admit(&to, 1, &tokens[..13]).unwrap());
    drop(admit(&from, 7, &tokens).unwrap());
    let hashes = hashes(&to, &tokens);
    let export = from.export_prefix(&hashes).unwrap();
    assert_eq!(export.hashes(), hashes);
    let mut import = to.import_prefix(0, &hashes).unwrap();
    assert_eq!((import.missing(), import.shared_blocks()), (&[3, 4, 5, 6][..], 3));
    // A block is missing until its bytes are stated, and again once its frame is given out.
    for place in [3, 4, 5] {
        let piece = import.piece(&[place]).unwrap();
        let packed = export.packed(place).unwrap();
        assert_eq!(import.arrived(place), Err(TransferError::InTransfer { holds: 1 }));
        // SAFETY: of a piece of an import, whose hold lives.
        unsafe { import.storage().unpack(&piece.runs, &packed) }.unwrap();
        drop(piece);
        import.arrived(place).unwrap();
    }
    assert_eq!(import.arrived(0), Err(super::not_transferred(0)));
    drop(import.piece(&[5]).unwrap());
    assert_eq!(import.verify(), Ok(vec![5, 6]));
    import = *import.commit().unwrap_err().import;
    import.arrived(5).unwrap();
    import.write(6, None, &export.packed(6).unwrap()).unwrap();
    assert!(matches!(import.commit().unwrap(), Imported::Cached(7)));
    assert_eq!(cached(&to, &[&tokens[..], &[0]].concat()), 7);
    // With a manifest its checksums decide.
    let mut import = pool(plain(), 10).import(&export.manifest().unwrap()).unwrap();
    assert!(matches!(import.arrived(0), Err(TransferError::Invalid(_))));
    drop((import, export));
    assert!(matches!(to.import_prefix(0, &[hashes[0]; 2]), Err(TransferError::Invalid(_))));
    [from, to].iter().for_each(is_idle);
}

/// A block that is given up while its bytes may still come has no other owner.
#[test]
fn a_hash_in_quarantine() {
    let (from, to) = pools(8);
    let tokens = prompt(1, 5);
    let mut import = to.import_prefix(0, &hashes(&from, &tokens)[..1]).unwrap();
    let piece = import.piece(&[0]).unwrap();
    drop(import);
    let [transfer] = &to.owners().transfers[..] else { panic!("{:?}", to.owners()) };
    assert_eq!((transfer.direction, transfer.quarantined), (TransferDirection::Import, true));
    assert!(to.allocate(AllocRequest::new(8)).is_err());
    assert_eq!(cached(&to, &tokens), 0);
    drop(piece);
    [from, to].iter().for_each(is_idle);
}
