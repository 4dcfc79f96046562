//! Block tables patched in place.

use kvpool::MovedEntry;
use kvpool_cuda::params::PatchParams;
use kvpool_cuda_tests::host::launch;
use kvpool_testkit::rng::Rng;

use crate::buffer::{Buffer, any_launch};

#[test]
fn entries_and_nothing_else_are_patched() {
    for seed in 0..50 {
        let mut rng = Rng(seed);
        let (rows, columns, stride) = (1 + rng.below(9), 1 + rng.below(300), 300 + rng.below(20));
        let mut want: Vec<i32> = (0..rows * stride).map(|_| rng.bits() as i32).collect();
        let mut table = Buffer::of_values(&want);
        let mut entries = Vec::new();
        for row in 0..rows {
            for column in (0..columns).filter(|_| rng.bits().is_multiple_of(3)).collect::<Vec<_>>() {
                let frame = rng.bits() as i32;
                want[row * stride + column] = frame;
                entries.push(MovedEntry { row: row as u32, column: column as u32, frame });
            }
        }
        let mut list = Buffer::of_values(&entries);
        let params = PatchParams {
            table: table.address(),
            entries: list.address(),
            row_stride: stride as u32,
            n: entries.len() as u32,
        };
        let (ctas, order) = any_launch(&mut rng);
        // SAFETY: the entries are in the table, and all have distinct places.
        unsafe { launch("kvp_patch", ctas, params, order) };
        assert_eq!(table.bytes(), Buffer::of_values(&want).bytes(), "seed {seed}");
        table.check_guards();
    }
}
