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
//! - **Codes** (`q8_0`, `tq4`, `tq3`, `tq2`, `kivi4`, `kivi2`) in strips of 16 slots of their own: [`crate::codes`]. They are not written
//!   token by token but made from a page of elements: [`recode`].
//!
//! Slots that were never written hold whatever the frame held before; who reads a page knows how many are filled.

mod recode;
mod rows;

pub use recode::{RecodeError, recode};
pub use rows::TokenRows;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use thiserror::Error;

use crate::codes::encode::decode;
use crate::codes::min_max::MinMaxStrip;
use crate::codes::packing::{Part, StripLayout};
use crate::codes::{BLOCK_LEN, Code, KeyConstants, MAX_CODED_HEAD_DIM, Rotated};
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
    /// Codes of 8 bits, an f16 scale for each 32 elements: 8.5 bits an element.
    Q8_0,
    /// Rotated codes of 4 bits, an f16 scale for each vector.
    Tq4,
    /// Rotated codes of 3 bits, an f16 scale for each vector.
    Tq3,
    /// Rotated codes of 2 bits, an f16 scale for each vector.
    Tq2,
    /// Codes of 4 bits, an f16 scale and minimum for each 16 slots of a key's channel and each 32 elements of a value.
    Kivi4,
    /// The same of 2 bits.
    Kivi2,
}

impl PageFormat {
    /// Every format.
    pub const ALL: [PageFormat; 9] = [
        PageFormat::F32,
        PageFormat::F16,
        PageFormat::Bf16,
        PageFormat::Q8_0,
        PageFormat::Tq4,
        PageFormat::Tq3,
        PageFormat::Tq2,
        PageFormat::Kivi4,
        PageFormat::Kivi2,
    ];

    /// Whether the part is codes, which [`recode`] makes and [`PageLayout::write_token`] cannot.
    #[inline]
    pub fn is_coded(self) -> bool {
        self.code().is_some() || self.min_max_bits().is_some()
    }

    /// Bits of codes between a smallest and a largest element, which attention reads as the numbers they stand for.
    #[inline]
    pub(crate) fn min_max_bits(self) -> Option<usize> {
        match self {
            PageFormat::Kivi4 => Some(4),
            PageFormat::Kivi2 => Some(2),
            _ => None,
        }
    }

    /// The kind of code that attention multiplies as it is; `None` for elements and for codes that it does not.
    #[inline]
    pub(crate) fn code(self) -> Option<Code> {
        match self {
            PageFormat::F32 | PageFormat::F16 | PageFormat::Bf16 | PageFormat::Kivi4 | PageFormat::Kivi2 => None,
            PageFormat::Q8_0 => Some(Code::Q8),
            PageFormat::Tq4 => Some(Code::Rotated(Rotated::Tq4)),
            PageFormat::Tq3 => Some(Code::Rotated(Rotated::Tq3)),
            PageFormat::Tq2 => Some(Code::Rotated(Rotated::Tq2)),
        }
    }

    /// Whether the part is rotated codes, whose keys need [`KeyConstants`].
    #[inline]
    pub fn is_rotated(self) -> bool {
        matches!(self.code(), Some(Code::Rotated(_)))
    }

    /// Bytes of `num_slots` slots of a part, whole strips of 16 if they are coded.
    #[inline]
    pub(crate) fn bytes(self, part: Part, num_slots: usize, head_dim: usize) -> usize {
        if let Some(bits) = self.min_max_bits() {
            return num_slots.div_ceil(LANES) * MinMaxStrip { bits, part, head_dim }.bytes();
        }
        match (self, self.code()) {
            (_, Some(code)) => num_slots.div_ceil(LANES) * StripLayout { code, head_dim }.bytes(),
            (PageFormat::F32, None) => num_slots * head_dim * 4,
            (_, None) => num_slots * head_dim * 2,
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
    /// Whether there are pages of this shape; [`LayoutError`] says what codes need.
    ///
    /// # Errors
    /// A head dimension or a page size that a coded part cannot have.
    pub fn validate(&self) -> Result<(), LayoutError> {
        let Some(format) = [self.keys, self.values].into_iter().find(|format| format.is_coded()) else { return Ok(()) };
        if !self.head_dim.is_multiple_of(BLOCK_LEN) || self.head_dim == 0 || self.head_dim > MAX_CODED_HEAD_DIM {
            return Err(LayoutError::HeadDim { format, got: self.head_dim });
        }
        if !self.page_size.is_multiple_of(LANES) || self.page_size == 0 {
            return Err(LayoutError::PageSize { format, got: self.page_size });
        }
        Ok(())
    }

    /// Bytes of a frame: keys and values of `page_size` tokens.
    pub fn bytes(&self) -> usize {
        self.key_bytes() + self.value_bytes()
    }

    /// Bytes of the keys.
    pub(crate) fn key_bytes(&self) -> usize {
        self.keys.bytes(Part::Keys, self.page_size, self.head_dim)
    }

    /// Bytes of the values.
    pub(crate) fn value_bytes(&self) -> usize {
        self.values.bytes(Part::Values, self.page_size, self.head_dim)
    }

    /// Place of element `i` of the key in `slot` among the key elements; they are not coded.
    #[inline]
    pub(crate) fn key_place(&self, slot: usize, i: usize) -> usize {
        let first = slot / LANES * LANES;
        let lane = slot - first;
        let width = LANES.min(self.page_size - first);
        let strip = first * self.head_dim;
        match self.keys {
            PageFormat::Bf16 if i | 1 < self.head_dim => strip + (i & !1) * width + 2 * lane + (i & 1),
            _ => strip + i * width + lane,
        }
    }

    /// Place of element `i` of the value in `slot` among the value elements; they are not coded.
    #[inline]
    pub(crate) fn value_place(&self, slot: usize, i: usize) -> usize {
        match self.values {
            PageFormat::Bf16 if slot | 1 < self.page_size => (slot & !1) * self.head_dim + 2 * i + (slot & 1),
            _ => slot * self.head_dim + i,
        }
    }

    /// Stores the key and value `[head_dim]` of one token.
    ///
    /// # Panics
    /// If `frame` is not [`PageLayout::bytes`] long, `slot` is not in the page, `k` or `v` is not one head long, or a part
    /// is coded.
    pub fn write_token(&self, frame: &mut [u8], slot: usize, k: &[f32], v: &[f32]) {
        self.check(frame.len(), slot, k.len(), v.len());
        let (keys, values) = frame.split_at_mut(self.key_bytes());
        write(self.keys, keys, k, |i| self.key_place(slot, i));
        write(self.values, values, v, |i| self.value_place(slot, i));
    }

    /// Loads the key and value `[head_dim]` of one token: what [`PageLayout::write_token`] stored, as rounded, or what codes
    /// stand for, exactly. `constants` are those the keys were coded with; nothing else reads them.
    ///
    /// # Panics
    /// As [`PageLayout::write_token`], but for codes; if the layout is not valid; if the keys are rotated codes and there are
    /// no constants of their head dimension.
    pub fn read_token(
        &self,
        frame: &[u8],
        slot: usize,
        constants: Option<&KeyConstants>,
        k: &mut [f32],
        v: &mut [f32],
    ) {
        self.check(frame.len(), slot, k.len(), v.len());
        assert_eq!(self.validate(), Ok(()));
        assert!(
            !self.keys.is_rotated() || constants.is_some_and(|constants| constants.head_dim() == self.head_dim),
            "rotated keys need constants of {} channels",
            self.head_dim
        );
        let (keys, values) = frame.split_at(self.key_bytes());
        match (self.keys.code(), self.keys.min_max_bits()) {
            (Some(code), _) => self.read_code(code, Part::Keys, keys, slot, constants, k),
            (_, Some(bits)) => self.read_min_max(bits, Part::Keys, keys, slot, k),
            (None, None) => read(self.keys, keys, k, |i| self.key_place(slot, i)),
        }
        match (self.values.code(), self.values.min_max_bits()) {
            (Some(code), _) => self.read_code(code, Part::Values, values, slot, None, v),
            (_, Some(bits)) => self.read_min_max(bits, Part::Values, values, slot, v),
            (None, None) => read(self.values, values, v, |i| self.value_place(slot, i)),
        }
    }

    fn read_min_max(&self, bits: usize, part: Part, bytes: &[u8], slot: usize, x: &mut [f32]) {
        let strip = MinMaxStrip { bits, part, head_dim: self.head_dim };
        strip.decode(&bytes[slot / LANES * strip.bytes()..][..strip.bytes()], slot % LANES, x);
    }

    fn read_code(
        &self,
        code: Code,
        part: Part,
        bytes: &[u8],
        slot: usize,
        constants: Option<&KeyConstants>,
        x: &mut [f32],
    ) {
        let layout = StripLayout { code, head_dim: self.head_dim };
        let strip = &bytes[slot / LANES * layout.bytes()..][..layout.bytes()];
        decode(layout, part, constants, strip, slot % LANES, x);
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
        coded => panic!("a token cannot be written as {coded:?}"),
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
            // In blocks, as they are written.
            let mut stored = [f16::ZERO; 64];
            for (block, x) in x.chunks_mut(64).enumerate() {
                let stored = &mut stored[..x.len()];
                stored
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, stored)| *stored = f16::from_ne_bytes(elements[place(block * 64 + i)]));
                stored.convert_to_f32_slice(x);
            }
        }
        PageFormat::Bf16 => {
            let elements = part.as_chunks().0;
            x.iter_mut().enumerate().for_each(|(i, x)| *x = bf16::from_ne_bytes(elements[place(i)]).to_f32());
        }
        coded => unreachable!("{coded:?} has no elements"),
    }
}

/// What pages with codes in them cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// Codes come in blocks of 32 dimensions, and their integer sums must fit.
    #[error(
        "{format:?} pages need a head dimension that is a multiple of {BLOCK_LEN} and at most {MAX_CODED_HEAD_DIM}, got {got}"
    )]
    HeadDim {
        /// The coded format.
        format: PageFormat,
        /// The head dimension asked for.
        got: usize,
    },
    /// Codes come in strips of 16 slots.
    #[error("{format:?} pages need a page size that is a multiple of {LANES}, got {got}")]
    PageSize {
        /// The coded format.
        format: PageFormat,
        /// The page size asked for.
        got: usize,
    },
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
                _ => bf16::from_f32(x).to_f32(),
            };
            let (mut k, mut v) = (vec![0.0; head_dim], vec![0.0; head_dim]);
            for slot in 0..page_size {
                layout.read_token(&frame, slot, None, &mut k, &mut v);
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

    #[test]
    fn bytes_of_coded_pages_are_those_of_the_format() {
        let bytes = |keys, values, head_dim| PageLayout { keys, values, page_size: 16, head_dim }.bytes();
        let of = |format| [64, 128, 256].map(|d| bytes(format, format, d));
        assert_eq!(of(PageFormat::Q8_0), [2_176, 4_352, 8_704]);
        assert_eq!(of(PageFormat::Tq4), [1_088, 2_112, 4_160]);
        assert_eq!(of(PageFormat::Tq3), [832, 1_600, 3_136]);
        assert_eq!(of(PageFormat::Tq2), [576, 1_088, 2_112]);
        // A scale and a minimum for 16 elements of a key, 32 of a value: 6 and 5 bits, 4 and 3 bits an element.
        assert_eq!(of(PageFormat::Kivi4), [1_408, 2_816, 5_632]);
        assert_eq!(of(PageFormat::Kivi2), [896, 1_792, 3_584]);
        assert_eq!(bytes(PageFormat::Tq3, PageFormat::Tq2, 64), 416 + 288);
        let layout = PageLayout { keys: PageFormat::Tq4, values: PageFormat::Q8_0, page_size: 64, head_dim: 96 };
        assert_eq!(layout.bytes(), 64 * 96 / 2 + 64 * 2 + 64 * 96 + 64 * 3 * 2);
    }

    #[test]
    fn shapes_that_codes_cannot_have_are_refused() {
        for format in PageFormat::ALL {
            for parts in [(format, PageFormat::F16), (PageFormat::F16, format)] {
                let validate = |page_size, head_dim| {
                    PageLayout { keys: parts.0, values: parts.1, page_size, head_dim }
                        .validate()
                        .map_err(|e| e.to_string())
                };
                assert_eq!(validate(16, 64), Ok(()));
                if !format.is_coded() {
                    assert_eq!(validate(5, 7), Ok(()));
                    continue;
                }
                for head_dim in [0, 16, 80, 544] {
                    let message = validate(16, head_dim).unwrap_err();
                    assert!(message.contains(&format!("{format:?}")) && message.ends_with(&format!("got {head_dim}")));
                }
                for page_size in [0, 8, 24] {
                    let message = validate(page_size, 64).unwrap_err();
                    assert!(message.ends_with(&format!("multiple of 16, got {page_size}")), "{message}");
                }
            }
        }
    }
}
