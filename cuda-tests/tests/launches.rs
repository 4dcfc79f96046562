//! What pools launch: kernel, grid, block and shared memory are those of the rules, by which
//! `gpu_check` measures.

use std::sync::mpsc::channel;
use std::time::Duration;

use kvpool::storage::{Dtype, FrameMove, KvLayout, Storage};
use kvpool::{FrameId, Run};
use kvpool_cuda::launch::{Choices, MOVING_CTAS, Shape, Work};
use kvpool_cuda::{CudaStorage, Device};
use kvpool_cuda_tests::mock::{Session, session};

/// Frames, of pieces of 4 KiB.
const FRAMES: usize = 64;

/// Multiprocessors of the mock's device.
const PROCESSORS: u32 = 4;

fn layout() -> KvLayout {
    let layout = KvLayout::builder().layers(2).kv_heads(2).head_dim(64).block_tokens(16).dtype(Dtype::Bf16);
    layout.build().expect("a layout")
}

/// Returns the launch of a rule, as the mock tells it.
fn launch_of(choices: &Choices, work: Work, bulk: bool, jobs: usize) -> (String, [u32; 3]) {
    let rule = choices.rule(work, bulk);
    let Shape { ctas, threads, shared_bytes } = rule.shape(jobs, PROCESSORS);
    (rule.kernel.to_string(), [ctas, threads, shared_bytes])
}

/// Returns the only launch since the seed was set, and its stream; forgets it.
fn only(session: &Session) -> ((String, [u32; 3]), u32) {
    let mut launches = session.launches();
    session.seed(1);
    assert_eq!(launches.len(), 1, "{launches:?}");
    let (kernel, shape, stream) = launches.remove(0);
    ((kernel, shape), stream)
}

/// Copies frames for a compaction.
fn wave(storage: &CudaStorage) {
    let (tell, told) = channel();
    let moves: Vec<FrameMove> = (0..8).map(|at| FrameMove::new(FrameId(at), FrameId(8 + at))).collect();
    let done = Box::new(move |outcome| tell.send(outcome).expect("the test receives"));
    // SAFETY: no other thread uses the frames.
    unsafe { storage.copy_then(&moves, done) };
    assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok(Ok(())));
}

/// Operations of a storage launch by the rules of their work, with bulk copies and without; a wave
/// beside a batch by the rule for that, without shared memory unless it is chosen. Copies to the
/// device, copies from it, wipes and waves have a stream each, unless the first three share one.
#[test]
fn a_storage_launches_by_the_rules() {
    let usual = Choices::DEFAULT;
    let other = Choices { is_bulk_beside: true, are_streams_apart: false, wave_bytes: 128 << 20, ..usual };
    for (major, choices) in [(8, usual), (9, usual), (8, other), (9, other)] {
        let (session, bulk) = (session(), major >= 9);
        session.set_capability(0, major, 0);
        let device = Device::open_with(0, choices).expect("the mock has a device");
        assert_eq!(device.kernels().has_bulk, bulk);
        let storage = CudaStorage::new(&device, layout(), FRAMES, FRAMES).expect("frames");
        assert_eq!(storage.wave_bytes(), choices.wave_bytes);
        let pieces = 4;
        session.seed(1);
        wave(&storage);
        let mut streams = Vec::new();
        let mut check = |work, jobs| {
            let (launch, stream) = only(&session);
            assert_eq!(launch, launch_of(&choices, work, bulk, jobs));
            streams.push(stream);
        };
        check(Work::Wave, 8 * pieces);
        let all = [Run { start: FrameId(0), len: FRAMES as u32 }];
        let mut bytes = vec![0; FRAMES * layout().packed_bytes()];
        // SAFETY: no other thread uses the frames.
        unsafe { storage.pack(&all, &mut bytes) }.expect("frames");
        check(Work::Pack, FRAMES * pieces);
        // SAFETY: as above.
        unsafe { storage.unpack(&all, &bytes) }.expect("frames");
        check(Work::Unpack, FRAMES * pieces);
        // SAFETY: as above.
        unsafe { storage.zero(&all) }.expect("frames");
        check(Work::Zero, FRAMES * pieces);
        let [wave, down, up, wipes] = streams[..] else { panic!("four launches") };
        assert!(![down, up, wipes].contains(&wave), "{streams:?}");
        let shared = [down == up, up == wipes, wipes == down];
        assert_eq!(shared, [!choices.are_streams_apart; 3], "{streams:?}");

        // A batch is in flight: its stream makes no progress, and its end is awaited.
        let stream = device.stream().expect("a stream");
        session.stop(0, 1);
        let (tell, ended) = channel();
        // SAFETY: as above; nothing else uses frame 63.
        unsafe { storage.copy_on(&stream, &[FrameMove::new(FrameId(62), FrameId(63))]) }.expect("a stream");
        storage.after(&stream, Box::new(move |outcome| tell.send(outcome).expect("the test receives")));
        session.seed(1);
        let (tell, told) = channel();
        let moves: Vec<FrameMove> = (0..8).map(|at| FrameMove::new(FrameId(at), FrameId(8 + at))).collect();
        let done = Box::new(move |outcome| tell.send(outcome).expect("the test receives"));
        // SAFETY: as above.
        unsafe { storage.copy_then(&moves, done) };
        let (beside, _) = only(&session);
        session.stop(0, 0);
        assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok(Ok(())));
        assert_eq!(ended.recv_timeout(Duration::from_secs(20)), Ok(Ok(())));
        assert_eq!(beside, launch_of(&choices, Work::WaveBeside { ctas: MOVING_CTAS }, bulk, 8 * pieces));
        let joins_any_multiprocessor = (beside.0.as_str(), beside.1[2]) == ("kvp_copy", 0);
        assert_eq!(joins_any_multiprocessor, !(bulk && choices.is_bulk_beside));
    }
}
