//! DLPack: the structures of its header, version 1, and a capsule of a tensor.

use std::ffi::{CStr, c_void};

use kvpool::DeviceId;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

#[repr(C)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: Tensor,
}

const READ_ONLY: u64 = 1;
const PLAIN: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

/// Memory to be exported.
pub struct Memory {
    /// Address of the first element.
    pub data: usize,
    /// Code and bits of the element type.
    pub element: (u8, u8),
    /// Minor version of DLPack 1 that has the code.
    pub minor: u32,
    /// Extents.
    pub shape: Box<[i64]>,
    /// Elements from one index to the next, by dimension.
    pub strides: Box<[i64]>,
    /// The device.
    pub device: DeviceId,
    /// Whether it must not be written.
    pub readonly: bool,
    /// The Python object that keeps the memory.
    pub owner: Py<PyAny>,
}

/// What a consumer holds.
struct Context {
    shape: Box<[i64]>,
    strides: Box<[i64]>,
    _owner: Py<PyAny>,
}

impl Context {
    /// Drops a context. Consumers call it on any thread.
    ///
    /// # Safety
    /// `context` came from a box, and is not used afterwards.
    unsafe fn free(context: *mut c_void) {
        // After the interpreter's end the object is left to the system.
        Python::try_attach(|_| {
            // SAFETY: as the caller promises.
            drop(unsafe { Box::from_raw(context.cast::<Self>()) });
        });
    }
}

/// Device type and number, as DLPack has them.
pub fn device(device: DeviceId) -> (i32, i32) {
    match device {
        DeviceId::Cuda(ordinal) => (2, i32::from(ordinal)),
        _ => (1, 0),
    }
}

unsafe extern "C" fn delete_managed(managed: *mut Managed) {
    // SAFETY: a consumer calls the deleter once, with the structure that it got.
    unsafe {
        let managed = Box::from_raw(managed);
        Context::free(managed.context);
    }
}

unsafe extern "C" fn delete_versioned(managed: *mut Versioned) {
    // SAFETY: as above.
    unsafe {
        let managed = Box::from_raw(managed);
        Context::free(managed.context);
    }
}

/// Deletes the structure of a capsule that was not consumed: a consumer renames it.
unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: called by Python for a capsule of this file, attached.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, PLAIN.as_ptr()) != 0 {
            delete_managed(ffi::PyCapsule_GetPointer(capsule, PLAIN.as_ptr()).cast());
        } else if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) != 0 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast());
        }
    }
}

/// Makes a capsule for a consumer: versioned if it reads that.
pub fn capsule(py: Python<'_>, memory: Memory, is_versioned: bool) -> PyResult<Py<PyAny>> {
    let Memory { data, element: (code, bits), minor, shape, strides, device, readonly, owner } = memory;
    if readonly && !is_versioned {
        return Err(PyBufferError::new_err(
            "the block is sealed: it can be read only by consumers of DLPack 1.0 and later, which know read-only tensors",
        ));
    }
    if minor > 0 && !is_versioned {
        return Err(PyBufferError::new_err(format!(
            "the element type has a code since DLPack 1.{minor}: the consumer must take versioned tensors"
        )));
    }
    let mut context = Box::new(Context { shape, strides, _owner: owner });
    let (kind, id) = self::device(device);
    let inner = Tensor {
        data: data as *mut c_void,
        device: Device { kind, id },
        ndim: context.shape.len() as i32,
        dtype: DataType { code, bits, lanes: 1 },
        shape: context.shape.as_mut_ptr(),
        strides: context.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let context = Box::into_raw(context).cast();
    let (pointer, name): (*mut c_void, _) = if is_versioned {
        let flags = if readonly { READ_ONLY } else { 0 };
        let deleter = Some(delete_versioned as unsafe extern "C" fn(*mut Versioned));
        let managed = Versioned { major: 1, minor, context, deleter, flags, tensor: inner };
        (Box::into_raw(Box::new(managed)).cast(), VERSIONED)
    } else {
        let deleter = Some(delete_managed as unsafe extern "C" fn(*mut Managed));
        (Box::into_raw(Box::new(Managed { tensor: inner, context, deleter })).cast(), PLAIN)
    };
    // SAFETY: attached; the name is static, and the destructor frees what the pointer names.
    unsafe {
        let capsule = ffi::PyCapsule_New(pointer, name.as_ptr(), Some(drop_capsule));
        if capsule.is_null() {
            match is_versioned {
                true => delete_versioned(pointer.cast()),
                false => delete_managed(pointer.cast()),
            }
            return Err(PyErr::fetch(py));
        }
        Ok(Bound::from_owned_ptr(py, capsule).unbind())
    }
}
