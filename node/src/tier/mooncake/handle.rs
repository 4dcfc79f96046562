use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use super::super::error::TierError;
use super::super::store_error::StoreError;
use super::api::{Api, NAME, Raw, ReplicateConfig, meaning};
use super::staging::{Memory, Spare};

const PROBE_BYTES: usize = 4096;

/// Settings of a [`Mooncake`](super::Mooncake) store.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct MooncakeSettings {
    /// Path of the library; by default [`LOCATION`](super::LOCATION) or the dynamic linker decides.
    pub library: Option<PathBuf>,
    /// Name and port at which other clients reach this host.
    pub hostname: String,
    /// Address of the metadata server; `P2PHANDSHAKE` for none.
    pub metadata_server: String,
    /// Address of the master.
    pub master: String,
    /// Transport: `tcp` or `rdma`.
    pub protocol: String,
    /// RDMA devices, if any.
    pub device: String,
    /// Bytes of memory that this process lends to the store; 0 for none.
    pub global_segment: u64,
    /// Bytes of the client's own buffer.
    pub local_buffer: u64,
    /// Number of copies of each value.
    pub replicas: usize,
    /// Time limit of the probe at the start.
    pub limit: Duration,
}

impl Default for MooncakeSettings {
    /// A client over TCP without lent memory, with a master on this host.
    fn default() -> Self {
        Self {
            library: None,
            hostname: "127.0.0.1:17901".into(),
            metadata_server: "P2PHANDSHAKE".into(),
            master: "127.0.0.1:50051".into(),
            protocol: "tcp".into(),
            device: String::new(),
            global_segment: 0,
            local_buffer: 16 << 20,
            replicas: 1,
            limit: Duration::from_secs(15),
        }
    }
}

pub(super) struct Handle {
    api: Api,
    raw: Raw,
    replicas: usize,
    spare: Mutex<Spare>,
}

// SAFETY: the library's clients may be used from any thread, and from several at a time.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

pub(super) struct Texts {
    _texts: Vec<CString>,
    pub(super) pointers: Vec<*const c_char>,
}

impl Texts {
    pub(super) fn new(texts: impl IntoIterator<Item = String>) -> Result<Self, StoreError> {
        let texts: Result<Vec<CString>, _> = texts.into_iter().map(CString::new).collect();
        let texts = texts.map_err(|error| refused(error.to_string()))?;
        let pointers = texts.iter().map(|text| text.as_ptr()).collect();
        Ok(Self { _texts: texts, pointers })
    }
}

pub(super) fn refused(reason: String) -> StoreError {
    StoreError::Refused { store: NAME, reason }
}

fn probe_failed(reason: String) -> TierError {
    TierError::Probe { store: NAME, reason }
}

impl Handle {
    pub(super) fn connect(settings: &MooncakeSettings) -> Result<Arc<Self>, TierError> {
        if settings.replicas == 0 {
            let what = "the number of replicas";
            return Err(TierError::OutOfRange { what, value: 0, max: usize::MAX });
        }
        let api = Api::load(settings.library.as_deref())?;
        // SAFETY: it takes nothing.
        let raw = unsafe { (api.create)() };
        if raw.is_null() {
            return Err(probe_failed("it created no client".into()));
        }
        let (replicas, spare) = (settings.replicas, Mutex::default());
        let handle = Arc::new(Self { api, raw, replicas, spare });
        let texts = [
            &settings.hostname,
            &settings.metadata_server,
            &settings.protocol,
            &settings.device,
            &settings.master,
        ];
        let texts = Texts::new(texts.into_iter().cloned())?;
        let [host, metadata, protocol, device, master] = texts.pointers[..] else {
            unreachable!("as many as above")
        };
        let (segment, buffer) = (settings.global_segment, settings.local_buffer);
        // SAFETY: a client, and texts that outlive the call.
        let code = unsafe {
            (handle.api.setup)(handle.raw, host, metadata, segment, buffer, protocol, device, master)
        };
        if code != 0 {
            let reason =
                format!("setup answered {}; the master is {}", meaning(code.into()), settings.master);
            return Err(probe_failed(reason));
        }
        Ok(handle)
    }

    /// Puts a value and reads it back: incompatible versions may work in part.
    pub(super) fn probe(&self) -> Result<(), TierError> {
        let mut secret = [0; 16];
        getrandom::fill(&mut secret).map_err(|error| probe_failed(error.to_string()))?;
        let key = Texts::new([format!("kvp2/probe/{:032x}", u128::from_le_bytes(secret))])?;
        let wanted: [u8; PROBE_BYTES] = std::array::from_fn(|at| secret[at % 16] ^ (at / 16) as u8);
        let mut memory = self.memory(2 * PROBE_BYTES)?;
        match self.put_and_get(key.pointers[0], &wanted, &mut memory) {
            Ok(()) => {
                self.give_back(memory);
                Ok(())
            }
            Err(reason) => {
                // It may still be read or written.
                self.set_aside(memory);
                let hint = "client and master may be of different versions, which must be equal";
                Err(probe_failed(format!("{reason}; {hint}")))
            }
        }
    }

    fn put_and_get(
        &self,
        key: *const c_char,
        wanted: &[u8; PROBE_BYTES],
        memory: &mut Memory,
    ) -> Result<(), String> {
        let (api, raw, config) = (&self.api, self.raw, self.config());
        // SAFETY: no transfer has the memory.
        unsafe { memory.write(0, wanted) };
        // SAFETY: a client, a text, and registered memory of this size.
        let code = unsafe { (api.put_from)(raw, key, memory.start().cast(), PROBE_BYTES, &config) };
        if code != 0 {
            return Err(format!("a put answered {}", meaning(code.into())));
        }
        // SAFETY: as above.
        if unsafe { (api.is_exist)(raw, key) } != 1 {
            return Err("a put was confirmed, and the key does not exist".into());
        }
        let back = memory.start().wrapping_add(PROBE_BYTES);
        // SAFETY: as above; the second half of the memory is written by this call alone.
        let got = unsafe { (api.get_into)(raw, key, back.cast(), PROBE_BYTES) };
        if got < 0 {
            return Err(format!("a get answered {}", meaning(got)));
        }
        if got != PROBE_BYTES as i64 {
            return Err(format!("a get answered {got} of {PROBE_BYTES} bytes"));
        }
        // SAFETY: the get is over.
        if unsafe { memory.bytes(PROBE_BYTES, PROBE_BYTES) } != wanted {
            return Err("a get returned other bytes than were put".into());
        }
        // SAFETY: as above. Without effect while the store leases the key, which it evicts later.
        unsafe { (api.remove)(raw, key, 1) };
        Ok(())
    }

    pub(super) fn api(&self) -> &Api {
        &self.api
    }

    pub(super) fn raw(&self) -> Raw {
        self.raw
    }

    pub(super) fn config(&self) -> ReplicateConfig {
        ReplicateConfig {
            replicas: self.replicas,
            with_soft_pin: 0,
            with_hard_pin: 0,
            preferred_segments: std::ptr::null(),
            preferred_segments_count: 0,
        }
    }

    fn spare(&self) -> MutexGuard<'_, Spare> {
        self.spare.lock()
    }

    pub(super) fn memory(&self, bytes: usize) -> Result<Memory, StoreError> {
        let mut spare = self.spare();
        if let Some(memory) = spare.take(bytes, Instant::now()) {
            return Ok(memory);
        }
        if !spare.has_room() {
            return Err(refused("calls that failed may still write memory; no more is given".into()));
        }
        drop(spare);
        let memory = Memory::new(bytes).ok_or_else(|| refused(format!("no memory of {bytes} bytes")))?;
        // SAFETY: a client, and memory that is unregistered before it is freed.
        let code = unsafe { (self.api.register_buffer)(self.raw, memory.start().cast(), memory.len()) };
        match code {
            0 => Ok(memory),
            code => Err(refused(format!("register_buffer answered {}", meaning(code.into())))),
        }
    }

    pub(super) fn give_back(&self, memory: Memory) {
        self.spare().give_back(memory);
    }

    /// Keeps memory that a failed call may still read or write.
    pub(super) fn set_aside(&self, memory: Memory) {
        self.spare().set_aside(memory, Instant::now());
    }
}

/// A client and its memory, on the way to the thread that destroys it.
struct Ending {
    raw: Raw,
    destroy: unsafe extern "C" fn(Raw),
    unregister: unsafe extern "C" fn(Raw, *mut c_void) -> c_int,
    /// Freed only if the client has ended.
    spare: ManuallyDrop<Spare>,
}

// SAFETY: the client may be used on any thread, and this is its last use.
unsafe impl Send for Ending {}

impl Ending {
    fn run(self) {
        let (free, set_aside) = ManuallyDrop::into_inner(self.spare).into_parts();
        for memory in free.iter().chain(&set_aside) {
            // SAFETY: registered memory of this client, which no session has any more.
            unsafe { (self.unregister)(self.raw, memory.start().cast()) };
        }
        // SAFETY: the last use of the client.
        unsafe { (self.destroy)(self.raw) };
        // A transfer that the library has lost track of may still write it.
        std::mem::forget(set_aside);
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let spare = ManuallyDrop::new(std::mem::take(&mut *self.spare()));
        let (destroy, unregister) = (self.api.destroy, self.api.unregister_buffer);
        let ending = Ending { raw: self.raw, destroy, unregister, spare };
        // Destroying waits for a master that may be dead. Without a thread the client is leaked.
        let thread = std::thread::Builder::new().name("kvpool-mooncake-end".into());
        drop(thread.spawn(move || ending.run()));
    }
}
