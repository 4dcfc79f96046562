use std::sync::Arc;

use futures_util::{StreamExt, stream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::super::file_error::FileError;
use super::super::key::TierKey;
use super::super::store::{Answer, Store, StoreFuture, blocking};
use super::super::store_counters::StoreCounters;
use super::super::store_error::StoreError;
use super::super::value::TierValue;
use super::settings::FileSettings;
use super::slot_file::{NAME, SlotFile};

/// A [`Store`] in a directory of a local drive, whose values survive a restart.
///
/// One process uses a directory at a time. Reads and writes block threads of tokio's pool for
/// blocking calls, as many at a time as [`depth`](FileSettings::depth) says.
pub struct FileStore {
    file: Arc<SlotFile>,
    reads: Arc<Semaphore>,
    writes: Arc<Semaphore>,
    depth: usize,
}

impl FileStore {
    /// Opens the store in a directory, or creates it. Blocks while it reads the index: 64 bytes a
    /// slot.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn open(settings: FileSettings) -> Result<Self, FileError> {
        Ok(Self::over(SlotFile::open(settings)?))
    }

    pub(super) fn over(file: SlotFile) -> Self {
        let depth = file.settings.depth;
        let of = |permits| Arc::new(Semaphore::new(permits));
        Self { file: Arc::new(file), reads: of(depth), writes: of(depth.div_ceil(2)), depth }
    }
}

/// Waits until the drive may be asked.
async fn turn(of: &Arc<Semaphore>) -> OwnedSemaphorePermit {
    of.clone().acquire_owned().await.expect("it is never closed")
}

impl Store for FileStore {
    fn name(&self) -> &'static str {
        NAME
    }

    fn keys_per_call(&self) -> usize {
        16.max(self.depth)
    }

    fn lookups_prove(&self) -> bool {
        false
    }

    fn exists<'a>(&'a self, keys: &'a [TierKey]) -> StoreFuture<'a, Vec<bool>> {
        Box::pin(async move { Ok(self.file.exists(keys)) })
    }

    fn put(&self, values: Vec<TierValue>) -> StoreFuture<'_, Vec<Result<(), StoreError>>> {
        let put = move |value: TierValue| async move {
            let (turn, file) = (turn(&self.writes).await, self.file.clone());
            blocking(move || {
                // It ends with the write, even if the call was dropped meanwhile.
                let _turn = turn;
                file.put(&value)
            })
            .await
        };
        Box::pin(async move { Ok(stream::iter(values).map(put).buffered(self.depth).collect().await) })
    }

    fn get<'a>(
        &'a self,
        keys: &'a [TierKey],
        _bytes: usize,
        answer: &'a mut (dyn FnMut(usize, Answer) + Send),
    ) -> StoreFuture<'a, ()> {
        let get = move |(place, key): (usize, TierKey)| async move {
            let (turn, file) = (turn(&self.reads).await, self.file.clone());
            let read = blocking(move || {
                let _turn = turn;
                file.get(&key)
            });
            (place, read.await)
        };
        Box::pin(async move {
            let keys: Vec<_> = keys.iter().copied().enumerate().collect();
            let mut reads = stream::iter(keys).map(get).buffer_unordered(self.depth);
            while let Some((place, read)) = reads.next().await {
                answer(place, read.map(|read| read.map(|read| Box::new(read) as _)));
            }
            Ok(())
        })
    }

    fn counters(&self) -> Option<StoreCounters> {
        Some(self.file.counters())
    }
}
