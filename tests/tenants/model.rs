//! Random steps against a naive model: lists of blocks, searched from the start.
//!
//! `KVPOOL_TENANTS_SEED` sets the first seed, which failures name.

use std::collections::BTreeMap;

use super::*;

/// A cached block of a prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Cached {
    tenant: Option<TenantId>,
    number: u32,
    place: usize,
}

/// No block has an owner between two steps, except for the leased ones.
struct Model {
    total: usize,
    leased: usize,
    /// The next one to be evicted first.
    cached: Vec<Cached>,
    limits: BTreeMap<u64, (usize, usize)>,
    evicted: BTreeMap<u64, u64>,
}

#[derive(PartialEq, Eq, Debug)]
enum Refused {
    Quota,
    Memory,
}

impl Model {
    fn held(&self, tenant: TenantId) -> usize {
        self.cached.iter().filter(|block| block.tenant == Some(tenant)).count()
    }

    /// Returns whether a block behind one that is missing is cached. Its prompt would compute it
    /// again, and the model has no duplicates.
    fn has_gap(&self, number: u32) -> bool {
        let places: Vec<_> =
            self.cached.iter().filter(|block| block.number == number).map(|block| block.place).collect();
        places.iter().any(|place| *place >= places.len())
    }

    fn evict(&mut self, at: usize) {
        let block = self.cached.remove(at);
        block.tenant.into_iter().for_each(|tenant| *self.evicted.entry(tenant.0).or_default() += 1);
    }

    /// Evicts for `wanted` blocks, while `owned` have owners, of which `charged` are of the tenants.
    fn take(
        &mut self,
        wanted: usize,
        owned: usize,
        by: Option<TenantId>,
        owned_of: &dyn Fn(TenantId) -> usize,
    ) -> Result<(), Refused> {
        let free = self.total - self.leased - self.cached.len() - owned;
        let missing = wanted.saturating_sub(free);
        let mut left: BTreeMap<u64, usize> = self
            .limits
            .iter()
            .map(|(&id, &(_, floor))| {
                (id, (self.held(TenantId(id)) + owned_of(TenantId(id))).saturating_sub(floor))
            })
            .collect();
        let mut victims = Vec::new();
        for (at, block) in self.cached.iter().enumerate() {
            match block.tenant.filter(|&tenant| Some(tenant) != by) {
                None => victims.push(at),
                Some(tenant) if left[&tenant.0] > 0 => {
                    *left.get_mut(&tenant.0).unwrap() -= 1;
                    victims.push(at);
                }
                Some(_) => {}
            }
        }
        if victims.len() < missing {
            return Err(Refused::Memory);
        }
        victims[..missing].iter().rev().for_each(|&at| self.evict(at));
        Ok(())
    }

    /// Runs a prompt of `blocks` full blocks and one with one token.
    fn run(&mut self, number: u32, blocks: usize, tenant: Option<TenantId>) -> Result<usize, Refused> {
        let find = |model: &Self, place| {
            model.cached.iter().position(|block| (block.number, block.place) == (number, place))
        };
        let hits = (0..blocks).take_while(|&place| find(self, place).is_some()).count();
        let before: Vec<Cached> = self.cached.clone();
        let hit: Vec<Cached> =
            (0..hits).map(|place| self.cached.remove(find(self, place).unwrap())).collect();
        let owned_of = |tenant| hit.iter().filter(|block| block.tenant == Some(tenant)).count();
        let needed = blocks + 1 - hits;
        // Refused: the hits return to their places.
        let refused = |model: &mut Self, refused| {
            let left = model.cached.clone();
            model.cached = before.iter().copied().filter(|b| left.contains(b) || hit.contains(b)).collect();
            Err(refused)
        };
        if let Some(tenant) = tenant {
            let charged = self.held(tenant) + owned_of(tenant);
            let excess = (charged + needed).saturating_sub(self.limits[&tenant.0].0);
            if excess > self.held(tenant) {
                return refused(self, Refused::Quota);
            }
            // What the pool cannot serve evicts nothing: a trial, on a copy.
            let (cached, evicted) = (self.cached.clone(), self.evicted.clone());
            let served = self.take(needed, hits, Some(tenant), &owned_of);
            (self.cached, self.evicted) = (cached, evicted);
            if let Err(error) = served {
                return refused(self, error);
            }
            for _ in 0..excess {
                let at = self.cached.iter().position(|block| block.tenant == Some(tenant)).unwrap();
                self.evict(at);
            }
        }
        if let Err(error) = self.take(needed, hits, tenant, &owned_of) {
            return refused(self, error);
        }
        for place in (0..blocks).rev() {
            let tenant = hit.get(place).map_or(tenant, |block| block.tenant);
            self.cached.push(Cached { tenant, number, place });
        }
        Ok(hits)
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ mixed >> 31) % limit as u64) as usize
    }
}

fn compare(seed: u64) {
    let mut random = Random(seed);
    const TOTAL: usize = 120;
    let ids = [TenantId(1), TenantId(2), TenantId(3)];
    let mut model = Model {
        total: TOTAL,
        leased: 0,
        cached: Vec::new(),
        limits: ids.iter().map(|id| (id.0, (usize::MAX, 0))).collect(),
        evicted: BTreeMap::new(),
    };
    let pool = pool(TOTAL, &ids.map(|id| (id, limits(None, 0))));
    let mut leases = Vec::new();
    for step in 0..300 {
        let what = random.below(20);
        match what {
            0 => {
                let id = ids[random.below(3)];
                let floor = random.below(40);
                let quota = [usize::MAX, floor + random.below(60)][random.below(2)];
                pool.set_tenant(id, limits((quota != usize::MAX).then_some(quota), floor)).unwrap();
                model.limits.insert(id.0, (quota, floor));
            }
            1 | 2 => {
                let wanted = 1 + random.below(40);
                let expected = model.take(wanted, 0, None, &|_| 0);
                let lease = pool.allocate(AllocRequest::new(wanted));
                assert_eq!(lease.is_ok(), expected.is_ok(), "seed {seed}, step {step}: {lease:?}");
                if let Ok(lease) = lease {
                    model.leased += wanted;
                    leases.push(lease);
                }
            }
            3 | 4 => {
                if !leases.is_empty() {
                    let lease = leases.swap_remove(random.below(leases.len()));
                    model.leased -= lease.blocks().len();
                }
            }
            _ => {
                let tenant = [None, Some(ids[0]), Some(ids[1]), Some(ids[2])][random.below(4)];
                let number = random.below(12) as u32;
                let blocks = 1 + number as usize * 2;
                if model.has_gap(number) {
                    continue;
                }
                let expected = model.run(number, blocks, tenant);
                match (try_open(&pool, number, blocks, tenant), &expected) {
                    (Ok(_), Ok(_)) => {}
                    (Err(SequenceError::Alloc(AllocError::OverQuota { .. })), Err(Refused::Quota)) => {}
                    (Err(SequenceError::Alloc(AllocError::Exhausted { .. })), Err(Refused::Memory)) => {}
                    (got, _) => panic!("seed {seed}, step {step}: {got:?}, expected {expected:?}"),
                }
            }
        }
        let mut found = BTreeMap::new();
        pool.tenants().iter().for_each(|info| {
            assert_eq!(info.owned_bytes, 0);
            found.insert(info.id.0, (info.cached_bytes / block_bytes(), info.evicted_blocks));
        });
        let evicted = |id: &TenantId| model.evicted.get(&id.0).copied().unwrap_or(0);
        let expected: BTreeMap<_, _> =
            ids.iter().map(|id| (id.0, (model.held(*id) as u64, evicted(id)))).collect();
        assert_eq!(found, expected, "seed {seed}, step {step}: {what}");
        assert_eq!(pool.stats().evictable, model.cached.len(), "seed {seed}, step {step}");
    }
    for number in 0..12 {
        let has = |place| model.cached.iter().any(|block| (block.number, block.place) == (number, place));
        assert_eq!(in_cache(&pool, number), (0..60).take_while(|&place| has(place)).count(), "seed {seed}");
    }
    drop(leases);
    pool.audit().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
}

#[test]
fn tenants_are_those_of_a_naive_model() {
    let first: u64 = std::env::var("KVPOOL_TENANTS_SEED").map_or(1, |seed| seed.parse().expect("a number"));
    (first..first + 40).for_each(compare);
}
