//! Time to the first token of a prompt: computed, with its prefix from a shared tier, and with its
//! prefix in the pool's own cache.
//!
//! One prompt at a time. A prefix from a tier is brought back first, which is part of the time. The
//! ways take turns, and a ratio is the median over rounds. The logits of the first token must be
//! the same in every way, to the bit.
//!
//! `cargo bench -p kvpool-node --features redis --bench first_token [ROUNDS]`

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpool::Pool;
use kvpool::prefix::{HashKey, PrefixConfig, PrefixKeys};
use kvpool_engine::config::ModelConfig;
use kvpool_engine::engine::Engine;
use kvpool_engine::model::Model;
use kvpool_engine::paged::Paged;
use kvpool_engine::request::{Event, Request, Sampling};
use kvpool_engine::weights::Weights;
use kvpool_engine::worker::Limits;
use kvpool_node::tier::{InProcess, SharedTier, TierPolicy, TierSettings, Tiered, TieredSettings};

const PREFIX_TOKENS: usize = 1024;
const BLOCK_TOKENS: usize = 16;
const PROMPTS: usize = 8;
/// Tokens behind the prefix.
const REST: usize = 16;
const TOKENS_MAX: usize = PREFIX_TOKENS + REST + 2;
const LIMIT: Duration = Duration::from_secs(60);

/// An engine, and the pool of its cache with a tier.
struct Served {
    engine: Engine<Paged, Model>,
    tiered: Tiered,
    prompts: Vec<Vec<u32>>,
    /// Of the logits of each prompt's first token.
    digests: Vec<Option<u64>>,
}

impl Served {
    fn start(tier: SharedTier) -> Self {
        let config = ModelConfig::small();
        let model = Model::new(config.clone(), Weights::random(&config, 1), TOKENS_MAX);
        let cached = PrefixConfig::new().key(HashKey::from_bytes([7; 32]));
        let blocks = (PROMPTS + 2) * TOKENS_MAX.div_ceil(BLOCK_TOKENS);
        let pool = Pool::builder(config.layout(BLOCK_TOKENS).unwrap()).blocks(blocks);
        let pool = pool.prefix_cache(cached).build().unwrap();
        let settings = TieredSettings::new("first token").policy(TierPolicy::Manual);
        let tiered = Tiered::new(pool.clone(), Arc::new(tier), settings).unwrap();
        let limits = Limits { jobs: 1, step_tokens: 64 };
        let cache = Paged::new(pool, config.kv_row(), 0, None);
        let engine = Engine::start(cache, Arc::new(model), 1, limits, TOKENS_MAX);
        let mut random = fastrand::Rng::with_seed(1);
        let mut prompt = || (0..PREFIX_TOKENS + REST).map(|_| random.u32(..config.vocab as u32)).collect();
        let prompts = (0..PROMPTS).map(|_| prompt()).collect();
        Self { engine, tiered, prompts, digests: vec![None; PROMPTS] }
    }

    /// Submits a prompt. Returns the time to its first token.
    async fn first_token(&mut self, place: usize) -> Duration {
        let began = Instant::now();
        let prompt = self.prompts[place].clone();
        let sampling = Sampling { temperature: 0.0, seed: 1 };
        let request = Request { prompt, tokens: 1, answers: 1, sampling, drafts: 0, is_urgent: false };
        let mut stream = self.engine.submit(request).unwrap();
        let Some(Event::Token { digest, .. }) = stream.recv().await else { panic!("no token") };
        let took = began.elapsed();
        assert_eq!(*self.digests[place].get_or_insert(digest), digest, "other logits");
        while stream.recv().await.is_some() {}
        took
    }

    /// Computes all prompts, and moves their blocks to the tier.
    async fn prepare(&mut self) {
        for place in 0..PROMPTS {
            self.first_token(place).await;
        }
        let blocks = PROMPTS * (PREFIX_TOKENS + REST) / BLOCK_TOKENS;
        let mut moved = 0;
        while moved < blocks {
            let report = self.tiered.offload(256, Instant::now() + LIMIT).await.unwrap();
            assert!(report.moved_blocks > 0, "{moved} of {blocks} blocks moved, {report:?}");
            moved += report.moved_blocks;
        }
    }

    async fn computed(&mut self, place: usize) -> Duration {
        self.tiered.pool().clear_prefix_cache();
        self.first_token(place).await
    }

    async fn fetched(&mut self, place: usize) -> Duration {
        self.tiered.pool().clear_prefix_cache();
        let (began, prefix) = (Instant::now(), &self.prompts[place][..PREFIX_TOKENS]);
        let report = self.tiered.bring_back(&PrefixKeys::new(), prefix, began + LIMIT).await.unwrap();
        assert_eq!(report.moved_blocks, PREFIX_TOKENS / BLOCK_TOKENS, "{report:?}");
        let fetched = began.elapsed();
        fetched + self.first_token(place).await
    }
}

async fn measure(name: &str, tier: SharedTier, rounds: usize) {
    let mut served = Served::start(tier);
    served.prepare().await;
    let (mut times, mut from_tier, mut cached) = ([vec![], vec![], vec![]], vec![], vec![]);
    for round in 0..rounds {
        let mut sums = [0.0; 3];
        for place in 0..PROMPTS {
            // In turns, so that a drift of the machine favours neither.
            let (computed, tier, local);
            if round % 2 == 0 {
                computed = served.computed(place).await;
                tier = served.fetched(place).await;
                local = served.first_token(place).await;
            } else {
                tier = served.fetched(place).await;
                local = served.first_token(place).await;
                computed = served.computed(place).await;
            }
            for ((sum, times), time) in sums.iter_mut().zip(&mut times).zip([computed, tier, local]) {
                *sum += time.as_secs_f64();
                times.push(time.as_secs_f64() * 1e3);
            }
        }
        from_tier.push(sums[0] / sums[1]);
        cached.push(sums[0] / sums[2]);
    }
    let [computed, tier, local] = times.map(|mut times| support::median(&mut times));
    println!(
        "{name:12} computed {computed:7.2} ms   from the tier {tier:6.2} ms ({:.1}x sooner)   cached {local:6.2} ms ({:.1}x)",
        support::median(&mut from_tier),
        support::median(&mut cached)
    );
}

#[cfg(feature = "redis")]
async fn redis(rounds: usize) {
    use std::process::{Command, Stdio};

    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut command = Command::new("redis-server");
    command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]);
    let Ok(mut server) = command.stdout(Stdio::null()).spawn() else {
        return println!("redis        SKIPPED: there is no program redis-server");
    };
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let store = kvpool_node::tier::Redis::new(&format!("redis://127.0.0.1:{port}"), None, LIMIT).unwrap();
    let measured = measure("redis", SharedTier::new(store, settings()).unwrap(), rounds);
    // Also after a panic, so that no server stays behind.
    let outcome = tokio::spawn(measured).await;
    let _ = server.kill();
    let _ = server.wait();
    outcome.unwrap();
}

fn settings() -> TierSettings {
    let mut settings = TierSettings::default();
    settings.patience = LIMIT;
    settings
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("first_token: to measure, run `cargo bench -p kvpool-node --bench first_token`");
        return;
    }
    let rounds = std::env::args().filter_map(|argument| argument.parse().ok()).next().unwrap_or(9);
    println!(
        "prompts of {PREFIX_TOKENS} + {REST} tokens, blocks of {BLOCK_TOKENS} tokens, one prompt at a time"
    );
    let store = InProcess::new(1 << 30);
    measure("in process", SharedTier::new(store, settings()).unwrap(), rounds).await;
    #[cfg(feature = "redis")]
    redis(rounds).await;
    #[cfg(not(feature = "redis"))]
    println!("redis        SKIPPED: built without the feature `redis`");
}
