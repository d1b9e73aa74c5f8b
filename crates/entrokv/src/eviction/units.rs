//! What one KV group holds, as a policy decides about it: pages, or tokens.

use std::borrow::Cow;

use entrokv_cache::{
    Granularity, KvCache, KvGroup, OpenPage, PageIndex, PageSpan, Pins, ResidentPage, SecondStage, pages_of_tokens,
};

/// The units of one KV group at the moment of a decision, and their scores once these are known.
pub(super) struct Units {
    /// What goes or stays as one.
    pub(super) granularity: Granularity,
    /// What a scorer is asked about: pages as they stand in the sequence, or, where tokens are decided about or have moved
    /// together, every token by itself.
    pub(super) spans: Vec<PageSpan>,
    /// Absolute positions of the tokens, ascending.
    pub(super) positions: Vec<u32>,
    /// One score a unit, higher staying longer.
    pub(super) scores: Vec<f32>,
    /// Of a policy that chooses in two stages the part of the budget that `scores` settle, and the scores of the second.
    second: Option<(f64, Vec<f32>)>,
    /// Index of each page.
    pages: Vec<PageIndex>,
    /// Tokens of each page.
    page_lens: Vec<usize>,
    page_size: usize,
}

impl Units {
    /// What `group` holds in pages that are not settled, by tokens if they are `wanted` and can move, else by pages; without
    /// scores.
    pub(super) fn of(cache: &KvCache, group: KvGroup, wanted: Granularity) -> Self {
        let (num_settled, page_size) = (cache.num_settled(group), cache.shape().page_size);
        let table = &cache.table(group)[num_settled..];
        let mut positions = Vec::new();
        cache.columns(group, &mut positions);
        positions.drain(..num_settled * page_size);
        let granularity = if cache.is_by_token(group) { wanted } else { Granularity::Page };
        let spans = if wanted == Granularity::Token || table.iter().any(|page| page.is_compacted()) {
            positions.iter().map(|&first_position| PageSpan { first_position, len: 1 }).collect()
        } else {
            let span = |page: &ResidentPage| PageSpan { first_position: page.first_position(page_size), len: page.len };
            table.iter().map(span).collect()
        };
        Self {
            granularity,
            spans,
            positions,
            scores: Vec::new(),
            second: None,
            pages: table.iter().map(|page| page.index).collect(),
            page_lens: table.iter().map(|page| page.len as usize).collect(),
            page_size,
        }
    }

    /// Takes the scores of `spans`, those of a second stage among them.
    pub(super) fn take(&mut self, scores: Vec<f32>, second: Option<SecondStage<'_>>) {
        self.second = second.map(|stage| (stage.share, self.of_units(stage.scores.to_vec())));
        self.scores = self.of_units(scores);
    }

    /// Scores of units, of those of `spans`: where tokens were scored and pages are decided about, a page counts its best token.
    fn of_units(&self, scores: Vec<f32>) -> Vec<f32> {
        if self.granularity == Granularity::Token || self.spans.len() == self.pages.len() {
            return scores;
        }
        let mut tokens = scores.into_iter();
        let best = |&len: &usize| tokens.by_ref().take(len).fold(f32::NEG_INFINITY, f32::max);
        self.page_lens.iter().map(best).collect()
    }

    /// By what `num_kept` units are chosen, and what stays whatever its score: for a policy of two stages also what the first of
    /// them settles, `safe_pages` at the least.
    pub(super) fn staged<'a>(
        &'a self,
        num_kept: usize,
        safe_pages: usize,
        pinned: &'a [usize],
    ) -> (&'a [f32], Cow<'a, [usize]>) {
        match &self.second {
            None => (&self.scores, Cow::Borrowed(pinned)),
            Some((share, scores)) => {
                let stage = SecondStage { share: *share, scores };
                (scores, Cow::Owned(stage.forced(&self.scores, num_kept, self.in_pages(safe_pages), pinned)))
            }
        }
    }

    /// Pages there are.
    pub(super) fn num_pages(&self) -> usize {
        self.pages.len()
    }

    /// Tokens of the page that is partly filled.
    pub(super) fn num_open(&self) -> usize {
        self.page_lens.last().filter(|&&len| len < self.page_size).copied().unwrap_or(0)
    }

    /// Units that `num_pages` pages hold, the open one among them.
    pub(super) fn in_pages(&self, num_pages: usize) -> usize {
        match self.granularity {
            Granularity::Page => num_pages,
            Granularity::Token => {
                let open_pages = usize::from(self.num_open() > 0);
                num_pages.saturating_sub(open_pages).saturating_mul(self.page_size).saturating_add(self.num_open())
            }
        }
    }

    /// Pages that so many units need, an open page not counted.
    pub(super) fn pages_of(&self, num_units: usize) -> usize {
        match self.granularity {
            Granularity::Page => num_units,
            Granularity::Token => num_units.div_ceil(self.page_size),
        }
    }

    /// Pages that hold the units, without those that a policy gives up whatever room there is: units of score minus infinity that
    /// are not `pinned`.
    pub(super) fn unmarked_pages(&self, pinned: &[usize]) -> usize {
        let mut stays: Vec<bool> = self.scores.iter().map(|score| *score != f32::NEG_INFINITY).collect();
        pinned.iter().for_each(|&unit| stays[unit] = true);
        match self.granularity {
            Granularity::Page => stays.into_iter().filter(|stays| *stays).count(),
            Granularity::Token => {
                let closed = stays[..self.positions.len() - self.num_open()].iter().filter(|stays| **stays).count();
                closed.div_ceil(self.page_size) + usize::from(self.num_open() > 0)
            }
        }
    }

    /// The units that `pins` keep under a budget of `budget_pages`.
    pub(super) fn pinned(&self, pins: &Pins, budget_pages: usize, open: OpenPage) -> Vec<usize> {
        match self.granularity {
            Granularity::Page => pins.pinned(&self.pages, self.page_size, budget_pages, open),
            Granularity::Token => {
                pins.pinned_tokens(&self.positions, self.page_size, budget_pages, open, self.num_open())
            }
        }
    }

    /// What an allotment chooses from: a score a page, and which pages are `pinned`. Tokens count as the pages they would fill.
    pub(super) fn pages(&self, pinned: &[usize]) -> (Vec<f32>, Vec<usize>) {
        match self.granularity {
            Granularity::Page => (self.scores.clone(), pinned.to_vec()),
            Granularity::Token => pages_of_tokens(&self.scores, pinned, self.num_open(), self.page_size),
        }
    }
}
