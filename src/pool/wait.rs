use std::time::Instant;

/// A call that waits when awaited, without limit unless [`until`](Self::until) sets a deadline.
/// [`IntoFuture::into_future`] returns the [`Future`], which does nothing before it is polled.
///
/// In a tokio runtime whose timer is disabled, it panics when it has to wait for a deadline, for a
/// run of blocks, or while moves or a resize hold blocks.
#[must_use = "nothing happens before it is awaited"]
pub struct Wait<C>(C);

impl<C: CallUntil> Wait<C> {
    pub(super) fn new(call: C) -> Self {
        Self(call)
    }

    /// Returns the future of the call with a deadline, which ends its waits but no copy; `None`
    /// sets none. Unless other requests wait ahead of it, the call makes at least one attempt, even
    /// if the deadline has passed. On a thread of a tokio runtime, that runtime's timer keeps the
    /// deadline. Elsewhere a dedicated thread keeps it: any executor works, but not one nested in a
    /// tokio task.
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

/// Function of a deadline that a [`Wait`] calls. Sealed: only closures implement it. It names the
/// result and the future in signatures.
pub trait CallUntil: sealed::Sealed {
    /// Result of the call.
    type Output;
    /// Future of the call.
    type Future: Future<Output = Self::Output>;

    /// Returns the future, which waits at most until the deadline, if any.
    fn call(self, deadline: Option<Instant>) -> Self::Future;
}

mod sealed {
    use std::time::Instant;

    /// Seals [`CallUntil`](super::CallUntil).
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
