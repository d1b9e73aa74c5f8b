//! Bytes of one page of one KV head: how keys and values lie in a frame.
//!
//! What is inside is this crate's secret; a frame is `[keys | values]`, each part in a format of its own:
//! - **Keys in strips of 16 slots, each strip transposed** `[head_dim, 16]` (a last, shorter strip `[head_dim, rest]`), so
//!   that 16 keys fill the lanes of a vector and a query's scores are sums over `head_dim` within a lane: no horizontal
//!   sum, and an order that does not depend on how many queries share the load.
//! - **Values by slot** `[page_size, head_dim]`: a weighted sum of values is a sum of rows.
//! - **bf16 in pairs**, as the dot products of bf16 read it: two successive elements of a key side by side
//!   `[head_dim / 2, 16, 2]`, the elements of two successive slots' values likewise `[page_size / 2, head_dim, 2]`; an odd
//!   last element or slot is alone.
//!
//! Slots that were never written hold whatever the frame held before; who reads a page knows how many are filled.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::simd::LANES;

/// How one part of a page, its keys or its values, stores its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageFormat {
    /// 4 bytes an element, exact.
    F32,
    /// 2 bytes an element, rounded to nearest even; magnitudes from 65,520 on become infinite.
    F16,
    /// 2 bytes an element, rounded to nearest even: the range of f32 with 8 significant bits.
    Bf16,
}

impl PageFormat {
    /// Bytes of one element.
    pub fn element_bytes(self) -> usize {
        match self {
            PageFormat::F32 => 4,
            PageFormat::F16 | PageFormat::Bf16 => 2,
        }
    }

    /// Whether values in this format are summed in a rotated space, apart from others, and rotated back in the end.
    pub(crate) fn is_rotated(self) -> bool {
        match self {
            PageFormat::F32 | PageFormat::F16 | PageFormat::Bf16 => false,
        }
    }
}

/// The shape of a page of one KV head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageLayout {
    /// How keys are stored.
    pub keys: PageFormat,
    /// How values are stored.
    pub values: PageFormat,
    /// Number of token slots.
    pub page_size: usize,
    /// Elements of one key, and of one value.
    pub head_dim: usize,
}

impl PageLayout {
    /// Bytes of a frame: keys and values of `page_size` tokens.
    pub fn bytes(&self) -> usize {
        self.key_bytes() + self.value_bytes()
    }

    /// Bytes of the keys.
    pub(crate) fn key_bytes(&self) -> usize {
        self.page_size * self.head_dim * self.keys.element_bytes()
    }

    /// Bytes of the values.
    pub(crate) fn value_bytes(&self) -> usize {
        self.page_size * self.head_dim * self.values.element_bytes()
    }

    /// Place of element `i` of the key in `slot` among the key elements.
    #[inline]
    pub(crate) fn key_place(&self, slot: usize, i: usize) -> usize {
        let first = slot / LANES * LANES;
        let lane = slot - first;
        let width = LANES.min(self.page_size - first);
        let strip = first * self.head_dim;
        match self.keys {
            PageFormat::Bf16 if i | 1 < self.head_dim => strip + (i & !1) * width + 2 * lane + (i & 1),
            PageFormat::F32 | PageFormat::F16 | PageFormat::Bf16 => strip + i * width + lane,
        }
    }

    /// Place of element `i` of the value in `slot` among the value elements.
    #[inline]
    pub(crate) fn value_place(&self, slot: usize, i: usize) -> usize {
        match self.values {
            PageFormat::Bf16 if slot | 1 < self.page_size => (slot & !1) * self.head_dim + 2 * i + (slot & 1),
            PageFormat::F32 | PageFormat::F16 | PageFormat::Bf16 => slot * self.head_dim + i,
        }
    }

    /// Stores the key and value `[head_dim]` of one token.
    ///
    /// # Panics
    /// If `frame` is not [`PageLayout::bytes`] long, `slot` is not in the page, or `k` or `v` is not one head long.
    pub fn write_token(&self, frame: &mut [u8], slot: usize, k: &[f32], v: &[f32]) {
        self.check(frame.len(), slot, k.len(), v.len());
        let (keys, values) = frame.split_at_mut(self.key_bytes());
        write(self.keys, keys, k, |i| self.key_place(slot, i));
        write(self.values, values, v, |i| self.value_place(slot, i));
    }

    /// Loads the key and value `[head_dim]` of one token; the values [`PageLayout::write_token`] stored, as rounded.
    ///
    /// # Panics
    /// As [`PageLayout::write_token`].
    pub fn read_token(&self, frame: &[u8], slot: usize, k: &mut [f32], v: &mut [f32]) {
        self.check(frame.len(), slot, k.len(), v.len());
        let (keys, values) = frame.split_at(self.key_bytes());
        read(self.keys, keys, k, |i| self.key_place(slot, i));
        read(self.values, values, v, |i| self.value_place(slot, i));
    }

    fn check(&self, frame_len: usize, slot: usize, k_len: usize, v_len: usize) {
        assert_eq!(frame_len, self.bytes(), "a frame of {self:?}");
        assert!(slot < self.page_size, "slot {slot} of a page of {}", self.page_size);
        assert!(k_len == self.head_dim && v_len == self.head_dim, "k and v must have {} elements", self.head_dim);
    }
}

/// Stores `x` rounded to `format`, element `i` at `place(i)`.
#[inline]
fn write(format: PageFormat, part: &mut [u8], x: &[f32], place: impl Fn(usize) -> usize) {
    match format {
        PageFormat::F32 => {
            let elements = part.as_chunks_mut().0;
            x.iter().enumerate().for_each(|(i, x)| elements[place(i)] = x.to_ne_bytes());
        }
        PageFormat::F16 => {
            let elements = part.as_chunks_mut().0;
            // In blocks, because `half` looks for the CPU's conversion once a slice: rounding one element at a time takes
            // longer than the rest.
            let mut rounded = [f16::ZERO; 64];
            for (block, x) in x.chunks(64).enumerate() {
                let rounded = &mut rounded[..x.len()];
                rounded.convert_from_f32_slice(x);
                rounded.iter().enumerate().for_each(|(i, x)| elements[place(block * 64 + i)] = x.to_ne_bytes());
            }
        }
        PageFormat::Bf16 => {
            let elements = part.as_chunks_mut().0;
            x.iter().enumerate().for_each(|(i, x)| elements[place(i)] = bf16::from_f32(*x).to_ne_bytes());
        }
    }
}

/// Loads element `i` of `x` from `place(i)`.
#[inline]
fn read(format: PageFormat, part: &[u8], x: &mut [f32], place: impl Fn(usize) -> usize) {
    match format {
        PageFormat::F32 => {
            let elements = part.as_chunks().0;
            x.iter_mut().enumerate().for_each(|(i, x)| *x = f32::from_ne_bytes(elements[place(i)]));
        }
        PageFormat::F16 => {
            let elements = part.as_chunks().0;
            x.iter_mut().enumerate().for_each(|(i, x)| *x = f16::from_ne_bytes(elements[place(i)]).to_f32());
        }
        PageFormat::Bf16 => {
            let elements = part.as_chunks().0;
            x.iter_mut().enumerate().for_each(|(i, x)| *x = bf16::from_ne_bytes(elements[place(i)]).to_f32());
        }
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
        fn tokens_read_back_as_written_and_as_rounded(
            page_size in 1usize..=256,
            head_dim in 1usize..70,
            keys in format(),
            values in format(),
        ) {
            let layout = PageLayout { keys, values, page_size, head_dim };
            let mut frame = vec![0xff; layout.bytes()];
            let element = |slot: usize, i: usize, part: f32| (slot * head_dim + i) as f32 * 0.37 + part;
            for slot in 0..page_size {
                let k: Vec<f32> = (0..head_dim).map(|i| element(slot, i, 0.1)).collect();
                let v: Vec<f32> = (0..head_dim).map(|i| -element(slot, i, 0.3)).collect();
                layout.write_token(&mut frame, slot, &k, &v);
            }
            let round = |format, x: f32| match format {
                PageFormat::F32 => x,
                PageFormat::F16 => f16::from_f32(x).to_f32(),
                PageFormat::Bf16 => bf16::from_f32(x).to_f32(),
            };
            let (mut k, mut v) = (vec![0.0; head_dim], vec![0.0; head_dim]);
            for slot in 0..page_size {
                layout.read_token(&frame, slot, &mut k, &mut v);
                for i in 0..head_dim {
                    prop_assert_eq!(k[i], round(keys, element(slot, i, 0.1)));
                    prop_assert_eq!(v[i], round(values, -element(slot, i, 0.3)));
                }
            }
        }
    }

    #[test]
    fn bytes_are_those_of_the_elements() {
        let bytes = |keys, values, head_dim| PageLayout { keys, values, page_size: 16, head_dim }.bytes();
        let of = |format| [64, 128, 256].map(|d| bytes(format, format, d));
        assert_eq!(of(PageFormat::F32), [8_192, 16_384, 32_768]);
        assert_eq!(of(PageFormat::F16), [4_096, 8_192, 16_384]);
        assert_eq!(of(PageFormat::Bf16), [4_096, 8_192, 16_384]);
        assert_eq!(bytes(PageFormat::F32, PageFormat::F16, 64), 4_096 + 2_048);
    }
}
