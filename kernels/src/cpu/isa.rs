//! Instruction sets of the CPU path: which there are, which this machine has.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// An instruction set that kernels are written for; larger is faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain code, on every machine: the oracle of all others.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Isa {
    /// All of them, slowest first.
    pub const ALL: [Self; 3] = [Self::Scalar, Self::Avx2, Self::Avx512];

    /// The fastest that this CPU has.
    pub fn best() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.missing().is_none()).unwrap_or(Self::Scalar)
    }

    /// Those that this CPU has, slowest first.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.missing().is_none())
    }

    /// Its name in configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// Checks that this CPU has it.
    ///
    /// # Errors
    /// [`Error::IsaMissing`] with the first feature that is lacking.
    pub fn check(self) -> Result<()> {
        self.missing().map_or(Ok(()), |missing| Err(Error::IsaMissing { wanted: self.name(), missing }))
    }

    #[cfg(target_arch = "x86_64")]
    fn missing(self) -> Option<&'static str> {
        let avx2 = [
            ("avx2", is_x86_feature_detected!("avx2")),
            ("fma", is_x86_feature_detected!("fma")),
            ("f16c", is_x86_feature_detected!("f16c")),
        ];
        let avx512 = [
            ("avx512f", is_x86_feature_detected!("avx512f")),
            ("avx512bw", is_x86_feature_detected!("avx512bw")),
            ("avx512dq", is_x86_feature_detected!("avx512dq")),
            ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ];
        let lacking = |features: &[(&'static str, bool)]| features.iter().find(|(_, has)| !has).map(|(name, _)| *name);
        match self {
            Self::Scalar => None,
            Self::Avx2 => lacking(&avx2),
            Self::Avx512 => lacking(&avx2).or_else(|| lacking(&avx512)),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn missing(self) -> Option<&'static str> {
        (self != Self::Scalar).then_some("x86-64")
    }
}

impl FromStr for Isa {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|isa| isa.name() == name);
        found.ok_or_else(|| Error::IsaUnknown { name: name.to_owned() })
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_unknown_ones_are_typed_errors() {
        for isa in Isa::ALL {
            assert_eq!(isa.name().parse(), Ok(isa));
        }
        for name in ["", "AVX2", "neon", "avx5120"] {
            assert_eq!(name.parse::<Isa>(), Err(Error::IsaUnknown { name: name.to_owned() }));
        }
    }

    #[test]
    fn best_is_available() {
        assert_eq!(Isa::best().check(), Ok(()));
        assert_eq!(Isa::available().last(), Some(Isa::best()));
    }
}
