//! What every policy must hold to, whatever it scores by: written once, run by all of them.

#![allow(clippy::unwrap_used)] // what does not hold here is a failed test

use entrokv_cache::{
    AttentionForm, AttentionRows, CacheShape, EvictionPolicy, KvGroup, LayerKind, OpenPage, POLICIES, PageIndex,
    PageScorer, PageSpan, QueryMoments, Release, ResidentTokens, RotaryPairs, RowSource, RowTap, moments_len,
    parse_policy, select_pages,
};

const GROUP_SIZE: usize = 3;
const HEAD_DIM: usize = 8;
const GROUP: KvGroup = KvGroup { layer: 0, kv_head: 0 };
/// Queries that moments are made of.
const NUM_QUERIES: usize = 20;
const FORM: AttentionForm<'_> =
    AttentionForm { frequencies: &[1.0, 0.3, 0.1], pairs: RotaryPairs::Halves, scale: 0.35 };
const PAGE_SIZES: [usize; 5] = [1, 8, 16, 32, 256];

/// Options beside the defaults that change what is scored.
const MORE: [&str; 30] = [
    "compactor:parts=leverage,sketch=3,seed=5",
    "compactor:parts=non-causal",
    "critical-kv:inner=expected-attention,epsilon=0.01",
    "critical-kv:inner=cur,first=0.25",
    "expected-attention:future=7,covariance=no,vnorm=no,epsilon=0.01",
    "page-entro-kv:preset=serving",
    "page-entro-kv:row=accumulated,pooling=max",
    "snapkv:preset=kvpress,pool=max",
    "lagkv:lag=8,cross=yes",
    "lagkv:lag=8",
    "cur:combine=average,window=5",
    "knorm:block=mean,schedule=once",
    "random:seed=5,block=sum",
    "h2o:schedule=once",
    "h2o:heads=entropy",
    "observed-attention:heads=mean",
    "snapkv:heads=union",
    "scissorhands:count=rate,history=5",
    "fastgen:window=9,recovery=0.4,local=5tok,punctuation=3+7",
    "fastgen:heads=max",
    "kv-compress:window=3,power=1,buffer=2",
    "kv-compress:preset=kvc-w,heads=mean",
    "r-kv:window=3,lambda=0.5",
    "tova:heads=max",
    "fast-kvzip:gates=gates,window=20",
    "kvzap:gates=gates,tau=0.3,window=9",
    "dms:gates=gates,window=5,scale=10",
    "kvzip:allot=uniform,block=sum",
    "quest:tokens=32,heads=sum",
    "ada-kv:normalise=yes",
];

fn policies() -> Vec<(String, Box<dyn EvictionPolicy>)> {
    // Gates are in no file here: their scores are noise.
    let defaults = POLICIES.iter().map(|entry| (entry.name.to_owned(), entry.default_policy()));
    defaults.chain(MORE.map(|text| (text.to_owned(), parse_policy(text).unwrap()))).collect()
}

/// Below, at and above a page, and several.
fn lengths(page_size: usize) -> [usize; 5] {
    [page_size.div_ceil(2), page_size, page_size + 1, 3 * page_size + page_size / 2 + 1, 6 * page_size]
}

fn shape(page_size: usize) -> CacheShape {
    CacheShape::new(vec![LayerKind::Global], 1, GROUP_SIZE, HEAD_DIM, page_size).unwrap()
}

/// Numbers between 0 and 1, the same ones every time.
fn noise(seed: usize) -> f32 {
    let x = (seed as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    ((x ^ (x >> 32)) >> 40) as f32 / (1 << 24) as f32
}

/// A sequence whose tokens and attention are made of noise.
#[derive(Clone, Copy)]
struct Sequence {
    seed: usize,
    /// Whether all keys, values and masses are alike.
    constant: bool,
}

impl Sequence {
    fn vectors(self, positions: &[u32], which: usize) -> Vec<f32> {
        let element = |position: u32, i: usize| {
            if self.constant {
                return 0.5;
            }
            let place = (self.seed * 7 + which) * 1_000_003 + position as usize * HEAD_DIM + i;
            noise(place) * 2.0 - 0.7
        };
        positions.iter().flat_map(|&position| (0..HEAD_DIM).map(move |i| element(position, i))).collect()
    }

    /// A positive number a token.
    fn positive(self, positions: &[u32], which: usize) -> Vec<f32> {
        let number = |position: &u32| noise(self.seed * which * 1_000_033 + *position as usize) + 0.01;
        positions.iter().map(|position| if self.constant { 0.5 } else { number(position) }).collect()
    }

    /// Moments of as many queries as there are always.
    fn moments(self) -> Vec<f64> {
        let queries: Vec<u32> = (0..NUM_QUERIES as u32).collect();
        let of_head = |head: usize| {
            let queries = self.vectors(&queries, 2 + head);
            let mut moments = vec![0.0; moments_len(HEAD_DIM)];
            for query in queries.chunks(HEAD_DIM) {
                let products = (0..HEAD_DIM).flat_map(|i| (0..=i).map(move |j| query[i] * query[j]));
                let terms = query.iter().copied().chain(products);
                moments.iter_mut().zip(terms).for_each(|(sum, x)| *sum += f64::from(x));
            }
            moments
        };
        (0..GROUP_SIZE).flat_map(of_head).collect()
    }

    /// The row of `query`, `[GROUP_SIZE, positions]`.
    fn row(self, query: u32, positions: &[u32]) -> Vec<f32> {
        let mass = |head: usize, position: u32| {
            if position > query {
                return 0.0;
            }
            if self.constant {
                return 1.0;
            }
            noise((self.seed * 13 + head) * 7_000_003 + query as usize * 4001 + position as usize).powi(4) + 1e-6
        };
        (0..GROUP_SIZE)
            .flat_map(|head| {
                let masses: Vec<f32> = positions.iter().map(|&position| mass(head, position)).collect();
                let total: f32 = masses.iter().sum();
                masses.into_iter().map(move |mass| mass / total)
            })
            .collect()
    }

    /// Shows `scorer` a prompt of `len` tokens as `policy` asks, its rows in pieces of `piece`.
    fn read(self, policy: &dyn EvictionPolicy, scorer: &mut dyn PageScorer, len: usize, piece: usize) {
        let positions: Vec<u32> = (0..len as u32).collect();
        let (source, first) = match policy.needs().prompt {
            RowTap::None => (None, len),
            RowTap::Last => (Some(RowSource::Prompt), len - 1),
            RowTap::Window(window) => (Some(RowSource::Prompt), len.saturating_sub(window)),
            RowTap::Accumulated => (Some(RowSource::ColumnSums { num_rows: len }), 0),
        };
        let rows: Vec<Vec<f32>> = (first..len).map(|query| self.row(query as u32, &positions)).collect();
        match source {
            Some(source @ RowSource::ColumnSums { .. }) => {
                let mut sums = vec![0.0; GROUP_SIZE * len];
                rows.iter().for_each(|row| sums.iter_mut().zip(row).for_each(|(sum, mass)| *sum += mass));
                scorer.observe(AttentionRows { source, group_size: GROUP_SIZE, positions: &positions, rows: &sums });
            }
            Some(source) => {
                for (index, piece_rows) in rows.chunks(piece).enumerate() {
                    // A piece knows the tokens up to its own end.
                    let end = first + index * piece + piece_rows.len();
                    let rows: Vec<f32> = piece_rows
                        .iter()
                        .flat_map(|row| row.chunks(len).flat_map(|head| head[..end].to_vec()))
                        .collect();
                    let positions = &positions[..end];
                    scorer.observe(AttentionRows { source, group_size: GROUP_SIZE, positions, rows: &rows });
                }
            }
            None => {}
        }
        if policy.needs().reconstruction.is_some() {
            // Columns of one row, in as many pieces.
            let row = self.row(len as u32, &positions);
            for columns in positions.chunks(piece.max(4)) {
                let masses = row.chunks(len).flat_map(|head| columns.iter().map(|&at| head[at as usize]));
                self.reconstruct(scorer, columns, &masses.collect::<Vec<_>>());
            }
        }
        scorer.end_prompt();
    }

    fn reconstruct(self, scorer: &mut dyn PageScorer, positions: &[u32], rows: &[f32]) {
        let source = RowSource::Reconstruction;
        scorer.observe(AttentionRows { source, group_size: GROUP_SIZE, positions, rows });
    }

    /// Shows `scorer` the row of the token at `query`, over `pages`.
    fn step(self, policy: &dyn EvictionPolicy, scorer: &mut dyn PageScorer, query: u32, pages: &[PageSpan]) {
        if policy.needs().step_rows {
            let positions = positions(pages);
            let rows = self.row(query, &positions);
            let source = RowSource::Step;
            scorer.observe(AttentionRows { source, group_size: GROUP_SIZE, positions: &positions, rows: &rows });
        }
    }

    /// What `scorer`, the only one of its layer, makes of `pages`.
    fn score(self, scorer: &mut dyn PageScorer, pages: &[PageSpan]) -> Vec<f32> {
        let positions = positions(pages);
        let (keys, values) = (self.vectors(&positions, 0), self.vectors(&positions, 1));
        self.score_vectors(scorer, pages, &keys, &values, &self.gates(&positions))
    }

    /// The same of other keys and values.
    fn score_vectors(
        self,
        scorer: &mut dyn PageScorer,
        pages: &[PageSpan],
        keys: &[f32],
        values: &[f32],
        gates: &[f32],
    ) -> Vec<f32> {
        let positions = positions(pages);
        let moments = self.moments();
        let (output_norms, two_way) = (self.positive(&positions, 11), self.positive(&positions, 17));
        let tokens = ResidentTokens {
            positions: &positions,
            keys,
            values,
            gates,
            form: FORM,
            output_norms: &output_norms,
            two_way: &two_way,
            layer_sums: &[],
            queries: QueryMoments { count: NUM_QUERIES, sums: &moments },
        };
        let mut layer_sums = Vec::new();
        scorer.measure(tokens, &mut layer_sums);
        let mut scores = vec![9.0];
        scorer.score(pages, ResidentTokens { layer_sums: &layer_sums, ..tokens }, &mut scores);
        scores
    }

    /// What a gate says of each token.
    fn gates(self, positions: &[u32]) -> Vec<f32> {
        let gate = |position: u32| noise((self.seed * 17 + 5) * 9_000_011 + position as usize);
        positions.iter().map(|&position| if self.constant { 0.5 } else { gate(position) }).collect()
    }
}

fn spans(len: usize, page_size: usize) -> Vec<PageSpan> {
    let page = |first: usize| PageSpan { first_position: first as u32, len: (len - first).min(page_size) as u32 };
    (0..len).step_by(page_size).map(page).collect()
}

fn positions(pages: &[PageSpan]) -> Vec<u32> {
    pages.iter().flat_map(|page| page.first_position..page.first_position + page.len).collect()
}

/// Whether a page may have this score: a finite one, or minus infinity where the policy gives pages up whatever room there is.
fn is_score(policy: &dyn EvictionPolicy, score: f32) -> bool {
    score.is_finite() || policy.release() == Release::Marked && score == f32::NEG_INFINITY
}

fn bits(scores: &[f32]) -> Vec<u32> {
    scores.iter().map(|score| score.to_bits()).collect()
}

const NOISE: Sequence = Sequence { seed: 1, constant: false };

/// Calls `check` with every policy, page size and length, and a name for the case.
fn for_each_case(check: impl Fn(&str, &dyn EvictionPolicy, usize, usize)) {
    for (text, policy) in policies() {
        for page_size in PAGE_SIZES {
            for len in lengths(page_size) {
                check(&format!("{text}, {len} tokens in pages of {page_size}"), &*policy, page_size, len);
            }
        }
    }
}

#[test]
fn scores_are_finite_one_a_page_and_the_same_however_a_prompt_was_cut() {
    for_each_case(|name, policy, page_size, len| {
        let pages = spans(len, page_size);
        let mut whole = policy.scorer(&shape(page_size), GROUP);
        NOISE.read(policy, &mut *whole, len, len);
        let expected = NOISE.score(&mut *whole, &pages);
        assert_eq!(expected.len(), pages.len(), "{name}");
        assert!(expected.iter().all(|score| is_score(policy, *score)), "{name}: {expected:?}");
        assert_eq!(bits(&NOISE.score(&mut *whole, &pages)), bits(&expected), "{name}: asked twice");
        for piece in [1, 7] {
            let mut pieces = policy.scorer(&shape(page_size), GROUP);
            NOISE.read(policy, &mut *pieces, len, piece);
            assert_eq!(bits(&NOISE.score(&mut *pieces, &pages)), bits(&expected), "{name}, pieces of {piece}");
        }
    });
}

#[test]
fn exactly_as_many_pages_stay_as_may_and_pins_stay_under_constant_scores() {
    let constant = Sequence { constant: true, ..NOISE };
    for_each_case(|name, policy, page_size, len| {
        let pages = spans(len, page_size);
        let indices: Vec<PageIndex> = (0..pages.len() as u32).map(PageIndex).collect();
        let open = if len.is_multiple_of(page_size) { OpenPage::None } else { OpenPage::Newest };
        let smallest = policy.pins().smallest_pages(page_size);
        for sequence in [NOISE, constant] {
            let mut scorer = policy.scorer(&shape(page_size), GROUP);
            sequence.read(policy, &mut *scorer, len, len);
            let scores = sequence.score(&mut *scorer, &pages);
            for keep in [smallest, smallest + 1, pages.len().max(smallest)] {
                let pinned = policy.pins().pinned(&indices, page_size, keep, open);
                let (scores, forced) = match scorer.second_stage() {
                    None => (scores.as_slice(), pinned.clone()),
                    Some(stage) => {
                        assert_eq!(stage.scores.len(), pages.len(), "{name}");
                        assert!(stage.scores.iter().all(|score| score.is_finite()), "{name}");
                        (stage.scores, stage.forced(&scores, keep, 0, &pinned))
                    }
                };
                let kept = select_pages(scores, keep, &forced);
                assert_eq!(kept.len(), keep.min(pages.len()), "{name}");
                assert!(pinned.iter().all(|&page| kept.contains(page)), "{name}: {pinned:?} of {kept:?}");
                assert!(kept.as_slice().is_sorted(), "{name}");
            }
        }
    });
}

#[test]
fn sequences_side_by_side_are_as_alone() {
    let other = Sequence { seed: 2, constant: false };
    for_each_case(|name, policy, page_size, len| {
        let pages = spans(len, page_size);
        let alone = |sequence: Sequence| {
            let mut scorer = policy.scorer(&shape(page_size), GROUP);
            sequence.read(policy, &mut *scorer, len, 5);
            sequence.step(policy, &mut *scorer, len as u32 - 1, &pages);
            sequence.score(&mut *scorer, &pages)
        };
        let (mut first, mut second) =
            (policy.scorer(&shape(page_size), GROUP), policy.scorer(&shape(page_size), GROUP));
        NOISE.read(policy, &mut *first, len, 5);
        other.read(policy, &mut *second, len, 5);
        NOISE.step(policy, &mut *first, len as u32 - 1, &pages);
        other.step(policy, &mut *second, len as u32 - 1, &pages);
        assert_eq!(bits(&NOISE.score(&mut *first, &pages)), bits(&alone(NOISE)), "{name}");
        assert_eq!(bits(&other.score(&mut *second, &pages)), bits(&alone(other)), "{name}");
    });
}

#[test]
fn what_is_evicted_is_forgotten_and_what_stays_keeps_its_attention() {
    for_each_case(|name, policy, page_size, len| {
        let pages = spans(len, page_size);
        let mut scorer = policy.scorer(&shape(page_size), GROUP);
        NOISE.read(policy, &mut *scorer, len, len);
        let before = NOISE.score(&mut *scorer, &pages);
        let held_before = scorer.state_bytes();
        let kept: Vec<PageSpan> = pages.iter().copied().step_by(2).collect();
        scorer.retain(&kept);
        let after = NOISE.score(&mut *scorer, &kept);
        // Scores made of what stays alone are made anew.
        let relative = matches!(
            policy.name(),
            "keydiff"
                | "lagkv"
                | "cur"
                | "observed-attention"
                | "fastgen"
                | "r-kv"
                | "compactor"
                | "expected-attention"
        ) || policy.to_string().contains("heads=union")
            || policy.to_string().contains("inner=");
        // A window ends at the newest token, which goes here and never does in a sequence.
        let has_window = policy.name() == "fast-kvzip" || policy.release() == Release::Marked;
        // A pool looks at neighbours, which are gone.
        let pools = policy.to_string().contains("pool=5");
        if !relative && !has_window && !pools {
            let expected: Vec<f32> = before.iter().copied().step_by(2).collect();
            assert_eq!(bits(&after), bits(&expected), "{name}");
        }
        assert!(after.iter().all(|score| is_score(policy, *score)), "{name}");
        let reads_rows = policy.needs().prompt != RowTap::None || policy.needs().reconstruction.is_some();
        if reads_rows && pages.len() >= 6 && page_size >= 16 {
            assert!(scorer.state_bytes() < held_before, "{name}: {} of {held_before}", scorer.state_bytes());
        }
    });
}

#[test]
fn rows_that_are_none_are_counted_and_spoil_no_score() {
    for_each_case(|name, policy, page_size, len| {
        let needs = policy.needs();
        if (needs.prompt == RowTap::None && needs.reconstruction.is_none()) || len < 2 {
            return;
        }
        let pages = spans(len, page_size);
        let positions: Vec<u32> = (0..len as u32).collect();
        for bad in [f32::NAN, f32::INFINITY, -1.0] {
            let mut scorer = policy.scorer(&shape(page_size), GROUP);
            let mut rows = NOISE.row(len as u32 - 1, &positions);
            rows[1] = bad;
            let source = match needs.prompt {
                RowTap::Accumulated => RowSource::ColumnSums { num_rows: 1 },
                RowTap::None => RowSource::Reconstruction,
                RowTap::Last | RowTap::Window(_) => RowSource::Prompt,
            };
            scorer.observe(AttentionRows { source, group_size: GROUP_SIZE, positions: &positions, rows: &rows });
            scorer.end_prompt();
            assert_eq!(scorer.nan_rows(), 1, "{name}, {bad}");
            let scores = NOISE.score(&mut *scorer, &pages);
            assert!(scores.iter().all(|score| score.is_finite()), "{name}, {bad}: {scores:?}");
        }
    });
}

#[test]
fn keys_values_and_gates_that_are_no_numbers_lose() {
    let page_size = 8;
    let pages = spans(40, page_size);
    let positions = positions(&pages);
    for (text, policy) in policies().into_iter().filter(|(_, policy)| policy.needs().prompt == RowTap::None) {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (mut keys, mut values) = (NOISE.vectors(&positions, 0), NOISE.vectors(&positions, 1));
            let mut gates = NOISE.gates(&positions);
            keys[9 * HEAD_DIM] = bad;
            values[17 * HEAD_DIM] = bad;
            gates[11] = bad;
            let mut scorer = policy.scorer(&shape(page_size), GROUP);
            let scores = NOISE.score_vectors(&mut *scorer, &pages, &keys, &values, &gates);
            assert!(scores.iter().all(|score| !score.is_nan()), "{text}, {bad}: {scores:?}");
        }
    }
}
