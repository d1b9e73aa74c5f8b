//! Budgets from text.

use std::str::FromStr;

use thiserror::Error;

use crate::budget::{Budget, Ratio};

/// Units of bytes, by lower-case name.
const BYTE_UNITS: [(&str, u64); 9] = [
    ("b", 1),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
];

/// What stands before the part that goes.
pub(super) const EVICT_PREFIX: &str = "evict:";

impl FromStr for Budget {
    type Err = BudgetParseError;

    fn from_str(text: &str) -> Result<Self, BudgetParseError> {
        let text = text.trim();
        let got = || text.to_owned();
        let prefix = text.get(..EVICT_PREFIX.len()).filter(|start| start.eq_ignore_ascii_case(EVICT_PREFIX));
        if let Some(prefix) = prefix {
            return evicted(&text[prefix.len()..], text);
        }
        if text.starts_with('-') {
            return Err(BudgetParseError::Negative { got: got() });
        }
        if let Some((numerator, denominator)) = text.split_once('/') {
            let parse = |part: &str| Decimal::parse(part.trim()).and_then(Decimal::integer);
            let (Some(numerator), Some(denominator)) = (parse(numerator), parse(denominator)) else {
                return Err(BudgetParseError::Unknown { got: got() });
            };
            return match Ratio::new(numerator, denominator) {
                Ok(ratio) => Ok(Budget::Fraction(ratio)),
                Err(_) if denominator == 0 => Err(BudgetParseError::Unknown { got: got() }),
                Err(_) => Err(BudgetParseError::Zero { got: got() }),
            };
        }
        let unit_start = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(unit_start);
        let number = Decimal::parse(number).ok_or_else(|| BudgetParseError::Unknown { got: got() })?;
        let budget = match unit.trim_start().to_ascii_lowercase().as_str() {
            "" if number.has_point => number.ratio(1).map(Budget::Fraction),
            "" if number.digits > 0 => return Err(BudgetParseError::BareInteger { got: got() }),
            "" => None,
            "%" => number.ratio(100).map(Budget::Fraction),
            "tok" | "token" | "tokens" => number.integer().map(Budget::Tokens),
            "page" | "pages" => number.integer().map(Budget::Pages),
            unit => {
                let Some((_, bytes)) = BYTE_UNITS.into_iter().find(|(name, _)| *name == unit) else {
                    return Err(BudgetParseError::Unknown { got: got() });
                };
                number.times(bytes).map(Budget::Bytes)
            }
        };
        match budget {
            // A part of a byte rounds down to none.
            _ if number.digits == 0 => Err(BudgetParseError::Zero { got: got() }),
            Some(Budget::Bytes(0)) => Err(BudgetParseError::Zero { got: got() }),
            Some(budget) => Ok(budget),
            None => Err(BudgetParseError::Unrepresentable { got: got() }),
        }
    }
}

/// The budget that gives up the `part` of `text`: `0.9`, `90%` or `9/10`, from 0 to what is below 1.
fn evicted(part: &str, text: &str) -> Result<Budget, BudgetParseError> {
    let part = part.trim();
    let unknown = || BudgetParseError::Unknown { got: text.to_owned() };
    let out_of_range = || BudgetParseError::EvictOutOfRange { got: text.to_owned() };
    if part.starts_with('-') {
        return Err(out_of_range());
    }
    let number = |text: &str| Decimal::parse(text.trim_end()).ok_or_else(unknown);
    let (numerator, denominator) = match (part.split_once('/'), part.strip_suffix('%')) {
        (Some((numerator, denominator)), _) => {
            let integer = |text: &str| number(text.trim())?.integer().ok_or_else(unknown);
            (integer(numerator)?, Some(integer(denominator)?))
        }
        (None, Some(percent)) => number(percent).map(|number| (number.digits, number.denominator(100)))?,
        (None, None) => number(part).map(|number| (number.digits, number.denominator(1)))?,
    };
    match (numerator, denominator) {
        (_, None) => Err(BudgetParseError::Unrepresentable { got: text.to_owned() }),
        (_, Some(0)) => Err(unknown()),
        (0, Some(_)) => Ok(Budget::Fraction(Ratio::ONE)),
        (numerator, Some(denominator)) if numerator >= denominator => Err(out_of_range()),
        (numerator, Some(denominator)) => Ratio::new(numerator, denominator).map(Budget::Evict).map_err(|_| unknown()),
    }
}

/// `digits / 10^places`, as written.
#[derive(Debug, Clone, Copy)]
struct Decimal {
    digits: u64,
    places: u32,
    has_point: bool,
}

impl Decimal {
    /// Digits with at most one point, at least one digit; `None` too where they do not fit 64 bits.
    fn parse(text: &str) -> Option<Self> {
        let (whole, part) = text.split_once('.').unwrap_or((text, ""));
        let part = part.trim_end_matches('0');
        let digits = [whole, part].concat();
        let is_number =
            text.bytes().any(|byte| byte.is_ascii_digit()) && digits.bytes().all(|byte| byte.is_ascii_digit());
        let digits = if digits.is_empty() { Ok(0) } else { digits.parse() };
        Some(Self {
            digits: digits.ok().filter(|_| is_number)?,
            places: u32::try_from(part.len()).ok()?,
            has_point: text.contains('.'),
        })
    }

    fn integer(self) -> Option<u64> {
        (!self.has_point).then_some(self.digits)
    }

    /// The number divided by `divisor`; `None` if that is zero or does not fit.
    fn ratio(self, divisor: u64) -> Option<Ratio> {
        Ratio::new(self.digits, self.denominator(divisor)?).ok()
    }

    /// What the digits are divided by if the number is divided by `divisor`.
    fn denominator(self, divisor: u64) -> Option<u64> {
        10_u64.checked_pow(self.places)?.checked_mul(divisor)
    }

    /// The number times `factor`, rounded down.
    fn times(self, factor: u64) -> Option<u64> {
        let product = u128::from(self.digits) * u128::from(factor);
        u64::try_from(product / 10_u128.checked_pow(self.places)?).ok()
    }
}

/// Why a text is no budget.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BudgetParseError {
    /// A number without a unit.
    #[error("a KV budget of {got:?} does not say what it counts: write {got}tok, {got}pages, {got}MiB or {got}%")]
    BareInteger {
        /// The text.
        got: String,
    },
    /// Nothing may stay.
    #[error("a KV budget of {got:?} keeps nothing: it must be greater than 0")]
    Zero {
        /// The text.
        got: String,
    },
    /// Less than nothing may stay.
    #[error("a KV budget of {got:?} is negative: it must be greater than 0")]
    Negative {
        /// The text.
        got: String,
    },
    /// More than everything is to go, everything, or less than nothing.
    #[error(
        "a KV budget of {got:?} is out of range: the part evicted is 0 or more and below 1, such as evict:0.9 or evict:90%"
    )]
    EvictOutOfRange {
        /// The text.
        got: String,
    },
    /// A number too long or too large, or with decimals where whole ones are counted.
    #[error("a KV budget of {got:?} is too large, too fine, or not a whole number of tokens or pages")]
    Unrepresentable {
        /// The text.
        got: String,
    },
    /// None of the forms.
    #[error(
        "{got:?} is not a KV budget: write bytes (64MiB, 1.5GB), tokens (512tok), pages (40pages), a fraction of the \
         prompt (20%, 0.2, 1/5) or the part that goes (evict:0.8)"
    )]
    Unknown {
        /// The text.
        got: String,
    },
}
