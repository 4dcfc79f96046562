//! An engine's tensors: checks that they are in the memory of this device, and their owner.
//!
//! Properties visible in the numbers (strides, alignment, overlaps) are checked as for host memory;
//! here the driver reports what lies at the addresses. A wrong address would end the device's
//! context at the first copy, and the engine with it.

use std::any::Any;
use std::ffi::{c_int, c_uint};
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUmemorytype, CUpointer_attribute as Attribute, CUresult};

use kvpool::storage::{AdoptedTensors, KvLayout};
use kvpool::{DeviceId, Invalid, StorageError};

use super::context::Context;
use super::error::describe;
use super::pieces::Placed;

/// Owner of an engine's tensors.
///
/// Dropping it drops the engine's own value, unless the device is stuck: work that may still be
/// running accesses the tensors.
pub(super) struct Owner {
    context: Arc<Context>,
    value: ManuallyDrop<Box<dyn Any + Send + Sync>>,
}

impl Owner {
    pub(super) fn new(context: &Arc<Context>, value: impl Send + Sync + 'static) -> Self {
        Self { context: context.clone(), value: ManuallyDrop::new(Box::new(value)) }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if !self.context.is_stuck() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}

/// Checks the planes and returns them, in the layout's order.
pub(super) fn placed(
    context: &Context,
    layout: &KvLayout,
    tensors: AdoptedTensors<'_>,
    frames: usize,
) -> Result<Vec<Placed>, StorageError> {
    let checked = tensors.checked(layout, frames)?;
    let _entered = context.enter()?;
    for (index, (base, plane)) in checked.iter().enumerate() {
        let needed = (frames - 1) * plane.frame_stride + plane.tile_bytes;
        is_here(context, index, base.addr(), needed)?;
    }
    Ok(checked.into_iter().map(|(base, plane)| Placed { base: base.addr() as u64, plane }).collect())
}

/// Checks that the bytes from this address on are memory of this device.
fn is_here(context: &Context, plane: usize, base: usize, needed: usize) -> Result<(), StorageError> {
    let device = context.id;
    let refused = |got: fmt::Arguments<'_>, limit: fmt::Arguments<'_>| {
        StorageError::from(Invalid::new("plane", got, limit).at(plane))
    };
    let not_here =
        |reason: &str| refused(format_args!("base {base:#x} ({reason})"), format_args!("memory of {device}"));
    let mut has = 0;
    while has < needed {
        let at = (base + has) as u64;
        let outside = || {
            let got = format_args!("{has} bytes from its base to the end of its allocation");
            refused(got, format_args!("at least {needed}"))
        };
        let refusal = |error| if has > 0 { outside() } else { not_here(&describe(error)) };
        let kind: c_uint = ask(at, Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE).map_err(refusal)?;
        if kind != CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint {
            return Err(not_here("it is host memory"));
        }
        let ordinal: c_int = ask(at, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL).map_err(refusal)?;
        if ordinal != context.device {
            let found = DeviceId::Cuda(ordinal.max(0) as u16);
            return Err(refused(format_args!("memory of {found}"), format_args!("memory of {device}")));
        }
        let start: u64 = ask(at, Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR).map_err(refusal)?;
        let bytes: u64 = ask(at, Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE).map_err(refusal)?;
        // An engine that maps its memory in pieces has several adjacent ranges.
        let end = start.saturating_add(bytes);
        if end <= at {
            return Err(outside());
        }
        has += (end - at) as usize;
    }
    Ok(())
}

fn ask<T: Default>(address: u64, attribute: Attribute) -> Result<T, CUresult> {
    let mut value = T::default();
    // SAFETY: the out pointer has the type documented for the attribute; the address is looked up
    // and not dereferenced.
    match unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, address) } {
        CUresult::CUDA_SUCCESS => Ok(value),
        error => Err(error),
    }
}
