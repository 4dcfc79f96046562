//! A core for one thread, as far as the system allows it.

use std::io;

/// Result of a request for a core.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Quiet {
    /// A core on which nothing else runs while the thread does not sleep.
    Alone,
    /// A core to which the thread is pinned, shared with others.
    Pinned,
    /// No pinning.
    No,
}

/// Returns the cores on which the calling thread may run, in ascending order.
///
/// # Errors
///
/// If the system does not report them.
#[cfg(target_os = "linux")]
pub fn cores() -> io::Result<Vec<usize>> {
    // SAFETY: all zeros is an empty set of cores.
    let mut cores: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is valid for the call, which writes only into it; 0 is the calling thread.
    if unsafe { libc::sched_getaffinity(0, size_of_val(&cores), &mut cores) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: every number is a bit of the set.
    let is_allowed = |&core: &usize| unsafe { libc::CPU_ISSET(core, &cores) };
    Ok((0..libc::CPU_SETSIZE as usize).filter(is_allowed).collect())
}

/// Returns an error: this system cannot report them.
///
/// # Errors
///
/// Always.
#[cfg(not(target_os = "linux"))]
pub fn cores() -> io::Result<Vec<usize>> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Pins the calling thread to a core.
///
/// # Errors
///
/// If the system refuses it.
pub fn pin_to(core: usize) -> io::Result<()> {
    pin_to_any(&[core])
}

/// Lets the calling thread run on these cores only.
///
/// # Errors
///
/// If the system refuses it.
#[cfg(target_os = "linux")]
pub fn pin_to_any(cores: &[usize]) -> io::Result<()> {
    // SAFETY: all zeros is an empty set of cores.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: a core's number is a bit of the set, checked by the macro's own bound.
    cores.iter().for_each(|&core| unsafe { libc::CPU_SET(core, &mut set) });
    // SAFETY: the set is valid for the call; 0 is the calling thread.
    match unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns an error: this system does not pin threads.
///
/// # Errors
///
/// Always.
#[cfg(not(target_os = "linux"))]
pub fn pin_to_any(_cores: &[usize]) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Returns how often the calling thread was stopped in favour of another; 0 where the system does
/// not count it.
#[cfg(target_os = "linux")]
pub fn preemptions() -> i64 {
    // SAFETY: all zeros is a valid value of this plain struct.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: writes only the struct passed to it.
    match unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) } {
        0 => usage.ru_nivcsw,
        _ => 0,
    }
}

/// Returns 0: not known on this system.
#[cfg(not(target_os = "linux"))]
pub fn preemptions() -> i64 {
    0
}

/// Pins the calling thread to a core, and gives it priority over everything else there. It must
/// sleep now and then: a system does not let such a thread use all of the time.
#[cfg(target_os = "linux")]
pub fn alone_on(core: usize) -> Quiet {
    if pin_to(core).is_err() {
        return Quiet::No;
    }
    let parameter = libc::sched_param { sched_priority: 50 };
    // SAFETY: the parameter is valid for the call; 0 is the calling thread.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &parameter) } {
        0 => Quiet::Alone,
        _ => Quiet::Pinned,
    }
}

/// Does nothing on this system.
#[cfg(not(target_os = "linux"))]
pub fn alone_on(_core: usize) -> Quiet {
    Quiet::No
}
