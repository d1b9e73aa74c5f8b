//! Every property of the module's documentation, against the f64 oracle and bit for bit between the ways to compute.

use std::num::NonZeroUsize;

mod coded;
mod maxima;

use super::*;
use crate::isa::Isa;
use crate::page::PageFormat;

/// Largest error of an output or probability relative to the largest value: f32 scores of up to a few hundred products,
/// magnified by the exponential.
const TOLERANCE: f64 = 3e-5;

/// The same where weights are rounded to bf16, by up to 2^-9 each; an output is a mean, so it is smaller than the values.
const ROUNDED_TOLERANCE: f64 = 1e-2;

/// Whether attention on `isa` is computed in bf16.
fn rounds(isa: Isa) -> bool {
    ["avx512bf16", "amx"].contains(&isa.name())
}

/// What attention on `isa` does to queries, keys and values.
fn rounding(isa: Isa) -> fn(f32) -> f32 {
    if rounds(isa) { |x| half::bf16::from_f32(x).to_f32() } else { |x| x }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }

    /// Roughly normal.
    fn normal(&mut self) -> f32 {
        (0..6).map(|_| (self.next() >> 40) as f32 / (1 << 24) as f32 - 0.5).sum::<f32>() * 1.4
    }

    fn normals(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }
}

/// A page of a test's cache.
#[derive(Clone)]
struct Page {
    keys: PageFormat,
    values: PageFormat,
    position: u32,
    len: u32,
    frame: Vec<u8>,
}

/// How pages follow each other in memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Ascending,
    Descending,
}

/// A test's cache as attention reads it.
struct LaidOut {
    memory: Vec<u8>,
    segments: Vec<SegmentList>,
}

impl LaidOut {
    fn span(&self, first_row: usize, num_rows: usize, first_position: u32, tap: Tap) -> AttentionSpan<'_> {
        let (memory, segments) = (&self.memory[..], &self.segments[..]);
        AttentionSpan { first_row, num_rows, first_position, memory, segments, constants: Vec::new(), tap }
    }
}

/// The pages of one sequence, per KV head.
#[derive(Clone)]
struct Cache {
    params: AttentionParams,
    pages: Vec<Vec<Page>>,
}

impl Cache {
    /// `num_tokens` random tokens; keys and values of each page in any of the formats.
    fn new(random: &mut Random, params: AttentionParams, num_tokens: usize, formats: &[PageFormat]) -> Cache {
        let mut pages = Vec::new();
        for _ in 0..params.num_kv_heads {
            let mut list = Vec::new();
            for position in (0..num_tokens).step_by(params.page_size) {
                let [keys, values] = std::array::from_fn(|_| formats[random.below(formats.len())]);
                let layout = layout(&params, keys, values);
                // Whatever a frame held before must not matter: NaN.
                let mut frame = vec![0xff; layout.bytes()];
                let len = params.page_size.min(num_tokens - position);
                for slot in 0..len {
                    let (k, v) = (random.normals(params.head_dim), random.normals(params.head_dim));
                    layout.write_token(&mut frame, slot, &k, &v);
                }
                list.push(Page { keys, values, position: position as u32, len: len as u32, frame });
            }
            pages.push(list);
        }
        Cache { params, pages }
    }

    /// Frees every page that `keep` refuses.
    fn evict(&mut self, mut keep: impl FnMut(usize, &Page) -> bool) {
        for (g, list) in self.pages.iter_mut().enumerate() {
            list.retain(|page| keep(g, page));
        }
    }

    fn num_tokens(&self, g: usize) -> usize {
        self.pages[g].iter().map(|page| page.len as usize).sum()
    }

    /// The pages in one memory.
    fn laid_out(&self, order: Order) -> LaidOut {
        let mut places: Vec<(usize, usize)> =
            self.pages.iter().enumerate().flat_map(|(g, list)| (0..list.len()).map(move |i| (g, i))).collect();
        // An odd address: frames need no alignment.
        let mut memory = vec![0xee; 1];
        if order == Order::Descending {
            places.reverse();
        }
        let mut frames: Vec<Vec<usize>> = self.pages.iter().map(|list| vec![0; list.len()]).collect();
        for (g, i) in places {
            frames[g][i] = memory.len();
            memory.extend(&self.pages[g][i].frame);
        }
        let segments = self.pages.iter().zip(&frames).map(|(pages, frames)| {
            let mut list = SegmentList::new(self.params.page_size, self.params.head_dim);
            for (page, &frame) in pages.iter().zip(frames) {
                let Page { keys, values, position, len, .. } = *page;
                list.push(Segment { keys, values, frame, position, len });
            }
            list
        });
        let segments = segments.collect();
        LaidOut { memory, segments }
    }

    fn column_sums(&self) -> Vec<Vec<f32>> {
        (0..self.pages.len()).map(|g| vec![0.0; self.num_tokens(g) * self.params.group_size()]).collect()
    }
}

fn params(num_heads: usize, num_kv_heads: usize, head_dim: usize, page_size: usize) -> AttentionParams {
    let scale = 1.0 / (head_dim as f32).sqrt();
    AttentionParams {
        num_heads,
        num_kv_heads,
        head_dim,
        page_size,
        scale,
        window: None,
        scores: ScoreArithmetic::Rounded,
    }
}

fn layout(params: &AttentionParams, keys: PageFormat, values: PageFormat) -> PageLayout {
    PageLayout { keys, values, page_size: params.page_size, head_dim: params.head_dim }
}

fn compute(isa: Isa, num_threads: usize) -> Compute {
    Compute::new(isa, NonZeroUsize::new(num_threads).unwrap())
}

/// Runs one span and returns the output and the tap.
fn run(compute: &Compute, cache: &Cache, q: &[f32], first_position: u32, tap: Tap) -> (Vec<f32>, Tap) {
    let num_rows = q.len() / (cache.params.num_heads * cache.params.head_dim);
    let laid_out = cache.laid_out(Order::Ascending);
    let mut spans = [laid_out.span(0, num_rows, first_position, tap)];
    let mut out = vec![f32::NAN; q.len()];
    paged_attention(compute, &cache.params, &mut spans, q, &mut out);
    let [span] = spans;
    (out, span.tap)
}

fn run_naive(round: fn(f32) -> f32, cache: &Cache, q: &[f32], first_position: u32, tap: Tap) -> (Vec<f32>, Tap) {
    let num_rows = q.len() / (cache.params.num_heads * cache.params.head_dim);
    let laid_out = cache.laid_out(Order::Ascending);
    let mut spans = [laid_out.span(0, num_rows, first_position, tap)];
    let mut out = vec![f32::NAN; q.len()];
    naive::attention(&cache.params, &mut spans, q, &mut out, round);
    let [span] = spans;
    (out, span.tap)
}

fn assert_close(tolerance: f64, got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(1e-3f64, |a, &b| a.max(f64::from(b.abs())));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - f64::from(*want)).abs();
        assert!(error <= tolerance * largest, "{what}: element {i}: {got} instead of {want}");
    }
}

#[track_caller]
fn assert_same_bits(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let different = got.iter().zip(want).position(|(a, b)| a.to_bits() != b.to_bits());
    assert_eq!(different, None, "{what}");
}

fn outs(tap: Tap) -> Vec<Vec<f32>> {
    match tap {
        Tap::None => Vec::new(),
        Tap::Rows { out, .. } | Tap::ColumnSums { out } => out,
        Tap::ColumnMaxima(maxima) => maxima.out,
    }
}

const PLAIN: [PageFormat; 3] = [PageFormat::F16, PageFormat::F32, PageFormat::Bf16];

#[test]
fn equals_the_f64_oracle_on_random_shapes() {
    let mut random = Random(1);
    for case in 0..120 {
        let group_size = [1, 2, 3, 4, 6, 7, 8][random.below(7)];
        let num_kv_heads = 1 + random.below(3);
        let head_dim = [64, 128, 256, 16, 32, 80, 1, 7, 24, 96][random.below(10)];
        let page_size = [16, 16, 32, 256, 1, 8, 5, 100, 48][random.below(9)];
        let mut params = params(group_size * num_kv_heads, num_kv_heads, head_dim, page_size);
        if random.chance(3) {
            params.window = Some([1, 5, 16, 300, 100_000][random.below(5)]);
        }
        if random.chance(3) {
            params.scores = ScoreArithmetic::F32;
        }
        let most = if random.chance(4) { 1500 } else { 400 };
        let num_tokens = 1 + random.below(most);
        let formats = [&PLAIN[..], &PLAIN[..1], &PLAIN[1..2], &PLAIN[2..]][random.below(4)];
        let mut cache = Cache::new(&mut random, params, num_tokens, formats);
        if random.chance(2) {
            let keep_one_in = 1 + random.below(4);
            cache.evict(|_, _| random.chance(keep_one_in));
        }
        let num_rows = 1 + random.below(num_tokens.min(40));
        let first_position = (num_tokens - num_rows) as u32;
        let mut q = random.normals(num_rows * params.num_heads * params.head_dim);
        if random.chance(3) {
            // Extreme logits, up to about 1e4.
            q.iter_mut().for_each(|x| *x *= 2000.0);
        }
        let tap = match random.below(3) {
            0 => Tap::None,
            1 => Tap::Rows { from_row: random.below(num_rows + 1), out: vec![vec![7.0; 1 << 16]; 3] },
            _ => Tap::ColumnSums { out: cache.column_sums() },
        };
        let [exact, rounded] = [Isa::SCALAR, Isa::detect()].map(|isa| {
            let (out, tap) = run_naive(rounding(isa), &cache, &q, first_position, tap.clone());
            (out, outs(tap))
        });
        for isa in Isa::available() {
            let ((want, want_tap), tolerance) =
                if rounds(isa) { (&rounded, ROUNDED_TOLERANCE) } else { (&exact, TOLERANCE) };
            let what = format!("case {case} on {isa}: {params:?}, {num_tokens} tokens, {num_rows} rows");
            let (got, got_tap) = run(&compute(isa, 1 + random.below(3)), &cache, &q, first_position, tap.clone());
            // With logits of 1e4, an f32 score is off by 1e-3: only the direction is left to compare.
            let extreme = q.iter().any(|x| x.abs() > 100.0);
            if extreme {
                assert!(got.iter().all(|x| x.is_finite()), "{what}");
                continue;
            }
            assert_close(tolerance, &got, want, &what);
            // The probabilities are those before rounding.
            for (got, want) in outs(got_tap).iter().zip(want_tap) {
                assert_close(TOLERANCE, got, want, &format!("tap of {what}"));
            }
        }
    }
}

/// Shapes for the tests of equal bits: the models' and some that fit nothing.
fn shapes() -> Vec<AttentionParams> {
    let mut shapes = vec![
        params(9, 3, 64, 16),
        params(14, 2, 64, 16),
        params(12, 2, 128, 16),
        params(4, 1, 256, 16),
        params(6, 2, 20, 5),
    ];
    shapes.push(AttentionParams { window: Some(100), ..params(8, 2, 32, 32) });
    shapes.push(AttentionParams { scores: ScoreArithmetic::F32, ..params(14, 2, 64, 16) });
    shapes
}

#[test]
fn same_bits_for_any_number_of_threads() {
    let mut random = Random(2);
    for params in shapes() {
        let cache = Cache::new(&mut random, params, 900, &PLAIN);
        for num_rows in [1, 3, 40] {
            let q = random.normals(num_rows * params.num_heads * params.head_dim);
            for isa in Isa::available() {
                let one = |num_threads| {
                    let tap = Tap::Rows { from_row: num_rows / 2, out: Vec::new() };
                    let (out, tap) = run(&compute(isa, num_threads), &cache, &q, 900 - num_rows as u32, tap);
                    [out, outs(tap).concat()].concat()
                };
                let want = one(1);
                for num_threads in [2, 3, 8] {
                    assert_same_bits(&one(num_threads), &want, &format!("{num_threads} threads, {isa}, {params:?}"));
                }
            }
        }
    }
}

#[test]
fn same_bits_for_any_chunks_of_a_prompt() {
    let mut random = Random(3);
    for params in shapes() {
        let (num_tokens, row_len) = (530, params.num_heads * params.head_dim);
        let cache = Cache::new(&mut random, params, num_tokens, &PLAIN);
        let q = random.normals(num_tokens * row_len);
        for isa in Isa::available() {
            let compute = compute(isa, 2);
            let (want, want_sums) = run(&compute, &cache, &q, 0, Tap::ColumnSums { out: cache.column_sums() });
            for chunk in [1, 7, 64, 500] {
                if chunk == 1 && isa == Isa::SCALAR {
                    continue; // Slow, and the same code as for the others.
                }
                let mut got = Vec::new();
                let mut sums = Tap::ColumnSums { out: cache.column_sums() };
                for (i, q) in q.chunks(chunk * row_len).enumerate() {
                    let (out, tap) = run(&compute, &cache, q, (i * chunk) as u32, sums);
                    got.extend(out);
                    sums = tap;
                }
                let what = format!("chunks of {chunk}, {isa}, {params:?}");
                assert_same_bits(&got, &want, &what);
                assert_same_bits(&outs(sums).concat(), &outs(want_sums.clone()).concat(), &what);
            }
        }
    }
}

#[test]
fn same_bits_in_any_batch() {
    let mut random = Random(4);
    for params in shapes() {
        let row_len = params.num_heads * params.head_dim;
        // A prompt's chunk, a decode step, a short prompt, another decode step.
        let sizes = [(700, 60), (400, 1), (5, 5), (1300, 1)];
        let caches = sizes.map(|(num_tokens, _)| Cache::new(&mut random, params, num_tokens, &PLAIN));
        let laid_out = caches.each_ref().map(|cache| cache.laid_out(Order::Ascending));
        let num_rows: usize = sizes.iter().map(|(_, num_rows)| num_rows).sum();
        let q = random.normals(num_rows * row_len);
        for isa in Isa::available() {
            let compute = compute(isa, 2);
            let mut together = vec![f32::NAN; q.len()];
            let mut spans = Vec::new();
            let mut first_row = 0;
            for (cache, (num_tokens, num_rows)) in laid_out.iter().zip(sizes) {
                spans.push(cache.span(first_row, num_rows, (num_tokens - num_rows) as u32, Tap::None));
                first_row += num_rows;
            }
            paged_attention(&compute, &params, &mut spans, &q, &mut together);
            let mut first_row = 0;
            for (cache, (num_tokens, num_rows)) in caches.iter().zip(sizes) {
                let rows = first_row * row_len..(first_row + num_rows) * row_len;
                first_row += num_rows;
                let (alone, _) = run(&compute, cache, &q[rows.clone()], (num_tokens - num_rows) as u32, Tap::None);
                assert_same_bits(&together[rows], &alone, &format!("{isa}, {params:?}"));
            }
        }
    }
}

#[test]
fn same_bits_wherever_the_frames_are() {
    let mut random = Random(5);
    let params = params(9, 3, 64, 16);
    let cache = Cache::new(&mut random, params, 600, &PLAIN);
    let q = random.normals(20 * 9 * 64);
    let compute = compute(Isa::detect(), 2);
    let (want, _) = run(&compute, &cache, &q, 580, Tap::None);
    let laid_out = cache.laid_out(Order::Descending);
    let mut got = vec![f32::NAN; q.len()];
    paged_attention(&compute, &params, &mut [laid_out.span(0, 20, 580, Tap::None)], &q, &mut got);
    assert_same_bits(&got, &want, "frames in reverse order");
}

/// Masks by hand: the same computation with the evicted tokens' scores at minus infinity, which is what keys at positions
/// before a window get. Eviction of everything before the window must then change no bit.
#[test]
fn evicted_is_masked_by_a_window() {
    let mut random = Random(6);
    for params in shapes() {
        let params = AttentionParams { window: Some(200), ..params };
        let cache = Cache::new(&mut random, params, 700, &PLAIN);
        let mut evicted = cache.clone();
        evicted.evict(|_, page| page.position + page.len > 700 - 3 - 200);
        let q = random.normals(3 * params.num_heads * params.head_dim);
        for isa in Isa::available() {
            let (want, _) = run(&compute(isa, 2), &cache, &q, 697, Tap::None);
            let (got, _) = run(&compute(isa, 2), &evicted, &q, 697, Tap::None);
            assert_same_bits(&got, &want, &format!("{isa}, {params:?}"));
        }
    }
}

/// Any set of pages: a key whose score underflows (e^-1000) weighs exactly 0, as a masked one does.
#[test]
fn evicted_is_masked_for_any_set_of_pages() {
    let mut random = Random(7);
    for params in [params(9, 3, 64, 16), params(12, 2, 128, 32), params(4, 2, 20, 7)] {
        let d = params.head_dim;
        let mut cache = Cache::new(&mut random, params, 800, &PLAIN);
        let mut kept: Vec<Vec<bool>> =
            cache.pages.iter().map(|list| list.iter().map(|_| random.chance(3)).collect()).collect();
        // Also a tile with nothing left, and a KV head with nothing at all.
        let in_tile_1 = |page: &Page| page.position + page.len > 256 && page.position < 512;
        for (page, kept) in cache.pages[0].iter().zip(&mut kept[0]) {
            *kept &= !in_tile_1(page);
        }
        kept[1].fill(false);
        // Queries with a 1 in the first element; keys with a 0 there, or a number that sinks the score.
        let mut q = random.normals(5 * params.num_heads * d);
        q.chunks_mut(d).for_each(|q| q[0] = 1.0);
        for (list, kept) in cache.pages.iter_mut().zip(&kept) {
            let any_kept = kept.contains(&true);
            for (page, kept) in list.iter_mut().zip(kept) {
                let layout = layout(&params, page.keys, page.values);
                for slot in 0..page.len as usize {
                    let (mut k, mut v) = (vec![0.0; d], vec![0.0; d]);
                    layout.read_token(&page.frame, slot, None, &mut k, &mut v);
                    k[0] = if *kept || !any_kept { 0.0 } else { -30_000.0 };
                    layout.write_token(&mut page.frame, slot, &k, &v);
                }
            }
        }
        let mut evicted = cache.clone();
        for (list, kept) in evicted.pages.iter_mut().zip(&kept) {
            let mut kept = kept.iter();
            list.retain(|_| *kept.next().unwrap());
        }
        for isa in Isa::available() {
            let (masked, _) = run(&compute(isa, 2), &cache, &q, 795, Tap::None);
            let (got, _) = run(&compute(isa, 2), &evicted, &q, 795, Tap::None);
            let r = params.group_size();
            for (h, (got, masked)) in got.chunks(d).zip(masked.chunks(d)).enumerate() {
                if h % params.num_heads / r == 1 {
                    assert_same_bits(got, &vec![0.0; d], "a KV head with nothing resident");
                } else {
                    assert_same_bits(got, masked, &format!("{isa}, head {h}, {params:?}"));
                }
            }
        }
    }
}

#[test]
fn taps_change_nothing_and_rows_sum_to_one() {
    let mut random = Random(8);
    for params in shapes() {
        let cache = Cache::new(&mut random, params, 777, &PLAIN);
        for num_rows in [1, 50] {
            let q = random.normals(num_rows * params.num_heads * params.head_dim);
            let first_position = 777 - num_rows as u32;
            for isa in Isa::available() {
                let compute = compute(isa, 2);
                let (want, _) = run(&compute, &cache, &q, first_position, Tap::None);
                let rows = Tap::Rows { from_row: num_rows / 3, out: Vec::new() };
                let sums = Tap::ColumnSums { out: cache.column_sums() };
                let (got, rows) = run(&compute, &cache, &q, first_position, rows);
                assert_same_bits(&got, &want, &format!("{isa}, {params:?}"));
                let (got, sums) = run(&compute, &cache, &q, first_position, sums);
                assert_same_bits(&got, &want, &format!("{isa}, {params:?}"));
                for row in outs(rows).iter().flat_map(|out| out.chunks(777)) {
                    let sum: f64 = row.iter().map(|&p| f64::from(p)).sum();
                    assert!((sum - 1.0).abs() < 1e-5, "{sum}");
                }
                for sums in outs(sums).iter().flat_map(|out| out.chunks(777)) {
                    let sum: f64 = sums.iter().map(|&p| f64::from(p)).sum();
                    assert!((sum / num_rows as f64 - 1.0).abs() < 1e-5, "{sum}");
                }
            }
        }
    }
}

#[test]
fn all_isas_in_f32_agree_bit_for_bit() {
    let mut random = Random(9);
    let vector: Vec<Isa> = Isa::available().into_iter().filter(|&isa| isa != Isa::SCALAR && !rounds(isa)).collect();
    for params in shapes() {
        let cache = Cache::new(&mut random, params, 600, &PLAIN);
        let q = random.normals(70 * params.num_heads * params.head_dim);
        let results: Vec<Vec<f32>> =
            vector.iter().map(|&isa| run(&compute(isa, 1), &cache, &q, 530, Tap::None).0).collect();
        for result in results.iter().skip(1) {
            assert_same_bits(result, &results[0], &format!("{params:?}"));
        }
    }
}

#[test]
fn a_single_token_gets_its_value() {
    let mut random = Random(10);
    for isa in Isa::available() {
        let params = params(3, 1, 64, 16);
        let cache = Cache::new(&mut random, params, 1, &[PageFormat::F32]);
        let (mut k, mut v) = (vec![0.0; 64], vec![0.0; 64]);
        layout(&params, PageFormat::F32, PageFormat::F32).read_token(&cache.pages[0][0].frame, 0, None, &mut k, &mut v);
        let tap = Tap::Rows { from_row: 0, out: Vec::new() };
        let (out, tap) = run(&compute(isa, 1), &cache, &random.normals(3 * 64), 0, tap);
        let v: Vec<f32> = v.iter().map(|x| rounding(isa)(*x)).collect();
        assert_eq!(out, v.repeat(3));
        assert_eq!(outs(tap), [vec![1.0; 3]]);
    }
}

#[test]
fn rows_that_see_nothing_are_zero() {
    let mut random = Random(11);
    let params = params(4, 2, 16, 16);
    let mut cache = Cache::new(&mut random, params, 64, &PLAIN);
    // Head 0 has only tokens after the query, head 1 has none.
    cache.evict(|g, page| g == 0 && page.position >= 32);
    for isa in Isa::available() {
        let q = random.normals(2 * 4 * 16);
        for tap in [
            Tap::None,
            Tap::Rows { from_row: 0, out: Vec::new() },
            Tap::ColumnSums { out: vec![vec![0.5; 64], vec![]] },
        ] {
            let (out, tap) = run(&compute(isa, 2), &cache, &q, 10, tap);
            assert_eq!(out, vec![0.0; q.len()]);
            match tap {
                Tap::None => {}
                Tap::Rows { out, .. } => assert_eq!(out, [vec![0.0; 2 * 2 * 32], vec![]]),
                Tap::ColumnSums { out } => assert_eq!(out, [vec![0.5; 64], vec![]]),
                Tap::ColumnMaxima(_) => unreachable!("none was asked for"),
            }
        }
    }
}

#[test]
fn nan_and_infinite_scores_make_their_row_nan_and_no_other() {
    let mut random = Random(12);
    let params = params(2, 1, 16, 16);
    let cache = Cache::new(&mut random, params, 40, &PLAIN);
    for isa in Isa::available() {
        for poison in [f32::NAN, f32::INFINITY] {
            let mut q = random.normals(3 * 2 * 16);
            let (want, _) = run(&compute(isa, 1), &cache, &q, 37, Tap::None);
            q[2 * 16 + 3] = poison; // Row 1, head 0.
            let (got, _) = run(&compute(isa, 1), &cache, &q, 37, Tap::None);
            assert!(got[2 * 16..3 * 16].iter().all(|x| x.is_nan()), "{isa}");
            assert_same_bits(&got[..2 * 16], &want[..2 * 16], "rows before");
            assert_same_bits(&got[3 * 16..], &want[3 * 16..], "rows after");
        }
    }
}

#[test]
fn no_span_and_no_row_are_fine() {
    let params = params(4, 2, 16, 16);
    let compute = compute(Isa::detect(), 2);
    paged_attention(&compute, &params, &mut [], &[], &mut []);
    let cache = Cache::new(&mut Random(13), params, 20, &PLAIN);
    let cache = cache.laid_out(Order::Ascending);
    let tap = Tap::Rows { from_row: 0, out: Vec::new() };
    paged_attention(&compute, &params, &mut [cache.span(0, 0, 20, tap)], &[], &mut []);
    let mut untouched = vec![7.0; 64];
    paged_attention(&compute, &params, &mut [], &[0.0; 64], &mut untouched);
    assert_eq!(untouched, [7.0; 64]);
}

/// Attention of one query over a cache in a memory that ends a byte before the last frame does.
fn attend_over_the_end(page_size: usize) {
    let params = params(1, 1, 16, page_size);
    let cache = Cache::new(&mut Random(14), params, 32, &PLAIN).laid_out(Order::Ascending);
    let span = AttentionSpan { memory: &cache.memory[..cache.memory.len() - 1], ..cache.span(0, 1, 31, Tap::None) };
    paged_attention(&compute(Isa::detect(), 1), &params, &mut [span], &[0.0; 16], &mut [0.0; 16]);
}

#[test]
#[should_panic(expected = "frames lie inside the memory")]
fn a_frame_outside_the_memory_panics() {
    attend_over_the_end(16);
}

#[test]
#[should_panic(expected = "frames lie inside the memory")]
fn a_frame_between_strips_outside_the_memory_panics() {
    attend_over_the_end(8);
}

#[test]
#[should_panic(expected = "frames lie inside the memory")]
fn a_frame_that_begins_at_the_end_of_the_address_space_panics() {
    let params = params(1, 1, 16, 16);
    let mut list = SegmentList::new(16, 16);
    let (keys, values) = (PageFormat::F16, PageFormat::F16);
    list.push(Segment { keys, values, frame: usize::MAX - 8, position: 0, len: 16 });
    let cache = LaidOut { memory: vec![0; 4096], segments: vec![list] };
    let mut span = [cache.span(0, 1, 15, Tap::None)];
    paged_attention(&compute(Isa::detect(), 1), &params, &mut span, &[0.0; 16], &mut [0.0; 16]);
}

#[test]
#[should_panic(expected = "a list of pages of another shape")]
fn lists_of_pages_of_another_shape_panic() {
    let cache = Cache::new(&mut Random(15), params(1, 1, 16, 16), 32, &PLAIN).laid_out(Order::Ascending);
    let mut span = [cache.span(0, 1, 31, Tap::None)];
    paged_attention(&compute(Isa::detect(), 1), &params(1, 1, 16, 32), &mut span, &[0.0; 16], &mut [0.0; 16]);
}
