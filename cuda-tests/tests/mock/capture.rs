//! Captures: the calls that invalidate them, and the effects of a replay.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode, CUstreamCaptureMode::*};
use cudarc::driver::{CudaEvent, CudaGraph, CudaStream, DriverError};
use kvpool_cuda_tests::mock::for_each_seed;

use super::gpu::{Probe, code, copy, fill, gpu, host_call, launch, unpin, upload};

const MODES: [CUstreamCaptureMode; 3] =
    [CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_RELAXED];

fn end(stream: &Arc<CudaStream>) -> Result<CudaGraph, DriverError> {
    stream.end_capture(sys::CUgraphInstantiate_flags(0)).map(|graph| graph.expect("a graph"))
}

/// Queries the event from another thread, whose mode is `mode`.
fn ask_elsewhere(event: &CudaEvent, mode: CUstreamCaptureMode) -> Result<bool, DriverError> {
    std::thread::scope(|scope| {
        scope
            .spawn(|| {
                let mut mode = mode;
                // SAFETY: the mode is a local variable.
                unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) }.result()?;
                assert_eq!(mode, CU_STREAM_CAPTURE_MODE_GLOBAL, "the initial mode of every thread");
                event.try_is_complete()
            })
            .join()
            .unwrap()
    })
}

#[test]
fn an_event_query_elsewhere_breaks_a_global_capture_alone_and_only_from_global_mode() {
    let gpu = gpu();
    let at = gpu.memory(16);
    let stream = gpu.stream();
    let event = gpu.context.new_event(None).unwrap();
    for captured in MODES {
        for asking in MODES {
            let breaks = captured == MODES[0] && asking == MODES[0];
            stream.begin_capture(captured).unwrap();
            fill(&stream, at, 1, 16).unwrap();
            let asked = ask_elsewhere(&event, asking);
            assert_eq!(asked.is_err(), breaks, "a {captured:?} capture, queried in {asking:?}: {asked:?}");
            let ended = end(&stream).err().map(|error| error.0);
            let expected = breaks.then_some(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
            assert_eq!(ended, expected, "a {captured:?} capture, queried in {asking:?}");
        }
    }
}

#[test]
fn the_capturing_thread_itself_may_query_in_a_relaxed_capture_alone() {
    let gpu = gpu();
    let stream = gpu.stream();
    let event = gpu.context.new_event(None).unwrap();
    for mode in MODES {
        stream.begin_capture(mode).unwrap();
        let asked = event.try_is_complete().map_err(|error| error.0);
        let relaxed = mode == CU_STREAM_CAPTURE_MODE_RELAXED;
        assert_eq!(
            asked,
            if relaxed { Ok(true) } else { Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) },
            "{mode:?}"
        );
        assert_eq!(end(&stream).is_ok(), relaxed, "{mode:?}");
    }
}

#[test]
fn what_waits_or_allocates_breaks_a_capture() {
    let gpu = gpu();
    let (stream, other) = (gpu.stream(), gpu.stream());
    type Break<'a> = &'a dyn Fn() -> CUresult;
    let allocate = || {
        // SAFETY: a context is current; the call is refused.
        unsafe { cudarc::driver::result::malloc_sync(64) }
            .map_or_else(|error| error.0, |_| CUresult::CUDA_SUCCESS)
    };
    let breaks: [(&str, Break); 5] = [
        ("a wait for another stream", &|| code(other.synchronize())),
        ("a wait for the context", &|| code(gpu.context.synchronize())),
        ("a wait for the stream", &|| code(stream.synchronize())),
        ("an allocation", &allocate),
        ("a host function", &|| code(host_call(&stream, || ()))),
    ];
    for (what, call) in breaks {
        stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        assert_eq!(call(), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "{what}");
        assert_eq!(
            stream.capture_status().unwrap(),
            sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED,
            "{what}"
        );
        assert_eq!(end(&stream).err().unwrap().0, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "{what}");
    }
}

#[test]
fn captured_work_runs_at_the_launch_and_not_before() {
    let gpu = gpu();
    let at = gpu.memory(16);
    let stream = gpu.stream();
    stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    fill(&stream, at, 1, 16).unwrap();
    let graph = end(&stream).unwrap();
    assert_eq!(gpu.read(&stream, at, 16), [0; 16]);
    graph.launch().unwrap();
    assert_eq!(gpu.read(&stream, at, 16), [1; 16]);
}

#[test]
fn a_replay_reads_memory_at_the_replay_and_has_parameters_of_the_capture() {
    let gpu = gpu();
    let (table, out) = (gpu.memory(256), gpu.memory(256));
    let pinned = gpu.pinned(16);
    let kernel = gpu.probe("kvp_probe_copy");
    let stream = gpu.stream();
    stream.begin_capture(CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    upload(&stream, table + 240, pinned).unwrap();
    launch(&stream, &kernel, 1, Probe { from: table, to: out, vectors: 16, rounds: 1, reserved: 0 }).unwrap();
    let graph = end(&stream).unwrap();
    for value in 1..4 {
        fill(&stream, table, value, 240).unwrap();
        pinned.fill(value + 10);
        graph.launch().unwrap();
        assert_eq!(gpu.read(&stream, out, 256), [vec![value; 240], vec![value + 10; 16]].concat());
    }
    drop(graph);
    unpin(pinned);
}

#[test]
fn a_replay_keeps_the_order_of_its_capture_and_no_other() {
    let gpu = gpu();
    let at = gpu.memory(16);
    let (stream, fork) = (gpu.stream(), gpu.stream());
    let capture = |joined_between: bool| {
        stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        fork.join(&stream).unwrap();
        fill(&fork, at, 1, 16).unwrap();
        if joined_between {
            stream.join(&fork).unwrap();
        }
        fill(&stream, at, 2, 16).unwrap();
        if !joined_between {
            stream.join(&fork).unwrap();
        }
        end(&stream).unwrap()
    };
    for (joined_between, outcomes) in [(true, vec![2]), (false, vec![1, 2])] {
        let graph = capture(joined_between);
        let mut seen = std::collections::BTreeSet::new();
        for_each_seed(&gpu.mock, 40, |_| {
            graph.launch().unwrap();
            seen.insert(gpu.read(&stream, at, 16)[0]);
        });
        assert_eq!(Vec::from_iter(seen), outcomes, "joined between: {joined_between}");
    }
}

#[test]
fn launches_of_one_graph_come_one_after_another() {
    let gpu = gpu();
    let (at, out) = (gpu.memory(16), gpu.memory(16));
    let (stream, other) = (gpu.stream(), gpu.stream());
    stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    fill(&stream, at, 1, 16).unwrap();
    copy(&stream, out, at, 16).unwrap();
    fill(&stream, at, 2, 16).unwrap();
    let graph = end(&stream).unwrap();
    for_each_seed(&gpu.mock, 40, |_| {
        for stream in [&stream, &other] {
            // SAFETY: the graph is alive; cudarc's own launch allows only one stream.
            unsafe { cudarc::driver::result::graph::launch(graph.cu_graph_exec(), stream.cu_stream()) }
                .unwrap();
        }
        stream.synchronize().unwrap();
        other.synchronize().unwrap();
        assert_eq!(gpu.read(&stream, out, 16), [1; 16]);
    });
}

#[test]
fn a_fork_must_be_joined_and_work_outside_cannot_be_waited_for() {
    let gpu = gpu();
    let at = gpu.memory(16);
    let (stream, fork) = (gpu.stream(), gpu.stream());
    stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    fork.join(&stream).unwrap();
    fill(&fork, at, 1, 16).unwrap();
    assert_eq!(end(&stream).err().unwrap().0, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED);

    let outside = fork.record_event(None).unwrap();
    stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    assert_eq!(code(stream.wait(&outside)), CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    assert!(end(&stream).is_err());

    stream.begin_capture(CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
    let inside = stream.record_event(None).unwrap();
    assert_eq!(inside.try_is_complete().unwrap_err().0, CUresult::CUDA_ERROR_CAPTURED_EVENT);
    assert_eq!(end(&stream).err().unwrap().0, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

#[test]
fn a_capture_ends_on_the_thread_that_began_it() {
    let gpu = gpu();
    let stream = gpu.stream();
    stream.begin_capture(CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    let elsewhere =
        std::thread::scope(|scope| scope.spawn(|| end(&stream).err().map(|error| error.0)).join().unwrap());
    assert_eq!(elsewhere, Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD));
    let fork = gpu.stream();
    fork.join(&stream).unwrap();
    assert_eq!(end(&fork).err().unwrap().0, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    assert!(end(&stream).is_err());
}

/// While a blocking stream is being captured, the legacy stream cannot be used in any way.
#[test]
fn the_legacy_stream_cannot_be_used_beside_a_captured_blocking_stream() {
    let gpu = gpu();
    let event = gpu.context.new_event(None).unwrap();
    let raw_event = event.cu_event();
    let legacy = std::ptr::null_mut();
    type Use<'a> = (&'a str, Box<dyn Fn() -> CUresult>);
    // SAFETY: the legacy stream always exists; the event lives.
    let uses: [Use<'_>; 4] = unsafe {
        [
            ("query", Box::new(move || sys::cuStreamQuery(legacy))),
            ("wait", Box::new(move || sys::cuStreamSynchronize(legacy))),
            ("record", Box::new(move || sys::cuEventRecord(raw_event, legacy))),
            ("host function", Box::new(move || sys::cuLaunchHostFunc(legacy, Some(nothing), legacy.cast()))),
        ]
    };
    for (what, used) in uses {
        for is_blocking in [true, false] {
            let mut stream = std::ptr::null_mut();
            let flags = u32::from(!is_blocking);
            // SAFETY: the pointers are valid; the stream is destroyed once, and its graph too.
            unsafe {
                sys::cuStreamCreate(&mut stream, flags).result().unwrap();
                sys::cuStreamBeginCapture_v2(stream, MODES[2]).result().unwrap();
                let mut mode = MODES[2];
                sys::cuThreadExchangeStreamCaptureMode(&mut mode).result().unwrap();
                let code = used();
                sys::cuThreadExchangeStreamCaptureMode(&mut mode).result().unwrap();
                let mut graph = std::ptr::null_mut();
                let ended = sys::cuStreamEndCapture(stream, &mut graph);
                let refused = [
                    CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                    CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
                ];
                if is_blocking {
                    assert_eq!([code, ended], refused, "{what}");
                } else {
                    assert!(!refused.contains(&code), "{what}: {code:?}");
                    sys::cuGraphDestroy(graph).result().unwrap();
                }
                sys::cuStreamDestroy_v2(stream).result().unwrap();
            }
        }
    }
    assert!(event.synchronize().is_ok(), "the refused record has no effect, and the other one ends");
}

extern "C" fn nothing(_: *mut std::ffi::c_void) {}
