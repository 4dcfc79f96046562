//! Cost of block hashes: a prompt of 1,000 tokens in blocks of 16, through a chain. The same chain
//! is measured with the candidate hash functions alone, 128 bits each. Then the other operations of
//! a chain: a token of decoding, an unfinished block, a root with a salt.

use std::hint::black_box;
use std::time::Instant;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use highway::HighwayHash;
use kvpool::prefix::{BlockHash, Chain, HashKey, Hashing, PrefixHasher, PrefixKeys};
use kvpool_benches::measure::medians;
use siphasher::sip128::{SipHasher13, SipHasher24};

const TOKENS: usize = 1_000;
const BLOCK: usize = 16;

fn prompt() -> Vec<u32> {
    let mut random = fastrand::Rng::with_seed(1_000);
    (0..TOKENS).map(|_| random.u32(..150_000)).collect()
}

fn hasher(hashing: Hashing) -> PrefixHasher {
    PrefixHasher::new(hashing, &HashKey::from_bytes([7; 32]), BLOCK).expect("blocks of some tokens")
}

fn chain(hasher: &PrefixHasher) -> Chain {
    Chain::new(hasher.root(&PrefixKeys::new()).expect("no keys, no empty ones"))
}

/// Computes a chain of keys, each by `hash` of the previous key and the tokens.
fn alone(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, hash: impl Fn(&[u8; 16 + 4 * BLOCK]) -> u128) {
    let prompt = prompt();
    let run = |prompt: &[u32]| {
        let mut key = 0u128;
        for block in prompt.as_chunks::<BLOCK>().0 {
            let mut bytes = [0; 16 + 4 * BLOCK];
            bytes[..16].copy_from_slice(&key.to_le_bytes());
            for (bytes, token) in bytes[16..].as_chunks_mut::<4>().0.iter_mut().zip(block) {
                *bytes = token.to_le_bytes();
            }
            key = hash(&bytes);
        }
        key
    };
    let mut other = prompt.clone();
    other[0] ^= 1;
    assert_ne!(run(&prompt), run(&other), "{name} does not chain");
    time(group, name, || run(black_box(&prompt)));
}

/// Times `run`; every sample is the median of its iterations.
fn time<T>(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, mut run: impl FnMut() -> T) {
    // Iterations per reading of the clock: enough to hide its cost.
    const AT_ONCE: u32 = 16;
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|iterations| {
            medians(iterations, || {
                let begin = Instant::now();
                (0..AT_ONCE).for_each(|_| drop(black_box(run())));
                begin.elapsed() / AT_ONCE
            })
        });
    });
}

fn prompts(c: &mut Criterion) {
    let prompt = prompt();
    let mut group = c.benchmark_group("hashes of 1000 tokens");
    group.throughput(Throughput::Elements((TOKENS / BLOCK) as u64));
    for hashing in [Hashing::Fast, Hashing::Keyed] {
        let hasher = hasher(hashing);
        let mut hashes = Vec::with_capacity(TOKENS / BLOCK);
        chain(&hasher).extend(&hasher, &prompt, |hash| hashes.push(hash));
        assert_eq!(hashes.len(), TOKENS / BLOCK);
        time(&mut group, &format!("kvpool, {hashing:?}, key and check"), || {
            let mut last = BlockHash::new(0, 0);
            chain(&hasher).extend(&hasher, black_box(&prompt), |hash| last = black_box(hash));
            last
        });
    }
    let secret: [u8; 192] = std::array::from_fn(|i| (i as u8).wrapping_mul(37));
    alone(&mut group, "XXH3-128 with a secret, key alone", |bytes| {
        xxhash_rust::xxh3::xxh3_128_with_secret(bytes, &secret)
    });
    alone(&mut group, "SipHash-1-3-128, key alone", |bytes| {
        SipHasher13::new_with_keys(1, 2).hash(bytes).as_u128()
    });
    alone(&mut group, "SipHash-2-4-128, key alone", |bytes| {
        SipHasher24::new_with_keys(1, 2).hash(bytes).as_u128()
    });
    alone(&mut group, "HighwayHash-128, key alone", |bytes| {
        let [low, high] = highway::HighwayHasher::new(highway::Key([1, 2, 3, 4])).hash128(bytes);
        u128::from(low) | u128::from(high) << 64
    });
    alone(&mut group, "BLAKE3 keyed, key alone", |bytes| {
        let hash = blake3::keyed_hash(&[7; 32], bytes);
        u128::from_le_bytes(hash.as_bytes().as_chunks().0[0])
    });
}

fn parts(c: &mut Criterion) {
    let prompt = prompt();
    let mut group = c.benchmark_group("parts of hashing");
    let hasher = hasher(Hashing::Fast);
    let mut decoding = chain(&hasher);
    let mut next = prompt.iter().copied().cycle();
    time(&mut group, "decode, a token", || {
        let token = next.next().expect("it cycles");
        decoding.extend(&hasher, black_box(&[token]), |hash| {
            black_box(hash);
        });
    });
    assert!(decoding.blocks() > 0, "nothing was hashed");
    let mut unfinished = chain(&hasher);
    unfinished.extend(&hasher, &prompt, |_| {});
    assert_eq!(unfinished.tail().len(), 8);
    time(&mut group, "an unfinished block of 8", || black_box(&unfinished).partial(&hasher));
    let keys = PrefixKeys::new().salt(b"a tenant's secret").adapter(b"adapter 7");
    time(&mut group, "a root with salt and adapter", || hasher.root(black_box(&keys)).expect("no empty key"));
}

criterion_group! {
    name = benches;
    config = kvpool_benches::settings();
    targets = prompts, parts
}
criterion_main!(benches);
