//! The oracle: attention as the formula says it, in f64, one row at a time.
//!
//! Where the kernels round queries, keys and values to bf16, so does it; but not the weights, whose rounding is the error.

use super::{AttentionParams, AttentionSpan, Maxima, ScoreArithmetic, Tap};

/// As `paged_attention`, but slow; `round` is what the kernels do to their operands.
pub(super) fn attention(
    params: &AttentionParams,
    spans: &mut [AttentionSpan<'_>],
    q: &[f32],
    out: &mut [f32],
    round: fn(f32) -> f32,
) {
    let (d, r) = (params.head_dim, params.group_size());
    let round_score = match params.scores {
        ScoreArithmetic::Rounded => round,
        ScoreArithmetic::F32 => |x| x,
    };
    for span in spans {
        let mut probabilities = vec![Vec::new(); params.num_kv_heads];
        let mut positions = Vec::new();
        for (g, list) in span.segments.iter().enumerate() {
            let constants = span.constants.get(g).copied().flatten();
            let mut tokens = Vec::new();
            for segment in list.segments() {
                let layout = params.layout(segment);
                let frame = &span.memory[segment.frame..][..layout.bytes()];
                for slot in 0..segment.len as usize {
                    let (mut k, mut v) = (vec![0.0; d], vec![0.0; d]);
                    layout.read_token(frame, slot, constants, &mut k, &mut v);
                    v.iter_mut().for_each(|x| *x = round(*x));
                    k.iter_mut().for_each(|x| *x = round_score(*x));
                    tokens.push((segment.position + slot as u32, k, v));
                }
            }
            positions.push(tokens.iter().map(|(p, ..)| *p).collect());
            for row in 0..span.num_rows {
                let position = span.first_position + row as u32;
                let oldest = params.window.map_or(0, |window| (position + 1).saturating_sub(window));
                for h in g * r..(g + 1) * r {
                    let at = ((span.first_row + row) * params.num_heads + h) * d;
                    let scores: Vec<f64> = tokens
                        .iter()
                        .map(|(p, k, _)| {
                            if *p > position || *p < oldest {
                                return f64::NEG_INFINITY;
                            }
                            let query = q[at..at + d].iter().map(|x| round_score(x * params.scale));
                            query.zip(k).map(|(a, b)| f64::from(a) * f64::from(*b)).sum()
                        })
                        .collect();
                    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> =
                        scores.iter().map(|s| if *s == f64::NEG_INFINITY { 0.0 } else { (s - max).exp() }).collect();
                    let total: f64 = weights.iter().sum();
                    let p: Vec<f64> = weights.iter().map(|w| if total > 0.0 { w / total } else { 0.0 }).collect();
                    for i in 0..d {
                        out[at + i] =
                            tokens.iter().zip(&p).map(|((_, _, v), p)| p * f64::from(v[i])).sum::<f64>() as f32;
                    }
                    probabilities[g].push(p);
                }
            }
        }
        tap(&mut span.tap, &probabilities, &positions, r);
    }
}

/// Fills the tap from the probabilities, per KV head `[rows * group_size][tokens]`, of tokens at `positions`.
fn tap(tap: &mut Tap, probabilities: &[Vec<Vec<f64>>], positions: &[Vec<u32>], r: usize) {
    match tap {
        Tap::None => {}
        Tap::Rows { from_row, out } => {
            let tapped = |rows: &Vec<Vec<f64>>| rows[*from_row * r..].concat().iter().map(|p| *p as f32).collect();
            *out = probabilities.iter().map(tapped).collect();
        }
        Tap::ColumnSums { out } => {
            for (out, rows) in out.iter_mut().zip(probabilities) {
                let num_tokens = out.len() / r;
                for (i, row) in rows.iter().enumerate() {
                    for (sum, p) in out[i % r * num_tokens..].iter_mut().zip(row) {
                        *sum += *p as f32;
                    }
                }
            }
        }
        Tap::ColumnMaxima(Maxima { columns, among, out }) => {
            let heads = out.iter_mut().zip(probabilities).zip(positions).zip(columns).zip(among);
            for ((((out, rows), positions), columns), among) in heads {
                let num_columns = out.len() / r;
                let tokens = || positions.iter().zip(0..);
                for (i, row) in rows.iter().enumerate() {
                    let inside = |position: &u32| among.iter().any(|range| range.contains(position));
                    let total: f64 = tokens().filter(|(p, _)| inside(p)).map(|(_, token): (_, usize)| row[token]).sum();
                    let shown = tokens().filter(|(p, _)| columns.contains(p));
                    for (maximum, (_, token)) in out[i % r * num_columns..].iter_mut().zip(shown) {
                        *maximum = maximum.max((row[token] / total).ln() as f32);
                    }
                }
            }
        }
    }
}
