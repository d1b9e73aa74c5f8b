//! KVzip: what the model needs to repeat the text stays.

use crate::allotment::Allotment;
use crate::attention_rows::{AttentionRows, Reconstruction, RowSource, Taps};
use crate::policy::{EvictionPolicy, PolicyError, Schedule};
use crate::policy_options::{OptionKey, OptionSet, at_least};
use crate::resident_tokens::ResidentTokens;
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `kvzip` (Kim et al. 2025, equation 2): the largest attention that any query of a group's heads gives a token
/// while the model repeats the text. It asks nothing about what comes after the prompt, so that a question may come later.
///
/// One budget is shared by all layers and heads, as in the paper. Departures: the sinks stay, so no head is ever empty; the
/// whole prompt is repeated and scored, a chat template's opening too. Tokens no pass has repeated, those of an answer, stay
/// before all others, and the oldest of them go first: the paper evicts at the prompt's end only. A further turn repeats what
/// has come since the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kvzip {
    /// `chunk`: tokens repeated at a time.
    pub chunk: usize,
}

impl Default for Kvzip {
    /// Chunks of the authors' code.
    fn default() -> Self {
        Self { chunk: 2000 }
    }
}

const OPTIONS: OptionSet<Options<Kvzip>> = OptionSet {
    policy: Kvzip::NAME,
    keys: &[
        &[OptionKey {
            key: "chunk",
            expected: "a number of tokens, 16 or more",
            read: |options, text| at_least(text, 16).map(|chunk| options.method.chunk = chunk),
            show: |options| options.method.chunk.to_string(),
        }],
        Options::AXES,
    ],
    without: &[],
    presets: &[],
    default: || Options { method: Kvzip::default(), axes: Axes { allotment: Allotment::Global, ..Axes::default() } },
};

impl Kvzip {
    /// The policy's name on a command line.
    pub const NAME: &'static str = "kvzip";

    pub(crate) fn parse(options: Option<&str>) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
        OPTIONS.parse(options).map(|options| OPTIONS.policy(options))
    }
}

impl TokenMethod for Kvzip {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn needs(&self, _schedule: Schedule) -> Taps {
        Taps { reconstruction: Some(Reconstruction { chunk: self.chunk }), ..Taps::default() }
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        Box::new(KvzipScorer::default())
    }
}

/// The largest mass of each token that has been repeated.
#[derive(Default)]
struct KvzipScorer {
    /// Ascending.
    positions: Vec<u32>,
    /// Of each position.
    largest: Vec<f32>,
    bad_rows: u64,
}

impl KvzipScorer {
    fn raise(&mut self, position: u32, mass: f32) {
        match self.positions.binary_search(&position) {
            Ok(at) => self.largest[at] = self.largest[at].max(mass),
            Err(at) => {
                self.positions.insert(at, position);
                self.largest.insert(at, mass);
            }
        }
    }
}

impl TokenScorer for KvzipScorer {
    fn observe(&mut self, rows: AttentionRows<'_>) {
        debug_assert_eq!(rows.source, RowSource::Reconstruction, "nothing else was asked for");
        for (row, head) in (0..rows.num_rows()).flat_map(|row| (0..rows.group_size).map(move |head| (row, head))) {
            let masses = rows.head(row, head);
            // The masses of a chunk are a part of a row: they may all be 0.
            if !masses.iter().all(|mass| (0.0..=f32::MAX).contains(mass)) {
                self.bad_rows += 1;
                continue;
            }
            rows.positions.iter().zip(masses).for_each(|(&position, &mass)| self.raise(position, mass));
        }
    }

    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        let mut known = self.positions.iter().zip(&self.largest).peekable();
        out.extend(tokens.positions.iter().map(|position| {
            while known.next_if(|(known, _)| *known < position).is_some() {}
            let mass = known.next_if(|(known, _)| *known == position).map(|(_, mass)| *mass);
            // No mass is above 1, or much above it.
            mass.unwrap_or(2.0 + *position as f32)
        }));
    }

    fn retain(&mut self, positions: &[u32]) {
        let mut kept = positions.iter().peekable();
        let mut stays = |position: &u32| {
            while kept.next_if(|kept| *kept < position).is_some() {}
            kept.next_if(|kept| *kept == position).is_some()
        };
        let stay: Vec<bool> = self.positions.iter().map(&mut stays).collect();
        let mut at = stay.iter();
        self.positions.retain(|_| at.next() == Some(&true));
        let mut at = stay.iter();
        self.largest.retain(|_| at.next() == Some(&true));
        self.positions.shrink_to_fit();
        self.largest.shrink_to_fit();
    }

    fn nan_rows(&self) -> u64 {
        self.bad_rows
    }

    fn state_bytes(&self) -> u64 {
        let tokens = self.positions.capacity() * size_of::<u32>() + self.largest.capacity() * size_of::<f32>();
        (size_of::<Self>() + tokens) as u64
    }
}
