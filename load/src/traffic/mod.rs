//! Synthetic traffic on a pool: conversations that grow, share prefixes, and are read back.
//!
//! Threads take requests from one generator, so the turns of a conversation, and system prompts,
//! are shared between threads. They run until the traffic is dropped. An audit halts them between
//! two steps.
//!
//! The traffic never fails for lack of blocks: it admits a request while there is room for it, and
//! closes the sequence that began last when an append is refused. Any other error, and any wrong
//! byte, is a finding.

mod coming;
mod conversation;
mod exchange;
mod running;
mod shared;

use std::sync::Arc;
use std::thread::{self, JoinHandle};

use kvpool::Pool;
use kvpool::storage::DeviceStream;
use kvpool_node::admin::Quiet;
use kvpool_node::settings::LoadSettings;

use crate::Rows;
use conversation::Conversing;
use shared::Shared;

pub use coming::Fetching;
pub use exchange::Exchange;
pub use running::fresh_seed;

/// Traffic on a pool, which ends on drop.
pub struct Load {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    /// Starts traffic with an exchange of one desk per thread, the streams of the pool's device,
    /// and the pool's tier, if any.
    ///
    /// Processes that exchange sequences need different seeds.
    ///
    /// # Errors
    /// Why the pool cannot have traffic, or a thread could not be started.
    pub fn start(
        pool: &Pool,
        streams: Vec<DeviceStream>,
        settings: LoadSettings,
        seed: u32,
        exchange: Arc<Exchange>,
        fetching: Option<Fetching>,
    ) -> Result<Self, String> {
        let rows = Rows::of(pool)?;
        let mut load = Self { shared: Arc::new(Shared::new(seed, exchange)), threads: Vec::new() };
        let mut streams = streams.into_iter();
        for thread in 0..settings.threads {
            let (pool, rows, shared, stream) =
                (pool.clone(), rows.clone(), load.shared.clone(), streams.next());
            let fetching = fetching.clone();
            let run =
                move || Conversing::new(&pool, &rows, &shared, (thread, settings), stream, fetching).run();
            let named = thread::Builder::new().name(format!("kvpool-load-{thread}"));
            load.threads.push(named.spawn(run).map_err(|error| format!("cannot start a thread: {error}"))?);
        }
        Ok(load)
    }

    /// Returns the hook for audits and statistics.
    pub fn quiet(&self) -> Arc<dyn Quiet> {
        self.shared.clone()
    }

    /// Ends the traffic and closes its sequences. Returns the findings.
    pub fn end(mut self) -> Vec<String> {
        self.join();
        self.shared.take_findings()
    }

    fn join(&mut self) {
        self.shared.end();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                self.shared.find("a thread of the traffic panicked".to_owned());
            }
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.join();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;
    use std::time::{Duration, Instant};

    use kvpool::prefix::PrefixConfig;
    use kvpool::{Dtype, KvLayout, SequenceId};
    use kvpool_node::Offers;
    use kvpool_node::settings::LoadKind;

    use super::running::Turn;
    use super::*;

    fn pool(blocks: usize) -> Pool {
        let layout = KvLayout::builder().layers(2).kv_heads(1).head_dim(4).dtype(Dtype::F16).block_tokens(16);
        let builder = Pool::builder(layout.build().unwrap()).blocks(blocks);
        builder.prefix_cache(PrefixConfig::new()).build().unwrap()
    }

    fn start(pool: &Pool, threads: usize) -> Load {
        start_as(pool, threads, LoadKind::Conversations, Duration::ZERO, 5)
    }

    fn start_as(pool: &Pool, threads: usize, kind: LoadKind, rest: Duration, seed: u32) -> Load {
        let exchange = Arc::new(Exchange::new(threads));
        let settings = LoadSettings { kind, threads, rest };
        Load::start(pool, Vec::new(), settings, seed, exchange, None).unwrap()
    }

    fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
        let start = Instant::now();
        while !is_so() {
            assert!(start.elapsed() < Duration::from_secs(60), "{what}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn traffic_reads_back_what_it_wrote_and_leaves_nothing_behind() {
        let pool = pool(3000);
        let load = start(&pool, 2);
        let at = &load.shared.counters;
        wait_until("sequences complete", || {
            at.completed.load(Relaxed) >= 20 && at.cached_tokens.load(Relaxed) > 0
        });
        assert!(at.tokens_verified.load(Relaxed) > 0);
        let quiet = load.quiet();
        let halted = quiet.clone().halt();
        wait_until("all threads halt", || quiet.is_quiet());
        pool.audit().unwrap();
        let tokens = at.tokens.load(Relaxed);
        thread::sleep(Duration::from_millis(50));
        assert_eq!(at.tokens.load(Relaxed), tokens, "no step while it is halted");
        drop(halted);
        wait_until("it goes on", || at.tokens.load(Relaxed) > tokens);
        assert_eq!(at.blocks_corrupt.load(Relaxed), 0);
        assert_eq!(load.end(), Vec::<String>::new());
        assert_eq!((pool.sequence_count(), pool.stats().used), (0, 0));
        assert_eq!(pool.audit().unwrap().owned, 0);
    }

    #[test]
    fn traffic_finds_a_byte_that_changed() {
        let pool = pool(3000);
        let load = start(&pool, 1);
        let at = &load.shared.counters;
        wait_until("tokens are written", || at.tokens.load(Relaxed) > 2000);
        let quiet = load.quiet();
        let halted = quiet.clone().halt();
        wait_until("all threads halt", || quiet.is_quiet());
        let rows = Rows::of(&pool).unwrap();
        // Every slot of the pool, including those of open sequences.
        let slots: Vec<i64> = (16..3001 * 16).collect();
        let wrong = vec![0x5a; slots.len() * 8];
        rows.store(1, &wrong, &wrong, &slots).unwrap();
        drop(halted);
        wait_until("a wrong byte is found", || at.blocks_corrupt.load(Relaxed) > 0);
        let findings = load.end();
        assert!(findings.iter().any(|finding| finding.contains("not as they were written")), "{findings:?}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_sequence_continues_in_another_pool_with_the_same_bytes() {
        let (here, there) = (pool(3000), pool(3000));
        let rest = Duration::from_millis(5);
        let from = start_as(&here, 2, LoadKind::Conversations, rest, 5);
        let to = start_as(&there, 1, LoadKind::Arrivals, Duration::ZERO, 6);
        let mut sequence = None;
        wait_until("one may leave", || {
            let longest = from.shared.exchange.longest();
            sequence = longest.and_then(|id| from.shared.exchange.release(id));
            sequence.is_some()
        });
        let sequence = sequence.unwrap();
        assert!(from.shared.exchange.release(sequence.id()).is_none(), "it is given once");
        let moved = here.migrate(sequence, &there).await.unwrap();
        to.shared.exchange.take_back(moved.0);
        let at = &to.shared.counters;
        wait_until("it is completed there", || at.arrived_completed.load(Relaxed) == 1);
        assert!(at.arrived_blocks_verified.load(Relaxed) > 0);
        let mut offered = None;
        wait_until("one is on offer", || {
            offered = from.shared.exchange.offer(10);
            offered.is_some()
        });
        from.shared.exchange.take_back(offered.unwrap());
        let returned = &from.shared.counters.returned;
        wait_until("it comes back", || returned.load(Relaxed) == 1);
        for load in [from, to] {
            assert_eq!(load.shared.counters.blocks_corrupt.load(Relaxed), 0);
            assert_eq!(load.end(), Vec::<String>::new());
        }
        assert_eq!((here.stats().used, there.stats().used), (0, 0));
    }

    #[test]
    fn wrong_bytes_of_a_sequence_that_arrives_are_found_before_it_continues() {
        let pool = pool(3000);
        let load = start_as(&pool, 1, LoadKind::Arrivals, Duration::ZERO, 6);
        let turn = Turn { seed: 5, number: 7 };
        let (request, text) = turn.text();
        let mut ids = Vec::new();
        text.ids(request.input_tokens as usize, &mut ids);
        let mut sequence = pool.sequence(turn.id()).tokens(&ids).unwrap();
        // Nothing is written to its slots.
        let mut step = pool.begin_batch();
        step.append(&mut sequence, ids.len()).unwrap();
        step.finish();
        let blocks = sequence.block_count() as u64;
        load.shared.exchange.take_back(sequence);
        let at = &load.shared.counters;
        wait_until("it is compared", || at.arrived_blocks_verified.load(Relaxed) == blocks);
        assert_eq!((at.arrived.load(Relaxed), at.blocks_corrupt.load(Relaxed) >= blocks), (1, true));
        // A sequence of other origin is kept unchanged, and can be moved on.
        let stranger = pool.sequence(SequenceId(1 << 60)).open().unwrap();
        load.shared.exchange.take_back(stranger);
        wait_until("it is kept", || load.shared.exchange.release(SequenceId(1 << 60)).is_some());
        assert!(load.end()[0].contains("not as they were written"));
    }

    #[test]
    fn a_pool_that_is_too_small_rejects() {
        let pool = pool(40);
        let load = start(&pool, 2);
        wait_until("requests are rejected", || load.shared.counters.rejected.load(Relaxed) > 20);
        assert_eq!(load.end(), Vec::<String>::new());
        assert_eq!(pool.stats().used, 0);
    }
}
