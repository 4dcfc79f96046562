//! The manifest of a transfer: what the target must know of the blocks before their bytes arrive.
//!
//! [`Manifest::check`] finds every contradiction in a peer's manifest before anything is allocated
//! for it. Checksums are XXH3-64 of packed blocks: they detect faults, not attacks by the peer.

use std::collections::HashMap;

use crate::config::FRAME_BITS;
use crate::error::Invalid;
use crate::ids::SequenceId;
use crate::prefix::{BlockHash, CACHE_GROUPS_MAX, ChainHash, ORIGINS_MAX, Origin, PrefixCache};
use crate::sequence::{Groups, ListOutline, Outline, Sequences, TOKENS_MAX};

use super::form::{PackedForm, other_form};
use super::heads::HeadRange;

/// Version of the manifests that this library writes and reads.
const VERSION: u32 = 6;

/// Maximum number of blocks before a cached one in its chain: no list is longer than a pool.
const DEPTH_MAX: u32 = (1 << FRAME_BITS) - 1;

/// Maximum number of extra keys of a sequence, each of which adds to the time to hash its blocks.
const EXTRA_KEYS_MAX: u32 = 4096;

/// The blocks of a transfer, which can be sent to another process with the feature `serde`.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Manifest {
    version: u32,
    form: PackedForm,
    hashing: Option<[u8; 16]>,
    heads: Option<HeadRange>,
    contents: Contents,
    checksums: Vec<u64>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(super) enum Contents {
    Sequence(Outline),
    Cached(CachedBlocks),
}

/// Cached blocks without an owner.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(super) struct CachedBlocks {
    /// The groups of layers of their pool.
    groups: Groups,
    pub(super) blocks: Vec<CachedBlock>,
    /// Whether they are a chain, whose end is evicted first; otherwise they are in eviction order.
    pub(super) is_chain: bool,
}

impl CachedBlocks {
    pub(super) fn new(of: &Sequences, blocks: Vec<CachedBlock>, is_chain: bool) -> Self {
        Self { groups: of.groups_of_layers(), blocks, is_chain }
    }

    /// Returns an error that says what differs, if the target has other groups of layers.
    pub(super) fn check_groups(&self, target: &Sequences) -> Result<(), Invalid> {
        self.groups.check(target)
    }
}

/// A cached block: its hash, the number of blocks before it in its list or checkpoint, its origins,
/// and its list or, behind these, its state.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(super) struct CachedBlock {
    pub(super) hash: BlockHash,
    pub(super) depth: u32,
    pub(super) origins: Vec<Origin>,
    pub(super) group: u32,
}

impl Manifest {
    pub(super) fn new(
        form: PackedForm,
        hashing: Option<[u8; 16]>,
        heads: Option<HeadRange>,
        contents: Contents,
        checksums: Vec<u64>,
    ) -> Self {
        Self { version: VERSION, form, hashing, heads, contents, checksums }
    }

    /// Checks a version. It is the first field of the manifests of all versions, a `u32`: a peer's
    /// can be read and checked before the rest, which another version may have changed.
    pub fn check_version(version: u32) -> Result<(), Invalid> {
        match version {
            VERSION => Ok(()),
            other => Err(Invalid::new("version of the manifest", other, VERSION)),
        }
    }

    /// Checks that the manifest does not contradict itself, and that a pool could hold its blocks.
    pub fn check(&self) -> Result<(), Invalid> {
        Self::check_version(self.version)?;
        self.form.check()?;
        if let Some(heads) = self.heads {
            heads.check(self.form.heads())?;
        }
        let blocks = self.blocks() as u64;
        at_most("blocks", blocks, u32::MAX)?;
        exactly("checksums", self.checksums.len() as u64, blocks)?;
        if self.bytes() == u64::MAX {
            return Err(Invalid::new("bytes", format_args!("{} or more", u64::MAX), "less"));
        }
        match &self.contents {
            Contents::Sequence(outline) => self.check_outline(outline),
            Contents::Cached(cached) => {
                if self.hashing.is_none() {
                    return Err(other_hashing());
                }
                let deepest = cached.blocks.iter().map(|block| block.depth).max().unwrap_or(0);
                at_most("blocks before a cached block", u64::from(deepest), DEPTH_MAX)?;
                for (place, block) in (0..).zip(&cached.blocks) {
                    cached.groups.check_group(block.group).map_err(|error| error.at(place))?;
                    check_origins(&block.origins)?;
                }
                check_distinct(&cached.blocks)
            }
        }
    }

    fn check_outline(&self, outline: &Outline) -> Result<(), Invalid> {
        let tokens_max = TOKENS_MAX as u32;
        at_most("tokens", u64::from(outline.length), tokens_max)?;
        at_most("committed tokens", u64::from(outline.committed), outline.length)?;
        at_most("tokens of states", u64::from(outline.state_tokens), outline.committed)?;
        for (what, count) in [("lists of blocks", outline.lists.len()), ("states", outline.states.len())] {
            at_most(what, count as u64, CACHE_GROUPS_MAX as u32)?;
        }
        outline.lists.iter().try_for_each(|list| self.check_list(outline, list))?;
        self.check_lists_agree(outline)
    }

    /// Checks that all lists are of the same tokens, each hashed as its group.
    fn check_lists_agree(&self, outline: &Outline) -> Result<(), Invalid> {
        let Some((first, others)) = outline.lists.split_first() else { return Ok(()) };
        let differs = |what: &str, place| {
            let got = format_args!("one with other {what}").to_string();
            Err(Invalid::new("list of blocks", got, "those of the first list").at(place))
        };
        for (place, list) in (1..).zip(others) {
            match (&first.known, &list.known) {
                (None, None) => {}
                (Some(first), Some(known)) => {
                    if let Some(what) = known.differs(first) {
                        return differs(what, place);
                    }
                }
                (None, Some(_)) | (Some(_), None) => return differs("known tokens", place),
            }
        }
        // The root of all layers, from which those of groups with equal blocks follow.
        let mut roots = HashMap::new();
        for (place, (group, list)) in (1..).zip(&outline.lists).enumerate() {
            let Some(known) = &list.known else { continue };
            let root = known.root.of_group(group);
            if *roots.entry(list.keeps.block_tokens).or_insert(root) != root {
                return differs("roots of hashes", place);
            }
        }
        Ok(())
    }

    fn check_list(&self, outline: &Outline, list: &ListOutline) -> Result<(), Invalid> {
        let block_tokens = u64::from(list.keeps.block_tokens);
        if block_tokens == 0 {
            return Err(Invalid::new("tokens", 0, "at least 1 in a block"));
        }
        list.keeps.check_front(list.front, outline)?;
        let Some(known) = &list.known else { return Ok(()) };
        if self.hashing.is_none() {
            return Err(other_hashing());
        }
        check_origins(&known.origins)?;
        known.versions.check(outline.length as usize, !known.is_stale)?;
        let announced = known.tokens.len() as u64;
        at_most("announced tokens", announced, TOKENS_MAX as u32)?;
        at_most("extra keys", known.extra_keys.len() as u64, EXTRA_KEYS_MAX)?;
        for (place, key) in (0..).zip(&known.extra_keys) {
            key.check(0, TOKENS_MAX).map_err(|error| error.at(place))?;
        }
        exactly("hashes", known.hashes.len() as u64, announced / block_tokens)?;
        let want = u64::from(outline.committed);
        match known.is_cut {
            // Unknown tokens are final behind the known ones.
            true if announced < want => Ok(()),
            true => {
                let limit = format_args!("fewer than the {want} committed tokens, behind a cut").to_string();
                Err(Invalid::new("announced tokens", announced, limit))
            }
            false => exactly("announced tokens", announced.min(want), want),
        }
    }

    /// Checks the hashes against the tokens, if there are tokens and the pool hashes alike.
    pub(super) fn check_hashes(&self, cache: &PrefixCache) -> Result<(), Invalid> {
        let Contents::Sequence(outline) = &self.contents else { return Ok(()) };
        for (list, known) in (0..).zip(outline.lists.iter().map(|list| &list.known)) {
            let Some(known) = known.as_ref().filter(|known| !known.is_stale) else { continue };
            let (mut place, mut wrong, hasher) = (0, None, cache.hasher_of(list));
            let mut chain = ChainHash::after(known.root, 0).with(hasher, &known.extra_keys);
            let whole = known.tokens.len() / hasher.block_tokens() * hasher.block_tokens();
            chain.fill(hasher, &known.tokens[..whole], |hash| {
                if known.hashes.get(place) != Some(&hash) {
                    wrong.get_or_insert(place);
                }
                place += 1;
            });
            if let Some(place) = wrong {
                let limit = "that of the manifest's tokens";
                return Err(Invalid::new("hashes", "another hash", limit).at(place));
            }
        }
        Ok(())
    }

    /// Checks that the source of this manifest holds other heads of the same blocks.
    pub(super) fn check_same_blocks(&self, other: &Self) -> Result<(), Invalid> {
        let without_times = |contents: &Contents| {
            let mut contents = contents.clone();
            if let Contents::Sequence(outline) = &mut contents {
                for known in outline.lists.iter_mut().flat_map(|list| &mut list.known) {
                    (known.keep_left_ms, known.returns_in_ms) = (None, None);
                    // Each source has its own cache; the target joins the origins. With batches of
                    // other weights, its hashes are stale; those of the hashes are in the root.
                    (known.is_stale, known.origins, known.versions) = Default::default();
                }
            }
            contents
        };
        let limit = "that of the first source's manifest";
        if self.hashing != other.hashing {
            let [first, got] = [self, other].map(|manifest| {
                let text = |print| format!("{:032x}", u128::from_be_bytes(print));
                manifest.hashing.map_or_else(|| "none".to_owned(), text)
            });
            return Err(Invalid::new("hashing", got, format_args!("{first}, {limit}")));
        }
        if without_times(&self.contents) != without_times(&other.contents) {
            return Err(Invalid::new("sequence", "another one", limit));
        }
        Ok(())
    }

    pub(super) fn contents(&self) -> &Contents {
        &self.contents
    }

    /// Returns the id of the sequence; `None` for cached blocks.
    pub fn sequence(&self) -> Option<SequenceId> {
        match &self.contents {
            Contents::Sequence(outline) => Some(outline.id),
            Contents::Cached(_) => None,
        }
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> usize {
        match &self.contents {
            Contents::Sequence(outline) => outline.blocks() as usize,
            Contents::Cached(cached) => cached.blocks.len(),
        }
    }

    /// Returns the packed bytes of all blocks; `u64::MAX` if an unchecked manifest overflows.
    pub fn bytes(&self) -> u64 {
        (self.blocks() as u64).saturating_mul(self.form.packed_bytes() as u64)
    }

    /// Returns the packed form of the blocks.
    pub fn form(&self) -> &PackedForm {
        &self.form
    }

    /// Returns the hashing's [fingerprint](PrefixHasher::fingerprint), if there is a prefix cache.
    pub(super) fn hashing(&self) -> Option<[u8; 16]> {
        self.hashing
    }

    /// Returns the heads that the blocks hold, if the source stated its rank.
    pub fn heads(&self) -> Option<HeadRange> {
        self.heads
    }

    /// Returns the XXH3-64 of each packed block.
    pub fn checksums(&self) -> &[u64] {
        &self.checksums
    }
}

/// The error of cached blocks that would never be found here.
pub(super) fn other_hashing() -> Invalid {
    let limit = "the hashing and key of the target; configure the same for both";
    Invalid::new("hashing", "that of another prefix cache, or none", limit)
}

fn at_most(what: &'static str, got: u64, max: u32) -> Result<(), Invalid> {
    let max = u64::from(max);
    if got > max { Err(Invalid::new(what, got, format_args!("at most {max}"))) } else { Ok(()) }
}

fn exactly(what: &'static str, got: u64, want: u64) -> Result<(), Invalid> {
    if got == want {
        return Ok(());
    }
    Err(Invalid::new(what, got, format_args!("{want}, by the other fields of the manifest")))
}

pub(super) fn check_origins(origins: &[Origin]) -> Result<(), Invalid> {
    at_most("origins", origins.len() as u64, ORIGINS_MAX as u32)?;
    match (0..).zip(origins.windows(2)).find(|(_, pair)| pair[0].cache >= pair[1].cache) {
        Some((place, _)) => Err(Invalid::new("origins", "one out of order", "ascending caches").at(place)),
        None => Ok(()),
    }
}

pub(super) fn check_distinct(blocks: &[CachedBlock]) -> Result<(), Invalid> {
    let mut seen = HashMap::new();
    for (second, block) in (0..).zip(blocks) {
        if let Some(first) = seen.insert(block.hash, second) {
            let got = format_args!("the hash of the one at index {first}");
            return Err(Invalid::new("blocks", got, "one of its own").at(second));
        }
    }
    Ok(())
}

pub(super) fn check_same_form(from: &PackedForm, to: &PackedForm) -> Result<(), Invalid> {
    if from.heads() != to.heads() {
        return Err(other_form("heads", from.heads(), to.heads()));
    }
    from.check_fits(to, (0..from.heads()).map(|head| (head, head)))
}
