//! A lock by which a node proves that the former process of its name has ended.
//!
//! It is a Unix socket in the abstract namespace: the kernel gives its name to one process at a
//! time, and releases it when that process ends in any way. The lock's number is derived from the
//! boot of the kernel, the network namespace in which that name is unique, the user, the node's
//! name and its addresses. Two processes that state the same number therefore ran one after the
//! other.

use std::os::unix::net::UnixListener;

use crate::transport::tcp::Address;

/// The lock of a node's name on this host, held until it is dropped or the process ends.
#[derive(Debug)]
pub(super) struct NameLock {
    _socket: UnixListener,
    number: [u8; 16],
}

impl NameLock {
    /// Takes the lock. `None` if the platform has none, or another process holds it.
    #[cfg(target_os = "linux")]
    pub(super) fn take(name: &str, addresses: &[Address]) -> Option<Self> {
        use std::os::linux::net::SocketAddrExt;
        use std::os::unix::fs::MetadataExt;
        let boot = std::fs::read("/proc/sys/kernel/random/boot_id").ok()?;
        let space = std::fs::metadata("/proc/self/ns/net").ok()?;
        // SAFETY: a query without arguments.
        let user = unsafe { libc::geteuid() };
        let mut hasher = blake3::Hasher::new_derive_key("kvpool node 2026 lock of a name");
        let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        let addresses = addresses.join(" ");
        let parts = [name.as_bytes(), addresses.as_bytes(), &boot];
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        for part in [space.dev(), space.ino(), user.into()] {
            hasher.update(&part.to_le_bytes());
        }
        let number: [u8; 16] = *hasher.finalize().as_bytes().first_chunk()?;
        let place = format!("kvpool-node-{:032x}", u128::from_be_bytes(number));
        let place = std::os::unix::net::SocketAddr::from_abstract_name(place).ok()?;
        match UnixListener::bind_addr(&place) {
            Ok(socket) => Some(Self { _socket: socket, number }),
            Err(error) => {
                tracing::debug!(name, %error, "peers get no proof when this process ends");
                None
            }
        }
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn take(_name: &str, _addresses: &[Address]) -> Option<Self> {
        None
    }

    pub(super) fn number(&self) -> [u8; 16] {
        self.number
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_lock_at_a_time() {
        let name = format!("locked-{}", std::process::id());
        let address = [Address::Tcp("127.0.0.1:7411".parse().unwrap())];
        let first = NameLock::take(&name, &address).expect("a free name");
        assert!(NameLock::take(&name, &address).is_none());
        let elsewhere = NameLock::take(&name, &[]).expect("a node at another address");
        assert_ne!(elsewhere.number(), first.number());
        let number = first.number();
        drop(first);
        assert_eq!(NameLock::take(&name, &address).expect("the former has ended").number(), number);
    }
}
