//! A reader that only knows block tables: a kernel that reads a table in the device's memory and
//! packs the blocks in it.
//!
//! It stands for paged attention: the contents of the table at the time when the *device* reads it
//! determine the result, not the host's view. The kernel is the pool's own pack kernel, from the
//! repository.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction};
use cudarc::driver::{CudaContext, DriverError};
use kvpool::storage::{ElementsMut, HostStorage, KvLayout, Storage};
use kvpool::{FrameId, Run};
use kvpool_cuda::params::{PackParams, Piece, THREADS, Way, unit};
use kvpool_cuda::{CudaStorage, DeviceTable};

use super::rows::Rows;

const PTX: &str = concat!(include_str!("../../../kernels/ptx/kvpool.sm80.ptx"), "\0");

/// The pack kernel, and the planes of a storage as its pieces.
pub struct Gather {
    pieces: Vec<Piece>,
    pack_unit: u32,
    module: sys::CUmodule,
    function: CUfunction,
    layout: KvLayout,
    /// Keeps the context alive into which the kernel was loaded.
    _context: Arc<CudaContext>,
}

// SAFETY: any thread can use modules and functions.
unsafe impl Send for Gather {}
// SAFETY: as above.
unsafe impl Sync for Gather {}

impl Gather {
    /// Loads the kernel. The context must be current.
    pub fn new(context: &Arc<CudaContext>, storage: &CudaStorage) -> Result<Self, DriverError> {
        let (mut pieces, mut packed_at) = (Vec::new(), 0);
        let planes = storage.planes().expect("a device's memory has addresses");
        for tensor in planes.tensors() {
            // Tiles here are shorter than the maximal piece.
            let (bytes, frame_stride) = (tensor.frame_bytes() as u32, tensor.frame_stride() as u64);
            pieces.push(Piece { base: tensor.data.addr() as u64, frame_stride, bytes, packed_at });
            packed_at += bytes;
        }
        let numbers = pieces
            .iter()
            .flat_map(|piece| [piece.base, piece.frame_stride, piece.bytes.into(), piece.packed_at.into()]);
        let pack_unit = unit(numbers.chain([packed_at.into()]));
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the pointers are valid, the texts end in a NUL, and a context is current.
        unsafe {
            sys::cuModuleLoadData(&mut module, PTX.as_ptr().cast()).result()?;
            sys::cuModuleGetFunction(&mut function, module, c"kvp_pack".as_ptr()).result()?;
        }
        let layout = storage.layout().clone();
        Ok(Self { pieces, pack_unit, module, function, layout, _context: context.clone() })
    }

    /// Returns the bytes of the pieces for the kernel.
    pub fn pieces(&self) -> &[u8] {
        // SAFETY: numbers, without padding.
        unsafe { std::slice::from_raw_parts(self.pieces.as_ptr().cast(), size_of_val(&*self.pieces)) }
    }

    /// Returns the packed size of this many rows of a table.
    pub fn packed_bytes(&self, rows: usize, columns: usize) -> usize {
        rows * columns * self.layout.packed_bytes()
    }

    /// Enqueues a kernel that packs the blocks in the first rows of a table to device memory.
    ///
    /// The padding of the rows is packed, too.
    ///
    /// # Safety
    /// The stream lives; until the kernel is complete, the pieces are at `pieces`, and the memory
    /// at `packed` is large enough; all entries of the table are existing frames.
    pub unsafe fn enqueue(
        &self,
        table: &DeviceTable,
        rows: usize,
        pieces: u64,
        packed: u64,
        stream: sys::CUstream,
    ) -> Result<(), DriverError> {
        let params = PackParams {
            pieces,
            frames: table.entries(),
            packed,
            packed_stride: self.layout.packed_bytes() as u64,
            n_pieces: self.pieces.len() as u32,
            n_frames: (rows * table.columns()) as u32,
            unit: self.pack_unit,
            way: Way::Out,
        };
        let mut arguments = [(&raw const params).cast_mut().cast::<c_void>()];
        let (start, none) = (arguments.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: the kernel takes this one struct; the rest is the caller's promise.
        unsafe { sys::cuLaunchKernel(self.function, 3, 1, 1, THREADS, 1, 1, 0, stream, start, none) }.result()
    }

    /// Compares packed blocks with the tokens of the table's rows. Returns how many rows of K or V
    /// were compared, or the first difference.
    pub fn compare(
        &self,
        packed: &[u8],
        columns: usize,
        tokens: &[Vec<u32>],
        rows: &mut Rows,
    ) -> Result<u64, String> {
        let (frames, block_tokens) = (tokens.len() * columns, self.layout.block_tokens());
        if frames == 0 {
            return Ok(0);
        }
        let host = HostStorage::new(self.layout.clone(), frames, frames).expect("memory for some blocks");
        // SAFETY: no one else has this storage.
        unsafe { host.unpack(&[Run { start: FrameId(0), len: frames as u32 }], packed) }
            .expect("the packed form of these frames");
        let (bytes, halves, dtype) = (rows.bytes(), rows.halves(), rows.dtype());
        let mut compared = 0;
        for (row, tokens) in tokens.iter().enumerate() {
            let first = (row * columns * block_tokens) as i64;
            let slots: Vec<i64> = (first..first + tokens.len() as i64).collect();
            for layer in 0..self.layout.layers() {
                let mut found = [vec![0; tokens.len() * bytes], vec![0; tokens.len() * bytes]];
                let [k, v] = &mut found;
                let k = ElementsMut::new(dtype, k).expect("whole elements");
                let v = if halves == 2 {
                    ElementsMut::new(dtype, v).expect("whole elements")
                } else {
                    ElementsMut::none()
                };
                // SAFETY: as above.
                unsafe { host.load(layer, &slots, k, v) }.expect("slots of this storage");
                for (at, &token) in tokens.iter().enumerate() {
                    for (half, found) in found.iter().enumerate().take(halves) {
                        let found = &found[at * bytes..][..bytes];
                        let expected = &rows.loaded(token, layer)[half];
                        if found != expected {
                            return Err(format!(
                                "through the table: row {row}, token {at} ({token:#x}), layer {layer}, half {half}: {found:x?} in place of {expected:x?}"
                            ));
                        }
                        compared += 1;
                    }
                }
            }
        }
        Ok(compared)
    }
}

impl Drop for Gather {
    fn drop(&mut self) {
        // SAFETY: loaded once; no one has its functions any more. The driver waits for their
        // launches.
        let _ = unsafe { sys::cuModuleUnload(self.module) };
    }
}
