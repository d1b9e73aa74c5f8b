//! Attention: one token after 8,000, and a chunk of 512 tokens at the end of 8,000.

use super::numbers::noise;
use super::{Bound, Case, KernelSpeed, median};
use crate::attention::{AttentionParams, AttentionSpan, ScoreArithmetic, Segment, Tap, paged_attention};
use crate::compute::Compute;
use crate::page::{PageFormat, PageLayout};

/// Tokens in the cache, of a page, and of a chunk of a prompt.
const TOKENS: usize = 8000;
const PAGE_SIZE: usize = 16;
const CHUNK: usize = 512;

/// Bytes of all caches that decoding goes through, one after the other like the layers of a model.
const DECODE_BYTES: usize = 192 << 20;

/// Heads of a small and of a larger model: query heads, KV heads, elements of a head.
const HEADS: [(usize, usize, usize); 2] = [(9, 3, 64), (12, 2, 128)];

/// Formats of keys and values that plain pages come in.
const FORMATS: [(&str, PageFormat); 3] =
    [("f16", PageFormat::F16), ("bf16", PageFormat::Bf16), ("f32", PageFormat::F32)];

/// Decoding over every format, reading a prompt over f16.
pub(super) fn cases() -> impl Iterator<Item = Case> {
    HEADS.into_iter().flat_map(|heads| {
        let decode = FORMATS.map(|(name, format)| -> Case { Box::new(move |c| speed(c, name, format, heads, 1)) });
        let prefill: Case = Box::new(move |c| speed(c, "f16", PageFormat::F16, heads, CHUNK));
        decode.into_iter().chain([prefill])
    })
}

/// Times `rows` queries at the end of the cache.
fn speed(
    compute: &Compute,
    name: &str,
    format: PageFormat,
    (num_heads, num_kv_heads, head_dim): (usize, usize, usize),
    rows: usize,
) -> KernelSpeed {
    let layout = PageLayout { keys: format, values: format, page_size: PAGE_SIZE, head_dim };
    let layer_bytes = TOKENS / PAGE_SIZE * num_kv_heads * layout.bytes();
    let num_layers = if rows == 1 { DECODE_BYTES.div_ceil(layer_bytes) } else { 1 };
    let frames = frames(&layout, num_kv_heads).repeat(num_layers);
    let scale = (head_dim as f32).sqrt().recip();
    let params = AttentionParams {
        num_heads,
        num_kv_heads,
        head_dim,
        page_size: PAGE_SIZE,
        scale,
        window: None,
        scores: ScoreArithmetic::Rounded,
    };
    let q: Vec<f32> = (0..rows * num_heads * head_dim).map(noise).collect();
    let mut out = vec![0.0; q.len()];
    let time = median(|| {
        for layer in frames.chunks_exact(layer_bytes) {
            let span = span(&layout, layer, num_kv_heads, rows);
            paged_attention(compute, &params, &mut [span], &q, &mut out);
        }
    });
    // Every value of a KV head is the same, so every weighted mean of values is that one.
    for (i, x) in out.iter().enumerate() {
        let want = value(i / head_dim % num_heads / params.group_size());
        assert!((x - want).abs() <= 0.01 * want, "element {i} is {x}, not {want}");
    }
    let seen = rows * TOKENS - rows * (rows - 1) / 2;
    KernelSpeed {
        kernel: format!("attention {name}"),
        shape: format!("{rows} x {num_heads}/{num_kv_heads} x {head_dim}, {TOKENS} keys"),
        time,
        bytes: (num_layers * layer_bytes) as u64,
        operations: (num_layers * seen * num_heads * head_dim * 4) as u64,
        bound: if rows == 1 { Bound::Memory } else { Bound::Bf16 },
    }
}

/// A layer's pages, those of a KV head side by side.
fn frames(layout: &PageLayout, num_kv_heads: usize) -> Vec<u8> {
    let mut frames = vec![0; TOKENS / PAGE_SIZE * num_kv_heads * layout.bytes()];
    for (index, frame) in frames.chunks_exact_mut(layout.bytes()).enumerate() {
        for slot in 0..PAGE_SIZE {
            let at = (index * PAGE_SIZE + slot) * layout.head_dim;
            let k: Vec<f32> = (at..at + layout.head_dim).map(noise).collect();
            let v = vec![value(index / (TOKENS / PAGE_SIZE)); layout.head_dim];
            layout.write_token(frame, slot, &k, &v);
        }
    }
    frames
}

/// The last `rows` positions of the cache.
fn span<'a>(layout: &PageLayout, layer: &'a [u8], num_kv_heads: usize, rows: usize) -> AttentionSpan<'a> {
    let PageLayout { keys, values, .. } = *layout;
    let segment =
        |(index, frame)| Segment { keys, values, frame, position: (index * PAGE_SIZE) as u32, len: PAGE_SIZE as u32 };
    let heads = layer.chunks_exact(layer.len() / num_kv_heads);
    AttentionSpan {
        first_row: 0,
        num_rows: rows,
        first_position: (TOKENS - rows) as u32,
        constants: vec![None; num_kv_heads],
        segments: heads.map(|head| head.chunks_exact(layout.bytes()).enumerate().map(segment).collect()).collect(),
        tap: Tap::None,
    }
}

/// All values of KV head `g`.
fn value(g: usize) -> f32 {
    0.5 + g as f32
}

const _: () = assert!(TOKENS.is_multiple_of(PAGE_SIZE));
