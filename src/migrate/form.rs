//! The packed form of a pool's blocks, as two pools compare it.
//!
//! ```text
//! packed block   for each layer:  for values, then scales (if dynamic):  for K, then V:  rows
//! row            for one token:   for each head:  head_dim elements, or one f32 scale
//! ```

use std::fmt;

use crate::dtype::Dtype;
use crate::error::Invalid;
use crate::storage::{KvLayout, KvPlanes, Scales};

/// Everything that the bytes of a packed block depend on. Pools with equal forms can exchange them.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PackedForm {
    layers: u32,
    heads: u32,
    head_dim: u32,
    block_tokens: u32,
    dtype: Dtype,
    is_latent: bool,
    scales: FormScales,
}

/// Scales of a form. Static ones by their bits, as `[layers][heads]`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
enum FormScales {
    Unit,
    PerTokenHead,
    PerHead { k: Vec<u32>, v: Vec<u32> },
}

impl FormScales {
    fn kind(&self) -> &'static str {
        match self {
            Self::Unit => "none",
            Self::PerTokenHead => "one a token and head",
            Self::PerHead { .. } => "static ones",
        }
    }
}

/// The error of blocks of two pools that differ; they are not converted.
pub(super) fn other_form(what: &'static str, from: impl fmt::Display, to: impl fmt::Display) -> Invalid {
    Invalid::new(what, from, format_args!("{to}, as in the blocks of the target"))
}

impl PackedForm {
    /// Returns the form of a layout's blocks.
    pub fn of(layout: &KvLayout) -> Self {
        let bits = |scales: &[f32]| scales.iter().map(|scale| scale.to_bits()).collect();
        Self {
            // They fit: a layout's planes are counted, and a block fits into memory.
            layers: layout.layers() as u32,
            heads: layout.kv_heads() as u32,
            head_dim: layout.head_dim() as u32,
            block_tokens: layout.block_tokens() as u32,
            dtype: layout.dtype(),
            is_latent: layout.parts() == KvPlanes::Latent,
            scales: match layout.scales() {
                Scales::Unit => FormScales::Unit,
                Scales::PerTokenHead => FormScales::PerTokenHead,
                Scales::PerHead { k, v } => FormScales::PerHead { k: bits(k), v: bits(v) },
            },
        }
    }

    /// Returns the number of heads in a block.
    pub fn heads(&self) -> u32 {
        self.heads
    }

    /// Returns the number of tokens of a block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Returns the bytes of a packed block; `usize::MAX` if an unchecked form overflows.
    pub fn packed_bytes(&self) -> usize {
        let head: usize = self.units().sum();
        [self.layers, self.block_tokens, self.heads]
            .into_iter()
            .fold(head * self.halves(), |bytes, count| bytes.saturating_mul(count as usize))
    }

    /// Returns a number that is equal for equal forms, and most likely different for others.
    pub fn fingerprint(&self) -> [u8; 16] {
        let mut bytes = b"kvpool packed form, version 1".to_vec();
        for number in [self.layers, self.heads, self.head_dim, self.block_tokens, u32::from(self.is_latent)] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.dtype.name().as_bytes());
        match &self.scales {
            FormScales::Unit => bytes.push(0),
            FormScales::PerTokenHead => bytes.push(1),
            FormScales::PerHead { k, v } => {
                bytes.push(2);
                bytes.extend(k.iter().chain(v).flat_map(|scale| scale.to_le_bytes()));
            }
        }
        twox_hash::XxHash3_128::oneshot(&bytes).to_le_bytes()
    }

    pub(super) fn check(&self) -> Result<(), Invalid> {
        let dimensions = [
            ("layers", self.layers),
            ("heads", self.heads),
            ("elements a head", self.head_dim),
            ("tokens", self.block_tokens),
        ];
        if let Some((what, _)) = dimensions.into_iter().find(|&(_, value)| value == 0) {
            return Err(Invalid::new(what, 0, "at least 1 in a block"));
        }
        // Each dimension is below 2^32, so the product cannot wrap.
        let bytes = dimensions
            .into_iter()
            .fold(16, |bytes: u128, (_, value)| bytes.saturating_mul(u128::from(value)));
        if bytes > isize::MAX as u128 {
            return Err(Invalid::new("bytes of a block", bytes, "a size within the address space"));
        }
        let FormScales::PerHead { k, v } = &self.scales else { return Ok(()) };
        let want = self.layers as usize * self.heads as usize;
        for (scales, want) in [(k, want), (v, if self.is_latent { 0 } else { want })] {
            if scales.len() != want {
                return Err(Invalid::new("static scales", scales.len(), want));
            }
        }
        Ok(())
    }

    /// Checks that blocks of this form fit into blocks of another, apart from the number of heads.
    /// `heads` are pairs of a head here and the same head there, whose static scales are compared.
    pub(super) fn check_fits(
        &self,
        target: &Self,
        heads: impl Iterator<Item = (u32, u32)> + Clone,
    ) -> Result<(), Invalid> {
        for (what, from, to) in [
            ("layers", self.layers, target.layers),
            ("elements a head", self.head_dim, target.head_dim),
            ("tokens", self.block_tokens, target.block_tokens),
        ] {
            if from != to {
                return Err(other_form(what, from, to));
            }
        }
        if self.dtype != target.dtype {
            return Err(other_form("element type", self.dtype, target.dtype));
        }
        if self.is_latent != target.is_latent {
            let name = |is_latent| if is_latent { "latent vectors" } else { "K and V" };
            return Err(other_form("contents", name(self.is_latent), name(target.is_latent)));
        }
        let (ours, theirs) = match (&self.scales, &target.scales) {
            (FormScales::PerHead { k, v }, FormScales::PerHead { k: to_k, v: to_v }) => {
                ([k, v], [to_k, to_v])
            }
            (ours, theirs) if ours == theirs => return Ok(()),
            (ours, theirs) => return Err(other_form("scales", ours.kind(), theirs.kind())),
        };
        for (part, (ours, theirs)) in
            ["static scales of K", "static scales of V"].into_iter().zip(ours.into_iter().zip(theirs))
        {
            for layer in 0..self.layers {
                let at = |scales: &Vec<u32>, form: &Self, head| {
                    scales.get(layer as usize * form.heads as usize + head as usize).copied()
                };
                let differs =
                    heads.clone().find(|&(from, to)| at(ours, self, from) != at(theirs, target, to));
                if let Some((_, head)) = differs {
                    let got = format_args!("others in layer {layer}, head {head} of the target");
                    return Err(Invalid::new(part, got, "equal ones, as values are not converted"));
                }
            }
        }
        Ok(())
    }

    /// Returns the number of rows of a token in each layer and kind: K and V, or the latent vector.
    pub(super) fn halves(&self) -> usize {
        if self.is_latent { 1 } else { 2 }
    }

    /// Returns the bytes of one head of a row, for each kind of row in a layer.
    pub(super) fn units(&self) -> impl Iterator<Item = usize> + use<> {
        let values = self.head_dim as usize * self.dtype.bytes();
        let scales = (self.scales == FormScales::PerTokenHead).then_some(size_of::<f32>());
        std::iter::once(values).chain(scales)
    }

    pub(super) fn rows(&self) -> usize {
        self.halves() * self.block_tokens as usize
    }

    pub(super) fn layers(&self) -> usize {
        self.layers as usize
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;
    use crate::storage::KvLayout;

    /// Nodes of different releases compare these numbers to exchange blocks.
    #[test]
    fn fingerprints_are_those_of_former_releases() {
        for (name, recorded) in [
            ("tiny", 263872269466395839674774609343607086454),
            ("qwen2.5-7b", 210603571854914527609629533120333209040),
        ] {
            let form = PackedForm::of(&KvLayout::named(name).unwrap());
            assert_eq!(u128::from_le_bytes(form.fingerprint()), recorded, "{name}");
        }
    }
}
