//! The policies that score tokens, one a file, with the defaults of its paper.
//!
//! All of them decide about pages here, and but for those that say so they free what they evict. What a paper decides about tokens is projected on pages by
//! the axis `block`; what it leaves open while decoding is said where it is settled.

mod ada_kv;
mod all_alike;
mod compactor;
mod critical_kv;
mod cur;
mod dms;
mod duo_attention;
mod expected_attention;
mod fast_gen;
mod fast_kvzip;
mod h2o;
mod head_mean;
mod k_norm;
mod key_diff;
mod kv_compress;
mod kvzap;
mod kvzip;
mod lag_kv;
mod paged_eviction;
mod pool_kind;
mod pyramid_kv;
mod quest;
mod r_kv;
mod random;
mod rocket_kv;
mod row_history;
mod row_sums;
mod scissorhands;
mod snap_kv;
mod streaming_llm;
mod think;
mod token_part;
mod tova;

pub use ada_kv::AdaKv;
pub use compactor::{Compactor, CompactorParts};
pub use critical_kv::CriticalKv;
pub use cur::{Cur, CurCombine};
pub use dms::Dms;
pub use duo_attention::DuoAttention;
pub use expected_attention::ExpectedAttention;
pub use fast_gen::FastGen;
pub use fast_kvzip::{FastKvzip, KeptWindow};
pub use h2o::{H2o, ObservedAttention};
pub use k_norm::KNorm;
pub use key_diff::KeyDiff;
pub use kv_compress::KvCompress;
pub use kvzap::Kvzap;
pub use kvzip::Kvzip;
pub use lag_kv::LagKv;
pub use paged_eviction::PagedEviction;
pub use pool_kind::PoolKind;
pub use pyramid_kv::PyramidKv;
pub use quest::Quest;
pub use r_kv::RKv;
pub use random::Random;
pub use rocket_kv::{RocketKv, RocketPlan};
pub use scissorhands::{Scissorhands, ShareCount};
pub use snap_kv::SnapKv;
pub use streaming_llm::StreamingLlm;
pub use think::Think;
pub use token_part::TokenPart;
pub use tova::Tova;

use crate::resident_tokens::ResidentTokens;

/// `sqrt(sum x_i^2)`, summed in f64.
fn norm(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
}

/// How many of the oldest tokens have left a window of so many newest positions.
fn past_window(tokens: ResidentTokens<'_>, window: usize) -> usize {
    let first = (tokens.next_position() as usize).saturating_sub(window);
    tokens.positions.partition_point(|&position| (position as usize) < first)
}
