//! Speed of coded pages, e.g. `cargo run --release -p entrokv-kernels --example coded_attention_speed -- avx512 avx2`.
//!
//! Arguments: instruction sets (the CPU's best if none), then `only` and words of which the name of a case must have one. For each format of keys and values, on one thread and in its CPU time,
//! so that a shared machine says something, too, best of several runs:
//! - making codes of a page of f16, in ns an element (keys and values);
//! - decoding: one token after 8,000, on as many layers as do not fit the caches: microseconds a layer, GB/s of the pages
//!   read, and ns for each 64 key and 64 value elements of a KV head, which all its query heads share;
//! - the same where four pages of five are evicted, in ns for as many elements that are left;
//! - a second turn: 64 tokens after 8,000, in GFLOP/s as if the products were of f32 (4 * head_dim for each pair of query and key).
//!
//! All values of a KV head are the same, so that the answers can be checked: they must be what a page reads back as.
#![allow(clippy::print_stdout, reason = "an example prints its figures")]

use std::num::NonZeroUsize;
use std::time::Duration;

use entrokv_kernels::attention::{AttentionParams, AttentionSpan, PagedAttention, ScoreArithmetic, Segment, Tap};
use entrokv_kernels::codes::KeyConstants;
use entrokv_kernels::compute::Compute;
use entrokv_kernels::isa::Isa;
use entrokv_kernels::page::{PageFormat, PageLayout, recode};

const PAGE_SIZE: usize = 16;
const NUM_TOKENS: usize = 8000;
const NUM_LAYERS: usize = 24;
const TURN: usize = 64;
const EVICTED_STRIDE: usize = 5;

/// One layer's pages in one format, all of a KV head in a row.
struct Cache {
    layout: PageLayout,
    /// Aligned as the engine's frames are.
    frames: Vec<Line>,
}

/// A cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u8; 64]);

impl Cache {
    /// `num_rows` queries of every `stride`-th page.
    fn span<'a>(
        &'a self,
        constants: &'a KeyConstants,
        num_kv_heads: usize,
        num_rows: usize,
        stride: usize,
    ) -> AttentionSpan<'a> {
        let head = |g: usize| {
            let len = self.frames.len() / num_kv_heads;
            let page = self.layout.bytes() / size_of::<Line>();
            let frames = self.frames[g * len..(g + 1) * len].chunks(page).map(bytes);
            let segment = |(index, frame)| Segment {
                keys: self.layout.keys,
                values: self.layout.values,
                frame,
                position: (index * PAGE_SIZE) as u32,
                len: PAGE_SIZE as u32,
            };
            frames.enumerate().step_by(stride).map(segment).collect()
        };
        AttentionSpan {
            first_row: 0,
            num_rows,
            first_position: (NUM_TOKENS - num_rows) as u32,
            segments: (0..num_kv_heads).map(head).collect(),
            constants: vec![Some(constants); num_kv_heads],
            tap: Tap::None,
        }
    }
}

fn bytes(lines: &[Line]) -> &[u8] {
    let first = lines.first().map_or(std::ptr::dangling(), |line| line.0.as_ptr());
    // SAFETY: arrays of bytes without padding, one after the other.
    unsafe { std::slice::from_raw_parts(first, size_of_val(lines)) }
}

fn value(i: usize) -> f32 {
    ((i * 31 % 64) as f32 - 32.0) / 20.0
}

/// The page of f16 that every page of every layer is made from.
fn page(layout: &PageLayout) -> Vec<u8> {
    let mut frame = vec![0; layout.bytes()];
    let mut state = 1u32;
    for slot in 0..PAGE_SIZE {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        let k: Vec<f32> = (0..layout.head_dim).map(|_| next()).collect();
        let v: Vec<f32> = (0..layout.head_dim).map(value).collect();
        layout.write_token(&mut frame, slot, &k, &v);
    }
    frame
}

/// The shortest of several runs, in CPU time.
fn best(runs: usize, mut run: impl FnMut()) -> f64 {
    let times = (0..runs).map(|_| {
        let start = thread_time();
        run();
        thread_time() - start
    });
    times.min().unwrap_or_default().as_secs_f64()
}

#[cfg(unix)]
fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

#[cfg(not(unix))]
fn thread_time() -> Duration {
    static START: std::sync::LazyLock<std::time::Instant> = std::sync::LazyLock::new(std::time::Instant::now);
    START.elapsed()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let names: Vec<String> = arguments.by_ref().take_while(|name| name != "only").collect();
    let only: Vec<String> = arguments.collect();
    let mut isas = names.iter().map(|name| Isa::named(name)).collect::<Result<Vec<_>, _>>()?;
    if isas.is_empty() {
        isas.push(Isa::detect());
    }
    for isa in isas {
        let compute = Compute::new(isa, NonZeroUsize::MIN);
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
            let q: Vec<f32> = (0..TURN * row_len).map(|i| (i * 7919 % 1009) as f32 / 500.0 - 1.0).collect();
            let mut out = vec![0.0; q.len()];
            let constants =
                KeyConstants::from_moments(&vec![0.0; head_dim], &vec![0.5; head_dim], &vec![1.0; head_dim]);
            let f16 = PageLayout { keys: PageFormat::F16, values: PageFormat::F16, page_size: PAGE_SIZE, head_dim };
            let plain = page(&f16);
            for format in [PageFormat::F16, PageFormat::Q8_0, PageFormat::Tq4, PageFormat::Tq3, PageFormat::Tq2] {
                let case = format!("{name} {format:?}");
                if !only.is_empty() && !only.iter().any(|word| case.contains(word)) {
                    continue;
                }
                let layout = PageLayout { keys: format, values: format, ..f16 };
                let mut coded = vec![0; layout.bytes()];
                let encode = best(200, || {
                    recode(isa, &f16, &plain, &layout, &mut coded, PAGE_SIZE, Some(&constants))
                        .expect("a shape for codes");
                });
                let (mut k, mut v) = (vec![0.0; head_dim], vec![0.0; head_dim]);
                layout.read_token(&coded, 0, Some(&constants), &mut k, &mut v);

                let lines: Vec<Line> = coded.as_chunks().0.iter().map(|line| Line(*line)).collect();
                let frames = lines.repeat(NUM_TOKENS / PAGE_SIZE * num_kv_heads);
                let num_bytes = size_of_val(&frames[..]);
                let layers: Vec<Cache> = (0..NUM_LAYERS).map(|_| Cache { layout, frames: frames.clone() }).collect();
                let mut attention = PagedAttention::default();
                let mut attend = |num_rows: usize, layers: &[Cache], stride: usize| {
                    for layer in layers {
                        let mut spans = [layer.span(&constants, num_kv_heads, num_rows, stride)];
                        let elements = num_rows * row_len;
                        attention.run(&compute, &params, &mut spans, &q[..elements], &mut out[..elements]);
                    }
                    for (i, x) in out[..num_rows * row_len].iter().enumerate() {
                        let want = v[i % head_dim];
                        assert!((x - want).abs() < 0.02, "{format:?}: element {i} is {x}, not {want}");
                    }
                };
                let decode = best(12, || attend(1, &layers, 1)) / NUM_LAYERS as f64;
                let evicted = best(12, || attend(1, &layers, EVICTED_STRIDE)) / NUM_LAYERS as f64;
                let cached = best(30, || attend(1, &layers[..1], 1));
                let turn = best(3, || attend(TURN, &layers[..1], 1));
                let pairs = (NUM_TOKENS * TURN - TURN * (TURN - 1) / 2) * num_heads;
                let groups = (NUM_TOKENS * num_kv_heads * head_dim / 64) as f64;
                println!(
                    "{isa} {case}: encode {:.2} ns; decode {:.1} us, {:.1} GB/s, {:.2} ns for 64 and 64, {:.2} from caches, {:.2} evicted; turn {:.0} GFLOP/s",
                    encode * 1e9 / (2 * PAGE_SIZE * head_dim) as f64,
                    decode * 1e6,
                    num_bytes as f64 / decode / 1e9,
                    decode * 1e9 / groups,
                    cached * 1e9 / groups,
                    evicted * 1e9 / groups * EVICTED_STRIDE as f64,
                    4.0 * (head_dim * pairs) as f64 / turn / 1e9,
                );
            }
        }
    }
    Ok(())
}
