//! Each wrong entry of a list is named, and the list changes nothing.

use kvpool::{AllocError, AllocRequest, FrameError, FrameGroup, FrameId, FramePool};

use super::{allocate, cache, key, pool, references};

/// Calls every operation that takes a list of referenced frames.
fn refusals(pool: &FramePool, frames: &[u32]) -> Vec<FrameError> {
    let named: Vec<_> = frames.iter().map(|&frame| (frame, key(pool, 99))).collect();
    let outcomes = [pool.free(frames), pool.free_evict_first(frames), pool.register(&named)];
    outcomes.into_iter().map(|outcome| outcome.unwrap_err()).collect()
}

#[test]
fn frames_out_of_range_null_and_free_are_named() {
    let pool = pool(70);
    let owned = allocate(&pool, 2);
    let free = (1..71).find(|frame| !owned.contains(frame)).unwrap();
    let before = pool.counts();
    for far in [71, 1 << 26, u32::MAX] {
        let expected = FrameError::OutOfRange { index: 2, frame: FrameId(far), frames: 71 };
        let list = [owned[0], owned[1], far];
        assert_eq!(refusals(&pool, &list), [expected; 3]);
        assert_eq!(pool.share(&list), Err(expected));
        assert_eq!(pool.claim(&[3 + free, 4 + free, far]), Err(expected));
        assert_eq!(pool.uncache(&list), Err(expected));
        let (mut out, mut info) = (vec![7], Vec::new());
        assert_eq!(pool.references(&list, &mut out), Err(expected));
        assert_eq!(pool.info(&list, &mut info), Err(expected));
        assert_eq!((out, info.len()), (vec![7], 0), "unchanged");
    }
    let null = FrameError::Null { index: 1, frame: FrameId(0) };
    assert_eq!(refusals(&pool, &[owned[0], 0]), [null; 3]);
    assert_eq!(pool.share(&[owned[0], 0]), Err(null));
    assert_eq!(pool.claim(&[free, 0]), Err(null));
    let unowned = FrameError::Free { index: 1, frame: FrameId(free) };
    assert_eq!(refusals(&pool, &[owned[0], free]), [unowned; 3]);
    assert_eq!(pool.share(&[owned[0], free]), Err(unowned));
    assert_eq!(pool.info(&[owned[0], free], &mut Vec::new()), Err(unowned));
    assert_eq!((pool.counts(), references(&pool, &owned)), (before, vec![1, 1]));
    assert_eq!(pool.cached(key(&pool, 99)).unwrap(), None);
    assert_eq!(pool.clear_idle().unwrap_err().to_string(), "2 frames are in use");
    pool.free(&owned).unwrap();
    pool.audit().unwrap();
}

#[test]
fn a_frame_that_is_freed_twice_is_named() {
    let pool = pool(100);
    for count in [2, 64] {
        let frames = allocate(&pool, count);
        // Twice in one list, at the ends of it.
        let mut list = frames.clone();
        list.push(frames[0]);
        let repeated =
            FrameError::Repeated { index: count, frame: FrameId(frames[0]), listed: 2, references: 1 };
        assert_eq!(pool.free(&list), Err(repeated));
        assert_eq!(references(&pool, &frames), vec![1; count], "nothing was freed");
        // As often as it has references is right.
        pool.share(&frames[..1]).unwrap();
        pool.free(&list).unwrap();
        // In two lists.
        let freed = FrameError::Free { index: 0, frame: FrameId(frames[1]) };
        assert_eq!(pool.free(&frames[1..]), Err(freed));
        assert_eq!(pool.audit().unwrap().owned, 0);
    }
    let cached = cache(&pool, &[1, 2]);
    let unreferenced = FrameError::Unreferenced { index: 0, frame: FrameId(cached[0]) };
    assert_eq!(refusals(&pool, &cached), [unreferenced; 3]);
    assert_eq!(pool.cached(key(&pool, 1)).unwrap(), Some(cached[0]));
}

#[test]
fn repeated_claims_and_frames_in_use_are_named() {
    let pool = pool(64);
    let cached = cache(&pool, &[1])[0];
    let owned = allocate(&pool, 1)[0];
    let in_use = FrameError::InUse { index: 1, frame: FrameId(owned), references: 1 };
    assert_eq!(pool.claim(&[cached, owned]), Err(in_use));
    let free: Vec<u32> = (1..65).filter(|frame| ![cached, owned].contains(frame)).collect();
    let repeated = FrameError::Repeated { index: 2, frame: FrameId(free[0]), listed: 2, references: 1 };
    assert!(matches!(pool.claim(&[free[0], cached, free[0]]), Err(error) if error == repeated));
    assert_eq!(pool.cached(key(&pool, 1)).unwrap(), Some(cached), "refused claims evict nothing");
    pool.claim(&free).unwrap();
    pool.claim(&[]).unwrap();
    assert_eq!(pool.audit().unwrap().owned, 63);
}

#[test]
fn references_have_a_maximum() {
    let pool = pool(8);
    let frames = allocate(&pool, 2);
    for _ in 1..8191 {
        pool.share(&frames[1..]).unwrap();
    }
    let full = FrameError::TooManyReferences { index: 1, frame: FrameId(frames[1]), max: 8191 };
    assert_eq!(pool.share(&frames), Err(full));
    assert_eq!(references(&pool, &frames), [1, 8191]);
    // The excess is in the list itself: the first shares are taken back.
    pool.free(&frames[1..]).unwrap();
    assert_eq!(
        pool.share(&[frames[0], frames[1], frames[1]]),
        Err(FrameError::TooManyReferences { index: 2, frame: FrameId(frames[1]), max: 8191 })
    );
    assert_eq!(references(&pool, &frames), [1, 8190]);
}

#[test]
fn hashes_and_keys_are_checked() {
    let (pool, other) = (pool(8), pool(8));
    assert_eq!(pool.key(FrameGroup(0), b""), Err(FrameError::EmptyHash { index: 0 }));
    let mut made = vec![key(&pool, 7)];
    let empty = FrameError::EmptyHash { index: 1 };
    assert_eq!(pool.keys(FrameGroup(0), [&b"a"[..], b"", b"b"], &mut made), Err(empty));
    assert_eq!(empty.to_string(), "entry 1: the hash is empty");
    pool.keys(FrameGroup(0), [b"a", b"b"], &mut made).unwrap();
    assert_eq!(
        made,
        [key(&pool, 7), pool.key(FrameGroup(0), b"a").unwrap(), pool.key(FrameGroup(0), b"b").unwrap()]
    );
    let frames = allocate(&pool, 2);
    let foreign = FrameError::ForeignKey { index: 1, key: other.tag(), pool: pool.tag() };
    let keys = [key(&pool, 1), key(&other, 1)];
    assert_eq!(pool.register(&[(frames[0], keys[0]), (frames[1], keys[1])]), Err(foreign));
    assert_eq!(pool.hit(&keys, &mut Vec::new()), Err(foreign));
    assert_eq!(pool.cached_prefix(&keys, &mut Vec::new()), Err(foreign));
    assert_eq!(pool.cached(keys[0]), Ok(None), "nothing was registered");
    assert!(pool.cached(keys[1]).is_err() && pool.unregister(keys[1]).is_err());

    pool.register(&[(frames[0], keys[0]), (frames[1], key(&pool, 2))]).unwrap();
    let cached = |frame| FrameError::Cached { index: 1, frame: FrameId(frame) };
    assert_eq!(pool.move_keys(frames[0], frames[1]), Err(cached(frames[1])));
    assert_eq!(pool.move_keys(frames[0], frames[0]), Err(cached(frames[0])));
    assert_eq!(pool.cached(keys[0]), Ok(Some(frames[0])));
    pool.free(&frames).unwrap();
    assert_eq!(
        pool.move_keys(frames[0], frames[1]),
        Err(FrameError::Unreferenced { index: 0, frame: FrameId(frames[0]) })
    );
    // Keys of any length.
    for len in [1, 8, 32, 1000] {
        pool.key(FrameGroup(3), &vec![5; len]).unwrap();
    }
}

#[test]
fn requests_are_checked_as_in_any_pool() {
    let pool = pool(8);
    let (mut out, mut runs) = (vec![1], Vec::new());
    assert_eq!(pool.allocate(AllocRequest::new(0), &mut out), Err(AllocError::Zero));
    assert_eq!(pool.allocate_runs(AllocRequest::new(0), &mut runs), Err(AllocError::Zero));
    let large = AllocError::TooLarge { asked: 9, total: 8 };
    assert_eq!(pool.allocate(AllocRequest::new(9), &mut out), Err(large));
    assert_eq!(
        pool.allocate_runs(AllocRequest::new(usize::MAX), &mut runs),
        Err(AllocError::TooLarge { asked: usize::MAX, total: 8 })
    );
    let owned = allocate(&pool, 5);
    assert!(matches!(
        pool.allocate_runs(AllocRequest::new(4), &mut runs),
        Err(AllocError::Exhausted { free: 3, .. })
    ));
    assert_eq!((out, runs.len()), (vec![1], 0));
    pool.free(&owned).unwrap();
    assert!(FramePool::builder(0).build().is_err());
    assert_eq!(pool.audit().unwrap().owned, 0);
}

#[test]
fn a_refused_keep_changes_nothing() {
    let pool = FramePool::builder(10).build().unwrap();
    let mut table = Vec::new();
    pool.allocate(AllocRequest::new(2), &mut table).unwrap();
    let key = pool.key(FrameGroup(0), b"abc").unwrap();
    pool.register(&[(table[0], key)]).unwrap();
    for twice in [[table[0], table[0]], [table[1], table[1]]] {
        assert!(matches!(pool.keep(&twice), Err(FrameError::Repeated { .. })), "{:?}", pool.keep(&twice));
    }
    assert_eq!(pool.cached(key).unwrap(), Some(table[0]), "registered before");
    assert!(pool.is_writable(table[1]).unwrap(), "not cached");
    pool.free(&table).unwrap();
    assert_eq!((pool.counts().free(), pool.counts().evictable), (9, 1));
}
