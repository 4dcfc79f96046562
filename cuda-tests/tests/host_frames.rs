//! Frames of storages in host memory, which the device copies directly: by every way, with pages
//! that cannot be locked, while the storage shrinks and grows, and with copies whose end is late or
//! never known.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpool::storage::{
    AdoptedPlane, AdoptedTensors, Arrangement, Dtype, Elements, ElementsMut, HostStorage, KvLayout, KvPlanes,
    Storage,
};
use kvpool::{AllocRequest, FrameId, Pool, Run, Sequence, SequenceId, StorageError};
use kvpool_cuda::launch::Choices;
use kvpool_cuda::{CudaConfig, CudaStorage, Device};
use kvpool_cuda_tests::mock::{Kind, Rules, Session, for_each_seed, session};

const FRAMES: usize = 8;
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`: says nothing about the device.
const REFUSED: i32 = 900;

/// Returns a layout whose tiles have 64 KiB, or 128 if K and V are joined.
fn layout(arrangement: Arrangement, parts: KvPlanes) -> KvLayout {
    let builder = KvLayout::builder().layers(2).kv_heads(8).head_dim(128).block_tokens(32);
    builder.dtype(Dtype::Bf16).arrangement(arrangement).parts(parts).build().expect("a layout")
}

/// All layouts with the same packed form.
fn layouts() -> Vec<KvLayout> {
    [Arrangement::LayerFirst, Arrangement::BlockFirst]
        .into_iter()
        .flat_map(|arrangement| {
            [KvPlanes::Separate, KvPlanes::Joined].map(|parts| layout(arrangement, parts))
        })
        .collect()
}

fn run(start: u32, len: u32) -> Run {
    Run { start: FrameId(start), len }
}

fn bytes(count: usize, seed: u64) -> Vec<u8> {
    let word = |at: u64| (at + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15 ^ seed << 21).to_le_bytes();
    (0..count.div_ceil(8) as u64).flat_map(word).take(count).collect()
}

fn packed(storage: &dyn Storage, runs: &[Run]) -> Vec<u8> {
    let frames: u32 = runs.iter().map(|run| run.len).sum();
    let mut out = vec![0; frames as usize * storage.layout().packed_bytes()];
    // SAFETY: no other thread uses the frames.
    unsafe { storage.pack(runs, &mut out) }.expect("existing frames");
    out
}

fn fill(storage: &dyn Storage, seed: u64) -> Vec<u8> {
    let (frames, per_frame) = (storage.frames(), storage.layout().packed_bytes());
    let content = bytes(frames * per_frame, seed);
    // SAFETY: no other thread uses the frames.
    unsafe { storage.unpack(&[run(0, frames as u32)], &content) }.expect("existing frames");
    content
}

fn receive(target: &dyn Storage, source: &dyn Storage, from: &[Run], to: &[Run]) -> Result<(), StorageError> {
    // SAFETY: no other thread uses the frames.
    unsafe { target.receive(source, from, to) }
}

/// Copies frames from the device to the host and others back, and compares every byte.
fn there_and_back(device: &CudaStorage, host: &HostStorage, seed: u64, what: &str) {
    let (near, far) = ([run(0, 3), run(5, 2)], [run(1, 2), run(4, 3)]);
    fill(device, seed);
    fill(host, seed + 1);
    let untouched = packed(host, &[run(0, 1), run(3, 1), run(7, 1)]);
    receive(host, device, &near, &far).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(packed(host, &far) == packed(device, &near), "{what}: offloaded");
    assert!(packed(host, &[run(0, 1), run(3, 1), run(7, 1)]) == untouched, "{what}: other frames");
    fill(host, seed + 2);
    let untouched = packed(device, &[run(0, 1), run(3, 2)]);
    // Scattered: no two are neighbours.
    let (from, to) = ([run(6, 1), run(2, 1), run(0, 1)], [run(1, 1), run(7, 1), run(5, 1)]);
    receive(device, host, &from, &to).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(packed(device, &to) == packed(host, &from), "{what}: brought back");
    assert!(packed(device, &[run(0, 1), run(3, 2)]) == untouched, "{what}: other frames");
}

/// Returns the number of registrations. A lost device keeps its own, from earlier tests.
fn registered(session: &Session) -> i64 {
    session.live()[Kind::Registered as usize]
}

#[test]
fn bytes_are_the_same_by_every_way() {
    let session = session();
    let before = registered(&session);
    let device = Device::open(0).expect("a device");
    for_each_seed(&session, 6, |seed| {
        session.rules(&Rules::of(seed));
        for here in layouts() {
            let storage = CudaStorage::new(&device, here.clone(), FRAMES, FRAMES).expect("frames");
            for there in layouts() {
                let host = HostStorage::new(there.clone(), FRAMES, FRAMES).expect("frames");
                let launches = session.calls("cuLaunchKernel");
                receive(&host, &storage, &[run(0, 8)], &[run(0, 8)]).expect("frames");
                let launches = session.calls("cuLaunchKernel") - launches;
                // Without a kernel if both cut a frame alike.
                let alike = here.arrangement() == there.arrangement()
                    && (here.parts() == there.parts() || here.arrangement() == Arrangement::BlockFirst);
                assert_eq!(launches, u64::from(!alike), "{here}, {there}");
                assert_eq!(registered(&session) - before, 1, "{here}, {there}");
                there_and_back(&storage, &host, seed, &format!("{here}, {there}"));
                drop(host);
                assert_eq!(registered(&session) - before, 0);
            }
        }
    });
}

/// Frames in pieces of some KiB: a kernel accesses the host's pages. Shorter ones, those with other
/// units, and those of pages that cannot be locked or reached, pass through buffers.
#[test]
fn short_pieces_are_copied_by_a_kernel() {
    let session = session();
    let before = registered(&session);
    let layout = |heads, head_dim, tokens, dtype, arrangement| {
        let builder = KvLayout::builder().layers(3).kv_heads(heads).head_dim(head_dim).dtype(dtype);
        builder.block_tokens(tokens).arrangement(arrangement).build().expect("a layout")
    };
    let shapes =
        [(2, 64, 16, Dtype::Bf16, true), (2, 64, 2, Dtype::Bf16, false), (1, 133, 33, Dtype::Int8, false)];
    for reaches in [true, false] {
        session.set_reaches_pages(0, reaches.into());
        let device = Device::open(0).expect("a device");
        for_each_seed(&session, 6, |seed| {
            session.rules(&Rules::of(seed));
            let (heads, head_dim, tokens, dtype, is_long) = shapes[seed as usize % shapes.len()];
            let layouts = [Arrangement::LayerFirst, Arrangement::BlockFirst]
                .map(|arrangement| layout(heads, head_dim, tokens, dtype, arrangement));
            // Scattered, so that every copy of the driver would be short.
            let apart = [run(6, 1), run(3, 1), run(0, 1)];
            for (here, there) in
                layouts.iter().flat_map(|here| layouts.iter().map(move |there| (here, there)))
            {
                let storage = CudaStorage::new(&device, here.clone(), FRAMES, FRAMES).expect("frames");
                let host = HostStorage::new(there.clone(), FRAMES, FRAMES).expect("frames");
                session.seed(seed);
                let calls = ["cuLaunchKernel", "cuMemcpyDtoHAsync_v2"];
                let called = calls.map(|call| session.calls(call));
                receive(&host, &storage, &apart, &apart).expect("frames");
                let launches = session.launches();
                let [launched, fetched] = [0, 1].map(|at| session.calls(calls[at]) - called[at]);
                let by_kernel = is_long && reaches;
                let expected = if by_kernel { (2, 0, 1) } else { (1, 1, 0) };
                let locked = registered(&session) - before;
                assert_eq!((launched, fetched, locked), expected, "{here}, {there}");
                assert!(launches.iter().all(|launch| launch.0 == "kvp_pack"), "{launches:?}");
                assert!(
                    launches.iter().any(|launch| launch.1[0] <= Choices::DEFAULT.host_ctas),
                    "{launches:?}"
                );
                there_and_back(&storage, &host, seed, &format!("{here}, {there}"));
                let host = HostStorage::new(there.clone(), FRAMES, FRAMES).expect("frames");
                session.fail_calls("cuMemHostRegister_v2", 801);
                there_and_back(&storage, &host, seed, "refused");
                session.forget_injected();
            }
        });
    }
    session.set_reaches_pages(0, 1);
    assert_eq!(registered(&session) - before, 0);
}

#[test]
fn frames_whose_pages_cannot_be_locked_pass_through_buffers() {
    let session = session();
    let before = registered(&session);
    let device = Device::open(0).expect("a device");
    let [here, there] = [Arrangement::LayerFirst, Arrangement::BlockFirst].map(|arrangement| {
        let made = layout(arrangement, KvPlanes::Separate);
        assert!(made.packed_bytes() < 8 << 20);
        made
    });
    let storage = CudaStorage::new(&device, here.clone(), FRAMES, FRAMES).expect("frames");
    let new_host = || HostStorage::new(there.clone(), FRAMES, FRAMES).expect("frames");
    // Not supported, registered by other code, and an error that otherwise means that the device
    // has failed.
    for code in [801, 712, 999] {
        session.fail_calls("cuMemHostRegister_v2", code);
        let (host, calls) = (new_host(), session.calls("cuMemHostRegister_v2"));
        there_and_back(&storage, &host, 3, "refused");
        // A refusal is remembered.
        assert_eq!(session.calls("cuMemHostRegister_v2") - calls, 1);
        session.forget_injected();
    }
    assert_eq!(registered(&session) - before, 0);
    // The engine has registered a part of the pages itself.
    let host = new_host();
    let planes = host.planes().expect("host memory");
    let inside = planes.tensors().next().expect("a plane").data.cast::<u8>().wrapping_add(1 << 20);
    let at = inside.wrapping_sub(inside.addr() % 4096).cast();
    cudarc::driver::CudaContext::new(0).and_then(|context| context.bind_to_thread()).expect("a device");
    // SAFETY: the host's memory, which outlives the registration.
    unsafe { cudarc::driver::sys::cuMemHostRegister_v2(at, 4096, 0) }.result().expect("a page");
    there_and_back(&storage, &host, 4, "registered by others");
    assert_eq!(registered(&session) - before, 1, "only that page");
    // SAFETY: registered above.
    unsafe { cudarc::driver::sys::cuMemHostUnregister(at) }.result().expect("registered");
    // The configuration forbids it, or forbids as much.
    for bytes in [0, FRAMES * there.packed_bytes() - 1] {
        let config = CudaConfig::default().host_bytes_max(bytes);
        let storage =
            CudaStorage::with_config(&device, here.clone(), FRAMES, FRAMES, config).expect("frames");
        there_and_back(&storage, &new_host(), 5, "forbidden");
    }
    // An engine's memory is its own affair.
    let mut memory = vec![0u8; 64 + FRAMES * there.bytes_per_block()];
    let start = memory.as_mut_ptr().wrapping_add(memory.as_ptr().align_offset(64));
    let table = there.planes(FRAMES).expect("a table");
    let planes: Vec<AdoptedPlane> = table
        .planes
        .iter()
        .map(|plane| AdoptedPlane { base: start.wrapping_add(plane.base), frame_stride: plane.frame_stride })
        .collect();
    let tensors = AdoptedTensors::Planes(&planes);
    // SAFETY: the planes are in the memory, which the storage owns.
    let host = unsafe { HostStorage::adopt_tensors(there.clone(), tensors, FRAMES, memory) }.expect("planes");
    there_and_back(&storage, &host, 6, "adopted");
    assert_eq!(registered(&session) - before, 0);
    // Memory of a device that an engine manages, too.
    let (host, calls) = (new_host(), session.calls("cuLaunchKernel"));
    let planes: Vec<AdoptedPlane> = {
        let planes = storage.planes().expect("a device's memory");
        let base = planes.tensors().map(|tensor| tensor.data);
        base.map(|base| AdoptedPlane { base: base.cast(), frame_stride: 64 << 10 }).collect()
    };
    let config = CudaConfig::default();
    let tensors = AdoptedTensors::Planes(&planes);
    // SAFETY: the planes of a storage that lives, whose frames are not used otherwise.
    let adopted = unsafe { CudaStorage::adopt_tensors(&device, here.clone(), tensors, FRAMES, (), config) };
    there_and_back(&adopted.expect("planes"), &host, 7, "adopted by the device");
    assert!(session.calls("cuLaunchKernel") > calls && registered(&session) - before == 1);
    drop(host);
    assert_eq!(registered(&session) - before, 0);
}

#[test]
fn a_driver_that_refuses_direct_copies_gets_others() {
    let session = session();
    let device = Device::open(0).expect("a device");
    let storage =
        CudaStorage::new(&device, layout(Arrangement::BlockFirst, KvPlanes::Joined), FRAMES, FRAMES)
            .expect("frames");
    let host =
        HostStorage::new(layout(Arrangement::LayerFirst, KvPlanes::Joined), FRAMES, FRAMES).expect("frames");
    session.fail_calls("cuMemcpy2DAsync_v2", 801);
    there_and_back(&storage, &host, 1, "no rectangles");
    session.forget_injected();
    // A device without room for another buffer.
    session.fail_calls("cuMemAlloc_v2", 2);
    there_and_back(&storage, &host, 2, "no memory");
}

#[test]
fn a_lost_registration_does_not_hurt_another_device() {
    let session = session();
    let [first, second] = [0, 1].map(|ordinal| Device::open(ordinal).expect("two devices"));
    let layout = layout(Arrangement::LayerFirst, KvPlanes::Separate);
    let [one, other] = [&first, &second]
        .map(|device| CudaStorage::new(device, layout.clone(), FRAMES, FRAMES).expect("frames"));
    let host = HostStorage::new(layout, FRAMES, FRAMES).expect("frames");
    there_and_back(&one, &host, 1, "the first device");
    let calls = session.calls("cuMemHostRegister_v2");
    there_and_back(&other, &host, 2, "the second device, with pages that the first one has registered");
    assert_eq!(session.calls("cuMemHostRegister_v2"), calls);
    session.fail(0, 719);
    let error = receive(&host, &one, &[run(0, 4)], &[run(0, 4)]).expect_err("a lost device");
    assert!(matches!(error, StorageError::DeviceLost { .. }), "{error}");
    there_and_back(&other, &host, 3, "the second device, after the first one was lost");
    drop((host, one));
}

#[test]
fn pages_are_given_back_only_after_their_registration() {
    let session = session();
    let before = registered(&session);
    let device = Device::open(0).expect("a device");
    for there in layouts() {
        let storage =
            CudaStorage::new(&device, layout(Arrangement::LayerFirst, KvPlanes::Separate), FRAMES, FRAMES)
                .expect("frames");
        let host = HostStorage::new(there.clone(), FRAMES, FRAMES + 4).expect("frames");
        there_and_back(&storage, &host, 1, "at first");
        let first = registered(&session) - before;
        assert!(first >= 1);
        // SAFETY: no other thread uses the frames.
        unsafe { host.shrink(3) };
        assert_eq!(registered(&session) - before, 0, "{there}: the pages of frame 3 and later were returned");
        receive(&host, &storage, &[run(2, 3)], &[run(0, 3)]).expect("frames");
        assert!(packed(&host, &[run(0, 3)]) == packed(&storage, &[run(2, 3)]));
        // More frames than were registered.
        host.grow(FRAMES).expect("address space");
        there_and_back(&storage, &host, 2, "after growing again");
        host.grow(FRAMES + 4).expect("address space");
        receive(&host, &storage, &[run(0, 8)], &[run(4, 8)]).expect("frames");
        assert!(packed(&host, &[run(4, 8)]) == packed(&storage, &[run(0, 8)]));
        drop(host);
        assert_eq!(registered(&session) - before, 0);
    }
}

/// While a copy is in progress, the storage shrinks: the copy's pages stay, and others copy through
/// buffers until it has ended.
#[test]
fn a_shrink_beside_a_copy_leaves_its_pages_registered() {
    let session = session();
    let before = registered(&session);
    let device = Device::open(0).expect("a device");
    let layout = layout(Arrangement::BlockFirst, KvPlanes::Separate);
    let storage = CudaStorage::new(&device, layout.clone(), FRAMES, FRAMES).expect("frames");
    let beside = CudaStorage::new(&device, layout.clone(), FRAMES, FRAMES).expect("frames");
    let host = HostStorage::new(layout, FRAMES, FRAMES).expect("frames");
    let content = fill(&storage, 1);
    fill(&beside, 2);
    session.pause();
    kvpool_testkit::threads::scope(|scope| {
        let copying = scope.spawn(|| receive(&host, &storage, &[run(0, 2)], &[run(0, 2)]));
        wait("the copy is enqueued", || session.pending() > 0);
        // SAFETY: the copy does not use these frames.
        unsafe { host.shrink(4) };
        assert_eq!(registered(&session) - before, 1, "the copy needs its pages");
        // It passes through buffers, which a kernel fills.
        let launched = session.calls("cuLaunchKernel");
        let other = scope.spawn(|| receive(&host, &beside, &[run(0, 2)], &[run(2, 2)]));
        wait("the other copy is enqueued", || session.calls("cuLaunchKernel") > launched);
        session.resume();
        copying.join().expect("no panic").expect("a healthy device");
        other.join().expect("no panic").expect("a healthy device");
    });
    assert_eq!(registered(&session) - before, 0);
    assert!(packed(&host, &[run(0, 2)]) == content[..2 * content.len() / FRAMES]);
    assert!(packed(&host, &[run(2, 2)]) == packed(&beside, &[run(0, 2)]));
}

/// A paused device has the lots that it will copy next, by each way that takes several.
#[test]
fn several_lots_are_in_flight() {
    const MANY: usize = 160;
    let session = session();
    let device = Device::open(0).expect("a device");
    let [here, there] = [Arrangement::LayerFirst, Arrangement::BlockFirst]
        .map(|arrangement| layout(arrangement, KvPlanes::Separate));
    let bytes = MANY * here.packed_bytes();
    // Lots of 8 MiB through pinned buffers, of 32 MiB without.
    for (host_bytes_max, lots) in [(0, 4.min(bytes / (8 << 20))), (usize::MAX, bytes.div_ceil(32 << 20))] {
        let config = CudaConfig::default().host_bytes_max(host_bytes_max);
        let storage = CudaStorage::with_config(&device, here.clone(), MANY, MANY, config).expect("frames");
        let host = HostStorage::new(there.clone(), MANY, MANY).expect("frames");
        let content = fill(&storage, 1);
        let all = [run(0, MANY as u32)];
        let launched = session.calls("cuLaunchKernel");
        session.pause();
        kvpool_testkit::threads::scope(|scope| {
            let copying = scope.spawn(|| receive(&host, &storage, &all, &all));
            wait("the lots are enqueued", || session.calls("cuLaunchKernel") - launched == lots as u64);
            session.resume();
            copying.join().expect("no panic").expect("a healthy device");
        });
        assert!(packed(&host, &all) == content);
        let mixed = [run(80, 80), run(0, 80)];
        receive(&storage, &host, &mixed, &all).expect("a healthy device");
        assert!(packed(&storage, &all) == packed(&host, &mixed));
    }
}

fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "timed out: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

// ---- Pools

const BLOCKS: usize = 8;

struct Pools {
    device: Device,
    here: Pool,
    there: Pool,
    sequence: Sequence,
    rows: Vec<u8>,
}

/// A pool on the device with a sequence of two blocks, and an empty pool of eight on the host.
fn pools() -> Pools {
    let device = Device::open(0).expect("a device");
    let layout = layout(Arrangement::BlockFirst, KvPlanes::Separate);
    let storage = CudaStorage::new(&device, layout.clone(), BLOCKS + 1, BLOCKS + 1).expect("frames");
    let here =
        Pool::builder(layout.clone()).blocks(BLOCKS).storage(Arc::new(storage)).build().expect("a pool");
    let host = HostStorage::new(layout.clone(), BLOCKS + 1, BLOCKS + 1).expect("frames");
    let there = Pool::builder(layout.clone()).blocks(BLOCKS).storage(Arc::new(host)).build().expect("a pool");
    let mut sequence = here.sequence(SequenceId(1)).open().expect("a new id");
    let tokens = 2 * layout.block_tokens();
    let rows = bytes(tokens * layout.row_elements() * 2, 9);
    let mut batch = here.begin_batch();
    batch.append(&mut sequence, tokens).expect("blocks");
    for layer in 0..layout.layers() {
        let [k, v] = [(); 2].map(|()| Elements::new(Dtype::Bf16, &rows).expect("whole elements"));
        batch.store(&mut sequence, layer, 0..tokens, k, v).expect("rows");
    }
    batch.finish();
    Pools { device, here, there, sequence, rows }
}

/// Checks that a sequence has the rows in both layers.
fn verify(pool: &Pool, sequence: &Sequence, rows: &[u8]) {
    let mut batch = pool.begin_batch();
    for layer in 0..pool.layout().layers() {
        let mut found = [vec![0; rows.len()], vec![0; rows.len()]];
        let [k, v] = &mut found;
        let [k, v] = [k, v].map(|part| ElementsMut::new(Dtype::Bf16, part).expect("whole elements"));
        batch.load(sequence, layer, 0..sequence.len(), k, v).expect("rows");
        assert!(found.iter().all(|found| found == rows), "layer {layer}");
    }
    batch.finish();
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("threads")
}

/// The future of a copy is dropped while the device has not begun it. The host's blocks get no
/// other owner before the copy has ended.
#[test]
fn a_dropped_future_leaves_the_blocks_to_the_copy() {
    let session = session();
    let runtime = runtime();
    let Pools { here, there, sequence, rows, device } = pools();
    for round in 0..2 {
        session.pause();
        let pending = session.pending();
        runtime.block_on(async {
            let copy = here.replicate(&sequence, &there);
            let enqueued = async {
                while session.pending() == pending {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            tokio::select! {
                _ = copy => panic!("the device is paused"),
                () = enqueued => {}
            }
        });
        let kept = there.stats();
        assert_eq!((kept.free, kept.used), (BLOCKS - 2, 2), "round {round}: {kept:?}");
        // The rest has other owners, whose bytes the copy must not change.
        let mut others = there.allocate_owned(AllocRequest::new(BLOCKS - 2)).expect("free blocks");
        assert!(there.allocate(AllocRequest::new(1)).is_err(), "the copy's blocks are not free");
        let runs: Vec<Run> = others.runs().collect();
        let storage = there.storage().expect("a pool with bytes").clone();
        let content = bytes((BLOCKS - 2) * storage.layout().packed_bytes(), round);
        // SAFETY: blocks of this lease.
        unsafe { storage.unpack(&runs, &content) }.expect("existing frames");
        others.seal(..);
        session.resume();
        wait("the copy ends", || there.stats().free == 2 && here.stats().in_transfer == 0);
        assert!(packed(&*storage, &runs) == content);
        drop(others);
        there.audit().expect("a sound pool");
    }
    let (copied, _) = runtime.block_on(here.replicate(&sequence, &there).into_future()).expect("blocks");
    verify(&there, &copied, &rows);
    drop((copied, sequence));
    device.good().expect("a healthy device");
}

/// The last handle of the host's pool is dropped while the device has not begun the copy.
#[test]
fn a_pool_that_is_dropped_during_a_copy_stays_until_its_end() {
    let session = session();
    let before = registered(&session);
    let runtime = runtime();
    let Pools { here, there, sequence, device, .. } = pools();
    session.pause();
    let copying = runtime.spawn({
        let (here, there) = (here.clone(), there.clone());
        async move { here.migrate(sequence, &there).await.map(|_| ()) }
    });
    wait("the copy is enqueued", || session.pending() > 0);
    let memory = Arc::downgrade(there.storage().expect("a pool with bytes"));
    copying.abort();
    drop(there);
    assert!(memory.strong_count() > 0 && registered(&session) - before == 1, "the device has not copied yet");
    session.resume();
    wait("the memory is released", || memory.strong_count() == 0 && registered(&session) - before == 0);
    device.good().expect("a healthy device");
    drop(here);
}

/// The device fails during the copy: nothing runs on it any more, and the host's blocks are free.
#[test]
fn blocks_of_a_copy_that_a_failure_ended_are_free() {
    let session = session();
    let runtime = runtime();
    let Pools { here, there, sequence, .. } = pools();
    session.pause();
    let copying = runtime.spawn({
        let (here, there) = (here.clone(), there.clone());
        async move { here.replicate(&sequence, &there).await.map(|_| ()) }
    });
    wait("the copy is enqueued", || session.pending() > 0);
    session.fail(0, 719);
    session.resume();
    let error = runtime.block_on(copying).expect("no panic").expect_err("a lost device");
    assert!(error.to_string().contains("lost"), "{error}");
    wait("the blocks are free", || there.stats().free == BLOCKS);
    there.audit().expect("a sound pool");
    assert_eq!(there.stats().quarantined, 0);
}

/// The driver says neither that the copy has ended nor that the device has failed. Its blocks are
/// never used again, and a copy that comes late changes no other.
#[test]
fn blocks_of_a_copy_whose_end_is_unknown_are_never_free() {
    let session = session();
    let before = registered(&session);
    let runtime = runtime();
    let Pools { here, there, sequence, .. } = pools();
    session.pause();
    for call in ["cuEventSynchronize", "cuStreamSynchronize"] {
        session.fail_calls(call, REFUSED);
    }
    let enqueued = session.pending();
    let error = runtime
        .block_on(here.replicate(&sequence, &there).into_future())
        .map(|_| ())
        .expect_err("a device that says nothing");
    assert!(error.to_string().contains("may still be copying"), "{error}");
    assert!(session.pending() > enqueued, "the copy has not run");
    let kept = there.stats();
    assert_eq!((kept.free, kept.quarantined), (BLOCKS - 2, 2), "{kept:?}");
    let others = there.allocate_owned(AllocRequest::new(BLOCKS - 2)).expect("free blocks");
    assert!(there.allocate(AllocRequest::new(1)).is_err(), "the copy's blocks are not free");
    let runs: Vec<Run> = others.runs().collect();
    let storage = there.storage().expect("a pool with bytes").clone();
    let content = bytes((BLOCKS - 2) * storage.layout().packed_bytes(), 4);
    // SAFETY: blocks of this lease.
    unsafe { storage.unpack(&runs, &content) }.expect("existing frames");
    session.forget_injected();
    session.resume();
    wait("the late copy", || session.pending() == 0);
    assert!(packed(&*storage, &runs) == content);
    // The pool on the host goes on with the others; its memory stays for good.
    drop((others, sequence, here, storage));
    assert_eq!(there.stats().free, BLOCKS - 2);
    there.audit().expect("a sound pool");
    drop(there);
    assert_eq!(registered(&session) - before, 1, "the pages stay registered");
}
