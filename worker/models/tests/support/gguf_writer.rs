//! Writes small GGUF files, right or wrong on purpose.

use kernels::WeightFormat;
use models::files::tensors::format_of_gguf;

/// A metadata value.
#[derive(Clone)]
pub enum Meta {
    /// `u32`.
    U32(u32),
    /// `f32`.
    F32(f32),
    /// `bool`.
    Bool(bool),
    /// Text.
    Text(String),
    /// Array of texts.
    Texts(Vec<String>),
    /// Array of `i32`.
    I32s(Vec<i32>),
    /// Array of `f32`.
    F32s(Vec<f32>),
}

/// A file in the making.
pub struct GgufWriter {
    /// Version to claim.
    pub version: u32,
    /// Metadata in order.
    pub metadata: Vec<(String, Meta)>,
    /// Name, dimensions as row-major (slowest first), format number, bytes.
    pub tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

impl GgufWriter {
    /// An empty file of version 3.
    pub fn new() -> Self {
        Self { version: 3, metadata: Vec::new(), tensors: Vec::new() }
    }

    /// Adds a pair.
    pub fn meta(&mut self, key: &str, value: Meta) -> &mut Self {
        self.metadata.push((key.to_owned(), value));
        self
    }

    /// Adds an f32 tensor.
    pub fn f32s(&mut self, name: &str, shape: &[usize], values: &[f32]) -> &mut Self {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "{name}");
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensors.push((name.to_owned(), shape.iter().map(|&dim| dim as u64).collect(), 0, bytes));
        self
    }

    /// Adds a matrix whose bytes are in `format`.
    pub fn matrix(&mut self, name: &str, shape: [usize; 2], format: WeightFormat, bytes: Vec<u8>) -> &mut Self {
        let code = (0..64).find(|&code| format_of_gguf(code) == Ok(format)).expect("GGUF has every format");
        self.tensors.push((name.to_owned(), shape.map(|dim| dim as u64).to_vec(), code, bytes));
        self
    }

    /// The file's bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            text(&mut out, key);
            meta(&mut out, value);
        }
        let mut offset = 0u64;
        for (name, shape, format, bytes) in &self.tensors {
            text(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(format.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += (bytes.len() as u64).next_multiple_of(32);
        }
        for (_, _, _, bytes) in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(bytes);
        }
        out
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn meta(out: &mut Vec<u8>, value: &Meta) {
    let mut array = |kind: u32, len: usize| {
        out.extend(9u32.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend((len as u64).to_le_bytes());
    };
    match value {
        Meta::U32(value) => out.extend([4u32.to_le_bytes(), value.to_le_bytes()].concat()),
        Meta::F32(value) => out.extend([6u32.to_le_bytes(), value.to_le_bytes()].concat()),
        Meta::Bool(value) => {
            out.extend(7u32.to_le_bytes());
            out.push(u8::from(*value));
        }
        Meta::Text(value) => {
            out.extend(8u32.to_le_bytes());
            text(out, value);
        }
        Meta::Texts(values) => {
            array(8, values.len());
            values.iter().for_each(|value| text(out, value));
        }
        Meta::I32s(values) => {
            array(5, values.len());
            values.iter().for_each(|value| out.extend(value.to_le_bytes()));
        }
        Meta::F32s(values) => {
            array(6, values.len());
            values.iter().for_each(|value| out.extend(value.to_le_bytes()));
        }
    }
}
