//! Reads GGUF, versions 2 and 3, little-endian: pure over a byte slice.
//!
//! The format is `magic "GGUF", version u32, tensor count u64, metadata count u64`, then the metadata pairs, then the
//! tensor table, then (aligned) the tensors' bytes.
//! Every count and offset is checked against the bytes that are there before anything is allocated for it, and arrays
//! are left in place until somebody reads them.

use std::collections::BTreeMap;

use kernels::WeightFormat;
use thiserror::Error;

use super::tensors::{FormatError, bytes_of, format_of_gguf};

const MAGIC: [u8; 4] = *b"GGUF";
const ALIGNMENT_DEFAULT: u64 = 32;
const DIMENSIONS_MAX: u32 = 4;
/// Least bytes of a metadata pair: key length, one-byte value and its type.
const PAIR_BYTES_MIN: u64 = 8 + 4 + 1;
/// Least bytes of a tensor entry: name length, dimension count, type, offset.
const ENTRY_BYTES_MIN: u64 = 8 + 4 + 4 + 8;

/// What is wrong with a GGUF file.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum GgufError {
    /// The first four bytes are not `GGUF`.
    #[error("it starts with {0:02x?} instead of \"GGUF\"")]
    Magic(Vec<u8>),
    /// The version is neither 2 nor 3 (a byte-swapped number is a big-endian file).
    #[error("version {0} is not supported (2 and 3 are, little-endian)")]
    Version(u32),
    /// The file ends inside something.
    #[error("{what} at byte {offset} needs {need} bytes, {have} are left")]
    Truncated {
        /// What was being read.
        what: String,
        /// Where.
        offset: u64,
        /// Bytes it takes.
        need: u64,
        /// Bytes there are.
        have: u64,
    },
    /// Text is not UTF-8.
    #[error("{what} at byte {offset} is not UTF-8")]
    Text {
        /// What was being read.
        what: String,
        /// Where.
        offset: u64,
    },
    /// A number is outside its range.
    #[error("{what} is {value}, expected {expected}")]
    Value {
        /// What was being read.
        what: String,
        /// What it is.
        value: String,
        /// What it could be.
        expected: &'static str,
    },
    /// Two pairs or two tensors have one name.
    #[error("{0} occurs twice")]
    Duplicate(String),
    /// Two tensors share bytes.
    #[error("tensors {first} and {second} overlap")]
    Overlap {
        /// The one that begins first.
        first: String,
        /// The one that begins inside it.
        second: String,
    },
    /// A tensor's format is unknown.
    #[error("tensor {tensor}: {format}")]
    Format {
        /// The tensor.
        tensor: String,
        /// What it has.
        format: FormatError,
    },
}

/// A parsed header over the file's bytes.
#[derive(Debug)]
pub struct Gguf<'a> {
    version: u32,
    metadata: BTreeMap<&'a str, Value<'a>>,
    tensors: Vec<GgufTensor<'a>>,
}

/// A tensor's place in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// Number format.
    pub format: WeightFormat,
    /// Dimensions, slowest first (the file has them fastest first).
    pub shape: Vec<usize>,
    /// Bytes from the start of the file.
    pub offset: usize,
    /// Bytes it takes.
    pub len: usize,
}

/// A metadata value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// Either float.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// Text.
    Text(&'a str),
    /// Values of one type.
    Array(Array<'a>),
}

/// An array of scalars or texts, still in the file's encoding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Array<'a> {
    kind: Kind,
    len: usize,
    bytes: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

impl<'a> Gguf<'a> {
    /// Parses the header and checks that every tensor lies inside `bytes`.
    ///
    /// # Errors
    /// The first thing that is wrong, with its place and value.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, GgufError> {
        let mut cursor = Cursor { bytes, at: 0 };
        let magic = cursor.take(4, || "the magic".into())?;
        if magic != MAGIC {
            return Err(GgufError::Magic(magic.to_vec()));
        }
        let version = cursor.u32(|| "the version".into())?;
        if !(2..=3).contains(&version) {
            return Err(GgufError::Version(version));
        }
        let n_tensors = cursor.u64(|| "the tensor count".into())?;
        let n_pairs = cursor.u64(|| "the metadata count".into())?;
        cursor.check_count(n_pairs, PAIR_BYTES_MIN, || format!("{n_pairs} metadata pairs"))?;
        let mut metadata = BTreeMap::new();
        for index in 0..n_pairs {
            let key = cursor.text(|| format!("metadata key {index}"))?;
            let value = cursor.value(key)?;
            if metadata.insert(key, value).is_some() {
                return Err(GgufError::Duplicate(format!("metadata key {key}")));
            }
        }
        let n_tensors = cursor.check_count(n_tensors, ENTRY_BYTES_MIN, || format!("{n_tensors} tensor entries"))?;
        let alignment = alignment(&metadata)?;
        let mut tensors = Vec::with_capacity(n_tensors);
        for index in 0..n_tensors {
            tensors.push(cursor.tensor(index)?);
        }
        place(&mut tensors, cursor.at as u64, alignment, bytes.len() as u64)?;
        Ok(Self { version, metadata, tensors })
    }

    /// Version of the format.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Looks a metadata value up.
    pub fn get(&self, key: &str) -> Option<Value<'a>> {
        self.metadata.get(key).copied()
    }

    /// All tensors in the file's order.
    pub fn tensors(&self) -> &[GgufTensor<'a>] {
        &self.tensors
    }
}

impl<'a> Array<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements, one by one.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let kind = self.kind;
        let mut cursor = Cursor { bytes: self.bytes, at: 0 };
        (0..self.len).map_while(move |_| cursor.scalar(kind, || "an array element".into()).ok())
    }
}

/// Turns offsets inside the data section into offsets in the file, and checks them.
fn place(tensors: &mut [GgufTensor<'_>], header_end: u64, alignment: u64, file_len: u64) -> Result<(), GgufError> {
    if tensors.is_empty() {
        return Ok(());
    }
    let data_start = header_end.checked_next_multiple_of(alignment).unwrap_or(u64::MAX);
    let mut names: Vec<&str> = tensors.iter().map(|tensor| tensor.name).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(GgufError::Duplicate(format!("tensor {}", pair[0])));
    }
    for tensor in &mut *tensors {
        let inside = tensor.offset as u64;
        if !inside.is_multiple_of(alignment) {
            return Err(GgufError::Value {
                what: format!("offset of tensor {}", tensor.name),
                value: inside.to_string(),
                expected: "a multiple of the alignment",
            });
        }
        let offset = data_start.saturating_add(inside);
        if offset.checked_add(tensor.len as u64).is_none_or(|end| end > file_len) {
            return Err(GgufError::Truncated {
                what: format!("tensor {}", tensor.name),
                offset,
                need: tensor.len as u64,
                have: file_len.saturating_sub(offset),
            });
        }
        tensor.offset = offset as usize;
    }
    check_apart(tensors)
}

/// Checks that no byte belongs to two tensors: shared ones would let a small file claim a large model.
fn check_apart(tensors: &[GgufTensor<'_>]) -> Result<(), GgufError> {
    let mut by_offset: Vec<_> = tensors.iter().filter(|tensor| tensor.len > 0).collect();
    by_offset.sort_unstable_by_key(|tensor| tensor.offset);
    match by_offset.windows(2).find(|pair| pair[0].offset + pair[0].len > pair[1].offset) {
        Some(pair) => Err(GgufError::Overlap { first: pair[0].name.to_owned(), second: pair[1].name.to_owned() }),
        None => Ok(()),
    }
}

fn alignment(metadata: &BTreeMap<&str, Value<'_>>) -> Result<u64, GgufError> {
    match metadata.get("general.alignment") {
        None => Ok(ALIGNMENT_DEFAULT),
        Some(Value::Unsigned(value)) if value.is_power_of_two() && (8..=1 << 20).contains(value) => Ok(*value),
        Some(other) => Err(GgufError::Value {
            what: "general.alignment".into(),
            value: format!("{other:?}"),
            expected: "a power of two from 8 to 1048576",
        }),
    }
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    fn take(&mut self, n: u64, what: impl FnOnce() -> String) -> Result<&'a [u8], GgufError> {
        if n > self.left() {
            return Err(GgufError::Truncated { what: what(), offset: self.at as u64, need: n, have: self.left() });
        }
        let taken = &self.bytes[self.at..self.at + n as usize];
        self.at += n as usize;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: impl FnOnce() -> String) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: impl FnOnce() -> String) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: impl FnOnce() -> String) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Checks that `count` things of at least `bytes_min` bytes each can follow.
    fn check_count(&self, count: u64, bytes_min: u64, what: impl FnOnce() -> String) -> Result<usize, GgufError> {
        let need = count.saturating_mul(bytes_min);
        if need > self.left() {
            return Err(GgufError::Truncated { what: what(), offset: self.at as u64, need, have: self.left() });
        }
        Ok(count as usize)
    }

    fn text(&mut self, what: impl Fn() -> String) -> Result<&'a str, GgufError> {
        let len = self.u64(&what)?;
        let offset = self.at as u64;
        let bytes = self.take(len, &what)?;
        std::str::from_utf8(bytes).map_err(|_| GgufError::Text { what: what(), offset })
    }

    fn kind(&mut self, key: &str) -> Result<Kind, GgufError> {
        const KINDS: [Kind; 13] = [
            Kind::U8,
            Kind::I8,
            Kind::U16,
            Kind::I16,
            Kind::U32,
            Kind::I32,
            Kind::F32,
            Kind::Bool,
            Kind::Text,
            Kind::Array,
            Kind::U64,
            Kind::I64,
            Kind::F64,
        ];
        let code = self.u32(|| format!("type of {key}"))?;
        KINDS.get(code as usize).copied().ok_or_else(|| GgufError::Value {
            what: format!("type of {key}"),
            value: code.to_string(),
            expected: "0 to 12",
        })
    }

    fn value(&mut self, key: &str) -> Result<Value<'a>, GgufError> {
        let what = || format!("value of {key}");
        let kind = self.kind(key)?;
        if kind != Kind::Array {
            return self.scalar(kind, what);
        }
        let kind = self.kind(key)?;
        let count = self.u64(what)?;
        let len = self.check_count(count, kind.bytes_min(), || format!("{count} elements of {key}"))?;
        let start = self.at;
        match kind {
            Kind::Array => {
                return Err(GgufError::Value {
                    what: format!("element type of {key}"),
                    value: "array".into(),
                    expected: "no arrays in arrays",
                });
            }
            Kind::Text => (0..len).try_for_each(|index| self.text(|| format!("element {index} of {key}")).map(drop))?,
            _ => drop(self.take(len as u64 * kind.bytes_min(), what)?),
        }
        Ok(Value::Array(Array { kind, len, bytes: &self.bytes[start..self.at] }))
    }

    fn scalar(&mut self, kind: Kind, what: impl Fn() -> String) -> Result<Value<'a>, GgufError> {
        Ok(match kind {
            Kind::U8 => Value::Unsigned(self.array::<1>(what)?[0].into()),
            Kind::I8 => Value::Signed(i8::from_le_bytes(self.array(what)?).into()),
            Kind::U16 => Value::Unsigned(u16::from_le_bytes(self.array(what)?).into()),
            Kind::I16 => Value::Signed(i16::from_le_bytes(self.array(what)?).into()),
            Kind::U32 => Value::Unsigned(self.u32(what)?.into()),
            Kind::I32 => Value::Signed(i32::from_le_bytes(self.array(what)?).into()),
            Kind::F32 => Value::Float(f32::from_le_bytes(self.array(what)?).into()),
            Kind::Bool => Value::Bool(self.array::<1>(what)?[0] != 0),
            Kind::U64 => Value::Unsigned(self.u64(what)?),
            Kind::I64 => Value::Signed(i64::from_le_bytes(self.array(what)?)),
            Kind::F64 => Value::Float(f64::from_le_bytes(self.array(what)?)),
            Kind::Text | Kind::Array => Value::Text(self.text(what)?),
        })
    }

    /// Reads one entry of the tensor table; its offset still counts from the data section.
    fn tensor(&mut self, index: usize) -> Result<GgufTensor<'a>, GgufError> {
        let name = self.text(|| format!("name of tensor {index}"))?;
        let bad = |what: &str, value: String, expected| GgufError::Value {
            what: format!("{what} of tensor {name}"),
            value,
            expected,
        };
        let n_dims = self.u32(|| format!("dimension count of tensor {name}"))?;
        if !(1..=DIMENSIONS_MAX).contains(&n_dims) {
            return Err(bad("dimension count", n_dims.to_string(), "1 to 4"));
        }
        let mut shape = Vec::with_capacity(n_dims as usize);
        for _ in 0..n_dims {
            let dim = self.u64(|| format!("dimensions of tensor {name}"))?;
            shape.push(usize::try_from(dim).map_err(|_| bad("dimension", dim.to_string(), "at most 2^63"))?);
        }
        shape.reverse();
        let code = self.u32(|| format!("format of tensor {name}"))?;
        let format = format_of_gguf(code).map_err(|format| GgufError::Format { tensor: name.to_owned(), format })?;
        let offset = self.u64(|| format!("offset of tensor {name}"))?;
        let offset = usize::try_from(offset).map_err(|_| bad("offset", offset.to_string(), "at most 2^63"))?;
        let len = bytes_of(format, &shape).ok_or_else(|| {
            bad("shape", format!("{shape:?} of {format:?}"), "whole blocks and fewer than 2^63 bytes")
        })?;
        Ok(GgufTensor { name, format, shape, offset, len })
    }
}

impl Kind {
    /// Bytes of a scalar; of a text, those of its length.
    fn bytes_min(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::Text => 8,
            Self::Array => 12,
        }
    }
}
