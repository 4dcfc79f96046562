//! Hits of several groups of layers at one boundary.
//!
//! ```text
//! boundary   each group is asked for its longest hit up to the boundary so far, until none is shorter
//! hit        references on what each needs there, group by group; a frame that is gone meanwhile:
//!            all are freed, and the search goes on below it
//! ```

use std::num::NonZeroUsize;

use crate::error::FrameError;
use crate::ids::BlockId;
use crate::prefix::{BlockHash, WindowBlocks};
use crate::sync::call;

use super::frame_pool::{FramePool, Shared};
use super::hashes::FrameKey;

/// Which frames before a boundary a group of layers needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Need {
    /// All: layers that attend to all tokens.
    All,
    /// The last ones, or all if there are fewer: layers that attend to a window. 0: a group that
    /// caches nothing, and has no say.
    Last(usize),
    /// The last one: layers with a state, whose key is that of the tokens up to the boundary.
    At,
}

/// What one group of layers contributes to a [hit](FramePool::hit_groups).
#[derive(Clone, Copy, Debug)]
pub struct HitGroup<'a> {
    /// Keys of the blocks of a prompt, in order.
    pub keys: &'a [FrameKey],
    /// Number of units in a block. Groups with blocks of 16 and of 64 tokens have 1 and 4: a hit
    /// ends with a whole block of each.
    pub block_units: NonZeroUsize,
    /// What it needs.
    pub need: Need,
}

struct Group {
    hashes: Vec<BlockHash>,
    units: usize,
    need: Need,
}

impl Group {
    /// Returns the number of last blocks that it needs; `None`: all.
    fn last(&self) -> Option<usize> {
        match self.need {
            Need::All => None,
            Need::Last(blocks) => Some(blocks),
            Need::At => Some(1),
        }
    }

    /// Returns the hashes that it needs at a boundary, a multiple of its units.
    fn needed(&self, boundary: usize) -> &[BlockHash] {
        let blocks = boundary / self.units;
        let last = self.last().unwrap_or(blocks);
        // A group without a say may have fewer.
        if last == 0 { &[] } else { &self.hashes[blocks.saturating_sub(last)..blocks] }
    }
}

impl FramePool {
    /// Takes a reference on each frame that the groups of layers need at the longest boundary at
    /// which all of them have it. Returns the boundary, in units, and the frames of each group,
    /// ascending by place: nothing is hit for a part of the groups.
    ///
    /// It counts as one lookup, of the first group's blocks.
    ///
    /// ```
    /// # use std::num::NonZeroUsize;
    /// # use kvpool::{AllocRequest, FrameGroup, FrameKey, FramePool, HitGroup, Need};
    /// let pool = FramePool::builder(10).build()?;
    /// let (mut full, mut window, mut frames) = (Vec::new(), Vec::new(), Vec::new());
    /// pool.keys(FrameGroup(0), ["a", "ab", "abc"], &mut full)?;
    /// pool.keys(FrameGroup(1), ["a", "ab", "abc"], &mut window)?;
    /// pool.allocate(AllocRequest::new(4), &mut frames)?;
    /// // All blocks of one group, and of the other those at the end of "ab".
    /// let keys: [&FrameKey; 4] = [&full[0], &full[1], &full[2], &window[1]];
    /// pool.register(&frames.iter().copied().zip(keys.map(|&key| key)).collect::<Vec<_>>())?;
    /// let group = |keys, need| HitGroup { keys, block_units: NonZeroUsize::MIN, need };
    /// let hit = pool.hit_groups(&[group(&full, Need::All), group(&window, Need::Last(1))])?;
    /// assert_eq!(hit, (2, vec![frames[..2].to_vec(), frames[3..].to_vec()]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FrameError::ForeignKey`], with the position among the keys of all groups.
    pub fn hit_groups(&self, groups: &[HitGroup<'_>]) -> Result<(usize, Vec<Vec<u32>>), FrameError> {
        let _call = call();
        let (mut checked, mut index) = (Vec::with_capacity(groups.len()), 0);
        for group in groups {
            let hashes = group.keys.iter().zip(index..).map(|(&key, index)| self.check_key(index, key));
            let hashes = hashes.collect::<Result<Vec<_>, _>>()?;
            index += hashes.len();
            checked.push(Group { hashes, units: group.block_units.get(), need: group.need });
        }
        let mut most = usize::MAX;
        let (boundary, frames) = loop {
            let boundary = self.boundary(&checked, most);
            let frames: Option<Vec<_>> = self.take_all(&checked, boundary);
            match frames {
                Some(frames) => break (boundary, frames),
                // Evicted since. A shorter boundary is a hit at the latest without any block.
                None => most = boundary - 1,
            }
        };
        if let Some(first) = checked.first() {
            let (cache, hits) = (&self.0.cache, boundary / first.units);
            cache.count_lookup(first.hashes.len(), hits, false);
            cache.looked_up(&first.hashes, hits, None, None);
        }
        Ok((boundary, frames))
    }

    /// Returns the longest boundary of at most this many units, without taking references.
    fn boundary(&self, groups: &[Group], most: usize) -> usize {
        let Shared { blocks, cache, .. } = &*self.0;
        let era = cache.era();
        let mut boundary = most;
        for group in groups.iter().filter(|group| group.need == Need::All) {
            let hashes = &group.hashes[..group.hashes.len().min(boundary / group.units)];
            boundary = cache.count_prefix(blocks, hashes, era).0 * group.units;
        }
        loop {
            let before = boundary;
            for group in groups {
                boundary = match group.last() {
                    // Its prefix is shorter too.
                    None => boundary / group.units * group.units,
                    Some(0) => boundary,
                    Some(window) => {
                        let hashes = &group.hashes[..group.hashes.len().min(boundary / group.units)];
                        let needs = WindowBlocks { sinks: 0, window };
                        cache.find_boundary(blocks, hashes, era, needs).0 * group.units
                    }
                };
            }
            if boundary == before || groups.iter().all(|group| group.last() == Some(0)) {
                // Without a group that has a say, there is no hit.
                return if boundary == usize::MAX { 0 } else { boundary };
            }
        }
    }

    /// Takes references on what all groups need at a boundary, or none.
    fn take_all(&self, groups: &[Group], boundary: usize) -> Option<Vec<Vec<u32>>> {
        let Shared { blocks, cache, .. } = &*self.0;
        let era = cache.era();
        let mut taken: Vec<Vec<u32>> = Vec::with_capacity(groups.len());
        for group in groups {
            let needed = group.needed(boundary);
            // First, so that a failed memory allocation leaks no reference.
            let mut frames = Vec::with_capacity(needed.len());
            let take = |&hash: &BlockHash| -> Option<BlockId> { cache.take(blocks, hash, era) };
            frames.extend(needed.iter().map_while(take).map(|id| blocks.frame(id).0));
            blocks.count_further(frames.len() as isize);
            let is_whole = frames.len() == needed.len();
            taken.push(frames);
            if !is_whole {
                taken.iter().for_each(|frames| self.free(frames).expect("these references are ours"));
                return None;
            }
        }
        Some(taken)
    }
}
