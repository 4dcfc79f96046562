//! The PTX in the repository contains every kernel, and each takes the struct that the host passes.

use kvpool_cuda::params::{CopyParams, PackParams, PatchParams, QuantParams, RowsParams, ZeroParams};

const PTX: [(&str, &str); 2] = [
    ("sm_80", include_str!("../../../kernels/ptx/kvpool.sm80.ptx")),
    ("sm_90", include_str!("../../../kernels/ptx/kvpool.sm90.ptx")),
];

/// Every kernel with the size of its parameter struct.
const KERNELS: [(&str, usize); 8] = [
    ("kvp_copy", size_of::<CopyParams>()),
    ("kvp_copy_bulk", size_of::<CopyParams>()),
    ("kvp_zero", size_of::<ZeroParams>()),
    ("kvp_pack", size_of::<PackParams>()),
    ("kvp_rows", size_of::<RowsParams>()),
    ("kvp_quantise", size_of::<QuantParams>()),
    ("kvp_dequantise", size_of::<QuantParams>()),
    ("kvp_patch", size_of::<PatchParams>()),
];

#[test]
fn every_kernel_is_there_with_its_struct() {
    for (target, text) in PTX {
        assert!(text.contains(".version 8.0\n"), "older drivers refuse newer PTX");
        assert!(text.contains(&format!(".target {target}\n")), "{target}");
        for (name, bytes) in KERNELS {
            assert!(text.contains(&format!(".entry {name}(\n")), "{target} lacks {name}");
            let parameter = format!("{name}_param_0[{bytes}]\n");
            assert!(text.contains(&parameter), "{name} of {target} has a parameter of another size");
        }
        assert_eq!(text.matches(".entry ").count(), KERNELS.len(), "{target} has unknown kernels");
    }
}
