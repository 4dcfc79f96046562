//! `Tensor`: memory of a pool, for other libraries, without copies.

use std::any::Any;
use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use kvpool::storage::PlaneTensor;
use kvpool::{BlockPin, DeviceId, Dtype, FrameId, Pool};
use pyo3::exceptions::{PyAttributeError, PyBufferError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::args::{Place, Version};
use crate::dlpack;
use crate::error::{Outcome, fields, raise};
use crate::process::{Own, Process};
use crate::views::ViewGuard;

/// Memory of a pool as a tensor: of one block in one layer, or of all frames.
///
/// Host memory is a buffer: `memoryview(t)` and `numpy.asarray(t)` make no copy. All memory, also of
/// CUDA devices, has DLPack: `torch.from_dlpack(t)`. Elements of bf16 and fp8, which the buffer
/// protocol has no codes for, are their bits there: uint16 and uint8.
///
/// A view of a block keeps the block allocated and pinned while it, or any array made of it, exists.
#[pyclass(frozen, name = "Tensor", module = "kvpool._kvpool")]
pub struct PyTensor {
    made_in: Process,
    /// Address, of the host or the device.
    data: usize,
    element: Element,
    shape: Box<[isize]>,
    /// In bytes.
    strides: Box<[isize]>,
    readonly: bool,
    device: DeviceId,
    _memory: Own<Arc<dyn Any + Send + Sync>>,
    _owner: Option<Own<Owner>>,
}

/// Type of the elements.
#[derive(Clone, Copy)]
struct Element(Dtype);

impl Element {
    /// Code and bits of DLPack.
    fn dlpack(self) -> (u8, u8) {
        match self.0 {
            Dtype::F32 => (2, 32),
            Dtype::F16 => (2, 16),
            Dtype::Bf16 => (4, 16),
            Dtype::Fp8E4M3 => (10, 8),
            Dtype::Fp8E5M2 => (12, 8),
            _ => (0, 8),
        }
    }

    /// Minor version of DLPack 1 that introduced the code.
    fn dlpack_minor(self) -> u32 {
        u32::from(matches!(self.0, Dtype::Fp8E4M3 | Dtype::Fp8E5M2))
    }

    /// Code of the buffer protocol, and type string of the array interface.
    fn codes(self) -> (&'static CStr, &'static str) {
        match self.0 {
            Dtype::F32 => (c"f", "<f4"),
            Dtype::F16 => (c"e", "<f2"),
            Dtype::Bf16 => (c"H", "<u2"),
            Dtype::Int8 => (c"b", "|i1"),
            _ => (c"B", "|u1"),
        }
    }
}

/// What keeps a view's block: its pin, a count at the object that owns the block, and the object.
pub struct Owner {
    /// Dropped before the object, which frees the block.
    pub _pin: BlockPin,
    /// Makes the object refuse to let go of the block.
    pub guard: ViewGuard,
    /// The lease or sequence.
    pub _object: Py<PyAny>,
}

/// Which plane of a layer.
fn plane(
    pool: &Pool,
    layer: Place,
    part: &str,
) -> Outcome<(PlaneTensor, DeviceId, Arc<dyn Any + Send + Sync>)> {
    let Some(storage) = pool.storage() else {
        return Err(raise("StorageError", "the pool was built without storage", fields![kind: "NoStorage"]));
    };
    let planes = storage.planes()?;
    let Some(of_layer) = planes.layers().get(layer.0) else {
        let message = format!("layer {} is outside {} layers", layer.0, planes.layers().len());
        return Err(raise("InvalidArgument", message, fields![layer: layer.0]));
    };
    let found = match part {
        "k" => Some(of_layer.k),
        "v" => of_layer.v,
        "k_scales" => of_layer.k_scales,
        "v_scales" => of_layer.v_scales,
        _ => None,
    };
    let Some(found) = found else {
        let message = format!(
            "the layout has no part {part:?}; parts are k, v, k_scales and v_scales, as far as it has them"
        );
        return Err(raise("InvalidArgument", message, Vec::new()));
    };
    Ok((found, planes.device(), Arc::clone(planes.owner())))
}

/// Makes the tensor of a pinned block, which is in this frame, in one layer.
pub fn tile(pool: &Pool, frame: FrameId, layer: Place, part: &str, owner: Owner) -> Outcome<PyTensor> {
    let (plane, device, memory) = plane(pool, layer, part)?;
    let size = plane.dtype.bytes() as isize;
    Ok(PyTensor {
        made_in: Process::current(),
        data: plane.data.addr() + frame.index() * plane.frame_stride(),
        element: Element(plane.dtype),
        shape: plane.shape[1..].iter().map(|&extent| extent as isize).collect(),
        strides: plane.strides[1..].iter().map(|&stride| stride as isize * size).collect(),
        readonly: !owner.guard.is_writable(),
        device,
        _memory: Own::new(memory),
        _owner: Some(Own::new(owner)),
    })
}

/// Makes the tensor of all frames in one layer.
pub fn whole(pool: &Pool, layer: Place, part: &str) -> Outcome<PyTensor> {
    let (plane, device, memory) = plane(pool, layer, part)?;
    let size = plane.dtype.bytes() as isize;
    Ok(PyTensor {
        made_in: Process::current(),
        data: plane.data.addr(),
        element: Element(plane.dtype),
        shape: plane.shape.iter().map(|&extent| extent as isize).collect(),
        strides: plane.strides.iter().map(|&stride| stride as isize * size).collect(),
        readonly: false,
        device,
        _memory: Own::new(memory),
        _owner: None,
    })
}

/// Whether dimensions, given as extent and stride from the innermost on, follow each other without
/// gaps.
pub fn is_packed<'a>(item_bytes: usize, dimensions: impl Iterator<Item = (&'a isize, &'a isize)>) -> bool {
    let mut expected = item_bytes as isize;
    let mut dimensions = dimensions;
    dimensions.all(|(&extent, &stride)| {
        let fits = stride == expected || extent <= 1;
        expected *= extent;
        fits
    })
}

impl PyTensor {
    /// Bytes of one element.
    fn item_bytes(&self) -> usize {
        self.element.0.bytes()
    }

    fn items(&self) -> usize {
        self.shape.iter().product::<isize>() as usize
    }

    fn is_contiguous(&self) -> bool {
        is_packed(self.item_bytes(), self.shape.iter().zip(&self.strides).rev())
    }
}

#[pymethods]
impl PyTensor {
    /// Extents: `[block_tokens, kv_heads, head_dim]` of a block, `[frames, block_tokens, kv_heads,
    /// head_dim]` of all frames. The last is 1 for scales.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.shape.iter())
    }

    /// Bytes from one index to the next, by dimension.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.strides.iter())
    }

    /// Name of the element type, as in `Layout.dtype`.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.element.0.name()
    }

    /// "host" or "cuda:N".
    #[getter]
    fn device(&self) -> String {
        self.device.to_string()
    }

    /// Address of the first element.
    #[getter]
    fn address(&self) -> usize {
        self.data
    }

    /// Whether the bytes are final.
    #[getter]
    fn readonly(&self) -> bool {
        self.readonly
    }

    /// Bytes of all elements.
    #[getter]
    fn nbytes(&self) -> usize {
        self.items() * self.item_bytes()
    }

    /// Device type and number, as DLPack has them: (1, 0) is the host, (2, N) a CUDA device.
    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::device(self.device)
    }

    /// Makes a DLPack capsule of the memory.
    ///
    /// No stream has to be waited for: what the pool itself writes is complete on the host before a
    /// block is visible at its place. Work of the caller is the caller's to order.
    ///
    /// The capsule says DLPack 1.1 for fp8, which has codes since then, and 1.0 for other types. A
    /// consumer that passes no `max_version` of 1 or later gets an unversioned one, and neither fp8 nor
    /// read-only memory.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__(
        slf: &Bound<'_, Self>,
        stream: Option<&Bound<'_, PyAny>>,
        max_version: Option<(Version, Version)>,
        dl_device: Option<&Bound<'_, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        let _ = stream;
        slf.get().made_in.check()?;
        if copy == Some(true) {
            return Err(PyBufferError::new_err("the memory of a pool is exported without copies only"));
        }
        let own = slf.get().__dlpack_device__();
        // Compared by Python: its first part is an enum of the consumer's.
        if dl_device.map_or(Ok(false), |asked| asked.ne(own))? {
            return Err(PyBufferError::new_err(format!(
                "the memory is on device {own:?}; it is exported there only"
            )));
        }
        let this = slf.get();
        let size = this.item_bytes() as i64;
        let memory = dlpack::Memory {
            data: this.data,
            element: this.element.dlpack(),
            minor: this.element.dlpack_minor(),
            shape: this.shape.iter().map(|&extent| extent as i64).collect(),
            strides: this.strides.iter().map(|&stride| stride as i64 / size).collect(),
            device: this.device,
            readonly: this.readonly,
            owner: slf.clone().into_any().unbind(),
        };
        dlpack::capsule(slf.py(), memory, max_version.is_some_and(|(Version(major), _)| major >= 1))
    }

    /// The CUDA array interface, version 3, of device memory.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if !matches!(self.device, DeviceId::Cuda(_)) {
            return Err(PyAttributeError::new_err("the tensor is not on a CUDA device"));
        }
        self.made_in.check()?;
        let dict = PyDict::new(py);
        dict.set_item("shape", self.shape(py)?)?;
        dict.set_item("strides", self.strides(py)?)?;
        dict.set_item("typestr", self.element.codes().1)?;
        dict.set_item("data", (self.data, self.readonly))?;
        dict.set_item("version", 3)?;
        Ok(dict)
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let refuse = |why: &str| Err(PyBufferError::new_err(why.to_owned()));
        // SAFETY: Python passes a structure to fill in.
        let view = unsafe { &mut *view };
        view.obj = null_mut();
        this.made_in.check()?;
        if this.device != DeviceId::Host {
            return refuse("the memory is on a device; use DLPack");
        }
        if this.readonly && flags & ffi::PyBUF_WRITABLE != 0 {
            return refuse("the block is sealed: its bytes are final");
        }
        let asks = |flag: c_int| flags & flag == flag;
        let is_contiguous = this.is_contiguous();
        if !is_contiguous && !asks(ffi::PyBUF_STRIDES) {
            return refuse("K and V interleave in this layout: the consumer must accept strides");
        }
        if !is_contiguous && (asks(ffi::PyBUF_C_CONTIGUOUS) || asks(ffi::PyBUF_ANY_CONTIGUOUS)) {
            return refuse("K and V interleave in this layout: the memory is not contiguous");
        }
        let has_fortran_order = is_packed(this.item_bytes(), this.shape.iter().zip(&this.strides));
        if asks(ffi::PyBUF_F_CONTIGUOUS) && !has_fortran_order {
            return refuse("the memory is not Fortran-contiguous");
        }
        view.buf = this.data as *mut c_void;
        view.len = (this.items() * this.item_bytes()) as isize;
        view.readonly = c_int::from(this.readonly);
        view.itemsize = this.item_bytes() as isize;
        view.format = match asks(ffi::PyBUF_FORMAT) {
            true => this.element.codes().0.as_ptr().cast_mut(),
            false => null_mut(),
        };
        view.ndim = this.shape.len() as c_int;
        // The object owns the arrays, and the view keeps the object.
        view.shape = if asks(ffi::PyBUF_ND) { this.shape.as_ptr().cast_mut() } else { null_mut() };
        view.strides = if asks(ffi::PyBUF_STRIDES) { this.strides.as_ptr().cast_mut() } else { null_mut() };
        view.suboffsets = null_mut();
        view.internal = null_mut();
        view.obj = slf.into_ptr();
        Ok(())
    }

    fn __repr__(&self) -> String {
        let kind = if self.readonly { ", read-only" } else { "" };
        format!("<kvpool.Tensor {:?} of {}, {}{kind}>", self.shape, self.element.0.name(), self.device)
    }
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyTensor>()
}
