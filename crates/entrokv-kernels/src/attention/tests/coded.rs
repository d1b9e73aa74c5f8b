//! Attention over codes: against what the codes stand for, and bit for bit between the ways to compute.

use super::*;
use crate::page::recode;

/// Largest error of an output or probability relative to the largest value. The codes are exact on both sides; attention
/// rounds their points to integers, queries to 16 bits and weights to 15.
const TOLERANCE: f64 = 2e-2;

const CODED: [PageFormat; 4] = [PageFormat::Q8_0, PageFormat::Tq4, PageFormat::Tq3, PageFormat::Tq2];

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

    fn span(&self, first_row: usize, num_rows: usize, first_position: u32, tap: Tap) -> AttentionSpan<'_> {
        let constants = self.constants.iter().map(Some).collect();
        AttentionSpan { constants, ..self.cache.span(first_row, num_rows, first_position, tap) }
    }

    fn run(&self, compute: &Compute, q: &[f32], first_position: u32, tap: Tap) -> (Vec<f32>, Tap) {
        let mut spans = [self.span(0, self.num_rows(q), first_position, tap)];
        let mut out = vec![f32::NAN; q.len()];
        paged_attention(compute, &self.cache.params, &mut spans, q, &mut out);
        let [span] = spans;
        (out, span.tap)
    }

    fn run_naive(&self, q: &[f32], first_position: u32, tap: Tap) -> (Vec<f32>, Tap) {
        let mut spans = [self.span(0, self.num_rows(q), first_position, tap)];
        let mut out = vec![f32::NAN; q.len()];
        naive::attention(&self.cache.params, &mut spans, q, &mut out);
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
        let one = [PageFormat::ALL[random.below(7)]];
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
            1 => Tap::Rows { from_row: random.below(num_rows + 1), out: vec![vec![7.0; 3]] },
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
