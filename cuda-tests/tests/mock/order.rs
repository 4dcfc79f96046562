//! Order: streams, events and waits; and that everything else is unordered.

use std::collections::BTreeSet;
use std::time::Duration;

use cudarc::driver::result;
use cudarc::driver::sys::CUresult;
use kvpool_cuda_tests::mock::{Rules, Style, for_each_seed};

use super::gpu::{Probe, code, copy, fill, gpu, launch};

const STYLES: [Style; 5] = [Style::Fifo, Style::Random, Style::Lazy, Style::Lowest, Style::Ranks];

#[test]
fn a_stream_does_its_work_in_the_order_of_the_calls() {
    let gpu = gpu();
    let (at, to) = (gpu.memory(5000), gpu.memory(5000));
    let (stream, noise) = (gpu.stream(), gpu.stream());
    let other = gpu.memory(64);
    for style in STYLES {
        gpu.mock.style(style);
        for_each_seed(&gpu.mock, 20, |_| {
            fill(&noise, other, 9, 64).unwrap();
            fill(&stream, at, 1, 5000).unwrap();
            copy(&stream, to, at, 5000).unwrap();
            fill(&stream, at, 2, 5000).unwrap();
            assert_eq!(gpu.read(&stream, to, 5000), [1; 5000], "{style:?}");
            assert_eq!(gpu.read(&stream, at, 5000), [2; 5000], "{style:?}");
        });
    }
}

#[test]
fn streams_without_an_event_between_them_run_in_any_order() {
    let gpu = gpu();
    let at = gpu.memory(16);
    let (a, b) = (gpu.stream(), gpu.stream());
    for (style, outcomes) in [(Style::Random, 2), (Style::Ranks, 2), (Style::Fifo, 1)] {
        gpu.mock.style(style);
        let mut seen = BTreeSet::new();
        for_each_seed(&gpu.mock, 60, |_| {
            gpu.mock.pause();
            fill(&a, at, 1, 16).unwrap();
            fill(&b, at, 2, 16).unwrap();
            gpu.mock.step(u64::MAX);
            seen.insert(gpu.read(&a, at, 16)[0]);
        });
        assert_eq!(seen.len(), outcomes, "{style:?} gave {seen:?}");
    }
}

#[test]
fn a_wait_for_an_event_orders_two_streams_under_every_style() {
    let gpu = gpu();
    let (at, first) = (gpu.memory(16), gpu.memory(20_000));
    let (a, b) = (gpu.stream(), gpu.stream());
    for style in STYLES.into_iter().chain([Style::Starve(a.cu_stream() as usize)]) {
        gpu.mock.style(style);
        for_each_seed(&gpu.mock, 20, |_| {
            copy(&a, first, first + 10_000, 10_000).unwrap();
            fill(&a, at, 1, 16).unwrap();
            b.wait(&a.record_event(None).unwrap()).unwrap();
            fill(&b, at, 2, 16).unwrap();
            assert_eq!(gpu.read(&b, at, 16), [2; 16], "{style:?}");
        });
    }
}

#[test]
fn a_wait_is_for_the_record_that_was_the_latest_then() {
    let gpu = gpu();
    let at = gpu.memory(32);
    let (a, b) = (gpu.stream(), gpu.stream());
    gpu.mock.style(Style::Starve(a.cu_stream() as usize));
    gpu.mock.pause();
    let event = gpu.context.new_event(None).unwrap();
    fill(&a, at, 1, 16).unwrap();
    event.record(&a).unwrap();
    b.wait(&event).unwrap();
    fill(&b, at + 16, 2, 16).unwrap();
    let end = b.record_event(None).unwrap();
    fill(&a, at, 3, 16).unwrap();
    event.record(&a).unwrap();
    while !end.try_is_complete().unwrap() {
        assert_eq!(gpu.mock.step(1), 1);
    }
    assert!(!event.try_is_complete().unwrap(), "the second record is of unfinished work");
    assert_eq!(gpu.mock.pending(), 2);
    gpu.mock.step(u64::MAX);
    assert!(event.try_is_complete().unwrap());
}

#[test]
fn an_event_is_complete_when_the_work_before_it_is() {
    let gpu = gpu();
    let at = gpu.memory(16);
    let stream = gpu.stream();
    let never = gpu.context.new_event(None).unwrap();
    assert!(never.try_is_complete().unwrap(), "an event that was never recorded is complete");
    stream.wait(&never).unwrap();
    gpu.mock.pause();
    fill(&stream, at, 1, 16).unwrap();
    let event = stream.record_event(None).unwrap();
    fill(&stream, at, 2, 16).unwrap();
    assert!(!event.try_is_complete().unwrap());
    assert_eq!(gpu.mock.step(1), 1);
    assert!(!event.try_is_complete().unwrap(), "the fill is done, the event is not");
    assert_eq!(gpu.mock.step(1), 1);
    assert!(event.try_is_complete().unwrap());
    assert_eq!(gpu.mock.pending(), 1, "an event does not wait for later work");
}

#[test]
fn blocking_streams_are_ordered_with_the_legacy_stream_and_others_are_not() {
    let gpu = gpu();
    let at = gpu.memory(16);
    let legacy = gpu.context.default_stream();
    let blocking =
        cudarc::driver::result::stream::create(cudarc::driver::result::stream::StreamKind::Default).unwrap();
    // SAFETY: destroyed below, after its last use.
    let blocking = unsafe { gpu.context.wrap_borrowed_stream(blocking) };
    let free = gpu.stream();
    let outcomes = |first, second| {
        let mut seen = BTreeSet::new();
        for_each_seed(&gpu.mock, 60, |_| {
            gpu.mock.pause();
            fill(first, at, 1, 16).unwrap();
            fill(second, at, 2, 16).unwrap();
            gpu.mock.step(u64::MAX);
            seen.insert(gpu.read(&legacy, at, 16)[0]);
        });
        Vec::from_iter(seen)
    };
    assert_eq!(outcomes(&blocking, &legacy), [2], "the legacy stream runs after a blocking one");
    assert_eq!(outcomes(&legacy, &blocking), [2], "a blocking stream runs after the legacy one");
    assert_eq!(outcomes(&free, &legacy), [1, 2], "the legacy stream after a non-blocking one");
    assert_eq!(outcomes(&legacy, &free), [1, 2], "a non-blocking stream after the legacy one");
    // SAFETY: created above, and no longer in use.
    let destroyed = unsafe { cudarc::driver::result::stream::destroy(blocking.cu_stream()) };
    assert_eq!(code(destroyed), CUresult::CUDA_SUCCESS);
}

#[test]
fn other_streams_run_between_the_ctas_of_a_kernel() {
    let gpu = gpu();
    const BYTES: usize = 8 * 16 * 1024;
    let (from, to) = (gpu.memory(BYTES), gpu.memory(BYTES));
    let kernel = gpu.probe("kvp_probe_copy");
    let (a, b) = (gpu.stream(), gpu.stream());
    let probe = Probe { from, to, vectors: BYTES as u64 / 16, rounds: 1, reserved: 0 };
    let mut torn = 0;
    for_each_seed(&gpu.mock, 20, |_| {
        fill(&a, from, 1, BYTES).unwrap();
        a.synchronize().unwrap();
        gpu.mock.pause();
        launch(&a, &kernel, 8, probe).unwrap();
        fill(&b, from, 2, BYTES).unwrap();
        assert_eq!(gpu.mock.step(u64::MAX), 9, "one step per CTA, and one for the fill");
        let read = gpu.read(&a, to, BYTES);
        assert!(read.iter().all(|&byte| byte == 1 || byte == 2));
        torn += usize::from(read.contains(&1) && read.contains(&2));
    });
    assert!(torn > 0, "no schedule wrote between two CTAs");
}

#[test]
fn the_lazy_machine_does_what_is_waited_for_and_no_more() {
    let gpu = gpu();
    let at = gpu.memory(48);
    let (a, b, c) = (gpu.stream(), gpu.stream(), gpu.stream());
    gpu.mock.style(Style::Lazy);
    (0..20).for_each(|value| fill(&b, at, value, 16).unwrap());
    let event = b.record_event(None).unwrap();
    fill(&c, at + 16, 1, 16).unwrap();
    a.join(&c).unwrap();
    (0..20).for_each(|value| fill(&c, at + 16, value, 16).unwrap());
    fill(&a, at + 32, 1, 16).unwrap();
    std::thread::sleep(Duration::from_millis(60));
    assert_eq!(gpu.mock.pending(), 21 + 22 + 2, "work ran although no thread waits");
    a.synchronize().unwrap();
    assert_eq!(gpu.mock.pending(), 21 + 20, "only the stream and its dependencies may run");
    let asked = (0..100).take_while(|_| !event.try_is_complete().unwrap()).count();
    assert!(asked < 100, "repeated queries must make progress");
}

#[test]
fn low_priority_work_goes_last_where_it_is_starved() {
    let gpu = gpu();
    let at = gpu.memory(16);
    let low = gpu.context.new_stream_with_priority(0).unwrap();
    let high = gpu.context.new_stream_with_priority(-3).unwrap();
    assert_eq!(
        (gpu.mock.priority(low.cu_stream() as usize), gpu.mock.priority(high.cu_stream() as usize)),
        (0, -3)
    );
    gpu.mock.style(Style::Lowest);
    for_each_seed(&gpu.mock, 20, |_| {
        gpu.mock.pause();
        fill(&low, at, 1, 16).unwrap();
        fill(&high, at, 2, 16).unwrap();
        gpu.mock.step(u64::MAX);
        assert_eq!(gpu.read(&low, at, 16)[0], 1);
    });
}

#[test]
fn one_seed_gives_one_schedule() {
    let gpu = gpu();
    let at = gpu.memory(64);
    let streams: Vec<_> = (0..4).map(|_| gpu.stream()).collect();
    let run = |style, seed| {
        gpu.mock.pause();
        gpu.mock.style(style);
        gpu.mock.seed(seed);
        for round in 0..4 {
            for (stream, i) in streams.iter().zip(0..) {
                fill(stream, at + 16 * i, round, 16).unwrap();
            }
        }
        gpu.mock.step(u64::MAX);
        gpu.mock.trace()
    };
    for style in [Style::Random, Style::Ranks] {
        let traces: BTreeSet<_> = (0..16).map(|seed| run(style, seed)).collect();
        assert!(traces.len() > 8, "{style:?}: seeds change too little: {traces:?}");
        (0..16).for_each(|seed| assert_eq!(run(style, seed), run(style, seed), "{style:?}, seed {seed}"));
    }
}

/// A stream with a full queue takes more work only when the device has done some.
#[test]
fn a_full_queue_blocks_its_caller() {
    let gpu = gpu();
    gpu.mock.rules(&Rules { queue_limit: 5, ..Rules::default() });
    let stream = gpu.stream();
    let memory = gpu.memory(64);
    gpu.mock.pause();
    for round in 0..40 {
        fill(&stream, memory, round, 64).unwrap();
        assert!(gpu.mock.pending() <= 5, "round {round}: {}", gpu.mock.pending());
    }
    assert!(gpu.mock.pending() > 0, "only as much runs as must");
    gpu.mock.resume();
    assert_eq!(gpu.read(&stream, memory, 64), vec![39; 64]);
    gpu.free(memory);
}

/// Streams of one hardware queue start their work in the order of the calls, whatever the policy.
#[test]
fn streams_may_share_a_hardware_queue() {
    let gpu = gpu();
    let streams = [0; 3].map(|_| gpu.stream());
    let memory = gpu.memory(64);
    for (connections, mixes) in [(0, true), (1, false)] {
        let mut mixed = false;
        for_each_seed(&gpu.mock, 40, |_| {
            gpu.mock.rules(&Rules { connections, ..Rules::default() });
            gpu.mock.pause();
            for round in 0..9 {
                fill(&streams[round % 3], memory, round as u8, 64).unwrap();
            }
            gpu.mock.resume();
            streams.iter().for_each(|stream| stream.synchronize().unwrap());
            mixed |= gpu.read(&streams[0], memory, 64) != vec![8; 64];
        });
        assert_eq!(mixed, mixes, "{connections} hardware queues");
    }
    gpu.mock.rules(&Rules::default());
    gpu.free(memory);
}

/// Allocations may wait for all work of the device.
#[test]
fn allocations_may_stall_the_device() {
    let gpu = gpu();
    let stream = gpu.stream();
    let memory = gpu.memory(64);
    for stalls in [false, true] {
        gpu.mock.rules(&Rules { stalls, ..Rules::default() });
        gpu.mock.pause();
        fill(&stream, memory, 1, 64).unwrap();
        // SAFETY: a context is current.
        let other = unsafe { result::malloc_sync(64) }.unwrap();
        assert_eq!(gpu.mock.pending() == 0, stalls);
        gpu.mock.resume();
        gpu.free(other);
    }
    gpu.mock.rules(&Rules::default());
    gpu.free(memory);
}
