//! A model of a node's pool: counts of blocks, the sequences with their owner, and the bytes of
//! copies under way.

use std::collections::{BTreeMap, BTreeSet};

use kvpool_node::protocol::*;
use serde::{Deserialize, Serialize};

/// What a source says about its copy.
#[derive(Clone, Serialize, Deserialize, PartialEq, Eq, Debug)]
pub struct Manifest {
    /// `None` for cached blocks.
    pub sequence: Option<u64>,
    pub tokens: u64,
    /// Per place: the key of a cached block, or the number of the place.
    pub keys: Vec<u32>,
}

impl Manifest {
    /// The bytes of a place.
    pub fn bytes(&self, place: u32) -> u64 {
        let mut bytes = u64::from(self.keys[place as usize]);
        for part in [self.sequence.unwrap_or(0), self.tokens] {
            bytes = (bytes ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        }
        bytes | 1
    }
}

pub struct Sequence {
    pub blocks: u32,
    pub tokens: u64,
    /// The machine for which it is held; such a sequence does not run.
    pub held: Option<MachineId>,
}

#[derive(Clone)]
pub struct Export {
    pub manifest: Manifest,
    pub kind: Kind,
    /// Places that are still exported.
    pub places: Vec<u32>,
}

pub struct Import {
    pub manifest: Manifest,
    pub blocks: u32,
    /// Places that are here or have a block.
    pub accepted: Vec<u32>,
    pub content: Vec<Option<u64>>,
    pub tag: u64,
}

pub struct Pool {
    pub capacity: u32,
    pub free: u32,
    pub sequences: BTreeMap<u64, Sequence>,
    /// Cached blocks, with the exports that hold them.
    pub cache: BTreeMap<u32, u32>,
    pub exports: BTreeMap<MachineId, Export>,
    pub imports: BTreeMap<MachineId, Import>,
}

impl Pool {
    pub fn new(capacity: u32) -> Self {
        let (sequences, cache, exports, imports) = Default::default();
        Self { capacity, free: capacity, sequences, cache, exports, imports }
    }

    pub fn add(&mut self, sequence: u64, blocks: u32) -> bool {
        if self.free < blocks {
            return false;
        }
        self.free -= blocks;
        self.sequences.insert(sequence, Sequence { blocks, tokens: 0, held: None });
        true
    }

    pub fn cache(&mut self, key: u32) {
        if self.free > 0 && !self.cache.contains_key(&key) {
            self.free -= 1;
            self.cache.insert(key, 0);
        }
    }

    pub fn is_runnable(&self, sequence: u64) -> bool {
        self.sequences.get(&sequence).is_some_and(|own| own.held.is_none())
    }

    pub fn has(&self, sequence: u64) -> bool {
        self.sequences.contains_key(&sequence)
    }

    pub fn export_sequence(
        &mut self,
        machine: MachineId,
        sequence: u64,
        copy: u64,
        kind: Kind,
    ) -> Option<Manifest> {
        let own = self.sequences.get(&sequence)?;
        // One that arrived behind the request was not given away.
        let expected = (kind == Kind::Migrate).then_some(machine);
        if own.held != expected {
            return None;
        }
        let keys = (0..own.blocks).collect();
        let manifest = Manifest { sequence: Some(copy), tokens: own.tokens, keys };
        let places = (0..manifest.keys.len() as u32).collect();
        self.exports.insert(machine, Export { manifest: manifest.clone(), kind, places });
        Some(manifest)
    }

    pub fn export_cached(&mut self, machine: MachineId, keys: &[u32], kind: Kind) -> Option<Manifest> {
        let keys: Vec<u32> = keys.iter().copied().filter(|key| self.cache.contains_key(key)).collect();
        if keys.is_empty() {
            return None;
        }
        for key in &keys {
            *self.cache.get_mut(key).unwrap() += 1;
        }
        let manifest = Manifest { sequence: None, tokens: 0, keys };
        let places = (0..manifest.keys.len() as u32).collect();
        self.exports.insert(machine, Export { manifest: manifest.clone(), kind, places });
        Some(manifest)
    }

    /// The target has the copy.
    pub fn finish(&mut self, machine: MachineId) -> Result<(), String> {
        let export = self.exports.remove(&machine).ok_or("an export is finished that does not exist")?;
        match export.kind {
            Kind::Migrate => {
                let sequence = export.manifest.sequence.unwrap();
                let own =
                    self.sequences.remove(&sequence).ok_or("a sequence is closed that does not exist")?;
                if own.held != Some(machine) {
                    return Err(format!("sequence {sequence} is closed while another machine has it"));
                }
                self.free += own.blocks;
            }
            Kind::Replicate => {}
            kind => self.unhold(&export.manifest, &export.places, kind == Kind::Cached),
        }
        Ok(())
    }

    /// The source goes on with its copy, also if the export has not ended yet.
    pub fn restore(&mut self, machine: MachineId) {
        for own in self.sequences.values_mut().filter(|own| own.held == Some(machine)) {
            own.held = None;
        }
        if let Some(export) = self.exports.remove(&machine)
            && export.manifest.sequence.is_none()
        {
            self.unhold(&export.manifest, &export.places, false);
        }
    }

    /// Of cached blocks, only these are exported from now on.
    pub fn retain(&mut self, machine: MachineId, accepted: &Places) {
        let Some(export) = self.exports.get_mut(&machine) else { return };
        let accepted: BTreeSet<u32> = accepted.iter().collect();
        let (kept, others) = export.places.iter().partition(|place| accepted.contains(place));
        export.places = kept;
        let manifest = export.manifest.clone();
        self.unhold(&manifest, &others, false);
    }

    fn unhold(&mut self, manifest: &Manifest, places: &[u32], evict: bool) {
        for key in places.iter().map(|&place| &manifest.keys[place as usize]) {
            let holds = self.cache.get_mut(key).expect("a held block is cached");
            *holds -= 1;
            if evict && *holds == 0 {
                self.cache.remove(key);
                self.free += 1;
            }
        }
    }

    /// Reserves blocks; `shared` places have their bytes here already.
    pub fn reserve(&mut self, machine: MachineId, bytes: &[u8], shared: u32, tag: u64) -> Work {
        let free = self.available();
        let refuse = |reason| Work::ReserveRefused { reason, free: u64::from(free) };
        let Ok(manifest) = postcard::from_bytes::<Manifest>(bytes) else {
            return refuse(Refusal::Manifest(Text::new("not readable")));
        };
        let same = |import: &Import| import.manifest.sequence == manifest.sequence;
        if let Some(sequence) = manifest.sequence
            && (self.has(sequence) || self.imports.values().any(same))
        {
            return refuse(Refusal::Exists);
        }
        let is_missing = |place: &u32| match manifest.sequence {
            Some(_) => *place >= shared,
            None => !self.cache.contains_key(&manifest.keys[*place as usize]),
        };
        let places = manifest.keys.len() as u32;
        let mut missing: Vec<u32> = (0..places).filter(is_missing).collect();
        let mut accepted: Vec<u32> = (0..places).collect();
        if manifest.sequence.is_none() && free > 0 {
            // As many as there is room for.
            let absent = missing.split_off(missing.len().min(free as usize));
            accepted.retain(|place| !absent.contains(place));
        }
        let blocks = if manifest.sequence.is_some() { places } else { missing.len() as u32 };
        if blocks > free {
            return refuse(Refusal::Full { needed: u64::from(blocks) });
        }
        let known: BTreeSet<u32> =
            accepted.iter().copied().filter(|place| !missing.contains(place)).collect();
        let content =
            (0..places).map(|place| known.contains(&place).then(|| manifest.bytes(place))).collect();
        self.evict(blocks);
        self.free -= blocks;
        let places = Places::of(accepted.iter().copied()).unwrap();
        self.imports.insert(machine, Import { manifest, blocks, accepted, content, tag });
        let grant = Grant { tag, ..Grant::default() };
        Work::Reserved { accepted: places, missing: Places::of(missing).unwrap(), grant }
    }

    fn available(&self) -> u32 {
        self.free + self.cache.values().filter(|&&holds| holds == 0).count() as u32
    }

    fn evict(&mut self, blocks: u32) {
        while self.free < blocks {
            let key = *self.cache.iter().find(|(_, holds)| **holds == 0).expect("checked").0;
            self.cache.remove(&key);
            self.free += 1;
        }
    }

    /// A write of the transport; nothing happens unless the grant is valid.
    pub fn write(&mut self, tag: u64, place: u32, bytes: u64) -> bool {
        let import = self.imports.values_mut().find(|import| import.tag == tag);
        import.map(|import| import.content[place as usize] = Some(bytes)).is_some()
    }

    pub fn verify(&mut self, machine: MachineId, attempt: Attempt, tag: u64) -> Work {
        let Some(import) = self.imports.get_mut(&machine) else {
            return Work::VerifyFailed(Text::new("released"));
        };
        let wrong = |place: &u32| import.content[*place as usize] != Some(import.manifest.bytes(*place));
        let bad: Vec<u32> = import.accepted.iter().copied().filter(wrong).collect();
        import.tag = tag;
        Work::Verified { attempt, bad: Places::of(bad).unwrap(), grant: Grant { tag, ..Grant::default() } }
    }

    pub fn commit(&mut self, machine: MachineId) -> Result<Option<u64>, String> {
        let import = self.imports.remove(&machine).ok_or("a commit of what is not reserved, or committed")?;
        let manifest = &import.manifest;
        for &place in &import.accepted {
            if import.content[place as usize] != Some(manifest.bytes(place)) {
                return Err(format!("a commit of wrong bytes at place {place}"));
            }
        }
        match manifest.sequence {
            Some(sequence) => {
                let own = Sequence { blocks: import.blocks, tokens: manifest.tokens, held: None };
                self.sequences.insert(sequence, own);
            }
            None => {
                self.free += import.blocks;
                import.accepted.iter().for_each(|&place| self.cache(manifest.keys[place as usize]));
            }
        }
        Ok(manifest.sequence)
    }

    pub fn release(&mut self, machine: MachineId) {
        if let Some(import) = self.imports.remove(&machine) {
            self.free += import.blocks;
        }
    }

    /// Blocks are conserved at every step.
    pub fn check(&self) -> Result<(), String> {
        let owned: u32 = self.sequences.values().map(|own| own.blocks).sum();
        let reserved: u32 = self.imports.values().map(|import| import.blocks).sum();
        let cached = self.cache.len() as u32;
        if self.free + owned + reserved + cached == self.capacity {
            return Ok(());
        }
        Err(format!(
            "{} free + {owned} owned + {reserved} reserved + {cached} cached blocks are not {}",
            self.free, self.capacity
        ))
    }

    /// Nothing is left of any migration.
    pub fn check_quiet(&self) -> Result<(), String> {
        let held = self.sequences.values().filter(|own| own.held.is_some()).count();
        let holds: u32 = self.cache.values().sum();
        match (self.imports.len(), self.exports.len(), held, holds) {
            (0, 0, 0, 0) => Ok(()),
            (imports, exports, ..) => Err(format!(
                "left behind: {imports} reservations, {exports} exports, {held} held sequences, {holds} holds"
            )),
        }
    }
}
