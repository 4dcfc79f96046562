//! Undefined behaviour in CUDA aborts the process with a message that names the misuse. Each case
//! runs in a process of its own.

use std::process::Command;

use cudarc::driver::result;

use super::gpu::{fill, gpu, host_call, unpin, upload};

const CASE: &str = "KVPOOL_MOCK_MISUSE";

/// Runs the case in a child; it must abort and print `message`.
fn dies(case: &str, message: &str) {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["misuse::child", "--exact", "--nocapture", "--test-threads=1"])
        .env(CASE, case)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stderr);
    assert!(!child.status.success(), "{case}: the child did not abort");
    assert!(said.contains("mock CUDA: ") && said.contains(message), "{case}: {said}");
}

#[test]
fn misuse_ends_the_process() {
    dies("stream", "was destroyed before");
    dies("event", "was destroyed before");
    dies("kind", "is a stream, not a event");
    dies("foreign free", "was not allocated here, or was freed before");
    dies("double free", "was not allocated here, or was freed before");
    dies("double free in a stream", "was not allocated here, or was freed before");
    dies("pinned", "was freed before a copy read it");
    dies("overrun", "past the end of the 100 bytes");
    dies("host function", "must not call CUDA");
    dies("overlap", "onto itself");
    dies("control", "nothing of the kind");
}

/// The body of a child: without the variable, as in a run of all tests, there is no case.
#[test]
fn child() {
    let Ok(case) = std::env::var(CASE) else { return };
    let gpu = gpu();
    let at = gpu.memory(100);
    let stream = gpu.stream();
    // SAFETY: each case breaks a rule on purpose; the mock aborts before any access.
    unsafe {
        match case.as_str() {
            "stream" => {
                let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
                result::stream::destroy(stream).unwrap();
                let _ = result::stream::synchronize(stream);
            }
            "event" => {
                let event = gpu.context.new_event(None).unwrap();
                result::event::destroy(event.cu_event()).unwrap();
                let _ = event.try_is_complete();
            }
            "kind" => drop(result::event::query(stream.cu_stream().cast())),
            "foreign free" => drop(result::free_sync(at + 8)),
            "double free" => {
                gpu.free(at);
                gpu.free(at);
            }
            "double free in a stream" => {
                gpu.mock.pause();
                result::free_async(at, stream.cu_stream()).unwrap();
                let _ = result::free_async(at, stream.cu_stream());
            }
            "pinned" => {
                let pinned = gpu.pinned(100);
                gpu.mock.pause();
                upload(&stream, at, pinned).unwrap();
                unpin(pinned);
                gpu.mock.step(1);
            }
            "overrun" => {
                (at as *mut u8).add(100).write(1);
                gpu.free(at);
            }
            "host function" => {
                let context = gpu.context.clone();
                host_call(&stream, move || drop(context.new_event(None))).unwrap();
                let _ = stream.synchronize();
            }
            "overlap" => drop(super::gpu::copy(&stream, at + 1, at, 50)),
            // Checks that the parent judges a child by its message.
            "control" => {
                fill(&stream, at, 1, 100).unwrap();
                stream.synchronize().unwrap();
                eprintln!("mock CUDA: nothing of the kind");
                std::process::abort();
            }
            other => panic!("there is no case {other}"),
        }
    }
}
