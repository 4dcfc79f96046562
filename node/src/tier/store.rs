use std::pin::Pin;

use super::key::TierKey;
use super::store_counters::StoreCounters;
use super::store_error::StoreError;
use super::value::TierValue;

/// What a store has under a key: the bytes of a value, nothing, or an error of this key.
pub type Answer = Result<Option<Box<dyn AsRef<[u8]> + Send>>, StoreError>;

/// Future of a call of a store.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// A store of values by key. Its calls may take any time, but must not block a thread of the
/// runtime.
///
/// An error of a whole call closes its connection, so that a late answer cannot be taken for that
/// to a later command.
pub trait Store: Send + Sync + 'static {
    /// Returns a short name for reports: `redis`, `mooncake`, `file`.
    fn name(&self) -> &'static str;

    /// Returns the most keys of one call that reads or stores values.
    fn keys_per_call(&self) -> usize {
        16
    }

    /// Returns the most keys of one call that looks them up.
    fn lookups_per_call(&self) -> usize {
        usize::MAX
    }

    /// Returns whether look-ups, misses, and values that were declined show that the store works.
    /// They do not if it answers them from memory, without its drive.
    fn lookups_prove(&self) -> bool {
        true
    }

    /// Returns for each key whether the store claims to have it.
    ///
    /// # Errors
    /// [`StoreError`]; nothing is known of any key.
    fn exists<'a>(&'a self, keys: &'a [TierKey]) -> StoreFuture<'a, Vec<bool>>;

    /// Stores values. Returns a result for each.
    ///
    /// # Errors
    /// [`StoreError`]; nothing is known of any value.
    fn put(&self, values: Vec<TierValue>) -> StoreFuture<'_, Vec<Result<(), StoreError>>>;

    /// Reads values of `bytes` bytes, and calls `answer` with the place of each key and what the
    /// store has, in any order. `answer` does not block: values are verified and copied elsewhere.
    ///
    /// # Errors
    /// [`StoreError`]; the keys without an answer failed.
    fn get<'a>(
        &'a self,
        keys: &'a [TierKey],
        bytes: usize,
        answer: &'a mut (dyn FnMut(usize, Answer) + Send),
    ) -> StoreFuture<'a, ()>;

    /// Reports that answers of the last [`get`](Self::get) were not the values of these keys, so
    /// that the store drops its copies, if it has any.
    fn found_bad_values(&self, keys: &[TierKey]) {
        let _ = keys;
    }

    /// Returns the counters of a store that has its values in this process.
    fn counters(&self) -> Option<StoreCounters> {
        None
    }
}

/// Runs work that hashes or copies values on a blocking thread. A panic propagates to the caller.
pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down, and this task with it.
            Err(_) => std::future::pending().await,
        },
    }
}
