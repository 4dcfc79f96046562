//! An asymmetric store-load fence: free for the side that runs often, an interprocessor interrupt for the other.
//!
//! The pair orders like two `fence(SeqCst)`: of a thread that does `store x; light_fence(); load y` and one that
//! does `store y; heavy_fence(); load x`, at least one sees the other's store. [`heavy_fence`] makes every running
//! thread of the process execute a full barrier (Linux `membarrier`, private expedited), so that the light side
//! needs only to keep the *compiler* from reordering. Where the system has no such call, and under loom and Miri,
//! both sides are real fences.
//!
//! The system can refuse a heavy fence to one thread alone: a filter of system calls (seccomp) that was put on that thread
//! after the process settled. Then the call says so, and its caller turns back; no allocation claims to have searched
//! everywhere, and no request sleeps, after a fence that was refused. There is no other way for such a thread:
//!
//! - to have all light sides fence from then on needs one more heavy fence, by which those are known to have begun to;
//! - a change of a page's protection interrupts other processors on x86-64 only, and only those that have the page cached;
//! - another thread that fences in its place would have to be started before the filter, in every process.
//!
//! The light side works on such a thread, and a heavy fence of another thread reaches it.

pub(crate) use imp::{heavy_fence, light_fence};

#[cfg(all(target_os = "linux", not(kvpool_loom), not(miri)))]
mod imp {
    use super::super::{AtomicU8, Ordering, compiler_fence, fence};

    const UNKNOWN: u8 = 0;
    const SYMMETRIC: u8 = 1;
    const ASYMMETRIC: u8 = 2;

    /// How this process fences. Settled once, before the first light fence has any effect: an unsettled process
    /// takes the symmetric way, which is right with either heavy side.
    static WAY: AtomicU8 = AtomicU8::new(UNKNOWN);

    #[inline]
    pub(crate) fn light_fence() {
        // Relaxed: the value goes from UNKNOWN to its final one; a late reader fences too much, never too little.
        if WAY.load(Ordering::Relaxed) == ASYMMETRIC {
            compiler_fence(Ordering::SeqCst);
        } else {
            light_fence_unsettled();
        }
    }

    #[cold]
    fn light_fence_unsettled() {
        settle();
        fence(Ordering::SeqCst);
    }

    #[must_use = "without the fence nothing is known about the light sides"]
    pub(crate) fn heavy_fence() -> bool {
        fence(Ordering::SeqCst);
        if settle() != ASYMMETRIC {
            return true;
        }
        // SAFETY: membarrier takes integers only and touches no memory of ours. It can fail although it was registered,
        // where a filter of system calls was put on this thread since.
        let rc = unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) };
        rc == 0
    }

    fn settle() -> u8 {
        let way = WAY.load(Ordering::Relaxed);
        if way != UNKNOWN {
            return way;
        }
        // SAFETY: as above. Registration is idempotent, so that two threads may both do it.
        let rc = unsafe {
            libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0)
        };
        let settled = if rc == 0 { ASYMMETRIC } else { SYMMETRIC };
        // The first one settles it, should registration fail for one thread and not for another (a filter of system
        // calls is a thread's own): a heavy side that does not interrupt must never meet a light one that relies on it.
        match WAY.compare_exchange(UNKNOWN, settled, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => settled,
            Err(first) => first,
        }
    }
}

#[cfg(not(all(target_os = "linux", not(kvpool_loom), not(miri))))]
mod imp {
    use super::super::{Ordering, fence};

    #[inline]
    pub(crate) fn light_fence() {
        fence(Ordering::SeqCst);
    }

    #[must_use = "without the fence nothing is known about the light sides"]
    pub(crate) fn heavy_fence() -> bool {
        fence(Ordering::SeqCst);
        true
    }
}
