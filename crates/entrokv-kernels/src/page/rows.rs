//! Writing many tokens of one KV head at once: whole strips, instead of elements scattered one token after another.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::{PageFormat, PageLayout, Part};
use crate::simd::LANES;

/// Dimensions of a strip of keys that are transposed at a time: what is staged stays in the first-level cache.
const STAGED_DIMS: usize = 64;

/// Keys and values of consecutive tokens of one KV head, as rows of an array of all heads.
#[derive(Clone, Copy, Debug)]
pub struct TokenRows<'a> {
    /// From the first token's key on; a key is the first `head_dim` elements of a row.
    pub k: &'a [f32],
    /// From the first token's value on, likewise.
    pub v: &'a [f32],
    /// Elements from one token's row to the next.
    pub stride: usize,
    /// Number of tokens.
    pub len: usize,
}

impl<'a> TokenRows<'a> {
    /// The key and value of token `index`.
    fn token(&self, index: usize, head_dim: usize) -> (&'a [f32], &'a [f32]) {
        let at = index * self.stride..index * self.stride + head_dim;
        (&self.k[at.clone()], &self.v[at])
    }
}

impl PageLayout {
    /// Stores the keys and values of `rows` in the slots from `first_slot` on: the bytes that [`PageLayout::write_token`]
    /// stores for one token after the other.
    ///
    /// # Panics
    /// As [`PageLayout::write_token`], and if `rows` has fewer elements than its tokens take.
    pub fn write_tokens(&self, frame: &mut [u8], first_slot: usize, rows: TokenRows<'_>) {
        let mut index = 0;
        while index < rows.len {
            let slot = first_slot + index;
            let strip_end = slot + LANES;
            if slot.is_multiple_of(LANES) && rows.len - index >= LANES && strip_end <= self.page_size {
                self.write_strip(frame, slot, |lane| rows.token(index + lane, self.head_dim));
                index += LANES;
            } else {
                let (k, v) = rows.token(index, self.head_dim);
                self.write_token(frame, slot, k, v);
                index += 1;
            }
        }
    }

    /// Stores 16 tokens in the strip that starts with `slot`.
    fn write_strip<'a>(&self, frame: &mut [u8], slot: usize, token: impl Fn(usize) -> (&'a [f32], &'a [f32])) {
        assert_eq!(frame.len(), self.bytes(), "a frame of {self:?}");
        assert!(!self.keys.is_coded() && !self.values.is_coded(), "a token cannot be written into {self:?}");
        let (keys, values) = frame.split_at_mut(self.key_bytes());
        let keys = &mut keys[self.keys.bytes(Part::Keys, slot, self.head_dim)..];
        let mut staged = [[0.0; LANES]; STAGED_DIMS];
        for first_dim in (0..self.head_dim).step_by(STAGED_DIMS) {
            let num_dims = STAGED_DIMS.min(self.head_dim - first_dim);
            for lane in 0..LANES {
                let k = &token(lane).0[first_dim..first_dim + num_dims];
                if self.keys == PageFormat::Bf16 {
                    // Two dimensions side by side; an odd last one is alone.
                    let (pairs, last) = k.as_chunks::<2>();
                    let (to, _) = staged.as_flattened_mut().as_chunks_mut::<{ 2 * LANES }>();
                    to.iter_mut().zip(pairs).for_each(|(to, pair)| to[2 * lane..2 * lane + 2].copy_from_slice(pair));
                    last.iter().for_each(|x| staged[num_dims - 1][lane] = *x);
                } else {
                    staged.iter_mut().zip(k).for_each(|(to, x)| to[lane] = *x);
                }
            }
            let at = self.keys.bytes(Part::Keys, LANES, first_dim);
            store(self.keys, &mut keys[at..], &staged.as_flattened()[..num_dims * LANES]);
        }

        let values = &mut values[self.values.bytes(Part::Values, slot, self.head_dim)..];
        let row_bytes = self.values.bytes(Part::Values, 1, self.head_dim);
        if self.values == PageFormat::Bf16 {
            for (pair, to) in values.chunks_exact_mut(2 * row_bytes).take(LANES / 2).enumerate() {
                let (even, odd) = (token(2 * pair).1, token(2 * pair + 1).1);
                for ((to, a), b) in to.as_chunks_mut::<4>().0.iter_mut().zip(even).zip(odd) {
                    let ([a0, a1], [b0, b1]) = (bf16::from_f32(*a).to_ne_bytes(), bf16::from_f32(*b).to_ne_bytes());
                    *to = [a0, a1, b0, b1];
                }
            }
        } else {
            for (lane, to) in values.chunks_exact_mut(row_bytes).take(LANES).enumerate() {
                store(self.values, to, token(lane).1);
            }
        }
    }
}

/// Stores `x` rounded to `format` at the start of `part`, element after element.
fn store(format: PageFormat, part: &mut [u8], x: &[f32]) {
    match format {
        PageFormat::F32 => {
            part.as_chunks_mut().0.iter_mut().zip(x).for_each(|(element, x)| *element = x.to_ne_bytes());
        }
        PageFormat::F16 => {
            let mut rounded = [f16::ZERO; STAGED_DIMS * LANES];
            for (part, x) in part.chunks_mut(2 * rounded.len()).zip(x.chunks(rounded.len())) {
                let rounded = &mut rounded[..x.len()];
                rounded.convert_from_f32_slice(x);
                part.as_chunks_mut().0.iter_mut().zip(rounded).for_each(|(element, x)| *element = x.to_ne_bytes());
            }
        }
        PageFormat::Bf16 => {
            let elements = part.as_chunks_mut().0.iter_mut();
            elements.zip(x).for_each(|(element, x)| *element = bf16::from_f32(*x).to_ne_bytes());
        }
        coded => unreachable!("{coded:?} has no elements"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn format() -> impl Strategy<Value = PageFormat> {
        prop_oneof![Just(PageFormat::F32), Just(PageFormat::F16), Just(PageFormat::Bf16)]
    }

    proptest! {
        #[test]
        fn many_tokens_are_the_bytes_of_one_after_another(
            page_size in 1usize..=70,
            head_dim in 1usize..150,
            keys in format(),
            values in format(),
            num_heads in 1usize..3,
            seed in 0u32..1000,
        ) {
            let layout = PageLayout { keys, values, page_size, head_dim };
            let stride = num_heads * head_dim;
            let (first_slot, first_head) = (seed as usize % page_size, seed as usize % num_heads);
            let len = (page_size - first_slot).min(seed as usize % 67);
            let random = |i: usize| ((i as u32 ^ seed).wrapping_mul(2_654_435_761) as f32 / 1e9 - 2.0).powi(3);
            let k: Vec<f32> = (0..len * stride).map(random).collect();
            let v: Vec<f32> = k.iter().map(|x| 0.3 - x).collect();
            let mut want = vec![0xff; layout.bytes()];
            for token in 0..len {
                let at = token * stride + first_head * head_dim;
                let at = at..at + head_dim;
                layout.write_token(&mut want, first_slot + token, &k[at.clone()], &v[at]);
            }
            let mut got = vec![0xff; layout.bytes()];
            let from = (first_head * head_dim).min(k.len());
            layout.write_tokens(&mut got, first_slot, TokenRows { k: &k[from..], v: &v[from..], stride, len });
            prop_assert_eq!(got, want);
        }
    }
}
