//! What the keys of one (layer, KV head) are centred on and divided by before they are coded.

use crate::codes::rotation::signs;

/// The least channel scale, as a share of the largest.
const LEAST_SCALE: f32 = 1e-3;

/// The least root mean square of a query's channel.
const LEAST_QUERY: f32 = 1e-6;

/// Centre and channel scale of the keys of one (sequence, layer, KV head), frozen when its first pages are coded.
///
/// A rotated code spreads the error of a key over all channels, so that channels that are large and matter little would
/// drown those that are small and matter much. A key is therefore coded as `(k - centre) / channel_scale` and a query
/// multiplied by the scale. The expected squared error of a logit, `sum_i q_i^2 c_i^2 * mean_i (k_i / c_i)^2`, is least
/// for `c_i^2 = |k_i| / |q_i|` (Cauchy-Schwarz).
#[derive(Clone, Debug, PartialEq)]
pub struct KeyConstants {
    centre: Vec<f32>,
    channel_scale: Vec<f32>,
    /// `channel_scale` with the signs of the rotation: what a query is multiplied with.
    signed_scale: Vec<f32>,
}

impl KeyConstants {
    /// From the moments of the keys and queries seen so far, each `[head_dim]`: the mean of the keys, their standard
    /// deviation, and the root mean square of the queries of all heads that share the KV head.
    ///
    /// `channel_scale_i = sqrt(key_std_i / query_rms_i)`, at least a thousandth of the largest; 1 throughout if no key
    /// varies or a moment is not finite.
    ///
    /// # Panics
    /// If the lengths differ, or are no multiple of 32 or above [`super::MAX_CODED_HEAD_DIM`].
    pub fn from_moments(key_mean: &[f32], key_std: &[f32], query_rms: &[f32]) -> KeyConstants {
        assert!(key_std.len() == key_mean.len() && query_rms.len() == key_mean.len(), "moments of one head");
        let scale = |(std, rms): (&f32, &f32)| (std / rms.max(LEAST_QUERY)).sqrt();
        let mut channel_scale: Vec<f32> = key_std.iter().zip(query_rms).map(scale).collect();
        let largest = channel_scale.iter().copied().fold(0.0, f32::max);
        if largest > 0.0 && channel_scale.iter().all(|c| c.is_finite()) {
            channel_scale.iter_mut().for_each(|c| *c = c.max(largest * LEAST_SCALE));
        } else {
            channel_scale.fill(1.0);
        }
        Self::new(key_mean.to_vec(), channel_scale)
    }

    /// The given constants, each `[head_dim]`.
    ///
    /// # Panics
    /// As [`KeyConstants::from_moments`].
    pub fn new(centre: Vec<f32>, channel_scale: Vec<f32>) -> KeyConstants {
        assert_eq!(centre.len(), channel_scale.len(), "constants of one head");
        let signed_scale = channel_scale.iter().zip(signs(centre.len())).map(|(c, sign)| c * sign).collect();
        KeyConstants { centre, channel_scale, signed_scale }
    }

    /// `[head_dim]`: what is subtracted from a key.
    pub fn centre(&self) -> &[f32] {
        &self.centre
    }

    /// `[head_dim]`: what a centred key is divided by.
    pub fn channel_scale(&self) -> &[f32] {
        &self.channel_scale
    }

    /// Channels.
    pub fn head_dim(&self) -> usize {
        self.centre.len()
    }

    /// `[head_dim]`: the channel scale times the signs of the rotation.
    pub(crate) fn signed_scale(&self) -> &[f32] {
        &self.signed_scale
    }

    /// Bytes of the centre and the channel scale, which a ledger counts as metadata.
    pub fn bytes(head_dim: usize) -> usize {
        2 * head_dim * size_of::<f32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_is_the_root_of_key_over_query_with_a_floor() {
        let mut std = [4.0; 32];
        let mut rms = [1.0; 32];
        (std[1], rms[2], std[3], rms[4]) = (1.0, 16.0, 0.0, 0.0);
        let constants = KeyConstants::from_moments(&[0.5; 32], &std, &rms);
        let largest = (4.0f32 / 1e-6).sqrt();
        assert_eq!(constants.channel_scale()[..5], [2.0, 2.0, 2.0, 2.0, largest]);
        rms[4] = 1.0;
        let constants = KeyConstants::from_moments(&[0.5; 32], &std, &rms);
        assert_eq!(constants.channel_scale()[..5], [2.0, 1.0, 0.5, 0.002, 2.0]);
        assert_eq!(constants.centre(), [0.5; 32]);
    }

    #[test]
    fn keys_that_do_not_vary_or_are_not_finite_have_a_scale_of_one() {
        for std in [0.0, f32::NAN, f32::INFINITY] {
            let constants = KeyConstants::from_moments(&[1.0; 32], &[std; 32], &[1.0; 32]);
            assert_eq!(constants.channel_scale(), [1.0; 32]);
        }
    }
}
