//! What the machine can do at most: reading memory, and each kind of dot product on registers.

use std::hint::black_box;
use std::time::Instant;

use crate::compute::Compute;
use crate::isa::{Isa, Level};
use crate::matrix::WeightMemory;
use crate::simd::tiles::{self, Tiles};
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// Bytes read to measure the bandwidth: more than the caches of a large server share.
const READ_BYTES: usize = 512 << 20;

/// Bytes that a thread reads at a time.
const READ_CHUNK: usize = 1 << 20;

/// How far ahead of what it reads a thread asks for more, which one core needs to keep memory busy: what hardware foresees ends
/// with a page.
const READ_AHEAD: usize = 8 << 10;

/// Steps of a loop of dot products on registers: some milliseconds.
const STEPS: usize = 400_000;

/// Accumulators of such a loop: more than the latency of an operation times those that start in a cycle.
const ACCUMULATORS: usize = 12;

/// Runs of each; the best counts, for a limit is what nothing disturbed.
const RUNS: usize = 5;

/// The limits of this machine with the threads and the instruction set at hand.
///
/// An operation is a multiplication or an addition: a multiply-add counts 2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Reading memory in huge pages, 10^9 bytes a second, all threads.
    pub read_gb_per_s: f64,
    /// f32 multiply-adds, 10^9 operations a second, all threads.
    pub f32_gop_per_s: f64,
    /// 8-bit dot products.
    pub int8_gop_per_s: f64,
    /// bf16 dot products; `None` where the instruction set has none.
    pub bf16_gop_per_s: Option<f64>,
}

impl Machine {
    /// Measures the limits; takes about a second.
    ///
    /// # Errors
    /// If there are not 512 MiB of memory to read.
    pub fn measure(compute: &Compute) -> std::io::Result<Machine> {
        let isa = compute.isa;
        Ok(Machine {
            read_gb_per_s: read_bandwidth(compute)?,
            f32_gop_per_s: rate(compute, || dispatch(isa, MultiplyAdds)),
            int8_gop_per_s: rate(compute, || int8_dots(isa)),
            bf16_gop_per_s: bf16_dots(isa).map(|dots| rate(compute, dots)),
        })
    }
}

/// 10^9 bytes a second that all threads together read and add up.
fn read_bandwidth(compute: &Compute) -> std::io::Result<f64> {
    let mut memory = WeightMemory::new().take(READ_BYTES)?;
    compute.threads.for_each_chunk(memory.bytes_mut(), READ_CHUNK, |_, chunk| {
        chunk.as_chunks_mut().0.iter_mut().for_each(|word| *word = 1f32.to_ne_bytes());
    });
    let chunks: Vec<&[u8]> = memory.bytes().chunks(READ_CHUNK).collect();
    let mut sums = vec![0.0; chunks.len()];
    let seconds = best_seconds(|| {
        compute.threads.for_each_chunk(&mut sums, 1, |index, sum| {
            sum[0] = dispatch(compute.isa, Read { bytes: chunks[index] });
        });
    });
    // Small integers, exact in f32.
    assert!(sums.iter().all(|&sum| sum == (READ_CHUNK / size_of::<f32>()) as f32), "words read");
    Ok(READ_BYTES as f64 * 1e-9 / seconds)
}

/// The sum of the f32 words of `bytes`, whole KiB.
struct Read<'a> {
    bytes: &'a [u8],
}

impl Kernel for Read<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut sums = [s.splat(0.0); 16];
        for line in self.bytes.as_chunks::<1024>().0 {
            for (sum, word) in sums.iter_mut().zip(line.as_chunks::<{ 4 * LANES }>().0) {
                s.prefetch(word.as_ptr().wrapping_add(READ_AHEAD));
                // SAFETY: 16 f32, any bits are one.
                *sum = s.add(*sum, unsafe { s.load_ptr(word.as_ptr().cast()) });
            }
        }
        let mut total = 0.0;
        for sum in sums {
            total += s.sum(sum);
        }
        total
    }
}

/// 10^9 operations a second of all threads, `run` returning how many it did.
fn rate(compute: &Compute, run: impl Fn() -> u64 + Sync) -> f64 {
    let num_threads = compute.threads.num_threads();
    let mut operations = vec![0u64; num_threads];
    let seconds = best_seconds(|| compute.threads.for_each_chunk(&mut operations, 1, |_, done| done[0] = run()));
    operations.iter().sum::<u64>() as f64 * 1e-9 / seconds
}

fn best_seconds(mut run: impl FnMut()) -> f64 {
    let seconds = (0..RUNS).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    seconds.fold(f64::INFINITY, f64::min)
}

/// f32 multiply-adds on registers.
struct MultiplyAdds;

impl Kernel for MultiplyAdds {
    type Output = u64;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> u64 {
        let (a, b) = (s.splat(black_box(0.999)), s.splat(black_box(0.001)));
        // A vector of two registers has half as many accumulators to spare.
        let mut sums = [s.splat(1.0); ACCUMULATORS / 2];
        let mut more = [s.splat(1.0); ACCUMULATORS / 2];
        for _ in 0..STEPS {
            for sum in &mut sums {
                *sum = s.mul_add(*sum, a, b);
            }
            if S::COLUMNS > 1 {
                for sum in &mut more {
                    *sum = s.mul_add(*sum, a, b);
                }
            }
        }
        sums.iter().chain(&more).for_each(|sum| {
            let largest = s.largest(*sum);
            assert!((0.99..1.01).contains(&largest), "0.999 x + 0.001 stays at 1, got {largest}");
        });
        let accumulators = if S::COLUMNS > 1 { ACCUMULATORS } else { ACCUMULATORS / 2 };
        (2 * STEPS * accumulators * LANES) as u64
    }
}

/// A loop of 8-bit dot products on registers, as the matrix products use them.
fn int8_dots(isa: Isa) -> u64 {
    match isa.level() {
        Level::Scalar => {
            let (a, b) = (black_box([3u8; 64]), black_box([5i8; 64]));
            let mut sums = [0i32; 64];
            for _ in 0..STEPS / 64 {
                for ((sum, &a), &b) in sums.iter_mut().zip(black_box(&a)).zip(&b) {
                    *sum += i32::from(a) * i32::from(b);
                }
            }
            assert_eq!(sums, [15 * (STEPS / 64) as i32; 64]);
            (STEPS / 64 * 128) as u64
        }
        // SAFETY: an `Isa` of this level proves the features.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { x86::int8_avx2() },
        // SAFETY: an `Isa` of this level proves the features.
        #[cfg(target_arch = "x86_64")]
        Level::AvxVnni => unsafe { x86::int8_avxvnni() },
        // SAFETY: an `Isa` of this level proves the features.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 | Level::Avx512Bf16 | Level::Amx => unsafe { x86::int8_avx512() },
    }
}

/// A loop of bf16 dot products on registers, or of tiles in the first-level cache, if there are such.
fn bf16_dots(isa: Isa) -> Option<impl Fn() -> u64 + Sync> {
    let tiles = Tiles::configure(isa, tiles::ROWS).is_some();
    #[cfg(target_arch = "x86_64")]
    let vectors = isa.level() == Level::Avx512Bf16;
    #[cfg(not(target_arch = "x86_64"))]
    let vectors = false;
    (tiles || vectors).then_some(move || match Tiles::configure(isa, tiles::ROWS) {
        Some(tiles) => bf16_tiles(&tiles),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` of this level proves the features.
        None => unsafe { x86::bf16_avx512() },
        #[cfg(not(target_arch = "x86_64"))]
        None => unreachable!("no vectors of pairs"),
    })
}

/// Products of tiles of ones.
fn bf16_tiles(tiles: &Tiles) -> u64 {
    const BLOCKS: usize = 4;
    const PAIRS: usize = BLOCKS * tiles::BLOCK_PAIRS;
    const TIMES: usize = STEPS / 16;
    #[repr(align(64))]
    struct Operand([u32; tiles::ROWS * PAIRS]);
    let (queries, keys) = (Operand([0x3f80_3f80; _]), black_box(Operand([0x3f80_3f80; _])));
    let keys = [keys.0.as_ptr().cast(); tiles::COLUMNS];
    let mut out = [0.0f32; tiles::ROWS * tiles::COLUMNS * LANES];
    for _ in 0..TIMES {
        let out = (black_box(&mut out).as_mut_ptr(), tiles::COLUMNS * LANES);
        // SAFETY: 16 rows of 64 pairs, keys of 64 rows of 16 pairs, and room for 16 rows of 64 sums.
        unsafe { tiles.scores((queries.0.as_ptr(), PAIRS), BLOCKS, &keys, out) };
    }
    assert!(out.iter().all(|sum| *sum == 2.0 * PAIRS as f32));
    (TIMES * tiles::ROWS * tiles::COLUMNS * LANES * PAIRS * 4) as u64
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::{ACCUMULATORS, STEPS};

    #[target_feature(enable = "avx2")]
    pub(super) fn int8_avx2() -> u64 {
        let (mut a, b) = (_mm256_set1_epi8(black_box(3)), _mm256_set1_epi8(black_box(5)));
        let one = _mm256_set1_epi16(1);
        let mut sums = [_mm256_setzero_si256(); ACCUMULATORS];
        for _ in 0..STEPS {
            for sum in &mut sums {
                // SAFETY: no instruction. It hides that `a` stays what it was: else the products would leave the loop.
                unsafe { asm!("/* {} */", inout(ymm_reg) a, options(pure, nomem, nostack, preserves_flags)) };
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), one));
            }
        }
        sums.iter().for_each(|sum| assert_eq!(_mm256_extract_epi32::<0>(*sum), 60 * STEPS as i32));
        (STEPS * ACCUMULATORS * 64) as u64
    }

    #[target_feature(enable = "avx2,avxvnni")]
    pub(super) fn int8_avxvnni() -> u64 {
        let (a, b) = (_mm256_set1_epi8(black_box(3)), _mm256_set1_epi8(black_box(5)));
        let mut sums = [_mm256_setzero_si256(); ACCUMULATORS];
        for _ in 0..STEPS {
            for sum in &mut sums {
                *sum = _mm256_dpbusd_avx_epi32(*sum, a, b);
            }
        }
        sums.iter().for_each(|sum| assert_eq!(_mm256_extract_epi32::<0>(*sum), 60 * STEPS as i32));
        (STEPS * ACCUMULATORS * 64) as u64
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) fn int8_avx512() -> u64 {
        let (a, b) = (_mm512_set1_epi8(black_box(3)), _mm512_set1_epi8(black_box(5)));
        let mut sums = [_mm512_setzero_si512(); ACCUMULATORS];
        for _ in 0..STEPS {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, a, b);
            }
        }
        sums.iter().for_each(|sum| assert_eq!(_mm512_cvtsi512_si32(*sum), 60 * STEPS as i32));
        (STEPS * ACCUMULATORS * 128) as u64
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn bf16_avx512() -> u64 {
        let pair = black_box(0x3f80_3f80);
        // SAFETY: bits of a register, 32 times 1.0 in bf16.
        let one: __m512bh = unsafe { std::mem::transmute(_mm512_set1_epi32(pair)) };
        let mut sums = [_mm512_setzero_ps(); ACCUMULATORS];
        for _ in 0..STEPS {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, one, one);
            }
        }
        sums.iter().for_each(|sum| assert_eq!(_mm512_cvtss_f32(*sum), 2.0 * STEPS as f32));
        (STEPS * ACCUMULATORS * 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_isa_computes_what_its_loops_assert() {
        for isa in Isa::available() {
            assert!(int8_dots(isa) > 0 && dispatch(isa, MultiplyAdds) > 0);
            assert!(bf16_dots(isa).is_none_or(|dots| dots() > 0));
            let bytes: Vec<u8> = (0..512).flat_map(|i| (i as f32).to_ne_bytes()).collect();
            assert_eq!(dispatch(isa, Read { bytes: &bytes }), (511 * 512 / 2) as f32);
        }
    }
}
