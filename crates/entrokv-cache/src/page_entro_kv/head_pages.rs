//! What each head of a group would choose alone.

use crate::attention_rows::PageSpan;
use crate::page_entro_kv::options::PageEntroKvOptions;
use crate::page_entro_kv::token_scores::TokenScores;
use crate::selection::select_pages;
use crate::token_table::TokenTable;

/// Every head's own page scores, as of the last prompt's end: what each would choose alone.
#[derive(Clone, Debug)]
pub(super) struct HeadPages {
    group_size: usize,
    /// First position of each page, ascending.
    first_positions: Vec<u32>,
    /// Scores, `[pages, group_size]`.
    scores: Vec<f32>,
}

impl HeadPages {
    /// No pages of a group of `group_size` heads.
    pub(super) fn new(group_size: usize) -> Self {
        Self { group_size, first_positions: Vec::new(), scores: Vec::new() }
    }

    /// Projects heads' rows, one a column, on the pages that hold the tokens.
    pub(super) fn project(&mut self, rows: &TokenTable, page_size: usize, options: &PageEntroKvOptions) {
        self.first_positions.clear();
        self.scores.clear();
        let page_of = |position: u32| position as usize / page_size;
        for tokens in rows.positions().chunk_by(|&a, &b| page_of(a) == page_of(b)) {
            let first_position = (page_of(tokens[0]) * page_size) as u32;
            let last = tokens[tokens.len() - 1];
            let page = PageSpan { first_position, len: last - first_position + 1 };
            self.first_positions.push(first_position);
            for head in 0..self.group_size {
                let scores = TokenScores { positions: rows.positions(), values: rows.column(head) };
                self.scores.push(scores.of_page(page, options) as f32);
            }
        }
    }

    /// Pages in any head's own top `k_pages` of `pages`, over `k_pages`; 1 when nothing is kept.
    pub(super) fn union_overhead_ratio(&self, pages: &[PageSpan], k_pages: usize) -> f64 {
        let k_pages = k_pages.min(pages.len());
        if k_pages == 0 {
            return 1.0;
        }
        let mut in_union = vec![false; pages.len()];
        for head in 0..self.group_size {
            let scores: Vec<f32> = pages.iter().map(|page| self.score(head, page.first_position)).collect();
            for index in &select_pages(&scores, k_pages, &[]) {
                in_union[index] = true;
            }
        }
        let union = in_union.iter().filter(|&&chosen| chosen).count();
        union as f64 / k_pages as f64
    }

    /// One head's score of the page that begins at `first_position`; 0 when no prompt row reached it.
    fn score(&self, head: usize, first_position: u32) -> f32 {
        let page = self.first_positions.binary_search(&first_position);
        page.map_or(0.0, |page| self.scores[page * self.group_size + head])
    }

    /// Bytes reserved.
    pub(super) fn bytes(&self) -> usize {
        self.first_positions.capacity() * size_of::<u32>() + self.scores.capacity() * size_of::<f32>()
    }
}
