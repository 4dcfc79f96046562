//! Receiving frames from another storage: the bytes are identical by every path, and only the
//! requested frames change.

use kvpool::storage::{Arrangement, HostStorage, KvLayout, KvPlanes, Scales, Storage};
use kvpool::{DeviceId, FrameId, Run, StorageError};

use super::FRAMES;
use super::ops::{all, pack_all};
use super::refusals::{OVERLAP, run_outside};

const fn run(start: u32, len: u32) -> Run {
    Run { start: FrameId(start), len }
}

fn receive(target: &dyn Storage, source: &dyn Storage, from: &[Run], to: &[Run]) -> Result<(), StorageError> {
    // SAFETY: one thread.
    unsafe { target.receive(source, from, to) }
}

/// Fills all frames with distinct bytes, and returns those.
pub(super) fn fill(storage: &dyn Storage, seed: u8) -> Vec<u8> {
    let length = storage.frames() * storage.layout().packed_bytes();
    let bytes: Vec<u8> = (0..length).map(|at| seed ^ (at ^ at >> 8 ^ at >> 16) as u8).collect();
    // SAFETY: one thread.
    unsafe { storage.unpack(&[all(storage.frames())], &bytes) }.expect("all frames can be unpacked");
    bytes
}

fn host(layout: &KvLayout, frames: usize) -> HostStorage {
    HostStorage::new(layout.clone(), frames, frames).expect("memory for a few frames")
}

/// Layouts with the same packed form, in every arrangement, joined and separate.
fn relatives(layout: &KvLayout) -> Vec<KvLayout> {
    let mut relatives = Vec::new();
    let parts = match layout.parts() {
        KvPlanes::Latent => vec![KvPlanes::Latent],
        _ => vec![KvPlanes::Separate, KvPlanes::Joined],
    };
    for parts in parts {
        for arrangement in [Arrangement::LayerFirst, Arrangement::BlockFirst] {
            relatives
                .push(builder(layout).parts(parts).arrangement(arrangement).build().expect("a valid layout"));
        }
    }
    relatives
}

fn builder(layout: &KvLayout) -> kvpool::storage::KvLayoutBuilder {
    KvLayout::builder()
        .layers(layout.layers())
        .kv_heads(layout.kv_heads())
        .head_dim(layout.head_dim())
        .block_tokens(layout.block_tokens())
        .dtype(layout.dtype())
        .scales(layout.scales().clone())
        .parts(layout.parts())
        .arrangement(layout.arrangement())
}

/// Host memory that does not identify itself as such, so that its bytes take the generic path of
/// all storages.
#[derive(Debug)]
struct Stranger(HostStorage);

// Forwards to host memory. The caller upholds the frame rule.
impl Storage for Stranger {
    crate::as_on_the_host!(0);

    fn device(&self) -> DeviceId {
        self.0.device()
    }
}

/// Runs in any order, cut differently on both sides, from and to storages of every such layout.
pub(super) fn receiving(storage: &dyn Storage, twin: &dyn Storage) {
    let from = [run(4, 2), run(0, 1), run(3, 0), run(2, 2)];
    let to = [run(1, 1), run(5, 1), run(2, 3)];
    let copied = [(4, 1), (5, 5), (0, 2), (2, 3), (3, 4)];
    let bytes = storage.layout().packed_bytes();
    let check = |target: &dyn Storage, source: &dyn Storage| {
        let (theirs, mut want) = (fill(source, 1), fill(target, 2));
        for (src, dst) in copied {
            want[dst * bytes..][..bytes].copy_from_slice(&theirs[src * bytes..][..bytes]);
        }
        receive(target, source, &from, &to).expect("the same blocks");
        assert!(pack_all(target) == want, "received from {source:?}");
        assert!(pack_all(source) == theirs, "the source was written");
    };
    check(storage, twin);
    for relative in relatives(storage.layout()) {
        let others: [Box<dyn Storage>; 2] =
            [Box::new(host(&relative, FRAMES)), Box::new(Stranger(host(&relative, FRAMES)))];
        for other in &others {
            check(storage, &**other);
            check(&**other, storage);
        }
    }
    // From itself, to other frames.
    let mut want = fill(storage, 7);
    receive(storage, storage, &[run(3, 2)], &[run(0, 2)]).expect("the same blocks");
    want.copy_within(3 * bytes..5 * bytes, 0);
    assert!(pack_all(storage) == want, "received from itself");
    let before = pack_all(storage);
    receive(storage, twin, &[], &[]).expect("an empty transfer succeeds");
    assert!(pack_all(storage) == before);
}

/// No byte moves.
pub(super) fn refusals(storage: &dyn Storage, twin: &dyn Storage) {
    let (theirs, ours) = (fill(twin, 3), fill(storage, 4));
    let frames = storage.frames();
    let outside = run(frames as u32 - 1, 2);
    for (from, to, refusal) in [
        (vec![run(0, 2)], vec![run(0, 1)], "frames to copy: got 2, expected 1".to_owned()),
        (vec![], vec![run(0, 1)], "frames to copy: got 0, expected 1".to_owned()),
        (vec![run(0, 1), outside], vec![run(0, 3)], run_outside(1, outside, frames)),
        (vec![run(0, 2)], vec![outside], run_outside(0, outside, frames)),
        (vec![run(0, 4)], vec![run(1, 2), run(0, 2)], OVERLAP.to_owned()),
    ] {
        let refused = receive(storage, twin, &from, &to).unwrap_err();
        assert_eq!(refused.to_string(), refusal, "{from:?} to {to:?}");
    }
    let layout = storage.layout();
    let mut strangers = vec![
        builder(layout).layers(layout.layers() + 1).scales(Scales::Unit),
        builder(layout).head_dim(layout.head_dim() + 1),
        builder(layout).block_tokens(layout.block_tokens() + 1),
    ];
    if layout.dtype().is_quantised() && *layout.scales() != Scales::Unit {
        strangers.push(builder(layout).scales(Scales::Unit));
    }
    for stranger in strangers {
        let stranger = host(&stranger.build().expect("a valid layout"), FRAMES);
        let refused = receive(storage, &stranger, &[run(0, 1)], &[run(0, 1)]);
        assert!(matches!(refused, Err(StorageError::OtherForm { .. })), "{refused:?}: {stranger:?}");
    }
    assert!(pack_all(storage) == ours && pack_all(twin) == theirs, "a refused operation moved bytes");
}

/// More bytes than are staged at a time, over runs with other boundaries.
pub(super) fn large_blocks(make: impl Fn(&KvLayout, usize, usize) -> Box<dyn Storage>) {
    let layout = KvLayout::builder().layers(2).kv_heads(4).head_dim(128).block_tokens(512);
    let layout = layout.build().expect("a valid layout");
    assert!(layout.packed_bytes() > 1 << 20, "a block of {layout} is too small for this check");
    let strangers = [false, true].map(|is_stranger| -> Box<dyn Storage> {
        let host = host(&layout, FRAMES);
        if is_stranger { Box::new(Stranger(host)) } else { Box::new(host) }
    });
    for source in strangers {
        many_bytes(&*make(&layout, FRAMES, FRAMES), &*source);
    }
}

fn many_bytes(storage: &dyn Storage, source: &dyn Storage) {
    let (theirs, bytes) = (fill(source, 5), storage.layout().packed_bytes());
    fill(storage, 6);
    receive(storage, source, &[run(3, 3), run(0, 3)], &[run(0, 2), run(2, 4)]).expect("the same blocks");
    let packed = pack_all(storage);
    for (dst, src) in [3, 4, 5, 0, 1, 2].into_iter().enumerate() {
        assert!(packed[dst * bytes..][..bytes] == theirs[src * bytes..][..bytes], "frame {src} to {dst}");
    }
}
