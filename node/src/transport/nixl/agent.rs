//! NIXL's objects, each released by its owner, in order. All belong to the transport's thread.

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;
use std::rc::Rc;

use kvpool::transport::TransportError;

use super::api::{self, AgentConfig, Api, IN_PROGRESS, Raw, Status};
use super::span::{Memory, Pair, Span};

const BACKEND: &CStr = c"UCX";

pub(super) struct Agent {
    api: Rc<Api>,
    raw: Raw,
    backend: Raw,
    options: Raw,
    notifications: Raw,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Progress {
    InFlight,
    Done,
    Failed(Status),
}

/// A posted request. Must be [released](Agent::release).
#[must_use]
pub(super) struct Request(Raw);

/// Registered memory. Must be [deregistered](Agent::deregister).
#[must_use]
pub(super) struct Registration(Raw);

fn check(call: &'static str, status: Status) -> Result<(), TransportError> {
    if status >= 0 { Ok(()) } else { Err(failed(call, status)) }
}

fn failed(call: &str, status: Status) -> TransportError {
    let meaning = match status {
        -1 => "invalid parameter",
        -2 => "the backend failed",
        -3 => "invalid state",
        -4 => "an exception",
        -6 => "unknown to the agent",
        _ => "unknown status",
    };
    api::unavailable(format!("{call}: {meaning} ({status})"))
}

fn memory_type(memory: Memory) -> (c_int, u64) {
    match memory {
        Memory::Host => (api::DRAM, 0),
        Memory::Cuda(device) => (api::VRAM, u64::from(device)),
    }
}

impl Agent {
    /// Creates an agent of this name, without a thread of its own.
    pub(super) fn new(api: Rc<Api>, name: &str) -> Result<Self, TransportError> {
        let name = CString::new(name).map_err(|_| api::unavailable("a name with a zero byte".into()))?;
        // A progress thread halves the rate on few cores; the transport's thread polls instead.
        let config = AgentConfig {
            progress_thread: false,
            listen_thread: false,
            listen_port: 0,
            thread_sync: 0,
            workers: 1,
            progress_delay_us: 0,
            listen_delay_us: 100_000,
            telemetry: false,
        };
        let mut raw = ptr::null_mut();
        // SAFETY: all pointers are valid; the library copies the name and the settings.
        let created = unsafe { (api.create_configured_agent)(name.as_ptr(), &config, &mut raw) };
        check("create an agent", created)?;
        let null = ptr::null_mut();
        // From here on, dropping it releases what was created.
        let mut agent = Self { api, raw, backend: null, options: null, notifications: null };
        agent.create_backend()?;
        Ok(agent)
    }

    fn create_backend(&mut self) -> Result<(), TransportError> {
        let (mut memories, mut parameters) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: of the agent; the lists are released below.
        unsafe {
            let got =
                (self.api.get_plugin_params)(self.raw, BACKEND.as_ptr(), &mut memories, &mut parameters);
            check("find the plugin UCX", got)?;
            let created =
                (self.api.create_backend)(self.raw, BACKEND.as_ptr(), parameters, &mut self.backend);
            (self.api.destroy_mem_list)(memories);
            (self.api.destroy_params)(parameters);
            check("start the backend UCX", created)?;
            check("create options", (self.api.create_opt_args)(&mut self.options))?;
            check("name the backend", (self.api.opt_args_add_backend)(self.options, self.backend))?;
            check("create a list", (self.api.create_notif_map)(&mut self.notifications))
        }
    }

    /// Makes memory available to peers that load this agent's metadata later.
    ///
    /// # Safety
    /// The memory exists until it is deregistered.
    pub(super) unsafe fn register(
        &self,
        memory: Memory,
        spans: &[Span],
    ) -> Result<Registration, TransportError> {
        let (kind, device) = memory_type(memory);
        let mut list = ptr::null_mut();
        // SAFETY: the list is new, and its entries are memory by the caller's promise.
        unsafe {
            check("create a list", (self.api.create_reg_dlist)(kind, &mut list))?;
            let registration = Registration(list);
            let add = |span: &Span| {
                (self.api.reg_dlist_add_desc)(list, span.start, span.len, device, ptr::null(), 0)
            };
            let added = spans.iter().map(add).find(|&status| status < 0).unwrap_or(0);
            let done = check("list memory", added).and_then(|()| {
                check("register memory", (self.api.register_mem)(self.raw, list, self.options))
            });
            match done {
                Ok(()) => Ok(registration),
                Err(error) => {
                    (self.api.destroy_reg_dlist)(list);
                    Err(error)
                }
            }
        }
    }

    pub(super) fn deregister(&self, Registration(list): Registration) {
        // SAFETY: a registration of this agent, which a failure leaves until the agent ends.
        unsafe {
            (self.api.deregister_mem)(self.raw, list, self.options);
            (self.api.destroy_reg_dlist)(list);
        }
    }

    pub(super) fn metadata(&self) -> Result<Vec<u8>, TransportError> {
        let (mut data, mut len) = (ptr::null_mut(), 0);
        // SAFETY: the library allocates the bytes by malloc, for the caller to free.
        unsafe {
            check("read the metadata", (self.api.get_local_md)(self.raw, &mut data, &mut len))?;
            let bytes = std::slice::from_raw_parts(data.cast::<u8>(), len).to_vec();
            libc::free(data);
            Ok(bytes)
        }
    }

    /// Loads a peer's metadata and connects to it. Returns its name.
    pub(super) fn load(&self, metadata: &[u8]) -> Result<CString, TransportError> {
        let mut name = ptr::null_mut();
        // SAFETY: the library copies the bytes, and allocates the name by malloc.
        let name = unsafe {
            let data = metadata.as_ptr().cast::<c_void>();
            let loaded = (self.api.load_remote_md)(self.raw, data, metadata.len(), &mut name);
            check("load the peer's metadata", loaded).map_err(|e| TransportError::Metadata(e.to_string()))?;
            let owned = CStr::from_ptr(name).to_owned();
            libc::free(name.cast());
            owned
        };
        // SAFETY: the name of a loaded agent.
        let connected = unsafe { (self.api.agent_make_connection)(self.raw, name.as_ptr(), self.options) };
        check("connect", connected)
            .map_err(|error| TransportError::PeerGone { peer: lossy(&name), reason: error.to_string() })?;
        Ok(name)
    }

    /// Forgets a peer. Requests to it in flight may continue.
    pub(super) fn unload(&self, name: &CStr) {
        // SAFETY: the library looks the name up.
        unsafe { (self.api.invalidate_remote_md)(self.raw, name.as_ptr()) };
    }

    /// Posts a request to write these pairs of memory.
    ///
    /// # Safety
    /// The memory exists, and its bytes may be read until the request is done, failed, or the agent
    /// is dropped.
    pub(super) unsafe fn post(
        &self,
        (local, remote): (Memory, Memory),
        pairs: &[Pair],
        peer: &CStr,
    ) -> Result<Request, TransportError> {
        let here = self.list(local, pairs.iter().map(|pair| pair.local()))?;
        let there = self.list(remote, pairs.iter().map(|pair| pair.remote()));
        let request = there.and_then(|there| {
            let mut request = ptr::null_mut();
            // SAFETY: both lists live during the call, which copies them.
            let created = unsafe {
                let peer = peer.as_ptr();
                let created = (self.api.create_xfer_req)(
                    self.raw,
                    api::WRITE,
                    here,
                    there,
                    peer,
                    &mut request,
                    self.options,
                );
                (self.api.destroy_xfer_dlist)(there);
                created
            };
            check("prepare a transfer", created).map(|()| Request(request))
        });
        // SAFETY: not used after this.
        unsafe { (self.api.destroy_xfer_dlist)(here) };
        let request = request?;
        // SAFETY: a request of this agent; the memory is the caller's promise.
        let posted = unsafe { (self.api.post_xfer_req)(self.raw, request.0, ptr::null_mut()) };
        match check("post a transfer", posted) {
            Ok(()) => Ok(request),
            Err(error) => {
                self.release(request);
                Err(error)
            }
        }
    }

    fn list(&self, memory: Memory, spans: impl Iterator<Item = Span>) -> Result<Raw, TransportError> {
        let (kind, device) = memory_type(memory);
        let mut list = ptr::null_mut();
        // SAFETY: a new list; the entries are numbers to it.
        unsafe {
            check("create a list", (self.api.create_xfer_dlist)(kind, &mut list))?;
            for span in spans {
                let added = (self.api.xfer_dlist_add_desc)(list, span.start, span.len, device);
                if let Err(error) = check("list memory", added) {
                    (self.api.destroy_xfer_dlist)(list);
                    return Err(error);
                }
            }
        }
        Ok(list)
    }

    /// Returns the state of a request, and makes progress in the backend.
    pub(super) fn progress(&self, request: &Request) -> Progress {
        // SAFETY: a request of this agent.
        match unsafe { (self.api.get_xfer_status)(self.raw, request.0) } {
            0 => Progress::Done,
            IN_PROGRESS => Progress::InFlight,
            status => Progress::Failed(status),
        }
    }

    /// Makes progress for peers that write this agent's memory.
    pub(super) fn serve(&self) {
        // SAFETY: of this agent. Failures show in the requests.
        unsafe {
            (self.api.get_notifs)(self.raw, self.notifications, self.options);
            (self.api.notif_map_clear)(self.notifications);
        }
    }

    pub(super) fn release(&self, Request(request): Request) {
        // SAFETY: of this agent, and not used again. If the backend keeps it, the object is leaked.
        unsafe {
            if (self.api.release_xfer_req)(self.raw, request) >= 0 {
                (self.api.destroy_xfer_req)(request);
            }
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // SAFETY: created by this agent, released once, the agent last. Null pointers are refused.
        unsafe {
            (self.api.destroy_notif_map)(self.notifications);
            (self.api.destroy_opt_args)(self.options);
            (self.api.destroy_agent)(self.raw);
            (self.api.destroy_backend)(self.backend);
        }
    }
}

pub(super) fn broken(status: Status) -> TransportError {
    failed("a transfer", status)
}

pub(super) fn lossy(name: &CStr) -> String {
    name.to_string_lossy().into_owned()
}
