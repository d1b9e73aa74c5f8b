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
