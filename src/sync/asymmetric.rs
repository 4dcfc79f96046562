//! An asymmetric store-load fence: free for the frequent side, an interprocessor interrupt for the
//! other.
//!
//! The pair orders like two `fence(SeqCst)`: if one thread does `store x; light_fence(); load y`
//! and another does `store y; heavy_fence(); load x`, at least one sees the other's store.
//! [`heavy_fence`] makes every running thread of the process execute a full barrier (Linux
//! `membarrier`, private expedited), so that the light side only needs to prevent *compiler*
//! reordering. On systems without this call, and under Miri, both sides are real fences.
//!
//! The system can refuse a heavy fence to a single thread, by a system call filter (seccomp)
//! installed on that thread after the process chose its mode. The call then returns false, and its
//! caller turns back: after a refused fence no allocation claims to have searched everywhere, and
//! no request sleeps. No alternative exists for such a thread:
//!
//! - making all light sides use real fences from then on needs one more heavy fence, to know when
//!   they have begun to;
//! - changing a page's protection interrupts other processors on x86-64 only, and only those with
//!   the page in their TLB;
//! - another thread that fences on its behalf would have to be started before the filter, in every
//!   process.
//!
//! The light side works on such a thread, and a heavy fence of another thread reaches it.
//!
//! # Under loom
//!
//! A light fence is a compiler fence in production. If it were a `fence(SeqCst)` in the models, it
//! would hide any missing real fence on its path. loom cannot run a barrier in another thread. But
//! loom's fences are no steps of their own: each is one point in the order of all steps. So it
//! suffices to define which fences synchronise:
//!
//! - a heavy fence comes after each earlier light fence: later operations of its thread see what
//!   preceded those fences;
//! - a light fence comes after each earlier heavy fence, likewise;
//! - two light fences do not synchronise, nor do a light fence and a `fence(SeqCst)`.
//!
//! Of a light and a heavy fence, one comes before the other: this is exactly what the pair
//! promises. As with loom's `fence(SeqCst)`, the model is stronger than the real pair in one point:
//! operations after the second fence *happen after* those before the first, where in reality they
//! need only see the stores.

#[cfg(kvpool_loom)]
pub(crate) use imp::Execution;
pub(crate) use imp::{heavy_fence, light_fence};

#[cfg(all(target_os = "linux", not(kvpool_loom), not(miri)))]
mod imp {
    use super::super::{AtomicU8, Ordering, compiler_fence, fence};

    const UNKNOWN: u8 = 0;
    const SYMMETRIC: u8 = 1;
    const ASYMMETRIC: u8 = 2;

    /// Fence mode of this process. It is set once, before the first light fence has any effect: a
    /// process that has not set it uses the symmetric mode, which is correct with either heavy
    /// side.
    static WAY: AtomicU8 = AtomicU8::new(UNKNOWN);

    #[inline]
    pub(crate) fn light_fence() {
        // Relaxed: the value changes once, from UNKNOWN to its final one; a late reader fences too
        // much, never too little.
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
        // SAFETY: membarrier takes only integers and accesses no memory of ours. It can fail after
        // a successful registration if a system call filter has been installed on this thread
        // since.
        let rc = unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) };
        rc == 0
    }

    fn settle() -> u8 {
        let way = WAY.load(Ordering::Relaxed);
        if way != UNKNOWN {
            return way;
        }
        // SAFETY: as above. Registration is idempotent, so two threads may both do it.
        let rc = unsafe {
            libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0)
        };
        let settled = if rc == 0 { ASYMMETRIC } else { SYMMETRIC };
        // The first thread decides, because registration may fail for one thread and succeed for
        // another (a system call filter belongs to a thread): a heavy side that does not interrupt
        // must never meet a light one that relies on it.
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

    /// A fence that later fences can synchronise with. The first [`get`](Lazy::get) of a lazy value
    /// is a Release and the following ones are Acquires, as required here, and none is a step of
    /// its own. No atomic has both properties.
    type Passed = &'static Lazy<()>;

    /// The fences of one execution; see the [module](super).
    #[derive(Default)]
    struct Fences {
        /// Lazy values created before, possibly by earlier executions, for reuse: loom's lazy
        /// values belong to an execution.
        spare: Vec<Passed>,
        used: usize,
        /// Light fences since the last heavy one, which a later heavy fence synchronises with.
        light: Vec<Passed>,
        heavy: Option<Passed>,
        /// False between two executions, and while loom drops the rest of one.
        is_open: bool,
    }

    impl Fences {
        /// Records the current point of the thread.
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

    /// An execution in which light and heavy fences synchronise as the [module](super) describes.
    /// Without one, both are a `fence(SeqCst)`.
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
            // As in production: two heavy fences synchronise here.
            fence(SeqCst);
            if fences.is_open {
                fences.heavy = Some(fences.pass());
            }
        });
        true
    }
}
