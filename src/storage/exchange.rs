//! Copies between storages through a host buffer.

use crate::error::StorageError;
use crate::ids::{FrameId, Run};

use super::{KvLayout, Scales, Storage};

/// Bytes per transfer, but at least one frame.
const CHUNK_BYTES: usize = 8 << 20;

/// Checks that both layouts have the same packed form.
///
/// The form depends neither on the arrangement nor on whether K and V are joined.
pub(crate) fn check_form(from: &KvLayout, to: &KvLayout) -> Result<(), StorageError> {
    if from.packs_as(to) {
        return Ok(());
    }
    // Scales are only named where they differ: layouts with two sets of static scales look the
    // same.
    let differ = from.scales() != to.scales();
    let name = |layout: &KvLayout| match layout.scales() {
        _ if !differ => format!("{layout}").into(),
        Scales::Unit => format!("{layout}, without scales").into(),
        Scales::PerHead { .. } => format!("{layout}, with static scales of its own").into(),
        Scales::PerTokenHead => format!("{layout}, with a scale per token and head").into(),
    };
    Err(StorageError::OtherForm { from: name(from), to: name(to) })
}

/// Returns the total number of frames in the runs.
fn count(runs: &[Run]) -> usize {
    runs.iter().map(|run| run.len as usize).sum()
}

/// Removes up to `frames` frames from the last of the runs, and returns them.
fn take(runs: &mut Vec<Run>, frames: usize) -> Vec<Run> {
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

/// Checks the layouts and the runs before any byte moves. Returns the number of frames.
pub(crate) fn check_runs<S: Storage + ?Sized>(
    target: &S,
    source: &dyn Storage,
    from: &[Run],
    to: &[Run],
) -> Result<usize, StorageError> {
    check_form(source.layout(), target.layout())?;
    let (frames, want) = (count(from), count(to));
    if frames != want {
        return Err(StorageError::RunsDiffer { from: frames, to: want });
    }
    super::check::runs(from, source.frames())?;
    super::check::runs_disjoint(to, target.frames())?;
    Ok(frames)
}

/// Implements [`Storage::receive`] through a host buffer.
///
/// # Safety
/// The frame rule, for the frames of both storages.
pub(crate) unsafe fn through_host<S: Storage + ?Sized>(
    target: &S,
    source: &dyn Storage,
    from: &[Run],
    to: &[Run],
) -> Result<(), StorageError> {
    let frames = check_runs(target, source, from, to)?;
    let per_frame = source.layout().packed_bytes();
    let chunk = (CHUNK_BYTES / per_frame).clamp(1, frames.max(1));
    let mut buffer = vec![0; chunk * per_frame];
    // Reversed, because `take` removes from the end.
    let reversed = |runs: &[Run]| runs.iter().rev().copied().filter(|run| run.len > 0).collect::<Vec<_>>();
    let (mut from, mut to) = (reversed(from), reversed(to));
    while !from.is_empty() {
        let (here, there) = (take(&mut from, chunk), take(&mut to, chunk));
        let bytes = &mut buffer[..count(&here) * per_frame];
        // SAFETY: the caller's promise.
        unsafe {
            source.pack(&here, bytes)?;
            target.unpack(&there, bytes)?;
        }
    }
    Ok(())
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
