//! Registrations of the host's pages: tried again after a lack of memory, made anew only after the
//! one before has ended, and kept from child processes.

use std::ffi::c_void;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use cudarc::driver::{CudaContext, sys};
use kvpool::storage::{Arrangement, Dtype, HostStorage, KvLayout, Storage};
use kvpool::{FrameId, Run};
use kvpool_cuda::launch::Choices;
use kvpool_cuda::{CudaStorage, Device};
use kvpool_cuda_tests::mock::{Kind, Rules, Session, for_each_seed, session};

const FRAMES: usize = 8;
const OUT_OF_MEMORY: i32 = 2;

fn run(start: u32, len: u32) -> Run {
    Run { start: FrameId(start), len }
}

fn storages(device: &Device) -> (CudaStorage, HostStorage) {
    storages_of(device, Arrangement::BlockFirst)
}

fn storages_of(device: &Device, arrangement: Arrangement) -> (CudaStorage, HostStorage) {
    let layout = KvLayout::builder().layers(2).kv_heads(8).head_dim(128).block_tokens(32).dtype(Dtype::Bf16);
    let layout = layout.arrangement(arrangement).build().expect("a layout");
    let storage = CudaStorage::new(device, layout.clone(), FRAMES, FRAMES).expect("frames");
    (storage, HostStorage::new(layout, FRAMES, FRAMES).expect("frames"))
}

fn copy(storage: &CudaStorage, host: &HostStorage, runs: &[Run]) {
    // SAFETY: no other thread uses the frames.
    unsafe { host.receive(storage, runs, runs) }.expect("frames");
}

fn registered(session: &Session) -> i64 {
    session.live()[Kind::Registered as usize]
}

fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let mut left = 60_000;
    while !is_so() {
        left -= 1;
        assert!(left > 0, "timed out: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Keeps a stream busy, by a host function that waits, until the sender is used or dropped. A
/// context must be current.
fn hold(stream: sys::CUstream) -> Sender<()> {
    unsafe extern "C" fn wait(data: *mut c_void) {
        // SAFETY: the box of `hold`, passed once.
        let gone = unsafe { Box::from_raw(data.cast::<Receiver<()>>()) };
        let _ = gone.recv();
    }
    let (go, gone) = mpsc::channel::<()>();
    let data = Box::into_raw(Box::new(gone)).cast();
    // SAFETY: the stream lives, and the function calls no function of the driver.
    unsafe { sys::cuLaunchHostFunc(stream, Some(wait), data) }.result().expect("a healthy device");
    go
}

/// The driver has no memory for a while: frames pass through buffers meanwhile. A copy that begins
/// when the refusal holds no longer registers the pages.
#[test]
fn a_lack_of_memory_is_not_final() {
    let session = session();
    let before = registered(&session);
    let device = Device::open(0).expect("a device");
    let (storage, host) = storages(&device);
    let all = [run(0, FRAMES as u32)];
    let tried = session.calls("cuMemHostRegister_v2");
    session.fail_calls("cuMemHostRegister_v2", OUT_OF_MEMORY);
    copy(&storage, &host, &all);
    assert_eq!(registered(&session) - before, 0);
    // More than one if the copy took long.
    let refusals = session.calls("cuMemHostRegister_v2") - tried;
    assert!(refusals > 0);
    session.forget_injected();
    // A refusal holds for one second, and each further one for twice as long.
    std::thread::sleep(Duration::from_secs(1 << (refusals - 1)));
    copy(&storage, &host, &all);
    assert_eq!(registered(&session) - before, 1, "after {refusals} refusals");
}

/// A device that is lost registers nothing, and does not keep another one from it.
#[test]
fn a_lost_device_leaves_the_pages_to_another_one() {
    let session = session();
    let before = registered(&session);
    let [lost, good] = [0, 1].map(|ordinal| Device::open(ordinal).expect("two devices"));
    let (of_lost, host) = storages(&lost);
    let (storage, _) = storages(&good);
    let all = [run(0, FRAMES as u32)];
    session.fail_call("cuMemHostRegister_v2", 0, 719);
    // SAFETY: no other thread uses the frames.
    unsafe { host.receive(&of_lost, &all, &all) }.expect_err("the device has failed");
    drop((of_lost, lost));
    // The pages change in number, after the refusal that no one knew the reason of.
    // SAFETY: as above.
    unsafe { host.shrink(FRAMES - 1) };
    copy(&storage, &host, &[run(0, 4)]);
    assert_eq!(registered(&session) - before, 1);
}

/// A storage shrinks while a copy holds the registration, and its last owner waits in the driver to
/// end it: no other registration is tried, which the driver would refuse for good.
#[test]
fn pages_are_registered_again_after_the_registration_has_ended() {
    let session = session();
    let before = registered(&session);
    let device = Device::open(0).expect("a device");
    let (storage, host) = storages(&device);
    let (beside, _) = storages(&device);
    copy(&storage, &host, &[run(0, FRAMES as u32)]);
    assert_eq!(registered(&session) - before, 1);
    let context = CudaContext::new(0).expect("a device");
    context.bind_to_thread().expect("its context");
    let stream = device.stream().expect("a stream");
    session.rules(&Rules { stalls: true, ..Rules::default() });
    let calls = |name: &str| session.calls(name);
    let (ended, made) = (calls("cuMemHostUnregister"), calls("cuMemHostRegister_v2"));
    std::thread::scope(|scope| {
        // In the scope, whose threads go on if the test fails.
        let go = hold(stream.as_raw().cast());
        // Holds the registration while the storage shrinks.
        session.pause();
        let pending = session.pending();
        let copying = scope.spawn(|| copy(&storage, &host, &[run(0, 4)]));
        wait("the copy is enqueued", || session.pending() > pending);
        // SAFETY: no thread uses the frames from 6 on.
        unsafe { host.shrink(6) };
        session.resume();
        wait("the registration is being ended", || calls("cuMemHostUnregister") > ended);
        let buffers = calls("cuMemHostAlloc");
        let other = scope.spawn(|| copy(&beside, &host, &[run(4, 2)]));
        // It takes a buffer, or registers the pages.
        wait("the other copy chooses its way", || {
            calls("cuMemHostAlloc") > buffers || calls("cuMemHostRegister_v2") > made
        });
        assert_eq!(calls("cuMemHostRegister_v2"), made, "the pages are still registered");
        go.send(()).expect("the stream waits");
        copying.join().expect("no panic");
        other.join().expect("no panic");
    });
    copy(&storage, &host, &[run(0, 4)]);
    assert_eq!(registered(&session) - before, 1);
}

/// Pages are registered in pieces that end between two frames: no copy crosses the border of two,
/// which the driver may refuse. If it refuses a piece, the others are given back.
#[test]
fn pages_are_registered_in_pieces() {
    let session = session();
    let before = registered(&session);
    // Less than two frames of 256 KiB.
    let choices = Choices { registration_bytes: 300 << 10, ..Choices::DEFAULT };
    let device = Device::open_with(0, choices).expect("a device");
    let all = [run(0, FRAMES as u32)];
    let arrangements = [Arrangement::BlockFirst, Arrangement::LayerFirst];
    for_each_seed(&session, 4, |seed| {
        session.rules(&Rules::of(seed));
        for (here, there) in arrangements.iter().flat_map(|here| arrangements.map(|there| (*here, there))) {
            let (storage, host) = (storages_of(&device, here).0, storages_of(&device, there).1);
            let bytes: Vec<u8> = (0..FRAMES * storage.layout().packed_bytes())
                .map(|at| (((at as u64 * 0x9E37_79B9) >> 13) ^ seed) as u8)
                .collect();
            // SAFETY: no other thread uses the frames.
            unsafe { storage.unpack(&all, &bytes) }.expect("frames");
            // Before the first copy.
            assert!(storage.lock_pages(&host));
            assert_eq!(registered(&session) - before, FRAMES as i64, "{here:?}, {there:?}");
            let copies = || {
                ["cuMemcpyDtoHAsync_v2", "cuMemcpy2DAsync_v2"].map(|call| session.calls(call)).iter().sum()
            };
            let (made, copied): (u64, u64) = (session.calls("cuMemHostRegister_v2"), copies());
            copy(&storage, &host, &all);
            // Of one frame, or of four frames' tiles of a plane, to one piece each.
            assert_eq!(copies() - copied, FRAMES as u64, "{here:?}, {there:?}");
            assert_eq!(session.calls("cuMemHostRegister_v2"), made);
            let mut got = vec![0; bytes.len()];
            // SAFETY: as above.
            unsafe {
                host.pack(&all, &mut got).expect("frames");
                storage.zero(&all).expect("frames");
                storage.receive(&host, &all, &all).expect("frames");
            }
            assert!(got == bytes, "{here:?}, {there:?}: offloaded");
            // SAFETY: as above.
            unsafe { storage.pack(&all, &mut got) }.expect("frames");
            assert!(got == bytes, "{here:?}, {there:?}: brought back");
            drop(host);
            assert_eq!(registered(&session) - before, 0);
        }
    });
    let (storage, host) = storages(&device);
    session.fail_call("cuMemHostRegister_v2", 3, OUT_OF_MEMORY);
    assert!(!storage.lock_pages(&host));
    assert_eq!(registered(&session) - before, 0);
    copy(&storage, &host, &all);
}

/// A copy to another device that waits for a registration goes on after a piece, and not after the
/// last one.
#[test]
fn copies_to_other_devices_go_on_between_two_pieces() {
    let session = session();
    let choices = Choices { registration_bytes: 300 << 10, ..Choices::DEFAULT };
    let [near, far] = [0, 1].map(|ordinal| Device::open_with(ordinal, choices).expect("two devices"));
    let context = CudaContext::new(0).expect("a device");
    context.bind_to_thread().expect("its context");
    let stream = near.stream().expect("a stream");
    let (target, all) = (storages(&far).0, [run(0, FRAMES as u32)]);
    let rounds: Vec<u64> = (0..20)
        .map(|_| {
            let (source, host) = storages(&near);
            // SAFETY: no other thread uses the frames.
            let cross = || unsafe { target.receive(&source, &all, &all) }.expect("frames");
            // It takes its buffers here.
            cross();
            session.rules(&Rules { stalls: true, ..Rules::default() });
            let before = session.calls("cuMemHostRegister_v2");
            let made = || session.calls("cuMemHostRegister_v2") - before;
            std::thread::scope(|scope| {
                // The driver waits for the stream before it registers the first piece.
                let go = hold(stream.as_raw().cast());
                let locking = scope.spawn(|| source.lock_pages(&host));
                wait("the first piece is being registered", || made() > 0);
                let peers = session.calls("cuMemcpyPeerAsync");
                let crossing = scope.spawn(cross);
                // It waits at the gate.
                std::thread::sleep(Duration::from_millis(20));
                go.send(()).expect("the stream waits");
                while session.calls("cuMemcpyPeerAsync") == peers {
                    std::hint::spin_loop();
                }
                let made = made();
                assert!(locking.join().expect("no panic"));
                crossing.join().expect("no panic");
                session.rules(&Rules::default());
                made
            })
        })
        .collect();
    // A copy may come late to the gate.
    let after_one = rounds.iter().filter(|&&made| made == 1).count();
    assert!(after_one >= 15, "pieces before the copy: {rounds:?}");
}

/// Pages that a device accesses stay this process's when it forks.
#[test]
#[cfg(target_os = "linux")]
fn child_processes_do_not_get_the_pages() {
    /// Returns true if children get the page at an address, by the kernel's list of mappings.
    fn is_inherited(at: usize) -> bool {
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("the kernel's list");
        let mut is_here = false;
        for line in maps.lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let ends = range.map(|(start, end)| [start, end].map(|end| usize::from_str_radix(end, 16)));
            if let Some([Ok(start), Ok(end)]) = ends {
                is_here = (start..end).contains(&at);
            } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| is_here) {
                return !flags.split_whitespace().any(|flag| flag == "dc");
            }
        }
        panic!("{at:#x} is not mapped");
    }
    let session = session();
    let device = Device::open(0).expect("a device");
    let (storage, host) = storages(&device);
    let planes = host.planes().expect("host memory");
    let at = planes.tensors().next().expect("a plane").data.addr();
    assert!(is_inherited(at));
    copy(&storage, &host, &[run(0, FRAMES as u32)]);
    assert!(!is_inherited(at), "a fork would move them away from the device");
    // SAFETY: no other thread uses the frames.
    unsafe { host.shrink(1) };
    assert!(is_inherited(at), "no longer registered");
    session.fail_calls("cuMemHostRegister_v2", OUT_OF_MEMORY);
    copy(&storage, &host, &[run(0, 1)]);
    assert!(is_inherited(at), "not registered");
}
