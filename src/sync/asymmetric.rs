//! An asymmetric store-load fence: free on one side, an interprocessor interrupt on the other.
//!
//! A pair orders like two `fence(SeqCst)`: if one thread does `store x; light_fence(); load y` and
//! another does `store y; heavy_fence(); load x`, at least one sees the other's store.
//! [`heavy_fence`] makes every running thread of the process execute a full barrier (Linux
//! `membarrier`, private expedited), so that the light side only prevents *compiler* reordering. On
//! systems without this call, and under Miri, both sides are real fences.
//!
//! The kernel can deny `membarrier` to a single thread, by a system call filter (seccomp) installed
//! after the process chose its mode. [`heavy_fence`] then returns false, and its caller backs out:
//! no allocation claims to have searched everywhere, and no request sleeps. Light fences of such a
//! thread work, and other threads' heavy fences reach it. There is no alternative: switching all
//! light sides to real fences needs one more heavy fence; changing a page's protection interrupts
//! only processors with the page in their TLB, on x86-64 only; and a helper thread would have to be
//! started before the filter, in every process.
//!
//! # Under loom
//!
//! A light fence is a compiler fence in production. A `fence(SeqCst)` in the models would hide a
//! missing real fence on its path. loom cannot run a barrier in another thread, but its fences are
//! points in the order of all steps, so it suffices to define which of them synchronise:
//!
//! - a heavy fence synchronises with all earlier light fences, and a light fence with all earlier
//!   heavy ones: later operations of its thread see what preceded those fences;
//! - two light fences do not synchronise, nor do a light fence and a `fence(SeqCst)`.
//!
//! Of a light and a heavy fence, one comes first: exactly what the pair guarantees. As with loom's
//! `fence(SeqCst)`, the model is stronger in one point: operations after the second fence *happen
//! after* those before the first, where in reality they need only see the stores.

#[cfg(kvpool_loom)]
pub(crate) use imp::Execution;
pub(crate) use imp::{heavy_fence, light_fence};

#[cfg(all(target_os = "linux", not(kvpool_loom), not(miri)))]
mod imp {
    use super::super::{AtomicU8, Ordering, compiler_fence, fence};

    const UNKNOWN: u8 = 0;
    const SYMMETRIC: u8 = 1;
    const ASYMMETRIC: u8 = 2;

    /// Set once. Until then the mode is symmetric, which is correct with either heavy side.
    static WAY: AtomicU8 = AtomicU8::new(UNKNOWN);

    #[inline]
    pub(crate) fn light_fence() {
        // Relaxed: changes once, from UNKNOWN; a late reader fences too much, never too little.
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
        // a successful registration if a system call filter was installed on this thread since.
        let rc = unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) };
        rc == 0
    }

    fn settle() -> u8 {
        let way = WAY.load(Ordering::Relaxed);
        if way != UNKNOWN {
            return way;
        }
        // SAFETY: as above. Registration is idempotent: two threads may both do it.
        let rc = unsafe {
            libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0)
        };
        let settled = if rc == 0 { ASYMMETRIC } else { SYMMETRIC };
        // The first thread decides, because registration may fail for one thread only: a heavy side
        // that does not interrupt must never be paired with a light one that relies on it.
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
    /// is a Release and later ones are Acquires, as required here, and none is a step of its own.
    /// No atomic has both properties.
    type Passed = &'static Lazy<()>;

    #[derive(Default)]
    struct Fences {
        /// Lazy values to reuse: loom's lazy values belong to an execution.
        spare: Vec<Passed>,
        used: usize,
        light: Vec<Passed>,
        heavy: Option<Passed>,
        /// False between two executions, and while loom drops the rest of one.
        is_open: bool,
    }

    impl Fences {
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
