//! An agent of NIXL, by the calls of its C interface alone: the baseline.
//!
//! Its objects live until the process ends.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::ptr::{null, null_mut};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

type Raw = *mut c_void;
type Status = c_int;

const DRAM: c_int = 0;
const WRITE: c_int = 1;
const IN_PROGRESS: Status = 1;

/// Consecutive bytes here, and as many at the peer.
pub struct Piece {
    pub local: usize,
    pub remote: usize,
    pub len: usize,
}

#[repr(C)]
struct Config {
    progress_thread: bool,
    listen_thread: bool,
    listen_port: c_int,
    thread_sync: c_int,
    workers: u32,
    progress_delay_us: u64,
    listen_delay_us: u64,
    telemetry: bool,
}

macro_rules! functions {
    ($($name:ident($($argument:ty),*);)*) => {
        struct Functions { $($name: unsafe extern "C" fn($($argument),*) -> Status,)* }

        impl Functions {
            fn load() -> Self {
                let path = library();
                // SAFETY: the initialisers of NIXL's libraries have no requirements.
                let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) };
                // NIXL's plugins start threads that outlive their agents: it stays loaded.
                let library = std::mem::ManuallyDrop::new(library.expect("the transport found it too"));
                // SAFETY: the types are those of the library's header.
                unsafe {
                    Self { $($name: *library.get(concat!("nixl_capi_", stringify!($name)).as_bytes()).unwrap(),)* }
                }
            }
        }
    };
}

functions! {
    create_configured_agent(*const c_char, *const Config, *mut Raw);
    get_local_md(Raw, *mut *mut c_void, *mut usize);
    load_remote_md(Raw, *const c_void, usize, *mut *mut c_char);
    get_plugin_params(Raw, *const c_char, *mut Raw, *mut Raw);
    create_backend(Raw, *const c_char, Raw, *mut Raw);
    create_opt_args(*mut Raw);
    opt_args_add_backend(Raw, Raw);
    register_mem(Raw, Raw, Raw);
    create_reg_dlist(c_int, *mut Raw);
    reg_dlist_add_desc(Raw, usize, usize, u64, *const c_void, usize);
    create_xfer_dlist(c_int, *mut Raw);
    destroy_xfer_dlist(Raw);
    xfer_dlist_add_desc(Raw, usize, usize, u64);
    agent_make_connection(Raw, *const c_char, Raw);
    create_xfer_req(Raw, c_int, Raw, Raw, *const c_char, *mut Raw, Raw);
    post_xfer_req(Raw, Raw, Raw);
    get_xfer_status(Raw, Raw);
    release_xfer_req(Raw, Raw);
    destroy_xfer_req(Raw);
    create_notif_map(*mut Raw);
    notif_map_clear(Raw);
    get_notifs(Raw, Raw, Raw);
}

/// Returns the library that the transport finds: `KVPOOL_NIXL` names it or a folder of packages.
fn library() -> PathBuf {
    const FILE: &str = "libnixl_capi.so";
    let Some(place) = std::env::var_os("KVPOOL_NIXL").map(PathBuf::from) else { return FILE.into() };
    if !place.is_dir() {
        return place;
    }
    let entries = std::fs::read_dir(&place).expect("a folder").flatten().map(|entry| entry.path().join(FILE));
    entries.filter(|path| path.exists()).min().unwrap_or_else(|| place.join(FILE))
}

fn done(status: Status) {
    assert!(status >= 0, "NIXL: status {status}");
}

/// An agent with the backend UCX, and a storage's memory registered.
pub struct Agent {
    functions: Functions,
    raw: Raw,
    options: Raw,
    notifications: Raw,
    peer: std::cell::OnceCell<CString>,
}

impl Agent {
    /// Registers tensors of `frames` frames, given by address and bytes per frame.
    pub fn new(name: &str, tensors: &[(usize, usize)], frames: usize) -> Self {
        let functions = Functions::load();
        let name = CString::new(name).unwrap();
        // As the transport's.
        let config = Config {
            progress_thread: false,
            listen_thread: false,
            listen_port: 0,
            thread_sync: 0,
            workers: 1,
            progress_delay_us: 0,
            listen_delay_us: 100_000,
            telemetry: false,
        };
        let [mut raw, mut memories, mut parameters, mut backend] = [null_mut(); 4];
        let [mut options, mut notifications, mut list] = [null_mut(); 3];
        // SAFETY: all pointers are valid during the calls; the memory is registered until the process
        // ends, and the storage lives as long.
        unsafe {
            done((functions.create_configured_agent)(name.as_ptr(), &config, &mut raw));
            done((functions.get_plugin_params)(raw, c"UCX".as_ptr(), &mut memories, &mut parameters));
            done((functions.create_backend)(raw, c"UCX".as_ptr(), parameters, &mut backend));
            done((functions.create_opt_args)(&mut options));
            done((functions.opt_args_add_backend)(options, backend));
            done((functions.create_notif_map)(&mut notifications));
            done((functions.create_reg_dlist)(DRAM, &mut list));
            for &(start, bytes) in tensors {
                done((functions.reg_dlist_add_desc)(list, start, frames * bytes, 0, null(), 0));
            }
            done((functions.register_mem)(raw, list, options));
        }
        Self { functions, raw, options, notifications, peer: std::cell::OnceCell::new() }
    }

    /// Returns what the peer loads.
    pub fn metadata(&self) -> Vec<u8> {
        let (mut data, mut len) = (null_mut(), 0);
        // SAFETY: the library allocates the bytes by malloc, for the caller to free.
        unsafe {
            done((self.functions.get_local_md)(self.raw, &mut data, &mut len));
            let bytes = std::slice::from_raw_parts(data.cast::<u8>(), len).to_vec();
            libc::free(data);
            bytes
        }
    }

    /// Connects to the peer.
    pub fn load(&self, metadata: &[u8]) {
        let mut name = null_mut();
        // SAFETY: the library copies the bytes, and allocates the name by malloc.
        let name = unsafe {
            let data = metadata.as_ptr().cast();
            done((self.functions.load_remote_md)(self.raw, data, metadata.len(), &mut name));
            let owned = CStr::from_ptr(name).to_owned();
            libc::free(name.cast());
            done((self.functions.agent_make_connection)(self.raw, owned.as_ptr(), self.options));
            owned
        };
        self.peer.set(name).expect("one peer");
    }

    /// Lets the backend work for the peer.
    pub fn serve(&self) {
        // SAFETY: of this agent.
        unsafe {
            (self.functions.get_notifs)(self.raw, self.notifications, self.options);
            (self.functions.notif_map_clear)(self.notifications);
        }
    }

    /// Writes pieces to the peer, in one request, and polls until it is done.
    pub fn write(&self, pieces: impl Iterator<Item = Piece>) {
        let [mut here, mut there, mut request] = [null_mut(); 3];
        let (raw, functions) = (self.raw, &self.functions);
        let peer = self.peer.get().expect("a peer").as_ptr();
        // SAFETY: objects of this agent, used only here; the memory is registered.
        unsafe {
            done((functions.create_xfer_dlist)(DRAM, &mut here));
            done((functions.create_xfer_dlist)(DRAM, &mut there));
            for Piece { local, remote, len } in pieces {
                done((functions.xfer_dlist_add_desc)(here, local, len, 0));
                done((functions.xfer_dlist_add_desc)(there, remote, len, 0));
            }
            done((functions.create_xfer_req)(raw, WRITE, here, there, peer, &mut request, self.options));
            (functions.destroy_xfer_dlist)(here);
            (functions.destroy_xfer_dlist)(there);
            done((functions.post_xfer_req)(raw, request, null_mut()));
            loop {
                match (functions.get_xfer_status)(raw, request) {
                    IN_PROGRESS => {}
                    status => break done(status),
                }
            }
            done((functions.release_xfer_req)(raw, request));
            (functions.destroy_xfer_req)(request);
        }
    }
}
