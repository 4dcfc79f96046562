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
    /// Number of the part, of a copy that comes in parts.
    pub part: u16,
    /// Per place: the key of a cached block, or the number of the place.
    pub keys: Vec<u32>,
}

impl Manifest {
    /// The bytes of a place.
    pub fn bytes(&self, place: u32) -> u64 {
        let mut bytes = u64::from(self.keys[place as usize]);
        for part in [self.sequence.unwrap_or(0), self.tokens, u64::from(self.part)] {
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

/// The number of a part of a sequence that several nodes have.
pub fn part_of(group: u64, index: u64) -> u64 {
    100 + 10 * group + index
}

/// The number of the sequence whose part this is.
pub fn whole_of(sequence: u64) -> Option<u64> {
    (100..1_000).contains(&sequence).then_some(sequence / 10 * 10 + 9)
}

#[derive(Clone)]
pub struct Export {
    /// The sequence here; `None` for cached blocks.
    pub sequence: Option<u64>,
    /// Era of the cache when it began.
    pub era: u64,
    pub manifest: Manifest,
    pub kind: Kind,
    /// Places that are still exported.
    pub places: Vec<u32>,
}

pub struct Import {
    pub manifest: Manifest,
    pub part: Option<CopyPart>,
    pub blocks: u32,
    /// Places that are here or have a block.
    pub accepted: Vec<u32>,
    pub content: Vec<Option<u64>>,
    pub tag: u64,
}

#[derive(Default)]
pub struct Cached {
    pub holds: u32,
    /// Not found any more; gone once no export holds it.
    pub is_cleared: bool,
}

pub struct Pool {
    pub capacity: u32,
    pub free: u32,
    pub sequences: BTreeMap<u64, Sequence>,
    /// Cached blocks, with the number of exports that hold them.
    pub cache: BTreeMap<u32, Cached>,
    /// Number of times that the cache was cleared.
    pub era: u64,
    pub exports: BTreeMap<MachineId, Export>,
    pub imports: BTreeMap<MachineId, Import>,
}

impl Import {
    fn check(&self) -> Result<(), String> {
        let wrong = |&&place: &&u32| self.content[place as usize] != Some(self.manifest.bytes(place));
        match self.accepted.iter().find(wrong) {
            Some(place) => Err(format!("a commit of wrong bytes at place {place}")),
            None => Ok(()),
        }
    }
}

impl Pool {
    pub fn new(capacity: u32) -> Self {
        let (sequences, cache, exports, imports) = Default::default();
        Self { capacity, free: capacity, sequences, cache, era: 0, exports, imports }
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
            self.cache.insert(key, Cached::default());
        }
    }

    fn finds(&self, key: u32) -> bool {
        self.cache.get(&key).is_some_and(|cached| !cached.is_cleared)
    }

    /// Clears the cache. Returns the machines whose exports are not current any more.
    pub fn clear(&mut self) -> Vec<MachineId> {
        self.era += 1;
        self.cache.values_mut().for_each(|cached| cached.is_cleared = true);
        self.drop_cleared();
        self.exports.keys().copied().collect()
    }

    fn drop_cleared(&mut self) {
        let before = self.cache.len() as u32;
        self.cache.retain(|_, cached| cached.holds > 0 || !cached.is_cleared);
        self.free += before - self.cache.len() as u32;
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
        (copy, part): (u64, Option<Part>),
        kind: Kind,
    ) -> Option<Manifest> {
        let own = self.sequences.get(&sequence)?;
        // One that arrived behind the request was not given away.
        let expected = (kind == Kind::Migrate).then_some(machine);
        if own.held != expected {
            return None;
        }
        let keys = (0..own.blocks).collect();
        let part = part.map_or(0, |part| part.index);
        let manifest = Manifest { sequence: Some(copy), tokens: own.tokens, part, keys };
        let places = (0..manifest.keys.len() as u32).collect();
        let (sequence, era) = (Some(sequence), self.era);
        self.exports.insert(machine, Export { sequence, era, manifest: manifest.clone(), kind, places });
        Some(manifest)
    }

    pub fn export_cached(&mut self, machine: MachineId, keys: &[u32], kind: Kind) -> Option<Manifest> {
        let keys: Vec<u32> = keys.iter().copied().filter(|&key| self.finds(key)).collect();
        if keys.is_empty() {
            return None;
        }
        for key in &keys {
            self.cache.get_mut(key).unwrap().holds += 1;
        }
        let manifest = Manifest { sequence: None, tokens: 0, part: 0, keys };
        let places = (0..manifest.keys.len() as u32).collect();
        let (sequence, era) = (None, self.era);
        self.exports.insert(machine, Export { sequence, era, manifest: manifest.clone(), kind, places });
        Some(manifest)
    }

    /// The target has the copy.
    pub fn finish(&mut self, machine: MachineId) -> Result<(), String> {
        let export = self.exports.remove(&machine).ok_or("an export is finished that does not exist")?;
        match export.kind {
            Kind::Migrate => {
                let sequence = export.sequence.unwrap();
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
            let cached = self.cache.get_mut(key).expect("a held block is cached");
            cached.holds -= 1;
            if evict && cached.holds == 0 {
                self.cache.remove(key);
                self.free += 1;
            }
        }
        self.drop_cleared();
    }

    /// Reserves blocks; `shared` places have their bytes here already.
    pub fn reserve(
        &mut self,
        machine: MachineId,
        (bytes, part): (&[u8], Option<CopyPart>),
        shared: u32,
        tag: u64,
    ) -> Work {
        let free = self.available();
        let refuse = |reason| Work::ReserveRefused { reason, free: u64::from(free) };
        let Ok(manifest) = postcard::from_bytes::<Manifest>(bytes) else {
            return refuse(Refusal::Manifest(Text::new("not readable")));
        };
        let copy = part.map(|part| part.copy);
        let of_copy = |import: &&Import| copy.is_some() && import.part.map(|part| part.copy) == copy;
        let other = |import: &Import| import.manifest.sequence == manifest.sequence && !of_copy(&import);
        let joins = self.imports.values().any(|import| of_copy(&import));
        if let Some(sequence) = manifest.sequence
            && (self.has(sequence) || self.imports.values().any(other))
        {
            return refuse(Refusal::Exists);
        }
        let is_missing = |place: &u32| match manifest.sequence {
            Some(_) => *place >= shared,
            None => !self.finds(manifest.keys[*place as usize]),
        };
        let places = manifest.keys.len() as u32;
        let mut missing: Vec<u32> = (0..places).filter(is_missing).collect();
        let mut accepted: Vec<u32> = (0..places).collect();
        if manifest.sequence.is_none() && free > 0 {
            // As many as there is room for.
            let absent = missing.split_off(missing.len().min(free as usize));
            accepted.retain(|place| !absent.contains(place));
        }
        let blocks = match manifest.sequence {
            // The first part has reserved them.
            Some(_) if joins => 0,
            Some(_) => places,
            None => missing.len() as u32,
        };
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
        self.imports.insert(machine, Import { manifest, part, blocks, accepted, content, tag });
        let grant = Grant { tag, ..Grant::default() };
        Work::Reserved { accepted: places, missing: Places::of(missing).unwrap(), grant }
    }

    fn available(&self) -> u32 {
        self.free + self.cache.values().filter(|cached| cached.holds == 0).count() as u32
    }

    fn evict(&mut self, blocks: u32) {
        while self.free < blocks {
            let key = *self.cache.iter().find(|(_, cached)| cached.holds == 0).expect("checked").0;
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

    /// Commits, with all parts of the copy.
    pub fn commit(&mut self, machine: MachineId) -> Result<Option<u64>, String> {
        let import = self.imports.remove(&machine).ok_or("a commit of what is not reserved, or committed")?;
        import.check()?;
        let manifest = &import.manifest;
        let mut blocks = import.blocks;
        if let Some(CopyPart { copy, part }) = import.part {
            let others: Vec<_> = self.others(copy).collect();
            if others.len() + 1 != usize::from(part.of) {
                return Err(format!("a commit of {} of {} parts", others.len() + 1, part.of));
            }
            for other in others {
                let other = self.imports.remove(&other).expect("listed");
                other.check()?;
                blocks += other.blocks;
            }
        }
        match manifest.sequence {
            Some(sequence) => {
                let own = Sequence { blocks, tokens: manifest.tokens, held: None };
                self.sequences.insert(sequence, own);
            }
            None => {
                self.free += import.blocks;
                import.accepted.iter().for_each(|&place| self.cache(manifest.keys[place as usize]));
            }
        }
        Ok(manifest.sequence)
    }

    fn others(&self, copy: CopyNumber) -> impl Iterator<Item = MachineId> + '_ {
        let of_copy = move |import: &Import| import.part.is_some_and(|part| part.copy == copy);
        self.imports.iter().filter(move |(_, import)| of_copy(import)).map(|(&machine, _)| machine)
    }

    /// A commit has failed: all parts are gone.
    pub fn fail(&mut self, machine: MachineId) {
        let part = self.imports.get(&machine).and_then(|import| import.part);
        let others: Vec<_> = part.into_iter().flat_map(|part| self.others(part.copy)).collect();
        others.into_iter().chain([machine]).for_each(|one| self.release(one));
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
        let holds: u32 = self.cache.values().map(|cached| cached.holds).sum();
        match (self.imports.len(), self.exports.len(), held, holds) {
            (0, 0, 0, 0) => Ok(()),
            (imports, exports, ..) => Err(format!(
                "left behind: {imports} reservations, {exports} exports, {held} held sequences, {holds} holds"
            )),
        }
    }
}
