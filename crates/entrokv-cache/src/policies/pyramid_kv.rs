//! PyramidKV: SnapKV with more room in lower layers.

use super::pool_kind::PoolKind;
use super::snap_kv::SnapKv;
use crate::allotment::Allotment;
use crate::policy::{EvictionPolicy, PolicyError};
use crate::policy_options::OptionSet;
use crate::pyramid::{Pyramid, PyramidForm};
use crate::token_policy::{Axes, Options};

/// The policy `pyramid-kv` (Cai et al. 2024): the scores of [`SnapKv`], the budget in an arithmetic series over the layers.
///
/// The defaults are those of SnapKV with kvpress's series. `preset=kvpress` takes its window of 64 too; `preset=official` is the
/// authors' runner: a window of 8, a maximum over 7 tokens, and their integer series ([`PyramidForm`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PyramidKv;

fn pyramid(form: PyramidForm) -> Axes {
    Axes { allotment: Allotment::Pyramid(Pyramid::new(Pyramid::STEEPNESS, form)), ..SnapKv::axes() }
}

const OPTIONS: OptionSet<Options<SnapKv>> = OptionSet {
    policy: PyramidKv::NAME,
    keys: &[SnapKv::KEYS, Options::HEADS, Options::AXES],
    without: SnapKv::WITHOUT,
    presets: &[
        ("official", || Options {
            method: SnapKv { window: 8, kernel: 7, pool: PoolKind::Max },
            axes: pyramid(PyramidForm::Official),
        }),
        ("kvpress", || Options {
            method: SnapKv { window: 64, ..SnapKv::default() },
            axes: pyramid(PyramidForm::Kvpress),
        }),
    ],
    default: || Options { method: SnapKv::default(), axes: pyramid(PyramidForm::Kvpress) },
};

impl PyramidKv {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "pyramid-kv";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        SnapKv::parse_as(&OPTIONS, options)
    }
}
