//! The pass that repeats a prompt for the sake of a policy's scores, after the prompt has been read and before anything is
//! evicted.
//!
//! The prompt is repeated in chunks. A chunk is read like a part of a prompt, behind the whole cache: an instruction, the
//! chunk's own tokens. Attention hands out the largest probability that any of these queries gives each token of the chunk
//! ([`Maxima`]), and when the chunk has been read the cache forgets it. Invariants, each a test of that name:
//! * `a_pass_leaves_no_token_behind`: cache and pool hold what they held before, whether the pass ended or was broken off.
//! * `a_pass_holds_one_chunk_more_than_the_prompt`.
//! * `an_interrupted_pass_goes_on`: a maximum does not mind being taken twice.

use std::ops::Range;

use entrokv_cache::{KvCache, KvGroup, LayerKind, PassView, Reconstruction};
use entrokv_kernels::attention::{Maxima, Segment, SegmentList, Tap};

use crate::repeat_instruction::RepeatInstruction;

/// Fewest tokens worth repeating at a time, unless there are fewer.
const LEAST_CHUNK: usize = 128;

/// How far a prompt has been repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassProgress {
    /// Tokens repeated.
    pub done: usize,
    /// Tokens to be repeated.
    pub total: usize,
}

/// A pass under way.
pub(crate) struct Pass {
    work: Work,
    /// What is read for it.
    tokens: Vec<u32>,
    /// How many of them have been.
    done: usize,
    /// Logits of the last row read before it, if it has any, for when the pass is over.
    logits: Option<Vec<f32>>,
}

/// What a pass is doing.
enum Work {
    /// It asks what any text may be asked, and then repeats it, if there is a plan for that.
    Probe { then: Option<PassPlan> },
    /// It repeats the text.
    Repeat {
        plan: PassPlan,
        /// The part that is being repeated.
        chunk: Range<usize>,
        /// What attention has said.
        record: Record,
    },
}

/// What is to be repeated, and in which pieces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PassPlan {
    /// Positions of the text to be repeated.
    text: Range<usize>,
    /// Tokens at a time.
    chunk_len: usize,
    /// How many of the first positions every row sees.
    sinks: usize,
    /// What it sees of the text.
    view: PassView,
}

/// The largest probabilities of a chunk's tokens.
pub(crate) struct Record {
    /// Absolute positions of the tokens.
    columns: Range<u32>,
    /// What attention is asked for, per layer; nothing in window layers.
    layers: Vec<Option<Maxima>>,
    /// What it reads.
    view: PassView,
}

impl PassPlan {
    /// A plan for `text`, after which the context has room for `room` tokens, a chunk and its instruction.
    ///
    /// # Errors
    /// The number of tokens there must be room for at least.
    pub(crate) fn new(
        reconstruction: Reconstruction,
        text: Range<usize>,
        sinks: usize,
        room: usize,
        instruction: &RepeatInstruction,
    ) -> Result<Self, usize> {
        let chunk_len = reconstruction.chunk.min(room.saturating_sub(instruction.longest()));
        let least = LEAST_CHUNK.min(reconstruction.chunk).min(text.len());
        if chunk_len < least {
            return Err(least + instruction.longest());
        }
        Ok(Self { text, chunk_len, sinks, view: reconstruction.view })
    }

    /// The chunk that begins at `start`; none at the end of the text.
    fn chunk(&self, start: usize) -> Option<Range<usize>> {
        (start < self.text.end).then(|| start..self.text.end.min(start + self.chunk_len))
    }
}

impl Pass {
    /// Begins a pass over the tokens of a sequence, whose cache holds all of them: a `probe` first, if there is one, and then what
    /// `plan` says; `None` if there is neither.
    pub(crate) fn begin(
        probe: Option<&[u32]>,
        plan: Option<PassPlan>,
        instruction: &RepeatInstruction,
        sequence: &[u32],
        cache: &KvCache,
        logits: Option<&[f32]>,
    ) -> Option<Self> {
        let logits = logits.map(<[f32]>::to_vec);
        match probe {
            Some(probe) => Some(Self { work: Work::Probe { then: plan }, tokens: probe.to_vec(), done: 0, logits }),
            None => {
                let start = plan.as_ref()?.text.start;
                Self::repeat(plan?, start, instruction, sequence, cache, logits).ok()
            }
        }
    }

    /// Repeats the chunk that begins at `start`; gives the logits back if none does.
    fn repeat(
        plan: PassPlan,
        start: usize,
        instruction: &RepeatInstruction,
        sequence: &[u32],
        cache: &KvCache,
        logits: Option<Vec<f32>>,
    ) -> Result<Self, Option<Vec<f32>>> {
        let Some(chunk) = plan.chunk(start) else { return Err(logits) };
        let tokens = instruction.tokens(sequence, &chunk);
        let record = Record::new(&plan, &chunk, &tokens, cache);
        Ok(Self { work: Work::Repeat { plan, chunk, record }, tokens, done: 0, logits })
    }

    /// Tokens still to be read for the chunk.
    pub(crate) fn pending(&self) -> &[u32] {
        &self.tokens[self.done..]
    }

    /// How many have been.
    pub(crate) fn done(&self) -> usize {
        self.done
    }

    /// Tokens it reads before the cache forgets them.
    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// The next `num_tokens` of them, and where attention's answer goes, unless it is rows of a probe.
    pub(crate) fn parts(&mut self, num_tokens: usize) -> (&[u32], Option<&mut Record>) {
        let record = match &mut self.work {
            Work::Probe { .. } => None,
            Work::Repeat { record, .. } => Some(record),
        };
        (&self.tokens[self.done..self.done + num_tokens], record)
    }

    /// Notes that `num_tokens` more have been read; whether the chunk is whole.
    pub(crate) fn advance(&mut self, num_tokens: usize) -> bool {
        self.done += num_tokens;
        self.done == self.tokens.len()
    }

    /// Goes on to the next chunk, once the cache has forgotten this one; gives the logits back if there is none.
    pub(crate) fn next_chunk(
        self,
        instruction: &RepeatInstruction,
        sequence: &[u32],
        cache: &KvCache,
    ) -> Result<Self, Option<Vec<f32>>> {
        let (plan, start) = match self.work {
            Work::Probe { then: None } => return Err(self.logits),
            Work::Probe { then: Some(plan) } => {
                let start = plan.text.start;
                (plan, start)
            }
            Work::Repeat { plan, chunk, .. } => (plan, chunk.end),
        };
        Self::repeat(plan, start, instruction, sequence, cache, self.logits)
    }

    /// The masses of the chunk's tokens; none of a probe, whose rows have been shown as they came.
    pub(crate) fn record(&self) -> Option<&Record> {
        match &self.work {
            Work::Probe { .. } => None,
            Work::Repeat { record, .. } => Some(record),
        }
    }

    /// How far it has come.
    pub(crate) fn progress(&self) -> PassProgress {
        match &self.work {
            Work::Probe { .. } => PassProgress { done: self.done, total: self.tokens.len() },
            Work::Repeat { plan, chunk, .. } => {
                let asked = self.tokens.len() - chunk.len();
                let done = chunk.start - plan.text.start + self.done.saturating_sub(asked);
                PassProgress { done, total: plan.text.len() }
            }
        }
    }

    /// Bytes it takes beside the pages.
    pub(crate) fn bytes(&self) -> u64 {
        let layers = self.record().map_or(&[][..], |record| &record.layers);
        let maxima: usize = layers.iter().flatten().flat_map(|maxima| &maxima.out).map(Vec::capacity).sum();
        ((maxima + self.logits.as_ref().map_or(0, Vec::capacity)) * size_of::<f32>()
            + self.tokens.capacity() * size_of::<u32>()) as u64
    }
}

impl Record {
    /// For a chunk that is repeated by `tokens` behind what `cache` holds.
    fn new(plan: &PassPlan, chunk: &Range<usize>, tokens: &[u32], cache: &KvCache) -> Self {
        let narrow = |range: Range<usize>| range.start as u32..range.end as u32;
        let (shape, end) = (cache.shape(), cache.logical_len());
        let columns = narrow(chunk.clone());
        let (sinks, pass) = (narrow(0..plan.sinks.min(chunk.start)), narrow(end..end + tokens.len()));
        // A turn of a few words is seen among as many tokens as a long text is, or what it says would seem to matter more.
        let reach = if plan.text.start > 0 { plan.chunk_len.saturating_sub(chunk.len()) as u32 } else { 0 };
        let mut layers = Vec::with_capacity(shape.layers.len());
        for (layer, kind) in shape.layers.iter().enumerate() {
            if *kind != LayerKind::Global {
                layers.push(None);
                continue;
            }
            let mut maxima = Maxima::default();
            for kv_head in 0..shape.num_kv_heads as u32 {
                // Tokens that have moved together stand at other places, in the same order.
                let places =
                    tokens_at(cache, KvGroup { layer: layer as u32, kv_head }, &columns).map(|(_, place)| place);
                let places: Vec<u32> = places.collect();
                let range = places.first().map_or(0, |first| *first)..places.last().map_or(0, |last| last + 1);
                maxima.out.push(vec![f32::NEG_INFINITY; places.len() * shape.group_size]);
                let rivals = range.start.saturating_sub(reach).max(sinks.end).min(range.start)..range.end;
                maxima.among.push(vec![sinks.clone(), rivals, pass.clone()]);
                maxima.columns.push(range);
            }
            layers.push(Some(maxima));
        }
        Self { columns, layers, view: plan.view }
    }

    /// Absolute positions of the tokens it is about.
    pub(crate) fn columns(&self) -> Range<u32> {
        self.columns.clone()
    }

    /// The lists that attention reads in `layer` instead of `held`, one a KV head, where the pass sees a part of the text.
    pub(crate) fn reads(&self, layer: usize, held: &[SegmentList]) -> Option<Vec<SegmentList>> {
        let maxima = self.layers[layer].as_ref().filter(|_| self.view == PassView::Chunk)?;
        let of_head = |(list, seen): (&SegmentList, &Vec<Range<u32>>)| {
            let is_seen = |segment: &Segment| {
                let end = segment.position + segment.len;
                seen.iter().any(|range| segment.position < range.end && range.start < end)
            };
            let segments = list.segments().iter().enumerate();
            let places: Vec<usize> = segments.filter(|(_, segment)| is_seen(segment)).map(|(place, _)| place).collect();
            list.of_places(&places)
        };
        Some(held.iter().zip(&maxima.among).map(of_head).collect())
    }

    /// What attention should record in `layer`.
    pub(crate) fn tap(&mut self, layer: usize) -> Tap {
        self.layers[layer].take().map_or(Tap::None, Tap::ColumnMaxima)
    }

    /// Takes back what it has recorded.
    pub(crate) fn put_back(&mut self, layer: usize, tap: Tap) {
        if let Tap::ColumnMaxima(maxima) = tap {
            self.layers[layer] = Some(maxima);
        }
    }

    /// The largest probabilities of the tokens of `group`, `[group_size, resident tokens of the columns]`.
    pub(crate) fn masses(&self, group: KvGroup) -> Vec<f32> {
        let maxima = self.layers[group.layer as usize].as_ref().map(|maxima| &maxima.out[group.kv_head as usize]);
        maxima.into_iter().flatten().map(|&x| f64::from(x).exp() as f32).collect()
    }
}

/// Absolute positions among `columns` of the tokens that `group` holds, ascending, and the places where they stand in attention.
pub(crate) fn tokens_at(cache: &KvCache, group: KvGroup, columns: &Range<u32>) -> impl Iterator<Item = (u32, u32)> {
    let page_size = cache.shape().page_size;
    let pages = cache.table(group).iter();
    let tokens = pages.flat_map(move |page| page.positions(page_size).zip(page.first_position(page_size)..));
    tokens.filter(|(position, _)| columns.contains(position))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instruction() -> RepeatInstruction {
        RepeatInstruction { from_start: vec![1; 10], from_words: vec![2; 12], answer: vec![3; 5] }
    }

    #[test]
    fn chunks_are_as_long_as_asked_or_as_there_is_room() {
        let plan = |text: Range<usize>, chunk: usize, room: usize| {
            PassPlan::new(Reconstruction { chunk, view: PassView::Text }, text, 4, room, &instruction())
        };
        let chunks = |plan: PassPlan| {
            let chunk = plan.chunk(plan.text.start);
            std::iter::successors(chunk, |chunk| plan.chunk(chunk.end)).collect::<Vec<_>>()
        };
        assert_eq!(chunks(plan(0..5000, 2000, 9000).unwrap()), [0..2000, 2000..4000, 4000..5000]);
        assert_eq!(chunks(plan(700..1500, 2000, 9000).unwrap()), vec![Range { start: 700, end: 1500 }]);
        // The instruction takes 25 tokens at most.
        assert_eq!(chunks(plan(0..1000, 2000, 425).unwrap()), [0..400, 400..800, 800..1000]);
        assert_eq!(plan(0..1000, 2000, 152), Err(153));
        assert_eq!(plan(0..100, 2000, 124), Err(125));
        assert_eq!(plan(0..1000, 16, 40), Err(41));
        assert_eq!(chunks(plan(0..20, 16, 41).unwrap()), [0..16, 16..20]);
        assert!(chunks(plan(20..20, 16, 41).unwrap()).is_empty());
    }
}
