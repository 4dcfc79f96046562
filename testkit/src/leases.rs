//! Leases of one block each, for tests that free, seal and pin blocks one by one.

use kvpool::{AllocRequest, BlockHandle, BlockId, Lease, Pool};

/// Allocates blocks in one request, and returns a lease for each.
///
/// # Panics
///
/// If the request is refused.
pub fn singles(pool: &Pool, request: AllocRequest) -> Vec<Lease<'static>> {
    split(pool.allocate_owned(request).expect("enough blocks are free"))
}

/// Splits a lease into leases of one block each.
pub fn split(mut lease: Lease<'static>) -> Vec<Lease<'static>> {
    let mut singles: Vec<_> = (1..lease.blocks().len()).rev().map(|at| lease.split_off(at)).collect();
    singles.push(lease);
    singles.reverse();
    singles
}

/// Returns the block of a lease of one block.
pub fn block(lease: &Lease<'_>) -> BlockId {
    lease.blocks()[0]
}

/// Returns a handle of the block of a lease of one block.
pub fn handle(lease: &Lease<'_>) -> BlockHandle {
    lease.handles().next().expect("a lease of one block")
}

/// Allocates all free blocks, frees every other one and seals the rest: maximal fragmentation.
pub fn checkerboard(pool: &Pool) -> Vec<Lease<'static>> {
    let mut kept = singles(pool, AllocRequest::new(pool.free_blocks()));
    kept.retain(|lease| block(lease).0.is_multiple_of(2));
    kept.iter_mut().for_each(|lease| lease.seal(..));
    kept
}
