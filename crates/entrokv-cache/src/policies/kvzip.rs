//! KVzip: what the model needs to repeat the text stays.

use crate::allotment::Allotment;
use crate::attention_rows::{AttentionRows, PassView, Reconstruction, RowSource, RowTap, Taps};
use crate::policy::{EvictionPolicy, PolicyError, Schedule};
use crate::policy_options::{OptionKey, OptionSet, at_least, spelling, word};
use crate::resident_tokens::{OutputTap, ResidentTokens};
use crate::shape::{CacheShape, KvGroup};
use crate::token_policy::{Axes, Options, TokenMethod, TokenScorer};

/// The policy `kvzip` (Kim et al. 2025, equation 2): the largest attention that any query of a group's heads gives a token
/// while the model repeats the text. It asks nothing about what comes after the prompt, so that a question may come later.
///
/// With `window=N` that mass is multiplied with a power of the largest one that the last N queries of the prompt give the token:
/// what the text's end looks back at is what most continuations need first.
///
/// One budget is shared by all layers and heads, as in the paper. Departures: the sinks stay, so no head is ever empty; the
/// whole prompt is repeated and scored, a chat template's opening too. Tokens no pass has repeated, those of an answer, stay
/// before all others, and the oldest of them go first: the paper evicts at the prompt's end only. A further turn repeats what
/// has come since the last one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kvzip {
    /// `chunk`: tokens repeated at a time.
    pub chunk: usize,
    /// `view`: what the pass sees of the text.
    pub view: PassView,
    /// `window`: the last so many queries of the prompt count too; 0 is the paper's method.
    pub window: usize,
    /// `weight`: the power in which they do.
    pub weight: f64,
    /// `output`: whether a token's mass is weighed with what its value adds to the layer's output.
    pub output: bool,
}

impl Default for Kvzip {
    /// Chunks of the authors' code, and no window.
    fn default() -> Self {
        Self { chunk: 2000, view: PassView::Text, window: 0, weight: 0.2, output: false }
    }
}

/// What a token counts at least that no pass has repeated: more than any mass, weighed or not.
const UNREPEATED: f32 = 1e6;

/// What a token counts that no query of the window looks at.
const LEAST_WINDOW_MASS: f64 = 1e-9;

const OPTIONS: OptionSet<Options<Kvzip>> = OptionSet {
    policy: Kvzip::NAME,
    keys: &[
        &[
            OptionKey {
                key: "chunk",
                expected: "a number of tokens, 16 or more",
                read: |options, text| at_least(text, 16).map(|chunk| options.method.chunk = chunk),
                show: |options| options.method.chunk.to_string(),
            },
            OptionKey {
                key: "view",
                expected: "text or chunk",
                read: |options, text| word(text, &PassView::WORDS).map(|view| options.method.view = view),
                show: |options| spelling(options.method.view, &PassView::WORDS),
            },
            OptionKey {
                key: "window",
                expected: "a number of queries, 0 or more",
                read: |options, text| at_least(text, 0).map(|window| options.method.window = window),
                show: |options| options.method.window.to_string(),
            },
            OptionKey {
                key: "output",
                expected: "true or false",
                read: |options, text| text.parse().ok().map(|output| options.method.output = output),
                show: |options| options.method.output.to_string(),
            },
            OptionKey {
                key: "weight",
                expected: "a power from 0 to 4",
                read: |options, text| {
                    options.method.weight = text.parse().ok().filter(|weight| (0.0..=4.0).contains(weight))?;
                    Some(())
                },
                show: |options| options.method.weight.to_string(),
            },
        ],
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
        let prompt = if self.window > 0 { RowTap::Window(self.window) } else { RowTap::None };
        let output = if self.output { OutputTap::Norms } else { OutputTap::None };
        Taps {
            prompt,
            output,
            reconstruction: Some(Reconstruction { chunk: self.chunk, view: self.view }),
            ..Taps::default()
        }
    }

    fn scorer(&self, _shape: &CacheShape, _group: KvGroup) -> Box<dyn TokenScorer> {
        let window = (self.window > 0).then(Largest::default);
        Box::new(KvzipScorer {
            repeated: Largest::default(),
            window,
            weight: self.weight,
            output: self.output,
            is_over: false,
            bad_rows: 0,
        })
    }
}

#[derive(Clone)]
struct KvzipScorer {
    /// Of each token that has been repeated.
    repeated: Largest,
    /// Of each token that the window has looked at, where it is to.
    window: Option<Largest>,
    weight: f64,
    /// Whether values count.
    output: bool,
    /// Whether the next window is that of another prompt.
    is_over: bool,
    bad_rows: u64,
}

/// The largest mass of each of some tokens.
#[derive(Clone, Default)]
struct Largest {
    /// Ascending.
    positions: Vec<u32>,
    /// Of each position.
    masses: Vec<f32>,
}

impl Largest {
    /// Takes in `masses` of the tokens at `positions`, ascending.
    fn raise(&mut self, positions: &[u32], masses: &[f32]) {
        if !positions.starts_with(&self.positions) {
            self.insert(positions);
        } else {
            self.positions.extend_from_slice(&positions[self.positions.len()..]);
        }
        self.masses.resize(self.positions.len(), 0.0);
        let first = positions.first().map_or(0, |first| self.positions.partition_point(|known| known < first));
        let mut known = self.positions[first..].iter().zip(&mut self.masses[first..]);
        for (position, mass) in positions.iter().zip(masses) {
            if let Some((_, known)) = known.by_ref().find(|(known, _)| *known == position) {
                *known = known.max(*mass);
            }
        }
    }

    /// Makes room for `positions` among those it has.
    fn insert(&mut self, positions: &[u32]) {
        let new: Vec<u32> = positions.iter().copied().filter(|at| self.positions.binary_search(at).is_err()).collect();
        if self.positions.last() < new.first() {
            self.positions.extend(new);
            return;
        }
        let masses = self.positions.iter().copied().zip(self.masses.iter().copied());
        let mut all: Vec<(u32, f32)> = masses.chain(new.into_iter().map(|position| (position, 0.0))).collect();
        all.sort_unstable_by_key(|(position, _)| *position);
        (self.positions, self.masses) = all.into_iter().unzip();
    }

    /// The mass of each of the tokens at `positions`, ascending; `None` for one it has not seen.
    fn at(&self, positions: &[u32]) -> impl Iterator<Item = Option<f32>> {
        let mut known = self.positions.iter().zip(&self.masses).peekable();
        positions.iter().map(move |position| {
            while known.next_if(|(known, _)| *known < position).is_some() {}
            known.next_if(|(known, _)| *known == position).map(|(_, mass)| *mass)
        })
    }

    /// Forgets every token that is not at one of `positions`.
    fn retain(&mut self, positions: &[u32]) {
        let known: Vec<(u32, f32)> =
            positions.iter().copied().zip(self.at(positions)).filter_map(|(at, mass)| Some((at, mass?))).collect();
        (self.positions, self.masses) = known.into_iter().unzip();
        self.positions.shrink_to_fit();
        self.masses.shrink_to_fit();
    }

    fn bytes(&self) -> usize {
        self.positions.capacity() * size_of::<u32>() + self.masses.capacity() * size_of::<f32>()
    }
}

impl TokenScorer for KvzipScorer {
    fn observe(&mut self, rows: AttentionRows<'_>) {
        let largest = match (rows.source, &mut self.window) {
            (RowSource::Prompt | RowSource::Probe, Some(window)) => {
                if std::mem::take(&mut self.is_over) {
                    *window = Largest::default();
                }
                window
            }
            _ => &mut self.repeated,
        };
        for (row, head) in (0..rows.num_rows()).flat_map(|row| (0..rows.group_size).map(move |head| (row, head))) {
            let masses = rows.head(row, head);
            // The masses of a chunk are a part of a row: they may all be 0.
            if masses.iter().all(|mass| (0.0..=f32::MAX).contains(mass)) {
                largest.raise(rows.positions, masses);
            } else {
                self.bad_rows += 1;
            }
        }
    }

    fn end_prompt(&mut self) {
        self.is_over = true;
    }

    /// How many tokens the layer has, and the sum of the squares of what they add to its output.
    fn measure(&mut self, tokens: ResidentTokens<'_>, sums: &mut Vec<f64>) {
        if self.output {
            let squares = tokens.output_norms.iter().map(|norm| f64::from(*norm).powi(2));
            sums.extend([tokens.len() as f64, squares.sum()]);
        }
    }

    fn score(&mut self, tokens: ResidentTokens<'_>, out: &mut Vec<f32>) {
        let repeated = self.repeated.at(tokens.positions);
        out.extend(
            tokens.positions.iter().zip(repeated).map(|(position, mass)| mass.unwrap_or(UNREPEATED + *position as f32)),
        );
        if let &[count, squares] = tokens.layer_sums {
            // Layers are compared with each other, so that what counts is how much more than others of its layer a token adds.
            let typical = (squares / count.max(1.0)).sqrt().max(f64::MIN_POSITIVE);
            for (score, norm) in out.iter_mut().zip(tokens.output_norms).filter(|(score, _)| **score < UNREPEATED) {
                *score = (f64::from(*score) * f64::from(*norm) / typical).min(f64::from(UNREPEATED) / 2.0) as f32;
            }
        }
        if let Some(window) = &self.window {
            // What has come after the window counts as if it were looked at no more and no less than others.
            let even = 1.0 / tokens.len().max(1) as f64;
            for (score, mass) in out.iter_mut().zip(window.at(tokens.positions)) {
                let mass = mass.map_or(even, |mass| f64::from(mass).max(LEAST_WINDOW_MASS));
                if *score < UNREPEATED {
                    *score = (f64::from(*score) * mass.powf(self.weight)) as f32;
                }
            }
        }
    }

    fn retain(&mut self, positions: &[u32]) {
        self.repeated.retain(positions);
        if let Some(window) = &mut self.window {
            window.retain(positions);
        }
    }

    fn nan_rows(&self) -> u64 {
        self.bad_rows
    }

    fn state_bytes(&self) -> u64 {
        (size_of::<Self>() + self.repeated.bytes() + self.window.as_ref().map_or(0, Largest::bytes)) as u64
    }
}
