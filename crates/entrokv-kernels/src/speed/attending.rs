//! Attention: one token after 8,000, of which all or a fifth are resident, and a chunk of 512 tokens at the end of 8,000.

use super::numbers::noise;
use super::{Bound, Case, KernelSpeed, median};
use crate::arena::Arena;
use crate::attention::{AttentionParams, AttentionSpan, PagedAttention, ScoreArithmetic, Segment, SegmentList, Tap};
use crate::codes::KeyConstants;
use crate::compute::Compute;
use crate::page::{PageFormat, PageLayout, recode};

/// Tokens in the cache, of a page, and of a chunk of a prompt.
const TOKENS: usize = 8000;
const PAGE_SIZE: usize = 16;
const CHUNK: usize = 512;

/// Of how many pages one is resident where a policy has freed the others.
const EVICTED_STRIDE: usize = 5;

/// Bytes of all caches that decoding goes through, one after the other like the layers of a model.
const DECODE_BYTES: usize = 192 << 20;

/// Heads of a small and of a larger model: query heads, KV heads, elements of a head.
const HEADS: [(usize, usize, usize); 2] = [(9, 3, 64), (12, 2, 128)];

/// Formats of keys and values.
const FORMATS: [(&str, PageFormat); 9] = [
    ("f32", PageFormat::F32),
    ("bf16", PageFormat::Bf16),
    ("f16", PageFormat::F16),
    ("q8_0", PageFormat::Q8_0),
    ("tq4", PageFormat::Tq4),
    ("tq3", PageFormat::Tq3),
    ("tq2", PageFormat::Tq2),
    ("kivi4", PageFormat::Kivi4),
    ("kivi2", PageFormat::Kivi2),
];

/// What queries meet.
#[derive(Clone, Copy)]
struct Cached {
    name: &'static str,
    format: PageFormat,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    /// Every `stride`-th page is resident.
    stride: usize,
}

impl Cached {
    fn layout(&self) -> PageLayout {
        PageLayout { keys: self.format, values: self.format, page_size: PAGE_SIZE, head_dim: self.head_dim }
    }

    /// Pages of a KV head.
    fn num_pages(&self) -> usize {
        TOKENS / PAGE_SIZE / self.stride
    }

    /// The resident pages of a KV head, in the memory of its layer: those of a KV head side by side.
    fn segments(&self, kv_head: usize) -> SegmentList {
        let layout = self.layout();
        let mut list = SegmentList::new(PAGE_SIZE, self.head_dim);
        for page in 0..self.num_pages() {
            list.push(Segment {
                keys: layout.keys,
                values: layout.values,
                frame: (kv_head * self.num_pages() + page) * layout.bytes(),
                position: (page * self.stride * PAGE_SIZE) as u32,
                len: PAGE_SIZE as u32,
            });
        }
        list
    }

    /// Bytes of a layer's pages.
    fn layer_bytes(&self) -> usize {
        self.num_pages() * self.num_kv_heads * self.layout().bytes()
    }
}

/// Decoding over every format, all pages resident and some; reading a prompt over f16.
pub(super) fn cases() -> impl Iterator<Item = Case> {
    HEADS.into_iter().flat_map(|(num_heads, num_kv_heads, head_dim)| {
        FORMATS.into_iter().flat_map(move |(name, format)| {
            let whole = Cached { name, format, num_heads, num_kv_heads, head_dim, stride: 1 };
            let (evicted, is_f16) = (Cached { stride: EVICTED_STRIDE, ..whole }, format == PageFormat::F16);
            let mut runs = vec![(whole, 1)];
            runs.extend((is_f16 || format.is_coded()).then_some((evicted, 1)));
            runs.extend(is_f16.then_some((whole, CHUNK)));
            runs.into_iter().map(|(cached, rows)| -> Case { Box::new(move |compute| speed(compute, cached, rows)) })
        })
    })
}

/// Times `rows` queries at the end of the cache.
fn speed(compute: &Compute, cached: Cached, rows: usize) -> KernelSpeed {
    let Cached { name, format, num_heads, num_kv_heads, head_dim, stride } = cached;
    let layer_bytes = cached.layer_bytes();
    let num_layers = if rows == 1 { DECODE_BYTES.div_ceil(layer_bytes) } else { 1 };
    let noise_rms = 12f32.sqrt().recip();
    let constants =
        KeyConstants::from_moments(&vec![0.0; head_dim], &vec![noise_rms; head_dim], &vec![noise_rms; head_dim]);
    let layer = layer(compute, cached, &constants);
    // As the engine's frames lie: aligned, and in huge pages where there are any.
    let num_bytes = (num_layers * layer_bytes) as u64;
    let mut frames = Arena::reserve(num_bytes).expect("memory for the pages of the benchmark");
    frames.bytes_mut(0..num_bytes).chunks_exact_mut(layer_bytes).for_each(|copy| copy.copy_from_slice(&layer));
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
    let mut attention = PagedAttention::default();
    // The frames of all layers lie alike.
    let segments: Vec<SegmentList> = (0..num_kv_heads).map(|kv_head| cached.segments(kv_head)).collect();
    let time = median(|| {
        for memory in frames.bytes(0..num_bytes).chunks_exact(layer_bytes) {
            let span = AttentionSpan {
                first_row: 0,
                num_rows: rows,
                first_position: (TOKENS - rows) as u32,
                memory,
                segments: &segments,
                constants: vec![Some(&constants); num_kv_heads],
                tap: Tap::None,
            };
            attention.run(compute, &params, &mut [span], &q, &mut out);
        }
    });
    check(cached, &layer, &constants, &out);
    let resident = TOKENS / stride;
    let seen = rows * resident - rows * (rows - 1) / 2;
    let bound = match (rows, format.is_coded()) {
        (1, true) => Bound::Codes,
        (1, false) => Bound::Memory,
        _ => Bound::Bf16,
    };
    let keys = if stride == 1 { format!("{TOKENS}") } else { format!("{resident} of {TOKENS}") };
    KernelSpeed {
        kernel: format!("attention {name}"),
        shape: format!("{rows} x {num_heads}/{num_kv_heads} x {head_dim}, {keys} keys"),
        time,
        bytes: num_bytes,
        operations: (num_layers * seen * num_heads * head_dim * 4) as u64,
        bound,
    }
}

/// All values of a KV head are the same, so every weighted mean of values is that one, as its page reads it back: but for the
/// rounding of weights to bf16 (1/512) and of a codebook's points to bytes. The latter, half of 1/26 of a deviation for two
/// bits, does not average out over equal values and adds up in the inverse rotation, in some elements to twice that.
fn check(cached: Cached, layer: &[u8], constants: &KeyConstants, out: &[f32]) {
    let layout = cached.layout();
    let heads: Vec<Vec<f32>> = layer
        .chunks_exact(layer.len() / cached.num_kv_heads)
        .map(|head| {
            let (mut k, mut v) = (vec![0.0; cached.head_dim], vec![0.0; cached.head_dim]);
            layout.read_token(&head[..layout.bytes()], 0, Some(constants), &mut k, &mut v);
            v
        })
        .collect();
    for (i, x) in out.iter().enumerate() {
        let g = i / cached.head_dim % cached.num_heads / (cached.num_heads / cached.num_kv_heads);
        let want = heads[g][i % cached.head_dim];
        assert!((x - want).abs() <= 0.05 * value(g), "element {i} is {x}, not {want}");
    }
}

/// A layer's resident pages, those of a KV head side by side.
fn layer(compute: &Compute, cached: Cached, constants: &KeyConstants) -> Vec<u8> {
    let layout = cached.layout();
    let written = match cached.format.is_coded() {
        true => PageLayout { keys: PageFormat::F16, values: PageFormat::F16, ..layout },
        false => layout,
    };
    let mut frames = vec![0; cached.layer_bytes()];
    let mut page = vec![0; written.bytes()];
    for (index, frame) in frames.chunks_exact_mut(layout.bytes()).enumerate() {
        for slot in 0..PAGE_SIZE {
            let at = (index * PAGE_SIZE + slot) * layout.head_dim;
            let k: Vec<f32> = (at..at + layout.head_dim).map(noise).collect();
            let v = vec![value(index / cached.num_pages()); layout.head_dim];
            written.write_token(&mut page, slot, &k, &v);
        }
        recode(compute.isa, &written, &page, &layout, frame, PAGE_SIZE, Some(constants))
            .expect("whole pages of a shape for codes");
    }
    frames
}

/// All values of KV head `g`.
fn value(g: usize) -> f32 {
    0.5 + g as f32
}

const _: () = assert!(TOKENS.is_multiple_of(PAGE_SIZE * EVICTED_STRIDE));
