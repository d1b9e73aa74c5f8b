//! Speed of paged attention beside what the machine can do, e.g.
//! `cargo run --release -p entrokv-kernels --example attention_speed -- 2`.
//!
//! Arguments: the number of threads (1 if none), then instruction sets (the CPU's best if none), then `only` and words of
//! which the name of a case must have one. Prefill: a whole prompt in
//! chunks of 512 tokens, in GFLOP/s of the products (4 * head_dim for each visible pair of query and key) beside the peak
//! that a loop of independent multiply-adds reaches. Decode: one token after 8,000, in GB/s of the pages read beside plain
//! reading of as many bytes. All figures are the best of several runs, with one thread in CPU time, so that a shared machine
//! says something, too. The answers are checked: all values of a KV head are
//! the same, so that every weighted mean of them must be that value.
#![allow(clippy::print_stdout, reason = "an example prints its figures")]

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use entrokv_kernels::arena::Arena;
use entrokv_kernels::attention::{AttentionParams, AttentionSpan, PagedAttention, ScoreArithmetic, Segment, Tap};
use entrokv_kernels::compute::Compute;
use entrokv_kernels::isa::Isa;
use entrokv_kernels::page::{PageFormat, PageLayout};

const PAGE_SIZE: usize = 16;
const CHUNK: usize = 512;

/// A cache of one layer: frames of all KV heads, page after page, as a growing prompt would have allocated them.
struct Cache {
    layout: PageLayout,
    num_kv_heads: usize,
    num_tokens: usize,
    frames: Arena,
}

impl Cache {
    fn new(num_kv_heads: usize, head_dim: usize, num_tokens: usize) -> Cache {
        let layout = PageLayout { keys: PageFormat::F16, values: PageFormat::F16, page_size: PAGE_SIZE, head_dim };
        let num_pages = num_tokens.div_ceil(PAGE_SIZE);
        let num_bytes = (num_pages * num_kv_heads * layout.bytes()) as u64;
        let mut arena = Arena::reserve(num_bytes).expect("address space");
        let frames = arena.bytes_mut(0..num_bytes);
        let mut state = 1u32;
        for position in 0..num_tokens {
            for g in 0..num_kv_heads {
                let k: Vec<f32> = (0..head_dim)
                    .map(|_| {
                        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
                    })
                    .collect();
                let v = vec![value(g); head_dim];
                let at = (position / PAGE_SIZE * num_kv_heads + g) * layout.bytes();
                layout.write_token(&mut frames[at..at + layout.bytes()], position % PAGE_SIZE, &k, &v);
            }
        }
        Cache { layout, num_kv_heads, num_tokens, frames: arena }
    }

    fn bytes(&self) -> &[u8] {
        self.frames.bytes(0..self.frames.len())
    }

    fn span(&self, positions: std::ops::Range<usize>, tap: Tap) -> AttentionSpan<'_> {
        let segments = (0..self.num_kv_heads).map(|g| {
            let frames = self.bytes().chunks(self.layout.bytes()).skip(g).step_by(self.num_kv_heads);
            let segment = |(index, frame)| {
                let position = index * PAGE_SIZE;
                let len = PAGE_SIZE.min(self.num_tokens - position) as u32;
                Segment { keys: PageFormat::F16, values: PageFormat::F16, frame, position: position as u32, len }
            };
            frames.enumerate().take(positions.end.div_ceil(PAGE_SIZE)).map(segment).collect()
        });
        AttentionSpan {
            first_row: 0,
            num_rows: positions.len(),
            first_position: positions.start as u32,
            segments: segments.collect(),
            constants: Vec::new(),
            tap,
        }
    }
}

fn value(g: usize) -> f32 {
    0.5 + g as f32
}

/// The shortest of several runs.
fn best(compute: &Compute, runs: usize, mut run: impl FnMut()) -> Duration {
    let now = || match compute.threads.num_threads() {
        1 => thread_time(),
        _ => wall_time(),
    };
    let times = (0..runs).map(|_| {
        let start = now();
        run();
        now() - start
    });
    times.min().unwrap_or_default()
}

fn wall_time() -> Duration {
    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
    START.elapsed()
}

#[cfg(unix)]
fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

#[cfg(not(unix))]
fn thread_time() -> Duration {
    wall_time()
}

/// Weights rounded to bf16 add up to 1 but for their rounding errors, of up to 1/512.
fn check(out: &[f32], params: &AttentionParams, isa: Isa) {
    let tolerance = if isa.name() == "avx512bf16" { 2e-3 } else { 1e-4 };
    let row_len = params.num_heads * params.head_dim;
    for (i, x) in out.iter().enumerate() {
        let want = value(i % row_len / params.head_dim / params.group_size());
        assert!((x - want).abs() < tolerance * want, "element {i} is {x}, not {want}");
    }
}

/// GFLOP/s of multiply-adds on registers, all threads.
fn peak_gflops(compute: &Compute) -> f64 {
    const STEPS: usize = 200_000;
    let num_threads = compute.threads.num_threads();
    let time = best(compute, 5, || {
        compute.threads.for_each(num_threads, |_| {
            // 16 times 16 lanes: more than the latency of a multiply-add can hide.
            let mut sums = [[1.0f32; 16]; 16];
            #[cfg(target_arch = "x86_64")]
            if compute.isa.name() == "avx512bf16" {
                // SAFETY: the CPU has the instruction set whose name is at hand.
                unsafe { dot_avx512bf16(&mut sums, STEPS) };
            } else if compute.isa.name() == "avx512" {
                // SAFETY: the CPU has the instruction set whose name is at hand.
                unsafe { multiply_add_avx512(&mut sums, STEPS) };
            } else if compute.isa.name().starts_with("avx") {
                // SAFETY: as above.
                unsafe { multiply_add_avx2(&mut sums, STEPS) };
            }
            std::hint::black_box(&sums);
        });
    });
    let products = if compute.isa.name() == "avx512bf16" { 2 } else { 1 };
    (2 * products * 16 * 16 * STEPS * num_threads) as f64 / time.as_secs_f64() / 1e9
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn dot_avx512bf16(sums: &mut [[f32; 16]; 16], steps: usize) {
    use std::arch::x86_64::*;
    let mut v = [_mm512_set1_ps(1.0); 16];
    let [a, b] =
        std::hint::black_box([0.999, 0.001]).map(|x| _mm512_cvtne2ps_pbh(_mm512_set1_ps(x), _mm512_set1_ps(x)));
    for _ in 0..steps {
        for v in &mut v {
            *v = _mm512_dpbf16_ps(*v, a, b);
        }
    }
    for (sums, v) in sums.iter_mut().zip(v) {
        // SAFETY: 16 f32.
        unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), v) };
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn multiply_add_avx512(sums: &mut [[f32; 16]; 16], steps: usize) {
    use std::arch::x86_64::*;
    let mut v = [_mm512_set1_ps(1.0); 16];
    let [a, b] = std::hint::black_box([0.999, 0.001]).map(|x| _mm512_set1_ps(x));
    for _ in 0..steps {
        for v in &mut v {
            *v = _mm512_fmadd_ps(*v, a, b);
        }
    }
    for (sums, v) in sums.iter_mut().zip(v) {
        // SAFETY: 16 f32.
        unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), v) };
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn multiply_add_avx2(sums: &mut [[f32; 16]; 16], steps: usize) {
    use std::arch::x86_64::*;
    let [a, b] = std::hint::black_box([0.999, 0.001]).map(|x| _mm256_set1_ps(x));
    // Ten registers at a time, as many steps as give all 32.
    let mut v = [_mm256_set1_ps(1.0); 10];
    for _ in 0..steps * 32 / 10 {
        for v in &mut v {
            *v = _mm256_fmadd_ps(*v, a, b);
        }
    }
    for (sums, v) in sums.iter_mut().zip(v) {
        // SAFETY: 8 of 16 f32.
        unsafe { _mm256_storeu_ps(sums.as_mut_ptr(), v) };
    }
}

/// GB/s of adding up all bytes of the layers' frames, all threads.
fn read_gbps(compute: &Compute, layers: &mut [Cache]) -> f64 {
    let num_bytes: usize = layers.iter().map(|layer| layer.bytes().len()).sum();
    let time = best(compute, 7, || {
        for layer in layers.iter_mut() {
            let len = layer.frames.len();
            let chunk = (len as usize).div_ceil(compute.threads.num_threads());
            compute.threads.for_each_chunk(layer.frames.bytes_mut(0..len), chunk, |_, frames| {
                let mut sums = [0u64; 32];
                for chunk in frames.as_chunks::<256>().0 {
                    for (sum, x) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
                        *sum = sum.wrapping_add(u64::from_ne_bytes(*x));
                    }
                }
                std::hint::black_box(sums);
            });
        }
    });
    num_bytes as f64 / time.as_secs_f64() / 1e9
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let num_threads: NonZeroUsize = arguments.next().map_or(Ok(NonZeroUsize::MIN), |n| n.parse())?;
    let names: Vec<String> = arguments.by_ref().take_while(|name| name != "only").collect();
    let only: Vec<String> = arguments.collect();
    let wanted = |case: &str| only.is_empty() || only.iter().any(|word| case.contains(word.as_str()));
    let mut isas = names.iter().map(|name| Isa::named(name)).collect::<Result<Vec<_>, _>>()?;
    if isas.is_empty() {
        isas.push(Isa::detect());
    }
    for isa in isas {
        let compute = Compute::new(isa, num_threads);
        let mut attention = PagedAttention::default();
        let fork_join = best(&compute, 2000, || {
            // Every task waits for all others, so that every thread must take one.
            let arrived = AtomicUsize::new(0);
            compute.threads.for_each(num_threads.get(), |_| {
                arrived.fetch_add(1, Ordering::SeqCst);
                while arrived.load(Ordering::SeqCst) < num_threads.get() {
                    std::hint::spin_loop();
                }
            });
        });
        let peak = peak_gflops(&compute);
        println!("{isa}, {num_threads} threads; fork and join {fork_join:?}; peak {peak:.0} GFLOP/s");
        for (name, num_heads, num_kv_heads, head_dim) in
            [("smollm2-135m", 9, 3, 64), ("qwen2.5-0.5b", 14, 2, 64), ("qwen2.5-1.5b", 12, 2, 128)]
        {
            let scale = 1.0 / (head_dim as f32).sqrt();
            let params = AttentionParams {
                num_heads,
                num_kv_heads,
                head_dim,
                page_size: PAGE_SIZE,
                scale,
                window: None,
                scores: ScoreArithmetic::Rounded,
            };
            let row_len = num_heads * head_dim;
            let q: Vec<f32> = (0..CHUNK * row_len).map(|i| (i * 7919 % 1009) as f32 / 500.0 - 1.0).collect();
            let mut out = vec![0.0; q.len()];

            for num_tokens in [512, 2048, 8000] {
                let case = format!("{name} prefill {num_tokens}");
                if !wanted(&case) {
                    continue;
                }
                let cache = Cache::new(num_kv_heads, head_dim, num_tokens);
                let mut prefill = |tapped_rows: usize| {
                    for start in (0..num_tokens).step_by(CHUNK) {
                        let num_rows = CHUNK.min(num_tokens - start);
                        let tap = match tapped_rows {
                            1.. if start + num_rows == num_tokens => {
                                Tap::Rows { from_row: num_rows - tapped_rows, out: Vec::new() }
                            }
                            _ => Tap::None,
                        };
                        let mut spans = [cache.span(start..start + num_rows, tap)];
                        let out = &mut out[..num_rows * row_len];
                        attention.run(&compute, &params, &mut spans, &q[..num_rows * row_len], out);
                    }
                };
                let runs = 10_000 / num_tokens + 2;
                let time = best(&compute, runs, || prefill(0));
                let tapped = best(&compute, runs, || prefill(32));
                check(&out[..num_tokens.min(CHUNK) * row_len], &params, isa);
                let flop = 4.0 * head_dim as f64 * num_heads as f64 * (num_tokens * (num_tokens + 1) / 2) as f64;
                let gflops = flop / time.as_secs_f64() / 1e9;
                println!(
                    "  {case}: {:.2} ms, {gflops:.0} GFLOP/s = {:.0} %; 32 rows tapped {:+.1} %",
                    time.as_secs_f64() * 1e3,
                    gflops / peak * 100.0,
                    (tapped.as_secs_f64() / time.as_secs_f64() - 1.0) * 100.0,
                );
            }

            let num_tokens = 8000;
            let case = format!("{name} decode at {num_tokens}");
            if !wanted(&case) {
                continue;
            }
            // As many layers as do not fit the caches.
            let mut layers: Vec<Cache> = (0..24).map(|_| Cache::new(num_kv_heads, head_dim, num_tokens)).collect();
            let bytes = layers.iter().map(|layer| layer.bytes().len()).sum::<usize>();
            let read = read_gbps(&compute, &mut layers);
            let mut rows = Vec::new();
            let mut decode = |tapped: bool| {
                for layer in &layers {
                    let out_rows = std::mem::take(&mut rows);
                    let tap = if tapped { Tap::Rows { from_row: 0, out: out_rows } } else { Tap::None };
                    let mut spans = [layer.span(num_tokens - 1..num_tokens, tap)];
                    attention.run(&compute, &params, &mut spans, &q[..row_len], &mut out[..row_len]);
                    if let [AttentionSpan { tap: Tap::Rows { out, .. }, .. }] = spans {
                        rows = out;
                    }
                }
            };
            let time = best(&compute, 15, || decode(false));
            let tapped = best(&compute, 15, || decode(true));
            check(&out[..row_len], &params, isa);
            println!(
                "  {case}: {:.1} us a layer, {:.1} GB/s (plain reading {read:.1}); tapped {:+.1} %",
                time.as_secs_f64() * 1e6 / layers.len() as f64,
                bytes as f64 / time.as_secs_f64() / 1e9,
                (tapped.as_secs_f64() / time.as_secs_f64() - 1.0) * 100.0,
            );
        }
    }
    Ok(())
}
