//! The tree, its LRU list and the free blocks: what the mutex guards.
//!
//! Equations: `nodes[n].refs == children of n + requests that end in n`, and
//! `nodes[n].tokens.len() == block_tokens * nodes[n].blocks.len()`.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::sync::Arc;

use kvpool::prefix::{Chain, HashKey, Hashing, PrefixHasher, PrefixKeys, PrefixRoot};

use crate::reuse::locked::Identity;

/// The root has no blocks, is never evicted, and is the end of the LRU list.
pub const ROOT: usize = 0;

/// A sequence.
pub struct Request {
    pub blocks: Vec<u32>,
    /// Node in which its registered blocks end.
    pub node: usize,
    /// Leading blocks that are in the tree, or of which there are others in the tree.
    pub registered: usize,
    /// The latter.
    pub copies: Vec<u32>,
    /// Tokens behind the registered blocks.
    pub rest: Vec<u32>,
    pub tokens: usize,
    pub cached: usize,
}

#[derive(Default)]
struct Node {
    parent: usize,
    /// By the hash of the first block of each.
    children: HashMap<u128, usize, BuildHasherDefault<Identity>>,
    tokens: Vec<u32>,
    blocks: Vec<u32>,
    refs: usize,
    /// Number of the release that used it last.
    used: u64,
    /// Neighbours in the list of leaves without references.
    older: usize,
    newer: usize,
}

/// State guarded by the lock.
pub struct Tree {
    nodes: Vec<Node>,
    /// Places in `nodes` to reuse.
    unused: Vec<usize>,
    pub free: Vec<u32>,
    releases: u64,
    hash: Arc<FirstHash>,
}

/// Hashes single blocks, with a random key: prompts cannot be made to collide.
pub struct FirstHash {
    hasher: PrefixHasher,
    root: PrefixRoot,
    pub block_tokens: usize,
}

impl FirstHash {
    pub fn new(block_tokens: usize) -> Self {
        let key = HashKey::random().expect("the system has random numbers");
        let hasher = PrefixHasher::new(Hashing::Fast, &key, block_tokens).expect("blocks have tokens");
        let root = hasher.root(&PrefixKeys::new()).expect("no keys are valid keys");
        Self { hasher, root, block_tokens }
    }

    /// Returns the hash of the first block; 0 if there is none.
    #[inline]
    pub fn of(&self, tokens: &[u32]) -> u128 {
        let first = &tokens[..self.block_tokens.min(tokens.len())];
        let mut key = 0;
        Chain::new(self.root).extend(&self.hasher, first, |hash| key = hash.key());
        key
    }

    /// Returns the number of leading blocks that are equal.
    #[inline]
    fn equal(&self, a: &[u32], b: &[u32]) -> usize {
        let len = a.len().min(b.len()) / self.block_tokens * self.block_tokens;
        if a[..len] == b[..len] {
            return len / self.block_tokens;
        }
        let pairs = a.chunks_exact(self.block_tokens).zip(b.chunks_exact(self.block_tokens));
        pairs.take_while(|(a, b)| a == b).count()
    }
}

impl Tree {
    pub fn new(blocks: usize, hash: Arc<FirstHash>) -> Self {
        let root = Node { refs: 1, ..Node::default() };
        Self {
            nodes: vec![root],
            unused: Vec::new(),
            free: (0..blocks as u32).rev().collect(),
            releases: 0,
            hash,
        }
    }

    /// Descends from a node along whole blocks of tokens, the first of which has the given hash.
    /// Returns the last node and adds the blocks on the way to `out`.
    #[inline]
    pub fn descend(
        &mut self,
        mut at: usize,
        mut tokens: &[u32],
        mut first: u128,
        out: &mut Vec<u32>,
    ) -> usize {
        while tokens.len() >= self.hash.block_tokens {
            let Some(&child) = self.nodes[at].children.get(&first) else { break };
            let node = &self.nodes[child];
            let equal = self.hash.equal(&node.tokens, tokens);
            if equal == 0 {
                break;
            }
            out.extend_from_slice(&node.blocks[..equal]);
            at = if equal < node.blocks.len() { self.divide(child, first, equal) } else { child };
            tokens = &tokens[equal * self.hash.block_tokens..];
            first = self.hash.of(tokens);
        }
        at
    }

    /// Moves the first blocks of a node to a new parent, which it returns. Requests that end in the
    /// node still do.
    fn divide(&mut self, at: usize, first: u128, blocks: usize) -> usize {
        let tokens = blocks * self.hash.block_tokens;
        let node = &mut self.nodes[at];
        let mut upper = Node { parent: node.parent, refs: 1, ..Node::default() };
        upper.tokens.extend(node.tokens.drain(..tokens));
        upper.blocks.extend(node.blocks.drain(..blocks));
        upper.children.insert(self.hash.of(&node.tokens), at);
        let parent = self.add(first, upper);
        self.nodes[at].parent = parent;
        parent
    }

    /// Adds a node as a child of its parent, or in the place of one.
    fn add(&mut self, first: u128, node: Node) -> usize {
        let parent = node.parent;
        let at = if let Some(at) = self.unused.pop() {
            self.nodes[at] = node;
            at
        } else {
            self.nodes.push(node);
            self.nodes.len() - 1
        };
        self.nodes[parent].children.insert(first, at);
        at
    }

    #[inline]
    pub fn share(&mut self, at: usize) {
        if self.nodes[at].refs == 0 {
            self.unlink(at);
        }
        self.nodes[at].refs += 1;
    }

    #[inline]
    pub fn release(&mut self, at: usize) {
        self.releases += 1;
        let node = &mut self.nodes[at];
        node.refs -= 1;
        node.used = self.releases;
        if node.refs == 0 {
            self.link_before(ROOT, at);
        }
    }

    fn unlink(&mut self, at: usize) {
        let Node { older, newer, .. } = self.nodes[at];
        self.nodes[older].newer = newer;
        self.nodes[newer].older = older;
    }

    /// Links a leaf in front of a newer one; the root is newer than all.
    fn link_before(&mut self, newer: usize, at: usize) {
        let older = self.nodes[newer].older;
        (self.nodes[at].older, self.nodes[at].newer) = (older, newer);
        self.nodes[older].newer = at;
        self.nodes[newer].older = at;
    }

    #[inline]
    pub fn allocate(&mut self, count: usize, out: &mut Vec<u32>) {
        while self.free.len() < count {
            self.evict(count - self.free.len());
        }
        out.extend(self.free.drain(self.free.len() - count..).rev());
    }

    /// Frees the oldest leaf, or `most` blocks of its end.
    fn evict(&mut self, most: usize) {
        let oldest = self.nodes[ROOT].newer;
        assert_ne!(oldest, ROOT, "enough blocks are free");
        let node = &mut self.nodes[oldest];
        let kept = node.blocks.len().saturating_sub(most);
        self.free.extend(node.blocks.drain(kept..));
        if kept > 0 {
            node.tokens.truncate(kept * self.hash.block_tokens);
            return;
        }
        self.unlink(oldest);
        let Node { parent, tokens, used, .. } = std::mem::take(&mut self.nodes[oldest]);
        self.unused.push(oldest);
        let first = self.hash.of(&tokens);
        let above = &mut self.nodes[parent];
        above.children.remove(&first);
        above.refs -= 1;
        above.used = above.used.max(used);
        if above.refs == 0 {
            // Every use of a child used its parent too. Few leaves are older than the parent, none
            // if no request ended in it since.
            let (used, mut newer) = (above.used, self.nodes[ROOT].newer);
            while newer != ROOT && self.nodes[newer].used < used {
                newer = self.nodes[newer].newer;
            }
            self.link_before(newer, parent);
        }
    }

    /// Evicts all leaves, until nothing without references is left.
    pub fn clear(&mut self) {
        while self.nodes[ROOT].newer != ROOT {
            self.evict(usize::MAX);
        }
    }

    /// Caches the full blocks of a request that are not cached yet.
    pub fn register(&mut self, request: &mut Request, first: u128) {
        let block_tokens = self.hash.block_tokens;
        let full = request.rest.len() / block_tokens;
        let end = request.registered + full;
        let last = &mut self.nodes[request.node];
        if request.node != ROOT && last.refs == 1 {
            // No other request ends here, and nothing follows: the run becomes longer.
            last.tokens.extend(request.rest.drain(..full * block_tokens));
            last.blocks.extend_from_slice(&request.blocks[request.registered..end]);
            request.registered = end;
            return;
        }
        let tail = request.rest.split_off(full * block_tokens);
        let mut tokens = std::mem::replace(&mut request.rest, tail);
        // Another request may have registered a part first. The copies of this one stay in its
        // table, and are free at its end.
        let mut cached = Vec::new();
        let mut at = self.descend(request.node, &tokens, first, &mut cached);
        let begin = request.registered + cached.len();
        request.copies.extend_from_slice(&request.blocks[request.registered..begin]);
        self.share(at);
        if begin < end {
            // The reference is that of a child.
            tokens.drain(..cached.len() * block_tokens);
            let first = if cached.is_empty() { first } else { self.hash.of(&tokens) };
            let blocks = request.blocks[begin..end].to_vec();
            at = self.add(first, Node { parent: at, tokens, blocks, refs: 1, ..Node::default() });
        }
        self.release(request.node);
        (request.node, request.registered) = (at, end);
    }

    /// Returns the number of blocks that no request owns.
    pub fn unowned(&self) -> usize {
        let mut is_owned = vec![false; self.nodes.len()];
        for (at, node) in self.nodes.iter().enumerate().skip(1) {
            if node.refs > node.children.len() {
                let path = std::iter::successors(Some(at), |&at| Some(self.nodes[at].parent));
                path.take_while(|&at| at != ROOT).for_each(|at| is_owned[at] = true);
            }
        }
        let cached = self.nodes.iter().zip(is_owned).filter(|(_, is_owned)| !is_owned);
        self.free.len() + cached.map(|(node, _)| node.blocks.len()).sum::<usize>()
    }
}
