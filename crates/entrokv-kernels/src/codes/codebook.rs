//! The points that rotated codes stand for, as f32 and as small integers.

use super::KEY_OFFSET;

/// The Lloyd-Max quantiser of a standard normal variable with `2^bits` points.
pub(crate) struct Codebook {
    /// Bits of a code: 2, 3 or 4.
    pub(crate) bits: usize,
    /// The points in ascending order; a code is an index.
    pub(crate) points: &'static [f32],
    /// The middles between neighbours; one fewer than points.
    pub(crate) boundaries: &'static [f32],
    /// What one of the integers stands for that attention rounds points to. Its inverse, a thousandth fine, is the one of least
    /// mean squared rounding error of a normal variable's points that keeps the integers within 127. The root mean square of
    /// that error, of the variable's standard deviation: 0.0032 (4 bits), 0.0011 (3), 0.0002 (2), beside the code's own
    /// 0.0975, 0.186 and 0.343.
    pub(crate) unit: f32,
    /// The points in units, rounded, plus [`KEY_OFFSET`]: as a table of 16, in which a code's entry does not
    /// depend on bits above its own.
    pub(crate) key_table: [u8; 16],
    /// The same without the offset, signed.
    pub(crate) value_table: [u8; 16],
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

/// The integers plus `offset` as a table of 16.
const fn table(integers: &[i8], offset: i32) -> [u8; 16] {
    let mut table = [0; 16];
    let mut i = 0;
    while i < 16 {
        // The low byte of a signed number.
        table[i] = (integers[i % integers.len()] as i32 + offset) as u8;
        i += 1;
    }
    table
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
                unit: 1.0 / $multiplier as f32,
                key_table: table(&multiplied(&POINTS, $multiplier), KEY_OFFSET),
                value_table: table(&multiplied(&POINTS, $multiplier), 0),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_symmetric_and_boundaries_lie_in_the_middle() {
        for (book, largest) in [(&TQ4, 2.7326), (&TQ3, 2.1519), (&TQ2, 1.5104)] {
            let n = 1 << book.bits;
            assert_eq!((book.points.len(), book.boundaries.len()), (n, n - 1));
            assert_eq!(book.points[n - 1], largest);
            for i in 0..n {
                assert_eq!(book.points[i], -book.points[n - 1 - i]);
            }
            for (i, boundary) in book.boundaries.iter().enumerate() {
                assert!((boundary - (book.points[i] + book.points[i + 1]) / 2.0).abs() < 1e-6);
            }
            for (i, (key, value)) in book.key_table.iter().zip(book.value_table).enumerate() {
                let integer = (book.points[i & (n - 1)] / book.unit).round() as i32;
                assert_eq!((i32::from(*key) - 128, i32::from(value.cast_signed())), (integer, integer));
            }
        }
    }

    #[test]
    fn integers_are_the_ones_stated() {
        assert_eq!(TQ4.value_table[8..], [5, 15, 25, 36, 48, 62, 79, 104]);
        assert_eq!(TQ3.value_table[4..8], [10, 31, 55, 88]);
        assert_eq!(TQ2.value_table[2..4], [12, 40]);
    }
}
