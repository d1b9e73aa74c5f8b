//! Attention over codes: against what the codes stand for, and bit for bit between the ways to compute.

use super::*;
use crate::page::recode;

/// Largest error of an output or probability relative to the largest value. The codes are exact on both sides; attention
/// rounds their points to integers, queries to 8 bits and weights to 8.
const TOLERANCE: f64 = 4e-2;

/// Codes that are multiplied as they are.
const MULTIPLIED: [PageFormat; 4] = [PageFormat::Q8_0, PageFormat::Tq4, PageFormat::Tq3, PageFormat::Tq2];

/// These, and those that are read as what they stand for.
const CODED: [PageFormat; 6] =
    [PageFormat::Q8_0, PageFormat::Tq4, PageFormat::Tq3, PageFormat::Tq2, PageFormat::Kivi4, PageFormat::Kivi2];

/// A cache some of whose pages are coded.
#[derive(Clone)]
struct CodedCache {
    cache: Cache,
    constants: Vec<KeyConstants>,
}

impl CodedCache {
    /// `num_tokens` random tokens; keys and values of each page in any of the formats.
    fn new(random: &mut Random, params: AttentionParams, num_tokens: usize, formats: &[PageFormat]) -> CodedCache {
        let mut cache = Cache::new(random, params, num_tokens, &[PageFormat::F32]);
        let constants: Vec<KeyConstants> = (0..params.num_kv_heads)
            .map(|_| {
                let centre = random.normals(params.head_dim).iter().map(|x| 0.3 * x).collect();
                let scale = random.normals(params.head_dim).iter().map(|x| 0.5 + x.abs()).collect();
                KeyConstants::new(centre, scale)
            })
            .collect();
        for (list, constants) in cache.pages.iter_mut().zip(&constants) {
            for page in list {
                let [keys, values] = std::array::from_fn(|_| formats[random.below(formats.len())]);
                let (from, to) = (layout(&params, page.keys, page.values), layout(&params, keys, values));
                // Whatever a frame held before must not matter.
                let mut frame = vec![0xff; to.bytes()];
                let len = page.len as usize;
                recode(Isa::SCALAR, &from, &page.frame, &to, &mut frame, len, Some(constants)).unwrap();
                (page.keys, page.values, page.frame) = (keys, values, frame);
            }
        }
        CodedCache { cache, constants }
    }

    fn constants(&self) -> Vec<Option<&KeyConstants>> {
        self.constants.iter().map(Some).collect()
    }

    fn run(&self, compute: &Compute, q: &[f32], first_position: u32, tap: Tap) -> (Vec<f32>, Tap) {
        let laid_out = self.cache.laid_out(Order::Ascending);
        let span = laid_out.span(0, self.num_rows(q), first_position, tap);
        let mut spans = [AttentionSpan { constants: self.constants(), ..span }];
        let mut out = vec![f32::NAN; q.len()];
        paged_attention(compute, &self.cache.params, &mut spans, q, &mut out);
        let [span] = spans;
        (out, span.tap)
    }

    fn run_naive(&self, q: &[f32], first_position: u32, tap: Tap) -> (Vec<f32>, Tap) {
        let laid_out = self.cache.laid_out(Order::Ascending);
        let span = laid_out.span(0, self.num_rows(q), first_position, tap);
        let mut spans = [AttentionSpan { constants: self.constants(), ..span }];
        let mut out = vec![f32::NAN; q.len()];
        naive::attention(&self.cache.params, &mut spans, q, &mut out, |x| x);
        let [span] = spans;
        (out, span.tap)
    }

    fn num_rows(&self, q: &[f32]) -> usize {
        q.len() / (self.cache.params.num_heads * self.cache.params.head_dim)
    }
}

#[track_caller]
fn assert_near(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(1e-3f64, |a, &b| a.max(f64::from(b.abs())));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - f64::from(*want)).abs();
        assert!(error <= TOLERANCE * largest, "{what}: element {i}: {got} instead of {want}");
    }
}

fn some_params(random: &mut Random) -> AttentionParams {
    let group_size = [1, 2, 3, 4, 6, 7, 8][random.below(7)];
    let num_kv_heads = 1 + random.below(3);
    let head_dim = [64, 128, 256, 32, 96, 160][random.below(6)];
    let page_size = [16, 32, 64, 256][random.below(4)];
    let mut params = params(group_size * num_kv_heads, num_kv_heads, head_dim, page_size);
    if random.chance(3) {
        params.window = Some([1, 5, 16, 300, 100_000][random.below(5)]);
    }
    params
}

#[test]
fn equals_the_f64_oracle_on_random_lists() {
    let mut random = Random(21);
    for case in 0..80 {
        let params = some_params(&mut random);
        let most = if random.chance(4) { 1500 } else { 400 };
        let num_tokens = 1 + random.below(most);
        let one = [PageFormat::ALL[random.below(PageFormat::ALL.len())]];
        let formats = [&PageFormat::ALL[..], &CODED[..], &one[..]][random.below(3)];
        let mut cache = CodedCache::new(&mut random, params, num_tokens, formats);
        if random.chance(2) {
            let keep_one_in = 1 + random.below(4);
            cache.cache.evict(|_, _| random.chance(keep_one_in));
        }
        let num_rows = 1 + random.below(num_tokens.min(40));
        let first_position = (num_tokens - num_rows) as u32;
        let q = random.normals(num_rows * params.num_heads * params.head_dim);
        let tap = match random.below(3) {
            0 => Tap::None,
            1 => Tap::Rows { from_row: random.below(num_rows + 1), out: vec![vec![7.0; 1 << 16]; 3] },
            _ => Tap::ColumnSums { out: cache.cache.column_sums() },
        };
        let (want, want_tap) = cache.run_naive(&q, first_position, tap.clone());
        let want_tap = outs(want_tap);
        for isa in Isa::available() {
            let what = format!("case {case} on {isa}: {params:?}, {num_tokens} tokens, {num_rows} rows");
            let compute = compute(isa, 1 + random.below(3));
            let (got, got_tap) = cache.run(&compute, &q, first_position, tap.clone());
            assert_near(&got, &want, &what);
            for (got, want) in outs(got_tap).iter().zip(&want_tap) {
                assert_near(got, want, &format!("tap of {what}"));
            }
        }
    }
}

/// Shapes and formats for the tests of equal bits.
fn cases(random: &mut Random, num_tokens: usize) -> Vec<CodedCache> {
    let mut shapes = vec![params(9, 3, 64, 16), params(7, 1, 64, 64), params(12, 2, 128, 16), params(4, 1, 256, 32)];
    shapes.push(AttentionParams { window: Some(100), ..params(8, 2, 96, 16) });
    shapes.push(params(2, 2, 32, 256));
    let mut cases = Vec::new();
    for params in shapes {
        for formats in [&MULTIPLIED[..], &PageFormat::ALL[..], &[PageFormat::Tq3, PageFormat::F16][..]] {
            cases.push(CodedCache::new(random, params, num_tokens, formats));
        }
    }
    cases
}

#[test]
fn same_bits_for_any_number_of_threads_and_any_chunks() {
    let mut random = Random(22);
    for cache in cases(&mut random, 700) {
        let params = cache.cache.params;
        let row_len = params.num_heads * params.head_dim;
        let q = random.normals(30 * row_len);
        for isa in Isa::available() {
            let (want, _) = cache.run(&compute(isa, 1), &q, 670, Tap::None);
            for num_threads in [2, 3, 5] {
                let (got, _) = cache.run(&compute(isa, num_threads), &q, 670, Tap::None);
                assert_same_bits(&got, &want, &format!("{isa}, {num_threads} threads, {params:?}"));
            }
            for chunk in [1, 2, 4, 13] {
                let compute = compute(isa, 2);
                for (rows, want) in q
                    .chunks(chunk * row_len)
                    .zip(want.chunks(chunk * row_len))
                    .enumerate()
                    .map(|(number, (q, want))| ((number * chunk, q), want))
                {
                    let (first, q) = rows;
                    let (got, _) = cache.run(&compute, q, 670 + first as u32, Tap::None);
                    assert_same_bits(&got, want, &format!("{isa}, chunks of {chunk}, {params:?}"));
                }
            }
        }
    }
}

#[test]
fn all_instruction_sets_agree_bit_for_bit_on_codes() {
    let mut random = Random(23);
    for (case, cache) in cases(&mut random, 600).into_iter().enumerate() {
        let params = cache.cache.params;
        // Elements are multiplied in f32 (and bf16) with rounding of each instruction set's own; these codes are not.
        let only_codes = case % 3 == 0;
        for num_rows in [1, 20] {
            let q = random.normals(num_rows * params.num_heads * params.head_dim);
            let run = |isa| cache.run(&compute(isa, 1), &q, 600 - num_rows as u32, Tap::None).0;
            let reference = if only_codes { Isa::SCALAR } else { Isa::available()[Isa::available().len().min(2) - 1] };
            let want = run(reference);
            for isa in Isa::available() {
                if only_codes || (isa != Isa::SCALAR && !rounds(isa)) {
                    assert_same_bits(&run(isa), &want, &format!("{isa} and {reference}, {params:?}"));
                }
            }
        }
    }
}

#[test]
fn codes_that_are_not_multiplied_give_the_bits_of_f32_pages_of_what_they_stand_for() {
    let mut random = Random(31);
    for params in [params(9, 3, 64, 16), params(12, 2, 128, 64), params(4, 2, 96, 32)] {
        for formats in [&[PageFormat::Kivi4][..], &[PageFormat::Kivi2], &[PageFormat::Kivi4, PageFormat::F32]] {
            let cache = CodedCache::new(&mut random, params, 450, formats);
            let mut plain = cache.clone();
            for page in plain.cache.pages.iter_mut().flatten() {
                let from = layout(&params, page.keys, page.values);
                let to = layout(&params, PageFormat::F32, PageFormat::F32);
                let mut frame = vec![0; to.bytes()];
                for slot in 0..page.len as usize {
                    let (mut k, mut v) = (vec![0.0; params.head_dim], vec![0.0; params.head_dim]);
                    from.read_token(&page.frame, slot, None, &mut k, &mut v);
                    to.write_token(&mut frame, slot, &k, &v);
                }
                (page.keys, page.values, page.frame) = (to.keys, to.values, frame);
            }
            for num_rows in [1, 20] {
                let q = random.normals(num_rows * params.num_heads * params.head_dim);
                for isa in Isa::available() {
                    let run = |cache: &CodedCache| cache.run(&compute(isa, 1), &q, 450 - num_rows as u32, Tap::None).0;
                    assert_same_bits(&run(&cache), &run(&plain), &format!("{isa}, {formats:?}, {params:?}"));
                }
            }
        }
    }
}

#[test]
fn an_evicted_page_gives_the_bits_of_a_masked_one() {
    let mut random = Random(24);
    for cache in cases(&mut random, 500) {
        let params = cache.cache.params;
        let q = random.normals(params.num_heads * params.head_dim);
        // What a window masks: positions up to 499 - 100.
        let cut = (400 / params.page_size * params.page_size) as u32;
        let mut evicted = cache.clone();
        evicted.cache.evict(|_, page| page.position >= cut);
        let window = Some(500 - cut);
        let mut masked = cache.clone();
        (masked.cache.params.window, evicted.cache.params.window) = (window, None);
        for isa in Isa::available() {
            let (want, _) = masked.run(&compute(isa, 2), &q, 499, Tap::None);
            let (got, _) = evicted.run(&compute(isa, 2), &q, 499, Tap::None);
            assert_same_bits(&got, &want, &format!("{isa}, {params:?}"));
        }
    }
}

#[test]
fn taps_change_nothing_and_rows_over_codes_sum_to_one() {
    let mut random = Random(25);
    for cache in cases(&mut random, 300) {
        let params = cache.cache.params;
        for num_rows in [1, 12] {
            let q = random.normals(num_rows * params.num_heads * params.head_dim);
            let first = 300 - num_rows as u32;
            for isa in Isa::available() {
                let compute = compute(isa, 2);
                let (want, _) = cache.run(&compute, &q, first, Tap::None);
                for tap in [
                    Tap::Rows { from_row: num_rows / 3, out: Vec::new() },
                    Tap::ColumnSums { out: cache.cache.column_sums() },
                ] {
                    let rows = if matches!(tap, Tap::Rows { .. }) { 1 } else { num_rows };
                    let (got, tap) = cache.run(&compute, &q, first, tap);
                    assert_same_bits(&got, &want, &format!("{isa}, {params:?}"));
                    for row in outs(tap).iter().flat_map(|out| out.chunks(300)) {
                        let sum: f64 = row.iter().map(|&p| f64::from(p)).sum();
                        assert!((sum / rows as f64 - 1.0).abs() < 1e-5, "{isa}: {sum}");
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_makes_its_row_nan() {
    let mut random = Random(26);
    for format in CODED {
        let params = params(2, 1, 64, 16);
        let mut cache = CodedCache::new(&mut random, params, 40, &[format]);
        for isa in Isa::available() {
            for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut q = random.normals(3 * 2 * 64);
                let (want, _) = cache.run(&compute(isa, 1), &q, 37, Tap::None);
                q[2 * 64 + 3] = poison; // Row 1, head 0.
                let (got, _) = cache.run(&compute(isa, 1), &q, 37, Tap::None);
                assert!(got[2 * 64..3 * 64].iter().all(|x| x.is_nan()), "{isa} {format:?} {poison}");
                assert_same_bits(&got[..2 * 64], &want[..2 * 64], "rows before");
                assert_same_bits(&got[3 * 64..], &want[3 * 64..], "rows after");
            }
        }
        // A value that is not finite reaches the rows that see it.
        let constants = &cache.constants[0];
        let from = layout(&params, PageFormat::F32, PageFormat::F32);
        let mut frame = vec![0; from.bytes()];
        let mut v = vec![0.5; 64];
        v[7] = f32::INFINITY;
        from.write_token(&mut frame, 0, &[0.0; 64], &v);
        let page = &mut cache.cache.pages[0][1];
        recode(Isa::SCALAR, &from, &frame, &layout(&params, format, format), &mut page.frame, 16, Some(constants))
            .unwrap();
        for isa in Isa::available() {
            let q = random.normals(2 * 2 * 64);
            let (got, _) = cache.run(&compute(isa, 1), &q, 15, Tap::None);
            // Of elements, as in plain pages, a weight of 0 is multiplied too.
            if MULTIPLIED.contains(&format) {
                assert!(got[..2 * 64].iter().all(|x| x.is_finite()), "{isa} {format:?}");
            }
            assert!(got[2 * 64..].iter().any(|x| !x.is_finite()), "{isa} {format:?}");
        }
    }
}

#[test]
fn a_query_of_zeros_and_a_tiny_one_see_the_mean() {
    let mut random = Random(27);
    for format in CODED {
        let params = params(1, 1, 64, 16);
        let cache = CodedCache::new(&mut random, params, 32, &[format]);
        for size in [0.0, 1e-38, 1e-44] {
            let q = vec![size; 64];
            let (want, _) = cache.run_naive(&q, 31, Tap::None);
            for isa in Isa::available() {
                let (got, _) = cache.run(&compute(isa, 1), &q, 31, Tap::None);
                assert_near(&got, &want, &format!("{isa} {format:?} {size}"));
            }
        }
    }
}

/// Weights below half of what a byte resolves are as good as lost one by one; what rounding leaves goes on to the next.
#[test]
fn many_small_weights_beside_a_large_one_are_not_lost() {
    let mut random = Random(30);
    for format in CODED {
        let params = params(1, 1, 64, 16);
        let num_tokens = 1 + super::TILE as usize;
        let mut cache = CodedCache::new(&mut random, params, num_tokens, &[format]);
        let constants = cache.constants[0].clone();
        let q = random.normals(64);
        // Token 5 scores 8 more than the others, which share 383 / 2,981 of its weight: 1 / 2,981 each.
        let norm: f32 = q.iter().map(|x| x * x).sum();
        let key: Vec<f32> = q.iter().map(|x| x * 8.0 / params.scale / norm).collect();
        let from = layout(&params, PageFormat::F32, PageFormat::F32);
        for page in &mut cache.cache.pages[0] {
            let mut frame = vec![0; from.bytes()];
            for slot in 0..page.len as usize {
                let (k, v) = match page.position as usize + slot {
                    5 => (&key[..], [1.0; 64]),
                    _ => (&[0.0; 64][..], [-1.0; 64]),
                };
                from.write_token(&mut frame, slot, k, &v);
            }
            let to = layout(&params, format, format);
            recode(Isa::SCALAR, &from, &frame, &to, &mut page.frame, page.len as usize, Some(&constants)).unwrap();
        }
        let first_position = num_tokens as u32 - 1;
        let (want, _) = cache.run_naive(&q, first_position, Tap::None);
        for isa in Isa::available() {
            let (got, _) = cache.run(&compute(isa, 1), &q, first_position, Tap::None);
            for (got, want) in got.iter().zip(&want) {
                assert!((got - want).abs() < 0.04, "{isa} {format:?}: {got} instead of {want}");
            }
        }
    }
}

#[test]
#[should_panic(expected = "rotated keys need constants of 64 channels")]
fn rotated_keys_without_constants_panic() {
    let cache = CodedCache::new(&mut Random(28), params(1, 1, 64, 16), 16, &[PageFormat::Tq4]);
    let laid_out = cache.cache.laid_out(Order::Ascending);
    let mut span = [laid_out.span(0, 1, 15, Tap::None)];
    paged_attention(&compute(Isa::detect(), 1), &cache.cache.params, &mut span, &[0.0; 64], &mut [0.0; 64]);
}
