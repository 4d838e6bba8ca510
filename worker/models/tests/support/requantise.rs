//! A model's file once more, its matrices in another format.

use std::borrow::Cow;

use kernels::WeightFormat;
use kernels::quant::dequantize;
use models::ModelFiles;

use super::convert::metadata;
use super::gguf_writer::GgufWriter;
use super::quantise::quantise;

/// The GGUF file `files` with every matrix in `format`, or in [`fitting`] where a row is not whole blocks.
pub fn requantise(files: &ModelFiles, format: WeightFormat) -> GgufWriter {
    let mut writer = GgufWriter::new();
    metadata(&mut writer, files.config());
    for name in files.tensor_names() {
        let stored = files.tensor(name).expect("it is in the list");
        let mut values = vec![0.0; stored.shape.iter().product()];
        dequantize(stored.format, stored.bytes, &mut values).expect("it was checked when the file was opened");
        match *stored.shape {
            [rows, columns] => {
                let format = fitting(format, columns);
                let bytes = match stored.format == format {
                    true => Cow::Borrowed(stored.bytes),
                    false => Cow::Owned(quantise(format, &values)),
                };
                writer.matrix(name, [rows, columns], format, bytes.into_owned());
            }
            _ => drop(writer.f32s(name, stored.shape, &values)),
        }
    }
    writer
}

/// The format itself, or for rows that are not whole blocks of 256 the one of 32 next to it, as published files have.
pub fn fitting(format: WeightFormat, columns: usize) -> WeightFormat {
    match format {
        _ if columns.is_multiple_of(format.block_elements()) => format,
        WeightFormat::Q4K => WeightFormat::Q5_0,
        WeightFormat::Q5K => WeightFormat::Q5_1,
        _ => WeightFormat::Q8_0,
    }
}
