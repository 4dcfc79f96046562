//! The mock driver from Rust: loading it in libcuda's place, and what tests say to it beside CUDA's own calls.
//!
//! ```text
//! session() ── loads the library ── cudarc's search for "libcuda.so" finds it loaded already, by its soname
//!     │
//!     └─ Session: this process's turn with the one machine; back to the defaults at its end
//! ```
//!
//! Invariants:
//! * the library is loaded before cudarc or kvpool's probe looks for a driver: a test's first line is `session()`;
//! * one [`Session`] at a time: tests of one process take turns, as the machine is one;
//! * a schedule repeats by its seed where the machine is paused, one thread makes all calls, and [`Session::step`] drives.
//!   With the mock's worker running the operating system has a say: a seed then makes a schedule likely, not sure.

use std::ffi::{CString, c_char, c_int, c_long, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock};

use libloading::Library;

/// Devices that the mock can have; it has [`DEVICES`] unless told otherwise.
pub const DEVICES_MAX: usize = 8;
/// Devices that a session begins with.
pub const DEVICES: usize = 2;
/// Memory of each, in bytes.
pub const CAPACITY: usize = 4 << 30;

/// Whose turn it is (`mock/schedule.cpp` has the table).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// In the order of enqueueing, each operation to its end.
    Fifo,
    /// Any stream that can go on.
    Random,
    /// Nobody, until somebody waits; then only what this one needs.
    Lazy,
    /// Any but one stream, given by its handle (`CUstream`) as a number, which goes when nothing else can.
    Starve(usize),
    /// Any but the streams of the lowest priority.
    Lowest,
    /// Streams have random ranks; the highest runs, and falls now and then.
    Ranks,
}

/// What the mock counts while it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Streams that were created.
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
    /// Registered stretches of host memory.
    Registered,
    /// Reservations of addresses.
    Reservation,
    /// Handles of physical memory.
    Physical,
    /// Mappings of those.
    Mapping,
    /// Primary contexts that are retained.
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

/// How many of each kind live, in the order of [`KINDS`].
pub type Live = [i64; KINDS.len()];

fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let path = env!("KVPOOL_MOCK_CUDA");
        // SAFETY: its initialisers only fill its own tables.
        unsafe { Library::new(path) }
            .unwrap_or_else(|error| panic!("the mock driver {path} does not load: {error}"))
    })
}

fn control<F: Copy>(name: &str) -> F {
    // SAFETY: the callers below name each function with the type that control.cpp gives it.
    *unsafe { library().get::<F>(name.as_bytes()) }
        .unwrap_or_else(|error| panic!("the mock has no {name}: {error}"))
}

/// A turn with the machine.
pub struct Session {
    _turn: MutexGuard<'static, ()>,
}

/// Waits for a turn with the machine, which has its defaults then: two devices that have not failed, a random schedule.
pub fn session() -> Session {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let session = Session { _turn: turn };
    session.defaults();
    session
}

impl Drop for Session {
    fn drop(&mut self) {
        self.defaults();
    }
}

/// Methods that hand their arguments to the control function of the same name.
macro_rules! controls {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal ($($arg:ident: $type:ty),*) $(-> $back:ty)?;)*) => {$(
        $(#[$doc])*
        pub fn $name(&self, $($arg: $type),*) $(-> $back)? {
            let call: unsafe extern "C" fn($($type),*) $(-> $back)? = control($symbol);
            // SAFETY: control.cpp has this signature; it checks what it is given, and aborts where that is wrong.
            unsafe { call($($arg),*) }
        }
    )*};
}

impl Session {
    controls! {
        /// Sets the seed of all that is random, and begins the trace anew.
        seed = "kvp_mock_seed" (seed: u64);
        /// Stops the device: nothing runs but by [`step`](Self::step). Who waits meanwhile hangs, for 30 seconds at most.
        pause = "kvp_mock_pause" ();
        /// Lets the device run again.
        resume = "kvp_mock_resume" ();
        /// Runs up to `steps` steps (one CTA, one piece of a copy); host functions that they start have returned then.
        /// Returns the steps done: fewer where nothing more can run.
        step = "kvp_mock_step" (steps: u64) -> u64;
        /// The same for one stream, by its handle, whose turn it is whatever the style.
        step_stream = "kvp_mock_step_stream" (stream: usize, steps: u64) -> u64;
        /// The device fails with this code of CUDA's, for good; code 0 revives it, without what was pending.
        fail = "kvp_mock_fail" (device: c_int, code: c_int);
        /// The driver's version, as CUDA writes it: 12080 for 12.8.
        set_version = "kvp_mock_set_version" (version: c_int);
        /// The number of devices, [`DEVICES_MAX`] at most; with 0 `cuInit` finds none.
        set_devices = "kvp_mock_set_devices" (count: c_int);
        /// The device's compute capability.
        set_capability = "kvp_mock_set_capability" (device: c_int, major: c_int, minor: c_int);
        /// The device's memory, in bytes.
        set_capacity = "kvp_mock_set_capacity" (device: c_int, bytes: usize);
        /// Whether the device has virtual memory management: 0 or 1.
        set_virtual_memory = "kvp_mock_set_virtual_memory" (device: c_int, supported: c_int);
        /// Whether the device has memory pools (and so stream-ordered allocation): 0 or 1.
        set_pools = "kvp_mock_set_pools" (device: c_int, supported: c_int);
        /// Bytes of the device's memory that are taken.
        used = "kvp_mock_used" (device: c_int) -> usize;
        /// Operations that wait in all streams.
        pending = "kvp_mock_pending" () -> u64;
        /// A hash over whose turn it was since the seed: equal for equal schedules.
        trace = "kvp_mock_trace" () -> u64;
    }

    /// The priority with which a stream was created, by its handle (`CUstream`) as a number: the mock aborts where that is no stream's.
    pub fn priority(&self, stream: usize) -> c_int {
        let call: unsafe extern "C" fn(*mut c_void) -> c_int = control("kvp_mock_priority");
        // SAFETY: as in `controls!`; the handle is only looked up.
        unsafe { call(stream as *mut c_void) }
    }

    /// Sets whose turn it is.
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

    /// The call of `function` (as `cuMemAlloc_v2`) after `skip` more of them returns `code`, and does nothing.
    pub fn fail_call(&self, function: &str, skip: u32, code: c_int) {
        let name = CString::new(function).expect("a function's name");
        let call: unsafe extern "C" fn(*const c_char, c_uint, c_int) = control("kvp_mock_fail_call");
        // SAFETY: as in `controls!`; the name lives through the call, which copies it.
        unsafe { call(name.as_ptr(), skip, code) }
    }

    /// How often a function was called since the process began.
    pub fn calls(&self, function: &str) -> u64 {
        let name = CString::new(function).expect("a function's name");
        let call: unsafe extern "C" fn(*const c_char) -> u64 = control("kvp_mock_calls");
        // SAFETY: as in `fail_call`.
        unsafe { call(name.as_ptr()) }
    }

    /// Operations enqueued, and steps done, since the process began.
    pub fn stats(&self) -> (u64, u64) {
        let (mut enqueued, mut steps) = (0, 0);
        let call: unsafe extern "C" fn(*mut u64, *mut u64) = control("kvp_mock_stats");
        // SAFETY: as in `controls!`; both places are this frame's.
        unsafe { call(&mut enqueued, &mut steps) };
        (enqueued, steps)
    }

    /// How many of each kind live.
    pub fn live(&self) -> Live {
        let call: unsafe extern "C" fn(c_int) -> c_long = control("kvp_mock_live");
        // SAFETY: as in `controls!`.
        KINDS.map(|kind| unsafe { call(kind as c_int) })
    }

    /// Panics with a list where more lives than at `before`: somebody leaked.
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
        self.set_version(12080);
        self.set_devices(DEVICES as c_int);
        for device in 0..DEVICES_MAX as c_int {
            self.fail(device, 0);
            self.set_capability(device, 9, 0);
            self.set_capacity(device, CAPACITY);
            self.set_virtual_memory(device, 1);
            self.set_pools(device, 1);
        }
        self.forget_injected();
        self.resume();
    }

    controls! {
        /// Takes back every failure that [`fail_call`](Self::fail_call) has asked for and that has not come yet.
        forget_injected = "kvp_mock_forget_injected" ();
    }
}

/// Runs `body` with seeds 0 to `count`, or with the one that `KVPOOL_SEED` names. A panic tells which seed it was.
pub fn for_each_seed(session: &Session, count: u64, mut body: impl FnMut(u64)) {
    struct Tell(u64);
    impl Drop for Tell {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("the seed was {0}: KVPOOL_SEED={0} runs it alone", self.0);
            }
        }
    }
    let wanted = std::env::var("KVPOOL_SEED").ok().map(|seed| seed.parse().expect("KVPOOL_SEED is a number"));
    let seeds = wanted.map_or(0..count, |seed: u64| seed..seed + 1);
    for seed in seeds {
        let _tell = Tell(seed);
        session.seed(seed);
        body(seed);
    }
}
