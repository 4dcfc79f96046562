//! Stores of values by key, whose calls block.

use super::key::TierKey;
use super::store_error::StoreError;
use super::value::TierValue;

/// What a store has under a key: the bytes of a value, nothing, or an error of this key alone.
pub type Answer<'a> = Result<Option<&'a [u8]>, StoreError>;

/// A store of values by key. Its calls block, and may take as long as they like.
pub trait Store: Send + Sync + 'static {
    /// Returns a short name for reports: `redis`, `mooncake`.
    fn name(&self) -> &'static str;

    /// Connects. Called on a thread of the tier, again after each failure.
    ///
    /// # Errors
    ///
    /// [`StoreError`].
    fn open(&self) -> Result<Box<dyn Session>, StoreError>;

    /// Returns the largest number of keys of one call of a session that reads or stores values.
    fn keys_per_call(&self) -> usize {
        16
    }

    /// Returns the largest number of keys of one call that looks them up.
    fn lookups_per_call(&self) -> usize {
        usize::MAX
    }
}

/// A connection to a store, of one thread.
///
/// An error of a call as a whole ends the session: it is dropped, and another one is opened. So no
/// answer can be taken for that to a later question.
pub trait Session: Send {
    /// Returns for each key whether the store claims to have it.
    ///
    /// # Errors
    ///
    /// [`StoreError`]; nothing is known of any key.
    fn exists(&mut self, keys: &[TierKey]) -> Result<Vec<bool>, StoreError>;

    /// Stores values. Returns a result for each.
    ///
    /// # Errors
    ///
    /// [`StoreError`]; nothing is known of any value.
    fn put(&mut self, values: &[TierValue]) -> Result<Vec<Result<(), StoreError>>, StoreError>;

    /// Reads values of `bytes` bytes, and calls `answer` with the place of each key and what the store
    /// has, in any order.
    ///
    /// # Errors
    ///
    /// [`StoreError`]; the keys without an answer failed.
    fn get(
        &mut self,
        keys: &[TierKey],
        bytes: usize,
        answer: &mut dyn FnMut(usize, Answer<'_>),
    ) -> Result<(), StoreError>;

    /// Takes note that answers of the last [`get`](Self::get) were not the values of these keys, so that
    /// no copy of them is served again. A session without copies has nothing to do.
    fn found_bad_values(&mut self, keys: &[TierKey]) {
        let _ = keys;
    }
}
