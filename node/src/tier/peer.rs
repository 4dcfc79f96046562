//! A node of kvpool as the store of a tier.
//!
//! Nodes exchange blocks between pools, not values. So a tier over a node has a small pool in this
//! process, the window, through which blocks pass in both directions:
//!
//! ```text
//! put   value --[verified]--> window --[as in an offload]--> cache of the peer
//! get   value <--[packed]---- window <--[as in a bring-back]- cache of the peer
//! ```
//!
//! The caches of window and peer find blocks by hashes that do not cover the namespace. So a block
//! is cached under a hash of its key, which contains the fingerprint: see [`place_of`].
//!
//! Existence is a query to the peer, which moves no block.
//!
//! # Damaged values
//!
//! A wrong value is dropped from the window only: a claim of this process must not clear the cache
//! of others. The peer compares what it sends with the checksum under which it arrived, and drops
//! what its memory damaged, so that the next put replaces it. A value that was wrong when it was
//! put stays until it is evicted.

use std::sync::Arc;
use std::time::Duration;

use kvpool::prefix::BlockHash;
use kvpool::transfer::Export;
use kvpool::{Pool, TransferError};
use tokio::sync::OnceCell;
use tokio::time::{Instant, sleep};

use super::error::TierError;
use super::key::{Fingerprint, TierKey};
use super::settings::FAR;
use super::store::{Answer, Store, StoreFuture, blocking};
use super::store_error::StoreError;
use super::value::{TierValue, origins_of, verify};
use crate::node::Node;
use crate::protocol::QUESTION_MAX;

const NAME: &str = "peer";

/// Interval at which the first calls look for the link.
const LOOK: Duration = Duration::from_millis(5);

/// Number of repeated fetches when another call evicts the blocks.
const ATTEMPTS: u32 = 3;

/// A peer of a node as a [`Store`].
#[derive(Clone)]
pub struct Peer {
    node: Arc<Node>,
    peer: String,
    fingerprint: Fingerprint,
    limit: Duration,
    /// Set when the first link is up, or its time is over.
    linked: Arc<OnceCell<()>>,
}

impl Peer {
    /// Creates the store. `node` is a node over the window, linked to the peer of this name.
    ///
    /// The window is a pool with a prefix cache, and with the layout and hashing of the pools that
    /// use the tier; it bounds the blocks of one call. The node needs no address. `limit` bounds
    /// each transfer, and the wait of the first calls for the link, which is made in the
    /// background.
    ///
    /// # Errors
    /// [`TierError::Namespace`], [`TierError::Pool`].
    pub fn new(node: Arc<Node>, peer: &str, namespace: &str, limit: Duration) -> Result<Self, TierError> {
        let fingerprint = Fingerprint::of(node.pool(), namespace)?;
        Ok(Self { node, peer: peer.to_owned(), fingerprint, limit: limit.min(FAR), linked: Arc::default() })
    }
}

fn failed(error: &TransferError) -> StoreError {
    StoreError::Unreachable { store: NAME, reason: error.to_string() }
}

fn refused(reason: impl ToString) -> StoreError {
    StoreError::Refused { store: NAME, reason: reason.to_string() }
}

/// Returns the hash under which the caches of window and peer have the block of a key. It differs
/// from the hashes of the peer's own blocks and of other namespaces, since two models may differ in
/// bytes but not in layout and hashes.
fn place_of(key: &TierKey) -> BlockHash {
    let mut hasher = blake3::Hasher::new_derive_key("kvpool shared tier, place in a node, version 1");
    hasher.update(&key.fingerprint.to_bytes()).update(&key.hash.to_bytes());
    BlockHash::from_bytes(*hasher.finalize().as_bytes().first_chunk().expect("32 bytes"))
}

impl Peer {
    fn pool(&self) -> &Pool {
        self.node.pool()
    }

    /// Returns the number of blocks that one call may hold; two may run, and fetch as many each.
    fn blocks_per_call(&self) -> usize {
        (self.pool().total_blocks() / 4).clamp(1, 32)
    }

    /// Waits for the first link. A part of the limit is left for the answer.
    async fn linked(&self) {
        let until = Instant::now() + self.limit * 9 / 10;
        let is_linked = || self.node.unreached().iter().all(|(name, _)| *name != self.peer);
        let wait = || async {
            while !is_linked() && Instant::now() < until {
                sleep(LOOK).await;
            }
        };
        self.linked.get_or_init(wait).await;
    }

    async fn within<T>(&self, work: impl Future<Output = T>) -> Result<T, StoreError> {
        tokio::time::timeout(self.limit, work).await.map_err(|_| StoreError::Unreachable {
            store: NAME,
            reason: format!("{} did not answer within {} ms", self.peer, self.limit.as_millis()),
        })
    }

    /// Holds a block in the window, if it is there.
    fn hold(&self, key: &TierKey) -> Option<Export> {
        let export = || self.pool().export_prefix(&[place_of(key)]).ok().filter(|export| !export.is_empty());
        (key.fingerprint == self.fingerprint).then(export).flatten()
    }

    fn has(&self, value: &TierValue, packed: &[u8]) -> bool {
        self.hold(value.key()).is_some_and(|export| {
            export.packed(0).is_ok_and(|bytes| *bytes == *packed)
                && *export.origins(0) == *origins_of(value.bytes())
        })
    }

    /// Holds the blocks of these keys; fetches those that the window lacks. A fetch ends at the
    /// first block that the peer lacks. The next one begins after it, at the cost of a round trip.
    /// Returns also the blocks that the peer dropped because they were damaged.
    async fn bring(&self, keys: &[TierKey]) -> Result<(Vec<Option<Export>>, Vec<BlockHash>), StoreError> {
        self.linked().await;
        let remote = self.pool().remote(&self.peer).map_err(|error| failed(&error))?;
        let mut held: Vec<_> = keys.iter().map(|key| self.hold(key)).collect();
        let (mut absent, mut damaged, mut attempts) = (Vec::new(), Vec::new(), ATTEMPTS);
        loop {
            let hashes = self.lacking(keys, &held, &absent);
            if hashes.is_empty() {
                return Ok((held, damaged));
            }
            let fetched = self.within(remote.fetch(hashes.clone())).await?.map_err(|error| failed(&error))?;
            damaged.extend(fetched.damaged.into_iter().filter(|hash| hashes.contains(hash)));
            for (key, held) in keys.iter().zip(&mut held).filter(|(_, held)| held.is_none()) {
                *held = self.hold(key);
            }
            let lacking = self.lacking(keys, &held, &absent);
            let came = hashes.iter().take_while(|hash| !lacking.contains(hash)).count();
            if came < fetched.carried.blocks && attempts > 0 {
                // Another call evicted the blocks before they were held.
                attempts -= 1;
                continue;
            }
            absent.extend(hashes.get(came));
            absent.extend(&damaged);
        }
    }

    fn lacking(&self, keys: &[TierKey], held: &[Option<Export>], absent: &[BlockHash]) -> Vec<BlockHash> {
        let mut hashes = Vec::new();
        let lacking = keys.iter().zip(held).filter(|(_, held)| held.is_none()).map(|(key, _)| key);
        for key in lacking.filter(|key| key.fingerprint == self.fingerprint) {
            let place = place_of(key);
            if !absent.contains(&place) && !hashes.contains(&place) {
                hashes.push(place);
            }
        }
        hashes
    }

    fn take_in(&self, value: &TierValue) -> Result<(), StoreError> {
        if value.key().fingerprint != self.fingerprint {
            return Err(refused("a value of another fingerprint"));
        }
        let packed = verify(value.key(), self.pool().layout().packed_bytes(), value.bytes());
        let packed = packed.map_err(refused)?;
        let place = [place_of(value.key())];
        let mut import = self.pool().import_prefix(0, &place).map_err(refused)?;
        if import.missing().is_empty() && !self.has(value, packed) {
            // A get has fetched bytes that are unverified, wrong, or of another era.
            drop(import);
            self.pool().uncache(&place);
            import = self.pool().import_prefix(0, &place).map_err(refused)?;
            if import.missing().is_empty() {
                return Err(refused("another call uses other bytes of this key"));
            }
        }
        if !import.missing().is_empty() {
            import.write(0, None, packed).map_err(refused)?;
            import.set_origins(0, &origins_of(value.bytes())).map_err(refused)?;
        }
        import.commit().map(drop).map_err(refused)
    }
}

fn value_of(key: TierKey, export: &Export) -> Result<TierValue, StoreError> {
    let packed = export.packed(0).map_err(|error| failed(&error))?;
    let fill = |bytes: &mut [u8]| {
        bytes.copy_from_slice(&packed);
        Ok(())
    };
    TierValue::new(key, export.origins(0), packed.len(), fill)
}

impl Store for Peer {
    fn name(&self) -> &'static str {
        NAME
    }

    fn keys_per_call(&self) -> usize {
        self.blocks_per_call()
    }

    fn lookups_per_call(&self) -> usize {
        QUESTION_MAX
    }

    fn exists<'a>(&'a self, keys: &'a [TierKey]) -> StoreFuture<'a, Vec<bool>> {
        Box::pin(async move {
            self.linked().await;
            let remote = self.pool().remote(&self.peer).map_err(|error| failed(&error))?;
            let places = keys.iter().map(place_of).collect();
            let cached = self.within(remote.cached(places)).await?.map_err(|error| failed(&error))?;
            let is_own = |key: &TierKey| key.fingerprint == self.fingerprint;
            Ok(keys.iter().zip(cached).map(|(key, is_cached)| is_cached && is_own(key)).collect())
        })
    }

    fn put(&self, values: Vec<TierValue>) -> StoreFuture<'_, Vec<Result<(), StoreError>>> {
        Box::pin(async move {
            self.linked().await;
            let keys: Vec<_> = values.iter().map(|value| *value.key()).collect();
            let peer = self.clone();
            // In the order of the values: held blocks stay in the window until all are there.
            let take_in = move |value: &TierValue| (peer.take_in(value), peer.hold(value.key()));
            let taken = blocking(move || values.iter().map(take_in).collect::<Vec<_>>()).await;
            let (mut stored, held): (Vec<_>, Vec<_>) = taken.into_iter().unzip();
            let mut hashes = Vec::new();
            for (key, _) in keys.iter().zip(&stored).filter(|(_, taken)| taken.is_ok()) {
                let place = place_of(key);
                if !hashes.contains(&place) {
                    hashes.push(place);
                }
            }
            let export = self.pool().export_prefix(&hashes).map_err(|error| failed(&error))?;
            drop(held);
            let sent = export.len();
            if sent > 0 {
                let remote = self.pool().remote(&self.peer).map_err(|error| failed(&error))?;
                self.within(remote.send(export.into_grouped()))
                    .await?
                    .map_err(|error| failed(&error.error))?;
            }
            for (key, stored) in keys.iter().zip(&mut stored) {
                // Another call may have evicted it.
                if stored.is_ok() && !hashes[..sent].contains(&place_of(key)) {
                    *stored = Err(refused("the window is full"));
                }
            }
            Ok(stored)
        })
    }

    fn get<'a>(
        &'a self,
        keys: &'a [TierKey],
        _bytes: usize,
        answer: &'a mut (dyn FnMut(usize, Answer) + Send),
    ) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let (held, damaged) = self.bring(keys).await?;
            for (place, (&key, held)) in keys.iter().zip(held).enumerate() {
                let Some(export) = held else {
                    let is_damaged = damaged.contains(&place_of(&key));
                    let damage = is_damaged.then_some(StoreError::Damaged { store: NAME });
                    answer(place, damage.map_or(Ok(None), Err));
                    continue;
                };
                let value = blocking(move || value_of(key, &export)).await?;
                answer(place, Ok(Some(Box::new(value))));
            }
            Ok(())
        })
    }

    /// Drops them from the window: the peer may have the right bytes by now.
    fn found_bad_values(&self, keys: &[TierKey]) {
        let places: Vec<_> = keys.iter().map(place_of).collect();
        self.pool().uncache(&places);
    }
}
