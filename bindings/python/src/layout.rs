//! `Layout`: the shape of a block.

use kvpool::storage::{Arrangement, KvPlanes, Scales};
use kvpool::{BuildError, Dtype, KvLayout};
use pyo3::basic::CompareOp;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::args::Count;
use crate::error::{Outcome, invalid, raise};

/// Shape of the blocks of a pool: K and V of `block_tokens` tokens, over all layers.
///
/// `Layout(layers=28, kv_heads=4, head_dim=128)` describes one tensor-parallel rank if
/// `tensor_parallel` is the number of ranks. `dtype` is one of f32, f16, bf16, fp8_e4m3, fp8_e5m2
/// and int8. With `latent=True` there is one vector of `head_dim` elements per token and layer
/// (multi-head latent attention). `arrangement` is "layer_first" or "block_first". With
/// `dynamic_scales=True` a quantised layout keeps one f32 scale per token and head.
///
/// Raises BuildError for a shape that is impossible.
#[pyclass(frozen, name = "Layout", module = "kvpool._kvpool", from_py_object)]
#[derive(Clone)]
pub struct PyLayout(pub KvLayout);

/// Finds an element type by name.
pub fn dtype(name: &str) -> Outcome<Dtype> {
    let known = || Dtype::ALL.map(Dtype::name).join(", ");
    let found = Dtype::ALL.into_iter().find(|dtype| dtype.name() == name);
    found.ok_or_else(|| invalid(format!("unknown dtype {name:?}; the dtypes are {}", known())))
}

#[pymethods]
impl PyLayout {
    #[new]
    #[pyo3(signature = (*, layers, head_dim, kv_heads=None, block_tokens=Count(16), dtype="bf16", tensor_parallel=Count(1), replicate_kv_heads=false, latent=false, joined=false, arrangement="layer_first", dynamic_scales=false), text_signature = r#"(*, layers, head_dim, kv_heads=None, block_tokens=16, dtype="bf16", tensor_parallel=1, replicate_kv_heads=False, latent=False, joined=False, arrangement="layer_first", dynamic_scales=False)"#)]
    #[allow(clippy::too_many_arguments)]
    fn new(
        layers: Count,
        head_dim: Count,
        kv_heads: Option<Count>,
        block_tokens: Count,
        dtype: &str,
        tensor_parallel: Count,
        replicate_kv_heads: bool,
        latent: bool,
        joined: bool,
        arrangement: &str,
        dynamic_scales: bool,
    ) -> Outcome<Self> {
        if latent && joined {
            return Err(invalid("a layout is latent or joined, not both"));
        }
        let mut builder = KvLayout::builder()
            .layers(layers.0)
            .block_tokens(block_tokens.0)
            .dtype(self::dtype(dtype)?)
            .tensor_parallel(tensor_parallel.0);
        builder = match latent {
            true => builder.latent(head_dim.0),
            false => builder.kv_heads(1).head_dim(head_dim.0),
        };
        if let Some(heads) = kv_heads {
            builder = builder.kv_heads(heads.0);
        }
        if joined {
            builder = builder.parts(KvPlanes::Joined);
        }
        if replicate_kv_heads {
            builder = builder.replicate_kv_heads();
        }
        builder = builder.arrangement(match arrangement {
            "layer_first" => Arrangement::LayerFirst,
            "block_first" => Arrangement::BlockFirst,
            _ => {
                return Err(invalid(format!(
                    "unknown arrangement {arrangement:?}; it is layer_first or block_first"
                )));
            }
        });
        if dynamic_scales {
            builder = builder.scales(Scales::PerTokenHead);
        }
        Ok(Self(builder.build().map_err(BuildError::from)?))
    }

    /// Returns the layout of a known model, on one rank of `tensor_parallel`.
    #[staticmethod]
    #[pyo3(signature = (name, *, block_tokens=None, dtype=None, tensor_parallel=Count(1)), text_signature = "(name, *, block_tokens=None, dtype=None, tensor_parallel=1)")]
    fn named(
        name: &str,
        block_tokens: Option<Count>,
        dtype: Option<&str>,
        tensor_parallel: Count,
    ) -> Outcome<Self> {
        let mut builder =
            KvLayout::named_builder(name).map_err(BuildError::from)?.tensor_parallel(tensor_parallel.0);
        if let Some(tokens) = block_tokens {
            builder = builder.block_tokens(tokens.0);
        }
        if let Some(name) = dtype {
            builder = builder.dtype(self::dtype(name)?);
        }
        Ok(Self(builder.build().map_err(BuildError::from)?))
    }

    /// Returns the names of the known models.
    #[staticmethod]
    fn names() -> Vec<&'static str> {
        KvLayout::names().collect()
    }

    /// Number of layers.
    #[getter]
    fn layers(&self) -> usize {
        self.0.layers()
    }

    /// Number of KV heads on this rank.
    #[getter]
    fn kv_heads(&self) -> usize {
        self.0.kv_heads()
    }

    /// Elements per head.
    #[getter]
    fn head_dim(&self) -> usize {
        self.0.head_dim()
    }

    /// Tokens per block.
    #[getter]
    fn block_tokens(&self) -> usize {
        self.0.block_tokens()
    }

    /// Name of the element type.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.dtype().name()
    }

    /// Whether a token has one latent vector instead of K and V.
    #[getter]
    fn latent(&self) -> bool {
        self.0.parts() == KvPlanes::Latent
    }

    /// Bytes of one block, over all layers.
    #[getter]
    fn bytes_per_block(&self) -> usize {
        self.0.bytes_per_block()
    }

    /// Bytes of one token, over all layers.
    #[getter]
    fn bytes_per_token(&self) -> usize {
        self.0.bytes_per_token()
    }

    fn __richcmp__(&self, other: &Self, op: CompareOp) -> Outcome<bool> {
        match op {
            CompareOp::Eq => Ok(self.0 == other.0),
            CompareOp::Ne => Ok(self.0 != other.0),
            _ => Err(raise("InvalidArgument", "layouts have no order", Vec::new())),
        }
    }

    /// Arguments that make an equal layout, for `pickle` and `copy`.
    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<((), Bound<'py, PyDict>)> {
        let (layout, named) = (&self.0, PyDict::new(py));
        let is_block_first = layout.arrangement() == Arrangement::BlockFirst;
        named.set_item("layers", layout.layers())?;
        named.set_item("kv_heads", layout.kv_heads_total())?;
        named.set_item("head_dim", layout.head_dim())?;
        named.set_item("block_tokens", layout.block_tokens())?;
        named.set_item("dtype", layout.dtype().name())?;
        named.set_item("tensor_parallel", layout.tensor_parallel())?;
        named.set_item("replicate_kv_heads", layout.kv_head_replicas() > 1)?;
        named.set_item("latent", layout.parts() == KvPlanes::Latent)?;
        named.set_item("joined", layout.parts() == KvPlanes::Joined)?;
        named.set_item("arrangement", if is_block_first { "block_first" } else { "layer_first" })?;
        named.set_item("dynamic_scales", *layout.scales() == Scales::PerTokenHead)?;
        Ok(((), named))
    }

    fn __repr__(&self) -> String {
        format!("<kvpool.Layout {}>", self.0)
    }
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyLayout>()
}
