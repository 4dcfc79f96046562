//! The C interface of NIXL, loaded at run time.
//!
//! A table of the functions used, from `libnixl_capi.so` in the Python wheels `nixl-cu12` and
//! `nixl-cu13`. The declarations follow the C header of NIXL 1.5; these functions are unchanged
//! since 0.10.

use std::ffi::{OsStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use kvpool::transport::TransportError;
use libloading::Library;
use libloading::os::unix::{Library as UnixLibrary, RTLD_LOCAL, RTLD_NOW};

/// Environment variable with the location of NIXL: the library, or a folder of Python packages.
pub const LOCATION: &str = "KVPOOL_NIXL";

const LIBRARY: &str = "libnixl_capi.so";

pub(super) type Raw = *mut c_void;

/// Result of a call: 0 is success, 1 in progress, a negative number an error.
pub(super) type Status = c_int;

pub(super) const IN_PROGRESS: Status = 1;
pub(super) const DRAM: c_int = 0;
pub(super) const VRAM: c_int = 1;
pub(super) const WRITE: c_int = 1;

#[repr(C)]
pub(super) struct AgentConfig {
    pub(super) progress_thread: bool,
    pub(super) listen_thread: bool,
    pub(super) listen_port: c_int,
    pub(super) thread_sync: c_int,
    pub(super) workers: u32,
    pub(super) progress_delay_us: u64,
    pub(super) listen_delay_us: u64,
    pub(super) telemetry: bool,
}

macro_rules! table {
    ($($name:ident($($argument:ty),*);)*) => {
        pub(super) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> Status,)*
            is_stub: unsafe extern "C" fn() -> bool,
            /// Released version of the library, if its folder has it.
            pub(super) version: Option<String>,
            // Never unloaded: NIXL's plugins start threads that outlive their agents.
            _library: std::mem::ManuallyDrop<Library>,
        }

        impl Api {
            fn of(library: Library, version: Option<String>) -> Result<Self, libloading::Error> {
                // SAFETY: the types are those of the library's header.
                unsafe {
                    Ok(Self {
                        $($name: *library.get(concat!("nixl_capi_", stringify!($name)))?,)*
                        is_stub: *library.get("nixl_capi_is_stub")?,
                        version,
                        _library: std::mem::ManuallyDrop::new(library),
                    })
                }
            }
        }
    };
}

table! {
    create_configured_agent(*const c_char, *const AgentConfig, *mut Raw);
    destroy_agent(Raw);
    get_local_md(Raw, *mut *mut c_void, *mut usize);
    load_remote_md(Raw, *const c_void, usize, *mut *mut c_char);
    invalidate_remote_md(Raw, *const c_char);
    get_plugin_params(Raw, *const c_char, *mut Raw, *mut Raw);
    destroy_mem_list(Raw);
    destroy_params(Raw);
    create_backend(Raw, *const c_char, Raw, *mut Raw);
    destroy_backend(Raw);
    create_opt_args(*mut Raw);
    destroy_opt_args(Raw);
    opt_args_add_backend(Raw, Raw);
    register_mem(Raw, Raw, Raw);
    deregister_mem(Raw, Raw, Raw);
    create_reg_dlist(c_int, *mut Raw);
    destroy_reg_dlist(Raw);
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
    destroy_notif_map(Raw);
    notif_map_clear(Raw);
    get_notifs(Raw, Raw, Raw);
}

impl Api {
    /// Loads the library from `location`, `KVPOOL_NIXL`, the dynamic linker's paths, or the Python
    /// packages of `VIRTUAL_ENV`, in this order.
    ///
    /// # Errors
    /// [`TransportError::Unavailable`] with the places that were tried.
    pub(super) fn load(location: Option<&Path>) -> Result<Self, TransportError> {
        let mut tried = Vec::new();
        for path in candidates(location) {
            match Self::open(&path) {
                Ok(api) => return Ok(api),
                Err(reason) => tried.push(format!("{}: {reason}", path.display())),
            }
        }
        let hint = format!("set {LOCATION} to the folder where the Python package nixl-cu12 is installed");
        Err(unavailable(format!("{LIBRARY} was not found ({}); {hint}", tried.join("; "))))
    }

    fn open(path: &Path) -> Result<Self, String> {
        // SAFETY: the initialisers of NIXL's libraries have no requirements. All symbols are bound
        // at once, so a missing one is an error here.
        let library = unsafe { UnixLibrary::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = Library::from(library.map_err(|error| error.to_string())?);
        let api = Self::of(library, version_beside(path)).map_err(|error| error.to_string())?;
        // SAFETY: it takes nothing.
        if unsafe { (api.is_stub)() } {
            return Err("it is a stub without NIXL behind it".into());
        }
        Ok(api)
    }
}

/// Checks that NIXL can be loaded from a location, or from one of the usual places.
///
/// # Errors
/// [`TransportError::Unavailable`], with the places that were searched.
pub fn check(location: Option<&Path>) -> Result<(), TransportError> {
    Api::load(location).map(drop)
}

pub(super) fn unavailable(reason: String) -> TransportError {
    TransportError::Unavailable { name: "nixl", reason }
}

fn candidates(location: Option<&Path>) -> Vec<PathBuf> {
    let given = location.map(Path::to_owned).or_else(|| std::env::var_os(LOCATION).map(PathBuf::from));
    match given {
        Some(path) if path.is_dir() => in_packages(&path),
        Some(path) => vec![path],
        None => {
            let mut all = vec![PathBuf::from(LIBRARY)];
            if let Some(environment) = std::env::var_os("VIRTUAL_ENV") {
                let pythons = entries(&Path::new(&environment).join("lib"));
                all.extend(pythons.flat_map(|python| in_packages(&python.join("site-packages"))));
            }
            all
        }
    }
}

/// Returns the paths of the library in a folder of Python packages, one per CUDA version.
fn in_packages(packages: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = entries(packages)
        .filter(|entry| name(entry).is_some_and(|name| name.starts_with(".nixl") && name.ends_with(".libs")))
        .map(|entry| entry.join(LIBRARY))
        .collect();
    found.sort_unstable();
    if found.is_empty() {
        found.push(packages.join(LIBRARY));
    }
    found
}

/// Returns the version in the name of the package's `dist-info` folder.
fn version_beside(library: &Path) -> Option<String> {
    let packages = library.parent()?.parent()?;
    let info = entries(packages).find(|entry| {
        name(entry).is_some_and(|name| name.starts_with("nixl_cu") && name.ends_with(".dist-info"))
    })?;
    let name = name(&info)?.trim_end_matches(".dist-info").to_owned();
    name.split_once('-').map(|(_, version)| version.to_owned())
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

fn name(path: &Path) -> Option<&str> {
    path.file_name().and_then(OsStr::to_str)
}
