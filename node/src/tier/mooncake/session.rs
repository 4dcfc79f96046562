use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use super::super::key::TierKey;
use super::super::store::Answer;
use super::super::store_error::StoreError;
use super::super::value::TierValue;
use super::api::{NAME, NOT_FOUND, NOT_READY, is_uncertain, is_unreachable, meaning};
use super::handle::{Handle, Texts, refused};
use super::staging::Memory;

pub(super) struct Client {
    pub(super) handle: Arc<Handle>,
}

/// Memory of one call. At the end it is set aside if a transfer may still use it.
pub(super) struct Lent {
    handle: Arc<Handle>,
    memory: Option<Memory>,
    is_certain: bool,
}

impl Lent {
    fn take(handle: &Arc<Handle>, bytes: usize) -> Result<Self, StoreError> {
        Ok(Self { memory: Some(handle.memory(bytes)?), handle: handle.clone(), is_certain: false })
    }

    fn memory(&mut self) -> &mut Memory {
        self.memory.as_mut().expect("it is there until the end")
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        match self.memory.take() {
            Some(memory) if self.is_certain => self.handle.give_back(memory),
            Some(memory) => self.handle.set_aside(memory),
            None => {}
        }
    }
}

pub(super) struct Got {
    lent: Lent,
    bytes: usize,
    /// For each key, the number of bytes, or a code.
    got: Vec<i64>,
}

struct GotValue {
    all: Arc<Got>,
    at: usize,
    len: usize,
}

impl AsRef<[u8]> for GotValue {
    fn as_ref(&self) -> &[u8] {
        let memory = self.all.lent.memory.as_ref().expect("it is there until the end");
        // SAFETY: the get has ended well, and no other call has the memory before it is given back.
        unsafe { memory.bytes(self.at, self.len) }
    }
}

struct Slots {
    pointers: Vec<*mut c_void>,
    sizes: Vec<usize>,
}

impl Slots {
    fn new(memory: &Memory, count: usize, bytes: usize) -> Self {
        // Within the memory: it has room for all.
        let at = |slot: usize| memory.start().wrapping_add(slot * bytes).cast::<c_void>();
        Self { pointers: (0..count).map(at).collect(), sizes: vec![bytes; count] }
    }
}

fn unreachable(call: &str, code: i64) -> StoreError {
    StoreError::Unreachable { store: NAME, reason: format!("{call} answered {}", meaning(code)) }
}

fn texts(keys: impl IntoIterator<Item = TierKey>) -> Result<Texts, StoreError> {
    Texts::new(keys.into_iter().map(|key| key.to_string()))
}

impl Client {
    fn exist(&self, keys: &[*const c_char]) -> Result<Vec<bool>, StoreError> {
        let mut found: Vec<c_int> = vec![0; keys.len()];
        let (api, raw) = (self.handle.api(), self.handle.raw());
        // SAFETY: a client, texts that outlive the call, and room for as many results.
        let code = unsafe { (api.batch_is_exist)(raw, keys.as_ptr(), keys.len(), found.as_mut_ptr()) };
        if code < 0 {
            return Err(unreachable("batch_is_exist", code.into()));
        }
        if let Some(&code) = found.iter().find(|code| is_unreachable(i64::from(**code))) {
            return Err(unreachable("batch_is_exist", code.into()));
        }
        Ok(found.into_iter().map(|found| found == 1).collect())
    }

    fn put_from(&self, memory: &mut Memory, keys: &Texts, values: &[TierValue]) -> (c_int, Vec<c_int>) {
        let bytes = memory.len() / values.len();
        for (slot, value) in values.iter().enumerate() {
            // SAFETY: taken from the spare ones: no transfer has it.
            unsafe { memory.write(slot * bytes, value.bytes()) };
        }
        let pointers = Slots::new(memory, values.len(), bytes).pointers;
        let sizes: Vec<usize> = values.iter().map(|value| value.bytes().len()).collect();
        let mut codes: Vec<c_int> = vec![0; values.len()];
        let (config, count) = (self.handle.config(), values.len());
        let (keys, bufs, sizes) = (keys.pointers.as_ptr(), pointers.as_ptr(), sizes.as_ptr());
        let (api, raw) = (self.handle.api(), self.handle.raw());
        // SAFETY: a client, texts and registered memory that outlive the call, and room for all
        // results.
        let code =
            unsafe { (api.batch_put_from)(raw, keys, bufs, sizes, count, &config, codes.as_mut_ptr()) };
        (code, codes)
    }

    /// Reads values into memory. Returns the number of bytes of each, or a code.
    fn get_into(&self, memory: &Memory, keys: &Texts, bytes: usize) -> (c_int, Vec<i64>) {
        let count = keys.pointers.len();
        let slots = Slots::new(memory, count, bytes);
        let mut got = vec![0i64; count];
        let (keys, bufs, sizes) = (keys.pointers.as_ptr(), slots.pointers.as_ptr(), slots.sizes.as_ptr());
        let (api, raw) = (self.handle.api(), self.handle.raw());
        // SAFETY: as in `put_from`; no other call has the memory.
        let code = unsafe { (api.batch_get_into)(raw, keys, bufs, sizes, count, got.as_mut_ptr()) };
        (code, got)
    }
}

impl Client {
    pub(super) fn exists(&self, keys: &[TierKey]) -> Result<Vec<bool>, StoreError> {
        self.exist(&texts(keys.iter().copied())?.pointers)
    }

    pub(super) fn put(&self, values: &[TierValue]) -> Result<Vec<Result<(), StoreError>>, StoreError> {
        let Some(bytes) = values.iter().map(|value| value.bytes().len()).max() else { return Ok(Vec::new()) };
        let keys = texts(values.iter().map(|value| *value.key()))?;
        let mut lent = Lent::take(&self.handle, bytes * values.len())?;
        let (code, codes) = self.put_from(lent.memory(), &keys, values);
        let all = || codes.iter().map(|&code| i64::from(code));
        lent.is_certain = code >= 0 && !all().any(is_uncertain);
        drop(lent);
        if let Some(code) = [i64::from(code)].into_iter().chain(all()).find(|code| is_unreachable(*code)) {
            return Err(unreachable("batch_put_from", code));
        }
        if code < 0 {
            return Err(unreachable("batch_put_from", code.into()));
        }
        // Mooncake confirms puts that it does not store.
        let exist = self.exist(&keys.pointers)?;
        let stored = codes.iter().zip(exist).map(|(&code, exists)| match (code, exists) {
            (_, true) => Ok(()),
            (0, false) => Err(refused("a put was confirmed, and the key does not exist".into())),
            (code, false) => Err(refused(meaning(code.into()))),
        });
        Ok(stored.collect())
    }

    pub(super) fn get(&self, keys: &[TierKey], bytes: usize) -> Result<Got, StoreError> {
        let names = texts(keys.iter().copied())?;
        let mut lent = Lent::take(&self.handle, bytes * keys.len())?;
        let (code, got) = self.get_into(lent.memory(), &names, bytes);
        if code < 0 {
            return Err(unreachable("batch_get_into", code.into()));
        }
        lent.is_certain = !got.iter().any(|&got| is_uncertain(got));
        Ok(Got { lent, bytes, got })
    }
}

impl Got {
    pub(super) fn answer(self, answer: &mut dyn FnMut(usize, Answer)) -> Result<(), StoreError> {
        let all = Arc::new(self);
        for (place, &got) in all.got.iter().enumerate() {
            match usize::try_from(got) {
                Ok(len) if len <= all.bytes => {
                    let value = GotValue { all: all.clone(), at: place * all.bytes, len };
                    answer(place, Ok(Some(Box::new(value))));
                }
                Ok(len) => {
                    let reason = format!("{len} bytes for a buffer of {}", all.bytes);
                    answer(place, Err(StoreError::Answer { store: NAME, reason }));
                }
                Err(_) if matches!(got, NOT_FOUND | NOT_READY) => answer(place, Ok(None)),
                Err(_) => answer(place, Err(refused(meaning(got)))),
            }
        }
        match all.got.iter().find(|got| is_unreachable(**got)) {
            Some(&code) => Err(unreachable("batch_get_into", code)),
            None => Ok(()),
        }
    }
}
