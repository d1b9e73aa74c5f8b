//! The instruction set the kernels run on, chosen once at run time.
//!
//! Invariant: possession is proof. An [`Isa`] exists only if this CPU has every feature it names, so that a kernel which
//! was handed one may call a `#[target_feature]` function of that level without another check.
//!
//! Adding an instruction set: one variant of `Level`, its feature test, its name, and one arm wherever a kernel matches
//! on `Isa::level`. The tests run over [`Isa::available`], so that they cover it from then on.

use thiserror::Error;

/// An instruction set that this CPU has.
///
/// The order is from slowest to fastest, but for what [`Isa::detect`] knows of some CPUs. A CPU may lack one in the middle: AVX-512
/// does not imply AVX-VNNI, which is the same instruction in another encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Isa(Level);

/// What a kernel dispatches on. The value alone proves nothing: only the one inside an [`Isa`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Level {
    /// Portable Rust, on every CPU.
    Scalar,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// All of `Avx2`, and AVX-VNNI: byte dot products without AVX-512.
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// All of `Avx2`, and AVX-512 F, BW, DQ, VL and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// All of `Avx512`, and AVX-512 BF16. From here on attention rounds its operands, to bf16.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// All of `Avx512Bf16`, and AMX tiles of bf16, which the operating system lets this process use.
    #[cfg(target_arch = "x86_64")]
    Amx,
}

/// Every level this build knows, slowest first.
#[cfg(target_arch = "x86_64")]
const LEVELS: [Level; 6] = [Level::Scalar, Level::Avx2, Level::AvxVnni, Level::Avx512, Level::Avx512Bf16, Level::Amx];
#[cfg(not(target_arch = "x86_64"))]
const LEVELS: [Level; 1] = [Level::Scalar];

impl Isa {
    /// The portable one, which every CPU has.
    pub const SCALAR: Isa = Isa(Level::Scalar);

    /// The fastest instruction set of this CPU.
    pub fn detect() -> Isa {
        Self::available().into_iter().rfind(|isa| !isa.level().is_slow_here()).unwrap_or(Self::SCALAR)
    }

    /// The instruction set called `name` (`scalar`, `avx2`, `avxvnni`, `avx512`, `avx512bf16`, `amx`).
    ///
    /// # Errors
    /// [`IsaError::Unknown`] for any other name, [`IsaError::Missing`] when this CPU lacks one of its features.
    pub fn named(name: &str) -> Result<Isa, IsaError> {
        let level = LEVELS
            .into_iter()
            .find(|level| level.name() == name)
            .ok_or_else(|| IsaError::Unknown { got: name.to_owned(), known: LEVELS.map(Level::name).join(", ") })?;
        match level.missing_feature() {
            None => Ok(Isa(level)),
            Some(feature) => Err(IsaError::Missing { name: level.name(), feature }),
        }
    }

    /// The same with attention computed in f32: the level below where this one would round its operands to bf16.
    pub fn in_f32(self) -> Isa {
        match self.level() {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Bf16 | Level::Amx => Isa(Level::Avx512),
            _ => self,
        }
    }

    /// Its name, as [`Isa::named`] takes it.
    pub fn name(self) -> &'static str {
        self.level().name()
    }

    /// Every instruction set of this CPU, slowest first; never empty.
    pub fn available() -> Vec<Isa> {
        LEVELS.into_iter().filter(|level| level.missing_feature().is_none()).map(Isa).collect()
    }

    /// What to dispatch on.
    pub(crate) fn level(self) -> Level {
        self.0
    }
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::AvxVnni => "avxvnni",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Bf16 => "avx512bf16",
            #[cfg(target_arch = "x86_64")]
            Level::Amx => "amx",
        }
    }

    /// Whether the level before is faster on this CPU.
    fn is_slow_here(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self == Level::Avx512Bf16 {
            // Intel's cores start such a dot product every other cycle on one of two ports: half the products of f32, where AMD's do twice
            // as many. "ntel" is the end of the vendor's name.
            return std::arch::x86_64::__cpuid(0).ecx == u32::from_le_bytes(*b"ntel");
        }
        false
    }

    /// The first feature of this level that the CPU lacks.
    fn missing_feature(self) -> Option<&'static str> {
        #[cfg(target_arch = "x86_64")]
        macro_rules! first_missing {
            ($($feature:tt),+) => {
                [$(($feature, std::arch::is_x86_feature_detected!($feature))),+]
                    .into_iter()
                    .find_map(|(name, present)| (!present).then_some(name))
            };
        }
        match self {
            Level::Scalar => None,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => first_missing!("avx2", "fma", "f16c"),
            #[cfg(target_arch = "x86_64")]
            Level::AvxVnni => Level::Avx2.missing_feature().or(first_missing!("avxvnni")),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => Level::Avx2.missing_feature().or(first_missing!(
                "avx512f",
                "avx512bw",
                "avx512dq",
                "avx512vl",
                "avx512vnni"
            )),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Bf16 => Level::Avx512.missing_feature().or(first_missing!("avx512bf16")),
            #[cfg(target_arch = "x86_64")]
            Level::Amx => Level::Avx512Bf16.missing_feature().or((!crate::simd::tiles::exist()).then_some("amx-bf16")),
        }
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Why an instruction set cannot be had by name.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum IsaError {
    /// No such name in this build.
    #[error("unknown instruction set {got:?}; this build knows {known}")]
    Unknown {
        /// The name asked for.
        got: String,
        /// The names there are.
        known: String,
    },
    /// The CPU lacks a feature of it.
    #[error("this CPU cannot run {name}: it lacks {feature}")]
    Missing {
        /// The name asked for.
        name: &'static str,
        /// The first missing CPU feature.
        feature: &'static str,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_available_isa_is_found_by_its_name() {
        let available = Isa::available();
        assert_eq!(available.first(), Some(&Isa::SCALAR));
        assert!(available.contains(&Isa::detect()));
        for isa in available {
            assert_eq!(Isa::named(isa.name()), Ok(isa));
        }
    }

    #[test]
    fn in_f32_leaves_out_bf16_and_nothing_else() {
        for isa in Isa::available() {
            let want = if ["avx512bf16", "amx"].contains(&isa.name()) { "avx512" } else { isa.name() };
            assert_eq!(isa.in_f32().name(), want);
        }
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let message = Isa::named("avx9000").expect_err("no such instruction set").to_string();
        assert!(message.contains("avx9000") && message.contains("scalar"), "{message}");
    }
}
