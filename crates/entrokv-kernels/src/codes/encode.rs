//! Vectors to codes, 16 at a time in the lanes of a vector, and one token's codes back to its vector.

use half::f16;

use super::codebook::Codebook;
use super::packing::{Part, StripLayout};
use super::rotation::{MAX_LEN, signs, transform, transform_columns};
use super::{BLOCK_LEN, Code, KEY_OFFSET, KeyConstants};
use crate::simd::{Kernel, LANES, Scalar, Simd};

/// The largest code of 8 bits.
const Q8_LARGEST: f32 = 127.0;

/// The least root mean square that a rotated vector is divided by: the least f16.
const LEAST_RMS: f32 = 1.0 / (1 << 24) as f32;

/// Memory for 16 vectors on their way to codes.
pub(crate) struct Columns {
    x: [[f32; LANES]; MAX_LEN],
    codes: [[u8; LANES]; MAX_LEN],
    scales: [[u16; LANES]; MAX_LEN / BLOCK_LEN],
}

impl Columns {
    pub(crate) fn new() -> Box<Columns> {
        Box::new(Columns {
            x: [[0.0; LANES]; MAX_LEN],
            codes: [[0; LANES]; MAX_LEN],
            scales: [[0; LANES]; MAX_LEN / BLOCK_LEN],
        })
    }

    /// The first `head_dim` elements of the vectors, `[head_dim, 16]`.
    pub(crate) fn x(&mut self, head_dim: usize) -> &mut [[f32; LANES]] {
        &mut self.x[..head_dim]
    }
}

/// Encodes the 16 vectors in `columns`, which it uses up, as one strip of a part.
pub(crate) struct EncodeStrip<'a> {
    pub(crate) layout: StripLayout,
    pub(crate) part: Part,
    /// Used by rotated keys only; none is a centre of 0 and a scale of 1.
    pub(crate) constants: Option<&'a KeyConstants>,
    pub(crate) columns: &'a mut Columns,
    /// [`StripLayout::bytes`].
    pub(crate) strip: &'a mut [u8],
}

impl Kernel for EncodeStrip<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let EncodeStrip { layout, part, constants, columns, strip } = self;
        let d = layout.head_dim;
        let Columns { x, codes, scales } = columns;
        let (x, codes) = (&mut x[..d], &mut codes[..d]);
        let scales = &mut scales[..layout.code.num_scales(d)];
        match layout.code {
            Code::Q8 => {
                let offset = if part == Part::Keys { KEY_OFFSET } else { 0 };
                let blocks = x.as_chunks().0.iter().zip(codes.as_chunks_mut().0).zip(&mut *scales);
                blocks.for_each(|((x, codes), scale)| encode_q8(s, offset, x, codes, scale));
            }
            Code::Rotated(rotated) => {
                match constants.filter(|_| part == Part::Keys) {
                    Some(constants) => centre(s, constants, x),
                    None => x.iter_mut().zip(signs(d)).for_each(|(x, sign)| {
                        let signed = s.mul(s.load(x), s.splat(*sign));
                        s.store(x, signed);
                    }),
                }
                transform_columns(s, x);
                encode_rotated(s, rotated.codebook(), x, codes, &mut scales[0]);
            }
        }
        layout.pack(part, codes, scales, strip);
    }
}

/// `x = sign * (x - centre) / channel_scale`.
#[inline(always)]
fn centre<S: Simd>(s: S, constants: &KeyConstants, x: &mut [[f32; LANES]]) {
    for ((x, centre), scale) in x.iter_mut().zip(constants.centre()).zip(constants.signed_scale()) {
        // A sign is its own inverse.
        let centred = s.div(s.sub(s.load(x), s.splat(*centre)), s.splat(*scale));
        s.store(x, centred);
    }
}

/// One block of 16 vectors: the scale is the largest magnitude over 127, rounded to f16 before the codes are.
#[inline(always)]
fn encode_q8<S: Simd>(
    s: S,
    offset: i32,
    x: &[[f32; LANES]; BLOCK_LEN],
    codes: &mut [[u8; LANES]; BLOCK_LEN],
    scale: &mut [u16; LANES],
) {
    let zero = s.splat(0.0);
    let mut largest = zero;
    // 0, or NaN if an element is not finite, which `max` may lose.
    let mut poison = zero;
    for x in x {
        let x = s.load(x);
        largest = s.max(largest, s.max(x, s.sub(zero, x)));
        poison = s.add(poison, s.mul(x, zero));
    }
    let mut exact = [0.0; LANES];
    s.store(&mut exact, s.add(s.div(largest, s.splat(Q8_LARGEST)), poison));
    let rounded = round_to_f16(exact);
    *scale = rounded.map(f16::to_bits);
    let d = s.load(&widen(rounded));
    // A scale of 0 or NaN gives codes of 0.
    let inverse = s.select_lt(zero, d, s.div(s.splat(1.0), d), zero);
    let bound = s.splat(Q8_LARGEST);
    for (codes, x) in codes.iter_mut().zip(x) {
        let code = s.round(s.mul(s.load(x), inverse));
        // The scale may have been rounded down. NaN (infinity times 0) becomes the bound.
        let code = s.select_lt(code, bound, code, bound);
        let code = s.select_lt(s.sub(zero, bound), code, code, s.sub(zero, bound));
        let mut integers = [0.0; LANES];
        s.store(&mut integers, code);
        // The low byte of a signed number.
        *codes = integers.map(|code| (code as i32 + offset) as u8);
    }
}

/// 16 rotated vectors: codes are the nearest points to `x / f16(rms(x))`, the lower of two; the scale is the one of least
/// squared error.
#[inline(always)]
fn encode_rotated<S: Simd>(
    s: S,
    book: &Codebook,
    x: &[[f32; LANES]],
    codes: &mut [[u8; LANES]],
    scale: &mut [u16; LANES],
) {
    let mut squares = s.splat(0.0);
    for x in x {
        let x = s.load(x);
        squares = s.fused_mul_add(x, x, squares);
    }
    let mut rms = [0.0; LANES];
    s.store(&mut rms, s.div(squares, s.splat(x.len() as f32)));
    let rms = widen(round_to_f16(rms.map(f32::sqrt)));
    // NaN stays NaN: `max` returns its second operand then.
    let rms = s.max(s.splat(LEAST_RMS), s.load(&rms));
    let inverse = s.div(s.splat(1.0), rms);
    let (mut products, mut squares) = (s.splat(0.0), s.splat(0.0));
    for (codes, x) in codes.iter_mut().zip(x) {
        let x = s.load(x);
        let ratio = s.mul(x, inverse);
        let mut code = s.splat(0.0);
        let mut point = s.splat(book.points[0]);
        for (i, boundary) in book.boundaries.iter().enumerate() {
            let boundary = s.splat(*boundary);
            code = s.select_lt(boundary, ratio, s.splat((i + 1) as f32), code);
            point = s.select_lt(boundary, ratio, s.splat(book.points[i + 1]), point);
        }
        products = s.fused_mul_add(x, point, products);
        squares = s.fused_mul_add(point, point, squares);
        let mut integers = [0.0; LANES];
        s.store(&mut integers, code);
        *codes = integers.map(|code| code as u8);
    }
    let mut exact = [0.0; LANES];
    s.store(&mut exact, s.div(products, squares));
    *scale = round_to_f16(exact).map(f16::to_bits);
}

/// To the nearest f16, ties to even.
#[inline(always)]
pub(super) fn round_to_f16(x: [f32; LANES]) -> [f16; LANES] {
    use half::slice::HalfFloatSliceExt;
    let mut rounded = [f16::ZERO; LANES];
    rounded.convert_from_f32_slice(&x);
    rounded
}

#[inline(always)]
pub(super) fn widen(x: [f16; LANES]) -> [f32; LANES] {
    use half::slice::HalfFloatSliceExt;
    let mut wide = [0.0; LANES];
    x.convert_to_f32_slice(&mut wide);
    wide
}

/// Writes what slot `slot` (of 16) of a strip stands for to `x`, `[head_dim]`: the exact codebook points, in f32.
///
/// `constants` as in [`EncodeStrip`].
pub(crate) fn decode(
    layout: StripLayout,
    part: Part,
    constants: Option<&KeyConstants>,
    strip: &[u8],
    slot: usize,
    x: &mut [f32],
) {
    let code = |dim| layout.code_at(part, strip, slot, dim);
    let scale = |index| layout.scale_at(strip, slot, index).to_f32();
    match layout.code {
        Code::Q8 => {
            for (dim, x) in x.iter_mut().enumerate() {
                let integer = match part {
                    Part::Keys => i32::from(code(dim)) - KEY_OFFSET,
                    Part::Values => i32::from(code(dim).cast_signed()),
                };
                *x = integer as f32 * scale(dim / BLOCK_LEN);
            }
        }
        Code::Rotated(rotated) => {
            let points = rotated.codebook().points;
            x.iter_mut().enumerate().for_each(|(dim, x)| *x = points[usize::from(code(dim))] * scale(0));
            transform(Scalar, x.as_chunks_mut().0);
            x.iter_mut().zip(signs(layout.head_dim)).for_each(|(x, sign)| *x *= sign);
            if let Some(constants) = constants.filter(|_| part == Part::Keys) {
                let constants = constants.channel_scale().iter().zip(constants.centre());
                x.iter_mut().zip(constants).for_each(|(x, (scale, centre))| *x = *x * scale + centre);
            }
        }
    }
}
