use crate::error::StorageError;
use crate::ids::{FrameId, Run};

use super::{KvLayout, Scales};

/// Checks that both layouts have the same packed form.
pub(crate) fn check_form(from: &KvLayout, to: &KvLayout) -> Result<(), StorageError> {
    if from.packs_as(to) {
        return Ok(());
    }
    // Scales are only named if they differ: two sets of static scales look the same.
    let differ = from.scales() != to.scales();
    let name = |layout: &KvLayout| match layout.scales() {
        _ if !differ => format!("{layout}").into(),
        Scales::Unit => format!("{layout}, without scales").into(),
        Scales::PerHead { .. } => format!("{layout}, with static scales of its own").into(),
        Scales::PerTokenHead => format!("{layout}, with a scale per token and head").into(),
    };
    Err(StorageError::OtherForm { from: name(from), to: name(to) })
}

pub(super) fn count(runs: &[Run]) -> usize {
    runs.iter().map(|run| run.len as usize).sum()
}

/// Removes up to `frames` frames from the end of the list, and returns their runs.
pub(super) fn take(runs: &mut Vec<Run>, frames: usize) -> Vec<Run> {
    let (mut left, mut taken) = (frames as u32, Vec::new());
    while left > 0 {
        let Some(run) = runs.last_mut() else { break };
        let len = run.len.min(left);
        taken.push(Run { start: run.start, len });
        *run = Run { start: FrameId(run.start.0 + len), len: run.len - len };
        left -= len;
        if run.len == 0 {
            runs.pop();
        }
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::Dtype;

    #[test]
    fn a_refusal_says_what_differs() {
        let layout = |heads, scales| {
            let builder = KvLayout::builder().layers(1).kv_heads(heads).head_dim(8).block_tokens(4);
            builder.dtype(Dtype::Fp8E4M3).scales(scales).build().unwrap()
        };
        let fixed = |scale: f32| Scales::PerHead { k: [scale].into(), v: [scale].into() };
        let all = [
            layout(1, Scales::Unit),
            layout(1, fixed(1.0)),
            layout(1, Scales::PerTokenHead),
            layout(2, Scales::Unit),
        ];
        for (one, from) in all.iter().enumerate() {
            for (other, to) in all.iter().enumerate() {
                let Err(StorageError::OtherForm { from, to }) = check_form(from, to) else {
                    assert_eq!(one, other);
                    continue;
                };
                assert!(one != other && from != to, "{from} and {to}");
            }
        }
        let refused = check_form(&all[1], &layout(1, fixed(2.0))).unwrap_err().to_string();
        assert!(refused.contains("static scales of its own"), "{refused}");
    }
}
