//! The example of a policy of one's own does what `docs/adding-a-policy.md` says of it.

#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
#[path = "../examples/custom_policy.rs"]
mod custom_policy;

use entrokv::tiny::{TinyArchitecture, TinyModel};
use entrokv::{Gguf, Model, ModelOptions};

#[test]
fn the_example_evicts_by_its_own_scores_and_keeps_its_budget() {
    let gguf = Gguf::from_bytes(TinyModel::new(TinyArchitecture::Llama).gguf().unwrap()).unwrap();
    let mut model = Model::from_gguf(&gguf, &ModelOptions::default(), &mut |_| ()).unwrap();
    let (kv, pages) = custom_policy::run(&mut model).unwrap();
    // A fifth of 320 tokens is 4 pages of 16 for each KV head; 359 tokens had keys and values, on 23 pages.
    assert_eq!(Some(kv.bytes_held), kv.bytes_budget);
    assert_eq!(kv.bytes_full / kv.bytes_held, 23 / 4);
    assert_eq!((kv.budget_violations, model.engine.pool().used_bytes()), (0, 0));
    // The sinks' page and the newest are pinned; heads choose the others for themselves.
    for pages in &pages {
        assert_eq!((pages.len(), pages[0], pages[3]), (4, 0, 22), "{pages:?}");
    }
    assert_ne!(pages[0], pages[1]);
    assert!(pages.iter().any(|pages| pages[1..3] != [20, 21]), "{pages:?}: the newest pages need no scores");
}
