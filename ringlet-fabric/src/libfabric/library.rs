//! The library itself: loaded when it is first asked for, and what it says of its providers.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;
use std::sync::OnceLock;

use super::abi::{self, Info};

type GetInfo = unsafe extern "C" fn(
    u32,
    *const c_char,
    *const c_char,
    u64,
    *const Info,
    *mut *mut Info,
) -> c_int;
type FreeInfo = unsafe extern "C" fn(*mut Info);
type DupInfo = unsafe extern "C" fn(*const Info) -> *mut Info;
type OpenFabric =
    unsafe extern "C" fn(*mut abi::FabricAttr, *mut *mut abi::Fabric, *mut c_void) -> c_int;
type StrError = unsafe extern "C" fn(c_int) -> *const c_char;

/// How it is to work, where nobody has said otherwise; the first one always.
const SETTINGS: &[(&str, &str)] = &[
    // Its cache of registrations watches the whole process's memory by hooks in it. We register seldom, and withdraw what we register.
    ("FI_MR_CACHE_MONITOR", "disabled"),
    // With how many peers a queue of completions is as long as can be needed.
    // KERNEL: one of rdma_rxe's has 32,767 entries; ofi_rxm asks for 256 times this number, which is 256 by default.
    ("FI_UNIVERSE_SIZE", "64"),
];

/// Its functions, of the versions that have the structs of `abi`.
pub struct Library {
    getinfo: GetInfo,
    freeinfo: FreeInfo,
    dupinfo: DupInfo,
    pub fabric: OpenFabric,
    strerror: StrError,
}

/// What the library can use: a provider in one domain (a device, an interface), with our address there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Provider {
    pub provider: String,
    pub domain: String,
    /// Of providers that are reached by Internet addresses.
    pub address: Option<IpAddr>,
}

/// Keys of our own choice are better: they can't be guessed.
const OWN_KEYS: c_int = 0;
/// Some providers choose them (verbs: the device does).
const THEIR_KEYS: c_int = abi::MR_PROV_KEY;

/// A list that `getinfo` made; never empty.
pub struct Infos {
    loaded: &'static Library,
    first: *mut Info,
}

impl Library {
    /// # Errors
    /// It is not installed, or older than 1.17.
    pub fn get() -> io::Result<&'static Library> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        match LIBRARY.get_or_init(Library::load) {
            Ok(library) => Ok(library),
            Err(error) => Err(io::Error::new(io::ErrorKind::NotFound, error.as_str())),
        }
    }

    fn load() -> Result<Library, String> {
        for (nth, (name, value)) in SETTINGS.iter().enumerate() {
            if nth == 0 || std::env::var_os(name).is_none() {
                // SAFETY: other threads' Rust code takes the same lock. C code that reads the environment at this moment still has the program's first
                // one, which libc leaves in place when it first grows a copy; nothing else here sets variables.
                unsafe { std::env::set_var(name, value) };
            }
        }
        // SAFETY: a string that ends; the library's constructors are its own affair. It is never unloaded: its providers have threads.
        let handle = unsafe { libc::dlopen(c"libfabric.so.1".as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            return Err(format!(
                "libfabric can't be loaded (Debian's package: libfabric1): {}",
                dl_error()
            ));
        }
        let symbol = |name: &CStr, version: &CStr| {
            // SAFETY: the handle is open; the strings end.
            let at = unsafe { libc::dlvsym(handle, name.as_ptr(), version.as_ptr()) };
            if at.is_null() {
                return Err(format!("libfabric is not 1.17 or newer: {}", dl_error()));
            }
            Ok(at)
        };
        // SAFETY: symbols of these versions have these types for good: see fabric.h, and libfabric.map in its source.
        unsafe {
            Ok(Library {
                getinfo: std::mem::transmute::<*mut c_void, GetInfo>(symbol(
                    c"fi_getinfo",
                    c"FABRIC_1.3",
                )?),
                freeinfo: std::mem::transmute::<*mut c_void, FreeInfo>(symbol(
                    c"fi_freeinfo",
                    c"FABRIC_1.3",
                )?),
                dupinfo: std::mem::transmute::<*mut c_void, DupInfo>(symbol(
                    c"fi_dupinfo",
                    c"FABRIC_1.3",
                )?),
                fabric: std::mem::transmute::<*mut c_void, OpenFabric>(symbol(
                    c"fi_fabric",
                    c"FABRIC_1.1",
                )?),
                strerror: std::mem::transmute::<*mut c_void, StrError>(symbol(
                    c"fi_strerror",
                    c"FABRIC_1.0",
                )?),
            })
        }
    }

    /// What a call returned that failed, below zero.
    pub fn error(&self, call: &str, code: isize) -> io::Error {
        let code = c_int::try_from(code.unsigned_abs()).unwrap_or(c_int::MAX);
        // Smaller numbers are the system's.
        let kind = match code {
            ..256 => io::Error::from_raw_os_error(code).kind(),
            _ => io::ErrorKind::Other,
        };
        // SAFETY: takes any number.
        let text = unsafe { text((self.strerror)(code)) };
        io::Error::new(kind, format!("{call}: {}", text.unwrap_or_else(|| code.to_string())))
    }

    /// What has all that a rail needs: of this provider, at this address or in this domain, if given.
    pub fn infos(
        &'static self,
        provider: Option<&str>,
        local: Option<&str>,
    ) -> io::Result<Option<Infos>> {
        Ok(match self.infos_by(OWN_KEYS, provider, local)? {
            None => self.infos_by(THEIR_KEYS, provider, local)?,
            found => found,
        })
    }

    /// The same, with keys of memory that are chosen so.
    fn infos_by(
        &'static self,
        keys: c_int,
        provider: Option<&str>,
        local: Option<&str>,
    ) -> io::Result<Option<Infos>> {
        let c = |text: &str| {
            CString::new(text).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
        };
        let provider = provider.map(c).transpose()?;
        let address = local.filter(|local| local.parse::<IpAddr>().is_ok()).map(c).transpose()?;
        let domain = local.filter(|_| address.is_none()).map(c).transpose()?;
        // SAFETY: of nothing it makes an empty one, with all its parts.
        let first = unsafe { (self.dupinfo)(ptr::null()) };
        if first.is_null() {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let hints = Infos { loaded: self, first };
        // SAFETY: it and its parts are ours alone; the strings are libc's, as `freeinfo` frees them.
        unsafe {
            let hints = &mut *hints.first;
            hints.caps = abi::MSG | abi::RMA | abi::LOCAL_COMM | abi::REMOTE_COMM;
            hints.caps |= abi::SEND | abi::RECV | abi::WRITE | abi::REMOTE_WRITE;
            hints.mode = abi::CONTEXT | abi::CONTEXT2;
            (*hints.ep_attr).kind = abi::EP_RDM;
            let attr = &mut *hints.domain_attr;
            attr.threading = abi::THREAD_DOMAIN;
            attr.resource_mgmt = abi::RM_ENABLED;
            attr.cq_data_size = size_of::<u32>();
            attr.mr_mode = abi::MR_LOCAL | abi::MR_VIRT_ADDR | abi::MR_ALLOCATED;
            attr.mr_mode |= abi::MR_ENDPOINT | keys;
            if let Some(domain) = &domain {
                attr.name = libc::strdup(domain.as_ptr());
            }
            if let Some(provider) = &provider {
                (*hints.fabric_attr).prov_name = libc::strdup(provider.as_ptr());
            }
        }
        let (node, flags) = match &address {
            Some(address) => (address.as_ptr(), abi::SOURCE | abi::NUMERIC_HOST),
            None => (ptr::null(), 0),
        };
        let mut found = ptr::null_mut();
        // SAFETY: the strings and the hints outlive the call.
        let done = unsafe {
            (self.getinfo)(abi::VERSION, node, ptr::null(), flags, hints.first, &raw mut found)
        };
        if done == 0 && !found.is_null() {
            return Ok(Some(Infos { loaded: self, first: found }));
        }
        if done != 0 && done != -libc::ENODATA {
            return Err(self.error("fi_getinfo", done as isize));
        }
        Ok(None)
    }

    /// What can carry a rail here.
    pub fn providers(&'static self) -> io::Result<Vec<Provider>> {
        let mut all = Vec::new();
        for keys in [OWN_KEYS, THEIR_KEYS] {
            let infos = self.infos_by(keys, None, None)?;
            let mut at = infos.as_ref().map_or(ptr::null_mut(), Infos::first);
            while !at.is_null() {
                // SAFETY: the list is whole for as long as `infos` is; each has its parts; strings end, or are null.
                let (provider, next) = unsafe {
                    let info = &*at;
                    let provider = Provider {
                        provider: text((*info.fabric_attr).prov_name).unwrap_or_default(),
                        domain: text((*info.domain_attr).name).unwrap_or_default(),
                        address: bytes(info.src_addr, info.src_addrlen).and_then(address),
                    };
                    (provider, info.next)
                };
                if !all.contains(&provider) {
                    all.push(provider);
                }
                at = next;
            }
        }
        Ok(all)
    }
}

impl Infos {
    /// The one that the library likes best.
    pub fn first(&self) -> *mut Info {
        self.first
    }
}

impl Drop for Infos {
    fn drop(&mut self) {
        // SAFETY: made by the library, and dropped once.
        unsafe { (self.loaded.freeinfo)(self.first) };
    }
}

/// # Safety
/// Null, or a string that ends.
pub unsafe fn text(at: *const c_char) -> Option<String> {
    // SAFETY: as the caller promises.
    (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned())
}

/// # Safety
/// Null, or so many bytes that do not change.
unsafe fn bytes<'a>(at: *const c_void, count: usize) -> Option<&'a [u8]> {
    // SAFETY: as the caller promises.
    (!at.is_null()).then(|| unsafe { std::slice::from_raw_parts(at.cast(), count) })
}

/// The Internet address in a `sockaddr_in` or `sockaddr_in6`.
pub fn address(name: &[u8]) -> Option<IpAddr> {
    let family = u16::from_ne_bytes(*name.first_chunk()?);
    match i32::from(family) {
        libc::AF_INET if name.len() == size_of::<libc::sockaddr_in>() => {
            Some(Ipv4Addr::from(*name[4..].first_chunk()?).into())
        }
        libc::AF_INET6 if name.len() == size_of::<libc::sockaddr_in6>() => {
            Some(Ipv6Addr::from(*name[8..].first_chunk()?).into())
        }
        _ => None,
    }
}

fn dl_error() -> String {
    // SAFETY: this thread's text of its last error, until the next call.
    unsafe { text(libc::dlerror()) }.unwrap_or_default()
}
