//! The points that rotated codes stand for, as f32 and as small integers.

/// The Lloyd-Max quantiser of a standard normal variable with `2^bits` points.
pub(crate) struct Codebook {
    /// Bits of a code: 2, 3 or 4.
    pub(crate) bits: usize,
    /// The points in ascending order; a code is an index.
    pub(crate) points: &'static [f32],
    /// The middles between neighbours; one fewer than points.
    pub(crate) boundaries: &'static [f32],
    /// The points times [`Codebook::multiplier`], rounded: what attention multiplies with.
    pub(crate) integers: &'static [i8],
    /// The one of least mean squared rounding error of a normal variable's points, a thousandth fine, that keeps the
    /// integers within 127. The root mean square of that error, of the variable's standard deviation: 0.0032 (4 bits),
    /// 0.0011 (3), 0.0002 (2), beside the code's own 0.0975, 0.186 and 0.343.
    pub(crate) multiplier: f32,
}

/// Mirrors the positive half of a codebook.
const fn mirrored<const HALF: usize, const ALL: usize>(half: [f64; HALF]) -> [f64; ALL] {
    let mut all = [0.0; ALL];
    let mut i = 0;
    while i < HALF {
        all[HALF + i] = half[i];
        all[HALF - 1 - i] = -half[i];
        i += 1;
    }
    all
}

const fn rounded<const N: usize>(exact: [f64; N]) -> [f32; N] {
    let mut points = [0.0; N];
    let mut i = 0;
    while i < N {
        points[i] = exact[i] as f32;
        i += 1;
    }
    points
}

const fn middles<const N: usize>(points: &[f64]) -> [f32; N] {
    let mut middles = [0.0; N];
    let mut i = 0;
    while i < N {
        middles[i] = ((points[i] + points[i + 1]) / 2.0) as f32;
        i += 1;
    }
    middles
}

const fn multiplied<const N: usize>(points: &[f64; N], multiplier: f64) -> [i8; N] {
    let mut integers = [0; N];
    let mut i = 0;
    while i < N {
        let x = points[i] * multiplier;
        // Half away from zero; no point is that close to a half.
        integers[i] = if x < 0.0 { (x - 0.5) as i8 } else { (x + 0.5) as i8 };
        i += 1;
    }
    integers
}

macro_rules! codebook {
    ($(#[$doc:meta])* $name:ident, $bits:literal, $half:expr, $multiplier:literal) => {
        $(#[$doc])*
        pub(crate) static $name: Codebook = {
            const POINTS: [f64; 1 << $bits] = mirrored($half);
            Codebook {
                bits: $bits,
                points: &const { rounded(POINTS) },
                boundaries: &const { middles::<{ (1 << $bits) - 1 }>(&POINTS) },
                integers: &const { multiplied(&POINTS, $multiplier) },
                multiplier: $multiplier as f32,
            }
        };
    };
}

codebook! {
    /// 16 points.
    TQ4, 4, [0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6180, 2.0690, 2.7326], 38.214
}
codebook! {
    /// 8 points.
    TQ3, 3, [0.2451, 0.7560, 1.3439, 2.1519], 40.926
}
codebook! {
    /// 4 points.
    TQ2, 2, [0.4528, 1.5104], 26.486
}

impl Codebook {
    /// The integers as a table of 16: a code's entry does not depend on bits above its own.
    pub(crate) fn table(&self) -> [i8; 16] {
        std::array::from_fn(|i| self.integers[i % self.integers.len()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_symmetric_and_boundaries_lie_in_the_middle() {
        for (book, largest) in [(&TQ4, 2.7326), (&TQ3, 2.1519), (&TQ2, 1.5104)] {
            let n = 1 << book.bits;
            assert_eq!((book.points.len(), book.boundaries.len(), book.integers.len()), (n, n - 1, n));
            assert_eq!(book.points[n - 1], largest);
            for i in 0..n {
                assert_eq!(book.points[i], -book.points[n - 1 - i]);
                assert_eq!(book.integers[i], -book.integers[n - 1 - i]);
                assert_eq!(f32::from(book.integers[i]), (book.points[i] * book.multiplier).round());
            }
            for (i, boundary) in book.boundaries.iter().enumerate() {
                assert!((boundary - (book.points[i] + book.points[i + 1]) / 2.0).abs() < 1e-6);
            }
            let table = book.table();
            assert!((0..16).all(|i| table[i] == book.integers[i & (n - 1)]));
        }
    }

    #[test]
    fn integers_are_the_ones_stated() {
        assert_eq!(TQ4.integers[8..], [5, 15, 25, 36, 48, 62, 79, 104]);
        assert_eq!(TQ3.integers[4..], [10, 31, 55, 88]);
        assert_eq!(TQ2.integers[2..], [12, 40]);
    }
}
