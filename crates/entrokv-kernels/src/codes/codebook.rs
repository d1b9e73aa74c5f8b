//! The points that rotated codes stand for.

/// The Lloyd-Max quantiser of a standard normal variable with `2^bits` points.
pub(crate) struct Codebook {
    /// Bits of a code: 2, 3 or 4.
    pub(crate) bits: usize,
    /// The points in ascending order; a code is an index.
    pub(crate) points: &'static [f32],
    /// The middles between neighbours; one fewer than points.
    pub(crate) boundaries: &'static [f32],
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

macro_rules! codebook {
    ($(#[$doc:meta])* $name:ident, $bits:literal, $half:expr) => {
        $(#[$doc])*
        pub(crate) static $name: Codebook = {
            const POINTS: [f64; 1 << $bits] = mirrored($half);
            Codebook {
                bits: $bits,
                points: &const { rounded(POINTS) },
                boundaries: &const { middles::<{ (1 << $bits) - 1 }>(&POINTS) },
            }
        };
    };
}

codebook! {
    /// 16 points.
    TQ4, 4, [0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6180, 2.0690, 2.7326]
}
codebook! {
    /// 8 points.
    TQ3, 3, [0.2451, 0.7560, 1.3439, 2.1519]
}
codebook! {
    /// 4 points.
    TQ2, 2, [0.4528, 1.5104]
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
        }
    }
}
