//! The Rust side of the mock driver: loads it in place of libcuda, and controls it.
//!
//! ```text
//! session() ── loads the library ── cudarc's search for "libcuda.so" finds it by its soname
//!     │
//!     └─ Session: exclusive use of the one machine; dropping it restores the defaults
//! ```
//!
//! Invariants:
//! * the library is loaded before cudarc or kvpool's probe searches for a driver: a test's first
//!   line is `session()`;
//! * there is one [`Session`] at a time, because there is one machine: tests of one process take
//!   turns;
//! * a schedule is determined by its seed if the machine is paused, one thread makes all calls, and
//!   [`Session::step`] drives. With the mock's worker running, the operating system has an
//!   influence: a seed then makes a schedule likely, not certain.

use std::ffi::{CString, c_char, c_int, c_long, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use libloading::Library;

/// Maximum number of devices of the mock; the default is [`DEVICES`].
pub const DEVICES_MAX: usize = 8;
/// Number of devices at the start of a session.
pub const DEVICES: usize = 2;
/// Memory of each device in bytes.
pub const CAPACITY: usize = 4 << 30;

/// Scheduling policy (see the table in `mock/schedule.cpp`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// In the order of enqueueing, each operation to its end.
    Fifo,
    /// Any stream that can proceed.
    Random,
    /// Nothing until a thread waits; then only the operations that it waits for.
    Lazy,
    /// Any stream except this one, given by its handle (`CUstream`) as a number, which runs when no
    /// other can.
    Starve(usize),
    /// Any stream except those of the lowest priority.
    Lowest,
    /// Streams have random ranks; the highest runs, and drops in rank now and then.
    Ranks,
}

/// Kinds of objects that the mock counts while they live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Streams.
    Stream,
    /// Events.
    Event,
    /// Modules.
    Module,
    /// Graphs.
    Graph,
    /// Executable graphs.
    Exec,
    /// Allocations of device memory.
    DeviceMemory,
    /// Allocations of pinned host memory.
    HostMemory,
    /// Registered ranges of host memory.
    Registered,
    /// Address reservations.
    Reservation,
    /// Handles of physical memory.
    Physical,
    /// Mappings of physical memory.
    Mapping,
    /// Retained primary contexts.
    Context,
}

/// All kinds, in the mock's order.
pub const KINDS: [Kind; 12] = [
    Kind::Stream,
    Kind::Event,
    Kind::Module,
    Kind::Graph,
    Kind::Exec,
    Kind::DeviceMemory,
    Kind::HostMemory,
    Kind::Registered,
    Kind::Reservation,
    Kind::Physical,
    Kind::Mapping,
    Kind::Context,
];

/// Number of live objects of each kind, in the order of [`KINDS`].
pub type Live = [i64; KINDS.len()];

fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let path = env!("KVPOOL_MOCK_CUDA");
        // SAFETY: its initialisers only fill its own tables.
        unsafe { Library::new(path) }
            .unwrap_or_else(|error| panic!("loading the mock driver {path} failed: {error}"))
    })
}

fn control<F: Copy>(name: &str) -> F {
    // SAFETY: the callers below use the type of each function in control.cpp.
    *unsafe { library().get::<F>(name.as_bytes()) }
        .unwrap_or_else(|error| panic!("the mock has no function {name}: {error}"))
}

/// Choices that CUDA leaves to the driver and the device: the struct `Rules` of `mock/state.h` has
/// the rule of each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rules {
    /// Unit of physical memory in bytes.
    pub granularity: usize,
    /// Maximum number of operations in a stream's queue; a call that enqueues more blocks.
    pub queue_limit: u32,
    /// Number of hardware queues that the streams share; 0: each has its own.
    pub connections: u32,
    /// True if calls that allocate, free, map or unmap wait for all work of the device.
    pub stalls: bool,
    /// True if a device that waits for a failed one waits for ever; false if it fails, too.
    pub hang: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self { granularity: 2 << 20, queue_limit: 1000, connections: 0, stalls: false, hang: false }
    }
}

impl Rules {
    /// Returns the choices of a schedule. Half of the schedules have the defaults.
    pub fn of(seed: u64) -> Self {
        // Mixed, so that the choices are independent of others made from the seed.
        let bits = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
        if bits & 1 == 0 {
            return Self::default();
        }
        Self {
            queue_limit: [6, 20, 1000, 1000][(bits >> 1) as usize % 4],
            connections: [0, 1, 2, 8][(bits >> 3) as usize % 4],
            stalls: (bits >> 5) & 1 == 1,
            hang: (bits >> 6) & 1 == 1,
            ..Self::default()
        }
    }
}

/// Exclusive use of the machine.
pub struct Session {
    _turn: MutexGuard<'static, ()>,
}

/// Waits for exclusive use of the machine, in its default state.
///
/// The default is two devices that have not failed, and a random schedule.
pub fn session() -> Session {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let session = Session { _turn: turn };
    session.defaults();
    forgotten();
    session
}

/// Waits until the threads of dropped devices have ended, for two seconds at most: a pool whose blocks
/// are quarantined keeps its device for good.
///
/// They hold the last references to the devices' state. A device that was stuck, and whose work nothing
/// tells the end of, is refused while there are any.
pub fn forgotten() {
    let is_watched = || {
        let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return false };
        let names = threads.flatten().map(|thread| std::fs::read_to_string(thread.path().join("comm")));
        names.flatten().any(|name| name.starts_with("kvpool-cuda:"))
    };
    let since = Instant::now();
    while is_watched() && since.elapsed() < Duration::from_secs(2) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.defaults();
    }
}

/// Defines methods that pass their arguments to the control function of the same name.
macro_rules! controls {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal ($($arg:ident: $type:ty),*) $(-> $back:ty)?;)*) => {$(
        $(#[$doc])*
        pub fn $name(&self, $($arg: $type),*) $(-> $back)? {
            let call: unsafe extern "C" fn($($type),*) $(-> $back)? = control($symbol);
            // SAFETY: control.cpp has this signature; it checks its arguments, and aborts if they
            // are invalid.
            unsafe { call($($arg),*) }
        }
    )*};
}

impl Session {
    controls! {
        /// Sets the seed of all random choices, and restarts the trace.
        seed = "kvp_mock_seed" (seed: u64);
        /// Pauses the device: only [`step`](Self::step) runs operations. A thread that waits
        /// meanwhile hangs, for at most 30 seconds.
        pause = "kvp_mock_pause" ();
        /// Lets the device run again.
        resume = "kvp_mock_resume" ();
        /// Runs up to `steps` steps (a step is one CTA, or one piece of a copy), and the host
        /// functions that they start. Returns the number of steps run, which is lower if no further
        /// operation can run.
        step = "kvp_mock_step" (steps: u64) -> u64;
        /// Runs steps of one stream, given by its handle, regardless of the policy.
        step_stream = "kvp_mock_step_stream" (stream: usize, steps: u64) -> u64;
        /// Makes the device fail with this CUDA error code; code 0 revives it, without its pending
        /// operations.
        fail = "kvp_mock_fail" (device: c_int, code: c_int);
        /// Sets whether a device that waits for a failed one waits for ever (1), or fails too (0).
        hang = "kvp_mock_hang" (hangs: c_int);
        /// Makes the compilation of kernels fail with this code; 0: not.
        fail_compilation = "kvp_mock_fail_compilation" (code: c_int);
        /// Makes `cuMemCreate` refuse handles for other processes (1), RDMA (2), or both (3), although
        /// the device has the attributes; 0: not.
        refuse = "kvp_mock_refuse" (what: c_uint);
        /// Stops a device (1): none of its operations begins or ends, until it goes on (0), or a
        /// thread waits for it. Streams with a hardware queue of their [own](Self::alone) go on.
        stop = "kvp_mock_stop" (device: c_int, stops: c_int);
        /// Gives a stream, named by its handle, a hardware queue of its own.
        alone = "kvp_mock_alone" (stream: usize);
        /// Sets the driver's version, in CUDA's encoding: 12080 for 12.8.
        set_version = "kvp_mock_set_version" (version: c_int);
        /// Sets the number of devices, at most [`DEVICES_MAX`]; with 0, `cuInit` finds none.
        set_devices = "kvp_mock_set_devices" (count: c_int);
        /// Sets the device's compute capability.
        set_capability = "kvp_mock_set_capability" (device: c_int, major: c_int, minor: c_int);
        /// Sets the device's memory in bytes.
        set_capacity = "kvp_mock_set_capacity" (device: c_int, bytes: usize);
        /// Sets whether the device has virtual memory management: 0 or 1.
        set_virtual_memory = "kvp_mock_set_virtual_memory" (device: c_int, supported: c_int);
        /// Sets the device's compute mode: 0 the default one, 3 exclusive to one process.
        set_compute_mode = "kvp_mock_set_compute_mode" (device: c_int, mode: c_int);
        /// Sets whether the device has memory pools, and with them stream-ordered allocation: 0 or
        /// 1.
        set_pools = "kvp_mock_set_pools" (device: c_int, supported: c_int);
        /// Sets whether kernels of the device may use the host's addresses of locked pages: 0 or 1.
        set_reaches_pages = "kvp_mock_set_reaches_pages" (device: c_int, supported: c_int);
        /// Returns the number of driver calls that this thread has made.
        calls_here = "kvp_mock_calls_here" () -> u64;
        /// Returns the used memory of the device in bytes.
        used = "kvp_mock_used" (device: c_int) -> usize;
        /// Returns the number of pending operations in all streams.
        pending = "kvp_mock_pending" () -> u64;
        /// Returns a hash of the scheduling decisions since the seed was set: equal for equal
        /// schedules.
        trace = "kvp_mock_trace" () -> u64;
    }

    /// Returns the priority with which a stream was created, given by its handle (`CUstream`) as a
    /// number. The mock aborts if it is not a stream's handle.
    pub fn priority(&self, stream: usize) -> c_int {
        let call: unsafe extern "C" fn(*mut c_void) -> c_int = control("kvp_mock_priority");
        // SAFETY: as in `controls!`; the handle is only looked up.
        unsafe { call(stream as *mut c_void) }
    }

    /// Sets the choices that CUDA leaves open.
    pub fn rules(&self, rules: &Rules) {
        let Rules { granularity, queue_limit, connections, stalls, hang } = *rules;
        self.hang(c_int::from(hang));
        let call: unsafe extern "C" fn(usize, c_uint, c_uint, c_int) = control("kvp_mock_rules");
        // SAFETY: as in `controls!`.
        unsafe { call(granularity, queue_limit, connections, c_int::from(stalls)) }
    }

    /// Sets the scheduling policy.
    pub fn style(&self, style: Style) {
        let (number, victim) = match style {
            Style::Fifo => (0, std::ptr::null_mut()),
            Style::Random => (1, std::ptr::null_mut()),
            Style::Lazy => (2, std::ptr::null_mut()),
            Style::Starve(stream) => (3, stream as *mut c_void),
            Style::Lowest => (4, std::ptr::null_mut()),
            Style::Ranks => (5, std::ptr::null_mut()),
        };
        let call: unsafe extern "C" fn(c_int, *mut c_void) = control("kvp_mock_style");
        // SAFETY: as in `controls!`.
        unsafe { call(number, victim) }
    }

    /// Makes the call of `function` (such as `cuMemAlloc_v2`) after `skip` further ones return
    /// `code` without effect.
    pub fn fail_call(&self, function: &str, skip: u32, code: c_int) {
        let name = CString::new(function).expect("a function's name");
        let call: unsafe extern "C" fn(*const c_char, c_uint, c_int) = control("kvp_mock_fail_call");
        // SAFETY: as in `controls!`; the name lives during the call, which copies it.
        unsafe { call(name.as_ptr(), skip, code) }
    }

    /// Makes all calls of `function` return `code` without effect, until
    /// [`forget_injected`](Self::forget_injected).
    pub fn fail_calls(&self, function: &str, code: c_int) {
        let name = CString::new(function).expect("a function's name");
        let call: unsafe extern "C" fn(*const c_char, c_int) = control("kvp_mock_fail_calls");
        // SAFETY: as in `fail_call`.
        unsafe { call(name.as_ptr(), code) }
    }

    /// Returns the number of calls of a function since the process began.
    pub fn calls(&self, function: &str) -> u64 {
        let name = CString::new(function).expect("a function's name");
        let call: unsafe extern "C" fn(*const c_char) -> u64 = control("kvp_mock_calls");
        // SAFETY: as in `fail_call`.
        unsafe { call(name.as_ptr()) }
    }

    /// Returns the different launches since the seed was set: kernel; CTAs, threads of each, and
    /// bytes of their dynamic shared memory; and the number of the stream.
    pub fn launches(&self) -> Vec<(String, [u32; 3], u32)> {
        let call: unsafe extern "C" fn(*mut u8, usize) -> usize = control("kvp_mock_launches");
        let mut text = vec![0; 1 << 20];
        // SAFETY: as in `controls!`; the buffer has this length.
        let bytes = unsafe { call(text.as_mut_ptr(), text.len()) };
        assert!(bytes <= text.len(), "too many launches");
        let text = std::str::from_utf8(&text[..bytes]).expect("names of kernels");
        let parse = |line: &str| {
            let mut words = line.split(' ');
            let name = words.next().expect("a name").to_owned();
            let mut number = |()| words.next().and_then(|word| word.parse().ok()).expect("a number");
            (name, [(); 3].map(&mut number), number(()))
        };
        text.lines().map(parse).collect()
    }

    /// Returns the number of enqueued operations and of steps since the process began.
    pub fn stats(&self) -> (u64, u64) {
        let (mut enqueued, mut steps) = (0, 0);
        let call: unsafe extern "C" fn(*mut u64, *mut u64) = control("kvp_mock_stats");
        // SAFETY: as in `controls!`; both pointers are to local variables.
        unsafe { call(&mut enqueued, &mut steps) };
        (enqueued, steps)
    }

    /// Returns the number of live objects of each kind.
    pub fn live(&self) -> Live {
        let call: unsafe extern "C" fn(c_int) -> c_long = control("kvp_mock_live");
        // SAFETY: as in `controls!`.
        KINDS.map(|kind| unsafe { call(kind as c_int) })
    }

    /// Panics with a list of leaked objects if more are alive than at `before`.
    pub fn assert_no_leaks(&self, before: &Live) {
        let now = self.live();
        let leaked: Vec<_> = KINDS
            .iter()
            .filter(|&&kind| now[kind as usize] > before[kind as usize])
            .map(|&kind| (kind, now[kind as usize] - before[kind as usize]))
            .collect();
        assert!(leaked.is_empty(), "leaked: {leaked:?}");
    }

    fn defaults(&self) {
        self.style(Style::Random);
        self.fail_compilation(0);
        self.refuse(0);
        self.rules(&Rules::default());
        self.set_version(12080);
        self.set_devices(DEVICES as c_int);
        for device in 0..DEVICES_MAX as c_int {
            self.fail(device, 0);
            self.stop(device, 0);
            self.set_capability(device, 9, 0);
            self.set_capacity(device, CAPACITY);
            self.set_virtual_memory(device, 1);
            self.set_pools(device, 1);
            self.set_reaches_pages(device, 1);
            self.set_compute_mode(device, 0);
        }
        self.forget_injected();
        self.resume();
    }

    controls! {
        /// Cancels all pending failures requested with [`fail_call`](Self::fail_call).
        forget_injected = "kvp_mock_forget_injected" ();
    }
}

/// Runs `body` with the seeds from 0 to `count`, or with the seed in `KVPOOL_SEED`. A panic reports
/// the seed.
pub fn for_each_seed(session: &Session, count: u64, mut body: impl FnMut(u64)) {
    struct Tell(u64);
    impl Drop for Tell {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("failed with seed {0}; KVPOOL_SEED={0} runs only this seed", self.0);
            }
        }
    }
    let wanted =
        std::env::var("KVPOOL_SEED").ok().map(|seed| seed.parse().expect("KVPOOL_SEED must be a number"));
    let seeds = wanted.map_or(0..count, |seed: u64| seed..seed + 1);
    for seed in seeds {
        let _tell = Tell(seed);
        session.seed(seed);
        body(seed);
    }
}
