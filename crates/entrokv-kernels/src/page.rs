//! Bytes of one page of one KV head: how keys and values lie in a frame.
//!
//! What is inside is this crate's secret; a frame is `[keys | values]`, both in the page's format:
//! - **Keys in strips of 16 slots, each strip transposed** `[head_dim, 16]` (a last, shorter strip `[head_dim, rest]`), so
//!   that 16 keys fill the lanes of a vector and a query's scores are sums over `head_dim` within a lane: no horizontal
//!   sum, and an order that does not depend on how many queries share the load.
//! - **Values by slot** `[page_size, head_dim]`: a weighted sum of values is a sum of rows.
//!
//! Slots that were never written hold whatever the frame held before; who reads a page knows how many are filled.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::simd::LANES;

/// How a page stores its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageFormat {
    /// 4 bytes an element, exact.
    F32,
    /// 2 bytes an element, rounded to nearest even; magnitudes from 65,520 on become infinite.
    F16,
}

impl PageFormat {
    /// Bytes of one element.
    pub fn element_bytes(self) -> usize {
        match self {
            PageFormat::F32 => 4,
            PageFormat::F16 => 2,
        }
    }
}

/// The shape of a page of one KV head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageLayout {
    /// How elements are stored.
    pub format: PageFormat,
    /// Number of token slots.
    pub page_size: usize,
    /// Elements of one key, and of one value.
    pub head_dim: usize,
}

impl PageLayout {
    /// Bytes of a frame: keys and values of `page_size` tokens.
    pub fn bytes(&self) -> usize {
        2 * self.part_bytes()
    }

    /// Bytes of the keys, and of the values.
    pub(crate) fn part_bytes(&self) -> usize {
        self.page_size * self.head_dim * self.format.element_bytes()
    }

    /// Where the key elements of `slot` lie among the key elements: the first, and how far apart they are.
    pub(crate) fn key_place(&self, slot: usize) -> KeyPlace {
        let strip = slot / LANES;
        let width = LANES.min(self.page_size - strip * LANES);
        KeyPlace { first: strip * LANES * self.head_dim + slot % LANES, stride: width }
    }

    /// Stores the key and value `[head_dim]` of one token.
    ///
    /// # Panics
    /// If `frame` is not [`PageLayout::bytes`] long, `slot` is not in the page, or `k` or `v` is not one head long.
    pub fn write_token(&self, frame: &mut [u8], slot: usize, k: &[f32], v: &[f32]) {
        self.check(frame.len(), slot, k.len(), v.len());
        let place = self.key_place(slot);
        let first_value = slot * self.head_dim;
        let (keys, values) = frame.split_at_mut(self.part_bytes());
        match self.format {
            PageFormat::F32 => {
                let keys = keys.as_chunks_mut().0[place.first..].iter_mut().step_by(place.stride);
                keys.zip(k).for_each(|(element, x)| *element = x.to_ne_bytes());
                let values = values.as_chunks_mut().0[first_value..].iter_mut();
                values.zip(v).for_each(|(element, x)| *element = x.to_ne_bytes());
            }
            PageFormat::F16 => {
                let keys = &mut keys.as_chunks_mut().0[place.first..];
                let values = &mut values.as_chunks_mut().0[first_value..];
                // In blocks, because `half` looks for the CPU's conversion once a slice: rounding one element at a time
                // takes longer than the rest.
                let mut rounded = [f16::ZERO; 64];
                for (block, (k, v)) in k.chunks(64).zip(v.chunks(64)).enumerate() {
                    let rounded = &mut rounded[..k.len()];
                    rounded.convert_from_f32_slice(k);
                    let keys = keys[block * 64 * place.stride..].iter_mut().step_by(place.stride);
                    keys.zip(&*rounded).for_each(|(element, x)| *element = x.to_ne_bytes());
                    rounded.convert_from_f32_slice(v);
                    let values = values[block * 64..].iter_mut();
                    values.zip(&*rounded).for_each(|(element, x)| *element = x.to_ne_bytes());
                }
            }
        }
    }

    /// Loads the key and value `[head_dim]` of one token; the values [`PageLayout::write_token`] stored, as rounded.
    ///
    /// # Panics
    /// As [`PageLayout::write_token`].
    pub fn read_token(&self, frame: &[u8], slot: usize, k: &mut [f32], v: &mut [f32]) {
        self.check(frame.len(), slot, k.len(), v.len());
        let place = self.key_place(slot);
        let first_value = slot * self.head_dim;
        let (keys, values) = frame.split_at(self.part_bytes());
        match self.format {
            PageFormat::F32 => {
                let keys = keys.as_chunks().0[place.first..].iter().step_by(place.stride);
                keys.zip(k).for_each(|(element, x)| *x = f32::from_ne_bytes(*element));
                let values = values.as_chunks().0[first_value..].iter();
                values.zip(v).for_each(|(element, x)| *x = f32::from_ne_bytes(*element));
            }
            PageFormat::F16 => {
                let keys = keys.as_chunks().0[place.first..].iter().step_by(place.stride);
                keys.zip(k).for_each(|(element, x)| *x = f16::from_ne_bytes(*element).to_f32());
                let values = values.as_chunks().0[first_value..].iter();
                values.zip(v).for_each(|(element, x)| *x = f16::from_ne_bytes(*element).to_f32());
            }
        }
    }

    fn check(&self, frame_len: usize, slot: usize, k_len: usize, v_len: usize) {
        assert_eq!(frame_len, self.bytes(), "a frame of {self:?}");
        assert!(slot < self.page_size, "slot {slot} of a page of {}", self.page_size);
        assert!(k_len == self.head_dim && v_len == self.head_dim, "k and v must have {} elements", self.head_dim);
    }
}

/// Where the elements of one key lie among the key elements of a page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyPlace {
    pub(crate) first: usize,
    pub(crate) stride: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn tokens_read_back_as_written_and_as_rounded(
            page_size in 1usize..=256,
            head_dim in 1usize..70,
            format in prop_oneof![Just(PageFormat::F32), Just(PageFormat::F16)],
        ) {
            let layout = PageLayout { format, page_size, head_dim };
            let mut frame = vec![0xff; layout.bytes()];
            let element = |slot: usize, i: usize, part: f32| (slot * head_dim + i) as f32 * 0.37 + part;
            for slot in 0..page_size {
                let k: Vec<f32> = (0..head_dim).map(|i| element(slot, i, 0.1)).collect();
                let v: Vec<f32> = (0..head_dim).map(|i| -element(slot, i, 0.3)).collect();
                layout.write_token(&mut frame, slot, &k, &v);
            }
            let round = |x: f32| match format {
                PageFormat::F32 => x,
                PageFormat::F16 => f16::from_f32(x).to_f32(),
            };
            let (mut k, mut v) = (vec![0.0; head_dim], vec![0.0; head_dim]);
            for slot in 0..page_size {
                layout.read_token(&frame, slot, &mut k, &mut v);
                for i in 0..head_dim {
                    prop_assert_eq!(k[i], round(element(slot, i, 0.1)));
                    prop_assert_eq!(v[i], round(-element(slot, i, 0.3)));
                }
            }
        }
    }

    #[test]
    fn bytes_are_those_of_the_elements() {
        let bytes = |format, head_dim| PageLayout { format, page_size: 16, head_dim }.bytes();
        assert_eq!([64, 128, 256].map(|d| bytes(PageFormat::F32, d)), [8_192, 16_384, 32_768]);
        assert_eq!([64, 128, 256].map(|d| bytes(PageFormat::F16, d)), [4_096, 8_192, 16_384]);
    }
}
