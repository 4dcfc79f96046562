//! State that calls of several Python threads share: of objects that one call at a time may use,
//! and of pools, which any number may use while they are open.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use arc_swap::{ArcSwapOption, Guard};

use crate::error::{Failure, Outcome, fields, raise};
use crate::process::Process;

/// A value that one call at a time may use: a sequence, a lease or a batch.
///
/// A second call is refused instead of waiting: the first one may be waiting for the GIL.
pub struct Exclusive<T> {
    made_in: Process,
    /// What it is, for messages.
    what: &'static str,
    held: Mutex<Held<T>>,
}

enum Held<T> {
    Here(T),
    /// An awaited call has it.
    Away,
    /// Closed, or given away.
    Gone,
}

impl<T> Exclusive<T> {
    /// Wraps a value.
    pub fn new(what: &'static str, value: T) -> Self {
        Self { made_in: Process::current(), what, held: Mutex::new(Held::Here(value)) }
    }

    fn lock(&self) -> Outcome<MutexGuard<'_, Held<T>>> {
        self.made_in.check()?;
        match self.held.try_lock() {
            Ok(held) => Ok(held),
            // A panic in the library became an exception; the value is as it left it.
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(self.busy()),
        }
    }

    /// Unlocks before the exception is made: that runs Python code, which another thread may
    /// interrupt to put the value back.
    #[cold]
    fn refuse(&self, held: MutexGuard<'_, Held<T>>, is_away: bool) -> Failure {
        drop(held);
        if is_away { self.busy() } else { self.gone() }
    }

    #[cold]
    fn busy(&self) -> Failure {
        raise("Busy", format!("another call is using this {}", self.what), Vec::new())
    }

    #[cold]
    fn gone(&self) -> Failure {
        let class = if self.what == "batch" { "BatchEnded" } else { "Closed" };
        let how = if self.what == "batch" { "has ended" } else { "is closed" };
        raise(class, format!("this {} {how}", self.what), Vec::new())
    }

    /// Returns the value for the length of a call.
    pub fn enter(&self) -> Outcome<Entered<'_, T>> {
        let held = self.lock()?;
        match &*held {
            Held::Here(_) => Ok(Entered(held)),
            Held::Away => Err(self.refuse(held, true)),
            Held::Gone => Err(self.refuse(held, false)),
        }
    }

    /// As [`enter`](Self::enter), or `None` if the value is gone. For `close`, which may be called
    /// twice, also by two threads.
    pub fn enter_if_any(&self) -> Outcome<Option<Entered<'_, T>>> {
        let held = self.lock()?;
        match &*held {
            Held::Here(_) => Ok(Some(Entered(held))),
            Held::Away => Err(self.refuse(held, true)),
            Held::Gone => Ok(None),
        }
    }

    /// Takes the value for good.
    pub fn take(&self) -> Outcome<T> {
        Ok(self.enter()?.take())
    }

    /// Takes the value, unless it is gone already.
    pub fn take_if_any(&self) -> Outcome<Option<T>> {
        Ok(self.enter_if_any()?.map(Entered::take))
    }

    /// Returns whether the value was closed or given away.
    pub fn is_gone(&self) -> Outcome<bool> {
        Ok(matches!(*self.lock()?, Held::Gone))
    }

    /// Lends the value to an awaited call: other calls are refused until the result is dropped.
    pub fn lend(self: &Arc<Self>) -> Outcome<Lent<T>> {
        let mut entered = self.enter()?;
        match std::mem::replace(&mut *entered.0, Held::Away) {
            Held::Here(value) => Ok(Lent { of: Arc::clone(self), value: Some(value) }),
            Held::Away | Held::Gone => unreachable!("it was entered"),
        }
    }
}

impl<T> Drop for Exclusive<T> {
    fn drop(&mut self) {
        // A fork's copy is left as it is: its threads and locks exist in the parent only.
        if self.made_in != Process::current() {
            let held = self.held.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::replace(held, Held::Gone));
        }
    }
}

/// The value, while a call uses it.
pub struct Entered<'a, T>(MutexGuard<'a, Held<T>>);

impl<T> Entered<'_, T> {
    /// Takes the value for good.
    pub fn take(mut self) -> T {
        match std::mem::replace(&mut *self.0, Held::Gone) {
            Held::Here(value) => value,
            Held::Away | Held::Gone => unreachable!("it was here when the call began"),
        }
    }
}

impl<T> std::ops::Deref for Entered<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match &*self.0 {
            Held::Here(value) => value,
            Held::Away | Held::Gone => unreachable!("it was here when the call began"),
        }
    }
}

impl<T> std::ops::DerefMut for Entered<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match &mut *self.0 {
            Held::Here(value) => value,
            Held::Away | Held::Gone => unreachable!("it was here when the call began"),
        }
    }
}

/// A value that an awaited call has. Dropping it puts the value back.
pub struct Lent<T> {
    of: Arc<Exclusive<T>>,
    value: Option<T>,
}

impl<T> Lent<T> {
    /// Returns the value.
    pub fn value(&mut self) -> &mut T {
        self.value.as_mut().expect("it is put back by the drop alone")
    }

    /// Takes the value out. The object it came from is closed, unless a value is put back.
    pub fn take(&mut self) -> T {
        self.value.take().expect("it is put back by the drop alone")
    }

    /// Puts a value back.
    pub fn put(&mut self, value: T) {
        self.value = Some(value);
    }
}

impl<T> Drop for Lent<T> {
    fn drop(&mut self) {
        if self.of.made_in != Process::current() {
            return std::mem::forget(self.value.take());
        }
        let held = self.value.take().map_or(Held::Gone, Held::Here);
        *self.of.held.lock().unwrap_or_else(PoisonError::into_inner) = held;
    }
}

/// A value that many calls use at once, until it is closed.
pub struct Open<T> {
    made_in: Process,
    what: &'static str,
    /// Calls read it without a shared write, also while another closes it.
    value: ArcSwapOption<T>,
}

impl<T> Open<T> {
    /// Wraps a value.
    pub fn new(what: &'static str, value: T) -> Self {
        Self { made_in: Process::current(), what, value: ArcSwapOption::from_pointee(value) }
    }

    /// Returns the value for the length of a call.
    #[inline]
    pub fn get(&self) -> Outcome<InUse<T>> {
        self.made_in.check()?;
        let value = self.value.load();
        if value.is_some() { Ok(InUse(value)) } else { Err(self.closed()) }
    }

    /// Refuses an object of another process.
    pub fn check(&self) -> Outcome<()> {
        self.made_in.check()
    }

    /// Returns the value, for a call that is awaited.
    pub fn share(&self) -> Outcome<Arc<T>> {
        self.made_in.check()?;
        self.value.load_full().ok_or_else(|| self.closed())
    }

    #[cold]
    fn closed(&self) -> Failure {
        raise("Closed", format!("this {} is closed", self.what), fields![kind: "Closed"])
    }

    /// Drops the value; calls under way end first.
    pub fn close(&self) -> Outcome<()> {
        self.made_in.check()?;
        self.value.store(None);
        Ok(())
    }

    /// Returns whether it is closed.
    pub fn is_closed(&self) -> bool {
        self.value.load().is_none()
    }
}

impl<T> Drop for Open<T> {
    fn drop(&mut self) {
        if self.made_in != Process::current() {
            std::mem::forget(self.value.swap(None));
        }
    }
}

/// A value that is open, while a call uses it.
pub struct InUse<T>(Guard<Option<Arc<T>>>);

impl<T> std::ops::Deref for InUse<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.0.as_deref().expect("it was open when the call began")
    }
}
