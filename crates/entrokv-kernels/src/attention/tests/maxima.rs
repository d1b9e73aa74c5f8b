//! Largest probabilities of columns: the oracle, and the same bits whoever takes them.

use std::ops::Range;

use super::*;

/// Tokens of the text that is repeated, and rows that repeat it.
const NUM_TOKENS: usize = 900;
const NUM_ROWS: usize = 130;

/// What a reconstruction asks for: sinks, a stretch of the text, and the rows themselves.
fn maxima(cache: &Cache, columns: Range<u32>) -> Maxima {
    let among = vec![0..columns.start.min(4), columns.clone(), (NUM_TOKENS - NUM_ROWS) as u32..NUM_TOKENS as u32];
    let count = |list: &Vec<Page>| {
        let positions = list.iter().flat_map(|page| page.position..page.position + page.len);
        positions.filter(|position| columns.contains(position)).count()
    };
    let len = |list| count(list) * cache.params.group_size();
    let out: Vec<_> = cache.pages.iter().map(|list| vec![f32::NEG_INFINITY; len(list)]).collect();
    Maxima { columns: vec![columns; out.len()], among: vec![among; out.len()], out }
}

fn cache(random: &mut Random, params: AttentionParams) -> Cache {
    let mut cache = Cache::new(random, params, NUM_TOKENS, &PLAIN);
    cache.evict(|_, page| page.position == 0 || page.position as usize > 700 || !random.chance(5));
    cache
}

const FIRST_ROW: u32 = (NUM_TOKENS - NUM_ROWS) as u32;

/// Stretches that begin and end anywhere: in tiles, in pages, in 16 lanes.
const STRETCHES: [Range<u32>; 4] = [4..768, 0..17, 383..399, 501..770];

#[test]
fn column_maxima_are_those_of_the_oracle() {
    let mut random = Random(31);
    for params in shapes() {
        let cache = cache(&mut random, params);
        let q = random.normals(NUM_ROWS * params.num_heads * params.head_dim);
        for columns in STRETCHES {
            let tap = Tap::ColumnMaxima(maxima(&cache, columns.clone()));
            let (_, want) = run_naive(rounding(Isa::SCALAR), &cache, &q, FIRST_ROW, tap.clone());
            let (_, rounded) = run_naive(rounding(Isa::detect()), &cache, &q, FIRST_ROW, tap.clone());
            for isa in Isa::available() {
                let (_, got) = run(&compute(isa, 2), &cache, &q, FIRST_ROW, tap.clone());
                let want = if rounds(isa) { &rounded } else { &want };
                let what = format!("{columns:?} on {isa}, {params:?}");
                let (got, want) = (outs(got).concat(), outs(want.clone()).concat());
                // A window may show no row a token of the stretch.
                let seen = want.iter().filter(|x| x.is_finite()).count();
                assert!(seen > 0 || params.window.is_some(), "{what}");
                for (got, want) in got.iter().zip(&want) {
                    let near = got == want || (got - want).abs() < 1e-4;
                    assert!(near, "{what}: {got} instead of {want}");
                }
            }
        }
    }
}

#[test]
fn column_maxima_have_the_same_bits_for_any_threads_and_pieces() {
    let mut random = Random(32);
    for params in shapes() {
        let cache = cache(&mut random, params);
        let row_len = params.num_heads * params.head_dim;
        let q = random.normals(NUM_ROWS * row_len);
        for isa in Isa::available() {
            let columns = 40..760;
            let (want_out, want) =
                run(&compute(isa, 1), &cache, &q, FIRST_ROW, Tap::ColumnMaxima(maxima(&cache, columns.clone())));
            assert_same_bits(&want_out, &run(&compute(isa, 1), &cache, &q, FIRST_ROW, Tap::None).0, "the output");
            let want = outs(want).concat();
            for (threads, piece) in [(3, NUM_ROWS), (2, 50), (1, 7)] {
                let mut tap = Tap::ColumnMaxima(maxima(&cache, columns.clone()));
                for (i, q) in q.chunks(piece * row_len).enumerate() {
                    tap = run(&compute(isa, threads), &cache, q, FIRST_ROW + (i * piece) as u32, tap).1;
                }
                let what = format!("{threads} threads, pieces of {piece}, {isa}, {params:?}");
                assert_same_bits(&outs(tap).concat(), &want, &what);
            }
        }
    }
}

#[test]
fn over_everything_column_maxima_are_the_largest_entries_of_the_rows() {
    let mut random = Random(33);
    let params = params(6, 2, 64, 16);
    let cache = cache(&mut random, params);
    let q = random.normals(NUM_ROWS * 6 * 64);
    for isa in Isa::available() {
        let rows = Tap::Rows { from_row: 0, out: Vec::new() };
        let rows = outs(run(&compute(isa, 2), &cache, &q, FIRST_ROW, rows).1);
        let among = vec![vec![0..NUM_TOKENS as u32]; 2];
        let all = Maxima { among, ..maxima(&cache, 0..NUM_TOKENS as u32) };
        let got = outs(run(&compute(isa, 2), &cache, &q, FIRST_ROW, Tap::ColumnMaxima(all)).1);
        for (g, (got, rows)) in got.iter().zip(rows).enumerate() {
            let num_tokens = cache.num_tokens(g);
            for (at, got) in got.iter().enumerate() {
                let largest = rows.iter().skip(at).step_by(3 * num_tokens).fold(0.0, |a: f32, b| a.max(*b));
                assert!((got.exp() - largest).abs() <= 2e-5 * largest, "{isa}: {} instead of {largest}", got.exp());
            }
        }
    }
}

#[test]
fn a_row_that_is_nan_makes_its_head_nan_and_no_other() {
    let mut random = Random(34);
    let params = params(4, 2, 64, 16);
    let cache = cache(&mut random, params);
    let mut q = random.normals(NUM_ROWS * 4 * 64);
    q[(5 * 4 + 2) * 64] = f32::NAN; // Row 5, head 2: the first one of KV head 1.
    for isa in Isa::available() {
        let got = outs(run(&compute(isa, 2), &cache, &q, FIRST_ROW, Tap::ColumnMaxima(maxima(&cache, 8..760))).1);
        let (poisoned, sound) = got[1].split_at(got[1].len() / 2);
        assert!(poisoned.iter().all(|x| x.is_nan()), "{isa}");
        assert!(sound.iter().chain(&got[0]).all(|x| x.is_finite()), "{isa}");
    }
}
