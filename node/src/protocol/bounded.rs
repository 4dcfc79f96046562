//! Values of a message whose size is checked before memory is allocated for them.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A value that is larger than its message permits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{len} elements are more than the {max} that the message permits")]
pub struct TooLong {
    /// Elements of the value.
    pub len: usize,
    /// Elements permitted.
    pub max: usize,
}

/// A list of at most `MAX` elements.
#[derive(Clone, PartialEq, Eq)]
pub struct List<T, const MAX: usize>(Vec<T>);

impl<T, const MAX: usize> List<T, MAX> {
    /// Checks the length of a list.
    pub fn new(list: Vec<T>) -> Result<Self, TooLong> {
        if list.len() > MAX { Err(TooLong { len: list.len(), max: MAX }) } else { Ok(Self(list)) }
    }

    /// Returns the list.
    pub fn into_vec(self) -> Vec<T> {
        self.0
    }
}

impl<T, const MAX: usize> Default for List<T, MAX> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T, const MAX: usize> Deref for List<T, MAX> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T: fmt::Debug, const MAX: usize> fmt::Debug for List<T, MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<T: Serialize, const MAX: usize> Serialize for List<T, MAX> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for List<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Elements<T, const MAX: usize>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Elements<T, MAX> {
            type Value = List<T, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX} elements")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let said = seq.size_hint().unwrap_or(0);
                if said > MAX {
                    return Err(A::Error::custom(TooLong { len: said, max: MAX }));
                }
                // The announced length is untrusted: memory grows with the elements received.
                let mut list = Vec::with_capacity(said.min(1024));
                while let Some(element) = seq.next_element()? {
                    if list.len() == MAX {
                        return Err(A::Error::custom(TooLong { len: MAX + 1, max: MAX }));
                    }
                    list.push(element);
                }
                Ok(List(list))
            }
        }

        deserializer.deserialize_seq(Elements(PhantomData))
    }
}

/// At most `MAX` opaque bytes.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Bytes<const MAX: usize>(Vec<u8>);

impl<const MAX: usize> Bytes<MAX> {
    /// Checks the number of bytes.
    pub fn new(bytes: Vec<u8>) -> Result<Self, TooLong> {
        if bytes.len() > MAX { Err(TooLong { len: bytes.len(), max: MAX }) } else { Ok(Self(bytes)) }
    }

    /// Returns the bytes.
    pub fn into_vec(self) -> Vec<u8> {
        self.0
    }
}

impl<const MAX: usize> Deref for Bytes<MAX> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl<const MAX: usize> fmt::Debug for Bytes<MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl<const MAX: usize> Serialize for Bytes<MAX> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de, const MAX: usize> Deserialize<'de> for Bytes<MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Borrowed from the message: the check precedes the copy.
        let bytes = <&[u8]>::deserialize(deserializer)?;
        if bytes.len() > MAX {
            return Err(D::Error::custom(TooLong { len: bytes.len(), max: MAX }));
        }
        Ok(Self(bytes.to_vec()))
    }
}

/// A reason for a report, of at most 256 bytes.
#[derive(Clone, PartialEq, Eq, Default, Serialize)]
#[serde(transparent)]
pub struct Text(String);

impl Text {
    /// Bytes of the longest text.
    pub const BYTES_MAX: usize = 256;

    /// Truncates a text to the permitted length, at a character boundary.
    pub fn new(text: impl Into<String>) -> Self {
        let mut text = text.into();
        let mut end = text.len().min(Self::BYTES_MAX);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        Self(text)
    }

    /// Returns the text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Untrusted: control characters must not reach a terminal or a log.
        self.0.chars().filter(|c| !c.is_control()).try_for_each(|c| write!(f, "{c}"))
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <&str>::deserialize(deserializer)?;
        if text.len() > Self::BYTES_MAX {
            return Err(D::Error::custom(TooLong { len: text.len(), max: Self::BYTES_MAX }));
        }
        Ok(Self(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_longer_than_permitted_is_refused() {
        let four = postcard::to_allocvec(&vec![1_u32, 2, 3, 4]).unwrap();
        assert_eq!(postcard::from_bytes::<List<u32, 4>>(&four).unwrap().to_vec(), [1, 2, 3, 4]);
        assert!(postcard::from_bytes::<List<u32, 3>>(&four).is_err());
        let bytes = postcard::to_allocvec(&Bytes::<4>::new(vec![1, 2, 3, 4]).unwrap()).unwrap();
        assert_eq!(postcard::from_bytes::<Bytes<4>>(&bytes).unwrap().to_vec(), [1, 2, 3, 4]);
        assert!(postcard::from_bytes::<Bytes<3>>(&bytes).is_err());
        let text = postcard::to_allocvec(&"x".repeat(257)).unwrap();
        assert!(postcard::from_bytes::<Text>(&text).is_err());
        assert_eq!(Bytes::<3>::new(vec![0; 4]), Err(TooLong { len: 4, max: 3 }));
        assert_eq!(List::<u8, 3>::new(vec![0; 4]), Err(TooLong { len: 4, max: 3 }));
    }

    #[test]
    fn an_announced_length_allocates_nothing() {
        // A length of 2^32 - 1, and no elements.
        let lie = [0xff, 0xff, 0xff, 0xff, 0x0f];
        assert!(postcard::from_bytes::<List<u64, { usize::MAX }>>(&lie).is_err());
        assert!(postcard::from_bytes::<Bytes<{ usize::MAX }>>(&lie).is_err());
    }

    #[test]
    fn a_text_is_cut_at_a_character_and_shown_without_control_characters() {
        let text = Text::new("é".repeat(200));
        assert_eq!(text.as_str().len(), 256);
        assert_eq!(Text::new("a\x1b[31mb\n").to_string(), "a[31mb");
    }
}
