//! The trait of stores of values by key.

use std::pin::Pin;

use super::key::TierKey;
use super::store_error::StoreError;
use super::value::TierValue;

/// What a store has under a key: the bytes of a value, nothing, or an error of this key alone.
pub type Answer = Result<Option<Box<dyn AsRef<[u8]> + Send>>, StoreError>;

/// Future of a call of a store.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// A store of values by key. Its calls may take as long as they like, but block no thread of the
/// runtime.
///
/// An error of a call as a whole ends the connection that it used. So no answer can be taken for
/// that to a later question.
pub trait Store: Send + Sync + 'static {
    /// Returns a short name for reports: `redis`, `mooncake`.
    fn name(&self) -> &'static str;

    /// Returns the largest number of keys of one call that reads or stores values.
    fn keys_per_call(&self) -> usize {
        16
    }

    /// Returns the largest number of keys of one call that looks them up.
    fn lookups_per_call(&self) -> usize {
        usize::MAX
    }

    /// Returns for each key whether the store claims to have it.
    ///
    /// # Errors
    ///
    /// [`StoreError`]; nothing is known of any key.
    fn exists<'a>(&'a self, keys: &'a [TierKey]) -> StoreFuture<'a, Vec<bool>>;

    /// Stores values. Returns a result for each.
    ///
    /// # Errors
    ///
    /// [`StoreError`]; nothing is known of any value.
    fn put(&self, values: Vec<TierValue>) -> StoreFuture<'_, Vec<Result<(), StoreError>>>;

    /// Reads values of `bytes` bytes, and calls `answer` with the place of each key and what the store
    /// has, in any order. `answer` returns at once: a value is verified and copied elsewhere.
    ///
    /// # Errors
    ///
    /// [`StoreError`]; the keys without an answer failed.
    fn get<'a>(
        &'a self,
        keys: &'a [TierKey],
        bytes: usize,
        answer: &'a mut (dyn FnMut(usize, Answer) + Send),
    ) -> StoreFuture<'a, ()>;

    /// Takes note that answers of the last [`get`](Self::get) were not the values of these keys, so that
    /// no copy of them is served again. A store without copies has nothing to do.
    fn found_bad_values(&self, keys: &[TierKey]) {
        let _ = keys;
    }
}

/// Runs work that hashes or copies values, on a thread that may block. A panic goes on in the caller.
pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime ends, and this task with it.
            Err(_) => std::future::pending().await,
        },
    }
}
