//! One page's elements stored again in another format.

use half::bf16;
use thiserror::Error;

use super::{LayoutError, PageFormat, PageLayout, read, write};
use crate::codes::encode::{Columns, EncodeStrip};
use crate::codes::min_max::{EncodeMinMax, MinMaxStrip};
use crate::codes::packing::{Part, StripLayout};
use crate::codes::{Code, KeyConstants};
use crate::isa::Isa;
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// Stores the first `len` tokens of `frame`, a page of `from`, to `out`, a page of `to`: elements in any format, codes only
/// as the same codes, because rounding twice is worse than rounding once. Keys and values go their own ways.
///
/// `constants` are needed to make rotated codes of keys. Slots from `len` on hold zeros in coded parts, or the key of another
/// slot where keys share their scales with it, and what `out` held in others.
///
/// # Errors
/// What [`RecodeError`] lists; `out` is untouched then.
///
/// # Panics
/// If `frame` or `out` is not as long as its layout says, or `len` is more than the page size.
pub fn recode(
    isa: Isa,
    from: &PageLayout,
    frame: &[u8],
    to: &PageLayout,
    out: &mut [u8],
    len: usize,
    constants: Option<&KeyConstants>,
) -> Result<(), RecodeError> {
    check(from, to, constants)?;
    assert!(frame.len() == from.bytes() && out.len() == to.bytes(), "frames of {from:?} and {to:?}");
    assert!(len <= from.page_size, "{len} tokens in a page of {}", from.page_size);
    let (keys, values) = frame.split_at(from.key_bytes());
    let (out_keys, out_values) = out.split_at_mut(to.key_bytes());
    let part = |part, bytes: &[u8], out: &mut [u8]| {
        let (from_format, to_format) = match part {
            Part::Keys => (from.keys, to.keys),
            Part::Values => (from.values, to.values),
        };
        match (to_format.code(), to_format.min_max_bits()) {
            _ if from_format == to_format => out.copy_from_slice(bytes),
            (_, Some(bits)) => dispatch(isa, EncodeMinMaxPart { from, part, bytes, bits, out, len }),
            (Some(code), _) => dispatch(isa, EncodePart { from, part, bytes, code, out, len, constants }),
            (None, None) => convert(from, to, part, bytes, out, len),
        }
    };
    part(Part::Keys, keys, out_keys);
    part(Part::Values, values, out_values);
    Ok(())
}

fn check(from: &PageLayout, to: &PageLayout, constants: Option<&KeyConstants>) -> Result<(), RecodeError> {
    if (from.page_size, from.head_dim) != (to.page_size, to.head_dim) {
        return Err(RecodeError::Shape { from: *from, to: *to });
    }
    from.validate()?;
    to.validate()?;
    for (from, to) in [(from.keys, to.keys), (from.values, to.values)] {
        if from.is_coded() && from != to {
            return Err(RecodeError::FromCodes { from, to });
        }
    }
    if to.keys.is_rotated() && !from.keys.is_coded() {
        let got = constants.ok_or(RecodeError::NoConstants { to: to.keys })?.head_dim();
        if got != to.head_dim {
            return Err(RecodeError::Constants { got, want: to.head_dim });
        }
    }
    Ok(())
}

/// Stores elements as elements of another format.
fn convert(from: &PageLayout, to: &PageLayout, part: Part, bytes: &[u8], out: &mut [u8], len: usize) {
    let mut x = vec![0.0; from.head_dim];
    for slot in 0..len {
        match part {
            Part::Keys => {
                read(from.keys, bytes, &mut x, |i| from.key_place(slot, i));
                write(to.keys, out, &x, |i| to.key_place(slot, i));
            }
            Part::Values => {
                read(from.values, bytes, &mut x, |i| from.value_place(slot, i));
                write(to.values, out, &x, |i| to.value_place(slot, i));
            }
        }
    }
}

/// Makes codes of one part of a page of elements.
struct EncodePart<'a> {
    from: &'a PageLayout,
    part: Part,
    bytes: &'a [u8],
    code: Code,
    out: &'a mut [u8],
    len: usize,
    constants: Option<&'a KeyConstants>,
}

impl Kernel for EncodePart<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let EncodePart { from, part, bytes, code, out, len, constants } = self;
        let layout = StripLayout { code, head_dim: from.head_dim };
        let mut columns = Columns::new();
        for (strip, out) in out.chunks_exact_mut(layout.bytes()).enumerate() {
            let first = strip * LANES;
            if first >= len {
                out.fill(0);
                continue;
            }
            let x = columns.x(from.head_dim);
            match (part, from.keys, from.values) {
                (Part::Keys, PageFormat::F16, _) => read_rows(s, &bytes[2 * from.key_place(first, 0)..], x),
                (Part::Values, _, PageFormat::F16) => transpose(s, &bytes[2 * from.value_place(first, 0)..], x),
                (Part::Keys, format, _) => read_columns(format, bytes, x, |lane, i| from.key_place(first + lane, i)),
                (Part::Values, _, format) => {
                    read_columns(format, bytes, x, |lane, i| from.value_place(first + lane, i));
                }
            }
            let x = columns.x(from.head_dim);
            for x in x {
                x[(len - first).min(LANES)..].fill(0.0);
            }
            s.vectorize(EncodeStrip { layout, part, constants, columns: &mut columns, strip: out });
        }
    }
}

/// Makes codes between the smallest and largest elements of one part of a page of elements.
struct EncodeMinMaxPart<'a> {
    from: &'a PageLayout,
    part: Part,
    bytes: &'a [u8],
    bits: usize,
    out: &'a mut [u8],
    len: usize,
}

impl Kernel for EncodeMinMaxPart<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let EncodeMinMaxPart { from, part, bytes, bits, out, len } = self;
        let layout = MinMaxStrip { bits, part, head_dim: from.head_dim };
        let rows_per_slot = from.head_dim / LANES;
        let mut rows = vec![[0.0; LANES]; from.head_dim];
        for (strip, out) in out.chunks_exact_mut(layout.bytes()).enumerate() {
            let first = strip * LANES;
            if first >= len {
                out.fill(0);
                continue;
            }
            let num_slots = (len - first).min(LANES);
            let place = |lane, row| match part {
                Part::Keys => from.key_place(first + lane, row),
                Part::Values => from.value_place(first + row / rows_per_slot, row % rows_per_slot * LANES + lane),
            };
            match (part, from.keys, from.values) {
                (Part::Keys, PageFormat::F16, _) | (Part::Values, _, PageFormat::F16) => {
                    read_rows(s, &bytes[2 * place(0, 0)..], &mut rows);
                }
                (Part::Keys, format, _) | (Part::Values, _, format) => read_columns(format, bytes, &mut rows, place),
            }
            match part {
                // Slots that are not there must not widen the range of the others.
                Part::Keys => rows.iter_mut().for_each(|row| {
                    let first = row[0];
                    row[num_slots..].fill(first);
                }),
                Part::Values => rows[num_slots * rows_per_slot..].fill([0.0; LANES]),
            }
            s.vectorize(EncodeMinMax { layout, rows: &rows, strip: out });
        }
    }
}

/// Loads 16 vectors that lie as `[head_dim, 16]` f16.
#[inline(always)]
fn read_rows<S: Simd>(s: S, bytes: &[u8], x: &mut [[f32; LANES]]) {
    for (x, row) in x.iter_mut().zip(bytes.as_chunks::<{ 2 * LANES }>().0) {
        // SAFETY: 16 f16.
        let wide = unsafe { s.load_f16_ptr(row.as_ptr().cast()) };
        s.store(x, wide);
    }
}

/// Loads 16 vectors that lie as `[16, head_dim]` f16 to `x`, `[head_dim, 16]`.
#[inline(always)]
fn transpose<S: Simd>(s: S, bytes: &[u8], x: &mut [[f32; LANES]]) {
    for (lane, vector) in bytes.chunks_exact(2 * x.len()).take(LANES).enumerate() {
        for (x, elements) in x.as_chunks_mut::<LANES>().0.iter_mut().zip(vector.as_chunks::<{ 2 * LANES }>().0) {
            let mut wide = [0.0; LANES];
            // SAFETY: 16 f16.
            s.store(&mut wide, unsafe { s.load_f16_ptr(elements.as_ptr().cast()) });
            x.iter_mut().zip(wide).for_each(|(x, wide)| x[lane] = wide);
        }
    }
}

/// Loads 16 vectors of f32 or bf16, element `i` of vector `lane` from `place(lane, i)`, to `x` `[head_dim, 16]`.
#[inline(always)]
fn read_columns(format: PageFormat, bytes: &[u8], x: &mut [[f32; LANES]], place: impl Fn(usize, usize) -> usize) {
    for (i, x) in x.iter_mut().enumerate() {
        for (lane, x) in x.iter_mut().enumerate() {
            let place = place(lane, i);
            *x = match format {
                PageFormat::F32 => f32::from_ne_bytes(bytes.as_chunks().0[place]),
                PageFormat::Bf16 => bf16::from_ne_bytes(bytes.as_chunks().0[place]).to_f32(),
                other => unreachable!("{other:?} is read in other ways"),
            };
        }
    }
}

/// Why a page cannot be stored in another format.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum RecodeError {
    /// There are no such pages.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The pages differ in more than their formats.
    #[error("a page cannot be stored in another shape: {from:?} as {to:?}")]
    Shape {
        /// The page there is.
        from: PageLayout,
        /// The page asked for.
        to: PageLayout,
    },
    /// Codes are made from elements only.
    #[error("{from:?} codes cannot be stored as {to:?}")]
    FromCodes {
        /// The codes there are.
        from: PageFormat,
        /// The format asked for.
        to: PageFormat,
    },
    /// Rotated codes of keys are relative to their constants.
    #[error("{to:?} keys need a centre and a channel scale")]
    NoConstants {
        /// The format asked for.
        to: PageFormat,
    },
    /// The constants of another head dimension.
    #[error("key constants of {got} channels for a head dimension of {want}")]
    Constants {
        /// Channels of the constants.
        got: usize,
        /// The head dimension.
        want: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_SIZE: usize = 32;
    const HEAD_DIM: usize = 64;

    fn layout(keys: PageFormat, values: PageFormat) -> PageLayout {
        PageLayout { keys, values, page_size: PAGE_SIZE, head_dim: HEAD_DIM }
    }

    fn constants() -> KeyConstants {
        let channel = |i: usize| ((i * 29 % 17) as f32 - 8.0) * 0.4;
        let scale = (0..HEAD_DIM).map(|i| 1.0 + 0.2 * channel(i).abs()).collect();
        KeyConstants::new((0..HEAD_DIM).map(channel).collect(), scale)
    }

    /// Something like noise, between -2 and 2.
    fn element(slot: usize, i: usize, part: usize) -> f32 {
        let hash = (slot * 1009 + i * 31 + part * 7).wrapping_mul(0x9e37_79b9) >> 7;
        (hash % 4001) as f32 / 1000.0 - 2.0
    }

    fn page(format: PageFormat) -> Vec<u8> {
        let layout = layout(format, format);
        let mut frame = vec![0xff; layout.bytes()];
        for slot in 0..PAGE_SIZE {
            let [k, v] = [0, 1].map(|part| (0..HEAD_DIM).map(|i| element(slot, i, part)).collect::<Vec<_>>());
            layout.write_token(&mut frame, slot, &k, &v);
        }
        frame
    }

    fn token(layout: &PageLayout, frame: &[u8], slot: usize) -> (Vec<f32>, Vec<f32>) {
        let (mut k, mut v) = (vec![0.0; HEAD_DIM], vec![0.0; HEAD_DIM]);
        layout.read_token(frame, slot, Some(&constants()), &mut k, &mut v);
        (k, v)
    }

    /// The largest error of a vector allowed, relative to its length. Those of rotated codes are more than twice those of
    /// normal vectors: single vectors scatter, and the constants here are no moments of these keys.
    fn tolerance(format: PageFormat) -> f32 {
        match format {
            PageFormat::F32 => 0.0,
            PageFormat::F16 => 5e-4,
            PageFormat::Bf16 => 4e-3,
            PageFormat::Q8_0 => 6e-3,
            PageFormat::Tq4 => 0.25,
            PageFormat::Tq3 => 0.45,
            PageFormat::Tq2 => 0.8,
            // Uniform elements in uniform steps: 1/15 and 1/3 on the average of vectors.
            PageFormat::Kivi4 => 0.09,
            PageFormat::Kivi2 => 0.45,
        }
    }

    #[test]
    fn pages_keep_their_tokens_in_every_pair_of_formats() {
        for from in [PageFormat::F32, PageFormat::F16, PageFormat::Bf16] {
            let frame = page(from);
            let from = layout(from, from);
            for keys in PageFormat::ALL {
                for values in PageFormat::ALL {
                    let to = layout(keys, values);
                    let mut want = None;
                    for isa in Isa::available() {
                        let mut out = vec![0xff; to.bytes()];
                        recode(isa, &from, &frame, &to, &mut out, PAGE_SIZE, Some(&constants())).unwrap();
                        assert_eq!(want.get_or_insert_with(|| out.clone()), &out, "{isa} {from:?} {to:?}");
                        for slot in 0..PAGE_SIZE {
                            let (k, v) = token(&to, &out, slot);
                            let (from_k, from_v) = token(&from, &frame, slot);
                            for (format, got, want) in [(keys, k, from_k), (values, v, from_v)] {
                                let error: f32 = got.iter().zip(&want).map(|(a, b)| (a - b).powi(2)).sum();
                                let size: f32 = want.iter().map(|x| x.powi(2)).sum();
                                let got = (error / size).sqrt();
                                assert!(got <= tolerance(format), "{format:?}, slot {slot}: {got}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn codes_stay_as_they_are_and_the_rest_of_a_page_is_zero() {
        let from = layout(PageFormat::F16, PageFormat::F16);
        let frame = page(PageFormat::F16);
        for format in PageFormat::ALL.into_iter().filter(|format| format.is_coded()) {
            let to = layout(format, format);
            let code = |len| {
                let mut out = vec![0xff; to.bytes()];
                recode(Isa::detect(), &from, &frame, &to, &mut out, len, Some(&constants())).unwrap();
                out
            };
            let all = code(PAGE_SIZE);
            let some = code(5);
            let shares_scales = format.min_max_bits().is_some();
            for slot in 0..5 {
                let [some, all] = [&some, &all].map(|frame| token(&to, frame, slot));
                assert_eq!(some.1, all.1, "{format:?}");
                assert!(some.0 == all.0 || shares_scales, "{format:?}");
            }
            for slot in 5..PAGE_SIZE {
                let (k, v) = token(&to, &some, slot);
                assert_eq!(v, [0.0; HEAD_DIM], "{format:?}");
                if shares_scales {
                    assert_eq!(k, if slot < 16 { token(&to, &some, 0).0 } else { vec![0.0; HEAD_DIM] });
                }
            }
            let mut again = vec![0xff; to.bytes()];
            recode(Isa::detect(), &to, &all, &to, &mut again, PAGE_SIZE, None).unwrap();
            assert_eq!(again, all);
        }
    }

    #[test]
    fn what_cannot_be_stored_is_refused() {
        let f16 = layout(PageFormat::F16, PageFormat::F16);
        let tq4 = layout(PageFormat::Tq4, PageFormat::Tq4);
        let refused = |from: &PageLayout, to: &PageLayout, constants: Option<&KeyConstants>| {
            let mut out = vec![0; to.bytes()];
            recode(Isa::detect(), from, &vec![0; from.bytes()], to, &mut out, 1, constants).expect_err("a refusal")
        };
        let constants = constants();
        let error = refused(&tq4, &f16, Some(&constants));
        assert_eq!(error, RecodeError::FromCodes { from: PageFormat::Tq4, to: PageFormat::F16 });
        let q8 = layout(PageFormat::Tq4, PageFormat::Q8_0);
        let error = refused(&tq4, &q8, Some(&constants));
        assert_eq!(error, RecodeError::FromCodes { from: PageFormat::Tq4, to: PageFormat::Q8_0 });
        assert_eq!(refused(&f16, &tq4, None), RecodeError::NoConstants { to: PageFormat::Tq4 });
        let narrow = KeyConstants::new(vec![0.0; 32], vec![1.0; 32]);
        assert_eq!(refused(&f16, &tq4, Some(&narrow)), RecodeError::Constants { got: 32, want: 64 });
        let other = PageLayout { page_size: 16, ..tq4 };
        assert_eq!(refused(&f16, &other, None), RecodeError::Shape { from: f16, to: other });
        let (from, to) = (PageLayout { head_dim: 48, ..f16 }, PageLayout { head_dim: 48, ..tq4 });
        let error = LayoutError::HeadDim { format: PageFormat::Tq4, got: 48 };
        assert_eq!(refused(&from, &to, None), RecodeError::Layout(error));
    }
}
