//! Cached blocks leave by an export and arrive by an import.

use kvpool::prefix::{Chain, PrefixKeys};
use kvpool::{AllocRequest, Imported, Pool, TransferError};

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
    assert_eq!(export.retain(&[3, 99]), Err(TransferError::NotTransferred { place: 99 }));
    export.retain(&import.accepted()).unwrap();
    assert_eq!((export.len(), from.stats().evictable), (7, 3));
    assert_eq!(export.piece(&[8]).err(), Some(TransferError::NotTransferred { place: 8 }));
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
    let export = from.export_prefix(3, &hashes[3..]).unwrap();
    let mut import = to.import(&export.manifest().unwrap()).unwrap();
    assert_eq!((export.len(), import.missing().len()), (4, 4));
    send_all(&export, &mut import);
    assert!(matches!(import.commit().unwrap(), Imported::Cached(4)));
    assert_eq!(export.finish().evicted_blocks, 0);
    assert_eq!([cached(&from, &tokens), cached(&to, &tokens)], [7, 7]);
    let none = from.export_prefix(0, &[]).unwrap();
    assert!(none.is_empty());
    drop(none);
    [from, to].iter().for_each(is_idle);
}
