//! The PTX in the repository contains every kernel, and each takes the struct that the host passes.

use kvpool::Dtype;
use kvpool_cuda::params::{CopyParams, PackParams, PatchParams, QuantParams, RowsParams, ZeroParams};
use kvpool_cuda_tests::host::{dequantise_name, quantise_name};

const PTX: [(&str, &str); 2] = [
    ("sm_80", include_str!("../../../kernels/ptx/kvpool.sm80.ptx")),
    ("sm_90", include_str!("../../../kernels/ptx/kvpool.sm90.ptx")),
];

/// Returns every kernel with the size of its parameter struct.
fn kernels() -> Vec<(String, usize)> {
    let mut kernels: Vec<(String, usize)> = [
        ("kvp_copy", size_of::<CopyParams>()),
        ("kvp_copy_bulk", size_of::<CopyParams>()),
        ("kvp_zero", size_of::<ZeroParams>()),
        ("kvp_pack", size_of::<PackParams>()),
        ("kvp_unpack", size_of::<PackParams>()),
        ("kvp_store", size_of::<RowsParams>()),
        ("kvp_load", size_of::<RowsParams>()),
        ("kvp_patch", size_of::<PatchParams>()),
    ]
    .map(|(name, bytes)| (name.to_owned(), bytes))
    .into();
    for codes in Dtype::ALL.into_iter().filter(|dtype| dtype.is_quantised()) {
        for rows in Dtype::ALL.into_iter().filter(|dtype| !dtype.is_quantised()) {
            kernels.push((quantise_name(codes, rows), size_of::<QuantParams>()));
            kernels.push((dequantise_name(codes, rows), size_of::<QuantParams>()));
        }
    }
    kernels
}

#[test]
fn every_kernel_is_there_with_its_struct() {
    for (target, text) in PTX {
        assert!(text.contains(".version 8.0\n"), "older drivers refuse newer PTX");
        assert!(text.contains(&format!(".target {target}\n")), "{target}");
        for (name, bytes) in kernels() {
            assert!(text.contains(&format!(".entry {name}(\n")), "{target} lacks {name}");
            let parameter = format!("{name}_param_0[{bytes}]\n");
            assert!(text.contains(&parameter), "{name} of {target} has a parameter of another size");
        }
        assert_eq!(text.matches(".entry ").count(), kernels().len(), "{target} has unknown kernels");
    }
}
