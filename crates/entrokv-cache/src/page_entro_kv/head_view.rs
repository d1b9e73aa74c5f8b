//! How one head's attention row is read.

use crate::entropy::MIN_RESIDUAL_MASS;
use crate::page_entro_kv::options::PoolOn;

/// How a head's masses enter the pooled score: a line for the sinks and one for the others.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadView {
    /// Factor of the mass on a sink.
    on_sinks: f64,
    /// Factor of the mass off the sinks.
    off_sinks: f64,
    /// Added off the sinks.
    floor: f64,
}

impl HeadView {
    /// The view of a head with the given masses off the sinks.
    pub(super) fn of<M: Copy + Into<f64>>(pool_on: PoolOn, residual: &[M]) -> Self {
        match pool_on {
            PoolOn::Raw => Self { on_sinks: 1.0, off_sinks: 1.0, floor: 0.0 },
            PoolOn::Isolated => {
                let num_tokens = residual.len();
                let mass = sum(residual);
                if mass < MIN_RESIDUAL_MASS {
                    // Rule R2: an empty residual is taken to be uniform.
                    Self { on_sinks: 0.0, off_sinks: 0.0, floor: 1.0 / num_tokens as f64 }
                } else {
                    Self { on_sinks: 0.0, off_sinks: 1.0 / mass, floor: 0.0 }
                }
            }
        }
    }

    /// What a mass counts; `is_sink` tells on which side of the isolation its token is.
    pub(super) fn see(self, mass: f64, is_sink: bool) -> f64 {
        if is_sink { self.on_sinks * mass } else { self.off_sinks * mass + self.floor }
    }

    /// Adds `weight` times what the masses count to the scores.
    pub(super) fn add(self, weight: f64, masses: &[f32], num_sinks: usize, scores: &mut [f64]) {
        let (sinks, others) = masses.split_at(num_sinks);
        let (sink_scores, other_scores) = scores.split_at_mut(num_sinks);
        for (score, &mass) in sink_scores.iter_mut().zip(sinks) {
            *score += weight * self.see(f64::from(mass), true);
        }
        for (score, &mass) in other_scores.iter_mut().zip(others) {
            *score += weight * self.see(f64::from(mass), false);
        }
    }
}

/// The sum in eight lanes by place modulo 8: every token generated sums every row, and one lane would wait for each
/// addition before the next.
fn sum<M: Copy + Into<f64>>(masses: &[M]) -> f64 {
    let (blocks, rest) = masses.as_chunks::<8>();
    let mut lanes = [0.0; 8];
    for block in blocks {
        for (lane, &mass) in lanes.iter_mut().zip(block) {
            *lane += mass.into();
        }
    }
    for (lane, &mass) in lanes.iter_mut().zip(rest) {
        *lane += mass.into();
    }
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mass_is_summed_once() {
        for len in 0..40 {
            let masses: Vec<f32> = (1..=len).map(|i| i as f32).collect();
            assert_eq!(sum(&masses), f64::from(len * (len + 1) / 2));
        }
    }
}
