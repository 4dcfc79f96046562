//! A pool that shrinks returns its memory to the system, and takes it again when it grows, by the
//! kernel's count of resident bytes. A test binary of its own, because that count is per process.
#![cfg(target_os = "linux")]

use kvpool::storage::{Arrangement, Dtype, KvLayout};
use kvpool::{AllocRequest, FrameId, Pool, Run};

const MIB: usize = 1 << 20;

/// Resident bytes of this process.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() * 1024
}

/// Writes every byte of all blocks, through one lease.
fn fill(pool: &Pool, byte: u8) {
    let lease = pool.allocate(AllocRequest::new(pool.total_blocks())).unwrap();
    let bytes = vec![byte; pool.layout().packed_bytes()];
    for &id in lease.blocks() {
        let one = Run { start: pool.blocks().frame(id), len: 1 };
        // SAFETY: the frame belongs to the lease.
        unsafe { pool.storage().unwrap().unpack(&[one], &bytes) }.unwrap();
    }
}

#[test]
fn memory_falls_when_the_pool_shrinks() {
    for arrangement in [Arrangement::LayerFirst, Arrangement::BlockFirst] {
        // 64 KiB per block; 4096 of them are 256 MiB.
        let layout =
            KvLayout::builder().layers(4).kv_heads(4).head_dim(64).block_tokens(16).dtype(Dtype::F16);
        let layout = layout.arrangement(arrangement).build().unwrap();
        let block = layout.packed_bytes();
        assert_eq!(block, 64 << 10);
        let (blocks, kept) = (4096, 1024);
        let pool = Pool::builder(layout).blocks(blocks).build().unwrap();
        let empty = resident();
        fill(&pool, 1);
        let full = resident();
        assert!(full > empty + 250 * MIB, "{arrangement:?}: {empty} bytes empty, {full} full");

        let mut shrinking = pool.blocks().begin_shrink(kept).unwrap();
        assert_eq!(shrinking.collect(), 0, "nothing is owned");
        let storage = pool.storage().unwrap();
        // SAFETY: the removed frames are all held by the shrink.
        shrinking.commit(|gone| unsafe { storage.shrink(gone.start.index()) }).unwrap();
        let shrunk = resident();
        // A quarter remains, and a page at the end of each plane.
        assert!(shrunk < empty + 64 * MIB + 2 * MIB, "{arrangement:?}: {full} bytes full, {shrunk} shrunk");
        assert_eq!((pool.total_blocks(), storage.frames()), (kept, kept + 1));
        let mut back = vec![0; block];
        let lowest = Run { start: FrameId(1), len: 1 };
        // SAFETY: no block is owned.
        unsafe { storage.pack(&[lowest], &mut back) }.unwrap();
        assert!(back.iter().all(|&byte| byte == 1), "the remaining frames keep their bytes");

        pool.grow(blocks - kept).unwrap();
        fill(&pool, 2);
        let again = resident();
        assert!(again > empty + 250 * MIB, "{arrangement:?}: {again} bytes after growth");
        println!(
            "{arrangement:?}: {} MiB empty, {} full, {} shrunk to a quarter, {} grown again and filled",
            empty / MIB,
            full / MIB,
            shrunk / MIB,
            again / MIB
        );
        pool.audit().unwrap();
    }
}
