//! Bytes without copies: tiles of sequences, planes, and an engine's contiguous tensors.
#![cfg(not(any(kvpool_loom, miri)))]

use std::sync::Arc;

use fastrand::Rng;
use half::{bf16, f16};
use kvpool::storage::{
    AdoptedTensor, AdoptedTensors, Dtype, Element, Elements, ElementsMut, HostStorage, KvLayout, KvPlanes,
    Scales, Storage,
};
use kvpool::{
    Batch, DeviceId, Invalid, Pool, Run, Sequence, SequenceError, SequenceId, StorageError, Tokens,
};
use kvpool_testkit::conformance;
use kvpool_testkit::steps;

const BLOCK_TOKENS: usize = 4;
const HEAD_DIM: usize = 32;

fn layout() -> KvLayout {
    let layout = KvLayout::builder().layers(2).kv_heads(1).head_dim(HEAD_DIM).block_tokens(BLOCK_TOKENS);
    layout.dtype(Dtype::F32).build().unwrap()
}

fn pool() -> Pool {
    Pool::builder(layout()).blocks(20).build().unwrap()
}

fn open(pool: &Pool, id: u64) -> Sequence {
    pool.sequence(SequenceId(id)).open().unwrap()
}

/// Returns elements as bytes.
fn bytes<'a, T>(elements: &'a [T]) -> &'a [u8]
where
    &'a [T]: Into<Elements<'a>>,
{
    elements.into().as_bytes()
}

/// Returns the bytes of a block's tile, whatever its type.
fn tile_bytes(batch: &Batch, sequence: &Sequence, layer: usize, index: usize, dtype: Dtype) -> [Vec<u8>; 2] {
    fn pair<T: Copy, U>((k, v): (&[T], &[T]), of: impl Fn(&[T]) -> U) -> [U; 2] {
        [of(k), of(v)]
    }
    match dtype {
        Dtype::F32 => pair(batch.tile::<f32>(sequence, layer, index).unwrap(), |part| bytes(part).to_vec()),
        Dtype::F16 => pair(batch.tile::<f16>(sequence, layer, index).unwrap(), |part| bytes(part).to_vec()),
        Dtype::Bf16 => pair(batch.tile::<bf16>(sequence, layer, index).unwrap(), |part| bytes(part).to_vec()),
        Dtype::Int8 => pair(batch.tile::<i8>(sequence, layer, index).unwrap(), |part| bytes(part).to_vec()),
        _ => pair(batch.tile::<u8>(sequence, layer, index).unwrap(), |part| part.to_vec()),
    }
}

/// Every layout: a tile has the bytes that a load returns, and those of the packed frame; scales
/// are those of the packed frame, too.
#[test]
fn tiles_are_the_bytes_that_are_loaded() {
    let mut rng = Rng::with_seed(7);
    for layout in conformance::layouts() {
        let pool = Pool::builder(layout.clone()).blocks(6).build().unwrap();
        let (tokens, row) = (layout.block_tokens(), layout.row_elements());
        let length = 2 * tokens + tokens.div_ceil(2);
        let is_latent = layout.parts() == KvPlanes::Latent;
        let is_scaled = *layout.scales() == Scales::PerTokenHead;
        let mut sequence = open(&pool, 1);
        let mut batch = pool.begin_batch();
        batch.append(&mut sequence, length).unwrap();
        for layer in 0..layout.layers() {
            let mut part = || -> Vec<u8> {
                let values: Vec<f32> = (0..length * row).map(|_| rng.f32() * 8.0 - 4.0).collect();
                match layout.dtype() {
                    Dtype::F16 => {
                        bytes(&values.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>()[..]).to_vec()
                    }
                    Dtype::Bf16 => {
                        bytes(&values.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>()[..]).to_vec()
                    }
                    _ => bytes(&values[..]).to_vec(),
                }
            };
            let given = if layout.dtype().is_quantised() { Dtype::F32 } else { layout.dtype() };
            let (k, v) = (part(), part());
            let k = Elements::new(given, &k).unwrap();
            let v = if is_latent { Elements::none() } else { Elements::new(given, &v).unwrap() };
            batch.store(&mut sequence, layer, 0..length, k, v).unwrap();
        }
        // Once while the blocks are open, and once when the full ones are sealed.
        for turn in 0..2 {
            for (index, layer) in
                (0..3).flat_map(|index| (0..layout.layers()).map(move |layer| (index, layer)))
            {
                let here = index * tokens..length.min((index + 1) * tokens);
                let [k, v] = tile_bytes(&batch, &sequence, layer, index, layout.dtype());
                if !is_scaled {
                    let size = here.len() * row * layout.dtype().bytes();
                    let (mut loaded_k, mut loaded_v) =
                        (vec![0; size], vec![0; if is_latent { 0 } else { size }]);
                    let k_out = ElementsMut::new(layout.dtype(), &mut loaded_k).unwrap();
                    let v_out = ElementsMut::new(layout.dtype(), &mut loaded_v).unwrap();
                    batch.load(&sequence, layer, here.clone(), k_out, v_out).unwrap();
                    assert_eq!((&k, &v), (&loaded_k, &loaded_v), "{layout}, turn {turn}");
                    let error = batch.tile_scales(&sequence, layer, index).unwrap_err();
                    assert_eq!(error, no_scales(layout.dtype()));
                    continue;
                }
                let scales = batch.tile_scales(&sequence, layer, index).unwrap();
                let frame = pool.blocks().frame(sequence.blocks().nth(index).unwrap());
                let mut packed = vec![0; layout.packed_bytes()];
                // SAFETY: the block is this thread's, and under the batch.
                unsafe { pool.storage().unwrap().pack(&[Run { start: frame, len: 1 }], &mut packed) }
                    .unwrap();
                let mut at = layer * packed.len() / layout.layers();
                let parts = [k, v, bytes(scales.0).to_vec(), bytes(scales.1).to_vec()];
                for (part, token) in
                    parts.iter().zip([row, row, 4 * layout.kv_heads(), 4 * layout.kv_heads()])
                {
                    assert_eq!(*part, packed[at..at + part.len()], "{layout}, turn {turn}");
                    at += if part.is_empty() { 0 } else { tokens * token };
                }
            }
            if turn == 0 {
                batch.finish();
                batch = pool.begin_batch();
            }
        }
        drop((batch, sequence));
        pool.audit().unwrap();
    }
}

/// What is written in place is loaded, and follows the block when it is copied and moved.
#[tokio::test]
async fn bytes_written_in_place_are_loaded() {
    let pool = pool();
    let mut filler = open(&pool, 9);
    let mut sequence = open(&pool, 1);
    let mut batch = pool.begin_batch();
    batch.append(&mut filler, 11 * BLOCK_TOKENS).unwrap();
    batch.append(&mut sequence, 2 * BLOCK_TOKENS + 1).unwrap();
    for (layer, index) in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)] {
        let (k, v) = batch.tile_mut::<f32>(&mut sequence, layer, index).unwrap();
        let tokens = if index == 2 { 1 } else { BLOCK_TOKENS };
        assert_eq!((k.len(), v.len()), (tokens * HEAD_DIM, tokens * HEAD_DIM));
        for (at, (k, v)) in k.iter_mut().zip(v).enumerate() {
            let number = (((index * BLOCK_TOKENS * HEAD_DIM) + at) * 2 + layer) as f32;
            (*k, *v) = (number, -number);
        }
    }
    batch.finish();
    let check = |sequence: &Sequence| {
        for layer in 0..2 {
            let mut batch = pool.begin_batch();
            let tokens = 0..sequence.len().min(2 * BLOCK_TOKENS + 1);
            let elements = tokens.len() * HEAD_DIM;
            let (mut k, mut v) = (vec![0f32; elements], vec![0f32; elements]);
            batch.load(sequence, layer, tokens, (&mut k).into(), (&mut v).into()).unwrap();
            assert!(k.iter().enumerate().all(|(at, &k)| k == (at * 2 + layer) as f32));
            assert!(v.iter().zip(&k).all(|(v, k)| *v == -k));
        }
    };
    check(&sequence);
    let mut fork = sequence.fork(SequenceId(2)).unwrap();
    let mut batch = pool.begin_batch();
    assert!(batch.append(&mut fork, 1).unwrap().copied.is_some());
    // The copy is the fork's alone.
    let (k, _) = batch.tile_mut::<f32>(&mut fork, 0, 2).unwrap();
    k[HEAD_DIM..].fill(-3.0);
    batch.finish();
    check(&fork);
    // Open blocks do not move.
    drop((filler, fork));
    sequence.truncate(2 * BLOCK_TOKENS).unwrap();
    let report = pool.resize(10).await.unwrap();
    assert!(report.moved.moved_blocks >= 2, "{report:?}");
    assert!(sequence.blocks().all(|block| pool.blocks().frame(block).index() <= 10));
    check(&sequence);
    let read = pool.begin_batch();
    assert_eq!(read.tile::<f32>(&sequence, 1, 1).unwrap().0[0], (BLOCK_TOKENS * HEAD_DIM * 2 + 1) as f32);
    drop((read, sequence));
    pool.audit().unwrap();
}

/// A block written in place in a batch is not sealed while that batch is in flight.
#[test]
fn a_tile_counts_as_a_write_of_its_batch() {
    let pool = pool();
    let mut sequence = open(&pool, 1);
    steps::append(&pool, &mut sequence, Tokens::Draft(BLOCK_TOKENS));
    let mut second = pool.begin_batch();
    second.tile_mut::<f32>(&mut sequence, 0, 0).unwrap().0.fill(1.0);
    sequence.commit(BLOCK_TOKENS).unwrap();
    let is_sealed = |sequence: &Sequence| pool.blocks().word(sequence.blocks().next().unwrap()).is_sealed();
    assert!(!is_sealed(&sequence), "the writer is in flight");
    // It may go on, and so may another batch, before whose end it is not sealed either.
    second.tile_mut::<f32>(&mut sequence, 0, 0).unwrap().1.fill(2.0);
    let mut third = pool.begin_batch();
    third.tile_mut::<f32>(&mut sequence, 1, 0).unwrap().1.fill(3.0);
    second.finish();
    sequence.commit(BLOCK_TOKENS).unwrap();
    assert!(!is_sealed(&sequence));
    third.finish();
    sequence.commit(BLOCK_TOKENS).unwrap();
    assert!(is_sealed(&sequence));
    let batch = pool.begin_batch();
    assert_eq!(batch.tile::<f32>(&sequence, 0, 0).unwrap(), (&[1.0; 128][..], &[2.0; 128][..]));
    drop((batch, sequence));
    pool.audit().unwrap();
}

#[derive(Debug)]
struct Elsewhere(HostStorage);

impl Storage for Elsewhere {
    kvpool_testkit::as_on_the_host!(0);

    fn device(&self) -> DeviceId {
        DeviceId::Cuda(3)
    }
}

fn no_scales(dtype: Dtype) -> SequenceError {
    let got = format!("{dtype} without dynamic scales");
    StorageError::from(Invalid::new("layout", got, "dynamic scales")).into()
}

fn refused_both<T: Element>(
    batch: &mut Batch,
    sequence: &mut Sequence,
    (layer, index): (usize, usize),
    want: impl Into<SequenceError>,
) {
    let want = want.into();
    assert_eq!(batch.tile::<T>(sequence, layer, index).unwrap_err(), want);
    assert_eq!(batch.tile_mut::<T>(sequence, layer, index).unwrap_err(), want);
}

#[test]
fn tiles_out_of_range_or_of_another_type_are_refused() {
    let pool = pool();
    let mut sequence = open(&pool, 1);
    let id = sequence.id();
    let mut batch = pool.begin_batch();
    let outside = |index: usize, blocks| {
        let limit = format!("less than {blocks}");
        SequenceError::Invalid { id, error: Invalid::new("index of the block", index, limit) }
    };
    refused_both::<f32>(&mut batch, &mut sequence, (0, 0), outside(0, 0));
    batch.append(&mut sequence, BLOCK_TOKENS + 1).unwrap();
    for index in [2, 1 << 32, usize::MAX] {
        refused_both::<f32>(&mut batch, &mut sequence, (0, index), outside(index, 2));
    }
    for layer in [2, usize::MAX] {
        let refused = StorageError::from(Invalid::new("layer", layer, "less than 2"));
        refused_both::<f32>(&mut batch, &mut sequence, (layer, 1), refused);
    }
    let wrong = |got: &str| StorageError::from(Invalid::new("element type", got, "one that holds f32"));
    refused_both::<f16>(&mut batch, &mut sequence, (0, 0), wrong("f16"));
    refused_both::<bf16>(&mut batch, &mut sequence, (0, 0), wrong("bf16"));
    refused_both::<u8>(&mut batch, &mut sequence, (0, 0), wrong("u8"));
    refused_both::<i8>(&mut batch, &mut sequence, (0, 0), wrong("i8"));
    assert_eq!(batch.tile_scales_mut(&mut sequence, 0, 0).unwrap_err(), no_scales(Dtype::F32));

    let other = Pool::builder(layout()).blocks(4).build().unwrap();
    let foreign = SequenceError::ForeignSequence { id };
    refused_both::<f32>(&mut other.begin_batch(), &mut sequence, (0, 0), foreign);
    drop((batch, sequence));
    pool.audit().unwrap();
}

#[test]
fn tiles_of_memory_out_of_reach_are_refused() {
    let bare = Pool::builder(layout()).blocks(4).without_storage().build().unwrap();
    let device = Arc::new(Elsewhere(HostStorage::new(layout(), 5, 5).unwrap()));
    let device = Pool::builder(layout()).blocks(4).storage(device).build().unwrap();
    let device_of = DeviceId::Cuda(3);
    let not_here =
        StorageError::Unsupported { device: device_of, what: "memory within the processor's reach" };
    for (pool, want) in [(bare, SequenceError::NoStorage), (device, not_here.into())] {
        let mut sequence = open(&pool, 1);
        let mut batch = pool.begin_batch();
        batch.append(&mut sequence, 1).unwrap();
        refused_both::<f32>(&mut batch, &mut sequence, (0, 0), want);
        drop((batch, sequence));
        pool.audit().unwrap();
    }
}

#[test]
fn tiles_of_blocks_that_are_neither_sealed_nor_owned_are_refused() {
    let pool = pool();
    let mut parent = open(&pool, 1);
    let mut batch = pool.begin_batch();
    batch.append(&mut parent, 2 * BLOCK_TOKENS + 1).unwrap();
    let blocks: Vec<_> = parent.blocks().collect();
    let not_writable = |id, index: usize| SequenceError::NotWritable {
        id: SequenceId(id),
        position: index * BLOCK_TOKENS,
        block: blocks[index],
    };
    let mut child = parent.fork(SequenceId(2)).unwrap();
    // Full and final, and promised to the batch: read by both, written by none.
    for sequence in [&mut parent, &mut child] {
        let id = sequence.id();
        assert!(batch.tile::<f32>(sequence, 0, 1).is_ok());
        assert_eq!(batch.tile_mut::<f32>(sequence, 0, 1).unwrap_err(), not_writable(id.0, 1));
        let open_and_shared = SequenceError::NotReadable { id, index: 2, block: blocks[2] };
        assert_eq!(batch.tile::<f32>(sequence, 0, 2).unwrap_err(), open_and_shared);
        assert_eq!(batch.tile_mut::<f32>(sequence, 0, 2).unwrap_err(), not_writable(id.0, 2));
    }
    drop(child);
    // The parent owns them again, and may even write the block that this batch will seal.
    batch.tile_mut::<f32>(&mut parent, 0, 1).unwrap().0.fill(4.0);
    batch.tile_mut::<f32>(&mut parent, 0, 2).unwrap();
    // Another batch may not: the first may end at any moment.
    let mut other = pool.begin_batch();
    assert_eq!(other.tile_mut::<f32>(&mut parent, 0, 1).unwrap_err(), not_writable(1, 1));
    other.finish();
    batch.finish();
    let mut batch = pool.begin_batch();
    assert_eq!(batch.tile_mut::<f32>(&mut parent, 0, 1).unwrap_err(), not_writable(1, 1));
    assert_eq!(batch.tile::<f32>(&parent, 0, 1).unwrap().0, [4.0; BLOCK_TOKENS * HEAD_DIM]);
    // The storage's own memory is not a source of a store.
    let mut fork = parent.fork(SequenceId(3)).unwrap();
    let mut store = pool.begin_batch();
    store.append(&mut fork, 1).unwrap();
    let (k, v) = batch.tile::<f32>(&parent, 0, 0).unwrap();
    let tokens = 2 * BLOCK_TOKENS..2 * BLOCK_TOKENS + 1;
    let aliased = store.store(&mut fork, 0, tokens, k[..HEAD_DIM].into(), v[..HEAD_DIM].into());
    assert_eq!(
        aliased,
        Err(StorageError::from(Invalid::new("k", "memory of the storage", "memory outside of it")).into())
    );
    drop((store, batch, parent, fork));
    pool.audit().unwrap();
}

/// An engine's tensors of every form: written by the pool in place, and read by the engine when the
/// pool is gone. The owner of planes keeps them until then.
#[test]
fn tensors_of_engines_are_used_in_place() {
    const FRAMES: usize = 5;
    let half = FRAMES * BLOCK_TOKENS * HEAD_DIM;
    for (form, joined) in [(0, false), (1, false), (2, false), (2, true)] {
        let layout = KvLayout::builder().layers(2).kv_heads(1).head_dim(HEAD_DIM).block_tokens(BLOCK_TOKENS);
        let parts = if joined { KvPlanes::Joined } else { KvPlanes::Separate };
        let layout = layout.dtype(Dtype::F32).parts(parts).build().unwrap();
        let mut tensors: Vec<Vec<f32>> = match form {
            0 => vec![vec![0.0; half]; 4],
            _ => vec![vec![0.0; 2 * half]; 2],
        };
        let adopted: Vec<_> = tensors.iter_mut().map(|tensor| AdoptedTensor::of(tensor)).collect();
        let form = match form {
            0 => AdoptedTensors::Separate { k: &adopted[..2], v: &adopted[2..] },
            1 => AdoptedTensors::KvFirst(&adopted),
            _ => AdoptedTensors::FramesFirst(&adopted),
        };
        let alive = Arc::new(tensors);
        let owner = alive.clone();
        // SAFETY: the tensors are kept by the owner, and accessed only when the pool is gone.
        let storage = unsafe { HostStorage::adopt_tensors(layout.clone(), form, FRAMES, owner) }.unwrap();
        let pool = Pool::builder(layout).blocks(FRAMES - 1).storage(Arc::new(storage)).build().unwrap();
        let mut sequence = open(&pool, 1);
        let mut batch = pool.begin_batch();
        batch.append(&mut sequence, BLOCK_TOKENS).unwrap();
        for layer in 0..2 {
            let (k, v) = batch.tile_mut::<f32>(&mut sequence, layer, 0).unwrap();
            k.fill(1.0 + layer as f32);
            v.fill(-1.0 - layer as f32);
        }
        let frame = pool.blocks().frame(sequence.blocks().next().unwrap()).index();
        drop((batch, sequence));
        pool.audit().unwrap();
        let planes = pool.storage().unwrap().planes().unwrap();
        drop(pool);
        assert_eq!(Arc::strong_count(&alive), 2, "the planes' owner keeps the engine's");
        for (layer, planes) in planes.layers().iter().enumerate() {
            for (tensor, sign) in [(planes.k, 1.0), (planes.v.unwrap(), -1.0)] {
                let start = tensor.data.wrapping_add(frame * tensor.frame_stride()).cast::<f32>();
                // SAFETY: kept by the planes' owner, and no pool is left that writes it.
                let read = unsafe { std::slice::from_raw_parts(start, tensor.frame_bytes() / 4) };
                assert_eq!(read, [sign * (1.0 + layer as f32); BLOCK_TOKENS * HEAD_DIM]);
            }
        }
        drop(planes);
        assert_eq!(Arc::strong_count(&alive), 1);
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let mut tensors = vec![vec![0f32; 2 * BLOCK_TOKENS * HEAD_DIM * 5]; 2];
    let adopted: Vec<_> = tensors.iter_mut().map(|tensor| AdoptedTensor::of(tensor)).collect();
    let adopt = |tensors, frames| {
        // SAFETY: the tensors outlive the storage.
        unsafe { HostStorage::adopt_tensors(layout(), tensors, frames, ()) }.map(drop)
    };
    assert_eq!(adopt(AdoptedTensors::KvFirst(&adopted), 5), Ok(()));
    let null = [adopted[0], AdoptedTensor { base: std::ptr::null_mut(), ..adopted[1] }];
    let odd = [adopted[0], AdoptedTensor { base: adopted[1].base.wrapping_add(1), ..adopted[1] }];
    for (tensors, frames, what, index, limit) in [
        (AdoptedTensors::FramesFirst(&adopted), 4, "k and v", Some(0), "4096 bytes"),
        (AdoptedTensors::KvFirst(&adopted[..1]), 5, "k and v", None, "one for each of 2 layers"),
        (AdoptedTensors::KvFirst(&adopted), 0, "number of frames", None, "1 up to"),
        (AdoptedTensors::KvFirst(&adopted), usize::MAX, "number of frames", None, "1 up to"),
        (AdoptedTensors::Latent(&adopted), 5, "form of the tensors", None, "K and V apart"),
        (AdoptedTensors::KvFirst(&[adopted[0]; 2]), 5, "plane", Some(2), "memory of its own"),
        (AdoptedTensors::KvFirst(&null), 5, "plane", Some(2), "a base that is not null"),
        (AdoptedTensors::KvFirst(&odd), 5, "plane", Some(2), "multiples of 4 bytes"),
    ] {
        let refused = adopt(tensors, frames).unwrap_err();
        assert_eq!((refused.what, refused.index), (what, index), "{refused}");
        assert!(refused.limit.starts_with(limit), "{refused}");
    }
}
