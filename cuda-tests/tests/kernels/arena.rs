//! The frames of a layout in memory, as a device would hold them, and the reference beside them.

use kvpool::storage::{KvLayout, KvPlanes, PlaneKind, PlanePart, Scales};
use kvpool::{FrameId, Run};
use kvpool_cuda::params::{Lane, PIECE_BYTES_MAX, Piece, unit};
use kvpool_testkit::rng::Rng;
use kvpool_testkit::scalar::ScalarStorage;

use crate::buffer::{Buffer, POISON};

pub const FRAMES: usize = 5;

/// A plane: `base` as an offset in the memory.
#[derive(Clone, Copy, Debug)]
struct Tile {
    layer: usize,
    kind: PlaneKind,
    part: PlanePart,
    base: usize,
    frame_stride: usize,
    bytes: usize,
}

pub struct Arena {
    pub layout: KvLayout,
    pub reference: ScalarStorage,
    pub memory: Buffer,
    tiles: Vec<Tile>,
}

impl Arena {
    /// Fills tiles with random bytes, and the gaps with poison. If `scattered`, the planes lie as
    /// an engine's tensors might: in any order, with a stride longer than a tile.
    pub fn new(layout: &KvLayout, scattered: bool, rng: &mut Rng) -> Self {
        let table = layout.planes(FRAMES).expect("a small layout");
        let mut bytes = table.bytes;
        let mut tiles: Vec<Tile> = table
            .planes
            .iter()
            .map(|plane| Tile {
                layer: plane.layer,
                kind: plane.kind,
                part: plane.part,
                base: plane.base,
                frame_stride: plane.frame_stride,
                bytes: plane.tile_bytes,
            })
            .collect();
        if scattered {
            bytes = 0;
            let mut order: Vec<usize> = (0..tiles.len()).collect();
            (1..order.len()).rev().for_each(|i| order.swap(i, rng.below(i + 1)));
            for index in order {
                let tile = &mut tiles[index];
                tile.base = bytes + 16 * rng.below(4);
                tile.frame_stride = tile.bytes.next_multiple_of(16) + 16 * rng.below(3);
                bytes = (tile.base + FRAMES * tile.frame_stride).next_multiple_of(16);
            }
        }
        let reference = ScalarStorage::new(layout.clone(), FRAMES);
        let memory = Buffer::poisoned(bytes, 0);
        let mut arena = Self { layout: layout.clone(), reference, memory, tiles };
        let packed = rng.bytes(FRAMES * layout.packed_bytes());
        arena.reference.unpack(&[ALL], &packed);
        let image = arena.image(&packed);
        arena.memory.bytes_mut().copy_from_slice(&image);
        arena
    }

    /// Returns the expected memory for these packed forms of the frames.
    fn image(&self, packed: &[u8]) -> Vec<u8> {
        let mut image = vec![POISON; self.memory.bytes().len()];
        for (frame, packed) in packed.chunks(self.layout.packed_bytes()).enumerate() {
            let mut rest = packed;
            for tile in &self.tiles {
                let (bytes, after) = rest.split_at(tile.bytes);
                image[tile.base + frame * tile.frame_stride..][..tile.bytes].copy_from_slice(bytes);
                rest = after;
            }
        }
        image
    }

    /// Asserts that the memory equals the reference byte for byte, and poison elsewhere.
    #[track_caller]
    pub fn check(&self, what: &str) {
        let want = self.image(&self.reference.pack(&[ALL]));
        let differs = self.memory.bytes().iter().zip(&want).position(|(got, want)| got != want);
        if let Some(at) = differs {
            let got = self.memory.bytes()[at];
            let tile = self
                .tiles
                .iter()
                .find(|tile| at >= tile.base && (at - tile.base) % tile.frame_stride < tile.bytes);
            panic!("{what}: byte {at} is {got:#x}, not {:#x}, near {tile:?}; {:?}", want[at], self.layout);
        }
        self.memory.check_guards();
    }

    /// Returns the layout's planes, split into pieces.
    pub fn pieces(&mut self) -> Vec<Piece> {
        let address = self.memory.address();
        let (mut pieces, mut packed_at) = (Vec::new(), 0);
        for tile in &self.tiles {
            for at in (0..tile.bytes).step_by(PIECE_BYTES_MAX as usize) {
                let bytes = (tile.bytes - at).min(PIECE_BYTES_MAX as usize);
                let base = address + (tile.base + at) as u64;
                pieces.push(Piece {
                    base,
                    frame_stride: tile.frame_stride as u64,
                    bytes: bytes as u32,
                    packed_at: packed_at as u32,
                });
                packed_at += bytes;
            }
        }
        assert_eq!(packed_at, self.layout.packed_bytes());
        pieces
    }

    /// Returns the lane of a layer's K or V or of their scales; a null lane if there is none.
    pub fn lane(&mut self, layer: usize, kind: PlaneKind, half: usize) -> Lane {
        let address = self.memory.address();
        let of_layer = |tile: &&Tile| tile.layer == layer && tile.kind == kind;
        let found = self.tiles.iter().filter(of_layer).find(|tile| match self.layout.parts() {
            KvPlanes::Separate => tile.part == [PlanePart::K, PlanePart::V][half],
            _ => true,
        });
        let Some(tile) = found else { return Lane::default() };
        let joined = self.layout.parts() == KvPlanes::Joined;
        let offset = if joined { half * tile.bytes / 2 } else { 0 };
        Lane { base: address + (tile.base + offset) as u64, frame_stride: tile.frame_stride as u64 }
    }

    /// Returns the static scales of a layer's K or V.
    pub fn static_scales(&self, layer: usize, half: usize) -> &[f32] {
        let heads = self.layout.kv_heads();
        match self.layout.scales() {
            Scales::PerHead { k, v } if half < self.reference.halves() => {
                &[k, v][half][layer * heads..][..heads]
            }
            _ => &[],
        }
    }
}

/// Every frame.
pub const ALL: Run = Run { start: FrameId(0), len: FRAMES as u32 };

/// Returns the unit of the pieces alone.
pub fn unit_of(pieces: &[Piece]) -> u32 {
    unit(pieces.iter().flat_map(|piece| [piece.base, piece.frame_stride, u64::from(piece.bytes)]))
}
