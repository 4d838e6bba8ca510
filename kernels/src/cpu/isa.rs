//! Instruction sets of the CPU path: which there are, which this machine has, which one runs.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// Environment variable that chooses the instruction set where the configuration leaves it open.
pub const ISA_VARIABLE: &str = "TESSERA_CPU";

/// An instruction set that kernels are written for; larger is faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain code, on every machine: the oracle of all others.
    Scalar,
    /// Vectors of eight lanes that the compiler maps to whatever the target has.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with BF16 and VNNI.
    Avx512Bf16,
    /// AMX tiles for bf16 and int8, and all of AVX-512 above.
    Amx,
}

impl Isa {
    /// All of them, slowest first.
    pub const ALL: [Self; 6] = [Self::Scalar, Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// The fastest that this CPU has.
    pub fn best() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.missing().is_none()).unwrap_or(Self::Scalar)
    }

    /// The one that the environment variable [`ISA_VARIABLE`] names, else the fastest that this CPU has.
    ///
    /// # Errors
    /// [`Error::IsaUnknown`] for another name, [`Error::IsaMissing`] for one that this CPU lacks.
    pub fn chosen() -> Result<Self> {
        match std::env::var(ISA_VARIABLE) {
            Ok(name) if !name.is_empty() => {
                let isa: Self = name.parse()?;
                isa.check().map(|()| isa)
            }
            _ => Ok(Self::best()),
        }
    }

    /// Those that this CPU has, slowest first.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.missing().is_none())
    }

    /// Its name in configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Amx => "amx",
        }
    }

    /// Checks that this CPU has it.
    ///
    /// # Errors
    /// [`Error::IsaMissing`] with the first feature that is lacking.
    pub fn check(self) -> Result<()> {
        let Some(missing) = self.missing() else { return Ok(()) };
        let available = Self::available().map(Self::name).collect::<Vec<_>>().join(", ");
        Err(Error::IsaMissing { wanted: self.name(), missing, available })
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
        let bf16 = [
            ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
            ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
        ];
        let lacking = |features: &[(&'static str, bool)]| features.iter().find(|(_, has)| !has).map(|(name, _)| *name);
        let up_to = |level: Self| {
            let avx512 = || (level >= Self::Avx512).then(|| lacking(&avx512)).flatten();
            let bf16 = || (level >= Self::Avx512Bf16).then(|| lacking(&bf16)).flatten();
            let amx = || (level >= Self::Amx).then(crate::cpu::amx::missing).flatten();
            lacking(&avx2).or_else(avx512).or_else(bf16).or_else(amx)
        };
        if self <= Self::Portable { None } else { up_to(self) }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn missing(self) -> Option<&'static str> {
        (self > Self::Portable).then_some("x86-64")
    }
}

impl FromStr for Isa {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|isa| isa.name() == name);
        found.ok_or_else(|| Error::IsaUnknown { name: name.to_owned(), known: Self::ALL.map(Self::name).join(", ") })
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
            let error = name.parse::<Isa>().unwrap_err();
            assert!(matches!(&error, Error::IsaUnknown { name: n, .. } if n == name), "{error}");
            assert!(error.to_string().contains("avx512bf16"), "{error}");
        }
    }

    #[test]
    fn best_is_available() {
        assert_eq!(Isa::best().check(), Ok(()));
        assert_eq!(Isa::available().last(), Some(Isa::best()));
    }

    #[test]
    fn a_lacking_instruction_set_is_named_with_those_there_are() {
        for isa in Isa::ALL.into_iter().filter(|isa| !Isa::available().any(|other| other == *isa)) {
            let error = isa.check().unwrap_err().to_string();
            assert!(error.contains(isa.name()) && error.contains("scalar, portable"), "{error}");
        }
    }
}
