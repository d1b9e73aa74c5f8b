//! Rényi entropies of attention rows with the sink set apart, and the head weights that follow from them.
//!
//! The residual of a row is what it leaves off the sinks: masses `A(t)`, `t` not a sink, not renormalised, `N` of
//! them with sum `z`. Every entropy here is that of `A / z`, which is never formed: `z` enters as a logarithm.

use std::fmt;
use std::str::FromStr;

/// Residual mass below which a row counts as pure sink (rule R2): its residual is taken to be uniform.
pub const MIN_RESIDUAL_MASS: f64 = 1e-12;

/// Distance from order 1 within which the general form would lose its digits to cancellation.
const NEAR_SHANNON: f64 = 0.01;

/// The order `alpha` of a Rényi entropy: any number from 0 to infinity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RenyiOrder(f64);

impl RenyiOrder {
    /// Order 1, Shannon's entropy.
    pub const SHANNON: Self = Self(1.0);
    /// Order 2, the collision entropy of the paper.
    pub const COLLISION: Self = Self(2.0);
    /// Order infinity, the min-entropy.
    pub const MIN: Self = Self(f64::INFINITY);

    /// The order `alpha`, or `None` for a negative number or NaN.
    #[must_use]
    pub fn new(alpha: f64) -> Option<Self> {
        (alpha >= 0.0).then_some(Self(alpha + 0.0))
    }

    /// The order as a number.
    #[must_use]
    pub fn get(self) -> f64 {
        self.0
    }
}

impl fmt::Display for RenyiOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for RenyiOrder {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        text.parse().ok().and_then(Self::new).ok_or(())
    }
}

/// The entropy, in nats, of a residual normalised to sum 1: `H_alpha` of the sink-isolated row (rules R2 to R4).
///
/// `residual` yields the masses off the sinks, all finite and not negative. The result lies in `[0, ln N]`; it is
/// `ln N` when the masses sum to less than [`MIN_RESIDUAL_MASS`] (a pure sink head is the least influential) and 0
/// when there are none.
#[must_use]
pub fn residual_entropy<I>(residual: I, order: RenyiOrder) -> f64
where
    I: Iterator<Item = f64> + Clone,
{
    let num_tokens = residual.clone().count();
    if num_tokens == 0 {
        return 0.0;
    }
    let mass: f64 = residual.clone().sum();
    if mass < MIN_RESIDUAL_MASS {
        return (num_tokens as f64).ln();
    }
    let alpha = order.0;
    if alpha == 2.0 {
        // Rule R3: both sums in one form, no division per token.
        let squares: f64 = residual.map(|a| a * a).sum();
        return 2.0 * mass.ln() - squares.ln();
    }
    let largest = residual.clone().fold(0.0, f64::max);
    if alpha == f64::INFINITY {
        return mass.ln() - largest.ln();
    }
    let positive = residual.filter(|&a| a > 0.0);
    if alpha == 1.0 {
        return -positive.map(|a| a / mass).map(|p| p * p.ln()).sum::<f64>();
    }
    if (alpha - 1.0).abs() < NEAR_SHANNON {
        // sum p^alpha = 1 + sum p (p^(alpha-1) - 1): the 1 is exact, so nothing cancels as alpha nears 1.
        let excess: f64 = positive.map(|a| a / mass).map(|p| p * ((alpha - 1.0) * p.ln()).exp_m1()).sum();
        return excess.ln_1p() / (1.0 - alpha);
    }
    // Relative to the largest mass, so that order 999 does not underflow.
    let relative: f64 = positive.map(|a| (a / largest).powf(alpha)).sum();
    (alpha * (largest.ln() - mass.ln()) + relative.ln()) / (1.0 - alpha)
}

/// Head weights `w_h = exp(-H_h / tau) / sum_j exp(-H_j / tau)` (rule R6), largest entropy weighing least.
///
/// `tau` is positive; infinity gives the arithmetic mean, and towards 0 the weights become one-hot on the smallest
/// entropy, uniform over ties (proposition 2).
#[must_use]
pub fn head_weights(entropies: &[f64], tau: f64) -> Vec<f64> {
    let smallest = entropies.iter().copied().fold(f64::INFINITY, f64::min);
    let mut weights: Vec<f64> = entropies.iter().map(|h| (-(h - smallest) / tau).exp()).collect();
    let sum: f64 = weights.iter().sum();
    for weight in &mut weights {
        *weight /= sum;
    }
    weights
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entropy(residual: &[f64], alpha: f64) -> f64 {
        let order = RenyiOrder::new(alpha).expect("a valid order");
        residual_entropy(residual.iter().copied(), order)
    }

    #[test]
    fn every_order_gives_ln_n_for_a_uniform_residual_whatever_its_mass() {
        for alpha in [0.0, 0.5, 0.995, 1.0, 1.005, 2.0, 3.0, 999.0, f64::INFINITY] {
            for mass in [1.0, 0.1, 1e-9, 0.0, 1e-13] {
                let residual = vec![mass / 836.0; 836];
                let got = entropy(&residual, alpha);
                assert!((got - 836f64.ln()).abs() < 1e-11, "alpha {alpha} mass {mass}: {got}");
            }
        }
    }

    #[test]
    fn a_single_mass_has_no_entropy_and_no_tokens_have_none_either() {
        for alpha in [0.0, 0.5, 0.995, 1.0, 2.0, 999.0, f64::INFINITY] {
            assert!(entropy(&[0.0, 0.3, 0.0], alpha).abs() < 1e-15, "alpha {alpha}");
            assert_eq!(entropy(&[], alpha), 0.0, "alpha {alpha}");
        }
    }

    #[test]
    fn orders_near_one_join_shannon_without_a_step() {
        let residual = [0.5, 0.25, 0.125, 0.0625, 0.0625];
        let shannon = entropy(&residual, 1.0);
        assert!((shannon - 1.875 * 2f64.ln()).abs() < 1e-15);
        for distance in [1e-15, 1e-12, 1e-9, 1e-6, 1e-3] {
            for alpha in [1.0 - distance, 1.0 + distance] {
                let difference = (entropy(&residual, alpha) - shannon).abs();
                assert!(difference < distance, "alpha {alpha}: off by {difference}");
            }
        }
        for edge in [1.0 - NEAR_SHANNON, 1.0 + NEAR_SHANNON] {
            let step = entropy(&residual, edge - 1e-9) - entropy(&residual, edge + 1e-9);
            assert!((0.0..1e-8).contains(&step), "a step of {step} at {edge}");
        }
    }

    #[test]
    fn temperature_goes_from_one_hot_to_the_mean() {
        let entropies = [1.0, 1.0, 2.0, 3.0];
        assert_eq!(head_weights(&entropies, f64::MIN_POSITIVE), [0.5, 0.5, 0.0, 0.0]);
        assert_eq!(head_weights(&entropies, f64::INFINITY), [0.25; 4]);
        let halves = head_weights(&[0.0, 2f64.ln()], 0.5);
        assert!((halves[0] - 0.8).abs() < 1e-15 && (halves[1] - 0.2).abs() < 1e-15, "{halves:?}");
    }

    #[test]
    fn an_order_is_a_number_from_zero_to_infinity() {
        for (text, order) in [("2", 2.0), ("0.5", 0.5), ("inf", f64::INFINITY), ("0", 0.0), ("-0", 0.0)] {
            let parsed: RenyiOrder = text.parse().expect(text);
            assert_eq!(parsed.get().to_bits(), f64::to_bits(order), "{text}");
            assert_eq!(parsed.to_string().parse(), Ok(parsed), "{text}");
        }
        for text in ["-1", "NaN", "", "two", "-inf"] {
            assert_eq!(text.parse::<RenyiOrder>(), Err(()), "{text}");
        }
    }
}
