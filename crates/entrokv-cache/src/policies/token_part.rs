//! A part of a sequence's tokens.

use std::fmt;
use std::str::FromStr;

/// So many tokens, or a fraction of those there are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TokenPart {
    /// From 0 to 1.
    Fraction(f64),
    /// This many.
    Tokens(usize),
}

impl TokenPart {
    /// The spellings, in words.
    pub(super) const EXPECTED: &'static str = "a fraction from 0 to 1, or Ntok";

    /// How many that is of `num_tokens`, rounded down.
    #[must_use]
    pub fn of(self, num_tokens: usize) -> usize {
        match self {
            // With no token lost to how a fraction is stored.
            Self::Fraction(fraction) => (fraction * num_tokens as f64 + 1e-9) as usize,
            Self::Tokens(count) => count.min(num_tokens),
        }
    }
}

impl fmt::Display for TokenPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fraction(fraction) => write!(f, "{fraction}"),
            Self::Tokens(count) => write!(f, "{count}tok"),
        }
    }
}

impl FromStr for TokenPart {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        if let Some(count) = text.strip_suffix("tok") {
            return count.parse().map(Self::Tokens).map_err(|_| ());
        }
        let fraction = text.parse().ok().filter(|fraction| (0.0..=1.0).contains(fraction));
        fraction.map(Self::Fraction).ok_or(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_whole_tokens_and_print_what_they_parse_from() {
        for (text, of_46) in [("0.3", 13), ("0", 0), ("1", 46), ("13tok", 13), ("99tok", 46), ("0tok", 0)] {
            let part: TokenPart = text.parse().unwrap();
            assert_eq!((part.to_string().as_str(), part.of(46)), (text, of_46));
        }
        // 0.7 * 10 is less than 7 as a float.
        assert_eq!(TokenPart::Fraction(0.7).of(10), 7);
        for text in ["", "tok", "1.1", "-0.1", "NaN", "-1tok", "0.5tok"] {
            assert_eq!(text.parse::<TokenPart>(), Err(()), "{text}");
        }
    }
}
