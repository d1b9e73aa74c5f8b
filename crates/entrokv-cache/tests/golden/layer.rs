//! The attention layer of the golden files (`tools/golden/policies`), as scorers are shown it, with pages of one token.

#![allow(dead_code)] // each test file uses a part

use std::fs;
use std::path::Path;

use entrokv_cache::{
    AttentionForm, AttentionRows, CacheShape, EvictionPolicy, KvGroup, LayerKind, PageScorer, PageSpan, QueryMoments,
    QueryTap, ResidentTokens, RotaryPairs, RowSource, RowTap, moments_len,
};
use serde_json::Value;

/// The file `name` of the golden directory.
pub(crate) fn golden(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/policies").join(format!("{name}.json"));
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// The case `name` of a golden file.
pub(crate) fn case<'a>(file: &'a Value, name: &str) -> &'a Value {
    file["cases"].as_array().unwrap().iter().find(|case| case["name"] == name).unwrap()
}

pub(crate) fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

pub(crate) fn indices(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as usize).collect()
}

/// `inputs.json`.
pub(crate) struct GoldenLayer {
    pub(crate) num_kv_heads: usize,
    pub(crate) group_size: usize,
    pub(crate) head_dim: usize,
    /// Tokens.
    pub(crate) len: usize,
    /// What the gate of each KV head has said of the tokens, where a test has any.
    pub(crate) gates: Vec<Vec<f32>>,
    inputs: Value,
}

impl GoldenLayer {
    pub(crate) fn read() -> Self {
        let inputs = golden("inputs");
        let size = |key: &str| inputs["shape"][key].as_u64().unwrap() as usize;
        Self {
            num_kv_heads: size("kv_heads"),
            group_size: size("group"),
            head_dim: size("head_dim"),
            len: size("tokens"),
            gates: Vec::new(),
            inputs,
        }
    }

    /// Its shape, with pages of `page_size`.
    pub(crate) fn shape(&self, page_size: usize) -> CacheShape {
        CacheShape::new(vec![LayerKind::Global], self.num_kv_heads, self.group_size, self.head_dim, page_size).unwrap()
    }

    /// The attention of query `head` in row `query`, `[tokens]`.
    pub(crate) fn row(&self, head: usize, query: usize) -> Vec<f32> {
        let mut row = floats(&self.inputs["rows"][head][query]);
        // Written up to the query's own token.
        row.resize(self.len, 0.0);
        row
    }

    /// Keys or values of a KV head, `[tokens, head_dim]`.
    pub(crate) fn vectors(&self, key: &str, kv_head: usize) -> Vec<f32> {
        self.inputs[key][kv_head].as_array().unwrap().iter().flat_map(floats).collect()
    }

    /// Inverse frequencies of RoPE, `[head_dim / 2]`.
    pub(crate) fn frequencies(&self) -> Vec<f64> {
        let base = self.inputs["rope"]["base"].as_f64().unwrap();
        (0..self.head_dim / 2).map(|i| base.powf(-2.0 * i as f64 / self.head_dim as f64)).collect()
    }

    /// How queries meet keys.
    pub(crate) fn form<'a>(&self, frequencies: &'a [f64]) -> AttentionForm<'a> {
        let scale = 1.0 / (self.head_dim as f32).sqrt();
        AttentionForm { frequencies, pairs: RotaryPairs::Halves, scale }
    }

    /// Moments of the queries of `head` before RoPE, those before the token `first` left out.
    fn moments(&self, head: usize, first: usize) -> Vec<f64> {
        let mut moments = vec![0.0; moments_len(self.head_dim)];
        for query in self.vectors("q_pre", head).chunks(self.head_dim).skip(first) {
            let query: Vec<f64> = query.iter().copied().map(f64::from).collect();
            let products = (0..query.len()).flat_map(|i| query[..=i].iter().map(|q| q * query[i]).collect::<Vec<_>>());
            let terms = query.iter().copied().chain(products);
            moments.iter_mut().zip(terms).for_each(|(sum, x)| *sum += x);
        }
        moments
    }

    /// Token scores `[KV heads][tokens]` that `policy` gives.
    pub(crate) fn scores(&self, policy: &dyn EvictionPolicy) -> Vec<Vec<f32>> {
        self.page_scores(policy, 1)
    }

    /// Scores `[KV heads][pages]` that `policy` gives pages of `page_size`.
    pub(crate) fn page_scores(&self, policy: &dyn EvictionPolicy, page_size: usize) -> Vec<Vec<f32>> {
        self.scored(policy, page_size).into_iter().map(|(_, scores)| scores).collect()
    }

    /// Of each KV head the scorer that `policy` has for it, shown the layer, and the scores of its pages.
    pub(crate) fn scored(&self, policy: &dyn EvictionPolicy, page_size: usize) -> Vec<(Box<dyn PageScorer>, Vec<f32>)> {
        let (len, group_size) = (self.len, self.group_size);
        let shape = self.shape(page_size);
        let positions: Vec<u32> = (0..len as u32).collect();
        let page = |first: usize| PageSpan { first_position: first as u32, len: (len - first).min(page_size) as u32 };
        let pages: Vec<PageSpan> = (0..len).step_by(page_size).map(page).collect();
        let of_head = |kv_head: usize| {
            let mut scorer = policy.scorer(&shape, KvGroup { layer: 0, kv_head: kv_head as u32 });
            let first = match policy.needs().prompt {
                RowTap::None => len,
                RowTap::Last => len - 1,
                RowTap::Window(window) => len.saturating_sub(window),
                RowTap::Accumulated => 0,
            };
            let heads = kv_head * group_size..(kv_head + 1) * group_size;
            let rows: Vec<Vec<f32>> =
                (first..len).map(|query| heads.clone().flat_map(|head| self.row(head, query)).collect()).collect();
            let (source, rows) = match policy.needs().prompt {
                RowTap::Accumulated => {
                    let sums =
                        (0..group_size * len).map(|at| rows.iter().map(|row| f64::from(row[at])).sum::<f64>() as f32);
                    (RowSource::ColumnSums { num_rows: len }, sums.collect())
                }
                _ => (RowSource::Prompt, rows.concat()),
            };
            scorer.observe(AttentionRows { source, group_size, positions: &positions, rows: &rows });
            scorer.end_prompt();
            let (keys, values) = (self.vectors("k", kv_head), self.vectors("v", kv_head));
            let gates = self.gates.get(kv_head).map_or(&[][..], Vec::as_slice);
            let first = match policy.needs().queries {
                QueryTap::None => len,
                QueryTap::Moments { first } => first,
            };
            let moments: Vec<f64> = heads.flat_map(|head| self.moments(head, first)).collect();
            let frequencies = self.frequencies();
            let tokens = ResidentTokens {
                positions: &positions,
                keys: &keys,
                values: &values,
                form: self.form(&frequencies),
                output_norms: &floats(&golden("critical-kv")["cases"][0]["output_norms"][kv_head]),
                queries: QueryMoments { count: len - first, sums: &moments },
                gates,
                ..ResidentTokens::default()
            };
            let mut scores = Vec::new();
            scorer.score(&pages, tokens, &mut scores);
            (scorer, scores)
        };
        (0..self.num_kv_heads).map(of_head).collect()
    }
}
