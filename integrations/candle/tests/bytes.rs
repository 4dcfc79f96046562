//! Tensors against the bytes that the storage loads: bit for bit.

use std::sync::Arc;

use candle_core::{D, DType, Device, Tensor};
use fastrand::Rng;
use half::{bf16, f16};
use kvpool::storage::{Arrangement, ElementsMut, KvLayout, KvPlanes, Scales};
use kvpool::{Batch, Dtype, Invalid, Pool, Sequence, SequenceError, SequenceId, StorageError};
use kvpool_candle::{CandleError, PlaneTensors, attention, read, read_block, write};

const TOKENS: usize = 11;
const BLOCK_TOKENS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 8;

fn layout(dtype: Dtype, parts: KvPlanes) -> KvLayout {
    let layout = KvLayout::builder().layers(2).block_tokens(BLOCK_TOKENS).dtype(dtype);
    let layout = match parts {
        KvPlanes::Latent => layout.latent(HEAD_DIM),
        parts => layout.kv_heads(KV_HEADS).head_dim(HEAD_DIM).parts(parts),
    };
    layout.build().unwrap()
}

fn layouts() -> impl Iterator<Item = KvLayout> {
    [Dtype::F32, Dtype::F16, Dtype::Bf16].into_iter().flat_map(|dtype| {
        [KvPlanes::Separate, KvPlanes::Joined, KvPlanes::Latent].map(|parts| layout(dtype, parts))
    })
}

fn candle(dtype: Dtype) -> DType {
    match dtype {
        Dtype::F16 => DType::F16,
        Dtype::Bf16 => DType::BF16,
        _ => DType::F32,
    }
}

fn random(rng: &mut Rng, shape: &[usize], dtype: DType) -> Tensor {
    let elements: Vec<f32> = (0..shape.iter().product()).map(|_| rng.f32() * 2.0 - 1.0).collect();
    Tensor::from_vec(elements, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Returns the bytes of a tensor's elements, row-major.
fn bytes(tensor: &Tensor) -> Vec<u8> {
    let flat = tensor.flatten_all().unwrap();
    match tensor.dtype() {
        DType::F32 => flat.to_vec1::<f32>().unwrap().iter().flat_map(|x| x.to_ne_bytes()).collect(),
        DType::F16 => flat.to_vec1::<f16>().unwrap().iter().flat_map(|x| x.to_ne_bytes()).collect(),
        DType::BF16 => flat.to_vec1::<bf16>().unwrap().iter().flat_map(|x| x.to_ne_bytes()).collect(),
        other => panic!("{other:?}"),
    }
}

/// Returns the slots of all tokens.
fn slots(batch: &Batch, sequence: &Sequence) -> Vec<i64> {
    let mut slots = Vec::new();
    batch.slot_mapping(sequence, 0..sequence.len(), &mut slots).unwrap();
    slots
}

/// Returns K and V of all tokens as the storage loads them.
fn loaded(pool: &Pool, batch: &Batch, sequence: &Sequence, layer: usize) -> [Vec<u8>; 2] {
    let layout = pool.layout();
    let size = sequence.len() * layout.row_elements() * layout.dtype().bytes();
    let is_latent = layout.parts() == KvPlanes::Latent;
    let (mut k, mut v) = (vec![0; size], vec![0; if is_latent { 0 } else { size }]);
    let k_out = ElementsMut::new(layout.dtype(), &mut k).unwrap();
    let v_out = ElementsMut::new(layout.dtype(), &mut v).unwrap();
    let slots = slots(batch, sequence);
    // SAFETY: one thread, under a batch.
    unsafe { pool.storage().unwrap().load(layer, &slots, k_out, v_out) }.unwrap();
    [k, v]
}

/// A pool in the memory of tensors, with a sequence whose bytes are written as tensors.
fn filled(layout: &KvLayout, rng: &mut Rng) -> (Pool, PlaneTensors, Sequence, Vec<(Tensor, Option<Tensor>)>) {
    let (planes, storage) = PlaneTensors::allocate(layout, 21).unwrap();
    let pool = Pool::builder(layout.clone()).blocks(20).storage(Arc::new(storage)).build().unwrap();
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    let mut batch = pool.begin_batch();
    let new = batch.append(&mut sequence, TOKENS).unwrap().tokens;
    let shape = [TOKENS, layout.kv_heads(), layout.head_dim()];
    let given: Vec<_> = (0..layout.layers())
        .map(|layer| {
            // One of them is not contiguous.
            let k =
                random(rng, &[shape[1], shape[0], shape[2]], candle(layout.dtype())).transpose(0, 1).unwrap();
            let v = random(rng, &shape, candle(layout.dtype()));
            let v = (layout.parts() != KvPlanes::Latent).then_some(v);
            write(&mut batch, &mut sequence, layer, new.clone(), &k, v.as_ref()).unwrap();
            (k, v)
        })
        .collect();
    batch.finish();
    (pool, planes, sequence, given)
}

#[test]
fn tensors_are_the_bytes_that_the_storage_loads() {
    let mut rng = Rng::with_seed(3);
    for layout in layouts() {
        let (pool, planes, sequence, given) = filled(&layout, &mut rng);
        let mut batch = pool.begin_batch();
        for (layer, (given_k, given_v)) in given.iter().enumerate() {
            let want = loaded(&pool, &batch, &sequence, layer);
            assert_eq!(bytes(given_k), want[0], "{layout}");
            assert_eq!(given_v.as_ref().map(bytes).unwrap_or_default(), want[1], "{layout}");

            let (k, v) = read(&layout, &mut batch, &sequence, layer, 0..TOKENS).unwrap();
            assert_eq!(k.dims(), [TOKENS, layout.kv_heads(), HEAD_DIM]);
            assert_eq!([bytes(&k), v.as_ref().map(bytes).unwrap_or_default()], want);

            let blocks = (0..sequence.block_count())
                .map(|index| read_block(&layout, &batch, &sequence, layer, index).unwrap());
            let (k, v): (Vec<_>, Vec<_>) = blocks.unzip();
            let v: Option<Vec<_>> = v.into_iter().collect();
            assert_eq!(bytes(&Tensor::cat(&k, 0).unwrap()), want[0]);
            assert_eq!(v.map(|v| bytes(&Tensor::cat(&v, 0).unwrap())).unwrap_or_default(), want[1]);

            // Without a copy: the planes themselves, indexed by slot.
            let slots: Vec<u32> = slots(&batch, &sequence).iter().map(|&slot| slot as u32).collect();
            let slots = Tensor::new(slots, &Device::Cpu).unwrap();
            // SAFETY: one thread, and nothing moves.
            let (k, v) = unsafe { (planes.k(layer).unwrap(), planes.v(layer)) };
            for (plane, want) in [Some(k), v].into_iter().zip(&want) {
                let Some(plane) = plane else { continue };
                assert_eq!(plane.dims(), [21, BLOCK_TOKENS, layout.kv_heads(), HEAD_DIM]);
                let rows = plane.flatten(0, 1).unwrap().index_select(&slots, 0).unwrap();
                assert_eq!(bytes(&rows), *want, "{layout}");
            }
        }
        drop((batch, sequence));
        pool.audit().unwrap();
    }
}

/// The tensors are the memory, not a copy of it: later writes of the pool show, and the memory
/// outlives the pool.
#[test]
fn planes_are_views() {
    let layout = layout(Dtype::F32, KvPlanes::Joined);
    let (pool, planes, mut sequence, _) = filled(&layout, &mut Rng::with_seed(4));
    let told = pool.storage().unwrap().planes().unwrap();
    let mut batch = pool.begin_batch();
    let (k, v) = batch.tile_mut::<f32>(&mut sequence, 1, 2).unwrap();
    k.fill(5.0);
    v.fill(6.0);
    let slot = slots(&batch, &sequence)[2 * BLOCK_TOKENS] as usize;
    drop((batch, sequence));
    pool.audit().unwrap();
    drop(pool);
    // SAFETY: the pool is gone.
    let (k, v) = unsafe { (planes.k(1).unwrap(), planes.v(1).unwrap()) };
    for (plane, told, want) in [(k, told.layers()[1].k, 5.0), (v, told.layers()[1].v.unwrap(), 6.0)] {
        let (storage, view) = plane.storage_and_layout();
        let candle_core::Storage::Cpu(candle_core::CpuStorage::F32(all)) = &*storage else {
            panic!("on the host")
        };
        // SAFETY: within the vector.
        assert_eq!(unsafe { all.as_ptr().add(view.start_offset()) }, told.data.cast_const().cast());
        assert_eq!((view.dims(), view.stride()), (&told.shape[..], &told.strides[..]));
        let row = plane.get(slot / BLOCK_TOKENS).unwrap().get(slot % BLOCK_TOKENS).unwrap();
        assert_eq!(row.flatten_all().unwrap().to_vec1::<f32>().unwrap(), [want; KV_HEADS * HEAD_DIM]);
    }
    // SAFETY: as above.
    assert!(unsafe { planes.k(2).is_none() && planes.v(2).is_none() });
}

/// The same arithmetic over the bytes that the storage loads, as one contiguous K and V.
fn contiguous(q: &[f32], k: &[f32], v: &[f32], heads: usize, scale: f32) -> Vec<f32> {
    let mut out = vec![0f32; q.len()];
    let queries = q.len() / heads / HEAD_DIM;
    for (at, (q, out)) in q.chunks(HEAD_DIM).zip(out.chunks_mut(HEAD_DIM)).enumerate() {
        let kv_head = at % heads / (heads / KV_HEADS);
        let row = |token: usize| (token * KV_HEADS + kv_head) * HEAD_DIM;
        let seen = TOKENS - queries + at / heads + 1;
        let score = |token| q.iter().zip(&k[row(token)..]).map(|(q, k)| q * k).sum::<f32>() * scale;
        let scores: Vec<f32> = (0..seen).map(score).collect();
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0f32;
        for (token, score) in scores.iter().enumerate() {
            let weight = (score - largest).exp();
            sum += weight;
            out.iter_mut().zip(&v[row(token)..]).for_each(|(out, v)| *out += weight * v);
        }
        out.iter_mut().for_each(|out| *out /= sum);
    }
    out
}

#[test]
fn attention_in_place_is_attention_over_the_loaded_bytes() {
    const HEADS: usize = 6;
    let mut rng = Rng::with_seed(5);
    for layout in layouts().filter(|layout| layout.parts() != KvPlanes::Latent) {
        let (pool, _, sequence, given) = filled(&layout, &mut rng);
        let batch = pool.begin_batch();
        for (layer, (k, v)) in given.iter().enumerate() {
            for (queries, dtype) in [(1, DType::F32), (5, DType::F32), (TOKENS, DType::F16), (3, DType::BF16)]
            {
                let q = random(&mut rng, &[queries, HEADS, HEAD_DIM], dtype);
                let out = attention(&layout, &batch, &sequence, layer, &q, 0.3).unwrap();
                assert_eq!((out.dims(), out.dtype()), (q.dims(), dtype));
                let wide = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap();
                let flat = |tensor: &Tensor| wide(tensor).flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let v = v.as_ref().unwrap();
                let want = contiguous(&flat(&q), &flat(k), &flat(v), HEADS, 0.3);
                let want = Tensor::from_vec(want, q.shape(), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                assert_eq!(bytes(&out), bytes(&want), "{layout}, {queries} queries");

                // And it is what candle's own operations compute, up to rounding.
                let repeat = |tensor: &Tensor| {
                    let tensor = wide(tensor).unsqueeze(2).unwrap();
                    let tensor = tensor.repeat((1, 1, HEADS / KV_HEADS, 1)).unwrap().flatten(1, 2).unwrap();
                    tensor.transpose(0, 1).unwrap().contiguous().unwrap()
                };
                let (k, v, q) =
                    (repeat(k), repeat(v), wide(&q).transpose(0, 1).unwrap().contiguous().unwrap());
                let scores = (q.matmul(&k.t().unwrap().contiguous().unwrap()).unwrap() * 0.3).unwrap();
                let hidden = (0..queries * TOKENS).map(|at| {
                    if at % TOKENS > TOKENS - queries + at / TOKENS { f32::NEG_INFINITY } else { 0.0 }
                });
                let hidden = Tensor::from_vec(hidden.collect::<Vec<_>>(), (1, queries, TOKENS), &Device::Cpu);
                let scores = scores.broadcast_add(&hidden.unwrap()).unwrap();
                let scores =
                    scores.broadcast_sub(&scores.max_keepdim(D::Minus1).unwrap()).unwrap().exp().unwrap();
                let weights = scores.broadcast_div(&scores.sum_keepdim(D::Minus1).unwrap()).unwrap();
                let theirs = weights.matmul(&v).unwrap().transpose(0, 1).unwrap().contiguous().unwrap();
                let bound = if dtype == DType::F32 { 1e-5 } else { 0.02 };
                assert!(flat(&theirs).iter().zip(flat(&out)).all(|(a, b)| (a - b).abs() < bound));
            }
        }
        drop((batch, sequence));
        pool.audit().unwrap();
    }
}

/// Attention is the same, bit for bit, after blocks have moved.
#[test]
fn attention_does_not_notice_moves() {
    let layout = layout(Dtype::F32, KvPlanes::Separate);
    let pool = Pool::builder(layout.clone()).blocks(64).build().unwrap();
    let mut rng = Rng::with_seed(6);
    let mut sequences: Vec<_> = (0..12).map(|id| pool.sequence(SequenceId(id)).open().unwrap()).collect();
    // Whole blocks: only these are sealed, and move.
    for _ in 0..3 * BLOCK_TOKENS {
        for sequence in &mut sequences {
            let mut batch = pool.begin_batch();
            let new = batch.append(sequence, 1).unwrap().tokens;
            let [k, v] = [0, 1].map(|_| random(&mut rng, &[1, KV_HEADS, HEAD_DIM], DType::F32));
            write(&mut batch, sequence, 0, new, &k, Some(&v)).unwrap();
            batch.finish();
        }
    }
    let q = random(&mut rng, &[2, 4, HEAD_DIM], DType::F32);
    let all = |sequences: &[Sequence]| -> Vec<Vec<u8>> {
        let batch = pool.begin_batch();
        let of = |sequence| bytes(&attention(&layout, &batch, sequence, 0, &q, 0.5).unwrap());
        sequences.iter().map(of).collect()
    };
    let mut before = all(&sequences);
    for index in (0..12).step_by(2).rev() {
        sequences.remove(index);
        before.remove(index);
    }
    let waker = std::task::Waker::noop();
    let mut resize = Box::pin(pool.resize(20));
    let done = loop {
        match resize.as_mut().poll(&mut std::task::Context::from_waker(waker)) {
            std::task::Poll::Ready(done) => break done,
            std::task::Poll::Pending => std::thread::yield_now(),
        }
    };
    drop(resize);
    let report = done.unwrap();
    assert!(report.moved.moved_blocks > 0, "{report:?}");
    assert_eq!(all(&sequences), before);
    drop(sequences);
    pool.audit().unwrap();
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let mut rng = Rng::with_seed(8);
    let layout = layout(Dtype::F16, KvPlanes::Separate);
    let (pool, _, mut sequence, given) = filled(&layout, &mut rng);
    let mut batch = pool.begin_batch();
    let k = &given[0].0;
    let mut write = |tokens, k: &Tensor, v| write(&mut batch, &mut sequence, 0, tokens, k, v).unwrap_err();
    let last = TOKENS - 1..TOKENS;
    let row = k.narrow(0, 0, 1).unwrap();
    let wide = row.to_dtype(DType::F32).unwrap();
    let whole = row.to_dtype(DType::I64).unwrap();
    let store = |error| matches!(error, CandleError::Sequence(SequenceError::Storage(_)));
    assert!(store(write(last.clone(), &wide, Some(&row))), "another type");
    assert!(store(write(last.clone(), k, Some(&row))), "too many tokens");
    assert!(store(write(last.clone(), &row, None)), "no V");
    let error = write(last.clone(), &row, Some(&whole));
    assert!(matches!(error, CandleError::ElementType { which: "v", got: DType::I64 }), "{error}");
    let sealed = write(0..1, &row, Some(&row));
    assert!(matches!(sealed, CandleError::Sequence(SequenceError::NotWritable { .. })), "{sealed}");
    let outside = write(TOKENS..TOKENS + 1, &row, Some(&row));
    assert!(matches!(outside, CandleError::Sequence(SequenceError::Invalid { .. })), "{outside}");

    let outside = read(&layout, &mut batch, &sequence, 0, 5..usize::MAX).unwrap_err();
    assert!(matches!(outside, CandleError::Sequence(SequenceError::Invalid { .. })), "{outside}");
    let layer = read_block(&layout, &batch, &sequence, 2, 0).unwrap_err();
    let want = StorageError::from(Invalid::new("layer", 2, "less than 2"));
    assert!(matches!(layer, CandleError::Sequence(SequenceError::Storage(error)) if error == want));

    let attend = |layout: &KvLayout, shape: &[usize], dtype| {
        let q = Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
        attention(layout, &batch, &sequence, 0, &q, 1.0).unwrap_err()
    };
    for shape in [&[0, 2, 8][..], &[TOKENS + 1, 2, 8], &[1, 3, 8], &[1, 0, 8], &[1, 2, 4], &[2, 8]] {
        let error = attend(&layout, shape, DType::F32);
        assert!(matches!(error, CandleError::Shape { which: "q", .. }), "{shape:?}: {error}");
    }
    let error = attend(&layout, &[1, 2, 8], DType::F64);
    assert!(matches!(error, CandleError::ElementType { which: "q", got: DType::F64 }), "{error}");
    let other = layout_of(Dtype::F16, 4);
    let error = attend(&other, &[1, 4, 8], DType::F32);
    assert!(matches!(error, CandleError::Layout { .. }), "{error}");
    let latent = self::layout(Dtype::F16, KvPlanes::Latent);
    assert!(matches!(attend(&latent, &[1, 1, 8], DType::F32), CandleError::Layout { .. }));
    let codes = KvLayout::builder().layers(1).kv_heads(2).head_dim(8).dtype(Dtype::Int8);
    let codes = codes.scales(Scales::PerTokenHead).arrangement(Arrangement::BlockFirst).build().unwrap();
    assert!(matches!(attend(&codes, &[1, 2, 8], DType::F32), CandleError::Codes { dtype: Dtype::Int8 }));
    assert!(matches!(PlaneTensors::allocate(&codes, 4), Err(CandleError::Codes { .. })));
    let none = PlaneTensors::allocate(&layout, 0).unwrap_err();
    assert!(matches!(none, CandleError::Storage(StorageError::Invalid(_))), "{none}");
    drop((batch, sequence));
    pool.audit().unwrap();
}

fn layout_of(dtype: Dtype, heads: usize) -> KvLayout {
    let layout = KvLayout::builder().layers(2).kv_heads(heads).head_dim(HEAD_DIM).block_tokens(BLOCK_TOKENS);
    layout.dtype(dtype).build().unwrap()
}

/// A quantised pool is read as the values that the storage loads.
#[test]
fn codes_are_read_as_values() {
    let layout = KvLayout::builder().layers(1).kv_heads(2).head_dim(8).dtype(Dtype::Fp8E4M3);
    let layout = layout.scales(Scales::PerTokenHead).build().unwrap();
    let pool = Pool::builder(layout.clone()).blocks(4).build().unwrap();
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 5).unwrap();
    let k = random(&mut Rng::with_seed(9), &[5, 2, 8], DType::BF16);
    write(&mut batch, &mut sequence, 0, 0..5, &k, Some(&k)).unwrap();
    let (read_k, read_v) = read(&layout, &mut batch, &sequence, 0, 0..5).unwrap();
    let (mut k_want, mut v_want) = (vec![0f32; 80], vec![0f32; 80]);
    batch.load(&sequence, 0, 0..5, (&mut k_want).into(), (&mut v_want).into()).unwrap();
    let flat = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!((flat(&read_k), flat(&read_v.unwrap())), (k_want, v_want));
    let error = read_block(&layout, &batch, &sequence, 0, 0).unwrap_err();
    assert!(matches!(error, CandleError::Codes { dtype: Dtype::Fp8E4M3 }), "{error}");
}
