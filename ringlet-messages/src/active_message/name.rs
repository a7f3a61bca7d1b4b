//! The name of an endpoint: what is needed to find its process and to know it again.

/// Opaque, of fixed size, may be copied to other processes in any way.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
#[repr(C)]
pub struct Name {
    /// Chosen anew by each process: a process that was started again is another one.
    pub(super) process: [u8; 16],
    pub(super) user: u32,
    pub(super) endpoint: u32,
    version: [u8; 8],
}

pub const NAME_BYTES: usize = size_of::<Name>();
const VERSION: [u8; 8] = {
    let mut bytes = *b"rngl-am\0";
    bytes[7] = ringlet_core::layout::VERSION as u8;
    bytes
};

impl Name {
    pub(super) fn new(process: [u8; 16], user: u32, endpoint: u32) -> Name {
        Name { process, user, endpoint, version: VERSION }
    }

    /// By which an endpoint knows a peer beyond its network namespace. It is what we say it is: nobody there can take the name of another one.
    pub(super) fn of_somebody_afar() -> Option<Name> {
        Some(Name::new(new_identity()?, u32::MAX, 0))
    }

    /// The endpoint that a process of this user's has made known by a number, not 0 (`Endpoint::make_known`), whichever process that is.
    pub fn known(port: u16) -> Name {
        let mut process = [0; 16];
        process[..2].copy_from_slice(&port.to_le_bytes());
        Name::new(process, ringlet_linux::sys::geteuid(), 0)
    }

    /// The number, if that is all which is known.
    pub(super) fn port(&self) -> Option<u16> {
        let (port, rest) = self.process.split_first_chunk()?;
        Some(u16::from_le_bytes(*port))
            .filter(|port| *port != 0 && rest.iter().all(|byte| *byte == 0))
    }

    pub fn to_bytes(self) -> [u8; NAME_BYTES] {
        let mut bytes = [0; NAME_BYTES];
        bytes[..16].copy_from_slice(&self.process);
        bytes[16..20].copy_from_slice(&self.user.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.endpoint.to_le_bytes());
        bytes[24..].copy_from_slice(&self.version);
        bytes
    }

    /// `None` for what is no name.
    pub fn from_bytes(bytes: &[u8; NAME_BYTES]) -> Option<Name> {
        let (process, rest) = bytes.split_first_chunk::<16>()?;
        let (user, rest) = rest.split_first_chunk::<4>()?;
        let (endpoint, version) = rest.split_first_chunk::<4>()?;
        let (user, endpoint) = (u32::from_le_bytes(*user), u32::from_le_bytes(*endpoint));
        (version == VERSION).then(|| Name::new(*process, user, endpoint))
    }

    /// Where the process is met: an abstract Unix name.
    pub(super) fn rendezvous(&self) -> Vec<u8> {
        if let Some(port) = self.port() {
            return format!("ringlet-am-port/{}/{port}", self.user).into_bytes();
        }
        let mut name = b"ringlet-am/".to_vec();
        for byte in self.process {
            name.extend(format!("{byte:02x}").bytes());
        }
        name
    }
}

/// Of a process. Its last four bytes are neither all zeros nor all ones: so it is told from a number and an address (an integer's upper half).
pub(super) fn new_identity() -> Option<[u8; 16]> {
    let mut process = [0; 16];
    let made = ringlet_linux::sys::random(&mut process);
    if matches!(process[12], 0 | u8::MAX) {
        process[12] = 1;
    }
    made.then_some(process)
}
