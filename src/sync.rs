//! Atomics, threads and locks. The only file that names `std::sync::atomic`, `std::thread` or loom.
//!
//! A normal build uses the standard library; `--cfg kvpool_loom --cfg crossbeam_loom` uses loom;
//! `--cfg kvpool_loom_coarse` uses the standard library here, and loom in the code of the model and
//! around each [call]. Two types have no loom support and are replaced by a loom mutex, which
//! models their *semantics* (each call is one atomic step) but not their internals: [`Map`]
//! (dashmap) and `AtomicWaker` (atomic-waker). loom treats SeqCst *accesses* as AcqRel, so every
//! store-load order here is an explicit fence: `fence(SeqCst)`, or a cheap *light* fence paired
//! with an expensive *heavy* one (`asymmetric`).

mod asymmetric;
mod call;
#[cfg(not(kvpool_loom))]
mod id_hash;
#[cfg(kvpool_loom)]
pub(crate) mod locals;
#[cfg(any(kvpool_loom, kvpool_loom_coarse))]
pub(crate) mod model;
pub(crate) mod runtime;

pub(crate) use asymmetric::{heavy_fence, light_fence};
pub(crate) use call::{call, calls};
pub(crate) use crossbeam_utils::CachePadded;
pub(crate) use imp::*;

/// Returns a tag unique among the pools and clocks of this process, until four billion have been
/// created. The counter is the standard library's also under loom, where no decision depends on it.
pub(crate) fn next_pool_tag() -> crate::ids::PoolTag {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(1);
    crate::ids::PoolTag(NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
}

/// Returns a small number of the calling thread, by which threads spread over shared slots. Zero
/// under loom, where they should collide, and in a thread that is ending.
#[inline]
pub(crate) fn thread_number() -> usize {
    #[cfg(not(kvpool_loom))]
    {
        use std::cell::Cell;
        static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(1);
        thread_local_const! {
            /// Zero: not numbered yet.
            static NUMBER: Cell<usize> = Cell::new(0);
        }
        let number = NUMBER.try_with(|number| {
            if number.get() == 0 {
                number.set(NEXT.fetch_add(1, Ordering::Relaxed));
            }
            number.get()
        });
        number.unwrap_or_default()
    }
    #[cfg(kvpool_loom)]
    0
}

/// A counter on which no decision depends: the standard library's also under loom.
pub(crate) type StatisticU64 = std::sync::atomic::AtomicU64;

pub(crate) fn available_parallelism() -> usize {
    if cfg!(kvpool_loom) {
        2
    } else {
        std::thread::available_parallelism().map_or(1, |threads| threads.get())
    }
}

/// Runs work on this thread and up to `threads - 1` others, fewer if the system cannot start them.
pub(crate) fn on_threads(threads: usize, work: impl Fn() + Sync) {
    std::thread::scope(|scope| {
        for _ in 1..threads {
            let _ = std::thread::Builder::new().spawn_scoped(scope, &work);
        }
        work();
    });
}

/// Acts as `fence(SeqCst)` for a thread that has performed an atomic read-modify-write since its
/// last store. On x86-64 that is a full barrier: only compiler reordering remains to be prevented.
#[inline]
pub(crate) fn fence_after_rmw() {
    #[cfg(all(target_arch = "x86_64", not(kvpool_loom), not(miri)))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(not(all(target_arch = "x86_64", not(kvpool_loom), not(miri))))]
    fence(Ordering::SeqCst);
}

/// The primitives that `kvpool::testing` offers to the code of a model: those that the pool uses.
pub mod testing {
    #[cfg(any(kvpool_loom, kvpool_loom_coarse))]
    pub use loom::{cell, future, skip_branch, sync, thread};
    #[cfg(not(any(kvpool_loom, kvpool_loom_coarse)))]
    pub use std::{cell, sync, thread};
}

#[cfg(not(kvpool_loom))]
mod imp {
    use super::id_hash::IdHashes;
    pub(crate) use atomic_waker::AtomicWaker;
    pub(crate) use crossbeam_epoch as epoch;
    pub(crate) use std::sync::Arc;
    #[cfg(all(target_os = "linux", not(miri)))]
    pub(crate) use std::sync::atomic::compiler_fence;
    pub(crate) use std::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
    };
    pub(crate) use std::sync::{Mutex, MutexGuard};
    pub(crate) use std::thread::{sleep as pause, yield_now};
    pub(crate) use std::thread_local;

    /// Declares a thread-local without a destructor, whose access costs one load.
    macro_rules! thread_local_const {
        ($(#[$attribute:meta])* static $name:ident: $type:ty = $value:expr;) => {
            std::thread_local! { $(#[$attribute])* static $name: $type = const { $value } }
        };
    }
    pub(crate) use thread_local_const;

    /// An unbounded queue for any number of threads.
    pub(crate) struct Queue<T>(crossbeam_queue::SegQueue<T>);

    impl<T> Queue<T> {
        pub(crate) fn new() -> Self {
            Self(crossbeam_queue::SegQueue::new())
        }

        pub(crate) fn push(&self, value: T) {
            self.0.push(value);
        }

        pub(crate) fn pop(&self) -> Option<T> {
            self.0.pop()
        }
    }

    /// Plain memory behind a published pointer: written before publication, never after. loom
    /// checks that every reader acquired the pointer.
    pub(crate) struct Frozen<T>(T);

    impl<T> Frozen<T> {
        #[inline]
        pub(crate) fn new(value: T) -> Self {
            Self(value)
        }
    }

    impl<T> std::ops::Deref for Frozen<T> {
        type Target = T;

        #[inline]
        fn deref(&self) -> &T {
            &self.0
        }
    }

    pub(crate) struct Map<K, V>(dashmap::DashMap<K, V, IdHashes>);

    impl<K: Eq + std::hash::Hash, V: Clone> Map<K, V> {
        pub(crate) fn new() -> Self {
            if cfg!(kvpool_loom_coarse) {
                // The usual number is found once in a process. Two models that begin at once, on
                // loom's stacks, were seen to wait for each other there forever.
                return Self(dashmap::DashMap::with_hasher_and_shard_amount(IdHashes::random(), 4));
            }
            Self(dashmap::DashMap::with_hasher(IdHashes::random()))
        }

        /// Inserts an entry unless the key has one. Returns whether it was inserted.
        #[inline]
        pub(crate) fn insert_new(&self, key: K, value: V) -> bool {
            match self.0.entry(key) {
                dashmap::Entry::Occupied(_) => false,
                dashmap::Entry::Vacant(vacant) => {
                    vacant.insert(value);
                    true
                }
            }
        }

        pub(crate) fn insert(&self, key: K, value: V) {
            self.0.insert(key, value);
        }

        /// Changes the entry of the key, or a default one, under the lock of its shard.
        pub(crate) fn update<R>(&self, key: K, change: impl FnOnce(&mut V) -> R) -> R
        where
            V: Default,
        {
            change(&mut self.0.entry(key).or_default())
        }

        pub(crate) fn get<Q: ?Sized + Eq + std::hash::Hash>(&self, key: &Q) -> Option<V>
        where
            K: std::borrow::Borrow<Q>,
        {
            self.0.get(key).map(|entry| entry.value().clone())
        }

        pub(crate) fn remove(&self, key: &K) {
            self.0.remove(key);
        }

        pub(crate) fn len(&self) -> usize {
            self.0.len()
        }

        /// Returns every entry; not a snapshot.
        pub(crate) fn entries(&self) -> Vec<(K, V)>
        where
            K: Copy,
        {
            self.0.iter().map(|entry| (*entry.key(), entry.value().clone())).collect()
        }
    }

    /// `std::cell::UnsafeCell` with loom's interface: access is a closure over the pointer.
    #[derive(Debug, Default)]
    pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        #[inline]
        pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }
}

#[cfg(kvpool_loom)]
mod imp {
    pub(crate) use loom::cell::UnsafeCell;
    pub(crate) use loom::sync::Arc;
    pub(crate) use loom::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
    };
    pub(crate) use loom::sync::{Mutex, MutexGuard};
    pub(crate) use loom::thread::yield_now;

    pub(crate) fn pause(_: Duration) {
        yield_now();
    }

    pub(crate) use super::locals::{local as thread_local, local as thread_local_const};

    pub(crate) mod epoch {
        pub(crate) use super::super::locals::pin;
        pub(crate) use crossbeam_epoch::*;
    }

    use std::collections::HashMap;
    use std::hash::Hash;
    use std::task::Waker;
    use std::time::Duration;

    /// Models `Frozen` above: creating it writes `made`, and each access reads it.
    pub(crate) struct Frozen<T> {
        value: T,
        made: UnsafeCell<()>,
    }

    // SAFETY: the cell has no contents; loom checks its accesses.
    unsafe impl<T: Sync> Sync for Frozen<T> {}

    impl<T> Frozen<T> {
        pub(crate) fn new(value: T) -> Self {
            Self { value, made: UnsafeCell::new(()) }
        }
    }

    impl<T> std::ops::Deref for Frozen<T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.made.with(|_| ());
            &self.value
        }
    }

    pub(crate) struct AtomicWaker(loom::sync::Mutex<Option<Waker>>);

    impl AtomicWaker {
        pub(crate) fn new() -> Self {
            Self(loom::sync::Mutex::new(None))
        }

        pub(crate) fn register(&self, waker: &Waker) {
            let _old = self.0.lock().unwrap().replace(waker.clone());
        }

        pub(crate) fn take(&self) -> Option<Waker> {
            self.0.lock().unwrap().take()
        }
    }

    pub(crate) struct Queue<T>(loom::sync::Mutex<std::collections::VecDeque<T>>);

    impl<T> Queue<T> {
        pub(crate) fn new() -> Self {
            Self(loom::sync::Mutex::new(std::collections::VecDeque::new()))
        }

        pub(crate) fn push(&self, value: T) {
            self.0.lock().unwrap().push_back(value);
        }

        pub(crate) fn pop(&self) -> Option<T> {
            self.0.lock().unwrap().pop_front()
        }
    }

    pub(crate) struct Map<K, V>(loom::sync::Mutex<HashMap<K, V>>);

    impl<K: Eq + Hash, V: Clone> Map<K, V> {
        pub(crate) fn new() -> Self {
            Self(loom::sync::Mutex::new(HashMap::new()))
        }

        pub(crate) fn insert_new(&self, key: K, value: V) -> bool {
            let mut entries = self.0.lock().unwrap();
            let vacant = !entries.contains_key(&key);
            if vacant {
                entries.insert(key, value);
            }
            vacant
        }

        pub(crate) fn insert(&self, key: K, value: V) {
            let _before = self.0.lock().unwrap().insert(key, value);
        }

        pub(crate) fn update<R>(&self, key: K, change: impl FnOnce(&mut V) -> R) -> R
        where
            V: Default,
        {
            change(self.0.lock().unwrap().entry(key).or_default())
        }

        pub(crate) fn get<Q: ?Sized + Eq + Hash>(&self, key: &Q) -> Option<V>
        where
            K: std::borrow::Borrow<Q>,
        {
            self.0.lock().unwrap().get(key).cloned()
        }

        pub(crate) fn remove(&self, key: &K) {
            // As in `register`.
            let _gone = self.0.lock().unwrap().remove(key);
        }

        pub(crate) fn len(&self) -> usize {
            self.0.lock().unwrap().len()
        }

        pub(crate) fn entries(&self) -> Vec<(K, V)>
        where
            K: Copy,
        {
            self.0.lock().unwrap().iter().map(|(key, value)| (*key, value.clone())).collect()
        }
    }
}

/// Calls user code. Returns `None` if it panics, which the panic hook has reported. The payload is
/// user code too: a panic of its destructor is caught, and that panic's payload is leaked.
pub(crate) fn caught<R>(call: impl FnOnce() -> R) -> Option<R> {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    let payload = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => return Some(result),
        Err(payload) => payload,
    };
    // Reached by `hostile_code`.
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        std::mem::forget(another);
    }
    None
}

/// Wakes a task. A waker is user code: its panic is caught, because the calling thread holds
/// frames, references or a batch.
pub(crate) fn wake(waker: std::task::Waker) {
    caught(|| waker.wake());
}

/// Prefetches a cache line, where the processor supports it.
#[inline]
pub fn prefetch<T>(row: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri), not(kvpool_loom)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every processor of this architecture has it, and it accesses no memory.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(row).cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri), not(kvpool_loom))))]
    let _ = row;
}
