//! Quantised weights as panels hold them: groups of 32 inputs, codes in planes, scales beside them.
//!
//! A strip is 16 columns. Of each group there are, each part for one strip and then the other: at the start of every
//! eighth group the super-block's own scales, the group's scales, the codes; codes begin at cache lines. They are in quad
//! order: quad `q` is inputs
//! `4 q..4 q + 4`, element `e` of its 64 is column `e / 4`, input `4 q + e % 4`: what one AVX-512 register of bytes holds.
//!
//! Codes: either one byte each, `[8 quads][64]`, or nibbles, `[4][64]` where byte `e` of line `i` holds quad `2 i` low
//! and quad `2 i + 1` high, followed by a plane of bits for each bit above the fourth, `[8 quads]` u64.
//!
//! Products in bf16: [`Unpack`], or [`DirectDot`] for few rows.
//!
//! Products in 8 bits: activations are rounded with a scale for each row and group, codes times activations are summed
//! exactly in 32 bits, and scaled sums are added in f32, groups ascending. The order is the same for every number of
//! rows; instruction sets differ only in whether a multiply and add rounds once or twice.

use std::ops::Range;

use half::f16;

use crate::cpu::dot::to_bf16;
use crate::cpu::lanes::{LINE, Lanes};
use crate::cpu::panels::{GROUP, STRIP};
use crate::quant::codes::{Codes, Scales};
use crate::weight::WeightFormat;

/// Groups of a super-block.
const SUPER: usize = 8;
/// Quads of a group.
pub(crate) const QUADS: usize = GROUP / 4;
/// Elements of a quad of inputs of a strip.
pub(crate) const QUAD: usize = 4 * STRIP;
/// Elements of a strip's group.
pub(crate) const ELEMENTS: usize = GROUP * STRIP;

/// How a format's groups lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grouping {
    /// Bits above the fourth in planes; `None` has a byte for each code.
    pub(crate) planes: Option<u8>,
    pub(crate) scale: ScaleKind,
}

/// Adding it changes no number, not even -0.
const NOTHING: f32 = -0.0;

/// Offsets in a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Places {
    pub(crate) header: usize,
    pub(crate) codes: usize,
    /// Scales of the super-block, where the format has one.
    pub(crate) super_block: usize,
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

    #[inline(always)]
    pub(crate) fn super_bytes(self) -> usize {
        match self.scale {
            ScaleKind::Centred { .. } | ScaleKind::Minimum => 0,
            ScaleKind::SuperMinimum => 4 * STRIP,
            ScaleKind::SuperHalves => 2 * STRIP,
        }
    }

    #[inline(always)]
    pub(crate) fn header_bytes(self) -> usize {
        match self.scale {
            ScaleKind::Minimum => 4 * STRIP,
            ScaleKind::Centred { .. } | ScaleKind::SuperMinimum | ScaleKind::SuperHalves => 2 * STRIP,
        }
    }

    #[inline(always)]
    pub(crate) fn code_bytes(self) -> usize {
        match self.planes {
            None => ELEMENTS,
            Some(planes) => ELEMENTS / 2 + usize::from(planes) * ELEMENTS / 8,
        }
    }

    /// Bytes of a panel of two strips over `n_groups`: whole cache lines.
    #[inline(always)]
    pub(crate) fn panel_bytes(self, n_groups: usize) -> usize {
        2 * (n_groups * (self.header_bytes() + self.code_bytes()) + n_groups.div_ceil(SUPER) * self.super_bytes())
    }

    /// Where the parts of a strip's group lie in their panel.
    #[inline(always)]
    pub(crate) fn places(self, group: usize, strip: usize) -> Places {
        let begins = if group.is_multiple_of(SUPER) { 2 * self.super_bytes() } else { 0 };
        let headers = self.panel_bytes(group) + begins;
        Places {
            header: headers + strip * self.header_bytes(),
            codes: headers + 2 * self.header_bytes() + strip * self.code_bytes(),
            super_block: self.panel_bytes(group - group % SUPER) + strip * self.super_bytes(),
        }
    }

    /// Asks for groups of a panel, or of the panels behind it.
    ///
    /// # Safety
    /// The target features of `V` are enabled in the caller.
    #[inline(always)]
    pub(crate) unsafe fn prefetch<V: Lanes>(self, panel: &[u8], groups: Range<usize>) {
        for at in (self.panel_bytes(groups.start)..self.panel_bytes(groups.end)).step_by(LINE) {
            // SAFETY: features are the caller's promise; a prefetch may name any address.
            unsafe { V::prefetch(panel.as_ptr().wrapping_add(at)) };
        }
    }

    /// Writes one column of one group into a zeroed panel.
    pub(crate) fn put(self, panel: &mut [u8], group: usize, column: usize, codes: &Codes) {
        let (strip, column) = (column / STRIP, column % STRIP);
        let Places { header, codes: codes_at, super_block } = self.places(group, strip);
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
                (panel[header + column], panel[header + STRIP + column]) = (s[0].cast_unsigned(), s[1].cast_unsigned());
            }
        }
        self.put_codes(&mut panel[codes_at..][..self.code_bytes()], column, &codes.codes);
    }

    /// Writes the codes of one column of a strip's group, a quad at a time: each has its own bytes but for planes.
    fn put_codes(self, target: &mut [u8], column: usize, codes: &[u8; GROUP]) {
        let quads: [u32; GROUP / 4] =
            std::array::from_fn(|quad| u32::from_le_bytes(std::array::from_fn(|i| codes[4 * quad + i])));
        let mut line = |line: usize, word: u32| {
            target[line * QUAD + 4 * column..][..4].copy_from_slice(&word.to_le_bytes());
        };
        let Some(planes) = self.planes else {
            return quads.iter().enumerate().for_each(|(quad, &word)| line(quad, word));
        };
        for (pair, quads) in quads.chunks_exact(2).enumerate() {
            line(pair, quads[0] & 0x0f0f_0f0f | (quads[1] & 0x0f0f_0f0f) << 4);
        }
        for plane in 0..usize::from(planes) {
            for (quad, &word) in quads.iter().enumerate() {
                // Moves the lowest bits of four bytes beside each other: all partial products are at different bits.
                let bits = (word >> (4 + plane) & 0x0101_0101).wrapping_mul(0x0102_0408) >> 24 & 15;
                target[plane_byte(plane, quad, 4 * column)] |= (bits as u8) << (4 * (column % 2));
            }
        }
    }

    /// Code of an element of a strip's group, whose codes are given.
    #[inline(always)]
    pub(crate) fn code(self, codes: &[u8], quad: usize, element: usize) -> u8 {
        let Some(planes) = self.planes else { return codes[quad * QUAD + element] };
        let mut code = codes[quad / 2 * QUAD + element] >> (4 * (quad % 2)) & 15;
        for plane in 0..usize::from(planes) {
            code |= (codes[plane_byte(plane, quad, element)] >> (element % 8) & 1) << (4 + plane);
        }
        code
    }

    /// Scale and minimum of a column in one half of a strip's group: `scale * (code - zero) + minimum`.
    pub(crate) fn scale(
        self,
        panel: &[u8],
        Places { header, super_block, .. }: Places,
        column: usize,
        half: usize,
    ) -> (f32, f32) {
        let f16_at = |at: usize| f16::from_le_bytes([panel[at + 2 * column], panel[at + 2 * column + 1]]).to_f32();
        match self.scale {
            ScaleKind::Centred { .. } => (f16_at(header), NOTHING),
            ScaleKind::Minimum => (f16_at(header), f16_at(header + 2 * STRIP)),
            ScaleKind::SuperMinimum => {
                let (s, t) = (f32::from(panel[header + column]), f32::from(panel[header + STRIP + column]));
                (f16_at(super_block) * s, -(f16_at(super_block + 2 * STRIP) * t))
            }
            ScaleKind::SuperHalves => {
                let scale = f16_at(super_block) * f32::from(panel[header + half * STRIP + column].cast_signed());
                (scale, NOTHING)
            }
        }
    }

    /// Values of one column of a panel, over all inputs.
    pub(crate) fn column(self, panel: &[u8], column: usize, out: &mut [f32]) {
        let (strip, column) = (column / STRIP, column % STRIP);
        for (group, out) in out.chunks_exact_mut(GROUP).enumerate() {
            self.group(panel, self.places(group, strip), column, out);
        }
    }

    /// Values of one column of a strip's group.
    fn group(self, panel: &[u8], places: Places, column: usize, out: &mut [f32]) {
        let codes = &panel[places.codes..][..self.code_bytes()];
        let zero = self.scale.zero() as f32;
        for (input, out) in out.iter_mut().enumerate() {
            let (scale, minimum) = self.scale(panel, places, column, input / 16);
            *out = scale * (f32::from(self.code(codes, input / 4, 4 * column + input % 4)) - zero) + minimum;
        }
    }
}

/// Where the bit of an element lies in a group's codes.
fn plane_byte(plane: usize, quad: usize, element: usize) -> usize {
    ELEMENTS / 2 + plane * ELEMENTS / 8 + quad * QUAD / 8 + element / 8
}

/// Activations of one row and group beside their codes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub(crate) struct Factor {
    /// Value of a code of 1.
    pub(crate) scale: f32,
    /// Sum of the rounded values.
    pub(crate) sum: f32,
    /// Sums of the codes of both halves.
    pub(crate) code_sums: [i32; 2],
}

/// `sums[r][c] = x[r] . panel[c]` over all groups of a panel.
pub(crate) struct GroupedDot<'a> {
    pub(crate) grouping: Grouping,
    pub(crate) panel: &'a [u8],
    /// `[rows, groups, 32]` signed codes.
    pub(crate) x: &'a [i8],
    /// `[rows, groups]`.
    pub(crate) factors: &'a [Factor],
    pub(crate) groups: usize,
    pub(crate) rows: usize,
    /// `[rows, 32]`.
    pub(crate) sums: &'a mut [f32],
    /// Scratch for [`SLAB`] groups of codes, `[groups][2 strips][8 quads][64]`.
    pub(crate) bytes: &'a mut [u8],
}

/// Groups of a panel that become bf16.
pub(crate) struct Unpack<'a> {
    pub(crate) grouping: Grouping,
    pub(crate) panel: &'a [u8],
    pub(crate) groups: Range<usize>,
    /// `[groups]` parts of a bf16 panel, see [`crate::cpu::panels`].
    pub(crate) out: &'a mut [u16],
}

impl Unpack<'_> {
    /// Checks what kernels rely on.
    pub(crate) fn check(&self) {
        assert!(self.panel.len() >= self.grouping.panel_bytes(self.groups.end), "a panel");
        assert!(self.out.len() >= self.groups.len() * 2 * ELEMENTS, "room for bf16");
    }
}

/// Most rows of a [`DirectDot`]; for more it pays to unpack to memory first.
pub(crate) const DIRECT_ROWS: usize = 4;

/// `sums[r][c] += x[r] . panel[c]` in bf16 over all groups of a panel, for few rows.
pub(crate) struct DirectDot<'a> {
    pub(crate) grouping: Grouping,
    pub(crate) panel: &'a [u8],
    pub(crate) groups: usize,
    /// Row `r` starts at `r * stride`.
    pub(crate) x: &'a [u16],
    pub(crate) stride: usize,
    pub(crate) rows: usize,
    /// `[rows, 32]`.
    pub(crate) sums: &'a mut [f32],
}

impl DirectDot<'_> {
    /// Checks what kernels rely on.
    pub(crate) fn check(&self) {
        assert!((1..=DIRECT_ROWS).contains(&self.rows), "few rows");
        assert!(self.panel.len() >= self.grouping.panel_bytes(self.groups), "a panel");
        let depth = self.groups * GROUP;
        assert!(self.stride >= depth && self.x.len() >= (self.rows - 1) * self.stride + depth, "rows of activations");
        assert!(self.sums.len() >= self.rows * 2 * STRIP, "sums");
    }
}

/// The plain form.
pub(crate) fn unpack(work: &mut Unpack<'_>) {
    work.check();
    let mut values = [0.0; GROUP];
    for (index, part) in work.out.chunks_exact_mut(ELEMENTS).take(2 * work.groups.len()).enumerate() {
        let places = work.grouping.places(work.groups.start + index / 2, index % 2);
        for column in 0..STRIP {
            work.grouping.group(work.panel, places, column, &mut values);
            for (pair, values) in values.chunks_exact(2).enumerate() {
                let at = pair * 2 * STRIP + 2 * column;
                (part[at], part[at + 1]) = (to_bf16(values[0]), to_bf16(values[1]));
            }
        }
    }
}

/// Groups whose codes are unpacked at a time: 8 KB.
pub(crate) const SLAB: usize = 8;

impl GroupedDot<'_> {
    /// Checks what kernels rely on.
    pub(crate) fn check(&self) {
        let n = self.rows * self.groups;
        assert!(self.x.len() >= n * GROUP && self.factors.len() >= n, "rows of activations");
        assert!(self.panel.len() >= self.grouping.panel_bytes(self.groups), "a panel");
        assert!(self.sums.len() >= self.rows * 2 * STRIP, "sums");
        assert!(self.bytes.len() >= SLAB * 2 * ELEMENTS, "scratch");
    }
}

/// The plain form.
pub(crate) fn reference(dot: &mut GroupedDot<'_>) {
    dot.check();
    let grouping = dot.grouping;
    for row in 0..dot.rows {
        for column in 0..2 * STRIP {
            let (strip, lane) = (column / STRIP, column % STRIP);
            let mut sum = 0.0f32;
            for group in 0..dot.groups {
                let places = grouping.places(group, strip);
                let codes = &dot.panel[places.codes..][..grouping.code_bytes()];
                let (x, factor) =
                    (&dot.x[(row * dot.groups + group) * GROUP..][..GROUP], dot.factors[row * dot.groups + group]);
                let product = |half: usize| -> i32 {
                    let inputs = half * GROUP / 2..(half + 1) * GROUP / 2;
                    inputs.map(|i| i32::from(grouping.code(codes, i / 4, 4 * lane + i % 4)) * i32::from(x[i])).sum()
                };
                let zero = grouping.scale.zero();
                let centred = |half: usize| product(half) - zero * factor.code_sums[half];
                let (scale, minimum) = grouping.scale(dot.panel, places, lane, 0);
                match grouping.scale {
                    ScaleKind::SuperHalves => {
                        let second = grouping.scale(dot.panel, places, lane, 1).0;
                        sum += scale * factor.scale * centred(0) as f32;
                        sum += second * factor.scale * centred(1) as f32;
                    }
                    ScaleKind::Centred { .. } => sum += scale * factor.scale * (centred(0) + centred(1)) as f32,
                    ScaleKind::Minimum | ScaleKind::SuperMinimum => {
                        sum += scale * factor.scale * (centred(0) + centred(1)) as f32;
                        sum += minimum * factor.sum;
                    }
                }
            }
            dot.sums[row * 2 * STRIP + column] = sum;
        }
    }
}

impl ScaleKind {
    /// Code of the value 0 where there is one.
    pub(crate) fn zero(self) -> i32 {
        match self {
            Self::Centred { zero } => i32::from(zero),
            Self::SuperHalves => 32,
            Self::Minimum | Self::SuperMinimum => 0,
        }
    }
}

/// Rounds a row of whole groups to 8 bits; the largest magnitude of a group becomes 127.
///
/// What is not a number becomes some code with a scale that is none, so that it shows in the result.
pub(crate) fn quantize(x: &[f32], codes: &mut [i8], factors: &mut [Factor]) {
    for ((x, codes), factor) in x.chunks_exact(GROUP).zip(codes.chunks_exact_mut(GROUP)).zip(factors) {
        let mut lanes = [0.0f32; 16];
        let mut poison = [0.0f32; 16];
        for x in x.chunks_exact(16) {
            for ((lane, poison), x) in lanes.iter_mut().zip(&mut poison).zip(x) {
                *lane = if x.abs() > *lane { x.abs() } else { *lane };
                *poison += x * 0.0;
            }
        }
        let largest = lanes.into_iter().fold(0.0f32, |a, b| if a > b { a } else { b });
        let inverse = if largest > 0.0 && largest.is_finite() { 127.0 / largest } else { 0.0 };
        for (code, x) in codes.iter_mut().zip(x) {
            *code = crate::cpu::dot::nearest_byte(x * inverse).cast_signed();
        }
        let sum = |codes: &[i8]| codes.iter().map(|&code| i32::from(code)).sum::<i32>();
        let code_sums = [sum(&codes[..GROUP / 2]), sum(&codes[GROUP / 2..])];
        let scale = largest / 127.0 + poison.iter().sum::<f32>();
        *factor = Factor { scale, sum: scale * (code_sums[0] + code_sums[1]) as f32, code_sums };
    }
}
