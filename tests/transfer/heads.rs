//! Ranks of one tensor-parallel split feed those of another, bit for bit.

use kvpool::storage::{Arrangement, Dtype, KvLayout, KvLayoutBuilder, KvPlanes, Scales};
use kvpool::transfer::{Export, HeadRange, Import};
use kvpool::{Pool, Run, Sequence, SequenceId, TransferError};
use kvpool_testkit::rng::Rng;
use kvpool_testkit::steps::append;

use super::kv::{config, is_idle};

const HEADS: usize = 16;
const TOKENS: usize = 11;

fn base(joined: bool, dtype: Dtype) -> KvLayoutBuilder {
    let builder = KvLayout::builder().layers(3).kv_heads(HEADS).head_dim(8).block_tokens(4).dtype(dtype);
    if joined { builder.parts(KvPlanes::Joined).arrangement(Arrangement::BlockFirst) } else { builder }
}

fn pool(layout: KvLayout) -> Pool {
    Pool::builder(layout).blocks(12).prefix_cache(config()).build().unwrap()
}

/// The packed blocks of a model with all heads in one rank, as random bytes.
fn whole(layout: &KvLayout) -> Vec<Vec<u8>> {
    (0..TOKENS.div_ceil(4) as u64).map(|block| Rng(block).bytes(layout.packed_bytes())).collect()
}

/// The heads of one rank, cut out of a packed block by counting rows.
fn cut(layout: &KvLayout, block: &[u8], first: usize, count: usize) -> Vec<u8> {
    let mut units = vec![8 * layout.dtype().bytes()];
    if *layout.scales() == Scales::PerTokenHead {
        units.push(4);
    }
    let (mut out, mut at) = (Vec::new(), 0);
    for _ in 0..layout.layers() {
        for &unit in &units {
            // K and V of four tokens.
            for _ in 0..2 * 4 {
                out.extend_from_slice(&block[at + first * unit..][..count * unit]);
                at += HEADS * unit;
            }
        }
    }
    assert_eq!(at, block.len());
    out
}

/// Opens a sequence whose blocks have these bytes.
fn open(pool: &Pool, blocks: &[Vec<u8>]) -> Sequence {
    let tokens: Vec<u32> = (0..TOKENS as u32).collect();
    let mut sequence = pool.sequence(SequenceId(7)).tokens(&tokens).unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, TOKENS).unwrap();
    for (id, bytes) in sequence.blocks().zip(blocks) {
        let runs = [Run { start: pool.blocks().frame(id), len: 1 }];
        // SAFETY: the sequence owns the block, and this is the only thread.
        unsafe { pool.storage().unwrap().unpack(&runs, bytes) }.unwrap();
    }
    batch.finish();
    sequence
}

fn contents(pool: &Pool, sequence: &Sequence) -> Vec<Vec<u8>> {
    let block = |id| {
        let mut bytes = vec![0; pool.layout().packed_bytes()];
        let runs = [Run { start: pool.blocks().frame(id), len: 1 }];
        // SAFETY: this is the only thread.
        unsafe { pool.storage().unwrap().pack(&runs, &mut bytes) }.unwrap();
        bytes
    };
    sequence.blocks().map(block).collect()
}

/// Exports the sequence on each of `ranks` ranks.
fn exports(builder: &KvLayoutBuilder, ranks: usize, blocks: &[Vec<u8>]) -> Vec<(Pool, Export, HeadRange)> {
    let (count, all) = (HEADS / ranks, builder.clone().build().unwrap());
    let export = |rank: usize| {
        let layout = builder.clone().tensor_parallel(ranks).build().unwrap();
        let heads = HeadRange::of_rank(&layout, rank).unwrap();
        assert_eq!(heads.heads(), (rank * count) as u32..((rank + 1) * count) as u32);
        let pool = pool(layout);
        let own: Vec<_> = blocks.iter().map(|block| cut(&all, block, rank * count, count)).collect();
        let sequence = open(&pool, &own);
        let mut export = pool.export(sequence).unwrap();
        export.set_heads(heads).unwrap();
        (pool, export, heads)
    };
    (0..ranks).map(export).collect()
}

/// Sends all blocks of the sources that have heads of the target.
fn feed(sources: &[(Pool, Export, HeadRange)], target: &Pool, own: HeadRange) -> Import {
    let mut import: Option<Import> = None;
    for (_, export, heads) in sources.iter().filter(|(.., heads)| heads.common(&own).is_some()) {
        let manifest = export.manifest().unwrap();
        let import = match &mut import {
            None => import.insert(target.import_heads(&manifest, own).unwrap()),
            Some(import) => {
                assert_eq!(import.verify().unwrap().len(), TOKENS.div_ceil(4), "heads are missing");
                import.add_source(&manifest).unwrap();
                import
            }
        };
        for place in import.missing().to_vec() {
            let mut bytes = export.packed(place).unwrap();
            bytes[1] ^= 1;
            assert_eq!(import.write(place, Some(*heads), &bytes), Err(TransferError::Checksum { place }));
            bytes[1] ^= 1;
            import.write(place, Some(*heads), &bytes).unwrap();
        }
    }
    import.unwrap()
}

fn between(from: KvLayoutBuilder, to: KvLayoutBuilder, source_ranks: usize, target_ranks: usize) {
    let all = from.clone().build().unwrap();
    let blocks = whole(&all);
    let sources = exports(&from, source_ranks, &blocks);
    for rank in 0..target_ranks {
        let layout = to.clone().tensor_parallel(target_ranks).build().unwrap();
        let own = HeadRange::of_rank(&layout, rank).unwrap();
        let target = pool(layout);
        let mut import = feed(&sources, &target, own);
        assert!(import.verify().unwrap().is_empty());
        let sequence = import.commit().unwrap().sequence().unwrap();
        assert_eq!(sequence.len(), TOKENS);
        let count = HEADS / target_ranks;
        let want: Vec<_> = blocks.iter().map(|block| cut(&all, block, rank * count, count)).collect();
        assert!(contents(&target, &sequence) == want, "rank {rank} of {target_ranks}");
        drop(sequence);
        is_idle(&target);
    }
    for (pool, export, _) in sources {
        export.finish();
        is_idle(&pool);
    }
}

#[test]
fn eight_ranks_feed_four_and_four_feed_eight() {
    let plain = |joined| base(joined, Dtype::Bf16);
    let scaled = |joined| base(joined, Dtype::Fp8E4M3).scales(Scales::PerTokenHead);
    for (from, to) in [(8, 4), (4, 8), (2, 8)] {
        for (joined, joins) in [(false, true), (true, false), (true, true)] {
            between(plain(joined), plain(joins), from, to);
            between(scaled(joined), scaled(joins), from, to);
        }
    }
}

/// Static scales of the shared heads must be equal; other block sizes are refused.
#[test]
fn refusals_name_the_reason() {
    let scales = |scale: f32, ranks: usize| Scales::PerHead {
        k: vec![scale; 3 * HEADS / ranks].into(),
        v: vec![1.0; 3 * HEADS / ranks].into(),
    };
    let layout = |scale, ranks| {
        let builder = base(false, Dtype::Fp8E4M3).tensor_parallel(ranks);
        builder.scales(scales(scale, ranks)).build().unwrap()
    };
    let source = pool(layout(2.0, 8));
    let sequence = open(&source, &[]);
    let mut export = source.export(sequence).unwrap();
    let own = |first, count| HeadRange::new(first, count, HEADS as u32).unwrap();
    let refused = |target: &Pool, export: &Export, heads| {
        let error = target.import_heads(&export.manifest().unwrap(), heads).unwrap_err();
        is_idle(target);
        assert!(matches!(error, TransferError::Invalid(_)), "{error}");
        error.to_string()
    };
    let same = pool(layout(2.0, 4));
    let unknown = "heads of the source: got none, expected those of its manifest";
    assert_eq!(refused(&same, &export, own(0, 4)), unknown);
    let range = |heads, held| format!("heads: got {heads} of 16, expected those of a block of {held}");
    assert_eq!(export.set_heads(own(0, 4)).unwrap_err().to_string(), range("0..4", 2));
    export.set_heads(own(2, 2)).unwrap();
    let mut import = same.import_heads(&export.manifest().unwrap(), own(0, 4)).unwrap();
    assert!(matches!(import.piece(&[0]), Err(TransferError::Invalid(_))), "its bytes are not whole blocks");
    drop(import);
    let other = pool(layout(3.0, 4));
    let scale = refused(&other, &export, own(0, 4));
    assert!(scale.starts_with("static scales of K: got others in layer 0, head 2 of the target"), "{scale}");
    assert_eq!(refused(&same, &export, own(4, 4)), range("2..4", 4), "no head in common");
    assert_eq!(refused(&same, &export, own(0, 2)), range("0..2", 4), "not the pool's");
    let total = HeadRange::new(0, 4, 32).unwrap();
    let other = |what, from, to| format!("{what}: got {from}, expected {to}, as in the blocks of the target");
    assert_eq!(refused(&same, &export, total), other("heads of the model", "16", "32"));
    let larger = base(false, Dtype::Fp8E4M3).tensor_parallel(4).block_tokens(8).scales(scales(2.0, 4));
    let larger = pool(larger.build().unwrap());
    assert_eq!(refused(&larger, &export, own(0, 4)), other("tokens", "4", "8"));
    let bf16 = pool(base(false, Dtype::Bf16).tensor_parallel(4).build().unwrap());
    assert_eq!(refused(&bf16, &export, own(0, 4)), other("element type", "fp8_e4m3", "bf16"));
    assert!(HeadRange::new(15, 2, 16).is_err() && HeadRange::new(0, 0, 16).is_err());
    assert!(HeadRange::of_rank(same.layout(), 4).is_err());
    drop(export);
    is_idle(&source);
}

/// Manifests of other sequences are not joined.
#[test]
fn sources_that_disagree() {
    let builder = base(false, Dtype::Bf16);
    let blocks = whole(&builder.clone().build().unwrap());
    let sources = exports(&builder, 8, &blocks);
    let layout = builder.tensor_parallel(4).build().unwrap();
    let (target, own) = (pool(layout.clone()), HeadRange::of_rank(&layout, 0).unwrap());
    let mut import = target.import_heads(&sources[0].1.manifest().unwrap(), own).unwrap();
    let other = pool(sources[1].0.layout().clone());
    let mut sequence = other.sequence(SequenceId(8)).tokens(&[1; TOKENS]).unwrap();
    append(&other, &mut sequence, TOKENS);
    let mut export = other.export(sequence).unwrap();
    export.set_heads(sources[1].2).unwrap();
    let refused = import.add_source(&export.manifest().unwrap()).unwrap_err().to_string();
    assert_eq!(refused, "sequence: got another one, expected that of the first source's manifest");
    let uncached = Pool::builder(sources[1].0.layout().clone()).blocks(12).build().unwrap();
    let mut sequence = uncached.sequence(SequenceId(7)).open().unwrap();
    append(&uncached, &mut sequence, TOKENS);
    let mut unhashed = uncached.export(sequence).unwrap();
    unhashed.set_heads(sources[1].2).unwrap();
    let refused = import.add_source(&unhashed.manifest().unwrap()).unwrap_err().to_string();
    assert!(refused.starts_with("hashing: got none, expected "), "{refused}");
    drop((import, export, unhashed, sources));
    [other, target, uncached].iter().for_each(is_idle);
}
