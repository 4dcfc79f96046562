//! An asymmetric store-load fence: free for the side that runs often, an interprocessor interrupt for the other.
//!
//! The pair orders like two `fence(SeqCst)`: of a thread that does `store x; light_fence(); load y` and one that
//! does `store y; heavy_fence(); load x`, at least one sees the other's store. [`heavy_fence`] makes every running
//! thread of the process execute a full barrier (Linux `membarrier`, private expedited), so that the light side
//! needs only to keep the *compiler* from reordering. Where the system has no such call, and under Miri, both sides
//! are real fences.
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
//!
//! # Under loom
//!
//! If a light fence, which is a compiler fence in production, were a `fence(SeqCst)` in the models, it would stand in for
//! any real fence that is missing on its path. loom cannot run a barrier in another thread. But its fences are no steps of
//! their own: each is one point in the order of all steps. So it is enough to say which fences meet:
//!
//! - a heavy fence comes after each light fence before it: what was done before those is seen by what comes after it;
//! - a light fence comes after each heavy fence before it, likewise;
//! - two light fences do not meet, nor do a light fence and a `fence(SeqCst)`.
//!
//! Of a light and a heavy fence one comes before the other: this is what the pair promises, and all of it. As with loom's
//! `fence(SeqCst)`, the model is stronger than the real pair in one point: what comes after the second fence *happens
//! after* what came before the first, where in reality it need only see the stores.

#[cfg(kvpool_loom)]
pub(crate) use imp::Execution;
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

#[cfg(all(not(kvpool_loom), not(all(target_os = "linux", not(miri)))))]
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

#[cfg(kvpool_loom)]
mod imp {
    use std::cell::RefCell;
    use std::marker::PhantomData;

    use loom::lazy_static::Lazy;

    use super::super::{Ordering::SeqCst, fence};

    /// A fence that others may come after. The first [`get`](Lazy::get) of a lazy value is a Release, and those that follow
    /// are Acquires, as they must be for who makes and who finds it; and none is a step of its own. No atomic has that.
    type Passed = &'static Lazy<()>;

    /// The fences of one execution; see the [module](super).
    #[derive(Default)]
    struct Fences {
        /// Made before, and perhaps by earlier executions, to which loom's lazy values belong.
        spare: Vec<Passed>,
        used: usize,
        /// Light fences since the last heavy one, which those after it come after.
        light: Vec<Passed>,
        heavy: Option<Passed>,
        /// Not between two executions, nor while loom drops what is left of one.
        is_open: bool,
    }

    impl Fences {
        /// The point at which the thread is now.
        fn pass(&mut self) -> Passed {
            if self.used == self.spare.len() {
                self.spare.push(Box::leak(Box::new(Lazy { init: || (), _p: PhantomData })));
            }
            let passed = self.spare[self.used];
            self.used += 1;
            passed.get();
            passed
        }
    }

    std::thread_local! {
        /// All threads of a model are loom's, on one thread of the system.
        static FENCES: RefCell<Fences> = RefCell::default();
    }

    /// An execution in which light and heavy fences meet as the [module](super) says. Without one, both are a
    /// `fence(SeqCst)`.
    pub(crate) struct Execution(());

    impl Execution {
        pub(crate) fn begin() -> Self {
            reset(true);
            Self(())
        }
    }

    impl Drop for Execution {
        fn drop(&mut self) {
            reset(false);
        }
    }

    fn reset(is_open: bool) {
        FENCES.with_borrow_mut(|fences| {
            let spare = std::mem::take(&mut fences.spare);
            *fences = Fences { spare, is_open, ..Fences::default() };
        });
    }

    pub(crate) fn light_fence() {
        FENCES.with_borrow_mut(|fences| {
            if !fences.is_open {
                return fence(SeqCst);
            }
            let passed = fences.pass();
            fences.light.push(passed);
            if let Some(heavy) = fences.heavy {
                heavy.get();
            }
        });
    }

    #[must_use = "without the fence nothing is known about the light sides"]
    pub(crate) fn heavy_fence() -> bool {
        FENCES.with_borrow_mut(|fences| {
            for light in fences.light.drain(..) {
                light.get();
            }
            // As in production. Two heavy fences meet here.
            fence(SeqCst);
            if fences.is_open {
                fences.heavy = Some(fences.pass());
            }
        });
        true
    }
}
