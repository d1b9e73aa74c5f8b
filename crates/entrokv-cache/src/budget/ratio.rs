//! Exact positive fractions.

use std::fmt;

use thiserror::Error;

/// A positive fraction in lowest terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ratio {
    numerator: u64,
    denominator: u64,
}

impl Ratio {
    /// Everything.
    pub const ONE: Self = Self { numerator: 1, denominator: 1 };

    /// `numerator / denominator`, reduced.
    ///
    /// # Errors
    /// [`RatioError`] if either is zero.
    pub fn new(numerator: u64, denominator: u64) -> Result<Self, RatioError> {
        if numerator == 0 || denominator == 0 {
            return Err(RatioError { numerator, denominator });
        }
        let divisor = gcd(numerator, denominator);
        Ok(Self { numerator: numerator / divisor, denominator: denominator / divisor })
    }

    /// The numerator in lowest terms.
    pub fn numerator(self) -> u64 {
        self.numerator
    }

    /// The denominator in lowest terms.
    pub fn denominator(self) -> u64 {
        self.denominator
    }

    /// Whether it is one or more.
    pub fn is_whole(self) -> bool {
        self.numerator >= self.denominator
    }

    /// What stays of `count` when this part of it, below one, goes: `floor(count (1 - self) + 1e-9)`, in integers.
    ///
    /// It is kvpress's `count (1 - compression_ratio)` without what binary floats cost it: of 10 tokens 0.9 leaves 1 and not 0.
    /// The billionth forgives a ratio that is itself a float written out: 0.6666666666666667 of 3,000 leaves 1,000.
    pub fn rest_of(self, count: u64) -> u64 {
        const BILLION: u128 = 1_000_000_000;
        let denominator = u128::from(self.denominator);
        let exact = u128::from(self.denominator.saturating_sub(self.numerator)) * u128::from(count);
        let (whole, part) = (exact / denominator, exact % denominator);
        let is_close = part * BILLION + denominator >= denominator * BILLION;
        // No more than `count`, for there is a part of one only where something goes.
        (whole + u128::from(is_close)) as u64
    }

    /// `floor(self * count)`, exact, and `u64::MAX` where that does not fit.
    pub fn floor_of(self, count: u64) -> u64 {
        let exact = u128::from(self.numerator) * u128::from(count) / u128::from(self.denominator);
        u64::try_from(exact).unwrap_or(u64::MAX)
    }
}

impl fmt::Display for Ratio {
    /// As a percentage where that is finite and not unwieldy, as `p/q` otherwise.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut denominator, mut scale, mut digits) = (u128::from(self.denominator), 100_u128, 0);
        // Each factor of ten shifts one decimal; a denominator with other primes than 2 and 5 never divides.
        while !scale.is_multiple_of(denominator) && digits < 6 {
            scale *= 10;
            digits += 1;
        }
        if !scale.is_multiple_of(denominator) {
            return write!(f, "{}/{}", self.numerator, self.denominator);
        }
        denominator = scale / denominator;
        let scaled = u128::from(self.numerator) * denominator;
        let unit = 10_u128.pow(digits);
        match digits {
            0 => write!(f, "{scaled}%"),
            _ => write!(f, "{}.{:0width$}%", scaled / unit, scaled % unit, width = digits as usize),
        }
    }
}

/// Zero is no fraction of anything, and nothing divides by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{numerator}/{denominator} is not a positive fraction")]
pub struct RatioError {
    /// The numerator given.
    pub numerator: u64,
    /// The denominator given.
    pub denominator: u64,
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_are_reduced_and_exact() {
        let fifth = Ratio::new(20, 100).unwrap();
        assert_eq!((fifth.numerator(), fifth.denominator()), (1, 5));
        // 0.2 * 1024 = 204.8; in f64, 0.29 * 100 would floor to 28.
        assert_eq!(fifth.floor_of(1024), 204);
        assert_eq!(Ratio::new(29, 100).unwrap().floor_of(100), 29);
        assert_eq!(Ratio::new(u64::MAX, 1).unwrap().floor_of(u64::MAX), u64::MAX);
        assert_eq!(Ratio::new(u64::MAX - 1, u64::MAX).unwrap().floor_of(u64::MAX), u64::MAX - 1);
    }

    #[test]
    fn the_rest_is_what_a_compression_ratio_leaves() {
        // Count, evicted, left: the specification's vectors, ratios that are floats written out, and both ends.
        let cases = [
            (10, (9, 10), 1),
            (100, (9, 10), 10),
            (1000, (7, 10), 300),
            (4096, (9, 10), 409),
            (3000, (6_666_666_666_666_667, 10_000_000_000_000_000), 1000),
            (3, (6_666_667, 10_000_000), 0),
            (1, (1, 1_000_000_000), 1),
            (1, (2, 1_000_000_000), 0),
            (0, (1, 2), 0),
            (7, (1, 1), 0),
            (u64::MAX, (1, u64::MAX), u64::MAX - 1),
            (u64::MAX, (u64::MAX - 1, u64::MAX), 1),
        ];
        for (count, (numerator, denominator), left) in cases {
            let part = Ratio::new(numerator, denominator).unwrap();
            assert_eq!(part.rest_of(count), left, "{part} of {count}");
        }
    }

    #[test]
    fn fractions_print_as_percentages_where_those_are_finite() {
        let cases =
            [(1, 5, "20%"), (1, 8, "12.5%"), (1, 3, "1/3"), (3, 2, "150%"), (1, 1000, "0.1%"), (1, 1600, "0.0625%")];
        for (numerator, denominator, text) in cases {
            assert_eq!(Ratio::new(numerator, denominator).unwrap().to_string(), text);
        }
    }

    #[test]
    fn zero_is_refused() {
        assert_eq!(Ratio::new(0, 5).unwrap_err().to_string(), "0/5 is not a positive fraction");
        assert_eq!(Ratio::new(1, 0).unwrap_err().to_string(), "1/0 is not a positive fraction");
    }
}
