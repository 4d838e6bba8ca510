//! Quantised weights as panels hold them: groups of 32 values, codes in planes, scales beside them.
//!
//! A strip is 16 columns. Of each strip and group of 32 inputs there are, one after the other: at the start of every
//! eighth group the super-block's own scales, the group's scales, the codes. Values come out in the pair order of
//! [`crate::cpu::panels`]: pair `p` is inputs `2 p` and `2 p + 1`, element `e` is column `e / 2`, input `2 p + e % 2`.
//!
//! Codes: either one byte each, `[16 pairs][32]`, or nibbles, `[8][32]` where byte `e` of line `i` holds pair `2 i`
//! low and pair `2 i + 1` high, followed by a plane of bits for each bit above the fourth, `[16 pairs]` u32.
//!
//! Every format's value is `scale * code + minimum`, exact but for one rounding; see [`crate::quant`].

use half::f16;

use crate::cpu::panels::{GROUP, STRIP};
use crate::quant::codes::{Codes, Scales};
use crate::weight::WeightFormat;

/// Groups of a super-block.
const SUPER: usize = 8;
/// Elements of a strip's group.
pub(crate) const ELEMENTS: usize = GROUP * STRIP;

/// How a format's groups lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grouping {
    /// Bits above the fourth in planes; `None` has a byte for each code.
    pub(crate) planes: Option<u8>,
    pub(crate) scale: ScaleKind,
}

/// What stands in a group's header, for each of 16 columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScaleKind {
    /// f16 `d`: `d * (code - zero)`.
    Centred {
        /// Code of the value 0.
        zero: u8,
    },
    /// f16 `d`, f16 `m`: `d * code + m`.
    Minimum,
    /// Super-block f16 `d`, f16 `m`; group u8 `s`, u8 `t`: `d * s * code - m * t`.
    SuperMinimum,
    /// Super-block f16 `d`; i8 `s` for each half of the group: `d * s * (code - 32)`.
    SuperHalves,
}

impl Grouping {
    /// Of a format; `None` when it is not quantised.
    pub(crate) fn of(format: WeightFormat) -> Option<Self> {
        let (planes, scale) = match format {
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => return None,
            WeightFormat::Q8_0 => (None, ScaleKind::Centred { zero: 128 }),
            WeightFormat::Q4_0 => (Some(0), ScaleKind::Centred { zero: 8 }),
            WeightFormat::Q5_0 => (Some(1), ScaleKind::Centred { zero: 16 }),
            WeightFormat::Q4_1 => (Some(0), ScaleKind::Minimum),
            WeightFormat::Q5_1 => (Some(1), ScaleKind::Minimum),
            WeightFormat::Q4K => (Some(0), ScaleKind::SuperMinimum),
            WeightFormat::Q5K => (Some(1), ScaleKind::SuperMinimum),
            WeightFormat::Q6K => (Some(2), ScaleKind::SuperHalves),
        };
        Some(Self { planes, scale })
    }

    pub(crate) fn super_bytes(self) -> usize {
        match self.scale {
            ScaleKind::Centred { .. } | ScaleKind::Minimum => 0,
            ScaleKind::SuperMinimum => 4 * STRIP,
            ScaleKind::SuperHalves => 2 * STRIP,
        }
    }

    pub(crate) fn header_bytes(self) -> usize {
        match self.scale {
            ScaleKind::Minimum => 4 * STRIP,
            ScaleKind::Centred { .. } | ScaleKind::SuperMinimum | ScaleKind::SuperHalves => 2 * STRIP,
        }
    }

    pub(crate) fn code_bytes(self) -> usize {
        match self.planes {
            None => ELEMENTS,
            Some(planes) => ELEMENTS / 2 + usize::from(planes) * ELEMENTS / 8,
        }
    }

    fn group_bytes(self) -> usize {
        self.header_bytes() + self.code_bytes()
    }

    /// Bytes of a panel of two strips over `n_groups`.
    pub(crate) fn panel_bytes(self, n_groups: usize) -> usize {
        2 * (n_groups * self.group_bytes() + n_groups.div_ceil(SUPER) * self.super_bytes())
    }

    /// Where a strip's group lies in its panel: at the super-block's scales when it begins one, else at its header.
    pub(crate) fn offset(self, group: usize, strip: usize) -> usize {
        let before = 2 * (group * self.group_bytes() + group.div_ceil(SUPER) * self.super_bytes());
        let own = self.group_bytes() + if group.is_multiple_of(SUPER) { self.super_bytes() } else { 0 };
        before + strip * own
    }

    /// Where a group's header lies, and where the scales of its super-block do.
    pub(crate) fn places(self, group: usize, strip: usize) -> (usize, usize) {
        let first = group - group % SUPER;
        let header = self.offset(group, strip) + if group == first { self.super_bytes() } else { 0 };
        (header, self.offset(first, strip))
    }

    /// Writes one column of one group into a zeroed panel.
    pub(crate) fn put(self, panel: &mut [u8], group: usize, column: usize, codes: &Codes) {
        let (strip, column) = (column / STRIP, column % STRIP);
        let (header, super_block) = self.places(group, strip);
        let half = |panel: &mut [u8], at: usize, bits: f16| {
            panel[at + 2 * column..][..2].copy_from_slice(&bits.to_le_bytes());
        };
        match codes.scales {
            Scales::Centred(d) => half(panel, header, d),
            Scales::Minimum(d, m) => {
                half(panel, header, d);
                half(panel, header + 2 * STRIP, m);
            }
            Scales::SuperMinimum { d, m, s, t } => {
                half(panel, super_block, d);
                half(panel, super_block + 2 * STRIP, m);
                (panel[header + column], panel[header + STRIP + column]) = (s, t);
            }
            Scales::SuperHalves { d, s } => {
                half(panel, super_block, d);
                (panel[header + column], panel[header + STRIP + column]) =
                    (s[0].cast_unsigned(), s[1].cast_unsigned());
            }
        }
        let codes_at = header + self.header_bytes();
        for (input, &code) in codes.codes.iter().enumerate() {
            let (pair, element) = (input / 2, 2 * column + input % 2);
            match self.planes {
                None => panel[codes_at + pair * 32 + element] = code,
                Some(planes) => {
                    panel[codes_at + pair / 2 * 32 + element] |= (code & 15) << (4 * (pair % 2));
                    for plane in 0..usize::from(planes) {
                        let bit = code >> (4 + plane) & 1;
                        let at = codes_at + ELEMENTS / 2 + plane * ELEMENTS / 8 + 4 * pair + element / 8;
                        panel[at] |= bit << (element % 8);
                    }
                }
            }
        }
    }

    /// Code of an element of a strip's group, whose codes are given.
    fn code(self, codes: &[u8], pair: usize, element: usize) -> u8 {
        let Some(planes) = self.planes else { return codes[pair * 32 + element] };
        let mut code = codes[pair / 2 * 32 + element] >> (4 * (pair % 2)) & 15;
        for plane in 0..usize::from(planes) {
            let byte = codes[ELEMENTS / 2 + plane * ELEMENTS / 8 + 4 * pair + element / 8];
            code |= (byte >> (element % 8) & 1) << (4 + plane);
        }
        code
    }

    /// Scale and minimum of a column in one half of a strip's group.
    fn scale(self, panel: &[u8], (header, super_block): (usize, usize), column: usize, half: usize) -> (f32, f32) {
        let f16_at = |at: usize| f16::from_le_bytes([panel[at + 2 * column], panel[at + 2 * column + 1]]).to_f32();
        match self.scale {
            ScaleKind::Centred { zero } => (f16_at(header), -f32::from(zero) * f16_at(header)),
            ScaleKind::Minimum => (f16_at(header), f16_at(header + 2 * STRIP)),
            ScaleKind::SuperMinimum => {
                let (s, t) = (f32::from(panel[header + column]), f32::from(panel[header + STRIP + column]));
                (f16_at(super_block) * s, -(f16_at(super_block + 2 * STRIP) * t))
            }
            ScaleKind::SuperHalves => {
                let scale = f16_at(super_block) * f32::from(panel[header + half * STRIP + column].cast_signed());
                (scale, -32.0 * scale)
            }
        }
    }

    /// Values of one column of a panel, over all inputs.
    pub(crate) fn column(self, panel: &[u8], column: usize, out: &mut [f32]) {
        let (strip, column) = (column / STRIP, column % STRIP);
        for (group, out) in out.chunks_exact_mut(GROUP).enumerate() {
            let places = self.places(group, strip);
            let codes = &panel[places.0 + self.header_bytes()..][..self.code_bytes()];
            for (input, out) in out.iter_mut().enumerate() {
                let (scale, minimum) = self.scale(panel, places, column, input / 16);
                *out = scale * f32::from(self.code(codes, input / 2, 2 * column + input % 2)) + minimum;
            }
        }
    }

    /// Values of one strip's group, rounded to bf16, in pair order: the plain form that vector code must equal.
    #[inline(always)]
    pub(crate) fn expand(self, panel: &[u8], group: usize, strip: usize, out: &mut [u16]) {
        let places = self.places(group, strip);
        let codes = &panel[places.0 + self.header_bytes()..][..self.code_bytes()];
        for half in 0..2 {
            let (mut scales, mut minima) = ([0.0f32; 2 * STRIP], [0.0f32; 2 * STRIP]);
            for column in 0..STRIP {
                let (scale, minimum) = self.scale(panel, places, column, half);
                scales[2 * column..2 * column + 2].fill(scale);
                minima[2 * column..2 * column + 2].fill(minimum);
            }
            for pair in 8 * half..8 * half + 8 {
                let line = &mut out[pair * 2 * STRIP..][..2 * STRIP];
                for (element, out) in line.iter_mut().enumerate() {
                    let code = f32::from(self.code(codes, pair, element));
                    *out = crate::cpu::dot::to_bf16(scales[element] * code + minima[element]);
                }
            }
        }
    }
}
