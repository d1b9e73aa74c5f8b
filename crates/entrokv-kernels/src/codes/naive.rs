//! The oracle: codes as their definition says, in f64, one vector at a time.

use half::f16;

use super::codebook::Codebook;
use super::rotation::signs;

/// `x` rounded to f16.
pub(super) fn round(x: f64) -> f64 {
    f16::from_f64(x).to_f64()
}

/// `H x`, by the matrix.
pub(super) fn transform(x: &[f64]) -> Vec<f64> {
    let n = 1 << x.len().trailing_zeros();
    let row = |i: usize| {
        let block = &x[i / n * n..(i / n + 1) * n];
        let sign = |j: usize| if ((i % n) & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
        block.iter().enumerate().map(|(j, x)| sign(j) * x).sum::<f64>() / (n as f64).sqrt()
    };
    (0..x.len()).map(row).collect()
}

/// `H (s * (x - centre) / scale)`.
pub(super) fn rotate(x: &[f32], centre: &[f32], scale: &[f32]) -> Vec<f64> {
    let element =
        |i: usize| f64::from(signs(x.len())[i]) * (f64::from(x[i]) - f64::from(centre[i])) / f64::from(scale[i]);
    transform(&(0..x.len()).map(element).collect::<Vec<_>>())
}

/// A rotated vector's codes, the distance of each ratio from the nearest boundary, and the scale.
pub(super) struct Encoded {
    pub(super) codes: Vec<u8>,
    pub(super) distances: Vec<f64>,
    pub(super) scale: f64,
}

pub(super) fn encode(book: &Codebook, y: &[f64]) -> Encoded {
    let rms = (y.iter().map(|y| y * y).sum::<f64>() / y.len() as f64).sqrt();
    let rho = round(rms).max(2f64.powi(-24));
    let boundaries: Vec<f64> =
        book.points.windows(2).map(|pair| (f64::from(pair[0]) + f64::from(pair[1])) / 2.0).collect();
    let code = |y: &f64| boundaries.iter().filter(|&&boundary| boundary < y / rho).count() as u8;
    let distance = |y: &f64| boundaries.iter().map(|b| (y / rho - b).abs()).fold(f64::INFINITY, f64::min);
    let codes: Vec<u8> = y.iter().map(code).collect();
    let points = codes.iter().map(|&code| f64::from(book.points[usize::from(code)]));
    let products: f64 = points.clone().zip(y).map(|(z, y)| z * y).sum();
    let squares: f64 = points.map(|z| z * z).sum();
    Encoded { distances: y.iter().map(distance).collect(), scale: round(products / squares), codes }
}

/// A group of elements as codes between the smallest and the largest.
pub(super) struct MinMax {
    pub(super) codes: Vec<u8>,
    pub(super) scale: f64,
    pub(super) minimum: f64,
    /// How far each level lies from where its code would change.
    pub(super) distances: Vec<f64>,
}

pub(super) fn min_max(x: &[f64], bits: u32) -> MinMax {
    let (low, high) = x.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(*x), high.max(*x)));
    let largest = f64::from((1 << bits) - 1);
    let (scale, minimum) = (round((high - low) / largest), round(low));
    let scale = if scale == 0.0 { 1.0 } else { scale };
    let level = |x: &f64| ((x - minimum) / scale).clamp(0.0, largest);
    let distance = |x: &f64| 0.5 - (level(x) - level(x).round_ties_even()).abs();
    let code = |x: &f64| level(x).round_ties_even() as u8;
    MinMax { codes: x.iter().map(code).collect(), scale, minimum, distances: x.iter().map(distance).collect() }
}
