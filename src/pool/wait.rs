//! Calls that wait, until a deadline if the caller sets one.

use std::time::Instant;

/// A call that waits. Awaiting it waits for as long as it takes; [`until`](Self::until) sets a
/// deadline first.
///
/// Nothing happens before it is awaited. Where a [`Future`] is needed, [`IntoFuture::into_future`]
/// returns it.
#[must_use = "nothing happens before it is awaited"]
pub struct Wait<C>(C);

impl<C: CallUntil> Wait<C> {
    pub(super) fn new(call: C) -> Self {
        Self(call)
    }

    /// Returns the future of the call with a deadline, which ends its waits, but no copy. `None` is
    /// no deadline.
    ///
    /// If no other request waits ahead of it, the call is tried at least once, even if the deadline
    /// has passed. Its documentation names the error of a missed deadline.
    ///
    /// On a thread of a tokio runtime the deadline is kept by that runtime's timer, elsewhere by a
    /// thread of its own: any executor will do, but not another one within a task of tokio.
    ///
    /// # Panics
    ///
    /// The future panics if it has to wait in a tokio runtime whose timer is disabled.
    pub fn until(self, deadline: impl Into<Option<Instant>>) -> C::Future {
        self.0.call(deadline.into())
    }
}

impl<C: CallUntil> IntoFuture for Wait<C> {
    type Output = C::Output;
    type IntoFuture = C::Future;

    fn into_future(self) -> C::Future {
        self.0.call(None)
    }
}

impl<C> std::fmt::Debug for Wait<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wait").finish_non_exhaustive()
    }
}

/// What a [`Wait`] calls: a function of the deadline that returns the future.
///
/// Sealed: it names the result and the future of a [`Wait`] in signatures. Closures have it, and
/// no other type can implement it.
pub trait CallUntil: sealed::Sealed {
    /// Result of the call.
    type Output;
    /// Future of the call.
    type Future: Future<Output = Self::Output>;

    /// Returns the future, which waits until the deadline if there is one.
    fn call(self, deadline: Option<Instant>) -> Self::Future;
}

mod sealed {
    use std::time::Instant;

    /// Keeps types that are not closures from implementing [`CallUntil`](super::CallUntil).
    pub trait Sealed {}

    impl<C, F> Sealed for C
    where
        C: FnOnce(Option<Instant>) -> F,
        F: Future,
    {
    }
}

impl<C, F> CallUntil for C
where
    C: FnOnce(Option<Instant>) -> F,
    F: Future,
{
    type Output = F::Output;
    type Future = F;

    fn call(self, deadline: Option<Instant>) -> F {
        self(deadline)
    }
}
