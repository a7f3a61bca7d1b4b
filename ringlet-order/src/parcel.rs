//! A frame on its way out, which has long payloads by reference.

use std::iter::once;

use bytes::Bytes;

/// What is shorter is copied: that costs less than a part of its own.
const LONG_BYTES: usize = 2048;

#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Parcel {
    bytes: Vec<u8>,
    /// Each behind so many of those bytes.
    long: Vec<(usize, Bytes)>,
    length: usize,
}

impl From<Vec<u8>> for Parcel {
    fn from(bytes: Vec<u8>) -> Parcel {
        Parcel { length: bytes.len(), bytes, long: Vec::new() }
    }
}

impl Parcel {
    /// With a payload, which it has by reference if it is long, between other bytes.
    pub fn around(before: &[u8], payload: &Bytes, behind: &[u8]) -> Parcel {
        let mut parcel = Parcel::from(before.to_vec());
        parcel.put_payload(payload);
        parcel.put(behind);
        parcel
    }

    pub fn len(&self) -> usize {
        self.length
    }

    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// All of it, in order. (Some may be empty.)
    pub fn parts(&self) -> impl Iterator<Item = &[u8]> {
        let places = || self.long.iter().map(|(place, _)| *place);
        let short = once(0).chain(places()).zip(places().chain(once(self.bytes.len())));
        let long = self.long.iter().map(|(_, bytes)| &bytes[..]).chain(once(&[][..]));
        short.zip(long).flat_map(|((from, to), long)| [&self.bytes[from..to], long])
    }

    /// What is before the only long payload, that, and what is behind it; if there is one, and not several.
    pub fn one_long(&self) -> Option<(&[u8], &Bytes, &[u8])> {
        let [(place, long)] = &self.long[..] else { return None };
        let (before, behind) = self.bytes.split_at(*place);
        Some((before, long, behind))
    }

    pub fn to_vec(&self) -> Vec<u8> {
        self.parts().flatten().copied().collect()
    }

    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
        self.length += bytes.len();
    }

    pub(crate) fn put_payload(&mut self, payload: &Bytes) {
        if payload.len() < LONG_BYTES {
            return self.put(payload);
        }
        self.long.push((self.bytes.len(), payload.clone()));
        self.length += payload.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_what_was_put_there() {
        let mut parcel = Parcel::from(vec![1, 2]);
        let mut all = vec![1, 2];
        for length in [0, 5, LONG_BYTES - 1, LONG_BYTES, 3, 2 * LONG_BYTES, LONG_BYTES] {
            let payload = vec![length as u8; length];
            parcel.put(&[9]);
            parcel.put_payload(&payload.clone().into());
            all.push(9);
            all.extend(payload);
            assert_eq!((parcel.to_vec(), parcel.len()), (all.clone(), all.len()));
        }
        assert_eq!((parcel.long.len(), parcel.one_long()), (3, None));
        let parcel = Parcel::around(&[1], &vec![2; LONG_BYTES].into(), &[3]);
        assert_eq!(parcel.one_long(), Some((&[1][..], &vec![2; LONG_BYTES].into(), &[3][..])));
    }
}
