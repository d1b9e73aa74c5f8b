//! Ada-KV: SnapKV with the heads of a layer sharing their budget.

use super::pool_kind::PoolKind;
use super::snap_kv::SnapKv;
use crate::allotment::Allotment;
use crate::policy::{EvictionPolicy, PolicyError};
use crate::policy_options::{OptionKey, OptionSet, YES_NO, spelling, word};
use crate::token_policy::{Axes, Options};

/// The policy `ada-kv` (Feng et al. 2024): the scores of [`SnapKv`] with a maximum over 7 tokens, and counts of heads drawn from the
/// layer's pooled choice a fifth of the way back to the mean, as its authors' code has it.
///
/// `normalise=yes` has the counts made of scores times the part of its mass that a head has in the best units, as their code can.
/// `preset=kvpress` is kvpress's: a window of 64, a mean over 5 tokens, and a fifth of each head's share safe in place of the drawing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdaKv;

const OPTIONS: OptionSet<Options<SnapKv>> = OptionSet {
    policy: AdaKv::NAME,
    keys: &[SnapKv::KEYS, Options::HEADS, Options::AXES, AdaKv::KEYS],
    without: SnapKv::WITHOUT,
    presets: &[("kvpress", || Options {
        method: SnapKv { window: 64, ..SnapKv::default() },
        axes: Axes { allotment: Allotment::AdaFloor { safeguard: 0.2 }, ..SnapKv::axes() },
    })],
    default: || Options {
        method: SnapKv { kernel: 7, pool: PoolKind::Max, ..SnapKv::default() },
        axes: Axes { allotment: Allotment::AdaInterpolated { toward: 0.2 }, ..SnapKv::axes() },
    },
};

impl AdaKv {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "ada-kv";

    /// Read after `allot`, which it varies.
    const KEYS: &'static [OptionKey<Options<SnapKv>>] = &[OptionKey {
        key: "normalise",
        expected: "no, or yes with allot=ada-interpolated:A",
        read: |options, text| {
            let allotment = &mut options.axes.allotment;
            match (word(text, &YES_NO)?, *allotment) {
                (true, Allotment::AdaInterpolated { toward }) => *allotment = Allotment::AdaNormalised { toward },
                (true, _) => return None,
                (false, _) => {}
            }
            Some(())
        },
        show: |options| spelling(matches!(options.axes.allotment, Allotment::AdaNormalised { .. }), &YES_NO),
    }];

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        SnapKv::parse_as(&OPTIONS, options)
    }
}
