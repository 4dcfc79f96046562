//! The C interface of Mooncake Store, loaded at run time.
//!
//! The declarations follow its header `store_c.h` of 2026-04-12 and later. Libraries of 2026-04-01
//! have a shorter [`ReplicateConfig`]; no symbol distinguishes them, but the probe at the start
//! detects them.

use std::ffi::{c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use libloading::Library;
use libloading::os::unix::{Library as UnixLibrary, RTLD_LOCAL, RTLD_NOW};

use super::super::error::TierError;

pub(super) const NAME: &str = "mooncake";

/// Name of the environment variable with the path of the library.
pub const LOCATION: &str = "KVPOOL_MOONCAKE";

const LIBRARY: &str = "libmooncake_store.so";

pub(super) type Raw = *mut c_void;

#[repr(C)]
pub(super) struct ReplicateConfig {
    pub(super) replicas: usize,
    pub(super) with_soft_pin: c_int,
    pub(super) with_hard_pin: c_int,
    pub(super) preferred_segments: *const *const c_char,
    pub(super) preferred_segments_count: usize,
}

macro_rules! table {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        #[allow(dead_code, reason = "a library that lacks a function of the interface is refused at the start")]
        pub(super) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            // Never unloaded: it starts threads that outlive their clients.
            _library: ManuallyDrop<Library>,
        }

        impl Api {
            fn of(library: Library) -> Result<Self, libloading::Error> {
                // SAFETY: the types are those of the library's header.
                unsafe {
                    Ok(Self {
                        $($name: *library.get(concat!("mooncake_store_", stringify!($name)))?,)*
                        _library: ManuallyDrop::new(library),
                    })
                }
            }
        }
    };
}

table! {
    create() -> Raw;
    destroy(Raw);
    setup(Raw, *const c_char, *const c_char, u64, u64, *const c_char, *const c_char, *const c_char) -> c_int;
    init_all(Raw, *const c_char, *const c_char, u64) -> c_int;
    health_check(Raw) -> c_int;
    put(Raw, *const c_char, *const c_void, usize, *const ReplicateConfig) -> c_int;
    put_from(Raw, *const c_char, *mut c_void, usize, *const ReplicateConfig) -> c_int;
    batch_put_from(
        Raw, *const *const c_char, *const *mut c_void, *const usize, usize, *const ReplicateConfig, *mut c_int
    ) -> c_int;
    get_into(Raw, *const c_char, *mut c_void, usize) -> i64;
    batch_get_into(
        Raw, *const *const c_char, *const *mut c_void, *const usize, usize, *mut i64
    ) -> c_int;
    is_exist(Raw, *const c_char) -> c_int;
    batch_is_exist(Raw, *const *const c_char, usize, *mut c_int) -> c_int;
    get_size(Raw, *const c_char) -> i64;
    get_hostname(Raw, *mut c_char, usize) -> c_int;
    remove(Raw, *const c_char, c_int) -> c_int;
    remove_by_regex(Raw, *const c_char, c_int) -> i64;
    remove_all(Raw, c_int) -> i64;
    register_buffer(Raw, *mut c_void, usize) -> c_int;
    unregister_buffer(Raw, *mut c_void) -> c_int;
}

impl Api {
    /// Loads the library: from `location`, else from [`LOCATION`], else by the dynamic linker.
    pub(super) fn load(location: Option<&Path>) -> Result<Self, TierError> {
        let given = location.map(Path::to_owned).or_else(|| std::env::var_os(LOCATION).map(PathBuf::from));
        let hint = if given.is_none() { format!("; set {LOCATION} to its path") } else { String::new() };
        let path = given.unwrap_or_else(|| PathBuf::from(LIBRARY));
        let failed = |reason: libloading::Error| TierError::Library {
            store: NAME,
            reason: match std::error::Error::source(&reason) {
                Some(source) => format!("{}: {reason}: {source}{hint}", path.display()),
                None => format!("{}: {reason}{hint}", path.display()),
            },
        };
        // SAFETY: the initialisers of Mooncake's library have no requirements. All symbols are
        // bound at once, so a missing one is an error here.
        let library = unsafe { UnixLibrary::open(Some(&path), RTLD_NOW | RTLD_LOCAL) };
        Self::of(library.map_err(failed)?.into()).map_err(failed)
    }
}

/// Codes after which certainly no byte is in flight.
pub(super) const NO_SPACE: i64 = -200;
pub(super) const PARAMETERS: i64 = -600;
pub(super) const NOT_READY: i64 = -703;
pub(super) const NOT_FOUND: i64 = -704;
pub(super) const EXISTS: i64 = -705;
pub(super) const LEASED: i64 = -706;

const RPC: i64 = -900;
const RPC_TIMEOUT: i64 = -901;

/// Returns whether a code concerns all keys.
pub(super) fn is_unreachable(code: i64) -> bool {
    matches!(code, RPC | RPC_TIMEOUT)
}

/// Returns whether memory of a failed call may still be read or written.
pub(super) fn is_uncertain(code: i64) -> bool {
    code < 0 && !matches!(code, NO_SPACE | PARAMETERS | NOT_READY | NOT_FOUND | EXISTS | LEASED)
}

pub(super) fn meaning(code: i64) -> String {
    let text = match code {
        NO_SPACE => "no space",
        PARAMETERS => "wrong parameters, or a value larger than its buffer",
        NOT_READY => "the value is not complete",
        NOT_FOUND => "not found",
        EXISTS => "exists already",
        LEASED => "leased",
        -707 => "the lease has expired",
        -800 => "the transfer failed",
        -801 => "a wrong checksum",
        RPC => "the master cannot be reached, or is of another version",
        RPC_TIMEOUT => "the master did not answer in time",
        _ => "an unknown code",
    };
    format!("{code}: {text}")
}
