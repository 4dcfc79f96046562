//! Explores a model with loom so that any failure is an ordinary panic of the caller.
//!
//! loom unwinds a failing execution. The destructors that then run use loom's atomics, which panic
//! again after a deadlock or outside of the execution, and a panic in a destructor aborts. A failed
//! execution is therefore not unwound here:
//!
//! ```text
//! caller                          checker, a thread of its own
//! waits for the outcome           loom explores;  the model panics;  the panic hook reports it as usual
//!                                 the unwinder is about to begin:  send the message, and park forever
//! panics with the message
//! ```
//!
//! The parked thread stays until the process ends. It cannot park in the panic hook, which runs
//! under a lock of the standard library. On other systems than Linux with glibc, the execution is
//! unwound, and the leaks of [`locals`](super::locals) avoid most aborts.

use std::cell::{Cell, RefCell};
use std::io::Write;
use std::panic::{self, PanicHookInfo};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Once, atomic};
use std::time::{Duration, Instant};

type Explored = (u64, usize);

thread_local! {
    static OUTCOME: RefCell<Option<Sender<Result<Explored, String>>>> = const { RefCell::new(None) };
    /// Number of calls of [`catch`] in progress, in all threads of the model.
    static CATCHING: Cell<usize> = const { Cell::new(0) };
    static FAILURE: RefCell<Option<String>> = const { RefCell::new(None) };
}

const PROGRESS: Duration = Duration::from_secs(10);

/// Explores the executions of `model`. The environment may raise the bounds.
pub(crate) fn explore(
    model_name: &str,
    preemptions: usize,
    branches: usize,
    model: impl Fn() + Send + Sync + 'static,
) -> Explored {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            before(info);
            if CATCHING.get() == 0 && OUTCOME.with_borrow(Option::is_some) {
                FAILURE.set(Some(message(info)));
            }
        }));
    });
    let (sender, outcome) = channel();
    let executions = Arc::new(atomic::AtomicU64::new(0));
    let counted = Arc::clone(&executions);
    // libtest names the thread after the test, and the panic reports that name.
    let name = std::thread::current().name().unwrap_or("model").to_owned();
    let checker = std::thread::Builder::new().name(name).spawn(move || {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = builder.preemption_bound.max(Some(preemptions));
        builder.max_branches = builder.max_branches.max(branches);
        let bound = builder.preemption_bound.unwrap_or_default();
        OUTCOME.set(Some(sender.clone()));
        let count = Arc::clone(&counted);
        builder.check(move || {
            count.fetch_add(1, atomic::Ordering::Relaxed);
            execution(&model);
        });
        OUTCOME.set(None);
        let _ = sender.send(Ok((counted.load(atomic::Ordering::Relaxed), bound)));
    });
    let checker = checker.expect("the system can start a thread");
    match wait_for(&outcome, model_name, &executions) {
        Ok(Ok(explored)) => explored,
        // The hook has already reported it.
        Ok(Err(message)) => panic::resume_unwind(Box::new(message)),
        Err(_) => match checker.join() {
            Err(payload) => panic::resume_unwind(payload),
            Ok(()) => unreachable!("a checker that returns has sent its outcome"),
        },
    }
}

#[cfg(kvpool_loom)]
fn execution(model: impl FnOnce()) {
    // Created first and dropped last.
    let _fences = super::asymmetric::Execution::begin();
    model();
}

#[cfg(kvpool_loom_coarse)]
use super::call::execution;

fn wait_for<T>(
    outcome: &Receiver<T>,
    model_name: &str,
    executions: &atomic::AtomicU64,
) -> Result<T, RecvTimeoutError> {
    let began = Instant::now();
    loop {
        match outcome.recv_timeout(PROGRESS) {
            Err(RecvTimeoutError::Timeout) => {
                let so_far = executions.load(atomic::Ordering::Relaxed);
                let elapsed = began.elapsed();
                // A closed standard error is ignored.
                let _ =
                    writeln!(std::io::stderr(), "{model_name}: {so_far} executions so far, in {elapsed:.0?}");
            }
            outcome => return outcome,
        }
    }
}

/// Acts as `std::panic::catch_unwind` for a panic that a model expects.
pub(crate) fn catch<R>(f: impl FnOnce() -> R) -> std::thread::Result<R> {
    CATCHING.set(CATCHING.get() + 1);
    let result = panic::catch_unwind(panic::AssertUnwindSafe(f));
    CATCHING.set(CATCHING.get() - 1);
    result
}

fn message(info: &PanicHookInfo<'_>) -> String {
    let payload = info.payload();
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}

/// Interposes the unwinder's function of this name, with which every unwinding begins.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[unsafe(no_mangle)]
extern "C-unwind" fn _Unwind_RaiseException(exception: *mut libc::c_void) -> libc::c_int {
    type Raise = unsafe extern "C-unwind" fn(*mut libc::c_void) -> libc::c_int;
    let failure = FAILURE.try_with(RefCell::take).ok().flatten();
    // loom's threads are generators, which end by a panic that bypasses the hook.
    if let Some(failure) = failure
        && let Some(outcome) = OUTCOME.take()
    {
        let _ = outcome.send(Err(failure));
        loop {
            std::thread::park();
        }
    }
    // SAFETY: the name is a C string.
    let next = unsafe { libc::dlsym(libc::RTLD_NEXT, c"_Unwind_RaiseException".as_ptr()) };
    assert!(!next.is_null(), "the unwinder is a shared library");
    // SAFETY: the function of this name has this type in every unwinder.
    let next = unsafe { std::mem::transmute::<*mut libc::c_void, Raise>(next) };
    // SAFETY: the argument is passed on unchanged.
    unsafe { next(exception) }
}
