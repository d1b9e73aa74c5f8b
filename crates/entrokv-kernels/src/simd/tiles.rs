//! Products of whole tiles on AMX: of bf16, 16 rows times 16 columns times 32 elements an instruction, some twenty times what
//! vectors of f32 do on the same core; of bytes ([`bytes`]) twice as many elements.
//!
//! What the instruction of bf16 computes, and what the kernels of [`Simd::SUMS_OF_TILES`](super::Simd::SUMS_OF_TILES) therefore compute too:
//! of up to 16 pairs of elements, the products of all first elements are summed from 0, each fused with its addition, those of all
//! second elements apart; both sums are added, and the result to what the tile held. Operands and results that are denormal count
//! as 0 in tiles only.
//!
//! Tile registers are no registers of the compiler's: it neither uses nor keeps them. They keep their shapes from a
//! `ldtilecfg` to a `tilerelease` of the same thread, which is what a [`Shaped`] stands for; contents never outlive one `asm!`.
//!
//! Stable Rust has no intrinsics for them yet, hence the assembly.

pub(crate) mod bytes;

#[cfg(target_arch = "x86_64")]
use std::arch::asm;

use crate::isa::Isa;
#[cfg(target_arch = "x86_64")]
use crate::isa::Level;

/// Most rows of a tile.
pub(crate) const ROWS: usize = 16;

/// Pairs of elements that a tile sums in one block.
pub(crate) const BLOCK_PAIRS: usize = 16;

/// Most tiles of sums that are worked on at a time.
pub(crate) const COLUMNS: usize = 4;

/// Whether this CPU has tiles of bf16 and of bytes, and the operating system lets this process use them.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) fn exist() -> bool {
    use std::sync::OnceLock;

    /// Linux asks for a permission, since the registers enlarge what it saves of a thread: `ARCH_REQ_XCOMP_PERM` for
    /// `XFEATURE_XTILE_DATA`.
    const REQUEST: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    /// Of leaf 7, in `edx`: AMX-BF16, AMX-TILE, AMX-INT8.
    const FEATURES: u32 = 1 << 22 | 1 << 24 | 1 << 25;

    static EXIST: OnceLock<bool> = OnceLock::new();
    *EXIST.get_or_init(|| {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        let known = __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & FEATURES == FEATURES;
        // SAFETY: the call takes two integers and only widens what this process may do; kernels that do not know it refuse.
        known && unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST, TILE_DATA) } == 0
    })
}

/// Whether this CPU has tiles of bf16 and of bytes, and the operating system lets this process use them.
#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
pub(crate) fn exist() -> bool {
    false
}

/// This thread's tile registers in some shapes. Not to be sent elsewhere, and one at a time: the end of one takes the shapes from
/// all of its thread's.
struct Shaped {
    #[cfg(target_arch = "x86_64")]
    _of_this_thread: std::marker::PhantomData<*const ()>,
    #[cfg(not(target_arch = "x86_64"))]
    never: std::convert::Infallible,
}

/// This thread's tile registers, in the shapes that [`Tiles::scores`] and [`Tiles::add_values`] use for so many rows.
pub(crate) struct Tiles {
    num_rows: usize,
    #[cfg_attr(target_arch = "x86_64", expect(dead_code, reason = "held for its end"))]
    shaped: Shaped,
}

/// What `ldtilecfg` reads.
#[cfg(target_arch = "x86_64")]
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

#[cfg(target_arch = "x86_64")]
impl Shaped {
    /// Gives the registers `shapes`, valid ones of palette 1, where `isa` has such registers.
    fn new(isa: Isa, shapes: &Shapes) -> Option<Shaped> {
        if isa.level() != Level::Amx {
            return None;
        }
        // SAFETY: the instruction set includes AMX, the shapes are valid ones.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) std::ptr::from_ref(shapes), options(nostack, preserves_flags, readonly));
        }
        Some(Shaped { _of_this_thread: std::marker::PhantomData })
    }
}

#[cfg(target_arch = "x86_64")]
impl Drop for Shaped {
    fn drop(&mut self) {
        // SAFETY: a `Shaped` exists, so this CPU has the instruction. What the registers hold is lost, and nobody's.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}

/// One asm block, which leaves nothing in the tile registers.
#[cfg(target_arch = "x86_64")]
macro_rules! tiles_asm {
    ($($line:expr),* ; $($operand:tt)*) => {
        asm!(
            $($line),*,
            $($operand)*
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}
#[cfg(target_arch = "x86_64")]
use tiles_asm;

#[cfg(target_arch = "x86_64")]
impl Shapes {
    /// Sums are tiles 0 to 3. Scores multiply tile 4, rows of 16 pairs, with tile 5, 16 pairs of 16 columns; values tile 6, rows of 8
    /// pairs, with tile 7, 8 pairs of 16 columns.
    fn of(num_rows: usize) -> Shapes {
        let n = num_rows as u8;
        Shapes {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [64, 64, 64, 64, 64, 64, 32, 64, 0, 0, 0, 0, 0, 0, 0, 0],
            rows: [n, n, n, n, n, 16, n, 8, 0, 0, 0, 0, 0, 0, 0, 0],
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;

    use super::{BLOCK_PAIRS, ROWS, Shaped, Shapes, Tiles};
    use crate::isa::Isa;

    /// Bytes of a row of 16 pairs or 16 sums.
    const ROW: usize = 64;

    impl Tiles {
        /// Shapes this thread's tile registers for `num_rows` rows, 1 to 16, where `isa` has them.
        pub(crate) fn configure(isa: Isa, num_rows: usize) -> Option<Tiles> {
            assert!((1..=ROWS).contains(&num_rows));
            Some(Tiles { num_rows, shaped: Shaped::new(isa, &Shapes::of(num_rows))? })
        }

        /// Rows of its products.
        pub(crate) fn num_rows(&self) -> usize {
            self.num_rows
        }

        /// `out[rows, 16 n] = queries[rows, 2 pairs] . keys[2 pairs, 16 n]`, of `num_blocks` times 16 pairs.
        ///
        /// # Safety
        /// - 1 to 4 `keys`, each to `[pairs, 16]` pairs.
        /// - `queries` are as many rows of as many pairs, `query_stride` pairs apart.
        /// - `out` has room for as many rows of `16 n`, `out_stride` elements apart.
        pub(crate) unsafe fn scores(
            &self,
            (queries, query_stride): (*const u32, usize),
            num_blocks: usize,
            keys: &[*const u8],
            (out, out_stride): (*mut f32, usize),
        ) {
            macro_rules! products {
                ($($key:ident = $index:literal, $sum:literal, $store:literal;)*) => {
                    tiles_asm!(
                        $(concat!("tilezero tmm", $sum),)*
                        "2:",
                        "tileloadd tmm4, [{queries} + {query_stride}]",
                        $(
                            concat!("tileloadd tmm5, [{", stringify!($key), "} + {row}]"),
                            concat!("tdpbf16ps tmm", $sum, ", tmm4, tmm5"),
                            concat!("add {", stringify!($key), "}, 1024"),
                        )*
                        "add {queries}, 64",
                        "dec {blocks}",
                        "jnz 2b"
                        $(, concat!("tilestored [{out} + {out_stride} + ", $store, "], tmm", $sum))*
                        ;
                        queries = inout(reg) queries => _,
                        query_stride = in(reg) query_stride * 4,
                        $($key = inout(reg) keys[$index] => _,)*
                        row = in(reg) ROW,
                        blocks = inout(reg) num_blocks => _,
                        out = in(reg) out,
                        out_stride = in(reg) out_stride * 4,
                    )
                };
            }
            debug_assert!(num_blocks > 0 && BLOCK_PAIRS * 4 == ROW);
            // SAFETY: the registers have their shapes (`self`); the caller's promise covers every row that is read or written.
            unsafe {
                match keys.len() {
                    1 => products!(k0 = 0, 0, 0;),
                    2 => products!(k0 = 0, 0, 0; k1 = 1, 1, 64;),
                    3 => products!(k0 = 0, 0, 0; k1 = 1, 1, 64; k2 = 2, 2, 128;),
                    4 => products!(k0 = 0, 0, 0; k1 = 1, 1, 64; k2 = 2, 2, 128; k3 = 3, 3, 192;),
                    n => unreachable!("{n} tiles of keys"),
                }
            }
        }

        /// `sums[rows, 16 n] += weights[rows, 2 pairs] . values[2 pairs, 16 n]`, 8 pairs of each of `values`, one after the other; the
        /// values from their byte `column_bytes` on. Unless they are `held`, sums start from 0.
        ///
        /// # Safety
        /// - One more pointer can be read behind `values`: what to ask memory for last, never read through.
        /// - Each of `values`, one at least, is to 8 rows of `16 n` pairs, `stride` pairs apart; `n` is 1 to 4.
        /// - `weights` are as many rows of 8 pairs for each of the values, `weight_stride` pairs apart.
        /// - `sums` are as many rows of `16 n`, `stride` elements apart.
        pub(crate) unsafe fn add_values(
            &self,
            (weights, weight_stride): (*const u32, usize),
            values: &[*const u8],
            (column_bytes, n): (usize, usize),
            (held, (sums, stride)): (bool, (*mut f32, usize)),
        ) {
            macro_rules! products {
                ($($sum:literal, $column:literal;)*) => {
                    tiles_asm!(
                        $(concat!("tilezero tmm", $sum),)*
                        "test {value}, {value}",
                        "jz 2f",
                        $(concat!("tileloadd tmm", $sum, ", [{sums} + {stride} + ", $column, "]"),)*
                        "2:",
                        "mov {value}, [{values}]",
                        "mov {next}, [{values} + 8]",
                        "add {value}, {column}",
                        "add {next}, {column}",
                        $(
                            concat!("prefetcht0 [{next} + ", $column, "]"),
                            concat!("prefetcht0 [{next} + {stride} + ", $column, "]"),
                            concat!("prefetcht0 [{next} + 2 * {stride} + ", $column, "]"),
                            concat!("prefetcht0 [{next} + 4 * {stride} + ", $column, "]"),
                        )*
                        "add {next}, {stride}",
                        $(
                            concat!("prefetcht0 [{next} + 2 * {stride} + ", $column, "]"),
                            concat!("prefetcht0 [{next} + 4 * {stride} + ", $column, "]"),
                        )*
                        "add {next}, {stride}",
                        $(
                            concat!("prefetcht0 [{next} + 4 * {stride} + ", $column, "]"),
                        )*
                        "add {next}, {stride}",
                        $(
                            concat!("prefetcht0 [{next} + 4 * {stride} + ", $column, "]"),
                        )*
                        "tileloadd tmm6, [{weights} + {weight_stride}]",
                        $(
                            concat!("tileloadd tmm7, [{value} + {stride} + ", $column, "]"),
                            concat!("tdpbf16ps tmm", $sum, ", tmm6, tmm7"),
                        )*
                        "add {weights}, 32",
                        "add {values}, 8",
                        "dec {strips}",
                        "jnz 2b"
                        $(, concat!("tilestored [{sums} + {stride} + ", $column, "], tmm", $sum))*
                        ;
                        weights = inout(reg) weights => _,
                        weight_stride = in(reg) weight_stride * 4,
                        values = inout(reg) values.as_ptr() => _,
                        value = inout(reg) usize::from(held) => _,
                        next = out(reg) _,
                        column = in(reg) column_bytes,
                        strips = inout(reg) values.len() => _,
                        sums = in(reg) sums,
                        stride = in(reg) stride * 4,
                    )
                };
            }
            debug_assert!(!values.is_empty());
            // SAFETY: the registers have their shapes (`self`); the caller's promise covers every row that is read or written.
            unsafe {
                match n {
                    1 => products!(0, 0;),
                    2 => products!(0, 0; 1, 64;),
                    3 => products!(0, 0; 1, 64; 2, 128;),
                    4 => products!(0, 0; 1, 64; 2, 128; 3, 192;),
                    n => unreachable!("{n} tiles of values"),
                }
            }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl Tiles {
    pub(crate) fn configure(_: Isa, _: usize) -> Option<Tiles> {
        None
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// # Safety
    /// None: there is no `Tiles`.
    pub(crate) unsafe fn scores(&self, _: (*const u32, usize), _: usize, _: &[*const u8], _: (*mut f32, usize)) {
        match self.shaped.never {}
    }

    /// # Safety
    /// None: there is no `Tiles`.
    pub(crate) unsafe fn add_values(
        &self,
        _: (*const u32, usize),
        _: &[*const u8],
        _: (usize, usize),
        _: (bool, (*mut f32, usize)),
    ) {
        match self.shaped.never {}
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::isa::Isa;
    use crate::simd::LANES;

    /// Aligned as tiles like it, which they do not need.
    #[repr(align(64))]
    struct Lines<const N: usize>([u32; N]);

    /// Pairs of bf16 of all magnitudes.
    fn pairs<const N: usize>(seed: u64) -> Lines<N> {
        Lines(std::array::from_fn(|i| {
            let bits = (seed << 32 | i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let half = |bits: u64| {
                let x = (bits & 0xff) as f32 - 127.5;
                u32::from(bf16::from_f32(x * (2.0f32).powi((bits >> 8 & 15) as i32 - 8)).to_bits())
            };
            half(bits >> 20) | half(bits >> 40) << 16
        }))
    }

    fn halves(pair: u32) -> [f32; 2] {
        [f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)]
    }

    /// What is added to `sum` for one block of pairs.
    fn block(sum: f32, a: impl Iterator<Item = u32>, b: impl Iterator<Item = u32>) -> f32 {
        let mut apart = [0.0f32; 2];
        for (a, b) in a.zip(b) {
            let (a, b) = (halves(a), halves(b));
            apart = [0, 1].map(|i| a[i].mul_add(b[i], apart[i]));
        }
        sum + (apart[0] + apart[1])
    }

    #[test]
    fn scores_are_sums_of_blocks_to_the_bit() {
        const PAIRS: usize = 3 * BLOCK_PAIRS;
        let queries = pairs::<{ ROWS * PAIRS }>(1);
        let keys = [2, 3, 4, 5].map(pairs::<{ PAIRS * LANES }>);
        for (isa, num_rows, n) in Isa::available()
            .into_iter()
            .flat_map(|isa| [1, 3, 9, 16].into_iter().flat_map(move |rows| (1..=COLUMNS).map(move |n| (isa, rows, n))))
        {
            let Some(tiles) = Tiles::configure(isa, num_rows) else { continue };
            let mut out = vec![7.0f32; ROWS * COLUMNS * LANES];
            let pointers: Vec<_> = keys[..n].iter().map(|keys| keys.0.as_ptr().cast()).collect();
            let room = (out.as_mut_ptr(), COLUMNS * LANES);
            // SAFETY: as many rows as asked for at least, of all operands.
            unsafe { tiles.scores((queries.0.as_ptr(), PAIRS), 3, &pointers, room) };
            for (at, got) in out.iter().enumerate() {
                let (row, column) = (at / (COLUMNS * LANES), at % (COLUMNS * LANES));
                let want = if row < num_rows && column < n * LANES {
                    let key = |i: usize| keys[column / LANES].0[i * LANES + column % LANES];
                    (0..PAIRS).step_by(BLOCK_PAIRS).fold(0.0, |sum, start| {
                        let pairs = start..start + BLOCK_PAIRS;
                        block(sum, pairs.clone().map(|i| queries.0[row * PAIRS + i]), pairs.map(key))
                    })
                } else {
                    7.0
                };
                assert_eq!(got.to_bits(), want.to_bits(), "{num_rows} rows, {n} tiles: {row}, {column}");
            }
        }
    }

    #[test]
    fn values_are_added_strip_by_strip_to_the_bit() {
        const STRIPS: usize = 5;
        const STRIDE: usize = 6 * LANES;
        let half = LANES / 2;
        let weights = pairs::<{ ROWS * STRIPS * LANES / 2 }>(6);
        let values = [7, 8, 9, 10, 11].map(pairs::<{ LANES / 2 * STRIDE }>);
        for (isa, num_rows, n, held) in Isa::available().into_iter().flat_map(|isa| {
            let shapes = [1, 9, 16].into_iter().flat_map(|rows| (1..=COLUMNS).map(move |n| (rows, n)));
            shapes.flat_map(move |(rows, n)| [false, true].map(|held| (isa, rows, n, held)))
        }) {
            let Some(tiles) = Tiles::configure(isa, num_rows) else { continue };
            let before = |at: usize| at as f32 * 0.37 - 100.0;
            let mut sums: Vec<f32> = (0..ROWS * STRIDE).map(before).collect();
            let mut pointers: Vec<_> = values.iter().map(|values| values.0.as_ptr().cast()).collect();
            pointers.push(std::ptr::null());
            let first = 2 * LANES;
            let into = sums[first..].as_mut_ptr();
            // SAFETY: as many rows as asked for at least, of all operands; the columns from the third tile on are four.
            unsafe {
                let weights = (weights.0.as_ptr(), STRIPS * half);
                tiles.add_values(weights, &pointers[..STRIPS], (4 * first, n), (held, (into, STRIDE)));
            }
            for (at, got) in sums.iter().enumerate() {
                let (row, column) = (at / STRIDE, at % STRIDE);
                let want = if row < num_rows && (first..first + n * LANES).contains(&column) {
                    (0..STRIPS).fold(if held { before(at) } else { 0.0 }, |sum, strip| {
                        let weights = (0..half).map(|i| weights.0[(row * STRIPS + strip) * half + i]);
                        block(sum, weights, (0..half).map(|i| values[strip].0[i * STRIDE + column]))
                    })
                } else {
                    before(at)
                };
                assert_eq!(got.to_bits(), want.to_bits(), "{num_rows} rows, {n} tiles, held {held}: {row}, {column}");
            }
        }
    }
}
